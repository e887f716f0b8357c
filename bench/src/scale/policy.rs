//! Changes of one pod's policy beside all other pods.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;
use serde_json::json;

use super::adds::{PATIENCE, milliseconds};
use super::sites::{Sites, Way};
use crate::Series;
use crate::agent::{Agent, NAMESPACE};
use crate::bpf::Words;

/// Changes that are measured.
const CHANGES: u16 = 10;
/// Time limit for one to be in force.
const IN_FORCE: Duration = Duration::from_secs(20);
/// Pause after a change, in which the policy before it is removed.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Serialize)]
pub(super) struct Changes {
    /// Milliseconds from a new manifest in its place to the word that the programs read.
    pub(super) in_force: Series,
    /// Milliseconds of the agent's processor time for one change, with all that follows it.
    pub(super) processor: Series,
}

/// Changes the policy of the first standing pod. No policy is left.
pub(super) fn measure(sites: &Sites) -> anyhow::Result<Changes> {
    let (agent, pod) = (&sites.agent, sites.pod(Way::Netattach, 1)?);
    let id = agent.row_of(pod, "eth0")?["id"].as_u64().and_then(|id| usize::try_from(id).ok());
    let id = id.context("an attachment without a number")?;
    let words = Words::open(&agent.pin("na_policy")?, id + 1)?;
    let place = agent.source().join("measured.yaml");
    let subject = Subject { agent, words, id, draft: agent.source().with_file_name("draft"), place };
    agent.settle(PATIENCE)?;
    let (mut in_force, mut processors) = (Vec::new(), Vec::new());
    // The first change, which isolates, does not count.
    for round in 0..=CHANGES {
        let (time, processor) = subject.change(pod.number, 20_000 + round)?;
        if round > 0 {
            in_force.push(milliseconds(time));
            processors.push(milliseconds(processor));
        }
    }
    fs::remove_file(&subject.place).context("remove the policy")?;
    subject.words.wait(subject.id, IN_FORCE, |word| word == 0)?;
    Ok(Changes { in_force: Series::new(in_force), processor: Series::new(processors) })
}

/// The attachment whose policy changes.
struct Subject<'a> {
    agent: &'a Agent,
    words: Words,
    id: usize,
    /// The path of a manifest before it is renamed, and after.
    draft: PathBuf,
    place: PathBuf,
}

impl Subject<'_> {
    /// Until the change is in force, and the agent's processor time.
    fn change(&self, pod: u16, port: u16) -> anyhow::Result<(Duration, Duration)> {
        let policy = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": NAMESPACE, "name": "measured",
                "annotations": {"k8s.v1.cni.cncf.io/policy-for": "kube-system/default"},
            },
            "spec": {
                "podSelector": {"matchLabels": {"number": pod.to_string()}},
                "policyTypes": ["Ingress"],
                "ingress": [{
                    "from": [{"ipBlock": {"cidr": "10.110.0.0/16"}}],
                    "ports": [{"protocol": "TCP", "port": port}],
                }],
            },
        });
        // JSON is YAML.
        fs::write(&self.draft, format!("{policy}\n")).context("write a manifest")?;
        let (before, used) = (self.words.get(self.id), self.agent.processor_time()?);
        let began = Instant::now();
        fs::rename(&self.draft, &self.place).context("put a manifest into its place")?;
        self.words.wait(self.id, IN_FORCE, |word| word != before)?;
        let time = began.elapsed();
        thread::sleep(PAUSE);
        Ok((time, self.agent.processor_time()?.saturating_sub(used)))
    }
}
