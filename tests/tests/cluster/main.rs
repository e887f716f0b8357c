//! The agent with a real Kubernetes API server as its source.
//!
//! | module | tests |
//! |---|---|
//! | `chart` | the helm chart: the objects of `deploy`, rendered without helm |
//! | `daemonset` | a DaemonSet of the image, installed by `kubectl apply -k`, upgraded under traffic, removed |
//! | `guides` | the quick start and the removal word by word: the commands of the pages, and the Job under the kubelet |
//! | `tested` | `kubectl netattach test`, with policies |
//! | `upgrade` | the same from the release that landed last, and back; not in the gate |
//! | `surge` | and the next agent's pod beside the one that serves |
//! | `deploy` | the manifests of `deploy`: rendered by kubectl, tried on the server |
//! | `nodes` | agents of several nodes of a real cluster: published statuses, and policies between them |
//! | `ranges` | a real cluster without any other network: the agent's own network |
//! | `server` | a real kube-apiserver: the behaviour that the agent relies on |
//! | `workloads` | a real cluster with a kubelet and containerd: the life of a Deployment, with an agent that is killed at random, and around a time without an API server |
//! | `failures` | the same when the kubelet, the node, the runtime's disk or the API server fails |
//! | `services` | kube-proxy, NetworkPolicies, the startup taint, static pods, `exec` |
//! | `alone` | the same node without any other network: the agent's own network, with Services, `hostPort` and a reboot |
//! | `devices` | a device plugin, and which network gets which of the kubelet's devices |
//! | `repair` | pods whose runtime read another configuration: attached or evicted, as rights and budgets permit |
//!
//! `rig` is shared by the last six: a node with its cluster, and checks of its pods.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod alone;
mod chart;
mod daemonset;
mod deploy;
mod devices;
mod failures;
mod guides;
mod nodes;
mod ranges;
mod repair;
mod rig;
mod server;
mod services;
mod surge;
mod tested;
mod upgrade;
mod workloads;
