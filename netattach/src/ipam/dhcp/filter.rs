//! Socket filters (classic BPF) of an exchange, so that the pod's other traffic is not copied. Accepted packets are
//! checked again. Pure.

use std::net::Ipv4Addr;

use super::codec::COOKIE;
use crate::mac::Mac;

/// `linux/filter.h`: load at an offset, or at an offset after the IPv4 header, whose length is loaded into the index
/// register; compare, test bits; return the number of bytes to keep.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const LOAD_WORD: u16 = 0x20;
const LOAD_BYTE_BEHIND: u16 = 0x50;
const LOAD_HALF_BEHIND: u16 = 0x48;
const LOAD_WORD_BEHIND: u16 = 0x40;
const LOAD_HEADER_LENGTH: u16 = 0xb1;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_SET: u16 = 0x45;
const RETURN: u16 = 0x06;

/// Offset of the IPv4 header in a frame, and of a message after that header.
const IPV4: u32 = 14;
const MESSAGE: u32 = IPV4 + 8;

const fn statement(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

/// Accepts the replies of servers to the client with that Ethernet address: unfragmented IPv4 UDP packets from port
/// 67 to port 68, BOOTP replies with the DHCP cookie. The transaction id changes within an exchange, and is checked
/// there.
pub(super) fn answers_to(client: Mac) -> Vec<libc::sock_filter> {
    let Mac([a, b, c, d, e, f]) = client;
    let behind = [
        (LOAD_HALF_BEHIND, IPV4, 67),
        (LOAD_HALF_BEHIND, IPV4 + 2, 68),
        (LOAD_BYTE_BEHIND, MESSAGE, 2),
        (LOAD_WORD_BEHIND, MESSAGE + 236, u32::from_be_bytes(COOKIE)),
        (LOAD_WORD_BEHIND, MESSAGE + 28, u32::from_be_bytes([a, b, c, d])),
        (LOAD_HALF_BEHIND, MESSAGE + 32, u32::from(u16::from_be_bytes([e, f]))),
    ];
    let mut code = vec![
        statement(LOAD_BYTE, IPV4 + 9),
        statement(JUMP_IF_EQUAL, libc::IPPROTO_UDP as u32),
        statement(LOAD_HALF, IPV4 + 6),
        // Later fragments are refused.
        statement(JUMP_IF_SET, 0x1fff),
        statement(LOAD_HEADER_LENGTH, IPV4),
    ];
    code.extend(
        behind
            .iter()
            .flat_map(|(load, at, wanted)| [statement(*load, *at), statement(JUMP_IF_EQUAL, *wanted)]),
    );
    code.extend([statement(RETURN, u32::MAX), statement(RETURN, 0)]);
    let last = code.len() - 1;
    for (at, instruction) in code.iter_mut().enumerate() {
        // Jumps to the last instruction; there are about two dozen.
        let away = (last - at).saturating_sub(1) as u8;
        match instruction.code {
            JUMP_IF_EQUAL => instruction.jf = away,
            JUMP_IF_SET => instruction.jt = away,
            _ => {}
        }
    }
    code
}

/// Accepts ARP packets for IPv4 that come from an address, or ask for it.
pub(super) fn about(address: Ipv4Addr) -> Vec<libc::sock_filter> {
    const SENDER: u32 = 28;
    const TARGET: u32 = 38;
    let address = address.to_bits();
    vec![
        statement(LOAD_WORD, SENDER),
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 2, jf: 0, k: address },
        statement(LOAD_WORD, TARGET),
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: address },
        statement(RETURN, u32::MAX),
        statement(RETURN, 0),
    ]
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::super::codec::{Kind, Message};
    use super::super::frame::{self, EVERYBODY, Ends};
    use super::super::probe;
    use super::*;
    use crate::netlink::socket_filter;

    const CLIENT: Mac = Mac([2, 0, 0, 0, 0, 7]);

    /// Which of the frames the kernel lets through.
    fn passing(mut code: Vec<libc::sock_filter>, frames: &[Vec<u8>]) -> Vec<bool> {
        let (sender, receiver) = UnixDatagram::pair().unwrap();
        socket_filter::attach(&receiver, &mut code).unwrap();
        receiver.set_nonblocking(true).unwrap();
        let mut buffer = [0; 2048];
        let passes = |frame: &Vec<u8>| {
            sender.send(frame).unwrap();
            receiver.recv(&mut buffer).is_ok_and(|length| length == frame.len())
        };
        frames.iter().map(passes).collect()
    }

    /// A frame of a server with that message.
    fn reply(message: &Message) -> Vec<u8> {
        let ip = (Ipv4Addr::new(10, 1, 0, 1), Ipv4Addr::BROADCAST);
        let ends = Ends { mac: (Mac([2, 0, 0, 0, 0, 1]), EVERYBODY), ip };
        let mut frame = frame::from_client(&ends, &message.write()).unwrap();
        // Swapping two words of a sum leaves it.
        frame.swap(34, 36);
        frame.swap(35, 37);
        frame
    }

    /// The same with a byte changed.
    fn with(frame: &[u8], at: usize, byte: u8) -> Vec<u8> {
        let mut frame = frame.to_vec();
        frame[at] = byte;
        frame
    }

    /// Rows: DHCP-filter.
    #[test]
    fn only_answers_to_the_client_come_through() {
        let offer = reply(&Message::of(Kind::Offer, 1, CLIENT));
        // Options of IPv4: four bytes that say nothing, and a header that is longer by them.
        let mut with_options = with(&offer, 14, 0x46);
        with_options.splice(34..34, [1, 1, 1, 0]);
        let own = reply(&Message::of(Kind::Discover, 1, CLIENT));
        let frames = [
            (offer.clone(), true),
            (with_options.clone(), true),
            (own, false),
            (reply(&Message::of(Kind::Offer, 1, Mac([2, 0, 0, 0, 0, 8]))), false),
            (reply(&Message::of(Kind::Offer, 1, Mac([3, 0, 0, 0, 0, 7]))), false),
            (with(&offer, 23, 6), false),
            (with(&offer, 21, 1), false),
            (with(&offer, 35, 68), false),
            (with(&offer, 37, 67), false),
            // The operation and the cookie, with and without options of IPv4.
            (with(&offer, 42, 1), false),
            (with(&with_options, 46, 1), false),
            (with(&offer, 42 + 239, 0), false),
            (with(&with_options, 46 + 239, 0), false),
            (offer[..42 + 239].to_vec(), false),
            (offer[..30].to_vec(), false),
        ];
        let (frames, expected): (Vec<_>, Vec<_>) = frames.into_iter().unzip();
        assert_eq!(passing(answers_to(CLIENT), &frames), expected);
    }

    #[test]
    fn only_what_is_about_the_address_comes_through() {
        let asked = Ipv4Addr::new(10, 1, 0, 7);
        let question = |address: [u8; 4]| probe::question(CLIENT, address.into()).to_vec();
        let mut answer = question([10, 1, 0, 9]);
        answer[28..32].copy_from_slice(&asked.octets());
        let frames = [
            question([10, 1, 0, 7]),
            question([10, 1, 0, 8]),
            answer,
            question([10, 1, 0, 7])[..40].to_vec(),
        ];
        assert_eq!(passing(about(asked), &frames), [true, false, true, false]);
    }
}
