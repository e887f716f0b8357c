//! The node agent: reads its configuration, reconciles the journal with the kernel, serves the socket.
//!
//! | module | what it does |
//! |---|---|
//! | `config`, `settings_file`, `policy_settings`, `watching`, `from_settings` | the command line and the settings; how the settings affect finding and planning networks |
//! | `log`, `privileges`, `kernel_settings`, `plugin_root`, `plugin_group`, `owned`, `signals`, `reload` | the log; required capabilities; a writable `/proc/sys`; the node's root directory, and a control group, for other plugins; directory locks; signals; what SIGHUP reloads |
//! | [`run`], `stand_by`, `sources`, `background` | startup and serving; which agent serves; where objects come from; background tasks |
//! | `cni_conf`, `conf_keeper`, `conf_repair`, `conf_watch`, `runtime_conf` | the configuration file that makes a container runtime call netattach: its content; keeping it up to date; the reaction to changes by other programs; noticing these; the configuration that the runtime reports |
//! | `left_over`, `waiting_dels` | finishes operations that an earlier agent had begun; DELs recorded while no agent answered |
//! | `handler`, `operation`, `after_add` | answers requests; carries out an operation, restarting it when necessary; work after the answer to an ADD |
//! | `required_status` | whether an ADD that needs its status written begins while the API server does not answer |
//! | `turns`, `lanes`, `scheduler` | one operation at a time per container; admission; suspending and waking |
//! | `drift` | restores links, leases, records and status on the node that other processes have changed |
//! | `in_pods` | reports changes that other processes make in pods |
//! | `missed`, `repair` | pods that run without their networks: reports, attaches or evicts them |
//! | `dynamic`, `live`, `changes`, `following`, `gc` | attachments of live pods, on request and by their annotation; the changes that are due; the order of pods; GC, concurrently with other requests |
//! | `devices` | asks the kubelet for the devices of a pod, and assigns one to each network |
//! | `collector` | detaches sandboxes for which no runtime will send a DEL |
//! | `node_network` | the node's part of the network that the agent makes: its routes |
//! | `pools`, `pool_uses` | answers how full address pools are; the pool usage that checks have found |
//! | [`validate`] | checks manifests and settings without an agent |
//! | `memory`, `pace` | limits the allocator, and returns freed memory after a burst; how often a large node is checked |
//! | `node_check` | what the node offers an agent: `--check` |
//! | `events` | the problems that become events of the cluster |
//! | `packet_log` | logs how each stage of the packet path treats packets, if that is enabled |
//! | `traces` | sends traces of requests to a collector |
//! | `http`, `metrics` | serves probes and metrics; the counters |
//! | `request_log`, `flow` | the log line of a request; records of packets as text |
//! | `own_node` | this node's object, as the last check saw it |
//! | `health`, `readiness`, `trouble`, `disk_look`, `share`, `shares`, `report` | readiness, and how it is logged; problems with objects, and on disk; which of very many are shown; results of checks of attachments; the agent's status |

mod after_add;
mod background;
mod changes;
mod cni_conf;
mod collector;
mod conf_keeper;
mod conf_repair;
mod conf_watch;
pub mod config;
mod devices;
mod disk_look;
mod drift;
mod dynamic;
mod events;
mod flow;
mod following;
mod from_settings;
mod gc;
mod handler;
mod health;
mod http;
mod in_pods;
mod kernel_settings;
mod lanes;
mod left_over;
mod live;
mod log;
mod memory;
mod metrics;
mod missed;
mod node_check;
mod node_network;
mod operation;
mod own_node;
mod owned;
mod packet_log;
mod plugin_group;
mod plugin_root;
mod policy_settings;
mod pool_uses;
mod pools;
mod privileges;
mod readiness;
mod reload;
mod repair;
mod report;
mod request_log;
mod required_status;
mod run;
mod runtime_conf;
mod scheduler;
mod settings_file;
mod share;
mod shares;
mod signals;
mod sources;
mod stand_by;
mod traces;
mod trouble;
mod turns;
pub mod validate;
mod waiting_dels;
mod watching;

pub use cni_conf::{Caller, callers};
pub use config::{Arguments, Settings};
pub use owned::{Owned, OwnedError, own_existing};
pub use privileges::{Unprivileged, check as check_privileges};
pub use report::features as kernel_features;
pub use run::{AgentError, run};
pub use sources::missing_rights;

/// `netattachd`: parses the command line, logs to standard error, and runs the agent.
pub fn main() -> std::process::ExitCode {
    memory::keep_small();
    run::main()
}
