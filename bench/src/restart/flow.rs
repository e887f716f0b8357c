//! A steady flow of datagrams from one pod to another.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, anyhow};

use crate::pods::{Pod, in_namespace};

/// Interval of the datagrams.
const PACE: Duration = Duration::from_millis(1);
/// Time limit for a datagram to arrive.
const PATIENCE: Duration = Duration::from_secs(1);
const PORT: u16 = 7007;

/// A flow that continues until [`Flow::end`].
pub(super) struct Flow {
    ending: Arc<AtomicBool>,
    sender: JoinHandle<u64>,
    receiver: JoinHandle<anyhow::Result<u64>>,
}

/// The counts of datagrams.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Flow {
    pub(super) fn start(from: &Pod, to: &Pod, address: Ipv4Addr) -> anyhow::Result<Self> {
        let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("open a socket in a pod");
        let server = in_namespace(to.namespace(), bind)?;
        let client = in_namespace(from.namespace(), bind)?;
        server.set_read_timeout(Some(PATIENCE)).context("open a socket in a pod")?;
        client.connect((address, PORT)).context("open a socket in a pod")?;
        let ending = Arc::new(AtomicBool::new(false));
        let sender = thread::spawn({
            let ending = Arc::clone(&ending);
            move || send(&client, &ending)
        });
        let receiver = thread::spawn({
            let ending = Arc::clone(&ending);
            move || receive(&server, &ending)
        });
        Ok(Self { ending, sender, receiver })
    }

    /// Ends the flow and waits for datagrams on their way.
    pub(super) fn end(self) -> anyhow::Result<Counted> {
        self.ending.store(true, Ordering::Relaxed);
        let panicked = |_| anyhow!("a thread of the benchmark panicked");
        let sent = self.sender.join().map_err(panicked)?;
        let received = self.receiver.join().map_err(panicked)??;
        Ok(Counted { sent, received })
    }
}

fn send(client: &UdpSocket, ending: &AtomicBool) -> u64 {
    let mut sent = 0_u64;
    while !ending.load(Ordering::Relaxed) {
        // A datagram refused by the kernel counts as not arrived.
        let _ = client.send(&sent.to_be_bytes());
        sent += 1;
        thread::sleep(PACE);
    }
    sent
}

fn receive(server: &UdpSocket, ending: &AtomicBool) -> anyhow::Result<u64> {
    let mut received = 0;
    loop {
        match server.recv(&mut [0; 8]) {
            Ok(_) => received += 1,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if ending.load(Ordering::Relaxed) {
                    return Ok(received);
                }
            }
            Err(error) => return Err(error).context("receive in a pod"),
        }
    }
}
