//! The packet path. Veth and bridge attachments: two classifiers on the host-side device. Macvlan attachments: two on
//! the parent, for all that share it, and on the ingress of the pod's device (see `parent`). Devices without an end
//! on the node: two on the device in the pod (see `pod`).
//!
//! | program | in | runs at | sees |
//! |---|---|---|---|
//! | `na_from_pod` | `node_end` | ingress of the host-side device | what the pod sends |
//! | `na_to_pod` | `node_end` | egress of the host-side device | what the pod receives |
//! | `na_par_from` | `parent` | ingress and egress of a parent, ingress of a macvlan | what its pods send |
//! | `na_par_to` | `parent` | ingress of a parent, ingress of a macvlan | what its pods receive |
//! | `na_par_in_from`, `na_par_in_to`, `na_par_out` | `parent` | a parent, by links: where `na_par_from` and `na_par_to` begin | nothing |
//! | `na_wire` | `uplink` | ingress of an uplink of the node | what comes from elsewhere |
//! | `na_xdp` | `xdp` | an uplink's driver | the same, before it is a packet of the kernel's |
//! | `na_fast` | `fast` | where `na_from_pod` and `na_wire` go on | what may pass the node's stack by |
//! | `na_routed` | `routed` | the node's packet filter | what pods send to the node and the node to them, once it is translated |
//! | `na_forwarded` | `routed` | the node's packet filter | what the node routes between pods and others, once it is translated |
//! | `na_pod_from` | `pod` | egress of a device in a pod | what the pod sends |
//! | `na_pod_to` | `pod` | ingress of a device in a pod | what the pod receives |
//!
//! A packet's attachment follows from the device's index (map `na_link`), so one pair of programs serves all
//! attachments and nothing is loaded when a pod starts. A packet that passes returns `TC_ACT_UNSPEC`: other
//! programs and filters of the device still run.
//!
//! What happens to a packet, in order (`judge`; the cuts that the verifier needs are in `subprograms`):
//!
//! 1. No attachment bound to the device, or an unused record: dropped. Fail closed, as the agent binds first and
//!    attaches second. Such packets count for no attachment: an id without a record is free, or about to be. The
//!    fields of the record that each packet needs are its `scope`.
//! 2. VLAN tags are stripped (`frame`; `netattach_common::parse` reads the headers). From the pod: source MAC, ARP,
//!    source address and neighbour discovery are checked (`antispoof`), and that none of these bytes is rewritten
//!    when the packet leaves (`unfinished`).
//! 3. ARP, neighbour discovery and multicast listener messages pass (`icmp`). While the policy is pending, no other
//!    packet does. Other ethertypes than IP pass.
//! 4. A pod isolated in any direction: the flow table, then the policy (`enforce` by way of `fragment`, `conntrack`,
//!    `policy`); a new flow takes a place among its attachment's (`share`). Where the node may translate addresses,
//!    the policy is applied after the translation (`routed`).
//! 5. A packet that may pass is charged to the attachment's bandwidth (`limit`).
//!
//! Most packets do not need all of these steps: `plain` judges the packets of which it is certain, and leaves all
//! others to `judge`. Most packets between pods of one bridge are judged for both ends at once and put into the
//! receiver's interface (`shortcut`), without `na_fast`.
//!
//! Every packet is counted by its `verdict`, drops by reason (`count`); new flows and drops are written as records
//! for the agent (`record`). The result of each stage can be logged, in an object built for that (`log`).
//!
//! The fast path knows a packet's ends (`endpoint`) and routes (`route`). All maps are in `maps`; `family` gives
//! access to those of an address family, `entry` to words of flows that other CPUs write too; the time is in `clock`.
//!
//! A file imports only files that do not import it, directly or indirectly; `cargo xtask tidy` checks this.

mod antispoof;
mod clock;
mod conntrack;
mod count;
mod endpoint;
mod enforce;
mod entry;
mod family;
mod fast;
mod fragment;
mod frame;
mod icmp;
mod judge;
mod limit;
mod log;
mod maps;
mod node_end;
mod parent;
mod plain;
mod pod;
mod policy;
mod record;
mod route;
mod routed;
mod scope;
mod share;
mod shortcut;
mod subprograms;
mod unfinished;
mod uplink;
mod verdict;
mod xdp;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses a program that could get here.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
