//! The agent restarts; attached pods are not affected.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aya::maps::{Array, Map, MapData, MapInfo};
use aya::programs::ProgramInfo;
use netattach::bpf::sys;
use netattach_common::{LAYOUT_VERSION, Share};
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{
    Conversation, Echo, PATIENCE, SILENCE, connect, datagram, eventually, exchange,
};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// A node with pods `a` and `b`, each on the default network, a routed one and a macvlan one.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({"app": name}), &json!("storage, lan"))).unwrap();
    }
    node
}

/// Kernel ids of everything that is pinned, by path.
fn ids(snapshot: &Snapshot) -> BTreeMap<String, u32> {
    snapshot
        .pins
        .iter()
        .map(|path| {
            let id = if path.contains("/prog/") {
                ProgramInfo::from_pin(path).unwrap().id()
            } else if path.contains("/link/") {
                sys::link_info(sys::open_pin(path.as_ref()).unwrap().as_fd()).unwrap().id
            } else {
                MapInfo::from_pin(path).unwrap().id()
            };
            (path.clone(), id)
        })
        .collect()
}

#[test]
fn traffic_flows_on_while_the_agent_is_killed_and_restarted() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    let before = Snapshot::take(&node, &[&a, &b]).unwrap();
    let servers: Vec<Echo> = ["10.50.0.3:7", "[fd00:50::3]:7", "10.51.0.3:7", "10.52.0.3:7"]
        .map(|address| Echo::serve(&b.namespace, address.parse().unwrap()).unwrap())
        .into();
    let conversations: Vec<Conversation> =
        servers.iter().map(|server| Conversation::start(&a.namespace, server.address()).unwrap()).collect();
    let mut connection = connect(&a.namespace, servers[0].address(), PATIENCE).unwrap();
    for round in 0..5 {
        node.kill().unwrap();
        exchange(&mut connection, PATIENCE).unwrap();
        connect(&a.namespace, servers[2].address(), PATIENCE).unwrap();
        node.start().unwrap();
        assert_eq!(node.ctl(&["attachments"]).unwrap().as_array().unwrap().len(), 6, "round {round}");
    }
    node.stop().unwrap();
    node.start().unwrap();
    for (server, conversation) in servers.iter().zip(conversations) {
        let (sent, lost) = conversation.end();
        assert!(sent > 10, "{}: only {sent}", server.address());
        assert_eq!(lost, 0, "{} of {sent}", server.address());
    }
    let after = Snapshot::take(&node, &[&a, &b]).unwrap();
    assert_eq!(after, before);
    assert_eq!(ids(&after), ids(&before));
    node.check(&a).success();
    node.check(&b).success();
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

#[test]
fn programs_and_maps_are_those_of_the_agent_before() {
    let mut node = node();
    node.start().unwrap();
    let first = ids(&Snapshot::take(&node, &[]).unwrap());
    assert!(first.keys().any(|path| path.ends_with("prog/na_from_pod")), "{first:?}");
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(ids(&Snapshot::take(&node, &[]).unwrap()), first);
}

#[test]
fn without_an_agent_add_fails_after_a_while_and_del_is_kept_until_it_is_back() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    node.kill().unwrap();
    let late = Pod::new("late").unwrap();
    assert_eq!(node.add(&late).failure().0, 11);

    node.del(&a).success();
    // A runtime repeats its call, with its arguments in another order; one of the pods' namespaces is removed
    // meanwhile.
    let again = node.call("DEL", &a);
    let args: Vec<&str> = again.env["CNI_ARGS"].rsplit(';').collect();
    again.clone().with("CNI_ARGS", &args.join(";")).run().success();
    let del_b = node.call("DEL", &b);
    drop(b);
    del_b.run().success();
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 2);

    node.start().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
    node.del(&a).success();
}

#[test]
fn an_add_finds_the_agent_that_restarts_meanwhile() {
    let mut node = node();
    node.start().unwrap();
    node.kill().unwrap();
    let a = Pod::new("a").unwrap();
    let mut conf = node.cni_config("1.0.0");
    conf["agentWaitSeconds"] = json!(60);
    let add = node.call("ADD", &a).stdin(conf);
    let add = std::thread::spawn(move || add.run());
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(!add.is_finished());
    node.start().unwrap();
    add.join().unwrap().success();
    node.del(&a).success();
}

#[test]
fn a_second_agent_is_refused_and_the_first_goes_on() {
    let mut node = node();
    node.start().unwrap();
    let mut command = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let mut second = node.namespace.run(|| command.spawn()).unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(1));
    let mut log = String::new();
    second.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("is served by another process"), "{log}");
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_second_agent_with_a_socket_of_its_own_gets_neither_records_nor_pins() {
    let mut node = node();
    node.start().unwrap();
    let refused = |state: &str, bpffs: &Path| {
        let first = node.agent_command(&executable("netattachd").unwrap()).unwrap();
        let mut words: Vec<OsString> = first.get_args().map(ToOwned::to_owned).collect();
        let own =
            [("--run-dir", node.path("run2")), ("--state-dir", node.path(state)), ("--bpffs", bpffs.into())];
        for (flag, value) in own {
            let at = words.iter().position(|word| word == flag).unwrap();
            words[at + 1] = value.into();
        }
        let mut second = Command::new(first.get_program());
        second.args(words).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut second = node.namespace.run(|| second.spawn()).unwrap();
        let status = second.wait().unwrap();
        let mut log = String::new();
        second.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert_eq!(status.code(), Some(1), "{log}");
        log
    };
    let elsewhere = node.bpffs().with_extension("second");
    let said = refused("state", &elsewhere);
    let expected = format!("another agent uses state directory {}", node.path("state").display());
    assert!(said.contains(&expected), "{said}");
    assert!(!elsewhere.exists());
    let said = refused("state2", node.bpffs());
    let expected = format!("another agent uses pins in {}", node.bpffs().display());
    assert!(said.contains(&expected), "{said}");
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
    fs::remove_dir_all(node.path("state2")).unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_socket_that_is_removed_is_there_again() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    fs::remove_file(node.socket()).unwrap();
    assert!(eventually(PATIENCE, || node.ctl(&["status"]).is_ok()));
    node.del(&a).success();
    assert!(node.stop().unwrap().contains("socket was removed; created again"));
    assert!(!node.socket().exists());
}

/// A runtime reuses ids: the DEL was for the previous container.
#[test]
fn a_waiting_del_that_is_older_than_its_attachment_is_dropped_whatever_the_clock_says() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    node.del(&a).success();
    let request = fs::read_dir(node.path("state/pending")).unwrap().next().unwrap().unwrap().path();
    let older = fs::read(&request).unwrap();
    fs::remove_file(&request).unwrap();
    node.start().unwrap();
    node.del(&a).success();
    node.add(&a).success();
    node.kill().unwrap();
    // By the wall clock it was written just now.
    fs::write(&request, older).unwrap();
    node.start().unwrap();
    node.check(&a).success();
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 0);
    // A younger request is carried out, even if by the wall clock it predates all pods.
    node.kill().unwrap();
    node.del(&a).success();
    let request = fs::read_dir(node.path("state/pending")).unwrap().next().unwrap().unwrap().path();
    fs::File::open(request).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    node.start().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_the_agent_writes_is_for_root_only() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let mode = |path| fs::metadata(node.path(path)).unwrap().permissions().mode() & 0o777;
    assert!(fs::metadata(node.socket()).unwrap().file_type().is_socket());
    assert_eq!(mode("run/netattach.sock"), 0o600);
    assert_eq!(mode("state/journal"), 0o700);
    assert_eq!(mode("state/journal/c-a@eth0.jsonl"), 0o600);
    node.del(&a).success();
}

#[test]
fn a_sandbox_that_cannot_be_taken_back_keeps_its_numbers_over_a_restart() {
    let mut node = node();
    let not_now = json!({"DEL": {"error": {"code": 11, "msg": "not now"}}});
    node.plugin("stubborn", &not_now).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "stubborn"});
    node.write("stubborn", &network(NAMESPACE, "stubborn", &config)).unwrap();
    node.write("s", &pod("s", &json!({}), &json!("stubborn"))).unwrap();
    node.start().unwrap();
    let (s, a, b) = (Pod::new("s").unwrap(), Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&s).success();
    assert_eq!(node.del(&s).failure().0, 11, "the plugin's own");
    node.kill().unwrap();
    node.start().unwrap();
    node.add(&a).success();
    node.add(&b).success();
    let server = Echo::serve(&b.namespace, "10.50.0.4:7".parse().unwrap()).unwrap();
    connect(&a.namespace, server.address(), PATIENCE).unwrap();

    node.plugin("stubborn", &json!({})).unwrap();
    node.del(&s).success();
    connect(&a.namespace, server.address(), PATIENCE).unwrap();
    node.check(&a).success();
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&s, &a, &b]).unwrap().assert_nothing_is_left();
}

/// A node whose pod `b` may be reached on one port of its routed network, and both pods attached.
fn node_under_policy() -> (Node, Pod, Pod) {
    let mut node = node();
    node.write("only-80", &only_port(80)).unwrap();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    (node, a, b)
}

fn only_port(port: u16) -> Value {
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "UDP", "port": port}]}]
    });
    policy("only-80", "storage", &rules)
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 51, 0, 3], port))
}

/// Makes the pins look like those of another layout: devices run programs whose maps are not found under today's names.
fn age_layout(node: &Node) -> PathBuf {
    let current = node.bpffs().join(format!("v{LAYOUT_VERSION}"));
    let older = node.bpffs().join(format!("v{}", LAYOUT_VERSION - 1));
    fs::rename(&current, &older).unwrap();
    older
}

#[test]
fn attachments_of_another_layout_are_taken_over_while_traffic_flows_and_nothing_of_it_stays() {
    let (mut node, a, b) = node_under_policy();
    let servers = [80, 81].map(|port| Echo::serve(&b.namespace, at(port)).unwrap());
    let over_macvlan = Echo::serve(&b.namespace, "10.52.0.3:7".parse().unwrap()).unwrap();
    let before = Snapshot::take(&node, &[&a, &b]).unwrap();
    let conversations = [&servers[0], &over_macvlan]
        .map(|server| Conversation::start(&a.namespace, server.address()).unwrap());
    let closed = |port| !datagram(&a.namespace, at(port), SILENCE).unwrap();
    assert!(closed(81));

    node.kill().unwrap();
    let older = age_layout(&node);
    assert!(closed(81), "the programs go on");
    node.start().unwrap();
    assert!(closed(81));
    assert!(!older.exists());
    for conversation in conversations {
        let (sent, lost) = conversation.end();
        assert!(sent > 10 && lost == 0, "{lost} of {sent} lost");
    }
    let after = Snapshot::take(&node, &[&a, &b]).unwrap();
    assert_eq!((&after.node, &after.pods, &after.pins), (&before.node, &before.pods, &before.pins));
    assert_eq!(after.dataplane.links, before.dataplane.links);
    assert_eq!(after.dataplane.records, before.dataplane.records);
    // A change reaches the running programs.
    node.write("only-80", &only_port(81)).unwrap();
    assert!(eventually(PATIENCE, || datagram(&a.namespace, at(81), SILENCE).unwrap()));
    assert!(closed(80));
    for pod in [&a, &b] {
        node.check(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

/// Until when segments of unknown connections may be answers, for each attachment with such a deadline.
fn deadlines(node: &Node) -> Vec<u32> {
    let map = MapData::from_pin(node.bpffs().join(format!("v{LAYOUT_VERSION}/na_share"))).unwrap();
    let map: Array<_, Share> = Map::from_map_data(map).unwrap().try_into().unwrap();
    map.iter().map(|share| share.unwrap().answers_until).filter(|until| *until != 0).collect()
}

/// Seconds of the clock used for deadlines.
fn now() -> u32 {
    rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec as u32
}

#[test]
fn a_connection_outlives_a_restart_and_a_lost_table_whichever_end_sends_first() {
    let mut node = node();
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}]
    });
    node.write("only-80", &policy("only-80", "storage, lan", &rules)).unwrap();
    node.write("c", &pod("c", &json!({"app": "c"}), &json!("storage"))).unwrap();
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    node.add(&b).success();
    // Routed, and on a macvlan: the server may open neither of them.
    let connections = [at(80), "10.52.0.3:80".parse().unwrap()].map(|address: SocketAddr| {
        let listener = b.namespace.run(|| TcpListener::bind(address)).unwrap();
        let client = a.namespace.run(|| TcpStream::connect_timeout(&address, PATIENCE)).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        (listener.accept().unwrap().0, client)
    });
    // The end that sends first, after an ordinary restart and after an upgrade.
    for (upgrade, server_first) in [(false, true), (false, false), (true, true), (true, false)] {
        node.kill().unwrap();
        if upgrade {
            age_layout(&node);
        }
        node.start().unwrap();
        for (mut server, mut client) in connections.iter().map(|(server, client)| (server, client)) {
            let (first, second): (&mut &TcpStream, &mut &TcpStream) =
                if server_first { (&mut server, &mut client) } else { (&mut client, &mut server) };
            second.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut byte = [0];
            first.write_all(b"x").unwrap();
            second.read_exact(&mut byte).unwrap();
        }
        let deadlines = deadlines(&node);
        if upgrade {
            // The existing attachments, and for at most a minute.
            let rows = node.ctl(&["attachments"]).unwrap();
            assert_eq!(deadlines.len(), rows.as_array().unwrap().len());
            assert!(deadlines.iter().all(|until| *until <= now() + Share::GRACE), "{deadlines:?}");
        } else {
            assert_eq!(deadlines, Vec::<u32>::new(), "no table was made");
        }
    }
    let c = Pod::new("c").unwrap();
    let before = deadlines(&node);
    node.add(&c).success();
    assert_eq!(deadlines(&node), before, "a new attachment has lost nothing");
    drop(connections);
    for pod in [&a, &b, &c] {
        node.del(pod).success();
    }
    assert!(eventually(PATIENCE, || deadlines(&node).is_empty()), "{:?}", deadlines(&node));
}

#[test]
fn an_agent_that_is_killed_while_it_takes_over_another_layout_leaves_it_to_the_next() {
    let (mut node, a, b) = node_under_policy();
    let _servers = [80, 81].map(|port| Echo::serve(&b.namespace, at(port)).unwrap());
    let agent = Path::new(env!("CARGO_BIN_EXE_crash-agent"));
    let judged = |what: &str| {
        assert!(datagram(&a.namespace, at(80), PATIENCE).unwrap(), "{what}: the open port");
        assert!(!datagram(&a.namespace, at(81), SILENCE).unwrap(), "{what}: the closed port");
    };
    node.kill().unwrap();
    age_layout(&node);
    // One agent counts its points to the end; the others die on the way, each continuing where its predecessor died.
    node.arm(usize::MAX).unwrap();
    node.start_with_points(agent).unwrap();
    node.kill().unwrap();
    let removed = node.points().iter().position(|point| point.starts_with("layout:")).unwrap();
    age_layout(&node);
    // Finished work is not repeated: each agent has fewer points than the first.
    for point in [0, removed / 4, removed / 4, removed / 4, removed / 4] {
        node.arm(point).unwrap();
        assert!(node.start_with_points(agent).is_err(), "the agent does not die at point {point}");
        judged(&format!("killed at point {point}"));
    }
    node.disarm().unwrap();
    node.start().unwrap();
    judged("taken over");
    assert!(!node.bpffs().join(format!("v{}", LAYOUT_VERSION - 1)).exists());
    for pod in [&a, &b] {
        node.check(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}
