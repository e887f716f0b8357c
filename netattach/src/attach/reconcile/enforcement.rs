//! Registers attached sandboxes with the dataplane and verifies that their programs are still attached.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::attach::{AttachError, Attached, Doing, StepError};
use crate::enforce::attachment::EnforcedAttachment;
use crate::enforce::error::EnforceError;
use crate::enforce::{Enforce, WholeParents};
use crate::error_chain::Chain;
use crate::journal::{JournalKey, Record};
use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, Plan, hook_kind, result};
use crate::step::{HookKind, Outputs, Step};

use super::parents::{Addresses, Parents};

/// The reason for an attachment whose VF has lost its end on the node.
const NO_REPRESENTOR: &str = "the representor of its VF is gone: the card's mode was changed, its driver reloaded, or its VFs recreated";

/// Returns the dataplane's view of a sandbox: one entry for each attachment that it enforces. `cookie`: that of the
/// sandbox's namespace, if known.
pub(in crate::attach) fn guards<'p>(
    plan: &'p Plan,
    outputs: &'p Outputs,
    cookie: Option<u64>,
) -> impl Iterator<Item = (&'p AttachmentPlan, EnforcedAttachment)> {
    plan.steps().filter_map(move |(at, attachment, step)| {
        let Step::Protect(protect) = step else { return None };
        let own = result::own(&plan.sandbox.netns, attachment, outputs.of(at.0));
        // If the plugin's result cannot be read, the interface must not count as one without addresses: packets with
        // checked sources are then dropped.
        let is_read = own.is_ok();
        let ends = result::ends(outputs.of(at.0));
        let vantage = hook_kind::of(attachment, outputs.of(at.0));
        let (of, own) = ((&plan.sandbox, cookie), own.unwrap_or_default());
        let guarded = EnforcedAttachment::new(protect, of, attachment, &own, vantage, ends.as_ref());
        let mut guarded = guarded.ok()?;
        guarded.attachment.flags.source_address |= protect.check_addresses && !is_read;
        Some((attachment, guarded))
    })
}

/// Describes the missing part of one attachment's enforcement. One that follows its parent has done so before:
/// [`Engine::follow_parents_of`](crate::attach::Engine::follow_parents_of).
pub(in crate::attach) fn difference(
    enforcer: &dyn Enforce,
    record: &Record,
    attachment: &AttachmentPlan,
    host: &mut Handle,
) -> Result<Option<String>, StepError> {
    let mut guards = guards(&record.plan, &record.outputs, record.netns_cookie);
    match guards.find(|(of, _)| of.ifname == attachment.ifname) {
        Some((_, guarded)) => Ok(enforcer.verify(&guarded, host)?),
        None => Ok(None),
    }
}

/// Tells the dataplane whether a device of kind `ifb` is in the pod's namespace. Returns whether there is one through
/// which packets can bypass programs on the node, and the handle if it [remains usable](Handle::has_ifb).
///
/// # Errors
/// The kernel does not report it.
pub(in crate::attach) fn look_for_ifb(
    enforcer: &dyn Enforce,
    plan: &Plan,
    pod: Handle,
) -> Result<(bool, Option<Handle>), AttachError> {
    let ids = plan.steps().filter_map(|(_, _, step)| match step {
        Step::Protect(protect) => Some(protect.id),
        _ => None,
    });
    let ids: Vec<u32> = ids.collect();
    let (has_one, pod) = pod.has_ifb().map_err(|error| AttachError::Open(error.into()))?;
    Ok((enforcer.note_ifb(&ids, has_one), pod))
}

/// Makes the dataplane check what only the pod's namespace shows of attachments whose programs are in the pod.
///
/// # Errors
/// The kernel does not report it.
pub(in crate::attach) fn look_into_pod(
    enforcer: &dyn Enforce,
    attached: &Attached,
    pod: &mut Handle,
) -> Result<(), AttachError> {
    let Attached { plan, outputs, netns_cookie, .. } = attached;
    let is_in_pod = |number: usize, attachment: &AttachmentPlan| {
        // Attachment numbers fit into a `u16`: see `Plan::steps`.
        hook_kind::of(attachment, outputs.of(number as u16)) == HookKind::Pod
    };
    if !plan.attachments.iter().enumerate().any(|(number, it)| is_in_pod(number, it)) {
        return Ok(());
    }
    for (attachment, guarded) in guards(plan, outputs, *netns_cookie) {
        let failed = |source| AttachError::step(Doing::Check, attachment, "look into the pod", source);
        enforcer.look_into_pod(&guarded, pod).map_err(failed)?;
    }
    Ok(())
}

/// The result of the check of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    /// The share that its sandbox belongs to.
    pub share: usize,
    /// The attachment, as text.
    pub subject: String,
    /// What it still lacks; `None`: it is enforced as set up.
    pub missing: Option<String>,
}

/// The attachments to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'w> {
    /// Those in this share.
    Share(usize),
    /// Those on one of these devices of the node.
    On(&'w BTreeSet<u32>),
}

impl Which<'_> {
    /// Returns the share of a sandbox: always the same one.
    fn share(container: &str, of: usize) -> usize {
        crc32fast::hash(container.as_bytes()) as usize % of.max(1)
    }

    /// Whether attachments of a sandbox can be selected.
    fn may_have(self, attached: &Attached, share: usize) -> bool {
        match self {
            Self::Share(wanted) => share == wanted,
            Self::On(devices) => (0..attached.plan.attachments.len()).any(|number| {
                // Attachment numbers fit into a `u16`: see `Plan::steps`.
                let ends = result::ends(attached.outputs.of(number as u16));
                let at = |index: u32| devices.contains(&index);
                ends.is_some_and(|ends| {
                    let (host, parent) =
                        (ends.host.map(|it| it.index), ends.parent.map(|it| it.device.index));
                    host.is_some_and(at) || parent.is_some_and(at)
                })
            }),
        }
    }

    fn has(self, guarded: &EnforcedAttachment) -> bool {
        match self {
            Self::Share(_) => true,
            Self::On(devices) => devices.contains(&guarded.host_index()),
        }
    }
}

/// Reattaches programs that were removed from their devices. Returns the results for those attachments that are
/// selected, out of `shares` shares, and the sandboxes that have followed their parents. Attachments whose device is
/// gone belong to pods that are being removed: they lack nothing.
///
/// # Errors
/// Returned in addition to the results: the last failure. An attachment that cannot be checked does not prevent the
/// check of others.
pub(in crate::attach) fn restore(
    (enforcer, parents): (&dyn Enforce, &Parents),
    attached: &[Arc<Attached>],
    which: Which<'_>,
    shares: usize,
) -> (Vec<Looked>, Vec<JournalKey>, Result<(), EnforceError>) {
    let (mut looked, mut followed, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
    let mut known = match which {
        Which::Share(_) => WholeParents::of_a_round(),
        Which::On(_) => WholeParents::default(),
    };
    let mut addresses = Addresses::default();
    let mut host = match Handle::open() {
        Ok(host) => host,
        Err(error) => return (looked, followed, Err(error.into())),
    };
    for attached in attached {
        let share = Which::share(&attached.key.container_id, shares);
        if !which.may_have(attached, share) {
            continue;
        }
        for (attachment, mut guarded) in guards(&attached.plan, &attached.outputs, attached.netns_cookie) {
            if !which.has(&guarded) {
                continue;
            }
            let has_followed = parents.follow(enforcer, &mut guarded, &mut addresses, &mut host);
            if let Ok(true) = has_followed
                && followed.last() != Some(&attached.key)
            {
                followed.push(attached.key.clone());
            }
            let missing = has_followed.and_then(|_| restored(enforcer, &guarded, &mut known, &mut host));
            let missing = missing.unwrap_or_else(|error| {
                let what = format!("it could not be checked: {}", Chain(&error));
                outcome = Err(error);
                Some(what)
            });
            let sandbox = &attached.plan.sandbox;
            let subject =
                sandbox.pod.as_ref().map_or_else(|| sandbox.container_id.clone(), ToString::to_string);
            looked.push(Looked { share, subject: format!("{subject} {}", attachment.ifname), missing });
        }
    }
    (looked, followed, outcome)
}

/// Reattaches removed programs of an attachment, and returns what is still missing.
fn restored(
    enforcer: &dyn Enforce,
    guarded: &EnforcedAttachment,
    known: &mut WholeParents,
    host: &mut Handle,
) -> Result<Option<String>, EnforceError> {
    if guarded.is_on_representor() && guarded.is_gone(host)? {
        // The pod may still have its VF.
        return Ok(Some(NO_REPRESENTOR.to_owned()));
    }
    let unsettled = enforcer
        .settle(guarded)
        .err()
        .map(|error| format!("its programs run by filters, and have not got links yet: {}", Chain(&error)));
    // Whether the programs run is checked nevertheless.
    let Some(what) = enforcer.verify_among_others(guarded, known, host)? else { return Ok(unsettled) };
    if guarded.is_gone(host)? {
        return Ok(None);
    }
    match enforcer.restore(guarded, host) {
        // The missing part may also have reappeared meanwhile.
        Ok(_) => enforcer.verify(guarded, host),
        Err(error) => Ok(Some(format!("{what}; not restored: {}", Chain(&error)))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::path::Path;

    use serde_json::{Map, Value, json};

    use super::*;
    use crate::attach::rig::{self, LIMIT};
    use crate::mac::Mac;
    use crate::plan::fixtures;
    use crate::step::{Delegate, Interface, Output, Protect, Role, StepRef};

    /// Another plugin's result is read anew at a start. Only of one that can be read it is known that the interface has no address,
    /// and the pod may give it one.
    #[test]
    fn an_interface_whose_addresses_cannot_be_read_sends_from_none() {
        let delegate = Delegate { plugin: "other".to_owned(), config: Map::new(), role: Role::Plugin };
        let steps = vec![Step::Delegate(delegate), Step::FindDevice, Step::Protect(Protect::verified())];
        let attachments = vec![fixtures::attachment("other", steps)];
        let plan = Plan { sandbox: fixtures::sandbox("a"), attachments, dynamic: None };
        let checked = |result: Value| -> Vec<_> {
            let mac = Some(Mac([2, 0, 0, 0, 0, 1]));
            let pod = Some(Interface { name: "net1".to_owned(), index: 3, mac, mtu: 1500 });
            let found = Output::Device { vantage: HookKind::Pod, host: None, pod, addresses: Vec::new() };
            let printed = Output::Delegate { result: result.into() };
            let outputs = Outputs::from_iter([(StepRef(0, 0), printed), (StepRef(0, 1), found)]);
            let guarded = guards(&plan, &outputs, None).map(|(_, it)| it.attachment);
            guarded.map(|it| (it.addresses, it.flags.source_address)).collect()
        };
        let own: IpAddr = "10.7.0.2".parse().unwrap();
        assert_eq!(checked(json!({"ips": [{"address": "10.7.0.2/24"}]})), [(vec![own], true)]);
        assert_eq!(checked(json!({})), [(Vec::new(), false)]);
        assert_eq!(checked(json!({"ips": 7})), [(Vec::new(), true)]);
    }

    #[test]
    fn an_attachment_that_cannot_be_looked_at_keeps_no_other_from_it() {
        let attached = |container: &str, id| {
            let plan = rig::plan(Path::new("/nonexistent"), container, id);
            Arc::new(Attached {
                key: rig::key(container),
                plan,
                outputs: Outputs::default(),
                netns_cookie: None,
                planned: None,
            })
        };
        let all = [attached("a", LIMIT), attached("b", 2)];
        let (maps, parents) = (rig::Maps::default(), Parents::default());
        let (looked, followed, outcome) = restore((&maps, &parents), &all, Which::Share(0), 1);
        assert!(followed.is_empty());
        let found = |subject: &str, missing: Option<&str>| Looked {
            share: 0,
            subject: subject.to_owned(),
            missing: missing.map(str::to_owned),
        };
        let why = EnforceError::NoDevice("eth0".to_owned()).to_string();
        let failed = format!("it could not be checked: {why}");
        assert_eq!(looked, [found("a eth0", Some(&failed)), found("b eth0", None)]);
        assert_eq!(outcome.unwrap_err().to_string(), why);
    }
}
