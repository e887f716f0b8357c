//! The compared paths from one pod to another.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};
use serde_json::{Value, json};
use xtask::child;

use super::load::Route;
use crate::agent::{self, Agent, NAMESPACE};
use crate::bpf::Program;
use crate::netlink::{self, Hook, Netlink};
use crate::pods::{Node, Pod, in_namespace, make_directory};

pub(super) const VETH: &str = "veth pair";
/// The minimum for any program that takes packets from one pod to another.
pub(super) const REDIRECT: &str = "only redirect";
pub(super) const BRIDGE: &str = "Linux bridge";
pub(super) const NETATTACH: &str = "netattach";
/// [`NETATTACH`] without the fast path.
pub(super) const NETATTACH_BRIDGED: &str = "netattach, fastPath false";
/// With a client behind a port of the network's bridge.
pub(super) const WIRE: &str = "netattach, client on the wire";
/// [`WIRE`] without the fast path.
pub(super) const WIRE_BRIDGED: &str = "netattach, client on the wire, fastPath false";
pub(super) const IPTABLES: &str = "iptables";

const BRIDGE_NAME: &str = "plain0";
const BRIDGE_INDEX: u32 = 20;
const NEAR_INDEX: u32 = 1000;
const POD_INDEX: u32 = 10;
pub(super) const PREFIX: u8 = 16;
/// Any group except the default one.
const GROUP: u32 = 7;
/// The policy allows a port range that contains the port of every sample.
pub(super) const PORTS: std::ops::RangeInclusive<u16> = 20_000..=29_999;

/// A path and the policy on it.
pub(super) struct Path {
    /// Its name in the table.
    pub(super) name: &'static str,
    /// Number of peers that the server's policy allows, the client last; `None` without a policy.
    pub(super) rules: Option<u32>,
    client: Pod,
    server: Pod,
    address: Ipv4Addr,
}

impl Path {
    pub(super) fn route(&self) -> Route<'_> {
        Route { client: self.client.namespace(), server: self.server.namespace(), address: self.address }
    }
}

/// Two pods at the ends of one veth.
pub(super) fn veth(mut pods: impl Iterator<Item = Pod>) -> anyhow::Result<Path> {
    let (client, server) = two(&mut pods)?;
    let far = server.namespace();
    in_namespace(client.namespace(), || {
        Netlink::open()?.send(vec![netlink::veth(("net1", POD_INDEX), ("net1", POD_INDEX), None, far, GROUP)])
    })?;
    let address = [&client, &server].map(|pod| set_up(pod, 1));
    let [_, server_address] = address;
    Ok(Path { name: VETH, rules: None, client, server, address: server_address? })
}

/// Two pods with a link to the node each; a program at the node's ends moves packets of one pod into the other's
/// interface.
pub(super) fn redirected(mut pods: impl Iterator<Item = Pod>) -> anyhow::Result<Path> {
    let (client, server) = two(&mut pods)?;
    for pod in [&client, &server] {
        plug_in(pod, None)?;
    }
    for (from, to) in [(&client, &server), (&server, &client)] {
        let program = Program::that_redirects(near_index(to))?;
        let near = near_index(from);
        let requests = vec![netlink::clsact(near), netlink::program(near, Hook::Ingress, 1, program.as_fd())];
        Netlink::open()?.send(requests).context("attach a program that redirects")?;
    }
    set_up(&client, 3)?;
    let address = set_up(&server, 3)?;
    Ok(Path { name: REDIRECT, rules: None, client, server, address })
}

/// Two pods on a bridge of the kernel; the server with that many iptables rules.
pub(super) fn bridged(mut pods: impl Iterator<Item = Pod>, rules: Option<u32>) -> anyhow::Result<Path> {
    let (client, server) = two(&mut pods)?;
    for pod in [&client, &server] {
        plug_in(pod, Some(BRIDGE_INDEX))?;
    }
    let own = set_up(&client, 2)?;
    let address = set_up(&server, 2)?;
    let name = if rules.is_some() { IPTABLES } else { BRIDGE };
    if let Some(rules) = rules {
        in_namespace(server.namespace(), || restore(&iptables_rules(rules, own)))
            .with_context(|| format!("load {rules} rules of iptables"))?;
    }
    Ok(Path { name, rules, client, server, address })
}

/// Makes the bridge of [`bridged`].
pub(super) fn make_bridge() -> anyhow::Result<()> {
    Netlink::open()?.send(vec![netlink::bridge(BRIDGE_NAME, BRIDGE_INDEX)]).context("make a bridge")
}

/// Pairs of pods that netattach attached, whose server has a policy with that many peers; for the first number also
/// on a network without the fast path, and on both with a client that is not a pod of the node.
pub(super) fn netattach(
    node: &Node,
    mut pods: impl Iterator<Item = Pod>,
    rules: &[u32],
) -> anyhow::Result<(Agent, Vec<Path>)> {
    let leases = make_directory(&node.scratch().join("leases"))?;
    let ipam = |network: u8| json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": format!("10.{network}.0.0/16")}]]});
    let bridge = |name: &str, network: u8| json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": name, "capabilities": {"ips": true}, "ipam": ipam(network)});
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &bridge("netattach0", 110)));
    objects.push(agent::network(NAMESPACE, "data", &bridge("netattach1", 120)));
    let mut slow = bridge("netattach2", 120);
    slow["fastPath"] = false.into();
    objects.push(agent::network(NAMESPACE, "slow", &slow));
    let smallest = rules.first();
    let all = rules.iter().map(|count| (NETATTACH, "data", count));
    let others = [(NETATTACH_BRIDGED, "slow"), (WIRE, "data"), (WIRE_BRIDGED, "slow")];
    let others = smallest.into_iter().flat_map(|count| others.map(|(name, network)| (name, network, count)));
    let mut paths = Vec::new();
    for (name, network, count) in all.chain(others) {
        let (client, server) = two(&mut pods)?;
        for pod in attached(name, &client, &server) {
            let wish = json!([{"name": network, "interface": "net1", "ips": [format!("{}/{PREFIX}", address_of(pod, 120))]}]);
            objects.push(agent::pod(pod, &wish.to_string()));
        }
        objects.push(policy(&server, network, *count, address_of(&client, 120)));
        let address = address_of(&server, 120);
        paths.push(Path { name, rules: Some(*count), client, server, address });
    }
    let agent = Agent::start(node, &objects)?;
    let mut fast = 0;
    for path in &paths {
        for pod in attached(path.name, &path.client, &path.server) {
            agent.call("ADD", pod, &pod.new_container())?;
            many_ports(pod)?;
            // The default network as well.
            fast += if [NETATTACH, WIRE].contains(&path.name) { 2 } else { 1 };
        }
        let bridge = match path.name {
            WIRE => "netattach1",
            WIRE_BRIDGED => "netattach2",
            _ => continue,
        };
        plug_in(&path.client, Some(index_of(bridge)?))?;
        give_address(&path.client, address_of(&path.client, 120))?;
    }
    agent.wait_for_fast_path(fast)?;
    agent.wait_for_uplinks(smallest.map_or(0, |_| 1))?;
    Ok((agent, paths))
}

/// The pods of a path that netattach attaches.
fn attached<'a>(path: &str, client: &'a Pod, server: &'a Pod) -> Vec<&'a Pod> {
    if [WIRE, WIRE_BRIDGED].contains(&path) { vec![server] } else { vec![client, server] }
}

/// Makes a pod's `net1` the far end of a veth with the other end on the node, as a port of a bridge if one is given.
fn plug_in(pod: &Pod, bridge: Option<u32>) -> anyhow::Result<()> {
    Netlink::open()?.send(vec![netlink::veth(
        (&format!("plain-{}", pod.number), near_index(pod)),
        ("net1", POD_INDEX),
        bridge,
        pod.namespace(),
        GROUP,
    )])
}

/// Index of the node's end of the veth made by [`plug_in`].
fn near_index(pod: &Pod) -> u32 {
    NEAR_INDEX + u32::from(pod.number)
}

/// Index of a device in the calling thread's namespace.
pub(super) fn index_of(device: &str) -> anyhow::Result<u32> {
    let probe = socket(AddressFamily::INET, SocketType::DGRAM, None).context("open a socket")?;
    name_to_index(&probe, device).with_context(|| format!("find {device}"))
}

pub(super) fn two(pods: &mut impl Iterator<Item = Pod>) -> anyhow::Result<(Pod, Pod)> {
    let mut next = || pods.next().context("too few pods were made");
    Ok((next()?, next()?))
}

/// Gives `net1` the pod's address on the path's own network, and brings it up.
fn set_up(pod: &Pod, network: u8) -> anyhow::Result<Ipv4Addr> {
    let address = address_of(pod, network);
    give_address(pod, address)?;
    Ok(address)
}

fn give_address(pod: &Pod, address: Ipv4Addr) -> anyhow::Result<()> {
    in_namespace(pod.namespace(), || {
        Netlink::open()?
            .send(vec![netlink::address(POD_INDEX, address, PREFIX), netlink::set_up(POD_INDEX)])
            .context("give a pod its address")
    })?;
    many_ports(pod)
}

/// Connections in quick succession need more ports than a pod has by default.
pub(super) fn many_ports(pod: &Pod) -> anyhow::Result<()> {
    in_namespace(pod.namespace(), || {
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "30000 65000")
            .context("widen a pod's range of ports")
    })
}

pub(super) fn address_of(pod: &Pod, network: u8) -> Ipv4Addr {
    let [high, low] = (pod.number + 256).to_be_bytes();
    Ipv4Addr::new(10, network, high, low)
}

/// Unused addresses, followed by the real peer.
fn peers(count: u32, last: Ipv4Addr) -> impl Iterator<Item = Ipv4Addr> {
    strangers(count - 1).chain([last])
}

/// Unused addresses, spread, so that the tables are as deep as with real peers.
pub(super) fn strangers(count: u32) -> impl Iterator<Item = Ipv4Addr> {
    let base = u32::from(Ipv4Addr::new(100, 64, 0, 0));
    (1..=count).map(move |number| Ipv4Addr::from(base | (number.wrapping_mul(37) & 0x3f_ffff)))
}

pub(super) fn policy(server: &Pod, network: &str, count: u32, client: Ipv4Addr) -> Value {
    let blocks: Vec<Value> =
        peers(count, client).map(|peer| json!({"ipBlock": {"cidr": format!("{peer}/32")}})).collect();
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": NAMESPACE, "name": format!("allow-{count}-on-{network}"),
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": network},
        },
        "spec": {
            "podSelector": {"matchLabels": {"number": server.number.to_string()}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": blocks, "ports": [{"protocol": "TCP", "port": PORTS.start(), "endPort": PORTS.end()}]}],
        },
    })
}

/// The same policy as multi-networkpolicy-iptables renders it: known connections first, then a mark for the port, a
/// mark for the peer, and packets with both marks pass.
fn iptables_rules(count: u32, client: Ipv4Addr) -> String {
    let mut rules = format!(
        "*filter\n:INPUT ACCEPT [0:0]\n:POLICY - [0:0]\n:PORTS - [0:0]\n:FROM - [0:0]\n\
         -A INPUT -i net1 -j POLICY\n\
         -A POLICY -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
         -A POLICY -j MARK --set-xmark 0x0/0x30000\n\
         -A POLICY -j PORTS\n-A POLICY -j FROM\n\
         -A POLICY -m mark --mark 0x30000/0x30000 -j RETURN\n-A POLICY -j DROP\n\
         -A PORTS -p tcp -m tcp --dport {}:{} -j MARK --set-xmark 0x10000/0x10000\n",
        PORTS.start(),
        PORTS.end()
    );
    for peer in peers(count, client) {
        let _ = writeln!(rules, "-A FROM -s {peer}/32 -j MARK --set-xmark 0x20000/0x20000");
    }
    rules.push_str("COMMIT\n");
    rules
}

/// Loads rules in the calling thread's namespace.
fn restore(rules: &str) -> anyhow::Result<()> {
    let mut child = Command::new(iptables_restore().context("there is no iptables-restore")?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start iptables-restore")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(rules.as_bytes()).context("write the rules")?;
    }
    let answer = child.wait_with_output().context("wait for iptables-restore")?;
    if !answer.status.success() {
        bail!("iptables-restore refused: {}", String::from_utf8_lossy(&answer.stderr).trim());
    }
    Ok(())
}

/// Returns the legacy variant if both exist: it needs no translation in the kernel.
pub(super) fn iptables_restore() -> Option<PathBuf> {
    child::find("iptables-legacy-restore").or_else(|| child::find("iptables-restore"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_the_last_of_the_peers() {
        let client = Ipv4Addr::new(10, 2, 1, 0);
        let all: Vec<_> = peers(3, client).collect();
        assert_eq!(all, [Ipv4Addr::new(100, 64, 0, 37), Ipv4Addr::new(100, 64, 0, 74), client]);
        assert_eq!(peers(1, client).collect::<Vec<_>>(), [client]);
        let mut many: Vec<_> = peers(100_000, client).collect();
        many.sort();
        many.dedup();
        assert_eq!(many.len(), 100_000);
    }

    #[test]
    fn both_renderings_of_a_policy_have_as_many_peers() {
        let rules = iptables_rules(10, Ipv4Addr::new(10, 2, 1, 0));
        assert_eq!(rules.lines().filter(|line| line.starts_with("-A FROM")).count(), 10);
    }
}
