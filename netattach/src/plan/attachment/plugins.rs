//! The plugins of a network's list, each with the configuration that it receives: the first, which creates the
//! interface, and the chained ones that are not folded into it.

use serde_json::{Map, Value};

use super::super::resolve::Options;
use super::super::{Sandbox, chained, pod_sources};
use super::Wanted;
use super::capability::check_offered;
use super::native::{is_own, native};
use crate::cni::{CniError, PluginConf, code};
use crate::link::{Driver, dataplane};

/// A plugin in a network's list.
pub(super) struct Configured<'a> {
    /// Its position in the list, from 0.
    pub(super) position: usize,
    pub(super) kind: &'a str,
    /// The configuration that it receives.
    pub(super) config: Map<String, Value>,
}

/// The plugins of a network's list, without those that are folded into the interface before them as properties.
pub(super) struct Plugins<'a> {
    /// The driver that creates the interface, if netattach does.
    pub(super) driver: Option<&'static dyn Driver>,
    pub(super) first: Configured<'a>,
    pub(super) chained: Vec<Configured<'a>>,
    /// Whether the list enables the dataplane for an interface that netattach creates.
    pub(super) has_dataplane: bool,
}

pub(super) fn configured<'a>(
    wanted: &Wanted<'a>,
    capabilities: &Map<String, Value>,
) -> Result<Vec<Configured<'a>>, CniError> {
    let plugins = wanted.network.list.plugins.iter().enumerate();
    let configured = |(position, plugin): (usize, &'a PluginConf)| {
        let config = wanted.config(plugin, capabilities)?;
        Ok(Configured { position, kind: plugin.plugin_type(), config })
    };
    plugins.map(configured).collect()
}

/// Folds plugins that only set properties of the interface into its configuration ([`chained::fold`]).
pub(super) fn folded<'a>(plugins: Vec<Configured<'a>>, options: &Options) -> Result<Plugins<'a>, CniError> {
    let mut plugins = plugins.into_iter();
    let Some(mut first) = plugins.next() else {
        return Err(CniError::new(code::INVALID_CONFIG, "plugins: the list is empty"));
    };
    let chained: Vec<_> = plugins.collect();
    let is_ours = |plugin: &Configured<'_>| is_own(plugin.kind, plugin.kind, options);
    let by_us = chained.iter().filter(|plugin| is_ours(plugin));
    chained::check_once(by_us.map(|plugin| (plugin.position, plugin.kind, &plugin.config)))?;
    let Some(driver) = native(first.kind, options) else {
        return Ok(Plugins { driver: None, first, chained, has_dataplane: false });
    };
    let mut has_dataplane = false;
    let mut rest = Vec::with_capacity(chained.len());
    for plugin in chained {
        if plugin.kind == dataplane::KIND {
            check_offered(plugin.kind, &plugin.config)?;
            has_dataplane = true;
        }
        if !is_ours(&plugin) || !chained::fold(driver, &mut first.config, plugin.kind, &plugin.config)? {
            rest.push(plugin);
        }
    }
    Ok(Plugins { driver: Some(driver), first, chained: rest, has_dataplane })
}

/// Adds the pod's requests about source checks to the configuration of the plugin that enables the dataplane.
pub(super) fn ask_sources(
    plugins: &mut Plugins<'_>,
    sandbox: &Sandbox,
    wanted: &Wanted<'_>,
    options: &Options,
) -> Result<(), CniError> {
    let behind = plugins.chained.iter_mut().find(|plugin| plugin.kind == dataplane::KIND);
    let (sources, is_judged) = match behind {
        Some(plugin) => (&mut plugin.config, true),
        None => {
            let config = &mut plugins.first.config;
            let is_judged = plugins.driver.is_some_and(|driver| driver.is_judged(config));
            (config, is_judged)
        }
    };
    let place = (sandbox, &wanted.network.name, is_judged);
    pod_sources::apply(sources, place, wanted.asked, &options.pod_sources)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cni::CniArgs;
    use crate::link::{Facts, bandwidth};
    use crate::plan::attachment::attachment;
    use crate::plan::fixtures::{self, network};

    #[test]
    fn an_interface_is_limited_by_one_plugin() {
        let limited = json!({"type": "bandwidth", "ingressRate": 5000});
        let check = |first: &Value, last: &Value, exec: &[&str]| {
            let plugins = [first, &limited, &json!({"type": "other"}), last];
            let network = network(&json!({"name": "lan", "cniVersion": "1.0.0", "plugins": plugins}));
            let facts = Facts::default();
            let wanted = fixtures::wanted(&network, &facts);
            let exec = exec.iter().map(|kind| (*kind).to_owned()).collect();
            let options = Options { exec, ..Options::default() };
            let sandbox = fixtures::sandbox("a");
            let planned = attachment(&sandbox, &wanted, &CniArgs::default(), &options, None);
            planned.map(drop).map_err(|error| (error.code, error.msg))
        };
        let msg = "attach net1 (shop/lan): plugins[3].type: bandwidth: a plugin before it limits the interface already";
        let other = json!({"type": "bandwidth", "egressRate": 6000});
        let bridge =
            json!({"type": "bridge", "ipam": {"type": "static", "addresses": [{"address": "10.1.0.2/24"}]}});
        let executed = json!({"type": "flannel"});
        for first in [&bridge, &executed] {
            for last in [&limited, &other] {
                assert_eq!(check(first, last, &[]), Err((code::INVALID_CONFIG, msg.to_owned())), "{first}");
            }
        }
        assert_eq!(check(&executed, &json!({"type": "bandwidth"}), &[]), Ok(()));
        assert_eq!(check(&executed, &other, &[bandwidth::KIND]), Ok(()));
    }
}
