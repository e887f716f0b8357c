//! Policies and source checks under real connections, on every kind of link, and attempts to get past them.
//!
//! | module | tests |
//! |---|---|
//! | `policy_live` | policies and anti-spoofing between attached pods |
//! | `netkit` | policies on netkits |
//! | `tap` | policies on taps, whose other end is a process of the pod |
//! | `sources` | definitions that let a pod send with other source addresses |
//! | `services` | policies with Services, where the node translates addresses |
//! | `macvlan`, `ipvlan`, `in_pod` | policies on macvlans, ipvlans and interfaces that other plugins make |
//! | `host_access` | the node and pods on its parents reach each other |
//! | `on_parent` | the policies of the tests of macvlans and ipvlans |
//! | `impostor`, `escape` | pods that claim others' addresses, and that try to bypass the programs |
//! | `closed_bridge` | which addresses of the node are reached through a bridge of the agent |
//! | `hooks` | where programs are attached, beside the programs of others |
//! | `flows`, `bandwidth` | flow records; limits, measured by transfers |
//! | `packet_log` | the path of a packet in the agent's log, with an object that was built for it |
//! | `map_space` | policies that do not fit into the maps |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod bandwidth;
mod closed_bridge;
mod escape;
mod flows;
mod hooks;
mod host_access;
mod impostor;
mod in_pod;
mod ipvlan;
mod macvlan;
mod map_space;
mod netkit;
mod on_parent;
mod packet_log;
mod policy_live;
mod services;
mod sources;
mod tap;
mod vlan;
