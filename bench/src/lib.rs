//! `cargo xtask bench`: netattach compared with its alternatives, in network namespaces made for the run.
//!
//! The contenders take turns within one run, so that other load on the machine affects all alike.
//!
//! The benchmarks: `attach` with `kinds-vm`, `locks` and `sriov`, `cluster`, `dataplane`, `fairness`, `ports`, `restart`,
//! `scale`. Shared: `pods` and the node's namespace, `agent`, `netlink` for the floor, `bpf` for the kernel's state, `processor`
//! time, `series` of samples, `limit`s, `document` for tables.

mod agent;
pub mod attach;
mod bpf;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod dataplane;
mod document;
pub mod fairness;
mod limit;
mod netlink;
mod pods;
pub mod ports;
#[cfg(feature = "cluster")]
mod processor;
pub mod restart;
pub mod scale;
mod series;

use std::env;
use std::fmt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::Serialize;
use xtask::{progress, setup, tree};

use self::series::Series;

/// Executables in this variable's directory are measured unchanged, to compare two versions; otherwise they are
/// built.
const DIST_VARIABLE: &str = "NETATTACH_DIST";

/// The directory of the measured executables.
fn dist() -> PathBuf {
    env::var_os(DIST_VARIABLE).map_or_else(tree::dist, PathBuf::from)
}

/// Returns the directory of the reference plugins: the one that a virtual machine's programs get, or that of setup.
fn reference_plugins() -> PathBuf {
    env::var_os("NETATTACH_REFERENCE_PLUGINS").map_or_else(setup::reference_plugins, PathBuf::from)
}

/// Returns a time limit multiplied by the slowness of this machine, which a virtual machine's programs get.
fn stretched(time: Duration) -> Duration {
    let factor = env::var("NETATTACH_TEST_SLOWNESS").ok().and_then(|factor| factor.parse::<u32>().ok());
    time.saturating_mul(factor.unwrap_or(1))
}

/// The machine and the conditions of a measurement.
#[derive(Serialize)]
struct Origin {
    /// Command line that repeats the run.
    command: String,
    /// Release of the kernel it ran on.
    kernel: String,
    /// Processors that were available.
    processors: usize,
}

impl Origin {
    fn of(command: String) -> Self {
        Self {
            command,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            processors: thread::available_parallelism().map_or(1, Into::into),
        }
    }
}

/// `Linux 6.18, 2 processors`.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Linux {}, {} processors", self.kernel, self.processors)
    }
}

/// How the result is printed.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// A table.
    Table,
    /// Every sample, for a program.
    Json,
}

/// Where a result goes: arguments of every bench.
#[derive(Clone, Copy, clap::Args)]
pub struct Form {
    /// Form of the result
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: Output,
    /// Also put the tables into docs/performance.md
    #[arg(long)]
    pub write: bool,
}

/// Prepares the machine, then measures on a thread that leaves the machine's namespace for good: the thread and all
/// its children live on the bench's node.
fn measured<T: Send>(
    output: Output,
    scope: setup::Scope,
    build: impl FnOnce() -> anyhow::Result<()>,
    measure: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    if !xtask::child::is_root() {
        bail!(progress::UserError::new("attaching takes root", "run the benchmark as root"));
    }
    if output == Output::Json {
        progress::silence();
    }
    setup::run(scope)?;
    if env::var_os(DIST_VARIABLE).is_none() {
        build()?;
    }
    progress::heading("bench");
    thread::scope(|scope| {
        scope.spawn(measure).join().map_err(|_| anyhow!("the measuring thread panicked"))?
    })
}

/// Ends a bench with one table: prints it, and replaces that of the bench in docs/performance.md if requested.
fn end(bench: &str, form: Form, origin: &Origin, report: &impl Serialize, table: &str) -> anyhow::Result<()> {
    print(form.output, report, table)?;
    if form.write { document::update(bench, &origin.command, table) } else { Ok(()) }
}

/// Prints a report: as this table, or every sample of it.
fn print(output: Output, report: &impl Serialize, table: &str) -> anyhow::Result<()> {
    match output {
        Output::Table => progress::line(&format!("\n{table}")),
        Output::Json => {
            progress::line(&serde_json::to_string_pretty(report).context("write the figures as JSON")?);
        }
    }
    Ok(())
}
