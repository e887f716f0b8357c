//! The capabilities of `runtimeConfig` that netattach's own plugins implement. A request by another one is refused,
//! because it would be lost.

use serde_json::{Map, Value};

use super::super::device::DEVICE_ID;
use super::super::resolve::PORT_MAPPINGS;
use crate::link::{self, Driver, PlanError, bandwidth, dataplane, portmap, tuning};
use crate::npwg::device_info;

/// The capabilities of `runtimeConfig` that the native plugins implement. A plugin must not declare a capability and
/// ignore it. The path of the device information is offered by netattach, not requested; a plugin that creates no
/// device may ignore it.
const NATIVE_CAPABILITIES: [&str; 4] = [IPS, "ipRanges", MAC, device_info::CAPABILITY];

/// The capability, and the key of arguments, that requests an Ethernet address.
pub(super) const MAC: &str = "mac";

/// The capability, and the key of arguments, that requests IP addresses.
pub(super) const IPS: &str = "ips";

/// Checks that a native interface plugin supports every capability that it receives.
pub(in crate::plan) fn check_carried_out(
    driver: &dyn Driver,
    config: &Map<String, Value>,
) -> Result<(), PlanError> {
    let is_carried_out = |capability: &str| {
        NATIVE_CAPABILITIES.contains(&capability)
            || (capability == bandwidth::CAPABILITY && driver.is_judged(config))
            || (capability == PORT_MAPPINGS && driver.maps_ports())
            || (capability == DEVICE_ID && driver.takes_device())
    };
    let asked = config.get("runtimeConfig").and_then(Value::as_object).into_iter().flatten();
    let mut lost = asked.filter(|(capability, value)| is_something(value) && !is_carried_out(capability));
    match lost.next() {
        Some((capability, _)) => {
            Err(PlanError::Capability { capability: capability.clone(), kind: driver.kind() })
        }
        None => Ok(()),
    }
}

/// Checks that a chained plugin of netattach supports every capability that it receives.
pub(in crate::plan) fn check_offered(kind: &str, config: &Map<String, Value>) -> Result<(), PlanError> {
    let kind = link::chained(kind).unwrap_or_default();
    let asked = config.get("runtimeConfig").and_then(Value::as_object);
    let own = match kind {
        tuning::KIND => MAC,
        portmap::KIND => PORT_MAPPINGS,
        bandwidth::KIND | dataplane::KIND => bandwidth::CAPABILITY,
        _ => device_info::CAPABILITY,
    };
    let is_known = |key: &str| key == device_info::CAPABILITY || key == own;
    match asked.into_iter().flatten().find(|(key, value)| !is_known(key) && is_something(value)) {
        Some((capability, _)) => Err(PlanError::Capability { capability: capability.clone(), kind }),
        None => Ok(()),
    }
}

/// Whether the value of a capability contains a request.
fn is_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}
