//! What pods of other nodes take, in each namespace: one that has many pods, addresses or label sets leaves others as
//! much as it may have itself. Pure.

use std::collections::{BTreeMap, HashMap};

use crate::objects::budget::{REMOTE_ADDRESSES, REMOTE_BYTES, REMOTE_PODS};
use crate::objects::remote::RemotePod;

/// The most that pods of all namespaces may take together. Those of one namespace may take half of it.
pub(super) const MOST: Taken = Taken { pods: REMOTE_PODS, addresses: REMOTE_ADDRESSES, bytes: REMOTE_BYTES };

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct RemoteShares {
    all: Taken,
    namespaces: BTreeMap<String, Taken>,
    /// The number of pods of each kind ([`RemotePod::kind`]): what they have in common is kept once.
    kinds: HashMap<usize, usize>,
}

/// What pods take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Taken {
    pods: usize,
    addresses: usize,
    /// Of what pods have in common ([`RemotePod::bytes_in_common`]).
    bytes: usize,
}

impl Taken {
    fn with(self, more: Self) -> Self {
        Self {
            pods: self.pods + more.pods,
            addresses: self.addresses + more.addresses,
            bytes: self.bytes + more.bytes,
        }
    }

    /// `less`: a part of it.
    fn without(self, less: Self) -> Self {
        Self {
            pods: self.pods.saturating_sub(less.pods),
            addresses: self.addresses.saturating_sub(less.addresses),
            bytes: self.bytes.saturating_sub(less.bytes),
        }
    }

    fn half(self) -> Self {
        Self { pods: self.pods / 2, addresses: self.addresses / 2, bytes: self.bytes / 2 }
    }

    fn is_within(self, most: Self) -> bool {
        self.pods <= most.pods && self.addresses <= most.addresses && self.bytes <= most.bytes
    }
}

impl RemoteShares {
    /// Counts a pod that is to be kept, and is not counted yet, if there is room. Returns whether there is.
    pub(super) fn add(&mut self, pod: &RemotePod, most: Taken) -> bool {
        let more = self.taken_by(pod, 0);
        let all = self.all.with(more);
        let own = self.namespaces.get(pod.namespace()).copied().unwrap_or_default().with(more);
        if !all.is_within(most) || !own.is_within(most.half()) {
            return false;
        }
        self.all = all;
        self.namespaces.insert(pod.namespace().to_owned(), own);
        *self.kinds.entry(pod.kind()).or_default() += 1;
        true
    }

    /// Counts a pod no more. One that is not counted changes nothing, if none of its kind is.
    pub(super) fn remove(&mut self, pod: &RemotePod) {
        let less = self.taken_by(pod, 1);
        let Some(alike) = self.kinds.get_mut(&pod.kind()) else { return };
        *alike -= 1;
        if *alike == 0 {
            self.kinds.remove(&pod.kind());
        }
        self.all = self.all.without(less);
        if let Some(own) = self.namespaces.get_mut(pod.namespace()) {
            *own = own.without(less);
            if *own == Taken::default() {
                self.namespaces.remove(pod.namespace());
            }
        }
    }

    /// What a pod takes alone: what it has in common with others, only if that many of its kind are counted.
    fn taken_by(&self, pod: &RemotePod, of_kind: usize) -> Taken {
        let is_alone = self.kinds.get(&pod.kind()).copied().unwrap_or_default() == of_kind;
        Taken {
            pods: 1,
            addresses: pod.claims().count(),
            bytes: if is_alone { pod.bytes_in_common() } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::objects::ObjectName;
    use crate::objects::interner::Interner;
    use crate::objects::labels::Labels;
    use crate::objects::remote::Written;

    /// A pod of a workload, with that many addresses.
    fn pod(interner: &mut Interner, name: &str, app: &str, addresses: usize) -> Arc<RemotePod> {
        let (namespace, name) = name.split_once('/').unwrap();
        let ips: Vec<String> = (0..addresses).map(|number| format!("10.0.0.{number}")).collect();
        let status = json!([{"name": "net/lan", "ips": ips}]).to_string();
        let labels = Labels::from([("app".to_owned(), app.to_owned())]);
        let written = Written { labels, status: Some(&status), ..Written::default() };
        Arc::new(RemotePod::read(&ObjectName::new(namespace, name), written, interner))
    }

    #[test]
    fn what_pods_of_a_workload_have_in_common_counts_until_the_last_is_gone() {
        let mut interner = Interner::default();
        let [a, b] = ["shop/a", "shop/b"].map(|name| pod(&mut interner, name, "web", 2));
        let other = pod(&mut interner, "far/a", "web", 1);
        let mut shares = RemoteShares::default();
        assert!([&a, &b, &other].into_iter().all(|pod| shares.add(pod, MOST)));
        let of = |pods, addresses, bytes| Taken { pods, addresses, bytes };
        let [web, far] = [&a, &other].map(|pod| pod.bytes_in_common());
        let namespaces = |both: &[(&str, Taken)]| -> BTreeMap<String, Taken> {
            both.iter().map(|(namespace, taken)| ((*namespace).to_owned(), *taken)).collect()
        };
        assert_eq!(shares.all, of(3, 5, web + far));
        assert_eq!(shares.namespaces, namespaces(&[("far", of(1, 1, far)), ("shop", of(2, 4, web))]));
        shares.remove(&a);
        assert_eq!(shares.namespaces, namespaces(&[("far", of(1, 1, far)), ("shop", of(1, 2, web))]));
        shares.remove(&b);
        assert_eq!(shares.namespaces, namespaces(&[("far", of(1, 1, far))]));
        shares.remove(&b);
        assert_eq!((shares.all, shares.kinds.len()), (of(1, 1, far), 1), "it is counted no more");
        shares.remove(&other);
        assert_eq!((shares.all, shares.kinds.len()), (Taken::default(), 0));
        assert_eq!(shares.namespaces, BTreeMap::new());
    }

    #[test]
    fn a_namespace_has_half_of_each_bound_and_leaves_the_rest_to_others() {
        let mut interner = Interner::default();
        let each = pod(&mut interner, "a/0", "0", 1).bytes_in_common();
        let many = Taken { pods: 100, addresses: 100, bytes: 100 * each };
        // What the bound is on, and how many addresses each pod has. Room is for two pods of a namespace, and
        // four of all.
        for (most, addresses) in [
            (Taken { pods: 4, ..many }, 1),
            (Taken { addresses: 12, ..many }, 3),
            (Taken { bytes: 4 * each, ..many }, 1),
        ] {
            let mut shares = RemoteShares::default();
            // All stay, as the number of a kind is that of a pod that exists.
            let pods = [("a/0", "0"), ("a/1", "1"), ("a/2", "2"), ("b/0", "0"), ("c/0", "0"), ("d/0", "0")]
                .map(|(name, app)| pod(&mut interner, name, app, addresses));
            let kept = pods.each_ref().map(|pod| shares.add(pod, most));
            assert_eq!(kept, [true, true, false, true, true, false], "{most:?}");
            shares.remove(&pods[0]);
            assert_eq!([2, 0, 5].map(|at| shares.add(&pods[at], most)), [true, false, false], "{most:?}");
        }
        // What is there already takes no bytes.
        let mut shares = RemoteShares::default();
        let most = Taken { bytes: 2 * each, ..many };
        let pods = ["a/0", "a/1", "a/2"].map(|name| pod(&mut interner, name, "0", 1));
        assert_eq!(pods.each_ref().map(|pod| shares.add(pod, most)), [true; 3]);
    }
}
