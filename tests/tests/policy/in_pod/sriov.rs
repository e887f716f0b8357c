//! Policies on VFs of a card: traffic between the pods is switched by the card, and the node sees none of it.
//!
//! The plugin that moves them is an executed one here; `native` tests ours, `killed` the state after an agent was
//! killed.
//!
//! These run in the virtual machine that has such cards (`cargo xtask vm`), as they take its VFs from it.

mod killed;
mod native;

use std::fs;

use netattach_tests::sriov::{Cards, Vf};

use super::*;

const RESOURCE: &str = "example.com/vf";
/// A host on the card's wire.
const OUTSIDE: &str = "10.60.0.9";
const SERVER_ADDRESS: &str = "10.60.0.2";
const CLIENT_ADDRESS: &str = "10.60.0.3";

/// Two pods with a VF each, and a host on the wire.
struct Rig {
    node: Node,
    server: Pod,
    client: Pod,
    outside: Namespace,
    vfs: Vec<Vf>,
    macs: [Mac; 2],
    // Dropped last, as the next test expects all VFs to be back.
    cards: Cards,
}

impl Rig {
    /// `None`: this machine has no such card.
    fn new(test: &str, policies: &[(&str, Value)]) -> Option<Self> {
        let cards = Cards::take(test).unwrap()?;
        let names = ["host-device", "host-local"];
        let from = plugins(test, &names)?;
        let vfs = cards.make_vfs(2).unwrap();
        let outside = outside(&cards, OUTSIDE);
        let mut node = Node::on_this_machine().unwrap();
        node.set("delegation", json!({"exec": ["host-device"]}));
        install(&node, &from, &names).unwrap();
        let macs = [0, 1].map(|number| mac(&node, &vfs[number].device));
        let config = json!({
            "cniVersion": "1.0.0", "type": "host-device",
            "capabilities": {"ips": true, "CNIDeviceInfoFile": true},
            "ipam": node.host_local(&["10.60.0.0/24"])
        });
        let vf = network(NAMESPACE, "vf", &config);
        node.write("vf", &with_resource(vf)).unwrap();
        for (number, (name, address)) in
            [("server", SERVER_ADDRESS), ("client", CLIENT_ADDRESS)].into_iter().enumerate()
        {
            let device = &vfs[number].address;
            describe(&node, &cards, device);
            let selection = json!([{"name": "vf", "deviceID": device, "ips": [format!("{address}/24")]}]);
            let pod = pod(name, &json!({"app": name}), &selection);
            let pod = if name == "server" { with_security_context(pod, DROPS_ALL) } else { pod };
            node.write(name, &pod).unwrap();
        }
        for (name, policy) in policies {
            node.write(name, policy).unwrap();
        }
        let [server, client] = ["server", "client"].map(|name| Pod::new(name).unwrap());
        let mut rig = Self { node, server, client, outside, vfs, macs, cards };
        rig.node.start().unwrap();
        for pod in [&rig.server, &rig.client] {
            rig.node.add(pod).success();
        }
        Some(rig)
    }

    fn reaches(&self, from: &Namespace, address: &str, port: u16, patience: Duration) -> bool {
        connects(from, SocketAddr::new(address.parse().unwrap(), port), patience)
    }

    /// Checks the policy [`only_the_client`].
    fn assert_the_policy_holds(&self) {
        let (client, outside) = (&self.client.namespace, &self.outside);
        assert!(self.reaches(client, SERVER_ADDRESS, 80, PATIENCE), "client to server 80");
        assert!(!self.reaches(client, SERVER_ADDRESS, 81, SILENCE), "client to server 81");
        assert!(!self.reaches(outside, SERVER_ADDRESS, 80, SILENCE), "outside to server 80");
        assert!(self.reaches(outside, CLIENT_ADDRESS, 80, PATIENCE), "outside to client 80");
    }

    fn serve(&self) -> Vec<Echo> {
        let mut served = Vec::new();
        for (pod, address, port) in [
            (&self.server, SERVER_ADDRESS, 80),
            (&self.server, SERVER_ADDRESS, 81),
            (&self.client, CLIENT_ADDRESS, 80),
        ] {
            let address = SocketAddr::new(address.parse().unwrap(), port);
            served.push(Echo::serve(&pod.namespace, address).unwrap());
        }
        served
    }

    fn del_both(&self) {
        for pod in [&self.server, &self.client] {
            self.node.del(pod).success();
        }
    }

    /// Checks that nothing is left of the pods' attachments; also removes the default network's bridge.
    fn assert_nothing_is_left(&self) {
        assert_eq!(links(&self.node), BTreeMap::new());
        Snapshot::take(&self.node, &[&self.server, &self.client]).unwrap().assert_nothing_is_left();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // The node is this machine: devices that elsewhere go with the node's namespace stay here.
        let _ = ip(&self.node.namespace, &["link", "del", "br0"]);
    }
}

/// Returns the other card's namespace, with an address on the card.
fn outside(cards: &Cards, address: &str) -> Namespace {
    let outside = Namespace::new().unwrap();
    let machine = Namespace::of_this_process().unwrap();
    ip(&machine, &["link", "set", &cards.other, "netns", &outside.task()]).unwrap();
    ip(&outside, &["address", "add", &format!("{address}/24"), "dev", &cards.other]).unwrap();
    ip(&outside, &["link", "set", &cards.other, "up"]).unwrap();
    outside
}

/// Writes a VF's device information as a device plugin does.
fn describe(node: &Node, cards: &Cards, device: &str) {
    let directory = node.path("devinfo/dp");
    fs::create_dir_all(&directory).unwrap();
    let file = format!("{}-{device}-device.json", RESOURCE.replace('/', "-"));
    fs::write(directory.join(file), device_info(cards, device).to_string()).unwrap();
}

fn device_info(cards: &Cards, device: &str) -> Value {
    let pci = json!({"pci-address": device, "pf-pci-address": cards.address});
    json!({"type": "pci", "version": "1.1.0", "pci": pci})
}

fn with_resource(mut network: Value) -> Value {
    network["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": RESOURCE});
    network
}

fn mac(node: &Node, device: &str) -> Mac {
    Network::of(&node.namespace).unwrap().links[device].mac.unwrap()
}

fn only_the_client_of_vfs() -> Value {
    let mut policy = only_the_client();
    policy["metadata"]["annotations"]["k8s.v1.cni.cncf.io/policy-for"] = json!("vf");
    policy
}

/// Rows: C17, C91, NPWG-5.3.7-device-info.
#[test]
fn policies_hold_between_two_vfs_of_a_card_also_over_a_restart_and_both_come_back() {
    let test = "policies_hold_between_two_vfs_of_a_card";
    let Some(mut rig) = Rig::new(test, &[("policy", only_the_client_of_vfs())]) else { return };
    let served = rig.serve();
    let before = links(&rig.node);
    assert_eq!(before.len(), 2, "{before:?}");
    let raw = "programs run in the pod, and its container main has CAP_NET_RAW";
    for (number, (pod, level, why)) in
        [(&rig.server, "full", ""), (&rig.client, "full-unless-privileged", raw)].into_iter().enumerate()
    {
        let row = row(&rig.node, &pod.name);
        let keys = ["kind", "mac", "enforcement", "host_interface"];
        let told = keys.map(|key| row[key].clone());
        let expected =
            [json!("exec:host-device"), json!(rig.macs[number].to_string()), json!(level), Value::Null];
        assert_eq!(told, expected, "{}", pod.name);
        assert_eq!(row["enforcement_detail"].as_str().unwrap_or_default(), why, "{}", pod.name);
        let status = rig.node.status(pod).unwrap();
        assert_eq!(status[1]["device-info"], device_info(&rig.cards, &rig.vfs[number].address));
        assert_eq!(rig.vfs[number].on_node(), None, "{}", pod.name);
    }

    rig.assert_the_policy_holds();
    let stats = rig.node.ctl(&["stats", "--pod", "shop/server"]).unwrap();
    let dropped = stats.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
    let dropped = dropped["dropped"].as_object().unwrap();
    assert_eq!(dropped.keys().collect::<Vec<_>>(), ["ingress-peer", "ingress-port"]);

    rig.node.kill().unwrap();
    rig.assert_the_policy_holds();
    rig.node.start().unwrap();
    assert_eq!(links(&rig.node), before);
    for pod in [&rig.server, &rig.client] {
        rig.node.check(pod).success();
    }

    drop(served);
    rig.del_both();
    rig.assert_nothing_is_left();
    for (vf, mac) in rig.vfs.iter().zip(rig.macs) {
        assert_eq!(vf.on_node().as_ref(), Some(&vf.device));
        assert_eq!(self::mac(&rig.node, &vf.device), mac);
    }
}

#[test]
fn vfs_that_vanish_from_their_pods_are_detached_and_new_ones_attached() {
    let test = "vfs_that_vanish_from_their_pods";
    let Some(rig) = Rig::new(test, &[("policy", only_the_client_of_vfs())]) else { return };
    assert_eq!(links(&rig.node).len(), 2);
    rig.cards.remove_vfs().unwrap();
    let (code, told) = rig.node.check(&rig.server).failure();
    assert_eq!((code, told.as_str()), (999, "net1 (shop/vf): interface net1 is gone from the pod"));
    rig.del_both();
    rig.assert_nothing_is_left();

    let again = rig.cards.make_vfs(2).unwrap();
    let addresses = |vfs: &[Vf]| vfs.iter().map(|vf| vf.address.clone()).collect::<Vec<_>>();
    assert_eq!(addresses(&again), addresses(&rig.vfs));
    rig.node.add(&rig.server).success();
    assert_eq!(links(&rig.node).len(), 2);
    rig.node.del(&rig.server).success();
    rig.assert_nothing_is_left();
}

/// The card's driver drops packets if the card is the uplink of a bridge. The driver restarts the card when it gets a
/// program.
#[test]
fn a_card_drops_what_claims_to_be_a_pod_before_the_kernel_has_it() {
    const NOTICED: Duration = Duration::from_secs(90);
    let Some(cards) = Cards::take("a_card_drops_what_claims_to_be_a_pod").unwrap() else { return };
    let outside = outside(&cards, "10.50.0.200");
    let mut node = Node::on_this_machine().unwrap();
    node.set("xdp", json!("native"));
    node.write("a", &pod("a", &json!({}), &Value::Null)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let result = node.add(&a).success();
    let address: IpAddr =
        result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap();
    ip(&node.namespace, &["link", "set", &cards.device, "up", "master", "br0"]).unwrap();
    let uplinks = || node.ctl(&["status"]).unwrap()["uplinks"].clone();
    let runs = || {
        uplinks().as_array().unwrap().iter().any(|it| it["device"] == cards.device && it["xdp"] == "native")
    };
    assert!(eventually(NOTICED, runs), "{:#}", uplinks());
    assert!(
        eventually(NOTICED, || ping(&outside, address, PATIENCE).unwrap()),
        "the pod is not reached by the wire"
    );

    let own = Network::of(&a.namespace).unwrap().links["eth0"].mac.unwrap();
    let others = Network::of(&outside).unwrap().links[&cards.other].mac.unwrap();
    let dropped = || {
        let stats = node.ctl(&["stats", "--pod", "shop/a"]).unwrap();
        stats[0]["dropped"]["wire-source"].as_u64().unwrap_or(0)
    };
    let socket = RawSocket::open(&outside, &cards.other).unwrap();
    let spoofed = [
        Packet::between("10.50.0.77", &address.to_string()).from_mac(own),
        Packet::between(&address.to_string(), "10.50.0.1").from_mac(others),
    ];
    for (number, packet) in spoofed.into_iter().enumerate() {
        socket.send(&packet.udp(1, 7).frame()).unwrap();
        assert!(eventually(PATIENCE, || dropped() == number as u64 + 1), "{number}");
    }
    // The bridge has not learned that the pod is behind the wire.
    assert!(ping(&outside, address, PATIENCE).unwrap());

    node.del(&a).success();
    let snapshot = Snapshot::take(&node, &[&a]).unwrap();
    ip(&node.namespace, &["link", "del", "br0"]).unwrap();
    snapshot.assert_nothing_is_left();
}
