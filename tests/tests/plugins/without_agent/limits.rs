//! The chained plugin `bandwidth`: devices and their queues, and how fast packets pass.

use std::net::TcpStream;

use netattach::netlink::Handle;
use netattach_tests::other_programs::tc;
use netattach_tests::traffic::stretched;

use super::*;

/// Bits per second, and a burst in bits.
const RATE: u64 = 8_000_000;
const BURST: u64 = 400_000;
/// Bytes that are sent, which take a second.
const BYTES: usize = 1_000_000;

fn bandwidth(keys: &Value) -> Value {
    config("1.1.0", "bandwidth", keys)
}

/// Returns how long it takes until all bytes have arrived from one namespace in another.
fn transfer(from: &Namespace, to: &Namespace, address: SocketAddr) -> Duration {
    let listener = to.run(|| TcpListener::bind(address).unwrap());
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let begun = Instant::now();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            assert_eq!(all.len(), BYTES);
            begun.elapsed()
        });
        let mut stream = from.run(|| TcpStream::connect_timeout(&address, stretched(PATIENCE)).unwrap());
        stream.write_all(&vec![7; BYTES]).unwrap();
        drop(stream);
        received.join().unwrap()
    })
}

/// The intermediate devices of the node.
fn intermediate(scene: &Scene) -> Vec<String> {
    let mut host = Handle::open_in(scene.node().netns()).unwrap();
    host.links().unwrap().into_iter().filter(|link| link.kind == "ifb").map(|link| link.name).collect()
}

/// Rows: BWD-rates, BWD-static-first.
#[test]
fn both_directions_have_the_rate_that_was_asked_for() {
    let scene = Scene::new();
    let chain = [
        scene.bridge(&json!({})),
        bandwidth(&json!({
            "ingressRate": RATE, "ingressBurst": BURST, "egressRate": RATE, "egressBurst": BURST,
            "runtimeConfig": {"bandwidth": {"ingressRate": 1000, "ingressBurst": 8000}}
        })),
    ];
    let pod = scene.add("a", &chain);
    let [v4, _] = pod.addresses();
    scene.check(&pod);
    let devices = intermediate(&scene);
    assert_eq!(devices.len(), 1, "{devices:?}");
    let listed = pod.result()["interfaces"].as_array().unwrap().last().unwrap();
    assert_eq!((&listed["name"], listed.get("sandbox")), (&json!(devices[0]), None));
    // At most a tenth is sent ahead of the rest.
    let (received, sent) = (
        transfer(&scene.outside, &pod.namespace, SocketAddr::new(v4, 80)),
        transfer(&pod.namespace, &scene.outside, at(OUTSIDE[0], 80)),
    );
    for took in [received, sent] {
        assert!(took > Duration::from_millis(700), "{took:?}");
    }
    scene.del(&pod);
    assert_eq!(intermediate(&scene), Vec::<String>::new());
}

/// Rows: BWD-none, BWD-one-direction, BWD-check, BWD-del, BWD-two-interfaces.
#[test]
fn devices_come_with_limits_and_go_with_del() {
    let scene = Scene::new();
    let pod = scene.add("a", &[scene.bridge(&json!({}))]);
    let with = |plugin: &Value| with_result(plugin, pod.result());
    let of_pod = |limits: Value| bandwidth(&json!({"runtimeConfig": {"bandwidth": limits}}));
    for nothing in [bandwidth(&json!({})), of_pod(json!({})), bandwidth(&json!({"ingressRate": 0}))] {
        assert_eq!(&scene.runtime.add(pod.call(), &with(&nothing)).unwrap(), pod.result());
    }
    // Only received packets: no device is needed for that, and no burst.
    let received = of_pod(json!({"ingressRate": RATE}));
    assert_eq!(&scene.runtime.add(pod.call(), &with(&received)).unwrap(), pod.result());
    assert_eq!(intermediate(&scene), Vec::<String>::new());
    let sent = of_pod(json!({"egressRate": RATE, "egressBurst": BURST}));
    // Twice: the second one replaces the leftovers of the first.
    for _ in 0..2 {
        scene.runtime.add(pod.call(), &with(&sent)).unwrap();
        assert_eq!(intermediate(&scene).len(), 1);
    }
    let check = |plugin: &Value| scene.runtime.run("CHECK", pod.call(), &with(plugin)).unwrap();
    for plugin in [&received, &sent] {
        assert_eq!(check(plugin).exit, Some(0), "{plugin}");
    }
    let differs = |plugin: &Value, told: &str| {
        let answer = check(plugin);
        let (_, msg) = refused(&answer);
        assert!(msg.contains(told), "{msg}");
    };
    differs(&of_pod(json!({"ingressRate": 2 * RATE})), "is not paced as asked for");
    differs(&of_pod(json!({"egressRate": 2 * RATE})), "is not paced as asked for");
    // Another interface on the same network.
    let second = Call { ifname: "eth1", ..pod.call() };
    let beside = scene.runtime.add(second, &scene.bridge(&json!({}))).unwrap();
    scene.runtime.add(second, &with_result(&sent, &beside)).unwrap();
    assert_eq!(intermediate(&scene).len(), 2);
    let bare = bandwidth(&json!({}));
    let del = |call: Call<'_>| {
        let answer = scene.runtime.run("DEL", call, &bare).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    };
    del(second);
    assert_eq!(intermediate(&scene).len(), 1);
    assert_eq!(check(&sent).exit, Some(0));
    ip(scene.node(), &["link", "del", &intermediate(&scene)[0]]).unwrap();
    differs(&sent, "is gone");
    scene.runtime.add(pod.call(), &with(&sent)).unwrap();
    // Without the namespace, and again.
    let gone = Call { netns: Path::new("/run/netns/nosuch"), ..pod.call() };
    del(gone);
    del(gone);
    assert_eq!(intermediate(&scene), Vec::<String>::new());
}

/// Rows: BWD-refused, BWD-subnets, BWD-gc.
#[test]
fn what_bandwidth_cannot_carry_out_is_refused_by_its_key() {
    let scene = Scene::new();
    let pod = scene.add("a", &[scene.bridge(&json!({}))]);
    let refusal = |keys: &Value| {
        let answer =
            scene.runtime.run("ADD", pod.call(), &with_result(&bandwidth(keys), pod.result())).unwrap();
        let (code, msg) = refused(&answer);
        (code, msg.to_owned())
    };
    let told = "key bandwidth: ingressBurst without ingressRate".to_owned();
    assert_eq!(refusal(&json!({"ingressBurst": BURST})), (7, told));
    for key in ["shapedSubnets", "unshapedSubnets"] {
        let (code, msg) = refusal(&json!({"ingressRate": RATE, key: ["10.0.0.0/8"]}));
        assert!(code == 2 && msg.starts_with(&format!("key {key}: ")), "{code} {msg}");
    }
    // An interface that has no end on the node.
    run(&pod.namespace, "link add link eth0 name eth7 type macvlan");
    let call = Call { ifname: "eth7", ..pod.call() };
    let limited = bandwidth(&json!({"egressRate": RATE}));
    let answer = scene.runtime.run("ADD", call, &with_result(&limited, pod.result())).unwrap();
    let said = "type: bandwidth: eth7 is not a veth whose other end is on the node";
    assert_eq!(refused(&answer), (7, said));
    assert_eq!(intermediate(&scene), Vec::<String>::new());
    let alone = scene.runtime.run("ADD", pod.call(), &limited).unwrap();
    assert_eq!(refused(&alone), (7, "key prevResult: missing, and bandwidth can only follow another plugin"));

    scene.runtime.add(pod.call(), &with_result(&limited, pod.result())).unwrap();
    let gc = |valid: Value| {
        let mut config = bandwidth(&json!({}));
        config["cni.dev/valid-attachments"] = valid;
        let answer = scene.runtime.run("GC", pod.call(), &config).unwrap();
        assert_eq!(answer.exit, Some(0), "{answer:?}");
        intermediate(&scene).len()
    };
    assert_eq!(gc(json!([{"containerID": "a", "ifname": "eth0"}])), 1);
    assert_eq!(gc(json!([])), 0);
    let status = scene.runtime.run("STATUS", pod.call(), &bandwidth(&json!({}))).unwrap();
    assert_eq!((status.exit, &status.stdout), (Some(0), &Value::Null), "{status:?}");
}

/// Rows: BWD-late-del.
#[test]
fn a_late_del_leaves_the_pod_alone_that_has_the_namespaces_path_now() {
    let scene = Scene::new();
    let both = bandwidth(&json!({
        "ingressRate": RATE, "ingressBurst": BURST, "egressRate": RATE, "egressBurst": BURST
    }));
    let chain = [scene.bridge(&json!({})), both];
    let (a, b) = (scene.add("a", &chain), scene.add("b", &chain));
    assert_eq!(intermediate(&scene).len(), 2);
    let late = Call { container: "a", ..b.call() };
    scene.runtime.after("DEL", late, &chain[1], a.result()).unwrap();
    scene.check(&b);
    let listed = b.result()["interfaces"].as_array().unwrap().last().unwrap();
    assert_eq!(json!(intermediate(&scene)), json!([listed["name"]]));
}

/// Rows: BWD-filter-before.
#[test]
fn what_a_filter_before_ours_would_let_through_is_refused() {
    let scene = Scene::new();
    let pod = scene.add("a", &[scene.bridge(&json!({}))]);
    let end = pod.result()["interfaces"][1]["name"].as_str().unwrap();
    let filter = |verb: &str, priority: u32| {
        let words = format!("filter {verb} dev {end} ingress protocol all prio {priority} u32");
        let words = if verb == "add" { format!("{words} match u32 0 0 flowid 1:1") } else { words };
        tc(scene.node(), &words).unwrap();
    };
    tc(scene.node(), &format!("qdisc add dev {end} clsact")).unwrap();
    filter("add", 50);
    let sent = with_result(&bandwidth(&json!({"egressRate": RATE})), pod.result());
    let answer = scene.runtime.run("ADD", pod.call(), &sent).unwrap();
    let told = format!(
        "{end} has another program's ingress filter of priority 50, which runs before the one that paces packets. See: tc filter show dev {end} ingress"
    );
    assert_eq!(refused(&answer), (7, told.as_str()));
    assert_eq!(intermediate(&scene), Vec::<String>::new());
    // Received packets do not pass it.
    let received = with_result(&bandwidth(&json!({"ingressRate": RATE})), pod.result());
    scene.runtime.add(pod.call(), &received).unwrap();
    filter("del", 50);
    filter("add", 200);
    scene.runtime.add(pod.call(), &sent).unwrap();
    let check = scene.runtime.run("CHECK", pod.call(), &sent).unwrap();
    assert_eq!(check.exit, Some(0), "{check:?}");
}
