//! The differences between the versions of IP, and the packet that an ICMP error quotes.

use super::bytes::{Bytes, Plain};
use super::echo;
use super::header::{IPV6_LEN, Ipv4Header, Ipv6Header, Part};
use crate::flow::Tuple;
use crate::protocol::{DCCP, ICMP, ICMPV6, SCTP, TCP, UDP, UDP_LITE};
use crate::{Address, Ip4, Ip6, Ports};

/// The differences between the versions of IP, apart from their header formats.
pub trait Version: Address + Plain {
    /// Protocol number of its control messages.
    const ICMP: u8;
    /// Turns the tuple of an ICMP error into that of an answer to the packet quoted at `offset`. `false`: not possible.
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool;
}

impl Version for Ip4 {
    const ICMP: u8 = ICMP;

    #[inline(never)]
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool {
        let Ok(header) = bytes.load::<Ipv4Header>(offset) else {
            return false;
        };
        match header.shape() {
            Ok((header_len, Part::Whole | Part::First)) => {
                answer_ports(bytes, offset + header_len, header.tuple(answer.lane), answer)
            }
            _ => false,
        }
    }
}

impl Version for Ip6 {
    const ICMP: u8 = ICMPV6;

    #[inline(never)]
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool {
        match bytes.load::<Ipv6Header>(offset) {
            // A quoted packet with extension headers is too rare for a second walk.
            Ok(header) => answer_ports(bytes, offset + IPV6_LEN, header.tuple(answer.lane), answer),
            Err(_) => false,
        }
    }
}

#[inline(always)]
fn answer_ports<A: Version, B: Bytes>(
    bytes: &B,
    transport: usize,
    mut quoted: Tuple<A>,
    answer: &mut Tuple<A>,
) -> bool {
    match quoted.lane.protocol() {
        TCP | UDP | SCTP | DCCP | UDP_LITE => {
            let Ok(ports) = bytes.load::<Ports>(transport) else {
                return false;
            };
            quoted.ports = ports;
        }
        number if number == A::ICMP => {
            let Ok(message) = bytes.load(transport) else {
                return false;
            };
            echo::set_echo(&mut quoted, &message);
        }
        _ => {}
    }
    *answer = quoted.reversed();
    true
}
