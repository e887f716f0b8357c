//! The policies that isolate in place of those that cannot be read or do not fit, and which of them are
//! kept individually. Pure.
//!
//! An author can make the selector of a policy large, and create any number of policies. Beyond a bound for
//! each namespace and for all, the namespace is isolated as a whole instead of the selected pods.

use std::collections::BTreeMap;

use crate::objects::policy::Policy;
use crate::source::read::manifest::Key;

/// Most bytes kept of all of them, and of those of one namespace.
pub(super) const MOST: usize = 8 << 20;
pub(super) const MOST_OF_NAMESPACE: usize = 64 << 10;
/// Overhead of each, in bytes.
const EACH: usize = 64;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct StandIns {
    weights: BTreeMap<Key, usize>,
    of_namespace: BTreeMap<String, usize>,
    total: usize,
    /// Kind and namespace of those that are isolated as a whole, and whether there was a reason since the
    /// last list of the kind began.
    whole: BTreeMap<(&'static str, String), bool>,
}

impl StandIns {
    /// Keeps the stand-in of a policy individually if there is room. Returns whether there is.
    pub(super) fn take(&mut self, key: &Key, policy: &Policy) -> bool {
        self.remove(key);
        let bytes = EACH + policy.selection_memory();
        let of_namespace = self.of_namespace.get(&key.name.namespace).copied().unwrap_or_default();
        if self.total + bytes > MOST || of_namespace + bytes > MOST_OF_NAMESPACE {
            return false;
        }
        self.weights.insert(key.clone(), bytes);
        self.of_namespace.insert(key.name.namespace.clone(), of_namespace + bytes);
        self.total += bytes;
        true
    }

    /// Removes the stand-in: the policy itself is kept, or deleted.
    pub(super) fn remove(&mut self, key: &Key) {
        let Some(bytes) = self.weights.remove(key) else { return };
        self.total -= bytes;
        if let Some(of) = self.of_namespace.get_mut(&key.name.namespace) {
            *of -= bytes;
            if *of == 0 {
                self.of_namespace.remove(&key.name.namespace);
            }
        }
    }

    /// Whether the policy's namespace is isolated as a whole.
    pub(super) fn has_all_of(&self, key: &Key) -> bool {
        self.whole.contains_key(&(key.kind, key.name.namespace.clone()))
    }

    /// Whether a stand-in is kept for the policy individually.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.weights.contains_key(key)
    }

    /// Isolates the namespace as a whole.
    pub(super) fn isolate(&mut self, kind: &'static str, namespace: &str) {
        self.whole.insert((kind, namespace.to_owned()), true);
    }

    /// A list of the kind begins.
    pub(super) fn list_begins(&mut self, kind: &'static str) {
        self.whole
            .iter_mut()
            .filter(|((of, _), _)| *of == kind)
            .for_each(|(_, has_reason)| *has_reason = false);
    }

    /// A list of the kind is complete. Returns the namespaces that need not be isolated any more.
    pub(super) fn list_ends(&mut self, kind: &'static str) -> Vec<String> {
        let mut over = Vec::new();
        self.whole.retain(|(of, namespace), has_reason| {
            let stays = *of != kind || *has_reason;
            if !stays {
                over.push(namespace.clone());
            }
            stays
        });
        over
    }
}
