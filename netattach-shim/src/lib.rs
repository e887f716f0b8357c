//! netattach's CNI executable, and the code that it shares with the agent and the command line.
//!
//! A container runtime starts the executable for every CNI call, and a pod waits for each call. Therefore
//! the executable is a package of its own, which links little and needs no start-up of the C library. All
//! decisions are left to the agent.
//!
//! | module | what it does | touches the machine |
//! |---|---|---|
//! | [`shim`] | one CNI call: environment and standard input to the agent, its reply to standard output | socket |
//! | [`client`] | one request to the agent, blocking | socket |
//! | [`frame`], [`message`] | payloads prefixed by their length; the messages in them | no |
//! | [`pending`] | the DELs that are recorded while no agent answers | files |
//! | [`cni`] | the codes and versions of the CNI specification | no |
//! | [`identifier`] | the names that the CNI specification allows | no |
//! | [`budget`] | size limits of input from others | no |
//! | [`built`] | the commit and the versions that `--version` shows | no |
//! | [`bounded`] | reads files of others up to a limit | files |
//! | [`durable`] | replaces files atomically | files |
//! | [`moment`] | determines which of two events came first | clock |
//! | [`error_chain`] | error printing | no |
//! | `crash` | for tests only: a crash at every point | |

pub mod bounded;
pub mod budget;
pub mod built;
pub mod client;
pub mod cni;
#[cfg(feature = "crash-points")]
pub mod crash;
pub mod durable;
pub mod error_chain;
pub mod frame;
pub mod identifier;
pub mod message;
pub mod moment;
pub mod pending;
pub mod shim;

use std::path::{Path, PathBuf};

/// Where the agent listens unless configured otherwise.
pub const DEFAULT_SOCKET: &str = "/run/netattach/netattach.sock";

/// Where the agent keeps its state unless configured otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/netattach";

/// The lock file beside a socket. The lock file outlives the socket, so its existence shows that an agent
/// has served.
pub fn lock_path(socket: &Path) -> PathBuf {
    let mut lock = socket.as_os_str().to_owned();
    lock.push(".lock");
    lock.into()
}

/// Kills the process, as `kill -9` would, when the environment requests a crash at this point. Exists only
/// with the feature `crash-points`, which only tests enable: they enumerate every point of an operation.
#[cfg(feature = "crash-points")]
#[macro_export]
macro_rules! crash_point {
    ($stage:expr, $at:expr) => {
        $crate::crash::reached(&format!("{}:{:?}", $stage, $at))
    };
}

/// Does nothing: the feature `crash-points` is off.
#[cfg(not(feature = "crash-points"))]
#[macro_export]
macro_rules! crash_point {
    ($stage:expr, $at:expr) => {{
        let _ = (&$stage, &$at);
    }};
}
