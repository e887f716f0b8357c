//! The client's claims about itself in DHCP (RFC 2131, section 2) and in BOOTP, which has the same format.

use super::bytes::Bytes;
use crate::{Address, DropReason, Ip4, Mac};

/// The port of servers and relays.
pub const SERVERS: u16 = 67;
/// The port of clients.
pub const CLIENTS: u16 = 68;

/// Number of bytes that are read here, from the UDP header to the client's Ethernet address. Servers ignore shorter
/// messages.
pub const READ: u32 = UDP_LEN + 34;

const UDP_LEN: u32 = 8;

/// The port of clients of DHCPv6 (RFC 8415, 7.2).
pub const CLIENTS_V6: u16 = 546;
/// The port of DHCPv6 servers and relays.
pub const SERVERS_V6: u16 = 547;
/// Offset of the message type of DHCPv6, in bytes from the UDP header.
pub const TYPE_V6: u32 = UDP_LEN;

/// Whether clients send DHCPv6 messages of this type (RFC 8415, 7.3): solicit, request, confirm, renew, rebind,
/// release, decline, information-request, DHCPv4-query (RFC 7341), and addr-reg-inform (RFC 9686), with which a
/// client registers an address that it has generated, sent from that address. All other types are sent by servers,
/// relays, or requesters of leasequery.
#[inline(always)]
pub const fn is_of_client_v6(message: u8) -> bool {
    matches!(message, 1 | 3..=6 | 8 | 9 | 11 | 20 | 36)
}

/// The sender's claims in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Whether the sender is a client on Ethernet that sent the message itself: neither a server nor a relay.
    pub is_client: bool,
    /// The client's Ethernet address.
    pub mac: Mac,
    /// The client's IP address; unspecified if it has none.
    pub address: Ip4,
}

/// Reads a message that has [`READ`] bytes. `udp`: offset of its UDP header.
///
/// # Errors
/// It is truncated.
#[inline(always)]
pub fn read<B: Bytes>(bytes: &B, udp: usize) -> Result<Claim, DropReason> {
    const REQUEST: u8 = 1;
    const ETHERNET: u8 = 1;
    let at = udp + UDP_LEN as usize;
    let [operation, hardware, length, _]: [u8; 4] = bytes.load(at)?;
    let address: Ip4 = bytes.load(at + 12)?;
    let relay: Ip4 = bytes.load(at + 24)?;
    let mac: Mac = bytes.load(at + 28)?;
    let is_client =
        operation == REQUEST && hardware == ETHERNET && length == 6 && relay.same(&Ip4::UNSPECIFIED);
    Ok(Claim { is_client, mac, address })
}

#[cfg(test)]
mod tests {
    use super::super::bytes::InMemory;
    use super::*;

    #[test]
    fn a_client_says_who_it_is() {
        let mut bytes = vec![0; 5 + READ as usize];
        let message = 5 + 8;
        bytes[message..message + 4].copy_from_slice(&[1, 1, 6, 9]);
        bytes[message + 12..message + 16].copy_from_slice(&[10, 0, 0, 1]);
        bytes[message + 28..message + 34].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
        let claim = Claim {
            is_client: true,
            mac: Mac { octets: [2, 0, 0, 0, 0, 7] },
            address: Ip4 { octets: [10, 0, 0, 1] },
        };
        let read =
            |bytes: &[u8]| read(&InMemory { bytes, in_place: 0, is_uncut: false, tag_beside: None }, 5);
        assert_eq!(read(&bytes), Ok(claim));
        for (at, value) in [(0, 2), (1, 6), (2, 16), (24, 10), (27, 1)] {
            let mut other = bytes.clone();
            other[message + at] = value;
            assert_eq!(read(&other), Ok(Claim { is_client: false, ..claim }), "{at}");
        }
        assert_eq!(read(&bytes[..bytes.len() - 1]), Err(DropReason::Malformed));
    }

    /// Advertise 2, reply 7, reconfigure 10, relay-forward 12, relay-reply 13, leasequery 14, DHCPv4-response 21,
    /// addr-reg-reply 37.
    #[test]
    fn clients_send_no_message_of_servers_or_relays() {
        let of_clients: Vec<u8> = (0..=u8::MAX).filter(|message| is_of_client_v6(*message)).collect();
        assert_eq!(of_clients, [1, 3, 4, 5, 6, 8, 9, 11, 20, 36]);
    }
}
