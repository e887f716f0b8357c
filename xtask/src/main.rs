//! `cargo xtask <verb>`: see the library for what each verb does.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{dist, ebpf, screen, setup};

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
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Setup => setup::run(setup::Scope::Usual),
        Verb::BuildEbpf => ebpf::build(),
        Verb::Build => dist::build(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen::failure(&error);
            ExitCode::FAILURE
        }
    }
}
