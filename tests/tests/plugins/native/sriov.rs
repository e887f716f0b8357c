//! `sriov`: VFs of a card in pods without an agent, and what a plugin does that keeps records and no process.
//!
//! These run in the virtual machine that has such cards (`cargo xtask vm`), as they take its VFs from it.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use netattach::netlink::{DeviceState, Handle, LinkState};
use netattach::spec::{VfRates, VfSettings, VfVlan};
use netattach_tests::node::ip;
use netattach_tests::runtime::{Answer, Call, Runtime, config, with_result};
use netattach_tests::sriov::{Cards, Vf};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Namespace, nightly};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The directories of records, one for each node that shares the machine.
const RECORDS: &str = "/run/cni/netattach-sriov";
/// No name of the machine's own, as the kernel moves a VF home under it.
const IFNAME: &str = "net1";
const SRIOV_CNI: &str = "/var/lib/cni/sriov";
const CONTAINERS: [&str; 2] = ["c0", "c1"];
const MACS: [&str; 2] = ["02:00:00:00:0b:02", "02:00:00:00:0b:03"];
const VLAN: u16 = 100;
const SIGKILL: i32 = 9;

/// Most points of ADD, and of DEL, at which the plugin is killed, unless all are tested: in an emulated machine each
/// takes seconds.
const KILLED: usize = 10;

/// A VF on the node.
type OnNode = (Option<DeviceState>, VfSettings);

/// This machine with two VFs and the plugin, and two pods.
struct Scene {
    runtime: Runtime,
    pods: [Namespace; 2],
    vfs: Vec<Vf>,
    dir: TempDir,
    // Dropped last, as the next test expects all VFs to be back.
    cards: Cards,
}

impl Scene {
    /// `None`: this machine has no such card.
    fn new(test: &str) -> Option<Self> {
        let cards = Cards::take(test).unwrap()?;
        let vfs = cards.make_vfs(2).unwrap();
        // Also those of another test that has failed.
        remove_records();
        let dir = tempfile::tempdir().unwrap();
        let runtime =
            Runtime { node: Namespace::of_this_process().unwrap(), plugins: super::installed(&dir) };
        let pods = [(); 2].map(|()| Namespace::new().unwrap());
        Some(Self { runtime, pods, vfs, dir, cards })
    }

    fn call(&self, pod: usize) -> Call<'_> {
        Call { container: CONTAINERS[pod], ifname: IFNAME, netns: self.pods[pod].path(), args: "" }
    }

    /// The configuration by which a pod gets a VF, with all keys that the card supports.
    fn config(&self, pod: usize, vf: usize) -> Value {
        let ipam = json!({
            "type": "host-local", "dataDir": self.dir.path().join("leases"),
            "ranges": [[{"subnet": "10.61.0.0/24"}]]
        });
        let keys = json!({
            "deviceID": self.vfs[vf].address, "mac": MACS[pod], "vlan": VLAN, "vlanQoS": 3, "spoofchk": "off",
            "trust": "on", "max_tx_rate": 200, "logLevel": "debug", "ipam": ipam
        });
        config("1.1.0", "sriov", &keys)
    }

    fn add(&self, pod: usize, vf: usize) -> Value {
        self.runtime.add(self.call(pod), &self.config(pod, vf)).unwrap()
    }

    fn refused(&self, pod: usize, config: &Value) -> (u64, String) {
        self.runtime.refusal("ADD", self.call(pod), config).unwrap()
    }

    fn check(&self, pod: usize, vf: usize, result: &Value) {
        self.runtime.after("CHECK", self.call(pod), &self.config(pod, vf), result).unwrap();
    }

    fn run(&self, verb: &str, call: Call<'_>, config: &Value) -> Answer {
        self.runtime.run(verb, call, config).unwrap()
    }

    fn del(&self, pod: usize, vf: usize) {
        self.del_at(self.call(pod), &self.config(pod, vf));
    }

    fn del_at(&self, call: Call<'_>, config: &Value) {
        let answer = self.run("DEL", call, config);
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    }

    /// The pod's namespace ends without a DEL, and another one takes its place.
    fn ends(&mut self, pod: usize) {
        self.pods[pod] = Namespace::new().unwrap();
    }

    fn node(&self) -> Handle {
        Handle::open_in(self.runtime.node.netns()).unwrap()
    }

    /// The card's settings of a VF.
    fn settings(&self, vf: usize) -> VfSettings {
        let mut node = self.node();
        let card = node.link(&self.cards.device).unwrap().index;
        node.vf_settings(card, vf as u32).unwrap().unwrap()
    }

    fn device(&self, vf: usize) -> Option<DeviceState> {
        let address = self.vfs[vf].address.as_str();
        self.node().devices().unwrap().into_iter().find(|it| it.parent.as_deref() == Some(address))
    }

    /// A VF as it can be compared: the kernel may give it another index, this driver takes the address that was set
    /// last for the permanent one, and reports its own to the card only after one was set.
    fn on_node(&self, vf: usize) -> OnNode {
        let device = self.device(vf);
        let settings = self.settings(vf);
        let own = device.as_ref().and_then(|device| device.link.mac);
        let mac = settings.mac.filter(|mac| mac.0 != [0; 6] && Some(*mac) != own);
        let device = device.map(|device| {
            let link = LinkState { index: 0, ..device.link };
            DeviceState { link, permanent: None, ..device }
        });
        (device, VfSettings { mac, ..settings })
    }

    fn both(&self) -> [OnNode; 2] {
        [0, 1].map(|vf| self.on_node(vf))
    }

    /// The addresses that pods have.
    fn leased(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir.path().join("leases/net")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut leased: Vec<String> = names.filter(|name| name.starts_with("10.")).collect();
        leased.sort();
        leased
    }

    /// Checks that the VFs are on the node as before, and that nothing is recorded of any pod.
    fn assert_as_before(&self, what: &str, before: &[OnNode; 2]) {
        assert_eq!(&self.both(), before, "after {what}");
        assert_eq!((records(), self.leased()), (Vec::new(), Vec::new()), "after {what}");
        assert_eq!(marks(), [""; 0], "after {what}");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        remove_records();
    }
}

fn remove_records() {
    let _ = fs::remove_dir_all(RECORDS);
    let _ = fs::remove_dir_all(SRIOV_CNI);
}

/// The records of all nodes.
fn records() -> Vec<PathBuf> {
    let list = |directory: &Path| -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let mut found: Vec<PathBuf> = list(Path::new(RECORDS)).iter().flat_map(|node| list(node)).collect();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    found.sort();
    found
}

/// The VFs that have a holder according to sriov-cni's files.
fn marks() -> Vec<String> {
    let Ok(entries) = fs::read_dir(Path::new(SRIOV_CNI).join("pci")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "vf_lock").collect();
    names.sort();
    names
}

fn mark(vf: &Vf) -> PathBuf {
    Path::new(SRIOV_CNI).join("pci").join(&vf.address)
}

/// Rows: SRV-keys, SRV-mtu, SRV-back, SRV-result, SRV-check.
#[test]
fn a_vf_is_set_by_its_card_and_goes_back_as_it_was_without_an_agent_too() {
    let Some(scene) = Scene::new("a_vf_is_set_by_its_card_and_goes_back") else { return };
    let before = scene.both();
    let link_state = scene.settings(0).link_state;
    let mut config = scene.config(0, 0);
    config["mtu"] = json!(1400);
    let result = scene.runtime.add(scene.call(0), &config).unwrap();
    let own = &result["interfaces"][0];
    let told = ["name", "mac", "mtu", "pciID"].map(|key| own[key].clone());
    assert_eq!(told, [json!(IFNAME), json!(MACS[0]), json!(1400), json!(scene.vfs[0].address)], "{result:#}");
    let expected = VfSettings {
        mac: Some(MACS[0].parse().unwrap()),
        vlan: Some(VfVlan { id: VLAN, priority: 3, service: false }),
        rates: Some(VfRates { min: 0, max: 200 }),
        spoof_check: Some(false),
        trust: Some(true),
        link_state,
    };
    assert_eq!((scene.settings(0), scene.device(0)), (expected, None));
    let inside = Handle::open_in(scene.pods[0].netns()).unwrap().link(IFNAME).unwrap();
    assert_eq!((inside.mtu, inside.up, inside.mac), (1400, true, Some(MACS[0].parse().unwrap())));
    assert_eq!(fs::read_to_string(mark(&scene.vfs[0])).unwrap(), scene.pods[0].path().to_str().unwrap());

    scene.runtime.after("CHECK", scene.call(0), &config, &result).unwrap();
    let (code, told) = scene.refused(0, &config);
    let attached = "container c0 is attached with interface net1 already; another ADD needs a DEL first";
    assert_eq!((code, told.as_str()), (4, attached));
    ip(&scene.runtime.node, &["link", "set", &scene.cards.device, "vf", "0", "vlan", "7"]).unwrap();
    let (code, told) = scene.runtime.refusal("CHECK", scene.call(0), &with_result(&config, &result)).unwrap();
    let expected = format!("VF 0 of {} has another vlan", scene.cards.address);
    assert!(code == 999 && told.ends_with(&expected), "{code}: {told}");
    // A DEL without a namespace takes the VF from that of the ADD.
    for netns in [Path::new(""), scene.pods[0].path()] {
        scene.del_at(Call { netns, ..scene.call(0) }, &config);
        scene.assert_as_before("DEL", &before);
    }
    let (code, _) = scene.runtime.refusal("CHECK", scene.call(0), &with_result(&config, &result)).unwrap();
    assert_eq!(code, 3);
}

/// Rows: SRV-refused, SRV-rollback.
#[test]
fn a_setting_that_the_card_refuses_leaves_nothing_without_an_agent_too() {
    let Some(scene) = Scene::new("a_setting_that_the_card_refuses_leaves_nothing") else { return };
    let before = scene.both();
    let mut config = scene.config(0, 0);
    config["link_state"] = json!("enable");
    let (code, told) = scene.refused(0, &config);
    let expected = format!("key link_state: the card refuses it for VF 0 of {}", scene.cards.address);
    assert!(code == 7 && told.contains(&expected), "{code}: {told}");
    scene.assert_as_before("a refused ADD", &before);
}

/// Rows: SRV-owner, SRV-namespace-gone, SRV-restart.
#[test]
fn a_vf_is_its_newest_pods_and_one_whose_pod_died_goes_back_with_the_next_add() {
    let Some(mut scene) = Scene::new("a_vf_is_its_newest_pods_without_an_agent") else { return };
    let before = scene.both();
    scene.add(0, 0);
    let (code, told) = scene.refused(1, &scene.config(1, 0));
    let expected = format!("device {} is taken: container c0, interface net1 has it", scene.vfs[0].address);
    assert!(code == 11 && told.ends_with(&expected), "{code}: {told}");

    // Nothing notices that its namespace ends, until the ADD of another VF.
    scene.ends(0);
    assert!(eventually(PATIENCE, || scene.device(0).is_some_and(|device| device.link.name == IFNAME)));
    assert_eq!(scene.settings(0).vlan.map(|vlan| vlan.id), Some(VLAN));
    let result = scene.add(1, 1);
    assert_eq!(scene.on_node(0), before[0]);
    scene.check(1, 1, &result);
    // Its record stays for its DEL, which leaves the VF alone.
    assert_eq!(records().len(), 2);
    ip(&scene.runtime.node, &["link", "set", &scene.cards.device, "vf", "0", "vlan", "9"]).unwrap();
    scene.del_at(Call { netns: Path::new(""), ..scene.call(0) }, &scene.config(0, 0));
    assert_eq!(scene.settings(0).vlan.map(|vlan| vlan.id), Some(9));
    ip(&scene.runtime.node, &["link", "set", &scene.cards.device, "vf", "0", "vlan", "0"]).unwrap();
    scene.del(1, 1);
    scene.assert_as_before("the late DEL", &before);

    // Another pod has the VF itself by the time of that DEL.
    scene.add(0, 0);
    scene.ends(0);
    assert!(eventually(PATIENCE, || scene.device(0).is_some()));
    let result = scene.add(1, 0);
    let set = scene.settings(0);
    for _ in 0..2 {
        scene.del_at(Call { netns: Path::new(""), ..scene.call(0) }, &scene.config(0, 0));
        assert_eq!((scene.settings(0), scene.device(0)), (set.clone(), None));
    }
    scene.check(1, 0, &result);
    scene.del(1, 0);
    scene.assert_as_before("both", &before);
}

/// Rows: SRV-owner.
#[test]
fn a_del_without_a_record_takes_no_vf_of_another_pod_and_its_own_home() {
    let Some(scene) = Scene::new("a_del_without_a_record") else { return };
    let result = scene.add(0, 0);
    // The path of a former container's namespace leads to this pod's.
    scene.del_at(Call { container: "former", ..scene.call(0) }, &scene.config(0, 0));
    scene.check(0, 0, &result);
    for record in records() {
        fs::remove_file(record).unwrap();
    }
    scene.del(0, 0);
    assert_eq!(scene.vfs[0].on_node(), Some(scene.vfs[0].device.clone()));
    // One that an agent or another plugin has moved is not marked.
    let task = scene.pods[1].task();
    for words in [
        &["link", "set", &scene.vfs[1].device, "alias", &scene.vfs[1].device, "down"][..],
        &["link", "set", &scene.vfs[1].device, "netns", &task, "name", IFNAME],
    ] {
        ip(&scene.runtime.node, words).unwrap();
    }
    scene.del(1, 1);
    assert_eq!(scene.vfs[1].on_node(), None);
    assert!(Handle::open_in(scene.pods[1].netns()).unwrap().find_link(IFNAME).unwrap().is_some());
}

/// Rows: SRV-back.
#[test]
fn gc_gives_back_the_vfs_of_pods_that_are_not_valid() {
    let Some(scene) = Scene::new("gc_gives_back_the_vfs") else { return };
    let before = scene.both();
    scene.add(0, 0);
    let result = scene.add(1, 1);
    let gc = |network: &str, valid: &Value| {
        let mut config = scene.config(0, 0);
        config["name"] = json!(network);
        config["cni.dev/valid-attachments"] = valid.clone();
        let answer = scene.run("GC", scene.call(0), &config);
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    };
    let second = json!([{"containerID": "c1", "ifname": IFNAME}]);
    gc("another", &json!([]));
    assert_eq!((scene.device(0), records().len()), (None, 2));
    gc("net", &second);
    assert_eq!(scene.on_node(0), before[0]);
    assert_eq!((records().len(), scene.leased().len()), (1, 1));
    scene.check(1, 1, &result);
    gc("net", &json!([]));
    scene.assert_as_before("GC", &before);
}

/// Nothing on such a VF shows whose it is.
///
/// Rows: SRV-userspace, SRV-owner, SRV-beside.
#[test]
fn a_vf_that_its_pod_drives_has_one_holder_without_an_agent_too() {
    let Some(mut scene) = Scene::new("a_vf_that_its_pod_drives_has_one_holder") else { return };
    let set = |scene: &Scene| VfSettings { mac: None, ..scene.settings(0) };
    let before = set(&scene);
    // The machine has no IOMMU, without which `vfio-pci` accepts no device.
    scene.vfs[0].bind("uio_pci_generic").unwrap();
    let result = scene.add(0, 0);
    assert_eq!(result["ips"][0]["address"], "10.61.0.2/24", "{result:#}");
    assert!(Handle::open_in(scene.pods[0].netns()).unwrap().find_link(IFNAME).unwrap().is_none());
    assert_eq!(set(&scene).vlan.map(|vlan| vlan.id), Some(VLAN));
    scene.check(0, 0, &result);
    let (code, told) = scene.refused(1, &scene.config(1, 0));
    let taken = format!("device {} is taken: container c0, interface net1 has it", scene.vfs[0].address);
    assert!(code == 11 && told.ends_with(&taken), "{code}: {told}");
    scene.del(0, 0);
    scene.del(0, 0);
    assert_eq!((set(&scene), records(), marks()), (before.clone(), Vec::new(), Vec::new()));

    // The process may live on when its pod's namespace is gone: the VF keeps its settings until somebody claims it.
    scene.add(0, 0);
    scene.ends(0);
    let result = scene.add(1, 1);
    assert_eq!(set(&scene).vlan.map(|vlan| vlan.id), Some(VLAN));
    scene.runtime.after("DEL", scene.call(1), &scene.config(1, 1), &result).unwrap();
    let result = scene.add(1, 0);
    scene.del_at(Call { netns: Path::new(""), ..scene.call(0) }, &scene.config(0, 0));
    assert_eq!(set(&scene).vlan.map(|vlan| vlan.id), Some(VLAN));
    scene.check(1, 0, &result);
    scene.del(1, 0);
    assert_eq!((set(&scene), records(), marks()), (before.clone(), Vec::new(), Vec::new()));

    // An agent of the node, or sriov-cni, has given it to a pod.
    fs::write(mark(&scene.vfs[0]), scene.pods[1].path().to_str().unwrap()).unwrap();
    let (code, told) = scene.refused(0, &scene.config(0, 0));
    let path = scene.pods[1].path().display();
    let given = format!("device {} is taken: sriov-cni has given it to {path}", scene.vfs[0].address);
    assert!(code == 11 && told.ends_with(&given), "{code}: {told}");
    assert_eq!((set(&scene), records()), (before, Vec::new()));
    ip(&scene.runtime.node, &["link", "set", &scene.cards.device, "vf", "0", "mac", "00:00:00:00:00:00"])
        .unwrap();
    scene.vfs[0].bind("igbvf").unwrap();
}

/// Rows: SRV-cycles.
#[test]
fn cycles_of_two_pods_at_once_leave_nothing_without_an_agent_too() {
    let Some(scene) = Scene::new("cycles_of_two_pods_at_once") else { return };
    let before = scene.both();
    for cycle in 0..nightly(5, 50) {
        // Each VF is assigned to each pod in turn.
        let at_once = |act: &(dyn Fn(usize, usize) + Sync)| {
            std::thread::scope(|scope| {
                for pod in [0, 1] {
                    scope.spawn(move || act(pod, (pod + cycle) % 2));
                }
            });
        };
        at_once(&|pod, vf| drop(scene.add(pod, vf)));
        assert_eq!((scene.device(0), scene.device(1)), (None, None), "cycle {cycle}");
        at_once(&|pod, vf| scene.del(pod, vf));
    }
    scene.assert_as_before("the cycles", &before);
}

/// The plugin with crash points, in this machine's namespace.
struct Killed {
    scene: Scene,
    before: [OnNode; 2],
    crash: PathBuf,
}

impl Killed {
    fn new(test: &str) -> Option<Self> {
        let scene = Scene::new(test)?;
        let before = scene.both();
        let crash = scene.dir.path().join("crash");
        fs::create_dir(&crash).unwrap();
        Some(Self { scene, before, crash })
    }

    /// Calls the plugin for the first pod and VF, and kills it at that point. Returns whether it was killed.
    fn dies_at(&self, verb: &str, point: usize) -> bool {
        let (call, config) = (self.scene.call(0), self.scene.config(0, 0));
        fs::write(self.crash.join("at"), point.to_string()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_crash-cni"))
            .env_clear()
            .env("NETATTACH_CRASH_DIR", &self.crash)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", call.container)
            .env("CNI_IFNAME", call.ifname)
            .env("CNI_NETNS", call.netns)
            .env("CNI_PATH", &self.scene.runtime.plugins)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let was_killed = output.status.signal() == Some(SIGKILL);
        assert!(was_killed || output.status.success(), "{output:?}");
        was_killed
    }

    fn points(&self) -> Vec<String> {
        let log = fs::read_to_string(self.crash.join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Carries out the operation, and returns the numbers of the points at which the plugin is to be killed: those at
    /// which interfaces and records change, unless all are tested.
    fn points_of(&self, verb: &str) -> Vec<usize> {
        assert!(!self.dies_at(verb, usize::MAX));
        let kinds = nightly(&["netlink:", "link:", "give-back:", "applied:", "add:", "undo:"][..], &[""][..]);
        let points = self.points();
        let is_chosen = |at: &usize| kinds.iter().any(|kind| points[*at].starts_with(kind));
        let chosen: Vec<usize> = (0..points.len()).filter(is_chosen).collect();
        assert!(chosen.len() > 5, "{points:?}");
        let apart = chosen.len().div_ceil(nightly(KILLED, usize::MAX));
        chosen.into_iter().step_by(apart).collect()
    }

    /// Checks that the next ADD of another pod, for another VF, settles what was left of the first pod, unless that is
    /// attached. While the VF is in the namespace of a process that has been killed, it is nowhere for a moment.
    fn assert_the_next_add_settles(&self, what: &str) {
        let is_attached = |record: &PathBuf| {
            let text = fs::read_to_string(record).unwrap_or_default();
            text.contains("\"state\":\"attached\"") && !text.contains("\"removing\"")
        };
        if records().iter().any(is_attached) {
            return;
        }
        let settles = || {
            self.scene.add(1, 1);
            self.scene.del(1, 1);
            records().is_empty()
        };
        assert!(eventually(PATIENCE, settles), "after {what}");
        self.scene.assert_as_before(what, &self.before);
    }

    /// DEL of the first pod succeeds, and nothing is left. As for the next ADD, it may have to be repeated.
    fn assert_del_settles(&self, what: &str) {
        let call = self.scene.call(0);
        let ends = || self.scene.run("DEL", call, &self.scene.config(0, 0)).exit == Some(0);
        assert!(eventually(PATIENCE, ends), "after {what}");
        self.scene.assert_as_before(what, &self.before);
    }
}

/// Kills calls of the plugin at one point after the other, and has the next calls settle what each has left.
fn assert_a_killed_call_is_settled(test: &str, verb: &str) {
    let Some(killed) = Killed::new(test) else { return };
    // Brings the pod to where the call begins, and from where it ends to no attachment.
    let prepare = || {
        if verb == "DEL" {
            killed.scene.add(0, 0);
        }
    };
    let complete = || {
        if verb == "ADD" {
            killed.scene.del(0, 0);
        }
    };
    prepare();
    let points = killed.points_of(verb);
    complete();
    for (number, point) in points.into_iter().enumerate() {
        prepare();
        if !killed.dies_at(verb, point) {
            complete();
            break;
        }
        let what = format!("{verb}, point {point}, {:?}", killed.points().last());
        if number % 2 == 0 {
            killed.assert_the_next_add_settles(&what);
        }
        killed.assert_del_settles(&what);
    }
    killed.scene.add(0, 0);
    killed.assert_del_settles(&format!("the last {verb}"));
}

/// Rows: SRV-killed.
#[test]
fn killed_while_it_takes_a_vf_it_has_the_next_call_give_it_back() {
    assert_a_killed_call_is_settled("killed_while_it_takes_a_vf", "ADD");
}

/// Rows: SRV-killed.
#[test]
fn killed_while_it_gives_a_vf_back_it_has_the_next_call_do_it() {
    assert_a_killed_call_is_settled("killed_while_it_gives_a_vf_back", "DEL");
}
