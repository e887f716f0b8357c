//! The published `network-status` of attached pods. Pure.

use std::net::IpAddr;
use std::sync::Arc;

use super::Attached;
use crate::npwg::status::{self, Form, StatusEntry};
use crate::plan::{AttachmentPlan, PodRef, hook_kind, result, routing};
use crate::step::Brought;

/// Returns the status of a pod's sandbox: the attachments of its ADD and those made later. `None` if nothing is
/// attached or the pod is unknown.
pub fn network_status(attached: &[Arc<Attached>], form: Form) -> Option<(PodRef, Vec<StatusEntry>)> {
    let pod = attached.first()?.plan.sandbox.pod.clone()?;
    Some((pod, attached.iter().flat_map(|attached| entries(attached, form)).collect()))
}

/// Returns the entries of the attachments, in order.
fn entries(attached: &Attached, form: Form) -> Vec<StatusEntry> {
    let mut entries = Vec::new();
    let dynamic = attached.plan.dynamic.as_ref().map(|dynamic| status::Dynamic { by: dynamic.by.clone() });
    for (number, attachment) in attached.plan.attachments.iter().enumerate() {
        // Attachment numbers fit into a `u16`: see `Plan::steps`.
        let number = number as u16;
        let result = result::result(&attached.plan.sandbox, attachment, attached.outputs.of(number));
        let described = status::Attached {
            name: attachment.network.to_string(),
            default: attachment.default,
            ifname: attachment.ifname.clone(),
            result: result.unwrap_or_default(),
            default_route: default_route(attachment, attached.outputs.of(number)),
            device_info: hook_kind::device_info(attached.outputs.of(number)).cloned(),
            warnings: attachment.warnings.clone(),
            dynamic: dynamic.clone(),
            device: attachment.device.clone(),
        };
        entries.extend(described.entries(form));
    }
    entries
}

/// Returns the gateways of the default routes that were moved to the attachment, as the kernel showed them
/// afterwards.
fn default_route(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Vec<IpAddr>> {
    attachment.yields_to.filter(|at| at.0 == outputs.attachment())?;
    let moved = routing::moved(attachment.yields_to, outputs.all());
    Some(moved.iter().filter_map(|route| route.gateway).collect())
}
