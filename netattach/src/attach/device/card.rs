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
    functions: Functions,
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
    let candidates = present.iter().filter(|device| is_of(function, device)).map(|it| it.link.index);
    let found = first_with(function.number, candidates, |index| host.all_vf_settings(index))?;
    Ok(found.map(|(index, functions)| Card { name: function.physical.clone(), index, functions }))
}

/// The settings that a card has of its VFs, by their numbers.
type Functions = Vec<(u32, VfSettings)>;

/// Returns the first candidate that knows the VF, with the settings that it has of VFs. In mode switchdev, the
/// representors have the bus address of the physical function too, and know no VFs.
fn first_with<E>(
    number: u32,
    candidates: impl Iterator<Item = u32>,
    mut read: impl FnMut(u32) -> Result<Functions, E>,
) -> Result<Option<(u32, Functions)>, E> {
    for index in candidates {
        let functions = read(index)?;
        if functions.iter().any(|(of, _)| *of == number) {
            return Ok(Some((index, functions)));
        }
    }
    Ok(None)
}

/// Does the same for a device that may not be known as a VF. If it is one all the same, and its physical function has
/// one interface, the card's settings are read only if an address is requested.
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
    let Some(function) = parent.and_then(bus::function_of) else { return Ok(None) };
    let candidates: Vec<u32> =
        present.iter().filter(|it| is_of(&function, it)).map(|it| it.link.index).collect();
    let Some(first) = candidates.first() else { return Ok(None) };
    let known = match (asked, candidates.len()) {
        (None, 1) => None,
        _ => among(host, &function, present)?,
    };
    // A driver may tell nothing of its VFs.
    Ok(known.or(Some(Card { name: function.physical, index: *first, functions: Vec::new() })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures;

    #[test]
    fn the_interface_that_knows_the_vf_is_the_physical_functions_and_no_representor() {
        let vfs = || vec![(0, VfSettings::default()), (1, VfSettings::default())];
        let read = |index: u32| match index {
            7 => Ok(vfs()),
            9 => Err("not asked"),
            _ => Ok(Vec::new()),
        };
        let found = |number, candidates: &[u32]| {
            let found = first_with(number, candidates.iter().copied(), read);
            found.map(|found| found.map(|(index, functions)| (index, functions.len())))
        };
        assert_eq!(found(1, &[5, 6, 7, 9]), Ok(Some((7, 2))));
        assert_eq!(found(2, &[5, 7]), Ok(None));
        assert_eq!(found(0, &[]), Ok(None));
    }

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
