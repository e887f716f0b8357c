//! The chained plugin `portmap`, by packets.

use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, datagram};

use super::*;

/// Rows: PMP-executable, PMP-from-everywhere.
#[test]
fn a_port_of_the_node_leads_to_the_pod_from_everywhere_until_its_del() {
    let scene = Scene::new();
    let ports = portmap(&[(8080, 80)], &json!({}));
    // If bridges pass their frames to the packet filter, the pod's packets return to it by the port that they left
    // by.
    let chain = [scene.bridge(&json!({"hairpinMode": true})), ports.clone()];
    let a = scene.add("a", &chain);
    assert_eq!(a.results[1], a.results[0]);
    let b = scene.add("b", &chain[..1]);
    let [v4, v6] = a.addresses();
    let _echoes = [v4, v6].map(|address| Echo::serve(&a.namespace, SocketAddr::new(address, 80)).unwrap());
    scene.check(&a);
    // The same ADD again.
    scene.runtime.after("CHECK", a.call(), &ports, a.result()).unwrap();
    let again = scene.runtime.add(a.call(), &with_result(&ports, &a.results[0])).unwrap();
    assert_eq!(again, a.results[1]);
    for family in [0, 1] {
        let node = at(NODE[family], 8080);
        for (who, from) in [
            ("outside", &scene.outside),
            ("the node", scene.node()),
            ("b", &b.namespace),
            ("a", &a.namespace),
        ] {
            assert!(connects(from, node, PATIENCE), "{who} to {node}");
        }
    }
    assert!(connects(scene.node(), at("127.0.0.1", 8080), PATIENCE));
    // The pod is still reached by its own port, and other ports of the node are the node's.
    assert!(connects(&scene.outside, SocketAddr::new(v4, 80), PATIENCE));
    assert!(!connects(&scene.outside, at(NODE[0], 8081), SILENCE));
    // DEL by a runtime that has lost its state: no ports, no result, no namespace.
    let gone = Call { netns: Path::new("/run/netns/nosuch"), ..a.call() };
    let bare = config("1.1.0", "portmap", &json!({}));
    for _ in 0..2 {
        let answer = scene.runtime.run("DEL", gone, &bare).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
        assert!(!connects(&scene.outside, at(NODE[0], 8080), SILENCE));
    }
    scene.assert_table_is_gone();
    assert_eq!(scene.loopback_by("br0"), "0");
}

/// Rows: PMP-through.
#[test]
fn what_passes_through_the_node_to_the_same_port_is_left_alone() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({})), portmap(&[(8080, 80)], &json!({}))]);
    let b = scene.add("b", &[scene.bridge(&json!({}))]);
    let [v4, _] = b.addresses();
    let _echo = Echo::serve(&a.namespace, SocketAddr::new(a.addresses()[0], 80)).unwrap();
    // Port 8080 of the other pod is not served, and the first pod is not reached by it.
    assert!(!connects(&scene.outside, SocketAddr::new(v4, 8080), SILENCE));
    let outside = Echo::serve(&scene.outside, at(OUTSIDE[0], 8080)).unwrap();
    assert!(connects(&b.namespace, outside.address(), PATIENCE));
}

/// Rows: PMP-snat, PMP-masqAll.
#[test]
fn who_is_masqueraded_on_the_way_is_as_the_keys_say() {
    let rows = [
        // Outside, the pod's neighbour, the node's loopback; the source addresses that the pod sees for the first
        // two.
        (json!({}), Some("192.0.2.2"), Some("10.1.0.1"), true),
        (json!({"masqAll": true}), Some("10.1.0.1"), Some("10.1.0.1"), true),
        (json!({"snat": false}), Some("192.0.2.2"), None, false),
    ];
    for (keys, outside, neighbour, by_loopback) in rows {
        let scene = Scene::new();
        let a = scene.add("a", &[scene.bridge(&json!({})), portmap(&[(8080, 80)], &keys)]);
        let b = scene.add("b", &[scene.bridge(&json!({}))]);
        let served = at(POD[0], 80);
        let by = |from: &Namespace, to: &str| seen(&a.namespace, served, from, at(to, 8080));
        let address = |text: Option<&str>| text.map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(by(&scene.outside, NODE[0]), address(outside), "{keys}");
        if neighbour.is_some() {
            assert_eq!(by(&b.namespace, NODE[0]), address(neighbour), "{keys}");
        }
        assert_eq!(by(scene.node(), "127.0.0.1").is_some(), by_loopback, "{keys}");
        let six = |from: &Namespace| seen(&a.namespace, at(POD[1], 80), from, at(NODE[1], 8080));
        let expected = if keys["masqAll"] == true { GATEWAY[1] } else { OUTSIDE[1] };
        assert_eq!(six(&scene.outside), address(Some(expected)), "{keys}");
        scene.check(&a);
        scene.del(&a);
        scene.assert_table_is_gone();
    }
}

/// Rows: PMP-one-holder.
#[test]
fn a_port_of_the_node_has_one_pod() {
    let scene = Scene::new();
    let chain = [scene.bridge(&json!({})), portmap(&[(8080, 80)], &json!({}))];
    let a = scene.add("a", &chain);
    let b = scene.add("b", &chain[..1]);
    let taken = scene.runtime.run("ADD", b.call(), &with_result(&chain[1], b.result())).unwrap();
    let told = "hostPort 8080/tcp (IPv4) is taken: container a, interface eth0 has it";
    assert_eq!(refused(&taken), (11, told));
    // The refused ADD has left nothing, and its DEL does not affect the other.
    scene.runtime.after("DEL", b.call(), &chain[1], b.result()).unwrap();
    scene.check(&a);
    let elements = scene.table().elements().len();
    scene.runtime.after("DEL", a.call(), &chain[1], a.result()).unwrap();
    let added = scene.runtime.add(b.call(), &with_result(&chain[1], b.result())).unwrap();
    assert_eq!(&added, b.result());
    assert_eq!(scene.table().elements().len(), elements);
    let _echo = Echo::serve(&b.namespace, SocketAddr::new(b.addresses()[0], 80)).unwrap();
    assert!(connects(&scene.outside, at(NODE[0], 8080), PATIENCE));
}

/// Rows: PMP-udp.
#[test]
fn datagrams_reach_the_pod_that_has_the_port_now() {
    let scene = Scene::new();
    let mapping = json!([{"hostPort": 5353, "containerPort": 53, "protocol": "udp"}]);
    let ports = config("1.1.0", "portmap", &json!({"runtimeConfig": {"portMappings": mapping}}));
    let chain = [scene.bridge(&json!({})), ports];
    for container in ["a", "b"] {
        let pod = scene.add(container, &chain);
        let _echo = Echo::serve(&pod.namespace, SocketAddr::new(pod.addresses()[0], 53)).unwrap();
        // From the same port each time, as a resolver may: the kernel already knows a connection to the previous pod.
        let reached = scene.outside.run(|| {
            let socket = std::net::UdpSocket::bind((OUTSIDE[0], 40000)).unwrap();
            socket.connect((NODE[0], 5353)).unwrap();
            netattach_tests::traffic::echoed(&socket, b"ping", PATIENCE)
        });
        assert!(reached, "{container}");
        assert!(datagram(&scene.outside, at(NODE[0], 5353), PATIENCE).unwrap());
        scene.del(&pod);
    }
    scene.assert_table_is_gone();
}

/// Rows: PMP-refused, PMP-backend, PMP-markMasqBit, PMP-externalSetMarkChain, PMP-conditions.
#[test]
fn what_portmap_cannot_carry_out_is_refused_by_its_key() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({}))]);
    let refusal = |keys: Value| {
        let config = with_result(&portmap(&[(8080, 80)], &keys), a.result());
        let answer = scene.runtime.run("ADD", a.call(), &config).unwrap();
        let (code, msg) = refused(&answer);
        (code, msg.to_owned())
    };
    for (key, value) in [
        ("externalSetMarkChain", json!("KUBE-MARK-MASQ")),
        ("conditionsV4", json!(["-s", "192.0.2.0/24"])),
        ("conditionsV6", json!(["!", "-d", "2001:db8::/32"])),
    ] {
        let (code, msg) = refusal(json!({ key: value }));
        assert!(code == 2 && msg.starts_with(&format!("key {key}: ")), "{code} {msg}");
    }
    for (keys, told) in [
        (json!({"backend": "ebtables"}), "key backend: \"ebtables\" is neither nftables nor iptables"),
        (json!({"markMasqBit": 32}), "key markMasqBit: 32 is no bit of a mark: 0 to 31"),
        (
            json!({"runtimeConfig": {"portMappings": [{"hostPort": 70000, "containerPort": 80}]}}),
            "key runtimeConfig.portMappings: element 0: hostPort must be a port from 1 to 65535",
        ),
    ] {
        assert_eq!(refusal(keys), (7, told.to_owned()));
    }
    let alone = scene.runtime.run("ADD", a.call(), &portmap(&[(8080, 80)], &json!({}))).unwrap();
    assert_eq!(refused(&alone), (7, "key prevResult: missing, and portmap can only follow another plugin"));
    scene.assert_table_is_gone();
    // Keys for the only implementation.
    for keys in [json!({"backend": "iptables", "markMasqBit": 0}), json!({"backend": "nftables"})] {
        let config = with_result(&portmap(&[(8080, 80)], &keys), a.result());
        assert_eq!(&scene.runtime.add(a.call(), &config).unwrap(), a.result());
    }
    scene.del(&a);
    // The bridge's own DEL leaves the elements of `portmap` to that.
    assert!(!scene.table().elements().is_empty());
}

/// Rows: PMP-check, PMP-gc, PMP-status.
#[test]
fn check_gc_and_status_look_at_the_table() {
    let scene = Scene::new();
    let chain = |port: u16| [scene.bridge(&json!({})), portmap(&[(port, 80)], &json!({}))];
    let (a, b) = (scene.add("a", &chain(8080)), scene.add("b", &chain(8081)));
    let other = config("1.1.0", "portmap", &json!({"name": "other"}));
    let gc = |config: &Value, valid: Value| {
        let mut config = config.clone();
        config["cni.dev/valid-attachments"] = valid;
        let answer = scene.runtime.run("GC", a.call(), &config).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    };
    let plugin = config("1.1.0", "portmap", &json!({}));
    // GC of another network, and with all attachments of this one.
    gc(&other, json!([]));
    gc(&plugin, json!([{"containerID": "a", "ifname": "eth0"}, {"containerID": "b", "ifname": "eth0"}]));
    scene.check(&a);
    gc(&plugin, json!([{"containerID": "b", "ifname": "eth0"}]));
    scene.check(&b);
    let lost = scene.runtime.run("CHECK", a.call(), &with_result(&a.chain[1], a.result())).unwrap();
    let (_, msg) = refused(&lost);
    assert!(msg.ends_with("table netattach-cni lacks an element of set ports4"), "{msg}");
    // Another process removes a rule: the next ADD rebuilds the table with its contents.
    let flush =
        || Command::new("nft").args(["flush", "chain", "inet", nat::SHARED_TABLE, "prerouting"]).status();
    assert!(scene.node().run(flush).unwrap().success());
    let without = scene.runtime.run("CHECK", b.call(), &with_result(&b.chain[1], b.result())).unwrap();
    let (_, msg) = refused(&without);
    assert!(msg.ends_with("table netattach-cni lacks chains or rules"), "{msg}");
    let c = scene.add("c", &chain(8082));
    scene.check(&b);
    scene.check(&c);
    let answer = scene.runtime.run("STATUS", a.call(), &plugin).unwrap();
    assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    let text = config("1.1.0", "portmap", &json!({"externalSetMarkChain": "X"}));
    assert_eq!(refused(&scene.runtime.run("STATUS", a.call(), &text).unwrap()).0, 2);
    gc(&plugin, json!([]));
    scene.assert_table_is_gone();
}
