//! Registers attached sandboxes with the dataplane and verifies that they are still there.

use super::{Attached, StepError};
use crate::enforce::Enforce;
use crate::enforce::attachment::EnforcedAttachment;
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, Plan, hook_kind, result};
use crate::step::{Outputs, Step};

/// What is said of an attachment whose VF has lost its end on the node.
const NO_REPRESENTOR: &str = "the representor of its VF is gone: the card's mode was changed, its driver loaded anew, or its VFs made anew";

/// The dataplane's view of a sandbox: one entry for each attachment that it enforces.
pub(super) fn guards<'p>(
    plan: &'p Plan,
    outputs: &'p Outputs,
) -> impl Iterator<Item = (&'p AttachmentPlan, EnforcedAttachment)> {
    plan.steps().filter_map(move |(at, attachment, step)| {
        let Step::Protect(protect) = step else { return None };
        let leased = result::leased(attachment, outputs.of(at.0)).unwrap_or_default();
        let ends = result::ends(outputs.of(at.0));
        let vantage = hook_kind::of(attachment, outputs.of(at.0));
        let guarded =
            EnforcedAttachment::new(protect, &plan.sandbox, attachment, &leased, vantage, ends.as_ref())
                .ok()?;
        Some((attachment, guarded))
    })
}

/// The missing part of one attachment's enforcement, in words.
pub(super) fn difference(
    enforcer: &dyn Enforce,
    plan: &Plan,
    outputs: &Outputs,
    attachment: &AttachmentPlan,
    host: &mut Handle,
) -> Result<Option<String>, StepError> {
    match guards(plan, outputs).find(|(of, _)| of.ifname == attachment.ifname) {
        Some((_, guarded)) => Ok(enforcer.verify(&guarded, host)?),
        None => Ok(None),
    }
}

/// Reattaches programs that were removed from their devices. Returns the `attached` that are still not enforced and
/// what is missing, in words. Attachments whose device is gone belong to pods that are being removed; they are
/// skipped.
pub(super) fn restore(
    enforcer: &dyn Enforce,
    attached: &[std::sync::Arc<Attached>],
) -> Result<Vec<(String, String)>, EnforceError> {
    let mut host = Handle::open()?;
    let mut missing = Vec::new();
    for attached in attached {
        for (attachment, guarded) in guards(&attached.plan, &attached.outputs) {
            let Some(what) = restored(enforcer, &guarded, &mut host)? else { continue };
            let sandbox = &attached.plan.sandbox;
            let subject =
                sandbox.pod.as_ref().map_or_else(|| sandbox.container_id.clone(), ToString::to_string);
            missing.push((format!("{subject} {}", attachment.ifname), what));
        }
    }
    Ok(missing)
}

/// Reattaches the programs of an attachment that were removed, and returns what is missing then.
fn restored(
    enforcer: &dyn Enforce,
    guarded: &EnforcedAttachment,
    host: &mut Handle,
) -> Result<Option<String>, EnforceError> {
    if guarded.is_on_representor() && guarded.is_gone(host)? {
        // The pod may have its VF still.
        return Ok(Some(NO_REPRESENTOR.to_owned()));
    }
    if let Err(error) = enforcer.settle(guarded) {
        let error = Chain(&error);
        return Ok(Some(format!("its programs run by filters, and have not got links yet: {error}")));
    }
    let Some(what) = enforcer.verify(guarded, host)? else { return Ok(None) };
    if guarded.is_gone(host)? {
        return Ok(None);
    }
    match enforcer.restore(guarded, host) {
        // The missing part may also have appeared meanwhile.
        Ok(_) => enforcer.verify(guarded, host),
        Err(error) => Ok(Some(format!("{what}; not restored: {}", Chain(&error)))),
    }
}
