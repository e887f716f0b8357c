//! Records that are gone although their sandboxes are attached: they are written anew from what is known in memory, at the
//! latest when somebody needs them. Also that of a sandbox whose DEL has begun, as what has to be finished.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::AttachError;
use super::engine::Engine;
use super::registry::Attached;
use crate::cni;
use crate::error_chain::Chain;
use crate::journal::{JournalKey, Loaded, Progress};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::undo::without_plugins;
use crate::plan::{Plan, Sandbox, result};
use crate::step::{Outputs, Step};

impl Engine {
    /// The sandboxes that have no record any more. Costs one list of the journal.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn without_record(&self) -> Result<Vec<JournalKey>, AttachError> {
        let recorded: BTreeSet<JournalKey> = self.journal.keys()?.into_iter().collect();
        let mut keys: Vec<JournalKey> = self.registry.all().iter().map(|it| it.key.clone()).collect();
        keys.retain(|key| !recorded.contains(key));
        Ok(keys)
    }

    /// Writes the record of a sandbox anew, in the container's turn, and returns whether there was none. What is kept of
    /// it in memory is enough to roll it back, unless another plugin made a part of it. If its DEL has failed, the record is one
    /// of a removal that is to go on: a DEL without a record is a success, and nobody would finish it.
    ///
    /// # Errors
    /// It is there and was edited; it cannot be written; or it needs the configuration of another plugin, which is lost with it.
    pub fn write_record_anew(&self, key: &JournalKey) -> Result<bool, AttachError> {
        let Some(attached) = self.registry.get(key) else { return Ok(false) };
        if self.check_record(key)? {
            return Ok(false);
        }
        let Attached { plan, outputs, netns_cookie, .. } = &*attached;
        if let Some((at, attachment, _)) = plan.steps().find(|(_, _, step)| matches!(step, Step::Delegate(_)))
        {
            tracing::debug!(?at, "the configuration of another plugin is lost");
            return Err(AttachError::RecordLost {
                container: key.container_id.clone(),
                plugin: attachment.kind.clone(),
            });
        }
        let result = self.registry.stays(key).map(|attached| result_of(&attached)).transpose()?;
        self.write_whole(key, (plan, outputs, *netns_cookie), result)?;
        Ok(true)
    }

    /// As [`Engine::write_record_anew`] where that cannot, of a sandbox whose removal begins: without the calls of other plugins,
    /// so that all else is taken back.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write_removal_without_plugins(&self, key: &JournalKey) -> Result<(), AttachError> {
        let Some(attached) = self.registry.get(key) else { return Ok(()) };
        let (plan, outputs) = without_plugins(&attached.plan, &attached.outputs);
        self.write_whole(key, (&plan, &outputs, attached.netns_cookie), None)?;
        self.registry.leaves(key);
        Ok(())
    }

    /// Writes the record of a removal again that went before the addresses which it names, as these could not be given back: by it
    /// the next DEL goes on. With what configuration another plugin is to be called nothing else says.
    /// `of`: its plan, what the steps have come to, and the cookie of its namespace.
    pub(super) fn write_removal_again(&self, key: &JournalKey, of: (&Plan, &Outputs, Option<u64>)) {
        if let Err(error) = self.write_whole(key, of, None) {
            let container = &key.container_id;
            tracing::warn!(container, error = %Chain(&error), "cannot rewrite the record of an unfinished DEL");
        }
    }

    /// Writes a record with all that a sandbox has come to. `result`: what the runtime has received; `None`: it is being removed.
    fn write_whole(
        &self,
        key: &JournalKey,
        (plan, outputs, cookie): (&Plan, &Outputs, Option<u64>),
        result: Option<cni::Value>,
    ) -> Result<(), AttachError> {
        let progress = Progress { netns_cookie: cookie_of(&plan.sandbox, cookie)?, outputs, result };
        let mut record = self.journal.create_whole(key.clone(), plan.clone(), progress)?;
        // What is kept in memory says what was claimed.
        if let Err(error) = self.note_returned(&mut record) {
            tracing::debug!(error = %Chain(&error), "the return of a device is recorded later");
            self.node.devices.stays_unwritten(key);
        }
        Ok(())
    }

    /// The record of a sandbox. Where it is gone although the sandbox is attached, as far as is known in memory, it is written
    /// anew first: without one a DEL would be a success that releases nothing, and an ADD take the sandbox for its own failure.
    ///
    /// # Errors
    /// The record cannot be read, and those of [`Engine::write_record_anew`].
    pub(super) fn load_known(&self, key: &JournalKey) -> Result<Loaded, AttachError> {
        let loaded = self.journal.load(key)?;
        if matches!(loaded, Loaded::Absent) && self.write_record_anew(key)? {
            return Ok(self.journal.load(key)?);
        }
        Ok(loaded)
    }

    /// As [`Engine::load_known`], for a DEL: what only the record knew of other plugins is lost, and to fail for it would bring
    /// nothing back. All else is known, and nobody would repeat the DEL for it.
    pub(super) fn load_to_release(&self, key: &JournalKey) -> Result<Loaded, AttachError> {
        match self.load_known(key) {
            Err(error @ AttachError::RecordLost { .. }) => {
                let container = &key.container_id;
                tracing::warn!(container, error = %Chain(&error), "rolling back everything else");
                self.write_removal_without_plugins(key)?;
                Ok(self.journal.load(key)?)
            }
            loaded => loaded,
        }
    }

    /// As [`Engine::load_known`], for an ADD. What is lost of an earlier namespace keeps nobody from attaching another.
    pub(super) fn load_to_attach(&self, key: &JournalKey, netns: &Netns) -> Result<Loaded, AttachError> {
        let is_elsewhere = |attached: Arc<Attached>| attached.plan.sandbox.netns_id != netns.id();
        match self.load_known(key) {
            Err(AttachError::RecordLost { .. }) if self.registry.get(key).is_none_or(is_elsewhere) => {
                Ok(Loaded::Absent)
            }
            loaded => loaded,
        }
    }
}

/// The result that the runtime has received, in the newest version.
fn result_of(attached: &Attached) -> Result<cni::Value, cni::CniError> {
    let Attached { plan, outputs, .. } = attached;
    let first = plan.attachments.first();
    let result = first.map(|first| result::as_reported(&plan.sandbox, first, outputs.of(0))).transpose()?;
    cni::result::in_version(&result.unwrap_or_default(), cni::Version::LATEST)
}

/// The cookie of a sandbox's namespace; 0: it is gone, and what is left of the sandbox is on the node. `known`: what it was, which
/// the namespace of another pod by now does not have.
fn cookie_of(sandbox: &Sandbox, known: Option<u64>) -> Result<u64, AttachError> {
    match Netns::of(&sandbox.netns, sandbox.netns_id, known)? {
        Some(netns) => Ok(Handle::open_in(&netns)?.netns_cookie()),
        None => Ok(0),
    }
}
