//! Raw frames, sent and received by packet sockets.

use std::io;
use std::mem::{size_of, size_of_val};
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketType, sockopt};

use crate::Namespace;

/// A packet socket (`packet(7)`) on one device: sends past the device's queueing discipline (`PACKET_QDISC_BYPASS`),
/// sees every frame that the device receives. It keeps frames from the moment it is opened.
#[derive(Debug)]
pub struct RawSocket(OwnedFd);

impl RawSocket {
    /// Opens a socket on a device of a namespace.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses.
    pub fn open(namespace: &Namespace, device: &str) -> Result<Self> {
        Self::open_for(namespace, device, libc::ETH_P_ALL as u16)
    }

    /// [`RawSocket::open`] for frames of one ethertype: the socket sees them as protocols do, after the filters of the
    /// device's ingress, while a socket for all ethertypes sees them before. It names that protocol for all that it sends.
    ///
    /// # Errors
    /// As [`RawSocket::open`].
    pub fn open_for(namespace: &Namespace, device: &str, ethertype: u16) -> Result<Self> {
        namespace.run(|| Self::open_here(device, ethertype))
    }

    /// [`RawSocket::open_for`] in the namespace of the calling thread, with its privileges.
    ///
    /// # Errors
    /// As [`RawSocket::open`].
    pub fn open_here(device: &str, ethertype: u16) -> Result<Self> {
        let socket = Self::bound(device, ethertype)?;
        socket.bypass()?;
        Ok(socket)
    }

    /// Opens a socket that sends by the device's queueing discipline, as protocols do.
    ///
    /// # Errors
    /// As [`RawSocket::open`].
    pub fn queued(namespace: &Namespace, device: &str) -> Result<Self> {
        Self::queued_as(namespace, device, libc::ETH_P_ALL as u16)
    }

    /// [`RawSocket::queued`], with this name for the protocol of all frames that it sends, whatever their ethertype
    /// (`sll_protocol`).
    ///
    /// # Errors
    /// As [`RawSocket::open`].
    pub fn queued_as(namespace: &Namespace, device: &str, protocol: u16) -> Result<Self> {
        namespace.run(|| Self::bound(device, protocol))
    }

    fn bound(device: &str, ethertype: u16) -> Result<Self> {
        let every = ethertype.to_be();
        let protocol = NonZero::new(u32::from(every)).map(Protocol::from_raw);
        let socket = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, protocol)?;
        let index = rustix::net::netdevice::name_to_index(&socket, device)
            .with_context(|| format!("look for device {device}"))?;
        // SAFETY: every field is a number or an array of numbers: all zeroes is a valid value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = every;
        address.sll_ifindex = i32::try_from(index)?;
        // SAFETY: the kernel reads as many bytes of `address` as it is long; it lives through the call.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        succeeded(bound).with_context(|| format!("bind to device {device}"))?;
        Ok(Self(socket))
    }

    fn bypass(&self) -> Result<()> {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads as many bytes of `on` as it is long; it lives through the call.
        let set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_QDISC_BYPASS,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        succeeded(set).context("set PACKET_QDISC_BYPASS")
    }

    /// Sends a frame. A drop on its way is not an error: with the bypass not all drivers report drops.
    ///
    /// # Errors
    /// The device is down or gone.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        match rustix::net::send(&self.0, frame, SendFlags::empty()) {
            Ok(_) | Err(rustix::io::Errno::NOBUFS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The frames received so far.
    ///
    /// # Errors
    /// The socket fails.
    pub fn frames(&self) -> Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        let mut buffer = [0; 2048];
        loop {
            match rustix::net::recv(&self.0, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((length, _)) => frames.push(buffer[..length].to_vec()),
                Err(rustix::io::Errno::AGAIN) => return Ok(frames),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The frames received up to and including one that ends in these bytes; all frames if none did in time.
    ///
    /// # Errors
    /// The socket fails.
    pub fn frames_until(&self, end: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + patience;
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let mut buffer = [0; 2048];
        while frames.last().is_none_or(|frame| !frame.ends_with(end)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, Some(left))?;
            match rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty()) {
                Ok((length, _)) => frames.push(buffer[..length].to_vec()),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(frames)
    }
}

fn succeeded(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
