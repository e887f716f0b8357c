//! Compilation compared with a reading of the policies' text that knows no classes, no prefixes and no index.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::tests::World;
use super::{Compiler, compile};
use crate::npwg::selection::PortProtocol;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION};
use crate::objects::Place;
use crate::objects::interner::Interner;
use crate::objects::labels::{Labels, Requirement, Selector};
use crate::objects::policy::{
    Direction, Directions, Inference, Peer, Peers, Policy, PolicyName, PortTerm, Ports, Rule,
};
use crate::objects::remote::{RemotePod, Written, ports_annotation};
use crate::objects::{ContainerPort, ObjectName, Objects, Phase, Pod};
use crate::policy::evaluate::evaluate;
use crate::policy::index::Endpoint;
use crate::policy::lookup::CompiledPolicy;
use crate::policy::options::Options;

/// `None`: not isolated. Otherwise the rules that allow the traffic.
fn read_text(
    world: &World,
    options: &Options,
    endpoint: &Endpoint,
    direction: Direction,
    peer: IpAddr,
    protocol: u8,
    dport: Option<u16>,
) -> Option<BTreeSet<String>> {
    let target = &world.objects.pods[&endpoint.pod];
    let isolating: Vec<&Policy> = world
        .objects
        .policies
        .values()
        .map(|policy| &**policy)
        .filter(|p| p.namespace() == target.name.namespace)
        .filter(|p| endpoint.at.iter().any(|place| is_on(p, place)))
        .filter(|p| p.pods.matches(&target.labels) && !target.host_network)
        .filter(|p| p.isolates(direction, options.policy_types_inference))
        .collect();
    if isolating.is_empty() {
        return None;
    }
    let mut rules = BTreeSet::new();
    for policy in isolating {
        // The holders of the peer's address on the attachment's own network or, if there are none, on each of the
        // policy's others.
        let on = |is_own: bool| {
            let places = policy.networks.iter().map(|network| Place::Network(network.clone()));
            let there = places.filter(|place| endpoint.at.contains(place) == is_own);
            there.filter_map(|place| holders(world, &place, peer)).collect::<Vec<_>>()
        };
        let own = on(true);
        let held = if own.is_empty() { on(false) } else { own };
        let have_all = |holds: &dyn Fn(&Holder<'_>) -> bool| {
            !held.is_empty() && held.iter().all(|holders| !holders.is_empty() && holders.iter().all(holds))
        };
        for (position, rule) in policy.rules(direction).iter().enumerate() {
            let selects = |item: &Peer, holder: &Holder<'_>| {
                let Peer::Pods { namespaces, pods } = item else { return false };
                holder.labels.is_some_and(|labels| pods.matches(labels))
                    && match namespaces {
                        None => holder.namespace == policy.namespace(),
                        Some(selector) => selector.matches(&world.objects.namespace_labels(holder.namespace)),
                    }
            };
            let meant = match &rule.peers {
                Peers::Any => true,
                Peers::Of(peers) => {
                    let is_in = |item: &Peer| match item {
                        Peer::Block { net, except } => {
                            net.contains(&peer) && !except.iter().any(|e| e.contains(&peer))
                        }
                        Peer::Pods { .. } => false,
                    };
                    let is_selected = |holder: &Holder<'_>| peers.iter().any(|item| selects(item, holder));
                    peers.iter().any(is_in) || have_all(&is_selected)
                }
            };
            let declares = |ports: &[ContainerPort], named: PortProtocol, name: &str| {
                ports
                    .iter()
                    .any(|p| p.protocol == named && p.name.as_deref() == Some(name) && Some(p.port) == dport)
            };
            let fits = match &rule.ports {
                Ports::Any => true,
                Ports::Of(terms) => terms.iter().any(|term| match term {
                    PortTerm::Protocol(wanted) => wanted.number() == protocol,
                    PortTerm::Range { protocol: wanted, first, last } => {
                        wanted.number() == protocol
                            && dport.is_some_and(|dport| (*first..=*last).contains(&dport))
                    }
                    PortTerm::Named { protocol: wanted, name } => {
                        wanted.number() == protocol
                            && match direction {
                                Direction::Ingress => declares(&target.ports, *wanted, name),
                                Direction::Egress => {
                                    have_all(&|holder: &Holder<'_>| declares(holder.ports, *wanted, name))
                                }
                            }
                    }
                }),
            };
            if meant && fits {
                rules.insert(format!("{} {direction}[{position}]", policy.name));
            }
        }
    }
    Some(rules)
}

fn is_on(policy: &Policy, place: &Place) -> bool {
    matches!(place, Place::Network(network) if policy.networks.contains(network))
}

/// A holder of an address; without labels no selector matches it.
struct Holder<'a> {
    namespace: &'a str,
    labels: Option<&'a Labels>,
    ports: &'a [ContainerPort],
}

/// Returns all holders of an address on a network; `None`: there are none. Attachments of pods that have ended keep
/// their addresses.
fn holders<'a>(world: &'a World, place: &Place, address: IpAddr) -> Option<Vec<Holder<'a>>> {
    let objects = &world.objects;
    let is_over = |pod: &Pod| pod.host_network || matches!(pod.phase, Phase::Succeeded | Phase::Failed);
    let is_known = |pod: &Pod| {
        let remote = objects.remote_pods.get(&pod.name);
        remote.is_none_or(|remote| remote.has_uid(pod.uid.as_deref()))
    };
    let of_pod = |pod: &'a Pod| Holder {
        namespace: &pod.name.namespace,
        labels: is_known(pod).then_some(&pod.labels),
        ports: if is_known(pod) { &pod.ports } else { &[] },
    };
    let has = |e: &&Endpoint| e.at.contains(place) && e.addresses.contains(&address);
    let attached: BTreeSet<&ObjectName> = world.endpoints.iter().filter(has).map(|e| &e.pod).collect();
    if !attached.is_empty() {
        let pods = attached.iter().map(|name| objects.pods.get(*name).ok_or(*name));
        let living = pods.filter_map(|pod| match pod {
            Ok(pod) => (!is_over(pod)).then(|| of_pod(pod)),
            Err(name) => Some(Holder { namespace: &name.namespace, labels: None, ports: &[] }),
        });
        return Some(living.collect());
    }
    let is_attached = |pod: &Pod| world.endpoints.iter().any(|e| e.pod == pod.name);
    let says = |pod: &Pod| {
        let Some(annotation) = pod.annotations.get(STATUS_ANNOTATION) else { return false };
        let entries: Vec<Value> = serde_json::from_str(annotation).unwrap();
        entries.iter().any(|entry| {
            entry["name"] == place.to_string()
                && entry["ips"].as_array().unwrap().iter().any(|ip| *ip == address.to_string())
        })
    };
    let pods = objects.pods.values().map(|pod| &**pod);
    let written =
        pods.filter(|pod| !is_over(pod) && !is_attached(pod) && pod.has_what_it_claims() && says(pod));
    let mut holders: Vec<Holder<'_>> = written.map(of_pod).collect();
    for remote in objects.remote_pods.iter() {
        let own = objects.pods.get(&remote.object_name());
        let is_here = own.is_some_and(|pod| is_known(pod));
        let is_peer = own.is_none() && remote.unreadable().is_none();
        if !is_here && remote.claims().any(|(at, it)| at == place && it == address) {
            holders.push(Holder {
                namespace: remote.namespace(),
                labels: is_peer.then_some(remote.labels()),
                ports: if is_peer { remote.ports() } else { &[] },
            });
        }
    }
    (!holders.is_empty()).then_some(holders)
}

// Random worlds: few names and addresses, so that everything meets everything.

fn any_labels() -> impl Strategy<Value = Labels> {
    prop::collection::btree_map("[xy]", "[12]", 0..3)
}

fn any_selector() -> impl Strategy<Value = Selector> {
    let values = || prop::collection::vec("[12]", 1..3);
    let requirement = prop_oneof![
        ("[xy]", values()).prop_map(|(key, values)| Requirement::In { key, values: values.into() }),
        ("[xy]", values()).prop_map(|(key, values)| Requirement::NotIn { key, values: values.into() }),
        "[xy]".prop_map(|key| Requirement::Exists { key }),
        "[xy]".prop_map(|key| Requirement::DoesNotExist { key }),
    ];
    prop::collection::vec(requirement, 0..2).prop_map(|requirements| Selector { requirements })
}

fn address(v6: bool, low: u8) -> IpAddr {
    if v6 {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, low.into()))
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, low))
    }
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    (any::<bool>(), 0_u8..16).prop_map(|(v6, low)| address(v6, low))
}

/// A prefix of the last five bits, or now and then of everything.
fn any_net() -> impl Strategy<Value = IpNet> {
    let host_bits = prop_oneof![9 => (0_u8..=5).prop_map(Some), 1 => Just(None)];
    (any_address(), host_bits).prop_map(|(address, host_bits)| {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let bits = host_bits.map_or(0, |host_bits| longest - host_bits);
        IpNet::new(address, bits).unwrap().trunc()
    })
}

fn any_protocol() -> impl Strategy<Value = PortProtocol> {
    prop::sample::select(vec![PortProtocol::Tcp, PortProtocol::Udp])
}

fn any_peer() -> impl Strategy<Value = Peer> {
    prop_oneof![
        (any_net(), prop::collection::vec(any_net(), 0..3))
            .prop_map(|(net, except)| Peer::Block { net, except }),
        (prop::option::of(any_selector()), any_selector())
            .prop_map(|(namespaces, pods)| Peer::Pods { namespaces, pods }),
    ]
}

fn any_term() -> impl Strategy<Value = PortTerm> {
    prop_oneof![
        1 => any_protocol().prop_map(PortTerm::Protocol),
        3 => (any_protocol(), 1_u16..40, 0_u16..20)
            .prop_map(|(protocol, first, more)| PortTerm::Range { protocol, first, last: first + more }),
        1 => (any_protocol(), 1_u16.., 1_u16..).prop_map(|(protocol, a, b)| {
            PortTerm::Range { protocol, first: a.min(b), last: a.max(b) }
        }),
        2 => (any_protocol(), "[pq]").prop_map(|(protocol, name)| PortTerm::Named { protocol, name }),
    ]
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let peers = prop_oneof![
        1 => Just(Peers::Any),
        5 => prop::collection::vec(any_peer(), 0..4).prop_map(Peers::Of),
    ];
    let ports = prop_oneof![
        1 => Just(Ports::Any),
        4 => prop::collection::vec(any_term(), 0..4).prop_map(Ports::Of),
    ];
    (peers, ports).prop_map(|(peers, ports)| Rule { peers, ports })
}

fn any_network() -> impl Strategy<Value = NetworkRef> {
    "[mn]".prop_map(|name| NetworkRef::new("a", name))
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let rules = || prop::collection::vec(any_rule(), 0..4);
    let directions = prop_oneof![
        1 => Just(Directions::Inferred),
        2 => any::<(bool, bool)>().prop_map(|(ingress, egress)| Directions::Listed { ingress, egress }),
    ];
    let networks = prop::collection::btree_set(any_network(), 1..3);
    ("[ab]", networks, any_selector(), rules(), rules(), directions).prop_map(
        |(namespace, networks, pods, ingress, egress, directions)| Policy {
            name: PolicyName::multi(ObjectName::new(namespace, "")),
            networks,
            all_networks: false,
            pods,
            ingress,
            egress,
            directions,
            problems: Vec::new(),
        },
    )
}

#[derive(Debug, Clone)]
struct AnyPod {
    pod: Pod,
    local: bool,
    attachments: Vec<(NetworkRef, BTreeSet<IpAddr>)>,
}

fn any_pod() -> impl Strategy<Value = AnyPod> {
    let port = (any_protocol(), "[pq]", 1_u16..40).prop_map(|(protocol, name, port)| ContainerPort {
        name: Some(name),
        protocol,
        port,
    });
    let attachment = (any_network(), prop::collection::btree_set(any_address(), 0..3));
    let phase = prop_oneof![8 => Just(Phase::Running), 1 => Just(Phase::Failed)];
    (
        "[ab]",
        any_labels(),
        prop::collection::vec(port, 0..3),
        phase,
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.6),
        prop::collection::vec(attachment, 1..3),
        (prop::option::of("[uv]"), prop::bool::weighted(0.3)),
    )
        .prop_map(|(namespace, labels, ports, phase, host_network, local, attachments, (uid, here))| {
            AnyPod {
                pod: Pod {
                    name: ObjectName::new(namespace, ""),
                    uid,
                    mirror_of: None,
                    labels,
                    annotations: BTreeMap::new(),
                    phase,
                    host_network,
                    ports,
                    powers: Default::default(),
                    on_this_node: here,
                    terminating: false,
                },
                local,
                attachments,
            }
        })
}

/// A pod of another node. Its name may be that of a pod of this one.
fn any_remote() -> impl Strategy<Value = Arc<RemotePod>> {
    let name =
        ("[ab]", 0_u8..8).prop_map(|(namespace, number)| ObjectName::new(namespace, format!("pod{number}")));
    let attachment = (any_network(), prop::collection::btree_set(any_address(), 0..3));
    let ports = (any_protocol(), "[pq]", 1_u16..40);
    (
        name,
        prop::option::of("[uv]"),
        any_labels(),
        prop::collection::vec(ports, 0..3),
        prop::collection::vec(attachment, 1..3),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(name, uid, labels, ports, attachments, is_garbled)| {
            let entries: Vec<Value> = attachments
                .iter()
                .map(|(network, ips)| json!({"name": network.to_string(), "ips": ips}))
                .collect();
            let ports: Vec<ContainerPort> = ports
                .into_iter()
                .map(|(protocol, name, port)| ContainerPort { name: Some(name), protocol, port })
                .collect();
            let ports = if is_garbled { Some("[".to_owned()) } else { ports_annotation(&ports) };
            let status = json!(entries).to_string();
            let written = Written {
                uid: uid.as_deref(),
                labels,
                status: Some(&status),
                ports: ports.as_deref(),
                beyond: None,
            };
            Arc::new(RemotePod::read(&name, written, &mut Interner::default()))
        })
}

fn any_world() -> impl Strategy<Value = World> {
    let pods = prop::collection::vec(any_pod(), 1..6);
    let remote = prop::collection::vec(any_remote(), 0..6);
    let policies = prop::collection::vec(any_policy(), 0..5);
    (prop::collection::btree_map("[ab]", any_labels(), 0..3), pods, remote, policies).prop_map(
        |(namespaces, pods, remote, policies)| {
            let mut world = World {
                objects: Objects { namespaces: namespaces.into_iter().collect(), ..Objects::default() },
                endpoints: Vec::new(),
            };
            for (number, AnyPod { mut pod, local, attachments }) in pods.into_iter().enumerate() {
                pod.name.name = format!("pod{number}");
                if local {
                    for (network, addresses) in attachments {
                        let id = u32::try_from(world.endpoints.len()).unwrap() + 1;
                        let addresses = addresses.into_iter().collect();
                        let at = BTreeSet::from([Place::Network(network)]);
                        let pod = pod.name.clone();
                        world.endpoints.push(Endpoint {
                            id,
                            pod,
                            uid: None,
                            at: Arc::new(at),
                            addresses,
                            dhcp: None,
                            ethertypes: Vec::new(),
                        });
                    }
                } else {
                    let entries: Vec<Value> = attachments
                        .iter()
                        .map(|(network, ips)| json!({"name": network.to_string(), "ips": ips}))
                        .collect();
                    pod.annotations.insert(STATUS_ANNOTATION.to_owned(), json!(entries).to_string());
                }
                world.objects.pods.insert(pod.name.clone(), pod.into());
            }
            for pod in remote {
                world.objects.remote_pods.insert(pod).unwrap();
            }
            for (number, mut policy) in policies.into_iter().enumerate() {
                policy.name.object.name = format!("p{number}");
                world.objects.policies.insert(policy.name.object.clone(), policy.into());
            }
            world
        },
    )
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#?}\n{:#?}", self.objects, self.endpoints)
    }
}

/// Every object and attachment of either world, as the bits choose.
fn mixed(one: &World, other: &World, bits: u64) -> World {
    let mut number = 0;
    let mut of_one = move || {
        number = (number + 1) % 64;
        bits >> number & 1 == 0
    };
    let mut world = World { objects: Objects::default(), endpoints: Vec::new() };
    for (source, is_one) in [(one, true), (other, false)] {
        let objects = &source.objects;
        let mut keep = || of_one() == is_one;
        world.objects.pods.extend(objects.pods.clone().into_iter().filter(|_| keep()));
        for pod in objects.remote_pods.iter().filter(|_| keep()) {
            world.objects.remote_pods.insert(Arc::clone(pod)).unwrap();
        }
        world.objects.policies.extend(objects.policies.clone().into_iter().filter(|_| keep()));
        world.objects.namespaces.extend(objects.namespaces.clone().into_iter().filter(|_| keep()));
        let new =
            source.endpoints.iter().filter(|endpoint| world.endpoints.iter().all(|it| it.id != endpoint.id));
        let new: Vec<Endpoint> = new.filter(|_| keep()).cloned().collect();
        world.endpoints.extend(new);
    }
    world
}

proptest! {
    /// An incremental update from one world to the next, in which some objects differ, has the result of compiling the
    /// next world from scratch.
    #[test]
    fn what_is_compiled_again_is_what_is_compiled_anew(
        one in any_world(), other in any_world(), steps in prop::collection::vec(any::<u64>(), 1..12)
    ) {
        let options = Options::default();
        let mut compiler = Compiler::default();
        let mut bits = 0;
        for step in steps {
            // One change or many.
            bits = if step % 3 == 0 { step } else { bits ^ 1 << (step >> 8 & 63) };
            let world = mixed(&one, &other, bits);
            let endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
            let again = compiler.update(&Arc::new(world.objects.clone()), &endpoints, &options);
            prop_assert_eq!(again, compile(&world.objects, &world.endpoints, &options));
        }
    }

    #[test]
    fn the_tables_say_what_the_text_says(world in any_world(), v1 in any::<bool>(), ports in prop::collection::vec(0_u16..70, 1..6), far in any::<u16>()) {
        let inference = if v1 { Inference::V1 } else { Inference::Presence };
        let options = Options { policy_types_inference: inference, ..Options::default() };
        let desired = compile(&world.objects, &world.endpoints, &options);
        let outside = ["192.0.2.1", "2001:db8::1"].map(|text| text.parse().unwrap());
        let inside = (0..16).flat_map(|low| [address(false, low), address(true, low)]);
        let peers: Vec<IpAddr> = inside.chain(outside).collect();
        for endpoint in &world.endpoints {
            for direction in [Direction::Ingress, Direction::Egress] {
                let policies = &desired.endpoints[&endpoint.id];
                let tables = match direction {
                    Direction::Ingress => &policies.ingress,
                    Direction::Egress => &policies.egress,
                };
                for peer in &peers {
                    for (protocol, port) in ports.iter().chain([&far]).flat_map(|port| [(6, Some(*port)), (17, Some(*port))]).chain([(1, None)]) {
                        let expected = read_text(&world, &options, endpoint, direction, *peer, protocol, port);
                        let found = tables.as_ref().map(|tables| {
                            evaluate(tables, *peer, protocol, port).map(|rule| tables.rules[&rule].to_string())
                        });
                        match (&expected, &found) {
                            (None, None) => {}
                            (Some(rules), Some(None)) if rules.is_empty() => {}
                            (Some(rules), Some(Some(rule))) if rules.contains(rule) => {}
                            _ => prop_assert!(
                                false,
                                "{direction} {peer} {protocol}/{port:?} at {endpoint:?}: {found:?} instead of {expected:?}"
                            ),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn equal_tables_are_one_value(world in any_world()) {
        let desired = world.compile();
        let tables: Vec<&Arc<CompiledPolicy>> =
            desired.endpoints.values().flat_map(|policies| policies.ingress.iter().chain(&policies.egress)).collect();
        for first in &tables {
            for second in &tables {
                prop_assert_eq!(first == second, Arc::ptr_eq(first, second));
            }
        }
    }
}
