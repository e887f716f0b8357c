//! Takes over the records that an earlier agent has left: attached sandboxes are adopted, the others are rolled back.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::AttachError;
use super::apply::{admit, translation};
use super::device::representor;
use super::engine::{Engine, is_whole, leased_from};
use super::reconcile::enforcement::guards;
use super::reconcile::parents::{follow_at_start, follows_a_parent};
use super::registry::Attached;
use crate::enforce::attachment::EnforcedAttachment;
use crate::error_chain::Chain;
use crate::ipam::{Patience, Pool};
use crate::journal::{JournalKey, Loaded, Record, RecordState};
use crate::moment::Moment;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::{self, AttachmentPlan};
use crate::step::Step;
use crate::waits;

/// Age, since planning, from which on a record's addresses have certainly been announced: longer than the slowest ADD
/// (plugins have up to 600 s) plus the kubelet's longest back-off before it restarts an agent (300 s).
const YOUNG: Duration = Duration::from_secs(900);

/// The state found at start.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Attached sandboxes that were adopted unchanged.
    pub adopted: usize,
    /// Records to roll back: of sandboxes that are partly attached or partly detached, or of an earlier boot.
    pub unfinished: Vec<JournalKey>,
    /// Attached records whose addresses are to be announced, because an earlier agent may have ended before it did:
    /// recent ones, and those that follow parents, which may have got another Ethernet address at any time.
    pub unannounced: Vec<JournalKey>,
    /// Records that could not be recovered and are kept, with the problem of each.
    pub left_alone: Vec<(JournalKey, String)>,
    /// Errors of the dataplane while taking over attachments.
    pub unenforced: Vec<String>,
    /// Errors of damaged records whose sandboxes were adopted unchanged.
    pub damaged: Vec<String>,
}

impl Recovery {
    /// Whether everything was taken over, except for records to roll back.
    pub fn is_whole(&self) -> bool {
        self.left_alone.is_empty() && self.unenforced.is_empty()
    }

    /// Returns whether `outcome` is a success; stores a failure with the record's key.
    fn note(&mut self, key: &JournalKey, outcome: Result<(), AttachError>) -> bool {
        let Err(error) = outcome else { return true };
        let problem = Chain(&error).to_string();
        self.left_alone.push((key.clone(), problem));
        false
    }
}

impl Engine {
    /// Compares the journal with the machine after a start, and adopts complete sandboxes. The others stay registered
    /// with the dataplane if they were registered, so that policies stay enforced on their remaining interfaces until
    /// [`Engine::finish`] has rolled them back.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn adopt(&self) -> Result<Recovery, AttachError> {
        let mut recovery = Recovery::default();
        let (mut guarded, mut unfinished) = (Vec::new(), Vec::new());
        let mut torn = Vec::new();
        let mut pools = BTreeSet::new();
        let mut is_all_known = true;
        self.journal.remove_unfinished()?;
        let enforcer = self.node.enforcer.as_ref();
        let recorded: BTreeSet<u32> =
            enforcer.map(|it| it.recorded()).unwrap_or_default().into_iter().collect();
        for key in self.journal.keys()? {
            match self.journal.load(&key) {
                Ok(Loaded::Absent) => {}
                // A torn record can only be judged when the owners of all other resources are known.
                Ok(Loaded::Torn { earlier_boot }) => torn.push((key, earlier_boot)),
                Ok(Loaded::Whole(record)) => {
                    if !record.is_of_earlier_boot() {
                        self.node.devices.adopt(&record);
                    }
                    pools.extend(leased_from(&record.plan));
                    let outcome = self.adopt_record(&record, &recorded, &mut recovery, &mut guarded);
                    // An unfinished record that is left alone keeps its addresses; one that is rolled back may still
                    // have them.
                    let is_left = outcome.is_err();
                    let had_begun = !is_whole(&record) && may_have_addresses(&record, &recorded);
                    unfinished.extend((is_left || had_begun).then(|| Attached::from(&*record)));
                    is_all_known &= recovery.note(&key, outcome);
                }
                Err(error) => is_all_known &= recovery.note(&key, Err(error.into())),
            }
        }
        let by_earlier_boot = torn.iter().filter(|(_, earlier_boot)| *earlier_boot);
        self.journal.keep_torn(by_earlier_boot.map(|(key, _)| key));
        self.note_boot();
        unfinished.iter().for_each(|attached| self.node.occupied.adopt(attached));
        for (key, earlier_boot) in torn {
            let outcome = if earlier_boot { Ok(()) } else { self.check_torn(&key, None) };
            let may_go = recovery.note(&key, outcome);
            is_all_known &= may_go;
            recovery.unfinished.extend(may_go.then_some(key));
        }
        if is_all_known {
            self.forget_pools(&pools);
        }
        if let Some(nat) = &self.node.nat
            && let Err(error) = nat.begin(is_all_known)
        {
            // Retried once a second; pods keep the rules of an earlier agent.
            tracing::error!(error = %Chain(&error), "translation of addresses not taken over");
        }
        if let Some(firewall) = &self.node.firewall
            && let Err(error) = firewall.begin(is_all_known)
        {
            // As above.
            tracing::error!(error = %Chain(&error), "forwarding for pods not taken over");
        }
        if let Some(enforcer) = &self.node.enforcer {
            // An unreadable record may belong to a live attachment: then no map entry may be treated as stale, and no
            // number in the maps as free.
            if !is_all_known {
                self.registry.hold_numbers(recorded);
            }
            // The claims of all records are known now. A representor belongs to the newest claim of its VF: an older
            // record, whose DEL is still to come, must not attach programs of an attachment that has ended.
            guarded.retain(|it| !it.is_on_representor() || self.node.devices.is_newest(it.id));
            follow_at_start(enforcer.as_ref(), &mut guarded);
            for error in enforcer.adopt(&guarded, is_all_known) {
                recovery.unenforced.push(Chain(&error).to_string());
            }
            if is_all_known && let Err(error) = representor::sweep(&self.node) {
                tracing::error!(error = %Chain(&error), "cannot check representors for programs without a record");
            }
        }
        Ok(recovery)
    }

    /// Adopts the sandbox of a record, or marks the record to be rolled back. A damaged record of this boot may
    /// belong to a live sandbox: it is adopted if all its attachments are known, and left alone otherwise.
    fn adopt_record(
        &self,
        record: &Record,
        recorded: &BTreeSet<u32>,
        recovery: &mut Recovery,
        guarded: &mut Vec<EnforcedAttachment>,
    ) -> Result<(), AttachError> {
        // The record's numbers stay reserved until it is rolled back.
        self.registry.hold(&record.plan);
        let goes_on = is_whole(record);
        let begun = known_ids(record, recorded);
        let is_begun = |of: &AttachmentPlan| of.number().is_some_and(|id| begun.contains(&id));
        if let Some(firewall) = &self.node.firewall {
            // A damaged record may belong to a live sandbox.
            let has_all = goes_on || record.check_whole().is_err();
            admit::adopt(firewall, record, has_all, &is_begun);
        }
        let keeps_numbers = record.is_of_earlier_boot() || (goes_on && record.is_complete());
        if !keeps_numbers {
            record.check_whole()?;
        }
        let of_record = guards(&record.plan, &record.outputs, record.netns_cookie);
        let of_record = of_record.filter(|(of, _)| is_begun(of));
        guarded.extend(of_record.map(|(_, guarded)| guarded));
        if goes_on {
            let attached = Attached::from(record);
            self.node.occupied.adopt(&attached);
            if let Some(nat) = &self.node.nat {
                translation::adopt(nat, record);
            }
            let may_lack_it = may_be_unannounced(&attached, &record.planned, &self.journal.now());
            recovery.unannounced.extend(may_lack_it.then(|| record.key.clone()));
            self.registry.insert(Arc::new(attached));
            recovery.adopted += 1;
            recovery.damaged.extend(record.check_whole().err().map(|error| Chain(&error).to_string()));
        } else {
            if let Some(nat) = &self.node.nat {
                translation::guard(nat, record);
            }
            recovery.unfinished.push(record.key.clone());
        }
        Ok(())
    }

    /// Notes that [`Engine::adopt`] has processed the records of an earlier boot: a record that is torn later is of
    /// this boot. Call this again when there may be space on the disk.
    pub fn note_boot(&self) {
        if let Err(error) = self.journal.note_boot() {
            tracing::warn!(error = %Chain(&error), "boot not noted: the next start may keep what an earlier boot has torn");
        }
    }

    /// Rolls back a record that an earlier agent left unfinished, and returns whether there was one. The caller holds
    /// the container's turn.
    ///
    /// # Errors
    /// The inverses that failed. The record is kept, and DEL may be repeated.
    pub fn finish(&self, key: &JournalKey) -> Result<bool, AttachError> {
        match self.journal.load(key)? {
            Loaded::Absent => Ok(false),
            Loaded::Torn { earlier_boot } => self.clear_torn(key, earlier_boot, None).map(|()| true),
            Loaded::Whole(record) if is_whole(&record) => Ok(false),
            Loaded::Whole(record) => self.roll_back_left(*record).map(|()| true),
        }
    }

    /// Rolls back a record that a killed process may have left. Such a process may have entered a VF in sriov-cni's
    /// files for a claim that it has not recorded: the entry would keep the VF from others while the pod lives.
    ///
    /// # Errors
    /// As for [`Engine::finish`].
    pub(super) fn roll_back_left(&self, record: Record) -> Result<(), AttachError> {
        for (at, _, step) in record.plan.steps() {
            let Step::ClaimDevice(device) = step else { continue };
            let is_unrecorded = record.has_begun(at) && !record.outputs.contains_key(&at);
            if is_unrecorded && let Err(error) = self.node.devices.unmark(device, &record.plan.sandbox) {
                tracing::warn!(device = %device.id, error = %Chain(&error), "sriov-cni's files may name the pod");
            }
        }
        self.roll_back(record)
    }

    /// Cleans up after a record whose plan was never completely written: releases the leases that the container may
    /// hold after a power failure. Leases of interfaces with other records of the container are kept.
    pub(super) fn clear_torn(
        &self,
        key: &JournalKey,
        earlier_boot: bool,
        netns: Option<&Netns>,
    ) -> Result<(), AttachError> {
        if !earlier_boot {
            self.check_torn(key, netns)?;
        }
        let keep = self.interfaces_beside(key)?;
        for pool in self.journal.pools() {
            let release = || self.node.leases.release_container(&pool, &key.container_id, &keep);
            waits::at_pool(Some(pool.clone()), release).map_err(AttachError::TornLease)?;
        }
        let released = self.node.leases.release_to_servers(&key.container_id, &keep);
        released.map_err(AttachError::TornLease)?;
        self.journal.discard(key)?;
        Ok(())
    }

    /// Returns the interfaces in other records of the container.
    fn interfaces_beside(&self, key: &JournalKey) -> Result<Vec<String>, AttachError> {
        let mut keep = Vec::new();
        for other in self
            .journal
            .keys()?
            .iter()
            .filter(|other| other.container_id == key.container_id && *other != key)
        {
            if let Loaded::Whole(record) = self.journal.load(other)? {
                keep.extend(record.plan.attachments.iter().map(|attachment| attachment.ifname.clone()));
            }
        }
        Ok(keep)
    }

    /// Checks that a torn record of this boot means that no step began. A lease of the sandbox, from a pool or a
    /// server, or a link of it shows that the record has lost its plan.
    ///
    /// # Errors
    /// `JournalError::Damaged`, with the trace that was found; or the sandbox could not be examined.
    fn check_torn(&self, key: &JournalKey, netns: Option<&Netns>) -> Result<(), AttachError> {
        match self.trace_of(key, &self.interfaces_beside(key)?, netns)? {
            Some(what) => Err(self.journal.emptied(key, what).into()),
            None => Ok(()),
        }
    }

    fn trace_of(
        &self,
        key: &JournalKey,
        keep: &[String],
        netns: Option<&Netns>,
    ) -> Result<Option<String>, AttachError> {
        let holds =
            |address: IpAddr| Some(format!("it has no plan, but its container holds address {address}"));
        for pool in self.journal.pools() {
            let held = || self.node.leases.held(&pool, &key.container_id, keep);
            let held = waits::at_pool(Some(pool.clone()), held);
            if let Some(address) = held.map_err(AttachError::TornLease)?.into_iter().next() {
                return Ok(holds(address));
            }
        }
        if let Some(address) = self.node.leases.held_by_server(&key.container_id, keep) {
            return Ok(holds(address));
        }
        let group = plan::link_group(&key.container_id, &key.ifname);
        let mut handles = vec![Handle::open().map_err(|error| AttachError::Open(error.into()))?];
        if let Some(netns) = netns {
            handles.push(Handle::open_in(netns)?);
        }
        for mut handle in handles {
            let links = match handle.links() {
                // The pod has created too many links to read all. A link that exists only in the pod is deleted with
                // it.
                Err(error) if error.is_too_many() => continue,
                links => links.map_err(|error| AttachError::Open(error.into()))?,
            };
            if let Some(link) = links.iter().find(|link| link.group == group) {
                return Ok(Some(format!("it has no plan, but its link {} exists", link.name)));
            }
        }
        Ok(None)
    }

    /// Returns those noted pools whose directories are on another file system than the records: for them, no journal
    /// keeps the order in which a record and its leases are created, and a loss of power may take the record alone.
    /// Asks each pool's file system, which may hang.
    pub fn pools_elsewhere(&self) -> Vec<PathBuf> {
        let device = |path: &Path| std::fs::metadata(path).ok().map(|it| it.dev());
        let Some(own) = device(self.journal.directory()) else { return Vec::new() };
        let is_elsewhere = |path: &PathBuf| device(path).is_some_and(|its| its != own);
        self.journal.pools().iter().map(Pool::path).filter(is_elsewhere).collect()
    }

    /// Forgets unneeded pools, if there are many more than after the last check.
    pub fn forget_unused_pools(&self) {
        if !self.journal.has_many_pools() {
            return;
        }
        let all = self.registry.all();
        // Pools of other records contain no leases, or their leases are found in the pools.
        self.forget_pools(&all.iter().flat_map(|attached| leased_from(&attached.plan)).collect());
    }

    /// Forgets those pools that no record names and that contain no leases, if there are many. `named`: the pools in
    /// records.
    fn forget_pools(&self, named: &BTreeSet<Pool>) {
        // A pool that cannot be read may contain leases.
        let is_empty = |pool: &Pool| {
            self.node.leases.holders(pool, Patience::Look).is_ok_and(|holders| holders.is_empty())
        };
        match self.journal.keep_pools(|pool| named.contains(pool) || !is_empty(pool)) {
            Ok(0) => {}
            Ok(forgotten) => {
                tracing::info!(forgotten, "empty pools are no longer checked")
            }
            Err(error) => tracing::warn!(error = %Chain(&error), "unused pools not forgotten"),
        }
    }
}

/// Returns the numbers of a record whose steps may have had an effect in the dataplane. Devices of an earlier boot
/// may belong to others now, so such a record has none.
fn begun_ids(record: &Record) -> impl Iterator<Item = u32> {
    let of_this_boot = !record.is_of_earlier_boot();
    let begun = record.plan.steps().filter(move |(at, ..)| of_this_boot && record.has_begun(*at));
    begun.filter_map(|(_, _, step)| match step {
        Step::Protect(protect) => Some(protect.id),
        _ => None,
    })
}

/// Returns the numbers of a record to register with the dataplane. If the record is not attached and a number is not
/// `recorded` in the maps, an agent may have ended during its rollback, and its addresses may have other holders.
fn known_ids(record: &Record, recorded: &BTreeSet<u32>) -> BTreeSet<u32> {
    let is_there = |id: &u32| record.state == RecordState::Attached || recorded.contains(id);
    begun_ids(record).filter(is_there).collect()
}

/// Whether an earlier agent may have ended before it announced the addresses of a sandbox: after its ADD, or after it
/// followed a parent.
fn may_be_unannounced(attached: &Attached, planned: &Moment, now: &Moment) -> bool {
    planned.is_within(YOUNG, now) || follows_a_parent(attached)
}

/// Whether a record that is to be rolled back may still have its addresses.
fn may_have_addresses(record: &Record, recorded: &BTreeSet<u32>) -> bool {
    let is_there = |id: u32| record.state != RecordState::Removing || recorded.contains(&id);
    begun_ids(record).any(is_there)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::spec::{Ipvlan, IpvlanMode, Link};
    use crate::step::Outputs;

    /// An agent may be killed after it has followed a parent, and before the announcement; no record tells.
    #[test]
    fn a_start_announces_young_sandboxes_and_all_that_follow_a_parent() {
        let attached = |link: Option<Link>| {
            let mut plan = rig::plan(Path::new("/nonexistent"), "a", 1);
            plan.attachments[0].steps.extend(link.map(Step::CreateLink));
            let (key, outputs) = (rig::key("a"), Outputs::default());
            Attached { key, plan, outputs, netns_cookie: None, planned: None }
        };
        let ipvlan = |in_pod| {
            let (pod_name, mode) = ("net1".to_owned(), IpvlanMode::L2);
            Some(Link::Ipvlan(Ipvlan { pod_name, parent: None, mode, mtu: None, group: 0, in_pod }))
        };
        let at = |since: Duration| Moment {
            boot: "this".to_owned(),
            since_boot: Some(u64::try_from(since.as_nanos()).unwrap()),
        };
        let found = |link, age| {
            let planned = Duration::from_secs(60);
            may_be_unannounced(&attached(link), &at(planned), &at(planned + age))
        };
        assert!(found(None, YOUNG) && found(ipvlan(false), YOUNG));
        let old = YOUNG + Duration::from_secs(1);
        assert_eq!([None, ipvlan(true), ipvlan(false)].map(|link| found(link, old)), [false, false, true]);
    }

    #[test]
    fn pools_on_another_file_system_than_the_records_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let journal = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, journal, &crate::sync::Arc::default());
        std::fs::create_dir_all(directory.join("pools/net")).unwrap();
        for (data_dir, network) in [(directory.join("pools"), "net"), (directory.join("pools"), "gone")] {
            engine.journal.note_pool(Pool::directory(data_dir, network)).unwrap();
        }
        assert_eq!(engine.pools_elsewhere(), Vec::<PathBuf>::new());
        engine.journal.note_pool(Pool::directory("/proc", "sys")).unwrap();
        assert_eq!(engine.pools_elsewhere(), [PathBuf::from("/proc/sys")]);
    }
}
