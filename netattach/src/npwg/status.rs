//! The `network-status` annotation: what a pod got, one entry for each attachment (section 5).
//!
//! Where the standard leaves a choice, it is made here once: addresses are written without a prefix length, as
//! all known readers expect them; `default` is always written; of a result with several interfaces in the pod
//! only the first is reported.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::selection::RequestedIp;

/// One attachment as published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEntry {
    /// `namespace/name` of the definition, or the name of the default network's configuration.
    pub name: String,
    /// Interface in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Its addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "bare_addresses")]
    pub ips: Vec<IpAddr>,
    /// Its hardware address as the plugin printed it (6 bytes, or 20 on InfiniBand); never without `interface`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Whether this is the cluster-wide default network.
    #[serde(default)]
    pub default: bool,
    /// Name resolution that the network brings; written even when empty, as Multus does.
    #[serde(default)]
    pub dns: Dns,
    /// Gateways of the pod's default routes, when the pod asked for them to be on this attachment.
    #[serde(default, rename = "default-route", skip_serializing_if = "Option::is_none")]
    pub default_route: Option<Vec<IpAddr>>,
    /// Present for an attachment that the pod was given while it was live (section 5.1): the standard asks that it
    /// be told from the others and names no key for it.
    #[serde(default, rename = "netattach.dev/dynamic", skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
}

/// Where an attachment comes from that the pod did not ask for itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// Who asked for it.
    pub by: String,
}

/// Name resolution in the standard's terms.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Dns {
    /// Servers, in order of preference.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Local domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Domains to search.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
}

/// The parts of a CNI result that the status reports. Empty for a plugin that printed no result.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attached {
    /// Interfaces, in the result's order.
    pub interfaces: Vec<AttachedInterface>,
    /// Addresses.
    pub ips: Vec<AttachedIp>,
    /// Name resolution.
    pub dns: Dns,
    /// What the pod asked for under `default-route`, as carried out; `None` when it did not ask.
    pub default_route: Option<Vec<IpAddr>>,
    /// For an attachment of a live pod.
    pub dynamic: Option<Dynamic>,
}

/// One interface of a CNI result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedInterface {
    /// Its name.
    pub name: String,
    /// Its hardware address, where the plugin reports one.
    pub mac: Option<String>,
    /// Whether it is in the pod: the result gives it a `sandbox`.
    pub sandbox: bool,
}

/// One address of a CNI result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedIp {
    /// The address.
    pub address: IpAddr,
    /// Position of its interface in the result; `None` where the result gives none or a negative one.
    pub interface: Option<usize>,
}

/// Why a `network-status` annotation cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("read network-status annotation")]
pub struct StatusError(#[source] serde_json::Error);

impl StatusEntry {
    /// Describes one attachment.
    ///
    /// `ifname` is the name under which the plugin was called (`CNI_IFNAME`): it stands in where the result
    /// tells of no interface in the pod, as results before version 0.3.0 never do.
    pub fn new(name: impl Into<String>, default: bool, ifname: &str, attached: &Attached) -> Self {
        let in_pod = attached.interfaces.iter().position(|interface| interface.sandbox);
        let reported = in_pod.map(|position| &attached.interfaces[position]);
        Self {
            name: name.into(),
            interface: Some(reported.map_or(ifname, |interface| &interface.name).to_owned()),
            ips: addresses_of(in_pod, attached),
            mac: reported.and_then(|interface| interface.mac.clone()).filter(|mac| !mac.is_empty()),
            default,
            dns: attached.dns.clone(),
            default_route: attached.default_route.clone(),
            dynamic: attached.dynamic.clone(),
        }
    }
}

/// Writes the annotation.
pub fn render(entries: &[StatusEntry]) -> String {
    // `Value`'s own printing cannot fail, unlike that of a foreign `Serialize`.
    serde_json::json!(entries).to_string()
}

/// Reads the annotation, also as others write it: unknown keys are passed over, a missing `default` is false,
/// and addresses may carry a prefix length.
///
/// # Errors
/// The text is not a JSON list of entries with a name each.
pub fn parse(annotation: &str) -> Result<Vec<StatusEntry>, StatusError> {
    if annotation.trim().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_str(annotation).map_err(StatusError)
}

/// An address that says no interface (or one that does not exist) belongs to the pod's first; so does every
/// address of a result that tells of no interface in the pod.
fn addresses_of(in_pod: Option<usize>, attached: &Attached) -> Vec<IpAddr> {
    let belongs = |ip: &&AttachedIp| match (ip.interface, in_pod) {
        (Some(index), Some(position)) => index == position || index >= attached.interfaces.len(),
        _ => true,
    };
    attached.ips.iter().filter(belongs).map(|ip| ip.address).collect()
}

mod bare_addresses {
    use super::{IpAddr, RequestedIp};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(ips: &[IpAddr], serializer: S) -> Result<S::Ok, S::Error> {
        ips.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpAddr>, D::Error> {
        // Go writes a nil slice as null.
        let ips: Option<Vec<RequestedIp>> = Deserialize::deserialize(deserializer)?;
        Ok(ips.unwrap_or_default().into_iter().map(|ip| ip.address).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn interface(name: &str, mac: &str, sandbox: bool) -> AttachedInterface {
        AttachedInterface { name: name.to_owned(), mac: Some(mac.to_owned()), sandbox }
    }

    fn ip(address: &str, interface: Option<usize>) -> AttachedIp {
        AttachedIp { address: address.parse().unwrap(), interface }
    }

    fn published(default: bool, attached: &Attached) -> Value {
        let text = render(&[StatusEntry::new("default/net-a", default, "net1", attached)]);
        let mut entries: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(entries.len(), 1);
        entries.remove(0)
    }

    #[test]
    fn the_first_interface_in_the_pod_is_reported_with_its_own_addresses() {
        // NPWG-5.1.1-first-sandbox, NPWG-5.3.2-interface, NPWG-5.3.3-ips-indexed, NPWG-5.3.3-ips-format
        let attached = Attached {
            interfaces: vec![
                interface("vethab12", "02:00:00:00:00:01", false),
                interface("eth1", "02:00:00:00:00:02", true),
                interface("eth2", "02:00:00:00:00:03", true),
            ],
            ips: vec![
                ip("10.0.0.1", Some(0)),
                ip("10.0.0.2", Some(1)),
                ip("2001:db8::2", Some(1)),
                ip("10.0.0.3", Some(2)),
            ],
            ..Attached::default()
        };
        assert_eq!(
            published(false, &attached),
            json!({
                "name": "default/net-a",
                "interface": "eth1",
                "ips": ["10.0.0.2", "2001:db8::2"],
                "mac": "02:00:00:00:00:02",
                "default": false,
                "dns": {},
            })
        );
    }

    #[test]
    fn no_result_gives_a_minimal_entry() {
        // NPWG-5.1.1-no-result, NPWG-5.3.4-mac-needs-interface
        assert_eq!(
            published(true, &Attached::default()),
            json!({"name": "default/net-a", "interface": "net1", "default": true, "dns": {}})
        );
    }

    #[test]
    fn addresses_without_an_interface_are_reported() {
        // NPWG-5.1.1-old-results, NPWG-5.3.3-ips-unindexed
        let bare =
            Attached { ips: vec![ip("10.0.0.2", None), ip("2001:db8::2", None)], ..Attached::default() };
        assert_eq!(published(false, &bare)["ips"], json!(["10.0.0.2", "2001:db8::2"]));
        let with_interface = Attached {
            interfaces: vec![interface("net1", "02:00:00:00:00:02", true)],
            ips: vec![ip("10.0.0.2", None), ip("10.0.0.3", Some(7))],
            ..Attached::default()
        };
        assert_eq!(published(false, &with_interface)["ips"], json!(["10.0.0.2", "10.0.0.3"]));
        let no_sandbox = Attached {
            interfaces: vec![interface("net1", "02:00:00:00:00:02", false)],
            ips: vec![ip("10.0.0.2", Some(0))],
            ..Attached::default()
        };
        assert_eq!(
            published(false, &no_sandbox),
            json!({"name": "default/net-a", "interface": "net1", "ips": ["10.0.0.2"], "default": false, "dns": {}})
        );
    }

    #[test]
    fn only_standard_keys_are_written() {
        // NPWG-5.3-reserved-keys, NPWG-5.3.6-dns, NPWG-5.3.6.4-default-route
        let attached = Attached {
            interfaces: vec![interface("net1", "02:00:00:00:00:02", true)],
            ips: vec![ip("10.0.0.2", Some(0))],
            dns: Dns {
                nameservers: vec!["10.0.0.53".to_owned()],
                domain: Some("a.example".to_owned()),
                search: vec!["b.example".to_owned()],
            },
            default_route: Some(vec!["10.0.0.1".parse().unwrap()]),
            ..Attached::default()
        };
        assert_eq!(
            published(false, &attached),
            json!({
                "name": "default/net-a",
                "interface": "net1",
                "ips": ["10.0.0.2"],
                "mac": "02:00:00:00:00:02",
                "default": false,
                "dns": {"nameservers": ["10.0.0.53"], "domain": "a.example", "search": ["b.example"]},
                "default-route": ["10.0.0.1"],
            })
        );
    }

    #[test]
    fn an_attachment_of_a_live_pod_says_so_and_by_whom() {
        let dynamic = Some(Dynamic { by: "hotplug.example.org".to_owned() });
        assert_eq!(
            published(false, &Attached { dynamic, ..Attached::default() }),
            json!({
                "name": "default/net-a",
                "interface": "net1",
                "default": false,
                "dns": {},
                "netattach.dev/dynamic": {"by": "hotplug.example.org"},
            })
        );
    }

    #[test]
    fn what_is_written_is_read_back() {
        let attached = Attached {
            interfaces: vec![interface("net1", "02:00:00:00:00:02", true)],
            ips: vec![ip("10.0.0.2", Some(0)), ip("2001:db8::2", Some(0))],
            default_route: Some(Vec::new()),
            ..Attached::default()
        };
        let entries = vec![
            StatusEntry::new("cbr0", true, "eth0", &Attached::default()),
            StatusEntry::new("default/net-a", false, "net1", &attached),
        ];
        assert_eq!(parse(&render(&entries)).unwrap(), entries);
    }

    #[test]
    fn annotations_of_others_are_read() {
        let multus = r#"[{
            "name": "kindnet", "interface": "eth0", "ips": ["10.244.1.2"], "mac": "c6:6f:0e:8f:6c:5e",
            "default": true, "dns": {}, "gateway": ["10.244.1.1"], "mtu": 1500
        },{
            "name": "default/net-a", "interface": "net1", "ips": ["10.1.1.7/24", "2001:db8::7/64"], "dns": {}
        },{
            "name": "default/net-b", "ips": null, "dns": {"options": ["ndots:5"]}
        }]"#;
        let entries = parse(multus).unwrap();
        let addresses: Vec<Vec<String>> =
            entries.iter().map(|entry| entry.ips.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(addresses, [vec!["10.244.1.2"], vec!["10.1.1.7", "2001:db8::7"], vec![]]);
        assert_eq!(entries.iter().map(|entry| entry.default).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(parse(" ").unwrap(), []);
    }

    #[test]
    fn unreadable_annotations_are_errors() {
        for text in ["{}", "[null]", "[{}]", "[", r#"[{"name":"a","ips":["x"]}]"#] {
            assert_eq!(parse(text).unwrap_err().to_string(), "read network-status annotation", "{text}");
        }
    }
}
