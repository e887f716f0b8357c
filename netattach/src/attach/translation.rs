//! What attachments ask of the node's translation of addresses.

use super::StepError;
use crate::journal::Record;
use crate::nat::wish::Wish;
use crate::nat::{Holder, Key, Nat};
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{LeasedAddress, Step, Translate};

/// The attachment, as the translation knows it.
pub(super) fn holder(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Holder {
    let container = &sandbox.container_id;
    let pod = sandbox.pod.as_ref().map(|pod| format!("pod {pod}, ")).unwrap_or_default();
    Holder {
        key: Key { container: container.clone(), ifname: attachment.ifname.clone() },
        who: format!("{pod}container {container}, interface {}", attachment.ifname),
    }
}

/// Has the translation take over what the attachments of a record have.
pub(super) fn adopt(nat: &Nat, record: &Record) {
    for (at, attachment, step) in record.plan.steps() {
        let Step::Translate(translate) = step else { continue };
        if !record.has_begun(at) {
            continue;
        }
        let leased = result::leased(attachment, record.outputs.of(at.0)).unwrap_or_default();
        match Wish::new(translate, &leased.addresses) {
            Ok(wish) => nat.adopt(&holder(&record.plan.sandbox, attachment), wish),
            // Its record has lost the lines that the addresses were in.
            Err(error) => tracing::warn!(ifname = attachment.ifname, %error, "translation not taken over"),
        }
    }
}

/// Has the translation keep guarding the devices of a record that is to be rolled back.
pub(super) fn guard(nat: &Nat, record: &Record) {
    for (at, attachment, step) in record.plan.steps() {
        if let Step::Translate(translate) = step
            && record.has_begun(at)
            && !translate.ports.is_empty()
        {
            nat.guard(&holder(&record.plan.sandbox, attachment), &translate.device);
        }
    }
}

/// What the node lacks of what an attachment asks for, in words.
pub(super) fn difference(
    nat: Option<&Nat>,
    (translate, leased): &(Translate, Vec<LeasedAddress>),
) -> Result<Option<String>, StepError> {
    let Some(nat) = nat else { return Ok(None) };
    let wish = Wish::new(translate, leased).map_err(crate::nat::NatError::from)?;
    Ok(nat.difference(&wish)?)
}
