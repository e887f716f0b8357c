//! The node agent: reads its configuration, brings the journal and the kernel together, serves the socket.

mod cni_conf;
pub mod config;
mod dynamic;
mod failure;
mod flow;
mod gc;
mod handler;
mod health;
mod lanes;
mod left_over;
mod log;
mod owned;
mod policy_settings;
mod privileges;
mod report;
mod run;
mod serial;
mod settings_file;
mod signals;
mod trouble;
mod turns;

pub use config::{Arguments, Settings};
pub use run::{AgentError, main, run};
