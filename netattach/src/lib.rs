//! netattach: a pod's network attachments, from the container runtime's request to the kernel.
//!
//! The modules, in the order in which one ADD passes through them:
//!
//! | module | what it does | touches the machine |
//! |---|---|---|
//! | [`rpc`] | frames between the CNI executable and the agent | socket |
//! | `wire` | converts the model of policies to messages, and back | no |
//! | [`cni`] | the CNI specification: requests, configurations, results, versions, errors | no |
//! | [`npwg`] | the NPWG multi-network standard: selections, names of networks, status | no |
//! | [`objects`] | the model: pods, namespaces, definitions and policies, as every source gives them | no |
//! | [`source`] | reads objects from their sources | files |
//! | [`builtin`] | the cluster's pod network that the agent provides if there is no other: its configuration and routes | no |
//! | [`kubelet`] | asks the kubelet which devices it gave to a pod | its socket, files |
//! | [`spec`], [`step`] | the elements of a plan: desired kernel objects; steps and their outputs | no |
//! | [`plan`], [`link`] | turns a request and the facts about the node into ordered steps with inverses | no |
//! | [`journal`] | records planned and completed steps, written ahead | files |
//! | [`attach`] | carries out plans and rolls them back | dispatches |
//! | [`ipam`] | owns leases | yes |
//! | [`delegate`] | owns child processes | yes |
//! | [`netlink`] | owns links | yes |
//! | [`nat`] | masquerades pods' traffic and maps ports of the node to pods | by `netlink` and `sysctl` |
//! | [`firewall`] | lets the node forward packets of pods that `iptables` rules would drop | by `netlink` |
//! | [`netns`] | owns namespaces | yes |
//! | [`sysctl`] | owns kernel settings | yes |
//! | [`bpf`] | owns BPF programs and maps | yes |
//! | [`policy`] | compiles policies to lookup tables; explains and shows them | no |
//! | [`enforce`] | keeps the kernel's policies equal to the compiled ones | by `hooks`, `bpf`, `netlink` |
//! | [`hooks`] | attaches programs to devices: clsact filters or tcx links | by `bpf` and `netlink` |
//! | [`fast_path`] | decides which attachments use the fast path: follows links and filters | by `netlink` and `bpf` |
//! | [`publish`] | publishes the `network-status` of attached pods | files |
//! | [`kube`] | follows the Kubernetes API: a source of objects, and a place to publish status | network |
//! | [`multus`] | reads Multus's files on a node: its configuration, its saved state of pods | no |
//! | [`grpc`] | a unary gRPC call over a unix socket | socket |
//! | [`cri`] | asks the container runtime for its sandboxes | socket |
//! | `own_thread` | runs blocking work, on the thread of its request or on another | no |
//! | [`observe`] | keeps the latest events of the programs | no |
//! | [`settings`] | the agent's settings: its command line and configuration file | files |
//! | [`agent`], [`cli`] | the daemon, the command line | |
//! | [`built`] | the commit and the versions that `--version` shows | no |
//! | [`pace`] | intervals of periodic checks | clock |
//! | `put_back` | limits how often a setting is restored that other programs keep changing | clock |
//! | [`ticks`] | timers of one phase | clock |
//! | `rounds` | runs periodic checks that are due together on one thread | no |
//! | [`timing`] | measures how the time of one operation is spent | clock |
//! | `sync` | locks and threads, under names that a model checker can replace | no |
//! | [`budget`] | size limits of external input | no |
//! | `cidr` | networks as text, and their first addresses | no |
//! | `file_version` | detects changes of a file | files |
//! | `flock` | waits for locks of other processes | files |
//! | [`waits`] | external resources that an operation may have to wait for | no |
//! | `descriptors` | the number of open files and its limit | limits |
//! | [`mac`] | Ethernet addresses | no |
//! | `model` | for tests only: a model checker | |
//!
//! The crate [`netattach_shim`] contains the code that the CNI executable shares with the agent and the command line:
//! frames and their messages, reading files with a size limit and replacing files atomically, and printing of errors.

// Code that only the agent and the command line use is unused in the build of the fuzz targets, which has neither.
#![cfg_attr(not(feature = "executables"), allow(dead_code, unused_imports))]

#[cfg(feature = "executables")]
pub mod agent;
pub mod attach;
pub mod bpf;
pub mod budget;
#[cfg(feature = "executables")]
pub mod built;
pub mod builtin;
mod cidr;
#[cfg(feature = "executables")]
pub mod cli;
pub mod cni;
#[cfg(feature = "executables")]
pub mod cri;
pub mod delegate;
mod descriptors;
pub mod enforce;
pub mod fast_path;
mod file_version;
pub mod firewall;
mod flock;
#[cfg(feature = "executables")]
pub mod grpc;
pub mod hooks;
pub mod ipam;
pub mod journal;
#[cfg(feature = "executables")]
pub mod kube;
#[cfg(feature = "executables")]
pub mod kubelet;
pub mod link;
pub mod mac;
#[cfg(test)]
#[cfg(feature = "model")]
pub(crate) mod model;
pub mod multus;
pub mod nat;
pub mod netlink;
pub mod netns;
pub mod npwg;
pub mod objects;
pub mod observe;
mod own_thread;
pub mod pace;
pub mod plan;
pub mod policy;
pub mod publish;
mod put_back;
mod rounds;
pub mod rpc;
#[cfg(feature = "executables")]
pub mod settings;
pub mod source;
pub mod spec;
pub mod step;
mod sync;
pub mod sysctl;
pub mod ticks;
pub mod timing;
pub mod waits;
mod wire;

#[cfg(feature = "crash-points")]
pub use netattach_shim::crash;
pub use netattach_shim::{crash_point, error_chain, moment};

use netattach_shim::{bounded, durable};

/// Runs the agent's background maintenance, which belongs to no operation: its crash points are not among those that
/// tests enumerate.
#[cfg(feature = "crash-points")]
fn upkeep<T>(work: impl FnOnce() -> T) -> T {
    crash::uncounted(work)
}

/// Runs the agent's background maintenance: see the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
fn upkeep<T>(work: impl FnOnce() -> T) -> T {
    work()
}
