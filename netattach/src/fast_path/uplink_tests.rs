//! Tests of the choice of uplinks and gateways, and of the reasons against other devices.

use crate::fast_path::decide;
use crate::fast_path::decide::Others;
use crate::fast_path::uplink::*;
use crate::netlink::{BridgeState, PortState};

const BRIDGE: u32 = 3;
const PORT: u32 = 4;
const ROUTER: u32 = 5;
const SWITCHED: u32 = 10;
const ROUTED: u32 = 11;
const MAC: Mac = Mac([2, 0, 0, 0, 0, 9]);

fn link(index: u32) -> ForwardingState {
    ForwardingState {
        index,
        name: format!("dev{index}"),
        mtu: 1500,
        mac: Some(MAC),
        kind: String::new(),
        group: 0,
        xdp: false,
        controller: None,
        discipline: "noqueue".into(),
        bridge: None,
        port: None,
    }
}

fn port_of(index: u32, bridge: u32) -> ForwardingState {
    let port = PortState { forwarding: true, ..PortState::default() };
    ForwardingState { controller: Some(bridge), port: Some(port), ..link(index) }
}

/// A bridge with an attachment and an uplink, a routed attachment, and a device with the default route.
fn node() -> Node {
    let bridge = BridgeState { ageing: 30_000, ..BridgeState::default() };
    let links = [
        ForwardingState { bridge: Some(bridge), ..link(BRIDGE) },
        port_of(PORT, BRIDGE),
        ForwardingState { discipline: "fq_codel".into(), ..link(ROUTER) },
        port_of(SWITCHED, BRIDGE),
        link(ROUTED),
    ];
    let links = links.into_iter().map(|link| (link.index, link)).collect();
    Node { links, default_routes: [ROUTER].into(), ..Node::default() }
}

fn members() -> BTreeMap<u32, Member> {
    let member = |id: u32, device, routed| {
        let addresses = vec![format!("10.0.0.{id}").parse().unwrap()];
        let (mac, chosen) = (Mac([2, 0, 0, 0, 0, id as u8]), Vec::new());
        Member { id, mac, addresses, chosen, device, routed, kept_off: None }
    };
    [(1, member(1, SWITCHED, false)), (2, member(2, ROUTED, true))].into()
}

fn uplinks(mode: Mode, members: &BTreeMap<u32, Member>, node: &Node) -> Uplinks {
    with_xdp(mode, Xdp::Off, members, node)
}

fn with_xdp(mode: Mode, xdp: Xdp, members: &BTreeMap<u32, Member>, node: &Node) -> Uplinks {
    crate::fast_path::uplink::decide(mode, xdp, members, &decide::decide(mode, members, node), node)
}

fn local(id: u32) -> (Local, u32) {
    ((Segment::Routed, format!("10.0.0.{id}").parse().unwrap()), id)
}

fn entry(leads_to: impl Into<Option<Segment>>, gateway: bool) -> bpf::Uplink {
    let leads_to = leads_to.into();
    bpf::Uplink { leads_to, fast: leads_to.is_some(), xdp: None, gateway, mtu: 1500, mac: MAC }
}

#[test]
fn a_foreign_port_and_the_default_route_are_uplinks_and_the_bridge_is_a_gateway() {
    let uplink =
        |index, segment| (index, Uplink { name: format!("dev{index}"), segment, status: Ok(()), xdp: None });
    let expected = Uplinks {
        uplinks: [uplink(PORT, Segment::Bridge(BRIDGE)), uplink(ROUTER, Segment::Routed)].into(),
        entries: [
            (BRIDGE, entry(None, true)),
            (PORT, entry(Segment::Bridge(BRIDGE), false)),
            (ROUTER, entry(Segment::Routed, false)),
        ]
        .into(),
        locals: [local(1), local(2)].into(),
    };
    assert_eq!(uplinks(Mode::Auto, &members(), &node()), expected);
    assert_eq!(uplinks(Mode::On, &members(), &node()), expected);
    assert_eq!(expected.running(), [PORT, ROUTER].into());
}

#[test]
fn without_attachments_on_the_fast_path_there_are_none() {
    assert_eq!(uplinks(Mode::Off, &members(), &node()), Uplinks::default());
    assert_eq!(uplinks(Mode::Auto, &BTreeMap::new(), &node()), Uplinks::default());
    let mut only_routed = members();
    only_routed.remove(&1);
    let found = uplinks(Mode::Auto, &only_routed, &node());
    // The port of the other attachment is not an uplink for this one.
    assert_eq!(found.uplinks.keys().collect::<Vec<_>>(), [&ROUTER]);
    assert_eq!(found.locals, [local(2)].into());
}

#[test]
fn a_port_of_a_pod_that_comes_or_goes_is_none() {
    let mut node = node();
    node.links.insert(99, ForwardingState { group: OWN_GROUPS | 7, ..port_of(99, BRIDGE) });
    let found = uplinks(Mode::Auto, &members(), &node);
    assert_eq!(found.uplinks.keys().collect::<Vec<_>>(), [&PORT, &ROUTER]);
}

#[test]
fn a_bridge_with_the_default_route_leads_out_and_is_a_gateway() {
    let mut node = node();
    node.default_routes = [BRIDGE].into();
    let found = uplinks(Mode::Auto, &members(), &node);
    assert_eq!(found.entries[&BRIDGE], entry(Segment::Routed, true));
    assert_eq!(found.running(), [BRIDGE, PORT].into());
}

/// The states of the bridge's uplink and of the router with `auto` and with `on`, after a change.
fn with(change: impl FnOnce(&mut Node)) -> [[Option<&'static str>; 2]; 2] {
    let mut node = node();
    change(&mut node);
    [PORT, ROUTER].map(|index| {
        [Mode::Auto, Mode::On].map(|mode| {
            let found = uplinks(mode, &members(), &node);
            assert_eq!(found.entries.contains_key(&index), found.running().contains(&index));
            found.uplinks[&index].status.as_ref().err().map(Reason::name)
        })
    })
}

#[test]
fn conditions_that_break_delivery_are_never_ignored() {
    let never = |reason| [Some(reason); 2];
    let fine = [None; 2];
    let of = |node: &mut Node, index| node.links.remove(&index).unwrap();
    let put = |node: &mut Node, link: ForwardingState| drop(node.links.insert(link.index, link));
    let port = |change: fn(&mut PortState)| {
        with(|node| {
            let mut link = of(node, PORT);
            change(link.port.as_mut().unwrap());
            put(node, link);
        })
    };
    assert_eq!(port(|port| port.forwarding = false), [never("port-state"), fine]);
    assert_eq!(port(|port| port.isolated = true), [never("port-restricted"), fine]);
    assert_eq!(port(|port| port.locked = true), [never("port-restricted"), fine]);
    let ageing = with(|node| {
        let mut link = of(node, BRIDGE);
        link.bridge.as_mut().unwrap().ageing = SHORTEST_AGEING - 1;
        put(node, link);
    });
    assert_eq!(ageing, [never("ageing"), fine]);
    let enslaved = with(|node| {
        let link = ForwardingState { controller: Some(99), ..of(node, ROUTER) };
        put(node, link);
    });
    assert_eq!(enslaved, [fine, never("enslaved")]);
    let tunnel = with(|node| {
        let link = ForwardingState { mac: None, ..of(node, ROUTER) };
        put(node, link);
    });
    assert_eq!(tunnel, [fine, never("not-ethernet")]);
    assert_eq!(with(|node| node.ipsec = true), [fine, never("ipsec")]);
    assert_eq!(with(|node| node.filters.nat = true), [fine, never("nat")]);
}

#[test]
fn other_programs_are_respected_unless_the_setting_is_on() {
    let unless_on = |reason| [Some(reason), None];
    let fine = [None; 2];
    assert_eq!(with(|node| node.filters.ip = true), [fine, unless_on("ip-rules")]);
    for (index, expected) in
        [(PORT, [unless_on("device-rules"), fine]), (ROUTER, [fine, unless_on("device-rules")])]
    {
        assert_eq!(with(|node| node.filters.devices = [format!("dev{index}")].into()), expected);
    }
    let ingress = Others { ingress: true, egress: false };
    for (index, expected) in [(PORT, [unless_on("programs"), fine]), (ROUTER, [fine, unless_on("programs")])]
    {
        assert_eq!(with(|node| node.others = [(index, ingress)].into()), expected);
    }
    // Packets that the device sends meet the filters in any case.
    let egress = Others { ingress: false, egress: true };
    assert_eq!(with(|node| node.others = [(PORT, egress), (ROUTER, egress)].into()), [fine; 2]);
}

#[test]
fn uplinks_that_drop_early_know_all_attachments_that_they_lead_to() {
    let bridge = Segment::Bridge(BRIDGE);
    let found = with_xdp(Mode::Auto, Xdp::Native, &members(), &node());
    assert_eq!(found.xdp(), [(PORT, XdpMode::Native), (ROUTER, XdpMode::Native)].into());
    let xdp = |index: u32| found.entries[&index].xdp;
    assert_eq!([xdp(PORT), xdp(ROUTER)], [Some(XdpDrops::SpoofedAndDenied), Some(XdpDrops::Spoofed)]);
    let by_mac = |segment, id: u8| ((segment, format!("fe80::ff:fe00:{id:x}").parse().unwrap()), id.into());
    let expected =
        [local(1), local(2), ((bridge, local(1).0.1), 1), by_mac(bridge, 1), by_mac(Segment::Routed, 2)];
    assert_eq!(found.locals, expected.into());

    // Off the fast path only packets with a pod's source address can certainly be dropped.
    let found = with_xdp(Mode::Off, Xdp::Generic, &members(), &node());
    assert_eq!(found.running(), BTreeSet::new());
    assert!(found.uplinks.values().all(|uplink| uplink.status == Err(Reason::Idle)));
    assert_eq!(found.entries[&PORT].xdp, Some(XdpDrops::Spoofed));
    assert!(!found.entries[&PORT].fast && !found.entries.contains_key(&BRIDGE));
    assert_eq!(found.xdp(), [(PORT, XdpMode::Generic), (ROUTER, XdpMode::Generic)].into());
}

/// The node has a route to an address that is chosen on a routed link, and to no other of these.
#[test]
fn an_address_that_a_pod_has_chosen_on_a_bridge_is_taken_from_no_host_behind_an_uplink() {
    let mut members = members();
    let server: IpAddr = "10.0.0.77".parse().unwrap();
    for member in members.values_mut() {
        member.addresses.push(server);
        member.chosen.push(server);
    }
    let bridge = Segment::Bridge(BRIDGE);
    let by_mac = |segment, id: u8| ((segment, format!("fe80::ff:fe00:{id:x}").parse().unwrap()), id.into());
    let expected = [
        local(1),
        local(2),
        ((Segment::Routed, server), 2),
        ((bridge, local(1).0.1), 1),
        by_mac(bridge, 1),
        by_mac(Segment::Routed, 2),
    ];
    assert_eq!(with_xdp(Mode::Auto, Xdp::Native, &members, &node()).locals, expected.into());
    assert_eq!(
        uplinks(Mode::Auto, &members, &node()).locals,
        [local(1), local(2), ((Segment::Routed, server), 2)].into()
    );
}

#[test]
fn by_itself_no_veth_drops_early() {
    let mut node = node();
    node.links.get_mut(&PORT).unwrap().kind = "veth".into();
    let found = with_xdp(Mode::Auto, Xdp::Auto, &members(), &node);
    assert_eq!(found.xdp(), [(ROUTER, XdpMode::Native)].into());
}

#[test]
fn a_bridge_that_others_look_at_is_no_gateway_and_stays_a_switch() {
    let others = Others { ingress: false, egress: true };
    let node = Node { others: [(BRIDGE, others)].into(), ..node() };
    let found = uplinks(Mode::Auto, &members(), &node);
    assert!(!found.entries.contains_key(&BRIDGE));
    assert_eq!((found.running(), found.locals), ([PORT, ROUTER].into(), [local(2)].into()));
}
