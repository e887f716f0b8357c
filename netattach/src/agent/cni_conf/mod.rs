//! The configuration file that makes a container runtime call netattach.
//!
//! | module | what it does |
//! |---|---|
//! | `file` | its content; reading and writing it |
//! | `conf_keeper` | keeps it up to date |
//! | `conf_watch` | notices changes by other programs |
//! | `conf_repair` | decides on the reaction to them |
//! | `runtime_conf` | the configuration that the runtime reports |

pub(super) mod conf_keeper;
mod conf_repair;
pub(super) mod conf_watch;
mod file;
pub(super) mod runtime_conf;

pub(super) use self::file::CniConf;
pub use self::file::{Caller, callers};
