//! A device that an attachment has taken from the node, and how it was before.

use serde::{Deserialize, Serialize};

use super::Interface;
use crate::mac::Mac;
use crate::spec::{Conduct, VfSettings};

/// What was found when a device was claimed, before anything was changed: how it goes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The device, in words that stay the same wherever it is: its name on its bus, with its permanent address if others
    /// have that too; else its permanent address, else its name.
    pub device: String,
    /// Grows with every claim on the node: the newest one of a device has it.
    pub generation: u64,
    /// Its interface on the node; absent: a process of the pod drives it, and it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
    /// What its physical function had set for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<VfSettings>,
    /// Index of the interface of its physical function, if it is a VF and the node has that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical: Option<u32>,
    /// Its end on the node, of a VF of a card in mode switchdev.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub representor: Option<Representor>,
    /// Whether it has gone back while something else of its sandbox has not: it is the node's again, or another pod's, and how
    /// it was before counts no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_back: bool,
}

impl Claim {
    /// Whether the kernel brings the device home when its namespace ends; one that is no card ends with it.
    pub fn outlives_namespace(&self) -> bool {
        self.home.as_ref().is_some_and(|home| home.parent.is_some() || home.permanent.is_some())
    }
}

/// The node's end of a VF, which stays when the VF goes, and what of it is given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Representor {
    /// As it is while the pod has the VF.
    pub device: Interface,
    /// Its MTU before, in bytes.
    pub mtu: u32,
    /// Whether it was up.
    pub up: bool,
    /// Whether the node took routes from what came in by it: its setting `accept_ra`, where the kernel has IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_ra: Option<u8>,
    /// Which link-local address it got: its setting `addr_gen_mode`, where the kernel has IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr_gen_mode: Option<u8>,
    /// For which addresses the node answered ARP requests there: its setting `arp_ignore`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arp_ignore: Option<u8>,
    /// The pod's end, if a process drives it: an interface with no index, and the address that its frames have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driven: Option<Interface>,
}

/// The interface of a device on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Name.
    pub name: String,
    /// Index.
    pub index: u32,
    /// The kernel's name for its kind; empty: a card.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Index of its other end or of the device beneath it, if it has one that is on the node too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// Ethernet address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// The address that it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permanent: Option<Mac>,
    /// The name of its parent device on that one's bus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Whether its parent had other interfaces, from which its permanent address tells it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub among: bool,
    /// In bytes.
    pub mtu: u32,
    /// Whether it was up.
    pub up: bool,
    /// Text for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Link group. Absent: the default one, 0.
    #[serde(default, skip_serializing_if = "is_default_group")]
    pub group: u32,
    /// Other names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_names: Vec<String>,
    /// Kernel's ids of the programs that were on it: XDP, tcx, and those of a netkit pair. Absent: nobody has looked, as where an
    /// earlier version has claimed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<Vec<u32>>,
    /// Where `programs` is absent, when the claim was planned, in nanoseconds since the boot, suspended time included: no process
    /// of the pod had loaded a program by then. Absent: that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<u64>,
    /// How it sent and received. Absent: nobody has looked, as with `programs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conduct: Option<Conduct>,
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
