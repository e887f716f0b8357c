//! The kubelet's checkpoint of device allocations, which names pods by their uids.
//!
//! The file is written before the sandbox of a pod is made (kubernetes, `pkg/kubelet/cm/devicemanager/checkpoint`). Its
//! `DeviceIDs` are a list, or since 1.20 lists by NUMA node.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde::Deserialize;

use super::ContainerDevices;
use crate::bounded;
use crate::budget;

/// The allocations of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkpoint {
    /// Container, resource and id of each device, by the pod's uid.
    allocated: BTreeMap<String, BTreeSet<(String, String, String)>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "PodDeviceEntries", default)]
    entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<DeviceIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DeviceIds {
    Flat(Vec<String>),
    ByNumaNode(BTreeMap<String, Option<Vec<String>>>),
}

impl Checkpoint {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, is larger than its bound, or is no checkpoint.
    pub fn read(path: &Path) -> io::Result<Self> {
        Self::parse(&bounded::read(path, budget::DEVICE_CHECKPOINT.most)?)
    }

    /// Reads the file's content.
    ///
    /// # Errors
    /// It is no checkpoint.
    pub fn parse(content: &[u8]) -> io::Result<Self> {
        let File { data } = serde_json::from_slice(content)?;
        let mut checkpoint = Self::default();
        for Entry { pod_uid, container_name, resource_name, device_ids } in data.entries.into_iter().flatten()
        {
            let ids: Vec<String> = match device_ids {
                None => Vec::new(),
                Some(DeviceIds::Flat(ids)) => ids,
                Some(DeviceIds::ByNumaNode(nodes)) => nodes.into_values().flatten().flatten().collect(),
            };
            let of_pod = checkpoint.allocated.entry(pod_uid).or_default();
            of_pod.extend(ids.into_iter().map(|id| (container_name.clone(), resource_name.clone(), id)));
        }
        Ok(checkpoint)
    }

    /// The devices that belong to the pod with this uid, in their order.
    pub fn of_uid(&self, uid: &str, devices: Vec<ContainerDevices>) -> Vec<ContainerDevices> {
        let Some(of_pod) = self.allocated.get(uid) else { return Vec::new() };
        let mut kept = Vec::new();
        for mut of_container in devices {
            let ContainerDevices { container, resource, ids } = &mut of_container;
            ids.retain(|id| of_pod.contains(&(container.clone(), resource.clone(), id.clone())));
            if !of_container.ids.is_empty() {
                kept.push(of_container);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(container: &str, ids: &[&str]) -> ContainerDevices {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        ContainerDevices { container: container.to_owned(), resource: "a/vf".to_owned(), ids }
    }

    #[test]
    fn both_forms_of_the_file_say_which_devices_are_of_which_pod() {
        let file = |ids: [serde_json::Value; 3]| {
            let [of_web, of_log, of_former] = ids;
            let entry = |uid: &str, container: &str, ids: serde_json::Value| json!({"PodUID": uid, "ContainerName": container, "ResourceName": "a/vf", "DeviceIDs": ids, "AllocResp": "CgA="});
            let entries =
                [entry("new", "web", of_web), entry("new", "log", of_log), entry("old", "web", of_former)];
            json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {"a/vf": ["1"]}}, "Checksum": 7})
        };
        let by_node =
            file([json!({"0": ["2"], "-1": ["1"], "1": null}), json!({"0": ["3"]}), json!({"0": ["4"]})]);
        let flat = file([json!(["1", "2"]), json!(["3"]), json!(["4"])]);
        // The kubelet lists the devices of both pods of the name.
        let listed = || vec![row("web", &["4"]), row("web", &["2", "1"]), row("log", &["3", "1"])];
        for content in [by_node, flat] {
            let checkpoint = Checkpoint::parse(content.to_string().as_bytes()).unwrap();
            assert_eq!(checkpoint.of_uid("new", listed()), [row("web", &["2", "1"]), row("log", &["3"])]);
            assert_eq!(checkpoint.of_uid("old", listed()), [row("web", &["4"])]);
            assert_eq!(checkpoint.of_uid("other", listed()), []);
        }
        let empty =
            Checkpoint::parse(br#"{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}}"#).unwrap();
        assert_eq!(empty, Checkpoint::default());
        for content in ["", "{}", r#"{"Data": {"PodDeviceEntries": [{"PodUID": 1}]}}"#, "[]"] {
            assert!(Checkpoint::parse(content.as_bytes()).is_err(), "{content}");
        }
    }

    #[test]
    fn a_file_beyond_its_bound_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint");
        let most = budget::DEVICE_CHECKPOINT.most;
        let content = r#"{"Data": {}}"#;
        std::fs::write(&path, bounded::padded(content, most)).unwrap();
        assert_eq!(Checkpoint::read(&path).unwrap(), Checkpoint::default());
        std::fs::write(&path, bounded::padded(content, most + 1)).unwrap();
        assert_eq!(Checkpoint::read(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
