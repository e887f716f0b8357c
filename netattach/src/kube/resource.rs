//! The kinds of objects that are read from the API: their paths, and which objects of each. Pure.

use std::time::Duration;

use crate::objects::ObjectName;
pub use crate::objects::remote::ATTACHED_LABEL;
use crate::source::read::Kind;

/// Value of [`ATTACHED_LABEL`] on pods that are on their default network alone, if that is no object: only
/// NetworkPolicies can have them as peers. If it is an object, policies can name it, and the value is its name
/// (`patch::value_of`). Other pods, and all that agents of earlier versions attached, have the empty value.
pub(super) const DEFAULT_ALONE: &str = "default";

/// A kind of objects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Resource {
    /// Its name in conditions and logs.
    pub(super) name: &'static str,
    /// How it is read.
    pub(super) content: Content,
    /// Its paths, the newest API version first; the first served path is used.
    pub(super) paths: &'static [&'static str],
    /// Most objects in one page of a list.
    pub(super) page: u32,
    /// Duration of one watch request, as a multiple of the setting `kubernetes.watchSeconds`.
    pub(super) watches: u32,
    /// Whether the kind may be missing on a server.
    pub(super) optional: bool,
}

/// The part of the objects that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Content {
    /// Objects of a kind.
    Objects(Kind),
    /// The metadata of pods that agents have labelled, on whichever node.
    RemotePods,
    /// The object of this node.
    OwnNode,
}

/// The pods of this node.
pub(super) const PODS: Resource = Resource {
    name: "pods of this node",
    content: Content::Objects(Kind::Pod),
    paths: &["/api/v1/pods"],
    page: 100,
    watches: 1,
    optional: false,
};

/// The kinds that are always followed.
pub(super) const ALWAYS: [&Resource; 4] = [&PODS, &NAMESPACES, &DEFINITIONS, &POLICIES];

const NAMESPACES: Resource = Resource {
    name: "namespaces",
    content: Content::Objects(Kind::Namespace),
    paths: &["/api/v1/namespaces"],
    page: 200,
    watches: 4,
    optional: false,
};

const DEFINITIONS: Resource = Resource {
    name: "network-attachment-definitions",
    content: Content::Objects(Kind::Definition),
    paths: &["/apis/k8s.cni.cncf.io/v1/network-attachment-definitions"],
    page: 100,
    watches: 4,
    optional: true,
};

const POLICIES: Resource = Resource {
    name: "multi-networkpolicies",
    content: Content::Objects(Kind::MultiNetworkPolicy),
    paths: &[
        "/apis/k8s.cni.cncf.io/v1beta2/multi-networkpolicies",
        "/apis/k8s.cni.cncf.io/v1beta1/multi-networkpolicies",
    ],
    page: 100,
    watches: 4,
    optional: true,
};

/// NetworkPolicies, if they are enforced.
pub(super) const NETWORK_POLICIES: Resource = Resource {
    name: "networkpolicies",
    content: Content::Objects(Kind::NetworkPolicy),
    paths: &["/apis/networking.k8s.io/v1/networkpolicies"],
    page: 100,
    watches: 4,
    optional: false,
};

/// Pods that agents have labelled, which policies select as peers: their metadata only.
pub(super) const REMOTE_PODS: Resource = Resource {
    name: "pods of other nodes",
    content: Content::RemotePods,
    paths: &["/api/v1/pods"],
    page: 250,
    watches: 1,
    optional: false,
};

/// All nodes, if the agent makes the network between them.
pub(super) const NODES: Resource = Resource {
    name: "nodes",
    content: Content::Objects(Kind::Node),
    paths: &[NODES_PATH],
    page: 100,
    watches: 4,
    optional: false,
};

/// This node, if a definition takes its range from it.
pub(super) const OWN_NODE: Resource =
    Resource { name: "this node", content: Content::OwnNode, optional: true, ..NODES };

/// The path of nodes.
pub(super) const NODES_PATH: &str = "/api/v1/nodes";

/// The media type for the metadata of a list.
pub(super) const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

impl Resource {
    /// Returns the remedy if a server does not serve it, or only an older version; empty for kinds that
    /// every server has.
    pub(super) fn remedy(&self) -> &'static str {
        let is_defined = self.paths.iter().any(|path| path.starts_with("/apis/k8s.cni.cncf.io/"));
        if is_defined { ": apply its definition, of deploy/base/crds" } else { "" }
    }

    /// Returns the page size of the first page of a list; `None`: all objects are requested at once, and
    /// pages are used only if that answer is too large.
    ///
    /// The pods of a node are few among those of all nodes. Servers of Kubernetes 1.31 to 1.33 answer a
    /// list without `limit` from their cache, by an index of nodes; with a `limit` they read all pods of
    /// the cluster from etcd until enough match. Older servers read all pods in both cases, unless the list
    /// names a version that it must not precede (`list::since`).
    pub(super) fn first_page(&self) -> Option<u32> {
        (self.content != Content::Objects(Kind::Pod)).then_some(self.page)
    }

    /// Returns the time over which the agents of a cluster spread a repeated list of the kind, if all of
    /// them may need one. A new pod of this node is then requested by its ADD.
    pub(super) fn spread(&self) -> Duration {
        match self.content {
            Content::Objects(Kind::Pod) => Duration::from_secs(5),
            _ => Duration::from_secs(10),
        }
    }

    /// Whether it is followed only while it is needed: snapshots do not wait for it.
    pub(super) fn is_on_demand(&self) -> bool {
        matches!(self.content, Content::RemotePods | Content::OwnNode)
    }

    /// Returns the media type for lists.
    pub(super) fn accept_list(&self) -> &'static str {
        match self.content {
            Content::Objects(_) | Content::OwnNode => "application/json",
            Content::RemotePods => METADATA_LIST,
        }
    }

    /// Returns the media type for single objects and watches.
    pub(super) fn accept_object(&self) -> &'static str {
        match self.content {
            Content::Objects(_) | Content::OwnNode => "application/json",
            Content::RemotePods => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        }
    }
}

/// A kind at one of its paths, on one node.
pub(super) struct Target<'a> {
    pub(super) resource: &'a Resource,
    pub(super) path: &'a str,
    /// Name of this node.
    pub(super) node: &'a str,
    /// The setting `kubernetes.watchSeconds`.
    pub(super) watch_seconds: u32,
    /// Of attached pods: the values of [`ATTACHED_LABEL`] that are left out, separated by commas.
    pub(super) left_out: &'a str,
}

impl Target<'_> {
    /// Returns path and query of one page of a list; without a limit, of the whole rest. `since`: a version that the
    /// list must not precede, of a list without a limit.
    pub(super) fn list(&self, limit: Option<u32>, next: Option<&str>, since: Option<&str>) -> String {
        let limit = limit.map(|limit| format!("limit={limit}&")).unwrap_or_default();
        let next = next.map(|next| format!("continue={}&", escaped(next))).unwrap_or_default();
        // Without a limit this is what servers mean by a version alone, also those before 1.19, which do not know
        // `resourceVersionMatch=NotOlderThan`.
        let since = since.map(|since| format!("resourceVersion={}&", escaped(since))).unwrap_or_default();
        let query = format!("{}{limit}{next}{since}", self.selector());
        match query.strip_suffix('&') {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.to_owned(),
        }
    }

    /// Returns path and query of a list that tells the newest version of the kind: of one object, whichever it is. With a
    /// selector, servers would read objects until one matches.
    pub(super) fn newest(&self) -> String {
        format!("{}?limit=1", self.path)
    }

    /// Path and query of a watch from a version on.
    pub(super) fn watch(&self, version: &str) -> String {
        format!(
            "{}?{}watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}",
            self.path,
            self.selector(),
            self.watch_seconds(),
            escaped(version)
        )
    }

    /// Returns the duration of one watch request, in seconds.
    pub(super) fn watch_seconds(&self) -> u32 {
        self.watch_seconds.saturating_mul(self.resource.watches)
    }

    fn selector(&self) -> String {
        match self.resource.content {
            Content::Objects(Kind::Pod) => {
                format!("fieldSelector={}&", escaped(&format!("spec.nodeName={}", self.node)))
            }
            Content::OwnNode => {
                format!("fieldSelector={}&", escaped(&format!("metadata.name={}", self.node)))
            }
            Content::Objects(_) => String::new(),
            Content::RemotePods if self.left_out.is_empty() => {
                format!("labelSelector={}&", escaped(ATTACHED_LABEL))
            }
            Content::RemotePods => {
                let others = format!("{ATTACHED_LABEL},{ATTACHED_LABEL} notin ({})", self.left_out);
                format!("labelSelector={}&", escaped(&others))
            }
        }
    }
}

/// Returns the path of a pod.
pub(super) fn pod_path(name: &ObjectName) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", escaped(&name.namespace), escaped(&name.name))
}

/// A value in a query (RFC 3986, section 2.1): all but the unreserved characters are escaped.
pub(super) fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::kube::resource::*;

    #[test]
    fn requests_select_what_is_kept() {
        let target =
            |resource| Target { resource, path: "/p", node: "node-1", watch_seconds: 60, left_out: "" };
        assert_eq!(target(&PODS).list(None, None, None), "/p?fieldSelector=spec.nodeName%3Dnode-1");
        assert_eq!(
            target(&PODS).list(Some(100), None, None),
            "/p?fieldSelector=spec.nodeName%3Dnode-1&limit=100"
        );
        assert_eq!(
            target(&REMOTE_PODS).list(Some(250), Some("a+b="), None),
            "/p?labelSelector=netattach.dev%2Fnetworks&limit=250&continue=a%2Bb%3D"
        );
        assert_eq!(
            target(&OWN_NODE).list(Some(1), None, None),
            "/p?fieldSelector=metadata.name%3Dnode-1&limit=1"
        );
        let few = Target { left_out: "default,a.b", ..target(&REMOTE_PODS) };
        assert_eq!(
            few.list(Some(250), None, None),
            "/p?labelSelector=netattach.dev%2Fnetworks%2Cnetattach.dev%2Fnetworks%20notin%20%28default%2Ca.b%29&limit=250"
        );
        assert_eq!(target(&NODES).list(Some(100), None, None), "/p?limit=100");
        assert_eq!(target(&NODES).list(None, None, None), "/p");
        assert_eq!(
            target(&PODS).list(None, None, Some("7")),
            "/p?fieldSelector=spec.nodeName%3Dnode-1&resourceVersion=7"
        );
        assert_eq!(target(&PODS).newest(), "/p?limit=1");
        assert_eq!(
            target(&NAMESPACES).watch("17"),
            "/p?watch=true&allowWatchBookmarks=true&timeoutSeconds=240&resourceVersion=17"
        );
    }
}
