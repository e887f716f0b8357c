//! Rules in the shape in which kube-proxy and the hostPort plugin write them.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

/// One port of a Service with one endpoint, for TCP and UDP.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) name: String,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) backend: SocketAddr,
    /// The node's range of pods: clients outside of it are masqueraded.
    pub(super) pods: String,
    pub(super) node_port: Option<u16>,
    pub(super) host_port: Option<u16>,
    pub(super) external: Option<IpAddr>,
}

/// `iptables-restore` input of kube-proxy in its mode `iptables`, and of portmap for host ports.
pub(super) fn kube_proxy(services: &[Service]) -> String {
    let (mut chains, mut rules, mut node_ports) = (String::new(), String::new(), String::new());
    let mut number = 0;
    for service in services {
        for protocol in ["tcp", "udp"] {
            number += 1;
            // Writing to memory cannot fail.
            let _ = one(service, protocol, number, &mut chains, &mut rules, &mut node_ports);
        }
    }
    format!(
        "*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment \"kubernetes forwarding rules\" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
{chains}-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
{rules}-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
{node_ports}COMMIT
"
    )
}

fn one(
    service: &Service,
    protocol: &str,
    number: u32,
    chains: &mut String,
    rules: &mut String,
    node_ports: &mut String,
) -> std::fmt::Result {
    let Service { name, address, port, backend, pods, .. } = service;
    let whole = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
    let bits = whole(address);
    // Chains are named by a digest of 16 letters.
    let [svc, sep, ext] = ["SVC", "SEP", "EXT"].map(|kind| format!("KUBE-{kind}-{number:0>16}"));
    for chain in [&svc, &sep, &ext] {
        writeln!(chains, ":{chain} - [0:0]")?;
    }
    let to_port = format!("-p {protocol} -m comment --comment \"{name}\" -m {protocol} --dport {port}");
    writeln!(rules, "-A KUBE-SERVICES -d {address}/{bits} {to_port} -j {svc}")?;
    if let Some(external) = service.external {
        writeln!(rules, "-A KUBE-SERVICES -d {external}/{bits} {to_port} -j {ext}")?;
    }
    if let Some(node_port) = service.node_port {
        let rule = format!("-p {protocol} -m comment --comment \"{name}\" -m {protocol} --dport {node_port}");
        writeln!(node_ports, "-A KUBE-NODEPORTS {rule} -j {ext}")?;
    }
    if let Some(host_port) = service.host_port {
        let rule = format!("-p {protocol} -m {protocol} --dport {host_port}");
        writeln!(node_ports, "-A CNI-HOSTPORT-DNAT {rule} -j DNAT --to-destination {backend}")?;
    }
    let masquerade =
        "-m comment --comment \"masquerade traffic for external destinations\" -j KUBE-MARK-MASQ";
    writeln!(rules, "-A {ext} {masquerade}\n-A {ext} -j {svc}")?;
    let by_others = format!("! -s {pods} -d {address}/{bits} {to_port}");
    writeln!(rules, "-A {svc} {by_others} -j KUBE-MARK-MASQ")?;
    writeln!(rules, "-A {svc} -m comment --comment \"{name} -> {backend}\" -j {sep}")?;
    let endpoint = backend.ip();
    writeln!(rules, "-A {sep} -s {endpoint}/{bits} -m comment --comment \"{name}\" -j KUBE-MARK-MASQ")?;
    let translated = format!("-p {protocol} -m comment --comment \"{name}\" -m {protocol}");
    writeln!(rules, "-A {sep} {translated} -j DNAT --to-destination {backend}")
}
