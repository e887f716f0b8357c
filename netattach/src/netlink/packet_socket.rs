//! Packet sockets: they send and receive whole frames of one link.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::socket_filter;

/// Opens a packet socket on the link with this index in the namespace of the calling thread, for frames of this
/// protocol (`ETH_P_*`). It receives those that pass the filter, or all if there is none.
///
/// # Errors
/// The kernel refused the socket, the filter or the link.
pub(crate) fn open(
    index: u32,
    protocol: i32,
    filter: Option<&mut [libc::sock_filter]>,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Without a protocol until it has its filter and its interface: so it receives nothing before.
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    if let Some(filter) = filter {
        socket_filter::attach(&socket, filter)?;
    }
    // SAFETY: every field is a number or an array of numbers: all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    // Protocol numbers have 16 bits.
    address.sll_protocol = (protocol as u16).to_be();
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
