//! The settings that separate a bridge that netattach created from the node's own IP stack.
//!
//! A bridge is also a device of the node, with or without an address there. A new bridge gets a link-local address
//! from the kernel, at which everything that listens on `[::]` can be reached; it answers ARP for every address of
//! the node; and packets that pods send to its Ethernet address reach the node's addresses, and are forwarded if the
//! node forwards. No author intends this for a network without gateways on the bridge. So such a bridge is closed
//! before it comes up, and opened for the first gateway. Frames between its ports are switched in any case. A closed
//! bridge does not block an address that another process adds later: the node answers ARP for an IPv4 address of the
//! bridge itself, and receives packets from the subnet of that address.
//!
//! | setting | on a closed bridge |
//! |---|---|
//! | `ipv4/conf/BRIDGE/arp_ignore` | 1: no reply for an address of the node that is not the bridge's own |
//! | `ipv4/conf/BRIDGE/rp_filter` | 1: without an address on the bridge no source is behind it, so packets that arrive on it are neither delivered to the node nor forwarded (`fib_validate_source` in `net/ipv4/fib_frontend.c`), even after another process has written `ip_forward`, which changes `forwarding` of all devices. The kernel does not ask for a route back to 0.0.0.0/8: what comes from there to 255.255.255.255, 0.0.0.0 or a group of 224.0.0.0/24 that the bridge has joined is delivered (`ip_route_input_slow`, `ip_mc_validate_source` in `net/ipv4/route.c`), but not forwarded |
//! | `ipv6/conf/BRIDGE/disable_ipv6` | 1: no address, and nothing is received (`ip6_rcv_core` in `net/ipv6/ip6_input.c`); `forwarding` of a single device does not restrict the kernel |

use super::ensure_if_present;
use crate::attach::StepError;
use crate::sysctl;

/// A setting with its family, and its value on a closed bridge.
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

/// Whether a bridge is closed; `false` if it is gone. `rp_filter` alone does not show it: other processes write
/// `rp_filter` of all devices.
pub(super) fn is_closed(bridge: &str) -> bool {
    let is = |setting| is_as_closed(setting, bridge);
    // A kernel without IPv6 has no IPv6 settings.
    is(ARP_IGNORE) == Some(true) && is(DISABLE_IPV6).or_else(|| is(RP_FILTER)) == Some(true)
}

/// Whether a setting has the value of a closed bridge; `None`: there is no such setting.
fn is_as_closed((setting, closed): Setting, bridge: &str) -> Option<bool> {
    sysctl::value(&key(setting, bridge)).map(|found| found == closed)
}

/// Restores the default settings of a closed bridge, except settings that other processes have changed since. Leaves
/// other bridges alone, including one whose opening was interrupted: IPv6 is restored first, and the remaining
/// settings do not keep pods from a gateway of their subnet.
///
/// # Errors
/// The kernel refuses a setting.
pub(super) fn open(bridge: &str) -> Result<(), StepError> {
    if !is_closed(bridge) {
        return Ok(());
    }
    let closed = CLOSED.into_iter().rev().filter(|it| is_as_closed(*it, bridge) == Some(true));
    closed.map(|(setting, _)| setting).try_for_each(|setting| {
        // New devices get the value of `default`.
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
            // Another process has since written the setting of all devices.
            close("br0").unwrap();
            sysctl::ensure(&key(RP_FILTER.0, "br0"), "2").unwrap();
            open("br0").unwrap();
            assert_eq!(settings(), [made[0].clone(), "2".to_owned(), made[2].clone()]);
            // Set by the administrator: stricter than the default, but not closed.
            for (setting, closed) in &CLOSED[..2] {
                sysctl::ensure(&key(*setting, "br0"), closed).unwrap();
            }
            open("br0").unwrap();
            assert_eq!(settings()[..2], ["1", "1"]);
        })
        .unwrap();
    }
}
