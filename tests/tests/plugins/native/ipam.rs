//! Third-party IPAM plugins, and DNS.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use netattach_tests::node::ip;
use netattach_tests::runtime::{Call, config, with_result};
use serde_json::{Value, json};

use super::{Rig, addresses, pairs, routes};

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

/// The kernel removes IPv6 addresses from an interface that is set down, unless it is told to keep them.
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
