//! `sourceCheck`, `allowedAddresses` and `vlans`: the source addresses and the VLANs by which a pod may send.
//! The author of the network's definition sets these keys for virtual addresses, routers and virtual
//! machines.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Driver, PlanError, Request, bridge_vlans};

/// The key for the kind of check.
pub const CHECK: &str = "sourceCheck";
/// The key for addresses that are allowed in addition to the pod's own.
pub const ALLOWED: &str = "allowedAddresses";

/// The key for VLANs whose tagged frames are allowed.
pub const VLANS: &str = "vlans";

/// Most ids in `vlans`: each takes one entry in the maps (`netattach_common::map_size::VLANS`), so that 64
/// attachments have room.
const MOST_VLANS: usize = 512;

/// Most addresses in `allowedAddresses`.
const MOST_ADDRESSES: usize = 64;

/// The checks on the sources of a pod's frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sources {
    /// Whether the Ethernet address is checked.
    pub(super) mac: bool,
    /// Whether IP addresses are checked.
    pub(super) addresses: bool,
    /// Addresses that are allowed in addition to the pod's own.
    pub(super) allowed: Vec<IpAddr>,
    /// First and last id of each range of VLANs whose tagged frames are allowed, ascending and disjoint.
    pub(super) vlans: Vec<(u16, u16)>,
}

/// The values of `sourceCheck`, the strictest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceCheck {
    /// Only the pod's own Ethernet and IP addresses are allowed.
    #[default]
    Full,
    /// Only the pod's own Ethernet address is allowed.
    Mac,
    /// All addresses are allowed.
    Off,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    #[serde(default)]
    source_check: Option<SourceCheck>,
    #[serde(default)]
    allowed_addresses: Option<Value>,
    #[serde(default)]
    vlans: Option<Value>,
}

/// Parses the keys.
///
/// # Errors
/// The error names the key.
pub(super) fn parse(request: &Request<'_>) -> Result<Sources, PlanError> {
    let Keys { source_check, allowed_addresses, vlans: tagged } = request.read()?;
    let check = source_check.unwrap_or_default();
    let wrong = |reason: String| PlanError::Value { key: ALLOWED, reason };
    let allowed = allowed_addresses.as_ref().map(addresses).transpose().map_err(wrong)?.unwrap_or_default();
    if check != SourceCheck::Full && !allowed.is_empty() {
        return Err(wrong("without effect, as sourceCheck lets every address pass".to_owned()));
    }
    let wrong = |reason: String| PlanError::Value { key: VLANS, reason };
    let tagged = tagged.as_ref().map(vlans).transpose().map_err(wrong)?.unwrap_or_default();
    if request.protect.is_none() && !tagged.is_empty() {
        return Err(wrong("needs the dataplane, which only netattachd has".to_owned()));
    }
    let vlans = bridge_vlans::ranges(&tagged);
    Ok(Sources { mac: check != SourceCheck::Off, addresses: check == SourceCheck::Full, allowed, vlans })
}

/// Parses the list `vlans`: ids, and ranges as in `vlanTrunk`.
///
/// # Errors
/// A description of the problem, without the key.
pub fn vlans(list: &Value) -> Result<BTreeSet<u16>, String> {
    let found = permitted_vlans(list)?;
    match found.len() > MOST_VLANS {
        true => Err(format!("more than {MOST_VLANS} VLANs, the most there may be")),
        false => Ok(found),
    }
}

/// Parses the same list where it states the VLANs that may be requested: it may contain all VLANs.
///
/// # Errors
/// A description of the problem, without the key.
pub fn permitted_vlans(list: &Value) -> Result<BTreeSet<u16>, String> {
    bridge_vlans::list(list)
}

/// Parses the list `allowedAddresses`: addresses, and prefixes, which stand for all addresses in them. Each
/// address takes one entry in the maps, so their total number is limited.
///
/// # Errors
/// A description of the problem, without the key.
pub fn addresses(list: &Value) -> Result<Vec<IpAddr>, String> {
    let items = list.as_array().ok_or("a list is needed, of addresses and prefixes")?;
    let mut found: Vec<IpAddr> = Vec::new();
    for item in items {
        let text = item.as_str().unwrap_or_default();
        let net = text.parse::<IpAddr>().map(IpNet::from).or_else(|_| text.parse::<IpNet>());
        let net = net.map_err(|_| format!("{item} is neither an IP address nor a prefix"))?;
        if net != net.trunc() {
            return Err(format!("{net} is no prefix: write {}", net.trunc()));
        }
        let bits = net.max_prefix_len() - net.prefix_len();
        let count = 1_u128.checked_shl(bits.into()).unwrap_or(u128::MAX).saturating_add(found.len() as u128);
        if count > MOST_ADDRESSES as u128 {
            return Err(match net.prefix_len() == net.max_prefix_len() {
                true => format!("more than {MOST_ADDRESSES} addresses, the most there may be"),
                false => format!("more than {MOST_ADDRESSES} addresses, the most there may be, with {net}"),
            });
        }
        let first = net.network();
        if let Some(address) = [first, net.broadcast()]
            .iter()
            .find(|it| it.is_unspecified() || it.is_multicast() || it.is_loopback())
        {
            return Err(format!("nothing is sent from {address}"));
        }
        for offset in 0..1_u32 << bits {
            let address = match first {
                IpAddr::V4(v4) => IpAddr::from((u32::from(v4) + offset).to_be_bytes()),
                IpAddr::V6(v6) => IpAddr::from((u128::from(v6) + u128::from(offset)).to_be_bytes()),
            };
            if !found.contains(&address) {
                found.push(address);
            }
        }
    }
    Ok(found)
}

impl Sources {
    /// Whether only untagged frames from the pod's own addresses are allowed.
    pub(super) fn is_full(&self) -> bool {
        self.mac && self.addresses && self.allowed.is_empty() && self.vlans.is_empty()
    }
}

/// Refuses `vlans` on a link that the node routes to, or that leads nowhere: there are no VLANs behind such a
/// link.
pub(super) fn refuse_vlans(request: &Request<'_>, driver: &dyn Driver) -> Result<(), PlanError> {
    request.refuse(driver.kind(), &[(VLANS, json!([]))])
}

/// Refuses source checks for a bridge port in the pod, which sends frames of other senders.
pub(super) fn refuse_on_port(request: &Request<'_>) -> Result<(), PlanError> {
    let Keys { source_check, allowed_addresses, .. } = request.read()?;
    let reason = "without effect: the tap is a bridge's port, which sends for others".to_owned();
    if source_check.is_some_and(|check| check != SourceCheck::Off) {
        return Err(PlanError::Value { key: CHECK, reason });
    }
    match allowed_addresses.is_some_and(|list| list != json!([])) {
        true => Err(PlanError::Value { key: ALLOWED, reason }),
        false => Ok(()),
    }
}

/// Refuses values that a link on a parent does not support: there an attachment is identified by its Ethernet
/// address.
pub(super) fn refuse_on_parent(request: &Request<'_>, driver: &dyn Driver) -> Result<(), PlanError> {
    let value = request.config.get("sourceCheck").filter(|value| **value == json!("off"));
    match value {
        Some(value) => {
            Err(PlanError::Unsupported { key: "sourceCheck", value: value.clone(), kind: driver.kind() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::cni::{CniArgs, CniError};
    use crate::link::driver;
    use crate::link::tests::request;
    use crate::step::{Protect, Step};

    fn planned(kind: &str, keys: Value) -> Result<Protect, String> {
        let mut config =
            json!({"ipam": {"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}, "master": "eth1"});
        let config = config.as_object_mut().unwrap();
        config.extend(keys.as_object().unwrap().clone());
        let (args, protect) = (CniArgs::default(), Protect::verified());
        let request = Request { protect: Some(&protect), ..request(config, &args) };
        let steps = driver(kind).unwrap().plan(&request).map_err(|error| CniError::from(error).msg)?;
        let found = steps.into_iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect),
            _ => None,
        });
        Ok(found.unwrap())
    }

    #[test]
    fn the_keys_say_what_is_checked() {
        for kind in ["bridge", "veth", "ptp"] {
            let rows = [
                (json!({}), Protect::verified(), None),
                (json!({"sourceCheck": "full", "allowedAddresses": []}), Protect::verified(), None),
                (json!({"sourceCheck": null, "allowedAddresses": null}), Protect::verified(), None),
                (
                    json!({"allowedAddresses": ["10.1.0.100", "fd00::100"]}),
                    Protect {
                        allowed: vec!["10.1.0.100".parse().unwrap(), "fd00::100".parse().unwrap()],
                        fast_path: false,
                        ..Protect::verified()
                    },
                    Some("the pod may send from 10.1.0.100, fd00::100 too"),
                ),
                (
                    json!({"allowedAddresses": ["10.1.0.100/31", "10.1.0.101", "fd00::100"]}),
                    Protect {
                        allowed: ["10.1.0.100", "10.1.0.101", "fd00::100"]
                            .map(|it| it.parse().unwrap())
                            .into(),
                        fast_path: false,
                        ..Protect::verified()
                    },
                    Some("the pod may send from 10.1.0.100/31, fd00::100 too"),
                ),
                (
                    json!({"sourceCheck": "mac"}),
                    Protect { check_addresses: false, fast_path: false, ..Protect::verified() },
                    Some("the pod may send from any IP address"),
                ),
                (
                    json!({"sourceCheck": "off"}),
                    Protect {
                        check_mac: false,
                        check_addresses: false,
                        fast_path: false,
                        ..Protect::verified()
                    },
                    Some("the pod may send from any Ethernet and IP address"),
                ),
            ];
            for (keys, expected, laxity) in rows {
                let found = planned(kind, keys.clone()).unwrap();
                assert_eq!((found.laxity().as_deref(), found), (laxity, expected), "{kind} {keys}");
            }
        }
        let lax = planned("macvlan", json!({"sourceCheck": "mac"})).unwrap();
        assert_eq!((lax.check_mac, lax.check_addresses), (true, false));
    }

    /// Rows: SRC-vlans.
    #[test]
    fn frames_of_the_vlans_that_are_named_pass_with_their_tag() {
        for kind in ["bridge", "macvlan", "ipvlan"] {
            let rows = [
                (json!({"vlans": []}), Vec::new(), None),
                (json!({"vlans": [5]}), vec![(5, 5)], Some("frames of VLAN 5 pass with their tag")),
                (
                    json!({"vlans": [9, {"minID": 5, "maxID": 7}, {"id": 8}, 4094], "sourceCheck": "mac"}),
                    vec![(5, 9), (4094, 4094)],
                    Some(
                        "the pod may send from any IP address; frames of VLANs 5 to 9, 4094 pass with their tag",
                    ),
                ),
            ];
            for (keys, expected, laxity) in rows {
                let found = planned(kind, keys.clone()).unwrap();
                assert_eq!(found.fast_path, expected.is_empty(), "{kind} {keys}");
                assert_eq!((found.laxity().as_deref(), found.vlans), (laxity, expected), "{kind} {keys}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_key() {
        let many: Vec<String> = (0..=MOST_ADDRESSES).map(|number| format!("10.1.1.{number}")).collect();
        let rows = [
            ("bridge", json!({"sourceCheck": "none"}), "sourceCheck"),
            (
                "bridge",
                json!({"allowedAddresses": ["10.1.0.0/24"]}),
                "key allowedAddresses: more than 64 addresses, the most there may be, with 10.1.0.0/24",
            ),
            (
                "bridge",
                json!({"allowedAddresses": ["10.1.0.5/28"]}),
                "key allowedAddresses: 10.1.0.5/28 is no prefix: write 10.1.0.0/28",
            ),
            (
                "bridge",
                json!({"allowedAddresses": [5]}),
                "key allowedAddresses: 5 is neither an IP address nor a prefix",
            ),
            ("bridge", json!({"allowedAddresses": ["::/0"]}), "more than 64 addresses"),
            (
                "bridge",
                json!({"allowedAddresses": ["224.0.0.18"]}),
                "key allowedAddresses: nothing is sent from 224.0.0.18",
            ),
            ("veth", json!({"allowedAddresses": ["::"]}), "key allowedAddresses: nothing is sent from ::"),
            (
                "veth",
                json!({"allowedAddresses": many}),
                "key allowedAddresses: more than 64 addresses, the most there may be",
            ),
            (
                "bridge",
                json!({"sourceCheck": "mac", "allowedAddresses": ["10.1.0.9"]}),
                "key allowedAddresses: without effect, as sourceCheck lets every address pass",
            ),
            ("macvlan", json!({"sourceCheck": "off"}), "key sourceCheck: \"off\" is not supported"),
            ("bridge", json!({"vlans": 5}), "key vlans: a list is needed, of VLAN ids and ranges"),
            (
                "bridge",
                json!({"vlans": [4095]}),
                "key vlans: element 0: id 4095 is not a VLAN id from 1 to 4094",
            ),
            (
                "bridge",
                json!({"vlans": [5, {}]}),
                "key vlans: {} is neither a VLAN id nor a range of minID and maxID",
            ),
            (
                "bridge",
                json!({"vlans": ["5"]}),
                "key vlans: \"5\" is neither a VLAN id nor a range of minID and maxID",
            ),
            (
                "bridge",
                json!({"vlans": [{"minID": 1, "maxID": 513}]}),
                "key vlans: more than 512 VLANs, the most there may be",
            ),
            ("veth", json!({"vlans": [5]}), "key vlans: [5] is not supported"),
            ("ptp", json!({"vlans": [5]}), "key vlans: [5] is not supported"),
            ("dummy", json!({"vlans": [5]}), "key vlans: [5] is not supported"),
            ("ipvlan", json!({"sourceCheck": "off"}), "key sourceCheck: \"off\" is not supported"),
        ];
        for (kind, keys, said) in rows {
            let error = planned(kind, keys.clone()).unwrap_err();
            assert!(error.contains(said), "{kind} {keys}: {error}");
        }
    }
}
