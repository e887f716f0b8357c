//! The resources that DELs of containers may wait for, for a caller with more DELs than can run at a time.

use std::collections::{BTreeMap, BTreeSet};

use crate::attach::engine::Engine;
use crate::journal::{JournalKey, Loaded};
use crate::waits::{Footprint, footprint};

impl Engine {
    /// Returns the resources that rolling these containers back may wait for, as far as known: none for a record that
    /// is missing or cannot be read. Reads the records of containers that are not attached, for example those that an
    /// earlier agent has begun to detach.
    pub fn needs_of(&self, containers: &BTreeSet<&str>) -> BTreeMap<String, Footprint> {
        let attached = containers.iter().flat_map(|container| self.registry.of_container(container));
        let recorded = self.journal.keys().unwrap_or_default().into_iter();
        let recorded = recorded.filter(|key| containers.contains(key.container_id.as_str()));
        let keys: BTreeSet<JournalKey> = attached.map(|it| it.key.clone()).chain(recorded).collect();
        let mut needs: BTreeMap<String, Footprint> = BTreeMap::new();
        for key in keys {
            let of_key = match self.registry.get(&key) {
                Some(attached) => footprint(&attached.plan),
                None => match self.journal.peek(&key) {
                    Ok(Loaded::Whole(record)) => footprint(&record.plan),
                    _ => continue,
                },
            };
            needs.entry(key.container_id).or_default().extend(of_key);
        }
        needs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;

    #[test]
    fn of_attached_containers_memory_tells_and_of_others_their_records() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let store = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, store, &crate::sync::Arc::default());
        let plan = rig::plan(directory, "a", 1);
        let needed = footprint(&plan);
        assert!(!needed.is_empty(), "it leases from a pool");
        engine.journal.create(rig::key("a"), plan).unwrap();
        let of = |containers: &[&str]| engine.needs_of(&containers.iter().copied().collect());
        let expected = BTreeMap::from([(rig::key("a").container_id, needed)]);
        assert_eq!(of(&[&rig::key("a").container_id, "gone"]), expected);
        assert_eq!(of(&["gone"]), BTreeMap::new());
    }
}
