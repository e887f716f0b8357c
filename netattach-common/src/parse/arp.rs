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
    /// Its IP address. The sender of a probe has none yet: then the address that it requests (RFC 5227).
    pub address: Ip4,
}

/// Ethernet pads to 46 bytes (50 with the trailer that some cards leave); more is not padding.
const MOST: u32 = 50;

/// The end of an ARP packet that begins at `offset`.
#[inline(always)]
pub fn end(offset: u16) -> u32 {
    u32::from(offset) + size_of::<ArpPacket>() as u32
}

/// Whether a frame of this length has nothing after its Ethernet header but an ARP packet and padding.
#[inline(always)]
pub fn fits(length: u32, offset: u16) -> bool {
    length <= u32::from(offset) + MOST
}

/// Checks that a frame that [`fits`] has nothing but zeros from the [`end`] of its ARP packet on, as a host pads (RFC 1042).
///
/// # Errors
/// There are other bytes.
#[inline(always)]
pub fn check_padding<B: Bytes>(bytes: &B, end: u32) -> Result<(), DropReason> {
    const PADDING: u32 = MOST - size_of::<ArpPacket>() as u32;
    let length = bytes.length();
    for at in 0..PADDING {
        let at = end + at;
        if at >= length {
            break;
        }
        let [byte]: [u8; 1] = bytes.load(at as usize)?;
        if byte != 0 {
            return Err(DropReason::Malformed);
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::super::bytes::InMemory;
    use super::*;

    #[test]
    fn nothing_but_zeros_follows_a_packet() {
        let judged = |bytes: &[u8]| {
            let read = InMemory { bytes, in_place: 0, is_uncut: false, tag_beside: None };
            check_padding(&read, end(14))
        };
        for padding in [0, 1, 18, 22] {
            let mut frame = vec![0xff; 42];
            frame.resize(42 + padding, 0);
            assert_eq!(judged(&frame), Ok(()), "{padding}");
            for at in 42..42 + padding {
                let mut other = frame.clone();
                other[at] = 1;
                assert_eq!(judged(&other), Err(DropReason::Malformed), "{at} of {padding}");
            }
        }
    }
}
