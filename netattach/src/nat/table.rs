//! The table in the kernel: what is in it, and what should be.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;

use crate::netlink::nat::{self, Element, Set, Shape};
use crate::netlink::{Error, filter_generation};

/// The table as it was left.
#[derive(Debug, Default)]
pub(super) struct Table {
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
    /// Takes the table of an earlier agent over: replaces it by one with these elements, or removes it if there are
    /// none. Without `all`, elements that nobody wants stay, as somebody may.
    pub(super) fn begin(&mut self, users: &Users, all: bool) -> Result<(), Error> {
        if all {
            return match (users.is_empty(), nat::shape()) {
                // Without nftables there is no table.
                (true, Ok(shape)) if shape.is_empty() => Ok(()),
                (true, Err(error)) => Err(error),
                (true, Ok(_)) => nat::uninstall(),
                (false, _) => self.install(users),
            };
        }
        let mut kept: Users = nat::all_elements()?.into_iter().map(|element| (element, 1)).collect();
        // What an attachment wants counts, where the table says something else.
        kept.retain(|element, _| {
            let same = |other: &&Element| other.set == element.set && other.key == element.key;
            users.keys().find(same).is_none_or(|wanted| wanted == element)
        });
        kept.extend(users.iter().map(|(element, users)| (element.clone(), *users)));
        self.has_strangers = true;
        if kept.is_empty() { Ok(()) } else { self.install(&kept) }
    }

    /// Removes elements and adds others; `users` are all that are wanted afterwards.
    pub(super) fn change(&mut self, users: &Users, gone: &[Element], new: &[Element]) -> Result<(), Error> {
        if users.is_empty() && !self.has_strangers {
            self.shape = None;
            return if gone.is_empty() { Ok(()) } else { nat::uninstall() };
        }
        if self.shape.is_none() {
            return self.install(users);
        }
        if gone.is_empty() && new.is_empty() {
            return Ok(());
        }
        match nat::change(gone, new) {
            // The table is gone, or an element to remove: somebody else has changed it.
            Err(error) if error.not_found() => self.install(users),
            other => other,
        }
    }

    /// Puts back what is missing; returns whether something was.
    pub(super) fn repair(&mut self, users: &Users) -> Result<bool, Error> {
        if users.is_empty() {
            return Ok(false);
        }
        let generation = filter_generation()?;
        if self.shape.is_some() && self.seen == Some(generation) {
            return Ok(false);
        }
        self.seen = None;
        if self.shape.is_none() || self.shape != Some(nat::shape()?) {
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

    fn install(&mut self, users: &Users) -> Result<(), Error> {
        self.shape = None;
        nat::install(users.keys())?;
        self.seen = None;
        self.shape = Some(nat::shape()?);
        Ok(())
    }
}

fn is_occupied(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::BUSY | Errno::EXIST | Errno::NOTEMPTY))
}
