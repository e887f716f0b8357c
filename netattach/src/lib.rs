//! netattach: a pod's network attachments, from the request of a container runtime to the kernel.
//!
//! The modules, in the order in which one ADD passes through them:
//!
//! | module | what it does | touches the machine |
//! |---|---|---|
//! | [`rpc`] | frames between the CNI executable and the agent | socket |
//! | `wire` | the model of policies as messages, and back | no |
//! | [`cni`] | the CNI specification: requests, configurations, results, versions, errors | no |
//! | [`npwg`] | the multi-network standard: selections, definitions, status | no |
//! | [`objects`] | the model: pods, namespaces, definitions and policies, as every source gives them | no |
//! | [`source`] | where objects come from | files |
//! | [`spec`], [`step`] | the words of a plan: kernel objects as they are wanted; steps and what they bring | no |
//! | [`plan`], [`link`] | a request and the facts about the node become ordered steps with inverses | no |
//! | [`journal`] | what was planned and done, written before it is done | files |
//! | [`attach`] | carries plans out and takes them back | dispatches |
//! | [`ipam`], [`delegate`], [`netlink`], [`netns`], [`sysctl`], [`bpf`] | one owner each for leases, child processes, links, namespaces, BPF | yes |
//! | [`policy`] | compiles policies to lookup tables; explains and shows them | no |
//! | [`enforce`] | keeps the kernel's policies equal to the compiled ones | by `hooks`, `bpf`, `netlink` |
//! | [`hooks`] | runs programs on devices: clsact filters or tcx links | by `bpf` and `netlink` |
//! | [`fast_path`] | who takes the fast path between pods: follows links and filters | by `netlink` and `bpf` |
//! | [`publish`] | where the `network-status` of attached pods is published | files |
//! | [`multus`] | what a node has of Multus: its configuration, its memory of pods | no |
//! | [`observe`] | what the programs reported lately | no |
//! | [`agent`], [`cli`], [`error_chain`] | the daemon, the command line, error printing | |
//! | [`moment`] | which of two things came first | clock |
//! | [`timing`] | where the time of one operation goes | clock |
//! | `sync` | locks and threads, by names that a model checker can stand behind | no |
//! | [`budget`] | how large what others write may be | no |
//! | `cidr` | networks as text | no |
//! | `bounded`, `durable`, `file_version` | files of others, read up to a bound; files that are replaced whole; whether a file is as it was | files |
//! | [`waits`] | what an operation may have to wait for that others own | no |
//! | `descriptors` | how many files may be open, and are | limits |
//! | [`mac`] | Ethernet addresses | no |
//! | `crash`, `model` | what only tests have: an end at every point; a model checker | |

pub mod agent;
pub mod attach;
mod bounded;
pub mod bpf;
pub mod budget;
mod cidr;
pub mod cli;
pub mod cni;
pub mod delegate;
mod descriptors;
mod durable;
pub mod enforce;
pub mod error_chain;
pub mod fast_path;
mod file_version;
pub mod hooks;
pub mod ipam;
pub mod journal;
pub mod link;
pub mod mac;
#[cfg(test)]
#[cfg(feature = "model")]
pub(crate) mod model;
pub mod moment;
pub mod multus;
pub mod netlink;
pub mod netns;
pub mod npwg;
pub mod objects;
pub mod observe;
pub mod plan;
pub mod policy;
pub mod publish;
pub mod rpc;
pub mod source;
pub mod spec;
pub mod step;
mod sync;
pub mod sysctl;
pub mod timing;
pub mod waits;
mod wire;

/// Ends the process, as `kill -9` would, when the environment asks for it at this point. Exists only with the
/// feature `crash-points`, which only tests enable: they enumerate every point of an operation.
#[cfg(feature = "crash-points")]
#[macro_export]
macro_rules! crash_point {
    ($stage:expr, $at:expr) => {
        $crate::crash::reached(&format!("{}:{:?}", $stage, $at))
    };
}

/// Nothing: see the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
#[macro_export]
macro_rules! crash_point {
    ($stage:expr, $at:expr) => {{
        let _ = (&$stage, &$at);
    }};
}

#[cfg(feature = "crash-points")]
pub mod crash;

/// Does the agent's own upkeep, which belongs to no operation: its points are not among those that tests enumerate.
#[cfg(feature = "crash-points")]
fn upkeep<T>(work: impl FnOnce() -> T) -> T {
    crash::uncounted(work)
}

/// Does the agent's own upkeep: see the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
fn upkeep<T>(work: impl FnOnce() -> T) -> T {
    work()
}
