//! Error codes and versions of the CNI specification, used by the executable and the agent.

/// The supported versions, oldest first, as written in configurations and results.
pub const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The newest of [`VERSIONS`].
pub const NEWEST: &str = VERSIONS[VERSIONS.len() - 1];

/// The error codes of the specification (SPEC, section "Error"), and two that only its Go library defines.
pub mod code {
    /// The version of the configuration is not supported.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field of the configuration is not supported; the message holds the key and the value.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// The container is not known: the runtime need not send DEL.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// An environment variable is missing or invalid; the message names it.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO_FAILURE: u32 = 5;
    /// Bytes could not be decoded.
    pub const DECODING_FAILURE: u32 = 6;
    /// The network configuration does not pass validation.
    pub const INVALID_CONFIG: u32 = 7;
    /// `CNI_NETNS` is not a usable namespace (Go library only).
    pub const INVALID_NETNS: u32 = 8;
    /// A transient condition: try again later.
    pub const TRY_AGAIN_LATER: u32 = 11;
    /// STATUS: ADD cannot be served.
    pub const NOT_AVAILABLE: u32 = 50;
    /// STATUS: ADD cannot be served, and containers already attached may have limited connectivity.
    pub const LIMITED_CONNECTIVITY: u32 = 51;
    /// Anything else (Go library only).
    pub const INTERNAL: u32 = 999;
}
