//! The CNI executable: passes each call of the container runtime to the agent. A runtime gives no
//! arguments; `--version`, for people, prints the build's version and commit.

use std::io::{self, Write};
use std::process::ExitCode;

use netattach_shim::{built, shim};

fn main() -> ExitCode {
    // A runtime can only read JSON, so a panic is reported as JSON too.
    std::panic::set_hook(Box::new(|panic| {
        let _ = io::stdout().write_all(shim::panic_text(panic).as_bytes());
        std::process::exit(1);
    }));
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|argument| argument == "--version" || argument == "-V") {
        let text = format!("netattach {}\n", built::describe(&[("features", features().to_owned())]));
        let written = io::stdout().write_all(text.as_bytes());
        return if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let exit = shim::run(std::env::vars_os(), io::stdin().lock(), &mut io::stdout(), &mut io::stderr());
    ExitCode::from(exit)
}

/// The features of the package that change its behaviour.
fn features() -> &'static str {
    if cfg!(feature = "crash-points") { "crash-points" } else { "the usual" }
}
