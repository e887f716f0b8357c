//! The fast path between two pods of one bridge.

use std::time::Duration;

use aya::maps::ProgramArray;
use netattach::bpf::{Decline, FastPath, FastStats, Place, Segment};
use netattach_tests::traffic::{PATIENCE, eventually};

use super::*;

/// The pod at [`PEER_V4`], behind a device of its own.
pub(super) const PEER: u32 = 8;
const PEER_DEVICE: u32 = 1_000_000;
pub(super) const BRIDGE: u32 = 77;
/// The program's return value after `bpf_redirect_peer`.
const REDIRECT: i32 = 7;
const STACK: i32 = -1;
const DROP: i32 = 2;

pub(super) struct FastRig {
    pub(super) rig: Rig,
    pub(super) fast: FastPath,
}

/// Counter changes caused by a packet.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    verdict: i32,
    sent: u64,
    received: u64,
    received_dropped: u64,
    fast_path: u64,
    declined: Vec<(Decline, u64)>,
}

impl FastRig {
    /// Two attachments on one bridge, both on the fast path, with an agent that watches.
    pub(super) fn new() -> Self {
        let rig = Rig::new();
        let fast = rig.dataplane.fast_path().unwrap();
        let mut rig = Self { rig, fast };
        rig.put_peer(Attachment { mac: PEER_MAC, ..bare() });
        rig.rig.dataplane.attachments().bind(PEER_DEVICE, PEER).unwrap();
        rig.fast.put(POD, Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: POD_MAC }).unwrap();
        rig.fast.put(PEER, Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: PEER_MAC }).unwrap();
        rig.fast.renew(FastPath::now() + Duration::from_secs(60)).unwrap();
        rig
    }

    pub(super) fn put_peer(&self, attachment: Attachment) {
        self.rig.dataplane.attachments().put(PEER, &attachment).unwrap();
    }

    pub(super) fn send(&self, frame: &[u8]) -> Moved {
        let look = || {
            let dataplane = &self.rig.dataplane;
            (dataplane.stats(POD).unwrap(), dataplane.stats(PEER).unwrap(), self.fast_stats())
        };
        let (pod, peer, [fast_pod, fast_peer]) = look();
        let result = self.rig.test_run(FromPod, frame, 1);
        let (pod_after, peer_after, [fast_pod_after, fast_peer_after]) = look();
        let declined = fast_pod_after.declined().map(|(reason, packets)| {
            let before = fast_pod.declined[reason as usize];
            (reason, packets - before)
        });
        let fast_path = fast_peer_after.received.packets - fast_peer.received.packets;
        let bytes = fast_peer_after.received.bytes - fast_peer.received.bytes;
        assert_eq!(bytes, fast_path * frame.len() as u64);
        Moved {
            verdict: result.return_value as i32,
            sent: pod_after.from_pod.packets - pod.from_pod.packets,
            received: peer_after.to_pod.packets - peer.to_pod.packets,
            received_dropped: peer_after.dropped_to_pod.packets - peer.dropped_to_pod.packets,
            fast_path,
            declined: declined.filter(|(_, packets)| *packets > 0).collect(),
        }
    }

    fn fast_stats(&self) -> [FastStats; 2] {
        [POD, PEER].map(|id| self.fast.stats(id).unwrap())
    }
}

pub(super) fn taken() -> Moved {
    Moved { verdict: REDIRECT, sent: 1, received: 1, fast_path: 1, ..Moved::default() }
}

/// Let pass for the sender, and denied by the receiver's policy.
pub(super) fn refused() -> Moved {
    Moved { verdict: DROP, sent: 1, received_dropped: 1, ..Moved::default() }
}

/// Left to the stack for a reason; `None`: not counted.
pub(super) fn declined(reason: impl Into<Option<Decline>>) -> Moved {
    let declined = reason.into().map(|reason| (reason, 1)).into_iter().collect();
    Moved { verdict: STACK, sent: 1, declined, ..Moved::default() }
}

#[test]
fn traffic_of_two_pods_takes_the_fast_path() {
    let rig = FastRig::new();
    let fragment = from_pod().udp(1, 2).fragment(0, true).frame();
    let extended = from_pod6().extension(60, &[0, 1, 4, 0, 0, 0, 0]).udp(1, 2).frame();
    for frame in [
        from_pod().tcp(1, 2, SYN).frame(),
        from_pod().udp(1, 2).frame(),
        from_pod().ping(3).frame(),
        from_pod6().tcp(1, 2, ACK).frame(),
        fragment,
        extended,
    ] {
        assert_eq!(rig.send(&frame), taken());
    }
}

#[test]
fn what_keeps_the_bridge_informed_stays_on_it() {
    let rig = FastRig::new();
    let mut multicast = from_pod().udp(1, 2).frame();
    multicast[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 1]);
    for frame in [
        arp_request(POD_MAC, POD_V4, PEER_V4),
        from_pod6().hop_limit(255).neighbour(135, PEER_V6, &[(1, POD_MAC)]).frame(),
        other_ethertype(0x88b5),
        multicast,
    ] {
        assert_eq!(rig.send(&frame), declined(Decline::Control));
    }
}

#[test]
fn a_tagged_frame_stays_on_the_bridge() {
    let rig = FastRig::new();
    let addresses = vec![POD_V4.parse().unwrap()];
    let attachment = Attachment { addresses, vlans: BTreeSet::from([5]), ..bare() };
    rig.rig.dataplane.attachments().put(POD, &attachment).unwrap();
    assert_eq!(rig.send(&from_pod().tagged(5).udp(1, 2).frame()), declined(Decline::Control));
}

#[test]
fn a_sender_that_does_not_take_part_is_not_counted() {
    let mut rig = FastRig::new();
    rig.fast.remove(POD).unwrap();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), declined(None));
}

#[test]
fn other_destinations_are_left_to_the_stack() {
    let mut rig = FastRig::new();
    let frame = from_pod().udp(1, 2).frame();
    let mut elsewhere = frame.clone();
    elsewhere[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    assert_eq!(rig.send(&elsewhere), declined(Decline::Elsewhere));
    let mut itself = frame.clone();
    itself[..6].copy_from_slice(&POD_MAC.0);
    assert_eq!(rig.send(&itself), declined(Decline::Elsewhere));
    rig.fast.put(PEER, Place { segment: Segment::Bridge(BRIDGE + 1), mtu: 1500, mac: PEER_MAC }).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::Elsewhere));
    rig.fast.remove(PEER).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::Elsewhere));
    rig.fast.put(PEER, Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: PEER_MAC }).unwrap();
    assert_eq!(rig.send(&frame), taken());
}

#[test]
fn receivers_whose_addresses_end_alike_are_told_apart() {
    const OTHER: u32 = 9;
    const OTHER_MAC: Mac = Mac([2, 0, 0, 1, PEER_MAC.0[4], PEER_MAC.0[5]]);
    let place = |segment, mac| Place { segment, mtu: 1500, mac };
    let mut rig = FastRig::new();
    rig.rig.dataplane.attachments().put(OTHER, &Attachment { mac: OTHER_MAC, ..bare() }).unwrap();
    rig.rig.dataplane.attachments().bind(PEER_DEVICE + 1, OTHER).unwrap();
    rig.fast.put(OTHER, place(Segment::Bridge(BRIDGE), OTHER_MAC)).unwrap();
    let to_peer = from_pod().udp(1, 2).frame();
    let mut to_other = to_peer.clone();
    to_other[..6].copy_from_slice(&OTHER_MAC.0);
    let sent_to_other = Moved { verdict: REDIRECT, sent: 1, ..Moved::default() };
    for turn in 1..=3 {
        assert_eq!(rig.send(&to_peer), taken());
        assert_eq!(rig.send(&to_other), sent_to_other);
        assert_eq!(rig.send(&to_other), sent_to_other);
        assert_eq!(rig.fast.stats(OTHER).unwrap().received.packets, 2 * turn);
    }
    rig.fast.put(OTHER, place(Segment::Bridge(BRIDGE + 1), OTHER_MAC)).unwrap();
    assert_eq!(rig.send(&to_other), declined(Decline::Elsewhere), "it is on another bridge now");
    assert_eq!(rig.send(&to_peer), taken());
    rig.fast.remove(PEER).unwrap();
    assert_eq!(rig.send(&to_peer), declined(Decline::Elsewhere), "it has no place any more");
}

#[test]
fn a_receiver_that_is_not_ready_is_left_to_the_stack() {
    let rig = FastRig::new();
    let frame = from_pod().udp(1, 2).frame();
    let pending = Checks { pending: true, ..Checks::default() };
    rig.put_peer(Attachment { mac: PEER_MAC, flags: pending, ..bare() });
    assert_eq!(rig.send(&frame), declined(Decline::Unready));
    rig.put_peer(Attachment { mac: Mac([2, 0, 0, 0, 0, 9]), ..bare() });
    assert_eq!(rig.send(&frame), declined(Decline::Unready), "its record has another address");
    rig.put_peer(Attachment { mac: PEER_MAC, ..bare() });
    assert_eq!(rig.send(&frame), taken());
    rig.rig.dataplane.attachments().bind(PEER_DEVICE, POD).unwrap();
    rig.rig.dataplane.attachments().bind(DEVICE, POD).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::Unready), "its device is another's");
    rig.rig.dataplane.attachments().unbind(PEER_DEVICE).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::Unready), "its device is nobody's");
    rig.rig.dataplane.remove_attachment(PEER).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::Unready), "it has no record");
}

#[test]
fn what_does_not_fit_the_receivers_link_is_left_to_the_stack() {
    let mut rig = FastRig::new();
    let frame = from_pod().tcp(1, 2, ACK).frame();
    let length = frame.len() as u32 - 14;
    rig.fast.put(PEER, Place { segment: Segment::Bridge(BRIDGE), mtu: length, mac: PEER_MAC }).unwrap();
    assert_eq!(rig.send(&frame), taken());
    rig.fast.put(PEER, Place { segment: Segment::Bridge(BRIDGE), mtu: length - 1, mac: PEER_MAC }).unwrap();
    assert_eq!(rig.send(&frame), declined(Decline::TooBig));
}

#[test]
fn without_an_agent_the_fast_path_ends() {
    let mut rig = FastRig::new();
    rig.fast.renew(Duration::ZERO).unwrap();
    // The programs read a clock that advances with the timer tick.
    let over = || rig.send(&from_pod().udp(1, 2).frame()) == declined(Decline::Unwatched);
    assert!(eventually(PATIENCE, over));
}

#[test]
fn without_the_program_packets_take_the_stack() {
    let rig = FastRig::new();
    let data = MapData::from_pin(rig.rig.pin("na_prog")).unwrap();
    let mut programs: ProgramArray<_> = Map::from_map_data(data).unwrap().try_into().unwrap();
    programs.clear_index(&0).unwrap();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), declined(Decline::NoProgram));
}

#[test]
fn the_receivers_policy_holds_on_the_fast_path() {
    let rig = FastRig::new();
    let from_pod_only = policy(&[("10.0.0.1/32", 1)], &[(1, port(6, 80))]);
    let ingress = rig.rig.install(&from_pod_only);
    rig.rig.dataplane.policies().set(PEER, PolicyIds { ingress, egress: 0 }).unwrap();
    assert_eq!(rig.send(&from_pod().tcp(1, 80, SYN).frame()), taken());
    assert_eq!(rig.send(&from_pod().tcp(1, 81, SYN).frame()), refused());
    assert_eq!(rig.rig.dataplane.stats(PEER).unwrap().drops[DropReason::IngressPort as usize], 1);
}

#[test]
fn what_the_sender_may_not_send_never_gets_there() {
    let rig = FastRig::new();
    rig.rig.enforce(None, Some(&deny_all()));
    let refused = Moved { verdict: DROP, ..Moved::default() };
    assert_eq!(rig.send(&from_pod().tcp(1, 80, SYN).frame()), refused);
    assert_eq!(rig.send(&from_pod().from_mac(PEER_MAC).udp(1, 2).frame()), refused);
}

#[test]
fn the_receivers_bandwidth_holds_on_the_fast_path() {
    let rig = FastRig::new();
    let frame = from_pod().udp(1, 2).frame();
    // A burst of two frames, and then a very low rate.
    let to_pod = Rate::new(1, 2 * frame.len() as u64);
    let limits = Limits { to_pod, ..Limits::default() };
    rig.put_peer(Attachment { mac: PEER_MAC, limits, ..bare() });
    let verdicts: Vec<i32> = (0..6).map(|_| rig.send(&frame).verdict).collect();
    let passed = verdicts.iter().filter(|verdict| **verdict == REDIRECT).count();
    assert!((2..=3).contains(&passed), "{verdicts:?}");
    assert_eq!(verdicts.last(), Some(&DROP));
    let drops = rig.rig.dataplane.stats(PEER).unwrap().drops;
    assert_eq!(drops[DropReason::RateLimit as usize], 6 - passed as u64);
}

#[test]
fn a_successor_begins_with_nobody_on_the_fast_path() {
    let rig = FastRig::new();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), taken());
    let counted = rig.fast_stats();
    let successor = Dataplane::open(&config(&rig.rig.root)).unwrap();
    let mut fast = successor.fast_path().unwrap();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), declined(None));
    assert_eq!([POD, PEER].map(|id| fast.stats(id).unwrap()), counted, "counters stay");
    fast.put(POD, Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: POD_MAC }).unwrap();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), declined(Decline::Unwatched), "nobody has renewed");
    fast.renew(FastPath::now() + Duration::from_secs(60)).unwrap();
    assert_eq!(rig.send(&from_pod().udp(1, 2).frame()), declined(Decline::Elsewhere));
    successor.remove_attachment(PEER).unwrap();
    assert_eq!(fast.stats(PEER).unwrap(), FastStats::default());
}
