//! `dhcp` in the agent, with the server of busybox: leases from ADD to DEL, extended, lost, and across restarts; and
//! those of the reference's daemon.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use netattach::cni::cache::Key;
use netattach::delegate::ResultCache;
use netattach::ipam::dhcp::MessageKind::{Ack, Decline, Discover, Nak, Offer, Release, Request};
use netattach::netlink::Handle;
use netattach::netns::Netns;
use netattach_tests::dhcp::{Daemon, Heard, Server, busybox};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::{self, has_driver, report_skipped};
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

use crate::differential::assert_differ_as_meant;
use crate::differential::deviations::{LEASED, OF_LEASES};

/// The server's address, and its device.
const SERVER: &str = "10.77.0.1";
const DEVICE: &str = "wire1";
/// The device of the node that a network of kind `host-device` gives to its pod, and the VLAN of one of kind `vlan`.
const CARD: &str = "card";
const VLAN: &str = "5";
/// The Ethernet address of a pod that asks for it.
const FIXED: &str = "02:00:00:00:77:07";
/// How long a lease that is extended every two seconds is watched.
const WHILE: Duration = Duration::from_secs(30);

const USUAL: [&str; 8] = [
    "start 10.77.0.10",
    "end 10.77.0.12",
    "opt subnet 255.255.255.0",
    "opt router 10.77.0.1",
    "opt staticroutes 10.8.0.0/16 10.77.0.9, 10.9.0.0/16 0.0.0.0, 0.0.0.0/0 10.77.0.1",
    "opt dns 10.77.0.1 10.77.0.2",
    "opt domain example.org",
    "opt lease 3600",
];

/// Returns the usual configuration, with leases of that many seconds.
fn lasting(seconds: u32) -> Vec<String> {
    let lease = format!("opt lease {seconds}");
    USUAL[..7].iter().map(|line| (*line).to_owned()).chain([lease]).collect()
}

/// A network with addresses by DHCP, of that kind, and these keys.
fn network(name: &str, kind: &str, keys: &Value) -> Value {
    let mut config = json!({"cniVersion": LEASED, "type": kind, "ipam": {"type": "dhcp"}});
    let (key, value) = match kind {
        "bridge" => ("bridge", "lan0"),
        "host-device" => ("device", CARD),
        _ => ("master", WIRE),
    };
    config[key] = value.into();
    if kind == "vlan" {
        config["vlanId"] = VLAN.parse::<u16>().unwrap().into();
    }
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    manifest::network(NAMESPACE, name, &config)
}

/// A node whose network `leased` is on a link with a server's namespace.
struct Scene {
    node: Node,
    beyond: Namespace,
    busybox: PathBuf,
}

impl Scene {
    /// With a network of that kind: on the link as its parent, `bridge` with the link as a port, or `host-device` with
    /// a device on the link. The server is on the VLAN of a `vlan`.
    fn new(test: &str, kind: &str, keys: &Value, manifests: &[Value]) -> Option<Self> {
        let busybox = busybox(test)?;
        let mut all = vec![network("leased", kind, keys)];
        all.extend(["a", "b"].map(|name| manifest::pod(name, &json!({"app": name}), &json!("leased"))));
        all.extend(manifests.iter().cloned());
        let mut node = Node::new(&all).unwrap();
        node.add_wire().unwrap();
        match kind {
            "bridge" => {
                ip(&node.namespace, &["link", "add", "lan0", "up", "type", "bridge"]).unwrap();
                ip(&node.namespace, &["link", "set", WIRE, "master", "lan0"]).unwrap();
            }
            "host-device" => {
                let card = ["link", "add", "link", WIRE, "name", CARD, "type", "macvlan", "mode", "bridge"];
                ip(&node.namespace, &card).unwrap();
            }
            _ => {}
        }
        let beyond = Namespace::new().unwrap();
        let path = beyond.path().to_string_lossy().into_owned();
        ip(&node.namespace, &["link", "set", DEVICE, "netns", &path]).unwrap();
        if kind == "vlan" {
            ip(&beyond, &["link", "set", DEVICE, "name", "trunk", "up"]).unwrap();
            ip(&beyond, &["link", "add", "link", "trunk", "name", DEVICE, "type", "vlan", "id", VLAN])
                .unwrap();
        }
        ip(&beyond, &["addr", "add", &format!("{SERVER}/24"), "dev", DEVICE]).unwrap();
        ip(&beyond, &["link", "set", DEVICE, "up"]).unwrap();
        node.start().unwrap();
        Some(Self { node, beyond, busybox })
    }

    fn serve<L: AsRef<str>>(&self, lines: &[L]) -> Server {
        let lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
        Server::start(&self.busybox, &self.beyond, DEVICE, &lines).unwrap()
    }

    fn hear(&self) -> Heard {
        Heard::open(&self.beyond, DEVICE).unwrap()
    }

    /// Attaches pod `a`. Returns it, and its address.
    fn leased(&self, heard: &mut Heard) -> (Pod, Ipv4Addr) {
        let pod = Pod::new("a").unwrap();
        self.node.add(&pod).success();
        (pod, heard.await_number(Ack, 1, PATIENCE).unwrap().message.yiaddr)
    }

    /// The records of leases.
    fn records(&self) -> Vec<Value> {
        // The directory does not exist before the first lease.
        let Ok(files) = std::fs::read_dir(self.node.path("state/dhcp")) else { return Vec::new() };
        let read = |path: PathBuf| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        files.map(|file| read(file.unwrap().path())).collect()
    }

    /// The part of a pod's network-status for its network.
    fn status(&self, pod: &Pod) -> Value {
        let status = self.node.status(pod).unwrap();
        let all = status.as_array().unwrap();
        all.iter().find(|one| one["interface"] == "net1").unwrap().clone()
    }

    /// The pod of the network's name from ADD to DEL: what it has, and what was said on the link; without names, which
    /// each network has its own of.
    fn seen(&self, network: &str, heard: &mut Heard) -> Value {
        let (before, releases) = (heard.all().len(), heard.count(Release));
        let pod = Pod::new(network).unwrap();
        self.node.add(&pod).success();
        self.node.check(&pod).success();
        let (addresses, routes) = on_net1(&pod);
        let mut status = self.status(&pod);
        assert_eq!(status["name"].take(), format!("{NAMESPACE}/{network}"));
        let key = Key { network: network.into(), container_id: pod.container.clone(), ifname: "net1".into() };
        let cached = ResultCache::new(self.node.path("cni-cache")).read(&key).unwrap().unwrap();
        let (result, records) = (cached.result.unwrap(), self.records().len());
        self.node.del(&pod).success();
        let released = heard.await_number(Release, releases + 1, PATIENCE).unwrap();
        let client = format!("\0{}/{network}/net1", pod.container);
        assert_eq!(released.message.options.get(61), Some(client.as_bytes()));
        let said = heard.all()[before..].iter().map(|said| format!("{:?}", said.kind));
        json!({
            "addresses": addresses, "routes": routes, "status": status, "records": records,
            "result": {"ips": result["ips"], "routes": result["routes"], "dns": result["dns"]},
            "said": said.collect::<Vec<_>>(),
            "released": {"address": released.message.ciaddr, "to everybody": released.to_everybody},
        })
    }
}

/// Addresses and routes of the pod's interface.
fn on_net1(pod: &Pod) -> (Vec<String>, BTreeSet<String>) {
    let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
    let link = handle.link("net1").unwrap();
    let addresses = handle.addresses(link.index).unwrap().into_iter().filter(|it| it.addr().is_ipv4());
    let routes = handle.routes_of_all_tables_by(link.index).unwrap().into_iter();
    let routes = routes.filter(|route| route.table == Some(254) && route.destination.addr().is_ipv4());
    let routes = routes.map(|route| match route.gateway {
        Some(gateway) => format!("{} via {gateway}", route.destination),
        None => route.destination.to_string(),
    });
    (addresses.map(|address| address.to_string()).collect(), routes.collect())
}

/// Pods have their leases, with all options, and release them.
///
/// Rows: DHCP-lease, DHCP-client, DHCP-request, DHCP-provide, DHCP-dns, DHCP-release.
#[test]
fn a_pod_has_its_lease_from_add_to_del() {
    lease_and_release("a_pod_has_its_lease_from_add_to_del", &["macvlan", "bridge", "host-device"]);
}

/// The same on links without a driver in many kernels.
///
/// Rows: DHCP-lease, DHCP-broadcast.
#[test]
fn a_pod_on_a_link_that_few_kernels_make_has_its_lease_too() {
    let test = "a_pod_on_a_link_that_few_kernels_make_has_its_lease_too";
    let kinds = ["ipvlan", "vlan"];
    if !kinds.into_iter().all(has_driver) {
        return report_skipped(test, "the kernel has not both of ipvlan and vlan");
    }
    lease_and_release(test, &kinds);
}

fn lease_and_release(test: &str, kinds: &[&str]) {
    for &kind in kinds {
        let keys = json!({"ipam": {
            "type": "dhcp", "request": [{"option": "42"}],
            "provide": [{"option": "host-name", "value": "other", "fromArg": "K8S_POD_NAME"}],
        }});
        let Some(scene) = Scene::new(test, kind, &keys, &[]) else { return };
        let _server = scene.serve(&USUAL);
        let mut heard = scene.hear();
        let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
        scene.node.add(&a).success();
        let said: Vec<_> = heard.all().iter().map(|said| said.kind.unwrap()).collect();
        assert_eq!(said, [Discover, Offer, Request, Ack], "{kind}");
        let asked = heard.all()[2].message.options.clone();
        assert_eq!(asked.get(61), Some(format!("\0{}/leased/net1", a.container).as_bytes()));
        assert_eq!((asked.text(12), asked.get(55)), (Some("a"), Some(&[1, 121, 3, 33, 6, 15, 119, 42][..])));
        // This server answers everybody, whatever is asked for, as long as the client has no address.
        let asks_all = [0, 2].map(|number| heard.all()[number].message.broadcast);
        assert_eq!(asks_all, [kind == "ipvlan"; 2], "{kind}");
        let address = heard.all()[3].message.yiaddr;
        let status = scene.status(&a);
        assert_eq!(status["ips"], json!([address]), "{kind}");
        let dns = json!({"nameservers": [SERVER, "10.77.0.2"], "domain": "example.org"});
        assert_eq!(status["dns"], dns, "{kind}");
        let routes = ["10.77.0.0/24", "10.8.0.0/16 via 10.77.0.9", "10.9.0.0/16"].map(str::to_owned).into();
        let (addresses, mut found) = on_net1(&a);
        found.retain(|route| !route.starts_with("0.0.0.0/0"));
        assert_eq!((addresses, found), (vec![format!("{address}/24")], routes), "{kind}");
        assert!(ping(&a.namespace, SERVER.parse().unwrap(), PATIENCE).unwrap(), "{kind}");
        scene.node.check(&a).success();

        // A device and the VLAN of a parent have one pod. The ipvlans of a parent have one Ethernet address, and by
        // that alone this server knows its clients.
        let other = ["macvlan", "bridge"].contains(&kind).then(|| {
            scene.node.add(&b).success();
            heard.await_number(Ack, 2, PATIENCE).unwrap().message.yiaddr
        });
        assert_ne!(Some(address), other, "{kind}");
        let leases = 1 + usize::from(other.is_some());
        assert_eq!(scene.records().len(), leases, "{kind}");
        scene.node.del(&a).success();
        let released = heard.await_number(Release, 1, PATIENCE).unwrap();
        assert_eq!((released.message.ciaddr, released.to_everybody), (address, false), "{kind}");
        assert_eq!(released.message.options.get(61), asked.get(61));
        // A sandbox that the runtime does not list any more.
        scene.node.gc("pods", Some(&[])).success();
        let released = heard.await_number(Release, leases, PATIENCE).unwrap();
        assert_eq!(released.message.ciaddr, other.unwrap_or(address), "{kind}");
        assert_eq!(scene.records(), [] as [Value; 0], "{kind}");
        // Whether the namespaces still exist or not, no message is sent twice.
        scene.node.del(&b).success();
        assert_eq!(heard.count(Release), leases, "{kind}");
    }
}

/// The agent renews with the server itself, at half of the lease time, and continues after a kill. A policy that
/// allows nothing does not prevent that.
///
/// Rows: C84, DHCP-renew, DHCP-restart.
#[test]
fn a_lease_is_extended_while_the_pod_lives_and_across_a_kill() {
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    let silent = manifest::policy("silent", &format!("{NAMESPACE}/leased"), &spec);
    for kind in ["macvlan", "bridge"] {
        let test = "a_lease_is_extended_while_the_pod_lives_and_across_a_kill";
        let manifests = std::slice::from_ref(&silent);
        let Some(mut scene) = Scene::new(test, kind, &json!({}), manifests) else { return };
        let short = lasting(4);
        let _server = scene.serve(&short);
        let mut heard = scene.hear();
        let (pod, address) = scene.leased(&mut heard);
        let renewal = heard.await_number(Request, 2, WHILE).unwrap();
        assert_eq!((renewal.message.ciaddr, renewal.to_everybody), (address, false), "{kind}");
        assert!(heard.await_number(Ack, 3, WHILE).is_some(), "{kind}");
        scene.node.kill().unwrap();
        let before = heard.count(Ack);
        scene.node.start().unwrap();
        assert!(heard.await_number(Ack, before + 3, WHILE).is_some(), "{kind}");
        scene.node.check(&pod).success();
        assert_eq!(on_net1(&pod).0, [format!("{address}/24")], "{kind}");
        assert_eq!((heard.count(Discover), heard.count(Nak)), (1, 0), "{kind}");
        scene.node.del(&pod).success();
        assert_eq!(heard.await_number(Release, 1, PATIENCE).unwrap().message.ciaddr, address, "{kind}");
    }
}

/// An agent that starts after the end of a lease requests it again, and the pod keeps it.
///
/// Rows: DHCP-restart.
#[test]
fn a_lease_that_ended_without_an_agent_is_asked_for_again() {
    let test = "a_lease_that_ended_without_an_agent_is_asked_for_again";
    let Some(mut scene) = Scene::new(test, "macvlan", &json!({}), &[]) else { return };
    let short = lasting(4);
    let _server = scene.serve(&short);
    let mut heard = scene.hear();
    let (pod, address) = scene.leased(&mut heard);
    scene.node.kill().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    let (asked, given) = (heard.count(Request), heard.count(Ack));
    scene.node.start().unwrap();
    let again = heard.await_number(Request, asked + 1, PATIENCE).unwrap();
    assert_eq!(again.message.options.address(50), Some(address));
    assert!(again.message.ciaddr.is_unspecified() && again.to_everybody);
    assert!(heard.await_number(Ack, given + 1, PATIENCE).is_some());
    assert!(eventually(PATIENCE, || scene.node.check(&pod).exit == 0));
    scene.node.del(&pod).success();
}

/// ADD reports the messages that it received, and nothing is left.
///
/// Rows: DHCP-timeout.
#[test]
fn without_an_answer_add_fails_in_time_and_leaves_nothing() {
    let test = "without_an_answer_add_fails_in_time_and_leaves_nothing";
    let Some(scene) = Scene::new(test, "macvlan", &json!({}), &[]) else { return };
    let mut heard = scene.hear();
    let pod = Pod::new("a").unwrap();
    let found = scene.node.add(&pod).failure();
    let said = "attach net1 (shop/leased): lease an address by DHCP in network leased: no lease by DHCP within 10 s: nothing was heard";
    assert_eq!(found, (11, said.to_owned()));
    assert!((3..=5).contains(&heard.count(Discover)), "{:?}", heard.all());
    assert_eq!(scene.records(), [] as [Value; 0]);
    let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
    let names: Vec<String> = handle.links().unwrap().into_iter().map(|link| link.name).collect();
    assert!(!names.contains(&"net1".to_owned()), "{names:?}");
    // The same pod gets its lease once there is a server.
    let _server = scene.serve(&USUAL);
    scene.node.add(&pod).success();
    scene.node.del(&pod).success();
}

/// A live pod's interface is up while its address is requested, and its processes run: their packets are judged.
///
/// Rows: DHCP-judged.
#[test]
fn a_live_pod_that_waits_for_its_lease_sends_in_no_other_name() {
    let test = "a_live_pod_that_waits_for_its_lease_sends_in_no_other_name";
    let late = [manifest::pod("late", &json!({}), &Value::Null)];
    let Some(scene) = Scene::new(test, "bridge", &json!({}), &late) else { return };
    let pod = Pod::new("late").unwrap();
    scene.node.add(&pod).success();
    let mut heard = scene.hear();
    let outside = RawSocket::open(&scene.beyond, DEVICE).unwrap();
    let frame = Packet::between("10.77.0.9", SERVER).udp(1000, 81).frame();
    std::thread::scope(|scope| {
        // No server answers.
        let attaching = scope.spawn(|| scene.node.ctl(&["attach", "shop/late", "leased"]));
        heard.await_number(Discover, 1, PATIENCE).unwrap();
        RawSocket::open(&pod.namespace, "net1").unwrap().send(&frame).unwrap();
        // Messages on the same path keep their order.
        heard.await_number(Discover, 2, PATIENCE).unwrap();
        assert!(!outside.frames().unwrap().contains(&frame));
        let said = attaching.join().unwrap().unwrap_err().to_string();
        assert!(said.contains("no lease by DHCP within 10 s: nothing was heard"), "{said}");
    });
    let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
    let names: Vec<String> = handle.links().unwrap().into_iter().map(|link| link.name).collect();
    assert!(!names.contains(&"net1".to_owned()), "{names:?}");
    scene.node.del(&pod).success();
}

/// A server that does not know the lease refuses it: the pod must not use the address any more (RFC 2131, section
/// 3.1). This server is silent when a running lease should be extended, and refuses one that has ended.
///
/// Rows: DHCP-lost.
#[test]
fn a_refused_lease_is_taken_from_the_pod_and_reported() {
    let test = "a_refused_lease_is_taken_from_the_pod_and_reported";
    let Some(mut scene) = Scene::new(test, "macvlan", &json!({"hostAccess": true}), &[]) else { return };
    ip(&scene.node.namespace, &["addr", "add", "10.77.0.250/24", "dev", WIRE]).unwrap();
    let short = lasting(4);
    let server = scene.serve(&short);
    let mut heard = scene.hear();
    let (pod, address) = scene.leased(&mut heard);
    let node = Netns::open(scene.node.namespace.path()).unwrap();
    let is_led_to = || {
        let routes = Handle::open_in(&node).unwrap().routes().unwrap();
        routes.iter().any(|route| route.destination.to_string() == format!("{address}/32"))
    };
    assert!(is_led_to());
    scene.node.kill().unwrap();
    drop(server);
    std::thread::sleep(Duration::from_secs(5));
    let elsewhere: Vec<&str> = ["start 10.77.0.50", "end 10.77.0.60"]
        .into_iter()
        .chain(short[2..].iter().map(String::as_str))
        .collect();
    let _server = scene.serve(&elsewhere);
    scene.node.start().unwrap();
    assert!(heard.await_number(Nak, 1, WHILE).is_some(), "{:?}", heard.all());
    assert!(eventually(PATIENCE, || on_net1(&pod).0.is_empty()), "{:?}", on_net1(&pod));
    assert!(eventually(PATIENCE, || !is_led_to()), "the node leads nobody there");
    let status = scene.node.whole_status().unwrap().to_string();
    let said = format!("lease of {address}: {SERVER} refuses {address}");
    assert!(status.contains(&said), "{status}");
    assert!(scene.node.check(&pod).exit != 0);
    let asked = heard.count(Request);
    std::thread::sleep(Duration::from_secs(3));
    scene.node.del(&pod).success();
    assert_eq!(
        (heard.count(Request), heard.count(Release)),
        (asked, 0),
        "what is lost is not asked for, nor given back"
    );
    assert_eq!(scene.records(), [] as [Value; 0]);
}

/// No server extends the lease: it ends, and the pod stops using the address.
///
/// Rows: DHCP-renew, DHCP-lost.
#[test]
fn a_lease_that_nobody_extends_ends_on_the_pods_interface() {
    let test = "a_lease_that_nobody_extends_ends_on_the_pods_interface";
    let Some(scene) = Scene::new(test, "bridge", &json!({}), &[]) else { return };
    let short = lasting(6);
    let server = scene.serve(&short);
    let mut heard = scene.hear();
    let pod = Pod::new("a").unwrap();
    scene.node.add(&pod).success();
    drop(server);
    let problem = || scene.node.whole_status().unwrap().to_string();
    assert!(eventually(WHILE, || problem().contains("not extended, and asked for again: nothing was heard")));
    assert!(eventually(WHILE, || on_net1(&pod).0.is_empty()), "{:?}", on_net1(&pod));
    // By its server first, then by any.
    let asked: Vec<bool> =
        heard.all().iter().filter(|it| it.kind == Some(Request)).map(|it| it.to_everybody).collect();
    assert_eq!((asked.get(1), asked.last()), (Some(&false), Some(&true)), "{asked:?}");
    assert!(problem().contains("its time is over, and no server has extended it"), "{}", problem());
    scene.node.del(&pod).success();
}

/// Permissions of an address on the node are removed with the address.
///
/// Rows: DHCP-lost.
#[test]
fn nothing_passes_for_an_address_whose_lease_is_lost() {
    let test = "nothing_passes_for_an_address_whose_lease_is_lost";
    let Some(mut scene) = Scene::new(test, "bridge", &json!({}), &[]) else { return };
    let bridge = json!({"type": "bridge", "bridge": "lan0", "ipam": {"type": "dhcp"}});
    let list = json!({"cniVersion": "1.0.0", "plugins": [bridge, {"type": "firewall"}]});
    scene.node.write("walled", &manifest::network(NAMESPACE, "walled", &list)).unwrap();
    scene.node.write("pod-walled", &manifest::pod("walled", &json!({}), &json!("walled"))).unwrap();
    let server = scene.serve(&lasting(6));
    let pod = Pod::new("walled").unwrap();
    scene.node.add(&pod).success();
    let passing = |scene: &Scene| Snapshot::take(&scene.node, &[&pod]).unwrap().forwarding;
    assert_ne!(passing(&scene), BTreeSet::new());
    drop(server);
    assert!(eventually(WHILE, || on_net1(&pod).0.is_empty()), "{:?}", on_net1(&pod));
    assert!(eventually(PATIENCE, || passing(&scene).is_empty()), "{:?}", passing(&scene));
    // The next agent reads it from the record of the lease.
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    assert!(eventually(PATIENCE, || passing(&scene).is_empty()), "{:?}", passing(&scene));
    scene.node.del(&pod).success();
}

/// The reference's daemon serves if its socket is named: the plugin of that name is executed, and a pod has of it what
/// it has of the agent's own lease. A policy that allows nothing does not prevent that.
///
/// Rows: DHCP-daemonSocketPath.
#[test]
fn the_references_daemon_leases_as_the_agent_does() {
    let test = "the_references_daemon_leases_as_the_agent_does";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["dhcp"]) else { return };
    let (plugin, directory) = (reference.join("dhcp"), tempfile::tempdir().unwrap());
    let silent = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    let silent = manifest::policy("silent", &format!("{NAMESPACE}/by-daemon"), &silent);
    let [own, other] = ["leased", "by-daemon"]
        .map(|name| manifest::pod(name, &json!({}), &json!([{"name": name, "mac": FIXED}])));
    for kind in ["macvlan", "bridge"] {
        let socket = directory.path().join(kind);
        let capabilities = json!({"mac": true});
        let by_daemon =
            json!({"capabilities": capabilities, "ipam": {"type": "dhcp", "daemonSocketPath": socket}});
        let manifests = [network("by-daemon", kind, &by_daemon), silent.clone(), own.clone(), other.clone()];
        let keys = json!({"capabilities": capabilities});
        let Some(mut scene) = Scene::new(test, kind, &keys, &manifests) else { return };
        // The results of the agent's own plugins are in libcni's cache too.
        scene.node.set("delegation", json!({"resultCache": "all"}));
        scene.node.kill().unwrap();
        scene.node.start().unwrap();
        symlink(&plugin, scene.node.path("cni-bin/dhcp")).unwrap();
        let _daemon = Daemon::start(&plugin, &scene.node.namespace, &socket).unwrap();
        // By the Ethernet address, so that both have the same.
        let fixed = format!("static_lease {FIXED} 10.77.0.11");
        let _server = scene.serve(&[&USUAL[..], &[fixed.as_str()]].concat());
        let mut heard = scene.hear();
        let ours = scene.seen("leased", &mut heard);
        let theirs = scene.seen("by-daemon", &mut heard);
        assert_differ_as_meant(kind, LEASED, [&ours, &theirs], &OF_LEASES);
        assert_eq!(ours["addresses"], json!(["10.77.0.11/24"]), "{kind}");
        let on_link = json!({"dst": "10.9.0.0/16", "gw": "0.0.0.0", "scope": 253});
        assert_eq!(theirs["result"]["routes"][1], on_link, "{kind}");
        assert_eq!(theirs["released"], json!({"address": "10.77.0.11", "to everybody": true}), "{kind}");
        let said = ["Discover", "Offer", "Request", "Ack", "Release"].map(|word| format!("Some({word})"));
        assert_eq!(theirs["said"], json!(said), "{kind}");
        assert_eq!(scene.records(), [] as [Value; 0], "{kind}");
    }
}

/// The server does not notice that the first addresses of its range are in use, as it is that host itself; the pod
/// notices, and gets a free one. With a server that has no other, the ADD fails.
///
/// Rows: DHCP-probe.
#[test]
fn an_address_that_another_host_has_is_declined() {
    let test = "an_address_that_another_host_has_is_declined";
    let keys = json!({"capabilities": {"mac": true}});
    let asks = json!([{"name": "leased", "mac": FIXED}]);
    let fixed = manifest::pod("fixed", &json!({}), &asks);
    for kind in ["macvlan", "bridge"] {
        let Some(scene) = Scene::new(test, kind, &keys, std::slice::from_ref(&fixed)) else { return };
        let busy = ["10.77.0.10", "10.77.0.11"];
        for address in busy {
            ip(&scene.beyond, &["addr", "add", &format!("{address}/32"), "dev", DEVICE]).unwrap();
        }
        let mut heard = scene.hear();
        let server = scene.serve(&USUAL);
        let pod = Pod::new("a").unwrap();
        scene.node.add(&pod).success();
        assert_eq!(on_net1(&pod).0, ["10.77.0.12/24"], "{kind}");
        assert_eq!(scene.status(&pod)["ips"], json!(["10.77.0.12"]), "{kind}");
        scene.node.check(&pod).success();
        let declined = heard.all().iter().filter(|said| said.kind == Some(Decline));
        let declined: Vec<_> = declined.map(|said| said.message.options.address(50).unwrap()).collect();
        assert!(declined.iter().all(|address| busy.contains(&&*address.to_string())), "{declined:?}");
        scene.node.del(&pod).success();
        drop(server);

        let one = format!("static_lease {FIXED} {}", busy[0]);
        let lines: Vec<&str> = USUAL.into_iter().chain([one.as_str()]).collect();
        let _server = scene.serve(&lines);
        let (before, pod) = (heard.count(Decline), Pod::new("fixed").unwrap());
        let (code, told) = scene.node.add(&pod).failure();
        let host = Handle::open_in(scene.beyond.netns()).unwrap().link(DEVICE).unwrap().mac.unwrap();
        let said =
            format!("no lease by DHCP within 10 s: {}, which {SERVER} gives, is in use by {host}", busy[0]);
        assert_eq!((code, told.ends_with(&said)), (11, true), "{kind}: {told}");
        // It is not released either: another host has it.
        assert_eq!((heard.count(Decline) - before, heard.count(Release)), (3, 1), "{kind}");
        assert_eq!(scene.records(), [] as [Value; 0], "{kind}");
    }
}

/// A router that answers ARP for all addresses would make the client decline each, and one pod's tries would use up
/// the server's whole range.
///
/// Rows: DHCP-proxy, DHCP-unprobed.
#[test]
fn a_host_that_answers_for_every_address_is_named_and_costs_the_server_three_of_them() {
    let test = "a_host_that_answers_for_every_address_is_named";
    let ipam = json!({"type": "dhcp", "probe": false});
    let unprobed = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": ipam});
    let manifests = [
        manifest::network(NAMESPACE, "unprobed", &unprobed),
        manifest::pod("trusting", &json!({}), &json!("unprobed")),
    ];
    let Some(scene) = Scene::new(test, "macvlan", &json!({}), &manifests) else { return };
    let range: BTreeSet<Ipv4Addr> = (10..=29).map(|last| Ipv4Addr::new(10, 77, 0, last)).collect();
    for address in &range {
        ip(&scene.beyond, &["addr", "add", &format!("{address}/32"), "dev", DEVICE]).unwrap();
    }
    let lines: Vec<&str> =
        ["start 10.77.0.10", "end 10.77.0.29"].into_iter().chain(USUAL[2..].iter().copied()).collect();
    let _server = scene.serve(&lines);
    let mut heard = scene.hear();
    let host = Handle::open_in(scene.beyond.netns()).unwrap().link(DEVICE).unwrap().mac.unwrap();
    let pod = Pod::new("a").unwrap();
    // A retry gets the same error, and releases the address that it does not use.
    for given_back in 0..3 {
        let (code, told) = scene.node.add(&pod).failure();
        assert_eq!(code, 7, "{told}");
        assert!(told.contains(&format!("every address that DHCP gives is in use by {host}, ")), "{told}");
        assert!(told.contains("with proxy ARP") && told.ends_with("or set ipam.probe to false"), "{told}");
        assert_eq!((heard.count(Decline), heard.count(Release)), (3, given_back), "{told}");
        assert_eq!(scene.records(), [] as [Value; 0]);
    }
    let pod = Pod::new("trusting").unwrap();
    scene.node.add(&pod).success();
    let (addresses, _) = on_net1(&pod);
    let [address] = <[String; 1]>::try_from(addresses).unwrap();
    assert!(range.contains(&address.trim_end_matches("/24").parse().unwrap()), "{address}");
    scene.node.check(&pod).success();
    scene.node.del(&pod).success();
    assert_eq!((heard.count(Decline), heard.count(Release)), (3, 3));
}

/// A record that cannot be read is reported with the remedy, until it is gone, and so is its pod. The same holds for
/// a missing record.
///
/// Rows: DHCP-unreadable.
#[test]
fn a_lease_that_cannot_be_read_is_a_condition() {
    let test = "a_lease_that_cannot_be_read_is_a_condition";
    let Some(mut scene) = Scene::new(test, "macvlan", &json!({}), &[]) else { return };
    // The server does not learn that its addresses are free.
    let many = USUAL.map(|line| if line.starts_with("end ") { "end 10.77.0.40" } else { line });
    let _server = scene.serve(&many);
    // In another format, truncated, empty, missing.
    for left in [Some("{}"), Some("{\"version\":1,"), Some(""), None] {
        let mut heard = scene.hear();
        let (pod, _) = scene.leased(&mut heard);
        scene.node.kill().unwrap();
        let directory = scene.node.path("state/dhcp");
        let file = std::fs::read_dir(directory).unwrap().next().unwrap().unwrap().path();
        match left {
            Some(content) => std::fs::write(&file, content).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        scene.node.start().unwrap();
        let rows = || scene.node.whole_status().unwrap()["source"].as_array().cloned().unwrap_or_default();
        let row = |object: &str| rows().into_iter().find(|row| row["object"] == object);
        let (of_file, of_pod) = (
            format!("lease by dhcp {}", file.display()),
            format!("interface net1 (network leased) of pod {NAMESPACE}/a (container c-a)"),
        );
        let told = row(&of_file).map(|row| row["problem"].as_str().unwrap().to_owned());
        assert_eq!(told.is_some(), left.is_some(), "{left:?}: {:#?}", rows());
        let what = "recreate the pod, and remove the file";
        assert!(told.as_ref().is_none_or(|told| told.contains(what)), "{left:?}: {told:?}");
        let told = row(&of_pod).unwrap_or_else(|| panic!("{left:?}: {:#?}", rows()));
        let problem = told["problem"].as_str().unwrap();
        let names_it = problem.contains(&file.display().to_string());
        assert!(names_it && problem.contains("neither renewed nor given back"), "{left:?}: {problem}");
        scene.node.del(&pod).success();
        assert_eq!([row(&of_file), row(&of_pod)], [None, None], "{left:?}");
        assert!(!file.exists(), "{left:?}");
    }
}
