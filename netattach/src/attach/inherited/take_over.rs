//! Live sandboxes that another plugin attached: they get a record without a network of its own, and further
//! attachments are made as for any live sandbox.

use std::path::PathBuf;
use std::sync::Arc;

use crate::attach::engine::Engine;
use crate::attach::{AttachError, Attached};
use crate::cni::{self, Value};
use crate::error_chain::Chain;
use crate::journal::{JournalError, JournalKey};
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsError};
use crate::plan::{Plan, Sandbox};

impl Engine {
    /// Records a live sandbox that another plugin attached. Its DEL rolls back all later attachments, and the other
    /// plugin's attachment as far as libcni's cache contains it.
    ///
    /// # Errors
    /// The container has a record, its namespace is another one or the node's, or the record cannot be written.
    pub fn take_over(&self, sandbox: Sandbox) -> Result<(), AttachError> {
        let path = PathBuf::from(&sandbox.netns);
        let netns = Netns::open(&path)?;
        if netns.id() == self.own {
            return Err(AttachError::HostNetns { path });
        }
        if netns.id() != sandbox.netns_id {
            return Err(NetnsError::Gone { path }.into());
        }
        let known = self.journal.keys()?.into_iter().find(|key| key.container_id == sandbox.container_id);
        if let Some(known) = known {
            return Err(JournalError::Exists(known).into());
        }
        let cookie = Handle::open_in(&netns)?.netns_cookie();
        let result = cni::result::in_version(&Value::Null, cni::Version::LATEST)?;
        let key = JournalKey { container_id: sandbox.container_id.clone(), ifname: sandbox.ifname.clone() };
        let mut record =
            self.journal.create(key, Plan { sandbox, attachments: Vec::new(), dynamic: None })?;
        crate::crash_point!("take over", "planned");
        if let Err(error) = record.note_namespace(cookie).and_then(|()| record.attached(result)) {
            // Nothing was done: a restart would remove the record too.
            if let Err(left) = record.remove() {
                tracing::warn!(error = %Chain(&left), "record without attachments not removed");
            }
            return Err(error.into());
        }
        self.registry.insert(Arc::new(Attached::from(&record)));
        Ok(())
    }

    /// Returns the number of records that cannot be read, or are not as they were written: their sandboxes are
    /// unknown.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn unreadable_records(&self) -> Result<usize, AttachError> {
        let unknown = self.journal.keys()?.into_iter().filter(|key| self.registry.get(key).is_none());
        Ok(unknown.filter(|key| !self.journal.can_read(key)).count())
    }
}
