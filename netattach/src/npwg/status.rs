//! The `network-status` annotation: the result of each of a pod's attachments, one entry for each (section 5).
//!
//! Where the standard leaves a choice, it is made here once: addresses are written without a prefix length, as all
//! known readers expect them; `default` is always written; of a result with several interfaces in the pod only the
//! first is reported. If Multus writes something else, [`Form`] has a switch.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::selection::RequestedIp;
use crate::cni::json::null_is_default;
use crate::cni::{CniResult, IpConfig, Route};

/// One attachment as published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEntry {
    /// `namespace/name` of the definition, or the name of the default network's configuration.
    pub name: String,
    /// Interface in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Its addresses, with or without prefix length.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub ips: Vec<RequestedIp>,
    /// Its hardware address as the plugin printed it (6 bytes, or 20 on InfiniBand); never without `interface`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Whether this is the cluster-wide default network.
    #[serde(default)]
    pub default: bool,
    /// DNS settings of the network; written even when empty, as Multus does.
    #[serde(default)]
    pub dns: Dns,
    /// Gateways of the pod's default routes, when the pod asked for them to be on this attachment.
    #[serde(
        default,
        rename = "default-route",
        skip_serializing_if = "Option::is_none",
        deserialize_with = "those_readable_if_any"
    )]
    pub default_route: Option<Vec<IpAddr>>,
    /// The device of the attachment, in the form that [`device_info`](super::device_info) reads.
    #[serde(default, rename = "device-info", skip_serializing_if = "Option::is_none")]
    pub device_info: Option<Value>,
    /// Next hops of every default route through the interface: a key of Multus ([`Form::multus_keys`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "those_readable")]
    pub gateway: Vec<IpAddr>,
    /// In bytes: a key of Multus ([`Form::multus_keys`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Warnings about the pod's request: parts that were tolerated although they were probably not intended.
    #[serde(default, rename = "dev.netattach.warnings", skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Present for an attachment that was added while the pod was live (section 5.1): the standard asks that it can be
    /// distinguished from the others and defines no key for it.
    #[serde(default, rename = "dev.netattach.dynamic", skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
    /// The device that the kubelet allocated to the pod for the attachment, and the container that it belongs to: the
    /// standard has keys for the description of the device, but none for its owner.
    #[serde(default, rename = "dev.netattach.device", skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
}

/// A device of an extended resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The extended resource.
    pub resource: String,
    /// Id of the device within it.
    pub id: String,
    /// The container that has it; `None`: the pod's selection names the device, and there is no kubelet to ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// The format of entries. The default follows the standard; each switch is for readers that expect Multus's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Form {
    /// An entry for each interface in the pod that a result lists, instead of only for the first.
    pub every_interface: bool,
    /// Addresses with the prefix length of their subnet.
    pub prefix_lengths: bool,
    /// `gateway` and `mtu`, which the standard does not have.
    pub multus_keys: bool,
}

/// The origin of an attachment that the pod did not request itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// The caller that requested it.
    pub by: String,
}

/// DNS settings in the standard's format.
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

/// The input of the status of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attached {
    /// `namespace/name` of the definition, or the name of the default network's configuration.
    pub name: String,
    /// Whether it is the cluster-wide default network.
    pub default: bool,
    /// The name with which the plugin was called (`CNI_IFNAME`): used if the result lists no interface in the pod, as
    /// results before version 0.3.0 never do.
    pub ifname: String,
    /// Its result; empty if the plugin printed none.
    pub result: CniResult,
    /// The gateways requested under `default-route`, as configured; `None` if not requested.
    pub default_route: Option<Vec<IpAddr>>,
    /// See [`StatusEntry::device_info`].
    pub device_info: Option<Value>,
    /// See [`StatusEntry::warnings`].
    pub warnings: Vec<String>,
    /// For an attachment of a live pod.
    pub dynamic: Option<Dynamic>,
    /// See [`StatusEntry::device`].
    pub device: Option<Device>,
}

/// Why a `network-status` annotation is invalid.
#[derive(Debug, thiserror::Error)]
#[error("read network-status annotation")]
pub struct StatusError(#[source] serde_json::Error);

impl Attached {
    /// The entries of the attachment: one, or several in that form.
    pub fn entries(&self, form: Form) -> Vec<StatusEntry> {
        let interfaces = self.result.interfaces.iter().enumerate();
        let in_pod: Vec<usize> =
            interfaces.filter(|(_, interface)| interface.sandbox.is_some()).map(|(index, _)| index).collect();
        let mut entries = vec![self.first_entry(in_pod.first().copied(), form)];
        if form.every_interface {
            entries.extend(in_pod.iter().skip(1).map(|index| self.entry(Some(*index), false, form)));
        }
        entries
    }

    /// The first entry has the data that is reported once per attachment.
    fn first_entry(&self, in_pod: Option<usize>, form: Form) -> StatusEntry {
        StatusEntry {
            default: self.default,
            default_route: self.default_route.clone(),
            device_info: self.device_info.clone(),
            warnings: self.warnings.clone(),
            device: self.device.clone(),
            ..self.entry(in_pod, true, form)
        }
    }

    fn entry(&self, in_pod: Option<usize>, is_first: bool, form: Form) -> StatusEntry {
        let reported = in_pod.and_then(|index| self.result.interfaces.get(index));
        let gateways = |ips: &[&IpConfig]| self.gateways_of(ips);
        let ips: Vec<&IpConfig> =
            self.result.ips.iter().filter(|ip| self.belongs(ip, in_pod, is_first)).collect();
        StatusEntry {
            name: self.name.clone(),
            interface: Some(reported.map_or(&self.ifname, |interface| &interface.name).clone()),
            ips: ips.iter().map(|ip| shown(ip.address, form)).collect(),
            mac: reported.and_then(|interface| interface.mac.clone()),
            default: false,
            dns: Dns {
                nameservers: self.result.dns.nameservers.clone(),
                domain: self.result.dns.domain.clone(),
                search: self.result.dns.search.clone(),
            },
            default_route: None,
            device_info: None,
            gateway: if form.multus_keys { gateways(&ips) } else { Vec::new() },
            mtu: reported.and_then(|interface| interface.mtu).filter(|_| form.multus_keys),
            warnings: Vec::new(),
            dynamic: self.dynamic.clone(),
            device: None,
        }
    }

    /// An address without an interface index (or with an invalid one) belongs to the pod's first interface; so does
    /// every address of a result that lists no interface in the pod.
    fn belongs(&self, ip: &IpConfig, in_pod: Option<usize>, is_first: bool) -> bool {
        match (ip.interface, in_pod) {
            (Some(index), Some(position)) if index < self.result.interfaces.len() => index == position,
            _ => is_first,
        }
    }

    /// The next hops of the result's default routes of these addresses' families.
    fn gateways_of(&self, ips: &[&IpConfig]) -> Vec<IpAddr> {
        let default = self.result.routes.iter().filter(|route| route.dst.prefix_len() == 0);
        let next_hop = |route: &Route| {
            let is_of_family = |ip: &&IpConfig| ip.address.addr().is_ipv4() == route.dst.addr().is_ipv4();
            let gateways = ips.iter().filter_map(|ip| ip.gateway);
            route.next_hop(gateways).filter(|_| ips.iter().any(is_of_family))
        };
        default.filter_map(next_hop).collect()
    }
}

fn shown(address: IpNet, form: Form) -> RequestedIp {
    RequestedIp { address: address.addr(), prefix: form.prefix_lengths.then_some(address.prefix_len()) }
}

/// Writes the annotation.
pub fn render(entries: &[StatusEntry]) -> String {
    // Printing a `Value` cannot fail, unlike a foreign `Serialize`.
    serde_json::json!(entries).to_string()
}

/// Gateways as other programs write them: Multus writes `<nil>` for a default route without one.
fn those_readable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpAddr>, D::Error> {
    Ok(those_readable_if_any(deserializer)?.unwrap_or_default())
}

fn those_readable_if_any<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<IpAddr>>, D::Error> {
    let texts = Option::<Vec<String>>::deserialize(deserializer)?;
    Ok(texts.map(|texts| texts.iter().filter_map(|text| text.parse().ok()).collect()))
}

/// Parses the annotation, also as written by others: unknown keys are ignored, a missing `default` is false, addresses may
/// have a prefix length, and gateways that are no addresses are left out.
///
/// # Errors
/// The text is not a JSON list of entries with names.
pub fn parse(annotation: &str) -> Result<Vec<StatusEntry>, StatusError> {
    if annotation.trim().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_str(annotation).map_err(StatusError)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn attached(result: Value) -> Attached {
        Attached {
            name: "default/net-a".to_owned(),
            ifname: "net1".to_owned(),
            result: serde_json::from_value(result).unwrap(),
            ..Attached::default()
        }
    }

    fn entries(attached: &Attached, form: Form) -> Value {
        serde_json::from_str(&render(&attached.entries(form))).unwrap()
    }

    fn published(attached: &Attached) -> Value {
        let mut entries = entries(attached, Form::default());
        assert_eq!(entries.as_array().unwrap().len(), 1);
        entries[0].take()
    }

    /// A result with an interface on the node and two in the pod.
    fn several() -> Value {
        json!({
            "interfaces": [
                {"name": "vethab12", "mac": "02:00:00:00:00:01"},
                {"name": "eth1", "mac": "02:00:00:00:00:02", "mtu": 1400, "sandbox": "/run/netns/c1"},
                {"name": "eth2", "mac": "02:00:00:00:00:03", "sandbox": "/run/netns/c1"},
            ],
            "ips": [
                {"interface": 0, "address": "10.0.0.1/24"},
                {"interface": 1, "address": "10.0.0.2/24"},
                {"interface": 1, "address": "2001:db8::2/64"},
                {"interface": 2, "address": "10.0.0.3/24"},
                {"address": "10.0.0.4/24", "gateway": "10.0.0.1"},
            ],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16"}, {"dst": "::/0", "gw": "fe80::1"}],
        })
    }

    /// Rows: NPWG-5.1.1-first-sandbox, NPWG-5.3.1-name, NPWG-5.3.1-name-namespaced, NPWG-5.3.2-interface.
    /// Rows: NPWG-5.3.3-ips-indexed, NPWG-5.3.3-ips-format, NPWG-5.3.5-default-required.
    #[test]
    fn the_first_interface_in_the_pod_is_reported_with_its_own_addresses() {
        assert_eq!(
            published(&attached(several())),
            json!({
                "name": "default/net-a",
                "interface": "eth1",
                "ips": ["10.0.0.2", "2001:db8::2", "10.0.0.4"],
                "mac": "02:00:00:00:00:02",
                "default": false,
                "dns": {},
            })
        );
    }

    /// Rows: NPWG-5.3.5-single-true.
    #[test]
    fn readers_of_multus_get_what_they_expect_by_switch() {
        let form = Form { every_interface: true, prefix_lengths: true, multus_keys: true };
        let default = Attached { default: true, ..attached(several()) };
        let expected = json!([
            {
                "name": "default/net-a", "interface": "eth1", "mac": "02:00:00:00:00:02", "mtu": 1400,
                "ips": ["10.0.0.2/24", "2001:db8::2/64", "10.0.0.4/24"],
                "gateway": ["10.0.0.1", "fe80::1"], "default": true, "dns": {},
            },
            {
                "name": "default/net-a", "interface": "eth2", "mac": "02:00:00:00:00:03", "ips": ["10.0.0.3/24"],
                "default": false, "dns": {},
            },
        ]);
        assert_eq!(entries(&default, form), expected);
    }

    /// Rows: NPWG-5.1.1-no-result, NPWG-5.3.4-mac-needs-interface.
    #[test]
    fn no_result_gives_a_minimal_entry() {
        for form in [Form::default(), Form { every_interface: true, prefix_lengths: true, multus_keys: true }]
        {
            let none = Attached { default: true, ..attached(json!({})) };
            assert_eq!(
                entries(&none, form),
                json!([{"name": "default/net-a", "interface": "net1", "default": true, "dns": {}}])
            );
        }
    }

    /// Rows: NPWG-5.1.1-old-results, NPWG-5.3.3-ips-unindexed.
    #[test]
    fn addresses_without_an_interface_are_reported() {
        let old =
            json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24"}, "ip6": {"ip": "2001:db8::2/64"}});
        let result = CniResult::parse(&old, crate::cni::Version::LATEST).unwrap();
        let bare = published(&Attached { result, ..attached(json!({})) });
        assert_eq!(bare["ips"], json!(["10.0.0.2", "2001:db8::2"]));
        assert_eq!(bare["interface"], "net1");
        let unindexed = [{
            json!({"interfaces": [{"name": "net1", "sandbox": "/n"}],
                "ips": [{"address": "10.0.0.2/24"}, {"interface": 7, "address": "10.0.0.3/24"},
                        {"interface": -1, "address": "10.0.0.4/24"}]})
        }];
        for result in unindexed {
            assert_eq!(published(&attached(result))["ips"], json!(["10.0.0.2", "10.0.0.3", "10.0.0.4"]));
        }
        let no_sandbox = json!({"interfaces": [{"name": "net1", "mac": "02:00:00:00:00:02"}],
            "ips": [{"interface": 0, "address": "10.0.0.2/24"}]});
        assert_eq!(
            published(&attached(no_sandbox)),
            json!({"name": "default/net-a", "interface": "net1", "ips": ["10.0.0.2"], "default": false, "dns": {}})
        );
    }

    /// An entry with every field set.
    fn full() -> Attached {
        let result = json!({
            "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:02", "mtu": 1500, "sandbox": "/n"}],
            "ips": [{"interface": 0, "address": "10.0.0.2/24"}],
            "dns": {"nameservers": ["10.0.0.53"], "domain": "a.example", "search": ["b.example"], "options": ["ndots:5"]},
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}],
        });
        Attached {
            default_route: Some(vec!["10.0.0.1".parse().unwrap()]),
            device_info: Some(json!({"type": "memif", "version": "1.1.0", "memif": {}})),
            warnings: vec!["odd".to_owned()],
            device: Some(Device {
                resource: "a/vf".into(),
                id: "0000:03:02.1".into(),
                container: Some("web".into()),
            }),
            ..attached(result)
        }
    }

    /// Rows: NPWG-5.3-reserved-keys, NPWG-5.3.6-dns, NPWG-5.3.6.4-default-route, NPWG-5.3.7-device-info.
    #[test]
    fn only_keys_of_the_standard_and_private_ones_are_written() {
        assert_eq!(
            published(&full()),
            json!({
                "name": "default/net-a",
                "interface": "net1",
                "ips": ["10.0.0.2"],
                "mac": "02:00:00:00:00:02",
                "default": false,
                "dns": {"nameservers": ["10.0.0.53"], "domain": "a.example", "search": ["b.example"]},
                "default-route": ["10.0.0.1"],
                "device-info": {"type": "memif", "version": "1.1.0", "memif": {}},
                "dev.netattach.warnings": ["odd"],
                "dev.netattach.device": {"resource": "a/vf", "id": "0000:03:02.1", "container": "web"},
            })
        );
    }

    #[test]
    fn an_attachment_of_a_live_pod_says_so_and_by_whom() {
        let dynamic = Some(Dynamic { by: "hotplug.example.org".to_owned() });
        assert_eq!(
            published(&Attached { dynamic, ..attached(json!({})) }),
            json!({
                "name": "default/net-a",
                "interface": "net1",
                "default": false,
                "dns": {},
                "dev.netattach.dynamic": {"by": "hotplug.example.org"},
            })
        );
    }

    #[test]
    fn what_is_written_is_read_back() {
        let form = Form { every_interface: true, prefix_lengths: true, multus_keys: true };
        let mut entries = full().entries(form);
        entries.extend(attached(several()).entries(Form::default()));
        entries.extend(attached(several()).entries(form));
        assert_eq!(parse(&render(&entries)).unwrap(), entries);
    }

    #[test]
    fn annotations_of_others_are_read() {
        let multus = r#"[{
            "name": "kindnet", "interface": "eth0", "ips": ["10.244.1.2"], "mac": "c6:6f:0e:8f:6c:5e",
            "default": true, "dns": {}, "gateway": ["10.244.1.1"], "mtu": 1500
        },{
            "name": "default/net-a", "interface": "net1", "ips": ["10.1.1.7/24", "2001:db8::7/64"], "dns": {},
            "gateway": ["<nil>"], "default-route": ["", "10.1.1.1"]
        },{
            "name": "default/net-b", "ips": null, "dns": {"options": ["ndots:5"]}
        }]"#;
        let entries = parse(multus).unwrap();
        let addresses: Vec<Vec<String>> =
            entries.iter().map(|entry| entry.ips.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(addresses, [vec!["10.244.1.2"], vec!["10.1.1.7/24", "2001:db8::7/64"], vec![]]);
        let keys: Vec<_> = entries.iter().map(|entry| (entry.gateway.len(), entry.mtu)).collect();
        assert_eq!(keys, [(1, Some(1500)), (0, None), (0, None)]);
        let routes: Vec<_> = entries.iter().map(|entry| entry.default_route.clone()).collect();
        assert_eq!(routes, [None, Some(vec!["10.1.1.1".parse().unwrap()]), None]);
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
