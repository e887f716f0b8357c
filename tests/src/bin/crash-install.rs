//! `netattach-cni install DIR --copy`, of executables beside those of another directory, with the crash points that
//! `tests/plugins/install.rs` enumerates.

use std::path::PathBuf;
use std::process::ExitCode;

use netattach::attach::standalone::copy::copy_all;
use netattach::error_chain::Chain;

fn main() -> ExitCode {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [executable, directory, conf_dir] = paths.as_slice() else { return ExitCode::from(2) };
    match copy_all(executable, directory, &["loopback"], Some(conf_dir)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            // A test that misses a line fails.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), Chain(&error).to_string().as_bytes());
            ExitCode::FAILURE
        }
    }
}
