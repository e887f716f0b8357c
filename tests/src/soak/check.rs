//! Compares the actual with the expected state.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::Value;

use super::decide::Key;
use super::model::{Attachment, End, Protocol, View, World, entries};
use super::network::{ALL, NETWORKS, Network, address_of, default_subnets, second};
use super::probe::{Prober, Way, connects};
use super::rig::{Live, Rig};
use super::stranger;
use crate::Namespace;
use crate::node::ip;
use crate::snapshot::Network as Links;
use crate::traffic::{SILENCE, stretched};

/// Longest time until everything is as expected: a failed attachment of a live pod is retried after 30 s.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longest time until a status is written once everything else is as expected, in addition to the pauses between
/// tries.
const WRITTEN: Duration = Duration::from_secs(20);
/// Interval at which packets that have not arrived are sent again.
const AGAIN: Duration = Duration::from_millis(150);
/// Longest duration of one check of all paths.
const LOOK: Duration = Duration::from_secs(3);
/// TCP connections for each question.
const CONNECTIONS: usize = 8;

/// Waits until every pod has the interfaces of its annotation and its status shows them, and all packets pass or are
/// dropped as expected. Returns the world in which that holds. `after`: how long the server may have had faults
/// before.
pub(super) fn settle(rig: &mut Rig, prober: &Mutex<Prober>, after: Duration) -> Result<World> {
    let deadline = Instant::now() + stretched(PATIENCE);
    // Pauses between tries double: the next try comes before twice the time of the failures has passed.
    let written = || Instant::now() + stretched(WRITTEN) + 2 * after;
    for key in rig.live.keys().cloned().collect::<Vec<_>>() {
        let (attachments, eth0) = until(deadline, &key, || has_what_it_should(rig, &key))?;
        let live = rig.live.get_mut(&key).context("the pod lives")?;
        (live.attachments, live.eth0) = (attachments, eth0);
        until(written(), &key, || says_what_it_has(rig, &key))?;
    }
    for (key, forged) in &rig.finished {
        if !forged {
            until(written(), key, || is_withdrawn(rig, key))?;
        }
    }
    ways(rig, prober)
}

/// Asks until it is as it must be.
fn until<T>(deadline: Instant, pod: &Key, mut question: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match question() {
            Ok(answer) => return Ok(answer),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context(format!("pod {}/{}", pod.0, pod.1)));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Checks that a completed pod has no sandbox, and that its status is empty.
fn is_withdrawn(rig: &Rig, key: &Key) -> Result<()> {
    let object = rig.server.get("pods", &key.0, &key.1).context("the pod has no object")?;
    let is_labelled = object["metadata"]["labels"].get("netattach.dev/networks").is_some();
    let status = entries(&object);
    ensure!(status.is_empty() && !is_labelled, "it has nothing, and its status is still {status:?}");
    Ok(())
}

/// Inspects the pod and its object. Returns its attachments, and the addresses of the default network.
fn has_what_it_should(rig: &Rig, key: &Key) -> Result<(Vec<Attachment>, BTreeSet<IpAddr>)> {
    let live = rig.live.get(key).context("the pod lives")?;
    let (found, addresses) = inside(live)?;
    if !live.attached {
        ensure!(found.is_empty(), "it is not attached and has {found:?}");
        return Ok((Vec::new(), BTreeSet::new()));
    }
    let eth0 = default_network(live)?;
    let annotated: BTreeSet<Network> = live.spec.networks.keys().copied().collect();
    let node = live.spec.node;
    let is_defined = |network: &&Network| {
        let name = network.definition(node);
        rig.server.get("network-attachment-definitions", NETWORKS, &name).is_some()
    };
    let missing: Vec<_> =
        annotated.iter().filter(is_defined).filter(|network| !found.contains_key(network)).collect();
    ensure!(missing.is_empty(), "its annotation selects {missing:?}, which it does not have");
    let surplus: Vec<_> = found
        .keys()
        .filter(|network| !annotated.contains(network) && !live.may_stay.contains(network))
        .collect();
    ensure!(surplus.is_empty(), "it has {surplus:?}, which its annotation does not select");
    for (network, host) in &live.spec.networks {
        let asked: BTreeSet<IpAddr> =
            network.addresses(*host).iter().filter_map(|it| address_of(it)).collect();
        if let Some(found) = found.get(network)
            && network.spans_nodes()
            && !live.may_stay.contains(network)
        {
            ensure!(asked == *found, "it asked for {asked:?} and has {found:?}");
        }
    }
    ensure!(addresses, "an address is of none of the pools");
    let attachment = |(network, addresses): (&Network, &BTreeSet<IpAddr>)| Attachment {
        node,
        pod: key.clone(),
        uid: live.spec.uid.clone(),
        network: format!("{NETWORKS}/{}", network.definition(node)),
        addresses: addresses.iter().copied().collect(),
    };
    Ok((found.iter().map(attachment).collect(), eth0))
}

/// Checks that a live pod's status shows its attachments, unless another client has written the status.
fn says_what_it_has(rig: &Rig, key: &Key) -> Result<()> {
    let live = rig.live.get(key).context("the pod lives")?;
    if live.forged {
        return Ok(());
    }
    let object = rig.server.get("pods", &key.0, &key.1).context("the pod has no object")?;
    let status = statuses(&object);
    let found = inside(live)?.0;
    let expected: BTreeMap<String, BTreeSet<IpAddr>> =
        found.into_iter().map(|(network, addresses)| (network.name().to_owned(), addresses)).collect();
    ensure!(status == expected, "its status is {status:?}, and it has {expected:?}");
    if !live.attached {
        return Ok(());
    }
    ensure!(
        object["metadata"]["labels"].get("netattach.dev/networks").is_some(),
        "it has no label: {:#}",
        object["metadata"]
    );
    let spec = &live.spec;
    let name = if spec.second { format!("{NETWORKS}/{}", second(spec.node)) } else { "default".to_owned() };
    let entries = entries(&object);
    let entry: Vec<&Value> = entries.iter().filter(|entry| entry["default"] == true).collect();
    let ips = entry.iter().flat_map(|entry| entry["ips"].as_array().into_iter().flatten());
    let ips: BTreeSet<IpAddr> = ips.filter_map(|ip| address_of(ip.as_str()?)).collect();
    let is_told = entry.len() == 1 && entry[0]["name"] == *name && ips == live.eth0;
    ensure!(is_told, "its eth0 is of {name} with {:?}, and its status says {entry:?}", live.eth0);
    Ok(())
}

/// The addresses of a pod's `eth0`, which are of the default network that the pod has chosen.
fn default_network(live: &Live) -> Result<BTreeSet<IpAddr>> {
    let spec = &live.spec;
    let links = Links::of(&live.sandbox.namespace)?.links;
    let eth0 = links.get("eth0").context("it has no eth0")?;
    let found: BTreeSet<IpAddr> = eth0.addresses.iter().map(IpNet::addr).collect();
    let ranges: Vec<IpNet> =
        default_subnets(spec.node, spec.second).iter().filter_map(|it| it.parse().ok()).collect();
    let is_one_of_each = found.len() == ranges.len()
        && ranges.iter().all(|range| found.iter().any(|address| range.contains(address)));
    ensure!(is_one_of_each, "its eth0 has {found:?}, of ranges {ranges:?}");
    Ok(found)
}

/// Returns the networks of a pod's interfaces, with their addresses; and whether leased addresses are from the right
/// pools.
fn inside(live: &Live) -> Result<(BTreeMap<Network, BTreeSet<IpAddr>>, bool)> {
    let links = Links::of(&live.sandbox.namespace)?.links;
    let mut found = BTreeMap::new();
    let mut right = true;
    for (name, link) in &links {
        let Some(network) = Network::named(name) else {
            ensure!(matches!(name.as_str(), "lo" | "eth0"), "it has the interface {name}");
            continue;
        };
        ensure!(link.up, "{name} is down");
        let pools: Vec<IpNet> =
            network.subnets(live.spec.node).iter().filter_map(|it| it.parse().ok()).collect();
        right &= pools.is_empty()
            || link.addresses.iter().all(|net| pools.iter().any(|pool| pool.contains(&net.addr())));
        found.insert(network, link.addresses.iter().map(IpNet::addr).collect());
    }
    Ok((found, right))
}

/// Returns the entries of a status except the default network's: addresses by interface.
fn statuses(object: &Value) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let of = |entry: &Value| {
        let ips = entry["ips"].as_array().into_iter().flatten();
        let ips = ips.filter_map(|ip| address_of(ip.as_str()?));
        (entry["interface"].as_str().unwrap_or_default().to_owned(), ips.collect())
    };
    entries(object).iter().filter(|entry| entry["default"] != true).map(of).collect()
}

/// Checks that the leases of each pool are those of its pods, and of sandboxes for which no DEL was sent.
fn leases(rig: &Rig) -> Result<()> {
    for (number, node) in rig.nodes.iter().enumerate() {
        let mut files = BTreeMap::new();
        lease_files(&node.path("leases"), &mut files)?;
        let lives = |container: &str| {
            rig.live
                .values()
                .any(|it| it.attached && it.spec.node == number && it.spec.container == container)
                || rig.lost[number].iter().any(|it| it.container == container)
        };
        for (address, container) in &files {
            ensure!(lives(container), "{address} is leased to {container}, which is over");
        }
        for live in rig.live.values().filter(|it| it.attached && it.spec.node == number) {
            let mut leased = live.eth0.clone();
            for network in ALL.into_iter().filter(|network| !network.spans_nodes()) {
                let name = format!("{NETWORKS}/{}", network.definition(number));
                let attachment = live.attachments.iter().find(|it| it.network == name);
                leased.extend(attachment.iter().flat_map(|it| &it.addresses).copied());
            }
            for address in &leased {
                ensure!(
                    files.get(address) == Some(&live.spec.container),
                    "{address} of {} is leased to {:?}",
                    live.spec.container,
                    files.get(address)
                );
            }
        }
    }
    Ok(())
}

/// The leases below a directory: address and container.
pub(super) fn lease_files(directory: &Path, found: &mut BTreeMap<IpAddr, String>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            lease_files(&path, found)?;
        } else if let Some(address) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) {
            // It may be released meanwhile.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let container = text.lines().next().unwrap_or_default().trim().to_owned();
            ensure!(found.insert(address, container).is_none(), "{address} is leased twice");
        }
    }
    Ok(())
}

/// Checks that all packets that may pass do, and no others. Returns the world in which that holds.
fn ways(rig: &mut Rig, prober: &Mutex<Prober>) -> Result<World> {
    open(rig, prober)?;
    let deadline = Instant::now() + stretched(PATIENCE);
    let world = loop {
        let looked = rig.forget_collected().and_then(|()| {
            let world = rig.world();
            at_once(rig, &world, prober).map(|()| world)
        });
        match looked {
            Ok(world) => break world,
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => {}
        }
    };
    locked(prober).close(&stranger::key());
    rig.stranger.go()?;
    Ok(world)
}

/// Checks leases and all packets once.
fn at_once(rig: &Rig, world: &World, prober: &Mutex<Prober>) -> Result<()> {
    leases(rig)?;
    let stranger = stranger::key();
    let mut namespaces: BTreeMap<&Key, &Namespace> =
        rig.live.iter().map(|(key, live)| (key, &live.sandbox.namespace)).collect();
    namespaces.insert(&stranger, &rig.stranger.namespace);
    for namespace in namespaces.values() {
        // An address may be another pod's now.
        ip(namespace, &["neigh", "flush", "all"])?;
    }
    let mut prober = locked(prober);
    prober.renew(&namespaces)?;
    let wrong = look(&mut prober, world)?;
    if !wrong.is_empty() {
        let told: Vec<String> = wrong.iter().take(12).cloned().collect();
        bail!("{} ways are not as they must be:\n  {}", wrong.len(), told.join("\n  "));
    }
    connections(&prober, world, &namespaces)
}

fn locked(prober: &Mutex<Prober>) -> MutexGuard<'_, Prober> {
    prober.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the sockets of every pod, and of the stranger with addresses that no pod has now.
fn open(rig: &mut Rig, prober: &Mutex<Prober>) -> Result<()> {
    let mut prober = locked(prober);
    for (key, live) in rig.live.iter().filter(|(_, live)| live.attached) {
        let spec = &live.spec;
        prober.open(key, &live.sandbox.namespace, spec.node, &spec.uid, &live.attachments)?;
    }
    let free = rig.free();
    let addresses = rig.stranger.come(&free)?;
    prober.open(&stranger::key(), &rig.stranger.namespace, 0, "", &addresses)
}

/// Checks all paths once; returns the deviations.
fn look(prober: &mut Prober, world: &World) -> Result<Vec<String>> {
    let ways = prober.ways();
    let mut wanted = Vec::new();
    for way in &ways {
        let is_shared = [way.0, way.1]
            .iter()
            .any(|number| prober.end(*number).is_none_or(|end| world.is_shared(end.network, end.address)));
        if !is_shared && verdict(prober, world, *way, "UDP") == Some(true) {
            wanted.push(*way);
        }
    }
    prober.forget();
    // Sent in parts, so that no queue overflows.
    for part in ways.chunks(200) {
        prober.send(part);
        prober.take();
    }
    let began = Instant::now();
    let mut sent = began;
    let mut missing = wanted.clone();
    while !missing.is_empty() && began.elapsed() < stretched(LOOK) {
        std::thread::sleep(Duration::from_millis(2));
        prober.take();
        let (arrived, answered) = prober.found();
        // The stranger does not answer.
        let is_over = |way: &Way| {
            let answers = prober.end(way.1).is_some_and(|end| !stranger::is_it(end.pod));
            arrived.contains(way) && (answered.contains(way) || !answers)
        };
        missing.retain(|way| !is_over(way));
        if sent.elapsed() > AGAIN {
            prober.send(&missing);
            sent = Instant::now();
        }
    }
    // Packets that must not arrive get their time as well.
    prober.send(&ways);
    let silence = Instant::now();
    while silence.elapsed() < stretched(AGAIN) {
        std::thread::sleep(Duration::from_millis(5));
        prober.take();
    }
    let mut wrong: Vec<String> =
        missing.iter().map(|way| format!("must pass and does not: {}", told(prober, *way))).collect();
    for way in prober.found().0 {
        if verdict(prober, world, *way, "UDP") == Some(false) {
            wrong.push(format!("must not pass and does: {}", told(prober, *way)));
        }
    }
    Ok(wrong)
}

/// Some ways by TCP.
fn connections(prober: &Prober, world: &World, namespaces: &BTreeMap<&Key, &Namespace>) -> Result<()> {
    let ways = prober.ways();
    let step = (ways.len() / CONNECTIONS).max(1);
    let results: Vec<Option<String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ways
            .iter()
            .step_by(step)
            .filter_map(|way| {
                let (from, to) = (prober.end(way.0)?, prober.end(way.1)?);
                // The stranger's source would be the first of its addresses.
                if stranger::is_it(from.pod) {
                    return None;
                }
                let is_shared = [&from, &to].iter().any(|end| world.is_shared(end.network, end.address));
                let allowed = verdict(prober, world, *way, "TCP").filter(|_| !is_shared)?;
                let namespace = *namespaces.get(from.pod)?;
                let target = SocketAddr::new(to.address, way.2);
                Some(scope.spawn(move || {
                    let patience = if allowed { LOOK } else { SILENCE };
                    (connects(namespace, target, patience) != allowed)
                        .then(|| format!("TCP, allowed: {allowed}, is not so: {}", told(prober, *way)))
                }))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(None)).collect()
    });
    let wrong: Vec<String> = results.into_iter().flatten().collect();
    ensure!(wrong.is_empty(), "{}", wrong.join("\n  "));
    Ok(())
}

fn verdict(prober: &Prober, world: &World, way: Way, protocol: Protocol) -> Option<bool> {
    let (from, to) = (prober.end(way.0)?, prober.end(way.1)?);
    // No agent judges packets at the stranger's end.
    let lets = |end: &End<'_>, is_ingress, peer| match stranger::is_it(end.pod) {
        true => Some(true),
        false => world.seen_by(end.node).lets(end, is_ingress, peer, protocol, way.2),
    };
    Some(lets(&from, false, to.address)? && lets(&to, true, from.address)?)
}

/// Checks that no packet passed that no agent could have allowed at any moment of the disturbance: each agent may
/// have known each kind of objects in a state of a different moment, but no state that never existed.
pub(super) fn nothing_passed_that_never_might(
    prober: &Mutex<Prober>,
    passed: &BTreeSet<Way>,
    worlds: &[World],
) -> Result<()> {
    let prober = locked(prober);
    for way in passed {
        let (Some(from), Some(to)) = (prober.end(way.0), prober.end(way.1)) else { continue };
        let plainly = |world: &World| verdict(&prober, world, *way, "UDP") != Some(false);
        if worlds.iter().any(plainly) {
            continue;
        }
        let might = |end: &End<'_>, is_ingress, peer| {
            views(end.node, worlds).any(|view| view.lets(end, is_ingress, peer, "UDP", way.2) != Some(false))
        };
        ensure!(
            might(&from, false, to.address) && might(&to, true, from.address),
            "passed while things changed, and might not before, between or after: {}",
            told(&prober, *way)
        );
    }
    Ok(())
}

fn views(node: usize, worlds: &[World]) -> impl Iterator<Item = View<'_>> {
    let all = worlds.iter();
    all.clone().flat_map(move |own_pods| {
        worlds.iter().flat_map(move |other_pods| {
            worlds.iter().flat_map(move |namespaces| {
                worlds.iter().map(move |policies| View {
                    node,
                    own_pods,
                    other_pods,
                    namespaces,
                    policies,
                    attachments: other_pods,
                })
            })
        })
    })
}

fn told(prober: &Prober, way: Way) -> String {
    let end = |number| match prober.end(number) {
        Some(end) => {
            format!("{}/{} (node {}, {} {})", end.pod.0, end.pod.1, end.node, end.network, end.address)
        }
        None => "?".to_owned(),
    };
    format!("{} to {} port {}", end(way.0), end(way.1), way.2)
}
