//! Third-party IPAM plugins, and DNS.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use netattach_tests::node::ip;
use netattach_tests::runtime::{Call, config, with_result};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use super::{Rig, addresses, pairs, routes};
use crate::delegate::is_alive;

/// Rows: MVL-dns, HLC-resolvConf.
#[test]
fn dns_comes_from_the_configuration_only_if_it_says_something() {
    let rig = Rig::new();
    let resolv_conf = rig.dir.path().join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 10.0.0.53\nsearch a.example b.example\n").unwrap();
    for (dns, expected) in [
        (json!({}), json!({"nameservers": ["10.0.0.53"], "search": ["a.example", "b.example"]})),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
    ] {
        let mut config = rig.config("1.0.0", "macvlan");
        config["ipam"]["resolvConf"] = json!(resolv_conf);
        config["dns"] = dns;
        let result = rig.add(&config);
        assert_eq!(result["dns"], expected);
        rig.after("DEL", &config, &result);
    }
}

/// An address management plugin that follows a script, in the directory of the plugins.
fn install_ipam(rig: &Rig, script: &Value) -> PathBuf {
    let path = rig.runtime.plugins.join("ipam-of-others");
    if !path.exists() {
        symlink(env!("CARGO_BIN_EXE_fake-plugin"), &path).unwrap();
    }
    fs::write(rig.runtime.plugins.join("ipam-of-others.json"), script.to_string()).unwrap();
    rig.runtime.plugins.join("ipam-of-others.json.calls")
}

/// The verbs that the plugin got, with its input.
fn calls(record: &Path) -> Vec<(String, Value)> {
    let text = fs::read_to_string(record).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .map(|call| (call["env"]["CNI_COMMAND"].as_str().unwrap().to_owned(), call["stdin"].clone()))
        .collect()
}

/// The processes of these calls.
fn pids(record: &Path) -> Vec<i32> {
    let text = fs::read_to_string(record).unwrap_or_default();
    // The last line may be about to be written.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|call| i32::try_from(call["pid"].as_i64()?).ok()).collect()
}

/// Rows: STA-03.
#[test]
fn an_address_plugin_of_others_is_asked_with_what_came_in() {
    let rig = Rig::new();
    let result = json!({
        "cniVersion": "1.0.0", "ips": [{"address": "10.7.0.9/24"}], "routes": [{"dst": "10.8.0.0/16", "gw": "10.7.0.1"}],
        "dns": {"nameservers": ["10.7.0.53"]},
    });
    let record = install_ipam(&rig, &json!({"ADD": {"result": result}}));
    let keys = json!({"bridge": "br0", "isGateway": true, "ipam": {"type": "ipam-of-others", "x": [1]}});
    let config = config("1.1.0", "bridge", &keys);
    let call = Call { args: "GATEWAY=10.7.0.1", ..rig.call() };
    let result = rig.runtime.add(call, &config).unwrap();
    assert_eq!(
        (&result["ips"], &result["routes"], &result["dns"]),
        (
            &json!([{"interface": 2, "address": "10.7.0.9/24", "gateway": "10.7.0.1"}]),
            &json!([{"dst": "10.8.0.0/16", "gw": "10.7.0.1"}]),
            &json!({"nameservers": ["10.7.0.53"]}),
        )
    );
    let index = rig.inside().link("eth0").unwrap().index;
    assert_eq!(addresses(&mut rig.inside(), index), ["10.7.0.9/24"]);
    assert_eq!(routes(&mut rig.inside(), index), pairs(&[("10.8.0.0/16", "10.7.0.1")]));
    let after = with_result(&config, &result);
    rig.runtime.after("CHECK", call, &config, &result).unwrap();
    rig.runtime.after("DEL", call, &config, &result).unwrap();
    rig.alone("STATUS", &config);
    let mut gc = config.clone();
    gc["cni.dev/valid-attachments"] = json!([]);
    rig.alone("GC", &gc);
    let expected = [("ADD", &config), ("CHECK", &after), ("DEL", &after), ("STATUS", &config), ("GC", &gc)];
    assert_eq!(calls(&record), expected.map(|(verb, stdin)| (verb.to_owned(), stdin.clone())));
    rig.assert_nothing_left("after DEL");
}

/// Rows: ADD-08.
#[test]
fn an_address_plugin_of_others_that_fails_or_gives_nothing_is_taken_back() {
    for (script, code, message) in [
        (
            json!({"ADD": {"error": {"code": 11, "msg": "pool is busy"}}}),
            11,
            "plugin \"ipam-of-others\" failed (ADD): pool is busy",
        ),
        (json!({}), 999, "IPAM plugin ipam-of-others returned missing IP config"),
    ] {
        let rig = Rig::new();
        let record = install_ipam(&rig, &script);
        let config =
            config("1.0.0", "macvlan", &json!({"master": "uplink", "ipam": {"type": "ipam-of-others"}}));
        let (found, said) = rig.refusal("ADD", &config);
        assert_eq!(found, code, "{said}");
        assert!(said.contains(message), "{said}");
        assert_eq!(calls(&record).into_iter().map(|(verb, _)| verb).collect::<Vec<_>>(), ["ADD", "DEL"]);
        rig.assert_nothing_left(message);
    }
}

/// A runtime kills the plugin that it has started and no other. What that has started would go on without a time limit,
/// and lease an address after the DEL.
///
/// Rows: EXE-18.
#[test]
fn an_address_plugin_of_others_ends_with_the_plugin_that_is_killed() {
    let rig = Rig::new();
    let address = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.7.0.9/24"}]});
    let hangs = json!({"sleepMs": 600_000});
    let of = |script: Value| install_ipam(&rig, &script);
    let keys = json!({"master": "uplink", "ipam": {"type": "ipam-of-others"}});
    let config = config("1.0.0", "macvlan", &keys);
    for verb in ["ADD", "DEL"] {
        let record = of(json!({"ADD": {"result": address}}));
        if verb == "DEL" {
            rig.add(&config);
        }
        let before = pids(&record).len();
        of(json!({verb: hangs}));
        let mut plugin = rig.runtime.start(verb, rig.call(), &config).unwrap();
        let is_called = eventually(PATIENCE, || pids(&record).len() > before);
        plugin.kill().unwrap();
        let output = plugin.wait_with_output().unwrap();
        assert!(is_called, "{verb}: {output:?}");
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{verb}: {output:?}");
        let called = pids(&record)[before];
        assert!(eventually(PATIENCE, || !is_alive(called)), "{verb}: process {called}");

        of(json!({}));
        rig.alone("DEL", &config);
        rig.assert_nothing_left(verb);
        let verbs: Vec<String> = calls(&record).into_iter().map(|(verb, _)| verb).collect();
        let expected: &[&str] = if verb == "ADD" { &["ADD", "DEL"] } else { &["ADD", "DEL", "DEL"] };
        assert_eq!(verbs, expected);
        fs::remove_file(&record).unwrap();
    }
}

/// Rows: STC-node-links, BRG-chosen.
#[test]
fn an_address_that_is_asked_for_is_nobodys_on_the_nodes_links_and_gives_the_node_none() {
    let rig = Rig::new();
    for words in [
        "link set uplink up",
        "address add 192.168.1.10/24 dev uplink",
        "address add fd00:168::10/64 dev uplink nodad",
        "route add default via 192.168.1.1",
        "route add 10.8.0.0/16 via 192.168.1.9",
        "route add blackhole 10.9.0.0/26",
        "route add 10.10.0.0/16 via 192.168.1.9 table 100",
        "rule add to 10.10.0.0/16 lookup 100",
    ] {
        ip(&rig.runtime.node, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let asked = |kind: &str, own: &[&str], ips: &[&str]| {
        let own: Vec<Value> = own.iter().map(|address| json!({"address": address})).collect();
        let ipam = json!({"type": "static", "addresses": own});
        let keys = json!({"ipam": ipam, "runtimeConfig": {"ips": ips}});
        config("1.0.0", kind, &keys)
    };
    let refused = |config: &Value, told: &str| {
        let (code, said) = rig.refusal("ADD", config);
        assert!(code == 7 && said.ends_with(told), "{config}: {code} {said}");
        rig.assert_nothing_left(told);
    };
    for kind in ["veth", "ptp"] {
        for (address, holder) in [
            ("192.168.1.2", "the node has a route to 192.168.1.0/24, by uplink"),
            ("fd00:168::2", "the node has a route to fd00:168::/64, by uplink"),
            ("10.8.0.7", "the node has a route to 10.8.0.0/16, by uplink"),
            ("10.9.0.7", "the node has a route to 10.9.0.0/26"),
            ("10.10.0.7", "the node has a route to 10.10.0.0/16, by uplink"),
        ] {
            let length = if address.contains(':') { 128 } else { 32 };
            let config = asked(kind, &[], &[&format!("{address}/{length}")]);
            refused(&config, &format!("address {address} is taken: {holder}"));
        }
        // The node knows no route to the first; the second's author has named the subnet.
        for config in
            [asked(kind, &[], &["198.51.100.7/32"]), asked(kind, &["192.168.1.50/24"], &["192.168.1.2/32"])]
        {
            let result = rig.add(&config);
            assert_eq!(result["ips"][0]["address"], config["runtimeConfig"]["ips"][0]);
            rig.after("DEL", &config, &result);
            rig.assert_nothing_left("after DEL");
        }
    }

    // The node's would be 192.168.1.1, which is its router's, with half of the subnet behind the bridge.
    let mut chosen = asked("bridge", &[], &["192.168.1.77/25"]);
    chosen["bridge"] = json!("br1");
    chosen["isGateway"] = json!(true);
    refused(&chosen, "ipam.addresses names the subnets that pods may choose in");
    let mut within = asked("bridge", &["10.1.0.7/24"], &["10.1.0.8/24"]);
    within["bridge"] = json!("br0");
    within["isGateway"] = json!(true);
    let result = rig.add(&within);
    assert_eq!(result["ips"][0]["address"], "10.1.0.8/24");
    let index = rig.node().link("br0").unwrap().index;
    assert_eq!(addresses(&mut rig.node(), index), ["10.1.0.1/24"]);
    rig.after("DEL", &within, &result);
    rig.assert_nothing_left("after DEL");
}

/// Rows: STC-node-links.
#[test]
fn an_address_plugin_of_others_gives_what_is_asked_for_only_where_nobody_is() {
    let rig = Rig::new();
    for words in ["link set uplink up", "address add 192.168.1.10/24 dev uplink"] {
        ip(&rig.runtime.node, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "192.168.1.2/24"}]});
    install_ipam(&rig, &json!({"ADD": {"result": result}}));
    let mut config = config("1.0.0", "veth", &json!({"ipam": {"type": "ipam-of-others"}}));
    let result = rig.add(&config);
    rig.after("DEL", &config, &result);
    config["runtimeConfig"] = json!({"ips": ["192.168.1.2/24"]});
    let (code, said) = rig.refusal("ADD", &config);
    let told = "address 192.168.1.2 is taken: the node has a route to 192.168.1.0/24, by uplink";
    assert!(code == 7 && said.ends_with(told), "{code} {said}");
    rig.assert_nothing_left("refused");
}

/// The kernel removes IPv6 addresses from an interface that is set down, unless a setting keeps them.
#[test]
fn addresses_outlast_an_interface_that_its_pod_sets_down_and_up() {
    for (kind, v4, v6) in [
        ("bridge", "10.1.0.2/24", "fd00:1::2/64"),
        ("macvlan", "10.1.0.2/24", "fd00:1::2/64"),
        ("veth", "10.1.0.2/32", "fd00:1::2/128"),
    ] {
        let rig = Rig::new();
        rig.add(&rig.config("1.0.0", kind));
        let index = rig.inside().link("eth0").unwrap().index;
        for state in ["down", "up"] {
            ip(&rig.pod, &["link", "set", "eth0", state]).unwrap();
            assert_eq!(addresses(&mut rig.inside(), index), [v4, v6], "{kind} {state}");
        }
    }
}
