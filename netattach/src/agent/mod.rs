//! The node agent: reads its configuration, brings the journal and the kernel together, serves the socket.

mod cni_conf;
pub mod config;
mod dynamic;
mod flow;
mod handler;
mod health;
mod policy_settings;
mod report;
mod run;
mod serial;
mod settings_file;

pub use config::{Arguments, Settings};
pub use run::{AgentError, main, run};
