//! `cargo xtask <verb>`: see the library for what each verb does.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use xtask::{bench, conformance, demo, dist, ebpf, fuzz, screen, setup, suite, tidy, vm};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, test and measure netattach")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Install what this machine lacks; changes nothing when nothing is missing
    Setup,
    /// Build the BPF object into target/bpf
    BuildEbpf,
    /// Build the BPF object and the static executables into target/dist
    Build,
    /// Check formatting, lints, the invariants of the source tree, documents, conformance and licences
    Tidy {
        /// Check these parts only
        #[arg(long, value_enum, value_delimiter = ',')]
        only: Vec<tidy::Part>,
        /// A copy of an advisory database in RustSec's format
        #[arg(long, value_name = "DIR")]
        advisories: Option<PathBuf>,
    },
    /// Write docs/conformance.md from the rows of the standards and the tests that name them
    Conformance {
        /// List the rows that nothing proves, and write nothing
        #[arg(long)]
        open: bool,
    },
    /// Set up, build and run every test; needs root or sudo
    Test {
        /// Also fuzz for a minute; the environment variable CI=true means the same
        #[arg(long)]
        ci: bool,
    },
    /// Set up, build and run selections of the tests in virtual machines: under Debian 12's Linux 6.1, and on VFs
    Vm {
        /// Run this machine only, by the Debian suite of its kernel: bookworm or trixie
        #[arg(long, value_name = "SUITE")]
        guest: Option<String>,
        /// Run this test executable only, with all of its tests
        #[arg(long, value_name = "NAME")]
        test: Option<String>,
        /// Test the static executables of this directory instead of building them
        #[arg(long, value_name = "DIR")]
        dist: Option<PathBuf>,
        /// With --test: run the tests with this in their names only
        #[arg(requires = "test")]
        filters: Vec<String>,
    },
    /// Set up, build and watch three pods get their networks and a policy; needs root
    Demo,
    /// Measure netattach beside its alternatives
    Bench {
        #[command(subcommand)]
        subject: Subject,
    },
    /// Run the fuzz targets, all or those of these names
    Fuzz {
        /// Time for all targets together
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
        /// Ten minutes for each target, as many at a time as there are processors; adds what is worth keeping to fuzz/corpus
        #[arg(long, conflicts_with = "seconds")]
        long: bool,
        targets: Vec<String>,
    },
}

#[derive(Subcommand)]
enum Subject {
    /// ADD and DEL of a pod with a bridge and two macvlans
    Attach(AttachArguments),
    /// Traffic between two pods by path and by size of the policy, changes of policies, nanoseconds of a packet
    Dataplane(DataplaneArguments),
    /// Restart of an agent with many attachments
    Restart(RestartArguments),
    /// ADD of a pod while others hang that have nothing to do with it
    Fairness(FairnessArguments),
}

#[derive(Args)]
struct AttachArguments {
    /// Pods attached one after another by each contender
    #[arg(long, default_value = "50")]
    rounds: NonZeroU16,
    /// Bursts of pods attached at once by each contender
    #[arg(long, default_value_t = 5)]
    bursts: u16,
    /// Pods in a burst
    #[arg(long, default_value = "20")]
    burst_size: NonZeroU16,
    /// Form of the result
    #[arg(short, long, value_enum, default_value = "table")]
    output: bench::Output,
    /// Also put the table into docs/performance.md
    #[arg(long)]
    write: bool,
    /// Leave a contender out, by the name it has in the table; may be repeated
    #[arg(long, value_name = "CONTENDER")]
    without: Vec<String>,
}

#[derive(Args)]
struct DataplaneArguments {
    /// How often each path gets its turn
    #[arg(long, default_value = "7")]
    rounds: NonZeroU16,
    /// Length of one sample in milliseconds
    #[arg(long, default_value = "500")]
    sample: NonZeroU16,
    /// Form of the result
    #[arg(short, long, value_enum, default_value = "table")]
    output: bench::Output,
    /// Also put the tables into docs/performance.md
    #[arg(long)]
    write: bool,
    /// Measure only this; may be repeated
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<bench::dataplane::Part>,
}

#[derive(Args)]
struct RestartArguments {
    /// Restarts of each kind with each number of attachments
    #[arg(long, default_value = "5")]
    rounds: NonZeroU16,
    /// Form of the result
    #[arg(short, long, value_enum, default_value = "table")]
    output: bench::Output,
    /// Also put the table into docs/performance.md
    #[arg(long)]
    write: bool,
}

#[derive(Args)]
struct FairnessArguments {
    /// Pods attached one after another in each situation
    #[arg(long, default_value = "50")]
    rounds: NonZeroU16,
    /// Form of the result
    #[arg(short, long, value_enum, default_value = "table")]
    output: bench::Output,
    /// Also put the table into docs/performance.md
    #[arg(long)]
    write: bool,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Setup => setup::run(setup::Scope::Testing),
        Verb::BuildEbpf => ebpf::build(),
        Verb::Build => dist::build(),
        Verb::Tidy { only, advisories } => tidy::run(&only, advisories.as_deref()),
        Verb::Conformance { open } => conformance::run(open),
        Verb::Test { ci } => suite::run(ci || std::env::var_os("CI").is_some_and(|value| value == "true")),
        Verb::Vm { guest, test, dist, filters } => {
            vm::run(vm::Options { guest, test, filters, executables: dist })
        }
        Verb::Demo => demo::run(),
        Verb::Bench { subject: Subject::Attach(arguments) } => bench::attach::run(&arguments.into()),
        Verb::Bench { subject: Subject::Dataplane(arguments) } => bench::dataplane::run(&arguments.into()),
        Verb::Bench { subject: Subject::Restart(arguments) } => bench::restart::run(&arguments.into()),
        Verb::Bench { subject: Subject::Fairness(arguments) } => bench::fairness::run(&arguments.into()),
        Verb::Fuzz { seconds, long, targets } => {
            let time = if long { fuzz::Time::Each(fuzz::LONG) } else { fuzz::Time::Together(seconds) };
            fuzz::run(&fuzz::Options { targets, time })
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen::failure(&error);
            ExitCode::FAILURE
        }
    }
}

impl From<AttachArguments> for bench::attach::Options {
    fn from(arguments: AttachArguments) -> Self {
        let AttachArguments { rounds, bursts, burst_size, output, write, without } = arguments;
        Self { rounds, bursts, burst_size, output, write, without }
    }
}

impl From<DataplaneArguments> for bench::dataplane::Options {
    fn from(arguments: DataplaneArguments) -> Self {
        let DataplaneArguments { rounds, sample, output, write, only } = arguments;
        Self { only, rounds, sample: Duration::from_millis(sample.get().into()), output, write }
    }
}

impl From<RestartArguments> for bench::restart::Options {
    fn from(arguments: RestartArguments) -> Self {
        let RestartArguments { rounds, output, write } = arguments;
        Self { rounds, output, write }
    }
}

impl From<FairnessArguments> for bench::fairness::Options {
    fn from(arguments: FairnessArguments) -> Self {
        let FairnessArguments { rounds, output, write } = arguments;
        Self { rounds, output, write }
    }
}
