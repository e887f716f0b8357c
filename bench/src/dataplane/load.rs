//! Request and response over TCP, client and server on one processor.
//!
//! On one processor the wake-up of the other side is a plain switch. On two it is an interrupt between
//! processors, whose cost in a virtual machine hides everything else and comes and goes.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::net::sockopt;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::netlink;
use crate::pods::{in_namespace, joined};

/// Time limit of an answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Number of exchanges between two readings of the clock, which costs as much as some packets.
const BETWEEN_LOOKS: u32 = 16;

/// The unit that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A byte there and a byte back on one connection: `TCP_RR`.
    Requests,
    /// A connection for each such exchange: `TCP_CRR`.
    Connections,
}

/// The route on which a sample is taken.
pub(crate) struct Route<'a> {
    pub(crate) client: BorrowedFd<'a>,
    pub(crate) server: BorrowedFd<'a>,
    /// The server's address.
    pub(crate) address: Ipv4Addr,
}

/// Returns the exchanges per second during `time`. Each sample needs its own port: the client's ports of an earlier
/// sample are not free immediately.
pub(crate) fn sample(route: &Route<'_>, kind: Kind, port: u16, time: Duration) -> anyhow::Result<f64> {
    let stop = AtomicBool::new(false);
    let address = SocketAddrV4::new(route.address, port);
    let listener = in_namespace(route.server, || {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).context("listen")?;
        // accept(2) honours it.
        sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(PATIENCE)).context("listen")?;
        Ok(listener)
    })?;
    thread::scope(|scope| {
        let server = scope.spawn(|| serve(&listener, &stop));
        let client = scope.spawn(|| {
            enter(route.client)?;
            let rate = ask(address, kind, time);
            stop.store(true, Ordering::Relaxed);
            // Wakes the server, so that it checks whether to end.
            let _ = TcpStream::connect_timeout(&address.into(), PATIENCE);
            rate
        });
        let rate = joined(client.join());
        joined(server.join()).and(rate)
    })
}

fn serve(listener: &TcpListener, stop: &AtomicBool) -> anyhow::Result<()> {
    pin()?;
    while !stop.load(Ordering::Relaxed) {
        let (mut connection, _) = match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            accepted => accepted.context("accept")?,
        };
        connection.set_nodelay(true).context("prepare a connection")?;
        let mut byte = [0];
        // A broken connection is reported by the client.
        while connection.read(&mut byte).is_ok_and(|count| count == 1) && connection.write_all(&byte).is_ok()
        {
        }
    }
    Ok(())
}

fn ask(address: SocketAddrV4, kind: Kind, time: Duration) -> anyhow::Result<f64> {
    let connect = || -> anyhow::Result<TcpStream> {
        let connection = TcpStream::connect_timeout(&address.into(), PATIENCE)
            .with_context(|| format!("connect to {address}"))?;
        connection.set_nodelay(true)?;
        Ok(connection)
    };
    let mut connection = connect()?;
    connection.set_read_timeout(Some(PATIENCE))?;
    let (mut exchanges, started) = (0_u32, Instant::now());
    loop {
        if kind == Kind::Connections && exchanges > 0 {
            connection = connect()?;
        }
        exchange(&mut connection).with_context(|| format!("exchange with {address}"))?;
        exchanges += 1;
        if exchanges.is_multiple_of(BETWEEN_LOOKS) && started.elapsed() >= time {
            return Ok(f64::from(exchanges) / started.elapsed().as_secs_f64());
        }
    }
}

fn exchange(connection: &mut TcpStream) -> anyhow::Result<()> {
    let mut byte = [1];
    connection.write_all(&byte)?;
    connection.read_exact(&mut byte)?;
    ensure!(byte == [1], "another byte came back");
    Ok(())
}

fn enter(namespace: BorrowedFd<'_>) -> anyhow::Result<()> {
    pin()?;
    netlink::enter(namespace)
}

fn pin() -> anyhow::Result<()> {
    stay_on(0)
}

/// Keeps the calling thread on one processor.
pub(crate) fn stay_on(processor: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).with_context(|| format!("stay on processor {processor}"))
}
