//! Devices of kind `ifb`: packets that such a device forwards pass no program on the device that receives them next.
//! This is not prevented; the attachment's enforcement level reports it.

use std::net::{SocketAddr, UdpSocket};

use netattach_tests::Namespace;
use netattach_tests::tools::report_skipped;

use super::*;

/// The device; its name does not matter.
const NAME: &str = "shaper0";
/// The text about it for people in the pod's row of `status`.
const TOLD: &str = "in the pod: a device of this kind is there, by which what the pod sends can go past programs on the node; it \
                    is left as it is";
const ITS_POD: &str = "its pod has a device of kind ifb, by which it can send past the programs on the node";
const ANOTHER: &str =
    "a pod on the same parent has a device of kind ifb, by which it can send to this one past the programs";

/// Whether the kernel has the features that a pod needs for it; otherwise the test is reported as skipped.
fn can_be_made(test: &str) -> bool {
    let scratch = Namespace::new().unwrap();
    let run = |program: &str, words: &str| {
        let words: Vec<String> = words.split(' ').map(|word| word.replace('_', " ")).collect();
        let output = scratch.run(|| Command::new(program).args(&words).output());
        output.is_ok_and(|output| output.status.success())
    };
    let found = run("ip", "link add shaper0 up type ifb")
        && run("tc", "qdisc add dev lo clsact")
        && run("tc", &format!("filter add dev lo egress {REDIRECTED}"));
    if !found {
        report_skipped(test, "the kernel has no ifb, cls_bpf or act_mirred");
    }
    found
}

/// About half of the pod's IPv4 packets are redirected to the device, each time that they pass: packets that return
/// from there and are not redirected again still have the mark. Uses a random number of the kernel, and its lowest
/// bit.
const REDIRECTED: &str = "protocol ip bpf bytecode 4,32_0_0_4294963256,69_0_1_1,6_0_0_4294967295,6_0_0_0 \
                          action mirred egress redirect dev shaper0";

/// The level of a pod on a network, and why it is not higher.
fn level(scene: &Scene, pod: &str, network: &str) -> (String, String) {
    let rows = scene.node.ctl(&["attachments"]).unwrap();
    let mut rows = rows.as_array().unwrap().iter();
    let row = rows.find(|row| row["pod"]["name"] == pod && row["network"] == network).unwrap();
    let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
    (text("enforcement"), text("enforcement_detail"))
}

/// Whether one of many datagrams to the denied port arrives.
fn arrives(scene: &Scene, link: &Link) -> bool {
    let [from, to] = link.v4.map(|address| address.parse().unwrap());
    let victim = scene.victim.namespace.run(|| UdpSocket::bind(SocketAddr::new(to, DENIED))).unwrap();
    victim.set_read_timeout(Some(SILENCE)).unwrap();
    let attacker = scene.attacker.namespace.run(|| UdpSocket::bind(SocketAddr::new(from, 0))).unwrap();
    for _ in 0..64 {
        attacker.send_to(b"denied", SocketAddr::new(to, DENIED)).unwrap();
    }
    victim.recv(&mut [0; 16]).is_ok()
}

/// A fourth of the packets bypasses the programs, so of 64 datagrams none does once in 10^8 times.
///
/// Rows: C89.
#[test]
fn what_an_ifb_of_the_pods_sends_on_is_not_judged_and_the_level_says_so() {
    if !can_be_made("what_an_ifb_of_the_pods_sends_on_is_not_judged") {
        return;
    }
    let scene = Scene::new();
    let links = scene.links();
    let networks = links.each_ref().map(|link| link.network);
    let levels = |pod: &str| networks.map(|network| level(&scene, pod, network));
    let before = ["attacker", "victim"].map(levels);
    assert_eq!(before[0].each_ref().map(|(level, _)| level.as_str())[..2], ["full", "full"]);
    for link in &links {
        assert!(!arrives(&scene, link), "{}", link.network);
    }

    attacker_runs(&scene, "ip", &format!("link add {NAME} up type ifb"));
    for link in &links {
        let device = link.device;
        if link.is_macvlan() {
            // There are programs of ours, for copies of group frames, by filters: those are after.
            let _ = as_attacker(&scene, || {
                Ok(Command::new("tc").args(["qdisc", "add", "dev", device, "clsact"]).output()?)
            });
        } else {
            attacker_runs(&scene, "tc", &format!("qdisc add dev {device} clsact"));
        }
        attacker_runs(&scene, "tc", &format!("filter add dev {device} egress {REDIRECTED}"));
        assert!(arrives(&scene, link), "{}: the control: this is not prevented", link.network);
    }
    let lowered = |why: &str| ("advisory".to_owned(), why.to_owned());
    let told = || {
        let status = scene.node.whole_status().unwrap();
        let troubles = status["troubles"].as_array().unwrap().clone();
        troubles
            .iter()
            .filter(|row| row["problem"] == TOLD)
            .map(|row| row["object"].clone())
            .collect::<Vec<_>>()
    };
    let of_attacker = || levels("attacker") == networks.map(|_| lowered(ITS_POD));
    // The pods are checked one after the other, after pauses of up to half a minute.
    assert!(eventually(PATIENCE * 4, of_attacker), "{:#?}", levels("attacker"));
    assert!(eventually(PATIENCE, || told() == ["pod shop/attacker ifb"]), "{:?}", told());
    // On a bridge and with a link of its own, the victim's programs judge what it receives all the same.
    let expected = [before[1][0].clone(), before[1][1].clone(), lowered(ANOTHER)];
    assert_eq!(levels("victim"), expected);
    for pod in [&scene.attacker, &scene.victim] {
        scene.node.check(pod).success();
    }

    attacker_runs(&scene, "ip", &format!("link del {NAME}"));
    let is_as_before = || ["attacker", "victim"].map(levels) == before && told().is_empty();
    assert!(eventually(PATIENCE * 4, is_as_before), "{:#?} {:?}", levels("attacker"), told());
    for link in &links {
        assert!(!arrives(&scene, link), "{}", link.network);
    }
    scene.end();
}
