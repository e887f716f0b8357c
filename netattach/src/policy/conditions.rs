//! The problems of objects that compiling has found. A change updates only the problems that it affects,
//! and updates share the others.
//!
//! Authors can cause tens of thousands of problems. An update without new problems and the counts do not
//! iterate over all of them, and a list contains only a bounded number for each namespace.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::desired::{Condition, Subject};
use crate::objects::policy::Severity;

/// Most problems of one namespace that a list shows individually.
const LISTED: usize = 128;

/// Problems by namespace, each once. A copy costs nothing; a change copies only the changed namespaces.
#[derive(Debug, Clone, Default)]
pub struct Conditions(Arc<BTreeMap<Arc<str>, Arc<OfNamespace>>>);

/// The problems of a namespace.
#[derive(Debug, Clone, Default)]
struct OfNamespace {
    found: Found,
    counts: Counts,
}

/// Problems, sorted, each with the number of times it was found.
type Found = BTreeMap<Arc<Condition>, usize>;

/// Numbers of objects that have problems, however many each of them has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Policies that are not enforced as written.
    pub wrong: usize,
    /// Policies with a warning. They can be not enforced as written, too.
    pub warned: usize,
    /// Pods.
    pub pods: usize,
}

impl Counts {
    /// The number of the objects that a problem counts among.
    fn of(&mut self, condition: &Condition) -> Option<&mut usize> {
        match (&condition.object, condition.severity) {
            (Subject::Policy(_), Severity::Error) => Some(&mut self.wrong),
            (Subject::Policy(_), Severity::Warning) => Some(&mut self.warned),
            (Subject::Pod(_), _) => Some(&mut self.pods),
            (Subject::Namespace(_), _) => None,
        }
    }
}

impl OfNamespace {
    /// Whether the object of the problem has one of this severity.
    fn has_alike(&self, object: &Subject, severity: Severity) -> bool {
        // No message precedes the empty one.
        let least = Condition { object: object.clone(), severity, message: String::new() };
        let next = self.found.range::<Condition, _>(&least..).next();
        next.is_some_and(|(it, _)| it.object == *object && it.severity == severity)
    }

    fn add(&mut self, condition: &Condition) {
        if let Some(count) = self.found.get_mut(condition) {
            *count += 1;
            return;
        }
        if !self.has_alike(&condition.object, condition.severity)
            && let Some(objects) = self.counts.of(condition)
        {
            *objects += 1;
        }
        self.found.insert(Arc::new(condition.clone()), 1);
    }

    fn remove(&mut self, condition: &Condition) {
        let Some(count) = self.found.get_mut(condition) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.found.remove(condition);
        if !self.has_alike(&condition.object, condition.severity)
            && let Some(objects) = self.counts.of(condition)
        {
            *objects -= 1;
        }
    }
}

impl Conditions {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the numbers of policies of these namespaces that have problems, and of pods of any namespace.
    pub fn counts<'n>(&self, namespaces: impl IntoIterator<Item = &'n str>) -> Counts {
        let mut counts = Counts { pods: self.0.values().map(|of| of.counts.pods).sum(), ..Counts::default() };
        for of in namespaces.into_iter().filter_map(|namespace| self.0.get(namespace)) {
            counts.wrong += of.counts.wrong;
            counts.warned += of.counts.warned;
        }
        counts
    }

    /// Whether an object has a problem by which it is not enforced as written.
    pub fn is_wrong(&self, object: &Subject) -> bool {
        self.0.get(object.namespace()).is_some_and(|of| of.has_alike(object, Severity::Error))
    }

    /// All problems, sorted by namespace.
    pub fn iter(&self) -> impl Iterator<Item = &Condition> {
        self.0.values().flat_map(|of| of.found.keys().map(|condition| &**condition))
    }

    /// Returns the first problems of each namespace, at most 128, and the number of the others.
    pub fn listed(&self) -> Vec<Arc<Condition>> {
        let mut listed = Vec::new();
        for (namespace, of) in &*self.0 {
            listed.extend(of.found.keys().take(LISTED).cloned());
            if let Some(more) = of.found.len().checked_sub(LISTED).filter(|more| *more > 0) {
                listed.push(Arc::new(Condition {
                    object: Subject::Namespace(namespace.to_string()),
                    severity: Severity::Error,
                    message: format!("{more} more problems of its policies and pods are not shown"),
                }));
            }
        }
        listed
    }

    /// Returns the problems that `before` does not have. Compares only the namespaces that have changed.
    pub fn beyond<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = &'a Condition> {
        let is_same = Arc::ptr_eq(&self.0, &before.0);
        let changed = self.0.iter().filter(move |_| !is_same).filter_map(move |(namespace, of)| {
            let before = before.0.get(namespace);
            before.is_none_or(|before| !Arc::ptr_eq(before, of)).then_some((of, before))
        });
        changed.flat_map(|(of, before)| {
            let is_new = move |condition: &&Arc<Condition>| {
                before.is_none_or(|before| !before.found.contains_key(*condition))
            };
            of.found.keys().filter(is_new).map(|condition| &**condition)
        })
    }

    /// Adds problems that were found.
    pub(super) fn add(&mut self, found: impl IntoIterator<Item = impl Borrow<Condition>>) {
        for condition in found {
            let condition: &Condition = condition.borrow();
            let all = Arc::make_mut(&mut self.0);
            let of = match all.get_mut(condition.object.namespace()) {
                Some(of) => of,
                None => all.entry(condition.object.namespace().into()).or_default(),
            };
            Arc::make_mut(of).add(condition);
        }
    }

    /// Removes problems, each added before, that are not found any more.
    pub(super) fn remove(&mut self, gone: impl IntoIterator<Item = impl Borrow<Condition>>) {
        for condition in gone {
            let condition: &Condition = condition.borrow();
            let namespace = condition.object.namespace();
            let all = Arc::make_mut(&mut self.0);
            let Some(of) = all.get_mut(namespace).map(Arc::make_mut) else { continue };
            of.remove(condition);
            if of.found.is_empty() {
                all.remove(namespace);
            }
        }
    }

    /// Replaces problems by others.
    pub(super) fn replace(&mut self, before: &[Condition], now: &[Condition]) {
        if before != now {
            // New problems first, so that a problem in both is not removed in between.
            self.add(now);
            self.remove(before);
        }
    }
}

/// Ignores how often each problem was found, which depends on how it was compiled.
impl PartialEq for Conditions {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.iter().eq(other.iter())
    }
}

impl Eq for Conditions {}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::objects::ObjectName;
    use crate::objects::policy::PolicyName;

    fn condition(namespace: &str, message: &str) -> Condition {
        let object = Subject::Pod(ObjectName::new(namespace, "a"));
        Condition { object, severity: Severity::Error, message: message.to_owned() }
    }

    fn messages<'a>(conditions: impl Iterator<Item = &'a Condition>) -> Vec<String> {
        conditions.map(|it| format!("{} {}", it.object, it.message)).collect()
    }

    #[test]
    fn a_problem_is_there_for_as_long_as_anything_finds_it() {
        let (one, two) = (condition("shop", "one"), condition("shop", "two"));
        let other = condition("other", "one");
        let mut conditions = Conditions::default();
        conditions.add([&two, &one, &one, &other]);
        assert_eq!(conditions.iter().count(), 3);
        assert_eq!(messages(conditions.iter()), ["pod other/a one", "pod shop/a one", "pod shop/a two"]);
        conditions.remove([&one, &other]);
        assert_eq!(messages(conditions.iter()), ["pod shop/a one", "pod shop/a two"]);
        conditions.replace(slice::from_ref(&one), slice::from_ref(&two));
        assert_eq!(messages(conditions.iter()), ["pod shop/a two"]);
        conditions.remove([&two, &two, &other]);
        assert_eq!((conditions.iter().count(), conditions.is_empty()), (0, true));
    }

    #[test]
    fn objects_are_counted_once_policies_by_severity_and_of_namespaces_that_are_asked_for() {
        let policy = |namespace: &str, name: &str, severity, message: &str| {
            let name = PolicyName::multi(ObjectName::new(namespace, name));
            Condition { object: Subject::Policy(name), severity, message: message.to_owned() }
        };
        let (error, warning) = (Severity::Error, Severity::Warning);
        let all = [
            policy("shop", "a", error, "one"),
            policy("shop", "a", error, "two"),
            policy("shop", "a", warning, "one"),
            policy("shop", "b", warning, "one"),
            policy("shop", "c", error, "one"),
            policy("other", "a", error, "one"),
            condition("other", "one"),
            condition("other", "two"),
        ];
        let mut conditions = Conditions::default();
        conditions.add(&all);
        conditions.add([&all[0]]);
        let counts = |it: &Conditions, namespaces: &[&'static str]| {
            let Counts { wrong, warned, pods } = it.counts(namespaces.iter().copied());
            (wrong, warned, pods)
        };
        assert_eq!(counts(&conditions, &[]), (0, 0, 1), "pods are counted wherever they are");
        assert_eq!(counts(&conditions, &["shop", "absent"]), (2, 2, 1));
        assert_eq!(counts(&conditions, &["other", "shop"]), (3, 2, 1));
        assert_eq!([0, 3, 7].map(|at| conditions.is_wrong(&all[at].object)), [true, false, true]);
        conditions.remove([&all[0], &all[1], &all[6]]);
        assert_eq!(counts(&conditions, &["shop"]), (2, 2, 1), "each of them has another problem");
        conditions.remove([&all[0], &all[2], &all[7]]);
        assert_eq!(counts(&conditions, &["other", "shop"]), (2, 1, 0));
    }

    #[test]
    fn what_is_new_is_found_among_the_namespaces_that_have_changed() {
        let mut conditions = Conditions::default();
        conditions.add([&condition("shop", "one"), &condition("other", "one")]);
        let before = conditions.clone();
        assert_eq!(messages(conditions.beyond(&before)), [""; 0]);
        conditions.add([&condition("shop", "one"), &condition("shop", "two"), &condition("new", "one")]);
        assert_eq!(messages(conditions.beyond(&before)), ["pod new/a one", "pod shop/a two"]);
        assert_eq!(messages(before.beyond(&conditions)), [""; 0]);
        assert_eq!(conditions.beyond(&Conditions::default()).count(), 4, "all of it");
        assert_ne!(conditions, before);
    }

    #[test]
    fn a_list_has_the_first_of_each_namespace_and_how_many_more_there_are() {
        let mut conditions = Conditions::default();
        let many: Vec<Condition> =
            (0..LISTED + 3).map(|number| condition("hostile", &format!("{number:04}"))).collect();
        conditions.add(&many);
        conditions.add([&condition("shop", "one")]);
        let listed = conditions.listed();
        let last: Vec<String> = messages(listed[LISTED - 1..].iter().map(|it| &**it));
        let expected = [
            "pod hostile/a 0127",
            "namespace hostile 3 more problems of its policies and pods are not shown",
            "pod shop/a one",
        ];
        assert_eq!((last, conditions.iter().count()), (expected.map(str::to_owned).to_vec(), LISTED + 4));
    }
}
