//! What `tuning` changes in the steps of the interface before it: which step sets the Ethernet address, and what is
//! stored to be restored.

use crate::cni::{CniError, code};
use crate::link::{self, PlanError};
use crate::mac::Mac;
use crate::spec::{Properties, Tune};
use crate::step::{SetDevice, Step};

/// Plans the tuning of an interface. A link that netattach creates gets its Ethernet address at creation, because the
/// dataplane checks that address and other links must not have it; the link need not be restored. A device of the
/// node gets the address before the pod has the device, from its physical function if there is one. Another plugin's
/// interface may be a device that goes back to the node, so its former properties are stored.
pub(super) fn tuned(steps: &mut Vec<Step>, tune: &mut Tune) -> Result<(), CniError> {
    let is_lo = steps.contains(&Step::RaiseLoopback);
    let refused = |what: &str| {
        CniError::new(
            code::INVALID_CONFIG,
            format!("key mac: {what} cannot have an Ethernet address of its own"),
        )
    };
    if is_lo && tune.properties != Properties::default() {
        return Err(CniError::new(code::INVALID_CONFIG, "tuning: of loopback only settings can be changed"));
    }
    if let Some(mac) = tune.properties.mac
        && let Some(at) = steps.iter().position(|step| matches!(step, Step::ClaimDevice(_)))
    {
        set_device(steps, at, mac)?;
        tune.properties.mac = None;
    }
    let made = steps.iter_mut().find_map(|step| match step {
        Step::CreateLink(link) => Some(link),
        _ => None,
    });
    match (made, tune.properties.mac) {
        (Some(link), Some(mac)) => {
            let kind = link.kind();
            if !link.set_mac(mac) {
                return Err(refused(&format!("a link of kind {kind}")));
            }
            tune.properties.mac = None;
        }
        (Some(_), None) => {}
        (None, _) if !tune.properties.is_empty() => steps.push(Step::NoteProperties(tune.clone())),
        (None, _) => {}
    }
    Ok(())
}

/// Adds the Ethernet address to the settings of the device that is claimed at that position.
fn set_device(steps: &mut Vec<Step>, claimed_at: usize, mac: Mac) -> Result<(), PlanError> {
    if let Some(Step::ClaimDevice(device)) = steps.get(claimed_at) {
        link::check_mac_can_be_set(device)?;
    }
    match steps.get_mut(claimed_at + 1) {
        Some(Step::SetDevice(set)) => set.mac = Some(mac),
        _ => steps
            .insert(claimed_at + 1, Step::SetDevice(SetDevice { mac: Some(mac), ..SetDevice::default() })),
    }
    Ok(())
}
