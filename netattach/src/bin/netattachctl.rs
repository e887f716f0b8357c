//! The command line of the agent.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use netattach::cli::{self, Arguments};
use netattach::error_chain::Chain;

fn main() -> ExitCode {
    match cli::run(&Arguments::parse(), &mut io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // There is nowhere else to say it.
            let _ = writeln!(io::stderr(), "netattachctl: {}", Chain(&error));
            ExitCode::from(error.exit().code())
        }
    }
}
