//! Frames and messages between the CNI executable, the command line and the agent.
//!
//! A connection carries one request. Each side first sends a [`message::Hello`]; the client sends its request
//! right behind it, without waiting, so that a call costs one round trip. All messages are JSON in
//! [`frame`]s over a unix stream socket that only its owner may open.
//!
//! [`client`], [`shim`] and [`pending`] do not depend on tokio: they make up the CNI executable, which is started for
//! every call of the container runtime.
//!
//! | module | what it does |
//! |---|---|
//! | [`frame`] | a payload prefixed by its length |
//! | [`message`] | requests and answers |
//! | [`client`] | one request, blocking |
//! | [`shim`], [`pending`] | the CNI executable; the DELs that it records while no agent answers |
//! | [`server`] | the agent's end of the socket |
//! | `acceptors`, `door`, `duty` | its threads, what they sleep at, and who of them may serve while another accepts |
//! | `incoming`, `converse` | a request as it arrives, and what is said from then on |

mod acceptors;
pub mod client;
mod converse;
mod door;
mod duty;
pub mod frame;
mod incoming;
pub mod message;
pub mod pending;
pub mod server;
pub mod shim;

use std::path::{Path, PathBuf};

/// Where the agent listens unless configured otherwise.
pub const DEFAULT_SOCKET: &str = "/run/netattach/netattach.sock";

/// Where the agent keeps its state unless configured otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/netattach";

/// The lock beside a socket. It outlives sockets, so it shows that an agent has served.
pub(crate) fn lock_path(socket: &Path) -> PathBuf {
    let mut lock = socket.as_os_str().to_owned();
    lock.push(".lock");
    lock.into()
}
