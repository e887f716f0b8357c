//! An attachment: its name, and its row in the list of all.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::mac::Mac;
use crate::objects::ObjectName;

/// The name of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentName {
    /// Number of the attachment in the kernel's maps; none if no packet program runs for it.
    pub id: Option<u32>,
    /// The pod, if the runtime named one.
    pub pod: Option<ObjectName>,
    /// Name of the network: `namespace/definition`, or that of a cluster-wide network.
    pub network: String,
    /// Interface in the pod.
    pub ifname: String,
}

/// One attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name of the attachment.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// How the interface was made.
    pub kind: Kind,
    /// Ethernet address of the interface in the pod, where it has one.
    pub mac: Option<Mac>,
    /// Addresses in the pod with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// The interface on the host that carries its traffic: the other end of a veth, the parent of a macvlan.
    pub host_interface: Option<String>,
    /// Enforcement level of policies.
    pub enforcement: Level,
    /// The reason for a lower level, for people; empty at [`Level::Full`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub enforcement_detail: String,
    /// Whether its packet programs are attached only when the first policy selects it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub programs_wait: bool,
    /// State on the fast path; absent for interfaces without an end on the node, which is never on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_path: Option<FastPath>,
    /// Progress of the attachment.
    pub state: State,
}

/// The enforcement level of policies and source checks for an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Policies have no effect.
    None,
    /// Enforced unless a process in the pod removes the programs, which are filters in the pod's netns.
    Advisory,
    /// Enforced unless the pod uses network privileges that it has or may have.
    FullUnlessPrivileged,
    /// Always enforced.
    Full,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Advisory => "advisory",
            Self::FullUnlessPrivileged => "full-unless-privileged",
            Self::Full => "full",
        })
    }
}

/// The state of an attachment or uplink on the fast path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastPath {
    /// `on`, `undecided` or the short name of the reason for being off.
    pub state: String,
    /// The reason for being off the fast path, for people; empty if there is none.
    pub detail: String,
}

/// The plugin that made an interface: `bridge` and so on of the agent, `exec:TYPE` for an executable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Kind {
    /// A plugin of the agent, by its type.
    Native(String),
    /// The executable of this type.
    Exec(String),
}

/// Progress of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// ADD is under way.
    Attaching,
    /// ADD succeeded.
    Attached,
    /// DEL is under way, or has failed and waits to be repeated.
    Detaching,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native(kind) => f.write_str(kind),
            Self::Exec(kind) => write!(f, "exec:{kind}"),
        }
    }
}

impl FromStr for Kind {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.strip_prefix("exec:") {
            Some(kind) => Self::Exec(kind.to_owned()),
            None => Self::Native(text.to_owned()),
        })
    }
}

impl From<String> for Kind {
    fn from(text: String) -> Self {
        let Ok(kind) = text.parse();
        kind
    }
}

impl From<Kind> for String {
    fn from(kind: Kind) -> Self {
        kind.to_string()
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attaching => "attaching",
            Self::Attached => "attached",
            Self::Detaching => "detaching",
        })
    }
}
