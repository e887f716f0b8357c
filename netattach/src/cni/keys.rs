//! The keys of the plugins that netattach implements, as they are documented.
//!
//! The JSON decoder of plugins in Go accepts a key in any letter case. [`as_documented`] changes such keys to the
//! documented spelling, so that a configuration means the same here. Unknown keys stay as they are, and [`unknown`]
//! returns them.

use super::json::{Map, Value};

/// A key, and the keys of objects in its value.
struct Key {
    name: &'static str,
    within: &'static [Key],
    /// Whether such an object may have other keys too.
    open: bool,
}

const fn key(name: &'static str) -> Key {
    Key { name, within: &[], open: true }
}

const fn object(name: &'static str, within: &'static [Key]) -> Key {
    Key { name, within, open: false }
}

const fn open(name: &'static str, within: &'static [Key]) -> Key {
    Key { name, within, open: true }
}

const RANGE: &[Key] = &[key("subnet"), key("rangeStart"), key("rangeEnd"), key("gateway")];
const ROUTES: Key = object(
    "routes",
    &[key("dst"), key("gw"), key("mtu"), key("advmss"), key("priority"), key("table"), key("scope")],
);
const DNS: Key = object("dns", &[key("nameservers"), key("domain"), key("search"), key("options")]);
const RATES: &[Key] = &[key("ingressRate"), key("ingressBurst"), key("egressRate"), key("egressBurst")];
const PORTS: &[Key] = &[key("hostPort"), key("containerPort"), key("protocol"), key("hostIP")];

/// The keys that the configuration of any plugin may have.
const ANY: &[Key] = &[
    key("cniVersion"),
    key("cniVersions"),
    key("name"),
    key("type"),
    key("capabilities"),
    key("disableCheck"),
    key("disableGC"),
    key("loadOnlyInlinedPlugins"),
    key("prevResult"),
    open(
        "runtimeConfig",
        &[
            key("ips"),
            object("ipRanges", RANGE),
            key("mac"),
            key("deviceID"),
            open("portMappings", PORTS),
            open("bandwidth", RATES),
        ],
    ),
];

/// The keys that select the IPAM of an interface.
const ADDRESSES: &[Key] = &[open("ipam", &[key("type")])];

/// The keys of an interface.
const INTERFACE: &[Key] =
    &[DNS, open("args", &[open("cni", &[key("mac"), key("ips")])]), key("mac"), key("mtu")];

/// The keys of the dataplane for an interface, from its own plugin or from netattach as a chained plugin.
const DATAPLANE: &[Key] =
    &[object("bandwidth", RATES), key("fastPath"), key("sourceCheck"), key("allowedAddresses"), key("vlans")];

/// The keys of address translation by the node.
const TRANSLATED: &[Key] = &[
    key("ipMasq"),
    key("ipMasqBackend"),
    key("nonMasqueradeCIDRs"),
    key("nonMasqueradeBuiltin"),
    key("portSenders"),
];

const VETH: &[Key] = &[key("isDefaultGateway")];

const BRIDGE: &[Key] = &[
    key("bridge"),
    key("isGateway"),
    key("isDefaultGateway"),
    key("forceAddress"),
    key("keepAddresses"),
    key("hairpinMode"),
    key("promiscMode"),
    key("macspoofchk"),
    key("linkLocal"),
    key("enabledad"),
    key("disableContainerInterface"),
    key("portIsolation"),
    key("vlan"),
    object("vlanTrunk", &[key("id"), key("minID"), key("maxID")]),
    key("preserveDefaultVlan"),
];

const ON_PARENT: &[Key] = &[key("master"), key("mode"), key("linkInContainer"), key("hostAccess")];
const MACVLAN: &[Key] = &[key("bcqueuelen"), key("linkLocal")];
const VLAN: &[Key] = &[key("master"), key("vlanId"), key("vlanProto"), key("linkInContainer")];
const NETKIT: &[Key] = &[key("isDefaultGateway"), key("mode"), key("policy"), key("peerPolicy")];
const TAP: &[Key] = &[key("multiQueue"), key("owner"), key("group"), key("selinuxContext"), key("bridge")];
const HOST_DEVICE: &[Key] =
    &[key("device"), key("hwaddr"), key("kernelpath"), key("pciBusID"), key("deviceID")];

const SRIOV: &[Key] = &[
    key("deviceID"),
    key("pciBusID"),
    key("vlan"),
    key("vlanQoS"),
    key("vlanProto"),
    key("spoofchk"),
    key("trust"),
    key("min_tx_rate"),
    key("max_tx_rate"),
    key("link_state"),
    key("logLevel"),
    key("logFile"),
    key("rdma"),
    key("rdmaIsolation"),
    key("guid"),
    key("pkey"),
];

const TUNED: &[Key] =
    &[key("sysctl"), key("mac"), key("mtu"), key("promisc"), key("allmulti"), key("txQLen")];
const TUNING: &[Key] = &[key("dataDir"), open("args", &[open("cni", TUNED)])];
const SBR: &[Key] = &[key("table"), key("gateways"), key("addSourceHints")];
const VRF: &[Key] = &[key("vrfname"), key("table")];

const PORTMAP: &[Key] = &[
    key("snat"),
    key("masqAll"),
    key("markMasqBit"),
    key("externalSetMarkChain"),
    key("conditionsV4"),
    key("conditionsV6"),
    key("backend"),
];

const FIREWALL: &[Key] =
    &[key("backend"), key("iptablesAdminChainName"), key("firewalldZone"), key("ingressPolicy")];
/// The keys of the runtime's entry that calls netattach.
const NETATTACH: &[Key] = &[key("socket"), key("stateDir"), key("agentWaitSeconds")];

const LIMITED: &[Key] = &[key("shapedSubnets"), key("unshapedSubnets")];

const HOST_LOCAL: &[Key] =
    &[key("type"), key("dataDir"), key("resolvConf"), key("exclude"), object("ranges", RANGE), ROUTES];
const STATIC: &[Key] = &[key("type"), object("addresses", &[key("address"), key("gateway")]), ROUTES, DNS];

const DHCP: &[Key] = &[
    key("type"),
    key("daemonSocketPath"),
    object("request", &[key("skipDefault"), key("option")]),
    object("provide", &[key("option"), key("value"), key("fromArg")]),
    key("priority"),
    key("broadcast"),
    key("probe"),
];

/// Returns the keys of a plugin type, in parts; `None`: netattach does not implement the type.
fn of_plugin(kind: &str) -> Option<Vec<&'static Key>> {
    let parts: &[&'static [Key]] = match kind {
        "bridge" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, BRIDGE, TRANSLATED],
        "ptp" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, TRANSLATED],
        "veth" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, TRANSLATED, VETH],
        "macvlan" | "macvtap" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, ON_PARENT, MACVLAN],
        "ipvlan" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, ON_PARENT],
        "vlan" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, VLAN],
        "dummy" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE],
        // netattach refuses the latter.
        "loopback" => &[ANY, DATAPLANE],
        "tap" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, TAP],
        "netkit" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, TRANSLATED, NETKIT],
        "host-device" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, HOST_DEVICE],
        "sriov" => &[ANY, ADDRESSES, INTERFACE, DATAPLANE, SRIOV],
        "tuning" => &[ANY, TUNED, TUNING],
        "sbr" => &[ANY, SBR],
        "vrf" => &[ANY, VRF],
        "portmap" => &[ANY, PORTMAP],
        "netattach" => &[ANY, DATAPLANE, NETATTACH],
        "bandwidth" => &[ANY, RATES, LIMITED],
        "firewall" => &[ANY, FIREWALL],
        _ => return None,
    };
    Some(parts.iter().copied().flatten().collect())
}

/// Returns the keys of a kind of IPAM, in parts.
fn of_ipam(kind: &str) -> Option<Vec<&'static Key>> {
    let parts: &[&'static [Key]] = match kind {
        "host-local" => &[HOST_LOCAL, RANGE],
        "static" => &[STATIC],
        "dhcp" => &[DHCP],
        _ => return None,
    };
    Some(parts.iter().copied().flatten().collect())
}

fn ipam_type(config: &Map) -> Option<&str> {
    config.get("ipam")?.get("type")?.as_str()
}

/// Whether a decoder written in Go treats the two as one key: equal in any letter case, where `s` and `k` each have a
/// further form beyond ASCII, the long s and the kelvin sign.
pub fn is_same(one: &str, other: &str) -> bool {
    let folded = |letter: char| match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        letter => letter.to_ascii_lowercase(),
    };
    one.chars().map(folded).eq(other.chars().map(folded))
}

/// Changes the known keys of a plugin's configuration to their documented spelling. Of several spellings of one key,
/// the last counts, as in Go.
pub fn as_documented(config: &mut Map) {
    // The caller reads these of `ipam` for plugins of any type. One of them is `type`, which determines the other
    // keys.
    rename(config, &ANY.iter().chain(ADDRESSES).collect::<Vec<_>>());
    let kind = config.get("type").and_then(Value::as_str).unwrap_or_default();
    if let Some(known) = of_plugin(kind) {
        rename(config, &known);
    }
    if let Some(known) = ipam_type(config).and_then(of_ipam)
        && let Some(Value::Object(ipam)) = config.get_mut("ipam")
    {
        rename(ipam, &known);
    }
}

fn rename(object: &mut Map, known: &[&'static Key]) {
    let documented = |written: &str| known.iter().copied().find(|key| is_same(key.name, written));
    if object.keys().any(|written| documented(written).is_some_and(|key| key.name != written)) {
        let renamed = std::mem::take(object).into_iter().map(|(written, value)| match documented(&written) {
            Some(key) => (key.name.to_owned(), value),
            None => (written, value),
        });
        *object = renamed.collect();
    }
    for key in known.iter().filter(|key| !key.within.is_empty()) {
        if let Some(value) = object.get_mut(key.name) {
            rename_within(value, &key.within.iter().collect::<Vec<_>>());
        }
    }
}

fn rename_within(value: &mut Value, known: &[&'static Key]) {
    match value {
        Value::Object(object) => rename(object, known),
        Value::Array(items) => items.iter_mut().for_each(|item| rename_within(item, known)),
        _ => {}
    }
}

/// Returns the paths of keys that a plugin which netattach implements does not have. Keys with the form of comments
/// or private keys are left out: `_comment`, `example.org/key`.
pub fn unknown(config: &Map) -> Vec<String> {
    let Some(known) = config.get("type").and_then(Value::as_str).and_then(of_plugin) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    unknown_in(config, &known, "", &mut found);
    if let Some(known) = ipam_type(config).and_then(of_ipam)
        && let Some(Value::Object(ipam)) = config.get("ipam")
    {
        unknown_in(ipam, &known, "ipam.", &mut found);
    }
    found
}

fn unknown_in(object: &Map, known: &[&'static Key], path: &str, found: &mut Vec<String>) {
    for (written, value) in object {
        match known.iter().find(|key| key.name == written) {
            Some(key) if key.open => {}
            Some(key) => {
                let known: Vec<&Key> = key.within.iter().collect();
                unknown_within(value, &known, &format!("{path}{written}"), found);
            }
            None if written.starts_with('_') || written.contains(['/', '.']) => {}
            None => found.push(format!("{path}{written}")),
        }
    }
}

fn unknown_within(value: &Value, known: &[&'static Key], path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => unknown_in(object, known, &format!("{path}."), found),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, item)| unknown_within(item, known, &format!("{path}[{index}]"), found)),
        _ => {}
    }
}

/// Returns the paths of the keys of a plugin type, or of a kind of IPAM.
#[cfg(test)]
pub(crate) fn listed(kind: &str) -> Vec<String> {
    fn paths(known: &[&'static Key], before: &str, found: &mut Vec<String>) {
        for key in known {
            let path = format!("{before}{}", key.name);
            match key.within {
                [] => found.push(path),
                within => paths(&within.iter().collect::<Vec<_>>(), &format!("{path}."), found),
            }
        }
    }
    let mut found = Vec::new();
    paths(&of_plugin(kind).or_else(|| of_ipam(kind)).unwrap_or_default(), "", &mut found);
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn documented(config: Value) -> Value {
        let Value::Object(mut config) = config else { panic!("{config}") };
        as_documented(&mut config);
        Value::Object(config)
    }

    #[test]
    fn keys_in_another_letter_case_are_those_that_are_documented() {
        let written = json!({
            "type": "vlan", "Master": "eth0", "vlanID": 100, "MTU": 1400, "linkincontainer": false,
            "IPAM": {"type": "host-local", "Ranges": [[{"Subnet": "10.0.0.0/24", "rangestart": "10.0.0.9"}]],
                "ROUTES": [{"DST": "0.0.0.0/0"}], "datadir": "/leases"},
            "args": {"CNI": {"MAC": "02:00:00:00:00:01"}}, "runtimeconfig": {"IPs": ["10.0.0.7"]},
            "other": {"Key": 1}
        });
        let meant = json!({
            "type": "vlan", "master": "eth0", "vlanId": 100, "mtu": 1400, "linkInContainer": false,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9"}]],
                "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/leases"},
            "args": {"cni": {"mac": "02:00:00:00:00:01"}}, "runtimeConfig": {"ips": ["10.0.0.7"]},
            "other": {"Key": 1}
        });
        assert_eq!(documented(written).to_string(), meant.to_string(), "in the same order");
        assert_eq!(documented(meant.clone()), meant);
        for (written, meant) in [
            (
                json!({"type": "bridge", "isgateway": true, "ipmasq": true, "vlantrunk": [{"minid": 5}]}),
                json!({"type": "bridge", "isGateway": true, "ipMasq": true, "vlanTrunk": [{"minID": 5}]}),
            ),
            (
                json!({"type": "host-device", "pciBusId": "0000:00:01.0"}),
                json!({"type": "host-device", "pciBusID": "0000:00:01.0"}),
            ),
            (
                json!({"type": "tuning", "txqlen": 5, "Sysctl": {"net.ipv4.Conf": "1"}}),
                json!({"type": "tuning", "txQLen": 5, "sysctl": {"net.ipv4.Conf": "1"}}),
            ),
            (json!({"Master": "eth1", "Type": "macvlan"}), json!({"master": "eth1", "type": "macvlan"})),
            // Keys of plugins that netattach does not implement stay as written.
            (
                json!({"type": "ovs", "isgateway": true, "ipam": {"type": "static", "Addresses": []}}),
                json!({"type": "ovs", "isgateway": true, "ipam": {"type": "static", "addresses": []}}),
            ),
            (
                json!({"type": "vlan", "lin\u{212a}InContainer": true, "args": {"cni": {"IP\u{17f}": ["10.0.0.7"]}}}),
                json!({"type": "vlan", "linkInContainer": true, "args": {"cni": {"ips": ["10.0.0.7"]}}}),
            ),
            (json!({"type": "veth", "mtu": 1, "MTU": 2}), json!({"type": "veth", "mtu": 2})),
            (json!({"type": "veth", "MTU": 2, "mtu": 1}), json!({"type": "veth", "mtu": 1})),
        ] {
            assert_eq!(documented(written), meant);
        }
    }

    /// containerd writes them as its library names its fields.
    #[test]
    fn what_a_runtime_asks_for_is_read_as_containerd_writes_it() {
        let written = json!({"type": "netattach", "runtimeConfig": {
            "portMappings": [{"HostPort": 8443, "ContainerPort": 5432, "Protocol": "tcp", "HostIP": ""}],
            "bandwidth": {"IngressRate": 1, "IngressBurst": 2, "EgressRate": 3, "EgressBurst": 4},
            "mac": "02:00:00:00:00:01", "other": [{"HostPort": 1}]
        }});
        let meant = json!({"type": "netattach", "runtimeConfig": {
            "portMappings": [{"hostPort": 8443, "containerPort": 5432, "protocol": "tcp", "hostIP": ""}],
            "bandwidth": {"ingressRate": 1, "ingressBurst": 2, "egressRate": 3, "egressBurst": 4},
            "mac": "02:00:00:00:00:01", "other": [{"HostPort": 1}]
        }});
        assert_eq!(documented(written), meant);
    }

    #[test]
    fn what_no_plugin_of_ours_has_is_named_by_its_path() {
        let config = json!({
            "type": "bridge", "name": "n", "hostAcess": true, "_comment": "", "example.org/key": 1,
            "vlanTrunk": [{"id": 5}, {"id": 6, "max": 7}], "capabilities": {"odd": true},
            "ipam": {"type": "host-local", "subnet": "10.0.0.0/24", "rangeBegin": "10.0.0.9"},
            "args": {"cni": {"any": 1}, "other": 1}, "runtimeConfig": {"any": 1}
        });
        let Value::Object(mut config) = config else { panic!("{config}") };
        assert_eq!(unknown(&config), ["hostAcess", "vlanTrunk[1].max", "ipam.rangeBegin"]);
        config.insert("type".to_owned(), "ovs".into());
        assert_eq!(unknown(&config), [""; 0]);
        let other = json!({"type": "macvlan", "ipam": {"type": "whereabouts", "range": ""}});
        assert_eq!(unknown(other.as_object().unwrap()), [""; 0], "another plugin reads it");
        // Keys of interfaces that are created by others, or that lead nowhere.
        let lo = json!({"type": "loopback", "mtu": 1400, "mac": "", "dns": {}, "ipam": {"type": "static"}, "args": {}});
        assert_eq!(unknown(lo.as_object().unwrap()), ["mtu", "mac", "dns", "ipam", "args"]);
        let chained = json!({"type": "tuning", "mtu": 1400, "ipam": {"type": "static"}});
        assert_eq!(unknown(chained.as_object().unwrap()), ["ipam"]);
        let dhcp = json!({"type": "macvlan", "ipam": {"type": "dhcp", "provide": [{"name": "12"}]}});
        assert_eq!(unknown(dhcp.as_object().unwrap()), ["ipam.provide[0].name"]);
    }
}
