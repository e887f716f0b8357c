//! podman with our executables alone: no agent, no other plugin.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::{fs, process::Command};

use netattach::netlink::{Handle, nat};
use netattach_tests::machine::podman::Podman;
use netattach_tests::machine::{CONFIGURATIONS, Machine};
use netattach_tests::node::executable;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects};
use netattach_tests::{Namespace, Node};
use serde_json::json;

/// Rows: PMP-podman.
#[test]
fn podman_publishes_ports_and_masquerades_by_our_executables_alone() {
    let test = "podman_publishes_ports_and_masquerades_by_our_executables_alone";
    let node = Node::new(&[]).unwrap();
    let outside = node.add_outside().unwrap();
    let Some(machine) = Machine::new(test, node).unwrap() else { return };
    let own = executable("netattach-cni").unwrap();
    for plugin in ["bridge", "host-local", "portmap", "bandwidth", "tuning"] {
        symlink(&own, machine.node.path("cni-bin").join(plugin)).unwrap();
    }
    let list = json!({
        "cniVersion": "1.0.0", "name": "plain",
        "plugins": [
            {
                "type": "bridge", "bridge": "plain0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "bandwidth", "egressRate": 100_000_000, "egressBurst": 10_000_000},
            {"type": "tuning", "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"}}
        ]
    });
    fs::create_dir_all(CONFIGURATIONS).unwrap();
    fs::write(Path::new(CONFIGURATIONS).join("10-plain.conflist"), list.to_string()).unwrap();
    let podman = Podman::set_up(machine).unwrap();
    podman.run_with("web", &["--network", "plain", "--publish", "8080:80"]).unwrap();
    podman.run_with("client", &["--network", "plain"]).unwrap();
    let netns = |container: &str| Namespace::at(Path::new(&podman.netns(container).unwrap())).unwrap();
    let (web, client) = (netns("web"), netns("client"));
    let address = podman.inspect("web", "{{.NetworkSettings.Networks.plain.IPAddress}}").unwrap();
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
    let address = podman.inspect("web", "{{.NetworkSettings.Networks.plain.IPAddress}}").unwrap();
    {
        let _echo = Echo::serve(&again, at(&address, 80)).unwrap();
        assert!(connects(&outside, published, PATIENCE));
    }
    podman.remove("web").unwrap();
    podman.remove("client").unwrap();
    assert!(!connects(&outside, published, SILENCE));
    let node = &podman.machine.node.namespace;
    let rules = node.run(|| Command::new("nft").args(["list", "ruleset"]).output().unwrap());
    assert!(!String::from_utf8_lossy(&rules.stdout).contains(nat::SHARED_TABLE), "{rules:?}");
    let links = Handle::open_in(node.netns()).unwrap().links().unwrap();
    assert!(links.iter().all(|link| link.kind != "ifb"), "{links:?}");
}
