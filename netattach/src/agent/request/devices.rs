//! Assigns devices to a pod's networks: asks the kubelet before an operation begins, and gives each network
//! its own device.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use crate::agent::Agent;
use crate::attach::{Attached, Engine};
use crate::cni::{CniError, Value, code};
use crate::error_chain::Chain;
use crate::kubelet::{self, ContainerDevices, Want, allocate};
use crate::npwg::status::Device;
use crate::npwg::{NetworkRef, Selection};
use crate::plan::PodRef;
use crate::plan::resolve::{Intent, Network};

/// The resource of a network, and the device of that resource that the pod's selection names.
type Named = (String, Option<String>);

/// The kubelet's answer on a pod's devices; empty if the kubelet was not asked.
pub(in crate::agent) type Asked = OnceLock<Result<Vec<ContainerDevices>, Arc<kubelet::Error>>>;

impl Agent {
    /// Asks the kubelet for the devices of a pod if one of its networks may need one.
    pub(super) async fn ask_for_devices(&self, pod: &PodRef, networks: &[NetworkRef], asked: &Asked) {
        if self.intents.may_need_devices(networks) {
            self.ask_for_devices_of(pod, asked).await;
        }
    }

    /// Asks the kubelet for the devices of a live pod if the additional network may need one.
    pub(super) async fn ask_for_device_of_one_more(
        &self,
        pod: Option<&PodRef>,
        element: &Value,
        asked: &Asked,
    ) {
        let wanted = self.intents.one_more(pod, element);
        if let Some(pod) = pod.filter(|_| wanted.is_ok_and(|(_, network)| network.resource.is_some())) {
            self.ask_for_devices_of(pod, asked).await;
        }
    }

    /// Asks the kubelet for the devices of a pod. Uses the source's uid, as the runtime may name none, so
    /// the devices of an earlier pod of the same name are not used. The kubelet knows a static pod by its
    /// own uid, not by its mirror pod's.
    async fn ask_for_devices_of(&self, pod: &PodRef, asked: &Asked) {
        let known = self.intents.source.snapshot().pods.get(&pod.name).cloned();
        let known = known.as_ref().and_then(|known| known.mirror_of.as_ref().or(known.uid.as_ref()));
        let uid = pod.uid.as_deref().or(known.map(String::as_str));
        let devices = self.kubelet.of_pod(&pod.name, uid).await;
        // Fails if it is already set; it is asked only once for each operation.
        let _ = asked.set(devices);
    }
}

/// Assigns the devices of a pod to its networks.
///
/// # Errors
/// Code 11: the devices of the pod are not known. Code 7: the pod has no device that a network needs.
pub(in crate::agent) fn give(engine: &Engine, intent: &mut Intent, asked: &Asked) -> Result<(), CniError> {
    let Intent { default, default_selection, selections, .. } = intent;
    let selected = selections.iter_mut().map(|(selection, network)| (Some(&*selection), network));
    let mut networks = vec![(default_selection.as_ref(), default)];
    networks.extend(selected);
    give_to(engine, &mut networks, asked, &BTreeSet::new())
}

/// Assigns a device to one more network of a live pod, one that none of the pod's attachments has.
///
/// # Errors
/// As [`give`].
pub(super) fn give_one(
    engine: &Engine,
    (selection, network): &mut (Selection, Network),
    asked: &Asked,
    of_pod: &[Arc<Attached>],
) -> Result<(), CniError> {
    let attachments = of_pod.iter().flat_map(|attached| &attached.plan.attachments);
    let devices = attachments.filter_map(|attachment| attachment.device.clone());
    let used = devices.map(|device| (device.resource, device.id)).collect();
    give_to(engine, &mut [(Some(&*selection), network)], asked, &used)
}

fn give_to(
    engine: &Engine,
    networks: &mut [(Option<&Selection>, &mut Network)],
    asked: &Asked,
    used: &BTreeSet<(String, String)>,
) -> Result<(), CniError> {
    let want = |(selection, network): &(Option<&Selection>, &mut Network)| {
        let resource = network.resource.clone().filter(|_| engine.needs_device(network))?;
        Some((resource, selection.and_then(|selection| selection.device_id.clone())))
    };
    let wants: Vec<Option<Named>> = networks.iter().map(want).collect();
    // Without an answer of the kubelet, planning refuses a network that needs a device.
    let Some(asked) = asked.get().filter(|_| wants.iter().any(Option::is_some)) else { return Ok(()) };
    let failed = |position: usize, code: u32, what: &dyn std::fmt::Display| {
        let name = networks.get(position).map(|(_, network)| network.name.to_string()).unwrap_or_default();
        CniError::new(code, format!("network {name}: {what}"))
    };
    let given: Vec<Option<Device>> = match asked {
        Ok(devices) => {
            let wants: Vec<Option<Want<'_>>> = wants
                .iter()
                .map(|want| want.as_ref().map(|(resource, named)| Want { resource, named: named.as_deref() }))
                .collect();
            let given = allocate(&wants, devices, used);
            let given =
                given.map_err(|(position, shortage)| failed(position, code::INVALID_CONFIG, &shortage))?;
            let pairs = wants.iter().zip(given);
            let device = |(want, given): (&Option<Want<'_>>, Option<kubelet::Given>)| {
                let (want, given) = ((*want)?, given?);
                Some(Device {
                    resource: want.resource.to_owned(),
                    id: given.id,
                    container: Some(given.container),
                })
            };
            pairs.map(device).collect()
        }
        Err(error) => unasked(&wants, error, engine.is_in_cluster())
            .map_err(|position| failed(position, code::TRY_AGAIN_LATER, &Chain(&**error)))?,
    };
    for ((_, network), device) in networks.iter_mut().zip(given) {
        network.device = device;
    }
    Ok(())
}

/// Returns the devices that selections name, if the kubelet cannot report the pod's devices; or the index
/// of a network that gets none this way.
fn unasked(
    wants: &[Option<Named>],
    error: &kubelet::Error,
    in_cluster: bool,
) -> Result<Vec<Option<Device>>, usize> {
    // Without a kubelet no component knows which pod owns a device. The author of manifests on disk owns
    // the node, so the named devices are trusted; an author of pods in a cluster does not, and there a
    // missing socket is a wrong setting.
    let is_trusted = !in_cluster && matches!(error, kubelet::Error::Absent(_));
    let is_lost =
        |want: &Option<Named>| want.as_ref().is_some_and(|(_, named)| !is_trusted || named.is_none());
    if let Some(position) = wants.iter().position(is_lost) {
        return Err(position);
    }
    let device = |want: &Option<Named>| {
        let (resource, named) = want.clone()?;
        Some(Device { resource, id: named?, container: None })
    };
    Ok(wants.iter().map(device).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_device_is_taken_without_the_kubelets_word_only_where_there_is_neither_kubelet_nor_cluster() {
        let absent = || kubelet::Error::Absent("/run/none.sock".into());
        let late = || kubelet::Error::Late("/run/late.sock".into());
        let resource = || "example.com/vf".to_owned();
        let named = || Some((resource(), Some("1".to_owned())));
        let device = || Some(Device { resource: resource(), id: "1".to_owned(), container: None });
        let any = || Some((resource(), None));
        let table = [
            (vec![None, named()], absent(), false, Ok(vec![None, device()])),
            (vec![None, named()], absent(), true, Err(1)),
            (vec![named(), any()], absent(), false, Err(1)),
            (vec![named()], late(), false, Err(0)),
            (vec![named()], late(), true, Err(0)),
            (vec![None], absent(), true, Ok(vec![None])),
        ];
        for (wants, error, in_cluster, expected) in table {
            assert_eq!(unasked(&wants, &error, in_cluster), expected, "{wants:?} {error} {in_cluster}");
        }
    }
}
