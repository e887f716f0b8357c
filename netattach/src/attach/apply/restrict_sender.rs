//! `macspoofchk` of a plain executable: limits a pod to its Ethernet source address in the node's packet filter.

use crate::attach::StepError;
use crate::firewall::senders::{self, Whose};
use crate::plan::check::Expected;
use crate::plan::{AttachmentPlan, Sandbox};
use crate::step::Brought;

fn whose<'a>(sandbox: &'a Sandbox, attachment: &'a AttachmentPlan) -> Whose<'a> {
    Whose { network: &attachment.config_name, container: &sandbox.container_id, ifname: &attachment.ifname }
}

/// Restricts the interface that earlier steps have created.
pub(super) fn attach(
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    outputs: Brought<'_>,
) -> Result<(), StepError> {
    let (host, pod) = crate::plan::result::link(outputs).ok_or(StepError::Missing("a link"))?;
    let host = host.ok_or(StepError::Missing("an end on the node"))?;
    let mac = pod.mac.ok_or(StepError::Missing("an Ethernet address"))?;
    Ok(senders::attach(&whose(sandbox, attachment), &host.name, mac)?)
}

/// Removes the restriction of an interface, whether or not it exists.
pub(in crate::attach) fn detach(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Result<(), StepError> {
    Ok(senders::detach(&whose(sandbox, attachment))?)
}

/// Describes what the node lacks of the restriction.
pub(in crate::attach) fn difference(
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    want: &Expected,
) -> Result<Option<String>, StepError> {
    let port = want.host.as_ref().map(|host| host.name.as_str());
    let mac = want.pod.as_ref().and_then(|pod| pod.mac);
    match (port, mac) {
        (Some(port), Some(mac)) => Ok(senders::difference(&whose(sandbox, attachment), port, mac)?),
        _ => Ok(Some("the result does not say by which Ethernet address the interface may send".to_owned())),
    }
}
