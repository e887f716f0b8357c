//! Carries out the decided actions, like users, runtimes and accidents.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::json;

use super::decide::{Action, Ending, Key, PodSpec, Trouble};
use super::model::Attachment;
use super::network::{NETWORKS, Network, address_of, selections};
use super::probe::Prober;
use super::rig::{Live, Lost, Rig};
use crate::api_server::{CutOff, Fault, TOKEN, Verb, When};
use crate::traffic::{eventually, stretched};
use crate::{Call, Outcome, Pod};

/// An ADD that has not succeeded after this time, without any fault, has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time until a status that is written immediately is written.
const WRITTEN: Duration = Duration::from_millis(500);
/// Every reader waits for a while; this is long for the tests' own server.
const LATE: Duration = Duration::from_millis(700);

/// Calls of the runtime that are under way.
#[derive(Debug, Default)]
pub(super) struct Calls {
    adds: Vec<(Key, JoinHandle<Outcome>)>,
    dels: Vec<(String, JoinHandle<Vec<Outcome>>)>,
}

impl Rig {
    /// Carries out one action. Calls of the runtime continue in `calls`.
    pub(super) fn act(&mut self, action: &Action, calls: &mut Calls, prober: &Mutex<Prober>) -> Result<()> {
        let prober = || prober.lock().unwrap_or_else(PoisonError::into_inner);
        let server = &self.server;
        match action {
            Action::Create(spec) => self.create(spec, calls)?,
            Action::End { pod, how } => {
                prober().close(pod);
                self.end(pod, *how, calls)?;
            }
            Action::Relabel { pod, labels } => {
                let mut patch = json!({"metadata": {"labels": labels}});
                for key in ["app", "tier"].iter().filter(|key| !labels.contains_key(**key)) {
                    patch["metadata"]["labels"][*key] = json!(null);
                }
                server.patch("pods", &pod.0, &pod.1, &patch)?;
            }
            Action::Annotate { pod, networks } => {
                let live = self.live.get_mut(pod).context("the pod lives")?;
                if !live.attached {
                    // Its ADD may find either.
                    live.may_stay.extend(live.spec.networks.keys());
                }
                live.spec.networks.clone_from(networks);
                let annotation = selections(networks, live.spec.node);
                let patch = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": annotation}}});
                server.patch("pods", &pod.0, &pod.1, &patch)?;
            }
            Action::LabelNamespace { namespace, labels } => {
                let mut labels = labels.clone();
                labels.entry("team").or_insert(json!(null));
                server.patch("namespaces", "", namespace, &json!({"metadata": {"labels": labels}}))?;
            }
            Action::PutPolicy(policy) => drop(server.apply(policy)?),
            Action::RemovePolicy((namespace, name)) => {
                server.delete("multi-networkpolicies", namespace, name)?;
            }
            Action::PutDefinition { network, node, mtu } => self.define(*network, *node, *mtu)?,
            Action::RemoveDefinition { network, node } => {
                let name = network.definition(*node);
                server.delete("network-attachment-definitions", NETWORKS, &name)?;
            }
            Action::Kill(node) => self.end_agent(*node, true)?,
            Action::Stop(node) => self.end_agent(*node, false)?,
            Action::Trouble(trouble) => self.trouble(*trouble)?,
            Action::Forge { spec, network, address } => self.forge(spec, *network, address)?,
            Action::Unforge(pod) => server.delete("pods", &pod.0, &pod.1)?,
            Action::Finish(pod) => {
                prober().close(pod);
                self.finish(pod)?;
            }
            Action::Discard(pod) => {
                server.delete("pods", &pod.0, &pod.1)?;
                self.finished.remove(pod);
            }
            Action::ForgeStatus { pod, network, address } => {
                let Some(live) = self.live.get_mut(pod) else { return Ok(()) };
                live.forged = true;
                let name = format!("{NETWORKS}/{}", network.definition(live.spec.node));
                let status = json!([{"name": name, "interface": "net1", "ips": [address]}]).to_string();
                let patch = json!({"metadata": {
                    "labels": {"netattach.dev/networks": ""},
                    "annotations": {"k8s.v1.cni.cncf.io/network-status": status}
                }});
                server.patch("pods", &pod.0, &pod.1, &patch)?;
            }
            Action::DelAgain { node, container } => {
                let pod = Pod { container: container.clone(), ..Pod::new("gone")? };
                let call = self.nodes[*node].call("DEL", &pod);
                self.lost[*node].retain(|it| it.container != *container);
                let label = del_again(container);
                calls.dels.push((
                    label,
                    std::thread::spawn(move || {
                        let _pod = pod;
                        vec![call.run()]
                    }),
                ));
            }
            Action::Collect(node) => {
                // Interfaces that an ADD is about to create must not be taken for leftovers.
                calls.wait(self)?;
                self.collect(*node)?;
            }
        }
        Ok(())
    }

    fn create(&mut self, spec: &PodSpec, calls: &mut Calls) -> Result<()> {
        // A runtime does not request a sandbox while it removes one of that name.
        if calls.dels.iter().any(|(label, _)| *label == del_again(&spec.container)) {
            calls.wait(self)?;
        }
        self.server.create(&Self::object(spec))?;
        let sandbox = Pod { container: spec.container.clone(), ..Pod::new(&spec.key.1)? };
        let live = Live {
            spec: spec.clone(),
            sandbox,
            attached: false,
            may_stay: BTreeSet::new(),
            eth0: BTreeSet::new(),
            attachments: Vec::new(),
            forged: false,
        };
        let call = self.call("ADD", &live);
        self.live.insert(spec.key.clone(), live);
        calls.adds.push((spec.key.clone(), std::thread::spawn(move || call.run())));
        Ok(())
    }

    fn call(&self, verb: &str, live: &Live) -> Call {
        let PodSpec { key, uid, container, node, .. } = &live.spec;
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container};K8S_POD_UID={uid}",
            key.0, key.1
        );
        self.nodes[*node].call(verb, &live.sandbox).with("CNI_ARGS", &args)
    }

    fn end(&mut self, pod: &Key, how: Ending, calls: &mut Calls) -> Result<()> {
        let live = self.live.remove(pod).context("the pod lives")?;
        self.is_gone(&live);
        let call = self.call("DEL", &live);
        let delete = || self.server.delete("pods", &pod.0, &pod.1);
        let node = live.spec.node;
        let label = format!("DEL of {}/{}", pod.0, pod.1);
        match how {
            Ending::Lost => {
                delete()?;
                let container = live.spec.container.clone();
                self.lost[node].push(Lost { container, attachments: live.attachments });
            }
            Ending::ObjectFirst => {
                delete()?;
                calls.dels.push((
                    label,
                    std::thread::spawn(move || {
                        let _sandbox = live.sandbox;
                        vec![call.run()]
                    }),
                ));
            }
            Ending::InOrder | Ending::Twice => {
                let times = if how == Ending::Twice { 2 } else { 1 };
                let outcomes: Vec<Outcome> = (0..times).map(|_| call.run()).collect();
                check_dels(&label, outcomes)?;
                delete()?;
            }
            Ending::NamespaceGone => {
                drop(live.sandbox);
                calls.dels.push((label, std::thread::spawn(move || vec![call.run()])));
                delete()?;
            }
        }
        Ok(())
    }

    /// Ends a pod that is not restarted, like a kubelet when its containers have ended.
    fn finish(&mut self, pod: &Key) -> Result<()> {
        let live = self.live.remove(pod).context("the pod lives")?;
        self.is_gone(&live);
        self.server.patch("pods", &pod.0, &pod.1, &json!({"status": {"phase": "Succeeded"}}))?;
        let outcome = self.call("DEL", &live).run();
        self.finished.insert(pod.clone(), live.forged);
        check_dels(&format!("DEL of {}/{}, which has done its work", pod.0, pod.1), vec![outcome])
    }

    fn forge(&mut self, spec: &PodSpec, network: Network, address: &str) -> Result<()> {
        let mut object = Self::object(spec);
        let name = format!("{NETWORKS}/{}", network.definition(spec.node));
        let status = json!([{"name": name, "interface": "net1", "ips": [address]}]).to_string();
        object["metadata"]["labels"]["netattach.dev/networks"] = json!("");
        object["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = json!(status);
        self.server.create(&object)?;
        Ok(())
    }

    fn trouble(&mut self, trouble: Trouble) -> Result<()> {
        self.forgets = trouble.forgets();
        let faults = self.server.faults();
        let always = |fault| {
            faults.always(When::any(), fault);
        };
        let times = |number, fault| {
            faults.times(number, When::any(), fault);
        };
        let watches = |number, what, after, how| {
            faults.times(number, When::on(Verb::Watch, what), Fault::CutOff { after, how });
        };
        let statuses = |fault| faults.always(When::on(Verb::Patch, "pods/status"), fault);
        match trouble {
            Trouble::Late => always(Fault::Delay(LATE)),
            Trouble::Answers(code) => always(Fault::Answer(code)),
            Trouble::Resets => times(5, Fault::Reset),
            Trouble::WatchesEnd(what) => watches(3, what, 0, CutOff::Reset),
            Trouble::WatchesFail(what, code) => watches(2, what, 1, CutOff::Error(code)),
            Trouble::WatchesSilent(what) => watches(2, what, 1, CutOff::Silence),
            Trouble::Lags(what) | Trouble::LagsAndForgets(what) => faults.hold_watches(what),
            Trouble::Slow => always(Fault::Slow(2000)),
            Trouble::NeverAnswers => times(3, Fault::NoAnswer),
            Trouble::Away | Trouble::AwayAndForgets => self.server.stop(),
            Trouble::NoListener => self.server.refuse_connections(),
            Trouble::TokenExpired => self.server.accept_tokens(&[]),
            Trouble::ForeignCertificate => self.server.foreign_certificate()?,
            Trouble::HistoryForgotten => self.server.compact(),
            Trouble::Stale(what) => {
                self.server.list_as_now(what);
                // Each of these watches has reported one change that the list after it does not contain.
                watches(3, what, 1, CutOff::Error(410));
            }
            Trouble::StatusRefused(code) => self.of_statuses = Some(statuses(Fault::Answer(code))),
            Trouble::StatusReset => self.of_statuses = Some(statuses(Fault::Reset)),
        }
        if !trouble.is_of_statuses() {
            // Faults affect watches when they begin.
            self.server.reset_connections();
        }
        Ok(())
    }

    /// Ends all faults, and repeats the calls that a runtime would repeat until they succeed.
    pub(super) fn heal(&mut self, calls: &mut Calls) -> Result<()> {
        if let Some(fault) = self.of_statuses.take() {
            // Pending writes are made concurrently with everything else; there may be none.
            eventually(WRITTEN, || self.server.faults().hits(fault) > 0);
        }
        if std::mem::take(&mut self.forgets) {
            // Before anything is sent: the held watches restart, and too late.
            self.server.compact();
            self.server.reset_connections();
        }
        self.server.faults().clear();
        self.server.accept_tokens(&[TOKEN]);
        self.server.own_certificate()?;
        self.server.start_again()?;
        self.server.reset_connections();
        calls.wait(self)?;
        self.start_agents()?;
        let deadline = Instant::now() + stretched(PATIENCE);
        for key in self.live.keys().cloned().collect::<Vec<_>>() {
            self.attach(&key, deadline)?;
        }
        Ok(())
    }

    /// Attaches a pod that is not, if its networks are defined.
    fn attach(&mut self, key: &Key, deadline: Instant) -> Result<()> {
        let mut tries = 0;
        loop {
            let live = self.live.get(key).context("the pod lives")?;
            let (node, annotated) =
                (live.spec.node, live.spec.networks.keys().copied().collect::<BTreeSet<_>>());
            let is_defined = |network: &Network| {
                let name = network.definition(node);
                self.server.get("network-attachment-definitions", NETWORKS, &name).is_some()
            };
            if live.attached || !annotated.iter().all(is_defined) {
                return Ok(());
            }
            check_dels("DEL before another ADD", vec![self.call("DEL", live).run()])?;
            let outcome = self.call("ADD", live).run();
            if outcome.exit == 0 {
                self.attached(key);
                return Ok(());
            }
            // The agent may not know yet that a definition exists again.
            let message = outcome.json["msg"].as_str().unwrap_or_default();
            let is_late = outcome.json["code"] == 7 && message.ends_with("is not defined");
            ensure!(outcome.json["code"] == 11 || is_late, "ADD of {key:?}: {:#}", outcome.json);
            ensure!(Instant::now() < deadline, "ADD of {key:?} never succeeds: {:#}", outcome.json);
            tries += 1;
            if tries > 1 {
                // An address may belong to a container for which no DEL was sent.
                self.collect(node)?;
            }
        }
    }

    fn attached(&mut self, key: &Key) {
        let Some(live) = self.live.get_mut(key) else { return };
        live.attached = true;
        live.may_stay.extend(live.spec.networks.keys());
        let spec = &live.spec;
        let asked = spec.networks.iter().filter(|(network, _)| network.spans_nodes());
        let asked = asked.map(|(network, host)| Attachment {
            node: spec.node,
            pod: spec.key.clone(),
            uid: spec.uid.clone(),
            network: format!("{NETWORKS}/{}", network.definition(spec.node)),
            addresses: network.addresses(*host).iter().filter_map(|it| address_of(it)).collect(),
        });
        live.attachments = asked.collect();
        // A container with the same id has ended, whichever runtime created it.
        let (node, container) = (spec.node, spec.container.clone());
        self.lost[node].retain(|it| it.container != container);
    }

    /// GC with the containers that are there.
    pub(super) fn collect(&mut self, node: usize) -> Result<()> {
        if !self.running[node] {
            return Ok(());
        }
        let live = self.live.values().filter(|it| it.spec.node == node).map(|it| &it.sandbox);
        let there: Vec<&Pod> = live.chain(self.standing.sandboxes(node)).collect();
        let outcome = self.nodes[node].gc("pods", Some(&there));
        // If a pool stays busy, GC gives up; another GC may still run.
        ensure!(outcome.exit == 0 || outcome.json["code"] == 11, "GC: {:#}", outcome.json);
        if outcome.exit == 0 {
            self.lost[node].clear();
        }
        Ok(())
    }
}

impl Calls {
    /// Waits for the calls that are under way.
    pub(super) fn wait(&mut self, rig: &mut Rig) -> Result<()> {
        for (key, add) in self.adds.drain(..) {
            let outcome = add.join().map_err(|_| anyhow!("the ADD of {key:?} panicked"))?;
            if outcome.exit == 0 {
                rig.attached(&key);
            }
        }
        for (label, dels) in self.dels.drain(..) {
            let outcomes = dels.join().map_err(|_| anyhow!("{label} panicked"))?;
            check_dels(&label, outcomes)?;
        }
        Ok(())
    }
}

/// Returns the label of a DEL for a container that ended long ago.
fn del_again(container: &str) -> String {
    format!("another DEL of {container}")
}

/// A DEL is a success, with an agent or without.
fn check_dels(label: &str, outcomes: Vec<Outcome>) -> Result<()> {
    for outcome in outcomes {
        if outcome.exit != 0 {
            bail!("{label} failed: {:#}", outcome.json);
        }
    }
    Ok(())
}
