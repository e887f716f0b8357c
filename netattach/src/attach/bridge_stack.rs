//! The settings that separate a bridge that netattach created from the node's own IP stack.
//!
//! A bridge is a device of the node as well, whether it has an address there or not. As the kernel makes one it gets a link-local
//! address, at which all that listens on `[::]` is reached; it answers ARP for every address of the node; and what pods send to its
//! Ethernet address reaches the node's addresses, and is forwarded where the node forwards. Where no network has its gateways on the
//! bridge that is nobody's intent: it is closed before it comes up, and opened for the first gateway. Frames between its ports are
//! switched in any case. What somebody else puts there later is not closed off: the node answers for an IPv4 address of the bridge
//! itself, and takes what comes from that one's subnet.
//!
//! | setting | on a closed bridge |
//! |---|---|
//! | `ipv4/conf/BRIDGE/arp_ignore` | 1: no reply for an address of the node that is not the bridge's own |
//! | `ipv4/conf/BRIDGE/rp_filter` | 1: without an address on the bridge no source is behind it, so that what comes by it is neither for the node nor forwarded (`fib_validate_source` in `net/ipv4/fib_frontend.c`), also after somebody has written `ip_forward`, which changes `forwarding` of all devices |
//! | `ipv6/conf/BRIDGE/disable_ipv6` | 1: no address, and nothing is received (`ip6_rcv_core` in `net/ipv6/ip6_input.c`); `forwarding` of one device keeps the kernel from nothing |

use super::StepError;
use super::apply::ensure_if_present;
use crate::sysctl;

/// A setting, by family, with what it is on a closed bridge.
type Setting = ((&'static str, &'static str), &'static str);

const ARP_IGNORE: Setting = (("ipv4", "arp_ignore"), "1");
const RP_FILTER: Setting = (("ipv4", "rp_filter"), "1");
const DISABLE_IPV6: Setting = (("ipv6", "disable_ipv6"), "1");

const CLOSED: [Setting; 3] = [ARP_IGNORE, RP_FILTER, DISABLE_IPV6];

fn key((family, setting): (&str, &str), device: &str) -> String {
    format!("{family}/conf/{device}/{setting}")
}

/// Separates a bridge from the node's IP stack.
///
/// # Errors
/// The kernel refuses a setting.
pub(super) fn close(bridge: &str) -> Result<(), StepError> {
    CLOSED.iter().try_for_each(|(setting, closed)| ensure_if_present(&key(*setting, bridge), closed))
}

/// Whether a bridge is closed. One that is gone is not. `rp_filter` does not tell: others write that of all devices.
pub(super) fn is_closed(bridge: &str) -> bool {
    let is = |setting| is_as_closed(setting, bridge);
    // A kernel without IPv6 has none of its settings.
    is(ARP_IGNORE) == Some(true) && is(DISABLE_IPV6).or_else(|| is(RP_FILTER)) == Some(true)
}

/// Whether a setting is what it is on a closed bridge; `None`: there is none.
fn is_as_closed((setting, closed): Setting, bridge: &str) -> Option<bool> {
    sysctl::value(&key(setting, bridge)).map(|found| found == closed)
}

/// Has a bridge that was closed be as the kernel makes one, but for what somebody has written since. Others are left alone, and so is
/// one of which that was cut short: IPv6 comes first, and what is closed still keeps no pod from a gateway of its subnet.
///
/// # Errors
/// The kernel refuses a setting.
pub(super) fn open(bridge: &str) -> Result<(), StepError> {
    if !is_closed(bridge) {
        return Ok(());
    }
    let closed = CLOSED.into_iter().rev().filter(|it| is_as_closed(*it, bridge) == Some(true));
    closed.map(|(setting, _)| setting).try_for_each(|setting| {
        // A new device has these.
        let made_with = sysctl::value(&key(setting, "default")).unwrap_or_else(|| "0".to_owned());
        ensure_if_present(&key(setting, bridge), &made_with)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};
    use crate::spec;

    /// Rows: BRG-closed.
    #[test]
    fn a_bridge_is_closed_and_opened_and_one_that_was_not_closed_is_left_alone() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let bridge = spec::Bridge { name: "br0".to_owned(), ..spec::Bridge::default() };
            host.ensure_bridge(&bridge).unwrap();
            let settings = || CLOSED.map(|(setting, _)| sysctl::value(&key(setting, "br0")).unwrap());
            let made = settings();
            assert!(!is_closed("br0") && !is_closed("gone0"));
            close("br0").unwrap();
            assert_eq!((settings(), is_closed("br0")), (["1", "1", "1"].map(str::to_owned), true));
            close("br0").unwrap();
            open("br0").unwrap();
            assert_eq!(settings(), made);
            // Of all devices somebody has written it since.
            close("br0").unwrap();
            sysctl::ensure(&key(RP_FILTER.0, "br0"), "2").unwrap();
            open("br0").unwrap();
            assert_eq!(settings(), [made[0].clone(), "2".to_owned(), made[2].clone()]);
            // As its administrator wants it: stricter than it was made, and not closed.
            for (setting, closed) in &CLOSED[..2] {
                sysctl::ensure(&key(*setting, "br0"), closed).unwrap();
            }
            open("br0").unwrap();
            assert_eq!(settings()[..2], ["1", "1"]);
        })
        .unwrap();
    }
}
