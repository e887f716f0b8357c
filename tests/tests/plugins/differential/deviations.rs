//! Differences between our plugins and the reference plugins, with the reasons. Those visible to users are in
//! `docs/plugins.md`.

/// An intended difference.
pub(crate) struct Deviation {
    /// JSON pointers into the state of an attachment.
    pub(super) at: &'static [&'static str],
    /// The versions in which it occurs.
    pub(super) versions: &'static [&'static str],
    #[expect(dead_code, reason = "for whoever reads the table")]
    why: &'static str,
}

pub(super) const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

pub(super) const MTU_OF_MACVLAN: Deviation = Deviation {
    at: &["/ADD/result/interfaces/0/mtu"],
    versions: &["1.0.0", "1.1.0"],
    why: "the specification has had the member since 1.1.0; we fill it in",
};

pub(super) const MTU_OF_BRIDGE: Deviation = Deviation {
    at: &["/ADD/result/interfaces/0/mtu", "/ADD/result/interfaces/1/mtu", "/ADD/result/interfaces/2/mtu"],
    versions: &["1.0.0", "1.1.0"],
    why: "the specification has had the member since 1.1.0; we fill it in",
};

pub(super) const MTU_OF_GATEWAY: Deviation = Deviation {
    at: &["/ADD/result/interfaces/3/mtu"],
    versions: &["1.0.0", "1.1.0"],
    why: "the specification has had the member since 1.1.0; we fill it in",
};

pub(super) const MTU_OF_PAIR: Deviation = Deviation {
    at: &["/ADD/result/interfaces/0/mtu", "/ADD/result/interfaces/1/mtu"],
    versions: &["1.0.0", "1.1.0"],
    why: "the specification has had the member since 1.1.0; we fill it in",
};

pub(super) const NO_RESULT_NO_LINK: Deviation = Deviation {
    at: &["/ADD/result/code", "/attached/pod/eth0"],
    versions: &["0.1.0", "0.2.0"],
    why: "the result has no form in these versions: we say so before, the reference after the link was made",
};

pub(super) const NO_RESULT_NO_BRIDGE: Deviation = Deviation {
    at: &[
        "/ADD/result/code",
        "/attached/pod/eth0",
        "/attached/node/the node's end",
        "/attached/node/br0",
        "/detached/node/br0",
    ],
    versions: &["0.1.0", "0.2.0"],
    why: "the result has no form in these versions: we say so before, the reference after the links were made",
};

pub(super) const CHECK_OF_L2: Deviation = Deviation {
    at: &["/CHECK"],
    versions: &["0.4.0", "1.0.0", "1.1.0"],
    why: "without ipam the reference asks an address plugin without a name, and fails",
};

pub(super) const CHECK_WITHOUT_MASTER: Deviation = Deviation {
    at: &["/CHECK"],
    versions: &["0.4.0", "1.0.0", "1.1.0"],
    why: "the reference looks for a parent without a name, and fails",
};

pub(super) const LO_STAYS_UP: Deviation = Deviation {
    at: &["/detached/pod/lo/up", "/detached/pod/lo/addresses"],
    versions: &VERSIONS,
    why: "lo belongs to the namespace, which ends; what still runs in it may talk to itself until then",
};

pub(super) const LO_IN_ITS_VERSION: [Deviation; 2] = [
    Deviation {
        at: &[
            "/ADD/result/dns",
            "/ADD/result/interfaces",
            "/ADD/result/ips",
            "/ADD/result/ip4",
            "/ADD/result/ip6",
        ],
        versions: &["0.1.0", "0.2.0"],
        why: "the reference prints the newest shape whatever version it names",
    },
    Deviation {
        at: &["/ADD/result/dns", "/ADD/result/ips/0/version", "/ADD/result/ips/1/version"],
        versions: &["0.3.0", "0.3.1", "0.4.0"],
        why: "the reference prints the newest shape whatever version it names",
    },
];

pub(super) const CODE_OF_CONFIG: Deviation = Deviation {
    at: &["/ADD/result/code"],
    versions: &VERSIONS,
    why: "what is wrong with the configuration is code 7; the reference has one code for everything",
};

pub(super) const DEL_OF_CONFIG: Deviation = Deviation {
    at: &["/DEL"],
    versions: &VERSIONS,
    why: "nothing was made, and DEL says so; the reference refuses the configuration at DEL too",
};

pub(super) const ONE_PER_FAMILY: Deviation = Deviation {
    at: &["/ADD/result/code"],
    versions: &["0.1.0", "0.2.0"],
    why: "what is wrong with the configuration is code 7; the reference has one code for everything",
};

pub(super) const GATEWAY_OF_ALL: [Deviation; 2] = [
    Deviation {
        at: &["/ADD/result/ip4/gateway"],
        versions: &["0.1.0", "0.2.0"],
        why: "GATEWAY is the gateway of every address whose subnet it is in; the reference passes ipam.addresses over",
    },
    Deviation {
        at: &["/ADD/result/ips/0/gateway"],
        versions: &["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
        why: "the same, in the words of these versions",
    },
];

const SYSCTLS_OF_PORT: &[&str] = &[
    "/attached/node/the node's end/sysctls/ipv6.accept_ra",
    "/attached/node/the node's end/sysctls/ipv6.addr_gen_mode",
];

pub(super) const PORT_HAS_NO_ADDRESS: Deviation = Deviation {
    at: SYSCTLS_OF_PORT,
    versions: &VERSIONS,
    why: "a port of a bridge has no network layer: we keep the kernel from giving it a link-local address, the reference \
          from taking advertisements",
};

pub(super) const L2_PORT_HAS_NO_ADDRESS: Deviation = Deviation {
    at: SYSCTLS_OF_PORT,
    versions: &["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    why: "the same, where there is a link in both",
};

const SYSCTLS_OF_CLOSED: &[&str] = &[
    "/attached/node/br0/sysctls/ipv4.arp_ignore",
    "/attached/node/br0/sysctls/ipv4.rp_filter",
    "/attached/node/br0/sysctls/ipv6.disable_ipv6",
    "/detached/node/br0/sysctls/ipv4.arp_ignore",
    "/detached/node/br0/sysctls/ipv4.rp_filter",
    "/detached/node/br0/sysctls/ipv6.disable_ipv6",
];

pub(super) const CLOSED_BRIDGE: Deviation = Deviation {
    at: SYSCTLS_OF_CLOSED,
    versions: &VERSIONS,
    why: "on a bridge of its own without gateways the node has no business: with the reference pods reach all of its addresses by \
          it, and what listens at its link-local one",
};

pub(super) const L2_CLOSED_BRIDGE: Deviation = Deviation {
    at: SYSCTLS_OF_CLOSED,
    versions: &["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    why: "the same, where there is a bridge in both",
};

pub(super) const PORT_OF_GATEWAY: Deviation = Deviation {
    at: &[
        "/attached/node/the port of br0.100/sysctls/ipv6.accept_ra",
        "/attached/node/the port of br0.100/sysctls/ipv6.addr_gen_mode",
        "/attached/node/br0.100/sysctls/ipv6.accept_ra",
        "/detached/node/the port of br0.100/sysctls/ipv6.accept_ra",
        "/detached/node/the port of br0.100/sysctls/ipv6.addr_gen_mode",
        "/detached/node/br0.100/sysctls/ipv6.accept_ra",
    ],
    versions: &VERSIONS,
    why: "of the pair, the end that has the gateways takes no advertisements of pods, and the port has no address; the \
          reference has the port take none",
};

pub(super) const DETECTION_BY_ADDRESS: Deviation = Deviation {
    at: &["/attached/pod/eth0/sysctls/ipv6.accept_dad"],
    versions: &VERSIONS,
    why: "we say of each address of the lease that no duplicate is looked for, the reference of the interface: what a \
          pod adds of its own is looked for",
};

pub(super) const NO_LINK_LOCAL: Deviation = Deviation {
    at: &["/attached/pod/eth0/sysctls/ipv6.addr_gen_mode"],
    versions: &VERSIONS,
    why: "a pod without IPv6 addresses, behind a gateway without them, has no link-local one: nobody is there to be \
          spoken to, and what it sends is flooded to all pods",
};

pub(super) const NEIGHBOURS_HEAR_OF_IPV4: Deviation = Deviation {
    at: &["/attached/pod/eth0/sysctls/ipv4.arp_notify"],
    versions: &VERSIONS,
    why: "whoever had the address before is forgotten when the link comes up; the reference announces behind some plugins \
          only",
};

pub(super) const NEIGHBOURS_HEAR_OF_IPV6: Deviation = Deviation {
    at: &["/attached/pod/eth0/sysctls/ipv6.ndisc_notify"],
    versions: &VERSIONS,
    why: "the same of IPv6, where the interface has such addresses; the reference announces them by macvlan and ipvlan only, \
          and there also where there are none",
};

/// The version in which the leases of an agent are compared with those of the reference's daemon.
pub(crate) const LEASED: &str = "1.0.0";

/// Leases of an agent, and of the reference's daemon in the same agent.
pub(crate) const OF_LEASES: [Deviation; 4] = [
    Deviation {
        at: &["/records"],
        versions: &[LEASED],
        why: "the next agent knows the lease; those of the reference's daemon end with it",
    },
    Deviation {
        at: &["/result/dns", "/status/dns/domain", "/status/dns/nameservers"],
        versions: &[LEASED],
        why: "name servers and domain are part of a lease; the reference leaves them out",
    },
    Deviation {
        at: &["/result/routes/1/gw"],
        versions: &[LEASED],
        why: "a route on the link has no next hop; the reference prints 0.0.0.0, which the kernel takes as none and \
              does not show, and its interface plugins miss the route at CHECK",
    },
    Deviation {
        at: &["/released/to everybody"],
        versions: &[LEASED],
        why: "the server alone is told, from the pod's address; the reference broadcasts it from 0.0.0.0, which no \
              UDP socket of a server on Linux receives, so the lease lasts until its time is over",
    },
];
