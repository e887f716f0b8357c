//! The kinds of objects that the server knows.

use serde_json::{Value, json};

/// A kind of objects. Its versions share one storage: an object written in one version is read in the others.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Versions, the preferred one first.
    pub versions: &'static [&'static str],
    /// Plural name, as in paths.
    pub resource: &'static str,
    /// As in `kind`.
    pub kind: &'static str,
    /// Whether objects are in namespaces.
    pub namespaced: bool,
    /// Whether it is defined by a CustomResourceDefinition: items of lists have `apiVersion` and `kind`, and
    /// field selectors know names alone.
    pub custom: bool,
    /// Whether `status` is a subresource.
    pub status: bool,
}

/// Pods.
pub static PODS: Kind = core("pods", "Pod", true, true);
/// Namespaces.
pub static NAMESPACES: Kind = core("namespaces", "Namespace", false, true);
/// Nodes.
pub static NODES: Kind = core("nodes", "Node", false, true);
/// Events of `events.k8s.io`.
pub static EVENTS: Kind = Kind {
    group: "events.k8s.io",
    versions: &["v1"],
    resource: "events",
    kind: "Event",
    namespaced: true,
    custom: false,
    status: false,
};
/// NetworkAttachmentDefinitions.
pub static NETWORKS: Kind = custom("network-attachment-definitions", "NetworkAttachmentDefinition", &["v1"]);
/// MultiNetworkPolicies.
pub static MULTI_POLICIES: Kind =
    custom("multi-networkpolicies", "MultiNetworkPolicy", &["v1beta1", "v1beta2"]);
/// NetworkPolicies.
pub static NETWORK_POLICIES: Kind = Kind {
    group: "networking.k8s.io",
    versions: &["v1"],
    resource: "networkpolicies",
    kind: "NetworkPolicy",
    namespaced: true,
    custom: false,
    status: false,
};

/// ServiceCIDRs.
pub static SERVICE_CIDRS: Kind = Kind {
    group: "networking.k8s.io",
    versions: &["v1"],
    resource: "servicecidrs",
    kind: "ServiceCIDR",
    namespaced: false,
    custom: false,
    status: true,
};

/// Every kind.
pub static ALL: [&Kind; 8] =
    [&PODS, &NAMESPACES, &NODES, &EVENTS, &NETWORKS, &MULTI_POLICIES, &NETWORK_POLICIES, &SERVICE_CIDRS];

const fn core(resource: &'static str, kind: &'static str, namespaced: bool, status: bool) -> Kind {
    Kind { group: "", versions: &["v1"], resource, kind, namespaced, custom: false, status }
}

const fn custom(resource: &'static str, kind: &'static str, versions: &'static [&'static str]) -> Kind {
    Kind { group: "k8s.cni.cncf.io", versions, resource, kind, namespaced: true, custom: true, status: false }
}

impl Kind {
    /// The kind with that plural name.
    pub fn named(resource: &str) -> Option<&'static Self> {
        ALL.into_iter().find(|kind| kind.resource == resource)
    }

    /// The kind of an object, by its `apiVersion` and `kind`.
    pub fn of(object: &Value) -> Option<&'static Self> {
        let (version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
        ALL.into_iter().find(|known| {
            known.kind == kind && known.versions.iter().any(|name| known.api_version(name) == version)
        })
    }

    /// `apiVersion` of a version.
    pub fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    /// `NAME.GROUP`, as messages name it.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.resource.to_owned()
        } else {
            format!("{}.{}", self.resource, self.group)
        }
    }

    /// The entry of the kind in a discovery document, with its subresources.
    pub(super) fn discovery(&self) -> Vec<Value> {
        let verbs = ["create", "delete", "get", "list", "patch", "update", "watch"];
        let entry = |name: String, verbs: &[&str]| {
            json!({
                "name": name, "singularName": self.kind.to_lowercase(), "namespaced": self.namespaced,
                "kind": self.kind, "verbs": verbs
            })
        };
        let mut entries = vec![entry(self.resource.to_owned(), &verbs)];
        if self.status {
            entries.push(entry(format!("{}/status", self.resource), &["get", "patch", "update"]));
        }
        entries
    }
}
