//! VFs that netattach takes, configures and returns itself.

use std::path::{Path, PathBuf};

use netattach::netlink::{DeviceState, Handle};
use netattach::spec::{VfRates, VfSettings, VfVlan};
use netattach_tests::nightly;
use netattach_tests::other_programs::{all_programs, occupy};

use super::*;

const VLAN: u16 = 100;
const PODS: [(&str, &str, &str); 2] =
    [("server", SERVER_ADDRESS, "02:00:00:00:0a:02"), ("client", CLIENT_ADDRESS, "02:00:00:00:0a:03")];

/// A node with two VFs, and two pods that should have one each.
pub(super) struct Own {
    pub(super) node: Node,
    pub(super) pods: [Pod; 2],
    pub(super) vfs: Vec<Vf>,
    cards: Cards,
}

/// The keys that the card supports.
pub(super) fn all_keys() -> Value {
    json!({
        "vlan": VLAN, "vlanQoS": 3, "spoofchk": "off", "trust": "on", "max_tx_rate": 200,
        "logLevel": "debug", "logFile": "/nowhere"
    })
}

impl Own {
    pub(super) fn new(test: &str, keys: &Value) -> Option<Self> {
        let mut own = Self::without_agent(test, keys)?;
        own.node.start().unwrap();
        Some(own)
    }

    /// No agent runs yet.
    pub(super) fn without_agent(test: &str, keys: &Value) -> Option<Self> {
        let cards = Cards::take(test).unwrap()?;
        let vfs = cards.make_vfs(2).unwrap();
        let node = Node::on_this_machine().unwrap();
        let mut config = json!({
            "cniVersion": "1.1.0", "type": "sriov", "capabilities": {"ips": true, "mac": true},
            "ipam": node.host_local(&["10.60.0.0/24"])
        });
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        node.write("vf", &with_resource(network(NAMESPACE, "vf", &config))).unwrap();
        let pods = PODS.map(|(name, _, _)| Pod::new(name).unwrap());
        let own = Self { node, pods, vfs, cards };
        for number in [0, 1] {
            own.select(number, number);
        }
        Some(own)
    }

    /// Makes a pod select a VF.
    fn select(&self, pod: usize, vf: usize) {
        self.select_as(pod, vf, PODS[pod].2);
    }

    /// The same, with that Ethernet address.
    fn select_as(&self, pod: usize, vf: usize, mac: &str) {
        let (name, address, _) = PODS[pod];
        let device = &self.vfs[vf].address;
        let selection =
            json!([{"name": "vf", "deviceID": device, "ips": [format!("{address}/24")], "mac": mac}]);
        let manifest = super::pod(name, &json!({"app": name}), &selection);
        self.node.write(name, &with_security_context(manifest, DROPS_ALL)).unwrap();
    }

    /// Returns why a pod is not attached, once the agent has read the last change.
    fn refused(&self, pod: usize) -> (u64, String) {
        let mut refusal = None;
        let is_refused = || {
            let added = self.node.add(&self.pods[pod]);
            match added.exit {
                0 => drop(self.node.del(&self.pods[pod]).success()),
                _ => refusal = Some(added.failure()),
            }
            refusal.is_some()
        };
        assert!(eventually(PATIENCE, is_refused));
        refusal.unwrap()
    }

    /// Returns the card's settings of a VF.
    fn settings(&self, vf: u32) -> VfSettings {
        let mut node = Handle::open_in(self.node.namespace.netns()).unwrap();
        let card = node.link(&self.cards.device).unwrap().index;
        node.vf_settings(card, vf).unwrap().unwrap()
    }

    /// The VF's interface, if it is on the node.
    fn device(&self, vf: usize) -> Option<DeviceState> {
        let mut node = Handle::open_in(self.node.namespace.netns()).unwrap();
        let address = self.vfs[vf].address.as_str();
        node.devices().unwrap().into_iter().find(|it| it.parent.as_deref() == Some(address))
    }

    pub(super) fn before(&self) -> Vec<(DeviceState, VfSettings)> {
        (0..2).map(|vf| (self.device(vf).unwrap(), self.settings(vf as u32))).collect()
    }

    fn assert_as(&self, before: &[(DeviceState, VfSettings)]) {
        self.assert_as_after("what the test has done", before);
    }

    pub(super) fn assert_as_after(&self, what: &str, before: &[(DeviceState, VfSettings)]) {
        let back = |(device, settings): (DeviceState, VfSettings)| {
            // The kernel may have given it another index.
            let link = netattach::netlink::LinkState { index: 0, ..device.link };
            // This driver takes the address that was last set for the permanent one, and reports its address to the
            // card only after one was set: before, the card shows none.
            let mac = settings.mac.filter(|mac| mac.0 != [0; 6] && Some(*mac) != link.mac);
            (DeviceState { link, permanent: None, ..device }, VfSettings { mac, ..settings })
        };
        let found: Vec<_> = self.before().into_iter().map(back).collect();
        let expected: Vec<_> = before.iter().cloned().map(back).collect();
        assert_eq!(found, expected, "after {what}");
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = ip(&self.node.namespace, &["link", "del", "br0"]);
    }
}

/// The host on the wire is in the VLAN of the pods from now on.
fn tag(outside: &Namespace, cards: &Cards) {
    let id = VLAN.to_string();
    ip(outside, &["address", "del", &format!("{OUTSIDE}/24"), "dev", &cards.other]).unwrap();
    ip(outside, &["link", "add", "link", &cards.other, "name", "tagged", "type", "vlan", "id", &id]).unwrap();
    ip(outside, &["address", "add", &format!("{OUTSIDE}/24"), "dev", "tagged"]).unwrap();
    ip(outside, &["link", "set", "tagged", "up"]).unwrap();
}

fn tagged_outside(cards: &Cards) -> Namespace {
    let outside = outside(cards, OUTSIDE);
    tag(&outside, cards);
    outside
}

/// Rows: SRV-keys, SRV-mtu, SRV-back, SRV-result, SRV-check.
#[test]
fn what_a_card_sets_holds_between_two_pods_and_goes_back_as_it_was() {
    let test = "what_a_card_sets_holds_between_two_pods";
    let mut keys = all_keys();
    keys["mtu"] = json!(1400);
    let Some(mut own) = Own::new(test, &keys) else { return };
    let outside = outside(&own.cards, OUTSIDE);
    own.node.write("policy", &only_the_client_of_vfs()).unwrap();
    let before = own.before();
    for pod in &own.pods {
        own.node.add(pod).success();
    }
    for (number, (name, _, mac)) in PODS.into_iter().enumerate() {
        let expected = VfSettings {
            mac: Some(mac.parse().unwrap()),
            vlan: Some(VfVlan { id: VLAN, priority: 3, service: false }),
            rates: Some(VfRates { min: 0, max: 200 }),
            spoof_check: Some(false),
            trust: Some(true),
            link_state: before[number].1.link_state,
        };
        assert_eq!(own.settings(number as u32), expected, "{name}");
        assert_eq!(own.device(number), None);
        let mut inside = Handle::open_in(own.pods[number].namespace.netns()).unwrap();
        assert_eq!(inside.link("net1").unwrap().mtu, 1400, "{name}");
        let row = row(&own.node, name);
        let told = ["kind", "mac", "enforcement"].map(|key| row[key].clone());
        assert_eq!(told, [json!("sriov"), json!(mac), json!("full")], "{name}");
    }
    let _served = [(0, 80), (0, 81), (1, 80)].map(|(pod, port): (usize, u16)| {
        let address = SocketAddr::new(PODS[pod].1.parse().unwrap(), port);
        Echo::serve(&own.pods[pod].namespace, address).unwrap()
    });
    let reaches = |own: &Own, port, patience| {
        connects(&own.pods[1].namespace, SocketAddr::new(SERVER_ADDRESS.parse().unwrap(), port), patience)
    };
    assert!(reaches(&own, 80, PATIENCE) && !reaches(&own, 81, SILENCE));
    // On the wire they are in their VLAN, and a host outside of it reaches none.
    let client = SocketAddr::new(CLIENT_ADDRESS.parse().unwrap(), 80);
    assert!(!connects(&outside, client, SILENCE));
    tag(&outside, &own.cards);
    assert!(connects(&outside, client, PATIENCE));

    own.node.kill().unwrap();
    own.node.start().unwrap();
    assert!(reaches(&own, 80, PATIENCE) && !reaches(&own, 81, SILENCE));
    for pod in &own.pods {
        own.node.check(pod).success();
    }
    ip(&own.node.namespace, &["link", "set", &own.cards.device, "vf", "0", "vlan", "7"]).unwrap();
    let (code, told) = own.node.check(&own.pods[0]).failure();
    let expected = format!("net1 (shop/vf): VF 0 of {} has another vlan", own.cards.address);
    assert_eq!((code, told), (999, expected));

    for pod in &own.pods {
        own.node.del(pod).success();
        own.node.del(pod).success();
    }
    own.assert_as(&before);
    assert_eq!(links(&own.node), BTreeMap::new());
    Snapshot::take(&own.node, &[&own.pods[0], &own.pods[1]]).unwrap().assert_nothing_is_left();
}

/// Rows: SRV-owner, SRV-namespace-gone.
#[test]
fn a_vf_is_its_newest_pods_and_a_late_del_leaves_it_alone() {
    let test = "a_vf_is_its_newest_pods";
    let Some(mut own) = Own::new(test, &all_keys()) else { return };
    let before = own.before();
    own.node.add(&own.pods[0]).success();
    // The device plugin considers the VF free.
    own.select(1, 0);
    let (code, told) = own.refused(1);
    let device = &own.vfs[0].address;
    assert_eq!(code, 11, "{told}");
    assert!(told.contains(&format!("device {device} is taken: pod shop/server, container ")), "{told}");

    // Its namespace dies, and the kernel brings the VF home under its name in the pod.
    own.pods[0].namespace = Namespace::new().unwrap();
    assert!(eventually(PATIENCE, || own.device(0).is_some()));
    own.node.add(&own.pods[1]).success();
    let set = own.settings(0);
    // Programs of the first came back with the VF; if they were still there, they would drop packets of the second.
    assert!(eventually(PATIENCE, || links(&own.node).len() == 2));
    let outside = tagged_outside(&own.cards);
    assert!(ping(&own.pods[1].namespace, OUTSIDE.parse().unwrap(), PATIENCE).unwrap());
    assert!(ping(&outside, CLIENT_ADDRESS.parse().unwrap(), PATIENCE).unwrap());
    // The DEL of the first comes late, and again after a restart.
    for _ in 0..2 {
        own.node.call("DEL", &own.pods[0]).with("CNI_NETNS", "").run().success();
        assert_eq!((own.settings(0), own.device(0)), (set.clone(), None));
        own.node.kill().unwrap();
        own.node.start().unwrap();
    }
    own.node.check(&own.pods[1]).success();
    own.node.del(&own.pods[1]).success();
    own.assert_as(&before);
}

/// Rows: SRV-mac.
#[test]
fn a_vf_gets_no_ethernet_address_of_another_vf_nor_of_its_card() {
    let Some(mut own) = Own::new("a_vf_gets_no_ethernet_address", &json!({})) else { return };
    let before = own.before();
    own.node.add(&own.pods[0]).success();
    let mut host = Handle::open_in(own.node.namespace.netns()).unwrap();
    let of_card = host.link(&own.cards.device).unwrap().mac.unwrap().to_string();
    let is_cards = format!("the node's device {} has it", own.cards.device);
    let is_servers = "pod shop/server, container ".to_owned();
    let wishes = [(PODS[0].2, 11, is_servers), (of_card.as_str(), 7, is_cards)];
    for restarted in [false, true] {
        if restarted {
            own.node.kill().unwrap();
            own.node.start().unwrap();
        }
        for (mac, code, holder) in &wishes {
            own.select_as(1, 1, mac);
            let told = format!("MAC address {mac} is taken: {holder}");
            let mut last = (0, String::new());
            // The agent may not have read the change yet.
            let is_refused = || {
                let added = own.node.add(&own.pods[1]);
                match added.exit {
                    0 => drop(own.node.del(&own.pods[1]).success()),
                    _ => last = added.failure(),
                }
                last.1.contains(&told)
            };
            assert!(eventually(PATIENCE, is_refused), "{told}");
            assert_eq!(last.0, *code, "{}", last.1);
        }
    }
    own.node.del(&own.pods[0]).success();
    own.assert_as(&before);
}

/// The VF does not keep the programs that its pod attached either, which come back to the node with it.
///
/// Rows: SRV-namespace-gone, SRV-restart, HDV-programs.
#[test]
fn a_vf_whose_pod_died_while_no_agent_ran_is_given_its_name_and_settings_back() {
    let test = "a_vf_whose_pod_died";
    let Some(mut own) = Own::new(test, &all_keys()) else { return };
    let before = own.before();
    own.node.add(&own.pods[0]).success();
    own.node.kill().unwrap();
    let held = occupy(&own.pods[0].namespace, "net1", true).unwrap();
    own.pods[0].namespace = Namespace::new().unwrap();
    assert!(eventually(PATIENCE, || own.device(0).is_some_and(|device| device.link.name == "net1")));
    assert!(all_programs(&own.node.namespace, "net1").unwrap().len() >= 3);
    own.node.start().unwrap();
    own.node.call("DEL", &own.pods[0]).with("CNI_NETNS", "").run().success();
    own.assert_as(&before);
    assert_eq!(all_programs(&own.node.namespace, &before[0].0.link.name).unwrap(), [0; 0]);
    drop(held);
}

/// Rows: SRV-refused, SRV-rollback.
#[test]
fn a_setting_that_the_card_refuses_is_named_and_all_others_go_back() {
    let keys = json!({"vlan": VLAN, "trust": "on", "link_state": "enable"});
    let Some(own) = Own::new("a_setting_that_the_card_refuses", &keys) else { return };
    let before = own.before();
    let (code, told) = own.node.add(&own.pods[0]).failure();
    let expected = format!("key link_state: the card refuses it for VF 0 of {}", own.cards.address);
    assert_eq!(code, 7, "{told}");
    assert!(told.contains(&expected), "{told}");
    own.assert_as(&before);
    Snapshot::take(&own.node, &[&own.pods[0]]).unwrap().assert_nothing_is_left();
}

/// The files of sriov-cni for one VF. They are on the machine while this is.
struct SriovCni {
    /// Says whose the VF is.
    mark: PathBuf,
    lock: PathBuf,
}

const SRIOV_CNI: &str = "/var/lib/cni/sriov";

impl SriovCni {
    fn with(vf: &Vf) -> Self {
        let pci = Path::new(SRIOV_CNI).join("pci");
        fs::create_dir_all(pci.join("vf_lock")).unwrap();
        let lock = pci.join("vf_lock").join(format!("{}.lock", vf.address));
        Self { mark: pci.join(&vf.address), lock }
    }

    fn give_to(&self, namespace: &Namespace) {
        fs::write(&self.mark, namespace.path().to_str().unwrap()).unwrap();
    }

    fn is_of(&self, namespace: &Namespace) -> bool {
        fs::read_to_string(&self.mark).is_ok_and(|path| Path::new(&path) == namespace.path())
    }
}

impl Drop for SriovCni {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(SRIOV_CNI);
    }
}

/// Rows: SRV-beside.
#[test]
fn a_vf_is_either_sriov_cnis_or_ours() {
    let Some(mut own) = Own::new("a_vf_is_either_sriov_cnis_or_ours", &all_keys()) else { return };
    let before = own.before();
    let sriov_cni = SriovCni::with(&own.vfs[0]);
    let (device, other) = (own.vfs[0].address.clone(), Namespace::new().unwrap());

    sriov_cni.give_to(&other);
    let (code, told) = own.node.add(&own.pods[0]).failure();
    let path = other.path().display();
    let expected = format!("device {device} is taken: sriov-cni has given it to {path}");
    assert!(code == 11 && told.ends_with(&expected), "{code}: {told}");
    fs::remove_file(&sriov_cni.mark).unwrap();
    let held = fs::File::create(&sriov_cni.lock).unwrap();
    held.lock().unwrap();
    let (code, told) = own.node.add(&own.pods[0]).failure();
    let expected = format!("device {device}: sriov-cni holds its lock");
    assert!(code == 11 && told.ends_with(&expected), "{code}: {told}");
    drop(held);
    own.assert_as(&before);

    // sriov-cni learns of our use of the VF, even if it forgets its own.
    own.node.add(&own.pods[0]).success();
    assert!(sriov_cni.is_of(&own.pods[0].namespace));
    fs::remove_file(&sriov_cni.mark).unwrap();
    own.node.kill().unwrap();
    own.node.start().unwrap();
    assert!(sriov_cni.is_of(&own.pods[0].namespace));
    own.node.del(&own.pods[0]).success();
    assert!(!sriov_cni.mark.exists());
    own.assert_as(&before);

    // A VF that it has given to a deleted pod is free. Then our pod ends, and it gives the VF to another before our
    // DEL.
    fs::write(&sriov_cni.mark, "/run/netns/netattach-test-gone").unwrap();
    own.node.add(&own.pods[0]).success();
    assert!(sriov_cni.is_of(&own.pods[0].namespace));
    sriov_cni.give_to(&other);
    own.pods[0].namespace = Namespace::new().unwrap();
    assert!(eventually(PATIENCE, || own.device(0).is_some()));
    ip(&own.node.namespace, &["link", "set", &own.cards.device, "vf", "0", "vlan", "7"]).unwrap();
    let found = (own.device(0), own.settings(0));
    own.node.call("DEL", &own.pods[0]).with("CNI_NETNS", "").run().success();
    assert_eq!((own.device(0), own.settings(0)), found);
    let as_it_came = (found.0.map(|device| device.link.name), found.1.vlan.map(|vlan| vlan.id));
    assert_eq!(as_it_came, (Some("net1".to_owned()), Some(7)));
    assert!(sriov_cni.is_of(&other));
}

/// Rows: SRV-cycles.
#[test]
fn cycles_leave_nothing() {
    let Some(own) = Own::new("cycles_leave_nothing", &all_keys()) else { return };
    let before = own.before();
    for cycle in 0..nightly(20, 100) {
        // Each VF is assigned to each pod in turn. The agent may have read only one of the manifests.
        for pod in [0, 1] {
            own.select(pod, (pod + cycle) % 2);
        }
        let have_theirs = || {
            let added = own.pods.each_ref().map(|pod| own.node.add(pod).exit == 0);
            for pod in &own.pods {
                own.node.del(pod).success();
            }
            added == [true; 2]
        };
        assert!(eventually(PATIENCE, have_theirs), "cycle {cycle}");
    }
    own.assert_as(&before);
    assert_eq!(links(&own.node), BTreeMap::new());
    Snapshot::take(&own.node, &[&own.pods[0], &own.pods[1]]).unwrap().assert_nothing_is_left();
}

/// Rows: HDV-pci, HDV-back.
#[test]
fn a_host_device_by_its_pci_address_goes_back_as_it_was() {
    let test = "a_host_device_by_its_pci_address";
    let Some(own) = Own::new(test, &json!({"type": "host-device"})) else { return };
    let before = own.before();
    for pod in &own.pods {
        own.node.add(pod).success();
        own.node.check(pod).success();
    }
    assert!(ping(&own.pods[0].namespace, CLIENT_ADDRESS.parse().unwrap(), PATIENCE).unwrap());
    // The pod's changes are undone, and the device has its own name again.
    ip(&own.pods[0].namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&own.pods[0].namespace, &["link", "set", "net1", "mtu", "1400", "promisc", "on"]).unwrap();
    ip(&own.pods[0].namespace, &["link", "set", "net1", "name", "mine"]).unwrap();
    for pod in &own.pods {
        own.node.del(pod).success();
    }
    own.assert_as(&before);
}

/// Rows: SRV-unbound.
#[test]
fn a_vf_that_has_lost_its_driver_is_set_back_and_one_that_is_elsewhere_is_waited_for() {
    let test = "a_vf_that_has_lost_its_driver";
    let Some(own) = Own::new(test, &all_keys()) else { return };
    let (pod, vf) = (&own.pods[0], &own.vfs[0]);
    let before = own.before();
    own.node.add(pod).success();
    // Its pod moves it to an unknown namespace.
    let aside = Namespace::new().unwrap();
    let task = aside.path().ancestors().nth(2).and_then(Path::file_name).unwrap().to_str().unwrap();
    ip(&pod.namespace, &["link", "set", "net1", "netns", task]).unwrap();
    let (code, told) = own.node.del(pod).failure();
    let expected = format!(
        "device {} has the driver igbvf, and its network interface is neither in the pod nor on the node",
        vf.address
    );
    assert_eq!((code, told.contains(&expected)), (11, true), "{told}");
    drop(aside);
    assert!(eventually(PATIENCE, || own.node.del(pod).exit == 0));
    own.assert_as(&before);

    own.node.add(pod).success();
    assert_ne!(own.settings(0), before[0].1);
    fs::write("/sys/bus/pci/drivers/igbvf/unbind", &vf.address).unwrap();
    own.node.del(pod).success();
    own.node.del(pod).success();
    let set = |settings: &VfSettings| VfSettings { mac: None, ..settings.clone() };
    assert_eq!((own.device(0), set(&own.settings(0))), (None, set(&before[0].1)));
    Snapshot::take(&own.node, &[pod]).unwrap().assert_nothing_is_left();
    vf.bind("igbvf").unwrap();
    assert!(eventually(PATIENCE, || own.device(0).is_some()));
    for pod in &own.pods {
        own.node.add(pod).success();
    }
    assert!(ping(&pod.namespace, CLIENT_ADDRESS.parse().unwrap(), PATIENCE).unwrap());
    for pod in &own.pods {
        own.node.del(pod).success();
    }
    assert_eq!(set(&own.settings(0)), set(&before[0].1));
}

/// Rows: SRV-userspace.
#[test]
fn a_vf_that_its_pod_drives_is_set_by_its_card_and_has_its_addresses_in_the_result() {
    let test = "a_vf_that_its_pod_drives";
    let Some(own) = Own::new(test, &all_keys()) else { return };
    // Set by the administrator: it is set again after the pod's.
    let pinned = "02:00:00:00:00:5a";
    let pin = |mac: &str| {
        ip(&own.node.namespace, &["link", "set", &own.cards.device, "vf", "0", "mac", mac]).unwrap();
    };
    pin(pinned);
    let before: Vec<_> = (0..2).map(|vf| own.settings(vf)).collect();
    // The machine has no IOMMU, without which `vfio-pci` accepts no device.
    own.vfs[0].bind("uio_pci_generic").unwrap();
    let (_, address, mac) = PODS[0];
    own.node.add(&own.pods[0]).success();
    let status = own.node.status(&own.pods[0]).unwrap();
    let told = ["interface", "ips", "mac"].map(|key| status[1][key].clone());
    assert_eq!(told, [json!("net1"), json!([address]), json!(mac)], "{status:#}");
    assert!(!Network::of(&own.pods[0].namespace).unwrap().links.contains_key("net1"));
    let set = own.settings(0);
    assert_eq!((set.mac, set.vlan.map(|vlan| vlan.id)), (Some(mac.parse().unwrap()), Some(VLAN)));
    let row = row(&own.node, PODS[0].0);
    assert_eq!((&row["kind"], &row["enforcement"]), (&json!("sriov"), &json!("none")), "{row:#}");
    own.node.check(&own.pods[0]).success();

    own.node.del(&own.pods[0]).success();
    own.node.del(&own.pods[0]).success();
    let settings = |vf| VfSettings { mac: None, ..own.settings(vf) };
    let expected = VfSettings { mac: None, ..before[0].clone() };
    assert_eq!((settings(0), own.settings(0).mac), (expected.clone(), Some(pinned.parse().unwrap())));
    Snapshot::take(&own.node, &[&own.pods[0]]).unwrap().assert_nothing_is_left();
    // A policy that selects the pod could not hold.
    own.node.write("policy", &only_the_client_of_vfs()).unwrap();
    let (_, told) = own.refused(0);
    assert!(told.contains("net1"), "{told}");
    assert_eq!(settings(0), expected);
    pin("00:00:00:00:00:00");
    own.vfs[0].bind("igbvf").unwrap();
}
