//! The chained plugin `vrf`: compared with the reference plugin, call by call, and in the chains of an agent.
//!
//! Tests that need a VRF run if the kernel has the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use netattach::netlink::Handle;
use netattach::plan::link_group;
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::runtime::{Call, Runtime, config, with_result};
use netattach_tests::settings::Settings;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually, ping};
use netattach_tests::{Namespace, Node, Pod, tools};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A pod with the interfaces `eth0` and `eth1`, which have addresses and routes.
struct Side {
    runtime: Runtime,
    pod: Namespace,
}

/// The state of a side after each call.
#[derive(Debug, PartialEq)]
struct Seen {
    answers: Vec<(Option<i32>, Value)>,
    attached: (BTreeMap<String, Shown>, Settings),
    detached: (BTreeMap<String, Shown>, Settings),
}

/// A link: kind, whether it is up, table, the name of what it is a port of, addresses, routes of all tables.
#[derive(Debug, PartialEq)]
struct Shown {
    kind: String,
    up: bool,
    table: Option<u32>,
    controller: Option<String>,
    addresses: BTreeSet<String>,
    routes: BTreeSet<String>,
}

/// Returns the links without objects of the kernel: link-local addresses, and routes of addresses in the local table.
fn shown(pod: &Namespace) -> BTreeMap<String, Shown> {
    let mut handle = Handle::open_in(pod.netns()).unwrap();
    let links = handle.links().unwrap();
    let name_of = |index: u32| links.iter().find(|link| link.index == index).unwrap().name.clone();
    let others = links.iter().filter(|link| link.name != "lo" && !link.name.starts_with("far"));
    others
        .map(|link| {
            let addresses = handle.addresses(link.index).unwrap();
            let addresses = addresses.iter().map(ToString::to_string);
            let routes = handle.routes_of_all_tables_by(link.index).unwrap();
            let routes = routes.iter().filter(|route| !route.destination.to_string().starts_with("fe80"));
            let routes = routes.map(|route| {
                let (to, via, metric, table) =
                    (route.destination, route.gateway, route.priority, route.table.unwrap());
                format!("{table}: {to} via {via:?} metric {metric:?}")
            });
            let shown = Shown {
                kind: link.kind.clone(),
                up: link.up,
                table: link.table,
                controller: link.controller.map(name_of),
                addresses: addresses.filter(|address| !address.starts_with("fe80")).collect(),
                routes: routes.collect(),
            };
            (link.name.clone(), shown)
        })
        .collect()
}

fn has_driver() -> bool {
    let namespace = Namespace::new().unwrap();
    ip(&namespace, &["link", "add", "probe", "type", "vrf", "table", "7"]).is_ok()
}

const NO_DRIVER: &str = "the kernel has no vrf";

impl Side {
    fn new(plugins: PathBuf) -> Self {
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins };
        let pod = Namespace::new().unwrap();
        for number in ["0", "1"] {
            let (near, far) = (format!("eth{number}"), format!("far{number}"));
            ip(&pod, &["link", "add", &near, "type", "veth", "peer", "name", &far]).unwrap();
            ip(&pod, &["link", "set", &far, "up"]).unwrap();
            ip(&pod, &["link", "set", &near, "up"]).unwrap();
            let words = |address: &str| ["addr", "add", address, "dev", &near].map(str::to_owned);
            let v4 = words(&format!("10.{number}.0.2/24"));
            let v6 = words(&format!("fd0{number}::2/64"));
            ip(&pod, &v4.each_ref().map(String::as_str)).unwrap();
            let mut v6: Vec<&str> = v6.iter().map(String::as_str).collect();
            v6.push("nodad");
            ip(&pod, &v6).unwrap();
            let (gateway, sixth) = (format!("10.{number}.0.1"), format!("fd0{number}::1"));
            let to = format!("192.0.{number}.0/24");
            ip(&pod, &["route", "add", &to, "via", &gateway, "dev", &near]).unwrap();
            let metric = format!("{}", 700 + u32::from(number == "1"));
            for (to, via) in [("0.0.0.0/0", &gateway), ("::/0", &sixth)] {
                ip(&pod, &["route", "add", to, "via", via, "dev", &near, "metric", &metric]).unwrap();
            }
        }
        Self { runtime, pod }
    }

    fn call(&self) -> Call<'_> {
        Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args: "" }
    }

    /// ADD, CHECK, DEL twice.
    fn run(&self, version: &str, keys: &Value) -> Seen {
        let vrf = config(version, "vrf", keys);
        let ran = |verb: &str, previous: &Value| {
            let answer = self.runtime.run(verb, self.call(), &with_result(&vrf, previous)).unwrap();
            // The words of an error are each implementation's own.
            let said = if answer.exit == Some(0) { answer.stdout } else { Value::Null };
            (answer.exit, said)
        };
        let mut answers = vec![ran("ADD", &previous(version))];
        let result = answers[0].1.clone();
        let whole = || (shown(&self.pod), Settings::of(&self.pod).unwrap());
        let attached = whole();
        if answers[0].0 == Some(0) {
            answers.push(ran("CHECK", &result));
            answers.extend([ran("DEL", &result), ran("DEL", &result)]);
        }
        Seen { answers, attached, detached: whole() }
    }
}

/// The result of a plugin before.
fn previous(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [{"name": "eth0", "sandbox": "/pod"}],
        "ips": [{"version": "4", "interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}], "dns": {}
    })
}

/// A directory with our executable under the plugin's name.
fn own() -> TempDir {
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("vrf")).unwrap();
    own
}

/// Rows: VRF-keys.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn vrf_agrees_with_the_reference() {
    let test = "vrf_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["vrf"]) else { return };
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let own = own();
    let join = |name| vec![vec!["link", "add", name, "up", "type", "vrf", "table", "9"]];
    let with_port = |port| {
        let mut words = join("blue");
        words.push(vec!["link", "set", port, "master", "blue"]);
        words
    };
    let rows: [(Value, Vec<Vec<&str>>); 10] = [
        (json!({"vrfname": "blue"}), vec![]),
        (json!({"vrfname": "blue", "table": 500}), vec![]),
        (json!({"vrfname": "blue", "table": 0}), vec![]),
        // A VRF that is there; one with an interface, which stays; one with another table.
        (json!({"vrfname": "blue"}), join("blue")),
        (json!({"vrfname": "blue", "table": 9}), with_port("eth1")),
        (json!({"vrfname": "blue", "table": 8}), join("blue")),
        // Another VRF has the table; the interface is in one already; the name belongs to another link.
        (json!({"vrfname": "blue"}), vec![vec!["link", "add", "red", "type", "vrf", "table", "1"]]),
        (json!({"vrfname": "blue"}), with_port("eth0")),
        (json!({"vrfname": "eth1"}), vec![]),
        (json!({}), vec![]),
    ];
    // All that the reference has. An emulated machine is slow: the first row is run in all of them, the others in two.
    let all = &["0.3.1", "0.4.0", "1.0.0", "1.1.0"][..];
    for (number, (keys, before)) in rows.into_iter().enumerate() {
        for &version in if number == 0 { all } else { &all[1..3] } {
            let [ours, theirs] = [own.path().to_owned(), reference.clone()].map(|plugins| {
                let side = Side::new(plugins);
                before.iter().for_each(|words| ip(&side.pod, words).unwrap());
                side.run(version, &keys)
            });
            assert_eq!(ours, theirs, "{version} {keys} {before:?}");
        }
    }
}

/// Rows: VRF-each-other.
#[test]
fn either_takes_out_of_a_vrf_what_the_other_has_put_there() {
    let test = "either_takes_out_of_a_vrf_what_the_other_has_put_there";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["vrf"]) else { return };
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let own = own();
    for (adds, dels) in [(own.path().to_owned(), reference.clone()), (reference, own.path().to_owned())] {
        let mut side = Side::new(adds);
        let vrf = with_result(&config("1.0.0", "vrf", &json!({"vrfname": "blue"})), &previous("1.0.0"));
        let result = side.runtime.add(side.call(), &vrf).unwrap();
        assert_eq!(shown(&side.pod)["eth0"].controller, Some("blue".into()));
        side.runtime.plugins = dels;
        for verb in ["CHECK", "DEL"] {
            side.runtime.after(verb, side.call(), &vrf, &result).unwrap();
        }
        let left = shown(&side.pod);
        assert_eq!((left.contains_key("blue"), left["eth0"].controller.clone()), (false, None));
    }
}

/// Routes that the reference loses, and cases in which it fails.
///
/// Rows: VRF-routes, VRF-check, VRF-del.
#[test]
fn vrf_keeps_every_route_and_needs_no_interface_to_be_undone() {
    let test = "vrf_keeps_every_route_and_needs_no_interface_to_be_undone";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let own = own();
    let side = Side::new(own.path().to_owned());
    ip(&side.pod, &["route", "add", "198.51.100.0/24", "dev", "eth0"]).unwrap();
    ip(&side.pod, &["route", "add", "203.0.113.0/24", "via", "10.0.0.1", "dev", "eth0", "table", "77"])
        .unwrap();
    // A table that a rule or a route uses is not taken.
    ip(&side.pod, &["rule", "add", "from", "192.0.2.1", "table", "1"]).unwrap();
    let vrf = with_result(&config("1.0.0", "vrf", &json!({"vrfname": "blue"})), &previous("1.0.0"));
    let passed_on = side.runtime.add(side.call(), &vrf).unwrap();
    assert_eq!(passed_on["interfaces"], previous("1.0.0")["interfaces"]);
    let found = shown(&side.pod);
    assert_eq!(found["blue"].table, Some(2));
    let wanted = [
        "2: 0.0.0.0/0 via Some(10.0.0.1) metric Some(700)",
        "2: 10.0.0.0/24 via None metric None",
        "2: 192.0.0.0/24 via Some(10.0.0.1) metric None",
        "2: 198.51.100.0/24 via None metric None",
        "2: ::/0 via Some(fd00::1) metric Some(700)",
        "2: fd00::/64 via None metric Some(256)",
        "77: 203.0.113.0/24 via Some(10.0.0.1) metric None",
    ];
    assert_eq!(found["eth0"].routes, wanted.map(str::to_owned).into());
    assert_eq!(found["eth0"].addresses, ["10.0.0.2/24", "fd00::2/64"].map(str::to_owned).into());
    // The reference leaves an existing one unchanged: down, so that no packet passes.
    ip(&side.pod, &["link", "add", "red", "type", "vrf", "table", "9"]).unwrap();
    let red = with_result(&config("1.0.0", "vrf", &json!({"vrfname": "red"})), &previous("1.0.0"));
    side.runtime.add(Call { ifname: "eth1", ..side.call() }, &red).unwrap();
    assert!(shown(&side.pod)["red"].up);
    let check = |keys: Value| {
        let vrf = with_result(&config("1.0.0", "vrf", &keys), &previous("1.0.0"));
        let answer = side.runtime.run("CHECK", side.call(), &vrf).unwrap();
        (answer.exit, answer.stdout["msg"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(check(json!({"vrfname": "blue", "table": 2})), (Some(0), String::new()));
    for (table, words, said) in [
        (3, None, "VRF blue has table 2, not 3"),
        (2, Some(vec!["link", "set", "blue", "down"]), "VRF blue is down"),
        (2, Some(vec!["link", "set", "eth0", "nomaster"]), "interface eth0 is not in VRF blue"),
        (2, Some(vec!["link", "del", "blue"]), "VRF blue is gone"),
    ] {
        if let Some(words) = &words {
            ip(&side.pod, words).unwrap();
        }
        if said.contains("not in VRF") {
            ip(&side.pod, &["link", "set", "blue", "up"]).unwrap();
        }
        let (exit, message) = check(json!({"vrfname": "blue", "table": table}));
        assert!(exit == Some(1) && message.ends_with(said), "{message} instead of {said}");
    }
    // The interface is gone, with the VRF still there.
    ip(&side.pod, &["link", "add", "blue", "type", "vrf", "table", "2"]).unwrap();
    ip(&side.pod, &["link", "del", "eth0"]).unwrap();
    let del = |call: Call<'_>| side.runtime.run("DEL", call, &vrf).unwrap().exit;
    assert_eq!((del(side.call()), shown(&side.pod).contains_key("blue")), (Some(0), false));
    assert_eq!(del(side.call()), Some(0));
    let broken = config("1.0.0", "vrf", &json!({}));
    assert_eq!(side.runtime.run("DEL", side.call(), &broken).unwrap().exit, Some(0), "ADD refuses it");
    for netns in ["", "/run/netns/gone"] {
        assert_eq!(del(Call { netns: netns.as_ref(), ..side.call() }), Some(0));
    }
}

/// Refused before any change, so on every kernel.
///
/// The path now leads to another container's namespace, which has an interface of that name in a VRF of the same
/// name.
///
/// Rows: VRF-late-del.
#[test]
fn a_late_del_leaves_the_vrf_alone_of_the_pod_that_has_the_namespaces_path_now() {
    let test = "a_late_del_leaves_the_vrf_alone_of_the_pod_that_has_the_namespaces_path_now";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let own = own();
    let side = Side::new(own.path().to_owned());
    let eth0 = || Handle::open_in(side.pod.netns()).unwrap().link("eth0").unwrap();
    let vrf = config("1.0.0", "vrf", &json!({"vrfname": "blue"}));
    let with = |mac: &str, address: &str| {
        let mut result = previous("1.0.0");
        result["interfaces"][0]["mac"] = json!(mac);
        result["ips"][0]["address"] = json!(address);
        with_result(&vrf, &result)
    };
    let its = with(&eth0().mac.unwrap().to_string(), "10.0.0.2/24");
    let other = Call { container: "c2", ..side.call() };
    side.runtime.add(other, &its).unwrap();
    let attached = shown(&side.pod);
    assert_eq!(attached["eth0"].controller.as_deref(), Some("blue"));
    let unchanged = |late: &Value| {
        let answer = side.runtime.run("DEL", side.call(), late).unwrap();
        assert_eq!((answer.exit, &shown(&side.pod)), (Some(0), &attached), "{late}");
    };
    unchanged(&with("02:00:00:00:00:99", "10.9.0.2/24"));
    // Its link is marked as another's.
    let group = link_group("c2", "eth0");
    Handle::open_in(side.pod.netns()).unwrap().set_group(eth0().index, group).unwrap();
    unchanged(&its);
    unchanged(&vrf);
    let answer = side.runtime.run("DEL", other, &its).unwrap();
    assert_eq!((answer.exit, shown(&side.pod)["eth0"].controller.as_deref()), (Some(0), None));
    // Without a group, an IP address identifies it too: a `tuning` behind it may have changed the Ethernet address, and
    // its DEL has restored the former one.
    Handle::open_in(side.pod.netns()).unwrap().set_group(eth0().index, 0).unwrap();
    side.runtime.add(side.call(), &its).unwrap();
    let last = with("02:00:00:00:00:07", "10.0.0.2/24");
    let answer = side.runtime.run("DEL", side.call(), &last).unwrap();
    assert_eq!((answer.exit, shown(&side.pod)["eth0"].controller.as_deref()), (Some(0), None));
}

/// Rows: VRF-table.
#[test]
fn a_table_that_others_use_is_refused_where_it_is_asked_for() {
    let own = own();
    let side = Side::new(own.path().to_owned());
    ip(&side.pod, &["rule", "add", "from", "192.0.2.1", "table", "100"]).unwrap();
    let before = shown(&side.pod);
    let rule = "key table: 100 is a table that a rule of the pod leads to";
    let by_source = "key table: 1851850755 is one of netattach's own, for what an interface's addresses send";
    for (table, said) in [(100, rule), (1_851_850_755, by_source)] {
        let keys = json!({"vrfname": "blue", "table": table});
        let vrf = with_result(&config("1.0.0", "vrf", &keys), &previous("1.0.0"));
        assert_eq!(side.runtime.refusal("ADD", side.call(), &vrf).unwrap(), (7, said.to_owned()));
    }
    assert_eq!(shown(&side.pod), before);
}

/// Refused before anything is made, so on every kernel.
///
/// Rows: VRF-routes.
#[test]
fn a_route_that_cannot_be_taken_along_is_named() {
    let own = own();
    let vrf = with_result(&config("1.0.0", "vrf", &json!({"vrfname": "blue"})), &previous("1.0.0"));
    for (words, what) in [
        (["via", "inet6", "fd00::9"].as_slice(), "a gateway of the other family"),
        (&["tos", "0x10"], "a type of service"),
    ] {
        let side = Side::new(own.path().to_owned());
        let route = [["route", "add", "203.0.113.0/24"].as_slice(), words, &["dev", "eth0"]].concat();
        ip(&side.pod, &route).unwrap();
        let before = shown(&side.pod);
        let said =
            format!("vrf: the route of eth0 to 203.0.113.0/24 has {what}, and would not be there afterwards");
        assert_eq!(side.runtime.refusal("ADD", side.call(), &vrf).unwrap(), (7, said));
        assert_eq!(shown(&side.pod), before);
    }
}

/// Rows: VRF-table.
#[test]
fn sbr_takes_no_table_of_a_vrf() {
    let test = "sbr_takes_no_table_of_a_vrf";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let own = own();
    symlink(executable("netattach-cni").unwrap(), own.path().join("sbr")).unwrap();
    let side = Side::new(own.path().to_owned());
    // It has no routes yet, and no rule leads to it.
    ip(&side.pod, &["link", "add", "blue", "type", "vrf", "table", "100"]).unwrap();
    let sbr = with_result(&config("1.0.0", "sbr", &json!({})), &previous("1.0.0"));
    side.runtime.add(side.call(), &sbr).unwrap();
    let rules = Handle::open_in(side.pod.netns()).unwrap().rules().unwrap();
    let tables: BTreeSet<u32> = rules.iter().map(|rule| rule.table).collect();
    assert!(!tables.is_empty() && !tables.contains(&100), "{rules:?}");
}

/// Rows: VRF-driver.
#[test]
fn a_kernel_without_vrfs_is_named() {
    let own = own();
    let side = Side::new(own.path().to_owned());
    if has_driver() {
        return;
    }
    let before = shown(&side.pod);
    let vrf = with_result(&config("1.0.0", "vrf", &json!({"vrfname": "blue"})), &previous("1.0.0"));
    let (code, said) = side.runtime.refusal("ADD", side.call(), &vrf).unwrap();
    assert_eq!(code, 50, "{said}");
    assert!(said.contains("the kernel of this node has no driver for links of kind vrf"), "{said}");
    assert_eq!(shown(&side.pod), before);
    for netns in [side.pod.path(), "".as_ref(), "/run/netns/gone".as_ref()] {
        let answer = side.runtime.run("DEL", Call { netns, ..side.call() }, &vrf).unwrap();
        assert_eq!(answer.exit, Some(0), "{answer:?}");
    }
    let (_, said) = side.runtime.refusal("CHECK", side.call(), &vrf).unwrap();
    assert!(said.ends_with("VRF blue is gone"), "{said}");
    let alone = config("1.0.0", "vrf", &json!({"vrfname": "blue"}));
    let (code, said) = side.runtime.refusal("ADD", side.call(), &alone).unwrap();
    assert_eq!((code, said.as_str()), (7, "key prevResult: missing, and vrf can only follow another plugin"));
}

/// Returns a node with a network of each name: the configuration of its first plugin, its subnet, and its VRF.
fn node_with(networks: &[(&str, Value, &str, &str)]) -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    for (name, first, subnet, vrf) in networks {
        let mut first = first.clone();
        first["ipam"] = node.host_local(&[subnet]);
        // All have a default route, which only VRFs separate in a pod.
        first["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}]);
        let plugins = json!([first, {"type": "vrf", "vrfname": vrf}]);
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &manifest::network(NAMESPACE, name, &list)).unwrap();
    }
    node
}

/// Interfaces of each kind in a VRF of their pod, two of which share one: packets of the node to them are answered,
/// policies are in force, and DEL leaves nothing.
///
/// Rows: VRF-agent, VRF-level.
#[test]
fn an_agent_puts_its_interfaces_into_vrfs_of_their_pod() {
    let test = "an_agent_puts_its_interfaces_into_vrfs_of_their_pod";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let mut node = node_with(&[
        ("one", json!({"type": "bridge", "bridge": "br1", "isGateway": true}), "10.71.0.0/24", "blue"),
        ("two", json!({"type": "veth"}), "10.72.0.0/24", "red"),
        ("three", json!({"type": "macvlan", "master": WIRE}), "10.73.0.0/24", "blue"),
        ("four", json!({"type": "ptp"}), "10.75.0.0/24", "green"),
    ]);
    node.set("fastPath", json!("on"));
    let rules = json!({
        "podSelector": {}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"ipBlock": {"cidr": "10.72.0.0/24"}}]}],
    });
    node.write("rules", &manifest::policy("rules", "two", &rules)).unwrap();
    node.write("pod-a", &manifest::pod("a", &json!({}), &json!("one, two, three, four"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let found = shown(&a.namespace);
    let place = |name: &str| (found[name].controller.clone(), found[name].routes.len());
    let of = |vrf: &str, routes| (Some(vrf.to_owned()), routes);
    assert_eq!([place("net1"), place("net3")], [of("blue", 2), of("blue", 2)], "{found:#?}");
    assert_eq!([place("net2"), place("net4")], [of("red", 2), of("green", 3)], "{found:#?}");
    let tables: BTreeSet<u32> = ["blue", "red", "green"].iter().filter_map(|vrf| found[*vrf].table).collect();
    assert_eq!(tables, [1, 2, 3].into());
    assert_eq!(node.check(&a).success(), Value::Null);
    let rows = || node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/a")]).unwrap();
    let told = |rows: &Value, what: &dyn Fn(&Value) -> Value| -> Vec<Value> {
        rows.as_array().unwrap().iter().filter(|row| row["ifname"] != "eth0").map(what).collect()
    };
    // As without a VRF: the pod's manifest names no containers, so a macvlan's pod may have every privilege.
    let levels = told(&rows(), &|row| row["enforcement"].clone());
    assert_eq!(levels, ["full", "full", "full-unless-privileged", "full"]);
    let on_fast_path = || told(&rows(), &|row| row["fast_path"]["state"].clone());
    let expected = [json!("on"), json!("on"), Value::Null, json!("on")];
    assert!(eventually(PATIENCE, || on_fast_path() == expected), "{:?}", on_fast_path());
    // The pod answers by the VRF's table, as its main table has no such route; the policy blocks the node from `two`.
    let answers =
        |address: &str, patience| ping(&node.namespace, address.parse().unwrap(), patience).unwrap();
    assert!(answers("10.71.0.2", PATIENCE));
    assert!(answers("10.75.0.2", PATIENCE));
    assert!(!answers("10.72.0.2", SILENCE));
    for (words, said) in [
        (["route", "del", "default", "vrf", "red"].as_slice(), "the route to 0.0.0.0/0 in table"),
        (&["link", "set", "net1", "nomaster"], "interface net1 is not in VRF blue"),
    ] {
        ip(&a.namespace, words).unwrap();
        let (_, message) = node.check(&a).failure();
        assert!(message.contains(said), "{message}");
    }
    assert_eq!(node.del(&a).success(), Value::Null);
    assert_eq!(node.del(&a).success(), Value::Null);
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: VRF-agent, VRF-shared.
#[test]
fn a_vrf_goes_with_its_last_port() {
    let test = "a_vrf_goes_with_its_last_port";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let mut node = node_with(&[
        ("one", json!({"type": "bridge", "bridge": "br1"}), "10.71.0.0/24", "blue"),
        ("three", json!({"type": "macvlan", "master": WIRE}), "10.73.0.0/24", "blue"),
    ]);
    let bad = json!([
        {"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.74.0.0/24"])},
        {"type": "vrf", "vrfname": "blue"}, {"type": "last"}
    ]);
    let bad = json!({"cniVersion": "1.0.0", "name": "bad", "plugins": bad});
    node.write("bad", &manifest::network(NAMESPACE, "bad", &bad)).unwrap();
    node.plugin("last", &json!({"ADD": {"error": {"code": 123, "msg": "no more"}}})).unwrap();
    node.write("pod-b", &manifest::pod("b", &json!({}), &json!("one, bad"))).unwrap();
    node.write("pod-c", &manifest::pod("c", &json!({}), &json!("one"))).unwrap();
    node.start().unwrap();
    let [b, c] = ["b", "c"].map(|name| Pod::new(name).unwrap());
    // An ADD that fails after it rolls the VRF back.
    let before = Snapshot::take(&node, &[&b]).unwrap();
    let (code, said) = node.add(&b).failure();
    assert!(code == 123 && said.contains("no more"), "{code}: {said}");
    assert_eq!(Snapshot::take(&node, &[&b]).unwrap().pods, before.pods);
    // A pod that is removed leaves the VRF to the other.
    node.add(&c).success();
    node.ctl(&["attach", &format!("{NAMESPACE}/c"), "three"]).unwrap();
    assert_eq!(shown(&c.namespace)["net2"].controller, Some("blue".into()));
    node.ctl(&["detach", &format!("{NAMESPACE}/c"), "net2"]).unwrap();
    let left = shown(&c.namespace);
    assert_eq!((left.contains_key("net2"), left["net1"].controller.clone()), (false, Some("blue".into())));
    node.del(&c).success();
    Snapshot::take(&node, &[&b, &c]).unwrap().assert_nothing_is_left();
}

/// If it stayed up after leaving, its routes would be in the main table until its plugin removes it.
///
/// Rows: VRF-del.
#[test]
fn an_interface_of_another_plugin_leaves_its_vrf_down() {
    let test = "an_interface_of_another_plugin_leaves_its_vrf_down";
    if !has_driver() {
        return tools::report_skipped(test, NO_DRIVER);
    }
    let mut node = Node::new(&[]).unwrap();
    // Its DEL leaves the interface.
    node.plugin("maker", &json!({"ADD": {"link": "dummy"}})).unwrap();
    let plugins = json!([{"type": "maker"}, {"type": "vrf", "vrfname": "blue"}]);
    let list = json!({"cniVersion": "1.0.0", "name": "made", "plugins": plugins});
    node.write("made", &manifest::network(NAMESPACE, "made", &list)).unwrap();
    node.write("pod-a", &manifest::pod("a", &json!({}), &json!("made"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let state = |shown: BTreeMap<String, Shown>| {
        let port = &shown["net1"];
        (port.up, port.controller.clone(), shown.contains_key("blue"))
    };
    assert_eq!(state(shown(&a.namespace)), (true, Some("blue".into()), true));
    node.del(&a).success();
    assert_eq!(state(shown(&a.namespace)), (false, None, false));
}

/// Rows: VRF-refused.
#[test]
fn a_chain_that_vrf_cannot_carry_out_is_refused_by_its_name() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.70.0.0/24"])});
    let macvlan = json!({"type": "macvlan", "master": WIRE, "hostAccess": true, "ipam": bridge["ipam"]});
    let vrf = json!({"type": "vrf", "vrfname": "blue"});
    let rows = [
        (
            json!([vrf]),
            json!("n0"),
            "attach net1 (shop/n0): plugins[0].type: vrf changes an interface that a plugin before it has made",
        ),
        (
            json!([bridge, vrf, vrf]),
            json!("n1"),
            "attach net1 (shop/n1): plugins[2].type: vrf: the list has it already",
        ),
        (
            json!([{"type": "loopback"}, vrf]),
            json!("n2"),
            "attach net1 (shop/n2): plugins[1].type: vrf: loopback has no routes of its own",
        ),
        (
            json!([bridge, {"type": "sbr"}, vrf]),
            json!("n3"),
            "attach net1 (shop/n3): plugins[2].type: vrf: sbr before it routes the interface by tables of its addresses; \
             one of the two",
        ),
        (
            json!([bridge, vrf, {"type": "sbr"}]),
            json!("n4"),
            "attach net1 (shop/n4): plugins[2].type: sbr: vrf before it routes the interface by the VRF's table; one of \
             the two",
        ),
        (
            json!([bridge, {"type": "vrf"}]),
            json!("n5"),
            "attach net1 (shop/n5): key vrfname: missing; name the VRF",
        ),
        (
            json!([bridge, vrf]),
            json!([{"name": "n6", "default-route": ["10.70.0.1"]}]),
            "attach net1 (shop/n6): key default-route: vrf behind the interface moves its routes to the table of VRF blue; \
             one of the two",
        ),
        (
            json!([macvlan, vrf]),
            json!("n7"),
            "attach net1 (shop/n7): plugins[1].type: vrf: hostAccess leads between pod and node by the main tables, which the \
             interface leaves; one of the two",
        ),
        (
            json!([bridge, {"type": "vrf", "vrfname": "eth0"}]),
            json!("n8"),
            "attach net1 (shop/n8): key vrfname: \"eth0\" is another interface of the pod",
        ),
    ];
    for (number, (plugins, selection, _)) in rows.iter().enumerate() {
        let name = format!("n{number}");
        let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(&name, &manifest::network(NAMESPACE, &name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &manifest::pod(&name, &json!({}), selection)).unwrap();
    }
    node.start().unwrap();
    for (number, (_, _, said)) in rows.iter().enumerate() {
        let pod = Pod::new(&format!("n{number}")).unwrap();
        assert_eq!(node.call("ADD", &pod).run().failure(), (7, (*said).to_owned()));
    }
}
