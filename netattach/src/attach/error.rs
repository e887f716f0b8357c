//! What can go wrong between a request and its result, and which CNI code each of it is.

use std::fmt;
use std::path::PathBuf;

use super::{Address, Holder, InheritanceError};
use crate::cni::{CniError, Command, code};
use crate::delegate::{CacheError, DelegateError};
use crate::enforce::admission::Unenforceable;
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::ipam::{self, Failure};
use crate::journal::{JournalError, JournalKey};
use crate::netlink;
use crate::netns::NetnsError;
use crate::plan::AttachmentPlan;
use crate::plan::routing::NotOnLink;
use crate::sysctl::SysctlError;
use crate::waits::Crowded;

/// Why an operation on a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The sandbox's namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// `CNI_NETNS` is the node's own namespace.
    #[error("CNI_NETNS {path} is the node's own network namespace, not a container's")]
    HostNetns {
        /// As given.
        path: PathBuf,
    },
    /// The journal failed.
    #[error("journal")]
    Journal(#[from] JournalError),
    /// The sandbox is attached already.
    #[error("container {} is attached with interface {} already; DEL comes before another ADD", .0.container_id, .0.ifname)]
    AlreadyAttached(JournalKey),
    /// The sandbox is attached already, and is asked to be attached in another way.
    #[error(
        "container {} is attached with interface {} already, otherwise than this ADD asks: {what}; DEL comes first",
        key.container_id, key.ifname
    )]
    AttachedOtherwise {
        /// Which.
        key: JournalKey,
        /// What is different.
        what: String,
    },
    /// The sandbox is attached already, and is not what it was after its ADD.
    #[error(
        "container {} is attached with interface {} already, and not as its ADD left it; DEL comes first",
        key.container_id, key.ifname
    )]
    AttachedAndChanged {
        /// Which.
        key: JournalKey,
        /// What CHECK says.
        #[source]
        source: Box<AttachError>,
    },
    /// The sandbox is not attached.
    #[error("container {} is not attached with interface {}", .0.container_id, .0.ifname)]
    NotAttached(JournalKey),
    /// The name that is asked for one more interface of a live sandbox is taken.
    #[error("container {container} has an interface named {ifname} already")]
    NameTaken {
        /// `CNI_CONTAINERID`.
        container: String,
        /// The name.
        ifname: String,
    },
    /// What is to be detached by itself came with its sandbox, and goes with it.
    #[error(
        "{ifname} of container {container} was not attached while the container was live: its DEL detaches it"
    )]
    NotDynamic {
        /// `CNI_CONTAINERID`.
        container: String,
        /// The name.
        ifname: String,
    },
    /// The plan could not be made.
    #[error(transparent)]
    Plan(#[from] CniError),
    /// What another meta plugin left cannot be used.
    #[error(transparent)]
    Inheritance(#[from] InheritanceError),
    /// No netlink socket.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// A step failed.
    #[error("{doing} {ifname} ({network}){}", after_colon(.step))]
    Step {
        /// What it was part of.
        doing: Doing,
        /// Name of the interface in the pod.
        ifname: String,
        /// Name of its network.
        network: String,
        /// The step, in words; empty where the cause says it all.
        step: String,
        /// Why.
        #[source]
        source: Box<StepError>,
    },
    /// A pool or another plugin failed at a verb that is about a network, not an attachment.
    #[error("{command} of network {network}")]
    Network {
        /// The verb.
        command: Command,
        /// Name of the network.
        network: String,
        /// Why.
        #[source]
        source: Box<StepError>,
    },
    /// Plugins before this one took all the time that one GC has.
    #[error("GC of network {0}: not asked, as no time was left; the next GC asks again")]
    OutOfTime(String),
    /// Too many wait for what it needs: it has had no effect and is begun anew.
    #[error(transparent)]
    Crowded(#[from] Crowded),
    /// Inverses failed: the record is kept, and DEL may be repeated.
    #[error("{}", join(.0))]
    Undo(Vec<AttachError>),
    /// Leases of a container whose record is torn could not be released.
    #[error("release what a torn record may have leased")]
    TornLease(#[source] ipam::Error),
    /// The kernel is not as the record has it.
    #[error("{ifname} ({network}): {what}")]
    Differs {
        /// Name of the interface in the pod.
        ifname: String,
        /// Name of its network.
        network: String,
        /// What is different.
        what: String,
    },
}

/// Why one step, or its inverse, failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The kernel refused a link, an address, a route or a filter.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// A policy selects what cannot be enforced as it has to be.
    #[error(transparent)]
    Unenforceable(#[from] Unenforceable),
    /// The namespace cannot be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// The interface is there already.
    #[error("the pod has an interface named {0} already")]
    NameTaken(String),
    /// A link's MTU is larger than its parent's.
    #[error("mtu {mtu} is larger than {max}, the MTU of the parent")]
    Mtu {
        /// Asked for, in bytes.
        mtu: u32,
        /// The parent's, in bytes.
        max: u32,
    },
    /// The parent carries links that another one cannot be beside.
    #[error("the parent {parent} carries {present}, and {wanted} cannot be on it beside them")]
    ParentShared {
        /// Name of the parent.
        parent: String,
        /// What it carries.
        present: &'static str,
        /// What was to come.
        wanted: &'static str,
    },
    /// Something else has the parent.
    #[error("the parent cannot carry {wanted}: a bridge, a bond or links of another kind have it already")]
    ParentBusy {
        /// What was to come.
        wanted: &'static str,
        /// What the kernel said.
        #[source]
        source: netlink::Error,
    },
    /// The kernel has no driver for links of that kind.
    #[error("the kernel of this node has no driver for links of kind {kind}")]
    NoDriver {
        /// Which kind.
        kind: &'static str,
        /// What the kernel said.
        #[source]
        source: netlink::Error,
    },
    /// The address that was asked for is somebody else's.
    #[error("{address} is taken: {holder}")]
    AddressTaken {
        /// Which.
        address: Address,
        /// Whose.
        holder: Holder,
    },
    /// A link without IPv6 is to have addresses of it.
    #[error("mtu {0} is below 1280, and IPv6 needs as much")]
    SmallMtu(u32),
    /// Another gateway address is on the bridge.
    #[error(
        "bridge {bridge} has the address {present} and {wanted} is needed; forceAddress would replace it"
    )]
    GatewayConflict {
        /// The bridge.
        bridge: String,
        /// On the bridge.
        present: ipnet::IpNet,
        /// Needed.
        wanted: ipnet::IpNet,
    },
    /// No address.
    #[error(transparent)]
    Lease(#[from] ipam::Error),
    /// Another plugin failed.
    #[error(transparent)]
    Delegate(#[from] DelegateError),
    /// A plugin that netattach carries itself failed, called as others are.
    #[error("plugin {plugin}")]
    InProcess {
        /// Its type.
        plugin: String,
        /// Why.
        #[source]
        source: CniError,
    },
    /// Another plugin printed something that is not a result.
    #[error("the result of plugin {plugin} cannot be read")]
    Result {
        /// Its type.
        plugin: String,
        /// Why.
        #[source]
        source: CniError,
    },
    /// The attachment could not be told to those who read libcni's cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Address management gave no address.
    #[error("IPAM plugin {0} returned missing IP config")]
    NoAddress(String),
    /// A kernel setting could not be changed.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// A gateway that the attachment's link does not lead to.
    #[error("default-route: gateway {gateway} is not reachable on the attachment's link")]
    Gateway {
        /// Which.
        gateway: std::net::IpAddr,
        /// What the kernel said.
        #[source]
        source: netlink::Error,
    },
    /// A gateway that a routed link does not have.
    #[error("default-route")]
    NotOnLink(#[from] NotOnLink),
    /// The kernel shows other default routes than those that were asked for.
    #[error(
        "default-route: the kernel shows another default route of the pod{}",
        .0.map(|gateway| format!(", through {gateway}")).unwrap_or_default()
    )]
    DefaultRoute(Option<std::net::IpAddr>),
    /// A file of device information could not be written or removed.
    #[error("device information {path}")]
    DeviceInfo {
        /// Its path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The dataplane failed.
    #[error(transparent)]
    Enforce(#[from] EnforceError),
    /// A step that this one builds on has no output: the plan is wrong.
    #[error("the plan lacks {0} before this step")]
    Missing(&'static str),
    /// The journal failed.
    #[error("journal")]
    Journal(#[from] JournalError),
}

/// What an attachment was undergoing when something failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// ADD.
    Attach,
    /// CHECK.
    Check,
    /// DEL, or taking an ADD back.
    Detach,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attach => "attach",
            Self::Check => "check",
            Self::Detach => "detach",
        })
    }
}

impl AttachError {
    /// A step of an attachment, or its inverse, failed. Another plugin's error names plugin and verb itself.
    pub(super) fn step(
        doing: Doing,
        attachment: &AttachmentPlan,
        step: impl Into<String>,
        source: impl Into<StepError>,
    ) -> Self {
        let source = source.into();
        Self::Step {
            doing,
            ifname: attachment.ifname.clone(),
            network: attachment.network.to_string(),
            step: if matches!(source, StepError::Delegate(_)) { String::new() } else { step.into() },
            source: Box::new(source),
        }
    }
}

impl From<AttachError> for CniError {
    fn from(error: AttachError) -> Self {
        Self::from(&error)
    }
}

impl From<&AttachError> for CniError {
    /// The only place where a failure gets its CNI code. Another plugin's keeps the plugin's code and details.
    fn from(error: &AttachError) -> Self {
        if let AttachError::Undo(errors) = error {
            return Self::joined(errors.iter().map(Self::from));
        }
        match error.delegate() {
            Some(delegate) => {
                let told = Self::from(delegate);
                Self { msg: format!("{error}: {}", told.msg), ..told }
            }
            None => Self::new(error.code(), Chain(error).to_string()),
        }
    }
}

impl AttachError {
    /// The other plugin's error that this is about.
    fn delegate(&self) -> Option<&DelegateError> {
        match self {
            Self::Step { source, .. } | Self::Network { source, .. } => match &**source {
                StepError::Delegate(error) => Some(error),
                _ => None,
            },
            _ => None,
        }
    }

    fn code(&self) -> u32 {
        match self {
            Self::Netns(_) | Self::HostNetns { .. } => code::INVALID_NETNS,
            Self::Journal(error) => journal_code(error),
            Self::OutOfTime(_) | Self::Crowded(_) => code::TRY_AGAIN_LATER,
            Self::AlreadyAttached(_)
            | Self::AttachedOtherwise { .. }
            | Self::AttachedAndChanged { .. }
            | Self::NameTaken { .. }
            | Self::NotDynamic { .. } => code::INVALID_ENVIRONMENT,
            Self::NotAttached(_) => code::UNKNOWN_CONTAINER,
            Self::Plan(error) => error.code,
            Self::Inheritance(InheritanceError::Scratch { .. }) => code::DECODING_FAILURE,
            Self::Inheritance(_) => code::IO_FAILURE,
            Self::Step { source, .. } | Self::Network { source, .. } => step_code(source),
            Self::Undo(errors) => errors.first().map_or(code::INTERNAL, Self::code),
            Self::Open(_) | Self::TornLease(_) | Self::Differs { .. } => code::INTERNAL,
        }
    }
}

fn lease_code(error: &ipam::Error) -> u32 {
    match error.failure() {
        Failure::TryLater => code::TRY_AGAIN_LATER,
        Failure::WrongRequest => code::INVALID_CONFIG,
        Failure::Io => code::IO_FAILURE,
        Failure::Other => code::INTERNAL,
    }
}

fn step_code(error: &StepError) -> u32 {
    match error {
        StepError::NameTaken(_) => code::INVALID_ENVIRONMENT,
        StepError::Netns(_) => code::INVALID_NETNS,
        StepError::AddressTaken { holder, .. } if holder.may_pass() => code::TRY_AGAIN_LATER,
        StepError::Mtu { .. }
        | StepError::AddressTaken { .. }
        | StepError::SmallMtu(_)
        | StepError::ParentShared { .. }
        | StepError::ParentBusy { .. }
        | StepError::Unenforceable(_)
        | StepError::GatewayConflict { .. }
        | StepError::Gateway { .. }
        | StepError::NotOnLink(_)
        | StepError::Netlink(
            netlink::Error::NoSuchLink(_) | netlink::Error::WrongKind { .. } | netlink::Error::NoDefaultRoute,
        ) => code::INVALID_CONFIG,
        StepError::Lease(error) => lease_code(error),
        StepError::NoDriver { .. } => code::NOT_AVAILABLE,
        StepError::Netlink(error) if error.errno().is_some() => errno_code(error),
        StepError::Delegate(error) => error.code(),
        StepError::Result { .. } => code::DECODING_FAILURE,
        StepError::InProcess { source, .. } => source.code,
        StepError::Journal(error) => journal_code(error),
        StepError::Cache(_) | StepError::DeviceInfo { .. } => code::IO_FAILURE,
        StepError::Netlink(_)
        | StepError::Open(_)
        | StepError::NoAddress(_)
        | StepError::Sysctl(_)
        | StepError::Enforce(_)
        | StepError::DefaultRoute(_)
        | StepError::Missing(_) => code::INTERNAL,
    }
}

/// What the kernel's refusal of a link, an address or a route says about the request.
fn errno_code(error: &netlink::Error) -> u32 {
    use rustix::io::Errno;
    match error.errno() {
        // Another has the address, or a limit is reached for now.
        Some(Errno::ADDRINUSE | Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN | Errno::XFULL) => {
            code::TRY_AGAIN_LATER
        }
        // A gateway that no route leads to, or something that is none.
        Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL | Errno::RANGE) => code::INVALID_CONFIG,
        _ => code::INTERNAL,
    }
}

fn journal_code(error: &JournalError) -> u32 {
    match error {
        JournalError::KeyTooLong(_) => code::INVALID_ENVIRONMENT,
        JournalError::Key(error) => error.code,
        JournalError::Version { .. } => code::INTERNAL,
        _ => code::IO_FAILURE,
    }
}

fn after_colon(step: &str) -> String {
    if step.is_empty() { String::new() } else { format!(": {step}") }
}

fn join(errors: &[AttachError]) -> String {
    errors.iter().map(|error| Chain(error).to_string()).collect::<Vec<_>>().join("; ")
}
