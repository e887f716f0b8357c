//! Errors between a request and its result, and the CNI code of each.

use std::fmt;
use std::path::PathBuf;

use super::apply::tuning::TuningError;
use super::device::left_programs::LeftError;
use super::{Address, Holder, InheritanceError};
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
use crate::plan::routing::NotOnLink;
use crate::step::NotObservable;
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
    /// The pod already has an interface of that name.
    #[error("the pod has an interface named {0} already")]
    NameTaken(String),
    /// A link's MTU is larger than its parent's.
    #[error("mtu {mtu} is larger than {max}, the MTU of the parent")]
    Mtu {
        /// The requested MTU, in bytes.
        mtu: u32,
        /// The parent's MTU, in bytes.
        max: u32,
    },
    /// The parent carries links of a kind that excludes the new link.
    #[error("the parent {parent} carries {present}, and {wanted} cannot share it with them")]
    ParentShared {
        /// Name of the parent.
        parent: String,
        /// The links that it carries.
        present: &'static str,
        /// The link that was requested.
        wanted: &'static str,
        /// The container of one of the links that it carries.
        container: String,
    },
    /// The parent is in use by another device.
    #[error("the parent cannot carry {wanted}: a bridge, a bond or links of another kind use it already")]
    ParentBusy {
        /// The link that was requested.
        wanted: &'static str,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// The kernel has no driver for links of this kind.
    #[error("the kernel of this node has no driver for links of kind {kind}")]
    NoDriver {
        /// The kind.
        kind: &'static str,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// The requested address is in use elsewhere.
    #[error("{address} is taken: {holder}")]
    AddressTaken {
        /// The address.
        address: Address,
        /// Its holder.
        holder: Holder,
    },
    /// The parent already has a link of that VLAN, and the kernel allows only one.
    #[error(
        "{parent} has an interface of VLAN {id} already; macvlans or a bridge on that one serve several pods"
    )]
    VlanTaken {
        /// Name of the parent.
        parent: String,
        /// The VLAN.
        id: u16,
    },
    /// Another host on the link has the address.
    #[error("address {0} is taken: another host on the link has answered for it")]
    Duplicate(std::net::IpAddr),
    /// The bridge does not filter by VLAN, and netattach did not create it.
    #[error(
        "bridge {0} does not filter by VLAN and was not made by netattach: switch it on (vlan_filtering 1), or remove the bridge"
    )]
    NotFiltering(String),
    /// The node has no address in a subnet of the pod.
    #[error("key hostAccess: {0} has no address of the node in a subnet of the pod")]
    NoHostAddress(String),
    /// The node has no address on the parent at all; one may follow, for example by DHCP when a node starts.
    #[error("key hostAccess: {0} has no address of the node yet")]
    NoAddressYet(String),
    /// The node would drop packets that the pod sends to it: it receives them on the parent, and answers through
    /// another link.
    #[error(
        "key hostAccess: the node drops what pods on ipvlans send to it (rp_filter is 1); set net.ipv4.conf.{0}.rp_filter to 2"
    )]
    StrictReversePath(String),
    /// IPv6 addresses were requested for a link whose MTU, in bytes, is too small for IPv6.
    #[error("mtu {0} is below 1280, which IPv6 needs")]
    SmallMtu(u32),
    /// The bridge has another gateway address.
    #[error(
        "bridge {bridge} has the address {present} and {wanted} is needed; forceAddress would replace it"
    )]
    GatewayConflict {
        /// The bridge.
        bridge: String,
        /// The address on the bridge.
        present: ipnet::IpNet,
        /// The address that is needed.
        wanted: ipnet::IpNet,
    },
    /// The node has no such device with a network interface, or not yet.
    #[error(
        "the node has no network interface of device {0}: it is not there yet, has no driver, or is in another namespace"
    )]
    NoDevice(String),
    /// A device that is named by its bus address has several network interfaces.
    #[error("device {device} has several network interfaces ({interfaces}): name one by device or hwaddr")]
    SeveralInterfaces {
        /// The device.
        device: String,
        /// Some of them.
        interfaces: String,
    },
    /// The node itself needs the device.
    #[error("device {device} stays on the node: {why}")]
    DeviceInUse {
        /// Its name.
        device: String,
        /// The reason.
        why: &'static str,
    },
    /// Interfaces of pods are on the device.
    #[error("device {0} stays on the node: it carries interfaces of pods")]
    ParentOfPods(String),
    /// Another sandbox holds the device.
    #[error("device {device} is taken: {who} has it")]
    DeviceTaken {
        /// The device.
        device: String,
        /// Its holder, as text.
        who: String,
        /// The holder's container.
        container: String,
    },
    /// The thread that returns a device to the node has not finished in time.
    #[error(
        "device {0} is being returned to the node, which has not ended in time: its card or driver may hang (see the \
         kernel's log)"
    )]
    DeviceReturning(String),
    /// sriov-cni attaches or detaches a VF.
    #[error("device {0}: sriov-cni holds its lock")]
    SriovCniIsAtIt(String),
    /// sriov-cni has moved a VF to a pod's namespace.
    #[error("device {device} is taken: sriov-cni has given it to {netns}")]
    SriovCniHasIt {
        /// The device.
        device: String,
        /// The path of the pod's namespace.
        netns: String,
    },
    /// sriov-cni's files cannot be used.
    #[error("sriov-cni's file {path}{}", durable::remedy(source))]
    SriovCniFile {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The physical function of a VF has no interface on the node, or does not know the VF.
    #[error("the physical function {0} has no network interface on the node that knows the VF")]
    NoPhysicalFunction(String),
    /// A card was in another mode when the attachment was planned.
    #[error("card {0} is changing its mode (legacy, switchdev)")]
    OtherMode(String),
    /// The card of a VF is in mode switchdev, and has not created the VF's representor, or the representor is in
    /// another namespace.
    #[error(
        "the node has no representor of VF {} of {}, whose card is in mode switchdev", .0.number, .0.physical
    )]
    NoRepresentor(crate::spec::VirtualFunction),
    /// Several representors match a VF.
    #[error("VF {} of {} has several representors ({names})", .function.number, .function.physical)]
    SeveralRepresentors {
        /// The VF.
        function: crate::spec::VirtualFunction,
        /// Two of them.
        names: String,
    },
    /// A process would drive a VF with an Ethernet address that it chooses, which the programs of the representor
    /// would not know.
    #[error("key mac: needed, as the pod drives the VF itself, and its physical function has set no address")]
    NoAddressOfVf,
    /// The card refuses a setting of a VF.
    #[error("key {setting}: the card refuses it for VF {} of {}", .function.number, .function.physical)]
    VfSetting {
        /// The key.
        setting: &'static str,
        /// The VF.
        function: crate::spec::VirtualFunction,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// A device refuses the requested MTU.
    #[error("key mtu: device {device} does not take {mtu}")]
    DeviceMtu {
        /// The device.
        device: String,
        /// The requested MTU, in bytes.
        mtu: u32,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// The device's own Ethernet address could not be restored later.
    #[error(
        "key mac: device {0} has an address other than its permanent one, which only a record of netattachd can restore; without netattachd, chain tuning"
    )]
    OwnMacLost(String),
    /// The card has accepted a setting of a VF, but reports another value.
    #[error(
        "key {setting}: the card has accepted it for VF {} of {}, but shows another value: its driver ignores it",
        .function.number, .function.physical
    )]
    VfSettingIgnored {
        /// The key.
        setting: &'static str,
        /// The VF.
        function: crate::spec::VirtualFunction,
    },
    /// A device refuses the requested Ethernet address.
    #[error("device {device} does not take the address {mac}, which its physical function has set")]
    AddressNotTaken {
        /// The device.
        device: String,
        /// The address.
        mac: crate::mac::Mac,
    },
    /// Another link now has the name that the device had on the node.
    #[error("cannot return the device: the node already has an interface named {0}")]
    HomeTaken(String),
    /// A device is in no known namespace.
    #[error(
        "device {device} has the driver {driver}, and its network interface is neither in the pod nor on the node{}",
        where_else(.elsewhere)
    )]
    DeviceLost {
        /// The device.
        device: String,
        /// Its driver.
        driver: String,
        /// Whether the node's namespace is not the machine's initial one, to which the kernel moves a card when its
        /// namespace ends.
        elsewhere: bool,
    },
    /// The programs on a device of the node cannot be listed.
    #[error("the programs on device {device} are not known")]
    ProgramsUnknown {
        /// Its name on the node.
        device: String,
        /// The kernel's error.
        #[source]
        source: LeftError,
    },
    /// A program that a pod has left on a device cannot be detached: it would see the node's packets.
    #[error(
        "device {device} stays down: program {program} ({name}), which its pod has attached, cannot be taken off"
    )]
    ProgramLeft {
        /// The device's name on the node.
        device: String,
        /// Kernel's id of the program.
        program: u32,
        /// The program's name; empty if it has none, or is gone.
        name: String,
        /// The cause.
        #[source]
        source: LeftError,
    },
    /// No address could be leased.
    #[error(transparent)]
    Lease(#[from] ipam::Error),
    /// Another plugin failed.
    #[error(transparent)]
    Delegate(#[from] DelegateError),
    /// A plugin that netattach implements itself failed when called as other plugins are.
    #[error("plugin {plugin}")]
    InProcess {
        /// The plugin type.
        plugin: String,
        /// The cause.
        #[source]
        source: CniError,
    },
    /// Another plugin printed something that is not a result.
    #[error("the result of plugin {plugin} cannot be read")]
    Result {
        /// The plugin type.
        plugin: String,
        /// The cause.
        #[source]
        source: CniError,
    },
    /// The attachment could not be written to libcni's result cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An IPAM plugin returned no address.
    #[error("IPAM plugin {0} returned missing IP config")]
    NoAddress(String),
    /// A kernel setting could not be changed.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// A change of an interface's settings is not allowed.
    #[error(transparent)]
    Tuning(#[from] TuningError),
    /// Routing by source address was requested for an interface without addresses.
    #[error("sbr: no plugin before it gave {0} an address")]
    NoSource(String),
    /// An interface has more routes than are moved to other tables.
    #[error("{plugin}: {ifname} has {found} routes, and there may be {most}")]
    ManyRoutes {
        /// The plugin.
        plugin: &'static str,
        /// The interface.
        ifname: String,
        /// The number of its routes.
        found: usize,
        /// The maximum number.
        most: usize,
    },
    /// The interface for a VRF is already a port of another link.
    #[error("vrf: {ifname} is a port of {controller} already")]
    PortOfAnother {
        /// The interface.
        ifname: String,
        /// The link that it is a port of.
        controller: String,
    },
    /// The existing VRF has another table.
    #[error("key table: VRF {name} is there with table {present}, not {wanted}")]
    TableOfVrf {
        /// Name of the VRF.
        name: String,
        /// Its table.
        present: u32,
        /// The requested table.
        wanted: u32,
    },
    /// A route of an interface cannot be moved to another table.
    #[error("vrf: the route of {ifname} to {destination} has {what}, and would not be there afterwards")]
    RouteNotKept {
        /// The interface.
        ifname: String,
        /// The route's destination.
        destination: ipnet::IpNet,
        /// The attribute of the route that cannot be kept.
        what: &'static str,
    },
    /// The table for a VRF has another use.
    #[error("key table: {table} is {owner}")]
    TableTaken {
        /// The table.
        table: u32,
        /// Its use.
        owner: &'static str,
    },
    /// The attachment's link does not lead to the gateway.
    #[error("default-route: gateway {gateway} is not reachable on the attachment's link")]
    Gateway {
        /// The gateway.
        gateway: std::net::IpAddr,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// A routed link does not have the requested gateway.
    #[error("default-route")]
    NotOnLink(#[from] NotOnLink),
    /// The kernel shows default routes other than the requested ones.
    #[error(
        "default-route: the kernel shows another default route of the pod{}",
        .0.map(|gateway| format!(", through {gateway}")).unwrap_or_default()
    )]
    DefaultRoute(Option<std::net::IpAddr>),
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
    /// A chained plugin asks for a rate limit, but no program sees the traffic of the interface.
    #[error("bandwidth of {ifname} cannot be limited: {why}")]
    Unlimited {
        /// Name of the interface in the pod.
        ifname: String,
        /// The reason.
        why: NotObservable,
    },
    /// The network's list enables netattach's dataplane for the interface, but no program sees its traffic.
    #[error("netattach behind another plugin: {ifname} cannot have its dataplane: {why}")]
    NoDataplane {
        /// Name of the interface in the pod.
        ifname: String,
        /// The reason.
        why: NotObservable,
    },
    /// The node does not translate addresses as requested.
    #[error(transparent)]
    Nat(#[from] NatError),
    /// The node does not forward as requested.
    #[error(transparent)]
    Firewall(#[from] FirewallError),
    /// A step that this one depends on has no output: the plan is wrong.
    #[error("the plan lacks {0} before this step")]
    Missing(&'static str),
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

/// Returns a hint for a card that the kernel has moved to a namespace other than the node's.
fn where_else(elsewhere: &bool) -> &'static str {
    if *elsewhere {
        "; when the pod's namespace ended, the kernel has brought it to the machine's first one, which is not the node's: move it \
         here from there (ip link set NAME netns PID)"
    } else {
        ""
    }
}

pub(super) fn step_code(error: &StepError) -> u32 {
    match error {
        StepError::NameTaken(_) => code::INVALID_ENVIRONMENT,
        StepError::Netns(_) => code::INVALID_NETNS,
        StepError::AddressTaken { holder, .. } if holder.may_pass() => code::TRY_AGAIN_LATER,
        // The pod with the interface may be about to end.
        StepError::VlanTaken { .. } => code::TRY_AGAIN_LATER,
        // The node may be starting.
        StepError::NoAddressYet(_) => code::TRY_AGAIN_LATER,
        // The device may appear soon, or be returned to the node.
        StepError::NoDevice(_)
        | StepError::ParentOfPods(_)
        | StepError::DeviceTaken { .. }
        | StepError::DeviceReturning(_)
        | StepError::SriovCniIsAtIt(_)
        | StepError::SriovCniHasIt { .. }
        | StepError::NoPhysicalFunction(_)
        | StepError::OtherMode(_)
        | StepError::NoRepresentor(_)
        | StepError::HomeTaken(_)
        | StepError::DeviceLost { .. } => code::TRY_AGAIN_LATER,
        StepError::VfSetting { source, .. } if source.errno() == Some(rustix::io::Errno::AGAIN) => {
            code::TRY_AGAIN_LATER
        }
        StepError::VfSetting { .. } | StepError::DeviceMtu { .. } | StepError::OwnMacLost(_) => {
            code::INVALID_CONFIG
        }
        StepError::AddressNotTaken { .. }
        | StepError::VfSettingIgnored { .. }
        | StepError::SeveralRepresentors { .. } => code::INTERNAL,
        StepError::Duplicate(_) | StepError::Netlink(netlink::Error::Tentative(_)) => code::TRY_AGAIN_LATER,
        // Its holder may be about to end.
        StepError::Enforce(EnforceError::AddressGuarded { .. }) => code::TRY_AGAIN_LATER,
        // Its holder may be about to end.
        StepError::Nat(NatError::PortTaken(_) | NatError::ManyPorts(_) | NatError::Busy) => {
            code::TRY_AGAIN_LATER
        }
        StepError::Firewall(FirewallError::Busy) => code::TRY_AGAIN_LATER,
        StepError::Firewall(
            FirewallError::Firewalld
            | FirewallError::NoBridge(_)
            | FirewallError::GatewayBehindPort(_)
            | FirewallError::NoAddress(_)
            | FirewallError::Many(_),
        ) => code::INVALID_CONFIG,
        StepError::Nat(
            NatError::NoAddress(_)
            | NatError::Ambiguous(_)
            | NatError::AddressTaken { .. }
            | NatError::PortReserved { .. }
            | NatError::ManyPortsOfPod(_),
        ) => code::INVALID_CONFIG,
        StepError::Tuning(TuningError::List { .. }) => code::IO_FAILURE,
        StepError::Tuning(_)
        | StepError::Unlimited { .. }
        | StepError::NoDataplane { .. }
        | StepError::NoSource(_)
        | StepError::ManyRoutes { .. }
        | StepError::PortOfAnother { .. }
        | StepError::TableOfVrf { .. }
        | StepError::TableTaken { .. }
        | StepError::RouteNotKept { .. }
        | StepError::Mtu { .. }
        | StepError::DeviceInUse { .. }
        | StepError::SeveralInterfaces { .. }
        | StepError::NoAddressOfVf
        | StepError::AddressTaken { .. }
        | StepError::SmallMtu(_)
        | StepError::ParentShared { .. }
        | StepError::ParentBusy { .. }
        | StepError::Unenforceable(_)
        | StepError::GatewayConflict { .. }
        | StepError::NotFiltering(_)
        | StepError::NoHostAddress(_)
        | StepError::StrictReversePath(_)
        | StepError::Gateway { .. }
        | StepError::NotOnLink(_)
        | StepError::Netlink(
            netlink::Error::NoSuchLink(_)
            | netlink::Error::WrongKind { .. }
            | netlink::Error::FilteredBefore { .. }
            | netlink::Error::NoDefaultRoute,
        ) => code::INVALID_CONFIG,
        StepError::Lease(error) => lease_code(error),
        StepError::NoDriver { .. }
        | StepError::Netlink(netlink::Error::NoTun(_))
        | StepError::Firewall(FirewallError::NoSenders(_)) => code::NOT_AVAILABLE,
        StepError::Netlink(error) if error.errno().is_some() => errno_code(error),
        StepError::Delegate(error) => error.code(),
        StepError::Result { .. } => code::DECODING_FAILURE,
        StepError::InProcess { source, .. } => source.code,
        StepError::Journal(error) => journal_code(error),
        StepError::Cache(_) | StepError::DeviceInfo { .. } | StepError::SriovCniFile { .. } => {
            code::IO_FAILURE
        }
        StepError::Netlink(_)
        | StepError::Open(_)
        | StepError::NoAddress(_)
        | StepError::Sysctl(_)
        | StepError::Enforce(_)
        | StepError::Nat(
            NatError::Table(_)
            | NatError::Shared(_)
            | NatError::Foreign { .. }
            | NatError::FoughtOver(_)
            | NatError::Sysctl(_),
        )
        | StepError::Firewall(
            FirewallError::Tables(_) | FirewallError::Senders(_) | FirewallError::FoughtOver(_),
        )
        | StepError::DefaultRoute(_)
        | StepError::ProgramsUnknown { .. }
        | StepError::ProgramLeft { .. }
        | StepError::Missing(_) => code::INTERNAL,
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
