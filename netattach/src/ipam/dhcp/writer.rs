//! The thread that writes changed leases, and removes lost addresses from pods. It is separate from the renewal
//! thread, and does not hold the lock of all leases while it waits for the disk or the kernel: however slow these
//! are, no exchange and no request for another lease waits for them. Several changes before a write cause one write.
//! A failed write, for example on a full disk, is retried: otherwise a renewed lease would count as expired after a
//! restart, and a lost address would still be used.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};

use super::Error;
use super::leases::{Next, Shared, open_namespace};
use super::record::Record;
use super::wire::now;
use crate::error_chain::Chain;
use crate::ipam::Owner;
use crate::netlink::{Handle, OpenError};

/// How long until a failed write of a lease is retried.
const AGAIN: Duration = Duration::from_secs(5);

/// A job for a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Job {
    /// Write its record.
    Write,
    /// Remove its address from the pod, for this reason.
    Lose(String),
}

/// The leases that could not be written, each with its number and the reason.
#[derive(Debug, Default)]
struct Unwritten(BTreeMap<Owner, (u64, String)>);

/// Works until the leases end and no job is left.
pub(super) fn run(shared: &Arc<Shared>) {
    let (mut unwritten, mut again) = (Unwritten::default(), None);
    loop {
        match shared.next_job(again) {
            Next::Job(owner, number, Job::Write) => unwritten.write(shared, &owner, number),
            Next::Job(owner, number, Job::Lose(why)) => lose(shared, &mut unwritten, (&owner, number), &why),
            Next::Nothing => {
                again = None;
                let all: Vec<_> =
                    unwritten.0.iter().map(|(owner, (number, _))| (owner.clone(), *number)).collect();
                all.iter().for_each(|(owner, number)| unwritten.write(shared, owner, *number));
            }
            Next::End => return,
        }
        again = if unwritten.0.is_empty() { None } else { again.or_else(|| Some(now() + AGAIN)) };
    }
}

impl Unwritten {
    /// Writes a lease, or notes and logs a new failure. A lease that has been released meanwhile needs no write.
    fn write(&mut self, shared: &Shared, owner: &Owner, number: u64) {
        let Err(error) = shared.write(owner, number) else {
            self.0.remove(owner);
            return;
        };
        let why = Chain(&error).to_string();
        if self.0.get(owner).is_none_or(|(_, before)| *before != why) {
            tracing::warn!(%owner, error = why, "lease by dhcp not written; it is tried again");
        }
        self.0.insert(owner.clone(), (number, why));
    }
}

/// Removes an address from a pod that must not use it any more: another host may have it (RFC 2131, sections 4.4.5
/// and 3.1).
fn lose(shared: &Shared, unwritten: &mut Unwritten, (owner, number): (&Owner, u64), why: &str) {
    let mut found = None;
    shared.with(owner, number, |held| {
        let before = held.record.lost.replace(why.to_owned());
        found = Some((held.record.clone(), before.is_none()));
    });
    // The lease has been released meanwhile.
    let Some((record, is_new)) = found else { return };
    if is_new {
        // Written first: so the address is not used after a kill either, and the next agent removes it.
        unwritten.write(shared, owner, number);
    }
    let is_taken = is_taken(&record, owner, why, is_new);
    // The node's routes and rules for the address are removed even if the pod still has it.
    shared.tell_lost(owner);
    shared.change(owner, number, |held| {
        held.record.is_taken = is_taken;
        held.tried = Some(now());
        held.is_busy = false;
    });
}

/// Removes the address of a lost lease from its pod, and logs that. Returns whether the address is gone.
fn is_taken(record: &Record, owner: &Owner, why: &str, is_new: bool) -> bool {
    let (network, address) = (&record.config.network, record.address);
    match take_away(record) {
        Ok(()) => {
            tracing::error!(
                %owner, network, %address, why,
                "lease by dhcp is lost: the address is removed from the pod, which has to be recreated"
            );
            true
        }
        // The address is gone with the namespace.
        Err(Error::NoNamespace) => true,
        Err(error) => {
            if is_new {
                tracing::error!(
                    %owner, network, %address, why, error = %Chain(&error),
                    "lease by dhcp is lost, and the address cannot be removed from the pod; it is tried again"
                );
            }
            false
        }
    }
}

/// Removes the address of a lease from the pod's interface.
pub(super) fn take_away(record: &Record) -> Result<(), Error> {
    let Some(terms) = &record.terms else { return Ok(()) };
    let netns = open_namespace(record)?;
    let take_away = || -> Result<(), OpenError> {
        let mut pod = Handle::open_in(&netns)?;
        let link = pod.link_by_index(record.index)?;
        // On a routed link the address has a host prefix.
        for prefix in [terms.prefix, 32] {
            let net = Ipv4Net::new(terms.address, prefix).unwrap_or_else(|_| terms.address.into());
            pod.ensure_address_absent(link.index, IpNet::V4(net))?;
        }
        Ok(())
    };
    Ok(take_away()?)
}
