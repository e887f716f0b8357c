//! Traffic between namespaces: pings, connections, datagrams. Sockets stay in the namespace they were made in.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, sockopt};

use crate::Namespace;

/// How long an expected event may take. Far more than needed: neighbour discovery retries once a second, and the
/// machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long to wait before something counts as not having arrived.
pub const SILENCE: Duration = Duration::from_millis(250);

/// Names the factor by which this machine is slower than others, where processors are emulated.
const SLOWNESS: &str = "NETATTACH_TEST_SLOWNESS";

/// A time-out scaled to this machine's speed. Every function here that takes a time scales it in this way.
pub fn stretched(time: Duration) -> Duration {
    static FACTOR: LazyLock<u32> = LazyLock::new(|| match std::env::var(SLOWNESS) {
        Ok(factor) => factor.parse().unwrap_or_else(|error| panic!("{SLOWNESS} is {factor:?}: {error}")),
        Err(_) => 1,
    });
    time * *FACTOR
}

/// Sets a flag when dropped, also if its thread fails, so that waiters for the flag continue.
#[derive(Debug)]
pub struct Ending<'f>(pub &'f AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How often an echo request is repeated: packets sent before a card has its carrier are lost.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Whether an echo request to `to` is answered in time.
///
/// # Errors
/// The socket cannot be made.
pub fn ping(from: &Namespace, to: IpAddr, patience: Duration) -> Result<bool> {
    static IDENTIFIER: AtomicU16 = AtomicU16::new(1);
    let identifier = IDENTIFIER.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let (family, protocol, kind, answer) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, 8, 0),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, 128, 129),
    };
    let socket: OwnedFd = from.run(|| rustix::net::socket(family, SocketType::RAW, Some(protocol)))?;
    let mut request = [kind, 0, 0, 0, identifier[0], identifier[1], 0, 1];
    // The kernel computes the checksum for ICMPv6 only.
    let sum = u32::from(kind) * 256 + u32::from(u16::from_be_bytes(identifier)) + 1;
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    request[2..4].copy_from_slice(&checksum.to_be_bytes());
    let deadline = Instant::now() + stretched(patience);
    let mut buffer = [0; 1500];
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Ok(false);
        }
        if now >= next {
            match rustix::net::sendto(&socket, &request, SendFlags::empty(), &SocketAddr::new(to, 0)) {
                Err(rustix::io::Errno::NETUNREACH | rustix::io::Errno::HOSTUNREACH) => return Ok(false),
                // An own address of IPv6 is there once its duplicates were looked for.
                Err(rustix::io::Errno::ADDRNOTAVAIL) => 0,
                sent => sent.context("send an echo request")?,
            };
            next = now + PING_INTERVAL;
        }
        let left = next.min(deadline).saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(left))?;
        let received = match rustix::net::recv(&socket, &mut buffer, RecvFlags::empty()) {
            Ok((length, _)) => &buffer[..length],
            // A socket with a timeout does not restart the call after a signal, whoever handles that.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        // An IPv4 socket hands over the IP header too.
        let message = if to.is_ipv4() { &received[usize::from(received[0] & 15) * 4..] } else { received };
        if message.len() >= 8 && message[0] == answer && message[4..6] == identifier {
            return Ok(true);
        }
    }
}

/// An echo server, over TCP and UDP at one address, until dropped.
#[derive(Debug)]
pub struct Echo {
    address: SocketAddr,
    tcp: TcpListener,
    udp: UdpSocket,
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Echo {
    /// Serves at an address in a namespace.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn serve(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        let bind = || -> io::Result<_> { Ok((TcpListener::bind(address)?, UdpSocket::bind(address)?)) };
        let (tcp, udp) = namespace.run(|| once_free(bind))?;
        let ending = Arc::new(AtomicBool::new(false));
        let (listener, over) = (tcp.try_clone()?, Arc::clone(&ending));
        let accepting = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                // Ends with the connection.
                std::thread::spawn(move || echo(stream));
            }
        });
        let (socket, over) = (udp.try_clone()?, Arc::clone(&ending));
        let answering = std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                // A peer that is gone does not matter.
                let _ = socket.send_to(&buffer[..length], peer);
            }
        });
        let threads = vec![accepting, answering];
        Ok(Self { address, tcp, udp, ending, threads })
    }

    /// As [`Echo::serve`], once the kernel accepts the address: an IPv6 address only after duplicate address
    /// detection.
    ///
    /// # Errors
    /// It does not within [`PATIENCE`].
    pub fn serve_soon(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        soon(|| Self::serve(namespace, address))
    }

    /// The server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Both calls return at once, with an error or with nothing, when the receiving side is shut down.
        let _ = rustix::net::shutdown(&self.tcp, rustix::net::Shutdown::Both);
        let _ = rustix::net::shutdown(&self.udp, rustix::net::Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Binds sockets of a server once their address is free. A process that another test is about to start has the sockets
/// of a server that has ended until it is executed: the address is in use so long.
///
/// # Errors
/// It is still in use after [`PATIENCE`], or cannot be bound for another reason.
pub fn once_free<T>(mut bind: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + stretched(PATIENCE);
    loop {
        match bind() {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            bound => return bound,
        }
    }
}

/// Opens a TCP connection and has one message echoed.
///
/// # Errors
/// The connection cannot be opened in time, or the message does not come back.
pub fn connect(from: &Namespace, to: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let mut stream = opened(from, to, patience)?;
    exchange(&mut stream, patience)?;
    Ok(stream)
}

/// Opens a TCP connection. Waits for an own IPv6 address, which is usable after duplicate address detection.
///
/// # Errors
/// The connection cannot be opened in time.
pub fn opened(from: &Namespace, to: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + stretched(patience);
    let is_early =
        |error: &io::Error| matches!(error.kind(), ErrorKind::AddrNotAvailable | ErrorKind::Interrupted);
    loop {
        match from.run(|| TcpStream::connect_timeout(&to, stretched(patience))) {
            Err(error) if is_early(&error) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            outcome => return outcome,
        }
    }
}

/// Sends a message over an open connection and waits for its echo.
///
/// # Errors
/// The echo does not come back in time.
pub fn exchange(stream: &mut TcpStream, patience: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(stretched(patience)))?;
    stream.set_nodelay(true)?;
    stream.write_all(b"ping")?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer)
}

/// Whether a datagram is echoed.
///
/// # Errors
/// The socket cannot be made.
pub fn datagram(from: &Namespace, to: SocketAddr, patience: Duration) -> Result<bool> {
    let socket = udp_socket(from, to)?;
    Ok(echoed(&socket, b"ping", patience))
}

/// Whether a datagram from that address of the namespace is echoed.
///
/// # Errors
/// The socket cannot be created within [`PATIENCE`]; an IPv6 address is usable after duplicate address detection.
pub fn datagram_from(from: &Namespace, source: IpAddr, to: SocketAddr, patience: Duration) -> Result<bool> {
    let socket = soon(|| from.run(|| UdpSocket::bind((source, 0))))?;
    socket.connect(to).with_context(|| format!("route to {to}"))?;
    Ok(echoed(&socket, b"ping", patience))
}

/// Sends a megabyte over one connection, in large packets, and has it echoed.
///
/// # Panics
/// The bytes do not come back as they were sent.
pub fn assert_transfers_whole(from: &Namespace, to: SocketAddr) {
    let mut stream = connect(from, to, PATIENCE).expect("the echo is reached");
    let sent: Vec<u8> = (0..1_000_000_u32).map(|number| number.to_le_bytes()[1] ^ 0x5a).collect();
    let mut received = vec![0; sent.len()];
    let mut writer = stream.try_clone().expect("a second handle of the socket");
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&sent).expect("the peer takes all"));
        stream.read_exact(&mut received).expect("all comes back");
    });
    assert!(received == sent, "the echo is another");
}

/// Returns the first success within [`PATIENCE`], or the last failure.
fn soon<T, E>(mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let mut outcome = attempt();
    eventually(PATIENCE, || {
        if outcome.is_err() {
            outcome = attempt();
        }
        outcome.is_ok()
    });
    outcome
}

/// Whether a TCP connection can be opened and used.
pub fn connects(from: &Namespace, to: SocketAddr, patience: Duration) -> bool {
    connect(from, to, patience).is_ok()
}

/// Datagrams that go back and forth, one at a time, until [`Conversation::end`].
#[derive(Debug)]
pub struct Conversation {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<(u64, u64)>,
}

impl Conversation {
    /// Starts a conversation with an [`Echo`], and returns once the first datagram came back.
    ///
    /// # Errors
    /// The socket cannot be made, or no datagram came back.
    pub fn start(from: &Namespace, to: SocketAddr) -> Result<Self> {
        Self::paced(from, to, Duration::ZERO)
    }

    /// The same, with that pause between an answer and the next datagram, as others need the processors.
    ///
    /// # Errors
    /// As [`Conversation::start`].
    pub fn paced(from: &Namespace, to: SocketAddr, pause: Duration) -> Result<Self> {
        let socket = udp_socket(from, to)?;
        anyhow::ensure!(echoed(&socket, b"first", PATIENCE), "{to} does not answer");
        let ending = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&ending);
        let thread = std::thread::spawn(move || {
            let (mut sent, mut lost) = (0u64, 0);
            while !over.load(Ordering::SeqCst) {
                sent += 1;
                lost += u64::from(!echoed(&socket, &sent.to_be_bytes(), PATIENCE));
                std::thread::sleep(pause);
            }
            (sent, lost)
        });
        Ok(Self { ending, thread })
    }

    /// Ends the conversation; returns how many datagrams were sent, and how many did not come back.
    ///
    /// # Panics
    /// The thread panicked.
    pub fn end(self) -> (u64, u64) {
        self.ending.store(true, Ordering::SeqCst);
        self.thread.join().expect("the conversation goes on until it is ended")
    }
}

/// Repeats a query until it returns true or the time is over.
pub fn eventually(patience: Duration, mut question: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    let deadline = began + stretched(patience);
    loop {
        let asked = Instant::now();
        if question() {
            return true;
        }
        let now = Instant::now();
        if now >= deadline {
            return false;
        }
        std::thread::sleep(pause(now - began, now - asked));
    }
}

/// The shortest and the longest pause between two queries.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// Returns the pause after a query that took that long. The awaited event and other tests need the processors too: a
/// query that is a process or a TLS connection takes at most a quarter of one. An event that took long is noticed a
/// little later.
fn pause(waited: Duration, query: Duration) -> Duration {
    let [shortest, longest] = PAUSES;
    (waited / 20).max(query * 3).clamp(shortest, longest)
}

fn udp_socket(from: &Namespace, to: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = from.run(|| UdpSocket::bind(any))?;
    socket.connect(to).with_context(|| format!("route to {to}"))?;
    Ok(socket)
}

/// Whether a datagram by a connected socket is echoed. Answers that are late, or another message, are not it.
pub fn echoed(socket: &UdpSocket, message: &[u8], patience: Duration) -> bool {
    let exchanged = || -> io::Result<bool> {
        socket.set_read_timeout(Some(stretched(patience)))?;
        socket.send(message)?;
        let mut buffer = [0; 64];
        loop {
            // Echoes of earlier messages may come late.
            let length = socket.recv(&mut buffer)?;
            if &buffer[..length] == message {
                return Ok(true);
            }
        }
    };
    exchanged().unwrap_or(false)
}

fn echo(mut stream: TcpStream) {
    let mut buffer = [0; 2048];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_and_with_what_a_query_takes() {
        let table =
            [((0, 0), 1), ((10, 0), 1), ((400, 0), 20), ((60_000, 0), 100), ((0, 8), 24), ((400, 250), 100)];
        for ((waited, query), expected) in table {
            let [waited, query, expected] = [waited, query, expected].map(Duration::from_millis);
            assert_eq!(pause(waited, query), expected, "{waited:?} {query:?}");
        }
    }
}
