//! The maps of policies behind their lock, and the policies of each attachment.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::maps::MapData;
use netattach_common::PolicyIds;

use super::map_table::map_name;
use super::pin::Pins;
use super::policies::Policies;
use super::sys::SharedWords;
use super::{BpfError, Config};
use crate::policy::diff::DENY_ALL;
use crate::policy::lookup::{CompiledPolicy, RuleId};

/// Installed policies, and the pair of policies that each attachment is under.
pub struct PolicyMaps {
    policies: Mutex<Policies>,
    /// `na_policy`, mapped: a word for each attachment.
    words: SharedWords,
}

impl PolicyMaps {
    pub(super) fn open(pins: &Pins, config: &Config) -> Result<Self, BpfError> {
        let policies = Mutex::new(Policies::open(pins, config)?);
        Ok(Self { policies, words: map_words(pins, config.max_attachments)? })
    }

    /// Puts both directions of an attachment under new policies in one atomic step. The policies must be
    /// installed.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn set(&self, id: u32, policies: PolicyIds) -> Result<(), BpfError> {
        let written = if id == 0 { None } else { self.words.set(id, policies.to_word()) };
        written.ok_or_else(|| self.out_of_range(id))?;
        crate::crash_point!("map", map_name::POLICY);
        Ok(())
    }

    /// The policies of an attachment.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn of(&self, id: u32) -> Result<PolicyIds, BpfError> {
        self.words.get(id).map(PolicyIds::from_word).ok_or_else(|| self.out_of_range(id))
    }

    /// Returns a policy number that neither this agent nor an earlier one has used.
    ///
    /// # Errors
    /// Numbers are used up, or the map cannot be written.
    pub fn allocate(&self) -> Result<u32, BpfError> {
        self.lock().allocate()
    }

    /// Marks this policy number and all below it as used: no later agent allocates them.
    ///
    /// # Errors
    /// `last` is above the highest number, or the map cannot be written.
    pub fn use_up(&self, last: u32) -> Result<(), BpfError> {
        self.lock().use_up(last)
    }

    /// Writes policies under numbers that nothing refers to yet, each completely or not at all. Returns those
    /// that do not fit, with the reason ([`BpfError::OverCapacity`]).
    ///
    /// # Errors
    /// A number is 0 or in use, or a map cannot be written: then none of them is installed.
    pub fn install(&self, policies: &[(u32, &CompiledPolicy)]) -> Result<BTreeMap<u32, BpfError>, BpfError> {
        self.lock().install(policies)
    }

    /// Returns those of these policies, by number and content, whose exact content is in the maps: an earlier
    /// agent wrote them, and they need not be written again.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn holding(&self, policies: &[(u32, &CompiledPolicy)]) -> Result<BTreeSet<u32>, BpfError> {
        self.lock().holding(policies)
    }

    /// Deletes the entries of policies. Nothing may refer to them any more. Idempotent.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn remove(&self, policies: &BTreeSet<u32>) -> Result<(), BpfError> {
        self.lock().remove(policies)
    }

    /// The policies with entries in the maps, for sweeping those that nothing refers to.
    pub fn installed(&self) -> BTreeSet<u32> {
        self.lock().installed()
    }

    /// Returns the number of flows that each rule has allowed since its policy was installed, by policy.
    /// Leaves out rules that have allowed none, and rules for whose counter there was no room.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn rule_flows(&self) -> Result<BTreeMap<u32, BTreeMap<RuleId, u64>>, BpfError> {
        self.lock().rule_flows()
    }

    /// The lowest policy number above all that attachments refer to, for the case that `na_cfg` was lost.
    pub(super) fn first_unused(&self) -> u32 {
        first_unused((0..self.words.len()).filter_map(|id| self.words.get(id)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Policies> {
        // No lock is poisoned: a panic ends the agent.
        self.policies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn out_of_range(&self, id: u32) -> BpfError {
        BpfError::InvalidAttachment { id, max: self.words.len().saturating_sub(1) }
    }
}

impl fmt::Debug for PolicyMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyMaps").field("words", &self.words).finish_non_exhaustive()
    }
}

fn first_unused(words: impl Iterator<Item = u64>) -> u32 {
    let ids = words.map(PolicyIds::from_word).flat_map(|ids| [ids.ingress, ids.egress]);
    // Complete isolation has a reserved number.
    let highest = ids.filter(|id| *id != DENY_ALL).max();
    highest.map_or(1, |highest| highest.saturating_add(1))
}

fn map_words(pins: &Pins, len: u32) -> Result<SharedWords, BpfError> {
    let path = pins.map(map_name::POLICY);
    let data = MapData::from_pin(&path).map_err(|source| BpfError::OpenMap { path, source })?;
    SharedWords::map(data.fd().as_fd(), len as usize).map_err(BpfError::MapPolicyWords)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_number_is_above_all_that_are_in_use_but_that_of_complete_isolation() {
        let under = |ingress, egress| PolicyIds { ingress, egress }.to_word();
        let table: [(&[u64], u32); 5] = [
            (&[], 1),
            (&[under(0, 0)], 1),
            (&[under(3, 0), under(0, 7), under(2, 2)], 8),
            (&[under(DENY_ALL, DENY_ALL)], 1),
            (&[under(4, 0), under(DENY_ALL, 5)], 6),
        ];
        for (words, expected) in table {
            assert_eq!(first_unused(words.iter().copied()), expected, "{words:x?}");
        }
    }
}
