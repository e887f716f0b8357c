//! How full the pools are: for operators.

use std::collections::BTreeMap;

use super::engine::Engine;
use crate::ipam::{self, Held, Pool, Survey};
use crate::plan::pools;
use crate::plan::resolve::Network;
use crate::step::Step;

impl Engine {
    /// The pools that attachments of a network get their addresses from, each with how full it is. Where attachments live
    /// in another pool than the configuration names, it is theirs. Empty if the configuration yields no plan.
    pub fn survey(&self, network: &Network) -> Vec<(Pool, Result<Survey, ipam::Error>)> {
        let live = self.registry().pools_of(std::iter::once(&network.name));
        let kept = live.get(&network.name).and_then(|live| pools::keep(network, live));
        let Ok(Some(plan)) = self.rehearsed(kept.as_ref().map_or(network, |(network, _)| network)) else {
            return Vec::new();
        };
        let configs = plan.steps.iter().filter_map(|step| match step {
            Step::Lease(config) => Some((config.pool()?, config)),
            _ => None,
        });
        let surveyed = configs
            .map(|(pool, config)| (pool, self.node().leases.survey(config).map(Option::unwrap_or_default)));
        surveyed.collect()
    }

    /// The pools that attachments have had addresses of, with what is held there: also those that no definition names.
    pub fn known_pools(&self) -> BTreeMap<Pool, Result<Vec<Held>, ipam::Error>> {
        let known = self.noted_pools().into_iter();
        known.map(|pool| (pool.clone(), self.node().leases.holders(&pool))).collect()
    }
}
