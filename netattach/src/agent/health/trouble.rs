//! Problems with objects that can be read but do not work as written, reported before they cause harm:
//! policies for undefined networks, NetworkPolicies that are not enforced, definitions by which no pod can
//! be attached, namespaces without an object whose labels policies select by, and policies that are not in
//! force as written.
//!
//! Each problem is logged once when it begins, and is a row of the status as long as it lasts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Notify, watch};

use super::disk_look::{DiskLook, LEAST_INTERVAL, Versions, versions};
use super::own_node::OwnNode;
use super::share::shared;
use super::{NOT_IN_FORCE, log_new, note};
use crate::agent::node::plugin_root;
use crate::agent::node_network::NodeNetwork;
use crate::attach::{Engine, IntentReader};
use crate::builtin::{ThisNode, pod_cidr};
use crate::cni::NetworkList;
use crate::enforce::enforcer::Enforcer;
use crate::error_chain::{Chain, clipped};
use crate::npwg::NetworkRef;
use crate::objects::labels::Requirement;
use crate::objects::policy::{Direction, Peer, Peers, Policy, Severity};
use crate::objects::{Definition, Identity, NAMESPACE_NAME_LABEL, ObjectName, Objects};
use crate::plan::pools;
use crate::policy::desired::{Condition as PolicyCondition, Subject};
use crate::rounds;
use crate::rpc::message::Condition;
use crate::source::Source;
use crate::sync::{Mutex, locked};
use crate::ticks;

/// Most rows that are reported; of the others only the number.
const MOST_ROWS: usize = 100;

/// The object of the problem that NetworkPolicies are not enforced.
pub(in crate::agent) const NETWORK_POLICIES: &str = "networkpolicies";

/// The object of the row with the number of the rows that are not shown.
pub(in crate::agent) const MORE: &str = "-";

/// How often configurations on disk are checked: they change independently of the objects.
const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for problems, and logs new ones.
pub(in crate::agent) struct Troubles {
    source: Arc<dyn Source>,
    enforcer: Arc<Enforcer>,
    intents: Arc<IntentReader>,
    engine: Arc<Engine>,
    network_policy: bool,
    /// Problems of the network that the agent makes.
    node_network: Option<Arc<NodeNetwork>>,
    seen: Mutex<Seen>,
    /// Locked during the check.
    disk_look: Mutex<DiskLook>,
    on_disk: Mutex<Vec<Condition>>,
    /// When the disk was last checked.
    looked: Mutex<Option<Instant>>,
    wanted: Notify,
}

/// Definitions as they were checked, each with its problem.
type Checked = BTreeMap<NetworkRef, (Weak<Definition>, Option<String>)>;

/// The results of the last check of objects. The objects themselves are not kept.
#[derive(Default)]
struct Seen {
    definitions: Identity<NetworkRef, Arc<Definition>>,
    /// Definitions can take their ranges from this node.
    node: OwnNode,
    policies: Identity<ObjectName, Arc<Policy>>,
    network_policies: Identity<ObjectName, Arc<Policy>>,
    has_other_nodes: bool,
    /// Namespaces of pods that have no Namespace object. Pods change most often; this is the only thing about them that
    /// matters here.
    unlabelled: BTreeSet<String>,
    /// Definitions with an inline configuration, and why no pod can be attached by one. An unchanged
    /// definition has the same result, except one that takes its range from this node, whose result also
    /// depends on the node's object. So only changed ones of thousands are checked.
    checked: Checked,
    rows: Vec<Condition>,
}

impl Seen {
    /// Whether a check of these objects would have the same results.
    fn is_of(&self, objects: &Objects, this: &ThisNode, unlabelled: &BTreeSet<String>) -> bool {
        self.unlabelled == *unlabelled
            && self.has_other_nodes == objects.has_other_nodes
            && self.has_definitions_of(objects, this)
            && self.policies.is_of(&objects.policies)
            && self.network_policies.is_of(&objects.network_policies)
    }

    /// Whether the definitions are the same as at the last check.
    fn has_definitions_of(&self, objects: &Objects, this: &ThisNode) -> bool {
        self.definitions.is_of(&objects.definitions) && self.node.is_of(objects, this)
    }
}

impl Troubles {
    pub(in crate::agent) fn new(
        source: Arc<dyn Source>,
        enforcer: Arc<Enforcer>,
        intents: Arc<IntentReader>,
        engine: Arc<Engine>,
        network_policy: bool,
        node_network: Option<Arc<NodeNetwork>>,
    ) -> Self {
        Self {
            source,
            enforcer,
            intents,
            engine,
            network_policy,
            node_network,
            seen: Mutex::default(),
            disk_look: Mutex::default(),
            on_disk: Mutex::default(),
            looked: Mutex::default(),
            wanted: Notify::new(),
        }
    }

    /// Returns one row for each problem: of the current objects, and on disk as of the last check.
    pub(in crate::agent) fn rows(&self) -> Vec<Condition> {
        let mut rows = self.of_objects();
        rows.extend(locked(&self.on_disk).iter().cloned());
        if locked(&self.looked).is_none_or(|at| at.elapsed() > LEAST_INTERVAL) {
            self.wanted.notify_one();
        }
        rows.extend(self.of_pools());
        rows.extend(self.engine.troubled_leases().map(|(object, problem)| Condition { object, problem }));
        rows.extend(self.node_network.iter().flat_map(|network| network.rows()));
        rows.extend(self.enforcer.conditions().into_iter().filter_map(of_policy));
        bounded(rows)
    }

    /// Checks when objects change, when the status is requested, and every [`INTERVAL`], until the objects'
    /// source ends; at most once a second, however often objects change.
    pub(in crate::agent) async fn keep_looking(self: Arc<Self>, mut changes: watch::Receiver<u64>) {
        let mut is_routine = false;
        loop {
            let looking = Arc::clone(&self);
            let next = tokio::time::Instant::now() + LEAST_INTERVAL;
            let look = move || {
                looking.of_objects();
                looking.look_at_disk();
            };
            // Thousands of definitions may have changed, so this may take long.
            rounds::take(is_routine, look).await;
            // All three futures may be dropped at any time: a change stays unseen, a request is kept, and the sleep
            // starts anew.
            is_routine = tokio::select! {
                changed = changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    false
                }
                () = self.wanted.notified() => false,
                () = ticks::pause(INTERVAL) => true,
            };
            tokio::time::sleep_until(next).await;
        }
    }

    /// Returns rows for the current objects. The first call after a change runs the check.
    fn of_objects(&self) -> Vec<Condition> {
        let objects = self.source.snapshot();
        let unlabelled = without_object(&objects);
        let this = &self.intents.from_node.this;
        let mut seen = locked(&self.seen);
        if !seen.has_definitions_of(&objects, this) {
            let mut before = std::mem::take(&mut seen.checked);
            if !seen.node.is_of(&objects, this) {
                forget_those_of_the_node(&mut before, &objects);
            }
            seen.checked = self.check_changed(&objects, before);
        }
        if !seen.is_of(&objects, this, &unlabelled) {
            let unusable = seen.checked.iter().filter_map(|(name, (_, problem))| {
                let object = format!("network-attachment-definition {name}");
                Some(Condition { object, problem: problem.clone()? })
            });
            let rows = self.look(&objects, &unlabelled).into_iter().chain(unusable).collect::<Vec<_>>();
            log_new(NOT_IN_FORCE, &seen.rows, &rows);
            seen.rows = rows;
            seen.definitions = objects.definitions.identity();
            seen.node = OwnNode::of(&objects, this);
            seen.policies = objects.policies.identity();
            seen.network_policies = objects.network_policies.identity();
            seen.has_other_nodes = objects.has_other_nodes;
            seen.unlabelled = unlabelled;
        }
        seen.rows.clone()
    }

    /// Checks the definitions with an inline configuration that have changed.
    fn check_changed(&self, objects: &Objects, mut before: Checked) -> Checked {
        let inline = objects.definitions.iter().filter(|(_, definition)| definition.config.is_some());
        let each = inline.map(|(name, definition)| {
            let same = before.remove(name).filter(|(known, _)| known.as_ptr() == Arc::as_ptr(definition));
            let outcome = same.unwrap_or_else(|| (Arc::downgrade(definition), self.unusable(objects, name)));
            (name.clone(), outcome)
        });
        each.collect()
    }

    /// Checks the definitions whose configuration is on disk.
    fn look_at_disk(&self) {
        let objects = self.source.snapshot();
        let is_on_disk = |definition: &Definition| definition.config.is_none();
        let versions = || match objects.definitions.values().any(|definition| is_on_disk(definition)) {
            true => versions(&self.intents.conf_dir, SystemTime::now()),
            false => Some(Versions::new()),
        };
        let read = || self.of_definitions(&objects, is_on_disk);
        let found = locked(&self.disk_look).look(Instant::now(), &objects.definitions, versions, read);
        if let Some(rows) = found {
            note(NOT_IN_FORCE, &self.on_disk, rows);
        }
        *locked(&self.looked) = Some(Instant::now());
    }

    fn look(&self, objects: &Objects, unlabelled: &BTreeSet<String>) -> Vec<Condition> {
        let mut rows = of_unlabelled(objects, unlabelled, self.network_policy);
        if !self.network_policy && !objects.network_policies.is_empty() {
            rows.push(Condition {
                object: NETWORK_POLICIES.into(),
                problem: format!(
                    "{} of networking.k8s.io are not enforced: networkPolicy is off, which is right only beside a primary network that \
                     enforces them itself",
                    objects.network_policies.len()
                ),
            });
        }
        let default = self.intents.restrictions.default_network.as_ref();
        rows.extend(of_no_network(objects, default));
        rows.extend(default.and_then(|default| of_fixed_range(objects, default)));
        rows
    }

    /// Returns the selected definitions by which no pod can be attached.
    fn of_definitions(&self, objects: &Objects, is_of_kind: impl Fn(&Definition) -> bool) -> Vec<Condition> {
        let of_kind = objects.definitions.iter().filter(|(_, definition)| is_of_kind(definition));
        let unusable = of_kind.filter_map(|(name, _)| {
            let problem = self.unusable(objects, name)?;
            Some(Condition { object: format!("network-attachment-definition {name}"), problem })
        });
        unusable.collect()
    }

    /// Returns definitions whose pool is not in use, because attachments use another one.
    fn of_pools(&self) -> Vec<Condition> {
        let objects = self.source.snapshot();
        let live = self.engine.registry().pools();
        let kept = live.iter().filter_map(|(name, live)| {
            let network = self.intents.network(&objects, name.definition()?).ok()?;
            let (_, kept) = pools::keep(&network, live)?;
            Some(Condition {
                object: format!("network-attachment-definition {name}"),
                problem: kept.to_string(),
            })
        });
        kept.collect()
    }

    /// Returns why no pod can be attached by a definition, or not as on the node itself.
    fn unusable(&self, objects: &Objects, name: &NetworkRef) -> Option<String> {
        let problem = match self.intents.network(objects, name) {
            Err(error) => Some(Chain(&error).to_string()),
            Ok(network) => match self.engine.check_plan(&network) {
                Err(error) => Some(error.to_string()),
                Ok(()) => plugin_root::in_the_container(&self.engine.paths_of_leases(&network)),
            },
        };
        problem.map(clipped)
    }
}

/// Discards the results of definitions that take their range from the node.
fn forget_those_of_the_node(checked: &mut Checked, objects: &Objects) {
    checked.retain(|name, _| {
        let config = objects.definitions.get(name).and_then(|definition| definition.config.as_deref());
        config.is_some_and(|config| !pod_cidr::is_named(config))
    });
}

/// Reports a default network of several nodes whose nodes would all give the same addresses.
fn of_fixed_range(objects: &Objects, default: &NetworkRef) -> Option<Condition> {
    let definition = objects.definitions.get(default).filter(|_| objects.has_other_nodes)?;
    let config = definition.config.as_deref()?;
    let list = NetworkList::parse_with_default_name(config.as_bytes(), &definition.name).ok()?;
    pod_cidr::is_fixed(&list).then(|| Condition {
        object: format!("network-attachment-definition {default}"),
        problem: "is the default network of more than one node, and its host-local range is the same on each of them: pods of \
                  two nodes get the same addresses; write \"subnet\": \"usePodCidr\" for the node's own podCIDR"
            .into(),
    })
}

/// Returns the policies for undefined networks: of each namespace at most as many rows as are reported plus
/// one, so that the report can say that there are more. Authors of one namespace could create hundreds of
/// thousands.
pub(in crate::agent) fn of_no_network(objects: &Objects, default: Option<&NetworkRef>) -> Vec<Condition> {
    let mut rows = Vec::new();
    // Policies are ordered by namespace: its name, and where its rows begin.
    let mut current = ("", 0);
    for policy in objects.policies.values() {
        if policy.namespace() != current.0 {
            current = (policy.namespace(), rows.len());
        }
        let room = (MOST_ROWS + 1).saturating_sub(rows.len() - current.1);
        let unknown =
            |network: &&NetworkRef| !objects.definitions.contains_key(*network) && default != Some(*network);
        rows.extend(policy.networks.iter().filter(unknown).take(room).map(|network| Condition {
            object: Subject::Policy(policy.name.clone()).to_string(),
            problem: format!("is for network {network}, which is not defined: it selects nothing there"),
        }));
    }
    rows
}

/// Returns namespaces of pods without a Namespace object. In a cluster there are none: the API accepts no
/// pod without its namespace.
pub(in crate::agent) fn without_object(objects: &Objects) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut next = objects.pods.keys().next();
    while let Some(ObjectName { namespace, .. }) = next {
        if !objects.namespaces.contains_key(namespace) {
            found.insert(namespace.clone());
        }
        // Pods are ordered by namespace, and no name contains a zero byte.
        let behind = ObjectName::new(format!("{namespace}\0"), "");
        next = objects.pods.range(behind..).next().map(|(name, _)| name);
    }
    found
}

/// Returns namespaces without an object, if policies select by namespace labels.
pub(in crate::agent) fn of_unlabelled(
    objects: &Objects,
    namespaces: &BTreeSet<String>,
    network_policy: bool,
) -> Vec<Condition> {
    let others = objects.network_policies.values().filter(|_| network_policy);
    let mut asking = objects.policies.values().chain(others).filter(|policy| selects_by_labels(policy));
    let Some(first) = asking.next() else { return Vec::new() };
    let first = Subject::Policy(first.name.clone());
    let by = match asking.count() {
        0 => format!("{first} selects"),
        more => format!("{first} and {more} more select"),
    };
    let row = |namespace: &String| Condition {
        object: format!("namespace {namespace}"),
        problem: format!("has no manifest, so its labels are not known: {by} namespaces by labels"),
    };
    // One more than is reported, so that the report can say that there are more.
    namespaces.iter().take(MOST_ROWS + 1).map(row).collect()
}

/// Whether a policy selects namespaces by labels other than their names.
fn selects_by_labels(policy: &Policy) -> bool {
    let rules = [Direction::Ingress, Direction::Egress].into_iter().flat_map(|it| policy.rules(it));
    let peers = rules.flat_map(|rule| match &rule.peers {
        Peers::Any => &[],
        Peers::Of(peers) => peers.as_slice(),
    });
    let selectors = peers.filter_map(|peer| match peer {
        Peer::Pods { namespaces, .. } => namespaces.as_ref(),
        Peer::Block { .. } => None,
    });
    let mut keys = selectors.flat_map(|selector| &selector.requirements).map(Requirement::key);
    keys.any(|key| key != NAMESPACE_NAME_LABEL)
}

/// The row for a policy that is not in force as written.
fn of_policy(condition: PolicyCondition) -> Option<Condition> {
    let is_error = condition.severity == Severity::Error;
    is_error.then(|| Condition { object: condition.object.to_string(), problem: condition.message })
}

fn bounded(rows: Vec<Condition>) -> Vec<Condition> {
    let all = rows.len();
    let mut rows = shared(rows, MOST_ROWS);
    if all > rows.len() {
        let more = all - rows.len();
        rows.push(Condition { object: MORE.into(), problem: format!("{more} more are not shown") });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Pod;
    use crate::objects::policy::POLICY_FOR_ANNOTATION;
    use crate::source::read::policy::read;

    #[test]
    fn when_this_node_changes_only_definitions_with_its_range_are_looked_at_anew() {
        let mut objects = Objects::default();
        let mut checked = Checked::new();
        for (name, config) in
            [("own", "{\"subnet\": \"usePodCidr\"}"), ("fixed", "{\"subnet\": \"10.1.0.0/24\"}")]
        {
            let definition = Arc::new(Definition {
                namespace: "shop".into(),
                name: name.into(),
                config: Some(config.into()),
                annotations: Default::default(),
                allowed: None,
            });
            let reference = NetworkRef::new("shop", name);
            checked.insert(reference.clone(), (Arc::downgrade(&definition), None));
            objects.definitions.insert(reference, definition);
        }
        checked.insert(NetworkRef::new("shop", "gone"), (Weak::new(), None));
        forget_those_of_the_node(&mut checked, &objects);
        assert_eq!(checked.into_keys().collect::<Vec<_>>(), [NetworkRef::new("shop", "fixed")]);
    }

    #[test]
    fn a_policy_for_an_undefined_network_is_reported_and_the_default_network_need_not_be_an_object() {
        let mut objects = Objects::default();
        let reference = NetworkRef::new("shop", "lan");
        let definition = Definition {
            namespace: "shop".into(),
            name: "lan".into(),
            config: None,
            annotations: Default::default(),
            allowed: None,
        };
        objects.definitions.insert(reference, Arc::new(definition));
        let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), "lan, lam, kube-system/default".to_owned())];
        let spec = serde_json::json!({"podSelector": {}, "policyTypes": ["Ingress"]});
        let policy = read(ObjectName::new("shop", "p"), &annotations.into(), &spec).unwrap();
        objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
        let default = NetworkRef::new("kube-system", "default");
        let of = |network: &str| Condition {
            object: "multi-networkpolicy shop/p".into(),
            problem: format!("is for network {network}, which is not defined: it selects nothing there"),
        };
        assert_eq!(of_no_network(&objects, Some(&default)), [of("shop/lam")]);
        assert_eq!(of_no_network(&objects, None), [of("kube-system/default"), of("shop/lam")]);
    }

    #[test]
    fn policies_for_very_many_undefined_networks_have_as_many_rows_as_are_reported_of_a_namespace() {
        let mut objects = Objects::default();
        let names = (0..2 * MOST_ROWS / 3).map(|it| format!("n{it:03}")).collect::<Vec<_>>().join(",");
        for (namespace, name) in
            [("a", "p"), ("hostile", "p"), ("hostile", "q"), ("hostile", "r"), ("z", "p")]
        {
            let networks = if namespace == "hostile" { names.clone() } else { "lam".to_owned() };
            let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), networks)].into();
            let spec = serde_json::json!({"podSelector": {}, "policyTypes": ["Ingress"]});
            let policy = read(ObjectName::new(namespace, name), &annotations, &spec).unwrap();
            objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
        }
        let mut rows: BTreeMap<String, usize> = BTreeMap::new();
        for row in of_no_network(&objects, None) {
            *rows.entry(row.object).or_default() += 1;
        }
        let (whole, rest) = (2 * MOST_ROWS / 3, MOST_ROWS + 1 - 2 * MOST_ROWS / 3);
        let expected = [("a/p", 1), ("hostile/p", whole), ("hostile/q", rest), ("z/p", 1)];
        let expected = expected.map(|(name, number)| (format!("multi-networkpolicy {name}"), number));
        assert_eq!(rows, BTreeMap::from(expected));
    }

    #[test]
    fn a_namespace_without_a_manifest_is_reported_while_policies_select_namespaces_by_labels() {
        let mut objects = Objects::default();
        for (namespace, name) in [("bare", "a"), ("bare", "b"), ("bare-2", "a"), ("shop", "a")] {
            let name = ObjectName::new(namespace, name);
            let pod = Pod {
                name: name.clone(),
                uid: None,
                mirror_of: None,
                labels: Default::default(),
                annotations: Default::default(),
                phase: Default::default(),
                host_network: false,
                ports: Vec::new(),
                powers: Default::default(),
                on_this_node: false,
                terminating: false,
            };
            objects.pods.insert(name, Arc::new(pod));
        }
        objects.namespaces.insert("shop".to_owned(), Default::default());
        let bare: BTreeSet<String> = ["bare", "bare-2"].map(str::to_owned).into();
        assert_eq!(without_object(&objects), bare);
        let mut add = |name: &str, key: &str| {
            let selector =
                serde_json::json!({"matchExpressions": [{"key": key, "operator": "DoesNotExist"}]});
            let spec = serde_json::json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": selector}]}]});
            let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())];
            let policy = read(ObjectName::new("shop", name), &annotations.into(), &spec).unwrap();
            objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
            of_unlabelled(&objects, &bare, false)
        };
        assert_eq!(add("by-name", NAMESPACE_NAME_LABEL), []);
        let of = |who: &str| {
            let problem = format!("has no manifest, so its labels are not known: {who} namespaces by labels");
            ["bare", "bare-2"]
                .map(|name| Condition { object: format!("namespace {name}"), problem: problem.clone() })
        };
        assert_eq!(add("one", "team"), of("multi-networkpolicy shop/one selects"));
        assert_eq!(add("two", "team"), of("multi-networkpolicy shop/one and 1 more select"));
    }

    #[test]
    fn a_default_network_that_gives_the_same_addresses_on_each_node_is_reported() {
        let default = NetworkRef::new("kube-system", "default");
        let of = |subnet: &str, has_other_nodes: bool| {
            let config = serde_json::json!({
                "type": "bridge", "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]]}
            });
            let definition = Definition {
                namespace: "kube-system".into(),
                name: "default".into(),
                config: Some(config.to_string().into()),
                annotations: Default::default(),
                allowed: None,
            };
            let definitions = [(default.clone(), Arc::new(definition))].into_iter().collect();
            let objects = Objects { definitions, has_other_nodes, ..Objects::default() };
            of_fixed_range(&objects, &default).map(|row| row.object)
        };
        let row = Some("network-attachment-definition kube-system/default".to_owned());
        assert_eq!(of("10.1.0.0/24", true), row);
        assert_eq!(of("10.1.0.0/24", false), None);
        assert_eq!(of("usePodCidr", true), None);
    }

    #[test]
    fn rows_beyond_the_bound_are_counted() {
        let row = |number: usize| Condition { object: number.to_string(), problem: String::new() };
        assert_eq!(bounded((0..MOST_ROWS).map(row).collect()).len(), MOST_ROWS);
        let more = bounded((0..MOST_ROWS + 5).map(row).collect());
        assert_eq!((more.len(), more[MOST_ROWS].problem.as_str()), (MOST_ROWS + 1, "5 more are not shown"));
    }
}
