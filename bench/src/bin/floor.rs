//! One request of the floor in a process of its own: the minimum cost of any CNI plugin.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match netattach_bench::attach::floor::main(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            xtask::progress::failure(&error);
            ExitCode::FAILURE
        }
    }
}
