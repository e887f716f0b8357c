//! Warnings about parts of a configuration, and of a pod's request, that have no effect.

use super::super::resolve::Options;
use super::Wanted;
use super::native::is_native;
use crate::cni::{self, PluginConf};
use crate::npwg::Selection;
use crate::step::Step;

/// Most keys that a warning lists.
const SHOWN_KEYS: usize = 8;

/// Warnings about parts of the configuration and of the pod's request that have no effect.
pub(super) fn warnings(wanted: &Wanted<'_>, steps: &[Step], options: &Options) -> Vec<String> {
    let plugins = wanted.network.list.plugins.iter();
    let own = plugins.filter(|plugin| is_native(plugin.plugin_type(), options));
    let claim = wanted.asked.and_then(|selection| claim_without_effect(selection, steps));
    own.filter_map(without_effect).chain(claim).collect()
}

/// Returns a warning if the configuration of a plugin that netattach implements has keys that it does not know, which
/// may be misspelt.
pub(in crate::plan) fn without_effect(plugin: &PluginConf) -> Option<String> {
    let unknown = cni::keys::unknown(plugin.raw());
    let (shown, more) = unknown.split_at(unknown.len().min(SHOWN_KEYS));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let plural = if unknown.len() > 1 { "s" } else { "" };
    let kind = plugin.plugin_type();
    (!unknown.is_empty()).then(|| {
        format!(
            "key{plural} {}{more}: without effect, netattach's own {kind} plugin has no such key",
            shown.join(", ")
        )
    })
}

/// Returns a warning if the pod claims an address and netattach's own IPAM serves the attachment, which does not
/// support claims. The standard lets such an attachment succeed (section 4.1.2.1.11).
fn claim_without_effect(selection: &Selection, steps: &[Step]) -> Option<String> {
    let claim = selection.ipam_claim_reference.as_deref()?;
    let kind = steps.iter().find_map(|step| match step {
        Step::Lease(config) => Some(config.kind().name()),
        _ => None,
    })?;
    Some(format!("ipam-claim-reference {claim:?} has no effect: {kind} keeps no claims"))
}
