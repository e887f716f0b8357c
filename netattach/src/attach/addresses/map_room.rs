//! The entries of attachments in the maps of allowed addresses, `na_addr4` and `na_addr6`: counted when a plan gets its
//! numbers, so that no author uses up the room of all other pods.
//!
//! A pod has [`budget::ADDRESSES_OF_POD`] entries. One entry of each family is kept free for each attachment that the
//! node may have: only the first address of a pod's default network uses it. So a pod that asks for nothing else
//! starts however full the maps are.

use std::collections::BTreeMap;
use std::net::IpAddr;

use netattach_common::capacity;

use super::pool_use;
use crate::budget::{self, Budget};
use crate::cni::{CniError, code};
use crate::ipam;
use crate::journal::JournalKey;
use crate::npwg::NetworkName;
use crate::plan::{AttachmentPlan, Plan, result};
use crate::step::{Outputs, Protect, Role, Step};

/// Entries in `na_addr4` and in `na_addr6`.
type Entries = [usize; 2];

/// The names of the maps' families, in the order of [`Entries`].
const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// The entries of one plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Used {
    /// Of the first address of each family on the default network.
    sure: Entries,
    /// Of all others.
    more: Entries,
    /// The namespace of the pod; `None`: the sandbox is of no known pod.
    namespace: Option<String>,
}

/// The entries of every plan that is being carried out, is in force, or could not be rolled back.
#[derive(Debug, Default)]
pub(in crate::attach) struct MapRoom {
    /// The entries of each map.
    size: usize,
    /// How many of them only the default network uses.
    kept: usize,
    of_plans: BTreeMap<JournalKey, Used>,
    /// The sum of all plans.
    sure: Entries,
    more: Entries,
}

impl MapRoom {
    /// No entries yet, on a node with fewer attachments than `limit`. At most half of the maps is kept for the default
    /// network.
    pub(in crate::attach) fn new(limit: u32) -> Self {
        let size = capacity::ADDRESSES;
        Self { size, kept: (limit as usize).min(size / 2), ..Self::default() }
    }

    /// Notes the entries of a plan that is in force, even if there is no room. A plan that is noted already stays as
    /// it is.
    pub(in crate::attach) fn hold(&mut self, plan: &Plan) {
        let key = pool_use::key(plan);
        if !self.of_plans.contains_key(&key) {
            self.put(key, planned(plan));
        }
    }

    /// Notes the entries of a new plan.
    ///
    /// # Errors
    /// Code 7: the pod would have too many. Code 11: the other pods leave too few.
    pub(in crate::attach) fn claim(&mut self, plan: &Plan) -> Result<(), CniError> {
        let (key, used) = (pool_use::key(plan), planned(plan));
        self.check(&key, &used, plan, None)?;
        self.put(key, used);
        Ok(())
    }

    /// Notes the entries that a plan has in fact: executed plugins may have given more addresses than were expected.
    ///
    /// # Errors
    /// As for [`MapRoom::claim`]. The entries are noted all the same, because the plan has them until it is rolled
    /// back.
    pub(in crate::attach) fn settle(&mut self, plan: &Plan, outputs: &Outputs) -> Result<(), CniError> {
        let (key, used) = (pool_use::key(plan), found(plan, outputs));
        let before = self.of_plans.get(&key).map_or(0, Used::sum);
        self.take(&key);
        // Others may meanwhile have more than was expected of them, which is no reason to refuse this plan.
        let fits = if used.sum() > before { self.check(&key, &used, plan, Some(outputs)) } else { Ok(()) };
        self.put(key, used);
        fits
    }

    /// Forgets the entries of a plan.
    pub(in crate::attach) fn free(&mut self, key: &JournalKey) {
        self.take(key);
    }

    fn put(&mut self, key: JournalKey, used: Used) {
        self.take(&key);
        (self.sure, self.more) = (plus(self.sure, used.sure), plus(self.more, used.more));
        self.of_plans.insert(key, used);
    }

    fn take(&mut self, key: &JournalKey) {
        let Some(used) = self.of_plans.remove(key) else { return };
        (self.sure, self.more) = (minus(self.sure, used.sure), minus(self.more, used.more));
    }

    /// Checks the entries of a plan that is not noted.
    fn check(
        &self,
        key: &JournalKey,
        used: &Used,
        plan: &Plan,
        outputs: Option<&Outputs>,
    ) -> Result<(), CniError> {
        let of_pod: usize = self.of_container(&key.container_id).map(Used::sum).sum();
        if let Err(exceeded) = budget::ADDRESSES_OF_POD.check(of_pod + used.sum()) {
            let most = greatest(plan, outputs);
            let most = most.map(|(name, count)| format!("; network {name} takes most of them, {count}"));
            let mut error = CniError::from(exceeded);
            error.msg += &most.unwrap_or_default();
            return Err(error);
        }
        match (0..FAMILIES.len()).find(|family| !self.has_room(*family, used)) {
            Some(family) => Err(self.full(family)),
            None => Ok(()),
        }
    }

    /// Whether the entries of one family fit beside those of all other plans.
    fn has_room(&self, family: usize, used: &Used) -> bool {
        let (sure, more) = (used.sure[family], used.more[family]);
        let all = self.sure[family] + self.more[family] + sure + more;
        let others_fit = more == 0 || self.more[family] + more <= self.size - self.kept;
        sure + more == 0 || (all <= self.size && others_fit)
    }

    fn full(&self, family: usize) -> CniError {
        let Budget { what, .. } = budget::ADDRESSES_OF_POD;
        let mut by_namespace: BTreeMap<Option<&str>, usize> = BTreeMap::new();
        for used in self.of_plans.values() {
            let count = used.more[family] + used.sure[family];
            *by_namespace.entry(used.namespace.as_deref()).or_default() += count;
        }
        let most = by_namespace.into_iter().max_by_key(|(_, count)| *count);
        let most = most.map(|(namespace, count)| match namespace {
            Some(namespace) => format!("; namespace {namespace} has most of them, {count}"),
            None => format!("; containers that are no known pods have most of them, {count}"),
        });
        let msg = format!(
            "{what}: all {} {} addresses that the node keeps for networks beside the default one are in use{}",
            self.size - self.kept,
            FAMILIES[family],
            most.unwrap_or_default()
        );
        CniError::new(code::TRY_AGAIN_LATER, msg)
    }

    /// Searches only the entries of this container.
    fn of_container<'i>(&'i self, container: &'i str) -> impl Iterator<Item = &'i Used> {
        let first = JournalKey { container_id: container.to_owned(), ifname: String::new() };
        let from_there = self.of_plans.range(first..);
        from_there.take_while(move |(key, _)| key.container_id == container).map(|(_, used)| used)
    }
}

impl Used {
    fn sum(&self) -> usize {
        self.sure.iter().chain(&self.more).sum()
    }
}

/// The entries that a plan is expected to need.
fn planned(plan: &Plan) -> Used {
    of_plan(plan, |_, attachment| expected(attachment))
}

/// The entries that a plan whose steps have these outputs needs.
fn found(plan: &Plan, outputs: &Outputs) -> Used {
    of_plan(plan, |number, attachment| own(plan, (number, attachment), outputs))
}

fn of_plan(plan: &Plan, own: impl Fn(usize, &AttachmentPlan) -> Entries) -> Used {
    let namespace = plan.sandbox.pod.as_ref().map(|pod| pod.name.namespace.clone());
    let mut used = Used { namespace, ..Used::default() };
    for (number, attachment) in plan.attachments.iter().enumerate() {
        let Some(protect) = attachment.protect() else { continue };
        let (own, allowed) = (own(number, attachment), allowed(protect));
        let sure = own.map(|count| count.min(usize::from(attachment.default)));
        used.sure = plus(used.sure, sure);
        used.more = plus(used.more, plus(minus(own, sure), allowed));
    }
    used
}

/// The network that takes most entries of a plan, with their number.
fn greatest<'p>(plan: &'p Plan, outputs: Option<&Outputs>) -> Option<(&'p NetworkName, usize)> {
    let mut by_network: BTreeMap<&NetworkName, usize> = BTreeMap::new();
    for (number, attachment) in plan.attachments.iter().enumerate() {
        let Some(protect) = attachment.protect() else { continue };
        let own = match outputs {
            Some(outputs) => own(plan, (number, attachment), outputs),
            None => expected(attachment),
        };
        let count: usize = own.iter().chain(&allowed(protect)).sum();
        *by_network.entry(&attachment.network).or_default() += count;
    }
    by_network.into_iter().max_by_key(|(_, count)| *count)
}

/// The entries of `allowedAddresses`. An address that is one of the pod's own as well is counted twice.
fn allowed(protect: &Protect) -> Entries {
    by_family(protect.allowed.iter().map(IpAddr::is_ipv4))
}

/// The number of addresses that an attachment will have. Of executed plugins, which decide themselves, one of each
/// family.
fn expected(attachment: &AttachmentPlan) -> Entries {
    let leases = attachment.steps.iter().find_map(|step| match step {
        Step::Lease(ipam::Config::HostLocal(config)) => {
            Some(by_family(config.sets.iter().map(ipam::host_local::range::RangeSet::is_ipv4)))
        }
        Step::Lease(ipam::Config::Static(config)) => {
            Some(by_family(config.addresses.iter().map(|leased| leased.address.addr().is_ipv4())))
        }
        Step::Lease(ipam::Config::Dhcp(_)) => Some([1, 0]),
        _ => None,
    });
    leases.unwrap_or(if is_by_plugin(attachment) { [1, 1] } else { [0, 0] })
}

/// The number of addresses that an attachment has, from the outputs of its steps.
fn own(plan: &Plan, (number, attachment): (usize, &AttachmentPlan), outputs: &Outputs) -> Entries {
    if !is_by_plugin(attachment) {
        return expected(attachment);
    }
    // Attachment numbers fit into a `u16`: see `Plan::steps`.
    match result::own(&plan.sandbox.netns, attachment, outputs.of(number as u16)) {
        Ok(own) => by_family(own.addresses.iter().map(|leased| leased.address.addr().is_ipv4())),
        // Such a result fails the ADD, and is not adopted.
        Err(_) => expected(attachment),
    }
}

/// Whether executed plugins determine the addresses of an attachment.
fn is_by_plugin(attachment: &AttachmentPlan) -> bool {
    attachment.steps.iter().any(|step| match step {
        Step::TakeMade(_) => true,
        Step::Delegate(delegate) => delegate.role == Role::Ipam || attachment.link().is_none(),
        _ => false,
    })
}

fn plus([v4, v6]: Entries, [more_v4, more_v6]: Entries) -> Entries {
    [v4 + more_v4, v6 + more_v6]
}

fn minus([v4, v6]: Entries, [less_v4, less_v6]: Entries) -> Entries {
    [v4 - less_v4, v6 - less_v6]
}

fn by_family(are_v4: impl Iterator<Item = bool>) -> Entries {
    are_v4.fold([0, 0], |[v4, v6], is_v4| if is_v4 { [v4 + 1, v6] } else { [v4, v6 + 1] })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cni::CniArgs;
    use crate::objects::ObjectName;
    use crate::plan::{PodRef, Sandbox, fixtures};

    /// An attachment with an IPv4 address of its own, and so many of `allowedAddresses`.
    fn attachment(network: &str, is_default: bool, allowed: usize) -> AttachmentPlan {
        let addresses = json!([{"address": "10.0.0.2/24"}]);
        let config = json!({"name": "net", "ipam": {"type": "static", "addresses": addresses}});
        let lease = ipam::Kind::Static.parse(config.as_object().unwrap(), &CniArgs::default()).unwrap();
        let allowed = (0..allowed).map(|number| IpAddr::from([10, 9, 0, number as u8])).collect();
        let steps = vec![Step::Lease(lease), Step::Protect(Protect { allowed, ..Protect::verified() })];
        AttachmentPlan { network: network.into(), default: is_default, ..fixtures::attachment("veth", steps) }
    }

    fn plan(namespace: &str, container: &str, attachments: Vec<AttachmentPlan>) -> Plan {
        let pod = Some(PodRef { name: ObjectName::new(namespace, container), uid: None });
        Plan { sandbox: Sandbox { pod, ..fixtures::sandbox(container) }, attachments, dynamic: None }
    }

    /// A pod with its default network and as many attachments as it may have with 64 more addresses each.
    fn greedy(number: usize) -> Plan {
        let more = (0..15).map(|_| attachment("evil/wide", false, 64));
        let attachments = [attachment("kube/pods", true, 0)].into_iter().chain(more).collect();
        plan("evil", &format!("greedy-{number}"), attachments)
    }

    fn usual(container: &str) -> Plan {
        plan("shop", container, vec![attachment("kube/pods", true, 0)])
    }

    #[test]
    fn a_pod_has_so_many_addresses_and_its_networks_are_told_of() {
        let most = budget::ADDRESSES_OF_POD.most;
        let of = |allowed: &[usize]| {
            let more = allowed.iter().map(|count| attachment("shop/wide", false, *count));
            let default = [attachment("kube/pods", true, 0)];
            plan("shop", "a", default.into_iter().chain(more).collect())
        };
        // 1 of the default network, and the attachments' own.
        let mut allowed = vec![64; 15];
        allowed.push(most - 1 - 15 * 65 - 1);
        let mut room = MapRoom::new(100);
        assert_eq!(room.claim(&of(&allowed)), Ok(()));
        room.free(&pool_use::key(&of(&[])));
        *allowed.last_mut().unwrap() += 1;
        let error = room.claim(&of(&allowed)).unwrap_err();
        let told = format!("; network shop/wide takes most of them, {most}");
        let exceeded = budget::ADDRESSES_OF_POD.check(most + 1).unwrap_err();
        assert_eq!((error.code, error.msg), (code::INVALID_CONFIG, format!("{exceeded}{told}")));
        // What was attached to the live pod counts as well.
        assert_eq!(room.claim(&of(&[64; 15])), Ok(()));
        let mut live = of(&[]);
        live.sandbox.ifname = "net9".to_owned();
        live.attachments = vec![attachment("shop/wide", false, 60)];
        assert_eq!(room.claim(&live).unwrap_err().code, code::INVALID_CONFIG);
        room.free(&pool_use::key(&of(&[])));
        assert_eq!(room.claim(&live), Ok(()));
        assert_eq!(room.more, [61, 0]);
    }

    #[test]
    fn however_many_addresses_pods_ask_for_another_one_gets_its_own_on_the_default_network() {
        let mut room = MapRoom::new(8192);
        let full = (0..100).find_map(|number| room.claim(&greedy(number)).err()).unwrap();
        assert_eq!(full.code, code::TRY_AGAIN_LATER);
        let told = "all 24576 IPv4 addresses that the node keeps for networks beside the default one are in use; \
                    namespace evil has most of them, ";
        assert!(full.msg.contains(told), "{}", full.msg);
        for number in 0..8000 {
            assert_eq!(room.claim(&usual(&format!("shop-{number}"))), Ok(()));
        }
        let another = plan("shop", "b", vec![attachment("shop/lan", false, 64); 4]);
        assert_eq!(room.claim(&another).unwrap_err().code, code::TRY_AGAIN_LATER);
        room.free(&pool_use::key(&greedy(0)));
        assert_eq!(room.claim(&another), Ok(()));
    }

    #[test]
    fn what_an_earlier_agent_has_attached_stays_counted_however_much_it_is() {
        let mut room = MapRoom::new(8192);
        for number in 0..100 {
            room.hold(&greedy(number));
            room.hold(&greedy(number).outline());
        }
        assert_eq!(room.more[0], 100 * 15 * 65);
        assert_eq!(room.claim(&greedy(100)).unwrap_err().code, code::TRY_AGAIN_LATER);
        for number in 0..100 {
            room.free(&pool_use::key(&greedy(number)));
        }
        assert_eq!((room.sure, room.more), ([0, 0], [0, 0]));
    }
}
