//! How full the pools are: for operators.

use std::collections::BTreeMap;
use std::time::Instant;

use super::engine::Engine;
use crate::ipam::{self, Held, Patience, Pool, Survey};
use crate::plan::pools;
use crate::plan::resolve::Network;
use crate::step::Step;

/// Why it is not known what a pool has.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// It could not be read, or others are at it.
    #[error(transparent)]
    Pool(#[from] ipam::Error),
    /// Others are at so many pools that no time is left for this one.
    #[error("not looked at: others are at too many pools; ask again")]
    Late,
}

impl Engine {
    /// The pools that attachments of a network get their addresses from, each with how full it is: of those that are looked at
    /// before `due`. Where attachments live in another pool than the configuration names, it is theirs. Empty if the configuration
    /// yields no plan.
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

    /// Those of these pools that attachments have had addresses of, with what is held there: also where no definition names them.
    /// `due`: as of [`Engine::survey`].
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
    use std::fs::File;
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
}
