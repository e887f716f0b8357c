//! The programs on parents of macvlans by tcx links.
//!
//! A filter's class tells a program on which hook of which kind of device it is, see `netattach-ebpf/src/parent.rs`. A link
//! has none, so each place has a program of its own ([`Entry`]).

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::AsFd;

use aya::programs::ProgramFd;

use super::BpfError;
use super::dataplane::open_program;
use super::links::{Links, Place};
use super::pin::{Entry, Pins, Program};

/// The links on parents, and what they run.
pub struct ParentLinks {
    /// In the order of [`Entry::ALL`].
    programs: [ProgramFd; 3],
    links: Links,
}

impl ParentLinks {
    pub(super) fn open(pins: &Pins, links: Links) -> Result<Self, BpfError> {
        let open = |entry| open_program(&pins.program(Program::Entry(entry)));
        let [first, second, third] = Entry::ALL;
        Ok(Self { programs: [open(first)?, open(second)?, open(third)?], links })
    }

    /// Runs the programs on a parent by tcx links, which are pinned. Those that run there already are replaced in one step
    /// each.
    ///
    /// # Errors
    /// [`BpfError::AttachLink`]: before Linux 6.6, or the device is gone.
    pub fn attach(&self, parent: u32) -> Result<(), BpfError> {
        let each = Entry::ALL.into_iter().zip(&self.programs);
        each.into_iter()
            .try_for_each(|(entry, program)| self.links.ensure(at(parent, entry), program.as_fd()))
    }

    /// The first of the programs that no link runs on a parent.
    ///
    /// # Errors
    /// The pins cannot be looked at.
    pub fn missing(&self, parent: u32) -> Result<Option<&'static str>, BpfError> {
        for entry in Entry::ALL {
            if self.links.find(at(parent, entry))?.is_none() {
                return Ok(Some(Program::Entry(entry).name()));
            }
        }
        Ok(None)
    }

    /// Takes a parent's links away. Idempotent. On a device that is still there each takes a grace period.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn detach(&self, parent: u32) -> Result<(), BpfError> {
        Entry::ALL.into_iter().try_for_each(|entry| self.links.remove(at(parent, entry)))
    }

    /// The parents that links are pinned for, whether they are still there or not.
    ///
    /// # Errors
    /// The pins cannot be listed.
    pub fn parents(&self) -> Result<BTreeSet<u32>, BpfError> {
        let mut parents = BTreeSet::new();
        for entry in Entry::ALL {
            parents.extend(self.links.devices_with(Program::Entry(entry))?);
        }
        Ok(parents)
    }
}

impl fmt::Debug for ParentLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParentLinks").field("links", &self.links).finish_non_exhaustive()
    }
}

/// A link on a parent.
const fn at(parent: u32, entry: Entry) -> Place {
    Place::Node { ifindex: parent, program: Program::Entry(entry) }
}
