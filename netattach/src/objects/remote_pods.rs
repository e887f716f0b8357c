//! All pods of other nodes: a map that is cheap to copy and cheap to change.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::ObjectName;
use super::budget::{REMOTE_ADDRESSES, REMOTE_PODS};
use super::remote::RemotePod;

/// Shards of the map. With 20,000 pods a shard has about 80.
const SHARDS: usize = 256;

/// Namespace and name.
type Key<'a> = (&'a [u8], &'a [u8]);

/// Pods sorted by namespace and name.
type Shard = Arc<Vec<Arc<RemotePod>>>;

/// Pods of other nodes by name, shared between snapshots: a copy costs nothing, a change copies one of 256
/// shards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemotePods {
    /// Empty while the map is empty.
    shards: Arc<Vec<Shard>>,
    len: usize,
    /// Addresses of all pods.
    addresses: usize,
}

/// The map is full: the pod is not in it. A formerly known pod of that name is not in it any more either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// [`REMOTE_PODS`].
    #[error("is one of more than {REMOTE_PODS} pods of other nodes: it is no policy's peer")]
    Pods,
    /// [`REMOTE_ADDRESSES`].
    #[error(
        "has one of more than {REMOTE_ADDRESSES} addresses of pods of other nodes: it is no policy's peer"
    )]
    Addresses,
}

impl RemotePods {
    /// The pod of that name.
    pub fn get(&self, name: &ObjectName) -> Option<&Arc<RemotePod>> {
        let key = key_of(name);
        let shard = self.shards.get(shard_of(key))?;
        shard.get(position(shard, key).ok()?)
    }

    /// Adds a pod or replaces the one of its name, which is returned. An equal pod is kept, so that nothing
    /// has changed: the cost of a repeated list depends on its differences.
    ///
    /// # Errors
    /// There are too many: the new pod is refused, and its name is not in the map afterwards. When pods
    /// have been removed, the caller must insert it again.
    pub fn insert(&mut self, pod: Arc<RemotePod>) -> Result<Option<Arc<RemotePod>>, Full> {
        let (key, more) = (pod.key(), pod.claims().count());
        let shard = shard_of(key);
        let found = self.shards.get(shard).map_or(Err(0), |it| position(it, key));
        let same = found.ok().and_then(|at| self.shards.get(shard)?.get(at));
        if let Some(same) = same.filter(|same| **same == pod) {
            return Ok(Some(Arc::clone(same)));
        }
        let less = same.map_or(0, |before| before.claims().count());
        let full = if same.is_none() && self.len >= REMOTE_PODS {
            Some(Full::Pods)
        } else {
            (more > less && self.addresses - less + more > REMOTE_ADDRESSES).then_some(Full::Addresses)
        };
        if let Some(full) = full {
            self.take(key);
            return Err(full);
        }
        self.addresses = self.addresses - less + more;
        let pods = self.shard_mut(shard);
        Ok(match found {
            Ok(at) => Some(std::mem::replace(&mut pods[at], pod)),
            Err(at) => {
                pods.insert(at, pod);
                self.len += 1;
                None
            }
        })
    }

    /// Removes the pod of that name.
    pub fn remove(&mut self, name: &ObjectName) -> Option<Arc<RemotePod>> {
        self.take(key_of(name))
    }

    fn take(&mut self, key: Key<'_>) -> Option<Arc<RemotePod>> {
        let shard = shard_of(key);
        let at = position(self.shards.get(shard)?, key).ok()?;
        let pod = self.shard_mut(shard).remove(at);
        self.len -= 1;
        self.addresses -= pod.claims().count();
        if self.len == 0 {
            *self = Self::default();
        }
        Some(pod)
    }

    /// Returns a shard for writing, which this map does not share afterwards.
    fn shard_mut(&mut self, shard: usize) -> &mut Vec<Arc<RemotePod>> {
        let shards = Arc::make_mut(&mut self.shards);
        if shards.is_empty() {
            shards.resize_with(SHARDS, Shard::default);
        }
        Arc::make_mut(&mut shards[shard])
    }

    /// Iterates over all pods, in an unspecified order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<RemotePod>> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    /// The number of pods.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the two are the same map, so that nothing has changed between them.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shards, &other.shards) || (self.is_empty() && other.is_empty())
    }

    /// Returns the names of pods that are new, changed or removed. The cost depends on the shards that have
    /// changed.
    pub fn changed_names<'a>(&'a self, before: &'a Self) -> BTreeSet<ObjectName> {
        let mut changed = BTreeSet::new();
        if self.is_same(before) {
            return changed;
        }
        for number in 0..SHARDS {
            let (old, new) = (before.shards.get(number), self.shards.get(number));
            if matches!((old, new), (Some(old), Some(new)) if Arc::ptr_eq(old, new)) {
                continue;
            }
            let of = |shard: Option<&'a Shard>| shard.map_or(&[][..], |it| it.as_slice());
            different(of(old), of(new), &mut changed);
        }
        changed
    }
}

/// Adds the names that are in only one of two sorted lists, or have different values.
fn different(mut old: &[Arc<RemotePod>], mut new: &[Arc<RemotePod>], changed: &mut BTreeSet<ObjectName>) {
    while let Some(pod) = match (old.first(), new.first()) {
        (Some(old), Some(new)) if new.key() < old.key() => Some(new),
        (Some(pod), _) | (None, Some(pod)) => Some(pod),
        (None, None) => None,
    } {
        let take = |pods: &mut &[Arc<RemotePod>]| match pods.split_first() {
            Some((first, rest)) if first.key() == pod.key() => {
                *pods = rest;
                Some(Arc::as_ptr(first))
            }
            _ => None,
        };
        if take(&mut old) != take(&mut new) {
            changed.insert(pod.object_name());
        }
    }
}

fn key_of(name: &ObjectName) -> Key<'_> {
    (name.namespace.as_bytes(), name.name.as_bytes())
}

fn shard_of(key: Key<'_>) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    usize::from(hasher.finish() as u8)
}

fn position(pods: &[Arc<RemotePod>], key: Key<'_>) -> Result<usize, usize> {
    pods.binary_search_by(|pod| pod.key().cmp(&key))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Instant;

    use super::super::interner::Interner;
    use super::super::remote::Written;
    use super::*;

    fn pod(name: &ObjectName, ip: &str, interner: &mut Interner) -> Arc<RemotePod> {
        let status = format!(r#"[{{"name": "shop/lan", "ips": ["{ip}"]}}]"#);
        let written = Written { status: Some(&status), ..Written::default() };
        Arc::new(RemotePod::read(name, written, interner))
    }

    fn name(number: usize) -> ObjectName {
        ObjectName::new(format!("shop-{}", number % 7), format!("cart-{number}"))
    }

    #[test]
    fn it_is_a_map_and_snapshots_of_it_do_not_change() {
        let mut interner = Interner::default();
        let (mut pods, mut model) = (RemotePods::default(), BTreeMap::new());
        let mut snapshots = Vec::new();
        // A walk that inserts, replaces and removes.
        for step in 0_usize..4000 {
            let name = name(step * 7919 % 500);
            if step % 3 == 0 {
                assert_eq!(pods.remove(&name), model.remove(&name));
            } else {
                let pod = pod(&name, &format!("10.0.{}.{}", step / 256, step % 256), &mut interner);
                assert_eq!(pods.insert(Arc::clone(&pod)), Ok(model.insert(name.clone(), pod)));
            }
            assert_eq!((pods.len(), pods.addresses), (model.len(), model.len()));
            if step % 500 == 0 {
                snapshots.push((pods.clone(), model.clone()));
            }
        }
        for (pods, model) in &snapshots {
            let all: BTreeMap<_, _> = pods.iter().map(|pod| (pod.object_name(), Arc::clone(pod))).collect();
            assert_eq!(all, *model);
            assert!((0..500).all(|number| pods.get(&name(number)) == model.get(&name(number))));
        }
        for (before, before_model) in &snapshots {
            for (now, now_model) in &snapshots {
                let names = before_model.keys().chain(now_model.keys());
                let expected = names.filter(|name| match (before_model.get(name), now_model.get(name)) {
                    (Some(before), Some(now)) => !Arc::ptr_eq(before, now),
                    _ => true,
                });
                assert_eq!(now.changed_names(before), expected.cloned().collect());
                assert_eq!(now.is_same(before), std::ptr::eq(now, before) || now_model == before_model);
            }
        }
        for number in 0..500 {
            pods.remove(&name(number));
        }
        assert_eq!(pods, RemotePods::default());
        assert!(pods.is_empty() && pods.is_same(&RemotePods::default()));
    }

    #[test]
    fn a_change_copies_a_small_part() {
        let mut interner = Interner::default();
        let mut pods = RemotePods::default();
        for number in 0..20_000 {
            pods.insert(pod(&name(number), "10.0.0.1", &mut interner)).unwrap();
        }
        let before = pods.clone();
        assert!(before.is_same(&pods));
        let began = Instant::now();
        pods.insert(pod(&name(77), "10.0.0.2", &mut interner)).unwrap();
        let changed = pods.changed_names(&before);
        eprintln!("change and its name among 20,000: {:?}", began.elapsed());
        assert_eq!(changed, BTreeSet::from([name(77)]));
        let now = pods.clone();
        pods.insert(pod(&name(77), "10.0.0.2", &mut interner)).unwrap();
        assert!(pods.is_same(&now), "an equal pod is no change");
        let shared = pods.shards.iter().zip(before.shards.iter()).filter(|(a, b)| Arc::ptr_eq(a, b)).count();
        assert_eq!(shared, SHARDS - 1);
        let largest = pods.shards.iter().map(|shard| shard.len()).max().unwrap();
        assert!(largest < 150, "{largest} pods in one part");
    }

    #[test]
    fn the_newest_beyond_the_bounds_are_refused() {
        let mut interner = Interner::default();
        let mut pods = RemotePods::default();
        let one = |number: usize| {
            let (name, uid) = (ObjectName::new("shop", format!("p{number}")), number.to_string());
            let written = Written { uid: Some(&uid), ..Written::default() };
            Arc::new(RemotePod::read(&name, written, &mut Interner::default()))
        };
        for number in 0..REMOTE_PODS {
            pods.insert(one(number)).unwrap();
        }
        assert_eq!(pods.insert(one(REMOTE_PODS)), Err(Full::Pods));
        assert_eq!(pods.get(&ObjectName::new("shop", format!("p{REMOTE_PODS}"))), None);
        // One that is known is replaced.
        assert!(pods.insert(one(7)).unwrap().is_some());
        pods.remove(&ObjectName::new("shop", "p7")).unwrap();
        pods.insert(one(REMOTE_PODS)).unwrap();
        pods.addresses = REMOTE_ADDRESSES;
        let name = ObjectName::new("shop", "p9");
        assert_eq!(pods.insert(pod(&name, "10.0.0.1", &mut interner)), Err(Full::Addresses));
        assert_eq!(pods.get(&name), None, "what it was before is not believed either");
    }
}
