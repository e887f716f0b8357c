//! The node agent. See `netattach::agent`.

use std::process::ExitCode;

use clap::Parser;
use netattach::agent::{Arguments, Settings, run};
use netattach::report::Chain;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("NETATTACH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let settings = Settings::read(Arguments::parse());
    match settings.map_err(Into::into).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}
