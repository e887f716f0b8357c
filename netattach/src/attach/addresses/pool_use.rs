//! The pools that attachments use, by network: two attachments of one network never have different pools.

use std::collections::BTreeMap;

use crate::cni::{CniError, code};
use crate::ipam::Pool;
use crate::journal::JournalKey;
use crate::npwg::NetworkName;
use crate::plan::Plan;
use crate::plan::pools::{self, Live};

/// The pools of every plan that is being carried out, is in force, or could not be rolled back.
#[derive(Debug, Default)]
pub(in crate::attach) struct PoolUse {
    of_plans: BTreeMap<JournalKey, Box<[(NetworkName, Pool)]>>,
    /// How many plans use each pool.
    users: BTreeMap<NetworkName, BTreeMap<Pool, u32>>,
}

impl PoolUse {
    /// Notes the pools of a plan that is in force. A plan that is noted already stays as it is: an outline does not
    /// name the pools of other plugins.
    pub(in crate::attach) fn hold(&mut self, plan: &Plan) {
        let key = key(plan);
        if self.of_plans.contains_key(&key) {
            return;
        }
        let pools = pools::of_plan(plan);
        if pools.is_empty() {
            return;
        }
        for (network, pool) in &pools {
            *self.users.entry(network.clone()).or_default().entry(pool.clone()).or_default() += 1;
        }
        self.of_plans.insert(key, pools.into_iter().collect());
    }

    /// Notes the pools of a new plan.
    ///
    /// # Errors
    /// Code 11: since the plan was made, another pod of the network was given another pool.
    pub(in crate::attach) fn claim(&mut self, plan: &Plan) -> Result<(), CniError> {
        for (network, pool) in pools::of_plan(plan) {
            let Some(live) = self.users.get(&network) else { continue };
            if let Some(other) = live.keys().next().filter(|_| !live.contains_key(&pool)) {
                let msg = format!(
                    "network {network}: its definition has changed to pool {pool} while a pod was attached with pool {other}"
                );
                return Err(CniError::new(code::TRY_AGAIN_LATER, msg));
            }
        }
        self.hold(plan);
        Ok(())
    }

    /// Forgets the pools of a plan.
    pub(in crate::attach) fn free(&mut self, key: &JournalKey) {
        for (network, pool) in self.of_plans.remove(key).unwrap_or_default() {
            let Some(users) = self.users.get_mut(&network) else { continue };
            if let Some(count) = users.get_mut(&pool) {
                *count -= 1;
            }
            users.retain(|_, count| *count > 0);
            if users.is_empty() {
                self.users.remove(&network);
            }
        }
    }

    /// Returns the pools of these networks.
    pub(in crate::attach) fn of<'n>(&self, networks: impl Iterator<Item = &'n NetworkName>) -> Live {
        let of_network =
            |name: &NetworkName| Some((name.clone(), self.users.get(name)?.keys().cloned().collect()));
        networks.filter_map(of_network).collect()
    }

    /// Returns the pools of all networks.
    pub(in crate::attach) fn all(&self) -> Live {
        self.of(self.users.keys())
    }
}

/// The key of a plan's record.
pub(in crate::attach) fn key(plan: &Plan) -> JournalKey {
    JournalKey { container_id: plan.sandbox.container_id.clone(), ifname: plan.sandbox.ifname.clone() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::attach::rig;

    #[test]
    fn a_network_has_one_pool_until_its_last_attachment_is_gone() {
        let old = |container: &str| rig::plan(Path::new("/old"), container, 1);
        let new = |container: &str| rig::plan(Path::new("/new"), container, 1);
        let network = NetworkName::from("shop/net");
        let live = |pools: &PoolUse| pools.all().remove(&network).unwrap_or_default();
        let (first, second) = (Pool::directory("/old/pools", "net"), Pool::directory("/new/pools", "net"));
        let mut pools = PoolUse::default();
        pools.claim(&old("a")).unwrap();
        pools.claim(&old("b")).unwrap();
        // Noted again when it is attached, and when a restarted agent finds it.
        pools.hold(&old("a").outline());
        assert_eq!(live(&pools), [first.clone()].into());
        let error = pools.claim(&new("c")).unwrap_err();
        assert_eq!(
            (error.code, error.msg.as_str()),
            (
                11,
                "network shop/net: its definition has changed to pool /new/pools/net while a pod was attached with pool \
                 /old/pools/net"
            )
        );
        pools.free(&key(&old("a")));
        pools.free(&key(&old("a")));
        assert_eq!(live(&pools), [first].into());
        pools.free(&key(&old("b")));
        assert_eq!(live(&pools), BTreeSet::new());
        pools.claim(&new("c")).unwrap();
        assert_eq!(live(&pools), [second].into());
    }
}
