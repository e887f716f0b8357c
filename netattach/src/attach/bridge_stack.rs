//! The settings that separate a bridge that netattach created from the node's own IP stack.
//!
//! A bridge is also a device of the node, whether or not it has an address. By default, the kernel gives a new bridge
//! a link-local address, at which every service that listens on `[::]` is reachable; the bridge answers ARP for every
//! address of the node; and packets that pods send to the bridge's Ethernet address reach the node's addresses, and
//! are forwarded if the node forwards. If no network has its gateway addresses on the bridge, none of this is wanted:
//! the bridge is closed before it comes up, and opened for the first gateway address. Frames between its ports are
//! switched in any case.
//!
//! | setting | on a closed bridge |
//! |---|---|
//! | `ipv4/conf/BRIDGE/arp_ignore` | 8: no reply for any address of the node |
//! | `ipv4/conf/BRIDGE/rp_filter` | 1: without an address on the bridge no source is behind it, so packets from the bridge are neither delivered to the node nor forwarded (`fib_validate_source` in `net/ipv4/fib_frontend.c`), also after a write to `ip_forward`, which changes `forwarding` of all devices |
//! | `ipv6/conf/BRIDGE/disable_ipv6` | 1: no address, and nothing is received (`ip6_rcv_core` in `net/ipv6/ip6_input.c`); `forwarding` of a single device does not prevent forwarding |

use super::StepError;
use super::apply::ensure_if_present;
use crate::sysctl;

/// The IPv4 setting that is written first when a bridge is closed and last when it is opened, so it shows that a
/// bridge is closed.
const KNOWN_BY: (&str, &str) = ("ipv4", "arp_ignore");

/// The settings, by family, with their values on a closed bridge.
const CLOSED: [((&str, &str), &str); 3] =
    [(KNOWN_BY, "8"), (("ipv4", "rp_filter"), "1"), (("ipv6", "disable_ipv6"), "1")];

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

/// Restores the kernel's default settings of a bridge that was closed. Leaves other bridges alone.
///
/// # Errors
/// The kernel refuses a setting.
pub(super) fn open(bridge: &str) -> Result<(), StepError> {
    let is_closed =
        CLOSED.iter().any(|(it, closed)| *it == KNOWN_BY && sysctl::is(&key(*it, bridge), closed));
    if !is_closed {
        return Ok(());
    }
    CLOSED.iter().rev().try_for_each(|(setting, _)| {
        // The values that a new device gets.
        let made_with = sysctl::value(&key(*setting, "default")).unwrap_or_else(|| "0".to_owned());
        ensure_if_present(&key(*setting, bridge), &made_with)
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
            close("br0").unwrap();
            assert_eq!(settings(), ["8", "1", "1"]);
            close("br0").unwrap();
            open("br0").unwrap();
            assert_eq!(settings(), made);
            // As its administrator wants it.
            sysctl::ensure("ipv4/conf/br0/rp_filter", "2").unwrap();
            open("br0").unwrap();
            assert_eq!(settings()[1], "2");
        })
        .unwrap();
    }
}
