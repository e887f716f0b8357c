//! Devices of a real kubelet: which network of a pod gets which, through restarts of agent and kubelet.

use std::collections::BTreeSet;
use std::fs;

use netattach_tests::cluster::Setup;
use netattach_tests::traffic::eventually;
use serde_json::{Value, json};

use crate::rig::{PATIENCE, PODS, Rig, busybox, definition, published};

const VF: &str = "example.com/vf";
const DEVICES: [&str; 4] = ["vf0", "vf1", "vf2", "vf3"];
/// The kubelet's records of which pods have which devices: its socket, and its checkpoint.
const POD_RESOURCES: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

/// A container and the id of a device that it has.
type Device = (String, String);

fn device(container: &Value, id: &Value) -> Device {
    (container.as_str().unwrap().to_owned(), id.as_str().unwrap().to_owned())
}

/// The devices of a pod in the kubelet's checkpoint.
fn allocated(uid: &str) -> BTreeSet<Device> {
    let checkpoint: Value = serde_json::from_slice(&fs::read(CHECKPOINT).unwrap()).unwrap();
    let entries = checkpoint["Data"]["PodDeviceEntries"].as_array().cloned().unwrap_or_default();
    let of_pod = entries.iter().filter(|entry| entry["PodUID"] == uid);
    let devices = of_pod.flat_map(|entry| {
        let by_node = entry["DeviceIDs"].as_object().unwrap().values();
        let ids = by_node.flat_map(|ids| ids.as_array().unwrap());
        ids.map(|id| device(&entry["ContainerName"], id)).collect::<Vec<_>>()
    });
    devices.collect()
}

/// Returns a pod whose containers have that many devices, and run that command.
fn spec(containers: &[(&str, usize)], command: &[&str]) -> Value {
    let mut spec = busybox(&json!({}));
    let container = |(name, devices): &(&str, usize)| {
        let mut container = spec["containers"][0].clone();
        container["name"] = json!(name);
        container["resources"] = json!({"limits": {VF: devices.to_string()}});
        if !command.is_empty() {
            container["command"] = json!([&["/bin/busybox"], command].concat());
        }
        container
    };
    let containers: Vec<Value> = containers.iter().map(container).collect();
    spec["containers"] = json!(containers);
    spec
}

impl Rig {
    /// Waits until the scheduler counts on the devices, which a kubelet forgets when it ends.
    #[track_caller]
    fn await_devices(&self, registrations: usize) {
        let said = || self.worker.device_plugin_said();
        let is_registered = || said().matches("registration: <nil>").count() == registrations;
        assert!(eventually(PATIENCE, is_registered), "{}", said());
        let node = || self.get("/api/v1/nodes/devices")["status"]["allocatable"].clone();
        let has_all = || node()[VF] == json!(DEVICES.len().to_string());
        assert!(eventually(PATIENCE, has_all), "{:#}\n{}", node(), self.worker.kubelet_said());
    }

    /// Returns the devices of a pod's networks in their order, from its status; its record must have the same.
    #[track_caller]
    fn devices(&self, pod: &Value) -> Vec<Device> {
        let of_status: Vec<Device> = published(pod)[1..]
            .iter()
            .map(|entry| {
                let given = &entry["dev.netattach.device"];
                assert_eq!(given["resource"], VF, "{entry:#}");
                device(&given["container"], &given["id"])
            })
            .collect();
        let attached = self.worker.record_of(pod["metadata"]["name"].as_str().unwrap()).unwrap();
        let devices = attached["attachments"].as_array().unwrap().iter().filter_map(|it| it.get("device"));
        let of_record: Vec<Device> = devices.map(|given| device(&given["container"], &given["id"])).collect();
        assert_eq!(of_record, of_status);
        of_status
    }

    /// Returns the devices of a new pod: of the containers in the order in which its networks request them, and those
    /// of the checkpoint.
    #[track_caller]
    fn given(&self, name: &str, networks: &str, containers: &[(&str, usize)]) -> Vec<Device> {
        self.worker.node().take_calls().unwrap();
        self.pod(name, &json!({}), networks, &spec(containers, &[]));
        let pod = self.ready(name, networks.split(',').count() + 1);
        let given = self.devices(&pod);
        assert_eq!(self.told("ADD"), ids(&given), "what the plugin was told");
        let in_order = containers.iter().flat_map(|(name, devices)| vec![*name; *devices]);
        let of_containers: Vec<&str> = given.iter().map(|(container, _)| &**container).collect();
        assert_eq!(of_containers, in_order.collect::<Vec<_>>());
        assert_eq!(BTreeSet::from_iter(given.clone()), allocated(pod["metadata"]["uid"].as_str().unwrap()));
        given
    }

    /// Returns the devices that the plugin got since the last query.
    fn told(&self, verb: &str) -> Vec<String> {
        let calls = self.worker.node().take_calls().unwrap();
        let of_verb =
            calls.iter().filter(|call| call["plugin"] == "vf" && call["env"]["CNI_COMMAND"] == verb);
        let told =
            of_verb.map(|call| call["stdin"]["runtimeConfig"]["deviceID"].as_str().unwrap().to_owned());
        told.collect()
    }
}

fn ids(devices: &[Device]) -> Vec<String> {
    devices.iter().map(|(_, id)| id.clone()).collect()
}

#[test]
fn networks_get_the_devices_that_the_kubelet_gave() {
    let settings = [("podResourcesSocket", json!(POD_RESOURCES)), ("deviceCheckpoint", json!(CHECKPOINT))];
    let setup = Setup { settings: &settings, ..Setup::default() };
    let Some(mut rig) = Rig::new("devices", &setup) else { return };
    rig.worker.start_device_plugin(VF, &DEVICES).unwrap();
    for name in ["left", "right"] {
        let config = json!({"cniVersion": "1.0.0", "type": "vf", "capabilities": {"deviceID": true}});
        let mut definition = definition(name, &config);
        definition["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": VF});
        rig.admin.create(&definition).unwrap();
    }
    rig.worker.node().plugin("vf", &json!({"ADD": {"result": {"cniVersion": "1.0.0"}}})).unwrap();
    rig.await_devices(1);

    // A pod that has ended is still in the API, and in the kubelet's list; its devices do not belong to it any more.
    let networks = "left, right, left, right";
    rig.pod("once", &json!({}), networks, &{
        let mut spec = spec(&[("main", 4)], &["true"]);
        spec["restartPolicy"] = json!("Never");
        spec
    });
    let once = || rig.get(&format!("{PODS}/once"));
    assert!(eventually(PATIENCE, || once()["status"]["phase"] == "Succeeded"), "{:#}", once());
    let first = rig.given("one", "left, right, left", &[("log", 1), ("web", 2)]);

    // Both are restarted, and nothing changes for the pod.
    rig.worker.node_mut().kill().unwrap();
    rig.worker.node_mut().start().unwrap();
    rig.worker.restart_kubelet().unwrap();
    rig.await_devices(2);
    assert_eq!(rig.devices(&rig.ready("one", 4)), first);
    let last = rig.given("two", "right", &[("web", 1)]);
    let all: BTreeSet<String> = ids(&[first.clone(), last].concat()).into_iter().collect();
    assert_eq!(all, DEVICES.map(str::to_owned).into(), "each device once");

    // Another pod of the same name, whose predecessor's devices the kubelet may still list, gets three of them again.
    rig.worker.node().take_calls().unwrap();
    rig.delete("one");
    let mut given_back = ids(&first);
    given_back.reverse();
    let is_detached = || {
        let rows = rig.worker.node().ctl(&["attachments"]).unwrap();
        rows.as_array().unwrap().iter().all(|row| row["pod"]["name"] != "one")
    };
    assert!(eventually(PATIENCE, is_detached), "{:#}", rig.status());
    assert_eq!(rig.told("DEL"), given_back);
    let again = rig.given("one", "right, left, right", &[("web", 3)]);
    assert_eq!(BTreeSet::from_iter(ids(&again)), BTreeSet::from_iter(ids(&first)));
    for name in ["once", "one", "two"] {
        rig.delete(name);
    }
    rig.assert_nothing_is_left();
}
