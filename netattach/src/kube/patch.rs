//! Composes the merge patches (RFC 7386) that write a pod's network-status. Pure.
//!
//! They are sent to the subresource `status`, which accepts a pod's labels and annotations too. The uid in
//! a patch makes the server refuse it for another pod of the same name.

use serde_json::{Value, json};

use super::resource::{ATTACHED_LABEL, pod_path};
use crate::npwg::STATUS_ANNOTATION;
use crate::objects::remote::{PORTS_ANNOTATION, ports_annotation};
use crate::objects::{ObjectName, Pod};

/// The status to write for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    /// Its networks, as in the annotation. The named ports of its containers are written with them.
    Attached { text: String },
    /// It has no networks any more.
    Detached,
}

/// Returns the path of the patch.
pub(super) fn path(name: &ObjectName) -> String {
    format!("{}/status", pod_path(name))
}

/// Returns the patch. `pod`: the known object; if unknown, so are its ports, and their written values stay.
pub(super) fn patch(uid: Option<&str>, pod: Option<&Pod>, status: &Status) -> Value {
    let (text, ports, label) = match status {
        Status::Attached { text } => {
            (json!(text), pod.map(|pod| json!(ports_annotation(&pod.ports))), json!(""))
        }
        Status::Detached => (Value::Null, Some(Value::Null), Value::Null),
    };
    let mut metadata = json!({
        "annotations": { STATUS_ANNOTATION: text },
        "labels": { ATTACHED_LABEL: label },
    });
    if let Some(ports) = ports {
        metadata["annotations"][PORTS_ANNOTATION] = ports;
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
    let is_labelled = pod.labels.contains_key(ATTACHED_LABEL);
    match status {
        Status::Attached { text: wanted } => {
            is_labelled && text == Some(wanted) && ports == ports_annotation(&pod.ports).as_deref()
        }
        Status::Detached => !is_labelled && text.is_none() && ports.is_none(),
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
        let attached = Status::Attached { text: "[]".to_owned() };
        let named = with_ports(&json!([{"name": "http", "containerPort": 8080}]));
        for (pod, ports) in [
            (Some(with_ports(&json!([]))), Some(Value::Null)),
            (Some(named), Some(json!("{\"TCP/http\":[8080]}"))),
            (None, None),
        ] {
            let mut wanted = json!({"metadata": {
                "uid": "u-1",
                "annotations": {"k8s.v1.cni.cncf.io/network-status": "[]"},
                "labels": {"netattach.dev/networks": ""},
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
}
