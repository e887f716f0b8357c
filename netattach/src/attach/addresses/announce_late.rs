//! Announces an attachment's addresses to its neighbours after its ADD has been answered.
//!
//! A neighbour may still map an address to the Ethernet address of the pod that had it before. The announcement goes
//! to all stations on the segment, so its cost grows with the number of pods there, and the ADD need not wait for it:
//! the runtime has yet to start the containers.
//!
//! IPv6 addresses are announced during the ADD: the request for the announcement flushes the pod's neighbour table,
//! which is harmless as long as no process runs in the pod.

use std::net::{IpAddr, Ipv4Addr};

use crate::attach::{AttachError, Doing, Engine, StepError};
use crate::journal::JournalKey;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::addressing::{Announcement, announcement};
use crate::plan::{AttachmentPlan, routing};
use crate::step::{Brought, Interface, Output, Step};

impl Engine {
    /// Announces the IPv4 addresses of the attachments in that record. Attachments that were detached, or whose
    /// namespace or interface is gone, need no announcement. Repeating the call only repeats the announcement.
    ///
    /// Does not check whether the addresses were announced before: only a restarted agent does not know this, and
    /// only of recent records; and reading that setting takes time proportional to the number of pods with an
    /// interface of that name (`proc_sys_compare` searches the entries of all network namespaces).
    ///
    /// # Errors
    /// The kernel refuses, or does not report whether the namespace exists.
    pub fn announce(&self, record: &JournalKey) -> Result<(), AttachError> {
        let Some(attached) = self.registry.get(record) else { return Ok(()) };
        let sandbox = &attached.plan.sandbox;
        let netns = Netns::of(&sandbox.netns, sandbox.netns_id, None)?;
        let Some(netns) = netns else { return Ok(()) };
        let mut pod = None;
        for (number, attachment) in attached.plan.attachments.iter().enumerate() {
            // Attachment numbers fit into a `u16`: see `Plan::steps`.
            let outputs = attached.outputs.of(number as u16);
            let Some((interface, addresses)) = announced(attachment, outputs)? else { continue };
            let pod = match &mut pod {
                Some(pod) => pod,
                None => match Handle::open_in_that(&netns, attached.netns_cookie)? {
                    Some(opened) => pod.insert(opened),
                    None => return Ok(()),
                },
            };
            tell(pod, interface, &addresses).map_err(|source| {
                AttachError::step(Doing::Attach, attachment, "announce addresses", source)
            })?;
        }
        Ok(())
    }
}

/// Returns the interface in the pod whose addresses are announced, and the addresses, if there are any.
fn announced<'o>(
    attachment: &AttachmentPlan,
    outputs: Brought<'o>,
) -> Result<Option<(&'o Interface, Vec<Ipv4Addr>)>, AttachError> {
    let mut interface = None;
    for (index, step) in attachment.steps.iter().enumerate() {
        let Some(output) = outputs.step(index) else { break };
        if let Output::Link { pod, .. } = output {
            interface = Some(pod);
        }
        if let (Step::Configure(configure), Some(interface)) = (step, interface)
            && !configure.down
        {
            let addressing = routing::settled(attachment, outputs, configure)?;
            if announcement(attachment.made_by(), &addressing, true) != Announcement::Late {
                return Ok(None);
            }
            let v4 = addressing.addresses.iter().filter_map(|address| match address.addr() {
                IpAddr::V4(address) => Some(address),
                IpAddr::V6(_) => None,
            });
            return Ok(Some((interface, v4.collect())));
        }
    }
    Ok(None)
}

fn tell(pod: &mut Handle, wanted: &Interface, addresses: &[Ipv4Addr]) -> Result<(), StepError> {
    // The pod may have renamed or replaced its interface.
    let Some(link) = pod.find_link(&wanted.name)?.filter(|link| link.index == wanted.index) else {
        return Ok(());
    };
    match pod.announce(link.index, addresses) {
        Err(error) if error.not_found() => Ok(()),
        other => Ok(other?),
    }
}
