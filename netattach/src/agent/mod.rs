//! The node agent: reads its configuration, reconciles the journal with the kernel, serves the socket.
//!
//! | module | what it does |
//! |---|---|
//! | `config`, `settings_file`, `policy_settings` | the command line and the settings |
//! | `log`, `privileges`, `owned`, `signals` | the log; required capabilities; directory locks; signals |
//! | [`run`], `background` | startup and serving; background tasks |
//! | `cni_conf` | the configuration file that makes a container runtime call netattach |
//! | `left_over` | finishes operations that an earlier agent had begun |
//! | `handler`, `operation` | answers requests; carries out an operation, restarting it when necessary |
//! | `turns`, `lanes`, `scheduler` | one operation at a time per container; admission; suspending and waking |
//! | `dynamic`, `gc` | attachments of live pods; GC, concurrently with other requests |
//! | `memory` | limits the allocator, and returns freed memory after a burst |
//! | `failure`, `flow` | the log line for a failed request; records of packets as text |
//! | `health`, `trouble`, `disk_look`, `report` | readiness; problems with objects, and on disk; the agent's status |

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

/// `netattachd`: parses the command line, logs to standard error, and runs the agent.
pub fn main() -> std::process::ExitCode {
    memory::keep_small();
    run::main()
}
