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

/// Has the agent take over what the attachments of a record have. Where not all of it `has_all`, as it is to be rolled back, what
/// is there stays, and no more comes: its addresses may be another pod's by now. But a bridge is closed until the links of its
/// pods are gone; `is_there` says of which attachments they may be there.
pub(super) fn adopt(
    firewall: &Firewall,
    record: &Record,
    has_all: bool,
    is_there: &dyn Fn(&AttachmentPlan) -> bool,
) {
    for (at, attachment, step) in record.plan.steps() {
        let Step::Admit(_) = step else { continue };
        let note = note(firewall.owner(), &record.plan.sandbox, attachment);
        let closes = |admitted: &Admitted| admitted.closed.is_some() && is_there(attachment);
        match record.outputs.get(&at) {
            Some(Output::Admitted(admitted)) if has_all || closes(admitted) => {
                firewall.adopt(note, admitted.clone());
            }
            _ => firewall.keep(note),
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
