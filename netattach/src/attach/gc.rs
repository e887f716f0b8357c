//! GC: takes back the sandboxes that the runtime does not know any more, then has every pool and every other
//! plugin do the same for what they hold.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::apply::runner;
use super::{AttachError, Engine, StepError};
use crate::cni::outgoing::insert_in_use;
use crate::cni::{self, AttachmentId, CniError, Command, Value};
use crate::delegate::{self, Call, DelegateError};
use crate::ipam::host_local::Owner;
use crate::journal::{Loaded, Record};
use crate::plan::collect::{Defined, Holder, Place, holders, in_use};
use crate::plan::{self, Plan, PodRef};
use crate::report::Chain;

/// What GC came to. What could be taken back is gone whatever else failed.
#[derive(Debug, Default)]
pub struct Collected {
    /// The pods of the sandboxes that were taken back.
    pub pods: Vec<PodRef>,
    /// What failed.
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

    fn note<T>(&mut self, outcome: Result<T, AttachError>) -> Option<T> {
        outcome.map_err(|error| self.errors.push(error)).ok()
    }
}

/// The journal, divided by what the runtime has in use.
#[derive(Default)]
struct Divided {
    stale: Vec<Record>,
    kept: Vec<Plan>,
    /// In use, says the runtime, and in no record: nobody knows which interfaces these containers have beside.
    strangers: Vec<AttachmentId>,
    /// Every record could be read.
    complete: bool,
}

impl Engine {
    /// GC of one configuration of the runtime: takes back every sandbox that was added by it and is not among the
    /// request's valid attachments; then has every pool and other plugin of the networks that are `defined` or
    /// attached release what no remaining sandbox has. Without a list of valid attachments nothing is done. The
    /// caller sees to it that nothing is attached or detached meanwhile.
    pub fn gc(&self, request: &cni::Request, defined: &[Defined]) -> Collected {
        let mut collected = Collected::default();
        let Some(valid) = &request.valid_attachments else { return collected };
        let Divided { stale, kept, strangers, complete } = self.divide(request, valid, &mut collected);
        for record in stale {
            let (pod, container) =
                (record.plan.sandbox.pod.clone(), record.plan.sandbox.container_id.clone());
            let of = pod.as_ref().map(ToString::to_string);
            tracing::info!(container, pod = of, "not in use any more, taking it back");
            if collected.note(self.take_back(record)).is_some() {
                collected.pods.extend(pod);
            }
        }
        if !complete {
            // What such a record has in use would be taken for stale.
            return collected;
        }
        let until = Instant::now() + self.node.delegate.timeout;
        for holder in holders(defined, &kept, &self.options.exec) {
            if !strangers.is_empty() && !holder.default {
                let containers: BTreeSet<&str> = strangers.iter().map(|id| &*id.container_id).collect();
                tracing::warn!(
                    network = holder.network,
                    ?containers,
                    "no GC: the runtime has containers in use of which it is not known whether they have this network"
                );
                continue;
            }
            let mut ids = in_use(&kept, &holder.config_name);
            ids.extend(strangers.iter().cloned());
            let left = until.saturating_duration_since(Instant::now());
            collected.note(self.release_others(request, &holder, &ids, left));
        }
        collected
    }

    fn divide(&self, request: &cni::Request, valid: &[AttachmentId], collected: &mut Collected) -> Divided {
        let valid: BTreeSet<&AttachmentId> = valid.iter().collect();
        let mut recorded = BTreeSet::new();
        let mut divided = Divided { complete: true, ..Divided::default() };
        let Some(keys) = collected.note(self.journal.keys().map_err(AttachError::from)) else {
            return Divided::default();
        };
        for key in keys {
            let id = |ifname: &str| AttachmentId {
                container_id: key.container_id.clone(),
                ifname: ifname.to_owned(),
            };
            recorded.insert(id(&key.ifname));
            match collected.note(self.journal.load(&key).map_err(AttachError::from)) {
                None => divided.complete = false,
                // Nothing was done for it.
                Some(Loaded::Absent | Loaded::Torn) => {}
                Some(Loaded::Whole(record)) => {
                    let is_ours = record.plan.sandbox.config_name == request.name;
                    // What a live sandbox was given goes and stays with it.
                    let sandbox =
                        record.plan.dynamic.as_ref().map_or(&key.ifname, |dynamic| &dynamic.sandbox);
                    if is_ours && !valid.contains(&id(sandbox)) {
                        divided.stale.push(*record);
                    } else {
                        divided.kept.push(record.plan);
                    }
                }
            }
        }
        divided.stale.sort_by_key(|record| Reverse((record.plan.dynamic.is_some(), record.planned)));
        divided.strangers = valid.into_iter().filter(|id| !recorded.contains(id)).cloned().collect();
        divided
    }

    /// Has one pool or plugin release what is not `in_use`, within `left`.
    fn release_others(
        &self,
        request: &cni::Request,
        holder: &Holder,
        in_use: &[AttachmentId],
        left: Duration,
    ) -> Result<(), AttachError> {
        let released = match &holder.place {
            Place::Pool { data_dir, network } => {
                let owners: Vec<Owner> = in_use.iter().map(Owner::from).collect();
                self.node.leases.retain(data_dir, network, &owners).map(drop).map_err(StepError::from)
            }
            Place::Plugin(_) if left.is_zero() => return Err(AttachError::OutOfTime(holder.network.clone())),
            Place::Plugin(plugin) => {
                let runner = delegate::Delegate { timeout: left, ..runner(&self.node, &request.path) };
                match run_gc(&runner, plugin, in_use) {
                    // A network of the cluster that this node has never had.
                    Err(error @ DelegateError::NotFound { .. }) if in_use.is_empty() => {
                        tracing::debug!(network = holder.network, error = %Chain(&error), "no GC");
                        Ok(())
                    }
                    other => other.map_err(StepError::from),
                }
            }
        };
        released.map_err(|source| AttachError::Network {
            command: Command::Gc,
            network: holder.network.clone(),
            source: Box::new(source),
        })
    }
}

fn run_gc(
    runner: &delegate::Delegate,
    plugin: &plan::Delegate,
    in_use: &[AttachmentId],
) -> Result<(), DelegateError> {
    let mut config = plugin.config.clone();
    insert_in_use(&mut config, in_use);
    let stdin = Value::Object(config).to_string();
    let call = Call::without_container(Command::Gc, &plugin.plugin, stdin.as_bytes());
    runner.run(&call).map(drop)
}
