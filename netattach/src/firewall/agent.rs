//! What the agent's attachments have in the tables, and the look that puts back what others remove.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::settle::{Note, Wanted, settle};
use super::{FirewallError, Owner, Settled, admit, carry_out, dismiss};
use crate::error_chain::Chain;
use crate::netlink;
use crate::step::Admitted;

/// The rules of the agent's attachments.
#[derive(Debug)]
pub struct Firewall {
    owner: Owner,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the comment of its rules.
    wanted: BTreeMap<String, Admitted>,
    /// Whether every record could be read: what nobody wants belongs to nobody.
    is_all_known: bool,
    /// Whether rules of nobody have been taken back.
    has_begun: bool,
    /// The packet filter's generation in which everything was right.
    right_in: Option<u32>,
    /// Why the rules are not as they should be.
    trouble: Option<String>,
}

impl Firewall {
    /// The rules of the agent with that state directory.
    pub fn new(state: &str) -> Self {
        Self { owner: Owner::agent(state), state: Mutex::default() }
    }

    /// Who writes the rules.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Takes over what an attachment of an earlier agent has. Nothing is written before [`Firewall::begin`].
    pub fn adopt(&self, note: String, admitted: Admitted) {
        self.lock().wanted.entry(note).or_insert(admitted);
    }

    /// Makes the rules those that the adopted attachments have. `all`: every record could be read, so what nobody has belongs
    /// to nobody.
    ///
    /// # Errors
    /// The kernel refuses. [`Firewall::repair`] tries again.
    pub fn begin(&self, all: bool) -> Result<(), FirewallError> {
        self.lock().is_all_known = all;
        self.repair().map(drop)
    }

    /// Gives an attachment what it is to have. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. What has been done is taken back by [`Firewall::detach`].
    pub fn attach(&self, note: String, admitted: Admitted) -> Result<(), FirewallError> {
        let mut state = self.lock();
        admit(&note, &admitted)?;
        state.wanted.insert(note, admitted);
        Ok(())
    }

    /// Takes back what an attachment has, whether or not it is known. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. Nothing has changed then.
    pub fn detach(&self, note: &str) -> Result<(), FirewallError> {
        let mut state = self.lock();
        dismiss(note)?;
        state.wanted.remove(note);
        Ok(())
    }

    /// Puts back what another program has removed. Returns whether there was something.
    ///
    /// # Errors
    /// The kernel does not answer, or refuses.
    pub fn repair(&self) -> Result<bool, FirewallError> {
        let mut state = self.lock();
        let repaired = state.repair(&self.owner);
        state.trouble = repaired.as_ref().err().map(|error| Chain(error).to_string());
        repaired
    }

    /// Why the rules are not as they should be.
    pub fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two writes leaves a state that the next look repairs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn repair(&mut self, owner: &Owner) -> Result<bool, FirewallError> {
        if self.has_begun && self.wanted.is_empty() {
            return Ok(false);
        }
        let is_right = || netlink::filter_generation().is_ok_and(|now| self.right_in == Some(now));
        if self.has_begun && is_right() {
            return Ok(false);
        }
        let known = &self.wanted;
        let wanted: Vec<Wanted<'_>> =
            known.iter().map(|(note, admitted)| Wanted { note, admitted }).collect();
        let is_gone = |note: &Note<'_>| {
            note.owner == owner.0 && self.is_all_known && !known.contains_key(note.attachment)
        };
        let Settled { changed, generation } = carry_out(|view| settle(view, &wanted, &is_gone))?;
        self.right_in = generation;
        self.has_begun = true;
        Ok(changed)
    }
}
