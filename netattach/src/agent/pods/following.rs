//! Decides which live pod's annotation is applied next ([`live`](super::live)). Depends only on counts, not
//! on a clock.
//!
//! Pods get turns in the order in which they ask, so a pod that asks again and again queues behind all pods
//! that have not had a turn. A turn is one change at one network: a pod never occupies a slot at a network
//! while it waits for another one. The number of concurrent changes of a namespace and of a network is
//! limited, and the last slots are reserved for networks without a running change. So networks that hang,
//! even several, leave room for all others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use tokio::task::Id;

use crate::journal::JournalKey;
use crate::npwg::NetworkRef;

/// Most concurrent changes: in total, of one namespace, and at one network.
const AT_ONCE: usize = 32;
const OF_NAMESPACE: usize = 4;
const AT_NETWORK: usize = 4;
/// Once this many are running, another begins only if no change is running at its network.
const SHARED: usize = AT_ONCE / 2;

/// A pod whose annotation is to be applied, by one change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) struct Asking {
    /// Its sandbox.
    pub(in crate::agent) key: JournalKey,
    pub(in crate::agent) namespace: String,
    /// The network that it is to get or to lose.
    pub(in crate::agent) network: Option<NetworkRef>,
}

/// The pods that wait for a turn, and those whose change is running.
#[derive(Debug, Default)]
pub(super) struct Following {
    /// By turn.
    waiting: BTreeMap<u64, Asking>,
    turns: BTreeMap<JournalKey, u64>,
    last: u64,
    /// By the task that runs the change.
    under_way: BTreeMap<Id, Asking>,
}

impl Following {
    /// Queues a pod. A queued pod keeps its turn, with its new change.
    pub(in crate::agent) fn ask(&mut self, asking: Asking) {
        let last = &mut self.last;
        let turn = *self.turns.entry(asking.key.clone()).or_insert_with(|| {
            *last += 1;
            *last
        });
        self.waiting.insert(turn, asking);
    }

    /// Removes from the queue the first pod whose change may begin.
    pub(in crate::agent) fn next(&mut self) -> Option<Asking> {
        if self.under_way.len() >= AT_ONCE {
            return None;
        }
        let under_way = || self.under_way.values();
        let keys: HashSet<&JournalKey> = under_way().map(|it| &it.key).collect();
        let of_namespace = counted(under_way().map(|it| it.namespace.as_str()));
        let at_network = counted(under_way().filter_map(|it| it.network.as_ref()));
        let most = if self.under_way.len() < SHARED { AT_NETWORK } else { 1 };
        let may_begin = |it: &Asking| {
            let of_same = of_namespace.get(it.namespace.as_str()).copied().unwrap_or_default();
            let there = |network: &NetworkRef| at_network.get(network).copied().unwrap_or_default();
            let has_room = it.network.as_ref().is_none_or(|network| there(network) < most);
            of_same < OF_NAMESPACE && has_room && !keys.contains(&it.key)
        };
        let turn = *self.waiting.iter().find(|(_, asking)| may_begin(asking))?.0;
        let asking = self.waiting.remove(&turn)?;
        self.turns.remove(&asking.key);
        Some(asking)
    }

    /// Records that a task has begun a change.
    pub(in crate::agent) fn begun(&mut self, task: Id, asking: Asking) {
        self.under_way.insert(task, asking);
    }

    /// Records that a task has ended, and returns its pod.
    pub(in crate::agent) fn ended(&mut self, task: Id) -> Option<JournalKey> {
        Some(self.under_way.remove(&task)?.key)
    }
}

/// Counts the occurrences of each value.
fn counted<T: Eq + Hash>(all: impl Iterator<Item = T>) -> HashMap<T, usize> {
    let mut counts: HashMap<T, usize> = HashMap::new();
    for one in all {
        *counts.entry(one).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pod, and the network that it is to get.
    fn asking(namespace: &str, name: &str, network: Option<&str>) -> Asking {
        Asking {
            key: JournalKey { container_id: name.to_owned(), ifname: "eth0".to_owned() },
            namespace: namespace.to_owned(),
            network: network.map(|network| NetworkRef::new("shop", network)),
        }
    }

    /// Pods whose changes end only when the test ends them.
    struct Scene {
        following: Following,
        runtime: tokio::runtime::Runtime,
        under_way: Vec<(Id, Asking)>,
    }

    impl Scene {
        fn of(asking: impl IntoIterator<Item = Asking>) -> Self {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let mut scene = Self { following: Following::default(), runtime, under_way: Vec::new() };
            asking.into_iter().for_each(|asking| scene.following.ask(asking));
            scene
        }

        /// The names of the pods that begin now.
        fn begin(&mut self) -> Vec<String> {
            let mut begun = Vec::new();
            while let Some(asking) = self.following.next() {
                let task = self.runtime.spawn(async {}).id();
                begun.push(asking.key.container_id.clone());
                self.under_way.push((task, asking.clone()));
                self.following.begun(task, asking);
            }
            begun
        }

        /// Ends the first begun change that `is` accepts, and returns it.
        fn end_of(&mut self, is: impl Fn(&Asking) -> bool) -> Asking {
            let at = self.under_way.iter().position(|(_, asking)| is(asking)).unwrap();
            let (task, asking) = self.under_way.remove(at);
            assert_eq!(self.following.ended(task).as_ref(), Some(&asking.key));
            assert_eq!(self.following.ended(task), None);
            asking
        }

        /// Ends the change that began first, and returns it.
        fn end(&mut self) -> Asking {
            self.end_of(|_| true)
        }
    }

    #[test]
    fn many_pods_of_one_namespace_leave_room_for_those_of_others_and_each_pod_follows_once_at_a_time() {
        let hostile = (0..10).map(|number| asking("hostile", &format!("hostile-{number}"), None));
        let mut scene = Scene::of(hostile.chain([asking("shop", "shop", None)]));
        assert_eq!(scene.begin(), ["hostile-0", "hostile-1", "hostile-2", "hostile-3", "shop"]);
        // A pod that asks again while its change is running has to wait for that.
        let changed = asking("shop", "shop", Some("lan"));
        scene.following.ask(changed.clone());
        assert_eq!(scene.begin(), [""; 0]);
        scene.end_of(|it| it.key == changed.key);
        assert_eq!(scene.following.next(), Some(changed));
        scene.end();
        assert_eq!(scene.begin(), ["hostile-4"]);
    }

    /// The changes of a network that hangs fail and are queued again, forever.
    #[test]
    fn pods_of_a_network_that_hangs_leave_room_for_those_of_others_and_have_their_turns_one_after_another() {
        let hanging =
            |number: usize| asking(&format!("n{}", number % 16), &format!("h{number:02}"), Some("x"));
        let mut scene = Scene::of((0..64).map(hanging).chain([asking("shop", "z", Some("lan"))]));
        assert_eq!(scene.begin(), ["h00", "h01", "h02", "h03", "z"]);
        // A queued pod whose change differs now keeps its turn.
        scene.following.ask(hanging(40));
        let mut turns = Vec::new();
        for _ in 0..75 {
            let failed = scene.end();
            scene.following.ask(failed);
            turns.extend(scene.begin());
        }
        let expected: Vec<String> = (4..64).map(|number| format!("h{number:02}")).collect();
        let (of_other, of_hanging): (Vec<String>, Vec<String>) =
            turns.into_iter().partition(|name| name == "z");
        assert_eq!(of_hanging, expected, "each once, before any has another turn");
        assert_eq!(of_other.len(), 15, "as often as it asks");
    }

    #[test]
    fn several_networks_that_hang_leave_room_for_those_that_nobody_is_at() {
        let of = |network: usize, number: usize| {
            let name = format!("{network}-{number}");
            asking(&format!("n{network}"), &name, Some(format!("x{network}").as_str()))
        };
        let hanging = (0..8).flat_map(|network| (0..4).map(move |number| (network, number)));
        let mut scene = Scene::of(hanging.map(|(network, number)| of(network, number)));
        let begun = scene.begin();
        let expected: Vec<String> = (0..4)
            .flat_map(|network| (0..4).map(move |number| format!("{network}-{number}")))
            .chain((4..8).map(|network| format!("{network}-0")))
            .collect();
        assert_eq!(begun, expected, "four at each of the first, and one at each of the others");
        scene.following.ask(asking("shop", "hangs", Some("x7")));
        scene.following.ask(asking("shop", "lan", Some("lan")));
        scene.following.ask(asking("shop", "none", None));
        assert_eq!(scene.begin(), ["lan", "none"]);
    }

    /// The tenant's pods need a network that hangs, and after it the network that the other pod needs.
    #[test]
    fn who_hangs_at_one_network_has_no_place_at_those_that_he_is_to_get_after_it() {
        let tenant = (0..4).map(|number| asking("tenant", &format!("t{number}"), Some("hangs")));
        let mut scene = Scene::of(tenant.chain([asking("shop", "z", Some("shared"))]));
        assert_eq!(scene.begin(), ["t0", "t1", "t2", "t3", "z"]);
        let failed = scene.end();
        scene.following.ask(Asking { network: Some(NetworkRef::new("shop", "shared")), ..failed });
        assert_eq!(scene.begin(), ["t0"]);
    }

    /// Ten pods need each of two networks, fail and ask again forever: there is never a free slot at both
    /// networks.
    #[test]
    fn a_pod_of_two_busy_networks_has_its_turn_at_each() {
        let of = |network: &str, number: usize| {
            let name = format!("{network}{number}");
            asking(&format!("n-{name}"), &name, Some(network))
        };
        let busy =
            |from: usize, to: usize| (from..to).flat_map(move |number| [of("a", number), of("b", number)]);
        let mut scene = Scene::of(busy(0, 4).chain([asking("shop", "p", Some("a"))]).chain(busy(4, 10)));
        assert_eq!(scene.begin(), ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]);
        let mut begun = Vec::new();
        for turn in 0..40 {
            let network = NetworkRef::new("shop", ["a", "b"][turn % 2]);
            let ended = scene.end_of(|it| it.network.as_ref() == Some(&network));
            match ended.key.container_id.as_str() {
                "p" => scene.following.ask(Asking { network: Some(NetworkRef::new("shop", "b")), ..ended }),
                _ => scene.following.ask(ended),
            }
            begun.extend(scene.begin().into_iter().filter(|name| name == "p").map(|_| turn));
        }
        assert_eq!(begun, [0, 21], "once all that had asked before it had had theirs");
    }
}
