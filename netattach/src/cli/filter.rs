//! Selects the attachments of a command: by namespace, pod, labels, network or container.

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use super::{CliError, ask};
use crate::objects::{ObjectName, label_query};
use crate::rpc::message::{Attachment, AttachmentName, Request, Response};

/// Characters of a container's id in tables.
const SHORT_ID: usize = 12;

/// Most candidates of an ambiguous id that are named.
const CANDIDATES: usize = 5;

/// Which attachments to show.
#[derive(Debug, Default, Args)]
pub(super) struct Filter {
    /// Only attachments of pods in this namespace
    #[arg(long, short, value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    pub(super) namespace: Option<String>,
    /// Attachments of pods in every namespace, as without -n
    #[arg(long, short = 'A', conflicts_with = "namespace")]
    pub(super) all_namespaces: bool,
    /// Only attachments of pods with these labels: app=web,tier in (front,back),!canary
    #[arg(long, short = 'l', value_name = "LABELS", value_parser = query)]
    pub(super) selector: Option<String>,
    /// Only attachments of this pod; without a namespace, of the one in the namespace of -n
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    pub(super) pod: Option<PodWord>,
    /// Only attachments to this network; without a namespace, to every network of that name
    #[arg(long, value_name = "[NAMESPACE/]NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(super) network: Option<String>,
    /// Only attachments of this container: its id, or a beginning that no other id has
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub(super) container_id: Option<String>,
}

/// A pod as written on a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodWord {
    namespace: Option<String>,
    name: String,
}

/// A filter with its labels and container resolved.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    pub(super) namespace: Option<String>,
    pub(super) pod: Option<ObjectName>,
    pub(super) network: Option<String>,
    /// The selector, and the pods that it selects.
    pub(super) selected: Option<(String, BTreeSet<ObjectName>)>,
    /// The container, and its attachments.
    pub(super) container: Option<(String, Vec<AttachmentName>)>,
}

/// An id is the prefix of no container's id, or of several.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContainerIdError {
    /// Of no container.
    #[error("container {0} is not attached on this node; netattachctl attachments lists what is attached")]
    Unknown(String),
    /// Of several containers.
    #[error("more than one container's id begins with {id}: {}", .candidates.join(", "))]
    Ambiguous {
        /// The id as written.
        id: String,
        /// The ids, with their pods; at most [`CANDIDATES`], and a note about the others.
        candidates: Vec<String>,
    },
}

fn query(text: &str) -> Result<String, label_query::QueryError> {
    label_query::parse(text).map(|_| text.to_owned())
}

impl FromStr for PodWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, text),
        };
        if name.is_empty() || name.contains('/') || namespace.as_deref() == Some("") {
            return Err(format!("{text:?} is not of the form [namespace/]name"));
        }
        Ok(Self { namespace, name: name.to_owned() })
    }
}

impl Filter {
    /// Whether the filter excludes anything.
    pub(super) fn is_set(&self) -> bool {
        self.namespace.is_some()
            || self.selector.is_some()
            || self.pod.is_some()
            || self.network.is_some()
            || self.container_id.is_some()
    }

    /// The pod, if the filter names one with its namespace.
    pub(super) fn whole_pod(&self) -> Option<ObjectName> {
        self.pod.as_ref().and_then(|pod| self.whole(pod).ok())
    }

    /// Completes the pod's name, and asks the agent for pods by label and for containers.
    pub(super) fn choose(&self, socket: &Path) -> Result<Chosen, CliError> {
        let pod = self.pod.as_ref().map(|pod| self.whole(pod)).transpose()?;
        let selected = match &self.selector {
            Some(selector) => {
                let request = Request::Select(selector.clone());
                let Response::Selected(pods) = ask(socket, &request)? else {
                    return Err(CliError::OtherAnswer { request: request.name() });
                };
                Some((selector.clone(), pods.into_iter().collect()))
            }
            None => None,
        };
        let container = match &self.container_id {
            Some(id) => {
                let rows = attachments(socket)?;
                let whole = whole_id(id, &rows)?;
                let names = rows.into_iter().filter(|row| row.container_id == whole).map(|row| row.name);
                Some((whole.clone(), names.collect()))
            }
            None => None,
        };
        Ok(Chosen {
            namespace: self.namespace.clone(),
            pod,
            network: self.network.clone(),
            selected,
            container,
        })
    }

    fn whole(&self, pod: &PodWord) -> Result<ObjectName, CliError> {
        let wrong = |text: String| Err(CliError::Usage(text));
        match (&pod.namespace, &self.namespace) {
            (Some(own), Some(other)) if own != other => {
                wrong(format!("--pod names namespace {own}, and --namespace {other}"))
            }
            (Some(namespace), _) | (None, Some(namespace)) => Ok(ObjectName::new(namespace, &pod.name)),
            (None, None) => {
                wrong(format!("--pod {0}: name its namespace too, as NAMESPACE/{0} or by -n", pod.name))
            }
        }
    }
}

impl Chosen {
    pub(super) fn matches(&self, name: &AttachmentName) -> bool {
        let pod = name.pod.as_ref();
        self.namespace.as_ref().is_none_or(|namespace| pod.is_some_and(|pod| pod.namespace == *namespace))
            && self.pod.as_ref().is_none_or(|wanted| pod == Some(wanted))
            && self.network.as_ref().is_none_or(|network| is_network(&name.network, network))
            && self.selected.as_ref().is_none_or(|(_, pods)| pod.is_some_and(|pod| pods.contains(pod)))
            && self.container.as_ref().is_none_or(|(_, names)| names.contains(name))
    }

    pub(super) fn retain<T>(&self, mut rows: Vec<T>, name: impl Fn(&T) -> &AttachmentName) -> Vec<T> {
        rows.retain(|row| self.matches(name(row)));
        rows
    }

    /// Returns an error if no attachment matches.
    pub(super) fn found<'n>(
        &self,
        names: impl Iterator<Item = &'n AttachmentName> + Clone,
    ) -> Result<(), CliError> {
        self.missing(names).map_or(Ok(()), |missing| Err(CliError::NotFound(missing)))
    }
}

/// Whether a network has that name, or that name without its namespace.
pub(super) fn is_network(network: &str, wanted: &str) -> bool {
    network == wanted || network.rsplit('/').next() == Some(wanted)
}

/// Every attachment of the node.
pub(super) fn attachments(socket: &Path) -> Result<Vec<Attachment>, CliError> {
    match ask(socket, &Request::Attachments)? {
        Response::Attachments(rows) => Ok(rows),
        _ => Err(CliError::OtherAnswer { request: Request::Attachments.name() }),
    }
}

/// Returns the id of the container with this id, or with this unique prefix.
pub(super) fn whole_id(id: &str, rows: &[Attachment]) -> Result<String, ContainerIdError> {
    let beginning: BTreeSet<(&str, String)> = rows
        .iter()
        .filter(|row| row.container_id.starts_with(id))
        .map(|row| (row.container_id.as_str(), super::or_dash(row.name.pod.as_ref())))
        .collect();
    let ids: BTreeSet<&str> = beginning.iter().map(|(id, _)| *id).collect();
    match ids.iter().next() {
        None => Err(ContainerIdError::Unknown(id.to_owned())),
        Some(_) if ids.contains(id) => Ok(id.to_owned()),
        Some(only) if ids.len() == 1 => Ok((*only).to_owned()),
        Some(_) => {
            let mut candidates: Vec<String> =
                beginning.iter().take(CANDIDATES).map(|(id, pod)| format!("{id} (pod {pod})")).collect();
            let more = beginning.len() - candidates.len();
            candidates.extend((more > 0).then(|| format!("{more} more")));
            Err(ContainerIdError::Ambiguous { id: id.to_owned(), candidates })
        }
    }
}

/// Returns the prefix of a container's id that tables show.
pub(super) fn short_id(id: &str) -> String {
    id.chars().take(SHORT_ID).collect()
}

/// Returns the name of an attachment for `-o name`: `namespace/pod/interface`.
pub(super) fn line_name(name: &AttachmentName) -> String {
    format!("{}/{}", super::or_dash(name.pod.as_ref()), name.ifname)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{attachment, name};
    use super::*;

    #[test]
    fn an_id_is_known_by_a_beginning_that_no_other_has() {
        let rows = [
            attachment(name(1, "shop/a", "n", "net1"), "abc123"),
            attachment(name(2, "shop/a", "n", "net2"), "abc123"),
            attachment(name(3, "shop/b", "n", "net1"), "abd456"),
            attachment(name(4, "shop/c", "n", "net1"), "abd4"),
        ];
        let of = |id: &str| whole_id(id, &rows).map_err(|error| error.to_string());
        assert_eq!(of("abc"), Ok("abc123".into()));
        assert_eq!(of("abd456"), Ok("abd456".into()));
        assert_eq!(of("abd4"), Ok("abd4".into()), "a whole id is its own, though another begins so");
        assert_eq!(
            of("ab"),
            Err("more than one container's id begins with ab: abc123 (pod shop/a), abd4 (pod shop/c), \
                 abd456 (pod shop/b)"
                .into())
        );
        assert_eq!(
            of("x"),
            Err("container x is not attached on this node; netattachctl attachments lists what is attached"
                .into())
        );
        let many: Vec<_> =
            (0..9).map(|at| attachment(name(at, "shop/a", "n", "net1"), &format!("c{at}"))).collect();
        let Err(ContainerIdError::Ambiguous { candidates, .. }) = whole_id("c", &many) else { panic!() };
        assert_eq!((candidates.len(), candidates[5].as_str()), (6, "4 more"));
    }

    #[test]
    fn all_parts_of_a_filter_count() {
        let names = [name(1, "shop/a", "shop/lan", "net1"), name(2, "ops/a", "ops/lan", "net1")];
        let chosen = Chosen::default;
        let matched = |chosen: Chosen| [&names[0], &names[1]].map(|name| chosen.matches(name));
        assert_eq!(matched(chosen()), [true, true]);
        assert_eq!(matched(Chosen { namespace: Some("shop".into()), ..chosen() }), [true, false]);
        assert_eq!(matched(Chosen { network: Some("lan".into()), ..chosen() }), [true, true]);
        assert_eq!(matched(Chosen { network: Some("ops/lan".into()), ..chosen() }), [false, true]);
        let selected = Some(("app=a".into(), ["ops/a".parse().unwrap()].into()));
        assert_eq!(matched(Chosen { selected, ..chosen() }), [false, true]);
        let container = Some(("c1".into(), vec![names[0].clone()]));
        assert_eq!(matched(Chosen { container, ..chosen() }), [true, false]);
    }

    #[test]
    fn a_pod_without_a_namespace_is_in_that_of_the_filter() {
        let whole = |namespace: Option<&str>, pod: &str| {
            let filter = Filter { namespace: namespace.map(str::to_owned), ..Filter::default() };
            filter.whole(&pod.parse().unwrap()).map(|pod| pod.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(whole(None, "shop/a"), Ok("shop/a".into()));
        assert_eq!(whole(Some("shop"), "a"), Ok("shop/a".into()));
        assert_eq!(whole(Some("shop"), "shop/a"), Ok("shop/a".into()));
        assert_eq!(
            whole(Some("ops"), "shop/a"),
            Err("--pod names namespace shop, and --namespace ops".into())
        );
        assert_eq!(whole(None, "a"), Err("--pod a: name its namespace too, as NAMESPACE/a or by -n".into()));
        for text in ["", "/", "a/", "/a", "a/b/c"] {
            assert!(text.parse::<PodWord>().is_err(), "{text}");
        }
    }
}
