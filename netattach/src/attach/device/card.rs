//! The physical function (PF) of a VF on the node: its interface is used to read and change the card's settings of
//! each VF.

use super::bus;
use crate::attach::StepError;
use crate::mac::Mac;
use crate::netlink::{DeviceState, Handle};
use crate::spec::{Device, VfSettings, VirtualFunction};
use crate::step::Home;

/// Whether a device is an interface of the physical function.
pub(super) fn is_of(function: &VirtualFunction, device: &DeviceState) -> bool {
    device.parent.as_deref() == Some(&*function.physical)
}

/// Returns the index of the interface of the VF's physical function, and the VF's settings there.
pub(in crate::attach) fn physical(
    host: &mut Handle,
    function: &VirtualFunction,
) -> Result<Option<(u32, VfSettings)>, StepError> {
    let present = host.devices()?;
    let card = among(host, function, &present)?;
    Ok(card.and_then(|card| Some((card.index, card.settings(function.number)?))))
}

/// A physical function on the node.
pub(super) struct Card {
    /// Its bus address.
    name: String,
    /// Index of its interface.
    pub(in crate::attach) index: u32,
    /// The settings of its VFs, by number, as far as they were read.
    functions: Vec<(u32, VfSettings)>,
}

impl Card {
    pub(in crate::attach) fn settings(&self, number: u32) -> Option<VfSettings> {
        self.functions.iter().find(|(of, _)| *of == number).map(|(_, settings)| settings.clone())
    }

    /// Returns a VF that has the address, other than the device itself.
    pub(super) fn other_function(
        &self,
        device: &Device,
        home: Option<&Home>,
        mac: Mac,
    ) -> Option<VirtualFunction> {
        let having = self.functions.iter().filter(|(_, settings)| settings.mac == Some(mac));
        let having: Vec<u32> = having.map(|(number, _)| *number).collect();
        if having.is_empty() {
            return None;
        }
        let on_bus = || bus::function_of(home?.parent.as_deref()?);
        let own = device.function.clone().or_else(on_bus).map(|function| function.number);
        let number = having.into_iter().find(|number| Some(*number) != own)?;
        Some(VirtualFunction { physical: self.name.clone(), number })
    }
}

/// Finds the physical function of a VF, among the devices of the node that were just listed, and reads its settings
/// of VFs.
fn among(
    host: &mut Handle,
    function: &VirtualFunction,
    present: &[DeviceState],
) -> Result<Option<Card>, StepError> {
    for device in present.iter().filter(|device| is_of(function, device)) {
        let index = device.link.index;
        let functions = host.all_vf_settings(index)?;
        if functions.iter().any(|(number, _)| *number == function.number) {
            return Ok(Some(Card { name: function.physical.clone(), index, functions }));
        }
    }
    Ok(None)
}

/// Does the same for a device that may not be known as a VF. If it is not a VF, the card's settings are read only if
/// an address is requested.
pub(super) fn find(
    host: &mut Handle,
    (device, found): (&Device, Option<&DeviceState>),
    present: &[DeviceState],
    asked: Option<Mac>,
) -> Result<Option<Card>, StepError> {
    if let Some(function) = &device.function {
        return among(host, function, present);
    }
    let parent = found.and_then(|found| found.parent.as_deref());
    let Some(name) = parent.and_then(bus::physical_of) else { return Ok(None) };
    let physical = present.iter().find(|it| it.parent.as_deref() == Some(name.as_str()));
    let Some(index) = physical.map(|it| it.link.index) else { return Ok(None) };
    let functions = match asked {
        Some(_) => host.all_vf_settings(index)?,
        None => Vec::new(),
    };
    Ok(Some(Card { name, index, functions }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures;

    /// Rows: SRV-mac.
    #[test]
    fn another_vf_that_has_an_address_is_named() {
        let mac = |last| Mac([2, 0, 0, 0, 0, last]);
        let functions = [(0, 7), (1, 8), (2, 7)]
            .map(|(number, last)| (number, VfSettings { mac: Some(mac(last)), ..VfSettings::default() }));
        let name = "0000:03:00.0".to_owned();
        let physical = Card { name: name.clone(), index: 3, functions: functions.into() };
        let function = |number| VirtualFunction { physical: name.clone(), number };
        // Of one that is not known as a VF, nor found on a bus, every VF is another.
        for (own, last, expected) in [
            (Some(0), 7, Some(2)),
            (Some(1), 7, Some(0)),
            (Some(1), 8, None),
            (Some(1), 9, None),
            (None, 8, Some(1)),
        ] {
            let device = Device { function: own.map(function), ..fixtures::device() };
            let found = physical.other_function(&device, None, mac(last));
            assert_eq!(found, expected.map(function), "{own:?} {last}");
        }
    }
}
