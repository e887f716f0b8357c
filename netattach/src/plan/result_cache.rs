//! The entries of attachments in libcni's cache, for other programs. Pure.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{AttachmentPlan, Sandbox, result};
use crate::cni::cache::{Entry, Key};
use crate::cni::{CniArgs, CniError, NetworkList};
use crate::step::{Brought, Remember, Step};

/// Which attachments are written to the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CachedResults {
    /// All attachments.
    All,
    /// Attachments that another plugin serves: its tools may look for the result.
    #[default]
    Delegated,
    /// None.
    Off,
}

impl CachedResults {
    /// Returns the last step of an attachment that is to be cached.
    pub(super) fn step(
        self,
        steps: &[Step],
        list: &NetworkList,
        capability_args: Map<String, Value>,
    ) -> Option<Step> {
        let is_meant = match self {
            Self::All => true,
            Self::Delegated => steps.iter().any(|step| matches!(step, Step::Delegate(_))),
            Self::Off => false,
        };
        is_meant.then(|| Step::Remember(Remember { config: (&list.to_value()).into(), capability_args }))
    }
}

/// Returns the entry's key.
pub fn key(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Key {
    Key {
        network: attachment.config_name.clone(),
        container_id: sandbox.container_id.clone(),
        ifname: attachment.ifname.clone(),
    }
}

/// Returns the entry of a completed attachment.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn entry(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    remember: &Remember,
    outputs: Brought<'_>,
) -> Result<Entry, CniError> {
    Ok(Entry {
        key: key(sandbox, attachment),
        config: remember.config.as_str().as_bytes().to_vec(),
        netns: Some(sandbox.netns.clone()),
        args: CniArgs::from(sandbox.args_of(attachment).into_owned()).pairs().to_vec(),
        capability_args: remember.capability_args.clone(),
        result: Some(result::as_reported(sandbox, attachment, outputs)?),
    })
}
