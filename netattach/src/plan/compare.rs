//! Compares the plan of a repeated ADD with the plan that was carried out. Pure.

use super::pod_sources::Permission;
use super::resolve::Options;
use super::{AttachmentPlan, Plan, Sandbox};
use crate::ipam::{self, static_addresses};
use crate::step::Step;

/// Returns the settings for planning a repeated ADD. A plugin that was executed for the first ADD is executed again,
/// even if netattach can implement it now: then equal requests yield equal plans.
pub fn as_planned(done: &Plan, options: &Options) -> Options {
    let mut options = options.clone();
    for (_, _, step) in done.steps() {
        if let Step::Delegate(delegate) = step
            && !options.exec.contains(&delegate.plugin)
        {
            options.exec.push(delegate.plugin.clone());
        }
    }
    // The request was permitted then; only its effect is compared.
    options.pod_sources = vec![Permission::of_anything()];
    options
}

/// Describes the first difference between a plan and the one that was carried out. The path of the namespace may
/// differ.
pub fn difference(done: &Plan, asked: &Plan) -> Option<String> {
    if let Some(what) = of_sandboxes(&done.sandbox, &asked.sandbox) {
        return Some(what.to_owned());
    }
    let [has, wants] = [done, asked].map(|plan| plan.attachments.iter().map(name).collect::<Vec<_>>());
    if has != wants {
        return Some(format!("it has {} and is to have {}", has.join(", "), wants.join(", ")));
    }
    let asked = asked.attachments.iter().zip(&done.attachments).map(|(asked, done)| as_recorded(done, asked));
    let mut pairs = done.attachments.iter().zip(asked);
    let (one, other) = pairs.find(|(one, other)| *one != other)?;
    Some(format!("{} has another {}", name(one), of_attachments(one, &other)))
}

/// Returns the requested attachment as an earlier version would have recorded it: its interfaces had link-local
/// addresses, wanted or not, and were protected once another plugin had leased their addresses. The cluster's ranges,
/// and whether rules accompany them, are those at the time of the first ADD, and warnings are not compared.
fn as_recorded(done: &AttachmentPlan, asked: &AttachmentPlan) -> AttachmentPlan {
    let mut asked = asked.clone();
    asked.warnings.clone_from(&done.warnings);
    let position = |steps: &[Step], is: fn(&Step) -> bool| steps.iter().position(is);
    let by_addresses = |step: &Step| matches!(step, Step::ProtectAddresses);
    if position(&done.steps, by_addresses).is_none()
        && let Some(then) = position(&asked.steps, by_addresses)
        && let Some(first) = position(&asked.steps, |step| matches!(step, Step::Protect(_)))
        && first < then
    {
        asked.steps[first..=then].rotate_left(1);
        asked.steps.remove(then - 1);
    }
    for (done, asked) in done.steps.iter().zip(&mut asked.steps) {
        match (done, asked) {
            (Step::Configure(done), Step::Configure(asked)) => asked.v4_alone &= done.v4_alone,
            (Step::MoveDefaultRoutes { keep: done, .. }, Step::MoveDefaultRoutes { keep: asked, .. }) => {
                asked.clone_from(done)
            }
            (Step::Lease(ipam::Config::Static(done)), Step::Lease(ipam::Config::Static(asked))) => {
                as_leased(done, asked);
            }
            _ => {}
        }
    }
    asked.steps.retain(|step| *step != Step::RouteBySource);
    asked.steps.extend(done.steps.last().filter(|step| **step == Step::RouteBySource).cloned());
    asked
}

/// `addresses` contains the pod's requests, regardless of the network author's further addresses. An earlier version
/// did not record the latter, and took no gateway from there.
fn as_leased(done: &static_addresses::Config, asked: &mut static_addresses::Config) {
    if done.own.is_none() && asked.own.is_some() {
        for (done, asked) in done.addresses.iter().zip(&mut asked.addresses) {
            asked.gateway = done.gateway;
        }
    }
    asked.own.clone_from(&done.own);
}

fn name(attachment: &AttachmentPlan) -> String {
    format!("{} ({})", attachment.ifname, attachment.network)
}

fn of_sandboxes(done: &Sandbox, asked: &Sandbox) -> Option<&'static str> {
    // Destructured completely, so that new fields must be considered here.
    let Sandbox { container_id, ifname, netns: _, netns_id, cni_args, cni_path, config_name, pod } = done;
    let table = [
        (*container_id == asked.container_id, "CNI_CONTAINERID differs"),
        (*ifname == asked.ifname, "CNI_IFNAME differs"),
        (*netns_id == asked.netns_id, "CNI_NETNS is a different namespace"),
        (*pod == asked.pod, "CNI_ARGS names a different pod"),
        (*cni_args == asked.cni_args, "CNI_ARGS differs"),
        (*cni_path == asked.cni_path, "CNI_PATH differs"),
        (*config_name == asked.config_name, "the configuration has another name"),
    ];
    table.into_iter().find_map(|(same, what)| (!same).then_some(what))
}

/// Describes the difference between two attachments that differ.
fn of_attachments(done: &AttachmentPlan, asked: &AttachmentPlan) -> String {
    let mut steps = done.steps.iter().zip(&asked.steps);
    match steps.find(|(one, other)| one != other) {
        Some((_, step)) => format!("way to {}", step.describe()),
        None if done.steps.len() != asked.steps.len() => "number of steps".to_owned(),
        None if done.version != asked.version => "cniVersion".to_owned(),
        None => "configuration".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::cni;
    use crate::ipam::LeasedAddress;
    use crate::plan::fixtures::{attachment, sandbox};
    use crate::step::{Configure, Delegate, Protect, Role};

    fn plan(steps: Vec<Step>, warnings: &[&str]) -> Plan {
        let warnings = warnings.iter().map(|it| (*it).to_owned()).collect();
        let attachments = vec![AttachmentPlan { warnings, ..attachment("macvlan", steps) }];
        Plan { sandbox: sandbox("c1"), attachments, dynamic: None }
    }

    #[test]
    fn what_an_earlier_version_recorded_is_what_is_asked_for_today() {
        let dhcp =
            || Step::Delegate(Delegate { plugin: "dhcp".to_owned(), config: Map::new(), role: Role::Ipam });
        let protect = || Step::Protect(Protect::verified());
        let configure = || Step::Configure(Configure::default());
        let done = plan(vec![dhcp(), protect(), configure()], &[]);
        let asked = vec![protect(), dhcp(), Step::ProtectAddresses, configure()];
        assert_eq!(difference(&done, &plan(asked.clone(), &["key \"mastr\" is not known"])), None);
        assert_eq!(difference(&plan(asked.clone(), &[]), &plan(asked, &[])), None);
        let by_source = || vec![configure(), Step::RouteBySource];
        assert_eq!(difference(&plan(vec![configure()], &[]), &plan(by_source(), &[])), None);
        assert_eq!(difference(&plan(by_source(), &[]), &plan(vec![configure()], &[])), None);
        let other = vec![protect(), Step::ProtectAddresses, configure()];
        assert!(difference(&done, &plan(other, &[])).is_some());
    }

    #[test]
    fn what_a_pod_asks_for_is_the_same_whatever_the_author_names_beside_it() {
        let leased = |address: &str, gateway: Option<&str>| LeasedAddress {
            address: address.parse().unwrap(),
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        };
        let lease = |address: LeasedAddress, own: Option<&str>| {
            let own = own.map(|own| vec![leased(own, Some("10.1.0.1"))]);
            let (routes, dns) = (Vec::new(), cni::Dns::default());
            let config = static_addresses::Config { addresses: vec![address], own, routes, dns };
            plan(vec![Step::Lease(ipam::Config::Static(config))], &[])
        };
        let asked = || leased("10.1.0.8/24", Some("10.1.0.1"));
        let now = lease(asked(), Some("10.1.0.7/24"));
        // As an earlier version recorded it.
        assert_eq!(difference(&lease(leased("10.1.0.8/24", None), None), &now), None);
        assert_eq!(difference(&lease(asked(), Some("10.1.0.9/24")), &now), None);
        assert!(difference(&lease(leased("10.1.0.9/24", None), None), &now).is_some());
        assert!(difference(&lease(leased("10.1.0.8/24", None), Some("10.1.0.7/24")), &now).is_some());
    }
}
