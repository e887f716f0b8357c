//! Ethertypes that the attachments of a network may exchange in addition to IP and ARP.

use netattach_common::AttachmentRecord;
use netattach_common::link::FIRST_ETHERTYPE;

/// Annotation of a NetworkAttachmentDefinition: up to [`MOST`] ethertypes, separated by commas, as `0x88b5`. Frames of
/// these ethertypes pass regardless of policies, and pods may send them even if netattach checks source addresses.
pub const ETHERTYPES_ANNOTATION: &str = "netattach.dev/ethertypes";

/// Maximum number of ethertypes: an attachment's record has room for this many.
pub const MOST: usize = AttachmentRecord::ETHERTYPES;

/// IPv4, ARP and IPv6, whose contents are checked by policies, and VLAN tags, which are followed by the ethertype.
const JUDGED: [u16; 6] = [0x0800, 0x0806, 0x86dd, 0x8100, 0x88a8, 0x9100];

/// Whether a number is an ethertype whose frames are not checked by their contents.
pub fn is_other(number: u16) -> bool {
    number >= FIRST_ETHERTYPE && !JUDGED.contains(&number)
}

/// The annotation is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEthertypes {
    /// Not an ethertype number.
    #[error("{0:?} is not an ethertype from 0x600 to 0xffff")]
    Number(String),
    /// The contents of this ethertype's frames are checked by policies.
    #[error("{0:#06x} is judged by policies and cannot be exempted")]
    Judged(u16),
    /// More ethertypes than a record has room for.
    #[error("{0} ethertypes, where there may be {MOST}")]
    Many(usize),
}

/// Parses the annotation and removes duplicates.
///
/// # Errors
/// An entry is not an ethertype that may pass, or there are too many.
pub fn parse(text: &str) -> Result<Vec<u16>, InvalidEthertypes> {
    let mut found = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let digits =
            word.strip_prefix("0x").filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let number = digits
            .and_then(|digits| u16::from_str_radix(digits, 16).ok())
            .filter(|number| *number >= FIRST_ETHERTYPE)
            .ok_or_else(|| InvalidEthertypes::Number(word.chars().take(32).collect()))?;
        if JUDGED.contains(&number) {
            return Err(InvalidEthertypes::Judged(number));
        }
        if !found.contains(&number) {
            found.push(number);
        }
    }
    if found.len() > MOST { Err(InvalidEthertypes::Many(found.len())) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_four_ethertypes_are_read_and_everything_else_is_refused() {
        let number = |text: &str| Err(InvalidEthertypes::Number(text.to_owned()));
        for (text, expected) in [
            ("0x88b5", Ok(vec![0x88b5])),
            (" 0x88B5 ,0x8863,0x88b5,", Ok(vec![0x88b5, 0x8863])),
            ("", Ok(Vec::new())),
            ("0x1,0x2", number("0x1")),
            ("0x5ff", number("0x5ff")),
            ("35000", number("35000")),
            ("0x+88b", number("0x+88b")),
            ("0x188b5", number("0x188b5")),
            ("ptp", number("ptp")),
            ("0x0800", Err(InvalidEthertypes::Judged(0x0800))),
            ("0x8100", Err(InvalidEthertypes::Judged(0x8100))),
            ("0x88b5,0x88b6,0x88b7,0x88b8", Ok(vec![0x88b5, 0x88b6, 0x88b7, 0x88b8])),
            ("0x88b5,0x88b6,0x88b7,0x88b8,0x88b9", Err(InvalidEthertypes::Many(5))),
        ] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }
}
