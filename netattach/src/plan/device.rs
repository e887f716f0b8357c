//! The device of an attachment, and how plugins receive it. Pure.

use std::path::Path;

use serde_json::{Map, Value};

use super::resolve::Network;
use crate::cni::{CniError, NetworkList, code, keys};
use crate::npwg::{NetworkName, RESOURCE_ANNOTATION, Selection, device_info};
use crate::step::DeviceInfoFiles;

/// Capability, and key, with which a plugin receives its device.
pub(super) const DEVICE_ID: &str = "deviceID";

/// Key with which `host-device` and, earlier, `sriov` receive a PCI address.
const PCI_BUS_ID: &str = "pciBusID";

/// Returns the PCI address of the device in a plugin's configuration, in the kernel's notation; `None` if the
/// configuration names no device or a device of another kind.
pub fn pci_address(config: &Map<String, Value>) -> Option<&str> {
    let named = [PCI_BUS_ID, DEVICE_ID].into_iter().find_map(|key| config.get(key)?.as_str())?;
    device_info::is_pci_address(named).then_some(named).filter(|address| address.contains('.'))
}

/// The device of an attachment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Device<'a> {
    /// The extended resource that the device belongs to.
    resource: Option<&'a str>,
    /// The id of the device within the resource.
    id: Option<&'a str>,
    /// Whether the pod's author has chosen the device without a comparison with the pod's allocated devices.
    is_chosen: bool,
}

impl<'a> Device<'a> {
    /// Returns the device that a selection requests, or that was allocated to the pod for the network. `is_needed`:
    /// see [`needs_device`](super::resolve::needs_device).
    ///
    /// # Errors
    /// The network needs a device and there is none: attaching without it would give the pod something other than it
    /// requested. Or, in a cluster, the device that the pod's author names was not compared with the allocated
    /// devices: the annotation or the definition may have changed since the kubelet was not asked.
    pub(super) fn of(
        network: &'a Network,
        selection: Option<&'a Selection>,
        is_needed: bool,
        in_cluster: bool,
    ) -> Result<Self, CniError> {
        let resource = network.resource.as_deref();
        let named = selection.and_then(|selection| selection.device_id.as_deref());
        let id = named.or(network.device.as_ref().map(|device| device.id.as_str()));
        let is_unasked = id.is_none() || (in_cluster && network.device.is_none());
        match resource {
            Some(resource) if is_needed && is_unasked => {
                let msg = format!(
                    "the network needs a device of resource {resource} (annotation {RESOURCE_ANNOTATION}), and the \
                     kubelet was not asked which one the pod was given"
                );
                Err(CniError::new(code::TRY_AGAIN_LATER, msg))
            }
            _ => Ok(Self { resource, id, is_chosen: resource.is_none() && named.is_some() }),
        }
    }

    /// # Errors
    /// The selection requests a device and none of the plugins takes one.
    pub(super) fn check_plugin_takes_device(
        self,
        list: &NetworkList,
        takes_none: impl Fn(&str) -> bool,
    ) -> Result<(), CniError> {
        match self.id {
            Some(id) if list.plugins.iter().all(|plugin| takes_none(plugin.plugin_type())) => {
                let msg = format!(
                    "deviceID {id} asked for, but netattach's own plugins, of which network {} consists, take no \
                     device",
                    list.name
                );
                Err(CniError::new(code::UNSUPPORTED_FIELD, msg))
            }
            _ => Ok(()),
        }
    }

    /// Returns the files of the attachment's device information, if a plugin needs their path or a device plugin may
    /// have described the device.
    pub(super) fn files(
        self,
        list: &NetworkList,
        root: &Path,
        network: &NetworkName,
        container: &str,
        ifname: &str,
    ) -> Option<DeviceInfoFiles> {
        let device_plugin = self
            .resource
            .zip(self.id)
            .map(|(resource, id)| device_info::device_plugin_file(root, resource, id));
        let wanted = list
            .plugins
            .iter()
            .any(|plugin| plugin.capabilities().any(|name| name == device_info::CAPABILITY));
        (wanted || device_plugin.is_some()).then(|| DeviceInfoFiles {
            device_plugin,
            attachment: device_info::attachment_file(root, &network.to_string(), container, ifname),
        })
    }

    /// Adds the device and the path of its information to the capabilities that plugins receive.
    pub(super) fn offer(self, capabilities: &mut Map<String, Value>, files: Option<&DeviceInfoFiles>) {
        if let Some(id) = self.id {
            capabilities.insert(DEVICE_ID.into(), id.into());
        }
        if let Some(files) = files {
            let path = files.attachment.to_string_lossy().into_owned();
            capabilities.insert(device_info::CAPABILITY.into(), path.into());
        }
    }

    /// Checks that the pod may choose a device that these plugins, native or executed, take from the node, according
    /// to their configurations.
    ///
    /// # Errors
    /// The pod's author has chosen it although the definition names another one; or in a cluster, where the authors
    /// of pods are not the node's administrators.
    pub(super) fn check_choice<'c>(
        self,
        takers: impl Iterator<Item = &'c Map<String, Value>>,
        in_cluster: bool,
    ) -> Result<(), CniError> {
        let Some(id) = self.id.filter(|_| self.is_chosen) else { return Ok(()) };
        // Keys of types that netattach does not implement are passed as written, and plugins in Go read them in any
        // case.
        let names_one = |key: &str| keys::is_same(key, DEVICE_ID) || keys::is_same(key, PCI_BUS_ID);
        let fields = takers.flatten().filter(|(key, _)| names_one(key));
        let fixed = fields.filter_map(|(_, value)| value.as_str()).filter(|fixed| !fixed.is_empty());
        let fixed: Vec<&str> = fixed.collect();
        let why = match fixed.iter().find(|fixed| **fixed != id) {
            Some(fixed) => format!("the definition has device {fixed}"),
            None if in_cluster && fixed.is_empty() => {
                format!("the definition has no resource ({RESOURCE_ANNOTATION}) whose devices pods are given")
            }
            None => return Ok(()),
        };
        Err(CniError::new(code::INVALID_CONFIG, format!("deviceID {id} asked for by the pod: {why}")))
    }

    /// Adds the device under the keys that Multus uses.
    pub(super) fn insert_into(self, config: &mut Map<String, Value>) {
        if let Some(id) = self.id {
            for key in [DEVICE_ID, PCI_BUS_ID] {
                config.insert(key.into(), id.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::link::Facts;
    use crate::link::facts::OnBus;
    use crate::npwg::{NetworkRef, status};
    use crate::plan::resolve::{Options, one_more};
    use crate::plan::{Dynamic, Sandbox, fixtures};
    use crate::spec::DeviceId;
    use crate::step::{EnforceWhen, Step};

    const VF: &str = "0000:03:02.1";
    const OTHER: &str = "0000:03:02.2";
    const RESOURCE: &str = "example.com/vf";

    /// Plans a pod's attachment to a network of that resource and configuration: the kubelet gave it `given`, and its
    /// annotation names `asked`.
    fn planned(
        config: &Value,
        (resource, given): (Option<&str>, Option<&str>),
        asked: Option<&str>,
        options: Options,
    ) -> Result<Vec<Step>, (u32, String)> {
        let device = |id: &str| status::Device {
            resource: RESOURCE.to_owned(),
            id: id.to_owned(),
            container: Some("main".to_owned()),
        };
        let network = Network {
            name: "shop/fast".into(),
            list: Arc::new(NetworkList::parse(config.to_string().as_bytes()).unwrap()),
            resource: resource.map(str::to_owned),
            enforce: None,
            ethertypes: Vec::new(),
            device: given.map(device),
        };
        let device_id = asked.map(str::to_owned);
        let selection = Selection { device_id, ..Selection::of(NetworkRef::new("shop", "fast")) };
        let sandbox = Sandbox { ifname: "net1".to_owned(), ..fixtures::sandbox("c1") };
        let options = Options { enforce: EnforceWhen::Never, ..options };
        let on_bus = [VF, OTHER].map(|name| (name.to_owned(), OnBus::default()));
        let facts = Facts { on_bus: on_bus.into(), gathered: true, ..Facts::default() };
        let dynamic = Dynamic { sandbox: "eth0".to_owned(), by: "a test".to_owned() };
        let plan = one_more(sandbox, dynamic, &(selection, network), (&options, &facts), None)
            .map_err(|error| (error.code, error.msg))?;
        Ok(plan.attachments[0].steps.clone())
    }

    /// The configuration of a network whose plugin has these keys.
    fn of(kind: &str, keys: &Value) -> Value {
        let mut config = json!({"cniVersion": "1.0.0", "name": "fast", "type": kind});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config
    }

    /// The device that a pod gets of a network of one of our own plugins.
    fn taken(
        (kind, keys): (&str, &Value),
        given: Option<&str>,
        asked: Option<&str>,
        in_cluster: bool,
    ) -> Result<DeviceId, (u32, String)> {
        let resource = given.map(|_| RESOURCE);
        let options = Options { in_cluster, ..Options::default() };
        let steps = planned(&of(kind, keys), (resource, given), asked, options)?;
        let mut claimed = steps.into_iter().filter_map(|step| match step {
            Step::ClaimDevice(device) => Some(device.id),
            _ => None,
        });
        Ok(claimed.next().unwrap())
    }

    /// The device that each plugin of a network is told of in a cluster, where all of them are executed.
    fn told(config: &Value, given: Option<&str>, asked: Option<&str>) -> Result<Vec<Value>, (u32, String)> {
        let exec = ["sriov", "host-device"].map(str::to_owned).into();
        let options = Options { exec, in_cluster: true, ..Options::default() };
        let steps = planned(config, (given.map(|_| RESOURCE), given), asked, options)?;
        let called = steps.into_iter().filter_map(|step| match step {
            Step::Delegate(plugin) => Some(plugin.config),
            _ => None,
        });
        Ok(called.map(|config| json!([config.get(DEVICE_ID), config.get(PCI_BUS_ID)])).collect())
    }

    fn refused<T>(why: &str) -> Result<T, (u32, String)> {
        Err((7, format!("attach net1 (shop/fast): deviceID {VF} asked for by the pod: {why}")))
    }

    const NO_RESOURCE: &str =
        "the definition has no resource (k8s.v1.cni.cncf.io/resourceName) whose devices pods are given";

    /// The author of a pod's annotation is not the node's administrator.
    #[test]
    fn a_pod_chooses_a_device_only_where_its_definition_leaves_it_the_choice_and_in_a_cluster_never() {
        let bus = |name: &str| Ok(DeviceId::Bus(name.to_owned()));
        let no_resource = || refused(NO_RESOURCE);
        let fixed = || refused(&format!("the definition has device {OTHER}"));
        let (nothing, own) = (json!({}), json!({"deviceID": VF}));
        let [other_id, other_bus] = ["deviceID", "pciBusID"].map(|key| json!({key: OTHER}));
        let empty = json!({"deviceID": "", "pciBusID": ""});
        let both = json!({"deviceID": "", "pciBusID": OTHER});
        // The kubelet's device; the annotation's; what becomes of it with manifests, and in a cluster.
        let table = [
            (&nothing, None, Some(VF), bus(VF), no_resource()),
            (&empty, None, Some(VF), bus(VF), no_resource()),
            (&other_id, None, Some(VF), fixed(), fixed()),
            (&other_bus, None, Some(VF), fixed(), fixed()),
            (&both, None, Some(VF), fixed(), fixed()),
            (&own, None, Some(VF), bus(VF), bus(VF)),
            (&own, None, None, bus(VF), bus(VF)),
            (&nothing, Some(VF), None, bus(VF), bus(VF)),
            // The kubelet's device has been compared with the one that the annotation names (`kubelet::allocate`).
            (&nothing, Some(VF), Some(VF), bus(VF), bus(VF)),
            (&other_id, Some(VF), None, bus(VF), bus(VF)),
        ];
        for kind in ["sriov", "host-device"] {
            for (keys, given, asked, with_manifests, in_cluster) in &table {
                let taken = |in_cluster| taken((kind, keys), *given, *asked, in_cluster);
                let what = format!("{kind} {keys} {given:?} {asked:?}");
                assert_eq!(taken(false), *with_manifests, "{what}");
                assert_eq!(taken(true), *in_cluster, "{what}, in a cluster");
            }
        }
        let by_name = json!({"device": "eth1"});
        let by_name = |in_cluster| taken(("host-device", &by_name), None, Some(VF), in_cluster);
        assert_eq!(by_name(false), Ok(DeviceId::Name("eth1".to_owned())), "the definition's goes first");
        assert_eq!(by_name(true), no_resource());
    }

    /// A plugin that is executed takes from the node whatever it is told of.
    #[test]
    fn a_pod_of_a_cluster_chooses_no_device_of_an_executed_plugin_either() {
        let both = |id: &str| json!([id, id]);
        let fixed = || refused(&format!("the definition has device {OTHER}"));
        for kind in ["sriov", "host-device", "ib-sriov"] {
            let of = |keys: Value| of(kind, &keys);
            let table = [
                (of(json!({})), None, Some(VF), refused(NO_RESOURCE)),
                (of(json!({"deviceID": ""})), None, Some(VF), refused(NO_RESOURCE)),
                (of(json!({"deviceID": OTHER})), None, Some(VF), fixed()),
                (of(json!({"PCIBusID": OTHER})), None, Some(VF), fixed()),
                (of(json!({"deviceID": VF, "pciBusID": OTHER})), None, Some(VF), fixed()),
                (of(json!({"deviceID": VF})), None, Some(VF), Ok(vec![both(VF)])),
                (of(json!({})), Some(VF), None, Ok(vec![both(VF)])),
                (of(json!({})), Some(VF), Some(VF), Ok(vec![both(VF)])),
                (of(json!({"deviceID": OTHER})), Some(VF), None, Ok(vec![both(VF)])),
            ];
            for (config, given, asked, expected) in table {
                assert_eq!(told(&config, given, asked), expected, "{config} {given:?} {asked:?}");
            }
        }
        // A plugin after another one gets the same device.
        let chain = |keys: Value| {
            let mut first = json!({"type": "ib-sriov"});
            first.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            json!({"cniVersion": "1.0.0", "name": "fast", "plugins": [first, {"type": "rate"}]})
        };
        assert_eq!(told(&chain(json!({"deviceID": VF})), None, Some(VF)), Ok(vec![both(VF); 2]));
        assert_eq!(told(&chain(json!({"deviceID": OTHER})), None, Some(VF)), fixed());
        assert_eq!(told(&chain(json!({})), None, Some(VF)), refused(NO_RESOURCE));
    }

    /// It may turn out only now that the network is one of a resource, or that the pod selects it.
    #[test]
    fn in_a_cluster_a_named_device_of_a_resource_counts_once_it_was_compared_with_what_the_pod_was_given() {
        let of_resource = |in_cluster| {
            let options = Options { in_cluster, ..Options::default() };
            planned(&of("ib-sriov", &json!({})), (Some(RESOURCE), None), Some(VF), options).map(drop)
        };
        let unasked = "attach net1 (shop/fast): the network needs a device of resource example.com/vf (annotation \
                       k8s.v1.cni.cncf.io/resourceName), and the kubelet was not asked which one the pod was given";
        assert_eq!(of_resource(true), Err((11, unasked.to_owned())));
        assert_eq!(of_resource(false), Ok(()), "manifests are the administrator's");
    }

    #[test]
    fn the_pci_address_is_what_the_plugin_uses() {
        let table = [
            (json!({"pciBusID": "0000:03:02.1"}), Some("0000:03:02.1")),
            (json!({"deviceID": "0000:03:02.1"}), Some("0000:03:02.1")),
            (json!({"deviceID": "0000:03:02.2", "pciBusID": "0000:03:02.1"}), Some("0000:03:02.1")),
            (json!({"deviceID": "mlx5_core.sf.4"}), None),
            (json!({"deviceID": "0000:03:02:1"}), None),
            (json!({"deviceID": "../../0000:03:02.1"}), None),
            (json!({"device": "eth1"}), None),
        ];
        for (config, expected) in table {
            assert_eq!(pci_address(config.as_object().unwrap()), expected, "{config}");
        }
    }
}
