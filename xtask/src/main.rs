//! `cargo xtask <verb>`: see the library for the verbs.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use xtask::ebpf::Flavour;
use xtask::release::Arch;
use xtask::suite::Extent;
use xtask::{
    child, conformance, demo, dist, ebpf, fuzz, nightly, progress, release, setup, soak, suite, tidy, vm,
};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, test and measure netattach")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Install what this machine lacks; changes nothing when nothing is missing
    Setup {
        /// Build the release that landed last instead, from git's history, for the tests of upgrades
        #[arg(long)]
        previous: bool,
    },
    /// Build the BPF object into target/bpf
    BuildEbpf {
        /// Build the one that logs the path of packets instead, for `netattachd --bpf-log`
        #[arg(long)]
        log: bool,
    },
    /// Build the BPF object and the static executables into target/dist
    Build,
    /// Build the container image as an archive in target/image, without a container daemon
    Image {
        /// Architecture; another than this machine's is built, and not tested
        #[arg(long, value_enum)]
        arch: Option<Arch>,
        /// Name of the image [default: localhost/netattach:VERSION]
        #[arg(long, value_name = "REGISTRY/NAME:TAG")]
        name: Option<String>,
        /// Take the static executables of this directory instead of building them
        #[arg(long, value_name = "DIR", conflicts_with = "twice")]
        dist: Option<PathBuf>,
        /// Fail when the image or an executable weighs more than it may
        #[arg(long)]
        check: bool,
        /// Build again from nothing in another directory, and fail unless both archives have the same bytes
        #[arg(long)]
        twice: bool,
    },
    /// Build the image, and an archive of the executables with manual, completions and systemd unit, into target/release-files
    Release {
        /// Architecture; another than this machine's is built, and not tested
        #[arg(long, value_enum)]
        arch: Option<Arch>,
        /// Where the files will be found, for the manifest by which krew installs kubectl netattach
        #[arg(long, default_value = release::NOWHERE)]
        url: String,
    },
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
        /// What every change must pass: tidy too, and no test may skip itself; CI=true means the same
        #[arg(long)]
        ci: bool,
        /// Run the unit tests only: no set-up, no root
        #[arg(long, conflicts_with = "ci")]
        unit: bool,
        /// Run the tests that have a longer form, in that form
        #[arg(long, conflicts_with_all = ["ci", "unit"])]
        longer: bool,
        /// Run the tests of the upgrade from the release that landed last, which is built from git's history
        #[arg(long, conflicts_with_all = ["ci", "unit", "longer"])]
        upgrade: bool,
    },
    /// Set up, build, and have pods come and go at random on two nodes, with failing servers and dying agents
    Soak {
        /// How long, in minutes
        #[arg(long, default_value_t = soak::NIGHTLY, value_parser = clap::value_parser!(u32).range(1..))]
        minutes: u32,
        /// Repeat the decisions of the run that printed this
        #[arg(long)]
        seed: Option<u64>,
        /// Attachments that stay meanwhile: what the agents use is told each minute, and must not grow
        #[arg(long, value_name = "NUMBER", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=3000))]
        attachments: u32,
    },
    /// What takes too long for the gate
    Nightly,
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
    Demo {
        /// Install, use, upgrade and remove netattach on a real cluster of one node, by kubectl
        #[arg(long)]
        cluster: bool,
    },
    /// Measure netattach beside its alternatives
    #[command(disable_help_flag = true)]
    Bench {
        /// As `cargo xtask bench --help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
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

fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Setup { previous: true } => setup::upgrades(),
        Verb::Setup { previous: false } => setup::everything(),
        Verb::BuildEbpf { log } => ebpf::build(if log { Flavour::Log } else { Flavour::Normal }),
        Verb::Build => dist::build(),
        Verb::Image { arch, name, dist, check, twice } => {
            release::image(&release::Options { arch, name, dist, check, twice })
        }
        Verb::Release { arch, url } => release::release(arch, &url),
        Verb::Tidy { only, advisories } => tidy::run(&only, advisories.as_deref()),
        Verb::Conformance { open } => conformance::run(open),
        Verb::Test { unit: true, .. } => suite::unit(),
        Verb::Test { longer: true, .. } => suite::longer(),
        Verb::Test { upgrade: true, .. } => suite::upgrade(),
        Verb::Test { ci, .. } => {
            let ci = ci || std::env::var_os("CI").is_some_and(|value| value == "true");
            suite::run(if ci { Extent::Gate } else { Extent::Tests })
        }
        Verb::Soak { minutes, seed, attachments } => soak::run(soak::Options { minutes, seed, attachments }),
        Verb::Nightly => nightly::run(),
        Verb::Vm { guest, test, dist, filters } => {
            vm::run(vm::Options { guest, test, filters, executables: dist })
        }
        Verb::Demo { cluster: false } => demo::run(),
        Verb::Demo { cluster: true } => demo::cluster::run(),
        Verb::Bench { arguments } => return bench(&arguments),
        Verb::Fuzz { seconds, long, targets } => {
            let time = if long { fuzz::Time::Each(fuzz::LONG) } else { fuzz::Time::Together(seconds) };
            fuzz::run(&fuzz::Options { targets, time })
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::failure(&error);
            ExitCode::FAILURE
        }
    }
}

/// The benchmarks are a crate of their own, which reads the arguments; its exit code is the verb's.
fn bench(arguments: &[OsString]) -> ExitCode {
    let mut cargo = child::cargo();
    cargo.args([
        "run",
        "--quiet",
        "--package",
        "netattach-bench",
        "--features",
        "cluster",
        "--bin",
        "bench",
        "--",
    ]);
    cargo.args(arguments);
    match cargo.status().context("run the benchmarks") {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            progress::failure(&error);
            ExitCode::FAILURE
        }
    }
}
