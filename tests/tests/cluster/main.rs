//! The agent with a real Kubernetes API server as its source.
//!
//! | module | tests |
//! |---|---|
//! | `nodes` | agents of two nodes of a real cluster: what they publish |
//! | `ranges` | a real cluster without any other network: the network of the agent's own |
//! | `server` | a real kube-apiserver: what the agent relies on |
//! | `workloads` | a real cluster with a kubelet and containerd: the pods of a Deployment |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod nodes;
mod ranges;
mod server;
mod workloads;
