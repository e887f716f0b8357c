//! Determines which device a configuration names. Pure.
//!
//! A device may be named in several ways, and may be absent from the node: in a pod, or about to be given back.
//! However it is named, it has one key for claims, and another device is never mistaken for it.

use super::claims::Known;
use super::error::DeviceError;
use super::identity;
use super::take_device::home;
use crate::attach::StepError;
use crate::netlink::DeviceState;
use crate::spec::{Device, DeviceId};
use crate::step::Home;

/// How many interfaces of a card an error lists.
const SHOWN: usize = 8;

/// The named device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// The key of its claims.
    pub key: String,
    /// The identity of its interface; `None`: a process drives the device, which has no interface.
    pub home: Option<Home>,
}

/// The known devices.
pub(super) struct There<'t> {
    /// The possible names of the interface's parent, if the device is named by its bus address; the requested one
    /// first.
    pub parents: &'t [String],
    /// The devices on the node.
    pub present: &'t [DeviceState],
    /// The devices in records; read later than those on the node, see [`super::claims::Devices::known`].
    pub known: &'t [Known],
    /// See [`super::bus::carrier_of`].
    pub carrier_of: &'t dyn Fn(&str) -> String,
}

impl There<'_> {
    /// Returns the named device.
    ///
    /// # Errors
    /// No device has the name, several have it, or the device could not be identified later.
    pub(super) fn meant(&self, device: &Device) -> Result<Target, StepError> {
        let absent = || StepError::Device(DeviceError::NotThere(device.id.to_string()));
        if device.userspace.is_some() {
            return self.without_interface().ok_or_else(absent);
        }
        let here: Vec<&DeviceState> =
            self.present.iter().filter(|it| self.is_meant(&device.id, it)).collect();
        let away: Vec<(&Known, &Home)> =
            self.away().filter(|(_, home)| self.was_meant(&device.id, home)).collect();
        let is_of_bus = matches!(device.id, DeviceId::Bus(_) | DeviceId::Path(_));
        if is_of_bus && here.len() + away.len() > 1 {
            let names = here.iter().map(|it| &*it.link.name).chain(away.iter().map(|(_, home)| &*home.name));
            let interfaces = names.take(SHOWN).collect::<Vec<_>>().join(", ");
            return Err(DeviceError::SeveralInterfaces { device: device.id.to_string(), interfaces }.into());
        }
        // A pod holds the device, and its name on the node has to be free when it comes back.
        if let Some((known, home)) = away.iter().find(|(known, _)| !known.is_back) {
            return Ok(Target { key: known.key.clone(), home: Some((*home).clone()) });
        }
        let found = here.into_iter().next().ok_or_else(absent)?;
        let among = self.has_siblings(found);
        let own = home(found.clone(), among);
        let is_it = |home: &Home| {
            identity::at_home(home, self.present).is_some_and(|it| it.link.index == found.link.index)
        };
        if !is_it(&own) {
            let why = "other interfaces of its card cannot be told from it";
            return Err(DeviceError::InUse { device: found.link.name.clone(), why }.into());
        }
        let of_record = self.known.iter().find(|known| known.home.as_ref().is_some_and(is_it));
        let key = of_record.map_or_else(|| self.key(found, among), |known| known.key.clone());
        Ok(Target { key, home: Some(own) })
    }

    /// Returns a device that a process drives.
    fn without_interface(&self) -> Option<Target> {
        let name = self.parents.first()?;
        let is_it = |it: &&Known| {
            let parent = it.home.as_ref().and_then(|home| home.parent.as_ref());
            it.key == *name || parent.is_some_and(|parent| self.parents.contains(parent))
        };
        let of_record = self.known.iter().find(is_it);
        let key = of_record.map_or_else(|| name.clone(), |known| known.key.clone());
        Some(Target { key, home: None })
    }

    /// Returns the devices of records that are not on the node.
    fn away(&self) -> impl Iterator<Item = (&Known, &Home)> {
        let homes = self.known.iter().filter_map(|known| Some((known, known.home.as_ref()?)));
        homes.filter(|(_, home)| identity::at_home(home, self.present).is_none())
    }

    fn is_meant(&self, id: &DeviceId, device: &DeviceState) -> bool {
        match id {
            DeviceId::Name(name) => device.link.name == *name || device.other_names.contains(name),
            DeviceId::Mac(mac) => device.link.mac == Some(*mac),
            DeviceId::Bus(_) | DeviceId::Path(_) => self.is_parent(device.parent.as_ref()),
        }
    }

    /// Whether the name meant a device in its former state.
    fn was_meant(&self, id: &DeviceId, home: &Home) -> bool {
        match id {
            DeviceId::Name(name) => home.name == *name || home.other_names.contains(name),
            DeviceId::Mac(mac) => home.mac == Some(*mac),
            DeviceId::Bus(_) | DeviceId::Path(_) => self.is_parent(home.parent.as_ref()),
        }
    }

    fn is_parent(&self, parent: Option<&String>) -> bool {
        parent.is_some_and(|parent| self.parents.contains(parent))
    }

    /// Whether the device's parent has other interfaces, on the node or elsewhere.
    fn has_siblings(&self, found: &DeviceState) -> bool {
        let others = self.present.iter().filter(|other| other.link.index != found.link.index);
        let others = others.map(|other| &other.parent).chain(self.away().map(|(_, home)| &home.parent));
        found.parent.is_some() && others.into_iter().any(|parent| *parent == found.parent)
    }

    /// Returns the key of the device's claims.
    fn key(&self, found: &DeviceState, among: bool) -> String {
        let permanent = found.permanent.map(|mac| mac.to_string());
        match (&found.parent, permanent) {
            (None, permanent) => permanent.unwrap_or_else(|| found.link.name.clone()),
            (Some(parent), Some(permanent)) if among => {
                format!("{} {permanent}", (self.carrier_of)(parent))
            }
            (Some(parent), _) => (self.carrier_of)(parent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::identity::tests::{FUNCTION, device, mac, port};
    use super::*;

    fn named(id: DeviceId) -> Device {
        let pod_name = "net1".to_owned();
        Device { pod_name, id, userspace: None, function: None, rdma: None, switchdev: false }
    }

    /// The keys under which devices named in these ways are claimed, or why they are not.
    fn meant<const N: usize>(
        present: &[DeviceState],
        known: &[Known],
        ids: [DeviceId; N],
    ) -> [Result<(String, Option<u32>), String>; N] {
        ids.map(|id| {
            let parents: &[String] = match &id {
                DeviceId::Bus(_) | DeviceId::Path(_) => &["0000:03:00.0".to_owned(), "virtio3".to_owned()],
                DeviceId::Name(_) | DeviceId::Mac(_) => &[],
            };
            let carrier_of = |parent: &str| parent.replace("virtio3", FUNCTION);
            let there = There { parents, present, known, carrier_of: &carrier_of };
            let target = there.meant(&named(id)).map_err(|error| error.to_string())?;
            Ok((target.key, target.home.map(|home| home.index)))
        })
    }

    fn name(name: &str) -> DeviceId {
        DeviceId::Name(name.to_owned())
    }

    fn bus() -> DeviceId {
        DeviceId::Bus(FUNCTION.to_owned())
    }

    fn known(key: &str, home: &Home, is_back: bool) -> Known {
        Known { key: key.to_owned(), home: Some(home.clone()), is_back }
    }

    /// Rows: HDV-one-device.
    #[test]
    fn a_device_is_one_to_claims_whichever_way_it_is_named() {
        let ways = || [name("eth1"), DeviceId::Mac(mac(1).unwrap()), bus(), DeviceId::Path(String::new())];
        let mut card = port(4, "eth1", mac(1));
        card.link.mac = mac(1);
        let expected = || Ok((FUNCTION.to_owned(), Some(4)));
        assert_eq!(meant(std::slice::from_ref(&card), &[], ways()), ways().map(|_| expected()));
        // The parent of a virtio device's interface has another name than the device of the bus.
        let virtio = DeviceState { parent: Some("virtio3".to_owned()), ..card.clone() };
        assert_eq!(meant(std::slice::from_ref(&virtio), &[], ways()), ways().map(|_| expected()));
        // A pod has it, or had it: its claim says what it is called.
        let before = home(card.clone(), false);
        for is_back in [false, true] {
            let claimed = [known("former name", &before, is_back)];
            let expected = || Ok(("former name".to_owned(), Some(4)));
            assert_eq!(meant(&[card.clone()], &claimed, ways()), ways().map(|_| expected()));
        }
        let claimed = [known(FUNCTION, &before, false)];
        assert_eq!(meant(&[], &claimed, ways()), ways().map(|_| expected()));
        // It is about to come back, or gone for good.
        let claimed = [known(FUNCTION, &before, true)];
        assert!(meant(&[], &claimed, ways()).iter().all(Result::is_err));
    }

    /// Rows: HDV-one-device.
    #[test]
    fn the_other_interface_of_a_card_is_not_taken_for_the_one_that_a_pod_has() {
        let [first, second] = [port(4, "eth1", mac(1)), port(5, "eth2", mac(2))];
        let several = |names: &str| {
            Err(format!(
                "device {FUNCTION} has several network interfaces ({names}): name one by device or hwaddr"
            ))
        };
        let one = |last: u8, index| Ok((format!("{FUNCTION} {}", mac(last).unwrap()), Some(index)));
        let ways = || [bus(), name("eth1"), name("eth2")];
        let both = [first.clone(), second.clone()];
        assert_eq!(meant(&both, &[], ways()), [several("eth1, eth2"), one(1, 4), one(2, 5)]);
        // A pod has the first; it is about to come back.
        let key = format!("{FUNCTION} {}", mac(1).unwrap());
        let away = home(first, true);
        for is_back in [false, true] {
            let claimed = [known(&key, &away, is_back)];
            let expected_first = match is_back {
                false => one(1, 4),
                true => Err(StepError::Device(DeviceError::NotThere("eth1".to_owned())).to_string()),
            };
            let expected = [several("eth2, eth1"), expected_first, one(2, 5)];
            assert_eq!(meant(std::slice::from_ref(&second), &claimed, ways()), expected, "{is_back}");
        }
        // Nothing tells them apart.
        let same = [port(4, "eth1", mac(1)), port(5, "eth2", mac(1))];
        let untold = "device eth1 stays on the node: other interfaces of its card cannot be told from it";
        assert_eq!(meant(&same, &[], [name("eth1")]), [Err(untold.to_owned())]);
    }

    /// Rows: HDV-one-device.
    #[test]
    fn a_device_without_a_card_is_known_by_its_name_and_comes_back_to_it() {
        let card = device(4, "card0", ("veth", Some(5)));
        let before = home(card.clone(), false);
        assert_eq!(meant(&[card], &[], [name("card0")]), [Ok(("card0".to_owned(), Some(4)))]);
        // Another device has its name meanwhile, and is not taken.
        let claimed = [known("card0", &before, false)];
        let other = device(9, "card0", ("veth", Some(10)));
        assert_eq!(
            meant(std::slice::from_ref(&other), &claimed, [name("card0")]),
            [Ok(("card0".to_owned(), Some(4)))]
        );
        let claimed = [known("card0", &before, true)];
        assert_eq!(meant(&[other], &claimed, [name("card0")]), [Ok(("card0".to_owned(), Some(9)))]);
    }

    /// Rows: HDV-one-device.
    #[test]
    fn a_device_that_a_process_drives_is_one_with_the_interface_that_it_had() {
        let driven = Device { userspace: Some("vfio-pci".to_owned()), ..named(bus()) };
        let parents = [FUNCTION.to_owned()];
        let key = |known: &[Known]| {
            let there =
                There { parents: &parents, present: &[], known, carrier_of: &|parent| parent.to_owned() };
            there.meant(&driven).unwrap()
        };
        let expected = |key: &str| Target { key: key.to_owned(), home: None };
        assert_eq!(key(&[]), expected(FUNCTION));
        let before = home(port(4, "eth1", mac(1)), true);
        assert_eq!(key(&[known("former name", &before, false)]), expected("former name"));
    }
}
