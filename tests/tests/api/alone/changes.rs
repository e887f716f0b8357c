//! Changes under attached pods: nodes join and leave, the node gets another range, netattach is removed.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use netattach::netlink::nat::{self, Element, Set};
use netattach_tests::traffic::Ending;

use super::*;

/// A server that notes the addresses that its clients have.
struct Witness {
    address: SocketAddr,
    seen: Arc<Mutex<BTreeSet<IpAddr>>>,
    /// Number of clients that have connected or are about to.
    visits: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Witness {
    fn start(namespace: &Namespace, address: SocketAddr) -> Self {
        let listener = namespace.run(|| TcpListener::bind(address)).unwrap();
        let (seen, stop) = (Arc::<Mutex<BTreeSet<IpAddr>>>::default(), Arc::<AtomicBool>::default());
        let visits = Arc::<AtomicUsize>::default();
        let (noted, ended, all) = (Arc::clone(&seen), Arc::clone(&stop), Arc::clone(&visits));
        let thread = std::thread::spawn(move || {
            for number in 1.. {
                let (_, client) = listener.accept().unwrap();
                noted.lock().unwrap().insert(client.ip());
                if ended.load(Ordering::SeqCst) && number == all.load(Ordering::SeqCst) {
                    return;
                }
            }
        });
        Self { address, seen, visits, stop, thread: Some(thread) }
    }

    /// Connects to it from there; panics if that fails.
    fn visit(&self, from: &Namespace) {
        self.visits.fetch_add(1, Ordering::SeqCst);
        self.connect(from);
    }

    fn connect(&self, from: &Namespace) {
        from.run(|| TcpStream::connect_timeout(&self.address, stretched(PATIENCE))).unwrap();
    }

    /// Returns the addresses of all clients.
    fn end(mut self, from: &Namespace) -> Vec<IpAddr> {
        // The last one is counted before it is known to be the last.
        self.visits.fetch_add(1, Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
        self.connect(from);
        self.thread.take().unwrap().join().unwrap();
        self.seen.lock().unwrap().iter().copied().collect()
    }
}

fn ip_of(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The lists of prefixes that a node has.
fn lists(rig: &Rig, number: usize) -> BTreeSet<Element> {
    rig.nodes[number - 1].namespace.run(|| {
        [Set::Prefixes4, Set::Prefixes6].into_iter().flat_map(|set| nat::elements(set).unwrap()).collect()
    })
}

#[test]
fn pods_of_a_node_that_joins_see_those_that_were_there_by_their_own_address() {
    let mut rig = Rig::new(3);
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    rig.register(2, &["10.244.2.0/24", "fd00:2::/64"]);
    rig.nodes[0].start().unwrap();
    rig.nodes[1].start().unwrap();
    let a = rig.pod(1, "a", &json!({}));
    let result = rig.call("ADD", 1, &a).run().success();
    let own = addresses(&result);
    let (b, others) = rig.attached(2, "b", &json!({}));
    let before = lists(&rig, 1);
    for family in [0, 1] {
        // All the time pods are masqueraded outside and nowhere else, whichever nodes join and leave.
        let outside = Witness::start(&rig.host, at(ip_of(HOSTS[family]), 7000));
        let beside = Witness::start(&b.namespace, at(others[family], 7000));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ending = Ending(&stop);
            let visits = scope.spawn(|| {
                // At least once: the changes may be over before a neighbour is resolved.
                loop {
                    outside.visit(&a.namespace);
                    beside.visit(&a.namespace);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for _ in 0..10 {
                rig.register(3, &["10.244.3.0/24", "fd00:3::/64"]);
                assert!(eventually(PATIENCE, || lists(&rig, 1).len() == before.len() + 2));
                rig.server.delete("nodes", "", &name(3)).unwrap();
                assert!(eventually(PATIENCE, || lists(&rig, 1) == before));
            }
            drop(ending);
            visits.join().unwrap();
        });
        assert_eq!(outside.end(&a.namespace), [ip_of(FIRST_NODE[family])]);
        assert_eq!(beside.end(&a.namespace), [own[family]]);
    }

    rig.register(3, &["10.244.3.0/24", "fd00:3::/64"]);
    rig.nodes[2].start().unwrap();
    let (c, joined) = rig.attached(3, "c", &json!({}));
    assert!(eventually(PATIENCE, || rig.routes(1).len() == 4), "{:?}", rig.routes(1));
    let whole = lists(&rig, 1);
    assert_eq!(whole.len(), before.len() + 2);
    for (own, joined) in own.iter().zip(&joined) {
        assert_eq!(seen_as(&a.namespace, &c.namespace, at(*joined, 8000)), *own);
    }
    rig.call("CHECK", 1, &a).stdin(check_config(&rig, &result)).run().success();

    // It outlasts an agent, with the API down at the next one's start, and a flush of the packet filter.
    rig.nodes[0].kill().unwrap();
    rig.server.stop();
    rig.nodes[0].start_serving().unwrap();
    assert_eq!(lists(&rig, 1), whole);
    rig.nodes[0].namespace.run(nat::uninstall).unwrap();
    assert!(eventually(PATIENCE, || lists(&rig, 1) == whole));
    for (own, joined) in own.iter().zip(&joined) {
        assert_eq!(seen_as(&a.namespace, &c.namespace, at(*joined, 8001)), *own);
    }
    rig.server.start_again().unwrap();

    // The range of a removed node is removed with it.
    rig.server.delete("nodes", "", &name(3)).unwrap();
    assert!(eventually(PATIENCE, || lists(&rig, 1) == before));
    for (number, pod) in [(1, &a), (2, &b), (3, &c)] {
        rig.call("DEL", number, pod).run().success();
    }
    assert!(rig.nodes[0].namespace.run(nat::shape).unwrap().is_empty());
}

/// More nodes than a definition may except networks, of ranges that cannot be merged.
#[test]
fn a_cluster_may_have_more_nodes_than_a_definition_may_except_networks() {
    let mut rig = Rig::new(1);
    rig.register(1, &["10.1.0.0/24", "fd00:1::/64"]);
    for number in 2..=400 {
        let ranges = [format!("10.{}.{}.0/25", number / 256, number % 256), format!("fd00:{number:x}::/64")];
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name(number)},
            "spec": {"podCIDR": ranges[0], "podCIDRs": ranges}
        });
        rig.server.create(&object).unwrap();
    }
    rig.nodes[0].start().unwrap();
    let (pod, _) = rig.attached(1, "a", &json!({}));
    // All but 10.1.0.0/25, which is in the node's own; two of each family are never masqueraded.
    assert!(eventually(PATIENCE, || lists(&rig, 1).len() == 2 * 400 - 1 + 4), "{}", lists(&rig, 1).len());
    rig.call("DEL", 1, &pod).run().success();
}

/// The kubelet never changes the range, but a node may be registered again with another one.
#[test]
fn a_changed_range_is_for_new_pods_and_old_ones_keep_theirs() {
    let mut rig = Rig::new(1);
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    rig.nodes[0].start().unwrap();
    let first = rig.pod(1, "first", &json!({}));
    let result = rig.call("ADD", 1, &first).run().success();
    let of_first = addresses(&result);
    rig.register(1, &["10.244.9.0/24", "fd00:9::/64"]);
    rig.await_trouble(
        1,
        "network builtin",
        "1 attached pods have addresses of 10.244.1.0/24, which is no podCIDR of this node any more: they keep them, and \
         other nodes do not reach them",
    );
    let (second, of_second) = rig.attached(1, "second", &json!({}));
    assert_eq!(of_second, [ip_of("10.244.9.2"), ip_of("fd00:9::2")]);
    let gateways = || {
        let words = ["-o", "address", "show", "dev", "pods0", "scope", "global"];
        let shown = rig.nodes[0].namespace.run(|| Command::new("ip").args(words).output()).unwrap();
        let text = String::from_utf8(shown.stdout).unwrap();
        text.lines()
            .map(|line| line.split_whitespace().nth(3).unwrap().to_owned())
            .collect::<BTreeSet<String>>()
    };
    let of = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<BTreeSet<String>>();
    let both = of(&["10.244.1.1/24", "10.244.9.1/24", "fd00:1::1/64", "fd00:9::1/64"]);
    assert_eq!(gateways(), both);
    rig.call("CHECK", 1, &first).stdin(check_config(&rig, &result)).run().success();
    // Isolated, and the node reaches both all the same, as its probes do.
    let closed = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    for family in [0, 1] {
        // Each other with their own addresses, and outside with the node's.
        for (pod, own, other, address) in
            [(&first, &of_first, &second, of_second[family]), (&second, &of_second, &first, of_first[family])]
        {
            assert_eq!(seen_as(&pod.namespace, &other.namespace, at(address, 8000)), own[family]);
            let outside = seen_as(&pod.namespace, &rig.host, at(ip_of(HOSTS[family]), 8000));
            assert_eq!(outside, ip_of(FIRST_NODE[family]));
        }
    }
    rig.server.create(&manifest::network_policy("closed", &closed)).unwrap();
    for family in [0, 1] {
        for (pod, other, address) in
            [(&first, &second, of_first[family]), (&second, &first, of_second[family])]
        {
            let _echo = Echo::serve(&pod.namespace, at(address, 5432)).unwrap();
            let shut = || !connects(&other.namespace, at(address, 5432), SILENCE);
            assert!(eventually(PATIENCE, shut), "{address}");
            assert!(connects(&rig.nodes[0].namespace, at(address, 5432), PATIENCE), "{address}");
        }
    }
    // The objects that a pod of the earlier range needs are restored, and removed with the last of these pods.
    ip(&rig.nodes[0].namespace, &["address", "del", "10.244.1.1/24", "dev", "pods0"]).unwrap();
    assert!(eventually(PATIENCE, || gateways() == both), "{:?}", gateways());
    rig.call("DEL", 1, &first).run().success();
    let new = of(&["10.244.9.1/24", "fd00:9::1/64"]);
    assert!(eventually(PATIENCE, || gateways() == new), "{:?}", gateways());
    assert!(eventually(PATIENCE, || rig.trouble(1, "network builtin").is_none()));

    // Ranges that overlap cannot be on one bridge: the bridge's routes would conflict.
    rig.register(1, &["10.244.0.0/16", "fd00:9::/64"]);
    rig.await_trouble(
        1,
        "network builtin",
        "until they have ended, no new pod is attached: the ranges overlap",
    );
    let third = rig.pod(1, "third", &json!({}));
    let (_, message) = rig.call("ADD", 1, &third).run().failure();
    assert!(message.contains("bridge pods0 has the address 10.244.9.1/24"), "{message}");
    rig.call("DEL", 1, &second).run().success();
    add_eventually(&rig, 1, &third);
    rig.call("DEL", 1, &third).run().success();
}

#[test]
fn uninstall_takes_routes_tables_and_bridges_along_and_says_so_before() {
    let mut rig = Rig::new(2);
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    rig.register(2, &["10.244.2.0/24", "fd00:2::/64"]);
    rig.nodes[0].start().unwrap();
    let (a, _) = rig.attached(1, "a", &json!({}));
    assert!(eventually(PATIENCE, || rig.routes(1).len() == 2), "{:?}", rig.routes(1));
    let inside = |rig: &Rig, words: &[&str]| ip(&rig.nodes[0].namespace, words).unwrap();
    // Objects of others, however similar.
    inside(&rig, &["link", "add", "pods1", "type", "bridge"]);
    let (bpffs, state) = (rig.nodes[0].bpffs(), rig.nodes[0].path("state"));
    let (bpffs, state) = (bpffs.to_string_lossy().into_owned(), state.to_string_lossy().into_owned());
    rig.nodes[0].stop().unwrap();
    let uninstall = |rig: &Rig, more: &[&str]| {
        let conf = rig.nodes[0].path("net.d").to_string_lossy().into_owned();
        let words = ["uninstall", "--bpffs", &bpffs, "--state-dir", &state, "--cni-conf-dir", &conf];
        let words = [&words[..], more].concat();
        let mut found = rig.nodes[0].namespace.run(|| rig.nodes[0].ctl(&words)).unwrap();
        // Files are for `lifecycle::removal`.
        for key in ["configurations", "state", "executables", "stays"] {
            assert!(found.as_object_mut().unwrap().remove(key).is_some(), "{key}");
        }
        found
    };
    let forced = uninstall(&rig, &["--force", "--dry-run"]);
    let (tables, routes) = (json!(["netattach", "netattach-nat"]), json!(["10.244.2.0/24", "fd00:2::/64"]));
    let found = |dry: bool, forced: bool, tables: &Value, bridges: Value, in_use: Value| {
        json!({
            "bpffs": bpffs, "removed": true, "forced": forced, "dry_run": dry,
            "tables": tables, "routes": routes, "devices": [], "host_links": [], "bridges": bridges, "bridges_in_use": in_use
        })
    };
    assert_eq!(forced, found(true, true, &tables, json!([]), json!(["pods0"])));
    rig.nodes[0].start().unwrap();
    rig.call("DEL", 1, &a).run().success();
    rig.nodes[0].stop().unwrap();
    inside(&rig, &["route", "add", "10.9.0.0/24", "via", "192.0.2.2", "proto", "110", "metric", "7"]);
    let (tables, bridges) = (json!(["netattach"]), json!(["pods0"]));
    assert_eq!(uninstall(&rig, &["--dry-run"]), found(true, false, &tables, bridges.clone(), json!([])));
    assert_eq!(rig.routes(1).len(), 3);
    assert_eq!(uninstall(&rig, &[]), found(false, false, &tables, bridges, json!([])));
    assert_eq!(rig.routes(1), ["10.9.0.0/24 via 192.0.2.2 dev eth0"]);
    inside(&rig, &["link", "show", "pods1"]);
    let gone = rig.nodes[0].namespace.run(|| Command::new("ip").args(["link", "show", "pods0"]).output());
    assert!(!gone.unwrap().status.success());
    let nothing = json!({
        "bpffs": bpffs, "removed": false, "forced": false, "dry_run": false,
        "tables": [], "routes": [], "devices": [], "host_links": [], "bridges": [], "bridges_in_use": []
    });
    assert_eq!(uninstall(&rig, &[]), nothing);
}
