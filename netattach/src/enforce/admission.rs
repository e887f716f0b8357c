//! Refuses attachments that a policy selects if policies cannot be enforced to the required level.

use serde::{Deserialize, Serialize};

use super::attachment::places;
use crate::objects::Objects;
use crate::objects::policy::PolicyName;
use crate::plan::{AttachmentPlan, PodRef};
use crate::policy::index::selecting;
use crate::policy::level::{Enforcement, Level};
use crate::policy::options::Options;

/// Annotation of a NetworkAttachmentDefinition: an [`EnforcementRequirement`] for its attachments that overrides the
/// agent's.
pub const UNENFORCEABLE_ANNOTATION: &str = "netattach.dev/unenforceable";

/// The result of an ADD whose pod is selected by a policy that is not fully enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EnforcementRequirement {
    /// The pod is attached and the policy reported.
    Warn,
    /// The ADD fails if nothing is enforced.
    #[default]
    Refuse,
    /// The ADD fails if the pod can bypass a policy.
    RefuseUnlessFull,
}

impl EnforcementRequirement {
    /// Parses the setting's word.
    fn named(word: &str) -> Option<Self> {
        [Self::Warn, Self::Refuse, Self::RefuseUnlessFull]
            .into_iter()
            .find(|requirement| requirement.word() == word)
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Warn => "warn",
            Self::Refuse => "refuse",
            Self::RefuseUnlessFull => "refuse-unless-full",
        }
    }

    /// Returns the lowest level that it accepts.
    pub const fn least(self) -> Level {
        match self {
            Self::Warn => Level::None,
            Self::Refuse => Level::Advisory,
            Self::RefuseUnlessFull => Level::Full,
        }
    }
}

/// Why a pod must not be attached to a network whose policies are not enforced to the required level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unenforceable {
    /// Refused by the definition or the agent's settings.
    #[error(
        "enforcement there is {enforcement}, unenforceable is set to {} by {by}, and the pod is selected by {}",
        requirement.word(),
        names(policies)
    )]
    Refused {
        /// The enforcement level.
        enforcement: Enforcement,
        /// The requirement.
        requirement: EnforcementRequirement,
        /// Where the requirement comes from.
        by: Asker,
        /// The policies that select the pod there.
        policies: Vec<PolicyName>,
    },
    /// The definition's annotation is invalid.
    #[error(
        "annotation {UNENFORCEABLE_ANNOTATION} of the network is {0:?}, not warn, refuse or refuse-unless-full"
    )]
    Word(String),
}

/// The origin of an [`EnforcementRequirement`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// The network's definition.
    Definition,
    /// The agent's settings.
    Settings,
}

impl std::fmt::Display for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Definition => write!(f, "annotation {UNENFORCEABLE_ANNOTATION} of the network"),
            Self::Settings => f.write_str("the agent's settings"),
        }
    }
}

/// The policies that select an attachment.
pub fn selected(
    objects: &Objects,
    options: &Options,
    pod: Option<&PodRef>,
    attachment: &AttachmentPlan,
) -> Vec<PolicyName> {
    let pod = pod.and_then(|pod| objects.pods.get(&pod.name));
    let Some(pod) = pod else { return Vec::new() };
    let at = places(attachment);
    selecting(objects, options, pod, &at).map(|policy| policy.name.clone()).collect()
}

/// The requirement for the attachments of a network, and its origin.
///
/// # Errors
/// The annotation has an unknown value.
pub fn requirement(
    objects: &Objects,
    attachment: &AttachmentPlan,
    settings: EnforcementRequirement,
) -> Result<(EnforcementRequirement, Asker), Unenforceable> {
    let definition = attachment.network.definition().and_then(|network| objects.definitions.get(network));
    match definition.and_then(|definition| definition.annotations.get(UNENFORCEABLE_ANNOTATION)) {
        None => Ok((settings, Asker::Settings)),
        Some(word) => match EnforcementRequirement::named(word) {
            Some(requirement) => Ok((requirement, Asker::Definition)),
            None => Err(Unenforceable::Word(word.clone())),
        },
    }
}

/// Checks whether an attachment with this enforcement level may be made.
///
/// # Errors
/// [`Unenforceable::Refused`].
pub fn permit(
    enforcement: Enforcement,
    (requirement, by): (EnforcementRequirement, Asker),
    policies: Vec<PolicyName>,
) -> Result<(), Unenforceable> {
    if policies.is_empty() || enforcement.level >= requirement.least() {
        return Ok(());
    }
    Err(Unenforceable::Refused { enforcement, requirement, by, policies })
}

fn names(policies: &[PolicyName]) -> String {
    policies.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
