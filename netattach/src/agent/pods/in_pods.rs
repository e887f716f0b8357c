//! Detects changes that other processes make in pods. They are reported and never reverted: the network
//! binding of a virtual machine, for example, renames the pod's interface on purpose. CHECK compares the
//! same and more, but some runtimes never send it. A change that bypasses an attachment's programs in the
//! pod also lowers its enforcement level. A device of kind `ifb`, by which a pod can send past programs on
//! the node, is found only here; CHECK does not fail for it, as it has legitimate uses.
//!
//! A check takes some of the sandboxes, the next check those that follow, in rounds. It compares only state
//! in the pod, starts no process, and skips containers with a running operation. The duration of a round
//! depends on the number of sandboxes and the duration of each check, see [`pace`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::agent::Agent;
use crate::agent::health::log_new;
use crate::agent::health::share::shared;
use crate::attach::Attached;
use crate::error_chain::{Chain, clipped};
use crate::journal::JournalKey;
use crate::pace;
use crate::rounds;
use crate::rpc::message::Condition;
use crate::sync::{Mutex, locked};
use crate::ticks;

/// How often a check runs, unless [`pace`] makes it rarer.
const INTERVAL: Duration = Duration::from_secs(5);
/// Most sandboxes of one check.
const AT_ONCE: usize = 32;
/// Most rows that are kept.
const MOST_ROWS: usize = 100;

/// The findings in a sandbox.
#[derive(Debug)]
struct Found {
    of: Arc<Attached>,
    rows: Vec<Condition>,
}

/// The findings of the last check of each sandbox.
#[derive(Debug, Default)]
pub(super) struct InPods(Mutex<BTreeMap<JournalKey, Found>>);

impl InPods {
    /// Returns the changes found in attached sandboxes.
    pub(in crate::agent) fn conditions(
        &self,
        is_attached: impl Fn(&Arc<Attached>) -> bool,
    ) -> Vec<Condition> {
        let mut all = locked(&self.0);
        all.retain(|_, found| is_attached(&found.of));
        // A pod has several records if a runtime, or a chain of plugins, calls netattach for each
        // interface.
        let mut told = BTreeSet::new();
        let rows = all.values().flat_map(|found| &found.rows);
        rows.filter(|row| told.insert((row.object.as_str(), row.problem.as_str()))).cloned().collect()
    }

    /// Records the findings of a check in a sandbox.
    fn note(&self, of: &Arc<Attached>, rows: Vec<Condition>) {
        let mut all = locked(&self.0);
        let mut before = all.remove(&of.key).map(|found| found.rows).unwrap_or_default();
        if rows.is_empty() {
            return;
        }
        // A finding already reported for another record of the pod is not logged again.
        before.extend(all.values().flat_map(|found| &found.rows).filter(|row| rows.contains(row)).cloned());
        all.insert(of.key.clone(), Found { of: Arc::clone(of), rows });
        limit(&mut all);
        let kept = all.get(&of.key).map(|found| found.rows.as_slice()).unwrap_or_default();
        log_new("not as it was made", &before, kept);
    }
}

/// Keeps at most [`MOST_ROWS`] rows, with equal shares for the namespaces.
fn limit(all: &mut BTreeMap<JournalKey, Found>) {
    let rows: Vec<Condition> = all.values().flat_map(|found| &found.rows).cloned().collect();
    if rows.len() <= MOST_ROWS {
        return;
    }
    let kept: BTreeSet<String> = shared(rows, MOST_ROWS).into_iter().map(|row| row.object).collect();
    for found in all.values_mut() {
        found.rows.retain(|row| kept.contains(&row.object));
    }
    all.retain(|_, found| !found.rows.is_empty());
}

/// Returns the sandboxes of the check after the one that ended at `last`. `all` is sorted by key.
fn next<'a>(all: &'a [Arc<Attached>], last: Option<&JournalKey>) -> &'a [Arc<Attached>] {
    let at = last.map_or(0, |last| all.partition_point(|attached| attached.key <= *last));
    let rest = if at < all.len() { &all[at..] } else { all };
    &rest[..rest.len().min(AT_ONCE)]
}

impl Agent {
    /// Checks for changes in pods, forever.
    pub(in crate::agent) async fn keep_looking_into_pods(self: Arc<Self>) {
        let mut last = None;
        loop {
            let looking = Arc::clone(&self);
            let look = move || looking.look_into_some_pods(last.as_ref());
            let (came_to, worked) = rounds::look(move || pace::measured("pods", look)).await;
            last = came_to;
            ticks::pause(pace::pause_by_two_parts(INTERVAL, worked)).await;
        }
    }

    /// Checks some pods, and returns the key of the last one.
    fn look_into_some_pods(&self, last: Option<&JournalKey>) -> Option<JournalKey> {
        let before = pace::worked();
        let all = self.engine.registry().all();
        let mut came_to = None;
        for attached in next(&all, last) {
            self.look_into_pod(attached);
            came_to = Some(attached.key.clone());
            if pace::worked().saturating_sub(before) >= pace::longest_look(INTERVAL) {
                break;
            }
        }
        came_to
    }

    fn look_into_pod(&self, attached: &Arc<Attached>) {
        // An operation on the container goes first; the next round checks the result.
        let Some(_turn) = self.admission.turns().look(&attached.key.container_id) else { return };
        if !self.engine.is_same(attached) {
            return;
        }
        match self.engine.differences_in_pod(attached) {
            Ok(differences) => {
                let name = self.sandbox_name(&attached.key);
                let row = |(ifname, difference): (String, String)| Condition {
                    object: format!("{name} {ifname}"),
                    problem: clipped(format!("in the pod: {difference}; it is left as it is")),
                };
                self.pods.in_pods.note(attached, differences.into_iter().map(row).collect());
            }
            // The previous findings stay.
            Err(error) => {
                let container = &attached.key.container_id;
                tracing::debug!(container, error = %Chain(&error), "cannot inspect its pod");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::attach::rig;
    use crate::step::Outputs;

    fn attached(container: &str) -> Arc<Attached> {
        let plan = rig::plan(Path::new("/nonexistent"), container, 1);
        let (key, outputs) = (rig::key(container), Outputs::default());
        Arc::new(Attached { key, plan, outputs, netns_cookie: None, planned: None })
    }

    fn row(object: &str) -> Condition {
        Condition { object: object.to_owned(), problem: "in the pod: x; it is left as it is".to_owned() }
    }

    #[test]
    fn looks_go_round_and_none_takes_more_than_its_share() {
        let mut all: Vec<_> = (0..70).map(|number| attached(&format!("{number:02}"))).collect();
        let mut last = None;
        let mut look = |all: &[Arc<Attached>]| {
            let taken = next(all, last.as_ref());
            last = taken.last().map(|it| it.key.clone());
            (taken.first().map(|it| it.key.container_id.clone()), taken.len())
        };
        let from = |name: &str, count: usize| (Some(name.to_owned()), count);
        let round: Vec<_> = (0..4).map(|_| look(&all)).collect();
        assert_eq!(round, [from("00", 32), from("32", 32), from("64", 6), from("00", 32)]);
        // The sandbox at which the last check ended is detached, with others.
        all.drain(20..40);
        assert_eq!([look(&all), look(&all)], [from("40", 30), from("00", 32)]);
        assert_eq!(look(&[]), (None, 0));
    }

    #[test]
    fn a_row_goes_with_the_difference_and_with_the_sandbox() {
        let (in_pods, a, b) = (InPods::default(), attached("a"), attached("b"));
        let told = || in_pods.conditions(|_| true);
        in_pods.note(&a, vec![row("pod shop/a net1"), row("pod shop/a net2")]);
        in_pods.note(&b, vec![row("pod shop/b eth0")]);
        assert_eq!(told(), [row("pod shop/a net1"), row("pod shop/a net2"), row("pod shop/b eth0")]);
        in_pods.note(&a, vec![row("pod shop/a net2")]);
        assert_eq!(told(), [row("pod shop/a net2"), row("pod shop/b eth0")]);
        in_pods.note(&a, Vec::new());
        assert_eq!(told(), [row("pod shop/b eth0")]);
        // The container is attached again.
        let again = attached("b");
        assert_eq!(in_pods.conditions(|it| Arc::ptr_eq(it, &again)), []);
        assert_eq!(told(), []);
    }

    #[test]
    fn what_several_records_of_a_pod_have_found_is_told_once_and_as_long_as_one_finds_it() {
        let (in_pods, first, second) = (InPods::default(), attached("a"), attached("b"));
        let told = || in_pods.conditions(|_| true);
        in_pods.note(&first, vec![row("pod shop/a ifb")]);
        in_pods.note(&second, vec![row("pod shop/a net1"), row("pod shop/a ifb")]);
        assert_eq!(told(), [row("pod shop/a ifb"), row("pod shop/a net1")]);
        in_pods.note(&first, Vec::new());
        assert_eq!(told(), [row("pod shop/a net1"), row("pod shop/a ifb")]);
    }

    #[test]
    fn no_namespace_takes_the_rows_of_another() {
        let in_pods = InPods::default();
        let of = |namespace: &str, number: usize| {
            let rows = (0..6).map(|net| row(&format!("pod {namespace}/{number} net{net}"))).collect();
            in_pods.note(&attached(&format!("{namespace}-{number:02}")), rows);
        };
        (0..50).for_each(|number| of("many", number));
        of("shop", 0);
        let told = in_pods.conditions(|_| true);
        let of_shop = told.iter().filter(|row| row.object.starts_with("pod shop/")).count();
        assert_eq!((told.len(), of_shop), (MOST_ROWS, 6));
    }
}
