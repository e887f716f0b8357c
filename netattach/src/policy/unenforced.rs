//! Attachments that nothing judges, and the policies that mean them all the same.

use super::guarded::places;
use super::index::selecting;
use super::model::PolicyName;
use crate::plan::{AttachmentPlan, PodRef, Step};
use crate::source::objects::{ObjectName, Objects};

/// Annotation of a NetworkAttachmentDefinition: `refuse` fails an ADD whose pod a policy selects on a network where
/// nothing can be enforced; `warn`, which is the default, attaches it and reports the policy.
pub const UNENFORCEABLE_ANNOTATION: &str = "netattach.dev/unenforceable";

/// Why a pod must not be attached to a network where nothing is enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unenforceable {
    /// The definition has it so.
    #[error(
        "attach {ifname} ({network}): nothing can be enforced there, annotation {UNENFORCEABLE_ANNOTATION} of the \
         network is refuse, and the pod is selected by {}",
        names(policies)
    )]
    Refused {
        /// Interface in the pod.
        ifname: String,
        /// The network.
        network: String,
        /// The policies that select the pod there.
        policies: Vec<PolicyName>,
    },
    /// The definition has something else.
    #[error(
        "attach {ifname} ({network}): annotation {UNENFORCEABLE_ANNOTATION} of the network is {word:?}, not refuse or warn"
    )]
    Word {
        /// Interface in the pod.
        ifname: String,
        /// The network.
        network: String,
        /// As written.
        word: String,
    },
}

/// The policies that select an attachment which nothing judges; none where it is judged.
pub fn selected(
    objects: &Objects,
    network_policy: bool,
    pod: Option<&PodRef>,
    attachment: &AttachmentPlan,
) -> Vec<PolicyName> {
    let judged = attachment.steps.iter().any(|step| matches!(step, Step::Protect(_)));
    let pod = pod.and_then(|pod| objects.pods.get(&ObjectName::new(&pod.namespace, &pod.name)));
    match pod {
        Some(pod) if !judged => {
            let at = places(attachment);
            let policies = selecting(objects, network_policy, pod, &at);
            policies.map(|policy| policy.name.clone()).collect()
        }
        _ => Vec::new(),
    }
}

/// Whether an attachment may be made although nothing judges it.
///
/// # Errors
/// [`Unenforceable`].
pub fn permit(
    objects: &Objects,
    network_policy: bool,
    pod: Option<&PodRef>,
    attachment: &AttachmentPlan,
) -> Result<(), Unenforceable> {
    let policies = selected(objects, network_policy, pod, attachment);
    let definition = objects.definitions.values().find(|it| it.reference().to_string() == attachment.network);
    let word = definition.and_then(|definition| definition.annotations.get(UNENFORCEABLE_ANNOTATION));
    let (ifname, network) = (attachment.ifname.clone(), attachment.network.clone());
    match word.map(String::as_str) {
        None | Some("warn") => Ok(()),
        Some("refuse") if policies.is_empty() => Ok(()),
        Some("refuse") => Err(Unenforceable::Refused { ifname, network, policies }),
        Some(word) => Err(Unenforceable::Word { ifname, network, word: word.to_owned() }),
    }
}

fn names(policies: &[PolicyName]) -> String {
    policies.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
