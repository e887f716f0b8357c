//! Computes the changes that make the interfaces of a live pod match its annotation, and tracks their
//! progress ([`live`](super::live)). Pure.

use std::sync::Arc;

use crate::npwg::{NetworkRef, Selection};
use crate::objects::Pod;

/// An attachment of a live pod, but not its default network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) struct Interface {
    /// Its network; `None` for one that no definition describes.
    pub(in crate::agent) network: Option<NetworkRef>,
    pub(in crate::agent) ifname: String,
    pub(in crate::agent) made: Made,
}

/// How an interface was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::agent) enum Made {
    /// The pod's ADD.
    Add,
    /// A change of its annotation.
    Annotation,
    /// A request of a controller or a user, which the annotation does not describe.
    Request,
}

/// A difference between a pod and its annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) enum Change {
    Attach(Box<Selection>),
    Detach(String),
    /// An interface of the pod's ADD that the annotation no longer selects. It stays.
    Stays(String),
}

/// Returns the changes that make a pod's interfaces match its annotation. Detachments come first: their
/// interface name or address may be the one that another selection asks for.
pub(in crate::agent) fn changes(selections: &[Selection], interfaces: &[Interface]) -> Vec<Change> {
    let mut left: Vec<&Interface> = interfaces.iter().filter(|it| it.made != Made::Request).collect();
    let mut take =
        |is: &dyn Fn(&Interface) -> bool| left.iter().position(|it| is(it)).map(|at| left.remove(at));
    let is_of = |it: &Interface, selection: &Selection| it.network.as_ref() == Some(&selection.network);
    // Selections with an interface name are matched first.
    let (named, unnamed): (Vec<_>, Vec<_>) = selections.iter().partition(|it| it.interface.is_some());
    let mut missing = Vec::new();
    for selection in named {
        let name = selection.interface.as_deref();
        if take(&|it| is_of(it, selection) && Some(it.ifname.as_str()) == name).is_none() {
            missing.push(selection);
        }
    }
    for selection in unnamed {
        if take(&|it| is_of(it, selection)).is_none() {
            missing.push(selection);
        }
    }
    let of_left = left.iter().map(|it| match it.made {
        Made::Annotation => Change::Detach(it.ifname.clone()),
        Made::Add | Made::Request => Change::Stays(it.ifname.clone()),
    });
    let of_left: Vec<Change> = of_left.collect();
    let attach = missing.into_iter().map(|selection| Change::Attach(Box::new(selection.clone())));
    of_left.into_iter().chain(attach).collect()
}

/// Returns the network of a change; `None`: it has no network, or it is refused at once because the pod may
/// not use the network.
pub(in crate::agent) fn network(
    change: &Change,
    interfaces: &[Interface],
    may_use: &dyn Fn(&NetworkRef) -> bool,
) -> Option<NetworkRef> {
    match change {
        Change::Attach(selection) => Some(selection.network.clone()).filter(|it| may_use(it)),
        Change::Detach(ifname) => interfaces.iter().find(|it| it.ifname == *ifname)?.network.clone(),
        Change::Stays(_) => None,
    }
}

/// One round of applying a pod's annotation, one change after another, until only failed changes are left.
#[derive(Debug)]
pub(super) struct Round {
    /// The pod as it is now.
    pub(in crate::agent) pod: Arc<Pod>,
    /// The change that is being carried out.
    pub(in crate::agent) at: Option<Change>,
    /// Bound on the number of further changes; `None`: not yet computed. It ends a round whose changes have
    /// no effect.
    left: Option<usize>,
    /// The failed changes, with their reasons. They are not retried in this round, even if the pod changes
    /// otherwise.
    failed: Vec<(Change, String)>,
}

impl Round {
    pub(in crate::agent) fn of(pod: Arc<Pod>) -> Self {
        Self { pod, at: None, left: None, failed: Vec::new() }
    }

    /// Continues with the pod as it is now, whether it has changed or not.
    pub(super) fn goes_on_with(&mut self, pod: Arc<Pod>) {
        (self.pod, self.left) = (pod, None);
    }

    /// Returns the first of the due changes that this round has not tried.
    pub(in crate::agent) fn next<'a>(&mut self, changes: &'a [Change]) -> Option<&'a Change> {
        let mut failed: Vec<&Change> = self.failed.iter().map(|(change, _)| change).collect();
        let mut due: Vec<&'a Change> = Vec::new();
        for change in changes.iter().filter(|it| !matches!(it, Change::Stays(_))) {
            // A pod may select a network twice, so one failed change accounts for one due change only.
            let Some(at) = failed.iter().position(|it| *it == change) else {
                due.push(change);
                continue;
            };
            failed.swap_remove(at);
        }
        let left = *self.left.get_or_insert(due.len());
        due.first().copied().filter(|_| left > 0)
    }

    /// Records the end of the current change, with its problem if it failed.
    pub(in crate::agent) fn ended(&mut self, problem: Option<String>) {
        let at = self.at.take();
        self.left = self.left.map(|left| left.saturating_sub(1));
        self.failed.extend(at.zip(problem));
    }

    /// Returns the differences that remain when no change is left.
    pub(in crate::agent) fn problems(&self, changes: &[Change]) -> Vec<String> {
        let stays = changes.iter().filter_map(|change| match change {
            Change::Stays(ifname) => {
                Some(format!("{ifname} is not in its annotation any more; it stays until the pod ends"))
            }
            Change::Attach(_) | Change::Detach(_) => None,
        });
        let failed = self.failed.iter().filter(|(change, _)| changes.contains(change));
        stays.chain(failed.map(|(_, problem)| problem.clone())).collect()
    }
}

#[cfg(test)]
pub(in crate::agent) mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::objects::{ObjectName, Phase};

    pub(in crate::agent) fn pod(namespace: &str, name: &str) -> Arc<Pod> {
        Arc::new(Pod {
            name: ObjectName::new(namespace, name),
            uid: None,
            mirror_of: None,
            labels: Default::default(),
            annotations: BTreeMap::new(),
            phase: Phase::Running,
            host_network: false,
            ports: Vec::new(),
            powers: Default::default(),
            on_this_node: true,
            terminating: false,
        })
    }

    fn selection(name: &str, interface: Option<&str>) -> Selection {
        Selection { interface: interface.map(str::to_owned), ..Selection::of(NetworkRef::new("shop", name)) }
    }

    fn interface(name: &str, ifname: &str, made: Made) -> Interface {
        Interface { network: Some(NetworkRef::new("shop", name)), ifname: ifname.to_owned(), made }
    }

    fn attach(name: &str, interface: Option<&str>) -> Change {
        Change::Attach(Box::new(selection(name, interface)))
    }

    fn detach(ifname: &str) -> Change {
        Change::Detach(ifname.to_owned())
    }

    fn stays(ifname: &str) -> Change {
        Change::Stays(ifname.to_owned())
    }

    #[test]
    fn a_change_is_at_the_network_that_comes_or_goes() {
        let interfaces = [
            interface("a", "net1", Made::Annotation),
            Interface { network: None, ifname: "net3".to_owned(), made: Made::Annotation },
            interface("of-others", "net5", Made::Annotation),
        ];
        let may_use = |network: &NetworkRef| network.name != "of-others";
        let at = |name: &str| Some(NetworkRef::new("shop", name));
        let table = [
            (detach("net1"), at("a")),
            (stays("net1"), None),
            (detach("net3"), None),
            (detach("net4"), None),
            (attach("c", Some("net1")), at("c")),
            (attach("of-others", None), None),
            // A network that the pod could use earlier.
            (detach("net5"), at("of-others")),
        ];
        for (change, expected) in table {
            assert_eq!(network(&change, &interfaces, &may_use), expected, "{change:?}");
        }
    }

    /// Carries out the next change, which must exist.
    fn carried_out(round: &mut Round, changes: &[Change], problem: Option<&str>) -> Change {
        let change = round.next(changes).unwrap().clone();
        round.at = Some(change.clone());
        round.ended(problem.map(str::to_owned));
        change
    }

    #[test]
    fn a_round_tries_each_change_once_and_ends_with_what_did_not_succeed() {
        let mut round = Round::of(pod("shop", "a"));
        let all = [stays("net1"), detach("net2"), attach("a", None), attach("a", None), attach("b", None)];
        assert_eq!(carried_out(&mut round, &all, Some("net2 hangs")), detach("net2"));
        assert_eq!(carried_out(&mut round, &all, Some("a is full")), attach("a", None));
        assert_eq!(carried_out(&mut round, &all, None), attach("a", None), "which it selects twice");
        let left = [stays("net1"), detach("net2"), attach("a", None), attach("b", None)];
        assert_eq!(carried_out(&mut round, &left, None), attach("b", None));
        let left = &left[..3];
        assert_eq!(round.next(left), None);
        let stays = "net1 is not in its annotation any more; it stays until the pod ends";
        assert_eq!(round.problems(left), [stays, "net2 hangs", "a is full"]);
    }

    /// The pod's object changes after each change, as its status is published.
    #[test]
    fn a_pod_that_changes_goes_on_with_what_it_has_not_tried() {
        let mut round = Round::of(pod("shop", "a"));
        let all = [attach("hangs", None), attach("a", None)];
        assert_eq!(carried_out(&mut round, &all, Some("it hangs")), attach("hangs", None));
        let changed = pod("shop", "a");
        round.goes_on_with(Arc::clone(&changed));
        assert!(Arc::ptr_eq(&round.pod, &changed));
        let all = [attach("hangs", None), attach("a", None), attach("b", None)];
        assert_eq!(carried_out(&mut round, &all, None), attach("a", None));
        let left = [attach("hangs", None), attach("b", None)];
        assert_eq!(carried_out(&mut round, &left, None), attach("b", None));
        assert_eq!(round.next(&left[..1]), None);
        assert_eq!(round.problems(&left[..1]), ["it hangs"]);
        assert_eq!(round.problems(&[]), [""; 0], "its annotation does not select it any more");
    }

    #[test]
    fn a_change_without_effect_ends_a_round_as_others_do() {
        let mut round = Round::of(pod("shop", "a"));
        let all = [attach("a", None), attach("b", None)];
        for _ in 0..2 {
            assert_eq!(carried_out(&mut round, &all, None), attach("a", None));
        }
        assert_eq!(round.next(&all), None);
        assert_eq!(round.problems(&all), [""; 0]);
        // Until the pod is checked again.
        round.goes_on_with(pod("shop", "a"));
        assert_eq!(round.next(&all), Some(&all[0]));
    }

    #[test]
    fn interfaces_follow_the_annotation() {
        let (add, annotation, request) = (Made::Add, Made::Annotation, Made::Request);
        type Row = (&'static str, Vec<Selection>, Vec<Interface>, Vec<Change>);
        let table: [Row; 7] = [
            ("as it was", vec![selection("a", None)], vec![interface("a", "net1", add)], vec![]),
            (
                "one more of the same",
                vec![selection("a", None), selection("a", None)],
                vec![interface("a", "net1", add)],
                vec![attach("a", None)],
            ),
            (
                "one that was added goes",
                vec![selection("a", None)],
                vec![interface("a", "net1", add), interface("b", "net2", annotation)],
                vec![Change::Detach("net2".to_owned())],
            ),
            (
                "one of the ADD stays",
                vec![],
                vec![interface("a", "net1", add)],
                vec![Change::Stays("net1".to_owned())],
            ),
            (
                "what was asked for otherwise is not of the annotation",
                vec![selection("b", None)],
                vec![interface("b", "net1", request)],
                vec![attach("b", None)],
            ),
            (
                "another interface of the same network",
                vec![selection("b", Some("fast"))],
                vec![interface("b", "net2", annotation)],
                vec![Change::Detach("net2".to_owned()), attach("b", Some("fast"))],
            ),
            (
                "those that name their interface choose first",
                vec![selection("a", None), selection("a", Some("net1"))],
                vec![interface("a", "net1", add), interface("a", "net2", add)],
                vec![],
            ),
        ];
        for (what, selections, interfaces, expected) in table {
            assert_eq!(changes(&selections, &interfaces), expected, "{what}");
        }
    }
}
