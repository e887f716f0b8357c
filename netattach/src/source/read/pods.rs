//! Parses pods from manifests.

use std::sync::Arc;

use serde::Deserialize;

use super::manifest::{Document, ManifestError, Metadata, Object, shape};
use super::security_context::{SecurityContext, powers};
use crate::npwg::selection::PortProtocol;
use crate::npwg::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, STATUS_ANNOTATION};
use crate::objects::{ContainerPort, Phase, Pod};

/// The annotations in use.
const ANNOTATIONS: [&str; 3] = [NETWORKS_ANNOTATION, DEFAULT_NETWORK_ANNOTATION, STATUS_ANNOTATION];

#[derive(Deserialize)]
struct WrittenPod {
    metadata: Metadata,
    spec: Option<WrittenPodSpec>,
    status: Option<WrittenPodStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenPodSpec {
    host_network: Option<bool>,
    containers: Option<Vec<WrittenContainer>>,
    init_containers: Option<Vec<WrittenContainer>>,
    ephemeral_containers: Option<Vec<WrittenContainer>>,
}

#[derive(Deserialize)]
struct WrittenPodStatus {
    phase: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenContainer {
    name: Option<String>,
    security_context: Option<SecurityContext>,
    ports: Option<Vec<WrittenContainerPort>>,
    restart_policy: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenContainerPort {
    name: Option<String>,
    container_port: i64,
    protocol: Option<String>,
}

/// Reads a pod.
pub(in crate::source) fn pod<'de>(document: impl Document<'de>) -> Result<Object, ManifestError> {
    const KIND: &str = "Pod";
    let WrittenPod { metadata, spec, status } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let (host_network, powers, containers) = match spec {
        None => (false, Default::default(), Vec::new()),
        Some(spec) => {
            let all = [&spec.init_containers, &spec.containers, &spec.ephemeral_containers];
            let all = all.into_iter().flatten().flatten();
            let powers = powers(all.map(|written| {
                (written.name.as_deref().unwrap_or_default(), written.security_context.as_ref())
            }));
            let restartable = spec.init_containers.into_iter().flatten();
            let restartable = restartable.filter(|c| c.restart_policy.as_deref() == Some("Always"));
            let containers = spec.containers.into_iter().flatten().chain(restartable).collect();
            (spec.host_network.unwrap_or(false), powers, containers)
        }
    };
    let mut ports = Vec::new();
    for written in containers.into_iter().filter_map(|container| container.ports).flatten() {
        // No policy can match a protocol that the API does not have.
        let protocol = written.protocol.as_deref().unwrap_or("TCP");
        let Some(protocol) = PortProtocol::from_name(protocol) else { continue };
        let port = u16::try_from(written.container_port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| ManifestError::ContainerPort {
            kind: KIND,
            name: name.clone(),
            port: written.container_port,
        })?;
        ports.push(ContainerPort { name: written.name, protocol, port });
    }
    let mut annotations = metadata.annotations.unwrap_or_default();
    // The others may be large and many.
    annotations.retain(|key, _| ANNOTATIONS.contains(&key.as_str()));
    Ok(Object::Pod(Arc::new(Pod {
        name,
        uid: metadata.uid,
        labels: metadata.labels.unwrap_or_default(),
        annotations,
        phase: phase(status.and_then(|status| status.phase).as_deref()),
        host_network,
        ports,
        powers,
    })))
}

fn phase(word: Option<&str>) -> Phase {
    match word {
        None | Some("" | "Pending") => Phase::Pending,
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        Some(_) => Phase::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::objects::{Grant, ObjectName, Powers};
    use crate::source::read::manifest::tests::{map, one};
    use crate::source::read::pods::*;

    #[test]
    fn a_pod_is_read() {
        let pod = one("
apiVersion: v1
kind: Pod
metadata:
  name: cart-0
  namespace: shop
  uid: 3f6c
  labels: {app: cart}
  annotations: {k8s.v1.cni.cncf.io/networks: net-a, another: x}
spec:
  hostNetwork: true
  initContainers:
  - {name: once, ports: [{name: setup, containerPort: 1}]}
  - {name: sidecar, restartPolicy: Always, ports: [{containerPort: 9000, protocol: UDP}]}
  containers:
  - name: web
    ports:
    - {name: http, containerPort: 8080}
  - name: silent
status: {phase: Running}
");
        let port = |name: Option<&str>, protocol, port| ContainerPort {
            name: name.map(str::to_owned),
            protocol,
            port,
        };
        assert_eq!(
            pod,
            Object::Pod(Arc::new(Pod {
                name: ObjectName::new("shop", "cart-0"),
                uid: Some("3f6c".to_owned()),
                labels: map(&[("app", "cart")]),
                annotations: map(&[("k8s.v1.cni.cncf.io/networks", "net-a")]),
                phase: Phase::Running,
                host_network: true,
                ports: vec![port(Some("http"), PortProtocol::Tcp, 8080), port(None, PortProtocol::Udp, 9000)],
                powers: Powers { admin: Grant::No, raw: Grant::To("once".to_owned()) },
            }))
        );
    }

    #[test]
    fn a_pod_needs_only_a_name() {
        let pod = one("{apiVersion: v1, kind: Pod, metadata: {name: a}}");
        assert_eq!(
            pod,
            Object::Pod(Arc::new(Pod {
                name: ObjectName::new("default", "a"),
                uid: None,
                labels: BTreeMap::new(),
                annotations: BTreeMap::new(),
                phase: Phase::Pending,
                host_network: false,
                ports: Vec::new(),
                powers: Powers::default(),
            }))
        );
    }
}
