//! Packets that come in by an uplink.

use std::collections::BTreeMap;
use std::time::Duration;

use netattach::bpf::{Decline, FastPath, FastStats, Place, Segment, Uplink};
use netattach_common::{Seen, StationKey};
use netattach_tests::traffic::{PATIENCE, eventually};

use super::fast::{BRIDGE, FastRig, PEER};
use super::*;

const REDIRECT: i32 = 7;
const STACK: i32 = -1;
const DROP: i32 = 2;
/// A station behind the uplink.
const OUTSIDE: Mac = Mac([2, 0, 0, 0, 0, 0x77]);
/// The loopback device's own address.
const OWN: Mac = Mac([0; 6]);

struct WireRig {
    rig: FastRig,
    program: SchedClassifier,
    is_known: bool,
}

/// Changes of the receiver's counters caused by a packet.
#[derive(Debug, Default, PartialEq, Eq)]
struct Moved {
    verdict: i32,
    received: u64,
    dropped: u64,
    fast_path: u64,
    left: Vec<(Decline, u64)>,
}

impl WireRig {
    /// The loopback device is an uplink; the receiver is an attachment on its bridge.
    fn new(leads_to: Segment) -> Self {
        let mut rig = FastRig::new();
        rig.rig.dataplane.attachments().unbind(DEVICE).unwrap();
        let uplink =
            Uplink { leads_to: Some(leads_to), fast: true, xdp: None, gateway: false, mtu: 1500, mac: OWN };
        rig.fast.set_uplinks([(DEVICE, uplink)].into()).unwrap();
        let locals = [PEER_V4, PEER_V6].map(|address| ((Segment::Routed, address.parse().unwrap()), PEER));
        rig.fast.set_locals(locals.into()).unwrap();
        let program = SchedClassifier::from_pin(rig.rig.pin("prog/na_wire")).unwrap();
        Self { rig, program, is_known: false }
    }

    fn receive(&self, frame: &[u8]) -> Moved {
        self.receive_in_segments(frame, 0)
    }

    /// As one packet that is still to be cut into segments of that many bytes.
    fn receive_in_segments(&self, frame: &[u8], segment: u32) -> Moved {
        let look = || (self.rig.rig.dataplane.stats(PEER).unwrap(), self.rig.fast.stats(PEER).unwrap());
        if self.is_known {
            self.see();
        }
        let (stats, fast) = look();
        // `struct __sk_buff` up to and with `gso_size`, and the padding to its end.
        let mut context = [0; 184];
        context[176..180].copy_from_slice(&segment.to_ne_bytes());
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            repeat: 1,
            ..TestRunOptions::new()
        };
        let result = self.program.test_run(options).expect("run the program");
        let (stats_after, fast_after) = look();
        assert_eq!(fast_after.sent, FastStats::default().sent);
        let left = fast_after.declined().map(|(reason, packets)| {
            let before = fast.declined[reason as usize];
            (reason, packets - before)
        });
        Moved {
            verdict: result.return_value as i32,
            received: stats_after.to_pod.packets - stats.to_pod.packets,
            dropped: stats_after.dropped_to_pod.packets - stats.dropped_to_pod.packets,
            fast_path: fast_after.received.packets - fast.received.packets,
            left: left.filter(|(_, packets)| *packets > 0).collect(),
        }
    }

    /// With the station already known to the bridge, for as long as the test takes.
    fn known() -> Self {
        let rig = Self::new(Segment::Bridge(BRIDGE));
        assert_eq!(rig.receive(&from_outside().udp(1, 2).frame()), left(Decline::Learning));
        Self { is_known: true, ..rig }
    }

    /// Marks the station as just seen by the bridge.
    fn see(&self) {
        let data = MapData::from_pin(self.rig.rig.pin("na_seen")).unwrap();
        let mut seen: HashMap<_, StationKey, Seen> = Map::LruHashMap(data).try_into().unwrap();
        // A second back: the programs' clock lags by a tick.
        let at = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec as u32 - 1;
        let key = StationKey::new(BRIDGE, netattach_common::Mac { octets: OUTSIDE.0 });
        seen.insert(key, Seen { port: DEVICE, at }, 0).unwrap();
    }
}

fn from_outside() -> Packet {
    Packet::between("10.0.0.9", PEER_V4).from_mac(OUTSIDE)
}

fn from_outside6() -> Packet {
    Packet::between("fd00::9", PEER_V6).from_mac(OUTSIDE)
}

/// A packet to the node itself, which routes it.
fn routed(packet: &Packet) -> Vec<u8> {
    let mut frame = packet.frame();
    frame[..6].copy_from_slice(&OWN.0);
    frame
}

fn taken() -> Moved {
    Moved { verdict: REDIRECT, received: 1, fast_path: 1, ..Moved::default() }
}

/// Left to the stack for a reason; `None`: not counted.
fn left(reason: impl Into<Option<Decline>>) -> Moved {
    let left = reason.into().map(|reason| (reason, 1)).into_iter().collect();
    Moved { verdict: STACK, left, ..Moved::default() }
}

#[test]
fn unicast_traffic_to_an_attachment_takes_the_fast_path_once_the_bridge_has_seen_its_sender() {
    let rig = WireRig::known();
    let fragment = from_outside().udp(1, 2).fragment(0, true).frame();
    for frame in [
        from_outside().tcp(1, 2, tcp::SYN).frame(),
        from_outside().udp(1, 2).frame(),
        from_outside().ping(3).frame(),
        from_outside6().tcp(1, 2, tcp::ACK).frame(),
        fragment,
        from_outside().udp(1, 2).hop_limit(1).frame(),
    ] {
        assert_eq!(rig.receive(&frame), taken());
    }
    let other = from_outside().from_mac(Mac([2, 0, 0, 0, 0, 0x78])).udp(1, 2).frame();
    assert_eq!(rig.receive(&other), left(Decline::Learning), "another station");
    assert_eq!(rig.receive(&other), taken());
}

#[test]
fn what_is_for_nobody_here_or_keeps_the_bridge_informed_is_left_to_it() {
    let rig = WireRig::known();
    let plain = from_outside().udp(1, 2).frame();
    let to = |mac: [u8; 6]| {
        let mut frame = plain.clone();
        frame[..6].copy_from_slice(&mac);
        frame
    };
    for frame in [
        to([1, 0, 0x5e, 0, 0, 1]),
        to([0xff; 6]),
        to([2, 0, 0, 0, 0, 0x55]),
        from_outside().tagged(5).udp(1, 2).frame(),
        arp_request(OUTSIDE, "10.0.0.9", PEER_V4),
        other_ethertype(0x88cc),
    ] {
        assert_eq!(rig.receive(&frame), left(None));
    }
    let hidden = from_outside6().extension(60, &[0, 1, 4, 0, 0, 0, 0]).udp(1, 2).frame();
    let solicitation = from_outside6().hop_limit(255).neighbour(135, PEER_V6, &[(1, OUTSIDE)]).frame();
    for frame in [hidden, solicitation] {
        assert_eq!(rig.receive(&frame), left(Decline::Control));
    }
}

#[test]
fn what_does_not_fit_is_left_to_the_bridge_unless_it_is_still_to_be_cut() {
    let mut rig = WireRig::known();
    let frame = from_outside().tcp(1, 2, tcp::ACK).frame();
    let mtu = frame.len() as u32 - 15;
    let place = Place { segment: Segment::Bridge(BRIDGE), mtu, mac: PEER_MAC };
    rig.rig.fast.put(PEER, place).unwrap();
    assert_eq!(rig.receive(&frame), left(Decline::TooBig));
    assert_eq!(rig.receive_in_segments(&frame, 10), taken());
}

#[test]
fn the_receivers_policy_holds_and_every_packet_is_counted_once() {
    let rig = WireRig::known();
    let from_one = policy(&[("10.0.0.9/32", 1)], &[(1, port(17, 80))]);
    let ingress = rig.rig.rig.install(&from_one);
    rig.rig.rig.dataplane.policies().set(PEER, PolicyIds { ingress, egress: 0 }).unwrap();
    assert_eq!(rig.receive(&from_outside().udp(1, 80).frame()), taken());
    let refused = Moved { verdict: DROP, dropped: 1, ..Moved::default() };
    assert_eq!(rig.receive(&from_outside().udp(1, 81).frame()), refused);
    assert_eq!(rig.receive(&from_outside().tcp(1, 80, tcp::SYN).frame()), refused);
    let about_nothing = from_outside().unreachable(&Packet::between(PEER_V4, "10.0.0.9").udp(5, 6)).frame();
    assert_eq!(rig.receive(&about_nothing), refused);
    let drops = rig.rig.rig.dataplane.stats(PEER).unwrap().drops;
    let counted = [DropReason::IngressPort, DropReason::IcmpUnrelated].map(|reason| drops[reason as usize]);
    assert_eq!(counted, [2, 1]);
}

#[test]
fn a_receiver_that_is_not_ready_is_left_to_the_stack() {
    let mut rig = WireRig::known();
    let frame = from_outside().udp(1, 2).frame();
    let pending = Checks { pending: true, ..Checks::default() };
    rig.rig.put_peer(Attachment { mac: PEER_MAC, flags: pending, ..bare() });
    assert_eq!(rig.receive(&frame), left(Decline::Unready));
    rig.rig.put_peer(Attachment { mac: PEER_MAC, ..bare() });
    assert_eq!(rig.receive(&frame), taken());
    rig.rig.fast.renew(Duration::ZERO).unwrap();
    // The programs read a clock that advances with the timer tick.
    let over = || rig.receive(&frame) == left(Decline::Unwatched);
    assert!(eventually(PATIENCE, over));
    rig.rig.fast.renew(FastPath::now() + Duration::from_secs(60)).unwrap();
    rig.rig.fast.remove(PEER).unwrap();
    assert_eq!(rig.receive(&frame), left(None), "the receiver has opted out");
    rig.rig.fast.set_uplinks(BTreeMap::new()).unwrap();
    assert_eq!(rig.receive(&frame), left(None), "no uplink");
}

/// An executed plugin may add a port to a bridge that is taken for an uplink before it is entered.
#[test]
fn what_comes_by_an_attachments_device_is_for_its_own_program() {
    let rig = WireRig::known();
    let frame = from_outside().udp(1, 2).frame();
    assert_eq!(rig.receive(&frame), taken());
    rig.rig.rig.dataplane.attachments().bind(DEVICE, POD).unwrap();
    assert_eq!(rig.receive(&frame), left(None));
    rig.rig.rig.dataplane.attachments().unbind(DEVICE).unwrap();
    assert_eq!(rig.receive(&frame), taken());
}

#[test]
fn what_only_routers_understand_is_left_to_the_node() {
    let mut rig = WireRig::new(Segment::Routed);
    rig.rig.fast.put(PEER, Place { segment: Segment::Routed, mtu: 1500, mac: PEER_MAC }).unwrap();
    let hop_by_hop = from_outside6().extension(0, &[0, 1, 4, 0, 0, 0, 0]).udp(1, 2);
    let from_link = Packet::between("fe80::9", PEER_V6).from_mac(OUTSIDE).udp(1, 2);
    let from_nobody = Packet::between("::", PEER_V6).from_mac(OUTSIDE).udp(1, 2);
    for (packet, reason) in [
        (from_outside().udp(1, 2).hop_limit(1), Decline::HopLimit),
        (from_outside6().udp(1, 2).hop_limit(1), Decline::HopLimit),
        (from_outside().options(&[1, 1, 1, 0]).udp(1, 2), Decline::HopLimit),
        (hop_by_hop, Decline::HopLimit),
        (from_link, Decline::Unroutable),
        (from_nobody, Decline::Unroutable),
        // The loopback device routes nothing.
        (from_outside().udp(1, 2), Decline::Source),
        (from_outside6().udp(1, 2), Decline::Source),
    ] {
        assert_eq!(rig.receive(&routed(&packet)), left(reason), "{packet:?}");
    }
    // A frame for another station, and the node's own packet.
    assert_eq!(rig.receive(&from_outside().udp(1, 2).frame()), left(None));
    let own = routed(&Packet::between("10.0.0.9", "10.0.0.1").from_mac(OUTSIDE).udp(1, 2));
    assert_eq!(rig.receive(&own), left(None));
}
