//! Takes steps back. Every inverse is tried whatever became of the others, and all errors are reported.

use super::plugin_del::PluginDel;
use super::{AttachError, Doing, Node, Progress, StepError, device_info, routing};
use crate::netlink::{Handle, LinkState};
use crate::netns::Netns;
use crate::plan::undo::{Inverse, inverse};
use crate::plan::{AttachmentPlan, Output, Plan, StepRef, remember};
use crate::waits::{self, Resource};

/// Takes back every step of `plan` that may have begun. `netns` is the sandbox's namespace if it still exists.
///
/// Other plugins come first, in reverse order, while their interfaces exist. Then all links of the sandbox go
/// at once: each would cost a grace period of its own. Addresses are free only after the links that carried
/// them are gone.
///
/// # Errors
/// [`AttachError::Undo`] with everything that failed. Calling again is safe.
pub fn undo(
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
) -> Result<(), AttachError> {
    let mut errors = Vec::new();
    let inverses: Vec<_> = plan
        .steps()
        .rev()
        .filter(|(at, _, _)| progress.has_begun(*at))
        .filter_map(|(at, attachment, step)| {
            Some((at, attachment, inverse(&plan.sandbox, attachment, step)?))
        })
        .collect();

    errors.extend(retire(node, &inverses).err());
    for (at, attachment, inverse) in &inverses {
        if let Inverse::Delegate(delegate) = inverse {
            crate::crash_point!("undo", at);
            let outputs = progress.outputs();
            let undone = PluginDel { node, plan, netns, at: *at, attachment, delegate, outputs }.run();
            errors.extend(
                undone
                    .err()
                    .map(|source| AttachError::step(Doing::Detach, attachment, "read its result", source)),
            );
        }
    }
    crate::crash_point!("undo", "links");
    errors.extend(delete_links(plan, netns, progress, &inverses).err());
    crate::crash_point!("undo", "leases");
    for (at, attachment, inverse) in &inverses {
        crate::crash_point!("release", at);
        let undone = match inverse {
            Inverse::Release { data_dir, network, owner } => {
                let pool =
                    Resource::Pool { data_dir: data_dir.to_path_buf(), network: (*network).to_owned() };
                let released = waits::at(&pool, || node.leases.release(data_dir, network, owner));
                released.map(drop).map_err(StepError::from)
            }
            Inverse::Unprotect { id } => match &node.enforcer {
                Some(enforcer) => enforcer.detach(*id).map_err(StepError::from),
                None => Ok(()),
            },
            Inverse::RemoveFile(path) => device_info::remove(path),
            Inverse::ForgetSources => match netns {
                Some(netns) => Handle::open_in(netns)
                    .map_err(StepError::from)
                    .and_then(|mut pod| routing::forget_gone_interfaces(&mut pod)),
                None => Ok(()),
            },
            Inverse::DeleteLink { .. } | Inverse::Delegate(_) | Inverse::Forget => Ok(()),
        };
        errors.extend(
            undone
                .err()
                .map(|source| AttachError::step(Doing::Detach, attachment, "release what it held", source)),
        );
    }
    // Whoever looks into the cache for what is left finds it as long as something is.
    if errors.is_empty() {
        for (at, attachment, _) in inverses.iter().filter(|(.., inverse)| *inverse == Inverse::Forget) {
            crate::crash_point!("forget", at);
            let undone =
                waits::at(&Resource::Cache, || node.cache.remove(&remember::key(&plan.sandbox, attachment)));
            let failed = |source| {
                AttachError::step(Doing::Detach, attachment, "remove it from libcni's cache", source)
            };
            errors.extend(undone.err().map(failed));
        }
    }
    if errors.is_empty() {
        node.occupied.release(plan);
        Ok(())
    } else {
        Err(AttachError::Undo(errors))
    }
}

/// Takes the attachments off the fast path while their links exist.
fn retire(node: &Node, inverses: &[(StepRef, &AttachmentPlan, Inverse<'_>)]) -> Result<(), AttachError> {
    let Some(enforcer) = &node.enforcer else { return Ok(()) };
    for (_, attachment, inverse) in inverses {
        if let Inverse::Unprotect { id } = inverse {
            let step = |source: StepError| {
                AttachError::step(Doing::Detach, attachment, "take it off the fast path", source)
            };
            enforcer.retire(*id).map_err(StepError::from).map_err(step)?;
        }
    }
    Ok(())
}

fn delete_links(
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
    inverses: &[(StepRef, &AttachmentPlan, Inverse<'_>)],
) -> Result<(), AttachError> {
    let group = plan.sandbox.link_group();
    // Without a cookie another namespace may have the inode by now, and in it another link the index.
    let is_certain = progress.netns_cookie().is_some();
    let mut in_pod = Vec::new();
    let mut on_node = Vec::new();
    for (at, _, inverse) in inverses {
        if let Inverse::DeleteLink { pod_name, host_name } = inverse {
            let made = match progress.outputs().get(at) {
                Some(Output::Link { pod, .. }) if is_certain => Some(pod.index),
                _ => None,
            };
            in_pod.push((*pod_name, made));
            on_node.extend(*host_name);
        }
    }
    if in_pod.is_empty() {
        return Ok(());
    }
    let run = || -> Result<(), StepError> {
        if let Some(netns) = netns {
            let mut pod = Handle::open_in(netns)?;
            let mut names = Vec::new();
            for (name, made) in in_pod {
                // Somebody else's link may have the name. Ours has our group, or is the one that was made in this namespace.
                // The index of what another meta plugin made is not known, 0.
                let is_made = |link: &LinkState| made.is_some_and(|index| index == 0 || index == link.index);
                let ours = |link: &LinkState| link.group == group || is_made(link);
                names.extend(pod.find_link(name)?.filter(ours).map(|_| name));
            }
            pod.ensure_links_absent(group, &names)?;
        }
        let mut host = Handle::open()?;
        for name in on_node {
            host.ensure_link_absent(name)?;
        }
        Ok(())
    };
    run().map_err(|source| AttachError::Step {
        doing: Doing::Detach,
        ifname: plan.sandbox.ifname.clone(),
        network: plan.sandbox.container_id.clone(),
        step: "delete links".into(),
        source: Box::new(source),
    })
}
