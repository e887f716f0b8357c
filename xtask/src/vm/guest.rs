//! The first process of a guest: it loads the modules, runs the tests and ends the machine.

use std::convert::Infallible;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use anyhow::Context;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, finit_module, reboot};

use crate::progress;

/// The modules to load, one path in each line.
pub(super) const MODULES: &str = "/modules/order";
/// The tests to run, one in each line: its name, its executable, its arguments, separated by tabs.
pub(super) const TESTS: &str = "/tests/list";
/// The variables for the tests, one `NAME=value` in each line.
pub(super) const VARIABLES: &str = "/tests/variables";
/// The last line; if it is missing, the run ended early.
pub(super) const ENDED: &str = "guest: all tests were run";

/// How many tests run at once on the one processor: they mostly wait.
const AT_ONCE: &str = "2";

/// The file systems that have to be mounted before anything else works.
const MOUNTS: [(&str, &str); 5] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// Runs as process 1. Does not return: a guest whose first process ends has crashed.
///
/// # Errors
/// The tests could not be run, or the machine could not be ended.
pub fn main() -> anyhow::Result<Infallible> {
    if let Err(error) = prepare().and_then(|()| run_tests()) {
        progress::failure(&error);
    }
    rustix::fs::sync();
    // The machine was started so that this ends it.
    reboot(RebootCommand::Restart).context("end the machine")?;
    loop {
        std::thread::park();
    }
}

fn prepare() -> anyhow::Result<()> {
    for (kind, target) in MOUNTS {
        mount(kind, target, kind, MountFlags::empty(), None).with_context(|| format!("mount {target}"))?;
    }
    for path in fs::read_to_string(MODULES).context(MODULES)?.lines() {
        let module = File::open(path).with_context(|| format!("open {path}"))?;
        // Otherwise it makes a link, which tests take for a leftover.
        let parameters = if path.ends_with("-dummy.ko") { c"numdummies=0" } else { c"" };
        finit_module(&module, parameters, 0).with_context(|| format!("load {path}"))?;
    }
    Ok(())
}

fn run_tests() -> anyhow::Result<()> {
    let variables = fs::read_to_string(VARIABLES).context(VARIABLES)?;
    let variables: Vec<(&str, &str)> = variables.lines().filter_map(|line| line.split_once('=')).collect();
    for line in fs::read_to_string(TESTS).context(TESTS)?.lines() {
        let mut words = line.split('\t');
        let name = words.next().unwrap_or_default();
        let executable = words.next().context("a test without an executable")?;
        // In cargo's format, so that the tally reads it as cargo's.
        progress::line(&format!("     Running tests/{name} (guest/{name}-0)"));
        let status = Command::new(executable)
            .args(words)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("RUST_TEST_THREADS", AT_ONCE)
            .envs(variables.iter().copied())
            .status()
            .with_context(|| format!("start {executable}"))?;
        if let Some(signal) = status.signal() {
            progress::line(&format!("{name} was ended by signal {signal}"));
        }
    }
    progress::line(ENDED);
    Ok(())
}
