//! The settings of a VF that its physical function makes.

use crate::attach::StepError;
use crate::attach::device::card::physical;
use crate::attach::device::{VfError, bus};
use crate::mac::Mac;
use crate::netlink::{self, Handle};
use crate::spec::{Device, VfSettings};
use crate::step::Claim;

/// Restores the settings of a VF that its physical function makes.
pub(super) fn settle_function(host: &mut Handle, device: &Device, claim: &Claim) -> Result<(), StepError> {
    let (Some(function), Some(before)) = (&device.function, &claim.settings) else { return Ok(()) };
    let Some((index, present)) = physical(host, function)? else {
        // The card is gone, or has fewer functions now, or its interface is in another namespace temporarily.
        return match bus::find(&claim.device) {
            Some(found) if found.function.as_ref() == Some(function) => {
                Err(VfError::NoPhysicalFunction(function.physical.clone()).into())
            }
            _ => Ok(()),
        };
    };
    let own = claim.home.as_ref().and_then(|home| home.mac);
    let mut failed = None;
    for (setting, one) in before.beyond(&present).each() {
        let set = match one.mac {
            Some(mac) => release_address(host, (index, function.number), (mac, own)),
            None => host.set_vf(index, function.number, &one),
        };
        if let Err(source) = set {
            failed.get_or_insert(StepError::Vf(VfError::Setting {
                setting,
                function: function.clone(),
                source,
            }));
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Restores a VF's address, with the first value that its card accepts.
fn release_address(
    host: &mut Handle,
    (index, number): (u32, u32),
    (before, own): (Mac, Option<Mac>),
) -> Result<(), netlink::Error> {
    let address = |mac| VfSettings { mac: Some(mac), ..VfSettings::default() };
    let mut set = Ok(());
    for way in ways_back(before, own) {
        set = host.set_vf(index, number, &address(way));
        if set.is_ok() {
            break;
        }
    }
    set
}

/// Returns the addresses that a physical function may restore for a VF, in order of preference. First zero, so that
/// the VF chooses its address again, as most cards reported zero or the VF's own address before. Then the address
/// reported before. Last the VF's own address on the node: some cards accept only a valid address
/// (`qede_set_vf_mac`), and had reported none.
pub(super) fn ways_back(before: Mac, own: Option<Mac>) -> Vec<Mac> {
    let mut ways = vec![Mac([0; 6])];
    for way in std::iter::once(before).chain(own) {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways
}
