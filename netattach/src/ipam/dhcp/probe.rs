//! Probes whether another host has an offered address (RFC 2131, section 3.1, step 5): ARP probes as in RFC 5227, but
//! faster, because a caller waits for the ADD. Pure.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::frame::EVERYBODY;
use crate::mac::Mac;

/// Number of probes, and the wait after each. RFC 5227 (section 1.1) takes 4 to 7 s, which is half of the time that
/// an ADD has; a host on the link answers within a few milliseconds, and one probe may be lost.
pub(super) const TIMES: u32 = 3;
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// Ethernet and IPv4, with the lengths of their addresses (RFC 826).
const ETHERTYPE: [u8; 2] = [8, 6];
const KINDS: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];
/// Length of a frame.
const LENGTH: usize = 14 + 28;

/// Returns the frame that asks for an address without claiming it.
pub(super) fn question(own: Mac, address: Ipv4Addr) -> [u8; LENGTH] {
    let parts: [&[u8]; 9] = [
        &EVERYBODY.0,
        &own.0,
        &ETHERTYPE,
        &KINDS,
        &REQUEST,
        &own.0,
        &Ipv4Addr::UNSPECIFIED.octets(),
        &[0; 6],
        &address.octets(),
    ];
    let mut frame = [0; LENGTH];
    for (to, byte) in frame.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *byte;
    }
    frame
}

/// Returns the host that has the address according to a frame, or that is about to take it; `None`: the frame tells
/// neither.
pub fn holder(frame: &[u8], own: Mac, address: Ipv4Addr) -> Option<Mac> {
    let frame = frame.first_chunk::<LENGTH>()?;
    let is_request = frame[20..22] == REQUEST;
    if frame[12..14] != ETHERTYPE || frame[14..20] != KINDS || !(is_request || frame[20..22] == REPLY) {
        return None;
    }
    let at = |from: usize| Ipv4Addr::new(frame[from], frame[from + 1], frame[from + 2], frame[from + 3]);
    let (sender, target) = (at(28), at(38));
    let mac = Mac([frame[22], frame[23], frame[24], frame[25], frame[26], frame[27]]);
    // Another client that probes for the address was offered it too (RFC 5227, section 2.1.1).
    let claims = sender == address || (sender.is_unspecified() && is_request && target == address);
    (claims && mac != own).then_some(mac)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 7]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 8]);
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 7);

    /// What a host sends: its answer, or its question with an address of its own.
    fn sent(by: Mac, operation: [u8; 2], from: Ipv4Addr, about: Ipv4Addr) -> [u8; LENGTH] {
        let mut frame = question(by, about);
        frame[20..22].copy_from_slice(&operation);
        frame[28..32].copy_from_slice(&from.octets());
        frame
    }

    /// Rows: DHCP-probe.
    #[test]
    fn a_host_has_an_address_that_it_speaks_from_or_asks_for_as_we_do() {
        let (nobody, another) = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::new(10, 1, 0, 9));
        let mut of_tokens = sent(OTHER, REPLY, ADDRESS, another);
        of_tokens[15] = 4;
        for (frame, expected, what) in [
            (sent(OTHER, REPLY, ADDRESS, nobody), Some(OTHER), "it answers"),
            (sent(OTHER, REQUEST, ADDRESS, another), Some(OTHER), "it asks by it"),
            (sent(OTHER, REQUEST, nobody, ADDRESS), Some(OTHER), "it probes for it"),
            (sent(OTHER, REQUEST, another, ADDRESS), None, "it asks for it, by its own"),
            (sent(OTHER, REPLY, another, ADDRESS), None, "it tells who asks for it"),
            (sent(OTHER, [0, 3], ADDRESS, nobody), None, "neither question nor answer"),
            (question(OWN, ADDRESS), None, "our own question"),
            (of_tokens, None, "not for Ethernet"),
        ] {
            assert_eq!(holder(&frame, OWN, ADDRESS), expected, "{what}");
            assert_eq!(holder(&frame[..LENGTH - 1], OWN, ADDRESS), None, "{what}, cut");
        }
    }

    #[test]
    fn a_question_is_an_arp_probe() {
        let expected = [
            &[0xff; 6][..],
            &OWN.0,
            &[8, 6],
            &[0, 1, 8, 0, 6, 4, 0, 1],
            &OWN.0,
            &[0; 4],
            &[0; 6],
            &[10, 1, 0, 7],
        ];
        assert_eq!(question(OWN, ADDRESS).as_slice(), expected.concat());
    }

    proptest! {
        #[test]
        fn any_bytes_are_of_a_holder_or_none(bytes: Vec<u8>) {
            let _ = holder(&bytes, OWN, ADDRESS);
        }
    }
}
