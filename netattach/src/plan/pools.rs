//! Determines the pool that a network's addresses come from. Pure.
//!
//! # Separate pools
//!
//! host-local keeps a pool in a directory named after the network. A definition whose configuration has no `name`
//! gets the name of its object (NPWG 3.4.2), without the namespace. So definitions with the same name in two
//! namespaces would share a directory, the position from which the search for a free address continues, and
//! exhaustion. For such definitions the directory is one level deeper, below one named after the namespace. The
//! content is the same, and because the key `dataDir` contains the path, the Go plugin finds the directory too when
//! it is executed.
//!
//! # The pool of a live network
//!
//! `name` and `dataDir` of a configuration name the pool, and its author may change them while pods are attached: a
//! second pool could then lease addresses that those pods have. So while attachments live, their pool stays in force,
//! for new ones too; the configuration's own pool is used once the last of them is gone ([`settle`]).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::resolve::{Intent, Network};
use super::{AttachmentPlan, Plan};
use crate::cni::{NetworkList, PluginConf};
use crate::ipam::{self, Pool};
use crate::npwg::NetworkName;
use crate::step::Step;

/// Separates the pools of a list's networks by namespace, see [`ipam::separate`].
pub fn separate(list: &mut NetworkList, namespace: &str) {
    for section in list.plugins.iter_mut().filter_map(|plugin| plugin.ipam_mut()) {
        ipam::separate(section, namespace);
    }
}

/// The pools of live attachments, by network.
pub type Live = BTreeMap<NetworkName, BTreeSet<Pool>>;

/// A pool that stays in force although the network's configuration names another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The network.
    pub network: NetworkName,
    /// The pool that its configuration names.
    pub named: Pool,
    /// The pool in force.
    pub kept: Pool,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its pool {} is not in force: attachments live in pool {}, which new pods get too until the last of them is \
             gone",
            self.named, self.kept
        )
    }
}

/// Returns a pod's networks with the pools in force, and which of these their configurations do not name.
pub fn settle<'i>(intent: &'i Intent, live: &Live) -> (Cow<'i, Intent>, Vec<Kept>) {
    let mut settled = Cow::Borrowed(intent);
    let mut kept = BTreeMap::new();
    let of_network = |network: &Network| keep(network, live.get(&network.name)?);
    if let Some((network, pool)) = of_network(&intent.default) {
        settled.to_mut().default = network;
        kept.insert(pool.network.clone(), pool);
    }
    for (position, (_, network)) in intent.selections.iter().enumerate() {
        let Some((network, pool)) = of_network(network) else { continue };
        if let Some((_, selected)) = settled.to_mut().selections.get_mut(position) {
            *selected = network;
        }
        kept.insert(pool.network.clone(), pool);
    }
    (settled, kept.into_values().collect())
}

/// Returns the network with the pool of its live attachments; `None` if its configuration names that pool, or none.
pub fn keep(network: &Network, live: &BTreeSet<Pool>) -> Option<(Network, Kept)> {
    let named = of_list(&network.list)?;
    let kept = live.first().filter(|_| !live.contains(&named))?.clone();
    let mut list = NetworkList::clone(&network.list);
    let name = list.name.clone();
    for plugin in &mut list.plugins {
        if of_plugin(&name, plugin).as_ref() == Some(&named)
            && let Some(section) = plugin.ipam_mut()
        {
            ipam::use_pool(section, &kept);
        }
    }
    list.rename(kept.network());
    let network = Network { list: Arc::new(list), ..network.clone() };
    let name = network.name.clone();
    Some((network, Kept { network: name, named, kept }))
}

/// Returns the pools of a plan's attachments, including those that other plugins create.
pub fn of_plan(plan: &Plan) -> BTreeSet<(NetworkName, Pool)> {
    let of_attachment = |attachment: &AttachmentPlan| attachment.steps.iter().find_map(of_step);
    let attachments = plan.attachments.iter();
    attachments.filter_map(|it| Some((it.network.clone(), of_attachment(it)?))).collect()
}

fn of_step(step: &Step) -> Option<Pool> {
    match step {
        Step::Lease(config) => config.pool(),
        Step::Delegate(delegate) => Pool::of(&delegate.config),
        _ => None,
    }
}

fn of_list(list: &NetworkList) -> Option<Pool> {
    list.plugins.iter().find_map(|plugin| of_plugin(&list.name, plugin))
}

fn of_plugin(name: &str, plugin: &PluginConf) -> Option<Pool> {
    let section = plugin.raw().get("ipam")?;
    let config = [("name", Value::from(name)), ("ipam", section.clone())];
    Pool::of(&config.map(|(key, value)| (key.to_owned(), value)).into_iter().collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A network of two plugins, the first of which has this address management.
    fn network(name: &str, ipam: Value) -> Network {
        let text = json!({"name": name, "plugins": [{"type": "bridge", "ipam": ipam}, {"type": "tuning"}]});
        Network {
            name: "shop/lan".into(),
            list: Arc::new(NetworkList::parse(text.to_string().as_bytes()).unwrap()),
            resource: None,
            enforce: None,
            ethertypes: Vec::new(),
            device: None,
        }
    }

    #[test]
    fn the_pool_of_live_attachments_stays_in_force_whatever_the_configuration_names() {
        let pool = |data_dir: &str, name: &str| Pool::directory(data_dir, name);
        let (old, new) = (pool("/p/@shop", "lan"), pool("/p", "lan-2"));
        let host_local =
            |data_dir: &str| json!({"type": "host-local", "dataDir": data_dir, "subnet": "10.1.0.0/24"});
        let renamed = || network("lan-2", host_local("/p"));
        let table = [
            // The name and the directory change, or one of them.
            (renamed(), vec![old.clone()], Some((old.clone(), new.clone()))),
            (network("lan", host_local("/p")), vec![old.clone()], Some((old.clone(), pool("/p", "lan")))),
            (
                network("lan-2", host_local("/p/@shop")),
                vec![old.clone()],
                Some((old.clone(), pool("/p/@shop", "lan-2"))),
            ),
            // Nothing changes, nothing lives, or an earlier version has let two pools live.
            (network("lan", host_local("/p/@shop")), vec![old.clone()], None),
            (renamed(), vec![], None),
            (renamed(), vec![new, old.clone()], None),
            // Addresses that come from no pool of this node.
            (network("lan-2", json!({"type": "static"})), vec![old.clone()], None),
            (network("lan-2", json!({"type": "whereabouts"})), vec![old], None),
        ];
        for (network, live, expected) in table {
            let found = keep(&network, &live.into_iter().collect());
            let of_found = found.as_ref().map(|(changed, kept)| {
                assert_eq!((of_list(&changed.list), &kept.network), (Some(kept.kept.clone()), &network.name));
                assert_eq!(changed.list.to_value()["name"], json!(kept.kept.network()));
                assert_eq!(changed.list.plugins[1], network.list.plugins[1]);
                let ranges = changed.list.plugins[0].raw()["ipam"].get("subnet");
                assert_eq!(ranges, Some(&json!("10.1.0.0/24")), "the rest is as configured");
                (kept.kept.clone(), kept.named.clone())
            });
            assert_eq!(of_found, expected, "{:?}", network.list);
        }
    }

    #[test]
    fn every_network_of_a_pod_is_settled_and_told_of_once() {
        let lan = network("lan-2", json!({"type": "host-local", "dataDir": "/p"}));
        let selection = || crate::npwg::Selection::of(crate::npwg::NetworkRef::new("shop", "lan"));
        let other = Network { name: "shop/other".into(), ..lan.clone() };
        let selections = vec![(selection(), lan.clone()), (selection(), other.clone()), (selection(), lan)];
        let intent = Intent {
            default: other,
            default_selection: None,
            selections,
            warnings: Vec::new(),
            cluster: None,
        };
        let old = Pool::directory("/p", "lan");
        let live = Live::from([("shop/lan".into(), BTreeSet::from([old.clone()]))]);
        let (settled, kept) = settle(&intent, &live);
        let names: Vec<&str> = settled.networks().map(|network| network.list.name.as_str()).collect();
        assert_eq!(names, ["lan-2", "lan", "lan-2", "lan"]);
        assert_eq!(
            kept.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "its pool /p/lan-2 is not in force: attachments live in pool /p/lan, which new pods get too until the last \
              of them is gone"
            ]
        );
        assert!(matches!(settle(&intent, &Live::default()), (Cow::Borrowed(_), kept) if kept.is_empty()));
    }

    #[test]
    fn a_pool_is_one_level_deeper_for_each_plugin_that_uses_host_local() {
        for (ipam, data_dir) in [
            (json!({"type": "host-local"}), json!("/var/lib/cni/networks/@shop")),
            (json!({"type": "host-local", "dataDir": ""}), json!("/var/lib/cni/networks/@shop")),
            (json!({"type": "host-local", "dataDir": "/a/b"}), json!("/a/b/@shop")),
            (json!({"type": "host-local", "dataDir": 1}), json!(1)),
            (json!({"type": "static"}), Value::Null),
            (json!({}), Value::Null),
        ] {
            let text = json!({"name": "n", "plugins": [{"type": "a"}, {"type": "b", "ipam": ipam}]});
            let mut list = NetworkList::parse(text.to_string().as_bytes()).unwrap();
            separate(&mut list, "shop");
            let raw = list.plugins[1].raw();
            assert_eq!(raw["ipam"].get("dataDir").cloned().unwrap_or_default(), data_dir, "{ipam}");
            assert_eq!(list.plugins[0].raw().get("ipam"), None);
        }
    }
}
