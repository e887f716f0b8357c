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
}

/// The elements that are wanted, and how often.
type Users = BTreeMap<Element, usize>;

impl Table {
    /// The table of the agent with that state directory.
    pub(super) fn new(owner: &str) -> Self {
        Self { owner: owner.to_owned(), ..Self::default() }
    }

    /// Takes the table of an earlier agent over: replaces it by one with these elements, or removes it if there are
    /// none. Without `all`, elements that nobody wants stay, as somebody may.
    pub(super) fn begin(&mut self, users: &Users, all: bool) -> Result<(), NatError> {
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
        self.check_owner()?;
        let mut kept: Users = nat::all_elements()?.into_iter().map(|element| (element, 1)).collect();
        // What an attachment wants counts, where the table says something else. One that is not known may follow the
        // exceptions of the node.
        let has_exceptions = users.keys().any(exceptions::is_of_list);
        kept.retain(|element, _| !(has_exceptions && exceptions::is_of_list(element)));
        kept.retain(|element, _| {
            let same = |other: &&Element| other.set == element.set && other.key == element.key;
            users.keys().find(same).is_none_or(|wanted| wanted == element)
        });
        kept.extend(users.iter().map(|(element, users)| (element.clone(), *users)));
        self.has_strangers = true;
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
        if users.is_empty() && !self.has_strangers {
            self.shape = None;
            let is_gone = gone.is_empty() || nat::comment_of_another(&self.owner)?.is_some();
            return if is_gone { Ok(()) } else { Ok(nat::uninstall()?) };
        }
        if self.shape.is_none() {
            return self.install(users);
        }
        if gone.is_empty() && new.is_empty() {
            return Ok(());
        }
        match nat::change(gone, new) {
            // The table is gone, or an element to remove, or another has the place of one: somebody else has changed it.
            Err(error) if error.not_found() || is_occupied(&error) => self.install(users),
            other => Ok(other?),
        }
    }

    /// Puts back what is missing; returns whether something was. `allowed` says whether what others have removed may be put back
    /// now.
    pub(super) fn repair(
        &mut self,
        users: &Users,
        allowed: impl FnOnce() -> Result<(), NatError>,
    ) -> Result<bool, NatError> {
        if users.is_empty() {
            return Ok(false);
        }
        let generation = filter_generation()?;
        if self.shape.is_some() && self.seen == Some(generation) {
            return Ok(false);
        }
        self.seen = None;
        if self.shape.is_none() {
            self.install(users)?;
            return Ok(true);
        }
        if self.shape != Some(nat::shape()?) {
            allowed()?;
            self.install(users)?;
            return Ok(true);
        }
        let found = nat::all_elements()?;
        let missing: Vec<&Element> = users.keys().filter(|element| !found.contains(element)).collect();
        if missing.is_empty() {
            // Later changes are handled at the next call.
            self.seen = Some(generation);
            return Ok(false);
        }
        allowed()?;
        match nat::change([], missing) {
            // Another element has the place of one.
            Err(error) if error.not_found() || is_occupied(&error) => self.install(users)?,
            other => other?,
        }
        Ok(true)
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

    fn install(&mut self, users: &Users) -> Result<(), NatError> {
        self.shape = None;
        self.check_owner()?;
        nat::install(&self.owner, users.keys())?;
        self.seen = None;
        self.shape = Some(nat::shape()?);
        Ok(())
    }

    /// A table has one agent: each replaces it as a whole when it starts.
    fn check_owner(&self) -> Result<(), NatError> {
        nat::comment_of_another(&self.owner)?.map_or(Ok(()), |comment| Err(NatError::Foreign { comment }))
    }
}

fn is_occupied(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::BUSY | Errno::EXIST | Errno::NOTEMPTY))
}
