//! The virtual machines: which kernel each has, which devices, and which tests are run in it.

/// Test executables with the tests taken from each, by parts of their names; none: all of them.
pub type Tests = &'static [(&'static str, &'static [&'static str])];

/// A virtual machine.
#[derive(Debug)]
pub struct Guest {
    /// The Debian suite that its kernel is of, by which it is also called.
    pub suite: &'static str,
    /// The package that names the kernel of the day.
    pub kernel: &'static str,
    /// Modules that it loads besides those of every guest.
    modules: &'static [&'static str],
    /// Its devices, as the emulator takes them.
    pub devices: &'static [&'static str],
    /// The reference plugins that its tests install.
    pub plugins: &'static [&'static str],
    /// Programs that its tests start, besides `ip` and `tc`; with any, busybox for pods that are run and for servers of
    /// DHCP.
    pub programs: &'static [&'static str],
    /// The variables for its tests.
    pub variables: &'static [(&'static str, &'static str)],
    /// The selections run in it, in a machine for each. No test may be skipped because something is missing.
    pub tests: &'static [Tests],
    /// Those of them that the gate runs: the longest should take as long as the others of all guests together, as two
    /// machines run at once. An emulated machine is slow, so every test costs time: what is here is the only test of a
    /// security property, or what breaks first.
    pub gate: &'static [Tests],
    /// Tests that have a longer form, which `cargo xtask test --longer` runs.
    pub longer: Tests,
}

/// Every guest, in the order in which they are run: the longest first.
pub const GUESTS: [Guest; 2] = [SRIOV, OLDEST];

/// The oldest kernel that a supported Debian runs. The selected tests cover the parts that differ by kernel: the
/// verifier, the hooks, the links and their removal.
const OLDEST: Guest = Guest {
    suite: "bookworm",
    // The same source as the usual one, with fewer drivers.
    kernel: "linux-image-cloud-amd64",
    modules: &["dummy"],
    devices: &[],
    plugins: &[],
    programs: &[],
    variables: &[],
    tests: ALL_OF_OLDEST,
    gate: ALL_OF_OLDEST,
    longer: &[],
};

/// Few enough for the gate.
const ALL_OF_OLDEST: &[Tests] = &[&[
    ("plugins", &["netlink::", "plugin_group::"]),
    (
        "packets",
        &[
            "pins::the_verifier",
            "pins::other_programs",
            "sender::a_pod_speaks",
            "policies::icmp_errors",
            "fragments::later_fragments",
        ],
    ),
    ("cni", &["attach::del_needs_neither", "attach::a_second_add"]),
    (
        "policy",
        &[
            "policy_live::ingress_lets_in",
            "policy_live::a_change_of_the_policy",
            "policy_live::policies_stay_in_force",
        ],
    ),
    ("lifecycle", &["restart::programs_and_maps"]),
]];

/// Two network cards with SR-IOV (Intel 82576) on one wire, and a kernel with tcx links: for VFs, and for links whose
/// drivers not every kernel has.
const SRIOV: Guest = Guest {
    suite: "trixie",
    kernel: "linux-image-amd64",
    modules: &[
        "igb",
        "igbvf",
        "ipvlan",
        "dummy",
        "macvtap",
        "tun",
        "uio_pci_generic",
        "vrf",
        // A simulated card that takes every setting of a VF and has a mode switchdev, without packets.
        "netdevsim",
        // The node's translation of addresses, and what nf_tables computes sums with.
        "crc32c_generic",
        "nft_chain_nat",
        "nft_nat",
        "nft_masq",
        "nft_ct",
        "nft_fib_inet",
    ],
    devices: &[
        "-device",
        "pcie-root-port,id=port1,chassis=1,slot=1",
        "-netdev",
        "hubport,id=wire1,hubid=0",
        "-device",
        "igb,bus=port1,netdev=wire1,mac=02:00:00:00:01:00",
        "-device",
        "pcie-root-port,id=port2,chassis=2,slot=2",
        "-netdev",
        "hubport,id=wire2,hubid=0",
        "-device",
        "igb,bus=port2,netdev=wire2,mac=02:00:00:00:02:00",
    ],
    plugins: &["host-device", "host-local", "bridge", "dummy", "ipvlan", "tuning", "vlan", "vrf"],
    // Of the shell in which a guide is run, and what sets a card's mode.
    programs: &[
        "bash", "cat", "cp", "devlink", "env", "ln", "mkdir", "mount", "mv", "rm", "sed", "sleep", "unshare",
    ],
    variables: &[("NETATTACH_SRIOV_DRIVER", "igb")],
    tests: &[
        &[(
            "policy",
            &[
                "in_pod::sriov::",
                "ipvlan::",
                "policies_hold_on_vlans",
                "policies_hold_on_macvtaps",
                "a_pod_on_a_vlan_follows",
                "netkit::",
                // The others run on the host.
                "host_access::a_node_and_its_pods_on_ipvlans",
                "host_access::a_node_reaches_a_pod_on_an_ipvlan",
                "host_access::a_node_that_would_drop",
            ],
        )],
        &[
            (
                "plugins",
                &[
                    "dhcp::a_pod_on_a_link_that_few_kernels_make",
                    "differential::drivers_",
                    "differential::host_device_by_its_bus",
                    "native::bridge_keys::",
                    "native::host_device::",
                    "native::versions::",
                    "native::node::a_link_on",
                    "native::node::a_macvtap",
                    "native::node::a_vlan_gets",
                    "native::queries::check_tells_what_is_missing_where",
                    "native::removal::a_failed_add",
                    "native::removal::a_late_del",
                    "native::removal::del_frees",
                    "native::netkit::",
                    "sbr::an_agent_routes_by_source_behind_its_own",
                    "sriov::",
                    "tuning::an_agent_tunes",
                    "vrf::",
                ],
            ),
            ("cni", &["holders::the_node_gets_no_gateway"]),
            ("fast_path", &["kept_apart::"]),
            (
                "lifecycle",
                &["crash::an_agent_killed_while_a_vrf", "drift::a_bridge_that_is_told_not_to_filter_by_vlan"],
            ),
        ],
    ],
    gate: &[
        &[(
            "policy",
            &[
                "in_pod::sriov::policies_hold",
                "in_pod::sriov::native::a_vf_is_its_newest_pods",
                "in_pod::sriov::native::a_vf_that_its_pod_drives",
                "in_pod::sriov::native::what_a_card_sets",
                "in_pod::sriov::killed::an_agent_killed_while_it_gives",
                "ipvlan::a_pod_cannot_name",
                "ipvlan::an_ipvlan_in_mode_l3s",
                "ipvlan::policies_hold",
                "netkit::a_policy_holds_on_the_agents_own",
                "netkit::what_others_do",
                "policies_hold_on_macvtaps",
                "policies_hold_on_vlans",
                // The others run on the host.
                "host_access::a_node_and_its_pods_on_ipvlans",
                "host_access::a_node_reaches_a_pod_on_an_ipvlan",
            ],
        )],
        &[
            (
                "plugins",
                &[
                    "native::bridge_keys::",
                    "native::host_device::a_",
                    "native::host_device::an_",
                    "native::host_device::gc_",
                    "native::host_device::what_",
                    "native::netkit::",
                    "native::node::a_link_on",
                    "native::node::a_macvtap",
                    "native::node::a_vlan_gets",
                    "native::queries::check_tells_what_is_missing_where",
                    "native::removal::a_failed_add",
                    "native::removal::a_late_del",
                    "native::removal::del_frees",
                    "native::sriov::a_",
                    "native::sriov::gc_",
                    "native::sriov::killed_while_it_gives",
                    "sriov::a_card",
                    "sriov::every_setting",
                    "sriov::representors",
                    "vrf::a_kernel",
                    "vrf::a_late_del",
                    "vrf::a_table",
                    "vrf::an_agent_puts",
                    "vrf::either_takes",
                ],
            ),
            ("cni", &["holders::the_node_gets_no_gateway"]),
            ("fast_path", &["kept_apart::no_frame_passes_between_vlans"]),
            ("lifecycle", &["drift::a_bridge_that_is_told_not_to_filter_by_vlan"]),
        ],
    ],
    longer: &[
        ("policy", &["in_pod::sriov::native::cycles_leave_nothing", "in_pod::sriov::killed::"]),
        ("plugins", &["native::sriov::cycles_", "native::sriov::killed_"]),
    ],
};

/// The modules that attachments, policies and the tests' own links use.
const MODULES: [&str; 7] = ["veth", "bridge", "macvlan", "8021q", "sch_ingress", "cls_bpf", "sch_tbf"];

impl Guest {
    /// The modules that it loads when it starts, and what they need.
    pub fn modules(&self) -> Vec<&'static str> {
        MODULES.iter().chain(self.modules).copied().collect()
    }
}
