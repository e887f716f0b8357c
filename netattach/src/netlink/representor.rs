//! Representors: the node's ends of the virtual functions (VFs) of a card in mode switchdev
//! (`Documentation/networking/switchdev.rst`, `Documentation/networking/representors.rst`).
//!
//! A representor is a port of the card's switch. The kernel reports the switch (`IFLA_PHYS_SWITCH_ID`), and
//! in the port name the VF that the port represents (`IFLA_PHYS_PORT_NAME`). For a card with devlink ports
//! the kernel generates the name itself (`devlink_port_phys_port_name_get`); other drivers have adopted the
//! format.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;

use super::link::observed;
use super::{Error, Handle, LinkState};
use crate::spec::VirtualFunction;

/// A port of a card's switch.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SwitchPort {
    link: LinkState,
    switch: Vec<u8>,
    /// Port name; some drivers give the card's own port no name.
    name: Option<String>,
    /// Name of the parent device on its bus (Linux 5.14).
    parent: Option<String>,
}

impl Handle {
    /// Returns the representors of a VF in this namespace. Exactly one is the normal case. None: the card is
    /// not in mode switchdev, or has not created the representor yet. Several: they cannot be told apart.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn representors(&mut self, of: &VirtualFunction) -> Result<Vec<LinkState>, Error> {
        let ports: Vec<SwitchPort> = self.all_links()?.into_iter().filter_map(switch_port).collect();
        Ok(representors(&ports, of).into_iter().map(|port| port.link.clone()).collect())
    }
}

fn switch_port(message: RouteNetlinkMessage) -> Option<SwitchPort> {
    let RouteNetlinkMessage::NewLink(shown) = &message else { return None };
    let (mut switch, mut name, mut parent) = (None, None, None);
    for attribute in &shown.attributes {
        match attribute {
            LinkAttribute::PhysSwitchId(id) => switch = id.id.get(..id.len).map(<[u8]>::to_vec),
            LinkAttribute::PhysPortName(text) => name = Some(text.clone()),
            LinkAttribute::ParentDevName(text) => parent = Some(text.clone()),
            _ => {}
        }
    }
    let switch = switch.filter(|id| !id.is_empty())?;
    Some(SwitchPort { link: observed(message)?, switch, name, parent })
}

/// The ports that represent the VF: on a switch of its physical function (PF), with the VF's number. The PFs
/// of one chip may share a switch. Ports whose parent is the PF take precedence over ports that only have the
/// number of its PCI function.
fn representors<'p>(ports: &'p [SwitchPort], of: &VirtualFunction) -> Vec<&'p SwitchPort> {
    let is_child = |port: &SwitchPort| port.parent.as_deref() == Some(&*of.physical);
    let name = |port: &SwitchPort| port.name.as_deref().and_then(PortName::parse);
    let cards = |port: &&SwitchPort| is_child(port) && name(port).is_none();
    let switches: Vec<&[u8]> = ports.iter().filter(cards).map(|port| &*port.switch).collect();
    let of_number = |port: &&SwitchPort| {
        switches.contains(&&*port.switch) && name(port).is_some_and(|name| name.function == of.number)
    };
    let (children, others): (Vec<_>, Vec<_>) =
        ports.iter().filter(of_number).partition(|port| is_child(port));
    if !children.is_empty() {
        return children;
    }
    let pci_function = of.physical.rsplit_once('.').and_then(|(_, number)| number.parse().ok());
    let is_its = |port: &&SwitchPort| name(port).map(|name| name.physical) == pci_function;
    others.into_iter().filter(is_its).collect()
}

/// The VF that a port represents, parsed from the port name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PortName {
    /// Number of the PF.
    physical: u32,
    /// Number of the VF within the PF.
    function: u32,
}

impl PortName {
    /// Parses `pf0vf1`, or `p0pf0vf1` where a driver puts the number of the physical port first. A name with
    /// a controller (`c1pf0vf1`) belongs to a VF of another host. Names of drivers from before Linux 5.1 are
    /// a bare number, which does not identify a VF.
    fn parse(name: &str) -> Option<Self> {
        let behind_wire =
            name.strip_prefix('p').map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
        let own = behind_wire.filter(|own| own.starts_with("pf")).unwrap_or(name);
        let (physical, function) = own.strip_prefix("pf")?.split_once("vf")?;
        let number = |digits: &str| {
            digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
        };
        Some(Self { physical: number(physical)?, function: number(function)? })
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::{LinkMessage, LinkPhysId};

    use super::*;

    const PF: &str = "0000:03:00.0";
    const OTHER: &str = "0000:03:00.1";

    fn port(name: &str, switch: u8, port: Option<&str>, parent: Option<&str>) -> SwitchPort {
        use netlink_packet_core::Parseable;
        let mut shown = LinkMessage::default();
        let switch = LinkPhysId::parse(&[switch; 8]).unwrap();
        let all = [
            Some(LinkAttribute::IfName(name.to_owned())),
            Some(LinkAttribute::PhysSwitchId(switch)),
            port.map(|port| LinkAttribute::PhysPortName(port.to_owned())),
            parent.map(|parent| LinkAttribute::ParentDevName(parent.to_owned())),
        ];
        shown.attributes.extend(all.into_iter().flatten());
        switch_port(RouteNetlinkMessage::NewLink(shown)).unwrap()
    }

    fn found(ports: &[SwitchPort], physical: &str, number: u32) -> Vec<String> {
        let of = VirtualFunction { physical: physical.to_owned(), number };
        representors(ports, &of).into_iter().map(|port| port.link.name.clone()).collect()
    }

    #[test]
    fn a_port_name_says_whose_end_it_is() {
        let ends = |physical, function| Some(PortName { physical, function });
        for (name, expected) in [
            ("pf0vf1", ends(0, 1)),
            ("pf1vf127", ends(1, 127)),
            ("p0pf1vf2", ends(1, 2)),
            ("p0", None),
            ("p0s1", None),
            ("pf0", None),
            ("pf0sf8", None),
            ("c1pf0vf1", None),
            ("pf0vf", None),
            ("pf0vf+1", None),
            ("pfvf1", None),
            ("pf0vf1x", None),
            ("pf0vf4294967296", None),
            ("1", None),
            ("", None),
        ] {
            assert_eq!(PortName::parse(name), expected, "{name}");
        }
    }

    /// Rows: SRV-switchdev.
    #[test]
    fn a_representor_is_on_its_cards_switch_under_its_number() {
        let card = |ports: &[SwitchPort]| {
            let own = [port("p0", 1, Some("p0"), Some(PF)), port("p1", 1, Some("p1"), Some(OTHER))];
            [&own, ports].concat()
        };
        // Both PFs of a chip share a switch, and each numbers its VFs from 0.
        let chip = card(&[
            port("p0_0", 1, Some("pf0vf0"), Some(PF)),
            port("p0_1", 1, Some("pf0vf1"), Some(PF)),
            port("p1_0", 1, Some("pf1vf0"), Some(OTHER)),
            port("far", 2, Some("pf0vf0"), None),
            port("sub", 1, Some("pf0sf0"), Some(PF)),
        ]);
        assert_eq!(found(&chip, PF, 0), ["p0_0"]);
        assert_eq!(found(&chip, PF, 1), ["p0_1"]);
        assert_eq!(found(&chip, OTHER, 0), ["p1_0"]);
        assert_eq!(found(&chip, OTHER, 1), [""; 0]);
        assert_eq!(found(&chip, "0000:04:00.0", 0), [""; 0], "its card has no switch");
        // A driver that reports no parent: the number of the PCI function decides.
        let bare = card(&[port("a", 1, Some("pf0vf0"), None), port("b", 1, Some("pf1vf0"), None)]);
        assert_eq!([found(&bare, PF, 0), found(&bare, OTHER, 0)], [["a"], ["b"]]);
        // Nothing distinguishes the two.
        let twice = card(&[port("a", 1, Some("pf0vf0"), Some(PF)), port("b", 1, Some("pf1vf0"), Some(PF))]);
        assert_eq!(found(&twice, PF, 0), ["a", "b"]);
        // In mode legacy some cards report their switch all the same.
        assert_eq!(found(&card(&[]), PF, 0), [""; 0]);
        let unnamed = [port("eth0", 1, None, Some(PF)), port("a", 1, Some("pf0vf3"), Some(PF))];
        assert_eq!(found(&unnamed, PF, 3), ["a"]);
    }

    proptest::proptest! {
        #[test]
        fn any_port_name_is_read_without_panic(name in "\\PC*") {
            let _ = PortName::parse(&name);
        }
    }
}
