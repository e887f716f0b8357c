//! The API paths of kinds of objects.

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The path of an object, and that of the collection it belongs to.
pub(super) fn paths_of(object: &Value) -> Result<(String, String)> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let version = text(&object["apiVersion"]).context("an object has an apiVersion")?;
    let kind = text(&object["kind"]).context("an object has a kind")?;
    let metadata = &object["metadata"];
    let name = text(&metadata["name"]).or_else(|| text(&metadata["generateName"]));
    let name = name.context("an object has a name")?;
    let root = if version.contains('/') { "apis" } else { "api" };
    let collection = match text(&metadata["namespace"]) {
        Some(namespace) => format!("/{root}/{version}/namespaces/{namespace}/{}", resource(&kind)?),
        None => format!("/{root}/{version}/{}", resource(&kind)?),
    };
    Ok((format!("{collection}/{name}"), collection))
}

fn resource(kind: &str) -> Result<&'static str> {
    Ok(match kind {
        "ClusterRole" => "clusterroles",
        "ClusterRoleBinding" => "clusterrolebindings",
        "ConfigMap" => "configmaps",
        "CustomResourceDefinition" => "customresourcedefinitions",
        "DaemonSet" => "daemonsets",
        "Deployment" => "deployments",
        "Event" => "events",
        "Job" => "jobs",
        "MultiNetworkPolicy" => "multi-networkpolicies",
        "Namespace" => "namespaces",
        "NetworkAttachmentDefinition" => "network-attachment-definitions",
        "NetworkPolicy" => "networkpolicies",
        "Node" => "nodes",
        "Pod" => "pods",
        "PodDisruptionBudget" => "poddisruptionbudgets",
        "Service" => "services",
        "ServiceAccount" => "serviceaccounts",
        _ => bail!("where objects of the kind {kind} are is not known here"),
    })
}
