//! Deletes the links of a sandbox: those in its pod, whatever the pod changed of them, and the node ends.
//!
//! The administrator of a pod's network chooses the names and link groups in the pod. A link that netattach created
//! there is identified by its index, which does not change within a namespace, and by its kind: so renaming does not
//! hide it, and a device that the kernel cannot delete is not mistaken for it.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;

use crate::attach::StepError;
use crate::attach::apply::LinkError;
use crate::netlink::{self, Handle, LinkState};
use crate::netns::Netns;

/// A link that was created, or may have been.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made<'p> {
    /// Name in the pod.
    pub(in crate::attach) pod_name: &'p str,
    /// Name of the node's end, if there is one.
    pub(in crate::attach) host_name: Option<&'p str>,
    /// The kernel's name for its kind.
    pub(in crate::attach) kind: &'p str,
    pub(in crate::attach) known: KnownBy,
}

/// What identifies a link in the pod, in addition to its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KnownBy {
    /// Its index; or its name and the sandbox's group, because the link gets another index if it was moved out of the
    /// namespace and back.
    Index(u32),
    /// Its name and the sandbox's group: another container's link may have the name.
    Group,
    /// Its name: another meta plugin created the link, without a group.
    Name,
}

/// The links of a sandbox of which some are deleted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Links<'a> {
    /// The group of the sandbox.
    pub(in crate::attach) group: u32,
    /// Those to delete.
    pub(in crate::attach) ending: &'a [Made<'a>],
    /// Those that are still needed. None: all links of the group are deleted, also those that are not found because
    /// they were renamed and their indices are unknown.
    pub(in crate::attach) needed: &'a [Made<'a>],
}

/// Links that were not deleted.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Positions of the links of which an end may still exist.
    pub(in crate::attach) links: BTreeSet<usize>,
    /// The errors.
    pub(in crate::attach) errors: Vec<StepError>,
}

impl Left {
    fn add(&mut self, links: impl IntoIterator<Item = usize>, why: StepError) {
        let mut links = links.into_iter().peekable();
        if links.peek().is_some() {
            self.errors.push(why);
        }
        self.links.extend(links);
    }
}

/// Deletes links: in the pod if its namespace exists, and on the node. A failure does not prevent the deletion of
/// others.
pub(super) fn delete(netns: Option<&Netns>, links: Links<'_>) -> Left {
    let of_pod = netns.map_or_else(|| Ok(Failed::new()), |netns| in_pod(netns, links));
    then_on_node(of_pod, links.ending)
}

/// Links that may still exist, by their positions, with the errors.
type Failed = BTreeMap<usize, StepError>;

/// Deletes the ends on the node, after the links in the pod. Deleting the node end of a pair also deletes the pod's
/// end.
fn then_on_node(of_pod: Result<Failed, StepError>, links: &[Made<'_>]) -> Left {
    let mut left = Left::default();
    let ended = on_node(links, &mut left);
    let is_there = |at: &usize| !ended.contains(at);
    match of_pod {
        Ok(failed) => {
            failed.into_iter().filter(|(at, _)| is_there(at)).for_each(|(at, why)| left.add([at], why));
        }
        Err(why) => left.add((0..links.len()).filter(is_there), why),
    }
    left
}

/// Deletes the links in the pod.
fn in_pod(netns: &Netns, links: Links<'_>) -> Result<Failed, StepError> {
    let Links { group, ending, needed } = links;
    let mut pod = Handle::open_in(netns)?;
    let (mut found, mut absent, mut failed) = (Vec::new(), Vec::new(), Failed::new());
    for (at, link) in ending.iter().enumerate() {
        let deleted = match link.find(&mut pod, group) {
            Ok(Found::At { index, is_told }) => {
                found.push((at, index, is_told));
                Ok(())
            }
            Ok(Found::Named) => if_it_can_be(pod.delete_link_named(link.pod_name).map(drop)),
            Ok(Found::Absent) => {
                absent.push(at);
                Ok(())
            }
            Err(why) => Err(why),
        };
        if let Err(why) = deleted {
            failed.insert(at, why.into());
        }
    }
    let indices: Vec<u32> = found.iter().map(|(_, index, _)| *index).collect();
    // A single link is deleted by its index. Several are deleted with one request by their group, which includes
    // links that were not found because they were renamed and their indices are unknown.
    let by_group = (needed.is_empty() && (ending.len() > 1 || indices.is_empty())).then_some(group);
    let outcomes = pod.delete_links(by_group, &indices)?;
    for ((at, _, is_told), outcome) in found.into_iter().zip(outcomes) {
        let outcome = if is_told { outcome } else { if_it_can_be(outcome) };
        if let Err(why) = outcome {
            failed.insert(at, why.into());
        }
    }
    if !needed.is_empty() {
        failed.extend(perhaps_renamed(&mut pod, links, &absent, &indices)?);
    }
    Ok(failed)
}

/// Those of the links that were not found at `absent` of which the pod may have changed the name: it has a link of
/// that kind which is none of those at the indices `found`, and none that is needed. The group says nothing, as the pod
/// may have changed that as well. A link with an end on the node goes with that end, whatever it is called.
fn perhaps_renamed(
    pod: &mut Handle,
    Links { group, ending, needed }: Links<'_>,
    absent: &[usize],
    found: &[u32],
) -> Result<Failed, StepError> {
    let mut known: BTreeSet<u32> = found.iter().copied().collect();
    for link in needed {
        if let Found::At { index, .. } = link.find(pod, group)? {
            known.insert(index);
        }
    }
    let mut others = pod.links()?;
    others.retain(|link| !known.contains(&link.index));
    let may_stay = |made: &&Made<'_>| made.known != KnownBy::Name && made.host_name.is_none();
    let renamed = absent.iter().filter_map(|at| {
        let made = ending.get(*at).filter(may_stay)?;
        let other = others.iter().find(|link| link.kind == made.kind)?;
        let (name, other) = (made.pod_name.to_owned(), other.name.clone());
        Some((*at, StepError::Link(LinkError::PerhapsRenamed { name, other })))
    });
    Ok(renamed.collect())
}

/// The outcome for a link that was found only by its index or name, and whose kind is unknown: a link that the kernel
/// cannot delete is not one that netattach created.
fn if_it_can_be(deleted: Result<(), netlink::Error>) -> Result<(), netlink::Error> {
    match deleted {
        Err(error) if error.errno() == Some(Errno::OPNOTSUPP) => Ok(()),
        deleted => deleted,
    }
}

/// Deletes the ends on the node. Returns the positions of the links that had one there.
fn on_node(links: &[Made<'_>], left: &mut Left) -> BTreeSet<usize> {
    let ends = || links.iter().enumerate().filter_map(|(at, link)| Some((at, link.host_name?)));
    let mut ended = BTreeSet::new();
    if ends().next().is_none() {
        return ended;
    }
    let mut host = match Handle::open() {
        Ok(host) => host,
        Err(why) => {
            left.add(ends().map(|(at, _)| at), why.into());
            return ended;
        }
    };
    for (at, name) in ends() {
        match host.delete_link_named(name) {
            Ok(true) => drop(ended.insert(at)),
            Ok(false) => {}
            Err(why) => left.add([at], why.into()),
        }
    }
    ended
}

/// Where a link is in the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It was not found, except perhaps by the sandbox's group.
    Absent,
    /// It has this index.
    At {
        /// The index.
        index: u32,
        /// Whether the kernel reports its kind. It does not if the pod has given the link more attributes than fit
        /// into a message.
        is_told: bool,
    },
    /// A link has its name, and the kernel reports neither index nor kind.
    Named,
}

impl Made<'_> {
    fn find(&self, pod: &mut Handle, group: u32) -> Result<Found, netlink::Error> {
        let is_of_kind = |link: &LinkState| link.kind == self.kind;
        if let KnownBy::Index(index) = self.known {
            match pod.link_by_index(index) {
                Err(netlink::Error::NoSuchLink(_)) => {}
                Err(error) if error.is_untold() => return Ok(Found::At { index, is_told: false }),
                shown => {
                    if is_of_kind(&shown?) {
                        return Ok(Found::At { index, is_told: true });
                    }
                }
            }
        }
        let is_in_group = |link: &LinkState| self.known == KnownBy::Name || link.group == group;
        let named = match pod.find_link(self.pod_name) {
            Err(error) if error.is_untold() => {
                let is_it = self.known == KnownBy::Name;
                return Ok(if is_it { Found::Named } else { Found::Absent });
            }
            named => named?.filter(|link| is_of_kind(link) && is_in_group(link)),
        };
        Ok(named.map_or(Found::Absent, |link| Found::At { index: link.index, is_told: true }))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::netns::within;
    use crate::spec::{Bridge, Macvlan, OWN_GROUPS, Veth};

    const GROUP: u32 = OWN_GROUPS | 7;

    /// A node with the device `wire`, and a pod.
    struct Scene {
        node: Netns,
        netns: Netns,
        host: Handle,
        pod: Handle,
    }

    impl Scene {
        fn new() -> Self {
            let [node, netns] = [(); 2].map(|()| Netns::private().unwrap());
            let [mut host, pod] = [&node, &netns].map(|it| Handle::open_in(it).unwrap());
            let wire =
                Bridge { name: "wire".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
            host.ensure_bridge(&wire).unwrap();
            Self { node, netns, host, pod }
        }

        /// The index in the pod.
        fn macvlan(&mut self, name: &str) -> u32 {
            let macvlan = Macvlan { group: GROUP, ..Macvlan::plain(name, "wire") };
            let parent = self.host.link("wire").unwrap();
            let made = self.host.create_macvlan(&macvlan, &parent, self.netns.as_fd(), &mut self.pod);
            made.unwrap().index
        }

        /// The index in the pod.
        fn veth(&mut self, name: &str, end: &str) -> u32 {
            let veth = Veth {
                host_name: end.to_owned(),
                pod_name: name.to_owned(),
                mtu: None,
                mac: None,
                group: GROUP,
                port: None,
            };
            let (_, pod) = self.host.create_veth(&veth, None, self.netns.as_fd(), &mut self.pod).unwrap();
            pod.index
        }

        fn delete(&self, links: &[Made<'_>]) -> Left {
            self.delete_but(&[], links)
        }

        fn delete_but(&self, needed: &[Made<'_>], ending: &[Made<'_>]) -> Left {
            let links = Links { group: GROUP, ending, needed };
            within(&self.node, || delete(Some(&self.netns), links)).unwrap()
        }

        /// The names of all links in the pod, and on the node.
        fn names(&mut self) -> [Vec<String>; 2] {
            [&mut self.pod, &mut self.host].map(|handle| {
                let mut names: Vec<String> =
                    handle.links().unwrap().into_iter().map(|link| link.name).collect();
                names.sort();
                names
            })
        }
    }

    fn macvlan(pod_name: &str, known: KnownBy) -> Made<'_> {
        Made { pod_name, host_name: None, kind: "macvlan", known }
    }

    fn veth<'p>(pod_name: &'p str, end: &'p str, index: u32) -> Made<'p> {
        Made { pod_name, host_name: Some(end), kind: "veth", known: KnownBy::Index(index) }
    }

    fn told(left: Left) -> (Vec<usize>, Vec<String>) {
        (left.links.into_iter().collect(), left.errors.iter().map(ToString::to_string).collect())
    }

    /// The pod has given the name and the group of one to a device that the kernel does not delete.
    #[test]
    fn links_go_whatever_their_pod_has_made_of_names_and_groups() {
        let mut scene = Scene::new();
        let (lan, pair) = (scene.macvlan("net1"), scene.veth("net2", "end2"));
        scene.pod.rename(lan, "mine").unwrap();
        scene.pod.set_group(lan, 0).unwrap();
        let lo = scene.pod.link("lo").unwrap().index;
        scene.pod.rename(lo, "net1").unwrap();
        scene.pod.set_group(lo, GROUP).unwrap();
        let links = [macvlan("net1", KnownBy::Index(lan)), veth("net2", "end2", pair)];
        for _ in 0..2 {
            assert_eq!(told(scene.delete(&links)), (Vec::new(), Vec::new()));
            assert_eq!(scene.names(), [vec!["net1"], vec!["lo", "wire"]]);
        }
    }

    /// The characters stand for bytes that are no text, which the kernel takes. With the longest list of other names that it takes
    /// a link is described by more than 64 KiB.
    #[test]
    fn links_go_although_their_names_are_no_texts_or_beyond_number() {
        let many: Vec<String> = (0..496).map(|number| format!("{number:0127}")).collect();
        for (name, alias, others) in
            [("\u{f7ff}", "", &many[..]), ("mine", "\u{f7fe}\u{f7ff}", &["\u{f780}".to_owned()])]
        {
            let mut scene = Scene::new();
            let lan = scene.macvlan("net1");
            scene.pod.rename(lan, name).unwrap();
            scene.pod.set_alias(lan, alias).unwrap();
            scene.pod.add_other_names(lan, others).unwrap();
            scene.pod.set_group(lan, 0).unwrap();
            assert_eq!(scene.names()[0], ["lo", name]);
            assert_eq!(told(scene.delete(&[macvlan("net1", KnownBy::Index(lan))])), (Vec::new(), Vec::new()));
            assert_eq!(scene.names()[0], ["lo"], "{name}");
        }
    }

    /// A macvlan in mode `source` has as many addresses as its pod gives it.
    #[test]
    fn links_go_although_the_kernel_has_too_much_to_tell_of_them() {
        let mut scene = Scene::new();
        let lan = scene.macvlan("net1");
        scene.pod.give_sources(lan, 20_000);
        scene.pod.rename(lan, "mine").unwrap();
        scene.pod.set_group(lan, 0).unwrap();
        assert_eq!(told(scene.delete(&[macvlan("net1", KnownBy::Index(lan))])), (Vec::new(), Vec::new()));
        assert_eq!(scene.names()[0], ["lo"]);
    }

    #[test]
    fn a_link_of_which_nothing_is_told_is_the_one_with_its_index_or_that_another_plugin_named() {
        let mut scene = Scene::new();
        let lan = scene.macvlan("net1");
        scene.pod.give_sources(lan, 20_000);
        scene.pod.narrow();
        let at = |known| macvlan("net1", known);
        let untold = Found::At { index: lan, is_told: false };
        for (known, found) in [
            (KnownBy::Index(lan), untold),
            (KnownBy::Index(lan + 1), Found::Absent),
            (KnownBy::Group, Found::Absent),
            (KnownBy::Name, Found::Named),
        ] {
            assert_eq!(at(known).find(&mut scene.pod, GROUP).unwrap(), found, "{known:?}");
        }
        let lo = scene.pod.link("lo").unwrap().index;
        let refused = scene.pod.delete_links(None, &[lo]).unwrap().remove(0);
        assert_eq!(refused.as_ref().unwrap_err().errno(), Some(Errno::OPNOTSUPP));
        if_it_can_be(refused).unwrap();
    }

    #[test]
    fn a_link_whose_index_is_not_known_goes_by_its_group_and_one_of_another_maker_by_its_name() {
        let mut scene = Scene::new();
        let lan = scene.macvlan("net1");
        scene.pod.rename(lan, "mine").unwrap();
        scene.delete(&[macvlan("net1", KnownBy::Group)]);
        assert_eq!(scene.names()[0], ["lo"]);
        // As after a way out of the namespace and back.
        scene.macvlan("net1");
        scene.delete(&[macvlan("net1", KnownBy::Index(lan))]);
        assert_eq!(scene.names()[0], ["lo"]);
        let others = scene.macvlan("net1");
        scene.pod.set_group(others, 0).unwrap();
        let of_another_kind = Made { kind: "veth", ..macvlan("net1", KnownBy::Name) };
        for stays in [macvlan("net1", KnownBy::Group), of_another_kind] {
            assert_eq!(told(scene.delete(&[stays])), (Vec::new(), Vec::new()));
            assert_eq!(scene.names()[0], ["lo", "net1"], "{stays:?}");
        }
        scene.delete(&[macvlan("net1", KnownBy::Name)]);
        assert_eq!(scene.names()[0], ["lo"]);
    }

    #[test]
    fn a_link_that_is_still_needed_stays_when_others_of_its_group_go_and_are_gone() {
        let mut scene = Scene::new();
        let [first, second, third] = ["net1", "net2", "net3"].map(|name| scene.macvlan(name));
        let links = [macvlan("net1", KnownBy::Index(first)), macvlan("net2", KnownBy::Index(second))];
        let needed = [macvlan("net3", KnownBy::Index(third))];
        for _ in 0..2 {
            assert_eq!(told(scene.delete_but(&needed, &links)), (Vec::new(), Vec::new()));
            assert_eq!(scene.names()[0], ["lo", "net3"]);
        }
        assert_eq!(told(scene.delete_but(&needed, &links[..1])), (Vec::new(), Vec::new()));
        assert_eq!(scene.names()[0], ["lo", "net3"]);
        scene.delete(&links);
        assert_eq!(scene.names()[0], ["lo"]);
    }

    /// Otherwise another pod gets the address that it has. Its index is not known, or it has been out of the namespace.
    #[test]
    fn a_link_that_the_pod_has_renamed_is_not_gone_while_another_of_its_pod_is_needed() {
        for (by_index, group) in [(false, GROUP), (true, GROUP), (false, 0), (true, 0)] {
            let mut scene = Scene::new();
            let [first, second] = ["net1", "net2"].map(|name| scene.macvlan(name));
            let known = if by_index { KnownBy::Index(second + 100) } else { KnownBy::Group };
            let (links, needed) = ([macvlan("net1", known)], [macvlan("net2", KnownBy::Index(second))]);
            scene.pod.rename(first, "mine").unwrap();
            scene.pod.set_group(first, group).unwrap();
            let told_of = "the pod has no link net1, but mine, which may be that one";
            for _ in 0..2 {
                assert_eq!(told(scene.delete_but(&needed, &links)), (vec![0], vec![told_of.to_owned()]));
                assert_eq!(scene.names()[0], ["lo", "mine", "net2"]);
            }
            // One of another maker, of another kind, or with an end on the node.
            let others = [
                macvlan("net1", KnownBy::Name),
                Made { kind: "veth", ..links[0] },
                Made { host_name: Some("end1"), ..links[0] },
            ];
            assert_eq!(told(scene.delete_but(&needed, &others)), (Vec::new(), Vec::new()));
            scene.pod.set_group(first, GROUP).unwrap();
            assert_eq!(told(scene.delete(&links)), (Vec::new(), Vec::new()));
            assert_eq!(scene.names()[0], ["lo"]);
        }
    }

    /// `lo` is of no kind that the kernel deletes.
    #[test]
    fn what_cannot_be_deleted_is_told_and_keeps_no_other() {
        let mut scene = Scene::new();
        let (first, last) = (scene.veth("net1", "end1"), scene.veth("net2", "end2"));
        let links = [veth("net1", "lo", first), veth("net2", "end2", last)];
        let (left, errors) = told(scene.delete(&links));
        assert_eq!((left, errors.len()), (vec![0], 1), "{errors:?}");
        assert_eq!(scene.names(), [vec!["lo"], vec!["lo", "wire"]]);
    }

    #[test]
    fn where_the_pod_cannot_be_entered_pairs_go_by_the_nodes_ends_and_all_else_is_left() {
        let mut scene = Scene::new();
        let (pair, lan) = (scene.veth("net1", "end1"), scene.macvlan("net2"));
        let links =
            [veth("net1", "end1", pair), macvlan("net2", KnownBy::Index(lan)), veth("net3", "end3", 99)];
        let refused = || Err(StepError::Missing("a way in"));
        let left = within(&scene.node, || then_on_node(refused(), &links)).unwrap();
        assert_eq!(told(left), (vec![1, 2], vec![StepError::Missing("a way in").to_string()]));
        assert_eq!(scene.names(), [vec!["lo", "net2"], vec!["lo", "wire"]]);
        let left = within(&scene.node, || then_on_node(refused(), &links[..0])).unwrap();
        assert_eq!(told(left), (Vec::new(), Vec::new()));
    }
}
