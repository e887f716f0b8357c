//! Drops in the wire's driver (XDP). Every veth has the native mode, and it is requested by name.

use netattach_tests::manifest::network_policy;
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::traffic::SILENCE;

use super::*;

fn scene(xdp: &str) -> Scene {
    let settings = [("xdp", json!(xdp)), ("networkPolicy", json!(true))];
    let scene = Scene::new(&settings, |config| config);
    scene.node("ip", &format!("link set {WIRE} master br0"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    scene.outside(&format!("addr add fd00:50::c8/64 dev {FAR} nodad"));
    scene
}

impl Scene {
    fn xdp(&self) -> String {
        let uplinks = self.node.ctl(&["status"]).unwrap()["uplinks"].clone();
        let wire = uplinks.as_array().unwrap().iter().find(|uplink| uplink["device"] == json!(WIRE)).cloned();
        wire.map(|wire| wire["xdp"].as_str().unwrap().to_owned()).unwrap_or_default()
    }

    fn await_xdp(&self, wanted: &str) {
        let mut last = String::new();
        let stands = || {
            last = self.xdp();
            last == wanted
        };
        assert!(eventually(NOTICED, stands), "{last:?}, not {wanted:?}");
    }

    fn dropped(&self, reason: &str) -> u64 {
        self.row("stats")["dropped"].get(reason).map_or(0, |packets| packets.as_u64().unwrap())
    }

    /// Whether the kernel shows a program on the wire, in native mode.
    fn runs_native(&self) -> bool {
        let run = || Command::new("ip").args(["-d", "link", "show", WIRE]).output();
        let shown = String::from_utf8(self.node.namespace.run(run).unwrap().stdout).unwrap();
        shown.contains("prog/xdp") && !shown.contains("xdpgeneric")
    }
}

#[test]
fn what_claims_to_be_a_pod_or_has_no_flow_and_no_rule_never_gets_in() {
    for mode in ["native", "generic"] {
        let scene = scene(mode);
        scene.await_standing("on");
        scene.await_xdp(mode);
        assert_eq!(scene.runs_native(), mode == "native");
        for family in [0, 1] {
            assert!(scene.answers(family), "{mode}");
        }

        let server = Network::of(&scene.server.namespace).unwrap().links["eth0"].mac.unwrap();
        let outside = Network::of(&scene.outside).unwrap().links[FAR].mac.unwrap();
        let (IpAddr::V4(own), IpAddr::V6(own6)) = (scene.addresses[0].ip(), scene.addresses[1].ip()) else {
            panic!("one address per family")
        };
        let socket = RawSocket::open(&scene.outside, FAR).unwrap();
        let spoofed = [
            Packet::between("10.50.0.77", &own.to_string()).from_mac(server).udp(1, 7),
            Packet::between(&own.to_string(), "10.50.0.1").from_mac(outside).udp(1, 7),
            Packet::between(&own6.to_string(), "fd00:50::1").from_mac(outside).udp(1, 7),
        ];
        for (index, packet) in spoofed.iter().enumerate() {
            socket.send(&packet.frame()).unwrap();
            let counted = || scene.dropped("wire-source") == index as u64 + 1;
            assert!(eventually(PATIENCE, counted), "{mode}: {packet:?}");
        }
        // The bridge has not learned that the pod is behind the wire.
        assert!(scene.answers(0), "{mode}");

        let rules = json!({
            "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "UDP", "port": 7}]}]
        });
        scene.node.write("rules", &network_policy("rules", &rules)).unwrap();
        let closed = SocketAddr::new(scene.addresses[0].ip(), 8);
        let _echo = Echo::serve(&scene.server.namespace, closed).unwrap();
        let in_force = || !datagram(&scene.outside, closed, SILENCE).unwrap();
        assert!(eventually(PATIENCE, in_force), "the policy is not in force");
        let look = || (scene.dropped("ingress-port"), scene.row("stats")["received"]["packets"].as_u64());
        let before = look();
        assert!(!datagram(&scene.outside, closed, SILENCE).unwrap());
        assert_eq!(look().0, before.0 + 1, "{mode}: counted once");
        // Replies to the pod's own packets come in: there is a flow.
        let answering = Echo::serve(&scene.outside, "10.50.0.200:9".parse().unwrap()).unwrap();
        assert!(datagram(&scene.server.namespace, answering.address(), PATIENCE).unwrap(), "{mode}");
        assert!(scene.answers(0));
        scene.end();
    }
}

#[test]
fn a_veth_does_not_drop_early_by_itself_and_a_foreign_program_stays() {
    let veth = scene("auto");
    veth.await_standing("on");
    assert_eq!(veth.xdp(), "");
    veth.end();

    let mut scene = scene("native");
    scene.await_xdp("native");
    // A successor adopts the link, in its mode or, if configured, in another.
    for (setting, shown) in [("native", "native"), ("generic", "generic"), ("off", "")] {
        scene.node.kill().unwrap();
        scene.node.set("xdp", json!(setting));
        scene.node.start().unwrap();
        scene.await_standing("on");
        scene.await_xdp(shown);
        assert!(scene.answers(0));
    }
    let links = scene.node.bpffs().join("link");
    let pinned = std::fs::read_dir(links).map_or(0, |entries| {
        entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("xdp")).count()
    });
    assert_eq!(pinned, 0);
    scene.end();
}

#[test]
fn uplinks_drop_early_for_pods_that_are_off_the_fast_path() {
    let mut scene = scene("native");
    scene.node.kill().unwrap();
    scene.node.set("fastPath", json!("off"));
    scene.node.start().unwrap();
    scene.await_standing("idle");
    scene.await_xdp("native");
    let server = Network::of(&scene.server.namespace).unwrap().links["eth0"].mac.unwrap();
    let socket = RawSocket::open(&scene.outside, FAR).unwrap();
    let to = scene.addresses[0].ip().to_string();
    socket.send(&Packet::between("10.50.0.77", &to).from_mac(server).udp(1, 7).frame()).unwrap();
    assert!(eventually(PATIENCE, || scene.dropped("wire-source") == 1));
    assert!(scene.answers(0));
    scene.end();
}
