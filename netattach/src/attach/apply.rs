//! Carries out the steps of a plan in order. This is the only dispatcher of [`Step`]; `together` carries out what several
//! attachments need at once.

mod together;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::bridges::{self, Entered};
use super::occupied::{Address, ROUTED, check_ip_is_free, check_mac_is_free, segment};
use super::routing::{move_default_routes, route_by_source};
use super::{
    AttachError, Doing, Node, Progress, StepError, admit, by_source, cluster_routes, device_info, facts,
    host_access, representor, restrict_sender, take_device, translation, tuning, vrf,
};
use crate::cni::Command;
use crate::delegate::{self, Call, DelegateError};
use crate::firewall;
use crate::ipam::{self, Lease, Lessee, Owner};
use crate::netlink::{self, Handle, LinkState};
use crate::netns::Netns;
use crate::plan::addressing::{GatewayChanges, Others};
use crate::plan::hook_kind::{self, FoundDevice};
use crate::plan::phases::{self, Item};
use crate::plan::undo::inverse;
use crate::plan::{AttachmentPlan, Plan, Sandbox, addressing, result, result_cache, routing};
use crate::spec;
use crate::step::{
    Bridge, Brought, Claim, Delegate, Interface, LeasedAddress, MadeBefore, MadeBy, Output, Parent, Printed,
    Role, SetDevice, Step, StepRef, Translate,
};
use crate::sysctl;
use crate::timing;
use crate::waits::{self, Resource};

/// The smallest MTU with which a link has IPv6 (RFC 8200, section 5), in bytes.
const IPV6_MIN_MTU: u32 = 1280;

/// How long duplicates of IPv6 addresses may be looked for, where that is asked for: it takes the kernel a second or two.
const DETECTION: Duration = Duration::from_secs(5);

/// Carries out every step of `plan`.
///
/// # Errors
/// The first step that fails, by name. Finished steps stay in effect; the caller rolls them back.
pub fn apply(
    node: &Node,
    plan: &Plan,
    netns: &Netns,
    progress: &mut dyn Progress,
) -> Result<(), AttachError> {
    let (pod, present) = Handle::open_with_names(netns)?;
    let mut executor = Executor {
        node,
        plan,
        sandbox: &plan.sandbox,
        netns,
        host: Handle::open().map_err(|error| AttachError::Open(error.into()))?,
        pod,
        parents: Vec::new(),
        entered: node.bridges.begin(),
        progress,
    };
    executor.progress.is_in(executor.pod.netns_cookie())?;
    executor.check_preconditions(plan, present)?;
    for group in phases::groups(plan) {
        executor.carry_out(&group).map_err(|Failed { item: (_, attachment, step), source }| {
            AttachError::step(Doing::Attach, attachment, step.describe(), *source)
        })?;
    }
    Ok(())
}

/// The step of a group that failed, and why.
struct Failed<'p> {
    item: Item<'p>,
    source: Box<StepError>,
}

impl<'p> Failed<'p> {
    fn of<E: Into<StepError>>(item: &Item<'p>) -> impl FnOnce(E) -> Self + use<'p, E> {
        let item = *item;
        move |source| Self { item, source: Box::new(source.into()) }
    }
}

struct Executor<'a> {
    node: &'a Node,
    plan: &'a Plan,
    sandbox: &'a Sandbox,
    netns: &'a Netns,
    host: Handle,
    pod: Handle,
    /// Parents of macvlans that were looked up already, by the name in the request.
    parents: Vec<(Option<String>, LinkState)>,
    progress: &'a mut dyn Progress,
    /// The bridges that this plan is about to use.
    entered: Entered<'a>,
}

impl<'a> Executor<'a> {
    /// Carries out the steps of a group: all are recorded as begun, then all take effect.
    fn carry_out(&mut self, group: &[Item<'a>]) -> Result<(), Failed<'a>> {
        let Some(first) = group.first() else { return Ok(()) };
        let mut begun = Vec::with_capacity(group.len());
        for item in group {
            let (at, attachment, step) = *item;
            let container = &self.plan.sandbox.container_id;
            tracing::debug!(container, ifname = attachment.ifname, step = step.describe(), "step");
            if matches!(step, Step::Delegate(_)) {
                waits::at(&Resource::Sync, || self.progress.wait_durable()).map_err(Failed::of(item))?;
            }
            // A step without an inverse is never rolled back, so its beginning is not recorded; but what an earlier step
            // has found or chosen, by which the effect is taken back, is written down before.
            let is_taken_back_by_another = matches!(
                step,
                Step::SetDevice(_)
                    | Step::MoveDevice
                    | Step::Tune(_)
                    | Step::UseTables(_)
                    | Step::JoinVrf(_)
                    | Step::GiveHostAccess
            );
            if is_taken_back_by_another || inverse(self.sandbox, attachment, step, None).is_some() {
                begun.push(at);
            }
        }
        self.progress.begin(&begun).map_err(Failed::of(first))?;
        for (at, _, _) in group {
            crate::crash_point!("apply", at);
        }
        let together = match first.2 {
            Step::CreateLink(link) if phases::has_company(link) => Some(self.create_links(group)?),
            Step::Protect(_) | Step::ProtectAddresses => {
                Some(timing::part("policy", || self.protect(group))?)
            }
            Step::Configure(_) => Some(self.configure(group)?),
            _ => None,
        };
        match together {
            Some(outputs) => {
                for (item, output) in group.iter().zip(outputs) {
                    self.done(item, output)?;
                }
            }
            // Each may need what came of the one before.
            None => {
                for item in group {
                    let (at, attachment, step) = *item;
                    if step.asks_the_network() {
                        // What is asked comes to the link by it, and so does the answer.
                        self.raise_representor(at).map_err(Failed::of(item))?;
                    }
                    let output = self.effect(at, attachment, step).map_err(Failed::of(item))?;
                    self.done(item, output)?;
                }
            }
        }
        Ok(())
    }

    fn done(&mut self, item: &Item<'a>, output: Output) -> Result<(), Failed<'a>> {
        crate::crash_point!("applied", item.0);
        self.progress.done(item.0, output).map_err(Failed::of(item))
    }

    /// Refuses, before the first step, a plan that is certain to fail: a step that has begun is rolled back, and a
    /// link that exists already is not ours to delete, nor could a plugin that is not installed run its DEL.
    /// `present`: the names of the pod's links, if they were read.
    fn check_preconditions(
        &mut self,
        plan: &Plan,
        present: Option<BTreeSet<String>>,
    ) -> Result<(), AttachError> {
        let present = match present {
            Some(present) => present,
            None => {
                let links = self.pod.links().map_err(|error| AttachError::Open(error.into()))?;
                links.into_iter().map(|link| link.name).collect()
            }
        };
        check_plugins(self.node, plan)?;
        for (_, attachment, step) in plan.steps() {
            if matches!(step, Step::RestrictSender) {
                firewall::senders::is_possible()
                    .map_err(|error| AttachError::step(Doing::Attach, attachment, step.describe(), error))?;
            }
            let made = step.makes_interface().and_then(MadeBy::pod_name);
            let Some(name) = made else { continue };
            if present.contains(name) {
                return Err(AttachError::step(
                    Doing::Attach,
                    attachment,
                    step.describe(),
                    StepError::NameTaken(name.to_owned()),
                ));
            }
        }
        Ok(())
    }

    fn effect(&mut self, at: StepRef, attachment: &AttachmentPlan, step: &Step) -> Result<Output, StepError> {
        match step {
            Step::TakeMade(made) => take_made(attachment, made),
            Step::EnsureBridge(bridge) => self.bridge(bridge),
            Step::CreateLink(link) => self.create_link(attachment, link),
            Step::ClaimDevice(device) => self.claim_device(attachment, device),
            Step::SetDevice(set) => self.set_device(at, attachment, set),
            Step::MoveDevice => self.move_device(at, attachment),
            Step::RaiseLoopback => self.loopback(),
            Step::Lease(config) => timing::part("lease", || self.lease(at, attachment, config)),
            Step::Delegate(delegate) => timing::part("plugin", || self.delegate(at, attachment, delegate)),
            Step::Gateway { bridge, force, beside, vlan } => {
                let others = match (force, beside) {
                    (true, _) => Others::Removed,
                    (false, true) => Others::Kept,
                    (false, false) => Others::Refused,
                };
                self.gateway(at, attachment, (bridge, *vlan), others)
            }
            Step::EnsureForwarding => self.forwarding(at, attachment),
            Step::RouteToPod => self.route_to_pod(at, attachment),
            Step::FindReach => self.find_reach(at, attachment),
            Step::Translate(translate) => {
                timing::part("translation", || self.translate(at, attachment, translate))
            }
            Step::Admit(admit) => timing::part("firewall", || {
                let outputs = self.progress.outputs().of(at.0);
                admit::attach(self.node, (self.sandbox, attachment), admit, outputs).map(Output::Admitted)
            }),
            Step::RestrictSender => {
                restrict_sender::attach((self.sandbox, attachment), self.progress.outputs().of(at.0))?;
                Ok(Output::Nothing)
            }
            Step::FindDevice => self.find_device(at, attachment),
            Step::Remember(remember) => {
                let entry =
                    result_cache::entry(self.sandbox, attachment, remember, self.progress.outputs().of(at.0))
                        .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })?;
                waits::at(&Resource::Cache, || self.node.cache.write(&entry))?;
                Ok(Output::Nothing)
            }
            Step::PrepareDeviceInfo(files) => device_info::prepare(files),
            Step::MoveDefaultRoutes { gateways, keep } => {
                self.move_default_routes(at, attachment, gateways, keep.as_deref())
            }
            Step::RouteBySource => self.route_by_source(attachment),
            Step::NoteProperties(tune) => {
                let before = tuning::before(&mut self.pod, &attachment.ifname, tune)?;
                Ok(Output::Properties { before })
            }
            Step::Tune(tune) => {
                tuning::tune(&mut self.pod, self.netns, &attachment.ifname, tune)?;
                Ok(Output::Nothing)
            }
            Step::ChooseTables(asked) => {
                let outputs = self.progress.outputs().of(at.0);
                let now = result::result(self.sandbox, attachment, outputs)
                    .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })?;
                Ok(Output::SourceTables(by_source::choose(&mut self.pod, &attachment.ifname, asked, &now)?))
            }
            Step::UseTables(_) => {
                let chosen = self.progress.outputs().of(at.0).iter().find_map(|output| match output {
                    Output::SourceTables(chosen) => Some(chosen.clone()),
                    _ => None,
                });
                by_source::apply(&mut self.pod, &chosen.ok_or(StepError::Missing("tables"))?)?;
                Ok(Output::Nothing)
            }
            Step::ChooseVrf(asked) => Ok(Output::Vrf(vrf::choose(&mut self.pod, &attachment.ifname, asked)?)),
            Step::JoinVrf(_) => self.join_vrf(at),
            Step::ChooseHostAccess => {
                let parent = on_parent(self.progress.outputs().of(at.0))?;
                let leased = self.leased(at, attachment)?;
                let on = (own_link(attachment)?, &parent.device);
                Ok(Output::HostAccess(host_access::choose(&mut self.host, on, &leased)?))
            }
            Step::GiveHostAccess => self.give_host_access(at, attachment),
            Step::ReadDeviceInfo(files) => {
                let found = device_info::read(&files.attachment);
                let (made_by, outputs) = (attachment.made_by(), self.progress.outputs().of(at.0));
                match (made_by, outputs.representor()) {
                    (MadeBy::Device(device), Some(representor)) => {
                        device_info::with_representor(&files.attachment, found, (device, representor))
                    }
                    _ => Ok(found),
                }
            }
            // Carried out together: see [`Executor::carry_out`].
            Step::Protect(_) | Step::ProtectAddresses | Step::Configure(_) => {
                Err(StepError::Missing("a group of steps"))
            }
        }
    }

    fn join_vrf(&mut self, at: StepRef) -> Result<Output, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        let chosen = outputs.iter().find_map(|output| match output {
            Output::Vrf(chosen) => Some(chosen),
            _ => None,
        });
        vrf::join(&mut self.pod, chosen.ok_or(StepError::Missing("a VRF"))?)?;
        // The pod's end went down and up again.
        if let Some(host) = result::ends(outputs).and_then(|ends| ends.host)
            && !self.host.await_carrier(host.index)?
        {
            tracing::warn!(device = host.name, "no carrier yet in the VRF; the first packets may be lost");
        }
        Ok(Output::Nothing)
    }

    fn bridge(&mut self, bridge: &spec::Bridge) -> Result<Output, StepError> {
        self.entered.enter(&bridge.name);
        let present = facts::named(&mut self.host, &bridge.name, self.node.links.as_ref())?;
        let ensured = self.host.ensure_bridge_beside(bridge, present);
        let ensured = ensured.map_err(|error| no_filtering(bridge, error))?;
        if bridge.vlan_filtering && !ensured.created {
            let filtered = bridges::filter_by_vlan(&mut self.host, &ensured.link);
            filtered.map_err(|error| no_filtering(bridge, error))?;
        }
        if ensured.created {
            // The node must not take addresses or routes from router advertisements that pods send.
            ensure_if_present(&format!("ipv6/conf/{}/accept_ra", bridge.name), "0")?;
        }
        let (made, ours) = (ensured.created, !ensured.created && ensured.link.own_bridge());
        Ok(Output::Bridge(Bridge { link: interface(&ensured.link), made, ours }))
    }

    /// Creates a link that is created by itself: see [`phases::has_company`].
    fn create_link(&mut self, attachment: &AttachmentPlan, link: &spec::Link) -> Result<Output, StepError> {
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

    /// Refuses a link whose parent is shared in another way, or is another pod's.
    fn share_parent(&mut self, attachment: &AttachmentPlan, link: &spec::Link) -> Result<(), StepError> {
        let spec::Tie::Parent { name, .. } = link.tie() else { return Ok(()) };
        let parent = self.parent(name)?;
        let wanted = link.sharing();
        let shared = self.node.occupied.share(parent.index, wanted, self.sandbox, attachment);
        shared.map_err(|(present, container)| StepError::ParentShared {
            parent: parent.name.clone(),
            present,
            wanted: wanted.unwrap_or_default(),
            container,
        })?;
        // A pod that takes the parent for itself sees what shares it, or is seen here.
        match self.node.devices.holder_of(parent.index) {
            Some((who, container)) => Err(StepError::DeviceTaken { device: parent.name, who, container }),
            None => Ok(()),
        }
    }

    fn claim_device(
        &mut self,
        attachment: &AttachmentPlan,
        device: &spec::Device,
    ) -> Result<Output, StepError> {
        let claimant = (self.sandbox, attachment, self.pod.netns_cookie());
        let claim = take_device::claim(self.node, &mut self.host, device, claimant)?;
        Ok(Output::Claimed(Box::new(claim)))
    }

    fn set_device(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        set: &SetDevice,
    ) -> Result<Output, StepError> {
        let (device, claim) = claimed(attachment, self.progress.outputs().of(at.0))?;
        take_device::set(&mut self.host, device, claim, (&set.function, set.mac))?;
        Ok(Output::Nothing)
    }

    fn move_device(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let (device, claim) = claimed(attachment, self.progress.outputs().of(at.0))?;
        let into = (&mut self.pod, self.netns.as_fd());
        let pod = take_device::move_in(&mut self.host, into, device, claim)?;
        Ok(Output::Link { host: None, pod: interface(&pod), parent: None })
    }

    /// Brings the representor of the attachment's device up, if it has one: before the pod's end, whose frames pass by it.
    fn raise_representor(&mut self, at: StepRef) -> Result<(), StepError> {
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
        let parent = Parent { device: interface(&parent), netns_cookie: self.pod.netns_cookie() };
        Ok(Output::Link { host: None, pod: interface(&pod), parent: Some(parent) })
    }

    fn vlan(&mut self, vlan: &spec::Vlan) -> Result<Output, StepError> {
        let taken = |error: netlink::Error, parent: &LinkState| match error.already_exists() {
            true => StepError::VlanTaken { parent: parent.name.clone(), id: vlan.tag.id },
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
        let made = self.host.create_vlan(vlan, &parent, self.netns.as_fd(), &mut self.pod);
        let pod = made.map_err(|error| taken(error, &parent))?;
        let parent = Parent { device: interface(&parent), netns_cookie: self.pod.netns_cookie() };
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
                // The name is derived from the container and the interface, so an existing link is a leftover of ours.
                self.host.ensure_link_absent(&netkit.host_name)?;
                self.host.create_netkit(netkit, self.netns.as_fd(), &mut self.pod)?
            }
            made => made?,
        };
        // The pod could announce routes to the node's end. There is no carrier yet.
        ensure_if_present(&format!("ipv6/conf/{}/accept_ra", netkit.host_name), "0")?;
        Ok(Output::Link { host: Some(interface(&host)), pod: interface(&pod), parent: None })
    }

    fn tap(&mut self, tap: &spec::Tap) -> Result<Output, StepError> {
        match self.pod.create_tap(tap, self.netns) {
            Err(netlink::OpenError::Netlink(error)) if error.already_exists() => {
                Err(StepError::NameTaken(tap.pod_name.clone()))
            }
            Err(netlink::OpenError::Netlink(error)) => Err(error.into()),
            made => Ok(link_in_pod(&made?)),
        }
    }

    /// The parent of a link that has it in the pod, and a second socket there: one creates the link, the other renames it.
    fn parent_in_pod(
        &mut self,
        name: Option<&str>,
        mtu: Option<u32>,
    ) -> Result<(LinkState, Handle), StepError> {
        let parent = facts::parent(&mut self.pod, name)?;
        check_mtu(mtu, &parent)?;
        Ok((parent, Handle::open_in(self.netns)?))
    }

    /// The parent of a macvlan; without a name, the interface of the node's default route. Interfaces of one pod
    /// often share a parent.
    fn parent(&mut self, name: Option<&str>) -> Result<LinkState, StepError> {
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

    fn loopback(&mut self) -> Result<Output, StepError> {
        let link = self.pod.link("lo")?;
        self.pod.ensure_up(link.index)?;
        Ok(Output::Loopback { addresses: self.pod.addresses(link.index)? })
    }

    fn lease(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        config: &ipam::Config,
    ) -> Result<Output, StepError> {
        let owner = owner(self.sandbox, attachment);
        let lessee = Lessee { owner: &owner, netns: Some(self.netns) };
        let resource = waits::of_lease(attachment, config);
        let (node, mut failed): (_, Option<StepError>) = (self.node, None);
        let mut before_probe =
            |address| failed = failed.take().or_else(|| self.admit_probe(at, attachment, address).err());
        let output = lease(&node.leases, config, lessee, resource.as_ref(), &mut before_probe);
        if let Some(error) = failed {
            return Err(error);
        }
        let output = output?;
        if let Output::Lease { addresses, .. } = &output {
            let addresses = addresses.iter().map(|leased| leased.address.addr());
            self.occupy(at, attachment, addresses, config.is_chosen())?;
        }
        Ok(output)
    }

    /// Has programs that are there before an address is let the question pass whether another host has it: it is asked in the
    /// pod's name.
    fn admit_probe(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        address: IpAddr,
    ) -> Result<(), StepError> {
        let protected = attachment.protect().filter(|_| attachment.steps.contains(&Step::ProtectAddresses));
        let (Some(protect), Some(enforcer)) = (protected, &self.node.enforcer) else { return Ok(()) };
        let address = LeasedAddress { address: address.into(), gateway: None };
        let leased = result::Leased { addresses: vec![address], ..result::Leased::default() };
        let guarded = self.enforced(at, attachment, protect, &leased)?;
        let loaded = enforcer.attach(&[guarded], &mut self.host, &mut self.pod);
        loaded.map_err(|failed| StepError::from(*failed.source))
    }

    fn delegate(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        delegate: &Delegate,
    ) -> Result<Output, StepError> {
        let unreadable = |source| StepError::Result { plugin: delegate.plugin.clone(), source };
        let before = match delegate.role {
            Role::Plugin if !attachment.is_made_at(at.1.into()) => {
                let so_far = result::as_reported(self.sandbox, attachment, self.progress.outputs().of(at.0));
                Some(so_far.map_err(unreadable)?)
            }
            _ => None,
        };
        let call =
            DelegateCall { command: Command::Add, netns: Some(&self.sandbox.netns), attachment, delegate };
        let stdin = call.stdin(before);
        let added = waits::at(&waits::plugin(attachment, &delegate.plugin), || {
            runner(self.node, &self.sandbox.cni_path)
                .add(&call.call(self.sandbox, &stdin), attachment.version)
        })?;
        if delegate.role == Role::Ipam {
            if added.result.ips.is_empty() {
                return Err(StepError::NoAddress(delegate.plugin.clone()));
            }
            let addresses = added.result.ips.iter().map(|ip| ip.address.addr());
            self.occupy(at, attachment, addresses, true)?;
        }
        Ok(Output::Delegate { result: Printed::new(added.raw, added.result) })
    }

    fn gateway(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        (bridge, vlan): (&str, Option<u16>),
        others: Others,
    ) -> Result<Output, StepError> {
        let wanted = addressing::gateways(&self.leased(at, attachment)?.addresses);
        let device = match vlan {
            Some(vlan) => {
                let keeps_default = attachment.link().and_then(spec::Link::port);
                let keeps_default = keeps_default.and_then(|port| port.vlans.as_ref());
                let keeps_default = keeps_default.is_some_and(|vlans| vlans.keeps_default);
                let bridge = (bridge, self.bridge_index(at)?);
                Some(bridges::ensure_vlan_device(&mut self.host, bridge, vlan, keeps_default)?)
            }
            None => None,
        };
        let index = device.as_ref().map_or_else(|| self.bridge_index(at), |device| Ok(device.index))?;
        let present = match &self.node.links {
            Some(links) => links.addresses(index, &mut self.host)?,
            None => self.host.addresses(index)?,
        };
        let changes = addressing::gateway_changes(&present, &wanted, others).map_err(|conflict| {
            StepError::GatewayConflict {
                bridge: bridge.to_owned(),
                present: conflict.present,
                wanted: conflict.wanted,
            }
        })?;
        let is_changed = changes != GatewayChanges::default();
        let changed = self.change_addresses(index, changes);
        if let Some(links) = self.node.links.as_ref().filter(|_| is_changed) {
            links.readdressed(index);
        }
        changed?;
        Ok(device.as_ref().map_or(Output::Nothing, |device| Output::Gateway(interface(device))))
    }

    fn change_addresses(&mut self, index: u32, changes: GatewayChanges) -> Result<(), StepError> {
        for other in changes.remove {
            self.host.ensure_address_absent(index, other)?;
        }
        for gateway in changes.add {
            if let Err(refused) = self.host.ensure_address(index, gateway) {
                // Such a device has no IPv6, and the kernel takes its addresses for malformed.
                let mtu = self.host.link_by_index(index)?.mtu;
                let is_too_small = gateway.addr().is_ipv6() && (1..IPV6_MIN_MTU).contains(&mtu);
                return Err(if is_too_small { StepError::SmallMtu(mtu) } else { refused.into() });
            }
        }
        Ok(())
    }

    fn forwarding(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        if leased.addresses.iter().any(|leased| leased.address.addr().is_ipv4()) {
            self.node.forwarding.v4.ensure("1")?;
        }
        if leased.addresses.iter().any(|leased| leased.address.addr().is_ipv6()) {
            self.node.forwarding.v6.ensure("1")?;
        }
        Ok(Output::Nothing)
    }

    fn route_to_pod(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let (host, _) = self.link(at)?;
        let host = host.ok_or(StepError::Missing("an end on the node"))?;
        let wanted = addressing::host_side(routing::style(attachment), &leased.addresses);
        self.host.configure(host.index, &wanted)?;
        Ok(Output::Nothing)
    }

    fn translate(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        translate: &Translate,
    ) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let translate = result::translation(translate, self.progress.outputs().of(at.0));
        translation::attach(self.node, (self.sandbox, attachment), &translate, &leased.addresses)?;
        Ok(Output::Nothing)
    }

    fn find_reach(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let addresses: Vec<IpAddr> = leased.addresses.iter().map(|leased| leased.address.addr()).collect();
        let device = translation::reach(&mut self.host, &addresses)?;
        Ok(Output::Reach { device })
    }

    /// Finds the device on which an interface made by other plugins can be enforced.
    fn find_device(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let pod = self.pod.find_link(&attachment.ifname)?;
        let host = match &pod {
            Some(pod) => self.host.find_peer(pod, self.netns.as_fd())?,
            None => None,
        };
        let bridge = host.as_ref().and_then(|host| host.controller);
        if let (Some(bridge), Some(mac)) = (bridge, pod.as_ref().and_then(|pod| pod.mac)) {
            self.node.occupied.claim(bridge, Address::Mac(mac), self.sandbox, attachment)?;
        }
        let told = result::own(&self.sandbox.netns, attachment, self.progress.outputs().of(at.0))
            .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })?;
        let addresses = match &pod {
            Some(pod) if told.addresses.is_empty() => self.pod.addresses(pod.index)?,
            _ => Vec::new(),
        };
        let sight = FoundDevice {
            addresses,
            pod: pod.as_ref().map(interface),
            host: host.as_ref().map(interface),
            device: hook_kind::device_info(self.progress.outputs().of(at.0)),
            mode: pod.as_ref().and_then(|pod| pod.mode),
        };
        Ok(sight.output())
    }

    /// Claims the IP addresses for the attachment, before any route leads to them. A pool answers for the addresses
    /// it gives; `chosen` addresses must not be in use elsewhere.
    fn occupy(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        addresses: impl Iterator<Item = IpAddr>,
        chosen: bool,
    ) -> Result<(), StepError> {
        let segment = segment(attachment, self.progress.outputs().of(at.0));
        let is_routed = segment == Some(ROUTED) || attachment.steps.contains(&Step::ChooseHostAccess);
        for ip in addresses {
            let claimed = segment.map_or(Ok(()), |segment| {
                self.node.occupied.claim(segment, Address::Ip(ip), self.sandbox, attachment)
            });
            if chosen {
                claimed?;
                check_ip_is_free(&mut self.host, ip, is_routed)?;
            }
        }
        Ok(())
    }

    fn move_default_routes(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        gateways: &[IpAddr],
        keep: Option<&[IpNet]>,
    ) -> Result<Output, StepError> {
        let cluster = match keep {
            Some(_) => cluster_routes::look(&mut self.pod, &self.sandbox.ifname)?,
            None => None,
        };
        let leased = self.leased(at, attachment)?;
        let own = routing::own_configuration(attachment).map(|own| (own, leased.addresses.as_slice()));
        let wanted = routing::default_routes(gateways, own)?;
        let link = self.pod.link(&attachment.ifname)?;
        let routes = move_default_routes(&mut self.pod, link.index, &wanted)?;
        if routes.is_empty() {
            let (ifname, network) = (&attachment.ifname, &attachment.network);
            tracing::warn!(
                ifname,
                %network,
                "default-route is empty and the network brings none; nothing moves"
            );
        }
        let kept = match &cluster {
            Some(side) => cluster_routes::keep(&mut self.pod, side, &routes, keep.unwrap_or_default())?,
            None => None,
        };
        Ok(Output::DefaultRoutes { routes, kept })
    }

    fn route_by_source(&mut self, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let interfaces = routing::by_source(self.plan, self.progress.outputs())
            .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })?;
        route_by_source(&mut self.pod, &interfaces)?;
        Ok(Output::SourceRouting { interfaces })
    }

    fn give_host_access(&mut self, at: StepRef, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        let parent = on_parent(outputs)?;
        let chosen = outputs.iter().find_map(|output| match output {
            Output::HostAccess(chosen) => Some(chosen),
            _ => None,
        });
        let chosen = chosen.ok_or(StepError::Missing("a way from the node"))?;
        let made = result::ends(outputs).ok_or(StepError::Missing("a link"))?.pod;
        let parent = self.host.link_by_index(parent.device.index)?;
        let on = (own_link(attachment)?, &parent, &made);
        host_access::give(self.node, (&mut self.host, &mut self.pod), on, chosen)?;
        Ok(Output::Nothing)
    }

    fn leased(&self, at: StepRef, attachment: &AttachmentPlan) -> Result<result::Leased, StepError> {
        result::leased(attachment, self.progress.outputs().of(at.0))
            .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })
    }

    /// Index of the bridge that the attachment is on.
    fn bridge_index(&self, at: StepRef) -> Result<u32, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        outputs
            .iter()
            .find_map(|output| match output {
                Output::Bridge(bridge) => Some(bridge.link.index),
                _ => None,
            })
            .ok_or(StepError::Missing("a bridge"))
    }

    /// The node's end, if there is one, and the pod's end of the attachment's link.
    fn link(&self, at: StepRef) -> Result<(Option<Interface>, Interface), StepError> {
        result::link(self.progress.outputs().of(at.0)).ok_or(StepError::Missing("a link"))
    }
}

/// The result of the plugin that has made the attachment's interface, which nothing is done about.
fn take_made(attachment: &AttachmentPlan, made: &MadeBefore) -> Result<Output, StepError> {
    let unreadable = |source| StepError::Result { plugin: attachment.kind.clone(), source };
    let result = Printed::from(made.result.read());
    result.read(attachment.version).map_err(unreadable)?;
    Ok(Output::Delegate { result })
}

/// The parent of an attachment's link on the node.
fn on_parent(outputs: Brought<'_>) -> Result<Parent, StepError> {
    result::ends(outputs).and_then(|ends| ends.parent).ok_or(StepError::Missing("a link on a parent"))
}

/// The link of an attachment that netattach makes.
fn own_link(attachment: &AttachmentPlan) -> Result<&spec::Link, StepError> {
    attachment.link().ok_or(StepError::Missing("a link on a parent"))
}

/// The device of an attachment, and its claim.
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
fn check_mtu(mtu: Option<u32>, parent: &LinkState) -> Result<(), StepError> {
    match mtu.filter(|mtu| *mtu > parent.mtu) {
        Some(mtu) => Err(StepError::Mtu { mtu, max: parent.mtu }),
        None => Ok(()),
    }
}

/// A link of the pod that is not tied to the node.
fn link_in_pod(pod: &LinkState) -> Output {
    Output::Link { host: None, pod: interface(pod), parent: None }
}

/// The error for a bridge that the kernel refused: it may know no VLANs.
fn no_filtering(bridge: &spec::Bridge, error: impl Into<StepError>) -> StepError {
    match error.into() {
        StepError::Netlink(source)
            if bridge.vlan_filtering && source.errno() == Some(rustix::io::Errno::OPNOTSUPP) =>
        {
            StepError::NoDriver { kind: "bridge with VLAN filtering", source }
        }
        other => other,
    }
}

/// The error for a new link that the kernel refused.
fn not_created(link: &spec::Link, error: StepError) -> StepError {
    use rustix::io::Errno;
    let StepError::Netlink(source) = error else { return error };
    match (source.errno(), link.sharing()) {
        (Some(Errno::OPNOTSUPP), _) => StepError::NoDriver { kind: link.kind(), source },
        (Some(Errno::BUSY), Some(wanted)) => StepError::ParentBusy { wanted, source },
        _ => StepError::Netlink(source),
    }
}

/// Leases addresses, with the name servers and routes that come with them. `resource`: what that may wait for.
pub(super) fn lease(
    leases: &ipam::Leases,
    config: &ipam::Config,
    lessee: Lessee<'_>,
    resource: Option<&Resource>,
    before_probe: &mut dyn FnMut(IpAddr),
) -> Result<Output, StepError> {
    let leased = waits::at_any(resource, || leases.lease(config, lessee, before_probe));
    let Lease { addresses, routes, dns } = leased?;
    Ok(Output::Lease { addresses, dns, routes })
}

/// A call of another plugin for an attachment.
pub(super) struct DelegateCall<'a> {
    pub(super) command: Command,
    pub(super) netns: Option<&'a str>,
    pub(super) attachment: &'a AttachmentPlan,
    pub(super) delegate: &'a Delegate,
}

impl<'a> DelegateCall<'a> {
    /// Runs the plugin for a verb that prints no result.
    pub(super) fn run(
        &self,
        node: &Node,
        sandbox: &Sandbox,
        prev_result: Option<Value>,
    ) -> Result<(), DelegateError> {
        let stdin = self.stdin(prev_result);
        waits::at(&waits::plugin(self.attachment, &self.delegate.plugin), || {
            runner(node, &sandbox.cni_path).run(&self.call(sandbox, &stdin)).map(drop)
        })
    }

    fn stdin(&self, prev_result: Option<Value>) -> String {
        /// The plugin's configuration with `prevResult` replaced.
        struct Stdin<'a>(&'a Map<String, Value>, Option<Value>);

        impl Serialize for Stdin<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let told = self.1.as_ref().map(|result| (PREV_RESULT, result));
                let config = self.0.iter().map(|(key, value)| (key.as_str(), value));
                serializer
                    .collect_map(config.filter(|(key, _)| told.is_none() || *key != PREV_RESULT).chain(told))
            }
        }

        const PREV_RESULT: &str = "prevResult";
        // Serialising JSON values cannot fail.
        serde_json::to_string(&Stdin(&self.delegate.config, prev_result)).unwrap_or_default()
    }

    fn call(&'a self, sandbox: &'a Sandbox, stdin: &'a str) -> Call<'a> {
        Call {
            command: self.command,
            plugin_type: &self.delegate.plugin,
            container_id: &sandbox.container_id,
            netns: self.netns,
            ifname: &self.attachment.ifname,
            args: &sandbox.cni_args,
            netns_override: false,
            stdin: stdin.as_bytes(),
        }
    }
}

/// Checks that every plugin that the plan runs is installed.
pub(super) fn check_plugins(node: &Node, plan: &Plan) -> Result<(), AttachError> {
    for (_, attachment, step) in plan.steps() {
        if let Step::Delegate(delegate) = step {
            let found = runner(node, &plan.sandbox.cni_path).find(&delegate.plugin);
            found.map_err(|error| AttachError::step(Doing::Attach, attachment, "", error))?;
        }
    }
    Ok(())
}

/// Runs plugins for a runtime: the runtime's search path comes before the agent's own.
pub(super) fn runner(node: &Node, cni_path: &[PathBuf]) -> delegate::Delegate {
    let mut search = cni_path.to_vec();
    search.extend(node.delegate.search.iter().filter(|path| !cni_path.contains(path)).cloned());
    delegate::Delegate { search, ..node.delegate.clone() }
}

pub(super) fn owner(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Owner {
    Owner { container_id: sandbox.container_id.clone(), ifname: attachment.ifname.clone() }
}

pub(super) fn ensure_if_present(key: &str, value: &str) -> Result<(), StepError> {
    match sysctl::ensure(key, value) {
        // A kernel without IPv6 has no such setting.
        Err(error) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

fn interface(link: &LinkState) -> Interface {
    Interface { name: link.name.clone(), index: link.index, mac: link.mac, mtu: link.mtu }
}
