//! Definitions of the node's default network that take their range from the node: `usePodCidr` instead of a
//! subnet of host-local, as in Calico's plugin.
//!
//! | written | stands for |
//! |---|---|
//! | `"subnet": "usePodCidr"` | the node's IPv4 podCIDR |
//! | `"subnet": "usePodCidrIPv6"` | its IPv6 podCIDR |
//!
//! Both in `ipam` itself and in its `ranges`.

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::ranges::NoRange;
use crate::cni::NetworkList;

/// Stands for the IPv4 range.
const IPV4: &str = "usePodCidr";
/// Stands for the IPv6 range.
const IPV6: &str = "usePodCidrIPv6";
/// The only address management that has ranges.
const HOST_LOCAL: &str = "host-local";

/// Whether the text of a configuration may contain such a name.
pub fn is_named(config: &str) -> bool {
    config.contains(IPV4)
}

/// Whether the network takes a range from the node.
pub fn is_used(list: &NetworkList) -> bool {
    list.plugins.iter().filter_map(|plugin| plugin.raw().get("ipam")?.as_object()).any(|ipam| {
        of_host_local(ipam) && subnets(ipam).any(|subnet| matches!(subnet.as_str(), Some(IPV4 | IPV6)))
    })
}

/// Replaces the names by the node's ranges.
///
/// # Errors
/// [`NoRange::NoneOfFamily`]: the node has no range of a family that is named.
pub fn fill(list: &mut NetworkList, node: &str, ranges: &[IpNet]) -> Result<(), NoRange> {
    let sections = list.plugins.iter_mut().filter_map(|plugin| plugin.ipam_mut());
    for ipam in sections.filter(|ipam| of_host_local(ipam)) {
        for subnet in subnets_mut(ipam) {
            let is_ipv4 = match subnet.as_str() {
                Some(IPV4) => true,
                Some(IPV6) => false,
                _ => continue,
            };
            let range = ranges.iter().find(|range| range.addr().is_ipv4() == is_ipv4);
            let none = || NoRange::NoneOfFamily {
                node: node.to_owned(),
                is_ipv4,
                ranges: ranges.iter().map(IpNet::to_string).collect::<Vec<_>>().join(", "),
            };
            *subnet = range.ok_or_else(none)?.to_string().into();
        }
    }
    Ok(())
}

/// Whether host-local has a literal range: another node would hand out the same addresses.
pub fn is_fixed(list: &NetworkList) -> bool {
    let sections = list.plugins.iter().filter_map(|plugin| plugin.raw().get("ipam")?.as_object());
    sections.filter(|ipam| of_host_local(ipam)).any(|ipam| {
        subnets(ipam).any(|subnet| subnet.as_str().is_some_and(|text| !matches!(text, "" | IPV4 | IPV6)))
    })
}

fn of_host_local(ipam: &Map<String, Value>) -> bool {
    ipam.get("type").and_then(Value::as_str) == Some(HOST_LOCAL)
}

/// The subnets of an `ipam` section. Values of another shape are skipped; planning refuses them.
fn subnets(ipam: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let sets = ipam.get("ranges").and_then(Value::as_array).into_iter().flatten();
    let ranges = sets.filter_map(Value::as_array).flatten();
    ipam.get("subnet").into_iter().chain(ranges.filter_map(|range| range.get("subnet")))
}

fn subnets_mut(ipam: &mut Map<String, Value>) -> Vec<&mut Value> {
    let mut found = Vec::new();
    for (key, value) in ipam.iter_mut() {
        match (key.as_str(), value) {
            ("subnet", subnet) => found.push(subnet),
            ("ranges", Value::Array(sets)) => {
                let ranges = sets.iter_mut().filter_map(Value::as_array_mut).flatten();
                found.extend(ranges.filter_map(|range| range.get_mut("subnet")));
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list(ipam: &Value) -> NetworkList {
        let text = json!({"name": "a", "cniVersion": "1.0.0", "type": "bridge", "ipam": ipam}).to_string();
        NetworkList::parse(text.as_bytes()).unwrap()
    }

    fn filled(ipam: &Value, ranges: &[&str]) -> Result<Value, String> {
        let mut list = list(ipam);
        let ranges: Vec<IpNet> = ranges.iter().map(|range| range.parse().unwrap()).collect();
        fill(&mut list, "a", &ranges).map_err(|error| error.to_string())?;
        Ok(list.plugins[0].raw()["ipam"].clone())
    }

    #[test]
    fn the_words_give_way_to_the_nodes_ranges_wherever_a_subnet_stands() {
        let both = ["10.1.0.0/24", "fd00::/64"];
        let words = json!({
            "type": "host-local", "subnet": "usePodCidr",
            "ranges": [[{"subnet": "usePodCidrIPv6", "rangeStart": "fd00::9"}], [{"subnet": "10.9.0.0/24"}]],
        });
        let expected = json!({
            "type": "host-local", "subnet": "10.1.0.0/24",
            "ranges": [[{"subnet": "fd00::/64", "rangeStart": "fd00::9"}], [{"subnet": "10.9.0.0/24"}]],
        });
        assert!(is_named(&words.to_string()) && is_used(&list(&words)));
        assert_eq!(filled(&words, &both), Ok(expected));
        assert_eq!(
            filled(&json!({"type": "host-local", "subnet": "usePodCidrIPv6"}), &["10.1.0.0/24"]),
            Err("node a has no podCIDR of IPv6, only 10.1.0.0/24".into())
        );
    }

    #[test]
    fn what_is_not_of_host_local_stays() {
        for other in [
            json!({"type": "calico-ipam", "subnet": "usePodCidr"}),
            json!({"subnet": "usePodCidr"}),
            json!({"type": "host-local", "subnet": 7, "ranges": "usePodCidr"}),
            json!({"type": "host-local", "ranges": [{"subnet": "usePodCidr"}]}),
        ] {
            assert!(!is_used(&list(&other)), "{other}");
            assert_eq!(filled(&other, &[]), Ok(other.clone()));
        }
    }

    #[test]
    fn a_range_that_is_written_out_is_fixed() {
        for (ipam, expected) in [
            (json!({"type": "host-local", "subnet": "10.1.0.0/24"}), true),
            (
                json!({"type": "host-local", "ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "fd00::/64"}]]}),
                true,
            ),
            (json!({"type": "host-local", "ranges": [[{"subnet": "usePodCidr"}]]}), false),
            (json!({"type": "whereabouts", "range": "10.1.0.0/24", "subnet": "10.1.0.0/24"}), false),
        ] {
            assert_eq!(is_fixed(&list(&ipam)), expected, "{ipam}");
        }
    }
}
