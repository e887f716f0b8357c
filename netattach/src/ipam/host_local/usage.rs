//! How many addresses a pool has, and how many of them are held. Pure.

use std::net::IpAddr;

use super::range::Range;
use super::{Config, survey};
use crate::ipam::PoolUse;

/// The use of a pool, by family, those that the configuration has. `reserved` is whether an address is reserved.
pub(super) fn of(config: &Config, reserved: &[IpAddr]) -> Vec<PoolUse> {
    let use_of = |is_ipv4: bool| {
        let sets: Vec<_> = config.sets.iter().filter(|set| set.is_ipv4() == is_ipv4).collect();
        let ranges: Vec<&Range> = sets.iter().flat_map(|set| set.ranges()).collect();
        let may_give = |address: IpAddr| {
            ranges.iter().any(|range| range.contains(address) && range.gateway != address)
                && !config.exclude.iter().any(|excluded| excluded.contains(&address))
        };
        let size = |range: &Range| survey::size(range, &survey::never(range, &config.exclude));
        (!sets.is_empty()).then(|| PoolUse {
            network: config.network.clone(),
            family: if is_ipv4 { "IPv4" } else { "IPv6" },
            // Ranges of one pool do not overlap.
            size: ranges.iter().map(|range| size(range)).fold(0, u128::saturating_add),
            used: reserved.iter().filter(|address| may_give(**address)).count(),
        })
    };
    [true, false].into_iter().filter_map(use_of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn used(ipam: serde_json::Value, reserved: &[&str]) -> Vec<(&'static str, u128, usize)> {
        let config = json!({"name": "lan", "ipam": ipam});
        let config = Config::parse(config.as_object().unwrap(), None).unwrap();
        let reserved: Vec<IpAddr> = reserved.iter().map(|address| address.parse().unwrap()).collect();
        of(&config, &reserved).into_iter().map(|it| (it.family, it.size, it.used)).collect()
    }

    /// Rows: HLC-exclude.
    #[test]
    fn neither_the_gateway_nor_what_is_excluded_can_be_given() {
        let subnet = |rest: serde_json::Value| {
            let mut ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/29"}]]});
            ipam.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            ipam
        };
        // 10.1.0.1 to 10.1.0.6, of which the first is the gateway.
        assert_eq!(
            used(subnet(json!({})), &["10.1.0.2", "10.1.0.6", "10.1.0.1", "10.9.0.1"]),
            [("IPv4", 5, 2)]
        );
        let excluded = json!({"exclude": ["10.1.0.4/31", "10.1.0.5/32", "10.1.0.4/31", "10.2.0.0/16"]});
        assert_eq!(used(subnet(excluded), &["10.1.0.2", "10.1.0.4"]), [("IPv4", 3, 1)]);
        let gateway = json!({"exclude": ["10.1.0.0/30"]});
        assert_eq!(used(subnet(gateway), &[]), [("IPv4", 3, 0)]);
    }

    #[test]
    fn families_are_counted_apart_and_large_ones_do_not_overflow() {
        let both =
            json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]});
        let [four, six] = used(both, &["fd00::2"])[..] else { panic!("two families") };
        assert_eq!(four, ("IPv4", 1, 0));
        assert_eq!((six.0, six.2), ("IPv6", 1));
        assert!(six.1 > u128::from(u64::MAX) - 4 && six.1 <= u128::from(u64::MAX) + 1, "{}", six.1);
    }
}
