//! The table in the kernel: what is in it, and what should be.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use rustix::io::Errno;

use super::{NatError, exceptions};
use crate::netlink::nat::{self, Element, Set, Shape};
use crate::netlink::{Error, filter_generation};

/// How often the table is read while others change it.
const TRIES: u32 = 5;

/// The table as it was left.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Whose it is: the agent's state directory.
    owner: String,
    /// Its chains and rules as the kernel showed them when they had been made; `None`: they have to be made.
    shape: Option<Shape>,
    /// The packet filter's generation when the table was seen to be as it should.
    seen: Option<u32>,
    /// The table may have elements of attachments whose records could not be read.
    has_strangers: bool,
    /// The kernel may have another table than is recorded here, because [`Table::begin`] has failed half way, or nobody knows whether
    /// a transaction was carried out. It is begun anew before anything else is done: `Some(all)`, as there.
    pending: Option<bool>,
}

/// What a look at the table has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repaired {
    /// It is as it should be.
    Nothing,
    /// It was begun anew, as that had failed.
    BegunAnew,
    /// Something was missing, and is there again.
    PutBack,
}

/// The elements that are wanted, and how often.
type Users = BTreeMap<Element, usize>;

impl Table {
    /// The table of the agent with that state directory.
    pub(super) fn new(owner: &str) -> Self {
        Self { owner: owner.to_owned(), ..Self::default() }
    }

    /// Takes the table of an earlier agent over: replaces it by one with these elements, or removes it if there are
    /// none. Without `all`, elements that nobody wants stay, as somebody may. Where it fails, whichever call comes next begins anew.
    pub(super) fn begin(&mut self, users: &Users, all: bool) -> Result<(), NatError> {
        self.begin_without(users, &[], all)
    }

    /// As [`Table::begin`]; `gone` goes in any case.
    fn begin_without(&mut self, users: &Users, gone: &[Element], all: bool) -> Result<(), NatError> {
        self.pending = Some(all);
        self.has_strangers = !all;
        self.shape = None;
        self.take_over(users, gone, all)?;
        self.pending = None;
        Ok(())
    }

    fn take_over(&mut self, users: &Users, gone: &[Element], all: bool) -> Result<(), NatError> {
        if all {
            return match users.is_empty() {
                // Without nftables there is no table.
                true if nat::shape()?.is_empty() => Ok(()),
                // Another agent's is of no concern while nothing is wanted.
                true if nat::comment_of_another(&self.owner)?.is_some() => Ok(()),
                true => Ok(nat::uninstall()?),
                false => self.install(users),
            };
        }
        if users.is_empty() && (nat::shape()?.is_empty() || nat::comment_of_another(&self.owner)?.is_some()) {
            return Ok(());
        }
        self.check_owner()?;
        let mut kept: Users = nat::all_elements()?.into_iter().map(|element| (element, 1)).collect();
        kept.retain(|element, _| !gone.contains(element));
        // What an attachment wants counts, where the table says something else. One that is not known may follow the
        // exceptions of the node.
        let has_exceptions = users.keys().any(exceptions::is_of_list);
        kept.retain(|element, _| !(has_exceptions && exceptions::is_of_list(element)));
        kept.retain(|element, _| {
            let same = |other: &&Element| other.set == element.set && other.key == element.key;
            users.keys().find(same).is_none_or(|wanted| wanted == element)
        });
        kept.extend(users.iter().map(|(element, users)| (element.clone(), *users)));
        if kept.is_empty() { Ok(()) } else { self.install(&kept) }
    }

    /// The exceptions of the node that the kernel has; none where there is no table.
    pub(super) fn exceptions() -> Result<Vec<IpNet>, Error> {
        let read = || Ok([nat::elements(Set::Prefixes4)?, nat::elements(Set::Prefixes6)?]);
        let mut found = read();
        for _ in 1..TRIES {
            match &found {
                Err(Error::Interrupted(_)) => found = read(),
                _ => break,
            }
        }
        Ok(found?.iter().flat_map(exceptions::nets_of).collect())
    }

    /// Removes elements and adds others; `users` are all that are wanted afterwards.
    pub(super) fn change(
        &mut self,
        users: &Users,
        gone: &[Element],
        new: &[Element],
    ) -> Result<(), NatError> {
        if let Some(all) = self.pending {
            return self.begin_without(users, gone, all);
        }
        if users.is_empty() && !self.has_strangers {
            self.shape = None;
            let is_gone = gone.is_empty() || nat::comment_of_another(&self.owner)?.is_some();
            return if is_gone { Ok(()) } else { self.known(nat::uninstall()) };
        }
        if self.shape.is_none() {
            return self.make(users, gone);
        }
        if gone.is_empty() && new.is_empty() {
            return Ok(());
        }
        match nat::change(gone, new) {
            // The table is gone, or an element to remove, or another has the place of one: somebody else has changed it.
            Err(error) if error.not_found() || is_occupied(&error) => self.make(users, gone),
            other => self.known(other),
        }
    }

    /// Puts back what is missing. `allowed` says whether what others have removed may be put back now.
    pub(super) fn repair(
        &mut self,
        users: &Users,
        allowed: impl FnOnce() -> Result<(), NatError>,
    ) -> Result<Repaired, NatError> {
        if let Some(all) = self.pending {
            self.begin(users, all)?;
            return Ok(Repaired::BegunAnew);
        }
        if users.is_empty() {
            return Ok(Repaired::Nothing);
        }
        let generation = filter_generation()?;
        if self.shape.is_some() && self.seen == Some(generation) {
            return Ok(Repaired::Nothing);
        }
        self.seen = None;
        if self.shape.is_none() {
            self.make(users, &[])?;
            return Ok(Repaired::PutBack);
        }
        if self.shape != Some(nat::shape()?) {
            allowed()?;
            self.make(users, &[])?;
            return Ok(Repaired::PutBack);
        }
        let found = nat::all_elements()?;
        let missing: Vec<&Element> = users.keys().filter(|element| !found.contains(element)).collect();
        if missing.is_empty() {
            // Later changes are handled at the next call.
            self.seen = Some(generation);
            return Ok(Repaired::Nothing);
        }
        allowed()?;
        match nat::change([], missing) {
            // Another element has the place of one.
            Err(error) if error.not_found() || is_occupied(&error) => self.make(users, &[])?,
            other => self.known(other)?,
        }
        Ok(Repaired::PutBack)
    }

    /// The first of the elements that the kernel does not have.
    pub(super) fn missing(&self, wanted: &BTreeSet<Element>) -> Result<Option<Element>, Error> {
        for set in Set::ALL {
            let mut of_set = wanted.iter().filter(|element| element.set == set).peekable();
            if of_set.peek().is_none() {
                continue;
            }
            let found = nat::elements(set)?;
            if let Some(missing) = of_set.find(|element| !found.contains(element)) {
                return Ok(Some(missing.clone()));
            }
        }
        Ok(None)
    }

    /// Makes the table anew: with what is wanted, and with what is there but for `gone`, where that may be of somebody who is not
    /// known.
    fn make(&mut self, users: &Users, gone: &[Element]) -> Result<(), NatError> {
        if self.has_strangers { self.begin_without(users, gone, false) } else { self.install(users) }
    }

    fn install(&mut self, users: &Users) -> Result<(), NatError> {
        self.shape = None;
        self.check_owner()?;
        self.known(nat::install(&self.owner, users.keys()))?;
        self.seen = None;
        // The table is there. Where its shape cannot be read now, because others are changing the packet filter, the next call
        // makes it once more.
        self.shape = nat::shape().ok();
        Ok(())
    }

    /// What a transaction has come to. It is carried out as a whole or not at all, but where its answer is lost nobody knows which.
    fn known(&mut self, done: Result<(), Error>) -> Result<(), NatError> {
        if done.as_ref().is_err_and(|error| !matches!(error, Error::Refused(_) | Error::Send(..))) {
            self.pending = self.pending.or(Some(!self.has_strangers));
        }
        Ok(done?)
    }

    /// A table has one agent: each replaces it as a whole when it starts.
    fn check_owner(&self) -> Result<(), NatError> {
        nat::comment_of_another(&self.owner)?.map_or(Ok(()), |comment| Err(NatError::Foreign { comment }))
    }
}

fn is_occupied(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::BUSY | Errno::EXIST | Errno::NOTEMPTY))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::wish::Wish;
    use super::*;
    use crate::netns::{Netns, within};
    use crate::step::LeasedAddress;

    /// What the masquerade of that address takes.
    fn masqueraded(address: &str) -> Users {
        let asked = json!({"device": "br0", "bridged": true, "masquerade": []});
        let leased = [LeasedAddress { address: address.parse().unwrap(), gateway: None }];
        let wish = Wish::new(&serde_json::from_value(asked).unwrap(), &leased).unwrap();
        wish.elements.into_iter().map(|element| (element, 1)).collect()
    }

    fn not_asked() -> Result<(), NatError> {
        panic!("nothing is put back that another program has removed")
    }

    /// Somebody else's table is in the way at first. Needs root, like the agent.
    #[test]
    fn what_has_failed_to_begin_is_begun_anew_by_whichever_call_comes_next() {
        let (stranger, own) = (masqueraded("10.1.0.2/24"), masqueraded("10.1.0.3/24"));
        let elements = |of: &Users| of.keys().cloned().collect::<BTreeSet<_>>();
        let begun_in_vain = |all| {
            nat::install("other", stranger.keys()).unwrap();
            let mut table = Table::new("own");
            let begun = table.begin(&own, all);
            assert!(matches!(begun, Err(NatError::Foreign { .. })), "{begun:?}");
            assert_eq!(table.pending, Some(all));
            // That agent goes, and what is left is of an earlier one of the same directory.
            nat::install("own", stranger.keys()).unwrap();
            table
        };
        within(&Netns::private().unwrap(), || {
            // Every record was read: what nobody wants goes.
            let mut table = begun_in_vain(true);
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::BegunAnew);
            assert_eq!(nat::all_elements().unwrap(), elements(&own));
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::Nothing);
            let mut table = begun_in_vain(true);
            table.change(&own, &[], &[]).unwrap();
            assert_eq!(nat::all_elements().unwrap(), elements(&own));
            let mut table = begun_in_vain(true);
            assert_eq!(table.repair(&Users::new(), not_asked).unwrap(), Repaired::BegunAnew);
            assert!(nat::shape().unwrap().is_empty());
            // Not every record was: what nobody is known to want stays, but for what goes just now.
            let both = elements(&stranger).union(&elements(&own)).cloned().collect::<BTreeSet<_>>();
            let mut table = begun_in_vain(false);
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::BegunAnew);
            assert_eq!(nat::all_elements().unwrap(), both);
            let mut table = begun_in_vain(false);
            table.change(&own, &[], &[]).unwrap();
            assert_eq!(nat::all_elements().unwrap(), both);
            let mut table = begun_in_vain(false);
            let gone: Vec<Element> = stranger.keys().filter(|it| !own.contains_key(it)).cloned().collect();
            table.change(&own, &gone, &[]).unwrap();
            assert_eq!((nat::all_elements().unwrap(), table.pending), (elements(&own), None));
        })
        .unwrap();
    }

    #[test]
    fn a_transaction_whose_answer_is_lost_is_begun_anew_and_one_that_was_refused_is_not() {
        use crate::netlink::Refused;

        let lost = || Error::Malformed { request: "NFT_MSG_NEWSETELEM", what: "the kernel did not answer" };
        let refused =
            || Error::from(Refused { request: "NFT_MSG_NEWSETELEM", errno: libc::ENOENT, text: None });
        let after = |has_strangers: bool, done: Result<(), Error>| {
            let mut table = Table { has_strangers, ..Table::new("own") };
            // What it comes to is the caller's.
            let _ = table.known(done);
            table.pending
        };
        assert_eq!([after(false, Ok(())), after(false, Err(refused()))], [None, None]);
        assert_eq!([after(false, Err(lost())), after(true, Err(lost()))], [Some(true), Some(false)]);
    }
}
