//! The Kubernetes API as the source of objects and the place where status is published. The only module that names the
//! `kube` crates.
//!
//! One thread talks to the server, so that reading a large cluster delays no CNI call. For each kind of
//! [`resource`](self), `follow` reads all objects by `list` and their changes by `watch`, through `client`, with pauses
//! of `backoff` after failures, over a connection that `renewal` says when to make anew; `cache` turns them into the model,
//! bounded by `weights` and `stand_ins` and with what is `refused` remembered, and `view` publishes snapshots of it; `on_demand`
//! says when what only some need is followed. `source`
//! answers from those, and asks the server for one pod if it lags behind the runtime. `publish` writes the network-status of
//! pods: the newest of each from `queue`, as `patch` composes it, within `rate`, and logs what `failures` lets it; `events`
//! writes events, of those in `event_queue`, `taint` removes the taint of a node that waits for its agent, `nodes` asks
//! whether there are others, `ranges` for the ranges of Services and of this node, `evict` evicts a pod; [`exec`] runs a
//! command in one, for people. `access` says what the agent may not do.

mod access;
mod backoff;
mod cache;
mod client;
mod event_queue;
mod events;
mod evict;
pub mod exec;
mod failures;
mod follow;
mod list;
mod nodes;
mod on_demand;
mod patch;
mod publish;
mod queue;
mod ranges;
mod rate;
mod refused;
mod renewal;
mod resource;
mod source;
mod stand_ins;
mod taint;
#[cfg(test)]
mod test_server;
mod view;
mod watch;
mod weights;

pub use access::RightsError;
pub use client::{Access, AccessError, Watcher};
pub use evict::{Candidate, NotEvicted, Owner};
pub use resource::ATTACHED_LABEL;
pub use source::{Cluster, ClusterError, ClusterOptions, NodesWanted, missing_rights};
