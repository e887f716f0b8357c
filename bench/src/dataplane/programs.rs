//! The cost of a packet in the programs, run by the kernel on one frame a million times (`BPF_PROG_TEST_RUN`).
//!
//! With the same packet all data is in the processor's caches: these figures show the code, not a node under load. The
//! overhead of measuring is measured by a program that does nothing, and is listed too.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use xtask::progress::{self, Done};

use crate::Series;
use crate::agent::{self, Agent, NAMESPACE};
use crate::bpf::Program;
use crate::pods::{Node, Pod, in_namespace, make_directory};

/// Runs of one sample.
const REPEAT: u32 = 1_000_000;
/// `TC_ACT_UNSPEC`: other programs may run, and the packet goes on.
const PASSES: i32 = -1;
/// `TC_ACT_REDIRECT`: by the fast path.
const REDIRECTED: i32 = 7;
/// `TC_ACT_SHOT`.
const DROPPED: i32 = 2;

const SYN: u8 = 2;
const SYN_FIN: u8 = 3;
const ACK: u8 = 16;

/// One kind of packet.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) packet: &'static str,
    /// Nanoseconds in `na_from_pod`, where the pod sends it.
    pub(super) from_pod: Option<Series>,
    /// Nanoseconds in `na_to_pod`, where the pod receives it.
    pub(super) to_pod: Option<Series>,
}

/// All kinds.
#[derive(Serialize)]
pub(super) struct Report {
    /// Nanoseconds of a program that does nothing: included in every figure.
    pub(super) floor: Series,
    pub(super) packets: Vec<Figures>,
    /// Instructions that the verifier processed, by program.
    pub(super) verified: Vec<(&'static str, u32)>,
}

/// Takes that many samples.
pub(super) fn measure(rounds: u16) -> anyhow::Result<Report> {
    let node = Node::enter()?;
    let mut report = None;
    progress::step("programs", |progress| {
        let pods = node.pods(2)?;
        progress.note("two pods");
        let agent = start(&node, &pods)?;
        // Devices are looked up in the namespace of the calling thread.
        report = Some(in_namespace(node.namespace(), || packets(&agent, &pods, rounds))?);
        Ok(Done::Unchanged(format!("{rounds} times {REPEAT} packets of each kind")))
    })?;
    report.context("nothing was measured")
}

/// The first pod is isolated, the second is not.
fn start(node: &Node, pods: &[Pod]) -> anyhow::Result<Agent> {
    let leases = make_directory(&node.scratch().join("leases"))?;
    let ranges = json!([[{"subnet": "10.110.0.0/16"}], [{"subnet": "fd00:110::/64"}]]);
    let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": ranges});
    let network = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "measured0", "ipam": ipam});
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &network));
    objects.extend(pods.iter().map(|pod| agent::pod(pod, "")));
    let everyone = json!([{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}]);
    let but_one =
        json!([{"ipBlock": {"cidr": "0.0.0.0/0", "except": [format!("{}/32", refused())]}}, everyone[1]]);
    let port = json!([{"protocol": "TCP", "port": PORT}]);
    objects.push(json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": NAMESPACE, "name": "measured",
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": "kube-system/default"},
        },
        "spec": {
            "podSelector": {"matchLabels": {"number": pods[0].number.to_string()}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": but_one, "ports": port}], "egress": [{"to": everyone, "ports": port}],
        },
    }));
    // A million new flows in a second are more than a pod may open.
    let agent = Agent::start_as(node, "programs", &objects, &json!({"newFlowsPerSecond": 0}))?;
    for pod in pods {
        agent.call("ADD", pod, &pod.new_container())?;
    }
    agent.wait_for_fast_path(pods.len())?;
    Ok(agent)
}

/// The port that the policy allows.
const PORT: u16 = 5201;

/// A peer of each family; [`refused`] is one that the policy excepts.
fn peers() -> [IpAddr; 2] {
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))]
}

fn refused() -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 99))
}

/// The attachment's addresses in packets.
struct Target {
    mac: [u8; 6],
    addresses: Vec<IpAddr>,
    device: u32,
}

impl Target {
    fn of(agent: &Agent, pod: &Pod) -> anyhow::Result<Self> {
        let all = agent.ask(&["attachments"])?;
        let name = agent::pod_name(pod);
        let row = all.as_array().and_then(|rows| rows.iter().find(|row| row["pod"]["name"] == name));
        let row = row.with_context(|| format!("{name} is not attached"))?;
        let text =
            |value: &Value| value.as_str().map(str::to_owned).context("netattachctl leaves something out");
        let mut mac = [0; 6];
        for (byte, digits) in mac.iter_mut().zip(text(&row["mac"])?.split(':')) {
            *byte = u8::from_str_radix(digits, 16).context("read a MAC address")?;
        }
        let addresses = row["addresses"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let addresses = addresses.filter_map(|text| text.split('/').next()?.parse().ok()).collect();
        let device = rustix::net::netdevice::name_to_index(
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
                .context("open a socket")?,
            &text(&row["host_interface"])?,
        )
        .context("find the node's end of a veth")?;
        Ok(Self { mac, addresses, device })
    }

    fn address_like(&self, peer: IpAddr) -> anyhow::Result<IpAddr> {
        let own = self.addresses.iter().find(|own| own.is_ipv4() == peer.is_ipv4());
        own.copied().context("the pod has no address of the family")
    }

    /// A frame of the pod to the peer.
    fn sent(&self, peer: IpAddr, ports: (u16, u16), flags: u8) -> anyhow::Result<Vec<u8>> {
        let frame = frame((self.mac, ROUTER), (self.address_like(peer)?, peer), ports, flags);
        frame.context("two families")
    }

    /// A frame of the peer to the pod.
    fn received(&self, peer: IpAddr, ports: (u16, u16), flags: u8) -> anyhow::Result<Vec<u8>> {
        let frame = frame((ROUTER, self.mac), (peer, self.address_like(peer)?), ports, flags);
        frame.context("two families")
    }
}

fn packets(agent: &Agent, pods: &[Pod], rounds: u16) -> anyhow::Result<Report> {
    let (isolated, open) = (Target::of(agent, &pods[0])?, Target::of(agent, &pods[1])?);
    let from_pod = Program::open(&agent.pin("prog/na_from_pod")?)?;
    let to_pod = Program::open(&agent.pin("prog/na_to_pod")?)?;
    let sample = |program: &Program, target: &Target, frame: &[u8], verdict: i32| {
        let (found, _) = program.run(frame, target.device, 1)?;
        ensure!(found == verdict, "the verdict is {found} instead of {verdict}");
        let samples: anyhow::Result<Vec<f64>> =
            (0..rounds).map(|_| Ok(nanoseconds(program.run(frame, target.device, REPEAT)?.1))).collect();
        Ok(Some(Series::new(samples?)))
    };
    let mut packets = Vec::new();
    let [v4, v6] = peers();
    for (packet, peer) in [("not isolated, IPv4", v4), ("not isolated, IPv6", v6)] {
        packets.push(Figures {
            packet,
            from_pod: sample(&from_pod, &open, &open.sent(peer, (40_000, PORT), ACK)?, PASSES)?,
            to_pod: sample(&to_pod, &open, &open.received(peer, (PORT, 40_000), ACK)?, PASSES)?,
        });
    }
    for (packet, peer) in [("established, IPv4", v4), ("established, IPv6", v6)] {
        let (sent, received) = ((40_001, PORT), (40_002, PORT));
        from_pod.run(&isolated.sent(peer, sent, SYN)?, isolated.device, 1)?;
        to_pod.run(&isolated.received(peer, received, SYN)?, isolated.device, 1)?;
        packets.push(Figures {
            packet,
            from_pod: sample(&from_pod, &isolated, &isolated.sent(peer, sent, ACK)?, PASSES)?,
            to_pod: sample(&to_pod, &isolated, &isolated.received(peer, received, ACK)?, PASSES)?,
        });
    }
    // A SYN on a closing flow opens it again: the policy judges it and the flow is written each time. A flow that is
    // not in the table can be opened only once.
    for (packet, peer) in [("opened again, IPv4", v4), ("opened again, IPv6", v6)] {
        packets.push(Figures {
            packet,
            from_pod: sample(&from_pod, &isolated, &isolated.sent(peer, (40_003, PORT), SYN_FIN)?, PASSES)?,
            to_pod: sample(&to_pod, &isolated, &isolated.received(peer, (40_004, PORT), SYN_FIN)?, PASSES)?,
        });
    }
    packets.push(Figures {
        packet: "denied, IPv4",
        from_pod: sample(&from_pod, &isolated, &isolated.sent(v4, (40_005, PORT + 1), SYN)?, DROPPED)?,
        to_pod: sample(&to_pod, &isolated, &isolated.received(refused(), (40_006, PORT), SYN)?, DROPPED)?,
    });
    let [neighbour] = open.addresses.iter().filter(|it| it.is_ipv4()).copied().collect::<Vec<_>>()[..] else {
        anyhow::bail!("a pod has not one IPv4 address");
    };
    let to_neighbour = |flags| {
        let frame = frame(
            (isolated.mac, open.mac),
            (isolated.address_like(neighbour)?, neighbour),
            (40_007, PORT),
            flags,
        );
        frame.context("two families")
    };
    from_pod.run(&to_neighbour(SYN)?, isolated.device, 1)?;
    packets.push(Figures {
        packet: "established, IPv4, to a pod of the bridge",
        from_pod: sample(&from_pod, &isolated, &to_neighbour(ACK)?, REDIRECTED)?,
        to_pod: None,
    });
    let nothing = Program::that_does_nothing()?;
    let frame = open.sent(v4, (40_000, PORT), ACK)?;
    let floor: anyhow::Result<Vec<f64>> =
        (0..rounds).map(|_| Ok(nanoseconds(nothing.run(&frame, open.device, REPEAT)?.1))).collect();
    let verified = ["na_from_pod", "na_to_pod", "na_fast"].map(|name| {
        let program = Program::open(&agent.pin(&format!("prog/{name}"))?)?;
        Ok((name, program.verified_instructions()?))
    });
    let verified: anyhow::Result<Vec<_>> = verified.into_iter().collect();
    Ok(Report { floor: Series::new(floor?), packets, verified: verified? })
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// The other end of the pod's link, or the router behind it.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];

/// An Ethernet frame of a TCP segment without payload, checksums zero; `None` for addresses of two families.
fn frame(
    (from, to): ([u8; 6], [u8; 6]),
    addresses: (IpAddr, IpAddr),
    (source, destination): (u16, u16),
    flags: u8,
) -> Option<Vec<u8>> {
    const TCP: u8 = 6;
    const LENGTH: u16 = 20;
    let mut frame = [to, from].concat();
    match addresses {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend((20 + LENGTH).to_be_bytes());
            frame.extend([0, 0, 0x40, 0, 64, TCP, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(LENGTH.to_be_bytes());
            frame.extend([TCP, 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        _ => return None,
    }
    frame.extend(source.to_be_bytes());
    frame.extend(destination.to_be_bytes());
    frame.extend([0; 8]);
    frame.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    Some(frame)
}
