//! The packet path. Veth and bridge attachments: two classifiers on the host-side device. Macvlan attachments: two on
//! the parent, for all that share it, and on the ingress of the pod's device (see `parent`). Devices without an end on the
//! node: two on the device in the pod (see `pod`).
//!
//! | program | runs at | sees |
//! |---|---|---|
//! | `na_from_pod` | ingress of the host-side device | what the pod sends |
//! | `na_to_pod` | egress of the host-side device | what the pod receives |
//! | `na_par_from` | ingress and egress of a parent, ingress of a macvlan | what its pods send |
//! | `na_par_to` | ingress of a parent, ingress of a macvlan | what its pods receive |
//! | `na_par_in_from`, `na_par_in_to`, `na_par_out` | a parent, by links: where `na_par_from` and `na_par_to` begin | nothing |
//! | `na_wire` | ingress of an uplink of the node (see `wire`) | what comes from elsewhere |
//! | `na_xdp` | an uplink's driver (see `xdp`) | the same, before it is a packet of the kernel's |
//! | `na_fast` | where `na_from_pod` and `na_wire` go on (see `fast`) | what may pass the node's stack by |
//! | `na_routed` | the node's packet filter (see `routed`) | what the node routes, once it is translated |
//! | `na_pod_from` | egress of a device in a pod | what the pod sends |
//! | `na_pod_to` | ingress of a device in a pod | what the pod receives |
//!
//! A packet's attachment follows from the device's index (map `na_link`), so one pair of programs serves all
//! attachments and nothing is loaded when a pod starts. A packet that passes returns `TC_ACT_UNSPEC`: other
//! programs and filters of the device still run.
//!
//! What happens to a packet, in order (`classifier::verdict`; the cuts that the verifier needs are in `stages`):
//!
//! 1. No attachment bound to the device, or an unused record: dropped. Fail closed, as the agent binds first
//!    and attaches second.
//! 2. VLAN tags are peeled off (`frame`; what a packet says is read by `netattach_common::parse`). From the pod: source MAC, ARP, source address and neighbour discovery are
//!    checked (`antispoof`).
//! 3. ARP, neighbour discovery and multicast listener messages pass. While the policy is pending nothing
//!    else does. Other ethertypes than IP pass.
//! 4. A pod isolated in any direction: the flow table, then the policy (`fragment`, `conntrack`, `policy`); where the node
//!    may translate addresses, behind that (`routed`).
//! 5. What may pass is charged to the attachment's bandwidth (`limit`).
//!
//! Every verdict is counted, drops by reason (`count`); new flows and drops are told to the agent (`record`).
//!
//! The entry points stand in `classifier`, the walk over a packet in `packet` and `icmp`, places for flows in `share`, the fast path's
//! routing in `route`; all maps in `maps`.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
// The target has atomic operations, which the standard library does not offer for it yet.
#![cfg_attr(target_arch = "bpf", feature(core_intrinsics), allow(internal_features))]

#[cfg(target_arch = "bpf")]
mod antispoof;
#[cfg(target_arch = "bpf")]
mod classifier;
#[cfg(target_arch = "bpf")]
mod conntrack;
#[cfg(target_arch = "bpf")]
mod count;
#[cfg(target_arch = "bpf")]
mod family;
#[cfg(target_arch = "bpf")]
mod fast;
#[cfg(target_arch = "bpf")]
mod fragment;
#[cfg(target_arch = "bpf")]
mod frame;
#[cfg(target_arch = "bpf")]
mod icmp;
#[cfg(target_arch = "bpf")]
mod limit;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod parent;
#[cfg(target_arch = "bpf")]
mod pod;
#[cfg(target_arch = "bpf")]
mod policy;
#[cfg(target_arch = "bpf")]
mod record;
#[cfg(target_arch = "bpf")]
mod route;
#[cfg(target_arch = "bpf")]
mod routed;
#[cfg(target_arch = "bpf")]
mod share;
#[cfg(target_arch = "bpf")]
mod stages;
#[cfg(target_arch = "bpf")]
mod verdict;
#[cfg(target_arch = "bpf")]
mod wire;
#[cfg(target_arch = "bpf")]
mod xdp;

/// Any other target gets a program that only explains itself, so that the workspace builds everywhere.
#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("this is a BPF program: build it with `cargo xtask build-ebpf`");
    std::process::exit(2);
}
