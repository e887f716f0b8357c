//! podman with our executables alone: no agent, no other plugin.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::{fs, process::Command};

use netattach::netlink::{Handle, nat};
use netattach_tests::machine::podman::Podman;
use netattach_tests::machine::{CONFIGURATIONS, Machine};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects};
use netattach_tests::{Namespace, Node, settings};
use serde_json::json;

/// The plugins of the two lists.
const PLUGINS: [&str; 9] =
    ["bridge", "host-local", "portmap", "bandwidth", "tuning", "macvlan", "static", "firewall", "sbr"];

/// Two networks: a bridge whose containers have ports, masquerade and limits; and a macvlan with an address of its own,
/// which the node forwards for and which is routed by its source.
///
/// Rows: PMP-podman.
#[test]
fn podman_publishes_ports_and_masquerades_by_our_executables_alone() {
    let test = "podman_publishes_ports_and_masquerades_by_our_executables_alone";
    let node = Node::new(&[]).unwrap();
    let outside = node.add_outside().unwrap();
    let Some(machine) = Machine::new(test, node).unwrap() else { return };
    let own = executable("netattach-cni").unwrap();
    for plugin in PLUGINS {
        symlink(&own, machine.node.path("cni-bin").join(plugin)).unwrap();
    }
    let plain = json!([
        {
            "type": "bridge", "bridge": "plain0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}
        },
        {"type": "portmap", "capabilities": {"portMappings": true}},
        {"type": "bandwidth", "egressRate": 100_000_000, "egressBurst": 10_000_000},
        {"type": "tuning", "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"}}
    ]);
    let fixed = json!([
        {
            "type": "macvlan", "master": WIRE,
            "ipam": {
                "type": "static", "addresses": [{"address": "192.0.2.7/24", "gateway": "192.0.2.2"}],
                "routes": [{"dst": "0.0.0.0/0"}]
            }
        },
        {"type": "firewall"},
        {"type": "sbr"}
    ]);
    fs::create_dir_all(CONFIGURATIONS).unwrap();
    for (name, plugins) in [("plain", plain), ("fixed", fixed)] {
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        let file = Path::new(CONFIGURATIONS).join(format!("10-{name}.conflist"));
        fs::write(file, list.to_string()).unwrap();
    }
    let podman = Podman::set_up(machine).unwrap();
    podman.run_with("web", &["--network", "plain", "--publish", "8080:80"]).unwrap();
    podman.run_with("client", &["--network", "plain"]).unwrap();
    let netns = |container: &str| Namespace::at(Path::new(&podman.netns(container).unwrap())).unwrap();
    let (web, client) = (netns("web"), netns("client"));
    let address_of = |container: &str, network: &str| {
        let field = format!("{{{{.NetworkSettings.Networks.{network}.IPAddress}}}}");
        podman.inspect(container, &field).unwrap()
    };
    let address = address_of("web", "plain");
    let at = |address: &str, port: u16| SocketAddr::new(address.parse().unwrap(), port);
    let published = at("192.0.2.1", 8080);
    {
        let _echo = Echo::serve(&web, at(&address, 80)).unwrap();
        for from in [&outside, &client, &web] {
            assert!(connects(from, published, PATIENCE));
        }
        assert!(connects(&podman.machine.node.namespace, at("127.0.0.1", 8080), PATIENCE));
    }
    // Outside, no host has a route to the containers' own addresses.
    let _echo = Echo::serve(&outside, at("192.0.2.2", 80)).unwrap();
    assert!(connects(&client, at("192.0.2.2", 80), PATIENCE));
    podman.restart("web").unwrap();
    let again = netns("web");
    let address = address_of("web", "plain");
    {
        let _echo = Echo::serve(&again, at(&address, 80)).unwrap();
        assert!(connects(&outside, published, PATIENCE));
    }
    podman.remove("web").unwrap();
    podman.remove("client").unwrap();
    assert!(!connects(&outside, published, SILENCE));
    let node = &podman.machine.node.namespace;
    // The rules by which the node forwards for containers.
    let forwarding = || Snapshot::take(&podman.machine.node, &[]).unwrap().forwarding;
    podman.run_with("fixed", &["--network", "fixed"]).unwrap();
    assert_eq!(address_of("fixed", "fixed"), "192.0.2.7");
    let fixed = netns("fixed");
    {
        // The answers go by the table of the address, as the main one has no route any more.
        let _echo = Echo::serve(&fixed, at("192.0.2.7", 80)).unwrap();
        assert!(connects(&outside, at("192.0.2.7", 80), PATIENCE));
    }
    let index = Handle::open_in(fixed.netns()).unwrap().link("eth0").unwrap().index;
    let through = |table: u32| Handle::open_in(fixed.netns()).unwrap().routes_by(index, table).unwrap();
    let to = |table: u32| -> BTreeSet<String> {
        let v4 = through(table).into_iter().filter(|route| route.destination.addr().is_ipv4());
        v4.map(|route| route.destination.to_string()).collect()
    };
    let moved = BTreeSet::from(["0.0.0.0/0", "192.0.2.0/24"].map(str::to_owned));
    assert_eq!((to(254), to(100)), (BTreeSet::new(), moved));
    let rules = settings::rules(&fixed).unwrap();
    assert!(rules.iter().any(|rule| rule.ends_with("from 192.0.2.7 lookup 100")), "{rules:?}");
    let passing = forwarding();
    let is_its = |rule: &String| rule.contains("192.0.2.7") && rule.contains("fixed");
    assert!(passing.len() == 2 && passing.iter().all(is_its), "{passing:?}");
    podman.remove("fixed").unwrap();
    assert_eq!(forwarding(), BTreeSet::new());
    let rules = node.run(|| Command::new("nft").args(["list", "ruleset"]).output().unwrap());
    assert!(!String::from_utf8_lossy(&rules.stdout).contains(nat::SHARED_TABLE), "{rules:?}");
    let links = Handle::open_in(node.netns()).unwrap().links().unwrap();
    assert!(links.iter().all(|link| link.kind != "ifb"), "{links:?}");
}
