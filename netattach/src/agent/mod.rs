//! The node agent: reads its configuration, brings the journal and the kernel together, serves the socket.
//!
//! | module | what it does |
//! |---|---|
//! | `config`, `settings_file`, `policy_settings` | the command line and the settings |
//! | `log`, `privileges`, `owned`, `signals` | the log; what the agent has to be allowed; directories that are its own; signals |
//! | [`run`], `background` | from settings to a serving agent; what it does beside its requests |
//! | `cni_conf` | the file that tells a container runtime to call netattach |
//! | `left_over` | finishes what an earlier agent had begun |
//! | `handler`, `operation` | answers requests; carries one out, as often as it has to begin |
//! | `turns`, `lanes`, `scheduler` | one operation at a time for a container; who may go on; puts to sleep and wakes |
//! | `dynamic`, `gc` | attachments of live pods; GC beside everything else |
//! | `memory` | keeps the allocator small, and gives back after a burst |
//! | `failure`, `flow` | the log's line about a failed request; records of packets in words |
//! | `health`, `trouble`, `disk_look`, `report` | readiness; what is wrong with objects, and with definitions on disk; what the agent shows of itself |

mod background;
mod cni_conf;
pub mod config;
mod disk_look;
mod dynamic;
mod failure;
mod flow;
mod gc;
mod handler;
mod health;
mod lanes;
mod left_over;
mod log;
mod memory;
mod operation;
mod owned;
mod policy_settings;
mod privileges;
mod report;
mod run;
mod scheduler;
mod settings_file;
mod signals;
mod trouble;
mod turns;

pub use config::{Arguments, Settings};
pub use run::{AgentError, run};

/// `netattachd`: reads the command line, logs to standard error, runs.
pub fn main() -> std::process::ExitCode {
    memory::keep_small();
    run::main()
}
