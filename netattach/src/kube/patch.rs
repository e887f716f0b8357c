//! The merge patches (RFC 7386) by which a pod's network-status is written. Pure.
//!
//! They go to the subresource `status`, which takes a pod's labels and annotations too. The uid in a patch makes the
//! server refuse it for another pod of the same name.

use serde_json::{Value, json};

use super::resource::{ATTACHED_LABEL, pod_path};
use crate::npwg::STATUS_ANNOTATION;
use crate::objects::remote::PORTS_ANNOTATION;
use crate::objects::{ObjectName, Pod};

/// What is to be written of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    /// Its networks, as the annotation has them, and the ports that its containers name.
    Attached { text: String, ports: Option<String> },
    /// It has none any more.
    Detached,
}

/// Where the patch is sent.
pub(super) fn path(name: &ObjectName) -> String {
    format!("{}/status", pod_path(name))
}

/// The patch.
pub(super) fn patch(uid: Option<&str>, status: &Status) -> Vec<u8> {
    let (text, ports, label) = match status {
        Status::Attached { text, ports } => (json!(text), json!(ports), json!("")),
        Status::Detached => (Value::Null, Value::Null, Value::Null),
    };
    let mut metadata = json!({
        "annotations": { STATUS_ANNOTATION: text, PORTS_ANNOTATION: ports },
        "labels": { ATTACHED_LABEL: label },
    });
    if let Some(uid) = uid {
        metadata["uid"] = uid.into();
    }
    json!({ "metadata": metadata }).to_string().into_bytes()
}

/// Whether the pod has what the patch would write.
pub(super) fn is_written(pod: &Pod, status: &Status) -> bool {
    let annotation = |key| pod.annotations.get(key).map(String::as_str);
    let (text, ports) = (annotation(STATUS_ANNOTATION), annotation(PORTS_ANNOTATION));
    let is_labelled = pod.labels.contains_key(ATTACHED_LABEL);
    match status {
        Status::Attached { text: wanted, ports: wanted_ports } => {
            is_labelled && text == Some(wanted) && ports == wanted_ports.as_deref()
        }
        Status::Detached => !is_labelled && text.is_none() && ports.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use crate::kube::patch::*;

    #[test]
    fn a_patch_names_the_pod_that_it_is_for_and_nothing_else_of_it() {
        let attached = Status::Attached { text: "[]".to_owned(), ports: None };
        let written: Value = serde_json::from_slice(&patch(Some("u-1"), &attached)).unwrap();
        assert_eq!(
            written,
            json!({"metadata": {
                "uid": "u-1",
                "annotations": {"k8s.v1.cni.cncf.io/network-status": "[]", "netattach.dev/ports": null},
                "labels": {"netattach.dev/networks": ""},
            }})
        );
        let written: Value = serde_json::from_slice(&patch(None, &Status::Detached)).unwrap();
        assert_eq!(
            written,
            json!({"metadata": {
                "annotations": {"k8s.v1.cni.cncf.io/network-status": null, "netattach.dev/ports": null},
                "labels": {"netattach.dev/networks": null},
            }})
        );
        assert_eq!(path(&ObjectName::new("shop", "cart-0")), "/api/v1/namespaces/shop/pods/cart-0/status");
    }
}
