//! Random whole packets: valid, half-valid and invalid. The programs' verdicts are compared with an interpretation of
//! the bytes and of the policies' text that shares no code with them, and with the answer of `explain`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use netattach::objects::access::Restrictions;
use netattach::policy::diff::Programmed;
use netattach::policy::explain::{self, Asked, End, Form, NodeRules, Question, View};
use netattach::policy::incremental::Compiler;
use netattach::policy::options::Options;
use netattach_tests::reading::{self, Reading};
use proptest::prelude::prop_assert_eq;
use proptest::test_runner::{Config as Cases, TestRunner};

use super::generated::{World, any_world};
use super::*;

/// Number of worlds, each with that many packets in each direction.
const WORLDS: u32 = 60;
const PACKETS: u32 = 250;

const OTHER_MAC: Mac = Mac([2, 9, 9, 9, 9, 9]);
const LINK_LOCAL: &str = "fe80::ff:fe00:1";
const V6: [&str; 9] = [
    "fd00::1",
    "fd00::2",
    "fd00::9",
    "fe80::ff:fe00:1",
    "fe80::2",
    "2001:db8::9",
    "::",
    "ff02::1",
    "ff02::1:ff00:1",
];
const GROUPS: [&str; 8] =
    ["ff02::1", "ff02::2", "ff02::16", "ff02::1:ff00:1", "ff02::1:ff00:2", "ff05::2", "ff0e::77", "fd00::2"];
const V4: [&str; 6] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.9", "0.0.0.0", "224.0.0.1"];
const SOME_PORTS: [u16; 15] = [1, 8, 10, 11, 12, 16, 65_535, 67, 68, 546, 547, 80, 443, 1985, 3222];

/// Random numbers from a seed (xorshift, Marsaglia 2003): a failure names its world, which contains the seed.
struct Dice(Cell<u64>);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(Cell::new(seed | 1))
    }

    fn below(&self, bound: usize) -> usize {
        let mut word = self.0.get();
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        self.0.set(word);
        (word >> 11) as usize % bound
    }

    fn of<T: Copy>(&self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// True one time in `times`.
    fn rarely(&self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn byte(&self) -> u8 {
        self.below(256) as u8
    }

    fn bytes(&self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.byte()).collect()
    }

    fn number(&self) -> u16 {
        self.below(65_536) as u16
    }
}

/// A frame towards the pod or from it.
fn any_packet(dice: &Dice, side: Side) -> Vec<u8> {
    let frame = match dice.below(10) {
        0..5 => traffic(dice, side),
        5 | 6 => discovery(dice, side),
        7 => arp(dice, side),
        8 => other(dice, side),
        _ => mutated(dice, if dice.rarely(3) { discovery(dice, side) } else { traffic(dice, side) }),
    };
    if dice.rarely(30) { mutated(dice, frame) } else { frame }
}

fn source_mac(dice: &Dice, side: Side) -> Mac {
    match side {
        FromPod if dice.rarely(30) => OTHER_MAC,
        FromPod => POD_MAC,
        ToPod => OTHER_MAC,
    }
}

fn ends(dice: &Dice, side: Side, own: &'static str, all: &[&'static str]) -> (&'static str, &'static str) {
    let peer = dice.of(all);
    match side {
        FromPod if dice.rarely(12) => (dice.of(all), peer),
        FromPod => (own, peer),
        ToPod => (peer, own),
    }
}

fn traffic(dice: &Dice, side: Side) -> Vec<u8> {
    let four = dice.rarely(2);
    let (from, to) = if four {
        ends(dice, side, POD_V4, &V4)
    } else {
        ends(dice, side, dice.of(&[POD_V6, POD_V6, LINK_LOCAL]), &V6)
    };
    let mut packet =
        Packet::between(from, to).from_mac(source_mac(dice, side)).hop_limit(dice.of(&[1, 64, 255]));
    if dice.rarely(15) {
        packet = packet.tagged(dice.number());
    }
    if four && dice.rarely(4) {
        let option = |dice: &Dice| match dice.below(5) {
            0 => vec![1],
            1 => vec![dice.of(&[131, 137]), 7, 4, 10, 0, 0, 9],
            2 => vec![148, 4, 0, 0],
            3 => vec![0],
            _ => dice.bytes(4),
        };
        let mut options: Vec<u8> = (0..dice.below(16)).flat_map(|_| option(dice)).collect();
        options.truncate(40);
        options.resize(options.len().next_multiple_of(4), 0);
        packet = packet.options(&options);
    }
    for _ in 0..if four || !dice.rarely(2) { 0 } else { dice.of(&[1, 1, 2, 3, 7, 8]) } {
        packet = match dice.below(6) {
            0 => packet.extension(0, &[0, 5, 2, 0, 0, 1, 0]),
            1 => packet.extension(43, &[0, dice.of(&[0, 2, 3, 4]), dice.of(&[0, 0, 1]), 0, 0, 0, 0]),
            2 => packet.extension(44, &[&[0, 0, dice.of(&[0, 0, 1, 9])], &[0, 0, 0, 7][..]].concat()),
            3 => packet.extension(51, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            4 => packet.extension(135, &[0, 1, 4, 0, 0, 0, 0]),
            _ => packet.extension(60, &[1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        };
    }
    if dice.rarely(6) {
        packet =
            packet.identification(dice.number()).fragment(dice.of(&[0, 0, 1, 2, 3, 185]), dice.rarely(2));
    }
    let (source, port) = (dice.number(), dice.of(&SOME_PORTS));
    let packet = match dice.below(12) {
        0..4 => packet.tcp(source, port, dice.of(&[SYN, SYN, SYN | ACK, ACK, 4, 1, 0, 0x29, dice.byte()])),
        4 if !four => packet.payload(17, &dhcpv6(dice.of(&[0, 1, 2, 3, 8, 12, 13, 20, 21, 36]))),
        4..7 => packet.udp(dice.of(&[source, 67, 68, 547, 546]), port),
        7 => packet.sctp(source, port, dice.of(&[INIT, INIT_ACK, 0, 3])),
        8 => packet.ping(source),
        9 => packet.icmp(
            dice.of(&[0, 1, 2, 3, 4, 5, 9, 11, 13, 128, 129, 151]),
            &if dice.rarely(2) { about_own(four) } else { [dice.bytes(60), vec![0; 4]].concat() },
        ),
        10 => packet.payload(2, &[dice.of(&[0x11, 0x13, 0x16, 0x22, 0x30]), 0, 0, 0, 224, 0, 0, 9]),
        _ => packet.payload(dice.of(&[2, 33, 47, 50, 59, 89, 103, 112, 136]), &dice.bytes(40)),
    };
    packet.frame()
}

/// A message from the port of clients of DHCPv6 to that of servers.
fn dhcpv6(message: u8) -> Vec<u8> {
    vec![2, 34, 2, 35, 0, 12, 0, 0, message, 0, 0, 1]
}

/// What follows the checksum of an ICMP error about a packet to the pod.
fn about_own(four: bool) -> Vec<u8> {
    let own: Vec<u8> = if four {
        POD_V4.parse::<std::net::Ipv4Addr>().unwrap().octets().to_vec()
    } else {
        POD_V6.parse::<std::net::Ipv6Addr>().unwrap().octets().to_vec()
    };
    [vec![0; 4 + if four { 16 } else { 24 }], own, vec![0; 8]].concat()
}

fn discovery(dice: &Dice, side: Side) -> Vec<u8> {
    let (own, peer) = (dice.of(&[POD_V6, POD_V6, LINK_LOCAL, "::"]), dice.of(&V6));
    let to = dice.of(&[peer, dice.of(&GROUPS)]);
    let (from, to) = match side {
        FromPod => (if dice.rarely(12) { dice.of(&V6) } else { own }, to),
        ToPod => (peer, dice.of(&[POD_V6, LINK_LOCAL, to])),
    };
    let target = if dice.rarely(2) { to } else { dice.of(&V6) };
    let target: std::net::Ipv6Addr = target.parse().unwrap();
    let kind = dice.of(&[130, 131, 132, 133, 133, 134, 135, 135, 135, 136, 136, 137, 143, 151]);
    let mut rest = vec![if dice.rarely(8) { dice.byte() } else { 0 }, 0, 0, u8::from(dice.rarely(15))];
    if kind != 133 && kind != 143 {
        rest.extend(target.octets());
    }
    let mac = if dice.rarely(6) { OTHER_MAC } else { source_mac(dice, side) };
    for _ in 0..dice.of(&[0, 0, 1, 1, 2, 3]) {
        rest.extend([dice.of(&[1, 1, 2, 14, 5]), dice.of(&[1, 1, 1, 1, 2, 0])]);
        rest.extend(mac.0);
    }
    if dice.rarely(10) {
        rest.extend(dice.bytes(20));
    }
    let mut packet = Packet::between(from, to).from_mac(source_mac(dice, side));
    if dice.rarely(4) {
        packet = packet.extension(0, &[0, 5, 2, 0, 0, 1, 0]);
    }
    if dice.rarely(12) {
        packet = packet.fragment(0, dice.rarely(2));
    }
    let limit = if (133..138).contains(&kind) { 255 } else { 1 };
    let limit = if dice.rarely(8) { dice.of(&[1, 64, 254, 255]) } else { limit };
    packet.hop_limit(limit).icmp(kind, &rest).frame()
}

fn arp(dice: &Dice, side: Side) -> Vec<u8> {
    let sender = if dice.rarely(4) { OTHER_MAC } else { POD_MAC };
    let mut frame = arp_request(sender, dice.of(&V4), dice.of(&V4));
    frame[6..12].copy_from_slice(&source_mac(dice, side).0);
    frame[21] = dice.of(&[1, 1, 1, 2, 2, 3, 8]);
    frame.extend(vec![0; dice.of(&[0, 0, 18, 22, 23, 200])]);
    frame
}

fn other(dice: &Dice, side: Side) -> Vec<u8> {
    let to = match dice.below(4) {
        0 => Mac([1, 0x80, 0xc2, 0, 0, dice.of(&[0, 2, 0xe, 0x21, 0x30])]),
        1 => Mac([1, 0, 0x0c, 0xcc, 0xcc, dice.of(&[0xcc, 0xcd, 0xce])]),
        _ => PEER_MAC,
    };
    let ethertypes =
        [0x88b5, 0x88b6, 0x8847, 0x8863, 0x8808, 0x8809, 0x888e, 0x88cc, 0x8035, 0x88e5, 46, 3, 0];
    let ethertype = if dice.rarely(6) { dice.number() } else { dice.of(&ethertypes) };
    let control = dice.of(&[3, 3, 0x13, 0xf3]);
    let snap = |ethertype: u16| [&[0xaa, 0xaa, control, 0, 0, 0][..], &ethertype.to_be_bytes()].concat();
    let head = if dice.rarely(4) {
        snap(dice.of(&[0x0800, 0x86dd, 0x809b]))
    } else {
        vec![dice.of(&[0x42, 0xaa, 0])]
    };
    let payload = [head, dice.bytes(60)].concat();
    any_frame(to, source_mac(dice, side), ethertype, &payload[..dice.of(&[payload.len(), payload.len(), 0])])
}

/// A frame with some bytes changed behind its addresses, truncated, or with bytes appended.
fn mutated(dice: &Dice, mut frame: Vec<u8>) -> Vec<u8> {
    for _ in 0..dice.below(4) {
        let at = 12 + dice.below(frame.len() - 12);
        frame[at] = dice.of(&[dice.byte(), 0, 1, 0xff, frame[at] ^ 1 << dice.below(8)]);
    }
    match dice.below(3) {
        0 => frame.truncate(14.max(dice.below(frame.len() + 1))),
        1 => frame.extend(dice.bytes(30)),
        _ => {}
    }
    frame
}

/// The packet in a frame of IP without tags.
fn read(frame: &[u8]) -> Option<Reading> {
    reading::packet(&frame[14..], if frame[12..14] == [8, 0] { 4 } else { 6 }, false)
}

fn is_about_the_link(packet: &Reading, side: Side) -> bool {
    let IpAddr::V6(destination) = packet.destination else { return false };
    let near = reading::is_link_local(destination) || destination.segments()[0] & 0xff0f == 0xff02;
    let group =
        !packet.message().is_some_and(|kind| (133..=137).contains(&kind)) && destination.is_multicast();
    let meant = match side {
        FromPod => destination.segments()[..4] == [0xfd00, 0, 0, 0],
        ToPod => is_own(packet.destination),
    };
    packet.is_formed() && (near || group || meant)
}

fn is_own(address: IpAddr) -> bool {
    [POD_V4, POD_V6, LINK_LOCAL].iter().any(|own| own.parse() == Ok(address))
}

/// Whether a packet is of a protocol among routers, which a pod with no address but its own does not speak.
fn is_among_routers(packet: &Reading) -> bool {
    let to_group = packet.protocol == 17 && packet.destination.is_multicast();
    let to_port = packet.ports().is_some_and(|(_, to)| [1985, 2029, 3222].contains(&to));
    [88, 89, 103, 112].contains(&packet.protocol) || to_group && to_port
}

/// Whether a packet is no ICMP error, or one about a packet to the pod.
fn is_about_own(packet: &Reading) -> bool {
    let quoted = match (packet.source.is_ipv4(), packet.icmp()) {
        (true, Some(3 | 4 | 5 | 11 | 12)) => packet.payload.get(24..28),
        (false, Some(1..=4)) => packet.payload.get(32..48),
        _ => return true,
    };
    quoted.is_some_and(|quoted| match <[u8; 4]>::try_from(quoted) {
        Ok(four) => is_own(IpAddr::from(four)),
        Err(_) => <[u8; 16]>::try_from(quoted).is_ok_and(|six| is_own(IpAddr::from(six))),
    })
}

/// Whether a packet in a frame of that length passes the sender checks.
fn is_honest(packet: &Reading, length: usize) -> bool {
    if is_among_routers(packet) || !is_about_own(packet) {
        return false;
    }
    let to_port = |port| packet.protocol == 17 && packet.ports().is_some_and(|(_, to)| to == port);
    if packet.source.is_ipv4() {
        let asks_for_address =
            packet.source.is_unspecified() && packet.protocol == 17 && packet.ports() == Some((68, 67));
        let igmp = (packet.protocol == 2 && !packet.later).then(|| packet.payload.first().copied());
        let speaks_as_host = !matches!(igmp, Some(None | Some(0x11 | 0x13 | 0x14 | 0x30)))
            && !matches!(packet.icmp(), Some(5 | 9));
        return (is_own(packet.source) || asks_for_address)
            && !to_port(68)
            && (!to_port(67) || is_own_dhcp(packet, length))
            && speaks_as_host
            && reading::options_are_sound(&packet.options);
    }
    let message = packet.message();
    let unsourced = packet.source.is_unspecified()
        && packet.claims_the_link()
        && matches!(message, Some(131 | 132 | 133 | 135 | 143));
    if !(is_own(packet.source) || unsourced) || to_port(546) {
        return false;
    }
    if to_port(547) {
        return match packet.payload.get(8) {
            Some(message) => [1, 3, 4, 5, 6, 8, 9, 11, 20, 36].contains(message),
            None => !packet.first && packet.behind == 0,
        };
    }
    let options = match message {
        Some(130 | 134 | 137 | 151) => return false,
        Some(133) => 8,
        Some(135 | 136) => {
            let claims = message == Some(136) || packet.source.is_unspecified();
            if claims && !packet.target().is_some_and(is_own) {
                return false;
            }
            24
        }
        _ => return true,
    };
    packet.names_only(POD_MAC.0, options)
}

/// Whether a datagram to DHCP servers is the pod's own as a client, or too short for a message with all following
/// fields in a frame of that length.
fn is_own_dhcp(packet: &Reading, length: usize) -> bool {
    let Some(message) = packet.payload.get(8..42) else {
        return !packet.first && length < 14 + 20 + packet.options.len() + 42;
    };
    let address = IpAddr::from([message[12], message[13], message[14], message[15]]);
    message[..3] == [1, 1, 6]
        && message[24..28] == [0; 4]
        && message[28..] == POD_MAC.0
        && (address.is_unspecified() || is_own(address))
}

/// The expected verdict on a frame, and the query for `explain`.
fn judge(world: &World, frame: &[u8], side: Side) -> (bool, Option<Asked>) {
    let (direction, own) = if side == FromPod { ("egress", true) } else { ("ingress", false) };
    let isolated = |direction| world.isolates(direction);
    if !own && !isolated("ingress") && !isolated("egress") {
        return (true, None);
    }
    if let Some((ids, _, payload)) = reading::tags(frame, None)
        && !ids.is_empty()
        && ids.iter().all(|id| *id == 0)
    {
        // The tags carry a priority alone. `explain` knows no frames with tags.
        let untagged = [&frame[..12], &frame[payload - 2..]].concat();
        return (judge(world, &untagged, side).0, None);
    }
    let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
    let tagged = [0x8100, 0x88a8, 0x9100].contains(&ethertype);
    if tagged || own && frame[6..12] != POD_MAC.0 {
        return (false, None);
    }
    let asked = |protocol, port, form| Some(Asked { protocol, port, form });
    match ethertype {
        0x0806 => (is_sound_arp(frame, own), None),
        0x0800 | 0x86dd => {
            let Some(packet) = read(frame).filter(|packet| !packet.is_broken_discovery()) else {
                return (false, None);
            };
            if own && !is_honest(&packet, frame.len()) {
                return (false, None);
            }
            if !isolated("ingress") && !isolated("egress") {
                return (true, None);
            }
            if is_about_the_link(&packet, side) {
                return (true, asked(58, None, Form::Link));
            }
            if !own && is_own(packet.source) {
                return (false, None);
            }
            let peer = if own { packet.destination } else { packet.source };
            let port = packet.ports().map(|(_, to)| to);
            let allowed = world.allows_one(direction, peer, packet.protocol, port);
            let form = if packet.later { Form::Fragment } else { Form::Opening };
            (allowed, asked(packet.protocol, port, form))
        }
        _ => {
            let infrastructure = frame[..5] == [1, 0x80, 0xc2, 0, 0] && frame[5] < 0x30
                || frame[..5] == [1, 0, 0x0c, 0xcc, 0xcc] && [0xcc, 0xcd].contains(&frame[5])
                || [0x8808, 0x8809, 0x888e, 0x88cc].contains(&ethertype)
                || ethertype < 0x600 && matches!(frame.get(14), None | Some(0x42));
            let carried = match &frame[14..] {
                [0xaa | 0xab, 0xaa | 0xab, 0x03 | 0x13, 0, 0, 0 | 0xf8, high, low, ..]
                    if ethertype < 0x600 =>
                {
                    u16::from_be_bytes([*high, *low])
                }
                _ => ethertype,
            };
            let carriers = [0x0800, 0x0806, 0x86dd, 0x8100, 0x88a8, 0x9100, 0x8847, 0x8848, 0x8863, 0x8864];
            let form = Form::Ethertype(ethertype);
            match (own && (infrastructure || carriers.contains(&carried)), isolated(direction)) {
                (true, _) => (false, None),
                (false, isolated) => (!isolated, asked(0, None, form)),
            }
        }
    }
}

fn is_sound_arp(frame: &[u8], own: bool) -> bool {
    let arp = &frame[14..];
    if arp.len() > 50 || !own {
        return arp.len() <= 50;
    }
    reading::arp(arp).is_some_and(|(mac, address)| mac == POD_MAC.0 && is_own(address))
        && arp[28..].iter().all(|byte| *byte == 0)
}

/// The answer of `explain` for a packet between addresses; `None`: it cannot be asked.
fn explained(view: &View<'_>, side: Side, frame: &[u8], asked: Asked) -> Option<bool> {
    let is_ip = [[8, 0], [0x86, 0xdd]].contains(&[frame[12], frame[13]]);
    let (from, to) = match read(frame) {
        Some(packet) if is_ip => (packet.source, packet.destination),
        _ => (POD_V4.parse().unwrap(), "192.0.2.1".parse().unwrap()),
    };
    let known = |address: IpAddr| [POD_V4, POD_V6].iter().any(|own| own.parse() == Ok(address));
    let (own, peer) = if side == FromPod { (from, to) } else { (to, from) };
    if !known(own) || known(peer) {
        return None;
    }
    let question = Question { from: End::Address(from), to: End::Address(to), traffic: asked };
    explain::explain(view, &question).first().map(explain::Path::passes)
}

/// Rows: C29, C40, C80, C86, C88.
#[test]
fn random_packets_fare_as_their_bytes_and_the_policies_text_say() {
    // Room enough that no flow is displaced by another.
    let flows = 2 * WORLDS * PACKETS * 2;
    let rig = Rig::sized(|config| Config { max_flows_v4: flows, max_flows_v6: flows, ..config });
    let zone = Cell::new(1);
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    let questions = Cell::new(0);
    let judge = |world: &World, seed: u64| {
        let (objects, endpoints) = world.objects();
        let by_number = endpoints.iter().map(|endpoint| (endpoint.id, endpoint.clone().into())).collect();
        let desired = Compiler::default().update(&objects.clone().into(), &by_number, &Options::default());
        let tables = &desired.endpoints[&1];
        let before = rig.dataplane.policies().of(POD).unwrap();
        let ids = rig.enforce(tables.ingress.as_deref(), tables.egress.as_deref());
        for old in [before.ingress, before.egress] {
            rig.dataplane.policies().remove(&[old].into()).unwrap();
        }
        let policies = [(ids.ingress, &tables.ingress), (ids.egress, &tables.egress)];
        let programmed = Programmed {
            policies: policies
                .into_iter()
                .filter_map(|(id, table)| Some((id, Arc::clone(table.as_ref()?))))
                .collect(),
            endpoints: [(1, ids)].into(),
            last_id: 0,
        };
        let (limited, routed) = (BTreeMap::new(), BTreeMap::new());
        let (node, restrictions) = (NodeRules::default(), Restrictions::default());
        let view = View {
            objects: &objects,
            endpoints: &endpoints,
            limited: &limited,
            programmed: &programmed,
            desired: &desired,
            routed: &routed,
            node,
            behind_translation: false,
            restrictions: &restrictions,
        };
        let dice = Dice::new(seed);
        for number in 0..2 * PACKETS {
            let side = [FromPod, ToPod][number as usize % 2];
            let frame = any_packet(&dice, side);
            // For a test run, the kernel accepts no IP packet without its header.
            let least = if frame[12..14] == [0x86, 0xdd] { 54 } else { 34 };
            if [[8, 0], [0x86, 0xdd]].contains(&[frame[12], frame[13]]) && frame.len() < least {
                continue;
            }
            // Flows of different zones never match, so no packet is a reply.
            zone.set(zone.get() + 1);
            let attachment = Attachment { zone: zone.get(), flags, addresses: addresses.clone(), ..bare() };
            rig.dataplane.attachments().put(POD, &attachment).unwrap();
            let passed = rig.test_run(side, &frame, 1).return_value as i32 == -1;
            let (expected, asked) = self::judge(world, &frame, side);
            prop_assert_eq!(passed, expected, "{:?} {:02x?} {:?}", side, frame, read(&frame));
            // `explain` answers for ethertypes only as sent by the pod.
            let asked = asked.filter(|asked| side == FromPod || !matches!(asked.form, Form::Ethertype(_)));
            if let Some(said) = asked.and_then(|asked| explained(&view, side, &frame, asked)) {
                prop_assert_eq!(said, passed, "explain: {:?} {:02x?} {:?}", side, frame, asked);
                questions.set(questions.get() + 1);
            }
        }
        Ok(())
    };
    let mut runner = TestRunner::new(Cases { cases: WORLDS, failure_persistence: None, ..Cases::default() });
    runner.run(&(any_world(), proptest::prelude::any::<u64>()), |(world, seed)| judge(&world, seed)).unwrap();
    assert!(questions.get() > WORLDS * PACKETS / 10, "explain was asked {} times", questions.get());
}
