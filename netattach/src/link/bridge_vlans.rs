//! The VLANs of a bridge port: `vlan`, `vlanTrunk` and `preserveDefaultVlan`; and lists of VLANs. Pure.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use super::{PlanError, Request};
use crate::cni::json::null_is_default;
use crate::spec::PortVlans;

/// The VLAN of untagged frames on a trunk, as in the reference plugin.
const NATIVE_OF_TRUNK: u16 = 1;

/// The highest id of a VLAN (IEEE 802.1Q, 9.6: 4095 is reserved).
pub(super) const MOST: i64 = 4094;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default, deserialize_with = "null_is_default")]
    vlan: i64,
    #[serde(default, deserialize_with = "null_is_default")]
    vlan_trunk: Vec<Option<Trunk>>,
    #[serde(default, deserialize_with = "null_is_default")]
    preserve_default_vlan: bool,
}

/// An element of `vlanTrunk`: a VLAN, a range, or both.
#[derive(Debug, Deserialize)]
struct Trunk {
    #[serde(default)]
    id: Option<i64>,
    #[serde(default, rename = "minID")]
    min_id: Option<i64>,
    #[serde(default, rename = "maxID")]
    max_id: Option<i64>,
}

/// The VLANs that a configuration asks for.
#[derive(Debug, Default)]
pub(super) struct Vlans {
    /// The VLANs of the port; `None`: the bridge's defaults for a port.
    pub(super) port: Option<PortVlans>,
    /// The VLAN of `vlan`, which contains the gateway.
    pub(super) access: Option<u16>,
}

impl Request<'_> {
    /// The VLANs that the configuration asks for.
    pub(super) fn vlans(&self) -> Result<Vlans, PlanError> {
        let config: Config = self.read()?;
        if !(0..=MOST).contains(&config.vlan) {
            let reason = format!("{} is not a VLAN id from 1 to {MOST}, nor 0 for none", config.vlan);
            return Err(PlanError::Value { key: "vlan", reason });
        }
        let access = u16::try_from(config.vlan).ok().filter(|id| *id != 0);
        let mut tagged = BTreeSet::new();
        for (position, element) in config.vlan_trunk.iter().flatten().enumerate() {
            let ids = ids(element).map_err(|reason| PlanError::Value {
                key: "vlanTrunk",
                reason: format!("element {position}: {reason}"),
            })?;
            tagged.extend(ids);
        }
        if access.is_none() && tagged.is_empty() {
            return Ok(Vlans::default());
        }
        let native = access.unwrap_or(NATIVE_OF_TRUNK);
        tagged.remove(&native);
        let (native, keeps_default) = (Some(native), config.preserve_default_vlan);
        Ok(Vlans { port: Some(PortVlans { native, tagged: ranges(&tagged), keeps_default }), access })
    }
}

fn ids(element: &Trunk) -> Result<Vec<u16>, String> {
    let id = |key: &str, number: i64| match u16::try_from(number) {
        Ok(id) if (1..=MOST).contains(&number) => Ok(id),
        _ => Err(format!("{key} {number} is not a VLAN id from 1 to {MOST}")),
    };
    let range = match (element.min_id, element.max_id) {
        (Some(first), Some(last)) => {
            let (first, last) = (id("minID", first)?, id("maxID", last)?);
            if first > last {
                return Err(format!("minID {first} is greater than maxID {last}"));
            }
            Some(first..=last)
        }
        (None, Some(_)) => return Err("maxID needs minID".to_owned()),
        (Some(_), None) => return Err("minID needs maxID".to_owned()),
        (None, None) => None,
    };
    let single = element.id.map(|number| id("id", number)).transpose()?;
    Ok(range.into_iter().flatten().chain(single).collect())
}

/// Parses a list of VLANs, each an id or an element of `vlanTrunk`.
///
/// # Errors
/// A description of the problem, without the key.
pub(super) fn list(value: &Value) -> Result<BTreeSet<u16>, String> {
    let elements = value.as_array().ok_or("a list is needed, of VLAN ids and ranges")?;
    let mut found = BTreeSet::new();
    for (position, element) in elements.iter().enumerate() {
        let read = match element.as_i64() {
            Some(id) => Trunk { id: Some(id), min_id: None, max_id: None },
            None => serde_json::from_value(element.clone())
                .map_err(|_| format!("{element} is neither a VLAN id nor a range of minID and maxID"))?,
        };
        let some = ids(&read).map_err(|reason| format!("element {position}: {reason}"))?;
        if some.is_empty() {
            return Err(format!("{element} is neither a VLAN id nor a range of minID and maxID"));
        }
        found.extend(some);
    }
    Ok(found)
}

/// The ids as ranges, ascending and disjoint.
pub(super) fn ranges(ids: &BTreeSet<u16>) -> Vec<(u16, u16)> {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for id in ids {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *id => *last = *id,
            _ => ranges.push((*id, *id)),
        }
    }
    ranges
}
