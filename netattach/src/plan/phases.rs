//! Groups the steps of a plan that are carried out together: the kernel accepts the requests for several links in one
//! datagram.
//!
//! Consecutive attachments whose steps all have a known phase are created side by side, phase by phase. The steps of
//! one attachment keep their order, and so do those of a phase. An attachment that runs another plugin, takes a
//! device or reads what is in the pod runs alone: after all attachments before it are complete, and before any later
//! one begins.

use super::{AttachmentPlan, Plan};
use crate::spec::{Link, Tie};
use crate::step::{Stage, Step, StepRef};

/// A step with its position and its attachment.
pub type Item<'p> = (StepRef, &'p AttachmentPlan, &'p Step);

/// Phases of attachments that are created side by side, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Bridges that links are ports of.
    Bridge,
    /// Creation of the links, down.
    Create,
    /// Addresses, and the node's part of them.
    Address,
    /// Policy and programs: before any packet passes.
    Protect,
    /// Addresses and routes in the pod; links come up.
    Configure,
}

impl Phase {
    const ALL: [Self; 5] = [Self::Bridge, Self::Create, Self::Address, Self::Protect, Self::Configure];

    /// Returns the phase of a step. `None`: its attachment is created alone.
    fn of(step: &Step) -> Option<Self> {
        match step {
            Step::EnsureBridge(_) => Some(Self::Bridge),
            Step::CreateLink(link) => has_company(link).then_some(Self::Create),
            // Its link comes up for the request, while no other attachment is half complete.
            Step::Lease(config) if config.asks_the_network() => None,
            Step::Lease(_)
            | Step::Gateway { .. }
            | Step::EnsureForwarding
            | Step::RouteToPod
            | Step::Translate(_) => Some(Self::Address),
            Step::Protect(_) => Some(Self::Protect),
            Step::Configure(_) => Some(Self::Configure),
            Step::TakeMade(_)
            | Step::ClaimDevice(_)
            | Step::SetDevice(_)
            | Step::MoveDevice
            | Step::RaiseLoopback
            | Step::PrepareDeviceInfo(_)
            | Step::Delegate(_)
            | Step::FindReach
            | Step::Admit(_)
            | Step::RestrictSender
            | Step::FindDevice
            | Step::ReadDeviceInfo(_)
            | Step::NoteProperties(_)
            | Step::Tune(_)
            | Step::ChooseTables(_)
            | Step::UseTables(_)
            | Step::ChooseVrf(_)
            | Step::JoinVrf(_)
            | Step::ProtectAddresses
            | Step::ChooseHostAccess
            | Step::GiveHostAccess
            | Step::MoveDefaultRoutes { .. }
            | Step::RouteBySource
            | Step::Remember(_) => None,
        }
    }
}

/// Whether the link can be created together with others: it depends on nothing in the pod, and its first request sets
/// its final name.
pub fn has_company(link: &Link) -> bool {
    matches!(link, Link::Veth(_) | Link::Macvlan(_)) && link.tie() != Tie::InPod
}

/// Returns all steps, in the order of execution: those of one group are carried out together. No group is empty.
pub fn groups(plan: &Plan) -> Vec<Vec<Item<'_>>> {
    let (attaching, later): (Vec<_>, Vec<_>) =
        plan.steps().partition(|(_, _, step)| step.stage() == Stage::Attach);
    let attachments: Vec<&[Item<'_>]> = attaching.chunk_by(|a, b| a.0.0 == b.0.0).collect();
    let mut groups = Vec::new();
    for run in attachments.chunk_by(|a, b| is_in_phases(a) && is_in_phases(b)) {
        if run.iter().all(|attachment| is_in_phases(attachment)) {
            let of = |phase| {
                let steps = run.iter().flat_map(|attachment| attachment.iter());
                steps.filter(move |(_, _, step)| Phase::of(step) == Some(phase)).copied().collect()
            };
            groups.extend(Phase::ALL.map(of).into_iter().filter(|group: &Vec<_>| !group.is_empty()));
        } else {
            groups.extend(run.iter().flat_map(|attachment| attachment.iter()).map(|item| vec![*item]));
        }
    }
    groups.extend(later.into_iter().map(|item| vec![item]));
    groups
}

fn is_in_phases(attachment: &[Item<'_>]) -> bool {
    attachment.iter().map(|(_, _, step)| Phase::of(step)).is_sorted()
        && attachment.iter().all(|(_, _, step)| Phase::of(step).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::{attachment, sandbox};
    use crate::spec;
    use crate::step::Configure;

    fn veth() -> Step {
        Step::CreateLink(Link::Veth(spec::Veth {
            host_name: "na0".to_owned(),
            pod_name: "eth0".to_owned(),
            mtu: None,
            mac: None,
            group: 1,
            port: None,
        }))
    }

    fn macvlan(in_pod: bool) -> Step {
        Step::CreateLink(Link::Macvlan(spec::Macvlan {
            pod_name: "net1".to_owned(),
            parent: Some("wire0".to_owned()),
            mode: spec::MacvlanMode::Bridge,
            mtu: None,
            mac: None,
            group: 1,
            broadcast_queue: None,
            tap: false,
            in_pod,
        }))
    }

    fn configure() -> Step {
        Step::Configure(Configure::default())
    }

    fn planned(attachments: Vec<Vec<Step>>) -> Plan {
        let attachments = attachments.into_iter().map(|steps| attachment("bridge", steps)).collect();
        Plan { sandbox: sandbox("c1"), attachments, dynamic: None }
    }

    fn places(plan: &Plan) -> Vec<Vec<(u16, u16)>> {
        let each = |group: Vec<Item<'_>>| group.into_iter().map(|(at, _, _)| (at.0, at.1)).collect();
        groups(plan).into_iter().map(each).collect()
    }

    #[test]
    fn attachments_that_follow_one_another_are_made_side_by_side() {
        let plan = planned(vec![
            vec![veth(), Step::EnsureForwarding, Step::RouteToPod, configure()],
            vec![macvlan(false), configure()],
        ]);
        let expected = [vec![(0, 0), (1, 0)], vec![(0, 1), (0, 2)], vec![(0, 3), (1, 1)]];
        assert_eq!(places(&plan), expected);
    }

    #[test]
    fn what_is_made_by_itself_has_those_before_it_made_and_none_after_it_begun() {
        let plan = planned(vec![
            vec![veth(), configure()],
            vec![macvlan(true), configure()],
            vec![macvlan(false), configure()],
            vec![veth(), configure(), Step::RouteBySource],
        ]);
        let expected = [
            vec![(0, 0)],
            vec![(0, 1)],
            vec![(1, 0)],
            vec![(1, 1)],
            vec![(2, 0), (3, 0)],
            vec![(2, 1), (3, 1)],
            vec![(3, 2)],
        ];
        assert_eq!(places(&plan), expected);
    }

    #[test]
    fn steps_of_an_attachment_keep_their_order() {
        let plan =
            planned(vec![vec![veth(), configure(), Step::EnsureForwarding], vec![veth(), configure()]]);
        let expected = [vec![(0, 0)], vec![(0, 1)], vec![(0, 2)], vec![(1, 0)], vec![(1, 1)]];
        assert_eq!(places(&plan), expected, "what is configured may be what forwarding is for");
    }
}
