//! The agent with a Kubernetes API server as its source: one of the tests' own, which fails on demand.
//!
//! | module | tests |
//! |---|---|
//! | `api_server` | the server itself: semantics of a real server, and its faults |
//! | `sync` | the first sync, kinds that are not served, objects that cannot be read |
//! | `alone` | the network of the agent's own; definitions that take their range from the node |
//! | `adds` | the requests of a CNI call to the server |
//! | `outages` | a server that fails, is down, or has another authority |
//! | `publishing`, `events` | the network-status of pods; events |
//! | `live`, `repair` | pods whose annotation changes; pods that run without their networks |
//! | `imported` | settings that `netattachctl import` has made of Multus's |
//! | `taint` | the node's startup taint |
//! | `admission` | the writes of an agent, and those possible with a stolen token, under the admission policies of `deploy` |
//! | `access`, `forged` | rights that the agent lacks; a published status that other clients change or invent |
//! | `hostile` | authors who create as much as they can, beside other tenants |
//! | `nodes` | policies between pods of two nodes, in both families |
//! | `told` | problems of the access to the cluster, in the log, as a condition and by `doctor` |
//! | `watched` | probes, metrics evaluated by Prometheus, lines of the log, traces |
//! | `client`, `rig` | a plain HTTP client; a node and its server |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod access;
mod adds;
mod admission;
mod alone;
mod api_server;
mod client;
mod events;
mod forged;
mod hostile;
mod imported;
mod live;
mod nodes;
mod outages;
mod publishing;
mod repair;
mod rig;
mod sync;
mod taint;
mod told;
mod watched;
