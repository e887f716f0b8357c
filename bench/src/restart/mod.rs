//! `cargo xtask bench restart`: the time until a restarted agent serves, by the number of attachments that it takes
//! over, while a flow between two of them continues.
//!
//! The agent is killed each time, so its state is that after a crash. Then it is replaced by one that stands by, as
//! at an upgrade, while pods are created.
//!
//! `flow` is the traffic that must not be affected; `change` the pods that may wait, but not long.

mod change;
mod flow;

use std::fs;
use std::num::NonZeroU16;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use self::change::Changes;
use self::flow::Flow;
use super::agent::{self, Agent};
use super::limit::{self, Limit};
use super::pods::{Node, make_directory};
use super::{Form, Origin, Series, document, end, measured};

/// Numbers of attachments that are taken over.
const SIZES: [u16; 3] = [10, 200, 1_000];
/// Scrapes after each restart.
const SCRAPES: usize = 5;
/// How long the flow continues after each restart.
const REST: Duration = Duration::from_millis(500);

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Restarts of each kind with each number of attachments
    #[arg(long, default_value = "5")]
    pub rounds: NonZeroU16,
    /// Fail if a limit is missed
    #[arg(long)]
    pub check: bool,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

/// The programs that the agent finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Programs {
    /// Its own, pinned and attached.
    Same,
    /// The programs of another agent: the agent loads its own and replaces them on every device.
    Others,
}

impl Programs {
    fn name(self) -> &'static str {
        match self {
            Self::Same => "as they are",
            Self::Others => "exchanged",
        }
    }

    /// Prepares such programs for the next agent.
    fn prepare(self, agent: &Agent) -> anyhow::Result<()> {
        match self {
            Self::Same => Ok(()),
            // An incomplete set of pins is loaded again.
            Self::Others => fs::remove_file(agent.pin("prog/na_from_pod")?).context("remove a pin"),
        }
    }
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rounds: u16,
    restarts: Vec<Figures>,
    changes: Vec<Changes>,
    limits: Vec<Limit>,
}

/// Restarts of one kind.
#[derive(Serialize)]
struct Figures {
    attachments: u16,
    programs: Programs,
    /// Milliseconds from its start to its first answer.
    ready: Series,
    /// Processor time until then, in milliseconds.
    processors: Series,
    /// Resident memory then, in KiB.
    resident: Series,
    /// Milliseconds of a scrape of its metrics, from the connection to the last byte.
    scrape: Series,
    /// Datagrams of the flow that were sent and that did not arrive, over all rounds.
    sent: u64,
    lost: u64,
}

/// Measures every kind of restart.
///
/// # Errors
/// Not root, a tool is missing, an attachment is gone after a restart, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.form.output, setup::Scope::Usual, dist::build, || measure(options))?;
    end("restart", options.form, &report.origin, &report, &table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let rounds = options.rounds.get();
    let node = Node::enter()?;
    let [.., most] = SIZES;
    let mut pods = node.pods(most + change::PODS)?;
    let coming = pods.split_off(usize::from(most));
    let leases = make_directory(&node.scratch().join("leases"))?;
    let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": "10.110.0.0/16"}]]});
    let network = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam});
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &network));
    objects.extend(pods.iter().chain(&coming).map(|pod| agent::pod(pod, "")));
    objects.push(policy());
    let mut agent = Agent::start(&node, &objects)?;
    let (mut restarts, mut changes) = (Vec::new(), Vec::new());
    let mut attached = 0;
    for size in SIZES {
        progress::step(&format!("{size} attachments"), |progress| {
            progress.note("attaching");
            agent.attach_all(&pods[attached..usize::from(size)])?;
            attached = usize::from(size);
            for programs in [Programs::Same, Programs::Others] {
                let address = agent.address_of(&pods[1], "eth0")?;
                let flow = Flow::start(&pods[0], &pods[1], address)?;
                progress.note("restarts");
                restarts.push(restarted(&mut agent, flow, size, programs, rounds)?);
                progress.note("changes");
                changes.push(change::measure(&mut agent, &coming, size, programs, rounds)?);
            }
            Ok(Done::Unchanged(format!("{rounds} restarts and changes of each kind")))
        })?;
    }
    let origin = Origin::of(format!("cargo xtask bench restart --rounds {rounds}"));
    let limits = changes.iter().map(Changes::limit).collect();
    Ok(Report { origin, rounds, restarts, changes, limits })
}

fn restarted(
    agent: &mut Agent,
    flow: Flow,
    attachments: u16,
    programs: Programs,
    rounds: u16,
) -> anyhow::Result<Figures> {
    let [mut ready, mut processors, mut resident, mut scrape] = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        programs.prepare(agent)?;
        ready.push(agent.restart()?.as_secs_f64() * 1000.0);
        processors.push(agent.processor_time()?.as_secs_f64() * 1000.0);
        resident.push(agent.resident_kib().context("the agent has no memory")? as f64);
        agent.has_attachments(attachments)?;
        for _ in 0..SCRAPES {
            scrape.push(agent.scrape()?.as_secs_f64() * 1000.0);
        }
        // The agent's work after it is ready may affect the flow too.
        thread::sleep(REST);
    }
    let counted = flow.end()?;
    let [ready, processors, resident, scrape] = [ready, processors, resident, scrape].map(Series::new);
    let (sent, lost) = (counted.sent, counted.sent.saturating_sub(counted.received));
    Ok(Figures { attachments, programs, ready, processors, resident, scrape, sent, lost })
}

/// A policy that selects every attachment, and that allows the flow.
fn policy() -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": agent::NAMESPACE, "name": "all",
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": "kube-system/default"},
        },
        "spec": {
            "podSelector": {}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"ipBlock": {"cidr": "10.110.0.0/16"}}], "ports": [{"protocol": "UDP"}]}],
        },
    })
}

fn table(report: &Report) -> String {
    let header = [
        "attachments",
        "programs",
        "ready after",
        "range",
        "processors",
        "MiB",
        "scrape",
        "datagrams",
        "lost",
    ];
    let row = |figures: &Figures| {
        vec![
            figures.attachments.to_string(),
            figures.programs.name().to_owned(),
            format!("{:.0}", figures.ready.median),
            format!("{:.0}-{:.0}", figures.ready.minimum, figures.ready.maximum),
            format!("{:.0}", figures.processors.median),
            format!("{:.1}", figures.resident.median / 1024.0),
            format!("{:.1}", figures.scrape.median),
            figures.sent.to_string(),
            figures.lost.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = report.restarts.iter().map(row).collect();
    let header_of_changes =
        ["attachments", "programs", "longest ADD", "with the next agent", "longer", "ADDs"];
    let row_of_changes = |changes: &Changes| {
        vec![
            changes.attachments.to_string(),
            changes.programs.name().to_owned(),
            format!("{:.0}", changes.without.maximum),
            format!("{:.0}", changes.with.maximum),
            format!("{:.0}", changes.delay()),
            changes.adds.to_string(),
        ]
    };
    let rows_of_changes: Vec<Vec<String>> = report.changes.iter().map(row_of_changes).collect();
    format!(
        "{}\nMilliseconds from the start of the agent to its first answer, and of processors until then; medians of {} restarts \
         after `kill -9`; of a scrape of its metrics then, from the connection to the last byte. Each attachment is one pod on a routed network, under a policy; the directory of manifests has one for \
         each of {} pods. Programs are exchanged when the agent brings others than those that it finds: it loads them and puts them in \
         place on every device before it answers. Datagrams are those of a flow between two of the pods that goes on all the time.\n\n{}\nMilliseconds of the longest ADD of {} pods that come and go at once, with one agent all the time and while the next one, \
         which stands by, takes its place as at an upgrade; of {} rounds each.\n\n{}\n{}.\n",
        document::aligned(&header, &rows),
        report.rounds,
        SIZES[SIZES.len() - 1] + change::PODS,
        document::aligned(&header_of_changes, &rows_of_changes),
        change::PODS,
        report.rounds,
        limit::table(&report.limits),
        report.origin
    )
}
