//! A request on the agent's socket, from its arrival to its answer and the work after it.
//!
//! | module | what it does |
//! |---|---|
//! | `handler` | answers requests: CNI calls by the engine, questions from memory |
//! | `devices` | asks the kubelet for the devices of a pod, and assigns one to each network |
//! | `operation` | carries out an operation in its turn and lane, restarting it when necessary |
//! | `publication` | the network-status of attached pods |
//! | `dynamic` | attaches live pods to further networks, and detaches them, on request |
//! | `gc` | GC, concurrently with other requests |
//! | `after_add` | work after the answer to an ADD |
//! | `request_log` | the log line of a request |

pub(super) mod after_add;
pub(super) mod devices;
mod dynamic;
mod gc;
pub(super) mod handler;
mod operation;
pub(super) mod publication;
pub(super) mod request_log;
