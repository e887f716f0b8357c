//! `cargo xtask bench ports`: the time of a pod's ADD and DEL with a port of the node and without, on an empty node and
//! beside many pods that have ports.

use std::num::NonZeroU16;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use super::agent::{self, Agent};
use super::pods::{Node, Pod, make_directory};
use super::{Form, Origin, Series, document, end, measured};

/// Numbers of standing pods, each with ports for TCP and for UDP.
const STANDING: [u16; 2] = [0, 300];
/// Number of alternations between the kinds.
const TURNS: u16 = 5;
/// First of the node's ports of the standing pods; the measured pod has the one before.
const FIRST: u16 = 10_000;

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Pods of each kind attached one after another beside each number of others
    #[arg(long, default_value = "50")]
    pub rounds: NonZeroU16,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

/// The kinds of the measured pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    NoPort,
    Tcp,
    Udp,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rounds: u16,
    figures: Vec<Figures>,
}

#[derive(Serialize)]
struct Figures {
    standing: u16,
    kind: Kind,
    /// Milliseconds of one ADD, and of one DEL.
    add: Series,
    del: Series,
    /// Milliseconds of the agent's processor time for an ADD and a DEL, in each turn.
    processors: Series,
}

/// Measures every kind beside every number of others.
///
/// # Errors
/// Not root, a tool is missing, or a pod is not attached.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.form.output, setup::Scope::Usual, dist::build, || measure(options))?;
    end("ports", options.form, &report.origin, &report, &table(&report))
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let rounds = options.rounds.get();
    let node = Node::enter()?;
    let [.., most] = STANDING;
    let pods = node.pods(1 + most)?;
    let leases = make_directory(&node.scratch().join("leases"))?;
    let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": "10.110.0.0/16"}]]});
    let network = json!({
        "cniVersion": "1.0.0", "type": "bridge", "bridge": "ports0", "isDefaultGateway": true, "ipMasq": true,
        "capabilities": {"portMappings": true}, "ipam": ipam
    });
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &network));
    objects.extend(pods.iter().map(|pod| agent::pod(pod, "")));
    let agent = Agent::start(&node, &objects)?;
    let [measured, others @ ..] = pods.as_slice() else { return Err(anyhow::anyhow!("there are no pods")) };
    let (mut figures, mut standing) = (Vec::new(), 0);
    for count in STANDING {
        progress::step(&format!("beside {count} pods"), |progress| {
            progress.note("attaching");
            for pod in &others[standing..usize::from(count)] {
                let ports = json!([mapping(FIRST + pod.number, "tcp"), mapping(FIRST + pod.number, "udp")]);
                agent
                    .caller_with(pod, &json!({ "portMappings": ports }))
                    .call("ADD", &pod.new_container())?;
            }
            standing = usize::from(count);
            progress.note("measuring");
            figures.extend(beside(&agent, measured, count, rounds)?);
            Ok(Done::Unchanged(format!("{rounds} pods of each kind")))
        })?;
    }
    let origin = Origin::of(format!("cargo xtask bench ports --rounds {rounds}"));
    Ok(Report { origin, rounds, figures })
}

fn mapping(port: u16, protocol: &str) -> Value {
    json!({"hostPort": port, "containerPort": 80, "protocol": protocol})
}

/// Measures every kind alternately.
fn beside(agent: &Agent, pod: &Pod, standing: u16, rounds: u16) -> anyhow::Result<Vec<Figures>> {
    const KINDS: [Kind; 3] = [Kind::NoPort, Kind::Tcp, Kind::Udp];
    // The first ADD of all is slower, as it warms up for the later ones.
    let mut samples = KINDS.map(|_| <[Vec<f64>; 3]>::default());
    for kind in KINDS {
        times(agent, pod, kind, 3, &mut Default::default())?;
    }
    for _ in 0..TURNS {
        for (kind, samples) in KINDS.into_iter().zip(&mut samples) {
            times(agent, pod, kind, rounds.div_ceil(TURNS), samples)?;
        }
    }
    let figures = KINDS.into_iter().zip(samples).map(|(kind, samples)| {
        let [add, del, processors] = samples.map(Series::new);
        Figures { standing, kind, add, del, processors }
    });
    Ok(figures.collect())
}

/// Milliseconds of ADDs, of DELs, and of the agent's processor time for both.
fn times(
    agent: &Agent,
    pod: &Pod,
    kind: Kind,
    rounds: u16,
    [adds, dels, processors]: &mut [Vec<f64>; 3],
) -> anyhow::Result<()> {
    let caller = match kind {
        Kind::NoPort => agent.caller(pod),
        Kind::Tcp => agent.caller_with(pod, &json!({"portMappings": [mapping(FIRST - 1, "tcp")]})),
        Kind::Udp => agent.caller_with(pod, &json!({"portMappings": [mapping(FIRST - 1, "udp")]})),
    };
    let before = agent.processor_time()?;
    for _ in 0..rounds {
        let container = pod.new_container();
        for (verb, times) in [("ADD", &mut *adds), ("DEL", &mut *dels)] {
            let began = Instant::now();
            caller.call(verb, &container)?;
            times.push(began.elapsed().as_secs_f64() * 1000.0);
        }
    }
    let used = agent.processor_time()?.saturating_sub(before);
    processors.push(used.as_secs_f64() * 1000.0 / f64::from(rounds));
    Ok(())
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::NoPort => "none",
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

fn table(report: &Report) -> String {
    let row = |figures: &Figures| {
        let is_alone = |it: &&Figures| it.standing == figures.standing && it.kind == Kind::NoPort;
        let without = report.figures.iter().find(is_alone);
        let empty = report.figures.iter().find(|it| it.kind == figures.kind);
        let ratio = |other: Option<&Figures>| {
            other.map_or_else(String::new, |other| format!("{:.2}", figures.add.median / other.add.median))
        };
        vec![
            figures.standing.to_string(),
            figures.kind.name().to_owned(),
            format!("{:.2}", figures.add.median),
            ratio(without),
            ratio(empty),
            format!("{:.2}", figures.del.median),
            format!("{:.2}", figures.processors.median),
        ]
    };
    let rows: Vec<Vec<String>> = report.figures.iter().map(row).collect();
    let header = ["standing pods", "port", "ADD", "to none", "to an empty node", "DEL", "processor"];
    format!(
        "{}\nMilliseconds, medians of {} pods of a masqueraded bridge, attached and detached one after another; the standing pods have a \
         port for TCP and one for UDP each. Ratios of the ADD to that of a pod without a port beside as many pods, and to the same \
         on an empty node; processor time of the agent for one ADD and DEL. {}.\n",
        document::aligned(&header, &rows),
        report.rounds,
        report.origin
    )
}
