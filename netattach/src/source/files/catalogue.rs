//! What the files of a directory give, put together: of two objects with one name the first counts, that of the first file by
//! its path, and in it of the first document.
//!
//! It is kept up to date file by file, and comes to the same in whatever order they come.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file_version::FileVersion;
use crate::objects::policy::PolicyKind;
use crate::objects::{Objects, Problem, Shared};
use crate::source::read::manifest::{Key, Object};

/// What one file gives.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Objects with the number of their document, in its order.
    pub(super) objects: Vec<(Option<usize>, Object)>,
    pub(super) problems: Vec<Problem>,
    /// The file as it was when this was read, if a later change is sure to show in it.
    pub(super) version: Option<FileVersion>,
}

/// Files, and places in them, in order. Most objects have one, so it is to be small.
type Places = Vec<(Arc<Path>, usize)>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    files: BTreeMap<PathBuf, Contents>,
    /// Which files give an object, and at which place of theirs; never none.
    givers: BTreeMap<Key, Places>,
    /// Names that several objects have.
    contested: BTreeSet<Key>,
    /// Files with problems.
    failing: BTreeSet<PathBuf>,
    /// The objects that count, without problems.
    objects: Objects,
}

impl Catalogue {
    /// The files.
    pub(super) fn files(&self) -> &BTreeMap<PathBuf, Contents> {
        &self.files
    }

    /// Puts what a file gives now in the place of what it gave before; `None`: nothing any more.
    pub(super) fn put(&mut self, path: &Path, now: Option<Contents>) {
        let before = self.files.remove(path).unwrap_or_default();
        let mut concerned = BTreeMap::new();
        for (position, (_, object)) in before.objects.into_iter().enumerate() {
            let key = object.key();
            if let Some(givers) = self.givers.get_mut(&key)
                && let Ok(at) = givers.binary_search_by(|(of, at)| (&**of, *at).cmp(&(path, position)))
            {
                givers.remove(at);
            }
            concerned.insert(key, object);
        }
        self.failing.remove(path);
        if let Some(now) = now {
            let shared: Arc<Path> = path.into();
            for (position, (_, object)) in now.objects.iter().enumerate() {
                let key = object.key();
                // Not doubled at once: most stay alone.
                let givers = self.givers.entry(key.clone()).or_insert_with(|| Vec::with_capacity(1));
                let place = (Arc::clone(&shared), position);
                if let Err(at) = givers.binary_search(&place) {
                    givers.insert(at, place);
                }
                concerned.insert(key, object.clone());
            }
            if !now.problems.is_empty() {
                self.failing.insert(path.to_owned());
            }
            self.files.insert(path.to_owned(), now);
        }
        for (key, object) in concerned {
            self.decide(key, &object);
        }
    }

    /// Sees to it that the first object of a name counts, and no other. `alike`: any of that name.
    fn decide(&mut self, key: Key, alike: &Object) {
        let Some(givers) = self.givers.get(&key).filter(|givers| !givers.is_empty()) else {
            self.givers.remove(&key);
            self.contested.remove(&key);
            return take_out(&mut self.objects, alike);
        };
        let first =
            givers.first().and_then(|(path, position)| self.files.get(&**path)?.objects.get(*position));
        if let Some((_, first)) = first {
            insert(&mut self.objects, first);
        }
        if givers.len() > 1 {
            self.contested.insert(key);
        } else {
            self.contested.remove(&key);
        }
    }

    /// Everything, with the problems in the order of the files.
    pub(super) fn objects(&self) -> Objects {
        let mut problems: BTreeMap<&Path, Vec<Problem>> = BTreeMap::new();
        for path in &self.failing {
            let of_file = self.files.get(path).map(|contents| contents.problems.clone());
            problems.insert(path, of_file.unwrap_or_default());
        }
        for (path, _, problem) in self.not_counting() {
            problems.entry(path).or_default().push(problem);
        }
        Objects { problems: problems.into_values().flatten().collect(), ..self.objects.clone() }
    }

    /// The objects whose name another one has that comes first, in the order of their places.
    fn not_counting(&self) -> BTreeSet<(&Path, usize, Problem)> {
        let mut found = BTreeSet::new();
        for key in &self.contested {
            let mut givers = self.givers.get(key).into_iter().flatten();
            let Some((origin, _)) = givers.next() else { continue };
            for (path, position) in givers {
                let contents = self.files.get(&**path);
                let document =
                    contents.and_then(|contents| contents.objects.get(*position)).and_then(|(it, _)| *it);
                let message = format!("{key} is in {} already", origin.display());
                found.insert((&**path, *position, Problem { file: path.to_path_buf(), document, message }));
            }
        }
        found
    }
}

fn insert(objects: &mut Objects, object: &Object) {
    match object {
        Object::Pod(pod) => set(&mut objects.pods, &pod.name, pod),
        Object::Namespace { name, labels } => set(&mut objects.namespaces, name, labels),
        Object::Definition(definition) => {
            set(&mut objects.definitions, &definition.reference(), definition);
        }
        Object::Policy(policy) => set(policies(objects, policy.name.kind), &policy.name.object, policy),
    }
}

fn take_out(objects: &mut Objects, object: &Object) {
    match object {
        Object::Pod(pod) => drop(objects.pods.remove(&pod.name)),
        Object::Namespace { name, .. } => drop(objects.namespaces.remove(name)),
        Object::Definition(definition) => drop(objects.definitions.remove(&definition.reference())),
        Object::Policy(policy) => {
            drop(policies(objects, policy.name.kind).remove(&policy.name.object));
        }
    }
}

fn policies(
    objects: &mut Objects,
    kind: PolicyKind,
) -> &mut Shared<crate::objects::ObjectName, std::sync::Arc<crate::objects::policy::Policy>> {
    match kind {
        PolicyKind::Multi => &mut objects.policies,
        PolicyKind::Network => &mut objects.network_policies,
    }
}

/// What says the same stays the value that it is: whoever looks for changes compares addresses.
fn set<K: Ord + Clone, V: PartialEq + Clone>(map: &mut Shared<K, V>, key: &K, value: &V) {
    if map.get(key) != Some(value) {
        map.insert(key.clone(), value.clone());
    }
}
