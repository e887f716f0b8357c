//! Maintains the node's part of the network that the agent makes (`defaultNetwork: builtin`): the routes to
//! the pods of other nodes, the destinations that are not masqueraded, and the MTU of pods. Reports nodes
//! without a route, and pods whose range no longer belongs to the node.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::sync::watch;

use super::health::note;
use crate::attach::{Engine, FromNode};
use crate::builtin::network::non_masqueraded;
use crate::builtin::routes::{OnLink, PROTOCOL, Wanted, overlap, wanted};
use crate::builtin::{Mode, NAME};
use crate::error_chain::Chain;
use crate::netlink::{self, Changes, Handle, LinkState, LinkWatch, RouteState};
use crate::npwg::NetworkName;
use crate::objects::{Identity, Node, Objects};
use crate::pace;
use crate::plan::{addressing, result};
use crate::rounds;
use crate::rpc::message::Condition;
use crate::source::{NotSynced, Source};
use crate::spec::{OWN_GROUPS, Route};
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// How often the node is checked without a notification, at most: the kernel does not notify the removal of
/// routes with their link, and a device that was down has none.
const INTERVAL: Duration = Duration::from_secs(5);
/// Most rows that are reported; of the others only the number.
const MOST_ROWS: usize = 50;
/// The object of rows about the network.
const OBJECT: &str = "network builtin";

/// See the module's documentation.
pub(super) struct NodeNetwork {
    source: Arc<dyn Source>,
    engine: Arc<Engine>,
    from_node: Arc<FromNode>,
    rows: Mutex<Vec<Condition>>,
}

/// The key of a route that the agent owns.
type RouteKey = (IpNet, Option<IpAddr>, Option<u32>, u32);

impl NodeNetwork {
    pub(super) fn new(source: Arc<dyn Source>, engine: Arc<Engine>, from_node: Arc<FromNode>) -> Self {
        Self { source, engine, from_node, rows: Mutex::default() }
    }

    /// Returns the problems that the last check found.
    pub(super) fn rows(&self) -> Vec<Condition> {
        locked(&self.rows).clone()
    }

    fn has_rows(&self) -> bool {
        !locked(&self.rows).is_empty()
    }

    /// Checks when nodes or the default route change or a route of the agent is removed, and every
    /// [`INTERVAL`], or without a problem as often as [`pace`] allows, until the source ends. Changes are gathered: nodes may
    /// be added by the hundred.
    pub(super) async fn keep(
        self: Arc<Self>,
        mut changes: watch::Receiver<u64>,
        mut links: LinkWatch,
    ) -> io::Result<()> {
        let mut tick = ticks(INTERVAL);
        let mut nodes = Identity::default();
        let (mut took, mut due) = (Duration::ZERO, tokio::time::Instant::now());
        loop {
            // All three futures may be dropped at any time: notifications stay in the socket, a change stays unseen, and
            // the ticker ticks again.
            let is_told = tokio::select! {
                ready = links.readable() => {
                    ready?;
                    if !is_of_routes(links.changes().as_ref().ok()) {
                        continue;
                    }
                    true
                }
                changed = changes.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    if nodes.is_of(&self.source.snapshot().nodes) {
                        continue;
                    }
                    true
                }
                _ = tick.tick() => {
                    // The last check ended shortly after its tick.
                    if tokio::time::Instant::now() + INTERVAL / 2 < due {
                        continue;
                    }
                    false
                }
            };
            if is_told {
                tokio::time::sleep(pace::gather(took)).await;
                // The check sees the changes, so the notifications are discarded.
                let _ = links.changes();
            }
            // Results from before the snapshot was complete are checked again.
            nodes = match self.is_complete() {
                true => self.source.snapshot().nodes.identity(),
                false => Identity::default(),
            };
            let looking = Arc::clone(&self);
            let look = move || {
                let begun = Instant::now();
                let ((), worked) = pace::measured("routes of the node", || crate::upkeep(|| looking.look()));
                (begun.elapsed(), worked)
            };
            let (lasted, worked) = rounds::take(!is_told, look).await;
            took = lasted;
            // What stands in the way of new pods goes soon after the last pod that needs it.
            let pause = if self.has_rows() { INTERVAL } else { pace::pause_by_two_parts(INTERVAL, worked) };
            due = tokio::time::Instant::now() + pause;
        }
    }

    /// Brings the node's routes up to date.
    pub(super) fn look(&self) {
        let rows = self.kept().unwrap_or_else(|error| {
            vec![Condition { object: OBJECT.into(), problem: format!("the node: {}", Chain(&error)) }]
        });
        note("network of the node", &self.rows, rows);
    }

    fn is_complete(&self) -> bool {
        !matches!(self.source.synced(), Err(NotSynced::Incomplete(_)))
    }

    fn kept(&self) -> Result<Vec<Condition>, netlink::Error> {
        let is_complete = self.is_complete();
        let objects = self.source.snapshot();
        let mut node = Handle::open()?;
        let (links, routes) = (node.links()?, node.routes()?);
        self.from_node.set_uplink_mtu(uplink_mtu(&links, &routes));
        // Without a complete snapshot no route is known to be stale, and a node without a range has no
        // pods.
        let (Ok(own), true) = (self.from_node.this.pod_cidrs(&objects), is_complete) else {
            return Ok(Vec::new());
        };
        let name = self.from_node.this.name.as_deref().unwrap_or_default();
        let mut reached = wanted((name, &own), objects.nodes.values(), &self.on_links(&mut node, &links)?);
        // Set before there is a route to them.
        let mut rows = self.keep_exceptions(&own, &reached.ranges);
        if !self.from_node.settings.routes {
            (reached.routes, reached.problems) = Default::default();
        }
        rows.extend(self.keep_routes(&mut node, reached, &routes)?);
        rows.extend(self.keep_ranges(&mut node, (&own, &objects), &links)?);
        Ok(rows)
    }

    /// Lets pods reach these ranges without masquerading.
    fn keep_exceptions(&self, own: &[IpNet], others: &[IpNet]) -> Vec<Condition> {
        let nets = non_masqueraded(&self.from_node.settings, own, others);
        let kept = self.engine.node().nat.as_ref().map_or(Ok(false), |nat| nat.except(&nets));
        match kept {
            Ok(is_new) => {
                self.from_node.set_excepted();
                if is_new {
                    tracing::info!(networks = nets.len(), "destinations without masquerade changed");
                }
                Vec::new()
            }
            Err(error) => vec![Condition {
                object: OBJECT.into(),
                problem: format!("destinations without masquerade: {}", Chain(&error)),
            }],
        }
    }

    fn keep_routes(
        &self,
        node: &mut Handle,
        reached: Wanted,
        routes: &[RouteState],
    ) -> Result<Vec<Condition>, netlink::Error> {
        let present: BTreeSet<RouteKey> =
            routes.iter().filter(|route| route.protocol == PROTOCOL).map(key_of_state).collect();
        let mut rows: Vec<Condition> = Vec::new();
        for (link, route) in &reached.routes {
            if present.contains(&key(*link, route)) {
                continue;
            }
            // One by one, so that a route that the kernel refuses does not prevent the others.
            match node.ensure_routes(*link, std::slice::from_ref(route)) {
                Ok(()) => {
                    tracing::info!(to = %route.destination, via = ?route.gateway, "route to another node's pods")
                }
                Err(error) => rows.push(Condition {
                    object: OBJECT.into(),
                    problem: format!("route to {}: {}", route.destination, Chain(&error)),
                }),
            }
        }
        let keep: BTreeSet<RouteKey> = reached.routes.iter().map(|(link, route)| key(*link, route)).collect();
        let stale = routes.iter().filter(|it| it.protocol == PROTOCOL && !keep.contains(&key_of_state(it)));
        let stale: Vec<RouteState> = stale.cloned().collect();
        node.ensure_routes_absent(&stale)?;
        for route in &stale {
            tracing::info!(to = %route.destination, via = ?route.gateway, "route to another node's pods removed");
        }
        rows.extend(reached.problems.into_iter().map(|(node, problem)| Condition {
            object: format!("node {node}"),
            problem: problem.to_string(),
        }));
        if rows.len() > MOST_ROWS {
            let more = rows.len() - MOST_ROWS;
            rows.truncate(MOST_ROWS);
            rows.push(Condition {
                object: OBJECT.into(),
                problem: format!("{more} more nodes are not shown"),
            });
        }
        Ok(rows)
    }

    /// Returns the networks that the node reaches without a router, except those of its own pods.
    fn on_links(&self, node: &mut Handle, links: &[LinkState]) -> Result<Vec<OnLink>, netlink::Error> {
        let bridge = self.from_node.settings.bridge.as_str();
        let is_wire =
            |link: &&LinkState| link.name != bridge && link.group & OWN_GROUPS == 0 && link.name != "lo";
        let wires: BTreeSet<u32> = links.iter().filter(is_wire).map(|link| link.index).collect();
        let addresses = node.addresses_by_link()?.into_iter();
        Ok(addresses
            .filter(|(link, _)| wires.contains(link))
            .map(|(link, net)| OnLink { link, net })
            .collect())
    }

    /// Finds pods with addresses of an earlier range; its gateway stays on the bridge as long as they
    /// exist.
    fn keep_ranges(
        &self,
        node: &mut Handle,
        (own, objects): (&[IpNet], &Objects),
        links: &[LinkState],
    ) -> Result<Vec<Condition>, netlink::Error> {
        let mut earlier: BTreeMap<IpNet, usize> = BTreeMap::new();
        for address in self.live() {
            if !own.contains(&address.trunc()) {
                *earlier.entry(address.trunc()).or_default() += 1;
            }
        }
        let settings = &self.from_node.settings;
        let bridge = links.iter().find(|link| settings.mode == Mode::Bridge && link.name == settings.bridge);
        if let Some(bridge) = bridge {
            let present = node.addresses(bridge.index)?;
            for range in earlier.keys() {
                let gateway = addressing::first_host(*range);
                let gateway = gateway.and_then(|gateway| IpNet::new(gateway, range.prefix_len()).ok());
                if let Some(gateway) = gateway.filter(|gateway| !present.contains(gateway)) {
                    // The gateway address was removed by another process, or while a pod of that range was
                    // being attached.
                    node.ensure_address(bridge.index, gateway)?;
                    tracing::info!(%gateway, bridge = bridge.name, "gateway of an earlier podCIDR put back");
                }
            }
            for address in present {
                let range = address.trunc();
                let is_gateway = addressing::first_host(address) == Some(address.addr());
                if is_gateway
                    && !own.contains(&range)
                    && !earlier.contains_key(&range)
                    && !is_link_local(range)
                {
                    node.ensure_address_absent(bridge.index, address)?;
                    tracing::info!(%address, bridge = bridge.name, "gateway of an earlier podCIDR removed");
                }
            }
        }
        let name = self.from_node.this.name.as_deref();
        let row = |(range, pods): (IpNet, usize)| {
            let mut problem = format!(
                "{pods} attached pods have addresses of {range}, which is no podCIDR of this node any more: they keep them, and \
                 other nodes do not reach them"
            );
            // A bridge has the whole range on its link; a routed link has only its pod's address.
            if bridge.is_some() {
                if own.iter().any(|own| overlap(*own, range)) {
                    problem.push_str("; until they have ended, no new pod is attached: the ranges overlap");
                }
                let has_it = |node: &&Arc<Node>| node.pod_cidrs.iter().any(|other| overlap(*other, range));
                let mut others = objects.nodes.values().filter(|node| Some(node.name.as_str()) != name);
                if let Some(other) = others.find(has_it) {
                    problem.push_str("; until they have ended, pods of node ");
                    problem.push_str(&other.name);
                    problem.push_str(", which has it now, are not reached from here");
                }
            }
            Condition { object: OBJECT.into(), problem }
        };
        Ok(earlier.into_iter().map(row).collect())
    }

    /// Returns the addresses of attached pods on this network, with their prefix lengths.
    fn live(&self) -> Vec<IpNet> {
        let own = NetworkName::Configuration(NAME.to_owned());
        let mut found = Vec::new();
        for attached in self.engine.registry().all() {
            for (index, attachment) in (0..).zip(&attached.plan.attachments) {
                if attachment.network == own
                    && let Ok(leased) = result::leased(attachment, attached.outputs.of(index))
                {
                    found.extend(leased.addresses.iter().map(|leased| leased.address));
                }
            }
        }
        found
    }
}

/// Whether routes that a check depends on have changed. `None`: the changes are not known.
fn is_of_routes(changes: Option<&Changes>) -> bool {
    match changes {
        Some(Changes::Of(touched)) => touched.default_routes || touched.removed_routes.contains(&PROTOCOL),
        Some(Changes::Anything) | None => true,
    }
}

/// Removes the routes of an agent that made the network, once none of its pods exists.
pub(super) fn remove_routes(engine: &Engine) -> Result<(), netlink::Error> {
    let own = NetworkName::Configuration(NAME.to_owned());
    let all = engine.registry().all();
    if all.iter().any(|attached| attached.plan.attachments.iter().any(|it| it.network == own)) {
        return Ok(());
    }
    let mut node = Handle::open()?;
    let mut routes = node.routes()?;
    routes.retain(|route| route.protocol == PROTOCOL);
    node.ensure_routes_absent(&routes)
}

/// Returns the MTU of the device of the default route: IPv4 first, the lowest metric first.
fn uplink_mtu(links: &[LinkState], routes: &[RouteState]) -> Option<u32> {
    let mut defaults: Vec<&RouteState> =
        routes.iter().filter(|route| route.destination.prefix_len() == 0).collect();
    defaults.sort_by_key(|route| (matches!(route.destination, IpNet::V6(_)), route.priority));
    let index = defaults.into_iter().find_map(|route| route.interface)?;
    links.iter().find(|link| link.index == index).map(|link| link.mtu)
}

fn key(link: u32, route: &Route) -> RouteKey {
    (route.destination, route.gateway, Some(link), route.priority.unwrap_or_default())
}

fn key_of_state(route: &RouteState) -> RouteKey {
    (route.destination, route.gateway, route.interface, route.priority)
}

fn is_link_local(range: IpNet) -> bool {
    match range {
        IpNet::V4(range) => range.addr().is_link_local(),
        IpNet::V6(range) => range.addr().is_unicast_link_local(),
    }
}

impl std::fmt::Debug for NodeNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeNetwork").finish_non_exhaustive()
    }
}
