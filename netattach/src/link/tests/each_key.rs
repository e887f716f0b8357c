//! Each key that is listed for a plugin type, or for a kind of address management, changes the plan or is refused
//! by its name, because listed keys are not reported as unknown. A new key needs a line here.

use std::fmt::Debug;

use super::*;
use crate::cni::keys;
use crate::link::facts::OnBus;
use crate::spec::VirtualFunction;

const VF: &str = "0000:03:02.1";
const ANY_KIND: &str = "*";

/// Keys that change no plan, by type; a path that ends with a dot stands for all keys below it.
const EXCEPTIONS: [(&str, &str); 22] = [
    // Keys of the list and its plugins, which the parsers of lists know.
    (ANY_KIND, "cniVersion"),
    (ANY_KIND, "cniVersions"),
    (ANY_KIND, "name"),
    (ANY_KIND, "type"),
    (ANY_KIND, "capabilities"),
    (ANY_KIND, "disableCheck"),
    (ANY_KIND, "disableGC"),
    (ANY_KIND, "loadOnlyInlinedPlugins"),
    (ANY_KIND, "prevResult"),
    // Requests of the runtime and the pod: `plan::attachment` refuses a capability that is not supported.
    (ANY_KIND, "runtimeConfig."),
    // Choices between implementations, of which there is only one.
    (ANY_KIND, "ipMasqBackend"),
    ("portmap", "backend"),
    ("portmap", "markMasqBit"),
    // Programs check this in any case; without programs the key is refused, or is a step for the executable.
    ("bridge", "macspoofchk"),
    // Keys of other implementations, documented as without effect.
    ("sriov", "logLevel"),
    ("sriov", "logFile"),
    ("firewall", "firewalldZone"),
    // Where the executable keeps its files.
    ("tuning", "dataDir"),
    // Keys of the runtime's entry that calls the agent.
    ("netattach", "socket"),
    ("netattach", "stateDir"),
    ("netattach", "agentWaitSeconds"),
    // Selects the address manager itself.
    (ANY_KIND, "ipam.type"),
];

fn is_excepted(kind: &str, path: &str, (of, what): (&str, &str)) -> bool {
    let is_meant = if what.ends_with('.') { path.starts_with(what) } else { path == what };
    is_meant && (of == ANY_KIND || of == kind)
}

fn shown<T: Debug>(planned: Result<T, PlanError>) -> Result<String, String> {
    planned.map(|it| format!("{it:?}")).map_err(|error| CniError::from(error).msg)
}

/// The plan as text, or the error.
fn planned(kind: &str, keys: &[&Value]) -> Result<String, String> {
    let mut config = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind}));
    for keys in keys {
        config.extend(object((*keys).clone()));
    }
    let function = Some(VirtualFunction { physical: "0000:03:00.0".into(), number: 1 });
    let found = OnBus { driver: Some("igbvf".into()), function, ..OnBus::default() };
    // A device that is not named depends on the pod.
    let facts = Facts { on_bus: [(VF.to_owned(), found)].into(), gathered: false, ..Facts::default() };
    let args = CniArgs::parse("IgnoreUnknown=1;K8S_POD_NAME=a").unwrap();
    let protect = Protect::verified();
    let request = Request { protect: Some(&protect), facts: &facts, ..request(&config, &args) };
    match kind {
        tuning::KIND => shown(tuning::parse(&request)),
        sbr::KIND => shown(sbr::parse(&request)),
        vrf::KIND => shown(vrf::parse(&request)),
        portmap::KIND => shown(portmap::parse(&request)),
        bandwidth::KIND => shown(bandwidth::parse(&request)),
        firewall::KIND => shown(firewall::parse(&request)),
        dataplane::KIND => shown(dataplane::parse(&request)),
        _ => shown(driver(kind).unwrap().plan(&request)),
    }
}

/// The required keys of a type.
fn needed(kind: &str) -> Value {
    match kind {
        "macvlan" | "macvtap" | "ipvlan" => json!({"master": "eth1", "ipam": pool()}),
        "vlan" => json!({"master": "eth1", "vlanId": 5, "ipam": pool()}),
        vrf::KIND => json!({"vrfname": "blue"}),
        kind if driver(kind).is_some() && kind != "loopback" => json!({"ipam": pool()}),
        _ => json!({}),
    }
}

/// Keys without the one at the path, and keys with it, which override them.
fn sample(kind: &str, path: &str) -> Option<(Value, Value)> {
    let bare = || json!({});
    let gateway = || json!({"isGateway": true});
    let masquerade = || json!({"isGateway": true, "ipMasq": true});
    of_dataplane(kind, path).or_else(|| {
        Some(match (kind, path) {
            (_, "mac") => (bare(), json!({"mac": MAC})),
            (_, "mtu") => (bare(), json!({"mtu": 1400})),
            (_, "args.cni.mac") => (bare(), json!({"args": {"cni": {"mac": MAC}}})),
            (_, "args.cni.ips") => (bare(), json!({"args": {"cni": {"ips": ["10.1.0.9"]}}})),
            (_, "dns.nameservers") => (bare(), json!({"dns": {"nameservers": ["10.1.0.53"]}})),
            (_, "dns.domain") => (bare(), json!({"dns": {"domain": "a.example"}})),
            (_, "dns.search") => (bare(), json!({"dns": {"search": ["a.example"]}})),
            (_, "dns.options") => (bare(), json!({"dns": {"options": ["ndots:2"]}})),

            (_, "ipMasq") => (gateway(), json!({"ipMasq": true})),
            (_, "nonMasqueradeCIDRs") => (masquerade(), json!({"nonMasqueradeCIDRs": ["10.9.0.0/16"]})),
            (_, "nonMasqueradeBuiltin") => (masquerade(), json!({"nonMasqueradeBuiltin": true})),
            (_, "portSenders") => {
                let ports = json!([{"hostPort": 8080, "containerPort": 80}]);
                let mapped = json!({"isGateway": true, "runtimeConfig": {"portMappings": ports}});
                (mapped, json!({"portSenders": "all"}))
            }

            (_, "bridge") => (bare(), json!({"bridge": "br7"})),
            (
                _,
                "isGateway" | "isDefaultGateway" | "hairpinMode" | "promiscMode" | "enabledad"
                | "portIsolation",
            ) => (bare(), json!({path: true})),
            (_, "forceAddress" | "keepAddresses" | "linkLocal") => (gateway(), json!({path: true})),
            (_, "disableContainerInterface") => (json!({"ipam": null}), json!({path: true})),
            (_, "vlan") => (bare(), json!({"vlan": 5})),
            (_, "vlanTrunk.id") => (bare(), json!({"vlanTrunk": [{"id": 5}]})),
            (_, "vlanTrunk.minID") => {
                (json!({"vlanTrunk": [{"id": 5}]}), json!({"vlanTrunk": [{"id": 5, "minID": 7, "maxID": 9}]}))
            }
            (_, "vlanTrunk.maxID") => (
                json!({"vlanTrunk": [{"minID": 7, "maxID": 8}]}),
                json!({"vlanTrunk": [{"minID": 7, "maxID": 9}]}),
            ),
            (_, "preserveDefaultVlan") => (json!({"vlan": 5}), json!({path: true})),

            (_, "master") => (bare(), json!({"master": "eth2"})),
            ("ipvlan", "mode") => (bare(), json!({"mode": "l3"})),
            ("netkit", "mode") => (bare(), json!({"mode": "l2"})),
            (_, "mode") => (bare(), json!({"mode": "private"})),
            (_, "linkInContainer" | "hostAccess") => (bare(), json!({path: true})),
            (_, "bcqueuelen") => (bare(), json!({"bcqueuelen": 500})),
            (_, "vlanId") => (bare(), json!({"vlanId": 6})),
            (_, "vlanProto") => (json!({"vlan": 5}), json!({"vlanProto": "802.1ad"})),
            (_, "policy" | "peerPolicy") => (bare(), json!({path: "drop"})),
            (_, "multiQueue") => (bare(), json!({"multiQueue": true})),
            (_, "owner" | "group") => (bare(), json!({path: 1000})),
            (_, "selinuxContext") => (bare(), json!({"selinuxContext": "a:b:c:d"})),
            _ => return of_device(path).or_else(|| of_chained(kind, path)),
        })
    })
}

fn of_dataplane(kind: &str, path: &str) -> Option<(Value, Value)> {
    let rate = |way: &str| json!({format!("{way}Rate"): 1_000_000});
    let both = |way: &str| json!({format!("{way}Rate"): 1_000_000, format!("{way}Burst"): 500_000});
    let limited = |limits: Value| json!({"bandwidth": limits});
    Some(match (kind, path) {
        (_, "bandwidth.ingressRate") => (json!({}), limited(rate("ingress"))),
        (_, "bandwidth.egressRate") => (json!({}), limited(rate("egress"))),
        (_, "bandwidth.ingressBurst") => (limited(rate("ingress")), limited(both("ingress"))),
        (_, "bandwidth.egressBurst") => (limited(rate("egress")), limited(both("egress"))),
        (_, "ingressRate") => (json!({}), rate("ingress")),
        (_, "egressRate") => (json!({}), rate("egress")),
        (_, "ingressBurst") => (rate("ingress"), both("ingress")),
        (_, "egressBurst") => (rate("egress"), both("egress")),
        // The fast path is the default where it exists.
        ("bridge" | "ptp" | "veth" | "netkit", "fastPath") => (json!({}), json!({"fastPath": false})),
        (_, "fastPath") => (json!({}), json!({"fastPath": true})),
        (_, "sourceCheck") => (json!({}), json!({"sourceCheck": "mac"})),
        (_, "allowedAddresses") => (json!({}), json!({"allowedAddresses": ["10.1.0.100"]})),
        (_, "vlans") => (json!({}), json!({"vlans": [5]})),
        _ => return None,
    })
}

fn of_device(path: &str) -> Option<(Value, Value)> {
    let bare = || json!({});
    Some(match path {
        "device" => (bare(), json!({"device": "eth9"})),
        "hwaddr" => (bare(), json!({"hwaddr": MAC})),
        "kernelpath" => (bare(), json!({"kernelpath": "/sys/devices/pci0000:00/0000:00:05.0"})),
        "pciBusID" | "deviceID" => (bare(), json!({path: VF})),
        "vlanQoS" => (json!({"vlan": 5}), json!({"vlanQoS": 3})),
        "spoofchk" | "trust" => (bare(), json!({path: "on"})),
        "min_tx_rate" | "max_tx_rate" => (bare(), json!({path: 10})),
        "link_state" => (bare(), json!({"link_state": "enable"})),
        "rdma" | "rdmaIsolation" => (bare(), json!({path: true})),
        "guid" | "pkey" => (bare(), json!({path: "x"})),
        _ => return None,
    })
}

fn of_chained(kind: &str, path: &str) -> Option<(Value, Value)> {
    let bare = || json!({});
    let of_args = |asked: Value| json!({"args": {"cni": asked}});
    Some(match (kind, path) {
        (_, "sysctl") => (bare(), json!({"sysctl": {"net.core.somaxconn": "5"}})),
        (_, "promisc" | "allmulti" | "addSourceHints" | "masqAll") => (bare(), json!({path: true})),
        (_, "txQLen") => (bare(), json!({"txQLen": 5})),
        (_, "args.cni.sysctl") => (bare(), of_args(json!({"sysctl": {"net.core.somaxconn": "5"}}))),
        (_, "args.cni.mtu") => (bare(), of_args(json!({"mtu": 1400}))),
        (_, "args.cni.promisc") => (bare(), of_args(json!({"promisc": true}))),
        (_, "args.cni.allmulti") => (bare(), of_args(json!({"allmulti": true}))),
        (_, "args.cni.txQLen") => (bare(), of_args(json!({"txQLen": 5}))),
        (_, "table") => (bare(), json!({"table": 500})),
        (_, "gateways") => (bare(), json!({"gateways": ["10.1.0.1"]})),
        (_, "vrfname") => (bare(), json!({"vrfname": "red"})),
        (_, "snat") => (bare(), json!({"snat": false})),
        (_, "externalSetMarkChain") => (bare(), json!({path: "KUBE-MARK-MASQ"})),
        (_, "conditionsV4") => (bare(), json!({path: ["-s", "10.0.0.0/8"]})),
        (_, "conditionsV6") => (bare(), json!({path: ["-s", "fd00::/8"]})),
        (_, "shapedSubnets" | "unshapedSubnets") => {
            (json!({"ingressRate": 1_000_000}), json!({path: ["10.0.0.0/8"]}))
        }
        ("firewall", "backend") => (bare(), json!({"backend": "iptables"})),
        (_, "iptablesAdminChainName") => (bare(), json!({path: "MINE"})),
        (_, "ingressPolicy") => (bare(), json!({path: "isolated"})),
        _ => return None,
    })
}

/// Fails unless the second set of keys results in another plan than the first, or in an error that names the key.
fn check_effect(of: &str, path: &str, kind: &str, [without, with]: [&[&Value]; 2]) {
    let names = [path.split('.').next(), path.split('.').next_back()].map(Option::unwrap_or_default);
    match (planned(kind, without), planned(kind, with)) {
        (_, Err(told)) => {
            let is_named = names.iter().any(|name| told.starts_with(&format!("key {name}: ")));
            assert!(is_named, "{of}: {path}: {told}");
        }
        (Ok(before), Ok(after)) => assert_ne!(before, after, "{of}: {path} changes nothing"),
        (Err(told), Ok(_)) => panic!("{of}: without {path}: {told}"),
    }
}

#[test]
fn each_key_of_a_plugin_changes_its_plan_or_is_refused_by_its_name() {
    let kinds: Vec<&str> = kinds().chain(CHAINED).chain([dataplane::KIND]).collect();
    for kind in &kinds {
        for path in keys::listed(kind) {
            if EXCEPTIONS.iter().any(|excepted| is_excepted(kind, &path, *excepted)) {
                continue;
            }
            let Some((without, with)) = sample(kind, &path) else { panic!("{kind}: no sample of {path}") };
            let needed = needed(kind);
            check_effect(kind, &path, kind, [&[&needed, &without], &[&needed, &without, &with]]);
        }
    }
    for excepted in EXCEPTIONS {
        let is_of = |kind: &&str| keys::listed(kind).iter().any(|path| is_excepted(kind, path, excepted));
        assert!(kinds.iter().any(is_of), "{excepted:?} is no key of any type");
    }
}

/// Keys of address management without the one at the path, and keys with it, which override them.
fn sample_of_addresses(kind: &str, path: &str) -> Option<(Value, Value)> {
    let bare = || json!({});
    let range = |more: Value| {
        let mut range = json!({"subnet": "10.2.0.0/24"});
        range.as_object_mut().unwrap().extend(object(more));
        json!({"ranges": [[range]]})
    };
    let route = |more: Value| {
        let mut route = json!({"dst": "10.9.0.0/16"});
        route.as_object_mut().unwrap().extend(object(more));
        json!({"routes": [route]})
    };
    let address = |more: Value| {
        let mut address = json!({"address": "10.1.0.8/24"});
        address.as_object_mut().unwrap().extend(object(more));
        json!({"addresses": [address]})
    };
    let host_name = |more: Value| {
        let mut option = json!({"option": "host-name"});
        option.as_object_mut().unwrap().extend(object(more));
        option
    };
    Some(match (kind, path) {
        (_, "dataDir") => (bare(), json!({"dataDir": "/leases"})),
        (_, "resolvConf") => (bare(), json!({"resolvConf": "/etc/resolv.conf"})),
        (_, "exclude") => (bare(), json!({"exclude": ["10.1.0.5"]})),
        (_, "subnet") => (bare(), json!({"subnet": "10.3.0.0/24"})),
        (_, "rangeStart") => (bare(), json!({"rangeStart": "10.1.0.9"})),
        (_, "rangeEnd") => (bare(), json!({"rangeEnd": "10.1.0.90"})),
        (_, "gateway") => (bare(), json!({"gateway": "10.1.0.7"})),
        (_, "ranges.subnet") => (bare(), range(bare())),
        (_, "ranges.rangeStart") => (range(bare()), range(json!({"rangeStart": "10.2.0.9"}))),
        (_, "ranges.rangeEnd") => (range(bare()), range(json!({"rangeEnd": "10.2.0.90"}))),
        (_, "ranges.gateway") => (range(bare()), range(json!({"gateway": "10.2.0.7"}))),
        (_, "routes.dst") => (bare(), route(bare())),
        (_, "routes.gw") => (route(bare()), route(json!({"gw": "10.1.0.7"}))),
        (_, "routes.mtu") => (route(bare()), route(json!({"mtu": 1400}))),
        (_, "routes.advmss") => (route(bare()), route(json!({"advmss": 1000}))),
        (_, "routes.priority") => (route(bare()), route(json!({"priority": 5}))),
        (_, "routes.table") => (route(bare()), route(json!({"table": 500}))),
        (_, "routes.scope") => (route(bare()), route(json!({"scope": 253}))),
        (_, "addresses.address") => (bare(), address(bare())),
        (_, "addresses.gateway") => (address(bare()), address(json!({"gateway": "10.1.0.1"}))),
        (_, "daemonSocketPath") => (bare(), json!({"daemonSocketPath": "/run/dhcp.sock"})),
        (_, "request.skipDefault") => (bare(), json!({"request": [{"skipDefault": true}]})),
        (_, "request.option") => (bare(), json!({"request": [host_name(bare())]})),
        (_, "provide.option" | "provide.value") => {
            (bare(), json!({"provide": [host_name(json!({"value": "a"}))]}))
        }
        (_, "provide.fromArg") => {
            let asked = host_name(json!({"fromArg": "K8S_POD_NAME"}));
            (json!({"provide": [host_name(bare())]}), json!({"provide": [asked]}))
        }
        (_, "priority") => (bare(), json!({"priority": 5})),
        (_, "broadcast") => (bare(), json!({"broadcast": true})),
        (_, "probe") => (bare(), json!({"probe": false})),
        (_, path) if path.starts_with("dns.") => return sample("macvlan", path),
        _ => return None,
    })
}

#[test]
fn each_key_of_address_management_changes_the_plan() {
    for (kind, needed) in [
        ("host-local", json!({"subnet": "10.1.0.0/24"})),
        ("static", json!({"addresses": [{"address": "10.1.0.7/24"}]})),
        ("dhcp", json!({})),
    ] {
        for path in keys::listed(kind).into_iter().filter(|path| path != "type") {
            let sample = sample_of_addresses(kind, &path);
            let Some((without, with)) = sample else { panic!("{kind}: no sample of {path}") };
            let ipam = |parts: &[&Value]| {
                let mut ipam = object(json!({"type": kind}));
                parts.iter().for_each(|part| ipam.extend(object((*part).clone())));
                json!({"master": "eth1", "ipam": ipam})
            };
            let (without, with) = (ipam(&[&needed, &without]), ipam(&[&needed, &without, &with]));
            check_effect(kind, &path, "macvlan", [&[&without], &[&with]]);
        }
    }
}
