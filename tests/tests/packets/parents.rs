//! The sender of frames that leave by a parent of macvlans, by the namespace of the sending socket.

use std::os::fd::AsRawFd;

use netattach::bpf::probe::has_netns_cookie;
use netattach::bpf::sys::Instruction;
use netattach::bpf::{Gate, OnParent, Parent, Trunks};
use netattach::netlink::Handle;
use netattach_tests::tools::report_skipped;

use super::*;

/// The VLAN whose device hands the parent frames.
const VLAN: u16 = 5;
/// Attachments with macvlans on the parent: of the pod itself, and of another.
const BESIDE: u32 = 8;
const OTHER: u32 = 9;
/// The address of [`BESIDE`].
const BESIDE_MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x08]);

/// Returns a program that gives a packet a tag outside of its bytes, like the device of a VLAN, and calls the one for
/// packets that leave by a parent.
fn below_a_vlan(rig: &Rig, vlan: u16) -> SchedClassifier {
    /// `BPF_FUNC_skb_vlan_push` and `BPF_FUNC_tail_call`.
    const PUSH: i32 = 18;
    const TAIL_CALL: i32 = 12;
    let programs = sys::open_pin(&rig.pin("na_par_prog")).unwrap();
    let with = |code, registers, constant| Instruction { code, registers, offset: 0, constant };
    let set = |register, constant| with(0xb4, register, constant);
    let call = |function| with(0x85, 0, function);
    let instructions = [
        // r6 = r1
        with(0xbf, 1 << 4 | 6, 0),
        set(2, 0x8100_u16.to_be().into()),
        set(3, vlan.into()),
        call(PUSH),
        // r1 = r6
        with(0xbf, 6 << 4 | 1, 0),
        // r2 = the map with that descriptor
        with(0x18, 1 << 4 | 2, programs.as_raw_fd()),
        with(0, 0, 0),
        set(3, 0),
        call(TAIL_CALL),
        // Drops packets that no other attachment judges.
        set(0, 2),
        with(0x95, 0, 0),
    ];
    let program = sys::load_classifier("below_a_vlan", &instructions).unwrap();
    let path = rig.root.join(format!("below_{vlan}"));
    sys::pin(program.as_fd(), &path).unwrap();
    let program = SchedClassifier::from_pin(&path).unwrap();
    // It is no pin of netattach, whose directory is removed as a whole.
    std::fs::remove_file(path).unwrap();
    program
}

/// The outcome of a frame of the calling thread's namespace at the parent's egress.
fn left(rig: &Rig, program: &SchedClassifier, frame: &[u8]) -> Outcome {
    outcome(rig, 0, program, frame)
}

/// The outcome of a frame whose drop is counted for an attachment.
fn outcome(rig: &Rig, counted_for: u32, program: &SchedClassifier, frame: &[u8]) -> Outcome {
    let before = rig.dataplane.stats(counted_for).unwrap();
    let options = TestRunOptions { data_in: Some(frame), repeat: 1, ..TestRunOptions::new() };
    let verdict = program.test_run(options).expect("run the program").return_value as i32;
    let after = rig.dataplane.stats(counted_for).unwrap();
    let mut reasons = DropReason::ALL.iter().copied();
    let dropped = reasons.find(|reason| after.drops[*reason as usize] > before.drops[*reason as usize]);
    match (verdict, dropped) {
        (-1, None) => Ok(()),
        (2, Some(reason)) => Err(reason),
        other => panic!("verdict and counters disagree: {other:?}"),
    }
}

/// Rows: MVL-vlan.
#[test]
fn what_was_judged_on_a_vlan_of_a_parent_passes_there_for_whom_nothing_else_leads_there() {
    if !has_netns_cookie() {
        return report_skipped(
            "what_was_judged_on_a_vlan",
            "the kernel does not say who sent a frame (6.15)",
        );
    }
    let rig = Rig::new();
    let from_elsewhere = || {
        // SAFETY: only the network namespace of this short-lived thread changes; it opened no sockets.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        judge_beneath(&rig, Handle::open().unwrap().netns_cookie());
    };
    std::thread::scope(|scope| scope.spawn(from_elsewhere).join()).unwrap();
}

/// Judges as a pod whose namespace has that cookie.
fn judge_beneath(rig: &Rig, cookie: u64) {
    let (attachments, parents) = (rig.dataplane.attachments(), rig.dataplane.parents());
    let node = Parent { netns_cookie: cookie + 1, card: true, strangers: false, own_clsact: false };
    parents.cover(DEVICE, node).unwrap();
    let untagged = SchedClassifier::from_pin(rig.pin("prog/na_par_from")).unwrap();
    let ways = [untagged, below_a_vlan(rig, VLAN), below_a_vlan(rig, VLAN + 1)];
    let frame = from_pod().udp(1, 2).frame();
    let outcomes = || ways.each_ref().map(|program| left(rig, program, &frame));
    let stranger: Outcome = Err(DropReason::Stranger);
    assert_eq!(outcomes(), [stranger; 3]);

    let trunks = |netns_cookie| Trunks { netns_cookie, on: vec![(DEVICE, VLAN), (DEVICE + 1, VLAN + 1)] };
    parents.pass_above(POD, &trunks(cookie + 2)).unwrap();
    assert_eq!(outcomes(), [stranger; 3], "another namespace's");
    parents.pass_above(POD, &trunks(cookie)).unwrap();
    assert_eq!(outcomes(), [stranger, Ok(()), stranger]);

    // Not by the address of a macvlan of another pod.
    attachments.put(OTHER, &Attachment { mac: PEER_MAC, ..bare() }).unwrap();
    let on = |netns_cookie| OnParent { parent: DEVICE, siblings: true, netns_cookie };
    attachments.bind_macvlan(OTHER, &on(cookie + 2)).unwrap();
    let as_other = from_pod().from_mac(PEER_MAC).udp(1, 2).frame();
    assert_eq!(left(rig, &ways[1], &as_other), Err(DropReason::SourceNamespace));

    // A VLAN of the pod's making on a macvlan on the parent would send the same.
    attachments.put(BESIDE, &Attachment { mac: BESIDE_MAC, ..bare() }).unwrap();
    attachments.bind_macvlan(BESIDE, &on(cookie)).unwrap();
    assert_eq!(outcomes(), [stranger; 3]);
    rig.dataplane.remove_attachment(BESIDE).unwrap();
    assert_eq!(outcomes(), [stranger, Ok(()), stranger]);
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(outcomes(), [stranger; 3]);
}

/// Any host of the network can write the node's address. The node's own link on the parent has an address of its own.
#[test]
fn on_a_parent_the_node_is_where_its_own_link_is() {
    const NODE: Mac = Mac([0x02, 0, 0, 0, 0, 0x09]);
    let rig = Rig::isolated(Some(&from_the_node()), Some(&from_the_node()));
    let netns_cookie = Handle::open().unwrap().netns_cookie();
    let on = OnParent { parent: DEVICE, siblings: true, netns_cookie };
    rig.dataplane.attachments().bind_macvlan(POD, &on).unwrap();
    let [sends, receives] = ["na_par_from", "na_par_to"]
        .map(|name| SchedClassifier::from_pin(rig.pin(&format!("prog/{name}"))).unwrap());
    let mut port = 8080;
    let mut with = |mac: Mac| {
        port += 1;
        let (mut out, mut into) = (from_pod().udp(1, port).frame(), to_pod().udp(1, port).frame());
        out[..6].copy_from_slice(&mac.0);
        into[..6].copy_from_slice(&POD_MAC.0);
        into[6..12].copy_from_slice(&mac.0);
        [outcome(&rig, POD, &sends, &out), outcome(&rig, POD, &receives, &into)]
    };
    let refused: [Outcome; 2] = [Err(DropReason::EgressPeer), Err(DropReason::IngressPeer)];
    assert_eq!(with(NODE), refused, "the node has no link there");
    let mut routed = rig.dataplane.routed().unwrap();
    routed.guard(POD, &[POD_V4.parse().unwrap()]).unwrap();
    routed.set_gate(POD, Gate::closed(netattach_common::Mac { octets: NODE.0 })).unwrap();
    assert_eq!(with(NODE), [Ok(()); 2]);
    assert_eq!(with(PEER_MAC), refused, "another host with the node's address");
}
