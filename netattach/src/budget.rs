//! Size limits of external input: one table. Pure.
//!
//! The author of a pod's annotation, a definition, a configuration or a plugin can make it large. Each of these has a
//! limit, which is checked before anything is looked up or kept, and an excess is refused by name. `docs/budgets.md`
//! has the same table.

/// Codes of the CNI specification (section 5) for refusing oversized input; [`crate::cni::code`] has all of them.
mod code {
    pub(super) const INVALID_ENVIRONMENT: u32 = 4;
    pub(super) const IO_FAILURE: u32 = 5;
    pub(super) const DECODING_FAILURE: u32 = 6;
    pub(super) const INVALID_CONFIG: u32 = 7;
    pub(super) const TRY_AGAIN_LATER: u32 = 11;
}

pub use netattach_shim::budget::{Budget, Exceeded, STDIN, WAITING_DEL, WAITING_DELS};

const POD: &str = "pod's author";
const DEFINITION: &str = "definition's author";
const RUNTIME: &str = "container runtime";
const PLUGIN: &str = "another plugin";
const NODE: &str = "who writes files on the node";

const fn of(what: &'static str, most: usize, unit: &'static str, origin: &'static str) -> Budget {
    Budget { what, most, unit, origin, refused: "ADD", code: Some(code::INVALID_CONFIG) }
}

const fn file(what: &'static str, most: usize, refused: &'static str, code: Option<u32>) -> Budget {
    Budget { what, most, unit: "bytes", origin: NODE, refused, code }
}

const fn object(what: &'static str, most: usize) -> Budget {
    file(what, most, "the object; what it was before stays", None)
}

/// Values that an external JSON text may have: more than the largest configuration and the largest result need. Each
/// takes at least 72 bytes, and several hundred as an object of its own.
const VALUES: usize = 40 << 10;

/// A pod's annotation that names networks.
pub const ANNOTATION: Budget = of("networks annotation", 64 << 10, "bytes", POD);
/// Its elements.
pub const SELECTIONS: Budget = of("networks of a pod", 64, "networks", POD);
/// All attachments of a pod on one node, including those attached while it is running; and never more than half of the
/// node's numbers.
pub const ATTACHMENTS: Budget = of("attachments of a pod", 65, "attachments", POD);
/// Entries of all attachments of a pod in `na_addr4` and `na_addr6`: their addresses and `allowedAddresses`. A few
/// pods cannot fill the maps (32,768 entries each); the rest is in `attach::addresses::map_room`.
pub const ADDRESSES_OF_POD: Budget = of("addresses of a pod's attachments", 1024, "addresses", POD);
/// `ips` of a selection, `args.cni.ips`, `runtimeConfig.ips`.
pub const IPS: Budget = of("addresses asked for", 32, "addresses", POD);
/// `default-route` of a selection.
pub const GATEWAYS: Budget = of("default-route", 8, "gateways", POD);
/// `portMappings` of a selection.
pub const PORT_MAPPINGS: Budget = of("portMappings", 256, "mappings", POD);
/// Ports of the node that are mapped to one pod, through all its interfaces. A mapping in both families counts twice.
pub const HOST_PORTS_OF_POD: Budget = of("ports of the node that lead to one pod", 1024, "ports", POD);
/// Ports of the node that are mapped to all pods: each takes about 1 KiB of the agent's memory, up to two elements of
/// the table in the kernel, and its share of the transaction that rebuilds this table. More than the node's pods
/// need; eight pods of one author can use up all of them.
pub const HOST_PORTS: Budget = Budget {
    code: Some(code::TRY_AGAIN_LATER),
    ..of("ports of the node that lead to pods", 8192, "ports", POD)
};
/// `cni-args` of a selection, as JSON.
pub const ARGUMENTS: Budget = of("cni-args", 8 << 10, "bytes", POD);
/// A name or namespace of a network.
pub const NAME: Budget = of("name of a network", 253, "bytes", POD);

/// The configurations of all its attachments together, as text: a plan contains them all.
pub const POD_TEXT: Budget = of("configurations of a pod's networks", 1 << 20, "bytes", POD);
/// Values in them.
pub const POD_VALUES: Budget = of("values of a pod's networks", VALUES, "values", POD);

/// A CNI configuration: `spec.config`, or a file.
pub const CONFIG: Budget = of("network configuration", 256 << 10, "bytes", DEFINITION);
/// Values in it: each takes many times its size in memory.
pub const CONFIG_VALUES: Budget = of("values of a network configuration", VALUES, "values", DEFINITION);
/// Plugins of a list, including those of its folder.
pub const PLUGINS: Budget = of("plugins of a network", 16, "plugins", DEFINITION);
/// `nonMasqueradeCIDRs`.
pub const NON_MASQUERADE: Budget = of("nonMasqueradeCIDRs", 256, "networks", DEFINITION);
/// Entries of a directory of CNI configurations, or of a network's folder in it.
pub const CONF_ENTRIES: Budget = Budget {
    unit: "entries",
    ..file("entries of a configuration directory", 16 << 10, "ADD", Some(code::IO_FAILURE))
};
/// Files of it that one search reads.
pub const CONF_FILES: Budget =
    Budget { unit: "files", ..file("files of a configuration directory", 1024, "the file", None) };
/// Bytes of them.
pub const CONF_BYTES: Budget = file("content of a configuration directory", 8 << 20, "the file", None);
/// Ranges of `host-local`, in all sets.
pub const RANGES: Budget = of("ranges of host-local", 256, "ranges", DEFINITION);
/// `ipam.addresses` of `static`.
pub const ADDRESSES: Budget = of("ipam.addresses", 256, "addresses", DEFINITION);
/// Each of `ipam.request` and `ipam.provide` of `dhcp`.
pub const DHCP_OPTIONS: Budget = of("options of dhcp", 64, "options", DEFINITION);
/// The values of `ipam.provide` together: a message of DHCP is one packet.
pub const DHCP_VALUES: Budget = of("values of ipam.provide", 1024, "bytes", DEFINITION);
/// `ipam.exclude`.
pub const EXCLUDED: Budget = of("ipam.exclude", 256, "networks", DEFINITION);
/// `ipam.routes`.
pub const ROUTES: Budget = of("ipam.routes", 4096, "routes", DEFINITION);
/// Each list of `dns`.
pub const DNS: Budget = of("dns", 64, "entries", DEFINITION);
/// The name of a lease file or of an entry in libcni's cache.
pub const FILE_NAME: Budget = of("name of a file", 255, "bytes", DEFINITION);
/// A directory path in a configuration.
pub const PATH: Budget = of("path of a directory", 3584, "bytes", DEFINITION);

/// Values in the standard input of a CNI call.
pub const STDIN_VALUES: Budget =
    Budget { what: "values of standard input", most: VALUES, unit: "values", ..STDIN };
/// `CNI_ARGS`.
pub const CNI_ARGS: Budget =
    Budget { code: Some(code::INVALID_ENVIRONMENT), ..of("CNI_ARGS", 16 << 10, "bytes", RUNTIME) };

/// The output of a plugin.
pub const RESULT: Budget = Budget {
    code: Some(code::DECODING_FAILURE),
    refused: "the call; the plugin is killed",
    ..of("output of a plugin", 1 << 20, "bytes", PLUGIN)
};
/// Values in the output of a plugin.
pub const RESULT_VALUES: Budget = Budget {
    what: "values of a plugin's output",
    most: VALUES,
    unit: "values",
    refused: "the call",
    ..RESULT
};
/// `interfaces` of a result.
pub const RESULT_INTERFACES: Budget = result("interfaces of a result", 256, "interfaces");
/// `ips` of a result.
pub const RESULT_IPS: Budget = result("ips of a result", 256, "addresses");
/// `routes` of a result.
pub const RESULT_ROUTES: Budget = result("routes of a result", 4096, "routes");

const fn result(what: &'static str, most: usize, unit: &'static str) -> Budget {
    Budget { code: Some(code::DECODING_FAILURE), ..of(what, most, unit, PLUGIN) }
}

/// A manifest.
pub const MANIFEST: Budget = file("manifest", 16 << 20, "the file; what it gave before stays", None);
/// Documents and items of a manifest.
pub const OBJECTS: Budget = Budget {
    unit: "objects",
    ..file("objects of a manifest", 8 << 10, "the file; what it gave before stays", None)
};
/// Definitions of a cluster that are kept.
pub const DEFINITIONS_OF_CLUSTER: Budget = Budget {
    origin: DEFINITION,
    ..file("definitions of a cluster", 32 << 20, "the definition; its previous version stays", None)
};
/// Policies of a cluster that are kept.
pub const POLICIES_OF_CLUSTER: Budget = Budget {
    origin: "policy's author",
    ..file("policies of a cluster", 64 << 20, "the policy's rules; what it selects is isolated", None)
};
/// Labels, annotations and ports of this node's pods that are kept. Anyone who may create pods may assign any number
/// of them to the node.
pub const PODS_OF_NODE: Budget = Budget {
    origin: POD,
    ..file("pods of a node", 64 << 20, "the pod: it is as one that is not known", None)
};
/// Nodes of a cluster that are known.
pub const NODES_OF_CLUSTER: Budget = Budget {
    origin: "who makes nodes",
    unit: "nodes",
    ..file("nodes of a cluster", 16_384, "the node: no route leads to it", None)
};
/// `spec.podCIDRs` of a node: one of each family.
pub const POD_CIDRS: Budget = Budget { unit: "ranges", ..of_node("podCIDRs of a node", 2) };
/// `status.addresses` of a node.
pub const NODE_ADDRESSES: Budget = Budget { unit: "addresses", ..of_node("addresses of a node", 64) };

const fn of_node(what: &'static str, most: usize) -> Budget {
    Budget { origin: NODES_OF_CLUSTER.origin, ..object(what, most) }
}
/// Labels, annotations in use and ports of all its objects: each takes up to 150 bytes of memory.
pub const ENTRIES: Budget = Budget {
    what: "labels, annotations and ports of a manifest",
    most: 64 << 10,
    unit: "entries",
    ..OBJECTS
};
/// All annotations of a pod or a definition, names and values, as an API server bounds them.
pub const ANNOTATIONS: Budget = object("annotations of an object", 256 << 10);
/// `spec.config` of a definition. A text longer than [`CONFIG`] is kept only so that ADD can name it.
pub const DEFINITION_CONFIG: Budget = object("spec.config of a definition", 1 << 20);
/// The key of a label: prefix, `/` and name, as an API server bounds them.
pub const LABEL_KEY: Budget = object("key of a label", 317);
/// The value of a label, as an API server bounds it.
pub const LABEL_VALUE: Budget = object("value of a label", 63);
/// `metadata.uid`.
pub const UID: Budget = object("uid of an object", 253);
/// `containers` and `initContainers` of a pod, each. Of `ephemeralContainers`, which are added to a live pod, those
/// beyond this number count as having every capability.
pub const CONTAINERS: Budget = Budget { unit: "containers", ..object("containers of a pod", 128) };
/// `ports` of a container.
pub const CONTAINER_PORTS: Budget = Budget { unit: "ports", ..object("ports of a container", 2048) };
/// A document in YAML, or an item of a list in it, that is parsed as a value.
pub const YAML: Budget = file("document in YAML", 512 << 10, MANIFEST.refused, None);
/// Values in it, counting those that aliases refer to.
pub const YAML_VALUES: Budget =
    Budget { what: "values of a document in YAML", most: VALUES, unit: "values", ..YAML };
/// The characters in it that may begin a value, `,` `:` `-` `?` `[` `{`, in texts as well. The parser keeps all of a
/// document in memory before the first value is counted. A mapping with [`YAML_VALUES`] has two for each.
pub const YAML_MARKS: Budget = Budget {
    what: "commas, colons, dashes and brackets of a document in YAML",
    most: 2 * VALUES,
    unit: "characters",
    ..YAML
};
/// `ipam.resolvConf`.
pub const RESOLV_CONF: Budget = file("ipam.resolvConf", 64 << 10, "ADD", Some(code::IO_FAILURE));
/// A file of device information.
pub const DEVICE_INFO: Budget = file("device information", 64 << 10, "ADD", Some(code::IO_FAILURE));
/// The kubelet's checkpoint of device allocations.
pub const DEVICE_CHECKPOINT: Budget =
    file("kubelet's device checkpoint", 16 << 20, "ADD", Some(code::TRY_AGAIN_LATER));
/// A file of Multus's saved state of a pod.
pub const MULTUS_STATE: Budget = file("file of multusStateDir", 1 << 20, "DEL", Some(code::IO_FAILURE));
/// An entry in libcni's cache: a configuration and a result, both escaped.
pub const CACHED: Budget = file("entry of libcni's cache", 4 << 20, "the entry", None);
/// Values in an entry of libcni's cache.
pub const CACHED_VALUES: Budget =
    Budget { unit: "values", ..file("values of an entry of libcni's cache", 2 * VALUES, "the entry", None) };
/// A lease.
pub const LEASE: Budget = file("lease", 64 << 10, "the lease; its address is not given", None);

/// All limits, in the order of `docs/budgets.md`.
pub const TABLE: [&Budget; 65] = [
    &ANNOTATION,
    &SELECTIONS,
    &ATTACHMENTS,
    &ADDRESSES_OF_POD,
    &NAME,
    &POD_TEXT,
    &POD_VALUES,
    &IPS,
    &GATEWAYS,
    &PORT_MAPPINGS,
    &HOST_PORTS_OF_POD,
    &HOST_PORTS,
    &ARGUMENTS,
    &CONFIG,
    &CONFIG_VALUES,
    &PLUGINS,
    &NON_MASQUERADE,
    &CONF_ENTRIES,
    &CONF_FILES,
    &CONF_BYTES,
    &RANGES,
    &ADDRESSES,
    &DHCP_OPTIONS,
    &DHCP_VALUES,
    &EXCLUDED,
    &ROUTES,
    &DNS,
    &FILE_NAME,
    &PATH,
    &STDIN,
    &STDIN_VALUES,
    &WAITING_DELS,
    &WAITING_DEL,
    &CNI_ARGS,
    &RESULT,
    &RESULT_VALUES,
    &RESULT_INTERFACES,
    &RESULT_IPS,
    &RESULT_ROUTES,
    &DEFINITIONS_OF_CLUSTER,
    &POLICIES_OF_CLUSTER,
    &PODS_OF_NODE,
    &NODES_OF_CLUSTER,
    &POD_CIDRS,
    &NODE_ADDRESSES,
    &MANIFEST,
    &OBJECTS,
    &ENTRIES,
    &ANNOTATIONS,
    &DEFINITION_CONFIG,
    &LABEL_KEY,
    &LABEL_VALUE,
    &UID,
    &CONTAINERS,
    &CONTAINER_PORTS,
    &YAML,
    &YAML_VALUES,
    &YAML_MARKS,
    &RESOLV_CONF,
    &DEVICE_INFO,
    &DEVICE_CHECKPOINT,
    &MULTUS_STATE,
    &CACHED,
    &CACHED_VALUES,
    &LEASE,
];

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
