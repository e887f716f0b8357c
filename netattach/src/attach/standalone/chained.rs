//! What the chained plugins have in common.

use crate::attach::error::step_code;
use crate::attach::{AttachError, StepError};
use crate::cni::{self, CniError, code};
use crate::link::{self, Facts};
use crate::netlink::Handle;
use crate::netns::Netns;

/// No `prevResult`.
pub(super) fn missing(kind: &str) -> CniError {
    let msg = format!("key prevResult: missing, and {kind} can only follow another plugin");
    CniError::new(code::INVALID_CONFIG, msg)
}

/// The CNI error for an effect that failed.
pub(super) fn cannot(error: StepError) -> CniError {
    CniError::from_chain(step_code(&error), &error)
}

/// The pod's namespace.
pub(super) fn sandbox(request: &cni::Request) -> Result<(Netns, Handle), CniError> {
    let path = request.netns.as_deref().unwrap_or_default();
    let netns = Netns::open(path).map_err(AttachError::from)?;
    let pod = Handle::open_in(&netns).map_err(AttachError::Open)?;
    Ok((netns, pod))
}

/// What the readers of configurations take, from the input alone.
pub(super) fn request(request: &cni::Request) -> link::Request<'_> {
    static NO_FACTS: std::sync::OnceLock<Facts> = std::sync::OnceLock::new();
    link::Request {
        container_id: &request.container_id,
        ifname: &request.ifname,
        config: &request.config,
        group: 0,
        cni_args: &request.args,
        exec: &[],
        protect: None,
        facts: NO_FACTS.get_or_init(Facts::default),
        recorded: false,
    }
}
