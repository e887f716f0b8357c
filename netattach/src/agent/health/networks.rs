//! The looks at the default network, at single networks, and at the files that describe them.

use std::time::Duration;

use super::look::Seen;
use super::pool_uses::PoolUses;
use super::share::shared;
use super::{Health, MOST_TROUBLES, NOT_IN_FORCE, note};
use crate::agent::node::plugin_root;
use crate::cni::{CniError, code};
use crate::error_chain::{Chain, clipped};
use crate::plan::gc::Defined;
use crate::plan::resolve::Network;
use crate::rpc::message::Condition;
use crate::sync::locked;

/// Most pools whose use is kept.
const MOST_POOLS: usize = 1024;
/// Longest wait for one plugin. STATUS has to be cheap; a plugin that takes longer counts as failed.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(5);

impl Health {
    /// Records the networks that could not be attached, and those without a free address.
    pub(super) fn look_at_networks(&self) -> Seen {
        let cni_path = locked(&self.cni_path).clone();
        // A definition that yields no plan is reported as the definition's trouble (`health::trouble`).
        let planned = |defined: &Defined| self.engine.check_plan(&defined.network).is_ok();
        // A metrics scrape during the check gets the previous values.
        let before = locked(&self.pools).clone();
        let mut pools = PoolUses::default();
        // Every network is checked, regardless of the number of problems, to record the use of all pools.
        let troubled = self.intents.defined().into_iter().filter(planned).filter_map(|defined| {
            let looked = self.engine.pools(&defined.network);
            let room = pools.note(&before, &defined.network.name.to_string(), looked);
            // Other problems of the default network are found by its own check.
            let found = match defined.default {
                true => Ok(()),
                false => self.engine.check_network(&defined.network, &cni_path),
            };
            let found = found.and(room);
            let problem = clipped(found.err()?.to_string());
            Some(Condition { object: format!("network {}", defined.network.name), problem })
        });
        let rows = shared(troubled.collect(), MOST_TROUBLES);
        note("network cannot be attached", &self.not_attachable, rows);
        pools.keep_most(MOST_POOLS);
        *locked(&self.pools) = pools;
        self.engine.forget_unused_pools();
        self.look_at_files();
        Ok(String::new())
    }

    /// Checks the default network and updates the runtime's file. The file is removed only by `cniConf.remove`: without it
    /// the runtime uses another plugin's.
    pub(super) fn look_at_network(&self) -> Seen {
        // Set before anything is read, so that changes made meanwhile trigger another check.
        if let Some(watch) = &self.watch {
            let mut directories = self.intents.default_directories();
            directories.extend(self.conf.as_ref().map(|keeper| keeper.conf().directory().to_owned()));
            watch.set(&directories);
        }
        let network = self.usable_network();
        if let Some(keeper) = &self.conf {
            self.file.take(|| keeper.keep(network.as_ref().ok().map(|network| &*network.list)));
        }
        Ok(network?.name.to_string())
    }

    /// Records the files that should describe networks but are invalid.
    fn look_at_files(&self) {
        let unusable = self.intents.unusable_files().into_iter();
        let unusable = unusable.map(|(path, error)| Condition {
            object: path.display().to_string(),
            problem: Chain(&error).to_string(),
        });
        note(NOT_IN_FORCE, &self.unusable, unusable.collect());
    }

    pub(super) fn ask_plugins(&self) -> Seen {
        // Problems with the configuration are reported by the other check.
        let Ok(network) = self.default_network() else { return Ok(String::new()) };
        let cni_path = locked(&self.cni_path).clone();
        let patience = PLUGIN_PATIENCE.min(self.engine.node().delegate.timeout);
        self.engine.ask_plugins(&network, &cni_path, patience).map(|()| String::new())
    }

    /// Returns the default network, if it could be attached now.
    pub(super) fn usable_network(&self) -> Result<Network, CniError> {
        let network = self.default_network();
        self.look_at_plugins_root(network.as_ref().ok());
        let network = network?;
        let cni_path = locked(&self.cni_path).clone();
        self.engine
            .check_network(&network, &cni_path)
            .map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })?;
        Ok(network)
    }

    /// Records the plugins of the default network that may lack files of the node. Done before the
    /// runtime's file is written. Attaches are not refused for this reason, as there are plugins that need
    /// no such files.
    fn look_at_plugins_root(&self, network: Option<&Network>) {
        if !self.forgot_root {
            return;
        }
        let row = network.and_then(|network| {
            let executed = self.engine.executed(network);
            plugin_root::without_the_nodes_files(&network.name.to_string(), &executed)
        });
        note("plugins may not find what they need", &self.without_files, row.into_iter().collect());
    }

    pub(super) fn default_network(&self) -> Result<Network, CniError> {
        self.intents.check_default().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))
    }
}
