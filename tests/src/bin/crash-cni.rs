//! `netattach-cni` as `sriov`, with the crash points that `tests/plugins/native/sriov.rs` enumerates.

use std::io;
use std::process::ExitCode;

use netattach::attach::standalone::run;

fn main() -> ExitCode {
    ExitCode::from(run(
        "sriov",
        std::env::vars_os(),
        io::stdin().lock(),
        &mut io::stdout(),
        &mut io::stderr(),
    ))
}
