//! Frames and messages between the CNI executable, the command line and the agent.
//!
//! A connection carries one request. Each side first sends a [`message::Hello`]; the client sends its
//! request directly after its greeting, without waiting for the agent's, so that a call costs one round
//! trip. All messages are JSON in [`frame`]s over a unix stream socket that only its owner may open.
//!
//! [`client`], [`frame`], [`shim`] and [`pending`] belong to the CNI executable, which is started for every
//! call of the container runtime: they are in a package of their own ([`netattach_shim`]).
//!
//! | module | what it does |
//! |---|---|
//! | [`frame`], [`frames`] | a payload prefixed by its length; a stream of them as it arrives |
//! | [`message`] | requests and answers |
//! | [`client`] | one request, blocking |
//! | [`shim`], [`pending`] | the CNI executable; the DELs that it records while no agent answers |
//! | [`server`] | the agent's end of the socket |
//! | `acceptors`, `door`, `duty` | its accepting threads; the listening socket; how many threads may serve at once |
//! | `incoming`, `converse` | reading a request; serving it and sending the answer |

mod acceptors;
mod converse;
mod door;
mod duty;
pub mod frames;
mod incoming;
pub mod message;
pub mod server;

pub use netattach_shim::{DEFAULT_SOCKET, DEFAULT_STATE_DIR, client, frame, pending, shim};

pub(crate) use netattach_shim::lock_path;
