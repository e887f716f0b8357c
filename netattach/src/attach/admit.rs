//! What attachments ask of the node's forwarding.

use super::{Node, StepError};
use crate::firewall::{self, Firewall, Owner};
use crate::journal::Record;
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{Admit, Admitted, Brought, Output, Step};

/// The comment of the attachment's rules.
fn note(owner: &Owner, sandbox: &Sandbox, attachment: &AttachmentPlan) -> String {
    owner.note(&attachment.config_name, &sandbox.container_id, &attachment.ifname)
}

fn note_on(node: &Node, sandbox: &Sandbox, attachment: &AttachmentPlan) -> String {
    match &node.firewall {
        Some(firewall) => note(firewall.owner(), sandbox, attachment),
        None => note(&Owner::executables(), sandbox, attachment),
    }
}

/// Has the agent take over what the attachments of a record have, one that is to be rolled back included: a bridge stays closed
/// until the links of its pods are gone.
pub(super) fn adopt(firewall: &Firewall, record: &Record) {
    for (at, attachment, step) in record.plan.steps() {
        if let (Step::Admit(_), Some(Output::Admitted(admitted))) = (step, record.outputs.get(&at)) {
            firewall.adopt(note(firewall.owner(), &record.plan.sandbox, attachment), admitted.clone());
        }
    }
}

/// Has the node forward what an attachment asks for, by what it has after the steps before.
pub(super) fn attach(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    admit: &Admit,
    outputs: Brought<'_>,
) -> Result<Admitted, StepError> {
    let now = result::result(sandbox, attachment, outputs)
        .map_err(|source| StepError::Result { plugin: attachment.kind.clone(), source })?;
    let admitted = firewall::admitted(admit, &now)?;
    firewall::check_effect(admit)?;
    let note = note_on(node, sandbox, attachment);
    match &node.firewall {
        Some(firewall) => firewall.attach(note, admitted.clone())?,
        None => firewall::admit(&note, &admitted)?,
    }
    Ok(admitted)
}

/// Takes back what the node forwards for an attachment.
pub(super) fn detach(node: &Node, sandbox: &Sandbox, attachment: &AttachmentPlan) -> Result<(), StepError> {
    let note = note_on(node, sandbox, attachment);
    match &node.firewall {
        Some(firewall) => Ok(firewall.detach(&note)?),
        None => Ok(firewall::dismiss(&note)?),
    }
}

/// What the node lacks of it, in words.
pub(super) fn difference(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    admitted: &Admitted,
) -> Result<Option<String>, StepError> {
    Ok(firewall::difference(&note_on(node, sandbox, attachment), admitted)?)
}
