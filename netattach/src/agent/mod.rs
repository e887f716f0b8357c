//! The node agent: reads its configuration, reconciles the journal with the kernel, serves the socket.
//!
//! | module | what it does |
//! |---|---|
//! | [`run`] | startup, serving and end; signals; which agent serves; background tasks |
//! | `node` | what the node has to offer, and what the agent prepares there; `--check` |
//! | `cni_conf` | the configuration file that makes a container runtime call netattach |
//! | `state` | the state that requests are answered from |
//! | `request` | answers requests: carries out operations, answers questions |
//! | `admission` | which request may begin, and which has to wait |
//! | `cleanup` | finishes what earlier agents began; detaches sandboxes without a request |
//! | `pods` | the pods that are running: annotations that change, pods without their networks, changes by other processes |
//! | `node_network` | the node's part of the network that the agent makes: its routes |
//! | `health` | whether the node is ready, and which networks, policies and attachments have problems |
//! | `report` | the agent's answers about itself |
//! | `monitoring` | probes, metrics, traces, events of the cluster, the log of packets |
//! | `memory` | limits the allocator, and returns freed memory after a burst |
//! | [`validate`] | checks manifests and settings without an agent |

mod admission;
mod cleanup;
mod cni_conf;
mod health;
mod memory;
mod monitoring;
mod node;
mod node_network;
mod pods;
mod report;
mod request;
mod run;
mod state;
pub mod validate;

use self::state::Agent;

pub use self::cni_conf::{Caller, callers};
pub use self::node::privileges::{Unprivileged, check as check_privileges};
pub use self::report::features as kernel_features;
pub use self::run::owned::{Owned, OwnedError, own_existing};
pub use self::run::sources::missing_rights;
pub use self::run::{AgentError, run};

/// `netattachd`: parses the command line, logs to standard error, and runs the agent.
pub fn main() -> std::process::ExitCode {
    memory::keep_small();
    run::main()
}
