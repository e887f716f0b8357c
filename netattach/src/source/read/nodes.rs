//! Parses nodes.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::Deserialize;

use super::manifest::{Document, ManifestError, Object, shape};
use super::metadata::Metadata;
use crate::budget::{self, Budget, Exceeded};
use crate::cidr;
use crate::objects::Node;
use crate::objects::budget::Bounded;

/// The type of the addresses by which the nodes of a cluster reach each other.
const INTERNAL_IP: &str = "InternalIP";

#[derive(Deserialize)]
struct WrittenNode {
    metadata: Metadata,
    spec: Option<WrittenSpec>,
    status: Option<WrittenStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenSpec {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Bounded<String, { budget::POD_CIDRS.most }>>,
}

#[derive(Deserialize)]
struct WrittenStatus {
    addresses: Option<Bounded<WrittenAddress, { budget::NODE_ADDRESSES.most }>>,
}

#[derive(Deserialize)]
struct WrittenAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

/// Reads a node.
pub(in crate::source) fn node<'de>(document: impl Document<'de>) -> Result<Object, ManifestError> {
    const KIND: &str = "Node";
    let WrittenNode { metadata, spec, status } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?.name;
    let excess = |source| ManifestError::Excess { kind: KIND, name: name.clone(), source };
    let mut written: Vec<String> = Vec::new();
    if let Some(WrittenSpec { pod_cidr, pod_cidrs }) = spec {
        let list = pod_cidrs.unwrap_or_default();
        check_length(&list, &budget::POD_CIDRS).map_err(excess)?;
        written = list.items;
        // Servers before 1.16 have only the one key.
        if written.is_empty() {
            written.extend(pod_cidr.filter(|text| !text.is_empty()));
        }
    }
    let mut pod_cidrs: Vec<IpNet> = Vec::new();
    for text in written {
        let range = cidr::parse(&text).map(|net| net.trunc());
        let is_new =
            |range: &IpNet| pod_cidrs.iter().all(|other| other.addr().is_ipv4() != range.addr().is_ipv4());
        match range.filter(is_new) {
            Some(range) => pod_cidrs.push(range),
            None => return Err(ManifestError::PodCidr { name, text }),
        }
    }
    let list = status.and_then(|status| status.addresses).unwrap_or_default();
    check_length(&list, &budget::NODE_ADDRESSES).map_err(excess)?;
    let internal = list.items.into_iter().filter(|address| address.kind == INTERNAL_IP);
    // A value that is no address is a host name, to which the node cannot route.
    let addresses: Vec<IpAddr> = internal.filter_map(|address| address.address.parse().ok()).collect();
    Ok(Object::Node(Arc::new(Node { name, pod_cidrs, addresses })))
}

fn check_length<T, const MOST: usize>(list: &Bounded<T, MOST>, budget: &Budget) -> Result<(), Exceeded> {
    budget.check(list.items.len() + usize::from(list.has_more))
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::*;
    use crate::error_chain::Chain;
    use crate::source::read::{Kind, api_object};

    fn read(spec: &Value, status: &Value) -> Result<Node, String> {
        let text = json!({"metadata": {"name": "a"}, "spec": spec, "status": status}).to_string();
        match api_object(Kind::Node, &RawValue::from_string(text).unwrap()) {
            Ok(Object::Node(node)) => Ok(Arc::unwrap_or_clone(node)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(Chain(&error).to_string()),
        }
    }

    #[test]
    fn ranges_and_internal_addresses_are_kept() {
        let addresses = json!([
            {"type": "Hostname", "address": "a"}, {"type": "InternalIP", "address": "192.0.2.1"},
            {"type": "ExternalIP", "address": "203.0.113.1"}, {"type": "InternalIP", "address": "a.example"},
            {"type": "InternalIP", "address": "2001:db8::1"}
        ]);
        let both = Node {
            name: "a".into(),
            pod_cidrs: vec!["10.1.2.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap()],
            addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        };
        let spec =
            json!({"podCIDR": "10.1.2.0/24", "podCIDRs": ["10.1.2.7/24", "fd00:1::/64"], "taints": []});
        assert_eq!(read(&spec, &json!({"addresses": addresses, "images": []})), Ok(both.clone()));
        let single = Node { pod_cidrs: both.pod_cidrs[..1].to_vec(), addresses: vec![], ..both.clone() };
        assert_eq!(read(&json!({"podCIDR": "10.1.2.0/24"}), &json!({})), Ok(single));
        let bare = Node { pod_cidrs: vec![], addresses: vec![], ..both };
        assert_eq!(read(&json!({}), &Value::Null), Ok(bare.clone()));
        assert_eq!(read(&Value::Null, &json!({"addresses": null})), Ok(bare));
    }

    #[test]
    fn a_node_with_other_ranges_is_refused() {
        let refused = |text: &str| {
            Err(format!(
                "read Node a: podCIDR {text:?} is not an address with a prefix length, or the second of its family"
            ))
        };
        for (ranges, text) in [
            (json!(["10.1.2.0"]), "10.1.2.0"),
            (json!(["10.1.2.0/24", "10.1.3.0/24"]), "10.1.3.0/24"),
            (json!(["fd00::/64", "::/0"]), "::/0"),
        ] {
            assert_eq!(read(&json!({"podCIDRs": ranges}), &Value::Null), refused(text));
        }
        let many = json!(["10.1.0.0/24", "fd00::/64", "10.2.0.0/24"]);
        assert_eq!(
            read(&json!({"podCIDRs": many}), &Value::Null),
            Err("read Node a: podCIDRs of a node: 3 ranges, and at most 2 are allowed".into())
        );
    }
}
