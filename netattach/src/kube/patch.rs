//! Composes the merge patches (RFC 7386) that write a pod's network-status, or only the label of a pod whose
//! status another plugin has written. Pure.
//!
//! They are sent to the subresource `status`, which accepts a pod's labels and annotations too. The uid in
//! a patch makes the server refuse it for another pod of the same name.

use serde_json::{Value, json};

use super::resource::{ATTACHED_LABEL, DEFAULT_ALONE, pod_path};
use crate::npwg::{STATUS_ANNOTATION, StatusEntry, status};
use crate::objects::remote::{BY_ANOTHER, PORTS_ANNOTATION, ports_annotation};
use crate::objects::{ObjectName, Pod};

/// The status to write for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    /// Its networks, as in the annotation, and the value of the label. The named ports of its containers are written
    /// with them.
    Attached { text: String, label: String },
    /// It has no networks any more.
    Detached,
    /// Another plugin has attached it. The status stays as that plugin has written it, and is labelled, so
    /// that agents of other nodes read it. The named ports are written as for attached pods.
    ByAnother,
    /// It was [`Status::ByAnother`], and has ended or lost its status.
    Unlabelled,
}

impl Status {
    /// Whether it is about the attachments of this node.
    pub(super) fn is_own(&self) -> bool {
        matches!(self, Self::Attached { .. } | Self::Detached)
    }

    /// Returns what is to be written for a pod of this node that the agent has not attached; `None`:
    /// nothing.
    pub(super) fn of_another(pod: &Pod) -> Option<Self> {
        if !pod.is_by_another() || pod.terminating {
            return None;
        }
        let has_status = pod.annotations.get(STATUS_ANNOTATION).is_some_and(|text| !text.trim().is_empty());
        if has_status && !pod.host_network && !pod.phase.has_ended() {
            return Some(Self::ByAnother);
        }
        pod.labels.contains_key(ATTACHED_LABEL).then_some(Self::Unlabelled)
    }
}

impl Status {
    /// The status of a pod with these networks.
    pub(super) fn attached(entries: &[StatusEntry]) -> Self {
        Self::Attached { text: status::render(entries), label: label(entries) }
    }
}

/// Returns the value of the label for a pod with these networks: by it agents leave out pods that are on their default
/// network alone.
fn label(entries: &[StatusEntry]) -> String {
    let name = entries.first().map_or("", |entry| entry.name.as_str());
    let is_alone = entries.iter().all(|entry| entry.default && entry.name == name);
    match name.contains('/') {
        _ if !is_alone || name.is_empty() => String::new(),
        true => value_of(name).unwrap_or_default(),
        false => DEFAULT_ALONE.to_owned(),
    }
}

/// Returns the value of the label for pods that are on this default network alone, which is an object; `None`: the name
/// does not fit into a label, and they have the value of all others.
pub(super) fn value_of(network: &str) -> Option<String> {
    /// Most bytes of the value of a label.
    const LONGEST: usize = 63;
    let value = network.replace('/', ".");
    let ends = [value.chars().next()?, value.chars().next_back()?];
    let is_value = value.len() <= LONGEST
        && value.chars().all(|it| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.'))
        && ends.iter().all(char::is_ascii_alphanumeric);
    is_value.then_some(value)
}

/// Returns the path of the patch.
pub(super) fn path(name: &ObjectName) -> String {
    format!("{}/status", pod_path(name))
}

/// Returns the patch. `pod`: the known object; if unknown, so are its ports, and their written values stay.
pub(super) fn patch(uid: Option<&str>, pod: Option<&Pod>, status: &Status) -> Value {
    let ports = || pod.map(|pod| json!(ports_annotation(&pod.ports)));
    let (text, ports, label) = match status {
        Status::Attached { text, label } => (Some(json!(text)), ports(), json!(label)),
        Status::Detached => (Some(Value::Null), Some(Value::Null), Value::Null),
        Status::ByAnother => (None, ports(), json!(BY_ANOTHER)),
        Status::Unlabelled => (None, Some(Value::Null), Value::Null),
    };
    let mut metadata = json!({ "labels": { ATTACHED_LABEL: label } });
    for (key, value) in [(STATUS_ANNOTATION, text), (PORTS_ANNOTATION, ports)] {
        if let Some(value) = value {
            metadata["annotations"][key] = value;
        }
    }
    if let Some(uid) = uid {
        metadata["uid"] = uid.into();
    }
    json!({ "metadata": metadata })
}

/// Whether the pod already has the content of the patch.
pub(super) fn is_written(pod: &Pod, status: &Status) -> bool {
    let annotation = |key| pod.annotations.get(key).map(String::as_str);
    let (text, ports) = (annotation(STATUS_ANNOTATION), annotation(PORTS_ANNOTATION));
    let known = pod.labels.get(ATTACHED_LABEL).map(String::as_str);
    let has_its_ports = || ports == ports_annotation(&pod.ports).as_deref();
    match status {
        Status::Attached { text: wanted, label } => {
            // By the empty value every agent finds it. Writing to all pods that earlier agents attached, for a shorter
            // list only, would load the server with each upgrade.
            let is_labelled = known.is_some_and(|known| known.is_empty() || known == label);
            is_labelled && text == Some(wanted) && has_its_ports()
        }
        Status::Detached => known.is_none() && text.is_none() && ports.is_none(),
        Status::ByAnother => known.is_some() && pod.is_by_another() && has_its_ports(),
        Status::Unlabelled => known.is_none() && ports.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use crate::kube::patch::*;
    use crate::source::read::manifest::Object;
    use crate::source::read::{Kind, api_object};

    /// A pod whose container has these ports.
    fn with_ports(ports: &Value) -> Pod {
        let json = json!({
            "metadata": {"namespace": "shop", "name": "cart-0"},
            "spec": {"containers": [{"name": "cart", "ports": ports}]},
        });
        let raw = serde_json::value::to_raw_value(&json).unwrap();
        let Ok(Object::Pod(pod)) = api_object(Kind::Pod, &raw) else { panic!("a pod") };
        std::sync::Arc::unwrap_or_clone(pod)
    }

    #[test]
    fn a_patch_names_the_pod_that_it_is_for_and_nothing_else_of_it() {
        let attached = Status::Attached { text: "[]".to_owned(), label: "a.b".to_owned() };
        let named = with_ports(&json!([{"name": "http", "containerPort": 8080}]));
        for (pod, ports) in [
            (Some(with_ports(&json!([]))), Some(Value::Null)),
            (Some(named), Some(json!("{\"TCP/http\":[8080]}"))),
            (None, None),
        ] {
            let mut wanted = json!({"metadata": {
                "uid": "u-1",
                "annotations": {"k8s.v1.cni.cncf.io/network-status": "[]"},
                "labels": {"netattach.dev/networks": "a.b"},
            }});
            if let Some(ports) = ports {
                wanted["metadata"]["annotations"]["netattach.dev/ports"] = ports;
            }
            assert_eq!(patch(Some("u-1"), pod.as_ref(), &attached), wanted);
        }
        assert_eq!(
            patch(None, None, &Status::Detached),
            json!({"metadata": {
                "annotations": {"k8s.v1.cni.cncf.io/network-status": null, "netattach.dev/ports": null},
                "labels": {"netattach.dev/networks": null},
            }})
        );
        assert_eq!(path(&ObjectName::new("shop", "cart-0")), "/api/v1/namespaces/shop/pods/cart-0/status");
    }

    #[test]
    fn of_a_pod_that_another_plugin_has_attached_the_label_and_the_ports_are_written() {
        let pod = with_ports(&json!([{"name": "http", "containerPort": 8080}]));
        assert_eq!(
            patch(Some("u-1"), Some(&pod), &Status::ByAnother),
            json!({"metadata": {
                "uid": "u-1",
                "annotations": {"netattach.dev/ports": "{\"TCP/http\":[8080]}"},
                "labels": {"netattach.dev/networks": "by-another"},
            }})
        );
        assert_eq!(
            patch(Some("u-1"), Some(&pod), &Status::Unlabelled),
            json!({"metadata": {
                "uid": "u-1",
                "annotations": {"netattach.dev/ports": null},
                "labels": {"netattach.dev/networks": null},
            }})
        );
    }

    #[test]
    fn only_a_living_pod_with_a_status_of_another_is_labelled() {
        use crate::objects::Phase;

        let mut pod = with_ports(&json!([]));
        assert_eq!(Status::of_another(&pod), None, "it has no status");
        pod.annotations.insert(STATUS_ANNOTATION.to_owned(), "[]".to_owned());
        assert_eq!(Status::of_another(&pod), Some(Status::ByAnother));
        assert!(!is_written(&pod, &Status::ByAnother));
        pod.labels.insert(ATTACHED_LABEL.to_owned(), BY_ANOTHER.to_owned());
        assert!(is_written(&pod, &Status::ByAnother));
        assert!(!is_written(&pod, &Status::attached(&[])), "the label is another's");
        let ended = Pod { phase: Phase::Succeeded, ..pod.clone() };
        assert_eq!(Status::of_another(&ended), Some(Status::Unlabelled));
        assert_eq!(Status::of_another(&Pod { host_network: true, ..pod.clone() }), Some(Status::Unlabelled));
        assert_eq!(Status::of_another(&Pod { terminating: true, ..pod.clone() }), None);
        pod.labels.insert(ATTACHED_LABEL.to_owned(), String::new());
        assert_eq!(Status::of_another(&pod), None, "it is an agent's");
        let unlabelled = Pod { labels: Default::default(), ..ended };
        assert_eq!(Status::of_another(&unlabelled), None);
    }

    #[test]
    fn pods_on_their_default_network_alone_are_labelled_by_it() {
        let of = |entries: &[(&str, bool)]| {
            let entry = |(name, default): &(&str, bool)| {
                serde_json::from_value(json!({"name": name, "default": default})).unwrap()
            };
            label(&entries.iter().map(entry).collect::<Vec<StatusEntry>>())
        };
        let long = format!("kube-system/{}", "a".repeat(60));
        assert_eq!(of(&[]), "");
        assert_eq!(of(&[("cbr0", true)]), "default");
        assert_eq!(
            of(&[("kube-system/default", true), ("kube-system/default", true)]),
            "kube-system.default"
        );
        assert_eq!(of(&[("kube-system/default", true), ("shop/lan", false)]), "");
        assert_eq!(of(&[("shop/lan", false)]), "");
        assert_eq!(of(&[(long.as_str(), true)]), "");
        assert_eq!(value_of("a/b_"), None);
    }

    #[test]
    fn a_label_by_which_a_pod_would_not_be_found_is_written_again() {
        let labelled = |value: &str| {
            let mut pod = with_ports(&json!([]));
            pod.labels.insert(ATTACHED_LABEL.to_owned(), value.to_owned());
            pod.annotations.insert(STATUS_ANNOTATION.to_owned(), "[]".to_owned());
            pod
        };
        let status = |label: &str| Status::Attached { text: "[]".to_owned(), label: label.to_owned() };
        let table =
            [("", "", true), ("default", "", false), ("default", "default", true), ("", "default", true)];
        for (known, wanted, expected) in table {
            assert_eq!(is_written(&labelled(known), &status(wanted)), expected, "{known:?} {wanted:?}");
        }
        assert!(!is_written(&with_ports(&json!([])), &status("")));
    }
}
