//! The agent with a real Kubernetes API server as its source.
//!
//! | module | tests |
//! |---|---|
//! | `nodes` | agents of two nodes of a real cluster: what they publish |
//! | `ranges` | a real cluster without any other network: the network of the agent's own |
//! | `server` | a real kube-apiserver: what the agent relies on |
//! | `workloads` | a real cluster with a kubelet and containerd: the life of a Deployment, with an agent that is killed at random |
//! | `failures` | the same when the kubelet, the node, the runtime's disk or the API server fails |
//! | `services` | kube-proxy, NetworkPolicies, the startup taint, static pods, `exec` |
//!
//! `rig` has what the last three share: a node with its cluster, and what must hold of its pods.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod failures;
mod nodes;
mod ranges;
mod rig;
mod server;
mod services;
mod workloads;
