//! Links that a pod creates on the node, and moves to it, by the number that the node's namespace has in its own
//! (`IFLA_TARGET_NETNSID`). The kernel requires the capability in the node's user namespace, which is also the pod's,
//! and does no other check on the node. This is not prevented; the attachment's enforcement level reports it.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use netattach::netlink::Handle;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};
use rustix::thread::CapabilitySet;

use super::*;

/// The reason that is reported for a pod that may have the capability.
const WHY: &str = "programs run on the node, past which a link leads that is made there by the number of its namespace, or a \
                   device of kind ifb, and its container main has CAP_NET_ADMIN";
/// The link that the pod creates on the node, its end in the pod, and an unused address.
const ON_NODE: &str = "way0";
const IN_POD: &str = "way1";
const OWN: &str = "fd00:9::9";
const ATTACKER: &str = "fd00:51::2";
const VICTIM: &str = "fd00:51::3";

/// `RTM_NEWLINK`, `RTM_DELLINK` and `RTM_SETLINK` of `linux/rtnetlink.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Make = 16,
    Delete = 17,
    Set = 19,
}

/// `IFLA_ADDRESS`, `IFLA_IFNAME`, `IFLA_LINKINFO` with `IFLA_INFO_KIND` and `IFLA_INFO_DATA` in it, and `IFLA_TARGET_NETNSID` of
/// `linux/if_link.h`; `VETH_INFO_PEER` of `linux/veth.h`.
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const INFO: u16 = 18;
const KIND: u16 = 1;
const DATA: u16 = 2;
const TARGET: u16 = 46;
const PEER: u16 = 1;

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = [((4 + value.len()) as u16).to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn named(name: &str) -> Vec<u8> {
    attribute(NAME, format!("{name}\0").as_bytes())
}

/// A link (`struct ifinfomsg`), which is up where it is made.
fn link(is_up: bool, attributes: &[Vec<u8>]) -> Vec<u8> {
    let flag = u32::from(is_up).to_ne_bytes();
    [[0_u8; 8].as_slice(), &flag, &flag, &attributes.concat()].concat()
}

/// Sends a request to the kernel as the calling thread, with acknowledgement; a link to create must not exist.
fn ask(verb: Verb, link: &[u8]) -> anyhow::Result<()> {
    const REQUEST_AND_ACKNOWLEDGE: u16 = 0x1 | 0x4;
    const CREATE_EXCLUSIVELY: u16 = 0x400 | 0x200;
    let flags = REQUEST_AND_ACKNOWLEDGE | if verb == Verb::Make { CREATE_EXCLUSIVELY } else { 0 };
    let mut message = ((16 + link.len()) as u32).to_ne_bytes().to_vec();
    message.extend([(verb as u16).to_ne_bytes(), flags.to_ne_bytes()].concat());
    message.extend([0; 8]);
    message.extend(link);
    // Without a protocol it is that of links and routes (`NETLINK_ROUTE`).
    let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0_u8; 4096];
    rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    match i32::from_ne_bytes(answer[16..20].try_into()?) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code).into()),
    }
}

/// Returns the kernel's error number for a process of the pod with only these capabilities.
fn answer(pod: &Pod, kept: CapabilitySet, verb: Verb, link: &[u8]) -> Option<i32> {
    let answer = pod.namespace.run(|| with_only(kept, || ask(verb, link)));
    answer.err().map(|error| error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).unwrap())
}

/// Whether one of some datagrams of the attacker's arrives, which it sends from that address.
fn arrives(attacker: &Pod, victim: &Pod, from: &str) -> bool {
    let [from, to] = [from, VICTIM].map(|address| address.parse::<IpAddr>().unwrap());
    let to = SocketAddr::new(to, DENIED);
    let receiver = victim.namespace.run(|| UdpSocket::bind(to)).unwrap();
    receiver.set_read_timeout(Some(SILENCE)).unwrap();
    let sender = attacker.namespace.run(|| UdpSocket::bind(SocketAddr::new(from, 0))).unwrap();
    for _ in 0..3 {
        sender.send_to(b"denied", to).unwrap();
    }
    receiver.recv_from(&mut [0; 16]).is_ok_and(|(_, sender)| sender.ip() == from)
}

/// Writes definitions of routed veths, each with its addresses and the level that it demands, and pods with one of
/// them, which may administrate their networks or not.
fn write(node: &Node, networks: &[(&str, &[&str], &str)], pods: &[(&str, &str, bool)]) {
    for (name, subnets, demanded) in networks {
        let keys = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(subnets)});
        let definition = network(NAMESPACE, name, &keys);
        node.write(name, &annotated(definition, "netattach.dev/unenforceable", demanded)).unwrap();
    }
    for (name, network, is_admin) in pods {
        let mut pod = pod(name, &json!({"app": name}), &json!(network));
        if *is_admin {
            pod["spec"]["containers"][0]["securityContext"] = json!({"capabilities": {"add": ["NET_ADMIN"]}});
        }
        node.write(name, &pod).unwrap();
    }
}

/// The level of a pod's additional attachment, and why it is not higher.
fn level(node: &Node, pod: &Pod) -> (Value, Value) {
    let rows = node.ctl(&["attachments"]).unwrap();
    let mut rows = rows.as_array().unwrap().iter();
    let row = rows.find(|row| row["pod"]["name"] == pod.name && row["ifname"] == "net1").unwrap();
    (row["enforcement"].clone(), row["enforcement_detail"].clone())
}

/// Rows: C89.
#[test]
fn a_link_that_a_pod_makes_on_the_node_by_its_number_passes_no_program_and_the_level_says_so() {
    let mut node = Node::new(&[]).unwrap();
    let storage = ("storage", &["10.51.0.0/24", "fd00:51::/64"][..], "refuse");
    write(&node, &[storage], &[("attacker", "storage", true), ("victim", "storage", false)]);
    let nothing = json!({"podSelector": {"matchLabels": {"app": "attacker"}}, "policyTypes": ["Egress"]});
    node.write("policy", &policy("attacker", "shop/storage", &nothing)).unwrap();
    node.start().unwrap();
    let [attacker, victim] = ["attacker", "victim"].map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    assert_eq!(level(&node, &attacker), (json!("full-unless-privileged"), json!(WHY)));
    assert_eq!(level(&node, &victim), (json!("full"), Value::Null));
    assert!(!arrives(&attacker, &victim, ATTACKER));

    let (admin, raw) = (CapabilitySet::NET_ADMIN, CapabilitySet::NET_RAW);
    let mut inside = Handle::open_in(attacker.namespace.netns()).unwrap();
    let mut outside = Handle::open_in(node.namespace.netns()).unwrap();
    let number = inside.device_named("net1").unwrap().unwrap().link_netns.unwrap();
    let to_node = attribute(TARGET, &number.to_ne_bytes());

    // A link of its own that it moves there, and that it removes there.
    ip(&attacker.namespace, &["link", "add", "moved0", "type", "veth", "peer", "name", "moved1"]).unwrap();
    let moved = link(false, &[named("moved0"), to_node.clone()]);
    assert_eq!(answer(&attacker, raw, Verb::Set, &moved), Some(libc::EPERM));
    assert_eq!(answer(&attacker, admin, Verb::Set, &moved), None);
    assert!(outside.find_link("moved0").unwrap().is_some());
    assert_eq!(answer(&attacker, admin, Verb::Delete, &moved), None);
    assert_eq!((outside.find_link("moved0").unwrap(), inside.find_link("moved1").unwrap()), (None, None));

    // A link that it creates there, up, with an Ethernet address that it knows.
    let peer = attribute(PEER, &link(false, &[named(IN_POD)]));
    let veth = attribute(INFO, &[attribute(KIND, b"veth\0"), attribute(DATA, &peer)].concat());
    let made = link(true, &[attribute(ADDRESS, &STRANGER.0), named(ON_NODE), veth, to_node.clone()]);
    assert_eq!(answer(&attacker, admin, Verb::Make, &made), None);
    assert!(outside.link(ON_NODE).unwrap().up);
    let (own, victims, next) = (format!("{OWN}/128"), format!("{VICTIM}/128"), STRANGER.to_string());
    for words in [
        &["link", "set", IN_POD, "up"][..],
        &["address", "add", &own, "dev", IN_POD, "nodad"],
        &["-6", "route", "add", &victims, "dev", IN_POD],
        &["-6", "neighbour", "add", VICTIM, "lladdr", &next, "dev", IN_POD, "nud", "permanent"],
    ] {
        let output =
            attacker.namespace.run(|| with_only(admin, || Ok(Command::new("ip").args(words).output()?)));
        let output = output.unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let passes = || arrives(&attacker, &victim, OWN);
    assert!(eventually(PATIENCE, passes), "the control: this is not prevented");
    // None of these packets came by the attacker's own link, whose programs still judge.
    let delete = link(false, &[named(ON_NODE), to_node]);
    assert_eq!(answer(&attacker, admin, Verb::Delete, &delete), None);
    assert!(!arrives(&attacker, &victim, ATTACKER));
    for pod in [&attacker, &victim] {
        node.check(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&attacker, &victim]).unwrap().assert_nothing_is_left();
}

/// Rows: C89.
#[test]
fn a_pod_that_may_make_links_on_the_node_is_not_full_from_its_add_on() {
    let mut node = Node::new(&[]).unwrap();
    let networks = [
        ("storage", &["10.51.0.0/24"][..], "refuse"),
        ("strict", &["10.52.0.0/24"][..], "refuse-unless-full"),
    ];
    let pods = [
        ("admin", "storage", true),
        ("plain", "storage", false),
        ("admin-strict", "strict", true),
        ("plain-strict", "strict", false),
    ];
    write(&node, &networks, &pods);
    let nobody = json!({"podSelector": {}, "policyTypes": ["Egress"]});
    node.write("policy", &policy("nobody", "shop/storage, shop/strict", &nobody)).unwrap();
    node.start().unwrap();
    let [admin, plain, refused, taken] = pods.map(|(name, ..)| Pod::new(name).unwrap());
    for pod in [&admin, &plain, &taken] {
        node.add(pod).success();
    }
    assert_eq!(level(&node, &admin), (json!("full-unless-privileged"), json!(WHY)));
    assert_eq!([&plain, &taken].map(|pod| level(&node, pod).0), ["full", "full"]);
    let (code, said) = node.add(&refused).failure();
    assert!(code == 7 && said.contains(WHY), "{code} {said}");
    for pod in [&admin, &plain, &taken, &refused] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&admin, &plain, &refused, &taken]).unwrap().assert_nothing_is_left();
}
