//! Creates an attachment's interface: a link, with or without a parent, or moves a device of the node into the pod.

use std::os::fd::AsFd;

use ipnet::IpNet;

use super::{Executor, IPV6_MIN_MTU, ensure_if_present, interface};
use crate::attach::addresses::holder::Address;
use crate::attach::addresses::in_use::check_mac_is_free;
use crate::attach::device::{DeviceError, representor, take_device};
use crate::attach::{StepError, facts};
use crate::cni::code;
use crate::netlink::{self, Handle, LinkState};
use crate::plan::AttachmentPlan;
use crate::spec;
use crate::step::{Brought, Claim, MadeBy, Output, Parent, SetDevice, StepRef, Trunk};

impl Executor<'_> {
    /// Creates a link that is not created together with others: see [`crate::plan::phases::has_company`].
    pub(super) fn create_link(
        &mut self,
        attachment: &AttachmentPlan,
        link: &spec::Link,
    ) -> Result<Output, StepError> {
        self.share_parent(attachment, link)?;
        let created = match link {
            spec::Link::Macvlan(macvlan) => self.macvlan_in_pod(macvlan),
            spec::Link::Ipvlan(ipvlan) => self.ipvlan(ipvlan),
            spec::Link::Vlan(vlan) => self.vlan(vlan),
            spec::Link::Dummy(dummy) => self.dummy(dummy),
            spec::Link::Tap(tap) => self.tap(tap),
            spec::Link::Netkit(netkit) => self.netkit(netkit),
            spec::Link::Veth(_) => Err(StepError::Missing("a group of steps")),
        };
        created.map_err(|error| not_created(link, error))
    }

    /// Refuses a parent that is shared in another way, or that another pod holds.
    pub(super) fn share_parent(
        &mut self,
        attachment: &AttachmentPlan,
        link: &spec::Link,
    ) -> Result<(), StepError> {
        let spec::Tie::Parent { name, .. } = link.tie() else { return Ok(()) };
        let parent = self.parent(name)?;
        let wanted = link.sharing();
        let shared = self.node.occupied.share(parent.index, wanted, self.sandbox, attachment);
        shared.map_err(|(present, container)| {
            StepError::Link(LinkError::ParentShared {
                parent: parent.name.clone(),
                present,
                wanted: wanted.unwrap_or_default(),
                container,
            })
        })?;
        // Concurrency: a pod that takes the parent device either sees this share, or its claim is seen here.
        match self.node.devices.holder_of(parent.index) {
            Some((who, container)) => Err(DeviceError::Taken { device: parent.name, who, container }.into()),
            None => Ok(()),
        }
    }

    pub(super) fn claim_device(
        &mut self,
        attachment: &AttachmentPlan,
        device: &spec::Device,
    ) -> Result<Output, StepError> {
        let claimant = (self.sandbox, attachment, self.pod.netns_cookie());
        let (claim, looked) = take_device::claim(self.node, &mut self.host, device, claimant)?;
        self.looked = looked;
        Ok(Output::Claimed(Box::new(claim)))
    }

    pub(super) fn set_device(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        set: &SetDevice,
    ) -> Result<Output, StepError> {
        let (device, claim) = claimed(attachment, self.progress.outputs().of(at.0))?;
        let claimed = (claim, &mut self.looked);
        take_device::set(&mut self.host, device, claimed, (&set.function, set.mac))?;
        if let Some(mtu) = set.mtu {
            take_device::set_mtu(&mut self.host, (claim, &mut self.looked), mtu)?;
        }
        Ok(Output::Nothing)
    }

    pub(super) fn move_device(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let (device, claim) = claimed(attachment, self.progress.outputs().of(at.0))?;
        let into = (&mut self.pod, self.netns.as_fd());
        let looked = std::mem::take(&mut self.looked);
        // Without an agent, the group tells a late DEL that has no record which container the device belongs to.
        let mark = self.node.enforcer.is_none().then(|| self.sandbox.link_group());
        let pod = take_device::move_in(&mut self.host, into, (device, mark), (claim, looked))?;
        self.node.devices.moved(claim, pod.index);
        if let (Some(card), Some(mac)) = (claim.physical, pod.mac) {
            // If no address was requested, the address is the device's own, whatever other holders it has.
            let _ = self.node.occupied.claim(card, Address::Mac(mac), self.sandbox, attachment);
        }
        Ok(Output::Link { host: None, pod: interface(&pod), parent: None })
    }

    /// Brings the representor of the attachment's device up, if it has one: before the pod's end, whose frames pass
    /// the representor.
    pub(super) fn raise_representor(&mut self, at: StepRef) -> Result<(), StepError> {
        match self.progress.outputs().of(at.0).representor() {
            Some(representor) => representor::raise(&mut self.host, representor),
            None => Ok(()),
        }
    }

    fn macvlan_in_pod(&mut self, macvlan: &spec::Macvlan) -> Result<Output, StepError> {
        let (parent, mut inside) = self.parent_in_pod(macvlan.parent.as_deref(), macvlan.mtu)?;
        let pod = self.pod.create_macvlan(macvlan, &parent, self.netns.as_fd(), &mut inside)?;
        Ok(link_in_pod(&pod))
    }

    fn ipvlan(&mut self, ipvlan: &spec::Ipvlan) -> Result<Output, StepError> {
        if ipvlan.in_pod {
            let (parent, mut inside) = self.parent_in_pod(ipvlan.parent.as_deref(), ipvlan.mtu)?;
            let pod = self.pod.create_ipvlan(ipvlan, &parent, self.netns.as_fd(), &mut inside)?;
            return Ok(link_in_pod(&pod));
        }
        let parent = self.parent(ipvlan.parent.as_deref())?;
        check_mtu(ipvlan.mtu, &parent)?;
        let pod = self.host.create_ipvlan(ipvlan, &parent, self.netns.as_fd(), &mut self.pod)?;
        let parent = self.shared(&parent, None)?;
        Ok(Output::Link { host: None, pod: interface(&pod), parent: Some(parent) })
    }

    fn vlan(&mut self, vlan: &spec::Vlan) -> Result<Output, StepError> {
        let taken = |error: netlink::Error, parent: &LinkState| match error.already_exists() {
            true => StepError::Link(LinkError::VlanTaken { parent: parent.name.clone(), id: vlan.tag.id }),
            false => error.into(),
        };
        if vlan.in_pod {
            let (parent, mut inside) = self.parent_in_pod(Some(&vlan.parent), vlan.mtu)?;
            let made = self.pod.create_vlan(vlan, &parent, self.netns.as_fd(), &mut inside);
            let pod = made.map_err(|error| taken(error, &parent))?;
            return Ok(link_in_pod(&pod));
        }
        let parent = self.parent(Some(&vlan.parent))?;
        check_mtu(vlan.mtu, &parent)?;
        // Without an address of its own, the VLAN link has its parent's.
        if let Some(mac) = vlan.mac.filter(|mac| parent.mac != Some(*mac)) {
            check_mac_is_free(&mut self.host, mac, None, None)?;
        }
        let made = self.host.create_vlan(vlan, &parent, self.netns.as_fd(), &mut self.pod);
        let pod = made.map_err(|error| taken(error, &parent))?;
        let parent = self.shared(&parent, Some(vlan.tag))?;
        Ok(Output::Link { host: None, pod: interface(&pod), parent: Some(parent) })
    }

    fn dummy(&mut self, dummy: &spec::Dummy) -> Result<Output, StepError> {
        let pod = self.pod.create_dummy(dummy)?;
        Ok(link_in_pod(&pod))
    }

    fn netkit(&mut self, netkit: &spec::Netkit) -> Result<Output, StepError> {
        if let Some(mac) = netkit.mac {
            check_mac_is_free(&mut self.host, mac, None, Some(&netkit.host_name))?;
        }
        let mut create = || self.host.create_netkit(netkit, self.netns.as_fd(), &mut self.pod);
        let (host, pod) = match create() {
            Err(error) if error.already_exists() => {
                // The name is derived from the container and the interface, so an existing link is a leftover of
                // netattach.
                self.host.ensure_link_absent(&netkit.host_name)?;
                self.host.create_netkit(netkit, self.netns.as_fd(), &mut self.pod)?
            }
            made => made?,
        };
        // The pod could send router advertisements to the node's end. There is no carrier yet.
        ensure_if_present(&format!("ipv6/conf/{}/accept_ra", netkit.host_name), "0")?;
        Ok(Output::Link { host: Some(interface(&host)), pod: interface(&pod), parent: None })
    }

    fn tap(&mut self, tap: &spec::Tap) -> Result<Output, StepError> {
        match self.pod.create_tap(tap, self.netns) {
            Err(netlink::OpenError::Netlink(error)) if error.already_exists() => {
                Err(LinkError::NameTaken(tap.pod_name.clone()).into())
            }
            Err(netlink::OpenError::Netlink(error)) => Err(error.into()),
            made => Ok(link_in_pod(&made?)),
        }
    }

    /// Returns the parent of a link whose parent is in the pod, and a second socket there: one creates the link, the
    /// other renames it.
    fn parent_in_pod(
        &mut self,
        name: Option<&str>,
        mtu: Option<u32>,
    ) -> Result<(LinkState, Handle), StepError> {
        let parent = facts::parent(&mut self.pod, name)?;
        check_mtu(mtu, &parent)?;
        Ok((parent, Handle::open_in(self.netns)?))
    }

    /// Returns the parent of a macvlan; without a name, the interface of the node's default route. Interfaces of one
    /// pod often share a parent.
    pub(super) fn parent(&mut self, name: Option<&str>) -> Result<LinkState, StepError> {
        if let Some((_, parent)) = self.parents.iter().find(|(of, _)| of.as_deref() == name) {
            return Ok(parent.clone());
        }
        let parent = match name {
            Some(name) => facts::named(&mut self.host, name, self.node.links.as_ref())?
                .ok_or_else(|| netlink::Error::NoSuchLink(name.to_owned()))?,
            None => facts::parent(&mut self.host, None)?,
        };
        self.parents.push((name.map(str::to_owned), parent.clone()));
        Ok(parent)
    }

    /// Returns the parent of a link in the form that other steps use. `tag`: of the link's frames on the parent, if
    /// the link is a VLAN.
    pub(super) fn shared(
        &mut self,
        parent: &LinkState,
        tag: Option<spec::VlanTag>,
    ) -> Result<Parent, StepError> {
        let own = tag.map(|tag| (parent.index, tag.id));
        let trunks = own.into_iter().chain(self.host.trunks(parent)?);
        Ok(Parent {
            device: interface(parent),
            netns_cookie: self.pod.netns_cookie(),
            trunks: trunks.map(|(device, vlan)| Trunk { device, vlan }).collect(),
        })
    }
}

/// Returns the device of an attachment, and its claim.
fn claimed<'a>(
    attachment: &'a AttachmentPlan,
    outputs: Brought<'a>,
) -> Result<(&'a spec::Device, &'a Claim), StepError> {
    let claim = outputs.iter().find_map(|output| match output {
        Output::Claimed(claim) => Some(&**claim),
        _ => None,
    });
    match (attachment.made_by(), claim) {
        (MadeBy::Device(device), Some(claim)) => Ok((device, claim)),
        _ => Err(StepError::Missing("a claim of the device")),
    }
}

/// Refuses an MTU larger than the parent's.
pub(super) fn check_mtu(mtu: Option<u32>, parent: &LinkState) -> Result<(), StepError> {
    match mtu.filter(|mtu| *mtu > parent.mtu) {
        Some(mtu) => Err(LinkError::Mtu { mtu, max: parent.mtu }.into()),
        None => Ok(()),
    }
}

/// Refuses IPv6 addresses for a link whose MTU is too small for IPv6: the kernel would call them malformed. An MTU of
/// 0 is unknown.
pub(super) fn check_has_v6(mtu: u32, addresses: &[IpNet]) -> Result<(), LinkError> {
    let wants_v6 = addresses.iter().any(|address| address.addr().is_ipv6());
    match wants_v6 && (1..IPV6_MIN_MTU).contains(&mtu) {
        true => Err(LinkError::SmallMtu(mtu)),
        false => Ok(()),
    }
}

/// A link of the pod that is not tied to the node.
fn link_in_pod(pod: &LinkState) -> Output {
    Output::Link { host: None, pod: interface(pod), parent: None }
}

/// Returns the error for a new link that the kernel has refused.
pub(super) fn not_created(link: &spec::Link, error: StepError) -> StepError {
    use rustix::io::Errno;
    let StepError::Netlink(source) = error else { return error };
    match (source.errno(), link.sharing()) {
        (Some(Errno::OPNOTSUPP), _) => StepError::Link(LinkError::NoDriver { kind: link.kind(), source }),
        (Some(Errno::BUSY), Some(wanted)) => StepError::Link(LinkError::ParentBusy { wanted, source }),
        _ => StepError::Netlink(source),
    }
}

/// Why an attachment's link cannot be created as requested.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
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
    #[error(
        "the parent {parent} carries {present}, and {wanted} cannot share it with them; whose they are is in HOST-INTERFACE of `netattachctl attachments -o wide`"
    )]
    ParentShared {
        /// Name of the parent.
        parent: String,
        /// The links that it carries.
        present: &'static str,
        /// The link that was requested.
        wanted: &'static str,
        /// The container of one of the links that it carries, to wait for its end. It is not in the message: the
        /// author of the refused pod reads that, and the container may be another's.
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
    /// A link is not to be found, but its pod has one that it may have become.
    #[error("the pod has no link {name}, but {other}, which may be that one")]
    PerhapsRenamed {
        /// The name that the link was given.
        name: String,
        /// Name of the other one.
        other: String,
    },
    /// IPv6 addresses were requested for a link whose MTU, in bytes, is too small for IPv6.
    #[error("mtu {0} is below 1280, which IPv6 needs")]
    SmallMtu(u32),
}

impl LinkError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::NameTaken(_) => code::INVALID_ENVIRONMENT,
            // The pod with the interface may be about to end; all links of a pod go once none is needed any more.
            Self::VlanTaken { .. } | Self::PerhapsRenamed { .. } => code::TRY_AGAIN_LATER,
            Self::Mtu { .. } | Self::SmallMtu(_) | Self::ParentShared { .. } | Self::ParentBusy { .. } => {
                code::INVALID_CONFIG
            }
            Self::NoDriver { .. } => code::NOT_AVAILABLE,
        }
    }
}
