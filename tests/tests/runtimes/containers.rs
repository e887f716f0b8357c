//! Real container runtimes call netattach for real containers: containerd as kubelet uses it and by `ctr`, and podman.
//!
//! `NETATTACH_RUNTIMES` names the directory that `cargo xtask setup` unpacks them into.

use std::collections::BTreeSet;
use std::fs;
use std::sync::mpsc;
use std::thread;

use netattach::netns::Netns;
use netattach_tests::Node;
use netattach_tests::machine::containerd::{Containerd, Version};
use netattach_tests::machine::podman::Podman;
use netattach_tests::machine::{CONFIGURATIONS, Machine, cri};
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::WIRE;
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

/// An echo server, on the port that the policy allows and on one that it denies.
const SERVE: [&str; 3] =
    ["sh", "-c", "busybox nc -ll -p 80 -e busybox cat & busybox nc -ll -p 5432 -e busybox cat"];
pub(crate) const SLEEP: [&str; 2] = ["sleep", "1000000"];

pub(crate) const DB: cri::Pod<'_> = cri::Pod { namespace: NAMESPACE, name: "db", uid: "uid-db" };
pub(crate) const CART: cri::Pod<'_> = cri::Pod { namespace: NAMESPACE, name: "cart", uid: "uid-cart" };
const ALIEN: cri::Pod<'_> = cri::Pod { namespace: NAMESPACE, name: "alien", uid: "uid-alien" };

/// A node with a routed network `storage` and a macvlan network `lan`, three pods on both, and a policy that lets only
/// `cart` reach `db`, and only on one port, on `storage` alone.
pub(crate) fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let mut default = node.default_config();
    default["capabilities"] = json!({"mac": true});
    node.write("default", &network("kube-system", "default", &default)).unwrap();
    let ipam = |subnet| node.host_local(&[subnet]);
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam("10.51.0.0/24")});
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": ipam("10.52.0.0/24")});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    for cri::Pod { name, uid, .. } in [DB, CART, ALIEN] {
        let mut pod = pod(name, &json!({"app": name}), &json!("storage, lan@lan0"));
        pod["metadata"]["uid"] = json!(uid);
        node.write(name, &pod).unwrap();
    }
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"app": "cart"}}}],
            "ports": [{"protocol": "TCP", "port": 5432}]
        }]
    });
    node.write("policy", &policy("db", "storage", &spec)).unwrap();
    node
}

/// The machine of a test, with a serving agent, whose runtimes' network is called `pods`; `None` when the runtimes are
/// missing.
fn machine(test: &str, version: Version) -> Option<Machine> {
    let mut machine = Machine::new(test, node()).unwrap()?;
    machine.node.start().unwrap();
    machine.network(version.configurations(), "pods", version.cni()).unwrap();
    Some(machine)
}

/// Verb, interface, namespace and arguments of each call for a container.
fn calls_for(calls: &[Value], container: &str) -> Vec<[String; 4]> {
    let is_its = |call: &&Value| call["env"]["CNI_CONTAINERID"] == container;
    calls.iter().filter(is_its).map(shown).collect()
}

/// Verb, interface, namespace, and `CNI_ARGS` in alphabetical order: runtimes keep no order.
fn shown(call: &Value) -> [String; 4] {
    let of = |name: &str| call["env"][name].as_str().unwrap_or_default().to_owned();
    let args = of("CNI_ARGS");
    let args: BTreeSet<&str> = args.split(';').collect();
    [of("CNI_COMMAND"), of("CNI_IFNAME"), of("CNI_NETNS"), Vec::from_iter(args).join(";")]
}

/// Returns interfaces, MAC addresses if requested, and addresses, from the kernel.
fn interfaces(netns: &str) -> Vec<String> {
    let netns = Netns::open(netns).unwrap();
    let links = Network::of_netns(&netns).unwrap().links;
    let shown = links.into_iter().map(|(name, link)| {
        let mac = link.mac.map(|mac| mac.to_string()).filter(|mac| mac.starts_with("02:00:00:00:"));
        let addresses = link.addresses.iter().map(ToString::to_string);
        let up = if link.up { "up" } else { "down" };
        let words = [name, up.to_owned()].into_iter().chain(mac).chain(addresses);
        words.collect::<Vec<_>>().join(" ")
    });
    shown.collect()
}

/// Name, interface, addresses and mark of each entry of a pod's network-status.
fn published(node: &Node, pod: &str) -> Vec<Value> {
    let path = node.path(&format!("run/network-status/shop/{pod}.json"));
    assert!(eventually(PATIENCE, || path.exists()));
    let status: Vec<Value> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    status.iter().map(|of| json!([of["name"], of["interface"], of["ips"], of["default"]])).collect()
}

/// Whether a server answers a container of a pod: tried once, or until it does if that is `expected`.
fn reaches(cri: &mut cri::Client, from: &cri::Sandbox, address: &str, port: u16, expected: bool) -> bool {
    let script = format!("echo hello | busybox nc -w 1 {address} {port}");
    let mut answers = || cri.exec(from, &["sh", "-c", &script]).unwrap().1 == "hello\n";
    if expected { eventually(PATIENCE, answers) } else { answers() }
}

/// Pods are run, talk, are stopped repeatedly and removed, as kubelet does it.
fn pods_live_and_end(machine: Machine, version: Version) {
    let containerd = Containerd::start(machine, version).unwrap();
    let machine = &containerd.machine;
    let mut cri = containerd.cri().unwrap();
    assert_eq!(cri.network_ready().unwrap(), (true, String::new()));

    let db = cri.run_pod(DB, &SERVE).unwrap();
    let cart = cri.run_pod(CART, &SLEEP).unwrap();
    let alien = cri.run_pod(ALIEN, &SLEEP).unwrap();
    let calls = calls_for(&machine.take_calls().unwrap(), &cart.id);
    let args = format!(
        "IgnoreUnknown=1;K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_NAME=cart;K8S_POD_NAMESPACE=shop;K8S_POD_UID=uid-cart",
        cart.id
    );
    let netns = calls[0][2].clone();
    assert!(netns.starts_with("/var/run/netns/cni-"), "{netns}");
    let call = |verb: &str, netns: &str| [verb, "eth0", netns, &args].map(str::to_owned);
    assert_eq!(calls, [call("ADD", &netns)]);

    let expected = [
        "eth0 up 10.50.0.3/24 fd00:50::3/64",
        "lan0 up 10.52.0.3/24",
        "lo up 127.0.0.1/8 ::1/128",
        "net1 up 10.51.0.3/32",
    ];
    assert_eq!(interfaces(&netns), expected);
    let (_, seen) = cri.exec(&cart, &["ip", "-o", "-4", "address", "show", "dev", "lan0"]).unwrap();
    assert!(seen.contains(" 10.52.0.3/24 "), "{seen}");
    let addresses = ["10.50.0.3", "fd00:50::3"].map(str::to_owned).to_vec();
    assert_eq!(cri.sandbox_status(&cart.id).unwrap(), (true, addresses));
    let expected = [
        json!(["kube-system/default", "eth0", ["10.50.0.3", "fd00:50::3"], true]),
        json!(["shop/storage", "net1", ["10.51.0.3"], false]),
        json!(["shop/lan", "lan0", ["10.52.0.3"], false]),
    ];
    assert_eq!(published(&machine.node, "cart"), expected);

    assert!(reaches(&mut cri, &cart, "10.51.0.2", 5432, true));
    // The policy is about one network, one pod and one port: each row differs from that in one of them.
    let table = [
        (&cart, "10.51.0.2", 80, false),
        (&alien, "10.51.0.2", 5432, false),
        (&alien, "10.50.0.2", 5432, true),
        (&cart, "10.50.0.2", 80, true),
        (&cart, "10.52.0.2", 80, true),
    ];
    for (from, to, port, expected) in table {
        assert_eq!(reaches(&mut cri, from, to, port, expected), expected, "{to} port {port}");
    }

    // kubelet asks from several threads at once.
    thread::scope(|scope| {
        let stop = || containerd.cri().unwrap().stop_sandbox(&db.id).unwrap();
        scope.spawn(stop);
        scope.spawn(stop);
    });
    for pod in [&cart, &alien, &db] {
        cri.stop_sandbox(&pod.id).unwrap();
        cri.stop_sandbox(&pod.id).unwrap();
        let (ready, _) = cri.sandbox_status(&pod.id).unwrap();
        assert!(!ready);
        cri.remove_sandbox(&pod.id).unwrap();
        cri.remove_sandbox(&pod.id).unwrap();
    }
    let calls = calls_for(&machine.take_calls().unwrap(), &cart.id);
    // One DEL with the namespace, and one after its end from each of the second stop and the removal.
    assert_eq!(calls, [call("DEL", &netns), call("DEL", ""), call("DEL", "")]);
    Snapshot::take(&machine.node, &[]).unwrap().assert_nothing_is_left();
}

/// Rows: ENV-02, ENV-36, DEL-07, DEL-08, NPWG-4-additional-only, NPWG-4.1.1-list-order, NPWG-6-always-default.
/// Rows: NPWG-5.2-default-entry, NPWG-5.3.1-name, NPWG-5.3.1-name-namespaced, C09, C16, C42, C68, STA-04.
#[test]
fn pods_of_containerd_1_6_live_and_end() {
    let Some(machine) = machine("pods_of_containerd_1_6_live_and_end", Version::V1_6) else { return };
    pods_live_and_end(machine, Version::V1_6);
}

/// Rows: ENV-02, ENV-36, DEL-07, DEL-08, NPWG-4-additional-only, NPWG-4.1.1-list-order, NPWG-6-always-default.
/// Rows: NPWG-5.2-default-entry, NPWG-5.3.1-name, NPWG-5.3.1-name-namespaced, C09, C16, C42, C68, NPWG-6.1.1-own-confdir.
#[test]
fn pods_of_containerd_2_live_and_end() {
    let Some(machine) = machine("pods_of_containerd_2_live_and_end", Version::V2) else { return };
    pods_live_and_end(machine, Version::V2);
}

/// Rows: ENV-36, CNI-DEL-idempotent, NPWG-6.1.2-block-until-ready.
#[test]
fn containerd_2_reports_what_stands_in_the_way_and_goes_on_when_it_is_gone() {
    let test = "containerd_2_reports_what_stands_in_the_way_and_goes_on_when_it_is_gone";
    let Some(machine) = machine(test, Version::V2) else { return };
    let mut containerd = Containerd::start(machine, Version::V2).unwrap();
    let mut cri = containerd.cri().unwrap();

    let refused =
        cri.run_sandbox(cri::Pod { name: "nobody", uid: "uid-nobody", ..DB }).unwrap_err().to_string();
    let said = r#"plugin type="netattach" failed (add): pod shop/nobody is not known yet"#;
    assert!(refused.ends_with(said), "{refused}");
    let calls = containerd.machine.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD netattach eth0", "DEL netattach eth0"]);
    assert_eq!(shown(&calls[0])[1..], shown(&calls[1])[1..], "the same attachment");
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();

    let db = cri.run_sandbox(DB).unwrap();
    containerd.machine.node.stop().unwrap();
    containerd.machine.take_calls().unwrap();
    let absent = format!("the agent does not answer at {}", containerd.machine.node.socket().display());
    let (ready, reason) = cri.network_ready().unwrap();
    assert!(!ready && reason.contains(&absent), "{reason}");
    let refused = cri.run_sandbox(CART).unwrap_err().to_string();
    assert!(refused.contains(&absent), "{refused}");
    // Recorded, it is a success.
    cri.stop_sandbox(&db).unwrap();
    let expected = ["STATUS netattach ", "ADD netattach eth0", "DEL netattach eth0", "DEL netattach eth0"];
    assert_eq!(verbs(&containerd.machine.take_calls().unwrap()), expected);

    // Both DELs have been recorded for the agent.
    containerd.machine.node.start().unwrap();
    assert_eq!(cri.network_ready().unwrap(), (true, String::new()));
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();
    cri.stop_sandbox(&db).unwrap();
    cri.remove_sandbox(&db).unwrap();
    let expected = ["STATUS netattach ", "DEL netattach eth0", "DEL netattach eth0"];
    assert_eq!(verbs(&containerd.machine.take_calls().unwrap()), expected);
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();
}

/// Rows: NPWG-4.2.1-tuple-stable.
#[test]
fn pods_outlive_containerd_and_agent_and_end_without_their_manifests() {
    let test = "pods_outlive_containerd_and_agent_and_end_without_their_manifests";
    let Some(machine) = machine(test, Version::V2) else { return };
    let mut containerd = Containerd::start(machine, Version::V2).unwrap();
    let mut cri = containerd.cri().unwrap();
    let db = cri.run_pod(DB, &SERVE).unwrap();
    let cart = cri.run_pod(CART, &SLEEP).unwrap();
    containerd.machine.node.kill().unwrap();
    containerd.restart().unwrap();
    let mut cri = containerd.cri().unwrap();
    for (port, expected) in [(5432, true), (80, false)] {
        assert_eq!(
            reaches(&mut cri, &cart, "10.51.0.2", port, expected),
            expected,
            "port {port}, without an agent"
        );
    }
    let addresses = ["10.50.0.2", "fd00:50::2"].map(str::to_owned).to_vec();
    assert_eq!(cri.sandbox_status(&db.id).unwrap(), (true, addresses));

    let node = &mut containerd.machine.node;
    for file in ["db", "cart", "storage", "lan", "policy"] {
        node.remove(file).unwrap();
    }
    node.start().unwrap();
    for pod in [&cart, &db] {
        cri.stop_sandbox(&pod.id).unwrap();
        cri.remove_sandbox(&pod.id).unwrap();
    }
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();
}

/// Rows: ENV-05, DEL-07.
#[test]
fn ctr_gives_containers_that_are_no_pods_the_default_network() {
    let test = "ctr_gives_containers_that_are_no_pods_the_default_network";
    let Some(machine) = machine(test, Version::V1_6) else { return };
    let containerd = Containerd::start(machine, Version::V1_6).unwrap();
    let machine = &containerd.machine;
    let first = containerd.run("first").unwrap();
    let second = containerd.run("second").unwrap();
    let calls: Vec<_> = machine.take_calls().unwrap().iter().map(shown).collect();
    let netns = calls[1][2].clone();
    assert!(netns.starts_with("/proc/") && netns.ends_with("/ns/net"), "{netns}");
    let call = |verb: &str, netns: &str| [verb, "eth0", netns, ""].map(str::to_owned);
    assert_eq!(calls, [call("ADD", &calls[0][2]), call("ADD", &netns)]);
    assert_eq!(interfaces(&netns), ["eth0 up 10.50.0.3/24 fd00:50::3/64", "lo up 127.0.0.1/8 ::1/128"]);
    for target in ["10.50.0.1", "10.50.0.2", "fd00:50::2"] {
        second.exec(&["ping", "-c", "1", "-W", "5", target]).unwrap();
    }
    first.end().unwrap();
    second.end().unwrap();
    let calls: Vec<_> = machine.take_calls().unwrap().iter().map(shown).collect();
    // The process whose namespace it was is gone.
    assert_eq!(calls, [call("DEL", ""), call("DEL", "")]);
    Snapshot::take(&machine.node, &[]).unwrap().assert_nothing_is_left();
}

#[test]
fn podman_joins_containers_to_networks_with_addresses_of_its_choice() {
    let test = "podman_joins_containers_to_networks_with_addresses_of_its_choice";
    let Some(machine) = machine(test, Version::V1_6) else { return };
    machine.network(CONFIGURATIONS, "more", "1.0.0").unwrap();
    let podman = Podman::set_up(machine).unwrap();
    let machine = &podman.machine;
    podman.run("chosen", &["pods:ip=10.50.0.77,mac=02:00:00:00:50:77"]).unwrap();
    podman.run("both", &["pods:interface_name=front", "more:interface_name=back,ip=10.50.0.200"]).unwrap();
    let calls: BTreeSet<_> = machine.take_calls().unwrap().iter().map(shown).collect();
    let (chosen, both) = (podman.netns("chosen").unwrap(), podman.netns("both").unwrap());
    let told = |verb: &str, chosen: &str| {
        let rows = [
            ("eth0", chosen, "IP=10.50.0.77;IgnoreUnknown=1;K8S_POD_NAME=chosen;MAC=02:00:00:00:50:77"),
            ("front", &both, "IgnoreUnknown=1;K8S_POD_NAME=both"),
            ("back", &both, "IP=10.50.0.200;IgnoreUnknown=1;K8S_POD_NAME=both"),
        ];
        BTreeSet::from(rows.map(|(ifname, netns, args)| [verb, ifname, netns, args].map(str::to_owned)))
    };
    assert_eq!(calls, told("ADD", &chosen));
    let loopback = "lo up 127.0.0.1/8 ::1/128";
    assert_eq!(interfaces(&chosen), ["eth0 up 02:00:00:00:50:77 10.50.0.77/24 fd00:50::2/64", loopback]);
    // podman attaches the networks of a container in no particular order.
    let [back, front, lo] = interfaces(&both).try_into().unwrap();
    assert!(back.starts_with("back up 10.50.0.200/24 fd00:50::"), "{back}");
    assert!(front.starts_with("front up 10.50.0."), "{front}");
    assert_eq!(lo, loopback);
    let address = podman.inspect("both", "{{.NetworkSettings.Networks.more.IPAddress}}").unwrap();
    assert_eq!(address, "10.50.0.200");
    for target in ["10.50.0.1", "10.50.0.77", "fd00:50::2"] {
        podman.exec("both", &["ping", "-c", "1", "-W", "5", target]).unwrap();
    }

    podman.restart("chosen").unwrap();
    let again = podman.netns("chosen").unwrap();
    assert_eq!(interfaces(&again)[0], "eth0 up 02:00:00:00:50:77 10.50.0.77/24 fd00:50::5/64");
    let refused = podman.run("elsewhere", &["pods:ip=10.99.0.1"]).unwrap_err().to_string();
    let said = "requested addresses 10.99.0.1 cannot be given: no range set is left that holds them";
    assert!(refused.trim_end().ends_with(said), "{refused}");

    machine.take_calls().unwrap();
    podman.remove("chosen").unwrap();
    podman.remove("both").unwrap();
    let calls: BTreeSet<_> = machine.take_calls().unwrap().iter().map(shown).collect();
    assert_eq!(calls, told("DEL", &again));
    Snapshot::take(&machine.node, &[]).unwrap().assert_nothing_is_left();
}

/// A property of the test rig itself, on which the machine under it depends.
#[test]
fn nothing_outlasts_a_test_that_fails() {
    let test = "nothing_outlasts_a_test_that_fails";
    let (tell, told) = mpsc::channel();
    let failing = thread::spawn(move || {
        let Some(machine) = machine(test, Version::V1_6) else { return };
        let directory = machine.node.path("");
        let containerd = Containerd::start(machine, Version::V1_6).unwrap();
        let _container = containerd.run("first").unwrap();
        let netns = shown(&containerd.machine.take_calls().unwrap()[0])[2].clone();
        let cgroups = containerd.machine.cgroups();
        assert!(!cgroups.is_empty());
        tell.send((directory, cgroups, Netns::open(&netns).unwrap().id(), netns)).unwrap();
        panic!("as a test that fails");
    });
    let failed = failing.join().is_err();
    // The channel is empty if the runtimes are missing.
    let Ok((directory, cgroups, id, netns)) = told.recv() else { return assert!(!failed) };
    assert!(failed);
    let left: Vec<_> = cgroups.into_iter().chain([directory]).filter(|path| path.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
    // The process id of the container may have been reused.
    assert!(Netns::open(netns).map_or(true, |other| other.id() != id));
}
