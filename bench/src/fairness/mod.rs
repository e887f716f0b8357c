//! `cargo xtask bench fairness`: the time of a pod's ADD while unrelated ADDs hang, compared with its time alone.
//!
//! `holders` are the pods that hang.

mod holders;

use std::num::NonZeroU16;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use self::holders::{Holders, Plugin};
use super::agent::{self, Agent};
use super::pods::{Node, Pod, make_directory};
use super::{Form, Origin, Series, document, end, measured};

/// Pods whose ADD hangs.
const HOLDERS: u16 = 40;
/// Networks whose plugin hangs.
const NETWORKS: u16 = 10;
/// The network whose pool is locked.
const LOCKED: &str = "locked";

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Pods attached one after another in each situation
    #[arg(long, default_value = "50")]
    pub rounds: NonZeroU16,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

/// The hanging pods during the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Beside {
    Nothing,
    /// Every pod of one network hangs in its plugin.
    Plugin,
    /// Every pod of several networks hangs in their plugins.
    Plugins,
    /// Every pod of one network waits for its pool, which another process has locked.
    Pool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rounds: u16,
    situations: Vec<Figures>,
}

#[derive(Serialize)]
struct Figures {
    beside: Beside,
    /// Milliseconds of one ADD, and of one DEL.
    add: Series,
    del: Series,
}

/// Measures every situation.
///
/// # Errors
/// Not root, a tool is missing, or an unrelated pod is not attached.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.form.output, setup::Scope::Usual, dist::build, || measure(options))?;
    end("fairness", options.form, &report.origin, &report, &table(&report))
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let rounds = options.rounds.get();
    let node = Node::enter()?;
    let pods = node.pods(1 + HOLDERS * 3)?;
    let leases = make_directory(&node.scratch().join("leases"))?;
    let plugin = Plugin::new(node.scratch())?;
    let agent = Agent::start(&node, &objects(&pods, &leases))?;
    plugin.install(agent.plugins(), NETWORKS)?;
    let [one, several, pool] = [0, 1, 2].map(|part| {
        let first = 1 + usize::from(part * HOLDERS);
        &pods[first..first + usize::from(HOLDERS)]
    });
    let mut situations = Vec::new();
    // The first ADD of all is slower, as it warms up for the later ones.
    times(&agent, &pods[0], 3)?;
    for beside in [Beside::Nothing, Beside::Plugin, Beside::Plugins, Beside::Pool] {
        progress::step(beside.name(), |progress| {
            progress.note("holding");
            let holders = match beside {
                Beside::Nothing => None,
                Beside::Plugin => Some(Holders::at_plugin(&agent, one, &plugin)?),
                Beside::Plugins => Some(Holders::at_plugin(&agent, several, &plugin)?),
                Beside::Pool => Some(Holders::at_pool(&agent, pool, &leases.join(LOCKED))?),
            };
            progress.note("measuring");
            let timed = times(&agent, &pods[0], rounds);
            let held = holders.map_or(Ok(()), Holders::end);
            let (add, del) = timed?;
            held?;
            situations.push(Figures { beside, add, del });
            Ok(Done::Unchanged(format!("{rounds} pods")))
        })?;
    }
    let origin = Origin::of(format!("cargo xtask bench fairness --rounds {rounds}"));
    Ok(Report { origin, rounds, situations })
}

/// Returns milliseconds of ADDs and DELs of a pod, alternately.
fn times(agent: &Agent, pod: &Pod, rounds: u16) -> anyhow::Result<(Series, Series)> {
    let (mut adds, mut dels) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let container = pod.new_container();
        for (verb, times) in [("ADD", &mut adds), ("DEL", &mut dels)] {
            let began = Instant::now();
            agent.call(verb, pod, &container)?;
            times.push(began.elapsed().as_secs_f64() * 1000.0);
        }
    }
    Ok((Series::new(adds), Series::new(dels)))
}

/// Returns the default network with its own pool, networks whose plugin hangs, one whose pool will be locked, and
/// pods: the first has only the default network, then follow those of the first plugin, of all plugins, and of the
/// pool.
fn objects(pods: &[Pod], leases: &Path) -> Vec<Value> {
    let network = |name: &str, subnet: &str| {
        let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]});
        json!({"cniVersion": "1.0.0", "name": name, "type": "veth", "ipam": ipam})
    };
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &network("default", "10.110.0.0/16")));
    objects.push(agent::network(agent::NAMESPACE, LOCKED, &network(LOCKED, "10.111.0.0/16")));
    for number in 0..NETWORKS {
        let name = Plugin::name(number);
        let config = json!({"cniVersion": "1.0.0", "name": name, "type": name});
        objects.push(agent::network(agent::NAMESPACE, &name, &config));
    }
    objects.extend(pods.iter().map(|pod| {
        let networks = match (pod.number.saturating_sub(1)) / HOLDERS {
            _ if pod.number == 0 => String::new(),
            0 => Plugin::name(0),
            1 => Plugin::name(pod.number % NETWORKS),
            _ => LOCKED.to_owned(),
        };
        agent::pod(pod, &networks)
    }));
    objects
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "alone",
            Self::Plugin => "one plugin hangs",
            Self::Plugins => "ten plugins hang",
            Self::Pool => "a pool is locked",
        }
    }
}

fn table(report: &Report) -> String {
    let [alone, ..] = report.situations.as_slice() else { return String::new() };
    let row = |figures: &Figures| {
        let ratio = |series: &Series, alone: &Series| format!("{:.2}", series.median / alone.median);
        vec![
            figures.beside.name().to_owned(),
            format!("{:.2}", figures.add.median),
            format!("{:.2}", figures.add.maximum),
            ratio(&figures.add, &alone.add),
            format!("{:.2}", figures.del.median),
            format!("{:.2}", figures.del.maximum),
            ratio(&figures.del, &alone.del),
        ]
    };
    let rows: Vec<Vec<String>> = report.situations.iter().map(row).collect();
    let header = ["meanwhile", "ADD", "most", "ratio", "DEL", "most", "ratio"];
    format!(
        "{}\nMilliseconds, medians of {} pods with a network of their own, attached and detached one after another while the ADDs of {} \
         others hang, as many at a time as the agent lets; ratios to the pod's time alone. {}.\n",
        document::aligned(&header, &rows),
        report.rounds,
        HOLDERS,
        report.origin
    )
}
