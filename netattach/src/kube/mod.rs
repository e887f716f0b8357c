//! The Kubernetes API as the source of objects and the destination of statuses. The only module that names
//! the `kube` crates.
//!
//! One thread talks to the server, so that reading a large cluster delays no CNI call.
//!
//! - Reading: for each kind of [`resource`](self), `follow` reads all objects by `list` and their changes
//!   by `watch`, through `client`, with pauses of `backoff` after failures; `renewal` decides when the
//!   connection is made anew.
//! - Keeping: `cache` converts objects into the model, bounded by `weights` and `stand_ins`, and remembers
//!   objects that are `refused`; `view` publishes snapshots of it; `on_demand` decides when kinds that are
//!   not always needed are followed.
//! - Answering: `source` answers from the snapshots, and asks the server for one pod if the watch lags
//!   behind the runtime.
//! - Writing: `publish` writes the network-status of pods, the newest of each from `queue`, as composed by
//!   `patch`, within `rate`; `failures` decides which failures are logged. `events` writes the events in
//!   `event_queue`, `taint` removes the startup taint of a node, `evict` evicts a pod.
//! - Further requests: `nodes` asks whether there are other nodes, `ranges` for the ranges of Services and
//!   of this node, [`exec`] runs a command in a pod for `kubectl netattach`, and `access` finds missing
//!   rights.

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
pub use source::{
    Cluster, ClusterError, ClusterOptions, NodesWanted, TaintRemoval, Untainted, missing_rights,
};
