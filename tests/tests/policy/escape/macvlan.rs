//! Attacks specific to macvlans of one parent: other pods' addresses, group frames, macvlans beside one's own.

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

/// The driver copies these past the parent: they are judged where they arrive.
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
