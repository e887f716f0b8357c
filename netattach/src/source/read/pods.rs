//! Parses pods from manifests.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::manifest::{Document, ManifestError, Object, shape};
use super::metadata::{MIRROR_ANNOTATION, Metadata};
use super::security_context::{SecurityContext, powers};
use crate::budget::{self, Budget, Exceeded};
use crate::npwg::selection::PortProtocol;
use crate::objects::budget::Bounded;
use crate::objects::{ContainerPort, Phase, Pod, Powers};

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
    runtime_class_name: Option<IgnoredAny>,
    containers: Option<WrittenContainers>,
    init_containers: Option<WrittenContainers>,
    ephemeral_containers: Option<WrittenContainers>,
}

type WrittenContainers = Bounded<WrittenContainer, { budget::CONTAINERS.most }>;

#[derive(Deserialize)]
struct WrittenPodStatus {
    phase: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenContainer {
    name: Option<String>,
    security_context: Option<SecurityContext>,
    ports: Option<Bounded<WrittenContainerPort, { budget::CONTAINER_PORTS.most }>>,
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
    let WrittenPod { mut metadata, spec, status } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let excess = |source| ManifestError::Excess { kind: KIND, name: name.to_string(), source };
    let (host_network, powers, containers) = match spec {
        None => (false, Default::default(), Vec::new()),
        Some(spec) => {
            for list in [&spec.init_containers, &spec.containers].into_iter().flatten() {
                check_length(list, &budget::CONTAINERS).map_err(excess)?;
            }
            let all = [&spec.init_containers, &spec.containers, &spec.ephemeral_containers];
            let all = all.into_iter().flatten().flat_map(|list| &list.items);
            let powers = powers(all.map(|written| {
                (written.name.as_deref().unwrap_or_default(), written.security_context.as_ref())
            }));
            let powers = Powers { own_runtime: spec.runtime_class_name.is_some(), ..powers };
            // A live pod can get any number of ephemeral containers. If that made the pod unreadable, the
            // agent would keep its old version, without later changes of its labels and containers.
            let has_unread = spec.ephemeral_containers.is_some_and(|list| list.has_more);
            let powers = if has_unread { powers.with_unread() } else { powers };
            let restartable = spec.init_containers.into_iter().flat_map(|list| list.items);
            let restartable = restartable.filter(|c| c.restart_policy.as_deref() == Some("Always"));
            let containers = spec.containers.into_iter().flat_map(|list| list.items);
            let containers: Vec<WrittenContainer> = containers.chain(restartable).collect();
            (spec.host_network.unwrap_or(false), powers, containers)
        }
    };
    let mut ports = Vec::new();
    let lists: Vec<_> = containers.into_iter().filter_map(|container| container.ports).collect();
    for list in &lists {
        check_length(list, &budget::CONTAINER_PORTS).map_err(excess)?;
    }
    for written in lists.into_iter().flat_map(|list| list.items) {
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
    let uid = metadata.take_uid().map_err(excess)?;
    let labels = metadata.take_labels().map_err(excess)?;
    let mut annotations = metadata.take_annotations().map_err(excess)?;
    let mirror_of = annotations.remove(MIRROR_ANNOTATION).filter(|uid| !uid.is_empty());
    Ok(Object::Pod(Arc::new(Pod {
        name,
        uid,
        mirror_of,
        labels,
        annotations,
        phase: phase(status.and_then(|status| status.phase).as_deref()),
        host_network,
        ports,
        powers,
        on_this_node: false,
        terminating: metadata.deletion_timestamp.is_some(),
    })))
}

fn check_length<T, const MOST: usize>(list: &Bounded<T, MOST>, budget: &Budget) -> Result<(), Exceeded> {
    budget.check(list.items.len() + usize::from(list.has_more))
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

    use crate::objects::{Grant, ObjectName};
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
  runtimeClassName: kata
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
                mirror_of: None,
                labels: map(&[("app", "cart")]),
                annotations: map(&[("k8s.v1.cni.cncf.io/networks", "net-a")]),
                phase: Phase::Running,
                host_network: true,
                ports: vec![port(Some("http"), PortProtocol::Tcp, 8080), port(None, PortProtocol::Udp, 9000)],
                powers: Powers { admin: Grant::No, raw: Grant::To("once".to_owned()), own_runtime: true },
                on_this_node: false,
                terminating: false,
            }))
        );
    }

    /// A live pod can get more ephemeral containers than any bound.
    #[test]
    fn a_pod_with_more_ephemeral_containers_than_are_read_is_read_and_may_have_every_capability() {
        let of = |ephemeral: usize, context: &str| {
            let text = format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: a, labels: {{quarantine: 'true'}}}},
                  spec: {{
                    containers: [{{name: app, ports: [{{containerPort: 80}}], securityContext: {context}}}],
                    ephemeralContainers: [{}]
                  }}}}",
                vec!["{name: e, securityContext: {capabilities: {drop: [ALL]}}}"; ephemeral].join(", ")
            );
            let Object::Pod(pod) = one(&text) else { panic!("{text}") };
            assert_eq!(pod.labels, map(&[("quarantine", "true")]));
            assert_eq!(pod.ports.len(), 1);
            let Powers { admin, raw, own_runtime } = pod.powers.clone();
            assert!(!own_runtime);
            [admin, raw]
        };
        let bare = "{capabilities: {drop: [ALL]}}";
        let most = budget::CONTAINERS.most;
        assert_eq!(of(most, bare), [Grant::No, Grant::No]);
        assert_eq!(of(most + 1, bare), [Grant::ToUnread, Grant::ToUnread]);
        // A container that is known to have the capability is the better answer.
        assert_eq!(of(most + 1, "{}"), [Grant::ToUnread, Grant::To("app".to_owned())]);
    }

    #[test]
    fn a_pod_needs_only_a_name() {
        let pod = one("{apiVersion: v1, kind: Pod, metadata: {name: a}}");
        assert_eq!(
            pod,
            Object::Pod(Arc::new(Pod {
                name: ObjectName::new("default", "a"),
                uid: None,
                mirror_of: None,
                labels: BTreeMap::new(),
                annotations: BTreeMap::new(),
                phase: Phase::Pending,
                host_network: false,
                ports: Vec::new(),
                powers: Powers::default(),
                on_this_node: false,
                terminating: false,
            }))
        );
    }

    #[test]
    fn a_mirror_has_its_own_uid_and_that_of_its_static_pod() {
        let read = |annotations: &str| {
            let text = format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: a, uid: own, annotations: {annotations}}}}}"
            );
            let Object::Pod(pod) = one(&text) else { panic!("{text}") };
            let has = ["own", "hash", "other", ""].map(|uid| pod.has_uid(uid));
            (pod.mirror_of.clone(), pod.annotations.len(), has)
        };
        for (annotations, expected) in [
            ("{kubernetes.io/config.mirror: hash}", (Some("hash".to_owned()), 0, [true, true, false, false])),
            ("{kubernetes.io/config.mirror: ''}", (None, 0, [true, false, false, false])),
            // Every static pod has the hash; only the mirror stands for another pod.
            ("{kubernetes.io/config.hash: hash}", (None, 0, [true, false, false, false])),
        ] {
            assert_eq!(read(annotations), expected, "{annotations}");
        }
    }
}
