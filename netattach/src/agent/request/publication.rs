//! The network-status of attached pods: published before or after an ADD's answer, compared, and withdrawn.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::agent::admission::required_status::RequiredStatus;
use crate::attach::{Attached, Engine, Recovery, network_status};
use crate::cni::{self, CniError, code};
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::npwg::status::Form;
use crate::objects::Pod;
use crate::plan::PodRef;
use crate::publish::{Event, Mark, Publish, PublishError, Published};
use crate::sync::{Mutex, locked};
use crate::waits::{self, Resource};

/// How long an ADD waits for its status to be published, if that is required.
const STATUS_PATIENCE: Duration = Duration::from_secs(10);

/// The publisher of pods' network-status, and the form it uses.
#[derive(Debug)]
pub(in crate::agent) struct Statuses {
    publisher: Arc<dyn Publish>,
    form: Form,
    /// Whether an ADD fails unless its status is published.
    required: bool,
    /// What recent ADDs that required it have found.
    recent: Mutex<RequiredStatus>,
}

impl Statuses {
    /// `required`: whether an ADD fails unless its status is published.
    pub(in crate::agent) fn new(publisher: Arc<dyn Publish>, form: Form, required: bool) -> Self {
        Self { publisher, form, required, recent: Mutex::default() }
    }

    /// Whether an ADD fails unless its status is published.
    pub(super) fn are_required(&self) -> bool {
        self.required
    }

    /// Notes that an ADD has ended before its status was to be published.
    pub(super) fn ended_untried(&self) {
        locked(&self.recent).ended_untried(Instant::now());
    }

    /// Updates the published status of all pods. If a record was left alone, no status is withdrawn, as the
    /// record may belong to any pod.
    ///
    /// # Errors
    /// The first status that cannot be published or withdrawn; all others were tried.
    pub(in crate::agent) fn publish_again(
        &self,
        engine: &Engine,
        recovery: &Recovery,
    ) -> Result<(), PublishError> {
        let attached = engine.registry().all();
        let mut published = Ok(());
        // A dynamic attachment is reported in the entry of the pod's own record.
        for sandbox in attached.iter().filter(|attached| attached.plan.dynamic.is_none()) {
            if let Some((pod, entries)) =
                network_status(&engine.registry().with_dynamic(&sandbox.key), self.form)
            {
                published = published.and(self.publisher.publish(&pod, &entries));
            }
        }
        let pods: BTreeSet<_> =
            attached.iter().filter_map(|attached| attached.plan.sandbox.pod.clone()).collect();
        // Nothing tries this again before the next start, and readers would go on seeing addresses that other
        // pods have by then.
        published.and(self.publisher.withdraw_others(recovery.left_alone.is_empty().then_some(&pods)))
    }
}

impl Agent {
    /// Refuses an ADD that could not be published as it has to be, before it has any effect.
    ///
    /// # Errors
    /// Code 11.
    pub(super) fn check_publishable(&self, request: &cni::Request) -> Result<(), CniError> {
        if !self.statuses.required {
            return Ok(());
        }
        let key = JournalKey { container_id: request.container_id.clone(), ifname: request.ifname.clone() };
        let reachable = self.intents.source.reachable().unwrap_or(Ok(()));
        // A sandbox that is already attached costs nothing, and its status may be unchanged.
        let may_begin = || {
            let is_attached = self.engine.registry().get(&key).is_some();
            is_attached || locked(&self.statuses.recent).may_begin(reachable.is_ok(), Instant::now())
        };
        if !may_begin()
            && let Err(why) = &reachable
        {
            let msg = format!("network-status cannot be published, and kubernetes.status is required: {why}");
            return Err(CniError::new(code::TRY_AGAIN_LATER, msg));
        }
        Ok(())
    }

    /// Publishes the status of an ADD before its answer; the ADD fails if that fails.
    ///
    /// # Errors
    /// Code 11; the ADD is rolled back if it has attached anything.
    pub(super) fn publish_first(
        &self,
        request: &cni::Request,
        sandbox: &JournalKey,
        is_new: bool,
    ) -> Result<(), CniError> {
        let attached = self.engine.registry().with_dynamic(sandbox);
        let Some((pod, entries)) = network_status(&attached, self.statuses.form) else { return Ok(()) };
        let published = waits::at(&Resource::Publication, || {
            self.statuses.publisher.publish_within(&pod, &entries, STATUS_PATIENCE)
        });
        {
            let (mut status, now) = (locked(&self.statuses.recent), Instant::now());
            match &published {
                Err(error) if error.is_gone => status.ended_untried(now),
                outcome => status.ended(outcome.is_ok(), now),
            }
        }
        published.map_err(|error| {
            let mut failed = CniError::from_chain(code::TRY_AGAIN_LATER, &error);
            // The attachments of a running pod stay.
            if is_new {
                // The runtime sends a DEL too, which then finds nothing.
                match self.engine.del(request) {
                    // Otherwise the publisher would keep retrying the failed status.
                    Ok(pod) => self.withdraw(pod.as_ref()),
                    Err(left) => {
                        failed = failed.with_details(format!("not rolled back: {}", Chain(&left)));
                    }
                }
            }
            failed
        })
    }

    /// Compares the published status with that of a sandbox with these attachments.
    pub(in crate::agent) fn published(&self, attached: &[Arc<Attached>]) -> Published {
        let status = network_status(attached, self.statuses.form);
        status.map_or(Published::Unknown, |(pod, entries)| self.statuses.publisher.published(&pod, &entries))
    }

    /// See [`Publish::mark`].
    pub(in crate::agent) fn published_mark(&self, pod: &PodRef) -> Option<Mark> {
        self.statuses.publisher.mark(pod)
    }

    pub(in crate::agent) fn publish(&self, sandbox: &JournalKey) {
        let attached = self.engine.registry().with_dynamic(sandbox);
        let Some((pod, entries)) = network_status(&attached, self.statuses.form) else { return };
        if let Err(error) = self.statuses.publisher.publish(&pod, &entries) {
            tracing::warn!(error = %Chain(&error), "network-status not published");
        }
    }

    /// Withdraws the network-status of detached pods, except of pods that already have another sandbox.
    pub(in crate::agent) fn withdraw<'p>(&self, pods: impl IntoIterator<Item = &'p PodRef>) {
        for pod in pods {
            let (all, objects) = (self.engine.registry().all(), self.intents.source.snapshot());
            let of_others = all.iter().filter_map(|it| it.plan.sandbox.pod.as_ref());
            if status_stays(pod, of_others, objects.pods.get(&pod.name).map(|object| &**object)) {
                continue;
            }
            if let Err(error) = self.statuses.publisher.withdraw(pod) {
                tracing::warn!(error = %Chain(&error), "network-status not withdrawn");
            }
        }
    }

    /// Reports a problem on the object that has it.
    pub(in crate::agent) fn report(&self, event: Event) {
        self.statuses.publisher.report(event);
    }
}

/// Whether the network-status of a detached pod belongs to another sandbox, one of `of_others`. `object`:
/// the source's pod of that name.
///
/// An earlier pod of the same name may stay attached for long, if its DEL fails or never comes. If the
/// object shows that the detached pod is the later one, the status belongs to no other sandbox.
fn status_stays<'a>(
    pod: &PodRef,
    of_others: impl IntoIterator<Item = &'a PodRef>,
    object: Option<&Pod>,
) -> bool {
    let is_latest = pod.uid.is_some() && object.is_some_and(|object| object.uid.is_some() && pod.is(object));
    of_others.into_iter().any(|other| other.may_be(pod) || (other.name == pod.name && !is_latest))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::objects::{ObjectName, Phase, Powers};
    use crate::publish::StatusFiles;

    /// Those of gone pods are withdrawn at a start only.
    #[test]
    fn a_status_that_cannot_be_written_keeps_no_other_from_being_published_or_withdrawn() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let journal = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, journal, &crate::sync::Arc::default());
        for name in ["a", "b"] {
            engine.registry().insert(rig::attached(name, &json!({"namespace": "shop", "name": name})));
        }
        let path = |name: &str| directory.join(format!("status/shop/{name}.json"));
        // The first one's place is taken.
        std::fs::create_dir_all(path("a")).unwrap();
        std::fs::write(path("gone"), "[]").unwrap();
        let files = Arc::new(StatusFiles::new(directory.join("status")));
        let statuses = Statuses::new(files, Form::default(), false);
        statuses.publish_again(&engine, &Recovery::default()).unwrap_err();
        assert_eq!(["a", "b", "gone"].map(|name| path(name).is_file()), [false, true, false]);
    }

    #[test]
    fn the_sandbox_of_an_earlier_pod_of_the_name_keeps_no_status_of_a_later_one() {
        let of = |name: &str, uid: Option<&str>| PodRef {
            name: ObjectName::new("shop", name),
            uid: uid.map(str::to_owned),
        };
        let object = |uid: Option<&str>| Pod {
            name: ObjectName::new("shop", "db-0"),
            uid: uid.map(str::to_owned),
            mirror_of: None,
            labels: Default::default(),
            annotations: Default::default(),
            phase: Phase::Failed,
            host_network: false,
            ports: Vec::new(),
            powers: Powers::default(),
            on_this_node: true,
            terminating: false,
        };
        let [old, new, unnamed] =
            ["old", "new", ""].map(|uid| of("db-0", Some(uid).filter(|uid| !uid.is_empty())));
        let other = of("db-1", Some("new"));
        let (is_new, is_unknown) = (object(Some("new")), object(None));
        let rows = [
            ("there is no other", &new, vec![&other], Some(&is_new), false),
            ("its own next sandbox", &new, vec![&new], Some(&is_new), true),
            ("of an earlier pod", &new, vec![&old], Some(&is_new), false),
            ("of an earlier pod and its own", &new, vec![&old, &new], Some(&is_new), true),
            ("of the later pod", &old, vec![&new], Some(&is_new), true),
            ("the object is gone", &new, vec![&old], None, true),
            ("a manifest without a uid", &new, vec![&old], Some(&is_unknown), true),
            ("a runtime that names no uid", &unnamed, vec![&old], Some(&is_new), true),
            ("another sandbox of such a runtime", &new, vec![&unnamed], Some(&is_new), true),
        ];
        for (what, pod, of_others, object, stays) in rows {
            assert_eq!(status_stays(pod, of_others, object), stays, "{what}");
        }
    }
}
