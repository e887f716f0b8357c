//! The chained plugin `tuning`: compared with the reference plugin, call by call, and in the chains of an agent.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use netattach::netlink::Handle;
use netattach::plan::link_group;
use netattach::spec::{OWN_GROUPS, Properties};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::node_root::with_own_mounts;
use netattach_tests::runtime::{Call, Runtime, config, in_form_of, with_result};
use netattach_tests::settings::Settings;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Namespace, Node, Pod, tools};
use rustix::mount::{MountFlags, mount};
use serde_json::{Value, json};
use tempfile::TempDir;

const MAC: &str = "02:00:00:00:00:07";
const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A pod with one interface, and the plugins of one side.
struct Side {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
}

/// The state of a side after each call.
#[derive(Debug, PartialEq)]
struct Seen {
    answers: Vec<(Option<i32>, Value)>,
    attached: (Properties, String, Settings),
    file: Value,
    detached: (Properties, Settings),
    is_file_gone: bool,
}

impl Side {
    fn new(plugins: PathBuf) -> Self {
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins };
        let side = Self { runtime, pod: Namespace::new().unwrap(), dir: tempfile::tempdir().unwrap() };
        let words =
            ["link", "add", "eth0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "far0"];
        ip(&side.pod, &words).unwrap();
        ip(&side.pod, &["link", "set", "eth0", "up", "txqueuelen", "1000"]).unwrap();
        side
    }

    fn call(&self) -> Call<'_> {
        Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args: "" }
    }

    fn properties(&self) -> Properties {
        Handle::open_in(self.pod.netns()).unwrap().properties("eth0").unwrap()
    }

    fn setting(&self, path: &str) -> String {
        self.pod.run(|| fs::read_to_string(format!("/proc/sys/net/{path}")).unwrap().trim_end().to_owned())
    }

    /// ADD, CHECK, CHECK after the interface was changed, DEL twice, with these `CNI_ARGS`.
    fn run(&self, version: &str, keys: &Value, args: &str) -> Seen {
        let data = self.dir.path().join("tuning");
        let mut tuning = config(version, "tuning", keys);
        tuning["dataDir"] = json!(data);
        let ran = |verb: &str, previous: &Value| {
            let call = Call { args, ..self.call() };
            let answer = self.runtime.run(verb, call, &with_result(&tuning, previous)).unwrap();
            // The words of an error are each implementation's own.
            let said = if answer.exit == Some(0) { answer.stdout } else { Value::Null };
            (answer.exit, said)
        };
        let mut answers = vec![ran("ADD", &previous(version))];
        let result = answers[0].1.clone();
        let settings = || Settings::of(&self.pod).unwrap();
        let attached = (self.properties(), self.setting("core/somaxconn"), settings());
        let path = data.join("c1_eth0.json");
        let mut file =
            fs::read(&path).map_or(Value::Null, |content| serde_json::from_slice(&content).unwrap());
        // Only ours records whose interface it was.
        if let Some(members) = file.as_object_mut() {
            members.remove("netattach");
        }
        answers.push(ran("CHECK", &result));
        ip(&self.pod, &["link", "set", "eth0", "mtu", "1290"]).unwrap();
        answers.push(ran("CHECK", &result));
        answers.extend([ran("DEL", &result), ran("DEL", &result)]);
        let detached = (self.properties(), settings());
        Seen { answers, attached, file, detached, is_file_gone: !path.exists() }
    }
}

/// The result of the plugin before.
fn previous(version: &str) -> Value {
    let result = json!({
        "interfaces": [
            {"name": "br0", "mac": "02:00:00:00:00:02"},
            {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/pod"}
        ],
        "ips": [{"version": "4", "interface": 1, "address": "10.1.0.2/24"}], "dns": {}
    });
    in_form_of(version, &result)
}

/// Rows: TUN-keys.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn tuning_agrees_with_the_reference() {
    let test = "tuning_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["tuning"]) else { return };
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:09";
    let rows = [
        json!({}),
        json!({"sysctl": {"net.core.somaxconn": "500", "net.ipv4.conf.IFNAME.log_martians": "1"}}),
        json!({"mac": MAC}),
        json!({"runtimeConfig": {"mac": MAC}, "mac": "02:00:00:00:00:08"}),
        json!({"mtu": 1400}),
        json!({"promisc": true}),
        json!({"promisc": false}),
        json!({"allmulti": true}),
        json!({"allmulti": false}),
        json!({"txQLen": 20000}),
        json!({"mac": MAC, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 7}),
        json!({"mtu": 1400, "sysctl": {"net.core.somaxconn": "500"},
            "args": {"cni": {"mac": MAC, "mtu": 1300, "promisc": true, "allmulti": true, "txQLen": 9,
                "sysctl": {"net.core.somaxconn": "500"}}}}),
        // Refused: no setting of the network, one that is not there.
        json!({"sysctl": {"kernel.hostname": "a"}}),
        json!({"sysctl": {"net.core.no_such": "1"}}),
    ];
    let by_args = [json!({}), json!({"mac": MAC}), json!({"runtimeConfig": {"mac": MAC}})];
    let rows = rows.into_iter().map(|keys| (keys, "")).chain(by_args.into_iter().map(|keys| (keys, arg)));
    for (keys, args) in rows {
        for version in VERSIONS {
            let ours = Side::new(own.path().to_owned()).run(version, &keys, args);
            let theirs = Side::new(reference.clone()).run(version, &keys, args);
            assert_eq!(ours, theirs, "{version} {keys} {args:?}");
        }
    }
}

/// Lines are regular expressions that match somewhere in the name as it is written; an empty one matches nothing.
///
/// Rows: TUN-allowed.
#[test]
fn the_administrators_list_allows_the_same_as_with_the_reference() {
    let test = "the_administrators_list_allows_the_same_as_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["tuning"]) else { return };
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    with_own_mounts(|_| {
        // In place of the machine's own, for this thread and the plugins that it starts.
        mount("tmpfs", "/etc", "tmpfs", MountFlags::empty(), None).unwrap();
        fs::create_dir_all("/etc/cni/tuning").unwrap();
        let list = "^net[.]ipv4[.]conf[.]IFNAME[.][a-z_]*$\n\n somaxconn\n";
        fs::write("/etc/cni/tuning/allowlist.conf", list).unwrap();
        let martians = "net.ipv4.conf.IFNAME.log_martians";
        for (keys, is_allowed) in [
            (json!({"sysctl": {martians: "1", "net.core.somaxconn": "500"}}), true),
            (json!({"sysctl": {"net/core/somaxconn": "500"}}), true),
            (json!({"sysctl": {"net.ipv4.conf.eth0.log_martians": "1"}}), false),
            (json!({"sysctl": {martians: "1", "net.ipv4.ip_forward": "1"}}), false),
            // What is no setting needs no permission.
            (json!({"mtu": 1400, "promisc": true}), true),
        ] {
            let [ours, theirs] = [own.path().to_owned(), reference.clone()]
                .map(|plugins| Side::new(plugins).run("1.0.0", &keys, ""));
            assert_eq!(ours.answers[0].0, Some(i32::from(!is_allowed)), "{keys}");
            assert_eq!(ours, theirs, "{keys}");
        }
    });
}

/// Each implementation detaches what the other has attached.
///
/// Rows: TUN-each-other.
#[test]
fn either_gives_back_what_the_other_has_changed() {
    let test = "either_gives_back_what_the_other_has_changed";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["tuning"]) else { return };
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    for (adds, dels) in [(own.path().to_owned(), reference.clone()), (reference, own.path().to_owned())] {
        let mut side = Side::new(adds.clone());
        let before = side.properties();
        for version in VERSIONS {
            let keys = json!({"mac": MAC, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 7,
                "dataDir": side.dir.path()});
            let tuning = config(version, "tuning", &keys);
            side.runtime.plugins.clone_from(&adds);
            let result = side.runtime.add(side.call(), &with_result(&tuning, &previous(version))).unwrap();
            assert_ne!(side.properties(), before, "{version}");
            side.runtime.plugins.clone_from(&dels);
            let answer = side.runtime.run("DEL", side.call(), &with_result(&tuning, &result)).unwrap();
            assert_eq!((answer.exit, side.properties()), (Some(0), before.clone()), "{version}");
            assert!(!side.dir.path().join("c1_eth0.json").exists(), "{version}");
        }
    }
}

/// The CHECK of every plugin of a list gets the last result.
///
/// Rows: TUN-result.
#[test]
fn the_plugin_that_made_an_interface_finds_it_as_it_was_tuned() {
    let own = tempfile::tempdir().unwrap();
    for name in ["bridge", "tuning"] {
        symlink(executable("netattach-cni").unwrap(), own.path().join(name)).unwrap();
    }
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins: own.path().to_owned() };
        let (pod, dir) = (Namespace::new().unwrap(), tempfile::tempdir().unwrap());
        let call = Call { container: "c1", ifname: "eth0", netns: pod.path(), args: "" };
        let ipam = json!({"type": "host-local", "dataDir": dir.path(), "subnet": "10.1.0.0/24"});
        let bridge = config(version, "bridge", &json!({"bridge": "br0", "isGateway": true, "ipam": ipam}));
        let tuned = json!({"mac": MAC, "mtu": 1400, "dataDir": dir.path().join("tuning")});
        let tuning = config(version, "tuning", &tuned);
        let made = runtime.add(call, &bridge).unwrap();
        let result = runtime.add(call, &with_result(&tuning, &made)).unwrap();
        for plugin in [&bridge, &tuning] {
            runtime.after("CHECK", call, plugin, &result).unwrap();
        }
        ip(&pod, &["link", "set", "eth0", "mtu", "1390"]).unwrap();
        let check = |plugin: &Value| {
            let answer = runtime.run("CHECK", call, &with_result(plugin, &result)).unwrap();
            answer.stdout["msg"].as_str().map(str::to_owned)
        };
        // Without a result that contains it, only the plugin that has set it knows it.
        let expected = (version != "0.4.0").then_some("eth0 (net): interface eth0 has MTU 1390, not 1400");
        assert_eq!(check(&bridge).as_deref(), expected, "{version}");
        let expected = Some("eth0 (net): interface eth0 has no longer MTU 1400");
        assert_eq!(check(&tuning).as_deref(), expected, "{version}");
        for plugin in [&tuning, &bridge] {
            runtime.after("DEL", call, plugin, &result).unwrap();
        }
        assert!(Handle::open_in(pod.netns()).unwrap().find_link("eth0").unwrap().is_none(), "{version}");
    }
}

/// The path now leads to another container's namespace, which has an interface of that name.
///
/// Rows: TUN-late-del.
#[test]
fn a_late_del_leaves_the_interface_alone_of_the_pod_that_has_the_namespaces_path_now() {
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let side = Side::new(own.path().to_owned());
    let before = side.properties();
    let result = |mac: &str| json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "mac": mac, "sandbox": "/pod"}]});
    let tuning = config("1.0.0", "tuning", &json!({"mtu": 1400, "dataDir": side.dir.path()}));
    let file = side.dir.path().join("c1_eth0.json");
    let (others, its) = (result("02:00:00:00:00:99"), result("02:00:00:00:00:01"));
    let del =
        |result: &Value| side.runtime.run("DEL", side.call(), &with_result(&tuning, result)).unwrap().exit;
    // The file records whose interface it was: the other namespace's may have the same name, and the same address.
    let other = Side::new(own.path().to_owned());
    ip(&other.pod, &["link", "set", "eth0", "mtu", "1400"]).unwrap();
    let of_other = other.properties();
    side.runtime.add(side.call(), &with_result(&tuning, &its)).unwrap();
    assert!(file.exists());
    let late = Call { netns: other.pod.path(), ..side.call() };
    let answer = side.runtime.run("DEL", late, &with_result(&tuning, &its)).unwrap();
    assert_eq!((answer.exit, other.properties(), file.exists()), (Some(0), of_other, false));
    ip(&side.pod, &["link", "set", "eth0", "mtu", "1500"]).unwrap();
    // A file of the reference does not record it. The interface has another address; or its link is marked as
    // another's.
    let as_by_the_reference = || {
        let mut kept: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        kept.as_object_mut().unwrap().remove("netattach");
        fs::write(&file, kept.to_string()).unwrap();
    };
    for (late, group) in [(&others, 0), (&its, link_group("c2", "eth0"))] {
        side.runtime.add(side.call(), &with_result(&tuning, &its)).unwrap();
        as_by_the_reference();
        let tuned = side.properties();
        assert_eq!((tuned.mtu, file.exists()), (Some(1400), true));
        let mut inside = Handle::open_in(side.pod.netns()).unwrap();
        let index = inside.link("eth0").unwrap().index;
        inside.set_group(index, group).unwrap();
        assert_eq!((del(late), side.properties(), file.exists()), (Some(0), tuned, true), "{late} {group}");
        inside.set_mtu(index, 1500).unwrap();
    }
    // With its own group, it is its own whatever its address.
    let mut inside = Handle::open_in(side.pod.netns()).unwrap();
    let index = inside.link("eth0").unwrap().index;
    inside.set_group(index, link_group("c1", "eth0")).unwrap();
    side.runtime.add(side.call(), &with_result(&tuning, &its)).unwrap();
    as_by_the_reference();
    assert_eq!((del(&others), side.properties(), file.exists()), (Some(0), before, false));
}

/// Name, address and link group are its to change.
///
/// Rows: TUN-kept.
#[test]
fn a_pod_keeps_no_property_of_its_interface_from_being_given_back() {
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let interfaces = json!([{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/pod"}]);
    let result = json!({"cniVersion": "1.0.0", "interfaces": interfaces});
    let changes: [fn(&Side, &mut Handle, u32); 3] = [
        |_, inside, index| inside.set_mac(index, MAC.parse().unwrap()).unwrap(),
        |_, inside, index| inside.set_group(index, OWN_GROUPS | 5).unwrap(),
        |side, inside, index| {
            inside.set_down(index).unwrap();
            ip(&side.pod, &["link", "set", "eth0", "name", "eth7"]).unwrap();
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let side = Side::new(own.path().to_owned());
        let before = side.properties();
        let keys = json!({"mtu": 1400, "promisc": true, "txQLen": 7, "dataDir": side.dir.path()});
        let tuning = with_result(&config("1.0.0", "tuning", &keys), &result);
        side.runtime.add(side.call(), &tuning).unwrap();
        let mut inside = Handle::open_in(side.pod.netns()).unwrap();
        let index = inside.link("eth0").unwrap().index;
        change(&side, &mut inside, index);
        let answer = side.runtime.run("DEL", side.call(), &tuning).unwrap();
        let link = inside.link_by_index(index).unwrap();
        // Properties that `tuning` has not set stay as the pod has changed them.
        let expected = Properties { mac: link.mac, ..before };
        let is_file_there = side.dir.path().join("c1_eth0.json").exists();
        let found = inside.properties(&link.name).unwrap();
        assert_eq!((answer.exit, found, is_file_there), (Some(0), expected, false), "change {number}");
    }
}

/// There is one file with the former properties. A card returns with them.
///
/// Rows: TUN-twice.
#[test]
fn what_several_executables_of_a_list_have_changed_is_given_back() {
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let side = Side::new(own.path().to_owned());
    let before = side.properties();
    let tuning = |mut keys: Value| {
        keys["dataDir"] = json!(side.dir.path());
        with_result(&config("1.0.0", "tuning", &keys), &json!({"cniVersion": "1.0.0"}))
    };
    let first = tuning(json!({"mac": MAC, "mtu": 1400}));
    let second = tuning(json!({"mtu": 1300, "promisc": true, "txQLen": 7}));
    let file = side.dir.path().join("c1_eth0.json");
    // The second list is that of an ADD that is repeated without a DEL.
    for list in [[&first, &second], [&first, &first]] {
        for plugin in list {
            side.runtime.add(side.call(), plugin).unwrap();
        }
        assert_eq!(side.properties().mac, MAC.parse().ok());
        for plugin in list.into_iter().rev() {
            let answer = side.runtime.run("DEL", side.call(), plugin).unwrap();
            assert_eq!((answer.exit, side.properties(), file.exists()), (Some(0), before.clone(), false));
        }
    }
    // A file left from another interface does not apply to this one.
    side.runtime.add(side.call(), &first).unwrap();
    ip(&side.pod, &["link", "del", "eth0"]).unwrap();
    ip(&side.pod, &["link", "add", "eth0", "mtu", "1450", "type", "veth", "peer", "name", "far0"]).unwrap();
    let before = side.properties();
    side.runtime.add(side.call(), &first).unwrap();
    side.runtime.run("DEL", side.call(), &first).unwrap();
    assert_eq!(side.properties(), before);
}

/// The kinds of interfaces that the kernel has, with the keys of each.
fn kinds() -> Vec<(&'static str, Value)> {
    let all = [
        ("bridge", json!({"bridge": "br1"})),
        ("veth", json!({})),
        ("macvlan", json!({"master": WIRE})),
        ("tap", json!({})),
        ("macvtap", json!({"master": WIRE})),
        ("ipvlan", json!({"master": WIRE})),
        ("vlan", json!({"master": WIRE, "vlanId": 5})),
    ];
    all.into_iter()
        .filter(|(kind, _)| !["ipvlan", "vlan"].contains(kind) || tools::has_driver(kind))
        .collect()
}

/// A node of an agent, with a network for each kind of interface, each with `tuning` behind it.
fn node(keys: &Value) -> Node {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    for (number, (name, mut first)) in kinds().into_iter().enumerate() {
        let mut tuning = keys.clone();
        tuning["type"] = json!("tuning");
        if name == "ipvlan" {
            // It has its parent's.
            tuning.as_object_mut().unwrap().remove("mac");
        }
        first["type"] = json!(name);
        first["ipam"] = node.host_local(&[&format!("10.7{number}.0.0/24")]);
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": [first, tuning]});
        node.write(name, &manifest::network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    node
}

/// Rows: TUN-agent.
#[test]
fn an_agent_tunes_the_interfaces_that_it_has_made() {
    let node = node(&json!({
        "mac": MAC, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 50,
        "sysctl": {"net.ipv4.conf.IFNAME.log_martians": "1"}
    }));
    let wire = Handle::open_in(node.namespace.netns()).unwrap().link(WIRE).unwrap().mac;
    for (name, _) in kinds() {
        let mac = if name == "ipvlan" { wire } else { MAC.parse().ok() };
        let pod = Pod::new(name).unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        node.add(&pod).success();
        let found = Handle::open_in(pod.namespace.netns()).unwrap().properties("net1").unwrap();
        let wanted =
            Properties { mac, mtu: Some(1400), promisc: Some(true), allmulti: Some(true), queue: Some(50) };
        assert_eq!(found, wanted, "{name}");
        assert_eq!(node.status(&pod).unwrap()[1]["mac"], json!(mac.unwrap().to_string()), "{name}");
        assert_eq!(node.check(&pod).success(), Value::Null, "{name}");
        ip(&pod.namespace, &["link", "set", "net1", "allmulticast", "off"]).unwrap();
        let (_, said) = node.check(&pod).failure();
        assert!(said.ends_with("interface net1 has no longer allmulti on"), "{name}: {said}");
        ip(&pod.namespace, &["link", "set", "net1", "allmulticast", "on"]).unwrap();
        pod.namespace.run(|| fs::write("/proc/sys/net/ipv4/conf/net1/log_martians", "0")).unwrap();
        let (_, said) = node.check(&pod).failure();
        assert!(said.ends_with(r#"net/ipv4/conf/net1/log_martians is "0", not "1""#), "{name}: {said}");
        assert_eq!(node.del(&pod).success(), Value::Null);
        assert_eq!(Snapshot::take(&node, &[&pod]).unwrap().pods, before.pods, "{name}");
    }
}

/// Rows: TUN-agent.
#[test]
fn an_agent_looks_for_what_each_tuning_of_a_list_has_set() {
    let mut node = Node::new(&[]).unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.70.0.0/24"])});
    let first = json!({"type": "tuning", "txQLen": 50, "mtu": 1300,
        "sysctl": {"net.ipv4.conf.IFNAME.log_martians": "1"}});
    let plugins = json!([bridge, first, {"type": "tuning", "mtu": 1400}]);
    let config = json!({"cniVersion": "1.0.0", "name": "twice", "plugins": plugins});
    node.write("twice", &manifest::network(NAMESPACE, "twice", &config)).unwrap();
    node.write("pod", &manifest::pod("a", &json!({}), &json!("twice"))).unwrap();
    node.start().unwrap();
    let pod = Pod::new("a").unwrap();
    node.add(&pod).success();
    let found = Handle::open_in(pod.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!((found.mtu, found.queue), (Some(1400), Some(50)));
    assert_eq!(node.check(&pod).success(), Value::Null);
    ip(&pod.namespace, &["link", "set", "net1", "txqueuelen", "60"]).unwrap();
    let (_, said) = node.check(&pod).failure();
    assert!(said.ends_with("interface net1 has no longer txQLen 50"), "{said}");
    pod.namespace.run(|| fs::write("/proc/sys/net/ipv4/conf/net1/log_martians", "0")).unwrap();
    let (_, said) = node.check(&pod).failure();
    assert!(said.ends_with(r#"net/ipv4/conf/net1/log_martians is "0", not "1""#), "{said}");
    assert_eq!(node.del(&pod).success(), Value::Null);
}

/// A device that returns to the node has its own properties there, even if the ADD fails after `tuning`.
///
/// Rows: TUN-home.
#[test]
fn a_device_that_goes_home_gets_its_properties_back() {
    let test = "a_device_that_goes_home_gets_its_properties_back";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["host-device"]) else {
        return;
    };
    let mut node = Node::new(&[]).unwrap();
    let device =
        ["link", "add", "dev0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "far0"];
    ip(&node.namespace, &device).unwrap();
    symlink(reference.join("host-device"), node.path("cni-bin").join("host-device")).unwrap();
    node.plugin("last", &json!({"ADD": {"error": {"code": 123, "msg": "no more"}}})).unwrap();
    let tuning = json!({"type": "tuning", "mac": MAC, "mtu": 1400, "promisc": true, "txQLen": 50});
    let chain = |more: &[Value]| {
        let mut plugins = vec![json!({"type": "host-device", "device": "dev0"}), tuning.clone()];
        plugins.extend(more.iter().cloned());
        json!({"cniVersion": "1.0.0", "name": "device", "plugins": plugins})
    };
    node.write("good", &manifest::network(NAMESPACE, "good", &chain(&[]))).unwrap();
    node.write("bad", &manifest::network(NAMESPACE, "bad", &chain(&[json!({"type": "last"})]))).unwrap();
    for name in ["good", "bad"] {
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let home = || Handle::open_in(node.namespace.netns()).unwrap().properties("dev0").unwrap();
    let before = home();
    let pod = Pod::new("good").unwrap();
    node.add(&pod).success();
    let found = Handle::open_in(pod.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!(
        (found.mac, found.mtu, found.promisc, found.queue),
        (MAC.parse().ok(), Some(1400), Some(true), Some(50))
    );
    assert_eq!(node.status(&pod).unwrap()[1]["mac"], MAC);
    assert_eq!(node.check(&pod).success(), Value::Null);
    assert_eq!(node.del(&pod).success(), Value::Null);
    assert_eq!(home(), before);
    let pod = Pod::new("bad").unwrap();
    node.call("ADD", &pod).run().failure();
    assert_eq!(home(), before);
}

/// An interface that netattach makes is made with its address, which is compared then.
///
/// Rows: TUN-mac-free.
#[test]
fn another_plugins_interface_gets_no_ethernet_address_of_the_node() {
    let other = "02:00:00:00:00:0c";
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    ip(&node.namespace, &["link", "add", "other", "address", other, "type", "bridge"]).unwrap();
    // Executed, it is another plugin's.
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("macvlan")).unwrap();
    node.set("delegation", json!({"exec": ["macvlan"]}));
    for (name, mac) in [("taken", other), ("free", MAC)] {
        let macvlan = json!({"type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.70.0.0/24"])});
        let plugins = [macvlan, json!({"type": "tuning", "mac": mac})];
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &manifest::network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let (code, said) = node.add(&Pod::new("taken").unwrap()).failure();
    let told = format!("MAC address {other} is taken: the node's device other has it");
    assert!(code == 7 && said.ends_with(&told), "{code}: {said}");
    let pod = Pod::new("free").unwrap();
    node.add(&pod).success();
    let found = Handle::open_in(pod.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!(found.mac, MAC.parse().ok());
    node.del(&pod).success();
}

/// The kernel uses the larger one of a device's setting and that of all devices. A pod that may set only the device's
/// gets that set, as by the reference plugin.
///
/// Rows: TUN-overridden.
#[test]
fn a_setting_that_another_overrides_is_set_and_told_of() {
    let mut node = Node::new(&[]).unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.70.0.0/24"])});
    let networks = [
        ("one", json!({"net.ipv4.conf.IFNAME.rp_filter": "0"})),
        ("both", json!({"net.ipv4.conf.IFNAME.rp_filter": "0", "net.ipv4.conf.all.rp_filter": "0"})),
    ];
    for (name, sysctl) in networks {
        let plugins = [bridge.clone(), json!({"type": "tuning", "sysctl": sysctl})];
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &manifest::network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let setting = |device: &str| format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
    let pods = ["one", "both"].map(|name| Pod::new(name).unwrap());
    for pod in &pods {
        pod.namespace.run(|| fs::write(setting("all"), "1")).unwrap();
        node.add(pod).success();
        node.check(pod).success();
    }
    let found = pods.each_ref().map(|pod| {
        pod.namespace.run(|| ["net1", "all"].map(|device| fs::read_to_string(setting(device)).unwrap()))
    });
    assert_eq!(found, [["0\n", "1\n"], ["0\n", "0\n"]]);
    for pod in &pods {
        node.del(pod).success();
    }
    let log = node.stop().unwrap();
    let told = "net/ipv4/conf/all/rp_filter is 1, and of both the larger counts; set that of all devices too";
    assert_eq!(log.matches(told).count(), 1, "{log}");
}

/// Rows: TUN-mtu-ipv6.
#[test]
fn no_mtu_takes_a_pods_ipv6_addresses() {
    let mut node = Node::new(&[]).unwrap();
    let subnets = [("both", vec!["10.70.0.0/24", "fd00:70::/64"]), ("four", vec!["10.71.0.0/24"])];
    for (name, subnets) in &subnets {
        let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(subnets)});
        let plugins = [bridge, json!({"type": "tuning", "mtu": 1279})];
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &manifest::network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let told = "attach net1 (shop/both): tune the interface: mtu 1279 is below 1280, which IPv6 needs";
    let [both, four] = ["both", "four"].map(|name| Pod::new(name).unwrap());
    assert_eq!(node.add(&both).failure(), (7, told.to_owned()));
    node.add(&four).success();
    let found = Handle::open_in(four.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!(found.mtu, Some(1279));
    node.del(&four).success();

    // The same by the plain executable, before any change.
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let side = Side::new(own.path().to_owned());
    ip(&side.pod, &["address", "add", "fd00:70::2/64", "dev", "eth0", "nodad"]).unwrap();
    let before = (side.properties(), Settings::of(&side.pod).unwrap());
    let keys = json!({"mtu": 1279, "sysctl": {"net.core.somaxconn": "500"}, "dataDir": side.dir.path()});
    let tuning = with_result(&config("1.0.0", "tuning", &keys), &json!({"cniVersion": "1.0.0"}));
    let refused = side.runtime.refusal("ADD", side.call(), &tuning).unwrap();
    assert_eq!(refused, (7, "mtu 1279 is below 1280, which IPv6 needs".to_owned()));
    assert_eq!((side.properties(), Settings::of(&side.pod).unwrap()), before);
}

/// The kubelet's list of settings that pods may request does not apply to `cni-args`. A setting that the author has
/// too is the author's.
///
/// Rows: TUN-asked-for.
#[test]
fn no_pod_asks_for_a_setting_where_the_administrator_lists_none() {
    let why = r#"key args.cni.sysctl: "net.ipv4.ip_forward" is asked for by the pod, and there is no /etc/cni/tuning/allowlist.conf, in which the node's administrator lists the settings that may be asked for; the network's author has his own in sysctl"#;
    let mut node = Node::new(&[]).unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.70.0.0/24"])});
    let own = json!({"net.core.somaxconn": "500"});
    let plugins = json!([bridge, {"type": "tuning", "sysctl": own}]);
    let lan = json!({"cniVersion": "1.0.0", "name": "lan", "plugins": plugins});
    node.write("lan", &manifest::network(NAMESPACE, "lan", &lan)).unwrap();
    let others = json!({"net.ipv4.ip_forward": "1"});
    for (name, asked) in [("asks", &others), ("repeats", &own)] {
        let networks = json!([{"name": "lan", "cni-args": {"sysctl": asked, "mtu": 1400}}]);
        node.write(&format!("pod-{name}"), &manifest::pod(name, &json!({}), &networks)).unwrap();
    }
    node.start().unwrap();
    let [asks, repeats] = ["asks", "repeats"].map(|name| Pod::new(name).unwrap());
    let told = format!("attach net1 (shop/lan): tune the interface: {why}");
    assert_eq!(node.add(&asks).failure(), (7, told));
    node.add(&repeats).success();
    let found = Handle::open_in(repeats.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!(found.mtu, Some(1400));
    node.del(&repeats).success();

    // For an executable, a runtime passes a pod's request in the same place, without its origin.
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("tuning")).unwrap();
    let side = Side::new(own.path().to_owned());
    let before = (side.properties(), Settings::of(&side.pod).unwrap());
    let keys = json!({"mtu": 1400, "args": {"cni": {"sysctl": others}}, "dataDir": side.dir.path()});
    let tuning = with_result(&config("1.0.0", "tuning", &keys), &json!({"cniVersion": "1.0.0"}));
    assert_eq!(side.runtime.refusal("ADD", side.call(), &tuning).unwrap(), (7, why.to_owned()));
    assert_eq!((side.properties(), Settings::of(&side.pod).unwrap()), before);
}

/// Rows: TUN-refused.
#[test]
fn a_chain_that_tuning_cannot_carry_out_is_refused_by_its_key() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.70.0.0/24"])});
    let ipvlan = json!({"type": "ipvlan", "master": WIRE, "ipam": node.host_local(&["10.71.0.0/24"])});
    let tuning = |keys: Value| {
        let mut keys = keys;
        keys["type"] = json!("tuning");
        keys
    };
    let rows = [
        (
            vec![bridge.clone(), tuning(json!({"sysctl": {"kernel.hostname": "a"}}))],
            r#"attach net1 (shop/n0): key sysctl: "kernel.hostname" is not a setting below net"#,
        ),
        (
            vec![ipvlan, tuning(json!({"mac": MAC}))],
            "attach net1 (shop/n1): key mac: a link of kind ipvlan cannot have an Ethernet address of its own",
        ),
        (
            vec![tuning(json!({"mtu": 1400}))],
            "attach net1 (shop/n2): plugins[0].type: tuning changes an interface that a plugin before it has made",
        ),
    ];
    for (number, (plugins, _)) in rows.iter().enumerate() {
        let name = format!("n{number}");
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(&name, &manifest::network(NAMESPACE, &name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(&name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    for (number, (_, said)) in rows.iter().enumerate() {
        let pod = Pod::new(&format!("n{number}")).unwrap();
        assert_eq!(node.call("ADD", &pod).run().failure(), (7, (*said).to_owned()));
    }
}
