//! What the CNI executable says to the agent and hears from it, as JSON. The agent's other messages are its own and the command
//! line's.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Number of this protocol. Peers with different numbers do not talk.
pub const PROTOCOL: u32 = 1;

/// The first frame of each side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u32,
    /// Version of the sender's software, for messages.
    pub version: String,
}

/// What the agent answers.
pub trait Answer: DeserializeOwned {
    /// The answer.
    ///
    /// # Errors
    /// The agent's reason where it refused the request.
    fn taken(self) -> Result<Self, String>;
}

/// A call of the CNI executable as the container runtime made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniCall {
    /// The `CNI_*` variables of its environment, `TRACEPARENT`, and no others.
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

/// The request of the CNI executable: one of those that the agent knows.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request<'a> {
    /// One call.
    Cni(&'a CniCall),
}

/// What the agent answers to that.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Response {
    /// To the call.
    Cni(CniReply),
    /// To a request that was not understood or could not be served: the reason, on one line.
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
    /// A variable; empty counts as absent, as everywhere in CNI.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}
