//! The messages between the CNI executable and the agent, as JSON. The messages between the command line
//! and the agent are defined in the agent's package.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Protocol number. Peers with different numbers do not exchange requests.
pub const PROTOCOL: u32 = 1;

/// The first frame of each side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u32,
    /// Version of the sender's software, for messages.
    pub version: String,
}

/// An answer of the agent.
pub trait Answer: DeserializeOwned {
    /// Returns the answer unless it is a refusal.
    ///
    /// # Errors
    /// The agent's reason where it refused the request.
    fn taken(self) -> Result<Self, String>;
}

/// A call of the CNI executable as the container runtime made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniCall {
    /// The `CNI_*` variables of its environment and `TRACEPARENT`; no others.
    pub env: BTreeMap<String, String>,
    /// All of its standard input.
    pub stdin: String,
}

/// The output and the exit code of the CNI executable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniReply {
    /// Written to standard output as it is.
    pub stdout: String,
    /// Exit code.
    pub exit: i32,
}

/// The request of the CNI executable, one of the requests that the agent serves.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request<'a> {
    /// One call.
    Cni(&'a CniCall),
}

/// The answers of the agent to [`Request`].
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Response {
    /// The reply to the call.
    Cni(CniReply),
    /// Refusal of a request that was not understood or could not be served: the reason, on one line.
    Refused(String),
}

impl Answer for Response {
    fn taken(self) -> Result<Self, String> {
        match self {
            Self::Refused(reason) => Err(reason),
            answer @ Self::Cni(_) => Ok(answer),
        }
    }
}

impl Hello {
    /// The greeting of this software.
    pub fn ours() -> Self {
        Self { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

impl CniCall {
    /// Returns a variable; an empty value counts as absent, as everywhere in CNI.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}
