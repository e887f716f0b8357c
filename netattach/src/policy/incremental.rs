//! Compiles policies incrementally: finds the attachments that a change affects and compiles only those
//! again.
//!
//! | changed | affected |
//! |---|---|
//! | a policy | the attachments that it selected or selects; those of policies that lose their rules, or get them back, because of it |
//! | labels of a namespace | policies whose namespace selectors match differently, of namespaces with attachments here |
//! | the list of a definition, labels of a namespace | policies whose namespace gained or lost the use of a network |
//! | a pod, or its attachments on this node | of such policies, those that selected or select the pod, or another claimant of one of its addresses, as a peer; the pod's attachments |
//! | addresses of the node | NetworkPolicies, whose tables contain them |
//! | settings | everything |
//!
//! Compiling everything equals an update from empty state; property tests compare the two. Where the work of a
//! namespace does not suffice, it may be other attachments that are isolated, as what was in force decides as well:
//! those with a table that holds come first, then those without any, each by number, then what had been refused before:
//! one attachment of each namespace in turn, of each namespace in the order in which they were last tried. So whatever
//! other namespaces take, each has its turn (`Work::end_turn`).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use super::changes::{Changes, different};
use super::conditions::Conditions;
use super::desired::{Condition, Desired, EndpointPolicy, Subject};
use super::entry::PolicyEntry;
use super::index::{Endpoint, Endpoints, is_about, of_namespace, selects, selects_pod};
use super::lookup::CompiledPolicy;
use super::options::Options;
use super::peers::{Known, Peers};
use super::resolve::{ByIdentity, Found, Key, exceeded, ports_of_target, resolve};
use super::shares::{OF_NODE, beyond};
use super::touch::Open;
use super::work::{Cost, Short, Work};
use crate::objects::budget::{Excess, Meter};
use crate::objects::policy::{Direction, Policy, PolicyKind, PolicyName, Severity};
use crate::objects::{ObjectName, Objects, Place, Pod};

/// Compiles the policies of this node, and keeps the results that the next change does not affect.
#[derive(Debug, Default)]
pub struct Compiler {
    options: Options,
    objects: Arc<Objects>,
    peers: Peers,
    policies: BTreeMap<PolicyName, PolicyEntry>,
    /// Policies beyond the node's budget: `policies` has them without their rules.
    refused: BTreeMap<PolicyName, Excess>,
    attachments: BTreeMap<u32, Attached>,
    tables: HashMap<Key, Arc<CachedTables>>,
    interner: Interner,
    /// The problems of peers that `conditions` contains.
    of_peers: Vec<Condition>,
    /// The conditions of peers, policies, tables and attachments.
    conditions: Conditions,
    /// Addresses that pods have given up, until [`Compiler::take_departed`] is called.
    departed: BTreeSet<(Place, IpAddr)>,
    /// What `tables` and this update take.
    work: Work,
    /// See [`Compiler::is_unfinished`].
    is_unfinished: bool,
    /// What the attachments of one update have in common: empty between updates.
    common: Common,
    /// How many policies were looked at again, for the networks that their namespaces may use.
    #[cfg(test)]
    pub(super) looked_again: usize,
    /// How many inputs of tables were put together.
    #[cfg(test)]
    keyed: std::cell::Cell<usize>,
    /// How many tables were worked out.
    #[cfg(test)]
    pub(super) worked_out: usize,
}

/// An attachment and its policies.
#[derive(Debug)]
struct Attached {
    endpoint: Arc<Endpoint>,
    /// `None`: its pod is unknown.
    selected: Option<Selected>,
    conditions: Vec<Condition>,
    /// When its tables were put together ([`Work::now`]).
    taken: usize,
    /// When it was last tried with all that its namespace had left; if never, when it was refused first.
    tried: usize,
}

#[derive(Debug)]
struct Selected {
    /// The policies that select it, sorted by name.
    by: Vec<Arc<Policy>>,
    /// The policy that results from them.
    policy: Arc<EndpointPolicy>,
    /// Kept in the cache by it.
    tables: [Option<Arc<CachedTables>>; 2],
}

/// What a change affects.
#[derive(Default)]
struct Affected {
    changes: Changes,
    /// Attachments that are new or changed.
    moved: BTreeSet<u32>,
    /// Policies whose tables must be compiled again.
    touched: BTreeSet<PolicyName>,
}

/// The order in which attachments get their tables in an update: a later one takes no room from an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// It has a table that holds.
    Holding,
    /// It has none.
    New,
    /// All of its tables were refused.
    Refused,
}

/// An attachment that has let go of its policies and tables, and gets others or the same.
struct Waiting {
    endpoint: Arc<Endpoint>,
    /// Its pod, and the policies that select it, sorted by name. `None`: its pod is unknown.
    selected: Option<(Arc<Pod>, Vec<Arc<Policy>>)>,
}

/// Kept while attachments are compiled: pods may have many, and a namespace many policies.
#[derive(Debug, Default)]
struct Common {
    /// The policies that select a pod, on whichever networks: empty while tables are worked out.
    of_pods: BTreeMap<ObjectName, Vec<Arc<Policy>>>,
    /// The results of the same policies and tables.
    results: HashMap<Input, Arc<EndpointPolicy>>,
}

/// Policies and tables that one [`EndpointPolicy`] results from.
type Input = (Vec<ByIdentity<Policy>>, [Option<ByIdentity<CompiledPolicy>>; 2]);

/// Tables, and the conditions found while they were made.
#[derive(Debug)]
struct CachedTables {
    tables: Arc<CompiledPolicy>,
    found: Vec<Condition>,
    /// The cost of making them ([`Meter::spent`]), or of trying to.
    cost: Cost,
    /// What they exceed: they deny everything, and take nothing of their namespace's work.
    refused: Option<Excess>,
}

impl CachedTables {
    /// What they lack if they were refused for too much work: with fewer peers or other tables, they may fit.
    fn short(&self) -> Option<Short> {
        self.refused.filter(|excess| excess.is_of_work()).map(|excess| Short { excess, cost: self.cost })
    }

    /// Returns what was found, or what is exceeded. The latter is not kept: many tables may be refused, each for many
    /// policies.
    fn conditions<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = Cow<'a, Condition>> {
        let exceeded = self.refused.into_iter().flat_map(move |excess| exceeded(key, excess));
        self.found.iter().map(Cow::Borrowed).chain(exceeded.map(Cow::<Condition>::Owned))
    }
}

impl Attached {
    fn tables(&self) -> impl Iterator<Item = &Arc<CachedTables>> {
        self.selected.iter().flat_map(|selected| selected.tables.iter().flatten())
    }

    fn short(&self) -> impl Iterator<Item = Short> {
        self.tables().filter_map(|tables| tables.short())
    }

    /// Whether another update may have room for it: the work of this one does not suffice.
    fn is_left(&self, work: &Work) -> bool {
        self.short().any(|short| work.has_room_anew(self.namespace(), short))
    }

    fn namespace(&self) -> &str {
        &self.endpoint.pod.namespace
    }

    fn rank(&self) -> Rank {
        match self.tables().map(|tables| tables.refused.is_some()).min() {
            None => Rank::New,
            Some(false) => Rank::Holding,
            Some(true) => Rank::Refused,
        }
    }
}

impl Compiler {
    /// Compiles the policies of every attachment of this node.
    ///
    /// Attachments with the same rules share one [`CompiledPolicy`]. Equal ones are one value, also from one update to
    /// the next, as long as the caller keeps a reference.
    pub fn update(&mut self, objects: &Arc<Objects>, endpoints: &Endpoints, options: &Options) -> Desired {
        self.update_by(Work::begin, objects, endpoints, options)
    }

    /// As [`Compiler::update`], with what the last update has left of its work: nobody waits for two in a row.
    pub fn update_further(
        &mut self,
        objects: &Arc<Objects>,
        endpoints: &Endpoints,
        options: &Options,
    ) -> Desired {
        self.update_by(Work::go_on, objects, endpoints, options)
    }

    fn update_by(
        &mut self,
        begin: fn(&mut Work, usize),
        objects: &Arc<Objects>,
        endpoints: &Endpoints,
        options: &Options,
    ) -> Desired {
        let is_node_other = self.options != *options && self.options.differ_by_node_alone(options);
        if is_node_other {
            self.options = options.clone();
        } else if self.options != *options {
            let departed = self.departing(objects, endpoints);
            self.forget();
            (self.departed, self.options) = (departed, options.clone());
        }
        let before = std::mem::replace(&mut self.objects, Arc::clone(objects));
        let attached = self.attachments.iter().map(|(id, attached)| (id, &attached.endpoint));
        let mut changes = Changes::between(&before, objects, options.network_policy);
        let moved = changes.attachments(attached, endpoints);
        // Policies whose tables must be compiled again.
        let mut touched = changes.policies.clone();
        self.take_policies(&changes, &mut touched);
        self.look_at_networks(&changes, &mut touched);
        self.take_peers(&changes, &before, endpoints, &mut touched);
        if is_node_other {
            touched.extend(self.policies.keys().filter(|name| name.kind == PolicyKind::Network).cloned());
        }
        begin(&mut self.work, self.peers.charged());
        self.recount();
        self.retain_tables(|key, _| key.policies.iter().all(|policy| !touched.contains(&policy.0.name)));
        self.retain_attachments(endpoints);
        drop(before);
        self.let_go(&changes);
        self.take_attachments(endpoints, &Affected { changes, moved, touched });
        self.desired()
    }

    /// Compiles the attachments that a change affects, and tries again what was short where there is room now.
    fn take_attachments(&mut self, endpoints: &Endpoints, affected: &Affected) {
        let mut ranked: BTreeMap<Rank, Vec<&Arc<Endpoint>>> = BTreeMap::new();
        for (id, endpoint) in endpoints {
            let rank = self.attachments.get(id).map_or(Rank::New, Attached::rank);
            ranked.entry(rank).or_default().push(endpoint);
        }
        let mut of_rank = |compiler: &mut Self, rank: Rank| -> Vec<Waiting> {
            let all = ranked.remove(&rank).unwrap_or_default();
            let waiting =
                all.into_iter().filter_map(|endpoint| compiler.reselect(endpoint, affected)).collect();
            compiler.common.of_pods = BTreeMap::new();
            waiting
        };
        self.work.begin_pass(false);
        let mut taken = BTreeSet::new();
        for rank in [Rank::Holding, Rank::New] {
            let waiting = of_rank(self, rank);
            taken.extend(waiting.iter().map(|it| it.endpoint.id));
            self.take_all(waiting);
            // Tables that nobody has taken again had their room until now. What had been refused before this update
            // waits for its turn, whatever it has in force: namespaces share the work for it.
            let again = self.short_with_room(|id| taken.contains(id));
            self.take_all(again);
        }
        self.work.begin_pass(true);
        // In one order: those that a change affects take no turn of others.
        let mut waiting = of_rank(self, Rank::Refused);
        waiting.extend(self.short_with_room(|_| true));
        self.take_in_turn(waiting);
        // Tables that others have got in their turn may be theirs.
        let again = self.short_with_room(|_| true);
        self.take_in_turn(again);
        self.common = Common::default();
        self.drop_unused();
        let left = self.attachments.values().filter(|attached| attached.is_left(&self.work));
        let namespaces: BTreeSet<&str> = left.map(Attached::namespace).collect();
        self.is_unfinished = !namespaces.is_empty();
        self.work.line_up(&namespaces);
    }

    /// Whether attachments wait for another update, which may have room for their tables: the work of this one did not
    /// suffice to try them all.
    pub fn is_unfinished(&self) -> bool {
        self.is_unfinished
    }

    fn take_all(&mut self, waiting: Vec<Waiting>) {
        for attachment in waiting {
            self.take_attachment(attachment);
        }
        self.drop_unused();
    }

    /// Takes what had been refused before: of the namespace that has waited for longest the attachment that has, then
    /// of the next one.
    fn take_in_turn(&mut self, mut waiting: Vec<Waiting>) {
        waiting.sort_by_key(|it| self.attachments.get(&it.endpoint.id).map_or(0, |attached| attached.tried));
        let mut of_namespaces: BTreeMap<String, VecDeque<Waiting>> = BTreeMap::new();
        for it in waiting {
            of_namespaces.entry(it.endpoint.pod.namespace.clone()).or_default().push_back(it);
        }
        let with_turn = |(namespace, its): (String, _)| ((self.work.turn(&namespace), namespace), its);
        let mut line: BTreeMap<(usize, String), VecDeque<Waiting>> =
            of_namespaces.into_iter().map(with_turn).collect();
        while let Some(((_, namespace), mut its)) = line.pop_first() {
            let Some(next) = its.pop_front() else { continue };
            let since = self.work.now();
            let is_left = self.take_attachment(next);
            self.work.end_turn(&namespace, since, is_left);
            line.insert((self.work.turn(&namespace), namespace), its);
        }
        self.drop_unused();
    }

    /// Returns attachments whose tables were refused for too much work: those for which there is room now, and those of
    /// namespaces where others hold since they were taken, which may be theirs. The others stay isolated.
    fn short_with_room(&mut self, is_due: impl Fn(&u32) -> bool) -> Vec<Waiting> {
        let work = &self.work;
        let is_again = |attached: &Attached| {
            let namespace = attached.namespace();
            let may_fit =
                |short| work.has_held_since(namespace, attached.taken) || work.has_room(namespace, short);
            attached.short().any(may_fit)
        };
        let again = self.attachments.iter_mut().filter(|(id, attached)| is_due(id) && is_again(attached));
        let let_go = again.filter_map(|(_, attached)| {
            let pod = Arc::clone(attached.endpoint.pod_in(&self.objects)?);
            let selected = attached.selected.take()?;
            Some(Waiting { endpoint: Arc::clone(&attached.endpoint), selected: Some((pod, selected.by)) })
        });
        let_go.collect()
    }

    /// Drops tables that only the cache references: no attachment has them.
    fn drop_unused(&mut self) {
        self.retain_tables(|_, cached| Arc::strong_count(cached) > 1);
    }

    fn retain_tables(&mut self, is_kept: impl Fn(&Key, &Arc<CachedTables>) -> bool) {
        let (before, conditions) = (self.tables.len(), &mut self.conditions);
        self.tables.retain(|key, cached| {
            let is_kept = is_kept(key, cached);
            if !is_kept {
                conditions.remove(cached.conditions(key));
            }
            is_kept
        });
        if self.tables.len() < before {
            self.recount();
        }
    }

    /// Counts the work of the tables that hold anew: an update has other peers, or some are gone.
    fn recount(&mut self) {
        let holding = self.tables.iter().filter(|(_, cached)| cached.refused.is_none());
        self.work.recount(holding.map(|(key, cached)| (namespace_of(key), cached.cost)));
    }

    fn retain_attachments(&mut self, endpoints: &Endpoints) {
        let conditions = &mut self.conditions;
        self.attachments.retain(|id, attached| {
            let is_kept = endpoints.contains_key(id);
            if !is_kept {
                conditions.remove(&attached.conditions);
            }
            is_kept
        });
    }

    /// Forgets everything, so that no memory is used while there is nothing to compile: the next update
    /// compiles everything. Equal tables stay one value nevertheless.
    pub fn forget(&mut self) {
        let interner = std::mem::take(&mut self.interner);
        *self = Self { interner, ..Self::default() };
    }

    /// Returns the addresses for [`Compiler::take_departed`], including those that these objects and
    /// attachments give up.
    fn departing(&mut self, objects: &Arc<Objects>, endpoints: &Endpoints) -> BTreeSet<(Place, IpAddr)> {
        let mut departed = std::mem::take(&mut self.departed);
        let mut changes = Changes::between(&self.objects, objects, self.options.network_policy);
        changes.attachments(self.attachments.iter().map(|(id, it)| (id, &it.endpoint)), endpoints);
        let of = |name: &ObjectName| {
            let its: Vec<&Endpoint> =
                endpoints.values().filter(|it| it.pod == *name).map(|it| &**it).collect();
            Known::of(name, objects, its.into_iter())
        };
        for name in &changes.pods {
            departed.extend(self.peers.known(name, &self.objects).addresses_beyond(&of(name)));
        }
        departed
    }

    /// Returns the addresses that pods had before an update and do not have any more, since the last call.
    pub fn take_departed(&mut self) -> BTreeSet<(Place, IpAddr)> {
        std::mem::take(&mut self.departed)
    }

    /// The cost of all tables that hold.
    #[cfg(test)]
    pub(super) fn spent(&self) -> usize {
        self.work.spent()
    }

    /// See [`Peers::compared`].
    #[cfg(test)]
    pub(super) fn compared(&self) -> usize {
        self.peers.compared.get()
    }

    /// Takes over changed policies, and those that lose their rules or get them back because of these.
    fn take_policies(&mut self, changes: &Changes, touched: &mut BTreeSet<PolicyName>) {
        if changes.policies.is_empty() {
            return;
        }
        let with_network_policies = self.options.network_policy;
        let network_policies = self.objects.network_policies.values().filter(|_| with_network_policies);
        let refused = beyond(self.objects.policies.values().chain(network_policies), &OF_NODE);
        touched.extend(different(&self.refused, &refused, PartialEq::eq).cloned());
        self.refused = refused;
        for name in &*touched {
            if let Some(before) = self.policies.remove(name) {
                self.conditions.remove(&before.conditions);
            }
            let all = match name.kind {
                PolicyKind::Multi => &self.objects.policies,
                PolicyKind::Network => &self.objects.network_policies,
            };
            let Some(policy) = all.get(&name.object) else { continue };
            let inference = self.options.policy_types_inference;
            let bare =
                self.refused.get(name).map(|excess| Arc::new(policy.without_rules(*excess, inference)));
            let entry = PolicyEntry::new(bare.as_ref().unwrap_or(policy), &self.objects, &self.options);
            self.conditions.add(&entry.conditions);
            self.policies.insert(name.clone(), entry);
        }
    }

    /// Keeps only the names of changed policies, to free their rules before the new ones are compiled:
    /// compiling large policies takes enough memory without the old ones.
    fn let_go(&mut self, changes: &Changes) {
        let selected = self.attachments.values_mut().filter_map(|attached| attached.selected.as_mut());
        let mut names: BTreeMap<PolicyName, Arc<Policy>> = BTreeMap::new();
        for policy in selected.flat_map(|selected| &mut selected.by) {
            if changes.policies.contains(&policy.name) {
                let name = names.entry(policy.name.clone()).or_insert_with(|| Arc::new(policy.name_only()));
                *policy = Arc::clone(name);
            }
        }
    }

    fn look_at_networks(&mut self, changes: &Changes, touched: &mut BTreeSet<PolicyName>) {
        if changes.definitions.is_empty() && changes.namespaces.is_empty() {
            return;
        }
        for (name, entry) in &mut self.policies {
            let is_concerned = changes.namespaces.contains(&name.object.namespace)
                || !entry.policy.networks.is_disjoint(&changes.definitions);
            // A touched one has just been looked up.
            if !is_concerned || touched.contains(name) {
                continue;
            }
            #[cfg(test)]
            {
                self.looked_again += 1;
            }
            let before = std::mem::take(&mut entry.conditions);
            if entry.look_again(&self.objects, &self.options) {
                touched.insert(name.clone());
            }
            self.conditions.replace(&before, &entry.conditions);
        }
    }

    /// Takes over changed labels of namespaces, and changed pods.
    fn take_peers(
        &mut self,
        changes: &Changes,
        before: &Objects,
        endpoints: &Endpoints,
        touched: &mut BTreeSet<PolicyName>,
    ) {
        if changes.pods.is_empty() && changes.namespaces.is_empty() {
            return;
        }
        let mut open = Open::new(&self.policies, endpoints, touched);
        for namespace in &changes.namespaces {
            let labels = self.objects.namespace_labels(namespace);
            if let Some(before) = self.peers.relabel(namespace, labels.clone()) {
                open.namespace_changes(&before, &labels, touched);
            }
        }
        let mut attachments: BTreeMap<&ObjectName, Vec<&Endpoint>> = BTreeMap::new();
        for endpoint in endpoints.values().filter(|endpoint| changes.pods.contains(&endpoint.pod)) {
            attachments.entry(&endpoint.pod).or_default().push(&**endpoint);
        }
        for name in &changes.pods {
            let its = attachments.get(name).into_iter().flatten().copied();
            let now = Known::of(name, &self.objects, its);
            let before = self.peers.known(name, before);
            let is_same = before.is_as(&now);
            if !is_same {
                open.pod_changes(&self.peers, &before, touched);
                self.departed.extend(before.addresses_beyond(&now));
            }
            self.peers.replace(name, &before, &now, &self.objects);
            if !is_same {
                open.pod_changes(&self.peers, &now, touched);
            }
        }
        let before = std::mem::replace(&mut self.of_peers, self.peers.conditions());
        self.conditions.replace(&before, &self.of_peers);
    }

    /// Looks which policies an attachment has, and lets go of those of before and of its tables. `None`: it is as it
    /// was.
    fn reselect(&mut self, endpoint: &Arc<Endpoint>, affected: &Affected) -> Option<Waiting> {
        let selected = match endpoint.pod_in(&self.objects).cloned() {
            Some(pod) => match self.reselected(endpoint, &pod, affected) {
                Reselected::AsItWas => return None,
                Reselected::By(policies) => Some((pod, policies)),
            },
            None => None,
        };
        if let Some(attached) = self.attachments.get_mut(&endpoint.id) {
            attached.selected = None;
        }
        Some(Waiting { endpoint: Arc::clone(endpoint), selected })
    }

    /// Returns whether it is left to another update ([`Attached::is_left`]).
    fn take_attachment(&mut self, Waiting { endpoint, selected }: Waiting) -> bool {
        let mut conditions = Vec::new();
        let selected = match selected {
            Some((pod, by)) => {
                let mut direction = |it| self.direction(it, &by, &endpoint, &pod, &mut conditions);
                let tables = [direction(Direction::Ingress), direction(Direction::Egress)];
                let policy = self.endpoint_policy(&by, &tables);
                Some(Selected { by, policy, tables })
            }
            None => {
                conditions.push(unknown_pod(&endpoint));
                None
            }
        };
        self.conditions.add(&conditions);
        let before = self.attachments.remove(&endpoint.id);
        if let Some(before) = &before {
            self.conditions.remove(&before.conditions);
        }
        let taken = self.work.now();
        let mut attached = Attached { endpoint, selected, conditions, taken, tried: taken };
        let is_left = attached.is_left(&self.work);
        // It keeps its place, whether it was begun or not.
        if let Some(before) = before.filter(|_| is_left) {
            attached.tried = before.tried;
        }
        self.attachments.insert(attached.endpoint.id, attached);
        is_left
    }

    fn reselected(&mut self, endpoint: &Endpoint, pod: &Pod, affected: &Affected) -> Reselected {
        let Affected { changes, moved, touched } = affected;
        let is_new = moved.contains(&endpoint.id) || changes.pods.contains(&endpoint.pod);
        let options = &self.options;
        let attached = self.attachments.get_mut(&endpoint.id).filter(|_| !is_new);
        let Some(selected) = attached.and_then(|attached| attached.selected.as_mut()) else {
            let of_pod = || {
                let all = of_namespace(&self.objects, &pod.name.namespace);
                all.filter(|policy| selects_pod(policy, pod)).cloned().collect()
            };
            let all = self.common.of_pods.entry(pod.name.clone()).or_insert_with(of_pod);
            let here = all.iter().filter(|policy| is_about(policy, options, &endpoint.at));
            return Reselected::By(here.map(|policy| in_force(&self.policies, policy)).collect());
        };
        let mut is_concerned = selected.by.iter().any(|policy| touched.contains(&policy.name));
        if !changes.policies.is_empty() {
            selected.by.retain(|policy| !changes.policies.contains(&policy.name));
        }
        for name in changes.policies.iter().filter(|name| name.object.namespace == pod.name.namespace) {
            let now = self.policies.get(name).map(|entry| &entry.policy);
            if let Some(policy) = now.filter(|it| selects(it, options, pod, &endpoint.at)) {
                selected.by.push(Arc::clone(policy));
                is_concerned = true;
            }
        }
        if !is_concerned {
            return Reselected::AsItWas;
        }
        // Moved, not copied: all attachments may wait at once, and each may have thousands of policies.
        let mut by = std::mem::take(&mut selected.by);
        for policy in &mut by {
            *policy = in_force(&self.policies, policy);
        }
        by.sort_by(|one, other| one.name.cmp(&other.name));
        Reselected::By(by)
    }

    /// Returns the input for one direction of an attachment. `None`: it is not isolated.
    fn key(
        &self,
        direction: Direction,
        by: &[Arc<Policy>],
        endpoint: &Endpoint,
        pod: &Pod,
        conditions: &mut Vec<Condition>,
    ) -> Option<Key> {
        #[cfg(test)]
        self.keyed.update(|keyed| keyed + 1);
        let inference = self.options.policy_types_inference;
        let isolating = by.iter().filter(|policy| policy.isolates(direction, inference)).cloned();
        let isolating: Vec<Arc<Policy>> = isolating.collect();
        if isolating.is_empty() {
            return None;
        }
        let own_ports = match direction {
            Direction::Ingress => ports_of_target(&isolating, pod, conditions),
            Direction::Egress => BTreeMap::new(),
        };
        let policies = isolating.into_iter().map(ByIdentity).collect();
        Some(Key { direction, policies, own_ports, dhcp: endpoint.dhcp.clone(), at: None })
    }

    /// Returns the tables that have been worked out for that input. It gets the attachment's networks if none are there
    /// for all networks.
    fn cached(&self, key: &mut Key, endpoint: &Endpoint) -> Option<Arc<CachedTables>> {
        let of_all = self.tables.get(&*key);
        if of_all.is_some() || !may_differ_by_network(key) {
            return of_all.cloned();
        }
        key.at = Some(Arc::clone(&endpoint.at));
        self.tables.get(&*key).cloned()
    }

    fn direction(
        &mut self,
        direction: Direction,
        by: &[Arc<Policy>],
        endpoint: &Endpoint,
        pod: &Pod,
        conditions: &mut Vec<Condition>,
    ) -> Option<Arc<CachedTables>> {
        let mut key = self.key(direction, by, endpoint, pod, conditions)?;
        if let Some(cached) = self.cached(&mut key, endpoint) {
            // What is short is refused again until there is more room.
            if !cached.short().is_some_and(|short| self.work.has_room(&pod.name.namespace, short)) {
                return Some(cached);
            }
            self.drop_refused(&key);
        }
        Some(self.work_out(key, endpoint))
    }

    /// Drops tables that hold nothing, before others are worked out.
    fn drop_refused(&mut self, key: &Key) {
        if let Some(refused) = self.tables.remove(key) {
            self.conditions.remove(refused.conditions(key));
        }
    }

    /// Works out the tables for an input, and keeps them.
    fn work_out(&mut self, mut key: Key, endpoint: &Endpoint) -> Arc<CachedTables> {
        static NOWHERE: BTreeSet<Place> = BTreeSet::new();
        #[cfg(test)]
        {
            self.worked_out += 1;
        }
        let places_of = |policy: &Policy| self.policies.get(&policy.name).map_or(&NOWHERE, |it| &it.places);
        let mut found = Found::default();
        let mut meter = Meter::new(self.work.left(namespace_of(&key)));
        let resolved =
            resolve(&key, &endpoint.at, &self.options, &self.peers, places_of, &mut found, &mut meter);
        let refused = resolved.as_ref().err().copied();
        // One that was cut off may have ended before an answer differed by network. For all networks, it would be found
        // before those that are in force.
        let is_cut_off = matches!(refused, Some(Excess::WorkOfNamespace | Excess::WorkOfUpdate));
        let is_of_network = found.is_of_network || is_cut_off && may_differ_by_network(&key);
        key.at = is_of_network.then(|| Arc::clone(&endpoint.at));
        let cost = self.work.tries(namespace_of(&key), meter.spent());
        if refused.is_none() {
            self.work.holds(namespace_of(&key), cost);
        }
        if refused.is_some() {
            found.conditions = Vec::new();
        }
        // Empty tables deny everything.
        let tables = self.interner.share(resolved.unwrap_or_default());
        let cached = Arc::new(CachedTables { tables, found: found.conditions, cost, refused });
        self.drop_refused(&key);
        self.conditions.add(cached.conditions(&key));
        self.tables.insert(key, Arc::clone(&cached));
        cached
    }

    /// The result of policies and tables: one value for all attachments of an update with the same.
    fn endpoint_policy(
        &mut self,
        by: &[Arc<Policy>],
        cached: &[Option<Arc<CachedTables>>; 2],
    ) -> Arc<EndpointPolicy> {
        let tables = cached.each_ref().map(|it| it.as_ref().map(|it| Arc::clone(&it.tables)));
        let input: Input =
            (by.iter().cloned().map(ByIdentity).collect(), tables.clone().map(|it| it.map(ByIdentity)));
        if let Some(known) = self.common.results.get(&input) {
            return Arc::clone(known);
        }
        let [ingress, egress] = tables;
        let result = Arc::new(EndpointPolicy {
            ingress,
            egress,
            policies: by.iter().map(|policy| policy.name.clone()).collect(),
            ingress_by: self.isolating(by, Direction::Ingress),
            egress_by: self.isolating(by, Direction::Egress),
        });
        self.common.results.insert(input, Arc::clone(&result));
        result
    }

    fn isolating(&self, by: &[Arc<Policy>], direction: Direction) -> Vec<PolicyName> {
        let isolating = by.iter().filter(|it| it.isolates(direction, self.options.policy_types_inference));
        isolating.map(|policy| policy.name.clone()).collect()
    }

    fn desired(&self) -> Desired {
        let mut desired = Desired { conditions: self.conditions.clone(), ..Desired::default() };
        for (id, attached) in &self.attachments {
            match &attached.selected {
                Some(selected) => {
                    desired.endpoints.insert(*id, Arc::clone(&selected.policy));
                }
                None => {
                    desired.undecided.insert(*id);
                }
            }
        }
        desired
    }
}

/// The policies that select an attachment after a change.
enum Reselected {
    /// The same policies, and none of them has changed.
    AsItWas,
    /// These, sorted by name.
    By(Vec<Arc<Policy>>),
}

/// Returns the namespace of the policies, of which there is at least one.
fn namespace_of(key: &Key) -> &str {
    key.policies.first().map_or("", |policy| policy.0.namespace())
}

/// Whether tables for that input may differ from network to network.
fn may_differ_by_network(key: &Key) -> bool {
    key.policies.iter().any(|policy| policy.0.networks.len() > 1)
}

/// Returns a policy as it is compiled, possibly without its rules ([`beyond`]).
fn in_force(policies: &BTreeMap<PolicyName, PolicyEntry>, policy: &Arc<Policy>) -> Arc<Policy> {
    Arc::clone(policies.get(&policy.name).map_or(policy, |entry| &entry.policy))
}

fn unknown_pod(endpoint: &Endpoint) -> Condition {
    Condition {
        object: Subject::Pod(endpoint.pod.clone()),
        severity: Severity::Warning,
        message: format!(
            "is attached to {} but not in the source, or another pod has its name: its policies are not changed",
            endpoint.at.first().unwrap_or(&Place::Default)
        ),
    }
}

/// Shares equal tables: while a table is referenced, an equal one becomes the same value, even if other
/// policies result in it.
#[derive(Debug, Default)]
struct Interner(HashMap<u64, Vec<Weak<CompiledPolicy>>>);

impl Interner {
    fn share(&mut self, tables: CompiledPolicy) -> Arc<CompiledPolicy> {
        self.0.retain(|_, all| {
            all.retain(|one| one.strong_count() > 0);
            !all.is_empty()
        });
        let alike = self.0.entry(fingerprint(&tables)).or_default();
        if let Some(same) = alike.iter().filter_map(Weak::upgrade).find(|one| **one == tables) {
            return same;
        }
        let tables = Arc::new(tables);
        alike.push(Arc::downgrade(&tables));
        tables
    }
}

/// Returns a hash of the lengths and the first entries: hashing a hundred thousand prefixes would take as
/// long as computing them.
fn fingerprint(tables: &CompiledPolicy) -> u64 {
    const LOOKED_AT: usize = 64;
    let mut hasher = DefaultHasher::new();
    (tables.peers.len(), tables.ports.len(), tables.rules.len()).hash(&mut hasher);
    tables.peers.iter().take(LOOKED_AT).for_each(|peer| peer.hash(&mut hasher));
    tables.ports.iter().take(LOOKED_AT).for_each(|port| port.hash(&mut hasher));
    hasher.finish()
}

/// Compiles everything from an empty memory.
#[cfg(test)]
pub(super) fn compile(objects: &Objects, endpoints: &[Endpoint], options: &Options) -> Desired {
    let endpoints = endpoints.iter().map(|endpoint| (endpoint.id, Arc::new(endpoint.clone()))).collect();
    Compiler::default().update(&Arc::new(objects.clone()), &endpoints, options)
}

#[cfg(test)]
#[path = "incremental_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "incremental_properties.rs"]
mod properties;
