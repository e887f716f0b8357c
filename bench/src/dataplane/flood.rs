//! The cost of a flood of new flows from one pod to two others, with and without the limit of new flows per attachment.
//!
//! The flood has a processor of its own, as its packets are handled where they are sent: the others lose only on
//! resources that they share with it. Part of that loss any load would cause; so the same packets are also sent as one
//! flow, and the difference to that is the effect of the flow table. Every packet is a TCP SYN, made by XDP in the
//! kernel.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use super::Options;
use super::generator::{Generator, Station, receive_from_xdp};
use super::load::{self, Kind, Route, stay_on};
use super::paths::{PORTS, PREFIX, address_of, many_ports, policy, two};
use crate::Series;
use crate::agent::{self, Agent, NAMESPACE};
use crate::document;
use crate::pods::{Node, Pod, in_namespace, joined, make_directory};

/// Number of pods that [`measure`] needs.
pub(super) const PODS: usize = 8;
/// Rules of the server's policy.
const RULES: u32 = 10;
/// Processor of the flood; [`load::sample`] has the first.
const PROCESSOR: usize = 1;
/// How long the flood runs before the measurement.
const HEAD_START: Duration = Duration::from_millis(100);

/// The results. Connections per second, in the order of the columns.
#[derive(Serialize)]
pub(super) struct Flood {
    /// Without a flood.
    quiet: Series,
    /// With a flood of packets of one flow.
    one_flow: Series,
    /// With a flood of new flows, and `newFlowsPerSecond` at its default.
    limited: Series,
    /// With a flood of new flows, and `newFlowsPerSecond: 0`.
    unlimited: Series,
    /// Packets per second of the floods, in the same order.
    packets: [Series; 3],
}

/// One agent with its pods.
struct Side {
    agent: Agent,
    client: Pod,
    server: Pod,
    flooder: Pod,
    /// Source and destination of the flood.
    ends: [Station; 2],
    network: u8,
}

/// Takes all three samples in turn, round by round.
///
/// # Errors
/// There is one processor only, or something cannot be set up.
pub(super) fn measure(
    node: &Node,
    pods: &mut impl Iterator<Item = Pod>,
    options: &Options,
    note: &mut dyn FnMut(&str),
) -> anyhow::Result<Flood> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    ensure!(processors > PROCESSOR, "the flood needs a second processor");
    let limited = Side::new(node, pods, "limited", 130, &json!({}))?;
    let unlimited = Side::new(node, pods, "unlimited", 140, &json!({"newFlowsPerSecond": 0}))?;
    let mut ports = PORTS.cycle();
    let mut port = || ports.next().unwrap_or(*PORTS.start());
    // These do not count: they resolve addresses and warm caches.
    for side in [&limited, &unlimited] {
        side.sample(port(), Duration::from_millis(50))?;
        side.flooded(Flows::Many, port(), Duration::from_millis(50))?;
    }
    let mut quiet = Vec::new();
    let mut floods = [(&limited, Flows::One), (&limited, Flows::Many), (&unlimited, Flows::Many)]
        .map(|(side, flows)| (side, flows, Vec::new(), Vec::new()));
    for round in 1..=options.rounds.get() {
        note(&format!("round {round} of {}", options.rounds));
        quiet.push(limited.sample(port(), options.sample)?);
        for (side, flows, rates, packets) in &mut floods {
            let (rate, sent) = side.flooded(*flows, port(), options.sample)?;
            rates.push(rate);
            packets.push(sent);
        }
    }
    let [one, with, without] =
        floods.map(|(_, _, rates, packets)| (Series::new(rates), Series::new(packets)));
    Ok(Flood {
        quiet: Series::new(quiet),
        one_flow: one.0,
        limited: with.0,
        unlimited: without.0,
        packets: [one.1, with.1, without.1],
    })
}

/// The flows of a flood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flows {
    /// Packets of one flow.
    One,
    /// A new flow with every packet.
    Many,
}

impl Side {
    fn new(
        node: &Node,
        pods: &mut impl Iterator<Item = Pod>,
        name: &str,
        network: u8,
        settings: &Value,
    ) -> anyhow::Result<Self> {
        let ((client, server), (flooder, sink)) = (two(pods)?, two(pods)?);
        let leases = make_directory(&node.scratch().join(format!("leases-{name}")))?;
        let bridge = |bridge: &str, network: u8| {
            let subnet = format!("10.{network}.0.0/{PREFIX}");
            json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": bridge, "capabilities": {"ips": true},
                   "ipam": {"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]}})
        };
        let mut objects: Vec<Value> = agent::namespaces().into();
        objects.push(agent::network(
            "kube-system",
            "default",
            &bridge(&format!("fl{network}d"), network + 1),
        ));
        objects.push(agent::network(NAMESPACE, "data", &bridge(&format!("fl{network}"), network)));
        for pod in [&client, &server, &flooder, &sink] {
            let address = format!("{}/{PREFIX}", address_of(pod, network));
            let wish = json!([{"name": "data", "interface": "net1", "ips": [address]}]);
            objects.push(agent::pod(pod, &wish.to_string()));
        }
        objects.push(policy(&server, "data", RULES, address_of(&client, network)));
        // Only flows of isolated pods are tracked.
        objects.push(egress(&flooder, address_of(&sink, network)));
        let agent = Agent::start_as(node, name, &objects, settings)?;
        for pod in [&client, &server, &flooder, &sink] {
            agent.call("ADD", pod, &pod.new_container())?;
            many_ports(pod)?;
        }
        let attachments = agent.ask(&["attachments"])?;
        let station = |pod: &Pod| {
            let mac = row_of(pod, &attachments)?["mac"].as_str().context("an attachment without MAC")?;
            anyhow::Ok(Station { mac: octets(mac)?, address: address_of(pod, network) })
        };
        let device =
            row_of(&flooder, &attachments)?["host_interface"].as_str().context("no device on the node")?;
        receive_from_xdp(node.namespace(), device)?;
        let ends = [station(&flooder)?, station(&sink)?];
        Ok(Self { agent, client, server, flooder, ends, network })
    }

    /// Connections per second from client to server.
    fn sample(&self, port: u16, time: Duration) -> anyhow::Result<f64> {
        let route = Route {
            client: self.client.namespace(),
            server: self.server.namespace(),
            address: address_of(&self.server, self.network),
        };
        load::sample(&route, Kind::Connections, port, time)
    }

    /// [`Side::sample`] during a flood, and how many packets per second of that came to the node.
    fn flooded(&self, flows: Flows, port: u16, time: Duration) -> anyhow::Result<(f64, f64)> {
        let stop = AtomicBool::new(false);
        let before = self.counted()?;
        let (rate, lasted) = thread::scope(|scope| {
            let flooding = scope.spawn(|| self.flood(flows, &stop));
            thread::sleep(HEAD_START);
            let rate = self.sample(port, time);
            stop.store(true, Ordering::Relaxed);
            anyhow::Ok((rate?, joined(flooding.join())?))
        })?;
        Ok((rate, (self.counted()? - before) as f64 / lasted.as_secs_f64()))
    }

    /// Number of the flooder's packets that the programs have counted.
    fn counted(&self) -> anyhow::Result<u64> {
        let rows = self.agent.ask(&["stats"])?;
        let row = row_of(&self.flooder, &rows)?;
        let dropped = row["dropped"].as_object().into_iter().flat_map(|reasons| reasons.values());
        let passed = &row["sent"]["packets"];
        Ok(dropped.chain([passed]).filter_map(Value::as_u64).sum())
    }

    /// Sends SYNs until `stop` is set; returns the duration.
    fn flood(&self, flows: Flows, stop: &AtomicBool) -> anyhow::Result<Duration> {
        in_namespace(self.flooder.namespace(), || {
            stay_on(PROCESSOR)?;
            let [from, to] = &self.ends;
            let generator = Generator::new("net1", from, to, flows)?;
            let begun = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                generator.send()?;
            }
            Ok(begun.elapsed())
        })
    }
}

/// A pod's row in the output of netattachctl, on the network that is flooded.
fn row_of<'a>(pod: &Pod, rows: &'a Value) -> anyhow::Result<&'a Value> {
    let name = agent::pod_name(pod);
    let is_wanted = |row: &&Value| row["pod"]["name"] == name && row["ifname"] == "net1";
    rows.as_array().into_iter().flatten().find(is_wanted).with_context(|| format!("{name} is not listed"))
}

/// The six octets of a MAC address.
fn octets(mac: &str) -> anyhow::Result<[u8; 6]> {
    let octets: Result<Vec<u8>, _> = mac.split(':').map(|octet| u8::from_str_radix(octet, 16)).collect();
    octets.ok().and_then(|octets| octets.try_into().ok()).with_context(|| format!("{mac} is no MAC address"))
}

/// The pod may open any connection to one address.
fn egress(pod: &Pod, to: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": NAMESPACE, "name": "flooder",
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": "data"},
        },
        "spec": {
            "podSelector": {"matchLabels": {"number": pod.number.to_string()}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": format!("{to}/32")}}]}],
        },
    })
}

/// The figures and what they mean.
pub(super) fn table(flood: &Flood) -> String {
    let row = |name: &str, series: &Series, sent: Option<&Series>| {
        vec![
            name.to_owned(),
            format!("{:.0}", series.median),
            format!("{:.0}-{:.0}", series.minimum, series.maximum),
            format!("{:.2}", series.median / flood.one_flow.median),
            sent.map_or_else(|| "-".to_owned(), |sent| format!("{:.0}", sent.median)),
        ]
    };
    let [one, limited, unlimited] = &flood.packets;
    let rows = [
        row("no flood", &flood.quiet, None),
        row("flood of one flow", &flood.one_flow, Some(one)),
        row("flood of new flows, limited", &flood.limited, Some(limited)),
        row("flood of new flows, not limited", &flood.unlimited, Some(unlimited)),
    ];
    let header = ["", "connections/s", "range", "to one flow", "SYNs/s beside"];
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nConnections per second between two pods of netattach, the server under {RULES} rules, while another pod \
         sends as fast as it can, on a processor of its own. Limited: `newFlowsPerSecond` as by default; not limited: 0."
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_read() {
        assert_eq!(octets("02:00:00:00:0a:ff").unwrap(), [2, 0, 0, 0, 10, 255]);
        for wrong in ["", "02:00:00:00:0a", "02:00:00:00:0a:fg", "02:00:00:00:0a:ff:01"] {
            assert!(octets(wrong).is_err(), "{wrong}");
        }
    }
}
