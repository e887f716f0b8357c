//! Decides the next actions. Pure: they depend only on the seed, never on the outcome of an earlier decision.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::network::{ALL, Network};
use super::policies;
use super::random::Random;

/// Namespaces of the pods.
pub(super) const NAMESPACES: [&str; 2] = ["red", "blue"];
/// Most pods at a time.
const MOST: usize = 11;
/// With at most this many pods, none ends.
const FEW: usize = 3;
/// Names of pods in a namespace.
const NAMES: usize = 9;
/// Names of policies in a namespace.
const POLICIES: usize = 3;
/// Numbers of hosts on the networks whose addresses pods ask for.
const HOSTS: u8 = 120;
/// In these batches the agent of the first node is restarted as well. Later it only runs, so that its leaks add up.
const RESTARTS_OF_THE_FIRST: usize = 12;

/// Namespace and name of a pod.
pub(super) type Key = (String, String);

/// A pod as its author wrote it, with its node.
#[derive(Debug, Clone)]
pub(super) struct PodSpec {
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) node: usize,
    pub(super) container: String,
    pub(super) labels: Map<String, Value>,
    /// The networks, each with the number of the host there.
    pub(super) networks: BTreeMap<Network, u8>,
    /// The number of the port that is called `web`.
    pub(super) web: u16,
    /// It chooses the second of the networks that can be the default one.
    pub(super) second: bool,
}

/// How a pod ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// DEL, then the object is deleted.
    InOrder,
    /// The object is deleted first.
    ObjectFirst,
    /// DEL is sent twice.
    Twice,
    /// The namespace is deleted before DEL.
    NamespaceGone,
    /// The namespace is deleted, and no DEL is ever sent.
    Lost,
}

/// A fault of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    Late,
    Answers(u16),
    Resets,
    /// Watches of this end in the middle.
    WatchesEnd(&'static str),
    /// Watches of this get an ERROR event of that code.
    WatchesFail(&'static str, u16),
    /// Watches of this are silent in the middle of an event.
    WatchesSilent(&'static str),
    /// No changes of this resource are sent.
    Lags(&'static str),
    /// Answers arrive byte by byte.
    Slow,
    NeverAnswers,
    Away,
    NoListener,
    TokenExpired,
    ForeignCertificate,
    HistoryForgotten,
    /// Watches of this end with 410, and the lists that follow are as of before everything that happens now.
    Stale(&'static str),
    /// The server is down, and has no history when it returns: only lists show what was deleted.
    AwayAndForgets,
    /// No changes of this resource are sent, and in the end they are forgotten: only a list shows what was deleted.
    LagsAndForgets(&'static str),
    /// Statuses are refused with that code; everything else is well.
    StatusRefused(u16),
    /// Connections are reset by which statuses are written.
    StatusReset,
}

impl Trouble {
    /// Whether objects deleted meanwhile appear in no watch, and are only missing from a list.
    pub(super) fn forgets(self) -> bool {
        matches!(self, Self::AwayAndForgets | Self::LagsAndForgets(_))
    }

    /// Whether it is about written statuses alone.
    pub(super) fn is_of_statuses(self) -> bool {
        matches!(self, Self::StatusRefused(_) | Self::StatusReset)
    }
}

/// One action.
#[derive(Debug, Clone)]
pub(super) enum Action {
    Create(PodSpec),
    End {
        pod: Key,
        how: Ending,
    },
    Relabel {
        pod: Key,
        labels: Map<String, Value>,
    },
    Annotate {
        pod: Key,
        networks: BTreeMap<Network, u8>,
    },
    LabelNamespace {
        namespace: &'static str,
        labels: Map<String, Value>,
    },
    PutPolicy(Value),
    RemovePolicy(Key),
    RemoveDefinition {
        network: Network,
        node: usize,
    },
    PutDefinition {
        network: Network,
        node: usize,
        mtu: u16,
    },
    /// The agent is killed.
    Kill(usize),
    /// The agent is asked to end.
    Stop(usize),
    Trouble(Trouble),
    /// A pod that no agent has attached claims an address by its status.
    Forge {
        spec: PodSpec,
        network: Network,
        address: String,
    },
    Unforge(Key),
    /// A pod has done its work: its sandbox is detached, and its object stays.
    Finish(Key),
    /// The object of a completed pod is deleted.
    Discard(Key),
    /// The author of an attached pod writes the address of another pod into its status.
    ForgeStatus {
        pod: Key,
        network: Network,
        address: String,
    },
    /// DEL of a container that ended long ago.
    DelAgain {
        node: usize,
        container: String,
    },
    /// GC, with the containers that are there.
    Collect(usize),
}

/// The decisions so far.
#[derive(Debug)]
pub(super) struct Decisions {
    random: Random,
    batch: usize,
    made: usize,
    /// Whether the reference plugins are there.
    reference: bool,
    pods: BTreeMap<Key, PodSpec>,
    forged: BTreeSet<Key>,
    finished: BTreeSet<Key>,
    policies: BTreeSet<Key>,
    removed: BTreeSet<(Network, usize)>,
    ended: Vec<(usize, String)>,
    /// Numbers of hosts that a pod has had: the networks that its ADD attached stay although its annotation changes.
    hosts: BTreeMap<Key, BTreeSet<u8>>,
    /// Numbers of hosts that pods have had which ended, the last one at the end.
    freed: Vec<u8>,
}

impl Decisions {
    pub(super) fn new(seed: u64, reference: bool) -> Self {
        Self {
            random: Random::new(seed),
            batch: 0,
            made: 0,
            reference,
            pods: BTreeMap::new(),
            forged: BTreeSet::new(),
            finished: BTreeSet::new(),
            policies: BTreeSet::new(),
            removed: BTreeSet::new(),
            ended: Vec::new(),
            hosts: BTreeMap::new(),
            freed: Vec::new(),
        }
    }

    /// Returns the actions between two quiet moments: at most one for each pod.
    pub(super) fn batch(&mut self) -> Vec<Action> {
        self.batch += 1;
        let number = if self.batch == 1 { 6 } else { 1 + self.random.below(5) };
        let mut actions = Vec::new();
        let mut touched = BTreeSet::new();
        if self.batch > 3 && self.random.chance(1, 2) {
            let trouble = self.trouble();
            actions.push(Action::Trouble(trouble));
            actions.extend(self.what_it_hits(trouble, &mut touched));
        }
        for _ in 0..number {
            let action = self.one(&mut touched);
            actions.extend(action);
        }
        if self.batch > 3 && self.random.chance(1, 6) {
            let node = if self.batch < RESTARTS_OF_THE_FIRST { self.random.below(2) } else { 1 };
            let at = self.random.below(actions.len() + 1);
            let kill = if self.random.chance(3, 4) { Action::Kill(node) } else { Action::Stop(node) };
            actions.insert(at, kill);
        }
        actions
    }

    fn one(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        if self.batch == 1 {
            return self.create(touched);
        }
        let full = self.pods.len() >= MOST;
        match self.random.below(33) {
            0..=6 if !full => self.create(touched),
            0..=10 if self.pods.len() > FEW => self.end(touched),
            11..=13 => {
                let (pod, labels) = (self.untouched(touched)?, policies::labels(&mut self.random));
                self.pods.get_mut(&pod)?.labels = labels.clone();
                Some(Action::Relabel { pod, labels })
            }
            14 | 15 => self.annotate(touched),
            16 => {
                let namespace = self.random.of(NAMESPACES);
                Some(Action::LabelNamespace {
                    namespace,
                    labels: policies::namespace_labels(&mut self.random),
                })
            }
            17..=21 => {
                let namespace = self.random.of(NAMESPACES);
                let name = format!("policy-{}", self.random.below(POLICIES));
                self.policies.insert((namespace.to_owned(), name.clone()));
                Some(Action::PutPolicy(policies::policy(&mut self.random, namespace, &name)))
            }
            22 => self.remove_policy(),
            23 => self.define(),
            24 | 25 => self.forge(touched),
            26 => {
                let (node, container) = self.random.one(&self.ended)?;
                let lives = |pod: &PodSpec| pod.container == container && pod.node == node;
                (!self.pods.values().any(lives)).then_some(Action::DelAgain { node, container })
            }
            27 => Some(Action::Collect(self.random.below(2))),
            28 if self.pods.len() > FEW => self.finish(touched),
            29 | 30 => self.discard(touched),
            _ if !full => self.create(touched),
            _ => None,
        }
    }

    /// Returns actions to carry out during the fault, so that it has an effect.
    fn what_it_hits(&mut self, trouble: Trouble, touched: &mut BTreeSet<Key>) -> Vec<Action> {
        let mut actions = Vec::new();
        let may_end = self.pods.len() > FEW;
        if trouble.forgets() {
            actions.extend(self.remove_policy());
            actions.extend(may_end.then(|| self.end(touched)).flatten());
        }
        if trouble.is_of_statuses() {
            actions.extend(may_end.then(|| self.finish(touched)).flatten());
        }
        actions
    }

    fn untouched(&mut self, touched: &mut BTreeSet<Key>) -> Option<Key> {
        let free: Vec<Key> = self.pods.keys().filter(|key| !touched.contains(*key)).cloned().collect();
        let chosen = self.random.one(&free)?;
        touched.insert(chosen.clone());
        Some(chosen)
    }

    fn spec(&mut self, touched: &mut BTreeSet<Key>) -> Option<PodSpec> {
        let free: Vec<Key> = NAMESPACES
            .iter()
            .flat_map(|namespace| (0..NAMES).map(|number| ((*namespace).to_owned(), format!("p{number}"))))
            .filter(|key| {
                !self.pods.contains_key(key)
                    && !self.forged.contains(key)
                    && !self.finished.contains(key)
                    && !touched.contains(key)
            })
            .collect();
        let key = self.random.one(&free)?;
        touched.insert(key.clone());
        self.made += 1;
        let node = self.random.below(2);
        let same = format!("c-{}-{}", key.0, key.1);
        let container = if self.random.chance(1, 2) { same } else { format!("{same}-{}", self.made) };
        let labels = policies::labels(&mut self.random);
        let web = self.random.of([80, 81]);
        let second = self.random.chance(1, 3);
        let mut networks = BTreeMap::new();
        for network in ALL {
            let times = if network.spans_nodes() { 4 } else { 2 };
            if self.usable(network, node) && self.random.chance(times, 6) {
                networks.insert(network, self.host(node));
            }
        }
        let uid = format!("00000000-0000-4000-8000-{:012x}", self.made);
        Some(PodSpec { key, uid, node, container, labels, networks, web, second })
    }

    fn usable(&self, network: Network, node: usize) -> bool {
        (self.reference || network != Network::Ptp) && !self.removed.contains(&(network, node))
    }

    /// Returns a number that no pod of the node has; sometimes one that a pod of the other node has, and often one
    /// that another pod had a moment ago.
    fn host(&mut self, node: usize) -> u8 {
        let used = |others: bool| {
            let pods = self.pods.values().filter(move |pod| others || pod.node == node);
            let hosts = pods.filter_map(|pod| self.hosts.get(&pod.key));
            hosts.flatten().copied().collect::<BTreeSet<u8>>()
        };
        let (everywhere, here) = (used(true), used(false));
        let taken = if self.random.chance(1, 8) { here } else { everywhere };
        let last: Vec<u8> =
            self.freed.iter().rev().take(3).copied().filter(|it| !taken.contains(it)).collect();
        if self.random.chance(1, 2)
            && let Some(host) = self.random.one(&last)
        {
            return host;
        }
        // Few numbers, so that the blocks of policies distinguish them.
        let free: Vec<u8> = (1..=HOSTS).filter(|host| !taken.contains(host)).take(12).collect();
        self.random.one(&free).unwrap_or(HOSTS + 1)
    }

    fn create(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let spec = self.spec(touched)?;
        self.hosts.insert(spec.key.clone(), spec.networks.values().copied().collect());
        self.pods.insert(spec.key.clone(), spec.clone());
        Some(Action::Create(spec))
    }

    fn remove_policy(&mut self) -> Option<Action> {
        let policy = self.random.one(&self.policies.iter().cloned().collect::<Vec<_>>())?;
        self.policies.remove(&policy);
        Some(Action::RemovePolicy(policy))
    }

    fn finish(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let pod = self.untouched(touched)?;
        self.is_over(&pod)?;
        self.finished.insert(pod.clone());
        Some(Action::Finish(pod))
    }

    fn discard(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let finished: Vec<Key> =
            self.finished.iter().filter(|key| !touched.contains(*key)).cloned().collect();
        let key = self.random.one(&finished)?;
        self.finished.remove(&key);
        touched.insert(key.clone());
        Some(Action::Discard(key))
    }

    /// A pod has no sandbox any more.
    fn is_over(&mut self, pod: &Key) -> Option<()> {
        let spec = self.pods.remove(pod)?;
        self.freed.extend(self.hosts.remove(pod).into_iter().flatten());
        self.ended.push((spec.node, spec.container));
        Some(())
    }

    fn end(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let pod = self.untouched(touched)?;
        let how = self.random.of([
            Ending::InOrder,
            Ending::InOrder,
            Ending::ObjectFirst,
            Ending::Twice,
            Ending::NamespaceGone,
            Ending::Lost,
        ]);
        self.is_over(&pod)?;
        Some(Action::End { pod, how })
    }

    fn annotate(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let pod = self.untouched(touched)?;
        let node = self.pods.get(&pod)?.node;
        let network = self.random.of(ALL);
        let usable = self.usable(network, node);
        let host = self.host(node);
        let spec = self.pods.get_mut(&pod)?;
        if spec.networks.remove(&network).is_none() && usable {
            spec.networks.insert(network, host);
            self.hosts.entry(pod.clone()).or_default().insert(host);
        }
        Some(Action::Annotate { pod, networks: spec.networks.clone() })
    }

    fn define(&mut self) -> Option<Action> {
        let missing: Vec<_> = self.removed.iter().copied().collect();
        let (network, node) = match self.random.one(&missing) {
            Some(missing) => missing,
            None => (self.random.of(ALL), self.random.below(2)),
        };
        if self.removed.remove(&(network, node)) || self.random.chance(1, 2) {
            if network.spans_nodes() {
                self.removed.remove(&(network, 1 - node));
            }
            if network == Network::Ptp && !self.reference {
                return None;
            }
            return Some(Action::PutDefinition { network, node, mtu: self.random.of([1400, 1500]) });
        }
        self.removed.insert((network, node));
        if network.spans_nodes() {
            self.removed.insert((network, 1 - node));
        }
        Some(Action::RemoveDefinition { network, node })
    }

    fn forge(&mut self, touched: &mut BTreeSet<Key>) -> Option<Action> {
        let forged: Vec<Key> = self.forged.iter().filter(|key| !touched.contains(*key)).cloned().collect();
        if self.random.chance(1, 2)
            && let Some(key) = self.random.one(&forged)
        {
            self.forged.remove(&key);
            touched.insert(key.clone());
            return Some(Action::Unforge(key));
        }
        let network = self.random.of([Network::Seg, Network::Lan]);
        let victims: Vec<u8> =
            self.pods.values().filter_map(|pod| pod.networks.get(&network).copied()).collect();
        let host = self.random.one(&victims)?;
        let address = network.addresses(host).first()?.split('/').next()?.to_owned();
        if self.random.chance(1, 3) {
            let pod = self.untouched(touched)?;
            return Some(Action::ForgeStatus { pod, network, address });
        }
        let spec = self.spec(touched)?;
        self.forged.insert(spec.key.clone());
        Some(Action::Forge { spec, network, address })
    }

    fn trouble(&mut self) -> Trouble {
        let what =
            self.random.of(["pods", "namespaces", "multi-networkpolicies", "network-attachment-definitions"]);
        match self.random.below(27) {
            0 => Trouble::Late,
            1 | 2 => Trouble::Answers(self.random.of([429, 500, 503, 504, 410])),
            3 => Trouble::Resets,
            4 => Trouble::WatchesEnd(what),
            5 | 6 => Trouble::WatchesFail(what, self.random.of([410, 410, 500])),
            7 => Trouble::WatchesSilent(what),
            8 | 9 => Trouble::Lags(what),
            10 => Trouble::Slow,
            11 => Trouble::NeverAnswers,
            12 => Trouble::Away,
            13 => Trouble::NoListener,
            14 => self.random.of([Trouble::TokenExpired, Trouble::ForeignCertificate]),
            15 => Trouble::HistoryForgotten,
            16..=18 => Trouble::Stale(what),
            19..=21 => Trouble::AwayAndForgets,
            22 | 23 => Trouble::LagsAndForgets(what),
            24 => Trouble::StatusReset,
            _ => Trouble::StatusRefused(self.random.of([409, 429, 500, 503, 504])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_everything() {
        let decided = |seed| {
            let mut decisions = Decisions::new(seed, true);
            (0..300).map(|_| format!("{:?}", decisions.batch())).collect::<Vec<_>>()
        };
        assert_eq!(decided(3), decided(3));
        assert_ne!(decided(3), decided(4));
    }
}
