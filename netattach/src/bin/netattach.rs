//! The CNI executable: hands each call of the container runtime to the agent.

use std::io::{self, Write};
use std::process::ExitCode;

use netattach::rpc::shim;

fn main() -> ExitCode {
    // A runtime can only read JSON: even a bug has to be told in it.
    std::panic::set_hook(Box::new(|panic| {
        let _ = io::stdout().write_all(shim::panic_text(panic).as_bytes());
        std::process::exit(1);
    }));
    let exit = shim::run(std::env::vars_os(), io::stdin().lock(), &mut io::stdout(), &mut io::stderr());
    ExitCode::from(exit)
}
