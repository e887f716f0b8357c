//! Packet sockets on the interfaces of pods, and the clock. `frame` and `codec` parse every frame.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};

use super::Error;
use super::codec::Message;
use super::exchange::Outgoing;
use super::frame::{self, EVERYBODY, Ends};
use super::record::Interface;
use super::{filter, probe};
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{Handle, OpenError, packet_socket};
use crate::netns::{self, Netns};

/// Longest frame that is read, in bytes: longer ones are not replies to a client that accepts 1500.
const LONGEST: usize = 2048;
/// Most frames of one socket that are read at a time.
const AT_ONCE: usize = 64;

/// A packet socket on the interface of a pod, which receives the messages for DHCP clients.
#[derive(Debug)]
pub(super) struct Socket {
    socket: OwnedFd,
    mac: Mac,
}

/// Brings an interface up, and waits for its carrier. If there is none, messages are lost, and sent again.
pub(super) fn raise(netns: &Netns, ifname: &str) -> Result<Interface, Error> {
    let raise = || -> Result<_, OpenError> {
        let mut pod = Handle::open_in(netns)?;
        let link = pod.link(ifname)?;
        pod.ensure_up(link.index)?;
        pod.await_carrier(link.index)?;
        // 0: the kernel has no cookies.
        Ok((link, Some(pod.netns_cookie()).filter(|cookie| *cookie != 0)))
    };
    let (link, netns_cookie) = raise()?;
    let mac = link.mac.ok_or_else(|| Error::NotEthernet(ifname.to_owned()))?;
    let (netns_id, netns) = (netns.id(), netns.path().to_owned());
    Ok(Interface { mac, index: link.index, netns, netns_id, netns_cookie })
}

/// Returns the Ethernet address of an interface that was leased an address by the address `then`. It is another one
/// only if the kernel has changed it with that of the parent on the node; every other change is the pod's own.
pub(super) fn present_mac(netns: &Netns, index: u32, then: Mac) -> Mac {
    let look = || -> Result<_, OpenError> { Ok(Handle::open_in(netns)?.link_by_index(index)?) };
    // If the interface is gone, no socket can be opened on it either.
    let Ok(link) = look() else { return then };
    let of_parent = || Handle::open().ok()?.link_by_index(link.link?).ok()?.mac;
    if link.may_follow_parent() { present(link.mac, then, of_parent) } else { then }
}

/// The address `own`, if it is that of the parent, otherwise `then`.
fn present(own: Option<Mac>, then: Mac, of_parent: impl FnOnce() -> Option<Mac>) -> Mac {
    own.filter(|own| *own != then && of_parent() == Some(*own)).unwrap_or(then)
}

impl Socket {
    /// Opens a socket on an interface of the namespace.
    pub(super) fn open(netns: &Netns, index: u32, mac: Mac) -> Result<Self, Error> {
        Ok(Self { socket: open(netns, index, libc::ETH_P_IP, &mut filter::answers_to(mac))?, mac })
    }

    /// Sends a message. A message that cannot be sent counts as lost.
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

    /// Returns the received messages, each with its Ethernet source address.
    pub(super) fn received(&self) -> Vec<(Mac, Message)> {
        let mut buffer = [0; LONGEST];
        let mut messages = Vec::new();
        for _ in 0..AT_ONCE {
            // An interface that went down causes one error, and receives again once it is up.
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

/// Opens a packet socket on an interface of the namespace, for packets of this protocol that pass the filter.
fn open(
    netns: &Netns,
    index: u32,
    protocol: i32,
    filter: &mut [libc::sock_filter],
) -> Result<OwnedFd, Error> {
    let socket = netns::within(netns, || packet_socket::open(index, protocol, Some(filter)));
    let socket = socket.map_err(OpenError::from)?;
    socket.map_err(Error::Socket)
}

/// Probes the link for another host with the address, and returns that host.
pub(super) fn holder(netns: &Netns, interface: &Interface, address: Ipv4Addr) -> Result<Option<Mac>, Error> {
    let socket = open(netns, interface.index, libc::ETH_P_ARP, &mut filter::about(address))?;
    let question = probe::question(interface.mac, address);
    for _ in 0..probe::TIMES {
        // A probe that cannot be sent counts as lost.
        if let Err(error) = rustix::net::send(&socket, &question, SendFlags::DONTWAIT) {
            tracing::debug!(error = %Chain(&error), "probe for an address not sent");
        }
        let until = now() + probe::PAUSE;
        while now() < until {
            wait_for(std::iter::once(socket.as_fd()), until);
            if let Some(holder) = heard_of(&socket, interface.mac, address) {
                return Ok(Some(holder));
            }
        }
    }
    Ok(None)
}

/// Returns the host that has the address, according to the received frames.
fn heard_of(socket: &OwnedFd, own: Mac, address: Ipv4Addr) -> Option<Mac> {
    let mut buffer = [0; LONGEST];
    for _ in 0..AT_ONCE {
        let (length, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT).ok()?;
        if let Some(holder) = probe::holder(buffer.get(..length)?, own, address) {
            return Some(holder);
        }
    }
    None
}

/// Waits until a socket is readable, or until that moment of [`now`].
pub(super) fn wait<'s>(sockets: impl Iterator<Item = &'s Socket>, until: Duration) {
    wait_for(sockets.map(AsFd::as_fd), until);
}

fn wait_for<'s>(sockets: impl Iterator<Item = BorrowedFd<'s>>, until: Duration) {
    let mut polled: Vec<PollFd<'_>> =
        sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
    let left = until.saturating_sub(now());
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Whatever ended the wait, the sockets and the time are checked next.
    let _ = rustix::event::poll(&mut polled, Some(&left));
}

/// Returns the time since the node's boot, including suspended time.
pub(super) fn now() -> Duration {
    let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(since.tv_sec).unwrap_or(0), u32::try_from(since.tv_nsec).unwrap_or(0))
}

/// Returns a number that differs from one call to the next.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_another_address_than_that_of_its_lease_only_if_it_is_its_parents() {
        let [then, of_parent, chosen] = [1, 2, 3].map(|last| Mac([2, 0, 0, 0, 0, last]));
        let now = |own| present(own, then, || Some(of_parent));
        assert_eq!([Some(of_parent), Some(chosen), None].map(now), [of_parent, then, then]);
        assert_eq!(present(Some(of_parent), then, || None), then);
        assert_eq!(present(Some(then), then, || panic!("nothing to compare")), then);
    }
}
