//! The command line of the agent. Under the name `kubectl-netattach` it is a plugin of kubectl, see `cli::kubectl`.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use netattach::cli::{self, Arguments, CliError, kubectl};

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let is_plugin = Path::new(&name).file_name().is_some_and(|name| name == "kubectl-netattach");
    if is_plugin {
        // Names in Kubernetes are text.
        let words = words.map(|word| word.to_string_lossy().into_owned()).collect();
        return match kubectl::run(words, &mut io::stdout()) {
            Ok(code) => ExitCode::from(code),
            Err(error) => failed("kubectl netattach", &error),
        };
    }
    match cli::run(&Arguments::parse(), &mut io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed("netattachctl", &error),
    }
}

fn failed(name: &str, error: &CliError) -> ExitCode {
    // There is nowhere else to say it.
    let _ = writeln!(io::stderr(), "{name}: {}", error.line());
    ExitCode::from(error.exit().code())
}
