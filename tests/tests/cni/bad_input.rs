//! Requests that cannot be served: the right code, a message that names the error, and no side effects.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Pod};
use rustix::mount::{MountFlags, UnmountFlags};
use serde_json::{Value, json};

/// A started node with a pod `good` and networks `lan` (no capabilities), `cap` (with) and `tiny` (one address).
fn node(manifests: &[(&str, Value)]) -> Node {
    let mut node = unstarted(manifests);
    node.start().unwrap();
    node
}

fn unstarted(manifests: &[(&str, Value)]) -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let macvlan = |subnet: &str| json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&[subnet])});
    let mut cap = macvlan("10.52.1.0/24");
    cap["capabilities"] = json!({"ips": true, "mac": true});
    for (name, config) in [("lan", macvlan("10.52.0.0/24")), ("cap", cap), ("tiny", macvlan("10.55.0.0/30"))]
    {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("good", &pod("good", &json!({}), &json!("lan"))).unwrap();
    for (name, manifest) in manifests {
        node.write(name, manifest).unwrap();
    }
    node
}

fn look(node: &Node, pods: &[&Pod]) -> Snapshot {
    Snapshot::take(node, pods).unwrap()
}

/// One invalid call, the code, and a part of the message.
type Row = (&'static str, Box<dyn Fn(&Node, Call) -> Call>, u64, &'static str);

fn row(
    what: &'static str,
    spoil: impl Fn(&Node, Call) -> Call + 'static,
    code: u64,
    said: &'static str,
) -> Row {
    (what, Box::new(spoil), code, said)
}

fn with(name: &'static str, value: &'static str) -> impl Fn(&Node, Call) -> Call {
    move |_, call| call.with(name, value)
}

fn key(key: &'static str, value: Value) -> impl Fn(&Node, Call) -> Call {
    move |_, call| {
        let mut config: Value = serde_json::from_str(&call.stdin).unwrap();
        config[key] = value.clone();
        call.stdin(config)
    }
}

/// Rows: ENV-26.
#[test]
fn a_request_that_is_wrong_changes_nothing() {
    let rows = [
        row("cut-off JSON", |_, call| call.stdin("{\"cniVersion\":"), 6, "EOF"),
        row("a list", |_, call| call.stdin("[]"), 6, "expected a map"),
        row("nothing", |_, call| call.stdin(""), 6, "EOF"),
        row("unknown version", key("cniVersion", json!("9.9.9")), 1, "9.9.9"),
        row("a version that is none", key("cniVersion", json!("x.y")), 1, "config is \"x.y\""),
        row("version of another type", key("cniVersion", json!(1)), 6, "cniVersion"),
        row("name with a slash", key("name", json!("a/b")), 7, "a/b"),
        row("name ..", key("name", json!("..")), 7, ".."),
        row("relative socket", key("socket", json!("run/x")), 7, "socket"),
        row("unknown verb", with("CNI_COMMAND", "FOO"), 4, "FOO"),
        row("no container", |_, call| call.without("CNI_CONTAINERID"), 4, "CNI_CONTAINERID"),
        row("no interface", |_, call| call.without("CNI_IFNAME"), 4, "CNI_IFNAME"),
        row("no namespace", |_, call| call.with("CNI_NETNS", ""), 4, "CNI_NETNS"),
        row("container ..", with("CNI_CONTAINERID", ".."), 4, ".."),
        row("container with a slash", with("CNI_CONTAINERID", "a/../../b"), 4, "containerID"),
        row("interface ..", with("CNI_IFNAME", ".."), 4, "interface name is . or .."),
        row("interface of 16 bytes", with("CNI_IFNAME", "abcdefghijklmnop"), 4, "interface name"),
        row("interface with a slash", with("CNI_IFNAME", "a/b"), 4, "interface name"),
        row("interface with a space", with("CNI_IFNAME", "a b"), 4, "interface name"),
        row("arguments", with("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME"), 4, "K8S_POD_NAME"),
        row(
            "namespace that is missing",
            with("CNI_NETNS", "/nonexistent/ns"),
            8,
            "/nonexistent/ns does not exist",
        ),
        row(
            "namespace that is a file",
            with("CNI_NETNS", "/etc/hostname"),
            8,
            "/etc/hostname is not a network namespace",
        ),
        row("namespace that is a directory", with("CNI_NETNS", "/etc"), 8, "/etc is not a network namespace"),
        row(
            "another kind of namespace",
            with("CNI_NETNS", "/proc/self/ns/uts"),
            8,
            "is not a network namespace",
        ),
        row(
            "the node's own namespace",
            |node, call| call.with("CNI_NETNS", &node.namespace.path().to_string_lossy()),
            8,
            "the node's own network namespace",
        ),
        row(
            "unknown pod",
            with("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=nobody"),
            11,
            "pod shop/nobody is not known",
        ),
    ];
    let node = node(&[]);
    let (good, bystander) = (Pod::new("good").unwrap(), Pod::new("good").unwrap());
    node.call("ADD", &bystander).with("CNI_CONTAINERID", "bystander").run().success();
    node.await_status(&bystander);
    let before = look(&node, &[&good]);
    let mut wrong = Vec::new();
    for (what, spoil, code, said) in rows {
        let (got, message) = spoil(&node, node.call("ADD", &good)).run().failure();
        if (got, message.contains(said)) != (code, true) {
            wrong.push(format!("{what}: {got} {message}"));
        }
        assert_eq!(look(&node, &[&good]), before, "{what}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    node.add(&good).success();
    node.del(&good).success();
    node.call("DEL", &bystander).with("CNI_CONTAINERID", "bystander").run().success();
    look(&node, &[&good, &bystander]).assert_nothing_is_left();
}

#[test]
fn a_pod_that_asks_for_what_is_not_there_is_refused_whole() {
    // Annotation, code, part of the message.
    let rows = [
        (json!("[null]"), 7, "annotation k8s.v1.cni.cncf.io/networks: networks annotation element 0 is null"),
        (json!("["), 7, "annotation k8s.v1.cni.cncf.io/networks"),
        (json!("{}"), 7, "annotation k8s.v1.cni.cncf.io/networks"),
        (json!("[1]"), 7, "element 0 is a number"),
        (json!("[{}]"), 7, "name"),
        (json!("a/b/c"), 7, "a/b/c"),
        (json!("lan@"), 7, "lan@"),
        (json!("lan,,lan"), 7, "annotation k8s.v1.cni.cncf.io/networks"),
        (json!("LAN!"), 7, "LAN!"),
        (json!("lan@abcdefghijklmnop"), 7, "abcdefghijklmnop"),
        (json!([{"name": "lan", "interface": "a/b"}]), 7, "interface"),
        (json!([{"name": "lan", "interface": ".."}]), 7, "interface"),
        (json!([{"name": "lan", "interface": 5}]), 7, "interface"),
        (json!([{"name": "cap", "mac": "zz"}]), 7, "mac"),
        (json!([{"name": "cap", "mac": "01:00:5e:00:00:01"}]), 7, "mac"),
        (json!([{"name": "cap", "ips": ["10.52.1.300"]}]), 7, "ips"),
        (json!([{"name": "cap", "ips": "10.52.1.3"}]), 7, "ips"),
        (json!([{"name": "cap", "ips": ["192.0.2.1/24"]}]), 7, "192.0.2.1"),
        (json!([{"name": "lan", "ips": ["10.52.0.9/24"]}]), 7, "ips asked for, but no plugin of network lan"),
        (
            json!([{"name": "lan", "mac": "02:00:00:00:00:01"}]),
            7,
            "mac asked for, but no plugin of network lan",
        ),
        (
            json!([{"name": "lan", "portMappings": [{"hostPort": 80, "containerPort": 80}]}]),
            7,
            "portMappings",
        ),
        (json!([{"name": "lan", "bandwidth": {"ingressRate": 1000}}]), 7, "bandwidth"),
        (json!([{"name": "lan", "interface": "x0"}, {"name": "lan", "interface": "x0"}]), 7, "x0"),
        (json!([{"name": "lan", "interface": "eth0"}]), 7, "eth0"),
        (
            json!([{"name": "lan", "interface": "lo"}]),
            7,
            "asks for interface \"lo\", which the pod already has",
        ),
        (json!([{"name": "nowhere"}]), 7, "network shop/nowhere is not defined"),
        (json!([{"name": "lan", "default-route": ["127.0.0.1"]}]), 7, "default-route[0] is \"127.0.0.1\""),
        (json!([{"name": "lan", "deviceID": "0000:00:01.0"}]), 2, "deviceID 0000:00:01.0 asked for"),
        (
            json!([{"name": "lan", "ipam-claim-reference": "claim", "ips": ["10.52.0.9"]}]),
            7,
            "ipam-claim-reference and ips exclude each other",
        ),
        (
            json!([{"name": "lan", "infiniband-guid": "c2:11:22:33:44:55:66:77"}]),
            7,
            "infinibandGUID asked for",
        ),
    ];
    let manifests: Vec<(String, Value)> = rows
        .iter()
        .enumerate()
        .map(|(number, (annotation, _, _))| {
            let name = format!("bad{number}");
            (name.clone(), pod(&name, &json!({}), annotation))
        })
        .collect();
    let manifests: Vec<(&str, Value)> =
        manifests.iter().map(|(name, manifest)| (name.as_str(), manifest.clone())).collect();
    let node = node(&manifests);
    warm_up(&node);
    let mut wrong = Vec::new();
    for (number, (annotation, code, said)) in rows.iter().enumerate() {
        let pod = Pod::new(&format!("bad{number}")).unwrap();
        wrong.extend(refused(&node, &pod, &annotation.to_string(), *code, said));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_network_that_cannot_be_carried_out_is_refused_by_its_key() {
    let bridge =
        |more: Value| merged(json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br9"}), &more);
    let macvlan =
        |more: Value| merged(json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE}), &more);
    // Configuration, code, part of the message.
    let rows = [
        (
            bridge(
                json!({"ipMasq": true, "ipam": {"type": "static", "addresses": [{"address": "10.9.0.2/24"}]}}),
            ),
            7,
            "key ipMasq: needs isGateway",
        ),
        (bridge(json!({"ipMasqBackend": "ebtables"})), 7, "key ipMasqBackend"),
        (bridge(json!({"nonMasqueradeCIDRs": ["10.0.0.0/8"]})), 7, "key nonMasqueradeCIDRs"),
        (bridge(json!({"vlan": 4095})), 7, "key vlan"),
        (bridge(json!({"vlanTrunk": [{"minID": 5}]})), 7, "key vlanTrunk"),
        (bridge(json!({"mtu": "big"})), 7, "key mtu"),
        (bridge(json!({"mtu": 7})), 7, "key mtu"),
        (bridge(json!({"bridge": "a/b"})), 7, "key bridge"),
        (bridge(json!({"bridge": ".."})), 7, "key bridge"),
        (bridge(json!({"bridge": WIRE})), 7, WIRE),
        (bridge(json!({"hairpinMode": true, "promiscMode": true})), 7, "key hairpinMode"),
        (bridge(json!({"ipam": {"type": "host-local"}})), 7, "ipam"),
        (bridge(json!({"ipam": {"type": "host-local", "subnet": "10.0.0.0/99"}})), 7, "10.0.0.0/99"),
        (bridge(json!({"ipam": {"subnet": "10.0.0.0/24"}})), 7, "key ipam.type"),
        (bridge(json!({"ipam": {"type": "nopool"}})), 7, "nopool"),
        (bridge(json!({"ipam": {"type": "../evil"}})), 7, "../evil"),
        (bridge(json!({"type": "../../bin/sh"})), 7, "invalid plugin name: \"../../bin/sh\""),
        (bridge(json!({"type": ""})), 7, "type"),
        (bridge(json!({"type": 5})), 7, "type"),
        (bridge(json!({"type": "not-installed"})), 7, "not-installed"),
        (bridge(json!({"name": "../../etc"})), 7, "../../etc"),
        (bridge(json!({"cniVersion": "7.0.0"})), 7, "key cniVersion: version \"7.0.0\" is not supported"),
        (json!({"cniVersion": "1.0.0", "name": "x", "plugins": []}), 7, "plugins"),
        (json!({"cniVersion": "1.0.0", "name": "x", "plugins": [null]}), 7, "plugin 0 of the list"),
        (
            json!({"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "macvlan"}, {"type": "bridge"}]}),
            7,
            "plugins[1].type",
        ),
        (macvlan(json!({"master": "nowhere0"})), 7, "nowhere0"),
        (macvlan(json!({"mode": "fast"})), 7, "key mode"),
        (macvlan(json!({"mtu": 9000})), 7, "9000"),
        (macvlan(json!({"mac": "junk"})), 7, "key mac"),
        (macvlan(json!({"linkInContainer": "yes"})), 7, "key linkInContainer"),
        (json!({"cniVersion": "1.0.0", "type": "veth"}), 7, "key ipam"),
        (bridge(json!({"type": "odd", "capabilities": ["ips"]})), 7, "capabilities"),
        (bridge(json!({"x": nested(500)})), 7, "recursion limit"),
    ];
    let mut manifests = Vec::new();
    for (number, (config, _, _)) in rows.iter().enumerate() {
        let name = format!("bad{number}");
        manifests.push((format!("{name}-net"), network(NAMESPACE, &name, config)));
        manifests.push((name.clone(), pod(&name, &json!({}), &json!(format!("lan, {name}")))));
    }
    let manifests: Vec<(&str, Value)> =
        manifests.iter().map(|(name, manifest)| (name.as_str(), manifest.clone())).collect();
    let node = node(&manifests);
    warm_up(&node);
    let mut wrong = Vec::new();
    for (number, (config, code, said)) in rows.iter().enumerate() {
        let pod = Pod::new(&format!("bad{number}")).unwrap();
        wrong.extend(refused(&node, &pod, &config.to_string(), *code, said));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Arrays nested this deep.
fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::Null, |inner, _| Value::Array(vec![inner]))
}

#[test]
fn a_large_configuration_is_carried_out_and_a_key_given_twice_has_its_last_value() {
    let large = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br0", "org.example.x": "x".repeat(250 << 10)});
    let mut twice = network(NAMESPACE, "twice", &json!({}));
    twice["spec"]["config"] =
        json!(r#"{"cniVersion": "1.0.0", "type": "odd", "type": "bridge", "bridge": "br0"}"#);
    let node = node(&[
        ("large-net", network(NAMESPACE, "large", &large)),
        ("twice-net", twice),
        ("large", pod("large", &json!({}), &json!("large, twice"))),
    ]);
    let large = Pod::new("large").unwrap();
    node.add(&large).success();
    node.check(&large).success();
    node.del(&large).success();
    look(&node, &[&large]).assert_nothing_is_left();
}

#[test]
fn a_plugin_that_misbehaves_fails_the_pod_in_time_and_leaves_nothing() {
    /// Upper bound for an answer when a plugin has three seconds, on a busy machine.
    const BOUND: Duration = Duration::from_secs(30);
    /// Enough memory for any plugin output.
    const MEMORY_KIB: u64 = 64 * 1024;
    // The plugin's behaviour at ADD, the code, part of the message.
    let rows = [
        (json!({"sleepMs": 600_000}), 11, "odd0"),
        (json!({"floodStdout": 1_u64 << 40}), 6, "odd1"),
        (json!({"floodStderr": 1 << 24, "exit": 3}), 999, "odd2"),
        (json!({"stdout": "garbage"}), 6, "odd3"),
        (json!({"stdout": r#"{"cniVersion": "99.0.0"}"#}), 6, "odd4"),
        (json!({"stdout": "garbage", "exit": 1}), 999, "odd5"),
        (json!({"exit": 7}), 999, "odd6"),
        (json!({"abort": true}), 999, "odd7"),
        (json!({"error": {"code": 113, "msg": "no room", "details": "at all"}}), 113, "no room"),
        (json!({"holdMs": 600_000, "sleepMs": 600_000}), 11, "odd9"),
    ];
    let mut node = unstarted(&[]);
    node.set("delegation", json!({"timeoutSeconds": 3}));
    for (number, (script, _, _)) in rows.iter().enumerate() {
        let plugin = format!("odd{number}");
        node.plugin(&plugin, &json!({"ADD": script})).unwrap();
        let config = json!({"cniVersion": "1.0.0", "type": plugin});
        node.write(&format!("{plugin}-net"), &network(NAMESPACE, &plugin, &config)).unwrap();
        node.write(&plugin, &pod(&plugin, &json!({}), &json!(format!("lan, {plugin}")))).unwrap();
    }
    node.start().unwrap();
    warm_up(&node);
    let mut wrong = Vec::new();
    for (number, (script, code, said)) in rows.iter().enumerate() {
        let pod = Pod::new(&format!("odd{number}")).unwrap();
        let begun = Instant::now();
        wrong.extend(refused(&node, &pod, &script.to_string(), *code, said));
        if begun.elapsed() > BOUND {
            wrong.push(format!("{script}: took {:?}", begun.elapsed()));
        }
        let calls = node.take_calls().unwrap();
        let verbs: Vec<&Value> = calls.iter().filter_map(|call| call["env"].get("CNI_COMMAND")).collect();
        if verbs.last() != Some(&&json!("DEL")) {
            wrong.push(format!("{script}: called {verbs:?}"));
        }
        for held in calls.iter().filter_map(|call| call["held"].as_u64()) {
            let gone = || !std::path::Path::new(&format!("/proc/{held}/exe")).exists();
            assert!(eventually(PATIENCE, gone), "what {script} started is still there");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.agent_pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < MEMORY_KIB, "{peak} KiB at most");
}

#[test]
fn a_directory_in_a_plugins_place_is_refused_before_anything_is_done() {
    let node = node(&[
        ("odd-net", network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))),
        ("odd", pod("odd", &json!({}), &json!("lan, odd"))),
    ]);
    std::fs::create_dir(node.path("cni-bin/odd")).unwrap();
    warm_up(&node);
    let odd = Pod::new("odd").unwrap();
    let wrong = refused(&node, &odd, "a directory", 7, "cni-bin/odd is not a regular file");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_interface_that_the_pod_has_already_is_not_touched() {
    let node = node(&[]);
    warm_up(&node);
    let good = Pod::new("good").unwrap();
    ip(&good.namespace, &["link", "add", "net1", "address", "02:00:00:00:99:99", "type", "bridge"]).unwrap();
    let wrong = refused(&node, &good, "net1 exists", 4, "the pod has an interface named net1 already");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_exhausted_pool_can_be_tried_again_when_a_pod_has_gone() {
    let node = node(&[
        ("one", pod("one", &json!({}), &json!("tiny"))),
        ("two", pod("two", &json!({}), &json!("tiny"))),
    ]);
    let (one, two) = (Pod::new("one").unwrap(), Pod::new("two").unwrap());
    node.add(&two).success();
    node.del(&two).success();
    node.add(&one).success();
    let wrong = refused(&node, &two, "no address left", 11, "lease addresses of network tiny");
    assert!(wrong.is_empty(), "{wrong:#?}");
    node.del(&one).success();
    node.add(&two).success();
    node.del(&two).success();
    look(&node, &[&one, &two]).assert_nothing_is_left();
}

/// Two cases that are not the agent's fault: an address still held until its DEL comes, and a full disk.
#[test]
fn a_lease_that_is_there_already_or_cannot_be_written_has_its_code() {
    let node = node(&[]);
    warm_up(&node);
    let good = Pod::new("good").unwrap();
    let pool = node.path(&format!("leases/@{NAMESPACE}/lan"));
    fs::write(pool.join("10.52.0.77"), "c-good\r\nnet1").unwrap();
    let (code, message) = node.add(&good).failure();
    assert!(code == 11 && message.contains("10.52.0.77"), "{code}: {message}");
    node.del(&good).success();
    node.add(&good).success();
    node.del(&good).success();
    // Room for the directory and its lock.
    let full = MountFlags::empty();
    rustix::mount::mount("full", &pool, "tmpfs", full, Some(c"nr_inodes=2")).unwrap();
    let outcome = node.add(&good);
    node.del(&good).success();
    rustix::mount::unmount(&pool, UnmountFlags::DETACH).unwrap();
    let (code, message) = outcome.failure();
    assert!(code == 5 && message.contains("No space left on device"), "{code}: {message}");
    node.add(&good).success();
    node.del(&good).success();
    look(&node, &[&good]).assert_nothing_is_left();
}

/// A small file system in a directory, until this is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(directory: PathBuf) -> Self {
        fs::create_dir_all(&directory).unwrap();
        let options = Some(c"size=256k,mode=0700");
        rustix::mount::mount("small", &directory, "tmpfs", MountFlags::empty(), options).unwrap();
        Self(directory)
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        let error = loop {
            if let Err(error) = file.write_all(&[0; 4096]) {
                break error;
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The agent may have files open there.
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Neither a record nor a status can be written any more: pods are refused without leftovers, and existing ones end.
#[test]
fn a_full_disk_refuses_pods_and_keeps_none_from_ending() {
    let mut node = unstarted(&[("late", pod("late", &json!({}), &json!("lan")))]);
    let disks = [SmallDisk::at(node.path("state")), SmallDisk::at(node.path("run"))];
    node.start().unwrap();
    warm_up(&node);
    let [good, late] = ["good", "late"].map(|name| Pod::new(name).unwrap());
    node.add(&good).success();
    node.await_status(&good);
    disks.iter().for_each(SmallDisk::fill);
    let wrong = refused(&node, &late, "a full disk", 5, "No space left on device");
    assert_eq!(wrong, [""; 0]);
    let mut journal = Value::Null;
    let is_told = eventually(PATIENCE, || {
        let status = node.whole_status().unwrap();
        let conditions = status["ready"].as_array().unwrap();
        journal = conditions.iter().find(|it| it["condition"] == "journal").unwrap().clone();
        journal["met"] == false && journal["detail"].as_str().unwrap().contains("No space left on device")
    });
    assert!(is_told, "{journal}");
    node.check(&good).success();
    node.del(&good).success();
    disks.iter().for_each(|disk| fs::remove_file(disk.filler()).unwrap());
    look(&node, &[&good, &late]).assert_nothing_is_left();
    node.add(&late).success();
    node.await_status(&late);
    node.del(&late).success();
    node.stop().unwrap();
}

/// Creates the parts that stay after the first pod: bridge, forwarding, lease directories.
fn warm_up(node: &Node) {
    let good = Pod::new("good").unwrap();
    node.add(&good).success();
    node.del(&good).success();
}

/// ADD fails with this code and message and, after the DEL that runtimes send anyway, leaves no trace. Returns the
/// violations.
#[must_use]
fn refused(node: &Node, pod: &Pod, what: &str, code: u64, said: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let before = look(node, &[pod]);
    let outcome = node.add(pod);
    if outcome.exit == 0 {
        wrong.push(format!("{what}: accepted"));
    } else {
        let (got, message) = outcome.failure();
        if (got, message.contains(said)) != (code, true) {
            wrong.push(format!("{what}: {got} {message}"));
        }
    }
    node.del(pod).success();
    let mut after = look(node, &[pod]);
    // A bridge that was made for the attempt stays, as every bridge does.
    after.node.links.retain(|name, _| before.node.links.contains_key(name) || name != "br9");
    assert_eq!(after, before, "{what}");
    wrong
}

fn merged(mut base: Value, more: &Value) -> Value {
    base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    base
}
