//! Frames at the full speed of one processor: an XDP program that the kernel runs on frames of its own and that sends
//! each out of a device (`BPF_F_TEST_XDP_LIVE_FRAMES`, Linux 5.18).

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use anyhow::{Context, ensure};
use rustix::net::{AddressFamily, SocketType, socket};

use super::flood::Flows;
use super::paths::index_of;
use crate::bpf::Program;
use crate::pods::in_namespace;

/// Frames per call; in between the generator can be stopped.
const AT_ONCE: u32 = 8192;
/// Byte offset of the ports in a frame without VLAN tag and IPv4 options.
const PORTS: u16 = 34;

/// Sends SYNs out of a device of the calling thread's namespace.
pub(super) struct Generator {
    program: Program,
    frame: [u8; 60],
}

impl Generator {
    /// For frames from one station to another; each with its own ports, or all with the same.
    pub(super) fn new(device: &str, from: &Station, to: &Station, flows: Flows) -> anyhow::Result<Self> {
        Ok(Self { program: Program::of_xdp(&code(index_of(device)?, flows))?, frame: syn(from, to) })
    }

    /// Sends frames for some milliseconds.
    pub(super) fn send(&self) -> anyhow::Result<()> {
        self.program.run_live(&self.frame, AT_ONCE)
    }
}

/// An end of a conversation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Station {
    pub(super) mac: [u8; 6],
    pub(super) address: Ipv4Addr,
}

/// Switches generic receive offload on, without which a veth accepts no frames from XDP at its other end.
pub(super) fn receive_from_xdp(namespace: BorrowedFd<'_>, device: &str) -> anyhow::Result<()> {
    /// `linux/ethtool.h`.
    const ETHTOOL_SGRO: u32 = 0x2c;
    /// `linux/sockios.h`.
    const SIOCETHTOOL: u64 = 0x8946;
    #[repr(C)]
    struct Wish {
        command: u32,
        value: u32,
    }
    #[repr(C)]
    struct Request {
        name: [u8; libc::IFNAMSIZ],
        wish: *const Wish,
        // The kernel copies a whole `struct ifreq`.
        rest: [u64; 2],
    }
    ensure!(device.len() < libc::IFNAMSIZ, "{device} is no name of a device");
    let mut name = [0; libc::IFNAMSIZ];
    name[..device.len()].copy_from_slice(device.as_bytes());
    in_namespace(namespace, || {
        let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).context("open a socket")?;
        let wish = Wish { command: ETHTOOL_SGRO, value: 1 };
        let request = Request { name, wish: &raw const wish, rest: [0; 2] };
        // SAFETY: laid out as `struct ifreq` with a pointer to a `struct ethtool_value`, both alive during the call.
        let answer = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw const request) };
        ensure!(answer == 0, "switch receive offload on for {device}: {}", io::Error::last_os_error());
        Ok(())
    })
}

/// The XDP program: writes both ports, and sends the frame out of the device.
fn code(device: u32, flows: Flows) -> Vec<u64> {
    const RANDOM: u32 = 7;
    const REDIRECT: u32 = 23;
    let ports = match flows {
        Flows::One => instruction(0xb7, 0, 0, 0, 1 << 16 | 1),
        Flows::Many => instruction(0x85, 0, 0, 0, RANDOM),
    };
    vec![
        // r2 = end of the frame, r7 = its beginning; without room for the ports: r0 = XDP_ABORTED.
        instruction(0x61, 2, 1, 4, 0),
        instruction(0x61, 7, 1, 0, 0),
        instruction(0xbf, 3, 7, 0, 0),
        instruction(0x07, 3, 0, 0, u32::from(PORTS) + 4),
        instruction(0x2d, 3, 2, 6, 0),
        ports,
        instruction(0x63, 7, 0, PORTS, 0),
        instruction(0xb7, 1, 0, 0, device),
        instruction(0xb7, 2, 0, 0, 0),
        instruction(0x85, 0, 0, 0, REDIRECT),
        instruction(0x95, 0, 0, 0, 0),
        instruction(0xb7, 0, 0, 0, 0),
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// One BPF instruction (RFC 9669, 3) as a little-endian machine stores it.
fn instruction(operation: u8, destination: u8, source: u8, offset: u16, immediate: u32) -> u64 {
    u64::from(operation)
        | u64::from(destination | source << 4) << 8
        | u64::from(offset) << 16
        | u64::from(immediate) << 32
}

/// An Ethernet frame of a TCP SYN (RFC 9293, 3.1), ports not filled in, with a TCP checksum that its receiver refuses,
/// so that no answer follows.
fn syn(from: &Station, to: &Station) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&to.mac);
    frame[6..12].copy_from_slice(&from.mac);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    let ip = &mut frame[14..34];
    ip[0] = 0x45;
    ip[3] = 40;
    ip[8] = 64;
    ip[9] = 6;
    ip[12..16].copy_from_slice(&from.address.octets());
    ip[16..20].copy_from_slice(&to.address.octets());
    let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    // Five words of header, SYN.
    frame[46] = 5 << 4;
    frame[47] = 2;
    frame[50..52].copy_from_slice(&[0xff, 0xff]);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_checksum_of_its_ip_header() {
        let from = Station { mac: [2, 0, 0, 0, 0, 1], address: [192, 168, 0, 1].into() };
        let to = Station { mac: [2, 0, 0, 0, 0, 2], address: [192, 168, 0, 199].into() };
        let frame = syn(&from, &to);
        let sum: u32 =
            frame[14..34].chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!((&frame[..14], frame[47]), (&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0][..], 2));
    }

    #[test]
    fn an_instruction_has_its_fields_where_the_kernel_reads_them() {
        // BPF_ALU64 | BPF_ADD | BPF_K: r3 += 38.
        assert_eq!(instruction(0x07, 3, 0, 0, 38).to_le_bytes(), [0x07, 0x03, 0, 0, 38, 0, 0, 0]);
        assert_eq!(instruction(0x63, 7, 0, 34, 0).to_le_bytes(), [0x63, 0x07, 34, 0, 0, 0, 0, 0]);
        assert_eq!(instruction(0x2d, 3, 2, 6, 0).to_le_bytes(), [0x2d, 0x23, 6, 0, 0, 0, 0, 0]);
    }
}
