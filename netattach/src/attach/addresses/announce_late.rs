//! Announces an attachment's addresses to its neighbours after its ADD has been answered.
//!
//! A neighbour may still map an address to the Ethernet address of the pod that had it before. The announcement goes
//! to all stations on the segment, so its cost grows with the number of pods there, and the ADD need not wait for it:
//! the runtime has yet to start the containers.
//!
//! IPv6 addresses are announced during the ADD: the request for the announcement flushes the pod's neighbour table,
//! which is harmless as long as no process runs in the pod. All those of an ipvlan are announced here
//! ([`advertise`](super::advertise)).

use std::collections::BTreeSet;
use std::net::IpAddr;

use tokio::sync::Notify;

use super::advertise::{Sender, Told};
use crate::attach::{AttachError, Doing, Engine, StepError};
use crate::journal::JournalKey;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::addressing::{Announcement, advertised, announcement};
use crate::plan::{AttachmentPlan, routing};
use crate::spec::{Addressing, Link};
use crate::step::{Brought, Interface, MadeBy, Output, Step};
use crate::sync::{Mutex, locked};

/// Sandboxes whose addresses are to be announced outside of what has found that they are.
#[derive(Debug, Default)]
pub(in crate::attach) struct Unannounced {
    waiting: Mutex<BTreeSet<JournalKey>>,
    added: Notify,
}

impl Engine {
    /// Has the addresses of these records announced by who awaits [`Engine::unannounced`].
    pub fn announce_soon(&self, records: impl IntoIterator<Item = JournalKey>) {
        locked(&self.unannounced.waiting).extend(records);
        self.unannounced.added.notify_one();
    }

    /// Waits for records whose addresses are to be announced, and hands them over. The future may be dropped at any
    /// time.
    pub async fn unannounced(&self) -> BTreeSet<JournalKey> {
        loop {
            let waiting = self.take_unannounced();
            if !waiting.is_empty() {
                return waiting;
            }
            self.unannounced.added.notified().await;
        }
    }

    pub(in crate::attach) fn take_unannounced(&self) -> BTreeSet<JournalKey> {
        std::mem::take(&mut *locked(&self.unannounced.waiting))
    }

    /// Announces the IPv4 addresses of the attachments in that record, and all those of ipvlans. Attachments that were
    /// detached, or whose namespace or interface is gone, need no announcement. Repeating the call only repeats
    /// the announcement.
    ///
    /// Does not check whether the addresses were announced before: only a restarted agent does not know this, of
    /// recent records and of those that follow parents; and reading that setting takes time proportional to the number
    /// of pods with an interface of that name (`proc_sys_compare` searches the entries of all network namespaces).
    ///
    /// # Errors
    /// The last failure: the kernel refuses, or does not report whether the namespace exists. Attachments that can be
    /// announced are.
    pub fn announce(&self, record: &JournalKey) -> Result<(), AttachError> {
        let Some(attached) = self.registry.get(record) else { return Ok(()) };
        let sandbox = &attached.plan.sandbox;
        let netns = Netns::of(&sandbox.netns, sandbox.netns_id, None)?;
        let Some(netns) = netns else { return Ok(()) };
        let (mut pod, mut outcome) = (None, Ok(()));
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
            let told = tell((&netns, pod), &announced)
                .map_err(|source| AttachError::step(Doing::Attach, attachment, "announce addresses", source));
            outcome = told.and(outcome);
        }
        outcome
    }
}

/// The addresses of an interface in a pod that are announced after the ADD.
struct Announced<'o> {
    interface: &'o Interface,
    told: Told,
}

impl Told {
    /// Selects what is announced after the ADD. Of an ipvlan this is everything, whatever the ADD has announced: its
    /// parent may have got another Ethernet address since.
    fn of(made_by: MadeBy<'_>, addressing: &Addressing) -> Self {
        let is_late = match announcement(made_by, addressing, true) {
            Announcement::Never => false,
            Announcement::Late => true,
            Announcement::AtOnce => matches!(made_by, MadeBy::Link(Link::Ipvlan(_))),
        };
        let mut told = Self::default();
        for address in addressing.addresses.iter().map(|address| address.addr()) {
            match address {
                IpAddr::V4(address) if is_late => told.by_kernel.push(address),
                IpAddr::V4(_) | IpAddr::V6(_) => {}
            }
            if advertised(made_by) {
                told.by_frames.push(address);
            }
        }
        told
    }

    fn is_nothing(&self) -> bool {
        self.by_kernel.is_empty() && self.by_frames.is_empty()
    }
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
            let told = Told::of(attachment.made_by(), &addressing);
            return Ok((!told.is_nothing()).then_some(Announced { interface, told }));
        }
    }
    Ok(None)
}

fn tell((netns, pod): (&Netns, &mut Handle), announced: &Announced<'_>) -> Result<(), StepError> {
    let Announced { interface, told } = announced;
    // The pod may have renamed or replaced its interface, or given it more than the kernel can tell.
    let found = pod.find_told(&interface.name)?;
    let Some(link) = found.filter(|link| link.index == interface.index) else { return Ok(()) };
    // A pod that has set its interface down sends nothing.
    let mac = link.mac.filter(|_| link.up);
    Sender { netns, pod, index: link.index, mac }.announce(told)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::plan::fixtures;
    use crate::spec::{Bridge, Ipvlan, IpvlanMode, Macvlan};

    #[tokio::test]
    async fn records_to_announce_are_handed_over_once_and_none_is_lost_by_a_wait_that_ends() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &crate::sync::Arc::default());
        let [a, b, c] = ["a", "b", "c"].map(rig::key);
        engine.announce_soon([a.clone()]);
        engine.announce_soon([a.clone(), b.clone()]);
        assert_eq!(engine.unannounced().await, [a, b].into());
        let wait = tokio::time::timeout(Duration::from_millis(1), engine.unannounced());
        assert!(wait.await.is_err());
        engine.announce_soon([c.clone()]);
        assert_eq!(engine.unannounced().await, [c].into());
    }

    /// A pod can bring that about at any time, and it is no failure to try again after.
    #[test]
    fn an_interface_of_which_the_kernel_cannot_tell_is_not_announced() {
        let [node, netns] = [(); 2].map(|()| Netns::private().unwrap());
        let [mut host, mut pod] = [&node, &netns].map(|it| Handle::open_in(it).unwrap());
        host.ensure_bridge(&Bridge { name: "wire".to_owned(), ..Bridge::default() }).unwrap();
        let parent = host.link("wire").unwrap();
        let macvlan = Macvlan::plain("net1", "wire");
        let made = host.create_macvlan(&macvlan, &parent, netns.as_fd(), &mut pod).unwrap();
        pod.give_sources(made.index, 20_000);
        pod.narrow();
        assert!(pod.find_link("net1").unwrap_err().is_untold());
        let interface =
            Interface { name: "net1".to_owned(), index: made.index, mac: made.mac, mtu: made.mtu };
        let told = Told { by_kernel: vec!["10.9.0.7".parse().unwrap()], by_frames: Vec::new() };
        tell((&netns, &mut pod), &Announced { interface: &interface, told }).unwrap();
    }

    #[test]
    fn all_addresses_of_an_ipvlan_are_announced_and_of_others_what_the_add_has_left() {
        let ipvlan = |mode| {
            let pod_name = "net1".to_owned();
            Link::Ipvlan(Ipvlan { pod_name, parent: None, mode, mtu: None, group: 0, in_pod: false })
        };
        let [l2, l3] = [IpvlanMode::L2, IpvlanMode::L3].map(ipvlan);
        let device = fixtures::device();
        let found = |made_by: MadeBy<'_>, addresses: &[&str]| {
            let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
            let addressing = Addressing { addresses, announce_v4: true, ..Addressing::default() };
            let Told { by_kernel, by_frames } = Told::of(made_by, &addressing);
            let texts = |it: Vec<String>| it.join(" ");
            let by_kernel = texts(by_kernel.iter().map(ToString::to_string).collect());
            (by_kernel, texts(by_frames.iter().map(ToString::to_string).collect()))
        };
        let (one, two) = (["10.9.0.7/24"], ["10.9.0.7/24", "10.9.0.8/24", "fd00::7/64"]);
        let [of_one, of_two] = ["10.9.0.7", "10.9.0.7 10.9.0.8"].map(str::to_owned);
        let nothing = String::new;
        assert_eq!(found(MadeBy::Link(&l2), &one), (of_one.clone(), of_one.clone()));
        assert_eq!(found(MadeBy::Link(&l2), &two), (of_two.clone(), format!("{of_two} fd00::7")));
        assert_eq!(found(MadeBy::Link(&l3), &two), (of_two, nothing()));
        assert_eq!(found(MadeBy::Plugin, &one), (of_one, nothing()));
        assert_eq!(found(MadeBy::Plugin, &two), (nothing(), nothing()));
        assert_eq!(found(MadeBy::Device(&device), &one), (nothing(), nothing()));
    }
}
