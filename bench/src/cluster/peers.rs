//! The delay until a change of a pod of another node is in force here: from the change on the API server to the first
//! packet that passes, or the last one.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use serde::Serialize;
use serde_json::{Value, json};

use super::objects;
use super::rig::Cluster;
use crate::Series;
use crate::agent::NAMESPACE;
use crate::pods::{Pod, in_namespace};

/// The port of the pod.
const PORT: u16 = 9000;
/// Each packet has its own source port, so that each is a new flow: the number of these ports.
const PORTS: u16 = 40_000;
const FIRST_PORT: u16 = 20_000;
/// Pause between packets.
const PAUSE: Duration = Duration::from_micros(500);
/// A change that is not in force after so long counts as lost.
const LOST: Duration = Duration::from_secs(20);
/// If that many packets in a row do not arrive, no further one will.
const SILENCE: u32 = 40;

/// Milliseconds from a change to its effect.
#[derive(Serialize)]
pub(super) struct Delays {
    pub(super) allowed: Series,
    pub(super) denied: Series,
}

/// Pods of other nodes become peers of a pod's policy and cease to be, one after another.
pub(super) fn measure(
    wire: &str,
    pod: &Pod,
    subnet: u8,
    changes: u32,
    cluster: &Cluster,
) -> anyhow::Result<Delays> {
    let mut probe = Probe::open(wire, pod, cluster)?;
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    // The first one does not count, and checks the set-up. None of these is a peer from the start: the pod is in the
    // first group.
    let others = (0..).filter(|number| number % objects::POLICIES != 0).zip(0..=changes);
    for (number, round) in others {
        let source = objects::far_address(subnet, 1, number);
        let group = (number % objects::POLICIES).to_string();
        let label = |group: &str| json!({"metadata": {"labels": {"peers": group}}});
        let change = |patch: &Value| {
            cluster.server.patch("pods", NAMESPACE, &objects::far_name(number), patch).map(drop)
        };
        let became = probe.until_it_passes(&source, || change(&label("0")))?;
        let ceased = probe.until_none_passes(&source, || change(&label(&group)))?;
        if round > 0 {
            allowed.push(became.as_secs_f64() * 1000.0);
            denied.push(ceased.as_secs_f64() * 1000.0);
        }
    }
    Ok(Delays { allowed: Series::new(allowed), denied: Series::new(denied) })
}

/// Sends packets to a pod from wherever, by the wire, and sees which of them arrive.
struct Probe {
    socket: UdpSocket,
    wire: RawSocket,
    mac: [u8; 6],
    address: String,
    next: u16,
    /// When each packet was sent, by its port.
    sent: Vec<Option<Instant>>,
}

impl Probe {
    fn open(wire: &str, pod: &Pod, cluster: &Cluster) -> anyhow::Result<Self> {
        let row = cluster.agent.row_of(pod, "net1")?;
        let text =
            |value: &Value| value.as_str().map(str::to_owned).context("the attachment has no addresses");
        let address = text(&row["addresses"][0])?;
        let address = address.split('/').next().unwrap_or_default().to_owned();
        let mac = text(&row["mac"])?;
        let bytes = mac.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<u8>, _>>();
        let mac = bytes.ok().and_then(|bytes| bytes.try_into().ok()).context("no Ethernet address")?;
        let socket = in_namespace(pod.namespace(), || {
            UdpSocket::bind(("0.0.0.0", PORT)).context("listen in the pod")
        })?;
        socket.set_read_timeout(Some(PAUSE)).context("listen in the pod")?;
        let wire = RawSocket::open_here(wire, 0)?;
        Ok(Self { socket, wire, mac, address, next: 0, sent: vec![None; usize::from(PORTS)] })
    }

    fn send(&mut self, source: &str) -> anyhow::Result<()> {
        self.next = (self.next + 1) % PORTS;
        let mut frame = Packet::between(source, &self.address).udp(FIRST_PORT + self.next, PORT).frame();
        frame[..6].copy_from_slice(&self.mac);
        self.sent[usize::from(self.next)] = Some(Instant::now());
        self.wire.send(&frame)
    }

    /// Returns the packet that arrives next, by the time when it was sent; `None` without one within [`PAUSE`].
    fn receive(&mut self) -> anyhow::Result<Option<Instant>> {
        match self.socket.recv_from(&mut [0; 64]) {
            Ok((_, from)) => {
                let index = from.port().checked_sub(FIRST_PORT).map(usize::from);
                Ok(index.and_then(|index| self.sent.get_mut(index)?.take()))
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(error) => Err(error).context("receive in the pod"),
        }
    }

    fn until_it_passes(
        &mut self,
        source: &str,
        change: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        change()?;
        while began.elapsed() < LOST {
            self.send(source)?;
            if self.receive()?.is_some() {
                return Ok(began.elapsed());
            }
        }
        bail!("{source} became a peer, and is not let through after {} s", LOST.as_secs())
    }

    fn until_none_passes(
        &mut self,
        source: &str,
        change: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        change()?;
        let (mut last, mut silent) = (began, 0);
        while began.elapsed() < LOST {
            self.send(source)?;
            match self.receive()? {
                Some(sent) => {
                    last = last.max(sent);
                    silent = 0;
                }
                None => silent += 1,
            }
            if silent >= SILENCE {
                return Ok(last - began);
            }
        }
        bail!("{source} ceased to be a peer, and is let through after {} s", LOST.as_secs())
    }
}
