//! `cargo xtask <verb>`: see the library for what each verb does.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{dist, ebpf, fuzz, screen, setup, suite, tidy};

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
    /// Check formatting, lints, the invariants of the source tree and licences
    Tidy {
        /// Check these parts only
        #[arg(long, value_enum, value_delimiter = ',')]
        only: Vec<tidy::Part>,
    },
    /// Set up, build and run every test; needs root or sudo
    Test {
        /// Also fuzz for a minute; the environment variable CI=true means the same
        #[arg(long)]
        ci: bool,
    },
    /// Run every fuzz target
    Fuzz {
        /// Time for all targets together
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Setup => setup::run(setup::Scope::Usual),
        Verb::BuildEbpf => ebpf::build(),
        Verb::Build => dist::build(),
        Verb::Tidy { only } => tidy::run(&only),
        Verb::Test { ci } => suite::run(ci || std::env::var_os("CI").is_some_and(|value| value == "true")),
        Verb::Fuzz { seconds } => fuzz::run(seconds),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen::failure(&error);
            ExitCode::FAILURE
        }
    }
}
