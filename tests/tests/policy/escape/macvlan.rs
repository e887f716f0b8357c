//! Attacks specific to macvlans of one parent: other pods' addresses, group frames, macvlans beside one's own, frames
//! that are changed on their way.

use netattach_tests::raw::Ring;

use super::*;

/// Programs run on the parent by filters, or by links.
const MODES: [&str; 2] = ["clsact", "tcx"];

/// The broadcast address.
const BROADCAST: Mac = Mac([0xff; 6]);

/// The link of the third network.
fn lan(scene: &Scene) -> Link {
    let [.., lan] = scene.links();
    lan
}

fn to(mac: Mac, packet: Packet) -> Vec<u8> {
    let mut frame = packet.frame();
    frame[..6].copy_from_slice(&mac.0);
    frame
}

#[test]
fn another_pods_address_is_not_to_be_had() {
    MODES.into_iter().for_each(another_pods_address_is_not_to_be_had_with);
}

fn another_pods_address_is_not_to_be_had_with(attach: &str) {
    let scene = Scene::with(&[("attach", json!(attach))]);
    let link = lan(&scene);
    let own = attackers_socket(&scene, link.device);
    let wire = RawSocket::open(&scene.node.namespace, "wire1").unwrap();
    let as_victim = Packet::between(link.v4[1], "10.52.0.9").from_mac(link.next).udp(1001, ALLOWED);
    let frame = to(STRANGER, as_victim);
    scene.blocked(&link, "the victim's address", &own, &frame, "source-namespace");

    // No device can take the victim's address; one with the pod's own address can replace the pod's device.
    attacker_runs(&scene, "ip", "link add link net2 name mv0 type macvlan mode bridge");
    let words = format!("link set mv0 address {}", link.next);
    let refused = as_attacker(&scene, || Ok(Command::new("ip").args(words.split(' ')).output()?));
    assert!(!refused.status.success(), "{refused:?}");
    attacker_runs(&scene, "ip", "link del net2");
    attacker_runs(&scene, "ip", &format!("link set mv0 name net2 address {} up", link.own));
    let denied = link.towards_the_victim(link.v4().udp(1002, DENIED).frame());
    only_the_allowed_arrives(&scene, &link, "net2", &[("made again", denied, "egress-port")], 2002);

    let last = to(STRANGER, link.v4().udp(2003, ALLOWED));
    attackers_socket(&scene, "net2").send(&last).unwrap();
    let seen = wire.frames_until(&last[last.len() - TAIL..], PATIENCE).unwrap();
    assert!(seen.contains(&last), "the allowed datagram leaves by the parent");
    assert!(!seen.contains(&frame), "what came from the victim's address did not");
    // DEL does not delete devices that the pod made itself.
    attacker_runs(&scene, "ip", "link del net2");
    scene.end();
}

/// The driver copies these without passing the parent: they are judged where they arrive.
#[test]
fn group_frames_are_judged_for_sender_and_receiver() {
    MODES.into_iter().for_each(group_frames_are_judged_with);
}

fn group_frames_are_judged_with(attach: &str) {
    let scene = Scene::with(&[("attach", json!(attach))]);
    let link = lan(&scene);
    let own = attackers_socket(&scene, link.device);
    let victim = Witness::of(&scene.victim, &link);
    let group = |packet: Packet| to(BROADCAST, packet);
    let at = |source: &str| Packet::between(source, "10.52.0.255").from_mac(link.own);
    let spoofed = at("10.52.0.77").udp(1002, ALLOWED);
    let frames = [
        ("a denied port", group(at(link.v4[0]).udp(1001, DENIED)), "egress-port"),
        ("another address", group(spoofed), "source-ipv4"),
        ("another MAC", group(at(link.v4[0]).from_mac(STRANGER).udp(1003, ALLOWED)), "stranger"),
        (
            "the victim's MAC",
            group(at(link.v4[0]).from_mac(link.next).udp(1004, ALLOWED)),
            "source-namespace",
        ),
    ];
    for (what, frame, reason) in &frames {
        scene.blocked(&link, what, &own, frame, reason);
    }
    let allowed = group(at(link.v4[0]).udp(2001, ALLOWED));
    own.send(&allowed).unwrap();
    let tail = |frame: &[u8]| frame[frame.len() - TAIL..].to_vec();
    let seen = victim.frames_until(&tail(&allowed));
    let came = |frame: &[u8]| seen.iter().any(|seen| seen.ends_with(&tail(frame)));
    assert!(came(&allowed), "the allowed broadcast arrives");
    let escaped: Vec<&str> =
        frames.iter().filter(|(_, frame, _)| came(frame)).map(|(what, ..)| *what).collect();
    // Copies carry no socket: the victim has to verify their sender.
    assert_eq!(escaped, ["another MAC"]);
    scene.end();
}

#[test]
fn macvlans_of_others_pass_where_the_settings_say_so() {
    for attach in MODES {
        let scene = Scene::with(&[("otherMacvlans", json!("pass")), ("attach", json!(attach))]);
        let link = lan(&scene);
        let made = format!("link add link net2 name mv0 address {STRANGER} up type macvlan mode bridge");
        attacker_runs(&scene, "ip", &made);
        let victim = Witness::of(&scene.victim, &link);
        let frame = link.towards_the_victim(link.v4().from_mac(STRANGER).udp(1001, DENIED).frame());
        attackers_socket(&scene, "mv0").send(&frame).unwrap();
        let tail = &frame[frame.len() - TAIL..];
        assert!(victim.frames_until(tail).iter().any(|seen| seen.ends_with(tail)), "{attach}");
        attacker_runs(&scene, "ip", "link del mv0");
        scene.end();
    }
}

/// Frames that the attacker changes: the name of the case, the frame, the offset, and the bytes that it writes there.
fn changing(link: &Link) -> [(&'static str, Vec<u8>, usize, Vec<u8>); 4] {
    // Two unknown options.
    let options = [&[30_u8, 24][..], &[0; 22], &[30, 16], &[0; 14]].concat();
    let padding = [&[1_u8, 1, 12][..], &[0; 12]].concat();
    let v4 = |port| {
        let packet = Packet::between(link.v4[0], "10.52.0.9").from_mac(link.own);
        to(STRANGER, packet.options(&options).udp(port, ALLOWED))
    };
    let v6 = |destination| Packet::between(link.v6[0], destination).from_mac(link.own);
    let extended = to(STRANGER, v6("fd00:52::9").extension(60, &padding).udp(1003, ALLOWED));
    let advertised = to(STRANGER, v6("ff02::1").neighbour(136, link.v6[0], &[(2, link.own)]));
    let denied = DENIED.to_be_bytes().to_vec();
    [
        ("the port behind options", v4(1001), 14 + 60 + 2, denied.clone()),
        ("an option: a source route", v4(1002), 14 + 20 + 24, vec![131]),
        ("the port behind an extension header", extended, 14 + 40 + 16 + 2, denied),
        ("the end of a neighbour's address", advertised, 14 + 40 + 8 + 15, vec![0x99]),
    ]
}

/// The attacker passes frames in shared memory to the kernel, and changes them while they wait on the parent after
/// its programs.
///
/// Rows: C88.
#[test]
fn what_is_judged_of_a_frame_is_what_leaves() {
    let scene = Scene::new();
    let link = lan(&scene);
    let queue = |words: &str| {
        let run = || Command::new("tc").args(words.split(' ')).output();
        let output = scene.node.namespace.run(run).unwrap();
        assert!(output.status.success(), "tc {words}: {output:?}");
    };
    queue(&format!("qdisc add dev {WIRE} root tbf rate 32kbit burst 1600 limit 65536"));
    let wire = RawSocket::open(&scene.node.namespace, "wire1").unwrap();
    let own = attackers_socket(&scene, link.device);
    // Keeps the queue busy for a second.
    let ports = [1000_u16.to_be_bytes(), ALLOWED.to_be_bytes()].concat();
    let datagram = [&ports[..], &1408_u16.to_be_bytes(), &[0; 1402]].concat();
    let filler = Packet::between(link.v4[0], "10.52.0.9").from_mac(link.own).payload(17, &datagram);
    let filler = to(STRANGER, filler);
    (0..4).for_each(|_| own.send(&filler).unwrap());
    let frames = changing(&link).map(|(what, frame, at, bytes)| {
        let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
        let mut ring = as_attacker(&scene, || Ring::open_here(link.device, ethertype));
        let sent = ring.send(&frame).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        ring.change(sent, at, &bytes);
        let mut changed = frame.clone();
        changed[at..at + bytes.len()].copy_from_slice(&bytes);
        (what, frame, changed, ring)
    });
    let last = to(STRANGER, link.v4().udp(2001, ALLOWED));
    own.send(&last).unwrap();
    let seen = wire.frames_until(&last[last.len() - TAIL..], PATIENCE).unwrap();
    let left = frames
        .each_ref()
        .map(|(what, frame, changed, _)| (*what, seen.contains(frame), seen.contains(changed)));
    assert_eq!(left, frames.each_ref().map(|(what, ..)| (*what, true, false)));
    queue(&format!("qdisc del dev {WIRE} root"));
    scene.end();
}
