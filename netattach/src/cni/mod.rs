//! The CNI specification as data and pure functions: requests, configurations, results, versions, errors.
//!
//! | file | content |
//! |---|---|
//! | [`request`] | the runtime's request: environment and stdin |
//! | [`config`], [`load`], [`multi_network`] | network configurations, the files that contain them, and plugins that cannot be the default network |
//! | [`keys`] | the spelling of the keys of a plugin's configuration |
//! | [`capability`], [`outgoing`] | the plugins that a verb calls, and their input |
//! | [`result`], `convert` | a plugin's result, in any version of the specification |
//! | [`cache`] | libcni's result cache |
//! | [`version`], [`identifier`], [`args`], [`error`] | the data types of all these |
//!
//! Nothing here reads a file, a clock or an environment variable: callers pass bytes and maps.
//!
//! JSON is read and printed by `json`.

pub mod args;
pub mod cache;
pub mod capability;
pub mod config;
mod convert;
pub mod error;
pub mod identifier;
pub mod json;
pub mod keys;
pub mod load;
pub mod multi_network;
pub mod outgoing;
pub mod request;
pub mod result;
pub mod version;

pub use args::CniArgs;
pub use config::{ConfigError, NetworkList, PluginConf};
pub use error::{CniError, code};
pub use json::{Map, Value};
pub use outgoing::{gc_config, plugins_called, request_config, status_config};
pub use request::{AttachmentId, Command, Request};
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use version::Version;
