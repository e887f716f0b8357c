//! The link layer: Ethernet and VLAN tags.

use super::bytes::{Bytes, Plain};
use crate::flow::{self, Lane};
use crate::link::FIRST_ETHERTYPE;
use crate::{DropReason, Mac};

/// Length of an Ethernet header without tags.
pub const ETHERNET_LEN: usize = 14;
/// Length of a VLAN tag.
pub const TAG_LEN: usize = 4;

/// EtherType numbers (IEEE 802).
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// Customer VLAN tag.
    pub const VLAN: u16 = 0x8100;
    /// Service VLAN tag.
    pub const QINQ: u16 = 0x88a8;
    /// Service VLAN tag, the number used before the standard.
    pub const OLD_QINQ: u16 = 0x9100;
    /// Linux's number for frames with a length instead of an ethertype, in Novell's format (`ETH_P_802_3`).
    pub const NOVELL: u16 = 1;
    /// Linux's number for all other frames with a length (`ETH_P_802_2`).
    pub const IEEE_802_2: u16 = 4;
}

/// An Ethernet header (IEEE 802.3) without tags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EthernetHeader {
    /// Destination address.
    pub destination: Mac,
    /// Source address.
    pub source: Mac,
    /// Type of the payload, in network order.
    pub ethertype: u16,
}

/// A VLAN tag (IEEE 802.1Q) after its ethertype, and the ethertype of the payload.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tag {
    /// Priority and VLAN id, in network order.
    pub control: u16,
    /// Type of what follows, in network order.
    pub ethertype: u16,
}

const _: () = {
    assert!(size_of::<EthernetHeader>() == ETHERNET_LEN);
    assert!(size_of::<Tag>() == TAG_LEN);
};

// SAFETY: integers and addresses, as long as these together (asserted above).
unsafe impl Plain for EthernetHeader {}
// SAFETY: as above.
unsafe impl Plain for Tag {}

/// The payload of a frame, after its tags. No padding, as required for arguments of subprograms.
#[repr(C)]
pub struct Payload {
    /// Its type.
    pub ethertype: u16,
    /// Its offset in the frame.
    pub offset: u16,
    /// The VLAN tags as they stand in keys; no protocol yet.
    pub lane: Lane,
}

const _: () = assert!(size_of::<Payload>() == 8);

/// Walks over at most two tags. At ingress the kernel has moved the outer one out of the frame; at egress it may be
/// in either place. `may_use`: whether the attachment may use the VLAN of this id; asked for tags with an id. The lane
/// of a frame is that without the tags that have none.
///
/// # Errors
/// There are more tags, or one is not allowed or truncated.
#[inline(always)]
pub fn peel<B: Bytes>(
    bytes: &B,
    payload: &mut Payload,
    may_use: impl Fn(u16) -> bool,
) -> Result<(), DropReason> {
    // A tag without an id carries a priority alone (IEEE 802.1Q, priority-tagged frames): it names no VLAN.
    // The closure answers yes or no, no `Result` with the id: that would be unwritten in a refusal, and the verifier refuses to
    // copy such a word.
    let may_pass = |id: u16| id == 0 || may_use(id);
    let (mut ethertype, mut offset) = (payload.ethertype, ETHERNET_LEN);
    let (mut outer, mut inner) = (0, 0);
    let mut found = 0usize;
    let (present, beside) = bytes.tag_beside();
    if present {
        outer = vlan_id(beside);
        if !may_pass(outer) {
            return Err(DropReason::VlanTagged);
        }
        found = 1;
    }
    if is_tag(ethertype) {
        let tag: Tag = bytes.load(offset)?;
        let id = vlan_id(u16::from_be(tag.control));
        if !may_pass(id) {
            return Err(DropReason::VlanTagged);
        }
        (outer, inner) = behind(outer, id);
        found += 1;
        ethertype = u16::from_be(tag.ethertype);
        offset += TAG_LEN;
    }
    if is_tag(ethertype) && found == 1 {
        let tag: Tag = bytes.load(offset)?;
        let id = vlan_id(u16::from_be(tag.control));
        if !may_pass(id) {
            return Err(DropReason::VlanTagged);
        }
        (outer, inner) = behind(outer, id);
        ethertype = u16::from_be(tag.ethertype);
        offset += TAG_LEN;
    }
    if is_tag(ethertype) {
        return Err(DropReason::VlanTagged);
    }
    payload.ethertype = ethertype;
    payload.offset = offset as u16;
    payload.lane = Lane::new(0, flow::tags(outer, inner));
    Ok(())
}

/// The ids of the outer and the inner VLAN of a frame with a tag of `id` behind that of `outer`; 0 is none.
#[inline(always)]
const fn behind(outer: u16, id: u16) -> (u16, u16) {
    if outer == 0 { (id, 0) } else { (outer, id) }
}

/// The VLAN id of a tag's control information; the other bits are its priority.
#[inline(always)]
pub const fn vlan_id(control: u16) -> u16 {
    control & 0xfff
}

/// Whether `protocol`, by which the kernel chooses the handler of a frame, agrees with the frame's header: it is the
/// ethertype, or for a length one of Linux's numbers for such frames, or the length itself, which is no protocol of
/// IP. A driver that reads the protocol from the frame (`eth_type_trans`) returns one of these.
#[inline(always)]
pub const fn is_named(protocol: u16, ethertype: u16) -> bool {
    protocol == ethertype
        || ethertype < FIRST_ETHERTYPE && matches!(protocol, ethertype::NOVELL | ethertype::IEEE_802_2)
}

/// Whether an ethertype is a tag's.
#[inline(always)]
pub const fn is_tag(number: u16) -> bool {
    matches!(number, ethertype::VLAN | ethertype::QINQ | ethertype::OLD_QINQ)
}

#[cfg(test)]
mod tests {
    use super::super::bytes::InMemory;
    use super::*;

    /// The ethertype, the offset and the tags in the lane of a frame of IPv4 behind `tags`; `ids` are allowed.
    fn peeled(beside: Option<u16>, tags: &[u16], ids: &[u16]) -> Result<(u16, u16, [u8; 3]), DropReason> {
        let mut bytes = vec![0; 12];
        tags.iter().for_each(|tag| bytes.extend([ethertype::VLAN.to_be_bytes(), tag.to_be_bytes()].concat()));
        bytes.extend([8, 0, 0, 0]);
        let number = u16::from_be_bytes([bytes[12], bytes[13]]);
        let read = InMemory { bytes: &bytes, in_place: 0, is_uncut: false, tag_beside: beside };
        let mut payload = Payload { ethertype: number, offset: ETHERNET_LEN as u16, lane: Lane::NONE };
        peel(&read, &mut payload, |id| ids.contains(&id))?;
        Ok((payload.ethertype, payload.offset, payload.lane.tags()))
    }

    #[test]
    fn a_tag_without_an_id_is_of_no_vlan_and_counts_as_a_tag() {
        const PRIORITY: u16 = 6 << 13;
        let plain = |offset| Ok((ethertype::IPV4, offset, [0; 3]));
        assert_eq!(peeled(Some(PRIORITY), &[], &[]), plain(14));
        assert_eq!(peeled(None, &[PRIORITY], &[]), plain(18));
        assert_eq!(peeled(Some(0), &[PRIORITY], &[]), plain(18));
        // Before the tag of a VLAN and behind it, the frame is in the VLAN.
        let in_vlan = |offset| Ok((ethertype::IPV4, offset, flow::tags(5, 0)));
        assert_eq!(peeled(None, &[5], &[5]), in_vlan(18));
        assert_eq!(peeled(None, &[PRIORITY, 5], &[5]), in_vlan(22));
        assert_eq!(peeled(Some(PRIORITY), &[5], &[5]), in_vlan(18));
        assert_eq!(peeled(None, &[5, PRIORITY], &[5]), in_vlan(22));
        assert_eq!(peeled(None, &[5, 6], &[5, 6]), Ok((ethertype::IPV4, 22, flow::tags(5, 6))));
        let refused = Err(DropReason::VlanTagged);
        assert_eq!(peeled(None, &[PRIORITY | 5], &[]), refused);
        assert_eq!(peeled(None, &[PRIORITY, 5], &[]), refused);
        assert_eq!(peeled(Some(0), &[0, 0], &[]), refused);
        assert_eq!(peeled(None, &[0, 0, 0], &[]), refused);
    }

    #[test]
    fn a_frame_goes_by_what_its_header_says_or_by_no_name_at_all() {
        let table = [
            (ethertype::IPV4, ethertype::IPV4, true),
            (ethertype::IPV6, ethertype::IPV6, true),
            (0x88b5, 0x88b5, true),
            (ethertype::VLAN, ethertype::VLAN, true),
            (ethertype::IPV4, 0x88b5, false),
            (ethertype::IPV6, 0x88b5, false),
            (0x88b5, ethertype::IPV4, false),
            (ethertype::IPV6, ethertype::IPV4, false),
            (ethertype::VLAN, ethertype::IPV4, false),
            (ethertype::IPV4, ethertype::VLAN, false),
            (0, ethertype::IPV4, false),
            // Lengths: 46 bytes, and the greatest below the ethertypes.
            (ethertype::IEEE_802_2, 46, true),
            (ethertype::NOVELL, 0x05ff, true),
            (46, 46, true),
            (47, 46, false),
            (ethertype::IPV4, 46, false),
            (ethertype::IEEE_802_2, 0x0600, false),
        ];
        for (protocol, ethertype, expected) in table {
            assert_eq!(is_named(protocol, ethertype), expected, "{protocol:#x} {ethertype:#x}");
        }
    }
}
