//! ethtool over netlink (Linux 5.7): which features of a device are on
//! (`Documentation/networking/ethtool-netlink.rst`).

use super::Error;
use super::generic::Generic;
use super::nft::{attribute, attribute_in, attributes_of, name, nested};

const FAMILY: &str = "ethtool";
/// `linux/ethtool_netlink.h`.
const FEATURES_GET: u8 = 11;
const ETHTOOL_A_FEATURES_HEADER: u16 = 1;
const ETHTOOL_A_FEATURES_ACTIVE: u16 = 4;
const ETHTOOL_A_HEADER_DEV_INDEX: u16 = 1;
const ETHTOOL_A_BITSET_BITS: u16 = 3;
const ETHTOOL_A_BITSET_BIT_NAME: u16 = 2;

const ASK: &str = "ETHTOOL_MSG_FEATURES_GET";

/// The feature that lets a card switch flows by itself after tc has offloaded them: these flows pass no
/// program.
pub const TC_OFFLOAD: &str = "hw-tc-offload";

/// Whether that feature is on for the device of that index; `None`: the kernel does not report the feature,
/// or has no such device.
///
/// # Errors
/// The kernel does not answer, or refuses.
pub fn is_on(device: u32, feature: &str) -> Result<Option<bool>, Error> {
    let Some(mut ethtool) = Generic::open(FAMILY)? else { return Ok(None) };
    let index = attribute(ETHTOOL_A_HEADER_DEV_INDEX, &device.to_ne_bytes());
    let asked = nested(ETHTOOL_A_FEATURES_HEADER, &[index]);
    let shown = ethtool.ask(ASK, FEATURES_GET, &asked)?;
    Ok(shown.and_then(|shown| is_active(&shown, feature)))
}

/// Whether an answer has the feature among the active ones: a bit set without a mask lists the bits that are
/// set.
fn is_active(shown: &[u8], feature: &str) -> Option<bool> {
    let active = attribute_in(shown, ETHTOOL_A_FEATURES_ACTIVE)?;
    let bits = attribute_in(active, ETHTOOL_A_BITSET_BITS).unwrap_or_default();
    let is_it =
        |bit: &[u8]| attribute_in(bit, ETHTOOL_A_BITSET_BIT_NAME).and_then(name).as_deref() == Some(feature);
    Some(attributes_of(bits).any(|(_, bit)| is_it(bit)))
}

#[cfg(test)]
mod tests {
    use super::super::LOOPBACK;
    use super::super::nft::text;
    use super::*;

    /// Rows: SRV-offload.
    #[test]
    fn a_feature_is_on_if_it_is_among_the_active_ones() {
        let bit = |feature: &str| nested(1, &[attribute(ETHTOOL_A_BITSET_BIT_NAME, &text(feature))]);
        let set = |kind, features: &[&str]| {
            let bits = features.iter().map(|feature| bit(feature)).collect::<Vec<_>>();
            nested(kind, &[attribute(1, &[]), nested(ETHTOOL_A_BITSET_BITS, &bits)])
        };
        let hardware = set(2, &["rx-gro", TC_OFFLOAD]);
        let answer = |active: &[&str]| [hardware.clone(), set(ETHTOOL_A_FEATURES_ACTIVE, active)].concat();
        assert_eq!(is_active(&answer(&["rx-gro", TC_OFFLOAD]), TC_OFFLOAD), Some(true));
        assert_eq!(is_active(&answer(&["rx-gro"]), TC_OFFLOAD), Some(false));
        assert_eq!(is_active(&answer(&[]), TC_OFFLOAD), Some(false));
        assert_eq!(is_active(&hardware, TC_OFFLOAD), None);
    }

    /// Rows: SRV-offload.
    #[test]
    fn the_kernel_tells_of_a_device() {
        assert_eq!(is_on(LOOPBACK, "loopback").unwrap(), Some(true));
        assert_eq!(is_on(LOOPBACK, TC_OFFLOAD).unwrap(), Some(false));
        assert_eq!(is_on(u32::MAX >> 1, TC_OFFLOAD).unwrap(), None);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            is_active(&bytes, TC_OFFLOAD);
        }
    }
}
