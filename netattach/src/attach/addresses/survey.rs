//! The use of the pools, for operators.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::attach::engine::Engine;
use crate::ipam::{self, Held, Patience, Pool, Survey};
use crate::plan::pools;
use crate::plan::resolve::Network;
use crate::step::Step;

/// Why the state of a pool is unknown.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// It could not be read, or another process holds its lock.
    #[error(transparent)]
    Pool(#[from] ipam::Error),
    /// Reading other pools has taken all the time.
    #[error("not checked: other processes lock too many pools; try again")]
    Late,
}

impl Engine {
    /// Returns the pools that a network's attachments lease from, each with its use, if it could be read before
    /// `due`. If attachments live in another pool than the configuration names, returns theirs. Empty if the
    /// configuration yields no plan.
    pub fn survey(&self, network: &Network, due: Instant) -> Vec<(Pool, Result<Survey, SurveyError>)> {
        let live = self.registry().pools_of(std::iter::once(&network.name));
        let kept = live.get(&network.name).and_then(|live| pools::keep(network, live));
        let Ok(Some(plan)) = self.rehearsed(kept.as_ref().map_or(network, |(network, _)| network)) else {
            return Vec::new();
        };
        let configs = plan.steps.iter().filter_map(|step| match step {
            Step::Lease(config) => Some((config.pool()?, config)),
            _ => None,
        });
        let surveyed = configs.map(|(pool, config)| {
            let survey = || self.node().leases.survey(config).map(Option::unwrap_or_default);
            (pool, before(due, survey))
        });
        surveyed.collect()
    }

    /// Returns those of these pools that attachments have leased from, with their leases, even if no definition names
    /// them. `due`: as for [`Engine::survey`].
    pub fn known_pools(
        &self,
        is_one: impl Fn(&Pool) -> bool,
        due: Instant,
    ) -> BTreeMap<Pool, Result<Vec<Held>, SurveyError>> {
        let known = self.noted_pools().into_iter().filter(is_one);
        let held = known.map(|pool| {
            let held = before(due, || self.node().leases.holders(&pool, Patience::Look));
            (pool, held)
        });
        held.collect()
    }
}

fn before<T>(due: Instant, look: impl FnOnce() -> Result<T, ipam::Error>) -> Result<T, SurveyError> {
    if Instant::now() < due { Ok(look()?) } else { Err(SurveyError::Late) }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Duration;

    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;

    #[test]
    fn pools_that_others_are_at_keep_nobody_waiting_and_no_other_pool_from_being_seen() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let store = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, store, &crate::sync::Arc::default());
        for (number, network) in (1..).zip(["a", "b", "c"]) {
            let mut plan = rig::plan(directory, network, number);
            let Step::Lease(config) = &mut plan.attachments[0].steps[0] else {
                panic!("the first step is a lease")
            };
            if let ipam::Config::HostLocal(config) = config {
                config.network = network.to_owned();
            }
            engine.journal.note_pool(config.pool().unwrap()).unwrap();
            rig::lease(&engine, &plan);
        }
        let locks = ["a", "b"].map(|network| {
            let lock = File::open(directory.join("pools").join(network).join("lock")).unwrap();
            lock.lock().unwrap();
            lock
        });
        let held = |is_one: fn(&Pool) -> bool, due| {
            let known = engine.known_pools(is_one, due);
            known.into_values().map(|held| held.map(|held| held.len())).collect::<Vec<_>>()
        };
        let began = Instant::now();
        let found = held(|_| true, began + ipam::DEADLINE);
        assert!(
            matches!(found[..], [Err(SurveyError::Pool(_)), Err(SurveyError::Pool(_)), Ok(1)]),
            "{found:?}"
        );
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        let found = held(|_| true, Instant::now());
        assert!(matches!(
            found[..],
            [Err(SurveyError::Late), Err(SurveyError::Late), Err(SurveyError::Late)]
        ));
        drop(locks);
        let found = held(|pool| pool.path().ends_with("b"), Instant::now() + ipam::DEADLINE);
        assert!(matches!(found[..], [Ok(1)]), "{found:?}");
    }

    #[test]
    fn of_very_many_pools_a_start_forgets_those_that_no_record_names_and_nobody_has_an_address_in() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let (journal, pools) = (directory.join("journal"), directory.join("pools"));
        let pool = |network: &str| Pool::directory(pools.clone(), network);
        let line = |network: &str| format!("{}\n", serde_json::to_string(&pool(network)).unwrap());
        let unknown = "{\"later\":true}\n".to_owned();
        let unused = (0..1000).map(|number| line(&format!("ci-{number}")));
        let used = ["busy", "named", "net"].map(line);
        let lines: String = unused.chain(used.clone()).chain([unknown.clone()]).collect();
        fs::create_dir(&journal).unwrap();
        fs::write(journal.join("pools.jsonl"), lines).unwrap();
        // A temporary file of a process that was killed.
        fs::write(journal.join("pools.jsonl.new"), "{").unwrap();
        let store = Store::open(&journal).unwrap();
        let engine = rig::engine(directory, store, &crate::sync::Arc::default());
        assert_eq!(engine.noted_pools().len(), 1003);
        rig::lease(&engine, &rig::plan(directory, "a", 1));
        let mut named = rig::plan(directory, "b", 2);
        let Step::Lease(ipam::Config::HostLocal(config)) = &mut named.attachments[0].steps[0] else {
            panic!("the first step is a lease of host-local")
        };
        config.network = "named".to_owned();
        engine.journal.create(rig::key("b"), named).unwrap();
        fs::create_dir(pools.join("busy")).unwrap();
        let lock = File::create(pools.join("busy/lock")).unwrap();
        lock.lock().unwrap();
        engine.adopt().unwrap();
        let left = ["busy", "named", "net"].map(pool);
        assert_eq!(engine.noted_pools(), left);
        let written = fs::read_to_string(journal.join("pools.jsonl")).unwrap();
        assert_eq!(written, [used.concat(), unknown].concat());
        assert!(!journal.join("pools.jsonl.new").exists());
        assert_eq!(Store::open(&journal).unwrap().pools(), left);
        // A few pools are kept although they contain no lease, so that the next operation need not wait for the disk.
        engine.journal.note_pool(pool("new")).unwrap();
        engine.adopt().unwrap();
        assert_eq!(engine.noted_pools().len(), 4);
    }
}
