//! Why a packet was dropped: the one numbered list behind BPF, metrics and command line.

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $number:literal $variant:ident $name:literal $text:literal,)+) => {
        /// Why a packet was dropped. The number is the index into [`Stats::drops`](crate::Stats::drops) and
        /// never changes its meaning; new reasons take new numbers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[$doc])* $variant = $number,)+
        }

        impl DropReason {
            /// Every reason, by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The reason's short name: kebab case, stable, used as a metric label and in JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// One line for an operator: what the packet was and which setting judged it.
            pub const fn description(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }
    };
}

drop_reasons! {
    /// The device runs our program but no attachment is bound to it.
    1 Unbound "unbound" "no attachment is bound to this device",
    /// The attachment's policy is not in force yet.
    2 Pending "pending" "the attachment's policy is not loaded yet; only ARP and neighbour discovery pass",
    /// A header is cut off or contradicts itself.
    3 Malformed "malformed" "a header is truncated or contradicts itself",
    /// Ethernet source, or the client of DHCP, is not the attachment's address.
    4 SourceMac "source-mac" "the pod sent from a MAC address that is not its own, or by DHCP for one",
    /// IPv4 source, or the address that a client of DHCP has, is not one of the attachment's addresses.
    5 SourceIpv4 "source-ipv4" "the pod sent from an IPv4 address that is not its own, or by DHCP for one",
    /// IPv6 source is not one of the attachment's addresses.
    6 SourceIpv6 "source-ipv6" "the pod sent from an IPv6 address that is not its own",
    /// ARP sender hardware address is not the attachment's.
    7 ArpSenderMac "arp-sender-mac" "the pod sent ARP with a sender MAC address that is not its own",
    /// ARP sender protocol address is not the attachment's.
    8 ArpSenderIp "arp-sender-ip" "the pod sent ARP with a sender address that is not its own, or a probe for one",
    /// A neighbour discovery link-layer option names another MAC address.
    9 NdLinkLayer "nd-link-layer" "the pod sent neighbour discovery with a link-layer option that is not its own MAC address",
    /// A neighbour advertisement claims another address.
    10 NdTarget "nd-target" "the pod advertised, or looked for duplicates of, an IPv6 address that is not its own",
    /// Router advertisement, redirect, multicast query or a protocol among routers from a pod.
    11 RouterMessage "router-message" "the pod sent a router advertisement, a redirect, a multicast query or router advertisement, or a protocol among routers (VRRP, CARP, OSPF, EIGRP, PIM, DVMRP, HSRP, GLBP)",
    /// A packet from a pod to the port of DHCP or DHCPv6 clients, or a message of either protocol that no client
    /// sends.
    12 DhcpServer "dhcp-server" "the pod spoke as a server or relay of DHCP: to the port of clients, or to servers otherwise than a client",
    /// A VLAN tag where none is allowed.
    13 VlanTagged "vlan-tagged" "the frame carries a VLAN tag",
    /// IPv4 source routing, or an IPv6 routing header of type 0 or with segments left.
    14 SourceRoute "source-route" "the packet chooses its way: IPv4 source routing, IPv6 routing header of type 0, or of another with segments left",
    /// More IPv6 extension headers than the programs follow.
    15 ExtensionHeaders "extension-headers" "the packet has more IPv6 extension headers than are followed",
    /// A later fragment whose first one was not seen, and no portless rule allows it.
    16 FragmentMiss "frag-miss" "a fragment whose first fragment was not seen, and no rule without ports allows its peer",
    /// Egress policy: the peer is in no rule.
    17 EgressPeer "egress-peer" "egress policy selects this pod and no rule allows the destination",
    /// Egress policy: the peer is known, not the port.
    18 EgressPort "egress-port" "egress policy allows the destination but not this protocol and port",
    /// Ingress policy: the peer is in no rule.
    19 IngressPeer "ingress-peer" "ingress policy selects this pod and no rule allows the source",
    /// Ingress policy: the peer is known, not the port.
    20 IngressPort "ingress-port" "ingress policy allows the source but not this protocol and port",
    /// An ICMP error about an unknown flow, or from a pod about a packet that was not sent to the pod.
    21 IcmpUnrelated "icmp-unrelated" "an ICMP error about no known flow, or from the pod about a packet that was not sent to it",
    /// A first fragment without the whole transport header, or a later one that overlaps it.
    22 FragmentTiny "frag-tiny" "a fragment that splits or overlaps the transport header",
    /// The attachment opens flows faster than it may.
    23 FlowRate "ct-rate" "the attachment opens more flows per second than newFlowsPerSecond allows",
    /// A packet that neither belongs to a known connection nor opens one.
    24 Midstream "midstream" "a packet of no known connection, and midstream is drop",
    /// Beyond the attachment's bandwidth.
    25 RateLimit "rate-limit" "beyond the bandwidth of the attachment",
    /// On a macvlan's parent: sent by another namespace, from no attachment's address.
    26 Stranger "stranger" "a macvlan without an attachment sent on a parent of attachments",
    /// On a macvlan's parent: sent from an attachment's address by another namespace.
    27 SourceNamespace "source-namespace" "sent from an attachment's MAC address, but not by its pod",
    /// On an uplink: from the address of an attachment of this node.
    28 WireSource "wire-source" "came in by an uplink with the address of a pod that is on this node",
    /// Neither IP nor ARP, from or to a pod that is isolated; or a carrier of packets whose addresses are not checked, from a pod.
    29 Ethertype "ethertype" "neither IP nor ARP, which no rule can allow, and policy isolates the pod in this direction; or the pod sent packets in SNAP, MPLS or PPPoE, where their addresses are not checked",
    /// A protocol of bridges, switches and cards from a pod.
    30 LinkProtocol "link-protocol" "the pod spoke as a bridge or switch: spanning tree, LACP, LLDP, 802.1X, pause frames",
    /// The flow table is full, beyond what attachments have places for.
    31 FlowsFull "ct-full" "the flow table has no room for another flow",
}

impl DropReason {
    /// How many numbers are reserved, 0 (unused) included: the length of [`Stats::drops`](crate::Stats::drops).
    pub const SLOTS: usize = 32;

    /// The reason of a number, `None` for numbers not given out.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| *reason as u8 == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn numbers_are_consecutive_from_one_and_fit_the_counters() {
        let numbers: Vec<usize> = DropReason::ALL.iter().map(|reason| *reason as usize).collect();
        assert_eq!(numbers, (1..=DropReason::ALL.len()).collect::<Vec<_>>());
        assert!(DropReason::ALL.len() < DropReason::SLOTS);
    }

    #[test]
    fn names_are_unique_kebab_case() {
        let names: BTreeSet<&str> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), DropReason::ALL.len());
        for name in names {
            let kebab = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(kebab), "{name}");
        }
    }

    /// Metrics and other pages refer to that page for the meaning of a reason.
    #[test]
    fn every_reason_is_in_the_page_with_what_it_usually_comes_from() {
        let page = include_str!("../../docs/troubleshooting.md");
        let (_, table) = page.split_once("\n| reason | usual cause |\n|---|---|\n").unwrap();
        let rows = table.lines().map_while(|line| line.strip_prefix("| ")?.split_once(" | "));
        let found: Vec<&str> = rows.flat_map(|(reasons, _)| reasons.split('`').skip(1).step_by(2)).collect();
        let unique: BTreeSet<&str> = found.iter().copied().collect();
        assert_eq!(unique, DropReason::ALL.iter().map(|reason| reason.name()).collect());
        assert_eq!(found.len(), unique.len(), "each once");
    }

    #[test]
    fn every_number_leads_back_to_its_reason() {
        for number in 0..=u8::MAX {
            let expected = DropReason::ALL.get(usize::from(number).wrapping_sub(1)).copied();
            assert_eq!(DropReason::from_number(number), expected);
        }
    }
}
