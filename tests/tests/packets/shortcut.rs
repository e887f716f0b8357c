//! The shortcut from pod to pod: that packets take it, and that it answers as `na_from_pod` and `na_fast` do.

use std::collections::BTreeMap;

use aya::maps::ProgramArray;
use netattach::bpf::{Decline, FastStats};

use super::fast::{FastRig, PEER, declined, refused, taken};
use super::*;

const FIN: u8 = tcp::FIN;

/// Empties the slot by which packets get to `na_fast`.
fn without_na_fast(rig: &FastRig) {
    let data = MapData::from_pin(rig.rig.pin("na_prog")).unwrap();
    let mut programs: ProgramArray<_> = Map::from_map_data(data).unwrap().try_into().unwrap();
    programs.clear_index(&0).unwrap();
}

/// Forgets who was found last for the peer's address, so that the next packet takes no shortcut.
fn forget_the_peer(rig: &FastRig) {
    let data = MapData::from_pin(rig.rig.pin("na_fast_hint")).unwrap();
    let mut found: Array<_, u32> = Map::from_map_data(data).unwrap().try_into().unwrap();
    let slot = u32::from(u16::from_be_bytes([PEER_MAC.0[4], PEER_MAC.0[5]])) & (found.len() - 1);
    found.set(slot, 0, 0).unwrap();
}

fn put(rig: &FastRig, flags: Checks) {
    let owned = |mac, v4: &str, v6: &str| Attachment {
        mac,
        addresses: vec![v4.parse().unwrap(), v6.parse().unwrap()],
        flags,
        ..bare()
    };
    rig.rig.dataplane.attachments().put(POD, &owned(POD_MAC, POD_V4, POD_V6)).unwrap();
    rig.put_peer(owned(PEER_MAC, PEER_V4, PEER_V6));
}

fn isolate(rig: &FastRig, pod: PolicyIds, peer: PolicyIds) {
    rig.rig.dataplane.policies().set(POD, pod).unwrap();
    rig.rig.dataplane.policies().set(PEER, peer).unwrap();
}

#[test]
fn known_connections_do_without_the_second_program() {
    let rig = FastRig::new();
    let web = rig.rig.install(&policy(&[("10.0.0.1/32", 1), ("fd00::1/128", 1)], &[(1, port(6, 80))]));
    let all = rig.rig.install(&allow_all());
    for pod in [0, all] {
        isolate(&rig, PolicyIds { ingress: 0, egress: pod }, PolicyIds { ingress: web, egress: 0 });
        for packet in [from_pod(), from_pod6()] {
            assert_eq!(rig.send(&packet.tcp(1, 80, SYN).frame()), taken());
        }
    }
    without_na_fast(&rig);
    for packet in [from_pod(), from_pod6()] {
        for flags in [ACK, FIN | ACK] {
            assert_eq!(rig.send(&packet.clone().tcp(1, 80, flags).frame()), taken());
        }
        let flow = packet.clone().tcp(2, 80, SYN).frame();
        assert_eq!(rig.send(&flow), declined(Decline::NoProgram), "the sender's policy is to judge it");
        assert_eq!(rig.send(&packet.ping(1).frame()), declined(Decline::NoProgram));
    }
    isolate(&rig, PolicyIds::default(), PolicyIds { ingress: web, egress: 0 });
    assert_eq!(rig.send(&from_pod().tcp(2, 80, SYN).frame()), taken());
    assert_eq!(rig.send(&from_pod().tcp(2, 81, SYN).frame()), refused());
    let drops = rig.rig.dataplane.stats(PEER).unwrap().drops;
    assert_eq!(drops[DropReason::IngressPort as usize], 1);
}

/// All state that packets change, except times.
type World = (Stats, Stats, [FastStats; 2], BTreeMap<FlowKey<Ip4>, Flow>);

fn world(rig: &FastRig) -> World {
    let flows = rig.rig.flows();
    let flows = flows.iter().map(|flow| {
        let (key, flow) = flow.unwrap();
        (key, Flow { last_seen: 0, opened: 0, ..flow })
    });
    let of = |id| rig.rig.dataplane.stats(id).unwrap();
    (of(POD), of(PEER), [POD, PEER].map(|id| rig.fast.stats(id).unwrap()), flows.collect())
}

/// Frames of a connection and around it, `true` for those that the pod sends.
fn frames() -> Vec<(bool, Vec<u8>)> {
    let mut frames = Vec::new();
    for (there, back) in [(from_pod(), to_pod()), (from_pod6(), to_pod6())] {
        let (call, answer) = (there.clone(), back.clone());
        frames.extend([
            (true, there.clone().tcp(9, 80, ACK).frame()),
            (true, there.clone().tcp(9, 80, SYN).frame()),
            (false, back.clone().tcp(80, 9, SYN | ACK).frame()),
            (true, there.clone().tcp(9, 80, ACK).frame()),
            (true, there.clone().from_mac(PEER_MAC).tcp(9, 80, ACK).frame()),
            (true, Packet::between("10.0.0.9", PEER_V4).tcp(9, 80, ACK).frame()),
            (true, there.clone().tcp(9, 80, FIN | ACK).frame()),
            (false, back.clone().tcp(80, 9, FIN | ACK).frame()),
            (true, there.clone().tcp(9, 80, SYN).frame()),
            (true, there.clone().tcp(9, 80, RST).frame()),
            (true, there.clone().tcp(9, 80, ACK).frame()),
            (false, back.clone().tcp(7, 80, SYN).frame()),
            (true, there.clone().tcp(80, 7, SYN | ACK).frame()),
            (true, there.clone().tcp(80, 7, SYN).frame()),
            (true, there.clone().udp(5, 80).frame()),
            (true, there.clone().udp(5, 80).frame()),
            (true, there.clone().udp(5, 68).frame()),
            (true, call.sctp(5, 6, INIT).frame()),
            (true, there.ping(3).frame()),
            (false, answer.ping(4).frame()),
            (true, back.tcp(80, 9, ACK).frame()),
        ]);
    }
    let mut group = from_pod().udp(1, 2).frame();
    group[0] |= 1;
    let mut short = from_pod().tcp(9, 80, ACK).frame();
    short.truncate(40);
    frames.extend([(true, group), (true, short)]);
    frames
}

/// One node takes the shortcut wherever possible and one never does; both see the same packets under the same
/// policies.
#[test]
fn the_shortcut_answers_as_the_two_programs_do() {
    let rigs = [FastRig::new(), FastRig::new()];
    let ids = rigs.each_ref().map(|rig| {
        let web = policy(&[("0.0.0.0/0", 1), ("::/0", 1)], &[(1, port(6, 80))]);
        [0, rig.rig.install(&allow_all()), rig.rig.install(&web), rig.rig.install(&deny_all())]
    });
    assert_eq!(ids[0], ids[1]);
    let checked = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let strict = Checks { strict_connections: true, ..checked };
    let kept = Checks { keep_established: true, ..checked };
    let mut taken = 0;
    for flags in [Checks::default(), checked, strict, kept] {
        for rig in &rigs {
            put(rig, flags);
            // An entry from before flows were kept is updated in a later second, which need not begin at the same
            // packet for both.
            let dataplane = &rig.rig.dataplane;
            let hosts = dataplane.attachments().hosts(&[POD, PEER].into()).unwrap();
            dataplane.flows().unwrap().purge(hosts).unwrap();
        }
        for case in 0..4_usize.pow(3) {
            let pod = PolicyIds { ingress: ids[0][case % 4], egress: ids[0][case / 4 % 4] };
            let peer = PolicyIds { ingress: ids[0][case / 16], egress: ids[0][case % 3] };
            rigs.iter().for_each(|rig| isolate(rig, pod, peer));
            for (number, (sent, frame)) in frames().into_iter().enumerate() {
                forget_the_peer(&rigs[1]);
                let verdicts = rigs.each_ref().map(|rig| {
                    rig.rig.test_run(if sent { FromPod } else { ToPod }, &frame, 1).return_value as i32
                });
                assert_eq!(verdicts[0], verdicts[1], "{flags:?} {pod:?} {peer:?} frame {number}");
                taken += usize::from(verdicts[0] == 7);
            }
            assert_eq!(world(&rigs[0]), world(&rigs[1]), "{flags:?} {pod:?} {peer:?}");
        }
    }
    assert!(taken > 1000, "{taken}");
}
