//! A device that an attachment has taken from the node, and its former state.

use serde::{Deserialize, Serialize};

use super::Interface;
use crate::mac::Mac;
use crate::spec::{Conduct, Reception, VfSettings};

/// The state of a device when it was claimed, before any change: the state to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The device's key, which does not depend on its namespace: its bus address, with its permanent address if other
    /// interfaces have the same bus address; without a bus address, its permanent address, else its name.
    pub device: String,
    /// Grows with every claim on the node, so the newest claim of a device has the highest number.
    pub generation: u64,
    /// The device's interface on the node; absent: a process of the pod drives the device, which has no interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
    /// The settings that its physical function had made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<VfSettings>,
    /// Index of the interface of its physical function, if the device is a VF and the node has that interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical: Option<u32>,
    /// The representor of a VF whose card is in switchdev mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub representor: Option<Representor>,
    /// Whether the device has been given back while other parts of its sandbox remain: the node or another pod has it
    /// now, and its former state is obsolete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_back: bool,
}

impl Claim {
    /// Whether the kernel moves the device back when its namespace ends; a device that is not a card is deleted with
    /// the namespace.
    pub fn outlives_namespace(&self) -> bool {
        self.home.as_ref().is_some_and(|home| home.parent.is_some() || home.permanent.is_some())
    }
}

/// The representor of a VF, which stays when the VF is moved, with the state to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Representor {
    /// The representor while the pod has the VF.
    pub device: Interface,
    /// The former MTU in bytes.
    pub mtu: u32,
    /// Whether the representor was up.
    pub up: bool,
    /// The former `accept_ra`, which decides whether the node accepts router advertisements there; absent: the kernel
    /// has no IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_ra: Option<u8>,
    /// The former `addr_gen_mode`, which selects the link-local address; absent: the kernel has no IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr_gen_mode: Option<u8>,
    /// The former `arp_ignore`, which selects the addresses for which the node answers ARP requests there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arp_ignore: Option<u8>,
    /// The pod's end if a process drives it: an interface without an index, and the Ethernet address of its frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driven: Option<Interface>,
}

/// The former state of a device's interface on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Name.
    pub name: String,
    /// Index.
    pub index: u32,
    /// The kernel's name for the kind of link; empty: a card.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Index of its peer or of the device beneath it, if that is on the node too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// Ethernet address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// The permanent address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permanent: Option<Mac>,
    /// The bus address of its parent device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Whether the parent has other interfaces, so that only the permanent address identifies this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub among: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it was up.
    pub up: bool,
    /// The alias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Link group; the default, 0, when absent.
    #[serde(default, skip_serializing_if = "is_default_group")]
    pub group: u32,
    /// Alternative names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_names: Vec<String>,
    /// Kernel ids of the attached programs: XDP, tcx, and those of a netkit pair. Absent: unknown, as for a claim of
    /// an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<Vec<u32>>,
    /// If `programs` is absent: when the claim was planned, in nanoseconds since boot including suspended time; no
    /// process of the pod had loaded a program before. Absent: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<u64>,
    /// How the device sent and received. Absent: unknown, as for `programs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conduct: Option<Conduct>,
    /// Which frames of others it received; none when absent.
    #[serde(default, skip_serializing_if = "Reception::is_selective")]
    pub reception: Reception,
}

fn is_default_group(group: &u32) -> bool {
    *group == 0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_device_sends_and_receives_is_read_as_it_was_written() {
        let conduct = json!({"broadcast": "ff:ff:ff:ff:ff:ff", "arp": true, "multicast": false, "mode": 1, "queue": 1000});
        let written = json!({"name": "card", "index": 4, "mtu": 1500, "up": true, "conduct": conduct});
        let home: Home = serde_json::from_value(written.clone()).unwrap();
        let broadcast = Some(Mac([0xff; 6]));
        let expected = Conduct { broadcast, arp: true, multicast: false, mode: 1, queue: 1000 };
        assert_eq!((home.conduct, serde_json::to_value(&home).unwrap()), (Some(expected), written));
    }

    /// As earlier versions have written it.
    #[test]
    fn a_device_of_the_default_group_is_written_without_one() {
        let written = json!({"name": "card", "index": 4, "mtu": 1500, "up": true});
        let mut home: Home = serde_json::from_value(written.clone()).unwrap();
        assert_eq!((home.group, serde_json::to_value(&home).unwrap()), (0, written));
        home.group = 5;
        assert_eq!(serde_json::to_value(&home).unwrap()["group"], json!(5));
        assert_eq!((home.programs, home.planned, home.conduct), (None, None, None));
    }
}
