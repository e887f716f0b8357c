//! The CNI specification as data and pure functions: requests, configurations, results, versions, errors.
//!
//! | file | question it answers |
//! |---|---|
//! | [`request`] | what did the runtime ask for (environment and stdin) |
//! | [`config`], [`load`] | what is a network, and which file describes it |
//! | [`capability`], [`outgoing`] | which plugins does a verb call, and what is each told |
//! | [`result`], `convert` | what did a plugin set up, in any version of the specification |
//! | [`cache`] | what do others find in the files in which libcni remembers results |
//! | [`version`], [`identifier`], [`args`], [`error`] | the words these are written in |
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
pub mod load;
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
