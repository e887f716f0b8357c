//! What a client of DHCP says of itself (RFC 2131, section 2), and of BOOTP, which has the same form.

use super::bytes::Bytes;
use crate::{Address, DropReason, Ip4, Mac};

/// The port of servers and relays.
pub const SERVERS: u16 = 67;
/// The port of clients.
pub const CLIENTS: u16 = 68;

/// Length of what is read here, in bytes from the UDP header on: it, and a message up to the client's Ethernet address. Servers
/// take no message that is shorter.
pub const READ: u32 = UDP_LEN + 34;

const UDP_LEN: u32 = 8;

/// What the sender of a message says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Whether it is a client on Ethernet and has sent the message itself: no server, and no relay.
    pub is_client: bool,
    /// The client's Ethernet address.
    pub mac: Mac,
    /// The address that it has; unspecified if it has none.
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
}
