//! Why the agent does not run.

use super::background::EndedEarly;
use super::log::LogError;
use super::owned::OwnedError;
use crate::agent::node::kernel_settings::Unwritable;
use crate::agent::node::plugin_root::UnfitRoot;
use crate::agent::node::privileges::Unprivileged;
use crate::attach::AttachError;
use crate::bpf::BpfError;
use crate::enforce::error::EnforceError;
use crate::hooks::NoHook;
use crate::ipam::dhcp;
use crate::journal::JournalError;
use crate::kube::ClusterError;
use crate::netlink;
use crate::netns::NetnsError;
use crate::rpc::pending::PendingError;
use crate::rpc::server::ListenError;
use crate::settings::SettingsError;
use crate::source::files::FilesError;

/// Reasons why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// `NETATTACH_LOG` is invalid.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The process lacks privileges that the agent needs.
    #[error(transparent)]
    Unprivileged(#[from] Unprivileged),
    /// Kernel settings cannot be written.
    #[error(transparent)]
    Unwritable(#[from] Unwritable),
    /// Plugins cannot be started in the root directory that was set.
    #[error(transparent)]
    PluginRoot(#[from] UnfitRoot),
    /// The kernel's notifications about the node's links cannot be subscribed to.
    #[error("follow the node's links")]
    Links(#[source] netlink::Error),
    /// Another agent serves, and has not ended while this one stood by.
    #[error("stood by for {seconds} s, but the other agent goes on; is netattach set up twice on this node?")]
    StoodBy {
        /// How long this agent stood by, in seconds.
        seconds: u64,
        /// The lock that the other agent holds.
        #[source]
        source: ListenError,
    },
    /// Another agent holds the state directory or the pins.
    #[error(transparent)]
    Owned(#[from] OwnedError),
    /// The leases of `dhcp` cannot be read.
    #[error(transparent)]
    Leases(#[from] dhcp::Error),
    /// The dataplane could not be set up.
    #[error("set up the dataplane")]
    Dataplane(#[from] BpfError),
    /// The dataplane could not be set up, because the kernel lacks features that the programs
    /// need.
    #[error(
        "kernel {release} lacks {}, without which no program can be loaded: use a newer one (docs/supported.md has those that \
         are tested)",
        .lacks.join(", ")
    )]
    Kernel {
        /// The kernel's release.
        release: String,
        /// The missing features.
        lacks: Vec<&'static str>,
        /// The error that they caused.
        #[source]
        source: Box<BpfError>,
    },
    /// The kernel cannot attach programs in the way the settings require.
    #[error(transparent)]
    NoHook(#[from] NoHook),
    /// The check whether the kernel has clsact failed.
    #[error("check whether the kernel has clsact")]
    Clsact(#[source] netlink::Error),
    /// Policies could not be put into force.
    #[error("policies")]
    Enforce(#[from] EnforceError),
    /// The manifests cannot be read.
    #[error("source of manifests")]
    Source(#[from] FilesError),
    /// The cluster cannot be the source.
    #[error("the Kubernetes API as the source")]
    Cluster(#[from] ClusterError),
    /// The journal cannot be used.
    #[error("journal")]
    Journal(#[from] JournalError),
    /// The journal and the machine could not be reconciled.
    #[error("recover attachments")]
    Recover(#[from] AttachError),
    /// The node's namespace cannot be identified.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The requests that were queued while no agent ran cannot be read.
    #[error("pending requests")]
    Pending(#[from] PendingError),
    /// The socket cannot be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Notifications about links cannot be received.
    #[error("watch for link changes")]
    Watch(#[from] netlink::Error),
    /// A background task ended early.
    #[error(transparent)]
    EndedEarly(#[from] EndedEarly),
    /// The tokio runtime or the signal handlers could not be set up.
    #[error("start")]
    Start(#[from] std::io::Error),
}
