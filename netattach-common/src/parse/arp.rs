//! ARP for Ethernet and IPv4 (RFC 826).

use super::bytes::{Bytes, Plain};
use super::frame::{ETHERNET_LEN, ethertype};
use crate::{Address, DropReason, Ip4, Mac};

/// An ARP packet for Ethernet and IPv4.
#[repr(C)]
#[derive(Clone, Copy)]
struct ArpPacket {
    hardware_and_protocol: [u16; 2],
    lengths: [u8; 2],
    operation: u16,
    sender_mac: Mac,
    sender_ip: [u8; 4],
    target_mac: Mac,
    target_ip: [u8; 4],
}

const _: () = assert!(size_of::<ArpPacket>() == 28);

// SAFETY: integers and addresses, as long as these together (asserted above).
unsafe impl Plain for ArpPacket {}

/// The addresses that the sender of an ARP packet claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its address. A probe has none yet: then the address that it requests (RFC 5227).
    pub address: Ip4,
}

/// Whether a frame of this length has nothing after its Ethernet header but an ARP packet and padding.
#[inline(always)]
pub fn fits(length: u32, offset: u16) -> bool {
    /// Ethernet pads to 46 bytes (50 with the trailer that some cards leave); more is not padding.
    const MOST: u32 = 50;
    length <= u32::from(offset) + MOST
}

/// Parses an ARP packet. `plain`: it directly follows an Ethernet header without tags.
///
/// # Errors
/// It is another protocol, or truncated.
#[inline(always)]
pub fn read<B: Bytes>(bytes: &B, plain: bool, offset: u16) -> Result<Claim, DropReason> {
    let arp: ArpPacket = bytes.header(plain, ETHERNET_LEN, offset.into())?;
    if arp.hardware_and_protocol != [1u16.to_be(), ethertype::IPV4.to_be()] || arp.lengths != [6, 4] {
        return Err(DropReason::Malformed);
    }
    // Reverse and inverse ARP (RFC 903, RFC 2390) are other protocols, which are not needed here.
    let request = arp.operation == 1u16.to_be();
    if !request && arp.operation != 2u16.to_be() {
        return Err(DropReason::Malformed);
    }
    let sender = Ip4 { octets: arp.sender_ip };
    let probe = request && sender.same(&Ip4::UNSPECIFIED);
    let address = if probe { Ip4 { octets: arp.target_ip } } else { sender };
    Ok(Claim { mac: arp.sender_mac, address })
}
