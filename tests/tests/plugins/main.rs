//! Plugins, ours and others: the built-in ones as executables and compared with the reference plugins, the input of
//! other plugins and their failures.
//!
//! | module | tests |
//! |---|---|
//! | `native` | the built-in plugins as plain executables, without an agent |
//! | `install` | the executables are put into a runtime's directory |
//! | `netlink` | the links, addresses, routes and filters that they use |
//! | `differential`, `host_local` | the built-in plugins compared with the reference plugins, configuration by configuration |
//! | `delegate`, `delegation`, `bad_plugins` | running other plugins: as processes, through the agent, when they misbehave |
//! | `plugin_group` | the control group of executed plugins |
//! | `devices` | the devices that the kubelet gave to a pod |
//! | `dhcp` | leases of a DHCP server in an agent |
//! | `multus`, `former_plugin` | pods that Multus attached; pods that the previous plugin attached |
//! | `primaries` | the configurations of other primary networks as the default network |
//! | `portmap` | ports of the node by a chained plugin: the reference, and our own |
//! | `firewall` | traffic that the node forwards past a chain that drops, by a chained plugin in the agent |
//! | `bandwidth` | limits by a chained plugin for an interface of another one |
//! | `chained` | netattach itself as a chained plugin of a network |
//! | `made_before` | netattach after another plugin in the runtime's list, whose interface is the pod's default network |
//! | `without_agent` | masquerade, ports of the node, limits and forwarding by plain executables, compared with the reference plugins |
//! | `sbr` | routing by source address by a chained plugin: compared with the reference, and in an agent |
//! | `sriov` | settings of VFs and their representors, on the kernel's simulated card |
//! | `tuning` | properties of an interface by a chained plugin: compared with the reference, and in an agent |
//! | `vrf` | an interface in a VRF of its pod, by a chained plugin: compared with the reference, and in an agent |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod bad_plugins;
mod bandwidth;
mod chained;
mod delegate;
mod delegation;
mod devices;
mod dhcp;
mod differential;
mod firewall;
mod former_plugin;
mod host_local;
mod install;
mod made_before;
mod multus;
mod native;
mod netlink;
mod plugin_group;
mod portmap;
mod primaries;
mod sbr;
mod sriov;
mod tuning;
mod vrf;
mod without_agent;
