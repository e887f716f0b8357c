//! Attachments added to and removed from a live sandbox.
//!
//! Each attachment has a record of its own, under its own interface name, and goes through the same steps as the
//! attachments of an ADD: a crash at any point leaves the same state as a crash in an ADD. The record names the
//! sandbox; CHECK of the sandbox covers it, and DEL of the sandbox rolls it back first.

use std::sync::Arc;

use super::engine::Engine;
use super::{AttachError, Attached, facts};
use crate::cni::{self, CniError, Value, code};
use crate::journal::{JournalKey, Loaded, Record};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::npwg::{self, Selection};
use crate::plan::resolve::{Network, one_more, wishes};
use crate::plan::{Dynamic, Sandbox, pools};

impl Engine {
    /// Attaches the sandbox of that record to one more network, under the interface name in the selection or a free
    /// one. Returns the result in the newest version.
    ///
    /// # Errors
    /// The sandbox is not attached, the name is taken, or any error of ADD. Everything done has been rolled back.
    pub fn attach(
        &self,
        sandbox: &JournalKey,
        by: &str,
        wanted: &(Selection, Network),
    ) -> Result<(Value, Arc<Attached>), AttachError> {
        let (record, netns) = self.attached(sandbox)?;
        let ifname = self.name_for(&record, &netns, &wanted.0)?;
        let dynamic = Dynamic { sandbox: sandbox.ifname.clone(), by: by.to_owned() };
        let named = Sandbox { ifname: ifname.clone(), ..record.plan.sandbox.clone() };
        let of_pod = self.registry.with_dynamic(sandbox);
        let held = of_pod.iter().map(|attached| attached.plan.attachments.len()).sum();
        let mut numbers = self.registry.reserve_more(held);
        let live = self.registry.pools_of(std::iter::once(&wanted.1.name));
        let settled = live.get(&wanted.1.name).and_then(|live| pools::keep(&wanted.1, live));
        let wanted = &match settled {
            Some((network, kept)) => {
                tracing::warn!(network = %kept.network, "{kept}");
                (wanted.0.clone(), network)
            }
            None => wanted.clone(),
        };
        let facts = facts::gather(&wishes([(Some(&wanted.0), &wanted.1)], &self.options))?;
        let given = (&self.options, &facts);
        let plan = one_more(named, dynamic, wanted, given, self.numbers(&mut numbers))?;
        let key = JournalKey { container_id: sandbox.container_id.clone(), ifname };
        self.carry_out(key, plan, numbers, &netns, cni::Version::LATEST)
    }

    /// Rolls back an attachment made by [`Engine::attach`], and returns whether there was one.
    ///
    /// # Errors
    /// The interface came with its sandbox; or some inverses failed, and the call may be repeated.
    pub fn detach(&self, sandbox: &JournalKey, ifname: &str) -> Result<bool, AttachError> {
        let key = JournalKey { container_id: sandbox.container_id.clone(), ifname: ifname.to_owned() };
        let not_dynamic =
            || AttachError::NotDynamic { container: key.container_id.clone(), ifname: ifname.to_owned() };
        if let Some(attached) = self.registry.get(sandbox)
            && attached.plan.attachments.iter().any(|attachment| attachment.ifname == ifname)
        {
            return Err(not_dynamic());
        }
        match self.load_known(&key)? {
            Loaded::Absent | Loaded::Torn { .. } => Ok(false),
            Loaded::Whole(record) if record.plan.dynamic.is_none() => Err(not_dynamic()),
            Loaded::Whole(record) => self.roll_back(*record).map(|()| true),
        }
    }

    /// Rolls back all dynamic attachments of the sandbox whose records can be read.
    pub(super) fn detach_all(&self, sandbox: &JournalKey) -> Result<(), AttachError> {
        let known = self.registry.dynamic_of(sandbox);
        let lost = known.iter().map(|attached| &attached.key).filter(|key| !self.has_record(key));
        let mut errors: Vec<AttachError> = lost.filter_map(|key| self.load_to_release(key).err()).collect();
        let (records, unread) = self.dynamic_of(sandbox);
        errors.extend(unread);
        errors.extend(records.into_iter().filter_map(|record| self.roll_back(record).err()));
        if errors.is_empty() { Ok(()) } else { Err(AttachError::Undo(errors)) }
    }

    /// Returns the records of the sandbox's dynamic attachments, the newest first, and the errors of unreadable
    /// records of its container, which may be such.
    pub(super) fn dynamic_of(&self, sandbox: &JournalKey) -> (Vec<Record>, Vec<AttachError>) {
        let keys = match self.journal.keys() {
            Ok(keys) => keys,
            Err(error) => return (Vec::new(), vec![error.into()]),
        };
        let (mut records, mut errors) = (Vec::new(), Vec::new());
        for key in keys {
            if key.container_id != sandbox.container_id || key == *sandbox {
                continue;
            }
            match self.journal.load(&key) {
                Ok(Loaded::Whole(record))
                    if record.plan.dynamic.as_ref().is_some_and(|it| it.sandbox == sandbox.ifname) =>
                {
                    records.push(*record);
                }
                // A torn record belongs to an attachment that never began, or is cleaned up at the next start.
                Ok(_) => {}
                Err(error) => errors.push(error.into()),
            }
        }
        records.sort_by_key(|record| std::cmp::Reverse(record.planned.since_boot));
        (records, errors)
    }

    /// Returns an interface name that neither the pod nor any record of the container uses.
    fn name_for(&self, record: &Record, netns: &Netns, selection: &Selection) -> Result<String, AttachError> {
        let container = &record.key.container_id;
        let mut taken: Vec<String> = Handle::open_in(netns)?
            .links()
            .map_err(|error| AttachError::Open(error.into()))?
            .into_iter()
            .map(|link| link.name)
            .collect();
        for attached in self.registry.all().iter().filter(|attached| attached.key.container_id == *container)
        {
            taken.extend(attached.plan.attachments.iter().map(|attachment| attachment.ifname.clone()));
        }
        let keys = self.journal.keys()?.into_iter().filter(|key| key.container_id == *container);
        taken.extend(keys.map(|key| key.ifname));
        if let Some(name) = selection.interface.as_ref().filter(|name| taken.contains(name)) {
            return Err(AttachError::NameTaken { container: container.clone(), ifname: name.clone() });
        }
        let taken: Vec<&str> = taken.iter().map(String::as_str).collect();
        let names = npwg::interface_names(std::slice::from_ref(selection), &taken)
            .map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))?;
        Ok(names.into_iter().collect())
    }
}
