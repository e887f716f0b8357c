//! Errors between a request and its result, and the CNI code of each. The errors of a subject, such as [`DeviceError`],
//! are declared beside it.

use std::fmt;
use std::path::PathBuf;

use super::InheritanceError;
use super::addresses::holder::AddressError;
use super::apply::host_access::HostAccessError;
use super::apply::routing::RoutingError;
use super::apply::routing::vrf::VrfError;
use super::apply::tuning::TuningError;
use super::apply::{BridgeError, DataplaneError, LinkError, PluginError};
use super::device::{DeviceError, SriovCniError, VfError};
use crate::cni::{CniError, Command, code};
use crate::delegate::{CacheError, DelegateError};
use crate::durable;
use crate::enforce::admission::Unenforceable;
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::firewall::FirewallError;
use crate::ipam::{self, Failure};
use crate::journal::{JournalError, JournalKey};
use crate::nat::NatError;
use crate::netlink;
use crate::netns::NetnsError;
use crate::plan::AttachmentPlan;
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
        /// The path as given.
        path: PathBuf,
    },
    /// The journal failed.
    #[error("journal")]
    Journal(#[from] JournalError),
    /// The sandbox is already attached.
    #[error("container {} is attached with interface {} already; another ADD needs a DEL first", .0.container_id, .0.ifname)]
    AlreadyAttached(JournalKey),
    /// The sandbox is already attached, and the new ADD asks for a different attachment.
    #[error(
        "container {} is attached with interface {} already, but not as this ADD requests: {what}; DEL it first",
        key.container_id, key.ifname
    )]
    AttachedOtherwise {
        /// The attached sandbox.
        key: JournalKey,
        /// The difference.
        what: String,
    },
    /// The sandbox is already attached, and has changed since its ADD.
    #[error(
        "container {} is attached with interface {} already, but not as its ADD left it; DEL it first",
        key.container_id, key.ifname
    )]
    AttachedAndChanged {
        /// The attached sandbox.
        key: JournalKey,
        /// The difference that CHECK found.
        #[source]
        source: Box<AttachError>,
    },
    /// The sandbox is not attached.
    #[error("container {} is not attached with interface {}", .0.container_id, .0.ifname)]
    NotAttached(JournalKey),
    /// The interface name requested for another attachment of a live sandbox is taken.
    #[error("container {container} has an interface named {ifname} already")]
    NameTaken {
        /// `CNI_CONTAINERID`.
        container: String,
        /// The name.
        ifname: String,
    },
    /// The interface to detach came with its sandbox, so only the sandbox's DEL removes it.
    #[error("{ifname} of container {container} was attached by the container's ADD: only DEL detaches it")]
    NotDynamic {
        /// `CNI_CONTAINERID`.
        container: String,
        /// The name.
        ifname: String,
    },
    /// The plan could not be made.
    #[error(transparent)]
    Plan(#[from] CniError),
    /// The state files of another meta plugin cannot be used.
    #[error(transparent)]
    Inheritance(#[from] InheritanceError),
    /// A netlink socket cannot be opened.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// A step failed.
    #[error("{doing} {ifname} ({network}){}", after_colon(.step))]
    Step {
        /// The operation that the step was part of.
        doing: Doing,
        /// Name of the interface in the pod.
        ifname: String,
        /// Name of its network.
        network: String,
        /// The step, as text; empty if the cause suffices.
        step: String,
        /// The cause.
        #[source]
        source: Box<StepError>,
    },
    /// A pool or another plugin failed at a verb that concerns a network, not an attachment.
    #[error("{command} of network {network}")]
    Network {
        /// The verb.
        command: Command,
        /// Name of the network.
        network: String,
        /// The cause.
        #[source]
        source: Box<StepError>,
    },
    /// Earlier plugins used all the time that one GC has.
    #[error("GC of network {0} was not called because no time was left; the next GC calls it")]
    OutOfTime(String),
    /// Too many operations wait for the same resource: this one has had no effect and is retried.
    #[error(transparent)]
    Crowded(#[from] Crowded),
    /// Inverses failed. The record is kept, and DEL may be repeated.
    #[error("{}", join(.0))]
    Undo(Vec<AttachError>),
    /// A record still marks its sandbox as attached, because it can be neither changed nor removed.
    #[error(
        "everything is rolled back but its addresses, which stay taken: the record {path} can be neither changed nor \
         removed, and says that they are in use; repeat DEL when it can{}",
        released(.plugins)
    )]
    AddressesStay {
        /// The record's file.
        path: PathBuf,
        /// Plugins that have undone their changes, including addresses that they had leased themselves.
        plugins: Vec<String>,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// Links of a sandbox could not be deleted.
    #[error("detach container {container} ({ifname}): delete links")]
    DeleteLinks {
        /// The container.
        container: String,
        /// Name of the sandbox's interface.
        ifname: String,
        /// The cause.
        #[source]
        source: Box<StepError>,
    },
    /// Leases of a container whose record is torn could not be released.
    #[error("release leases of a torn record")]
    TornLease(#[source] ipam::Error),
    /// A lease that another program has removed could not be restored.
    #[error("take a lease again")]
    DriftedLease(#[source] ipam::Error),
    /// A record that another program has removed cannot be rewritten.
    #[error(
        "the record of container {container} was removed, and with it the configuration of plugin {plugin}: DEL does not call that plugin"
    )]
    RecordLost {
        /// The container.
        container: String,
        /// The plugin.
        plugin: String,
    },
    /// A bridge is gone, and it is not known what else it was made of.
    #[error("bridge {bridge} is gone; netattach did not create it, and does not recreate it")]
    BridgeGone {
        /// Its name.
        bridge: String,
    },
    /// The node's part of attachments cannot be restored.
    #[error("{what}")]
    PutBack {
        /// The action.
        what: String,
        /// The cause.
        #[source]
        source: Box<StepError>,
    },
    /// The kernel state differs from the record.
    #[error("{ifname} ({network}): {what}")]
    Differs {
        /// Name of the interface in the pod.
        ifname: String,
        /// Name of its network.
        network: String,
        /// The difference.
        what: String,
    },
}

/// Why a step or its inverse failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The kernel refused a link, an address, a route or a filter.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// A policy selects an attachment on which it cannot be enforced as required.
    #[error(transparent)]
    Unenforceable(#[from] Unenforceable),
    /// The namespace cannot be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// A netlink socket cannot be opened.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// A link of a pod cannot be created as requested.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// An address is in use elsewhere.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A bridge does not fit the request.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// The node and the pod cannot reach each other.
    #[error(transparent)]
    HostAccess(#[from] HostAccessError),
    /// A device of the node cannot be taken, set up or given back.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// sriov-cni holds the VF or its lock, or its files cannot be used.
    #[error(transparent)]
    SriovCni(#[from] SriovCniError),
    /// A VF cannot be set up through its physical function, or is not known there.
    #[error(transparent)]
    Vf(#[from] VfError),
    /// No address could be leased.
    #[error(transparent)]
    Lease(#[from] ipam::Error),
    /// Another plugin failed.
    #[error(transparent)]
    Delegate(#[from] DelegateError),
    /// The call of a plugin has no usable result.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// The attachment could not be written to libcni's result cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A kernel setting could not be changed.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// A change of an interface's settings is not allowed.
    #[error(transparent)]
    Tuning(#[from] TuningError),
    /// The routing of a pod cannot be configured.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// An interface cannot be a port of the VRF.
    #[error(transparent)]
    Vrf(#[from] VrfError),
    /// A device information file could not be written or removed.
    #[error("device information {path}{}", durable::remedy(source))]
    DeviceInfo {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The dataplane failed.
    #[error(transparent)]
    Enforce(#[from] EnforceError),
    /// A rate limit or the dataplane was requested where no program sees the traffic.
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// The node does not translate addresses as requested.
    #[error(transparent)]
    Nat(#[from] NatError),
    /// The node does not forward as requested.
    #[error(transparent)]
    Firewall(#[from] FirewallError),
    /// A step that this one depends on has no output: the plan is wrong.
    #[error("the plan lacks {0} before this step")]
    Missing(&'static str),
    /// Addresses could not be announced to neighbours.
    #[error("send announcements")]
    Announce(#[source] std::io::Error),
    /// The journal failed.
    #[error("journal")]
    Journal(#[from] JournalError),
}

/// The operation on an attachment during which something failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// ADD.
    Attach,
    /// CHECK.
    Check,
    /// DEL, or the rollback of an ADD.
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
    /// A step of an attachment, or its inverse, failed. Another plugin's error already names plugin and verb.
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
    /// Assigns the CNI code; no other place does. Another plugin's error keeps that plugin's code and details.
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
    /// The other plugin's error that caused this one.
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
            Self::AddressesStay { .. } => code::IO_FAILURE,
            Self::OutOfTime(_) | Self::Crowded(_) => code::TRY_AGAIN_LATER,
            Self::AlreadyAttached(_)
            | Self::AttachedOtherwise { .. }
            | Self::AttachedAndChanged { .. }
            | Self::NameTaken { .. }
            | Self::NotDynamic { .. } => code::INVALID_ENVIRONMENT,
            Self::NotAttached(_) => code::UNKNOWN_CONTAINER,
            Self::Plan(error) => error.code,
            Self::Inheritance(InheritanceError::Scratch { .. } | InheritanceError::LibcniConfig { .. }) => {
                code::DECODING_FAILURE
            }
            Self::Inheritance(_) => code::IO_FAILURE,
            Self::Step { source, .. } | Self::Network { source, .. } | Self::DeleteLinks { source, .. } => {
                step_code(source)
            }
            Self::Undo(errors) => errors.first().map_or(code::INTERNAL, Self::code),
            Self::Open(_)
            | Self::TornLease(_)
            | Self::DriftedLease(_)
            | Self::RecordLost { .. }
            | Self::BridgeGone { .. }
            | Self::PutBack { .. }
            | Self::Differs { .. } => code::INTERNAL,
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

pub(super) fn step_code(error: &StepError) -> u32 {
    match error {
        StepError::Link(error) => error.code(),
        StepError::Address(error) => error.code(),
        StepError::Bridge(error) => error.code(),
        StepError::HostAccess(error) => error.code(),
        StepError::Device(error) => error.code(),
        StepError::SriovCni(error) => error.code(),
        StepError::Vf(error) => error.code(),
        StepError::Plugin(error) => error.code(),
        StepError::Tuning(error) => error.code(),
        StepError::Routing(error) => error.code(),
        StepError::Vrf(error) => error.code(),
        StepError::Dataplane(error) => error.code(),
        StepError::Delegate(error) => error.code(),
        StepError::Netlink(error) => netlink_code(error),
        StepError::Lease(error) => lease_code(error),
        StepError::Nat(error) => nat_code(error),
        StepError::Firewall(error) => firewall_code(error),
        StepError::Journal(error) => journal_code(error),
        // Its holder may be about to end.
        StepError::Enforce(EnforceError::AddressGuarded { .. }) => code::TRY_AGAIN_LATER,
        StepError::Netns(_) => code::INVALID_NETNS,
        StepError::Unenforceable(_) => code::INVALID_CONFIG,
        StepError::Cache(_) | StepError::DeviceInfo { .. } | StepError::Announce(_) => code::IO_FAILURE,
        StepError::Open(_) | StepError::Sysctl(_) | StepError::Enforce(_) | StepError::Missing(_) => {
            code::INTERNAL
        }
    }
}

fn nat_code(error: &NatError) -> u32 {
    match error {
        // Its holder may be about to end.
        NatError::PortTaken(_) | NatError::ManyPorts(_) | NatError::Busy => code::TRY_AGAIN_LATER,
        NatError::NoAddress(_)
        | NatError::Ambiguous(_)
        | NatError::AddressTaken { .. }
        | NatError::PortReserved { .. }
        | NatError::ManyPortsOfPod(_) => code::INVALID_CONFIG,
        NatError::Table(_)
        | NatError::Shared(_)
        | NatError::Foreign { .. }
        | NatError::FoughtOver(_)
        | NatError::Sysctl(_) => code::INTERNAL,
    }
}

fn firewall_code(error: &FirewallError) -> u32 {
    match error {
        FirewallError::Busy => code::TRY_AGAIN_LATER,
        FirewallError::Firewalld
        | FirewallError::NoBridge(_)
        | FirewallError::GatewayBehindPort(_)
        | FirewallError::NoAddress(_)
        | FirewallError::Many(_) => code::INVALID_CONFIG,
        FirewallError::NoSenders(_) => code::NOT_AVAILABLE,
        FirewallError::Tables(_) | FirewallError::Senders(_) | FirewallError::FoughtOver(_) => code::INTERNAL,
    }
}

fn netlink_code(error: &netlink::Error) -> u32 {
    match error {
        netlink::Error::Tentative(_) => code::TRY_AGAIN_LATER,
        netlink::Error::NoSuchLink(_)
        | netlink::Error::WrongKind { .. }
        | netlink::Error::FilteredBefore { .. }
        | netlink::Error::NoDefaultRoute => code::INVALID_CONFIG,
        netlink::Error::NoTun(_) => code::NOT_AVAILABLE,
        other => errno_code(other),
    }
}

/// The CNI code for the kernel's refusal of a link, an address or a route.
fn errno_code(error: &netlink::Error) -> u32 {
    use rustix::io::Errno;
    match error.errno() {
        // The address is in use elsewhere, or a limit is reached for now.
        Some(Errno::ADDRINUSE | Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN | Errno::XFULL) => {
            code::TRY_AGAIN_LATER
        }
        // No route leads to the gateway, or the gateway is not valid.
        Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL | Errno::RANGE) => code::INVALID_CONFIG,
        _ => code::INTERNAL,
    }
}

fn journal_code(error: &JournalError) -> u32 {
    match error {
        JournalError::KeyTooLong(_) => code::INVALID_ENVIRONMENT,
        JournalError::Key(error) => error.code,
        JournalError::Version { .. } => code::INTERNAL,
        JournalError::ManyPools(_) => code::TRY_AGAIN_LATER,
        _ => code::IO_FAILURE,
    }
}

fn after_colon(step: &str) -> String {
    if step.is_empty() { String::new() } else { format!(": {step}") }
}

/// Describes the parts of a sandbox that may belong to others, although its record marks it as attached.
fn released(plugins: &[String]) -> String {
    match plugins {
        [] => String::new(),
        plugins => {
            let plugins = plugins.join(", ");
            format!(
                ", and before an agent starts: an address that {plugins} had given out may belong to another pod"
            )
        }
    }
}

fn join(errors: &[AttachError]) -> String {
    errors.iter().map(|error| Chain(error).to_string()).collect::<Vec<_>>().join("; ")
}
