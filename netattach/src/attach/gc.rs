//! GC: rolls back the sandboxes that the runtime no longer knows, then makes every pool and every other plugin
//! release the resources that belong to no remaining sandbox.
//!
//! GC runs concurrently with other operations. A container that another operation has worked on since the request
//! arrived is in use; the others are rolled back, each in its own turn. A pool or a plugin is called while no other
//! operation uses it, and gets the list of attachments in use only then: every holder of one of its resources has a
//! record at that time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::apply::runner;
use super::{AttachError, Attached, Engine, StepError};
use crate::cni::outgoing::insert_in_use;
use crate::cni::{self, AttachmentId, CniError, Command, Value};
use crate::delegate::{self, Call, DelegateError};
use crate::error_chain::Chain;
use crate::ipam::InUse;
use crate::journal::{JournalKey, Loaded};
use crate::plan::gc::{Defined, Holder, Place, holders, in_use};
use crate::plan::{Plan, PodRef};
use crate::step::Delegate;

/// The outcome of GC. Everything that could be rolled back is gone, even if other parts failed.
#[derive(Debug, Default)]
pub struct Collected {
    /// The attachments that were rolled back.
    pub detached: Vec<Arc<Attached>>,
    /// The failures.
    pub errors: Vec<AttachError>,
}

impl Collected {
    /// # Errors
    /// Everything that failed, as one error.
    pub fn outcome(self) -> Result<(), CniError> {
        if self.errors.is_empty() {
            return Ok(());
        }
        Err(CniError::joined(self.errors.iter().map(CniError::from)))
    }

    /// The pods of what was rolled back.
    pub fn pods(&self) -> impl Iterator<Item = &PodRef> {
        self.detached.iter().filter_map(|it| it.plan.sandbox.pod.as_ref())
    }

    /// Adds the outcome of another part of GC.
    pub fn add(&mut self, other: Self) {
        self.detached.extend(other.detached);
        self.errors.extend(other.errors);
    }

    fn note<T>(&mut self, outcome: Result<T, AttachError>) -> Option<T> {
        outcome.map_err(|error| self.errors.push(error)).ok()
    }
}

/// The records that one GC has found, sorted into stale and kept.
#[derive(Debug, Default)]
pub struct Census {
    /// Records to roll back, by container; the newest of a container first.
    pub stale: BTreeMap<String, Vec<Stale>>,
    /// All other records.
    kept: BTreeMap<JournalKey, Arc<Plan>>,
    /// Attachments that the runtime reports as in use and that have no record; their containers may have other
    /// interfaces, which are not known.
    strangers: Vec<AttachmentId>,
    /// Whether every record could be read.
    complete: bool,
}

/// A record to roll back, as it was when GC began.
#[derive(Debug, Clone)]
pub struct Stale {
    key: JournalKey,
    plan: Arc<Plan>,
}

impl Census {
    /// Marks a container's records as in use: another operation is working on them.
    pub fn keep(&mut self, container: &str) {
        let kept = self.stale.remove(container).unwrap_or_default();
        self.kept.extend(kept.into_iter().map(|stale| (stale.key, stale.plan)));
    }
}

impl Engine {
    /// Finds the records that GC of one runtime configuration concerns: a sandbox that was added by it and is not
    /// among the request's valid attachments is stale. This changes nothing and may run beside other operations.
    /// Without a list of valid attachments there is nothing to do.
    pub fn census(&self, request: &cni::Request, collected: &mut Collected) -> Option<Census> {
        let valid: BTreeSet<&AttachmentId> = request.valid_attachments.as_ref()?.iter().collect();
        let mut census = Census { complete: true, ..Census::default() };
        let mut recorded = BTreeSet::new();
        let mut stale = Vec::new();
        for key in collected.note(self.journal.keys().map_err(AttachError::from))? {
            let id = |ifname: &str| AttachmentId {
                container_id: key.container_id.clone(),
                ifname: ifname.to_owned(),
            };
            recorded.insert(id(&key.ifname));
            match collected.note(self.journal.peek(&key).map_err(AttachError::from)) {
                None => census.complete = false,
                // No step was carried out for this record.
                Some(Loaded::Absent | Loaded::Torn { .. }) => {}
                Some(Loaded::Whole(record)) => {
                    let is_ours = record.plan.sandbox.config_name == request.name;
                    // An attachment made while the sandbox was live is stale exactly when its sandbox is.
                    let sandbox =
                        record.plan.dynamic.as_ref().map_or(&key.ifname, |dynamic| &dynamic.sandbox);
                    if is_ours && !valid.contains(&id(sandbox)) {
                        stale.push(record);
                    } else {
                        census.kept.insert(key, record.plan);
                    }
                }
            }
        }
        stale.sort_by_key(|record| Reverse((record.plan.dynamic.is_some(), record.planned.since_boot)));
        for record in stale {
            let of_container = census.stale.entry(record.key.container_id.clone()).or_default();
            of_container.push(Stale { key: record.key, plan: record.plan });
        }
        census.strangers = valid.into_iter().filter(|id| !recorded.contains(id)).cloned().collect();
        Some(census)
    }

    /// Rolls back the stale records of one container, except those replaced meanwhile. The caller holds the
    /// container's turn.
    pub fn collect(&self, stale: &[Stale]) -> Collected {
        let mut collected = Collected::default();
        for Stale { key, plan } in stale {
            let loaded = collected.note(self.journal.load(key).map_err(AttachError::from));
            let Some(Loaded::Whole(record)) = loaded else { continue };
            if record.plan != *plan {
                continue;
            }
            let attached = Arc::new(Attached::from(&*record));
            let rolled_back = collected.note(self.roll_back(*record));
            collected.detached.extend(rolled_back.map(|()| attached));
        }
        collected
    }

    /// Returns every pool and every other plugin, of the `defined` or attached networks, that must release resources
    /// of no remaining sandbox. Empty if a record cannot be read: resources that its sandbox uses would look stale.
    pub fn holders(&self, census: &Census, defined: &[Defined]) -> Vec<Holder> {
        if !census.complete {
            return Vec::new();
        }
        let kept: Vec<Arc<Plan>> = census.kept.values().cloned().collect();
        let mut holders = holders(defined, &kept, &self.options.exec);
        if census.strangers.is_empty() {
            return holders;
        }
        let containers: BTreeSet<&str> = census.strangers.iter().map(|id| &*id.container_id).collect();
        holders.retain(|holder| {
            if !holder.default {
                tracing::warn!(
                    network = %holder.network,
                    ?containers,
                    "GC skipped: it is not known whether containers that the runtime uses are attached to this network"
                );
            }
            holder.default
        });
        holders
    }

    /// Makes one pool or plugin release everything that is not in use, before `until`. No other operation may use it
    /// meanwhile. `busy` are the containers that other operations have worked on since the census: their records are
    /// read again, as are newer records.
    pub fn release_others(
        &self,
        request: &cni::Request,
        census: &Census,
        holder: &Holder,
        busy: &HashSet<String>,
        until: Instant,
    ) -> Result<(), AttachError> {
        let mut plans: Vec<Arc<Plan>> = census.kept.values().cloned().collect();
        for key in self.journal.keys()? {
            let is_known = census.kept.contains_key(&key) && !busy.contains(&key.container_id);
            if !is_known && let Loaded::Whole(record) = self.journal.peek(&key)? {
                plans.push(record.plan);
            }
        }
        // No record contains the attachments that another plugin has made for a sandbox before it was taken over.
        let has_taken_over = plans.iter().any(|plan| plan.is_taken_over());
        if has_taken_over && !holder.default && matches!(holder.place, Place::Plugin(_)) {
            let why = "it is not known which interfaces pods that were taken over have on this network";
            tracing::warn!(network = %holder.network, why, "GC skipped");
            return Ok(());
        }
        let taken_over = plans.iter().filter(|plan| plan.is_taken_over()).map(|plan| AttachmentId {
            container_id: plan.sandbox.container_id.clone(),
            ifname: plan.sandbox.ifname.clone(),
        });
        let of_others: Vec<AttachmentId> = taken_over.chain(census.strangers.iter().cloned()).collect();
        let containers = of_others.iter().map(|id| id.container_id.clone()).collect();
        let mut ids = in_use(&plans, &holder.config_name);
        ids.extend(of_others);
        ids.sort();
        ids.dedup();
        let left = until.saturating_duration_since(Instant::now());
        self.release_at(request, holder, (&ids, containers), left)
    }

    /// Makes one pool or plugin release everything that is not `in_use`, within `left`; a pool keeps everything of
    /// these `containers`.
    fn release_at(
        &self,
        request: &cni::Request,
        holder: &Holder,
        (in_use, containers): (&[AttachmentId], BTreeSet<String>),
        left: Duration,
    ) -> Result<(), AttachError> {
        let released = match &holder.place {
            Place::Pool(pool) => {
                let in_use = InUse { containers, ..InUse::from(in_use) };
                self.node.leases.collect(pool, &in_use).map_err(StepError::from)
            }
            Place::Plugin(_) if left.is_zero() => {
                return Err(AttachError::OutOfTime(holder.network.to_string()));
            }
            Place::Plugin(plugin) => {
                let runner = delegate::Delegate { timeout: left, ..runner(&self.node, &request.path) };
                match run_gc(&runner, plugin, in_use) {
                    // The network is defined in the cluster but was never used on this node.
                    Err(error @ DelegateError::NotFound { .. }) if in_use.is_empty() => {
                        tracing::debug!(network = %holder.network, error = %Chain(&error), "GC skipped: the plugin is not installed");
                        Ok(())
                    }
                    other => other.map_err(StepError::from),
                }
            }
        };
        released.map_err(|source| AttachError::Network {
            command: Command::Gc,
            network: holder.network.to_string(),
            source: Box::new(source),
        })
    }
}

fn run_gc(
    runner: &delegate::Delegate,
    plugin: &Delegate,
    in_use: &[AttachmentId],
) -> Result<(), DelegateError> {
    let mut config = plugin.config.clone();
    insert_in_use(&mut config, in_use);
    let stdin = Value::Object(config).to_string();
    let call = Call::without_container(Command::Gc, &plugin.plugin, stdin.as_bytes());
    runner.run(&call).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::attach::rig;
    use crate::cni::Version;
    use crate::journal::Store;
    use crate::netns::Netns;
    use crate::plan::resolve::Numbers;

    /// Another plugin has attached it, and holds an address for it that no record has.
    #[test]
    fn what_a_sandbox_had_before_it_was_taken_over_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &Arc::default());
        let mut numbers = engine.registry().reserve();
        let mut plan = rig::plan(directory.path(), "a", numbers.attachment().unwrap());
        plan.attachments[0].version = Version::LATEST;
        let own = Netns::current().unwrap();
        engine.carry_out(rig::key("a"), plan.clone(), numbers, &own, Version::LATEST).unwrap();
        let mut taken_over = Plan { attachments: Vec::new(), ..plan };
        taken_over.sandbox.container_id = "b".to_owned();
        taken_over.sandbox.config_name = String::new();
        let mut record = engine.journal.create(rig::key("b"), taken_over).unwrap();
        record.attached(Value::Null).unwrap();
        let pool = directory.path().join("pools/net");
        let mut expected = rig::leased(directory.path());
        for (address, container, ifname) in
            [("10.1.0.7", "b", "eth0"), ("10.1.0.8", "b", "net1"), ("10.1.0.9", "gone", "eth0")]
        {
            fs::write(pool.join(address), format!("{container}\r\n{ifname}")).unwrap();
            expected.insert(address.to_owned(), container.to_owned());
        }
        assert_eq!(rig::leased(directory.path()), expected);

        let id =
            |container: &str| AttachmentId { container_id: container.to_owned(), ifname: "eth0".to_owned() };
        let request =
            cni::Request { valid_attachments: Some(vec![id("a"), id("b")]), ..rig::request("GC", "") };
        let mut collected = Collected::default();
        let census = engine.census(&request, &mut collected).unwrap();
        let [holder] = <[Holder; 1]>::try_from(engine.holders(&census, &[])).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        engine.release_others(&request, &census, &holder, &HashSet::new(), until).unwrap();
        collected.outcome().unwrap();
        expected.remove("10.1.0.9");
        assert_eq!(rig::leased(directory.path()), expected);
    }
}
