//! Estimates the memory that an ADD takes before reading any of its configurations: the plan holds the configurations
//! of the pod's networks, as parsed values, for the duration of the ADD. Also determines whether the ADD takes
//! devices, and the names of its networks.

use std::collections::BTreeMap;

use super::IntentReader;
use crate::budget;
use crate::cni::{Value, json};
use crate::npwg::{self, DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, NetworkRef, RESOURCE_ANNOTATION};
use crate::objects::{ObjectName, Objects, Pod};
use crate::plan::PodRef;

/// Bytes of memory that one value of a configuration takes in a plan, in addition to its text; measured with
/// configurations of many values.
const VALUE: usize = 512;

impl IntentReader {
    /// Returns the memory in bytes that the networks of a pod take. Networks with a configuration on disk, where only
    /// the node's administrator writes, do not count, nor do configurations that are refused anyway.
    pub fn weight(&self, networks: &[NetworkRef]) -> usize {
        weight_of_networks(&self.source.snapshot(), networks)
    }

    /// Does the same for a further network of a live pod, requested as for [`IntentReader::one_more`].
    pub fn weight_of_one_more(&self, pod: Option<&PodRef>, element: &Value) -> usize {
        selected_by(pod, element).map_or(0, |it| weight_of_networks(&self.source.snapshot(), &[it]))
    }

    /// Returns the networks that an ADD of the pod will attach, in order, as far as they are known without reading
    /// their configurations: none for an unknown pod.
    pub fn named(&self, pod: &ObjectName) -> Vec<NetworkRef> {
        let objects = self.source.snapshot();
        let Some(pod) = objects.pods.get(pod) else { return Vec::new() };
        let chooses = pod.annotations.contains_key(DEFAULT_NETWORK_ANNOTATION);
        let default = self.restrictions.default_network.clone().filter(|_| !chooses);
        default.into_iter().chain(self.selected(pod)).collect()
    }

    /// Whether one of a pod's networks, or the default one, uses devices, so that the kubelet must be asked for those
    /// of the pod.
    pub fn may_need_devices(&self, networks: &[NetworkRef]) -> bool {
        let objects = self.source.snapshot();
        networks.iter().chain(&self.restrictions.default_network).any(|network| {
            let definition = objects.definitions.get(network);
            definition.is_some_and(|definition| definition.annotations.contains_key(RESOURCE_ANNOTATION))
        })
    }

    /// Returns the networks that the annotations of a pod name. An invalid annotation names none: it is refused when
    /// it is read.
    pub(in crate::attach) fn selected(&self, pod: &Pod) -> Vec<NetworkRef> {
        let parsed = |annotation: &str, parse: &dyn Fn(&str) -> Vec<NetworkRef>| {
            pod.annotations.get(annotation).map(|text| parse(text)).unwrap_or_default()
        };
        let references = |parsed: Result<npwg::Parsed, npwg::SelectionError>| -> Vec<NetworkRef> {
            let selections = parsed.map(|parsed| parsed.selections).unwrap_or_default();
            selections.into_iter().map(|selection| selection.network).collect()
        };
        let mut networks = parsed(DEFAULT_NETWORK_ANNOTATION, &|text| {
            references(npwg::parse_default_network(text, &self.default_namespace))
        });
        networks.extend(parsed(NETWORKS_ANNOTATION, &|text| {
            references(npwg::parse_networks(text, &pod.name.namespace))
        }));
        networks
    }
}

/// Returns the network that a request for a further one names; `None`: the request is invalid, and is refused when it
/// is read.
pub fn selected_by(pod: Option<&PodRef>, element: &Value) -> Option<NetworkRef> {
    let namespace = pod.map(|pod| pod.name.namespace.as_str()).unwrap_or_default();
    Some(npwg::parse_selection(element, namespace).ok()?.0.network)
}

fn weight_of_networks(objects: &Objects, networks: &[NetworkRef]) -> usize {
    let (mut known, mut text, mut weight) = (BTreeMap::new(), 0, 0);
    for network in networks {
        let definition = objects.definitions.get(network);
        let Some(config) = definition.and_then(|definition| definition.config.as_deref()) else {
            continue;
        };
        text += config.len();
        if config.len() > budget::CONFIG.most || text > budget::POD_TEXT.most {
            break;
        }
        let values = *known.entry(network).or_insert_with(|| json::count_values(config.as_bytes()));
        weight += config.len() + values * VALUE;
    }
    weight
}
