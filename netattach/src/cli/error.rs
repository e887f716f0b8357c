//! Why a command failed.

use std::io;
use std::path::PathBuf;

use super::filter::ContainerIdError;
use super::{Exit, attach, import, missing, visible};
use crate::agent::OwnedError;
use crate::agent::validate::ValidateError;
use crate::bpf::BpfError;
use crate::cni::code;
use crate::error_chain::Chain;
use crate::journal::JournalError;
use crate::kube::exec::RemoteError;
use crate::netlink;
use crate::netns::NetnsError;
use crate::rpc::client::ClientError;
use crate::rpc::message::Failure;
use crate::rpc::pending::PendingError;

/// Reasons why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The agent did not answer.
    #[error(transparent)]
    Agent(#[from] ClientError),
    /// The agent reported a failure.
    #[error("{} (code {})", .0.message, .0.code)]
    Failed(Failure),
    /// The command line names no sandbox, or has an invalid argument.
    #[error(transparent)]
    Words(#[from] attach::WordsError),
    /// The configuration of Multus cannot be read.
    #[error(transparent)]
    Import(#[from] import::ImportError),
    /// `import` of keys without an equivalent in netattach.
    #[error("these keys have no equivalent, and the table says what to do: {}", .0.join(", "))]
    NoEquivalent(Vec<String>),
    /// `uninstall` while an agent runs.
    #[error("an agent serves {0}: have it detach its pods (cniConf.remove, docs/remove.md), then stop it")]
    AgentRuns(PathBuf),
    /// `uninstall` while pods are attached.
    #[error(
        "pods are attached, and their devices would keep programs that no agent maintains: {}; detach them first, by an agent with cniConf.remove (docs/remove.md), or give --force",
        missing::list(.0)
    )]
    Attached(Vec<String>),
    /// `uninstall` cannot determine whether pods are attached.
    #[error("check for attached pods; --force skips the check")]
    Journal(#[from] JournalError),
    /// `uninstall` of a directory that an agent works on.
    #[error("an agent may run: stop it first")]
    Owned(#[from] OwnedError),
    /// `uninstall` could not read the recorded DELs.
    #[error("look for DELs that wait for an agent")]
    Pending(#[from] PendingError),
    /// `uninstall` could not read or remove a file.
    #[error("{action} {path}")]
    File {
        /// The action that failed.
        action: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// An object that the command line names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The agents of the nodes to be queried do not run.
    #[error("no agent can be asked: {}", missing::list(.0))]
    NotRunning(Vec<String>),
    /// `uninstall` could not remove an object.
    #[error("remove pins")]
    Pins(#[from] BpfError),
    /// `uninstall` could not remove tables, routes or bridges.
    #[error("remove tables of the packet filter, routes and bridges")]
    Node(#[from] netlink::Error),
    /// Arguments contradict one another, or are incomplete.
    #[error("{0}")]
    Usage(String),
    /// The id of a container is invalid, or matches several containers.
    #[error(transparent)]
    Container(#[from] ContainerIdError),
    /// The agent sent an answer of the wrong kind.
    #[error("the agent's answer is not one to {request}")]
    OtherAnswer {
        /// Name of the request.
        request: &'static str,
    },
    /// The answer cannot be encoded as JSON.
    #[error("encode the answer")]
    Encode(#[from] serde_json::Error),
    /// `sysdump` could not write its archive.
    #[error("write {path}")]
    Archive {
        /// The archive.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The cluster could not be queried.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A network namespace could not be created.
    #[error("make a network namespace; run this as root")]
    Netns(#[from] NetnsError),
    /// `validate` found problems.
    #[error("{0} problems; each is shown with its remedy")]
    Invalid(usize),
    /// `validate` could not begin.
    #[error(transparent)]
    Validate(#[from] ValidateError),
    /// `doctor` or `test` found a problem.
    #[error("{0} checks failed; each is shown with its details")]
    Unwell(usize),
    /// The answer cannot be encoded as YAML.
    #[error("encode the answer")]
    Yaml(#[source] serde_norway::Error),
    /// Writing to standard output failed.
    #[error("write stdout")]
    Write(#[from] io::Error),
    /// `status` of an agent that is not ready.
    #[error("the agent is not ready: {}", .0.join(", "))]
    NotReady(Vec<String>),
}

impl CliError {
    /// Returns the error and its causes on one line, with control characters in texts of others escaped.
    pub fn line(&self) -> String {
        visible::inline(&Chain(self).to_string())
    }

    /// The exit code of the command.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Agent(ClientError::Refused { .. } | ClientError::Prepare(_)) => Exit::Failed,
            Self::Agent(_) | Self::Remote(_) | Self::NotRunning(_) => Exit::NoAgent,
            Self::Failed(failure) if failure.not_there || failure.code == code::UNKNOWN_CONTAINER => {
                Exit::NotFound
            }
            Self::NotFound(_) | Self::Container(ContainerIdError::Unknown(_)) => Exit::NotFound,
            Self::Words(_) | Self::Usage(_) | Self::Container(ContainerIdError::Ambiguous { .. }) => {
                Exit::Usage
            }
            Self::AgentRuns(_) | Self::Attached(_) | Self::Owned(OwnedError::Taken { .. }) => Exit::InUse,
            Self::Failed(_)
            | Self::Import(_)
            | Self::NoEquivalent(_)
            | Self::Journal(_)
            | Self::Pins(_)
            | Self::Owned(_)
            | Self::Pending(_)
            | Self::File { .. }
            | Self::OtherAnswer { .. }
            | Self::Encode(_)
            | Self::Yaml(_)
            | Self::Invalid(_)
            | Self::Validate(_)
            | Self::Unwell(_)
            | Self::Netns(_)
            | Self::Archive { .. }
            | Self::Write(_)
            | Self::NotReady(_)
            | Self::Node(_) => Exit::Failed,
        }
    }
}
