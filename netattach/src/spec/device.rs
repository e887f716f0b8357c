//! Devices of the node that a pod takes and that are given back when it ends: network cards, and virtual functions
//! (VFs) of cards with the settings that their physical function (PF) makes for them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// A device of the node that becomes an interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// The identifier by which the node finds it.
    pub id: DeviceId,
    /// The userspace driver with which the pod itself drives the device, bypassing the kernel's network stack; such a
    /// device is not moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub userspace: Option<String>,
    /// The virtual function of a card that the device is, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<VirtualFunction>,
    /// Its RDMA device, whose traffic bypasses the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<String>,
    /// Whether it is a VF of a card in switchdev mode: all its traffic passes a representor on the node.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub switchdev: bool,
}

/// The identifier of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceId {
    /// Its name on the node.
    Name(String),
    /// Its Ethernet address.
    Mac(Mac),
    /// Its bus address: a PCI address such as `0000:03:02.1`, or a name on the auxiliary bus.
    Bus(String),
    /// The directory of its parent in sysfs, below `/sys/devices`.
    Path(String),
}

/// A VF, as identified by its PF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualFunction {
    /// PCI address of the PF.
    pub physical: String,
    /// The number of the VF of that PF, from 0.
    pub number: u32,
}

/// How a device sends and receives, apart from its address and its MTU: settings that the kernel keeps when the
/// device moves to another namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conduct {
    /// The broadcast Ethernet address, to which also ARP requests are sent, of a device that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast: Option<Mac>,
    /// Whether it resolves neighbours by ARP and answers requests.
    pub arp: bool,
    /// Whether multicast is enabled.
    pub multicast: bool,
    /// The condition besides the carrier for its operational state (`IFLA_LINKMODE` of the kernel); 0: none.
    pub mode: u8,
    /// Maximum number of frames that wait to be sent.
    pub queue: u32,
}

/// Which frames a device receives beyond those that are for it, as far as that was switched on explicitly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reception {
    /// All frames.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub promiscuous: bool,
    /// All multicast frames.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_multicast: bool,
}

impl Reception {
    /// Whether it receives no others.
    pub fn is_selective(&self) -> bool {
        *self == Self::default()
    }
}

/// The settings that a PF makes for one of its VFs. Absent: not set, or not reported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfSettings {
    /// The address that the PF has assigned; all zeros: none, so the VF chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// The VLAN of its frames on the wire, which the VF does not see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VfVlan>,
    /// Sending rates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<VfRates>,
    /// Whether frames with another source address are dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoof_check: Option<bool>,
    /// Whether it may change its address and receive frames for other addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// Whether its link follows the card's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_state: Option<VfLinkState>,
}

/// The VLAN of a VF.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfVlan {
    /// 1 to 4094; 0: none.
    pub id: u16,
    /// Priority of its frames, 0 to 7.
    #[serde(default)]
    pub priority: u8,
    /// Whether the tag is a service tag (802.1ad).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub service: bool,
}

/// Rate limits for sending of a VF, in megabits per second; 0: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfRates {
    /// Guaranteed rate.
    pub min: u32,
    /// Maximum rate.
    pub max: u32,
}

/// The state of a VF's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VfLinkState {
    /// The same as the card's.
    Auto,
    /// Always up: VFs of the card reach each other even without a cable.
    Enable,
    /// Always down.
    Disable,
}

impl VfSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the settings that differ from `present`.
    pub fn beyond(&self, present: &Self) -> Self {
        fn differing<T: PartialEq + Clone>(wanted: &Option<T>, present: &Option<T>) -> Option<T> {
            wanted.clone().filter(|_| wanted != present)
        }
        Self {
            mac: differing(&self.mac, &present.mac),
            vlan: differing(&self.vlan, &present.vlan),
            rates: differing(&self.rates, &present.rates),
            spoof_check: differing(&self.spoof_check, &present.spoof_check),
            trust: differing(&self.trust, &present.trust),
            link_state: differing(&self.link_state, &present.link_state),
        }
    }

    /// Returns the settings that `shown` reports too.
    #[must_use]
    pub fn told_in(&self, shown: &Self) -> Self {
        Self {
            mac: self.mac.filter(|_| shown.mac.is_some()),
            vlan: self.vlan.filter(|_| shown.vlan.is_some()),
            rates: self.rates.filter(|_| shown.rates.is_some()),
            spoof_check: self.spoof_check.filter(|_| shown.spoof_check.is_some()),
            trust: self.trust.filter(|_| shown.trust.is_some()),
            link_state: self.link_state.filter(|_| shown.link_state.is_some()),
        }
    }

    /// Returns the settings that a card contradicts which reports `shown` after they were made: its driver has
    /// accepted them without effect.
    ///
    /// If a driver does not report a setting, the kernel shows no switch setting, and for other values no address,
    /// the rate and the priority 0, 802.1Q and `auto` (`rtnl_fill_vfinfo`): those contradict nothing. The kernel
    /// shows VLAN 0 as well, but every driver reports its VLANs.
    #[must_use]
    pub fn contradicted_by(&self, shown: &Self) -> Self {
        const NO_ADDRESS: Mac = Mac([0; 6]);
        let other = |wanted: u32, shown: u32| shown != 0 && shown != wanted;
        let beyond = self.told_in(shown).beyond(shown);
        Self {
            mac: beyond.mac.filter(|_| shown.mac != Some(NO_ADDRESS)),
            vlan: beyond.vlan.zip(shown.vlan).and_then(|(wanted, shown)| {
                let is_other = wanted.id != shown.id
                    || other(wanted.priority.into(), shown.priority.into())
                    || shown.service && !wanted.service;
                is_other.then_some(wanted)
            }),
            rates: beyond.rates.zip(shown.rates).and_then(|(wanted, shown)| {
                (other(wanted.min, shown.min) || other(wanted.max, shown.max)).then_some(wanted)
            }),
            link_state: beyond.link_state.filter(|_| shown.link_state != Some(VfLinkState::Auto)),
            ..beyond
        }
    }

    /// Returns each setting alone, in the order in which they are made, with its key in a configuration. Trust comes
    /// late: some cards accept no changes of a VF that lost it.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, Self)> + use<> {
        let none = Self::default;
        [
            ("vlan", Self { vlan: self.vlan, ..none() }),
            ("mac", Self { mac: self.mac, ..none() }),
            ("max_tx_rate", Self { rates: self.rates, ..none() }),
            ("spoofchk", Self { spoof_check: self.spoof_check, ..none() }),
            ("trust", Self { trust: self.trust, ..none() }),
            ("link_state", Self { link_state: self.link_state, ..none() }),
        ]
        .into_iter()
        .filter(|(_, one)| !one.is_empty())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Mac(mac) => write!(f, "with address {mac}"),
            Self::Bus(name) => f.write_str(name),
            Self::Path(path) => write!(f, "at {path}"),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} as {}", self.id, self.pod_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_set_each_setting_alone() {
        let vlan = |id| Some(VfVlan { id, ..VfVlan::default() });
        let wanted = VfSettings {
            vlan: vlan(5),
            trust: Some(true),
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            ..VfSettings::default()
        };
        let present =
            VfSettings { vlan: vlan(0), trust: Some(true), spoof_check: Some(true), ..VfSettings::default() };
        let beyond = wanted.beyond(&present);
        assert_eq!(beyond, VfSettings { trust: None, ..wanted.clone() });
        let each: Vec<_> = beyond.each().collect();
        let expected = [
            ("vlan", VfSettings { vlan: vlan(5), ..VfSettings::default() }),
            ("mac", VfSettings { mac: wanted.mac, ..VfSettings::default() }),
        ];
        assert_eq!(each, expected);
        assert!(present.beyond(&present).is_empty());
    }

    /// Rows: SRV-ignored.
    #[test]
    fn what_a_driver_says_nothing_of_it_does_not_contradict() {
        let none = VfSettings::default;
        let vlan = |id, priority, service| VfSettings {
            vlan: Some(VfVlan { id, priority, service }),
            ..VfSettings::default()
        };
        let mac = |last| VfSettings { mac: Some(Mac([last; 6])), ..VfSettings::default() };
        let rates = |min, max| VfSettings { rates: Some(VfRates { min, max }), ..VfSettings::default() };
        let spoof_check = |on| VfSettings { spoof_check: Some(on), ..VfSettings::default() };
        let trust = |on| VfSettings { trust: Some(on), ..VfSettings::default() };
        let state = |state| VfSettings { link_state: Some(state), ..VfSettings::default() };
        use VfLinkState::{Auto, Disable, Enable};
        let table = [
            // Wanted, shown, and the setting that is contradicted.
            (vlan(5, 0, false), vlan(0, 0, false), Some("vlan")),
            (vlan(5, 3, false), vlan(5, 2, false), Some("vlan")),
            (vlan(5, 0, false), vlan(5, 0, true), Some("vlan")),
            (vlan(5, 3, true), vlan(5, 0, false), None),
            (vlan(5, 3, true), vlan(5, 3, true), None),
            (vlan(5, 0, false), none(), None),
            (mac(2), mac(4), Some("mac")),
            (mac(2), mac(2), None),
            (mac(2), mac(0), None),
            (rates(0, 200), rates(0, 100), Some("max_tx_rate")),
            (rates(50, 200), rates(0, 200), None),
            (rates(0, 0), rates(0, 100), Some("max_tx_rate")),
            (rates(0, 200), none(), None),
            (spoof_check(true), spoof_check(false), Some("spoofchk")),
            (spoof_check(false), spoof_check(true), Some("spoofchk")),
            (spoof_check(true), none(), None),
            (trust(true), trust(false), Some("trust")),
            (trust(true), trust(true), None),
            (trust(true), none(), None),
            (state(Enable), state(Disable), Some("link_state")),
            (state(Auto), state(Enable), Some("link_state")),
            (state(Enable), state(Auto), None),
            (none(), VfSettings { mac: Some(Mac([2; 6])), ..vlan(7, 0, false) }, None),
        ];
        for (wanted, shown, expected) in table {
            let contradicted = wanted.contradicted_by(&shown).each().next().map(|(setting, _)| setting);
            assert_eq!(contradicted, expected, "{wanted:?} {shown:?}");
        }
    }
}
