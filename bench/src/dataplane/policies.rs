//! The time from a changed policy's manifest to the kernel: by the size of the policy, and by the number of affected
//! attachments.
//!
//! The manifest is renamed into its place; the end is when the word with an attachment's policies, which the programs
//! read, has changed for every attachment. The agent reports the steps in between afterwards.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use xtask::progress::{self, Done};

use crate::Series;
use crate::agent::{self, Agent, NAMESPACE};
use crate::bpf::Words;
use crate::pods::{Node, make_directory};

/// Sizes of the policies that are loaded for one attachment.
const SIZES: [u32; 4] = [10, 1_000, 10_000, 100_000];
/// Numbers of attachments affected by a small policy.
const AFFECTED: [u16; 3] = [1, 100, 1_000];
/// Peers of the small policy.
const SMALL: u32 = 10;
/// Time limit for a policy to be in force.
const PATIENCE: Duration = Duration::from_secs(60);
/// Polling interval of the kernel's map.
const TICK: Duration = Duration::from_micros(100);
/// The agent's cache of files is used only when they have not changed for a while.
const SETTLING: Duration = Duration::from_secs(4);

/// The part of a policy that grows with its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Shape {
    /// One rule with that many peers.
    Peers,
    /// That many rules, each with one peer and one port.
    Rules,
}

/// One kind of change.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) shape: Shape,
    /// Peers or rules.
    pub(super) size: u32,
    /// Attachments whose policy changes.
    pub(super) attachments: u16,
    /// Milliseconds from the new manifest to the kernel.
    pub(super) total: Series,
    /// Milliseconds of each step, as the agent reports.
    pub(super) read: Series,
    pub(super) compile: Series,
    pub(super) write: Series,
    pub(super) switch: Series,
}

#[derive(Default)]
struct Samples {
    total: Vec<f64>,
    read: Vec<f64>,
    compile: Vec<f64>,
    write: Vec<f64>,
    switch: Vec<f64>,
}

/// Measures every change that many times.
pub(super) fn measure(rounds: u16) -> anyhow::Result<Vec<Figures>> {
    let node = Node::enter()?;
    let mut bench = None;
    progress::step("attachments", |progress| {
        progress.note(&format!("{} pods", AFFECTED[AFFECTED.len() - 1]));
        bench = Some(Bench::prepare(&node)?);
        Ok(Done::Unchanged(format!("{}, by veth", AFFECTED[AFFECTED.len() - 1])))
    })?;
    let bench = bench.context("nothing was prepared")?;
    let mut figures = Vec::new();
    progress::step("policies", |progress| {
        for shape in [Shape::Peers, Shape::Rules] {
            for size in SIZES {
                progress.note(&format!("of size {size}"));
                figures.push(bench.changes(shape, size, AFFECTED[0], rounds)?);
            }
        }
        for affected in &AFFECTED[1..] {
            progress.note(&format!("of {affected} attachments"));
            figures.push(bench.changes(Shape::Peers, SMALL, *affected, rounds)?);
        }
        Ok(Done::Unchanged(format!("{rounds} changes of each kind")))
    })?;
    Ok(figures)
}

/// An agent with attachments, selected in different numbers by the policies' labels.
struct Bench {
    agent: Agent,
    words: Words,
    /// Numbers of the attachments, in the order of the pods.
    ids: Vec<usize>,
    /// The path of a manifest before it is renamed.
    draft: PathBuf,
}

impl Bench {
    fn prepare(node: &Node) -> anyhow::Result<Self> {
        let count = AFFECTED[AFFECTED.len() - 1];
        let pods = node.pods(count)?;
        let leases = make_directory(&node.scratch().join("leases"))?;
        let ipam =
            json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": "10.110.0.0/16"}]]});
        let network = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam});
        let mut objects: Vec<Value> = agent::namespaces().into();
        objects.push(agent::network("kube-system", "default", &network));
        for pod in &pods {
            let mut object = agent::pod(pod, "");
            for affected in AFFECTED.iter().filter(|affected| pod.number < **affected) {
                object["metadata"]["labels"][group(*affected)] = json!("yes");
            }
            objects.push(object);
        }
        let agent = Agent::start(node, &objects)?;
        agent.attach_all(&pods)?;
        let ids = ids(&agent, &pods.iter().map(agent::pod_name).collect::<Vec<_>>())?;
        let highest = ids.iter().max().map_or(0, |highest| *highest);
        let words = Words::open(&agent.pin("na_policy")?, highest + 1)?;
        thread::sleep(SETTLING);
        Ok(Self { agent, words, ids, draft: node.scratch().join("draft") })
    }

    fn changes(&self, shape: Shape, size: u32, affected: u16, rounds: u16) -> anyhow::Result<Figures> {
        let manifest = self.agent.source().join("measured.yaml");
        let mut samples = Samples::default();
        // The first change, which isolates, does not count.
        for round in 0..=rounds {
            let text = policy(shape, size, affected, 20_000 + round);
            self.change(&text, &manifest, affected, (round > 0).then_some(&mut samples))
                .with_context(|| format!("change a policy of size {size}"))?;
        }
        fs::remove_file(&manifest).context("remove the policy")?;
        self.wait(affected, |_, word| word == 0)?;
        let Samples { total, read, compile, write, switch } = samples;
        let [total, read, compile, write, switch] = [total, read, compile, write, switch].map(Series::new);
        Ok(Figures { shape, size, attachments: affected, total, read, compile, write, switch })
    }

    fn change(
        &self,
        text: &str,
        manifest: &PathBuf,
        affected: u16,
        samples: Option<&mut Samples>,
    ) -> anyhow::Result<()> {
        let before: Vec<u64> = self.ids.iter().map(|id| self.words.get(*id)).collect();
        fs::write(&self.draft, text).context("write a manifest")?;
        let began = Instant::now();
        fs::rename(&self.draft, manifest).context("put a manifest into its place")?;
        self.wait(affected, |pod, word| word != before[pod])?;
        let total = began.elapsed();
        let Some(samples) = samples else {
            // Waits until the replaced policy is removed, which is not part of the change.
            thread::sleep(Duration::from_millis(500));
            return Ok(());
        };
        // The report covers this change as soon as the agent is done with it.
        let change = &self.agent.ask(&["status"])?["policy_change"];
        let told =
            |name: &str| change[name].as_f64().map(|us| us / 1000.0).with_context(|| format!("no {name}"));
        ensure!(change["attachments"] == affected, "another change came between: {change}");
        samples.total.push(total.as_secs_f64() * 1000.0);
        samples.read.push(told("read_us")?);
        samples.compile.push(told("compile_us")?);
        samples.write.push(told("write_us")?);
        samples.switch.push(told("switch_us")?);
        thread::sleep(Duration::from_millis(500));
        Ok(())
    }

    /// Waits until the words of all affected attachments satisfy `is_done`, which gets the number of the pod.
    fn wait(&self, affected: u16, is_done: impl Fn(usize, u64) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        for (pod, id) in self.ids.iter().take(affected.into()).enumerate() {
            while !is_done(pod, self.words.get(*id)) {
                ensure!(
                    Instant::now() < deadline,
                    "attachment {id} is not under the policy after {PATIENCE:?}"
                );
                thread::sleep(TICK);
            }
        }
        Ok(())
    }
}

/// The label that selects that many.
fn group(affected: u16) -> String {
    format!("among-{affected}")
}

/// The numbers of these pods' attachments.
fn ids(agent: &Agent, names: &[String]) -> anyhow::Result<Vec<usize>> {
    let attachments = agent.ask(&["attachments"])?;
    let rows = attachments.as_array().context("netattachctl shows no list")?;
    let id = |name: &String| {
        let row = rows.iter().find(|row| row["pod"]["name"] == **name);
        let id = row.and_then(|row| row["id"].as_u64());
        id.and_then(|id| usize::try_from(id).ok()).with_context(|| format!("{name} is not attached"))
    };
    names.iter().map(id).collect()
}

/// A manifest as programs write it, block by block.
fn policy(shape: Shape, size: u32, affected: u16, port: u16) -> String {
    let mut text = format!(
        "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata:\n  name: measured\n  namespace: {NAMESPACE}\n  \
         annotations:\n    k8s.v1.cni.cncf.io/policy-for: kube-system/default\nspec:\n  podSelector:\n    matchLabels:\n      \
         {}: \"yes\"\n  policyTypes:\n  - Ingress\n  ingress:\n",
        group(affected)
    );
    let ports = format!("    ports:\n    - protocol: TCP\n      port: {port}\n");
    let from = |text: &mut String| text.push_str("  - from:\n");
    if shape == Shape::Peers {
        from(&mut text);
    }
    for peer in super::paths::strangers(size) {
        if shape == Shape::Rules {
            from(&mut text);
        }
        let _ = write!(text, "    - ipBlock:\n        cidr: {peer}/32\n");
        if shape == Shape::Rules {
            text.push_str(&ports);
        }
    }
    if shape == Shape::Peers {
        text.push_str(&ports);
    }
    text
}
