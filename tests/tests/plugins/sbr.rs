//! The chained plugin `sbr`: compared with the reference plugin, call by call, and in the chains of an agent.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use netattach::netlink::Handle;
use netattach::plan::link_group;
use netattach_tests::crowd::crowd_of_rules;
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::runtime::{Call, Runtime, config, in_form_of, with_result};
use netattach_tests::settings::Settings;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{PATIENCE, ping};
use netattach_tests::{Namespace, Node, Pod, tools};
use serde_json::{Value, json};
use tempfile::TempDir;

const MAIN: u32 = 254;

/// A pod with the interface `eth0`, which has the addresses of a result, and routes.
struct Side {
    runtime: Runtime,
    pod: Namespace,
}

/// The state of a side after each call.
#[derive(Debug, PartialEq)]
struct Seen {
    answers: Vec<(Option<i32>, Value)>,
    attached: (Routing, Settings),
    detached: (Routing, Settings),
}

/// Rules as source and table, and the routes of their tables and of the main one. Only routes of the source's family,
/// as the reference adds those of the other family too, where no rule finds them; and none of IPv6 link-local
/// addresses, which the reference removes from the main table, so that neighbours are not found.
#[derive(Debug, Clone, Default, PartialEq)]
struct Routing {
    rules: Vec<(IpAddr, u32, u32)>,
    tables: BTreeSet<String>,
    main: BTreeSet<String>,
}

impl Routing {
    fn of(pod: &Namespace) -> Self {
        let mut handle = Handle::open_in(pod.netns()).unwrap();
        let index = handle.link("eth0").unwrap().index;
        let mut shown = |table: u32, v4: Option<bool>| -> BTreeSet<String> {
            let routes = handle.routes_by(index, table).unwrap();
            let its = routes.iter().filter(|route| {
                let is_local = route.destination.to_string().starts_with("fe80");
                !is_local && v4.is_none_or(|v4| route.destination.addr().is_ipv4() == v4)
            });
            its.map(|route| {
                let (to, via, from) = (route.destination, route.gateway, route.source);
                format!("{table}: {to} via {via:?} from {from:?} metric {:?}", route.priority)
            })
            .collect()
        };
        let main = shown(MAIN, None);
        let mut found = Handle::open_in(pod.netns()).unwrap().rules().unwrap();
        found.sort_by_key(|rule| (rule.source, rule.table));
        let tables = found.iter().flat_map(|rule| shown(rule.table, Some(rule.source.is_ipv4()))).collect();
        let rules = found.iter().map(|rule| (rule.source, rule.table, rule.priority)).collect();
        Self { rules, tables, main }
    }
}

impl Side {
    fn new(plugins: PathBuf, ips: &Value) -> Self {
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins };
        let pod = Namespace::new().unwrap();
        ip(&pod, &["link", "add", "eth0", "type", "veth", "peer", "name", "far0"]).unwrap();
        ip(&pod, &["link", "set", "far0", "up"]).unwrap();
        ip(&pod, &["link", "set", "eth0", "up"]).unwrap();
        let its = ips.as_array().unwrap().iter().filter(|ip| ip["interface"] != 0);
        for address in its.map(|ip| ip["address"].as_str().unwrap()) {
            let mut words = vec!["addr", "add", address, "dev", "eth0"];
            words.extend(address.contains(':').then_some("nodad"));
            ip(&pod, &words).unwrap();
            for (own, to, via) in [
                ("10.1.0.2/24", "192.0.2.0/24", "10.1.0.1"),
                ("10.1.0.2/24", "0.0.0.0/0", "10.1.0.1"),
                ("fd00::2/64", "::/0", "fd00::1"),
            ] {
                if address == own {
                    ip(&pod, &["route", "add", to, "via", via, "dev", "eth0"]).unwrap();
                }
            }
        }
        ip(&pod, &["route", "add", "198.51.100.0/24", "dev", "eth0"]).unwrap();
        Self { runtime, pod }
    }

    fn call(&self) -> Call<'_> {
        Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args: "" }
    }

    /// ADD, CHECK, DEL twice.
    fn run(&self, version: &str, keys: &Value, ips: &Value) -> Seen {
        let sbr = config(version, "sbr", keys);
        let before = json!({
            "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": "/pod"}], "ips": ips, "dns": {}
        });
        let previous = in_form_of(version, &before);
        let ran = |verb: &str, previous: &Value| {
            let answer = self.runtime.run(verb, self.call(), &with_result(&sbr, previous)).unwrap();
            // The words of an error are each implementation's own.
            let said = if answer.exit == Some(0) { answer.stdout } else { Value::Null };
            (answer.exit, said)
        };
        let mut answers = vec![ran("ADD", &previous)];
        let result = answers[0].1.clone();
        let shown = || (Routing::of(&self.pod), Settings::of(&self.pod).unwrap());
        let attached = shown();
        if answers[0].0 == Some(0) {
            answers.push(ran("CHECK", &result));
        }
        answers.extend([ran("DEL", &previous), ran("DEL", &previous)]);
        Seen { answers, attached, detached: shown() }
    }
}

/// A directory with our executable under the plugin's name.
fn own() -> TempDir {
    let own = tempfile::tempdir().unwrap();
    symlink(executable("netattach-cni").unwrap(), own.path().join("sbr")).unwrap();
    own
}

/// Rows: SBR-keys.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn sbr_agrees_with_the_reference() {
    let test = "sbr_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["sbr"]) else { return };
    let own = own();
    let v4 = |address: &str, gateway: Option<&str>, interface: Option<u32>| {
        let mut ip = json!({"version": "4", "address": address});
        for (key, value) in [("gateway", gateway.map(Value::from)), ("interface", interface.map(Value::from))]
        {
            if let Some(value) = value {
                ip[key] = value;
            }
        }
        ip
    };
    let v6 = json!({"version": "6", "interface": 1, "address": "fd00::2/64", "gateway": "fd00::1"});
    let plain = v4("10.1.0.2/24", Some("10.1.0.1"), Some(1));
    let all = &["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"][..];
    // The two oldest have results of one address of each family, which name no interfaces.
    let with_interfaces = &all[2..];
    let rows = [
        (json!({}), json!([plain]), all),
        (json!({}), json!([v4("10.1.0.2/24", None, None)]), all),
        (json!({}), json!([plain, v4("10.1.0.3/24", Some("10.1.0.1"), Some(1))]), with_interfaces),
        (json!({}), json!([plain, v4("10.2.0.2/24", Some("10.2.0.1"), Some(1)), v6]), with_interfaces),
        (json!({}), json!([v4("10.9.0.1/24", None, Some(0)), plain]), with_interfaces),
        (json!({"table": 500}), json!([plain, v6]), all),
        // No interface has an address.
        (json!({}), json!([]), with_interfaces),
    ];
    for (keys, ips, versions) in rows {
        for &version in versions {
            let ours = Side::new(own.path().to_owned(), &ips).run(version, &keys, &ips);
            let theirs = Side::new(reference.clone(), &ips).run(version, &keys, &ips);
            assert_eq!(ours, theirs, "{version} {keys} {ips}");
        }
    }
}

/// The keys of later versions of the reference, and differences of DEL and CHECK from the reference.
///
/// Rows: SBR-gateways, SBR-hints, SBR-check, SBR-del.
#[test]
fn sbr_has_gateways_and_hints_and_looks_for_its_rules() {
    let own = own();
    let ips = json!([
        {"interface": 1, "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
        {"interface": 1, "address": "fd00::2/64", "gateway": "fd00::1"}
    ]);
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": "/pod"}],
        "ips": ips, "dns": {}});
    let side = Side::new(own.path().to_owned(), &ips);
    let keys = json!({"gateways": ["10.1.0.9"], "addSourceHints": true});
    let sbr = with_result(&config("1.0.0", "sbr", &keys), &previous);
    side.runtime.add(side.call(), &sbr).unwrap();
    let found = Routing::of(&side.pod);
    let defaults = |routing: &Routing| -> Vec<String> {
        let is_default = |line: &&String| line.contains(" 0.0.0.0/0 ") || line.contains(" ::/0 ");
        routing.tables.iter().filter(is_default).cloned().collect()
    };
    assert_eq!(
        defaults(&found),
        [
            "100: 0.0.0.0/0 via Some(10.1.0.9) from None metric None",
            "101: ::/0 via Some(fd00::1) from None metric Some(1024)"
        ]
    );
    let main = [
        "254: 10.1.0.0/24 via None from Some(10.1.0.2) metric None",
        "254: 198.51.100.0/24 via None from None metric None",
        "254: fd00::/64 via None from Some(fd00::2) metric Some(256)",
    ];
    assert_eq!(found.main, main.map(str::to_owned).into());
    let check = || side.runtime.run("CHECK", side.call(), &sbr).unwrap();
    assert_eq!(check().exit, Some(0));
    // Each is reported before the one above it.
    for (words, what) in [
        (
            ["-6", "route", "flush", "table", "101"].as_slice(),
            "table 101 has lost its default route for what fd00::2 sends",
        ),
        (
            &["route", "replace", "default", "via", "10.1.0.1", "dev", "eth0", "table", "100"],
            "table 100 has lost its default route by 10.1.0.9 for what 10.1.0.2 sends",
        ),
        (&["rule", "del", "from", "10.1.0.2"], "the rule for what 10.1.0.2 sends is gone"),
    ] {
        ip(&side.pod, words).unwrap();
        let said = check().stdout["msg"].as_str().unwrap().to_owned();
        assert!(said.ends_with(what), "{said}");
    }
    // The interface is gone: the result has its addresses.
    ip(&side.pod, &["link", "del", "eth0"]).unwrap();
    let del = || side.runtime.run("DEL", side.call(), &sbr).unwrap().exit;
    assert_eq!((del(), del()), (Some(0), Some(0)));
    assert_eq!(Network::of(&side.pod).unwrap().rules, BTreeSet::new());
    // The namespace is gone too.
    let gone = Call { netns: "/run/netns/gone".as_ref(), ..side.call() };
    assert_eq!(side.runtime.run("DEL", gone, &sbr).unwrap().exit, Some(0));
}

/// The addresses of a result may all belong to another interface, and one of the node may have the name of the pod's.
///
/// Rows: SBR-refused.
#[test]
fn an_interface_without_addresses_of_its_own_keeps_its_routes() {
    let own = own();
    let ips = json!([{"interface": 0, "address": "10.1.0.2/24"}]);
    for node_end in ["veth1", "eth0"] {
        let side = Side::new(own.path().to_owned(), &ips);
        let before = Routing::of(&side.pod);
        let main = BTreeSet::from(["254: 198.51.100.0/24 via None from None metric None".to_owned()]);
        assert_eq!(before, Routing { main, ..Routing::default() });
        let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": node_end}, {"name": "eth0", "sandbox": "/pod"}],
            "ips": ips, "dns": {}});
        let sbr = with_result(&config("1.0.0", "sbr", &json!({})), &previous);
        let told = "sbr: no plugin before it gave eth0 an address";
        assert_eq!(
            side.runtime.refusal("ADD", side.call(), &sbr).unwrap(),
            (7, told.to_owned()),
            "{node_end}"
        );
        assert_eq!(Routing::of(&side.pod), before, "{node_end}");
    }
}

/// A result with that address of eth0, and a network address.
fn result_of(mac: &str, address: &str) -> Value {
    json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "mac": mac, "sandbox": "/pod"}],
        "ips": [{"interface": 0, "address": address}], "dns": {}})
}

/// Rows: SBR-del.
#[test]
fn a_pod_with_more_rules_than_are_read_loses_those_of_sbr() {
    let own = own();
    let ips = json!([{"interface": 1, "address": "10.1.0.2/24"}, {"interface": 1, "address": "fd00::2/64"}]);
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": "/pod"}],
        "ips": ips, "dns": {}});
    for (keys, has_result) in [(json!({}), true), (json!({"table": 500}), true), (json!({}), false)] {
        let side = Side::new(own.path().to_owned(), &ips);
        let rules = || {
            let found = side.pod.run(Handle::open).unwrap().rules().unwrap();
            let sources = found.iter().map(|rule| rule.source.to_string());
            sources.filter(|source| !source.starts_with("11.")).collect::<Vec<_>>()
        };
        let sbr = config("1.0.0", "sbr", &keys);
        let with = with_result(&sbr, &previous);
        side.runtime.add(side.call(), &with).unwrap();
        assert_eq!(rules(), ["10.1.0.2", "fd00::2"]);
        crowd_of_rules(&side.pod).unwrap();
        for _ in 0..2 {
            let del = if has_result { &with } else { &sbr };
            let answer = side.runtime.run("DEL", side.call(), del).unwrap();
            assert_eq!((answer.exit, rules()), (Some(0), Vec::new()), "{keys} {has_result}");
        }
    }
}

/// The path now leads to another container's namespace, which has an interface of that name.
///
/// Rows: SBR-late-del.
#[test]
fn a_late_del_leaves_the_rules_alone_of_the_pod_that_has_the_namespaces_path_now() {
    let own = own();
    let ips = json!([{"interface": 1, "address": "10.1.0.2/24"}]);
    let side = Side::new(own.path().to_owned(), &ips);
    let eth0 = || Handle::open_in(side.pod.netns()).unwrap().link("eth0").unwrap();
    let mac = eth0().mac.unwrap().to_string();
    let sbr = config("1.0.0", "sbr", &json!({}));
    let its = with_result(&sbr, &result_of(&mac, "10.1.0.2/24"));
    let other = Call { container: "c2", ..side.call() };
    side.runtime.add(other, &its).unwrap();
    let attached = Routing::of(&side.pod);
    assert_eq!(attached.rules.len(), 1);
    let unchanged = |late: &Value| {
        let answer = side.runtime.run("DEL", side.call(), late).unwrap();
        assert_eq!((answer.exit, Routing::of(&side.pod)), (Some(0), attached.clone()), "{late}");
    };
    // An address of its own, or no known one; and the address of the other one, whose link is marked as another's.
    unchanged(&with_result(&sbr, &result_of("02:00:00:00:00:99", "10.9.0.2/24")));
    unchanged(&with_result(&sbr, &result_of(&mac, "10.9.0.2/24")));
    let group = link_group("c2", "eth0");
    Handle::open_in(side.pod.netns()).unwrap().set_group(eth0().index, group).unwrap();
    unchanged(&its);
    unchanged(&sbr);
    let answer = side.runtime.run("DEL", other, &its).unwrap();
    assert_eq!((answer.exit, Routing::of(&side.pod).rules), (Some(0), Vec::new()));
}

/// A `tuning` behind it had changed the Ethernet address; its DEL, which runs first, has restored the former one.
#[test]
fn a_del_knows_its_interface_by_an_ip_address_when_the_mac_is_the_former_one() {
    let own = own();
    let side = Side::new(own.path().to_owned(), &json!([{"interface": 1, "address": "10.1.0.2/24"}]));
    let mac = Handle::open_in(side.pod.netns()).unwrap().link("eth0").unwrap().mac.unwrap().to_string();
    let sbr = config("1.0.0", "sbr", &json!({}));
    side.runtime.add(side.call(), &with_result(&sbr, &result_of(&mac, "10.1.0.2/24"))).unwrap();
    assert_eq!(Routing::of(&side.pod).rules.len(), 1);
    let last = with_result(&sbr, &result_of("02:00:00:00:00:07", "10.1.0.2/24"));
    let answer = side.runtime.run("DEL", side.call(), &last).unwrap();
    assert_eq!((answer.exit, Routing::of(&side.pod).rules), (Some(0), Vec::new()));
}

/// All of an agent's links have the group of the sandbox, which is derived from the name of the pod's first
/// interface.
///
/// Rows: SBR-behind-agent.
#[test]
fn the_executable_knows_the_interfaces_that_an_agent_has_made_for_the_pod() {
    let own = own();
    let side = Side::new(own.path().to_owned(), &json!([]));
    for words in [
        &["link", "add", "net1", "type", "veth", "peer", "name", "far1"][..],
        &["link", "set", "far1", "up"],
        &["link", "set", "net1", "up"],
        &["addr", "add", "10.2.0.2/24", "dev", "net1"],
    ] {
        ip(&side.pod, words).unwrap();
    }
    let mut inside = Handle::open_in(side.pod.netns()).unwrap();
    let net1 = inside.link("net1").unwrap();
    inside.set_group(net1.index, link_group("c1", "eth0")).unwrap();
    let interfaces = json!([{"name": "net1", "mac": net1.mac.unwrap().to_string(), "sandbox": "/pod"}]);
    let ips = json!([{"interface": 0, "address": "10.2.0.2/24"}]);
    let previous = json!({"cniVersion": "1.0.0", "interfaces": interfaces, "ips": ips, "dns": {}});
    let sbr = with_result(&config("1.0.0", "sbr", &json!({})), &previous);
    let call = Call { ifname: "net1", ..side.call() };
    side.runtime.add(call, &sbr).unwrap();
    let mut sources =
        || inside.rules().unwrap().iter().map(|rule| rule.source.to_string()).collect::<Vec<_>>();
    assert_eq!(sources(), ["10.2.0.2"]);
    let answer = side.runtime.run("DEL", call, &sbr).unwrap();
    assert_eq!((answer.exit, sources()), (Some(0), Vec::new()));
}

/// Rows: SBR-agent.
#[test]
fn an_agent_routes_by_source_behind_its_own_interfaces() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let mut kinds = vec![
        ("bridge", json!({"bridge": "br1", "isGateway": true})),
        ("veth", json!({})),
        ("ptp", json!({})),
        ("macvlan", json!({"master": WIRE})),
        ("tap", json!({})),
        ("macvtap", json!({"master": WIRE})),
        ("ipvlan", json!({"master": WIRE})),
        ("vlan", json!({"master": WIRE, "vlanId": 5})),
    ];
    kinds.retain(|(kind, _)| !["ipvlan", "vlan"].contains(kind) || tools::has_driver(kind));
    for (number, (name, first)) in kinds.iter().enumerate() {
        let mut first = first.clone();
        first["type"] = json!(name);
        first["ipam"] = node.host_local(&[&format!("10.7{number}.0.0/24"), &format!("fd7{number}::/64")]);
        first["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        for (list, more) in
            [(format!("{name}-good"), None), (format!("{name}-bad"), Some(json!({"type": "last"})))]
        {
            let plugins: Vec<Value> =
                [first.clone(), json!({"type": "sbr"})].into_iter().chain(more).collect();
            let config = json!({"cniVersion": "1.0.0", "name": list, "plugins": plugins});
            node.write(&list, &manifest::network(NAMESPACE, &list, &config)).unwrap();
            node.write(&format!("pod-{list}"), &manifest::pod(&list, &json!({}), &json!(list))).unwrap();
        }
    }
    node.plugin("last", &json!({"ADD": {"error": {"code": 123, "msg": "no more"}}})).unwrap();
    node.start().unwrap();
    for (number, (name, _)) in kinds.iter().enumerate() {
        let pod = Pod::new(&format!("{name}-good")).unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        node.add(&pod).success();
        let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
        let its: Vec<String> = handle
            .rules()
            .unwrap()
            .iter()
            .filter(|rule| (100..1000).contains(&rule.table))
            .map(|rule| format!("{} {}", rule.source, rule.table))
            .collect();
        assert_eq!(its, [format!("10.7{number}.0.2 100"), format!("fd7{number}::2 101")], "{name}");
        let index = handle.link("net1").unwrap().index;
        let main = handle.routes_by(index, MAIN).unwrap();
        let of_link = |text: &str| text.starts_with("fe80");
        let left: Vec<_> = main.iter().filter(|it| !of_link(&it.destination.to_string())).collect();
        assert_eq!(left, Vec::<&netattach::spec::Route>::new(), "{name}");
        for table in [100, 101] {
            let routes = handle.routes_by(index, table).unwrap();
            let defaults = routes.iter().filter(|route| route.destination.prefix_len() == 0).count();
            assert_eq!(defaults, 1, "{name} {table}: {routes:?}");
        }
        if *name == "bridge" {
            // The node answers to the pod's address, and its answer is answered by the same interface.
            assert!(ping(&node.namespace, "10.70.0.2".parse().unwrap(), PATIENCE).unwrap());
            assert!(ping(&node.namespace, "fd70::2".parse().unwrap(), PATIENCE).unwrap());
        }
        assert_eq!(node.check(&pod).success(), Value::Null, "{name}");
        ip(&pod.namespace, &["route", "del", "default", "table", "100"]).unwrap();
        let (_, said) = node.check(&pod).failure();
        assert!(said.ends_with("the route to 0.0.0.0/0 in table 100 is gone"), "{name}: {said}");
        ip(&pod.namespace, &["rule", "del", "table", "100"]).unwrap();
        let (_, said) = node.check(&pod).failure();
        let gone = format!("the rule from 10.7{number}.0.2 to table 100 is gone");
        assert!(said.ends_with(&gone), "{name}: {said}");
        assert_eq!(node.del(&pod).success(), Value::Null);
        assert_eq!(node.del(&pod).success(), Value::Null);
        assert_eq!(Snapshot::take(&node, &[&pod]).unwrap().pods, before.pods, "{name}");
        // An ADD that fails after it rolls its rules back.
        let pod = Pod::new(&format!("{name}-bad")).unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        node.call("ADD", &pod).run().failure();
        assert_eq!(Snapshot::take(&node, &[&pod]).unwrap().pods, before.pods, "{name}");
    }
}

/// Rows: SBR-delegated.
#[test]
fn an_agent_routes_by_source_behind_an_interface_of_another_plugin() {
    let test = "an_agent_routes_by_source_behind_an_interface_of_another_plugin";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["host-device", "static"])
    else {
        return;
    };
    let mut node = Node::new(&[]).unwrap();
    ip(&node.namespace, &["link", "add", "dev0", "type", "veth", "peer", "name", "far0"]).unwrap();
    ip(&node.namespace, &["link", "set", "far0", "up"]).unwrap();
    for plugin in ["host-device", "static"] {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    // The reference's CHECK searches the subnet in the main table.
    let sbr = json!({"type": "sbr", "addSourceHints": true});
    let ipam = json!({"type": "static", "addresses": [{"address": "10.79.0.2/24", "gateway": "10.79.0.1"}]});
    let plugins = json!([{"type": "host-device", "device": "dev0", "ipam": ipam}, sbr]);
    let list = json!({"cniVersion": "1.0.0", "name": "device", "plugins": plugins});
    node.write("device", &manifest::network(NAMESPACE, "device", &list)).unwrap();
    node.write("pod", &manifest::pod("a", &json!({}), &json!("device"))).unwrap();
    node.start().unwrap();
    let pod = Pod::new("a").unwrap();
    let before = Snapshot::take(&node, &[&pod]).unwrap();
    node.add(&pod).success();
    let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
    let index = handle.link("net1").unwrap().index;
    let rules: Vec<_> =
        handle.rules().unwrap().iter().map(|rule| (rule.source.to_string(), rule.table)).collect();
    assert_eq!(rules, [("10.79.0.2".to_owned(), 100)]);
    let shown = |table: u32, handle: &mut Handle| -> Vec<String> {
        let routes = handle.routes_by(index, table).unwrap();
        let v4 = routes.iter().filter(|route| route.destination.addr().is_ipv4());
        v4.map(|route| format!("{} {:?}", route.destination, route.gateway)).collect()
    };
    assert_eq!(shown(100, &mut handle), ["0.0.0.0/0 Some(10.79.0.1)", "10.79.0.0/24 None"]);
    assert_eq!(shown(MAIN, &mut handle), ["10.79.0.0/24 None"]);
    assert_eq!(node.check(&pod).success(), Value::Null);
    assert_eq!(node.del(&pod).success(), Value::Null);
    assert_eq!(Snapshot::take(&node, &[&pod]).unwrap().pods, before.pods);
}

/// Rows: SBR-refused.
#[test]
fn a_chain_that_sbr_cannot_carry_out_is_refused_by_its_key() {
    let mut node = Node::new(&[]).unwrap();
    let bridge = json!({"type": "bridge", "bridge": "br1", "isGateway": true, "ipam": node.host_local(&["10.70.0.0/24"])});
    let sbr = json!({"type": "sbr"});
    let rows = [
        (
            json!([sbr]),
            json!("n0"),
            "attach net1 (shop/n0): plugins[0].type: sbr changes an interface that a plugin before it has made",
        ),
        (
            json!([bridge, sbr, sbr]),
            json!("n1"),
            "attach net1 (shop/n1): plugins[2].type: sbr: the list has it already",
        ),
        (
            json!([{"type": "loopback"}, sbr]),
            json!("n2"),
            "attach net1 (shop/n2): plugins[1].type: sbr: loopback has no routes of its own",
        ),
        (
            json!([bridge, {"type": "sbr", "table": 5, "gateways": ["10.70.0.1"]}]),
            json!("n3"),
            "attach net1 (shop/n3): key gateways: without effect, as with table no routes are made or moved",
        ),
        (
            json!([bridge, sbr]),
            json!([{"name": "n4", "default-route": ["10.70.0.1"]}]),
            "attach net1 (shop/n4): key default-route: sbr behind the interface moves its routes to tables by source \
             address; one of the two",
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
