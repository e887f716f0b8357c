//! Announces an attachment's addresses to its neighbours after its ADD has been answered.
//!
//! A neighbour may still map an address to the Ethernet address of the pod that had it before. The announcement goes
//! to all stations on the segment, so its cost grows with the number of pods there, and the ADD need not wait for it:
//! the runtime has yet to start the containers.
//!
//! IPv6 addresses are announced during the ADD: the request for the announcement flushes the pod's neighbour table,
//! which is harmless as long as no process runs in the pod. Those of an ipvlan are announced here ([`advertise`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::advertise::advertise;
use crate::attach::{AttachError, Doing, Engine, StepError};
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::addressing::{Announcement, advertised, announcement};
use crate::plan::{AttachmentPlan, routing};
use crate::spec::Link;
use crate::step::{Brought, Interface, MadeBy, Output, Step};

impl Engine {
    /// Announces the IPv4 addresses of the attachments in that record, and the IPv6 ones of ipvlans. Attachments that
    /// were detached, or whose namespace or interface is gone, need no announcement. Repeating the call only repeats
    /// the announcement.
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
            let Some(announced) = announced(attachment, outputs)? else { continue };
            let pod = match &mut pod {
                Some(pod) => pod,
                None => match Handle::open_in_that(&netns, attached.netns_cookie)? {
                    Some(opened) => pod.insert(opened),
                    None => return Ok(()),
                },
            };
            tell((&netns, pod), &announced).map_err(|source| {
                AttachError::step(Doing::Attach, attachment, "announce addresses", source)
            })?;
        }
        Ok(())
    }
}

/// The addresses of an interface in a pod that are announced after the ADD.
struct Announced<'o> {
    interface: &'o Interface,
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// Returns the addresses of an attachment that are announced, if there are any.
fn announced<'o>(
    attachment: &AttachmentPlan,
    outputs: Brought<'o>,
) -> Result<Option<Announced<'o>>, AttachError> {
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
            let made_by = attachment.made_by();
            let is_told = match announcement(made_by, &addressing, true) {
                Announcement::Never => false,
                Announcement::Late => true,
                // The ADD has announced them, but not the Ethernet address that the parent of an ipvlan has got since.
                Announcement::AtOnce => matches!(made_by, MadeBy::Link(Link::Ipvlan(_))),
            };
            let mut announced = Announced { interface, v4: Vec::new(), v6: Vec::new() };
            for address in &addressing.addresses {
                match address.addr() {
                    IpAddr::V4(address) if is_told => announced.v4.push(address),
                    IpAddr::V6(address) if advertised(made_by) => announced.v6.push(address),
                    IpAddr::V4(_) | IpAddr::V6(_) => {}
                }
            }
            let has_some = !announced.v4.is_empty() || !announced.v6.is_empty();
            return Ok(has_some.then_some(announced));
        }
    }
    Ok(None)
}

fn tell((netns, pod): (&Netns, &mut Handle), announced: &Announced<'_>) -> Result<(), StepError> {
    let Announced { interface, v4, v6 } = announced;
    // The pod may have renamed or replaced its interface.
    let Some(link) = pod.find_link(&interface.name)?.filter(|link| link.index == interface.index) else {
        return Ok(());
    };
    if let Some(mac) = link.mac.filter(|_| !v6.is_empty())
        && let Err(error) = advertise(netns, (link.index, mac), v6)?
    {
        tracing::debug!(device = interface.name, error = %Chain(&error), "IPv6 addresses not announced");
    }
    if v4.is_empty() {
        return Ok(());
    }
    match pod.announce(link.index, v4) {
        Err(error) if error.not_found() => Ok(()),
        other => Ok(other?),
    }
}
