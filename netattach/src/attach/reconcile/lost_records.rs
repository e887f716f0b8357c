//! Rewrites records that are gone although their sandboxes are attached, from the state in memory, at the latest when
//! an operation needs them. Includes the record of a sandbox whose DEL has begun, so that the DEL can be completed.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::attach::AttachError;
use crate::attach::engine::Engine;
use crate::attach::registry::Attached;
use crate::cni;
use crate::error_chain::Chain;
use crate::journal::{JournalKey, Loaded, Progress};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::undo::without_plugins;
use crate::plan::{Plan, Sandbox, result};
use crate::step::{Outputs, Step};

impl Engine {
    /// Returns the sandboxes whose record is gone. Costs one listing of the journal.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn without_record(&self) -> Result<Vec<JournalKey>, AttachError> {
        let recorded: BTreeSet<JournalKey> = self.journal.keys()?.into_iter().collect();
        let mut keys: Vec<JournalKey> = self.registry.all().iter().map(|it| it.key.clone()).collect();
        keys.retain(|key| !recorded.contains(key));
        Ok(keys)
    }

    /// Rewrites the record of a sandbox, in the container's turn, and returns whether it was missing. The state in
    /// memory suffices to roll the sandbox back, unless another plugin made a part of it. If its DEL has failed, the
    /// new record is one of a removal to be continued: without a record, a DEL succeeds without completing the
    /// removal.
    ///
    /// # Errors
    /// The record exists and was edited; the record cannot be written; or it needs the configuration of another
    /// plugin, which is lost.
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

    /// Writes a record of a sandbox whose removal begins, when [`Engine::write_record_anew`] cannot: without the
    /// calls of other plugins, so that everything else is undone.
    ///
    /// # Errors
    /// The record cannot be written.
    fn write_removal_without_plugins(&self, key: &JournalKey) -> Result<(), AttachError> {
        let Some(attached) = self.registry.get(key) else { return Ok(()) };
        let (plan, outputs) = without_plugins(&attached.plan, &attached.outputs);
        self.write_whole(key, (&plan, &outputs, attached.netns_cookie), None)?;
        self.registry.leaves(key);
        Ok(())
    }

    /// Rewrites the record of a removal whose addresses could not be released after the record was removed, so that
    /// the next DEL continues. Only this record contains the configurations for calls of other plugins. `of`: the
    /// plan, the outputs of its steps, and the cookie of the namespace.
    pub(in crate::attach) fn write_removal_again(
        &self,
        key: &JournalKey,
        of: (&Plan, &Outputs, Option<u64>),
    ) {
        if let Err(error) = self.write_whole(key, of, None) {
            let container = &key.container_id;
            tracing::warn!(container, error = %Chain(&error), "cannot rewrite the record of an unfinished DEL");
        }
    }

    /// Writes a record with the whole progress of a sandbox. `result`: the result that the runtime received; `None`:
    /// the sandbox is being removed.
    fn write_whole(
        &self,
        key: &JournalKey,
        (plan, outputs, cookie): (&Plan, &Outputs, Option<u64>),
        result: Option<cni::Value>,
    ) -> Result<(), AttachError> {
        let progress = Progress { netns_cookie: cookie_of(&plan.sandbox, cookie)?, outputs, result };
        let mut record = self.journal.create_whole(key.clone(), plan.clone(), progress)?;
        // The outputs in memory contain the claims.
        if let Err(error) = self.note_returned(&mut record) {
            tracing::debug!(error = %Chain(&error), "the return of a device is recorded later");
            self.node.devices.stays_unwritten(key);
        }
        Ok(())
    }

    /// Loads the record of a sandbox. If the record is gone although the sandbox is attached according to memory,
    /// rewrites it first: without a record, a DEL would succeed without releasing anything, and an ADD would fail
    /// because of what it finds.
    ///
    /// # Errors
    /// The record cannot be read, or [`Engine::write_record_anew`] fails.
    pub(in crate::attach) fn load_known(&self, key: &JournalKey) -> Result<Loaded, AttachError> {
        let loaded = self.journal.load(key)?;
        if matches!(loaded, Loaded::Absent) && self.write_record_anew(key)? {
            return Ok(self.journal.load(key)?);
        }
        Ok(loaded)
    }

    /// Like [`Engine::load_known`], for a DEL: what only the record contained about other plugins is lost, and an
    /// error would not restore it. Everything else is known and is undone, as no later DEL may come.
    pub(in crate::attach) fn load_to_release(&self, key: &JournalKey) -> Result<Loaded, AttachError> {
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

    /// Like [`Engine::load_known`], for an ADD. Data lost about an earlier namespace does not prevent attaching
    /// another one.
    pub(in crate::attach) fn load_to_attach(
        &self,
        key: &JournalKey,
        netns: &Netns,
    ) -> Result<Loaded, AttachError> {
        let is_elsewhere = |attached: Arc<Attached>| attached.plan.sandbox.netns_id != netns.id();
        match self.load_known(key) {
            Err(AttachError::RecordLost { .. }) if self.registry.get(key).is_none_or(is_elsewhere) => {
                Ok(Loaded::Absent)
            }
            loaded => loaded,
        }
    }
}

/// Returns the result that the runtime received, in the newest version.
fn result_of(attached: &Attached) -> Result<cni::Value, cni::CniError> {
    let Attached { plan, outputs, .. } = attached;
    let first = plan.attachments.first();
    let result = first.map(|first| result::as_reported(&plan.sandbox, first, outputs.of(0))).transpose()?;
    cni::result::in_version(&result.unwrap_or_default(), cni::Version::LATEST)
}

/// Returns the cookie of a sandbox's namespace; 0: the namespace is gone, and only node objects are left of the
/// sandbox. `known`: the former cookie, which distinguishes the namespace from another pod's.
fn cookie_of(sandbox: &Sandbox, known: Option<u64>) -> Result<u64, AttachError> {
    match Netns::of(&sandbox.netns, sandbox.netns_id, known)? {
        Some(netns) => Ok(Handle::open_in(&netns)?.netns_cookie()),
        None => Ok(0),
    }
}
