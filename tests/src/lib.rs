//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets, a whole node with a
//! running agent, and a machine with container runtimes.
//!
//! | module | provides |
//! |---|---|
//! | [`node`], `agent`, `crash_points` | a node with a running agent, and with one that is killed at a point of the test's choice |
//! | [`cluster`] | a real cluster: kube-apiserver, and nodes with a kubelet |
//! | [`manifest`] | the objects that the agent reads |
//! | [`api_server`], [`admission`] | a Kubernetes API server that fails on demand; ValidatingAdmissionPolicies |
//! | [`service_account`] | the files by which a pod reaches its API server |
//! | [`namespace`], [`wires`], [`sriov`] | namespaces; devices that lead out of a node; cards with VFs |
//! | [`call`], [`runtime`], [`machine`] | a call of the CNI executable; of a plugin, without an agent; real container runtimes |
//! | [`kubelet`], [`cri`] | a kubelet's PodResources socket; a container runtime's CRI socket |
//! | [`dhcp`] | a DHCP server, the reference's daemon, and the messages on their link |
//! | [`coming`], [`crowd`] | pods that are created and deleted all the time; a pod with more objects than are read |
//! | [`guide`] | pages that are executed as they are written |
//! | [`plugin_calls`] | the recorded calls of scripted plugins |
//! | [`primaries`] | the configurations of other primary networks |
//! | [`traffic`], [`packet`], [`raw`], [`tap`], [`reading`] | connections; frames built byte by byte; frames sent and received unchanged; the process's end of a tap; an independent parser of packets |
//! | [`peak`], [`map_memory`] | the peak memory of a process; that of the maps, as documented |
//! | [`snapshot`], [`settings`], [`record`] | what attachments leave behind; rules and sysctls of a namespace; records of the journal |
//! | [`soak`] | pods that are created and deleted at random on two nodes, and a model of the expected state |
//! | [`other_programs`], [`privilege`], [`node_root`], [`tools`] | other agents' programs; fewer capabilities, less of the kernel; the node's root directory as a container has it; programs that a machine may lack |

pub mod admission;
mod agent;
pub mod api_server;
pub mod call;
pub mod cluster;
pub mod coming;
mod crash_points;
pub mod cri;
pub mod crowd;
pub mod dhcp;
pub mod guide;
pub mod kubelet;
pub mod machine;
pub mod manifest;
pub mod map_memory;
mod namespace;
pub mod node;
pub mod node_root;
pub mod other_programs;
pub mod packet;
pub mod peak;
pub mod plugin_calls;
pub mod primaries;
pub mod privilege;
pub mod raw;
pub mod reading;
pub mod record;
pub mod runtime;
pub mod service_account;
pub mod settings;
pub mod snapshot;
pub mod soak;
pub mod sriov;
pub mod tap;
pub mod tools;
pub mod traffic;
pub mod wires;

pub use call::{Call, Outcome};
pub use namespace::{Bound, Namespace};
pub use node::{Node, Pod};

/// Returns the figure for a test that has a longer form at night: `at_night` then, else `otherwise`.
pub fn nightly<T>(otherwise: T, at_night: T) -> T {
    if std::env::var("NETATTACH_NIGHTLY").as_deref() == Ok("1") { at_night } else { otherwise }
}
