//! Packet sockets on the interfaces of pods, and the clock. Every frame is read by `frame` and `codec`.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::Error;
use super::codec::Message;
use super::exchange::Outgoing;
use super::frame::{self, EVERYBODY, Ends};
use super::record::Interface;
use crate::mac::Mac;
use crate::netlink::{Handle, OpenError, socket_filter};
use crate::netns::{self, Netns};

/// Longest frame that is read, in bytes: longer ones are no answers to a client that takes 1500.
const LONGEST: usize = 2048;
/// Most frames of one socket that are read in one go.
const AT_ONCE: usize = 64;

/// A packet socket on the interface of a pod, which hears what is sent to clients.
#[derive(Debug)]
pub(super) struct Socket {
    socket: OwnedFd,
    mac: Mac,
}

/// Brings an interface up, and waits for its carrier; without one, what is sent is lost, and sent again.
pub(super) fn raise(netns: &Netns, ifname: &str) -> Result<Interface, Error> {
    let raise = || -> Result<_, OpenError> {
        let mut pod = Handle::open_in(netns)?;
        let link = pod.link(ifname)?;
        pod.ensure_up(link.index)?;
        pod.await_carrier(link.index)?;
        Ok(link)
    };
    let link = raise()?;
    let mac = link.mac.ok_or_else(|| Error::NotEthernet(ifname.to_owned()))?;
    let netns_id = netns.id();
    Ok(Interface { mac, index: link.index, netns: netns.path().to_owned(), netns_id })
}

impl Socket {
    /// Opens a socket on an interface of the namespace.
    pub(super) fn open(netns: &Netns, index: u32, mac: Mac) -> Result<Self, Error> {
        let socket = netns::within(netns, || open(index)).map_err(OpenError::from)?;
        Ok(Self { socket: socket.map_err(Error::Socket)?, mac })
    }

    /// Sends a message. One that cannot be sent is as one that is lost.
    pub(super) fn send(&self, outgoing: &Outgoing) -> io::Result<()> {
        let Outgoing { message, to, .. } = outgoing;
        let (mac, address) = match to {
            Some(server) => (server.mac, server.address),
            None => (EVERYBODY, std::net::Ipv4Addr::BROADCAST),
        };
        let ends = Ends { mac: (self.mac, mac), ip: (message.ciaddr, address) };
        let frame = frame::from_client(&ends, &message.write());
        let frame = frame.ok_or_else(|| io::Error::other("a message that no packet holds"))?;
        rustix::net::send(&self.socket, &frame, SendFlags::DONTWAIT)?;
        Ok(())
    }

    /// What has been received by now, each with the Ethernet address that it came from.
    pub(super) fn received(&self) -> Vec<(Mac, Message)> {
        let mut buffer = [0; LONGEST];
        let mut messages = Vec::new();
        for _ in 0..AT_ONCE {
            // An interface that went down says so once, and is heard again when it is up.
            let length = match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((length, _)) => length,
                Err(rustix::io::Errno::NETDOWN | rustix::io::Errno::INTR) => continue,
                Err(_) => break,
            };
            let frame = buffer.get(..length).and_then(frame::to_client);
            let message = frame.and_then(|(ends, payload)| Some((ends.mac.0, Message::read(payload).ok()?)));
            messages.extend(message);
        }
        messages
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn open(index: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Of no protocol until it has its filter and its interface: it hears nothing before.
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    socket_filter::attach(&socket, &mut to_clients())?;
    // SAFETY: every field is a number or an array of numbers: all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    // SAFETY: the kernel reads as many bytes of `address` as it is long; it lives through the call.
    let bound = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if bound == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// Lets IPv4 packets of UDP to port 68 through that are no later fragments, so that a pod's other traffic costs no copy. What
/// comes through is checked again.
fn to_clients() -> [libc::sock_filter; 9] {
    /// `linux/filter.h`: load a byte or a half-word at an offset, a half-word behind the IPv4 header, whose length is loaded
    /// into the index; compare, test bits; return the bytes to keep.
    const LOAD_BYTE: u16 = 0x30;
    const LOAD_HALF: u16 = 0x28;
    const LOAD_HALF_BEHIND: u16 = 0x48;
    const LOAD_HEADER_LENGTH: u16 = 0xb1;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const JUMP_IF_SET: u16 = 0x45;
    const RETURN: u16 = 0x06;
    let statement = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    [
        statement(LOAD_BYTE, 23),
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 6, k: libc::IPPROTO_UDP as u32 },
        statement(LOAD_HALF, 20),
        libc::sock_filter { code: JUMP_IF_SET, jt: 4, jf: 0, k: 0x1fff },
        statement(LOAD_HEADER_LENGTH, 14),
        statement(LOAD_HALF_BEHIND, 16),
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: 68 },
        statement(RETURN, u32::MAX),
        statement(RETURN, 0),
    ]
}

/// Waits until one of the sockets has something, or that moment of [`now`].
pub(super) fn wait<'s>(sockets: impl Iterator<Item = &'s Socket>, until: Duration) {
    let mut polled: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let left = until.saturating_sub(now());
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Whatever ended it, the sockets are read and the time is looked at next.
    let _ = rustix::event::poll(&mut polled, Some(&left));
}

/// The time since the node's boot, suspended time included.
pub(super) fn now() -> Duration {
    let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(since.tv_sec).unwrap_or(0), u32::try_from(since.tv_nsec).unwrap_or(0))
}

/// A number that differs from one call to the next.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(0_u8)
}
