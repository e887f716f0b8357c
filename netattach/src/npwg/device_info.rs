//! Device information: the description of an attachment's device by a device plugin or a CNI plugin (NPWG Device
//! Information Specification 1.1.0).

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::cni;

/// Capability that passes the path of an attachment's file to a plugin (section 5.1).
pub const CAPABILITY: &str = "CNIDeviceInfoFile";

/// The version of the specification whose keys are written.
const VERSION: &str = "1.1.0";

/// Longest name of a file on the file systems of Linux, in bytes.
const LONGEST_NAME: usize = 255;

/// Why device information is invalid.
#[derive(Debug, thiserror::Error)]
pub enum DeviceInfoError {
    /// It is not JSON.
    #[error("device information is not json")]
    Json(#[source] serde_json::Error),
    /// It is JSON, but not an object.
    #[error("device information is {0}, not an object")]
    NotAnObject(&'static str),
    /// A required key is missing.
    #[error("device information: {0} is missing")]
    Missing(String),
    /// A key has a value that the specification does not allow.
    #[error("device information: {key} is {value}, but must be {expected}")]
    Value {
        /// The key, with dots for nesting.
        key: String,
        /// The value as written, in JSON.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
}

/// The type of a key in a device's own map.
enum Holds {
    Text,
    PciAddress,
    OneOf(&'static [&'static str], &'static str),
}

/// The required and optional keys of a device's own map.
struct Form {
    kind: &'static str,
    required: &'static [(&'static str, Holds)],
    optional: &'static [(&'static str, Holds)],
}

/// Sections 3.1.3 to 3.1.6.
const FORMS: [Form; 4] = [
    Form {
        kind: "pci",
        required: &[("pci-address", Holds::PciAddress)],
        optional: &[
            ("vhost-net", Holds::Text),
            ("rdma-device", Holds::Text),
            ("pf-pci-address", Holds::PciAddress),
            ("representor-device", Holds::Text),
        ],
    },
    Form {
        kind: "vdpa",
        required: &[
            ("parent-device", Holds::Text),
            ("driver", Holds::OneOf(&["vhost", "virtio"], "vhost or virtio")),
            ("path", Holds::Text),
        ],
        optional: &[
            ("pci-address", Holds::PciAddress),
            ("pf-pci-address", Holds::PciAddress),
            ("representor-device", Holds::Text),
        ],
    },
    Form {
        kind: "vhost-user",
        required: &[("mode", Holds::OneOf(&["client", "server"], "client or server")), ("path", Holds::Text)],
        optional: &[],
    },
    Form {
        kind: "memif",
        required: &[
            ("role", Holds::OneOf(&["master", "slave"], "master or slave")),
            ("path", Holds::Text),
            ("mode", Holds::OneOf(&["ethernet", "ip", "inject-punt"], "ethernet, ip or inject-punt")),
        ],
        optional: &[],
    },
];

/// Parses device information and keeps keys unknown to the specification.
///
/// # Errors
/// [`DeviceInfoError`] naming the key.
pub fn parse(text: &[u8]) -> Result<Value, DeviceInfoError> {
    let info: Value = serde_json::from_slice(text).map_err(DeviceInfoError::Json)?;
    let Value::Object(object) = &info else {
        return Err(DeviceInfoError::NotAnObject(cni::json::kind(&info)));
    };
    let kind = object.get("type").ok_or_else(|| DeviceInfoError::Missing("type".into()))?;
    let form = FORMS.iter().find(|form| kind == form.kind);
    let form = form.ok_or_else(|| wrong("type", kind, "pci, vdpa, vhost-user or memif"))?;
    let version = object.get("version").ok_or_else(|| DeviceInfoError::Missing("version".into()))?;
    if !version.as_str().is_some_and(is_version) {
        return Err(wrong("version", version, "three numbers joined by dots, such as 1.1.0"));
    }
    let device = object.get(form.kind).ok_or_else(|| DeviceInfoError::Missing(form.kind.into()))?;
    let Value::Object(device) = device else { return Err(wrong(form.kind, device, "an object")) };
    for (key, holds) in form.required {
        if !device.contains_key(*key) {
            return Err(DeviceInfoError::Missing(format!("{}.{key}", form.kind)));
        }
        check(form.kind, key, holds, device)?;
    }
    for (key, holds) in form.optional {
        check(form.kind, key, holds, device)?;
    }
    Ok(info)
}

/// Device information of a VF with its representor (section 3.1.3), which the card's mode decides and no device plugin needs to
/// know. What else is there stays as it was; without any, what is known of the VF. `function`: PCI addresses of the VF and its
/// PF. Information of another type has no place for it.
pub fn with_representor(info: Option<Value>, (function, physical): (&str, &str), representor: &str) -> Value {
    let known = || json!({"type": "pci", "version": VERSION, "pci": {"pci-address": function, "pf-pci-address": physical}});
    let mut info = info.unwrap_or_else(known);
    if let Some(device) = info.get_mut("pci").and_then(Value::as_object_mut) {
        device.insert("representor-device".to_owned(), representor.into());
    }
    info
}

/// The file in which a device plugin describes a device (section 4.1). `root` is the directory of all device
/// information.
pub fn device_plugin_file(root: &Path, resource: &str, device: &str) -> PathBuf {
    root.join("dp").join(format!("{resource}-{device}-device.json").replace('/', "-"))
}

/// The file that describes an attachment's device (section 4.2): named after network, container and interface as in
/// Multus, so that no two attachments share a file. A network name that is too long is truncated; the other two parts
/// make the name unique.
pub fn attachment_file(root: &Path, network: &str, container: &str, ifname: &str) -> PathBuf {
    let unique = format!("{container}_{ifname}");
    let room = LONGEST_NAME.saturating_sub(unique.len() + 1);
    let network: String = network.replace('/', "-").chars().take(room).collect();
    root.join("cni").join(format!("{network}-{unique}"))
}

fn check(kind: &str, key: &str, holds: &Holds, device: &Map<String, Value>) -> Result<(), DeviceInfoError> {
    let Some(value) = device.get(key) else { return Ok(()) };
    let text = value.as_str().filter(|text| !text.is_empty());
    let (fits, expected) = match holds {
        Holds::Text => (text.is_some(), "a text that is not empty"),
        Holds::PciAddress => (text.is_some_and(is_pci_address), "a PCI address such as 0000:03:02.1"),
        Holds::OneOf(values, expected) => (text.is_some_and(|text| values.contains(&text)), *expected),
    };
    if fits { Ok(()) } else { Err(wrong(&format!("{kind}.{key}"), value, expected)) }
}

fn wrong(key: &str, value: &Value, expected: &'static str) -> DeviceInfoError {
    DeviceInfoError::Value { key: key.to_owned(), value: value.to_string(), expected }
}

fn is_version(text: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    text.split('.').count() == 3 && text.split('.').all(number)
}

/// `dddd:BB:DD.f`. An example in the specification has a colon before the function: accepted as well.
pub(crate) fn is_pci_address(text: &str) -> bool {
    let groups: Vec<&str> = text.split([':', '.']).collect();
    let hexadecimal = |group: &&str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_hexdigit());
    groups.len() == 4
        && groups.iter().all(hexadecimal)
        && groups
            .iter()
            .map(|group| group.len())
            .zip([4..=8, 2..=2, 2..=2, 1..=1])
            .all(|(n, r)| r.contains(&n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: DI-3-required.
    #[test]
    fn every_type_of_device_is_read_with_unknown_keys() {
        for info in [
            json!({"type": "pci", "version": "1.1.0", "pci": {
                "pci-address": "0000:03:02.1", "vhost-net": "/dev/vhost-net", "rdma-device": "mlx5_4",
                "pf-pci-address": "0000:03:00.0", "representor-device": "eth3"}, "x": 1}),
            json!({"type": "vdpa", "version": "1.0.0", "vdpa": {
                "parent-device": "vdpa3", "driver": "vhost", "path": "/dev/vhost-vdpa3", "pci-address": "0000:02:01:6"}}),
            json!({"type": "vhost-user", "version": "1.1.0", "vhost-user": {"mode": "client", "path": "/a", "y": []}}),
            json!({"type": "memif", "version": "1.1.0", "memif": {"role": "slave", "path": "/m", "mode": "inject-punt"}}),
        ] {
            assert_eq!(parse(info.to_string().as_bytes()).unwrap(), info);
        }
    }

    /// Rows: SRV-switchdev.
    #[test]
    fn a_representor_is_added_to_what_is_known() {
        let functions = ("0000:03:02.1", "0000:03:00.0");
        let with = |info| with_representor(info, functions, "eth3");
        let alone = json!({"type": "pci", "version": "1.1.0", "pci": {
            "pci-address": "0000:03:02.1", "pf-pci-address": "0000:03:00.0", "representor-device": "eth3"}});
        assert_eq!(with(None), alone);
        assert_eq!(parse(alone.to_string().as_bytes()).unwrap(), alone);
        let told = json!({"type": "pci", "version": "1.0.0", "x": 1, "pci": {
            "pci-address": "0000:03:02.1", "rdma-device": "mlx5_4", "representor-device": "stale"}});
        let expected = json!({"type": "pci", "version": "1.0.0", "x": 1, "pci": {
            "pci-address": "0000:03:02.1", "rdma-device": "mlx5_4", "representor-device": "eth3"}});
        assert_eq!(with(Some(told)), expected);
        let memif = json!({"type": "memif", "version": "1.1.0", "memif": {}});
        assert_eq!(with(Some(memif.clone())), memif);
    }

    /// Rows: DI-3-required.
    #[test]
    fn what_the_specification_requires_is_missed_by_name() {
        let version = "three numbers joined by dots, such as 1.1.0";
        let table = [
            (json!([]), "device information is an array, not an object".to_owned()),
            (json!({"version": "1.1.0"}), "device information: type is missing".into()),
            (
                json!({"type": "usb", "version": "1.1.0"}),
                r#"device information: type is "usb", but must be pci, vdpa, vhost-user or memif"#.into(),
            ),
            (json!({"type": "pci", "pci": {}}), "device information: version is missing".into()),
            (
                json!({"type": "pci", "version": "1.1", "pci": {}}),
                format!(r#"device information: version is "1.1", but must be {version}"#),
            ),
            (
                json!({"type": "pci", "version": 1, "pci": {}}),
                format!("device information: version is 1, but must be {version}"),
            ),
            (json!({"type": "pci", "version": "1.1.0"}), "device information: pci is missing".into()),
            (
                json!({"type": "pci", "version": "1.1.0", "pci": "0000:03:02.1"}),
                r#"device information: pci is "0000:03:02.1", but must be an object"#.into(),
            ),
        ];
        for (info, expected) in table {
            assert_eq!(parse(info.to_string().as_bytes()).unwrap_err().to_string(), expected);
        }
        assert_eq!(parse(b"{").unwrap_err().to_string(), "device information is not json");
    }

    /// Rows: DI-3-required.
    #[test]
    fn the_keys_of_a_device_are_checked_by_its_type() {
        let address = "a PCI address such as 0000:03:02.1";
        let table = [
            ("pci", json!({}), "pci.pci-address is missing".to_owned()),
            (
                "pci",
                json!({"pci-address": "3:2"}),
                format!(r#"pci.pci-address is "3:2", but must be {address}"#),
            ),
            (
                "pci",
                json!({"pci-address": "0000:03:02.1", "pf-pci-address": ""}),
                format!(r#"pci.pf-pci-address is "", but must be {address}"#),
            ),
            ("vdpa", json!({"driver": "vhost", "path": "/a"}), "vdpa.parent-device is missing".into()),
            (
                "vdpa",
                json!({"parent-device": "v", "driver": "kernel", "path": "/a"}),
                r#"vdpa.driver is "kernel", but must be vhost or virtio"#.into(),
            ),
            ("vdpa", json!({"parent-device": "v", "driver": "vhost"}), "vdpa.path is missing".into()),
            ("vhost-user", json!({"path": "/a"}), "vhost-user.mode is missing".into()),
            (
                "vhost-user",
                json!({"mode": "both", "path": "/a"}),
                r#"vhost-user.mode is "both", but must be client or server"#.into(),
            ),
            (
                "vhost-user",
                json!({"mode": "client", "path": 1}),
                "vhost-user.path is 1, but must be a text that is not empty".into(),
            ),
            ("memif", json!({"path": "/a", "mode": "ip"}), "memif.role is missing".into()),
            ("memif", json!({"role": "master", "mode": "ip"}), "memif.path is missing".into()),
            (
                "memif",
                json!({"role": "master", "path": "/a", "mode": "arp"}),
                r#"memif.mode is "arp", but must be ethernet, ip or inject-punt"#.into(),
            ),
        ];
        for (kind, device, message) in table {
            let info = json!({"type": kind, "version": "1.1.0", kind: device});
            let expected = format!("device information: {message}");
            assert_eq!(parse(info.to_string().as_bytes()).unwrap_err().to_string(), expected);
        }
    }

    /// Rows: DI-4.1-path.
    #[test]
    fn a_device_plugin_is_asked_by_resource_and_device() {
        let root = Path::new("/var/run/k8s.cni.cncf.io/devinfo");
        let expected = "/var/run/k8s.cni.cncf.io/devinfo/dp/a.com-b-0000:03:02.1-device.json";
        assert_eq!(device_plugin_file(root, "a.com/b", "0000:03:02.1"), Path::new(expected));
        let slashes = device_plugin_file(root, "a.com/b", "dev/../1");
        assert_eq!(slashes.parent(), Some(Path::new("/var/run/k8s.cni.cncf.io/devinfo/dp")));
    }

    /// Rows: DI-4.2-unique.
    #[test]
    fn no_two_attachments_share_a_file() {
        let file = |network, container, ifname| attachment_file(Path::new("/d"), network, container, ifname);
        assert_eq!(file("shop/net", "c1", "net1"), Path::new("/d/cni/shop-net-c1_net1"));
        let long = "n".repeat(300);
        let files = [
            file("shop/net", "c1", "net1"),
            file("shop/net", "c1", "net2"),
            file("shop/net", "c2", "net1"),
            file(&long, "c1", "net1"),
            file(&long, "c1", "net2"),
        ];
        let different: std::collections::BTreeSet<_> = files.iter().collect();
        assert_eq!(different.len(), files.len());
        assert!(files.iter().all(|file| file.file_name().is_some_and(|name| name.len() <= LONGEST_NAME)));
    }
}
