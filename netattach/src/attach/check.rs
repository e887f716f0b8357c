//! CHECK: compares every attachment of a sandbox with its record. The agent's periodic checks also compare the part
//! that is in the pod.

use std::net::IpAddr;

use super::apply::routing::{by_source, vrf};
use super::apply::{DelegateCall, admit, host_access, owner, restrict_sender, routing, translation, tuning};
use super::device::card::physical;
use super::device::representor;
use super::reconcile::enforcement;
use super::{AttachError, Attached, Doing, Node, StepError};
use crate::cni::{Command, Value};
use crate::ipam::Lessee;
use crate::journal::Record;
use crate::mac::Mac;
use crate::netlink::{self, Handle, LinkState};
use crate::netns::Netns;
use crate::plan::check::{Expected, expected};
use crate::plan::routing::MAIN_TABLE;
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::spec::{Device, IpvlanMode, Link, LinkMode, Route, VfSettings};
use crate::step::{Interface, Step};
use crate::waits;

/// Compares the kernel with the record and runs CHECK of every other plugin.
///
/// # Errors
/// [`AttachError::Differs`] with the first difference; a plugin's own error.
pub(super) fn check(node: &Node, record: &Record, netns: &Netns) -> Result<(), AttachError> {
    let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
    let mut pod = Handle::open_in(netns)?;
    let sandbox = &record.plan.sandbox;
    for (number, attachment) in record.plan.attachments.iter().enumerate() {
        if attachment.disable_check {
            continue;
        }
        // Attachment numbers fit into a `u16`: see `Plan::steps`.
        let number = number as u16;
        let last = result::result(sandbox, attachment, record.outputs.of(number))?;
        let want = expected(attachment, record.outputs.of(number), &last, &sandbox.netns)?;
        let looked = compare(node, sandbox, attachment, &want, &mut host, &mut pod, netns);
        let looked = looked.and_then(|difference| match (difference, &node.enforcer) {
            (None, Some(enforcer)) => {
                enforcement::difference(enforcer.as_ref(), record, attachment, &mut host)
            }
            (difference, _) => Ok(difference),
        });
        if let Some(what) = looked.map_err(|source| {
            AttachError::step(Doing::Check, attachment, "read the kernel's state", source)
        })? {
            return Err(AttachError::Differs {
                ifname: attachment.ifname.clone(),
                network: attachment.network.to_string(),
                what,
            });
        }
        if attachment.version.has_check() {
            let told = result::as_reported(sandbox, attachment, record.outputs.of(number))?;
            check_delegates(node, sandbox, attachment, Some(&told))?;
        }
    }
    Ok(())
}

/// Returns the differences between the pod and what the attachments of a sandbox left there: the first of each
/// attachment, with its interface. Skips attachments that CHECK skips.
pub(super) fn differences_in_pod(
    attached: &Attached,
    (netns, pod): (&Netns, &mut Handle),
) -> Result<Vec<(String, String)>, AttachError> {
    let sandbox = &attached.plan.sandbox;
    let mut differences = Vec::new();
    for (number, attachment) in attached.plan.attachments.iter().enumerate() {
        if attachment.disable_check {
            continue;
        }
        // Attachment numbers fit into a `u16`: see `Plan::steps`.
        let outputs = attached.outputs.of(number as u16);
        let last = result::result(sandbox, attachment, outputs)?;
        let want = expected(attachment, outputs, &last, &sandbox.netns)?;
        let failed = |source| AttachError::step(Doing::Check, attachment, "read the kernel's state", source);
        let host = want.follows.map(|_| Handle::open()).transpose();
        let mut host = host.map_err(|error| AttachError::Open(error.into()))?;
        let difference = compare_in_pod(attachment, (&want, host.as_mut()), pod, netns).map_err(failed)?;
        differences.extend(difference.map(|difference| (attachment.ifname.clone(), difference)));
    }
    Ok(differences)
}

/// Describes the first difference between the kernel and the expected state of an attachment.
pub(super) fn compare(
    node: &Node,
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    want: &Expected,
    host: &mut Handle,
    pod: &mut Handle,
    netns: &Netns,
) -> Result<Option<String>, StepError> {
    let found = match look_at_pod_end(want, Some(&mut *host), pod)? {
        Found::Differs(difference) => return Ok(Some(difference)),
        Found::NotWanted => None,
        Found::AsWanted(link) => Some(link),
    };
    if let Some(difference) = compare_host_end(want, found.as_ref(), host)? {
        return Ok(Some(difference));
    }
    if let Some(difference) = compare_around_pod_end(attachment, want, pod, netns)? {
        return Ok(Some(difference));
    }
    if let Some((Device { function: Some(function), .. }, wanted)) = &want.device {
        let shown = physical(host, function)?.map(|(_, shown)| shown);
        if let Some(setting) = other_setting(wanted, shown.as_ref()) {
            let (number, card) = (function.number, &function.physical);
            return Ok(Some(format!("VF {number} of {card} has another {setting}")));
        }
    }
    if let (Some((device, _)), Some(wanted)) = (&want.device, &want.host)
        && let Some(difference) = representor::difference(host, device, wanted)?
    {
        return Ok(Some(difference));
    }
    if let Some(chosen) = &want.host_access
        && let Some(difference) = host_access::difference((&mut *host, &mut *pod), found.as_ref(), chosen)?
    {
        return Ok(Some(difference));
    }
    if let Some(wanted) = &want.translation
        && let Some(difference) = translation::difference(node, (sandbox, attachment), wanted)?
    {
        return Ok(Some(difference));
    }
    if let Some(admitted) = &want.admitted
        && let Some(difference) = admit::difference(node, (sandbox, attachment), admitted)?
    {
        return Ok(Some(difference));
    }
    if want.restricted
        && let Some(difference) = restrict_sender::difference((sandbox, attachment), want)?
    {
        return Ok(Some(difference));
    }
    if let Some(config) = &want.lease {
        let held: Vec<IpAddr> = want.addresses.iter().map(|address| address.addr()).collect();
        let owner = owner(sandbox, attachment);
        let lessee = Lessee { owner: &owner, netns: Some(netns) };
        let resource = waits::of_lease(attachment, config);
        waits::at_any(resource.as_ref(), || node.leases.check(config, lessee, &held))?;
    }
    Ok(None)
}

/// Describes the first difference between the pod's namespace and its expected state. Reads nothing else, and calls
/// no other plugin. `host`: needed if the interface follows a parent.
fn compare_in_pod(
    attachment: &AttachmentPlan,
    (want, host): (&Expected, Option<&mut Handle>),
    pod: &mut Handle,
    netns: &Netns,
) -> Result<Option<String>, StepError> {
    match look_at_pod_end(want, host, pod)? {
        Found::Differs(difference) => Ok(Some(difference)),
        Found::NotWanted | Found::AsWanted(_) => compare_around_pod_end(attachment, want, pod, netns),
    }
}

/// Like [`compare_in_pod`], for everything but the interface with its addresses and routes.
fn compare_around_pod_end(
    attachment: &AttachmentPlan,
    want: &Expected,
    pod: &mut Handle,
    netns: &Netns,
) -> Result<Option<String>, StepError> {
    if let Some(difference) = routing::compare(want, pod)? {
        return Ok(Some(difference));
    }
    if let Some(chosen) = &want.by_source
        && let Some(difference) = by_source::difference(pod, &attachment.ifname, chosen)?
    {
        return Ok(Some(difference));
    }
    if let Some(chosen) = &want.vrf {
        let wanted = (chosen.name.as_str(), Some(chosen.table));
        if let Some(difference) = vrf::difference(pod, &attachment.ifname, wanted, &chosen.routes)? {
            return Ok(Some(difference));
        }
    }
    match &want.tune {
        Some(tune) => tuning::difference(pod, netns, &attachment.ifname, tune),
        None => Ok(None),
    }
}

/// Returns the first setting of a VF that differs from the one that ADD made. A setting that the driver does not
/// report may have its value: ADD has accepted that too. `shown`: what the card reports; `None`: the card is gone.
fn other_setting(wanted: &VfSettings, shown: Option<&VfSettings>) -> Option<&'static str> {
    let differs = shown.map_or_else(|| wanted.clone(), |shown| wanted.contradicted_by(shown));
    differs.each().next().map(|(setting, _)| setting)
}

enum Found {
    NotWanted,
    AsWanted(LinkState),
    Differs(String),
}

/// Compares the interface in the pod. The parent that it follows may get another Ethernet address between two requests:
/// so it is looked at once more if it differs.
fn look_at_pod_end(want: &Expected, host: Option<&mut Handle>, pod: &mut Handle) -> Result<Found, StepError> {
    let (Some(parent), Some(host)) = (want.follows, host) else { return compare_pod_end(want, None, pod) };
    match compare_pod_end(want, mac_of(parent, host)?, pod)? {
        Found::Differs(_) => compare_pod_end(want, mac_of(parent, host)?, pod),
        found => Ok(found),
    }
}

/// Returns the present Ethernet address of a parent, if it is there.
fn mac_of(parent: u32, host: &mut Handle) -> Result<Option<Mac>, StepError> {
    match host.link_by_index(parent) {
        Err(error) if error.not_found() => Ok(None),
        found => Ok(found?.mac),
    }
}

/// `parents_mac`: an Ethernet address that the interface may have instead of its own.
fn compare_pod_end(want: &Expected, parents_mac: Option<Mac>, pod: &mut Handle) -> Result<Found, StepError> {
    if want.loopback && !pod.find_link("lo")?.is_some_and(|link| link.up) {
        return Ok(Found::Differs("lo is not up".into()));
    }
    let Some(wanted) = &want.pod else { return Ok(Found::NotWanted) };
    let differs = |what: String| Ok(Found::Differs(format!("interface {} {what}", wanted.name)));
    let Some(link) = pod.find_link(&wanted.name)? else {
        return differs("is gone from the pod".into());
    };
    if is_another(&link, wanted) || want.link.as_ref().is_some_and(|wanted| link.kind != wanted.shown_kind())
    {
        return differs("is not the interface that ADD created".into());
    }
    if is_another_mac(link.mac, wanted.mac, parents_mac) {
        let shown = link.mac.map_or_else(|| "none".into(), |mac| mac.to_string());
        return differs(format!("has Ethernet address {shown}"));
    }
    // Another plugin may keep its interface down on purpose.
    if !link.up && (want.link.is_some() || want.device.is_some()) && !want.down {
        return differs("is down".into());
    }
    if wanted.mtu != 0 && link.mtu != wanted.mtu {
        return differs(format!("has MTU {}, not {}", link.mtu, wanted.mtu));
    }
    if let Some(asked) = &want.link
        && asked.mode().is_some()
        && link.mode != asked.mode()
    {
        return differs(match asked {
            Link::Tap(_) => "has another owner, group or number of queues".to_owned(),
            Link::Netkit(_) => "has another netkit mode or policy".to_owned(),
            Link::Vlan(_) => "has another VLAN tag".to_owned(),
            _ => format!("has another {} mode", asked.kind()),
        });
    }
    // The mode applies to all ipvlans of a parent, and any pod that has one and administrates its network can change
    // it.
    if want.judged_in_pod && link.mode == Some(LinkMode::Ipvlan(IpvlanMode::L3s)) {
        return differs("is in ipvlan mode l3s, in which no program judges what it receives".into());
    }
    if let Some(bridge) = want.link.as_ref().and_then(Link::bridge_in_pod) {
        let index = pod.find_link(bridge)?.map(|bridge| bridge.index);
        if index.is_none() || link.controller != index {
            return differs(format!("is not a port of bridge {bridge} of the pod"));
        }
    }
    let addresses = pod.addresses(link.index)?;
    if let Some(missing) = want.addresses.iter().find(|address| !addresses.contains(address)) {
        return differs(format!("lacks address {missing}"));
    }
    Ok(match missing_route(&want.routes, link.index, pod)? {
        Some(route) => Found::Differs(format!("the route to {} is gone", route.destination)),
        None => Found::AsWanted(link),
    })
}

/// Returns the first route that does not lead through the interface any more, in the main table.
fn missing_route<'r>(
    wanted: &'r [Route],
    interface: u32,
    namespace: &mut Handle,
) -> Result<Option<&'r Route>, StepError> {
    let mut main =
        wanted.iter().filter(|route| route.table.is_none_or(|table| table == MAIN_TABLE)).peekable();
    if main.peek().is_none() {
        return Ok(None);
    }
    let routes = namespace.routes_like(main.clone().map(|route| &route.destination))?;
    let is_there = |route: &Route| {
        routes.iter().any(|found| {
            found.destination == route.destination.trunc()
                && found.gateway == route.gateway
                && found.interface == Some(interface)
        })
    };
    Ok(main.find(|route| !is_there(route)))
}

/// Whether an interface has neither the Ethernet address that it was created with, if that is known, nor its parent's.
fn is_another_mac(found: Option<Mac>, made: Option<Mac>, parents: Option<Mac>) -> bool {
    made.is_some() && found != made && (parents.is_none() || found != parents)
}

/// Whether a link has the name of the created interface but is a different link.
fn is_another(link: &LinkState, made: &Interface) -> bool {
    made.index != 0 && made.index != link.index
}

fn compare_host_end(
    want: &Expected,
    pod: Option<&LinkState>,
    host: &mut Handle,
) -> Result<Option<String>, StepError> {
    if let (Some(parent), Some(pod)) = (want.link.as_ref().and_then(Link::parent), pod)
        && host.find_link(parent)?.map(|link| link.index) != pod.link
    {
        return Ok(Some(format!("interface {} is not on {parent}", pod.name)));
    }
    let Some(wanted) = &want.host else { return Ok(None) };
    let Some(link) = host.find_link(&wanted.name)? else {
        return Ok(Some(format!("link {} is gone from the node", wanted.name)));
    };
    // The kernel does not show the VF of a representor: see `representor::difference`.
    let is_pair = want.device.is_none();
    if is_another(&link, wanted) || (is_pair && pod.is_some_and(|pod| link.link != Some(pod.index))) {
        return Ok(Some(format!("link {} is not the other end of the pod's interface", wanted.name)));
    }
    if !link.up {
        return Ok(Some(format!("link {} of the node is down", wanted.name)));
    }
    if let Some(side) = &want.host_side {
        let addresses = host.addresses(link.index)?;
        if let Some(missing) = side.addresses.iter().find(|address| !addresses.contains(address)) {
            return Ok(Some(format!("link {} of the node lacks address {missing}", wanted.name)));
        }
        if let Some(route) = missing_route(&side.routes, link.index, host)? {
            return Ok(Some(format!("the node's route to {} is gone", route.destination)));
        }
    }
    compare_bridge(want, &link, host)
}

fn compare_bridge(want: &Expected, port: &LinkState, host: &mut Handle) -> Result<Option<String>, StepError> {
    let (Some(wanted), Some(wanted_port)) = (&want.bridge, want.link.as_ref().and_then(Link::port)) else {
        return Ok(None);
    };
    let name = &wanted.name;
    let Some(bridge) = host.find_link(name)?.filter(|link| link.kind == "bridge") else {
        return Ok(Some(format!("bridge {name} is gone")));
    };
    if port.controller != Some(bridge.index) {
        return Ok(Some(format!("link {} is not a port of bridge {name}", port.name)));
    }
    if wanted_port.hairpin && port.hairpin != Some(true) {
        return Ok(Some(format!("port {} is not in hairpin mode", port.name)));
    }
    if wanted_port.isolated && !port.isolated {
        return Ok(Some(format!("port {} is not isolated", port.name)));
    }
    if wanted.vlan_filtering && !host.filters_by_vlan(bridge.index)? {
        return Ok(Some(format!("bridge {name} does not filter by VLAN")));
    }
    if let Some(vlans) = &wanted_port.vlans {
        let present = host.port_vlans()?.remove(&port.index).unwrap_or_default();
        if !netlink::has_vlans(&present, vlans) {
            return Ok(Some(format!("port {} is in other VLANs", port.name)));
        }
    }
    if wanted.promiscuous && !bridge.promiscuous {
        return Ok(Some(format!("bridge {name} is not in promiscuous mode")));
    }
    let device = match &want.gateway_device {
        Some(device) => match host.find_link(device)?.filter(|link| link.up) {
            Some(link) => link,
            None => return Ok(Some(format!("device {device}, which has the gateways, is gone or down"))),
        },
        None => bridge,
    };
    let addresses = host.addresses(device.index)?;
    let missing = want.gateways.iter().find(|gateway| !addresses.contains(gateway));
    Ok(missing.map(|gateway| format!("{} {} lacks gateway address {gateway}", device.kind, device.name)))
}

/// Runs CHECK of every other plugin of the attachment. `last` is the final result, if the plugins' configurations do
/// not contain it already.
pub(super) fn check_delegates(
    node: &Node,
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    last: Option<&Value>,
) -> Result<(), AttachError> {
    for step in &attachment.steps {
        let Step::Delegate(delegate) = step else { continue };
        let call =
            DelegateCall { command: Command::Check, netns: Some(&sandbox.netns), attachment, delegate };
        call.run(node, sandbox, last.cloned())
            .map_err(|error| AttachError::step(Doing::Check, attachment, "", error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{VfLinkState, VfRates};

    /// Rows: SRV-ignored.
    #[test]
    fn a_setting_that_the_driver_does_not_report_is_no_difference() {
        let rates = |max| Some(VfRates { min: 0, max });
        let wanted = VfSettings {
            rates: rates(200),
            link_state: Some(VfLinkState::Enable),
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            ..VfSettings::default()
        };
        let silent = VfSettings {
            rates: rates(0),
            link_state: Some(VfLinkState::Auto),
            mac: Some(Mac([0; 6])),
            trust: Some(false),
            ..VfSettings::default()
        };
        assert_eq!(other_setting(&wanted, Some(&silent)), None);
        let other = VfSettings { rates: rates(100), ..silent };
        assert_eq!(other_setting(&wanted, Some(&other)), Some("max_tx_rate"));
        assert_eq!(other_setting(&wanted, None), Some("mac"));
        assert_eq!(other_setting(&VfSettings::default(), None), None);
    }

    /// Rows: IVL-parent-mac.
    #[test]
    fn an_interface_has_the_address_that_it_was_made_with_or_that_of_the_parent_that_it_follows() {
        let mac = |last| Some(Mac([2, 0, 0, 0, 0, last]));
        for (found, made, parents, expected) in [
            (mac(1), mac(1), None, false),
            (mac(2), mac(1), None, true),
            (mac(2), mac(1), mac(2), false),
            // A VLAN with an address of its own keeps it.
            (mac(1), mac(1), mac(2), false),
            (mac(3), mac(1), mac(2), true),
            (None, mac(1), None, true),
            (None, None, None, false),
            (mac(3), None, mac(2), false),
        ] {
            assert_eq!(is_another_mac(found, made, parents), expected, "{found:?} {made:?} {parents:?}");
        }
    }
}
