//! The settings of a VF that its physical function makes.

use crate::attach::StepError;
use crate::attach::device::card::physical;
use crate::attach::device::{VfError, bus};
use crate::mac::Mac;
use crate::netlink::{self, Handle};
use crate::spec::{Device, VfSettings, VirtualFunction};
use crate::step::Claim;

/// The address of a VF that chooses its own.
const NO_ADDRESS: Mac = Mac([0; 6]);

/// Restores the settings of a VF that its physical function makes. Returns whether it has released an address that the
/// physical function had set: see [`set_address_again`].
pub(super) fn settle_function(host: &mut Handle, device: &Device, claim: &Claim) -> Result<bool, StepError> {
    let (Some(function), Some(before)) = (&device.function, &claim.settings) else { return Ok(false) };
    let Some((index, present)) = physical(host, function)? else {
        // The card is gone, or has fewer functions now, or its interface is in another namespace temporarily.
        return match bus::find(&claim.device) {
            Some(found) if found.function.as_ref() == Some(function) => {
                Err(VfError::NoPhysicalFunction(function.physical.clone()).into())
            }
            _ => Ok(false),
        };
    };
    let own = claim.home.as_ref().and_then(|home| home.mac);
    let (mut is_released, mut failed) = (false, None);
    for (setting, one) in before.beyond(&present).each() {
        let set = match one.mac {
            Some(mac) => {
                is_released = mac != NO_ADDRESS;
                release_address(host, (index, function.number), (mac, own))
            }
            None => host.set_vf(index, function.number, &one),
        };
        if let Err(source) = set {
            failed.get_or_insert(refused(function, setting, source));
        }
    }
    failed.map_or(Ok(is_released), Err)
}

/// Has the physical function set an address again that it had set before the claim. [`settle_function`] has released
/// it, as a VF with a set address could not take its own one back (`igb_set_vf_mac_addr`); now it has that.
pub(super) fn set_address_again(host: &mut Handle, device: &Device, claim: &Claim) -> Result<(), StepError> {
    let before = claim.settings.as_ref().and_then(|settings| settings.mac);
    let (Some(function), Some(before)) = (&device.function, before) else { return Ok(()) };
    let Some((index, present)) = physical(host, function)? else { return Ok(()) };
    if !is_to_be_set(before, present.mac) {
        return Ok(());
    }
    let set = host.set_vf(index, function.number, &address(before));
    set.map_err(|source| refused(function, "mac", source))
}

/// Whether a physical function sets an address again after the VF has its own one back. Many cards show what the VF
/// has chosen (`igb_ndo_get_vf_config`): if it is the address from before, nobody may have set that.
pub(super) fn is_to_be_set(before: Mac, shown: Option<Mac>) -> bool {
    before != NO_ADDRESS && shown != Some(before)
}

fn refused(function: &VirtualFunction, setting: &'static str, source: netlink::Error) -> StepError {
    StepError::Vf(VfError::Setting { setting, function: function.clone(), source })
}

fn address(mac: Mac) -> VfSettings {
    VfSettings { mac: Some(mac), ..VfSettings::default() }
}

/// Restores a VF's address, with the first value that its card accepts.
fn release_address(
    host: &mut Handle,
    (index, number): (u32, u32),
    (before, own): (Mac, Option<Mac>),
) -> Result<(), netlink::Error> {
    let mut set = Ok(());
    for way in ways_back(before, own) {
        set = host.set_vf(index, number, &address(way));
        if set.is_ok() {
            break;
        }
    }
    set
}

/// Returns the addresses that a physical function may restore for a VF, in order of preference. If a process drives the
/// VF, which has no interface (`own` is absent), the address reported before. Otherwise zero first, so that the VF can
/// take its own address back, then the address reported before ([`set_address_again`] sets it after that). Last the
/// VF's own address on the node: some cards accept only a valid address (`qede_set_vf_mac`), and had reported none.
pub(super) fn ways_back(before: Mac, own: Option<Mac>) -> Vec<Mac> {
    let first = if own.is_some() { [NO_ADDRESS, before] } else { [before, NO_ADDRESS] };
    let mut ways = Vec::with_capacity(3);
    for way in first.into_iter().chain(own) {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways
}
