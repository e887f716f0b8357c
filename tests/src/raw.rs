//! Raw frames, sent and received by packet sockets.

use std::io;
use std::mem::size_of;
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketType, sockopt};

use crate::Namespace;
use crate::traffic::stretched;

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

    /// [`RawSocket::open_here`], for frames each behind what [`sum_at`] returns (`PACKET_VNET_HDR`).
    ///
    /// # Errors
    /// As [`RawSocket::open`].
    pub fn leaving_sums(device: &str) -> Result<Self> {
        let socket = Self::open_here(device, libc::ETH_P_ALL as u16)?;
        let on: libc::c_int = 1;
        socket.set(libc::PACKET_VNET_HDR, &on).context("set PACKET_VNET_HDR")?;
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
        self.set(libc::PACKET_QDISC_BYPASS, &on).context("set PACKET_QDISC_BYPASS")
    }

    fn set<T>(&self, option: libc::c_int, value: &T) -> io::Result<()> {
        // SAFETY: the kernel reads as many bytes of `value` as it is long; it lives through the call.
        let set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                std::ptr::from_ref(value).cast(),
                size_of::<T>() as libc::socklen_t,
            )
        };
        succeeded(set)
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
        let deadline = Instant::now() + stretched(patience);
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

/// Returns the header of a frame whose checksum, of the bytes from `start` on, is computed when the frame is put on
/// the wire, and stored `offset` bytes after `start` (`struct virtio_net_hdr` of `linux/virtio_net.h`).
pub fn sum_at(start: u16, offset: u16) -> [u8; 10] {
    const NEEDS_SUM: u8 = 1;
    let ([a, b], [c, d]) = (start.to_ne_bytes(), offset.to_ne_bytes());
    [NEEDS_SUM, 0, 0, 0, 0, 0, a, b, c, d]
}

/// A packet socket whose frames the kernel sends without a copy, except for the Ethernet header (`PACKET_TX_RING`):
/// they stay in shared memory until they have left, and can be changed there.
#[derive(Debug)]
pub struct Ring {
    socket: RawSocket,
    memory: NonNull<u8>,
    sent: usize,
}

/// A frame that a [`Ring`] has sent.
#[derive(Debug, Clone, Copy)]
pub struct Sent(usize);

// SAFETY: the memory is reached by way of the ring alone, and stays mapped until `drop`.
unsafe impl Send for Ring {}

impl Ring {
    /// The number of its frames, each of which is sent once.
    const FRAMES: usize = 32;
    /// Room for a frame and the kernel's header for it.
    const ROOM: usize = 2048;
    /// Offset of a frame in its room.
    const BEGIN: usize = libc::TPACKET2_HDRLEN - size_of::<libc::sockaddr_ll>();

    /// Opens a ring for frames of one ethertype on a device in the namespace of the calling thread, with its privileges.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses.
    pub fn open_here(device: &str, ethertype: u16) -> Result<Self> {
        /// `TPACKET_V2` (`linux/if_packet.h`).
        const VERSION: libc::c_int = 1;
        let socket = RawSocket::bound(device, ethertype)?;
        socket.set(libc::PACKET_VERSION, &VERSION).context("set PACKET_VERSION")?;
        let ring = libc::tpacket_req {
            tp_block_size: (Self::FRAMES * Self::ROOM) as libc::c_uint,
            tp_block_nr: 1,
            tp_frame_size: Self::ROOM as libc::c_uint,
            tp_frame_nr: Self::FRAMES as libc::c_uint,
        };
        socket.set(libc::PACKET_TX_RING, &ring).context("set PACKET_TX_RING")?;
        // SAFETY: a new mapping at an address of the kernel's choice, which refuses any length but the ring's.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::FRAMES * Self::ROOM,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                socket.0.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("map the ring");
        }
        let memory = NonNull::new(memory.cast()).context("the ring is nowhere")?;
        Ok(Self { socket, memory, sent: 0 })
    }

    /// Sends a frame. It has passed the programs then, and may not have left yet.
    ///
    /// # Errors
    /// It is too long, the ring is full, or it was dropped.
    pub fn send(&mut self, frame: &[u8]) -> Result<Sent> {
        ensure!(self.sent < Self::FRAMES, "all frames of the ring were sent");
        ensure!(frame.len() <= Self::ROOM - Self::BEGIN, "the frame is too long");
        let sent = Sent(self.sent);
        self.sent += 1;
        self.change(sent, 0, frame);
        // SAFETY: the room of a frame of the ring (ensured above), which begins with this header and is aligned for it.
        unsafe {
            let header = self.memory.add(sent.0 * Self::ROOM).cast::<libc::tpacket2_hdr>().as_ptr();
            (&raw mut (*header).tp_len).write_volatile(frame.len() as u32);
            (&raw mut (*header).tp_status).write_volatile(libc::TP_STATUS_SEND_REQUEST);
        }
        // Without this flag, it would wait until the frame has left.
        rustix::net::send(&self.socket.0, &[], SendFlags::DONTWAIT).context("send what is in the ring")?;
        Ok(sent)
    }

    /// Changes bytes of a frame, whether it has left or not.
    ///
    /// # Panics
    /// There is no room for them.
    pub fn change(&mut self, sent: Sent, offset: usize, bytes: &[u8]) {
        assert!(sent.0 < Self::FRAMES && Self::BEGIN + offset + bytes.len() <= Self::ROOM);
        for (at, byte) in (sent.0 * Self::ROOM + Self::BEGIN + offset..).zip(bytes) {
            // SAFETY: within the ring (asserted above), of which there are no references.
            unsafe { self.memory.add(at).write_volatile(*byte) };
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `open_here`.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), Self::FRAMES * Self::ROOM) };
    }
}

fn succeeded(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
