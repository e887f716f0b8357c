//! The looks at single attachments.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::look::Seen;
use super::shares::SHARES;
use super::{Health, INTERVAL, MOST_TROUBLES, note};
use crate::attach::Which;
use crate::cni::{CniError, code};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::firewall::Firewall;
use crate::nat::Nat;
use crate::netlink::Removed;
use crate::pace;
use crate::rpc::message::Condition;
use crate::sync::locked;

/// What a check that has failed leaves to the next one: the devices from which filters were removed. A check of all
/// attachments is not repeated at once: each share has its turn anyway, and an attachment that cannot be checked would
/// make every check one of all attachments.
fn left_over(removed: Removed) -> Removed {
    match removed {
        Removed::From(_) => removed,
        Removed::Anywhere => Removed::default(),
    }
}

impl Health {
    /// Requests a check of all attachments.
    pub(in crate::agent) fn look_at_attachments_soon(&self) {
        self.attachments.want();
    }

    /// Restores missing programs, and records the attachments that still lack theirs. Checks all
    /// attachments if a request wants this, else those on devices from which filters were removed, or those
    /// of the next share.
    pub(super) fn look_at_attachments(&self) -> Seen {
        let removed = std::mem::take(&mut *locked(&self.removed));
        let is_wanted = self.attachments.is_wanted.swap(false, Ordering::Relaxed);
        let found = match &removed {
            Removed::From(devices) if !is_wanted => self.look_at_some(devices),
            _ => {
                if removed == Removed::Anywhere {
                    self.dataplane.want();
                }
                *locked(&self.all_shares) = Some(Instant::now());
                self.look_at_shares(0..SHARES)
            }
        };
        let node = self.engine.node();
        let named = |object: &str, problem: Option<String>| {
            problem.map(|problem| Condition { object: object.to_owned(), problem })
        };
        let translation = named("translation of addresses", node.nat.as_ref().and_then(Nat::trouble));
        let forwarding = named("forwarding for pods", node.firewall.as_ref().and_then(Firewall::trouble));
        let missing: Vec<Condition> = locked(&self.shares).rows().collect();
        let rows = translation.into_iter().chain(forwarding).chain(missing);
        note("attachment is not enforced", &self.not_enforced, rows.take(MOST_TROUBLES).collect());
        let Err(error) = found else { return Ok(String::new()) };
        locked(&self.removed).extend(left_over(removed));
        Err(CniError::new(code::LIMITED_CONNECTIVITY, format!("attachments: {}", Chain(&error))))
    }

    /// Checks the attachments on these devices, and those of the next share if there are no devices or the
    /// share is overdue. A failure on the devices does not prevent the check of the share; the devices are
    /// tried again with each check.
    fn look_at_some(&self, devices: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let mut outcome = Ok(());
        if !devices.is_empty() {
            let (looked, done) = self.engine.restore_attachments(Which::On(devices), SHARES);
            if !looked.is_empty() {
                self.dataplane.want();
            }
            locked(&self.shares).merge(looked);
            outcome = done;
        }
        let next = {
            let (mut shares, now) = (locked(&self.shares), Instant::now());
            if !devices.is_empty() && !shares.is_late(now, pace::longest(INTERVAL)) {
                return outcome;
            }
            shares.next(now)
        };
        self.look_at_shares(next..next + 1).and(outcome)
    }

    /// Checks the attachments of these shares. Returns the last failure; the other shares are checked all
    /// the same.
    fn look_at_shares(&self, shares: std::ops::Range<usize>) -> Result<(), EnforceError> {
        let mut outcome = Ok(());
        for share in shares {
            let (looked, done) = self.engine.restore_attachments(Which::Share(share), SHARES);
            let mut known = locked(&self.shares);
            match done {
                Ok(()) => known.replace(share, looked),
                Err(error) => {
                    // Not one attachment was looked at: as without the descriptor or the memory for it.
                    if looked.is_empty() {
                        self.attachments.want();
                    }
                    known.merge(looked);
                    outcome = Err(error);
                }
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_leaves_devices_to_the_next_one_and_no_check_of_all_attachments() {
        let devices = Removed::From([3, 5].into());
        assert_eq!(left_over(devices.clone()), devices);
        assert_eq!(left_over(Removed::Anywhere), Removed::From(BTreeSet::new()));
    }
}
