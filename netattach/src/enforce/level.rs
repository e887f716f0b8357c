//! Determines the enforcement level of an attachment from where its programs run and from its pod's
//! privileges. Pure.

use crate::hooks::{AttachMode, AttachModes, Lack};
use crate::objects::{Grant, Pod};
use crate::policy::level::{Enforcement, Level};
use crate::spec::{IpvlanMode, LinkMode};
use crate::step::HookKind;

/// The text for programs on the node that a link into the node's netns bypasses. With such a link the
/// kernel gives the node's netns an id in the pod's netns, and creates, moves and deletes links in the
/// node's netns by that id (`IFLA_TARGET_NETNSID`) for a process with CAP_NET_ADMIN in the node's user
/// namespace, which a pod without its own user namespace may have.
const PAST_NODE: &str = "on the node, past which a link leads that is made there by the number of its namespace, or a \
                         device of kind ifb";

/// The text for programs that cannot see what is written into a packet after they have judged it.
const UNFINISHED: &str =
    "where they do not see what is written into a packet later, as this kernel does not let them";

/// The facts that determine a level, except those of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Means {
    /// How programs are attached in pods.
    pub in_pod: AttachMode,
    /// Whether programs can detect what is written into a packet after they have judged it.
    pub sees_unfinished: bool,
}

/// Where programs see the traffic of an attachment, as far as the level depends on it.
#[derive(Debug, Clone, Copy)]
pub struct Vantage<'v> {
    /// Where they run.
    pub hook: &'v HookKind,
    /// Whether they are on a representor: the pod's packets arrive there from the card, without the
    /// metadata that the kernel attached to them in the pod.
    pub behind_card: bool,
}

/// Whose traffic can bypass an attachment's programs by a device of kind `ifb`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PastBy {
    /// Traffic sent by its own pod.
    ItsPod,
    /// Traffic that it receives from another pod with a link on the same parent.
    PodOnItsParent,
}

/// Returns the enforcement level for an attachment of that pod. An unknown pod may have every privilege.
pub fn enforcement(vantage: Vantage<'_>, pod: Option<&Pod>, means: Means) -> Enforcement {
    let lower = |level, why: String| Enforcement { level, why };
    let privileged = |place: &str, capability: &str, who: String| {
        lower(Level::FullUnlessPrivileged, format!("programs run {place}, and {who} {capability}"))
    };
    let admin = || holder(pod.map(|pod| &pod.powers.admin));
    let raw = || holder(pod.map(|pod| &pod.powers.raw));
    match vantage.hook {
        HookKind::Nowhere(why) => lower(Level::None, why.to_string()),
        HookKind::Node => match (admin(), raw()) {
            (Some(who), _) => privileged(PAST_NODE, "CAP_NET_ADMIN", who),
            (None, Some(who)) if !means.sees_unfinished && !vantage.behind_card => {
                privileged(UNFINISHED, "CAP_NET_RAW", who)
            }
            (None, _) => lower(Level::Full, String::new()),
        },
        // A packet socket sends packets that reach the parent without the pod's socket, by which the sender
        // would be known: frames that the kernel segments on the pod's device, and copies of multicast and
        // broadcast frames.
        HookKind::Parent => match (admin(), raw()) {
            (Some(who), _) => privileged("on the parent", "CAP_NET_ADMIN", who),
            (None, Some(who)) => privileged("on the parent", "CAP_NET_RAW", who),
            (None, None) => lower(Level::Full, String::new()),
        },
        HookKind::Pod if means.in_pod == AttachMode::Clsact => {
            let why = "programs are filters in the pod, where a process with CAP_NET_ADMIN can remove them; links need Linux 6.6";
            lower(Level::Advisory, why.to_owned())
        }
        HookKind::Pod => match (admin(), raw()) {
            (Some(who), _) => privileged("in the pod", "CAP_NET_ADMIN", who),
            (None, Some(who)) => privileged("in the pod", "CAP_NET_RAW", who),
            (None, None) => lower(Level::Full, String::new()),
        },
    }
}

/// Whether programs in that pod may run as filters until they are attached by BPF links: the kernel
/// supports both, no process of the pod can remove filters, and its runtime does not need the place of a
/// qdisc. An unknown pod, or one whose uid differs, may have such a process.
pub(super) fn may_begin_by_filters(modes: AttachModes, pod: Option<&Pod>, uid: Option<&str>) -> bool {
    let has_both = modes == AttachModes { attachments: AttachMode::Clsact, others: AttachMode::Tcx };
    let pod = pod.filter(|pod| uid.is_none_or(|uid| pod.has_uid(uid)));
    let leaves_them = |pod: &Pod| holder(Some(&pod.powers.admin)).is_none() && !pod.powers.own_runtime;
    has_both && pod.is_some_and(leaves_them)
}

/// Returns the level of an attachment whose programs were found not to judge every packet, for reason
/// `lack`.
pub(super) fn lacking(lack: Lack, why: String) -> Enforcement {
    let level = match lack {
        Lack::Absent(_) => Level::None,
        // They judge the packets that other programs pass on to them.
        Lack::BehindFilter(_) | Lack::BehindTcx(_) => Level::Advisory,
    };
    Enforcement { level, why }
}

/// Returns the level of an attachment on a device on which another process repeatedly puts its filters
/// before the programs, so that these sometimes run first.
pub(super) fn contested(times: u32) -> Enforcement {
    let why = format!(
        "another program puts its filter before ours again and again: ours were put before it {times} times, and from now on are once a minute"
    );
    Enforcement { level: Level::Advisory, why }
}

/// Returns the level of an attachment from whose device another process repeatedly removes the programs, so
/// that they are sometimes missing.
pub(super) fn removed(times: u32) -> Enforcement {
    let why = format!(
        "another program takes its programs off again and again: they were put back {times} times and more, and are each time"
    );
    Enforcement { level: Level::Advisory, why }
}

/// Returns the level of an attachment on a representor whose card may switch flows itself once a process
/// offloads them, as such flows pass no program. `None`: the card may not. `told`: the kernel's answer, if
/// there is one.
pub(super) fn past_programs(told: Option<bool>) -> Option<Enforcement> {
    let advice = "`ethtool -K REPRESENTOR hw-tc-offload off` prevents that";
    let why = match told {
        Some(false) => return None,
        Some(true) => "hw-tc-offload is on: flows that another program offloads to the card pass no program",
        None => "the kernel does not say whether the card switches flows by itself, past the programs",
    };
    Some(Enforcement { level: Level::Advisory, why: format!("{why}; {advice}") })
}

/// Returns the level of an attachment that is judged in its pod, by the mode of its interface there.
/// `None`: packets pass the interface. All ipvlans on one parent have one mode: a process with
/// CAP_NET_ADMIN in the netns of a pod with such a link can change it.
pub(super) fn behind_the_interface(mode: Option<LinkMode>) -> Option<Enforcement> {
    (mode == Some(LinkMode::Ipvlan(IpvlanMode::L3s))).then(|| Enforcement {
        level: Level::None,
        why: "its ipvlan was switched to mode l3s, in which packets come to the pod behind it".to_owned(),
    })
}

/// Returns the level of an attachment by a netkit on whose pod's end other programs judge the sent packets
/// first.
pub(super) fn behind_the_pods_end() -> Enforcement {
    let why = "another's netkit program sees what the pod sends before the programs on the node's end, and may end the chain";
    Enforcement { level: Level::Advisory, why: why.to_owned() }
}

/// Returns the level of an attachment if devices of kind `ifb` were found in pods. Packets that such a
/// device forwards pass no program on the device that receives them next: see `netlink::ifb`.
pub(super) fn past_by_ifb(by: PastBy) -> Enforcement {
    let why = match by {
        PastBy::ItsPod => {
            "its pod has a device of kind ifb, by which it can send past the programs on the node"
        }
        PastBy::PodOnItsParent => {
            "a pod on the same parent has a device of kind ifb, by which it can send to this one past the programs"
        }
    };
    Enforcement { level: Level::Advisory, why: why.to_owned() }
}

/// Returns the lower of the level by place and pod, and of the level that a check has found.
pub(super) fn lower_of(by_place: Enforcement, found: Option<Enforcement>) -> Enforcement {
    match found {
        Some(found) if found.level < by_place.level => found,
        _ => by_place,
    }
}

/// Returns the container of a pod that has a capability, and how that is known; `None` if no container has
/// it.
fn holder(grant: Option<&Grant>) -> Option<String> {
    match grant {
        Some(Grant::No) => None,
        Some(Grant::To(container)) => Some(format!("its container {container} has")),
        Some(Grant::Unknown) => Some("its manifest names no containers: they may have".to_owned()),
        Some(Grant::ToUnread) => {
            Some("it has more ephemeral containers than are read: one may have".to_owned())
        }
        None => Some("it has no manifest: it may have".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::enforce::level::*;
    use crate::objects::{ObjectName, Phase, Powers};
    use crate::step::NotObservable;

    fn pod(admin: Grant, raw: Grant) -> Pod {
        Pod {
            name: ObjectName::new("shop", "a"),
            uid: None,
            mirror_of: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            phase: Phase::Running,
            host_network: false,
            ports: Vec::new(),
            powers: Powers { admin, raw, own_runtime: false },
            on_this_node: false,
            terminating: false,
        }
    }

    #[test]
    fn programs_begin_by_filters_only_where_nobody_in_the_pod_can_take_those_off() {
        const BOTH: AttachModes = AttachModes { attachments: AttachMode::Clsact, others: AttachMode::Tcx };
        let to = || Grant::To("app".to_owned());
        let bare = || pod(Grant::No, to());
        let own_runtime = || {
            let bare = bare();
            Pod { powers: Powers { own_runtime: true, ..bare.powers }, ..bare }
        };
        let table = [
            (BOTH, Some(bare()), true),
            (BOTH, Some(pod(to(), Grant::No)), false),
            (BOTH, Some(pod(Grant::Unknown, Grant::No)), false),
            (BOTH, Some(pod(Grant::ToUnread, Grant::No)), false),
            (BOTH, None, false),
            // The pod may put a qdisc where ours would be.
            (BOTH, Some(own_runtime()), false),
            // With only one kind there is nothing to exchange.
            (AttachModes { attachments: AttachMode::Tcx, ..BOTH }, Some(bare()), false),
            (AttachModes { others: AttachMode::Clsact, ..BOTH }, Some(bare()), false),
        ];
        for (modes, pod, expected) in table {
            assert_eq!(may_begin_by_filters(modes, pod.as_ref(), Some("1")), expected, "{modes:?} {pod:?}");
        }
        let known = Pod { uid: Some("1".to_owned()), ..bare() };
        let of = |uid| may_begin_by_filters(BOTH, Some(&known), uid);
        assert_eq!([of(Some("1")), of(None), of(Some("2"))], [true, true, false]);
    }

    /// Rows: SRV-offload.
    #[test]
    fn a_level_follows_from_where_programs_run_and_what_the_pod_may_do() {
        const LINKS: Means = Means { in_pod: AttachMode::Tcx, sees_unfinished: true };
        const FILTERS: Means = Means { in_pod: AttachMode::Clsact, sees_unfinished: true };
        const BLIND: Means = Means { sees_unfinished: false, ..LINKS };
        let to = || Grant::To("app".to_owned());
        let (bare, raw, admin) = (pod(Grant::No, Grant::No), pod(Grant::No, to()), pod(to(), Grant::No));
        let unread = pod(Grant::ToUnread, Grant::ToUnread);
        let table = [
            (HookKind::Node, Some(&bare), LINKS, "full"),
            (HookKind::Node, Some(&raw), LINKS, "full"),
            (
                HookKind::Node,
                Some(&admin),
                LINKS,
                "full-unless-privileged (programs run on the node, past which a link leads that is made there by the number of its \
                 namespace, or a device of kind ifb, and its container app has CAP_NET_ADMIN)",
            ),
            (
                HookKind::Node,
                None,
                LINKS,
                "full-unless-privileged (programs run on the node, past which a link leads that is made there by the number of its \
                 namespace, or a device of kind ifb, and it has no manifest: it may have CAP_NET_ADMIN)",
            ),
            (
                HookKind::Node,
                Some(&unread),
                LINKS,
                "full-unless-privileged (programs run on the node, past which a link leads that is made there by the number of its \
                 namespace, or a device of kind ifb, and it has more ephemeral containers than are read: one may have \
                 CAP_NET_ADMIN)",
            ),
            (HookKind::Node, Some(&bare), BLIND, "full"),
            (
                HookKind::Node,
                Some(&raw),
                BLIND,
                "full-unless-privileged (programs run where they do not see what is written into a packet later, as this kernel does \
                 not let them, and its container app has CAP_NET_RAW)",
            ),
            (HookKind::Parent, Some(&bare), BLIND, "full"),
            (
                HookKind::Parent,
                Some(&raw),
                LINKS,
                "full-unless-privileged (programs run on the parent, and its container app has CAP_NET_RAW)",
            ),
            (
                HookKind::Parent,
                None,
                LINKS,
                "full-unless-privileged (programs run on the parent, and it has no manifest: it may have CAP_NET_ADMIN)",
            ),
            (HookKind::Pod, Some(&bare), LINKS, "full"),
            (
                HookKind::Pod,
                Some(&raw),
                LINKS,
                "full-unless-privileged (programs run in the pod, and its container app has CAP_NET_RAW)",
            ),
            (
                HookKind::Pod,
                Some(&admin),
                LINKS,
                "full-unless-privileged (programs run in the pod, and its container app has CAP_NET_ADMIN)",
            ),
            (
                HookKind::Pod,
                Some(&bare),
                FILTERS,
                "advisory (programs are filters in the pod, where a process with CAP_NET_ADMIN can remove them; links need Linux 6.6)",
            ),
            (
                HookKind::Nowhere(NotObservable::NoInterface),
                Some(&bare),
                LINKS,
                "none (the pod has no interface of that name)",
            ),
        ];
        for (hook, pod, means, expected) in table {
            let vantage = Vantage { hook: &hook, behind_card: false };
            assert_eq!(enforcement(vantage, pod, means).to_string(), expected, "{hook:?}");
        }
        // A pod with a card may have another link by which it knows the node's netns. A packet from the
        // card is a new packet to the kernel.
        let representor = Vantage { hook: &HookKind::Node, behind_card: true };
        let node_end = Vantage { behind_card: false, ..representor };
        for pod in [Some(&admin), Some(&unread), None] {
            let level = enforcement(representor, pod, BLIND);
            assert_eq!(level, enforcement(node_end, pod, BLIND));
            assert_eq!(level.level, Level::FullUnlessPrivileged);
        }
        for pod in [&bare, &raw] {
            assert_eq!(enforcement(representor, Some(pod), BLIND).to_string(), "full");
        }
        let full = || Enforcement { level: Level::Full, why: String::new() };
        let found = [
            (Some(lacking(Lack::Absent("na_to_pod"), "absent".to_owned())), "none (absent)"),
            (Some(lacking(Lack::BehindFilter("na_to_pod"), "behind".to_owned())), "advisory (behind)"),
            (Some(lacking(Lack::BehindTcx("na_to_pod"), "behind".to_owned())), "advisory (behind)"),
            (None, "full"),
        ];
        for (found, expected) in found {
            assert_eq!(lower_of(full(), found).to_string(), expected);
        }
        let none = || Enforcement { level: Level::None, why: "nowhere".to_owned() };
        assert_eq!(lower_of(none(), Some(contested(5))), none());
        assert_eq!(lower_of(full(), Some(contested(5))), contested(5));
        assert_eq!(past_programs(Some(false)), None);
        assert_eq!(
            past_programs(Some(true)).unwrap().to_string(),
            "advisory (hw-tc-offload is on: flows that another program offloads to the card pass no program; `ethtool -K REPRESENTOR hw-tc-offload off` prevents that)"
        );
        assert_eq!(past_programs(None).unwrap().level, Level::Advisory);
        assert_eq!(lower_of(full(), Some(behind_the_pods_end())), behind_the_pods_end());
        for by in [PastBy::ItsPod, PastBy::PodOnItsParent] {
            assert_eq!(lower_of(full(), Some(past_by_ifb(by))).level, Level::Advisory);
        }
        assert_eq!(
            behind_the_interface(Some(LinkMode::Ipvlan(IpvlanMode::L3s))).unwrap().to_string(),
            "none (its ipvlan was switched to mode l3s, in which packets come to the pod behind it)"
        );
        for mode in [None, Some(IpvlanMode::L2), Some(IpvlanMode::L3)] {
            assert_eq!(behind_the_interface(mode.map(LinkMode::Ipvlan)), None);
        }
        let levels = [Level::None, Level::Advisory, Level::FullUnlessPrivileged, Level::Full];
        assert!(levels.is_sorted());
    }
}
