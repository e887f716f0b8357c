//! `cargo xtask nightly`: the checks that take too long for the gate, by name. The gate lists what it leaves out.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::progress::{self, Done};
use crate::release::Arch;
use crate::suite::Stages;

/// The nightly runs, as arguments of `cargo xtask`.
const RUNS: [&[&str]; 17] = [
    &["soak"],
    &["soak", "--attachments", "1000", "--minutes", "10"],
    &["demo", "--cluster"],
    &["vm"],
    &["test", "--longer"],
    &["test", "--upgrade"],
    &["bench", "cluster", "--check"],
    &["bench", "scale", "--check"],
    &["bench", "restart", "--check"],
    &["bench", "sriov", "--check"],
    &["bench", "kinds-vm"],
    &["bench", "locks", "--check"],
    &["bench", "dataplane", "--only", "pairs", "--check"],
    &["image", "--check", "--twice"],
    &["release"],
    FOR_ARM64,
    &["fuzz", "--long"],
];
/// Left out if the standard library for that target is neither installed nor available.
const FOR_ARM64: &[&str] = &["image", "--arch", "arm64"];
/// The suites whose tests have a longer form, which `test --longer` runs: in `cluster` the API server is away for two minutes
/// in place of 20 s, and the agent is killed 12 times in place of 3 at each change of a Deployment. Virtual machines have tests
/// of their own with one (`Guest::longer`): VFs go into pods and back 100 times in place of 20, and the agent is killed at every
/// point of that in place of some.
pub(crate) const LONGER: [&str; 1] = ["cluster"];
/// Tests of these suites that are run in the longer form only. Other tests cover each of their properties: that a
/// failed kubelet leaves pods alone, that pods come back after losses of the node or its runtime
/// (`pods_come_back_after_...`, the last time without an API server), and that they continue without a server
/// (`pods_go_on_while_...`); these tests combine all of that.
pub(crate) const TESTS: [(&str, &str); 1] =
    [("cluster", "failures::the_kubelet_and_the_runtime_fail_while_there_is_no_api_server")];
/// The variable that requests the longer form, and its value.
pub(crate) const VARIABLE: (&str, &str) = ("NETATTACH_NIGHTLY", "1");

/// The names of the nightly runs.
pub fn names() -> String {
    let runs = RUNS.map(|words| words.join(" ")).join(", ");
    let tests = TESTS.map(|(suite, test)| format!("{suite} {test}")).join(", ");
    format!("{runs}, where test --longer has {tests}")
}

/// Runs all of them even if some fail; prints what was left out, and why.
///
/// # Errors
/// Some runs failed; their own output says why.
pub fn run() -> anyhow::Result<()> {
    let xtask = env::current_exe().context("find this executable")?;
    let mut stages = Stages::new();
    let (mut failed, mut skipped) = (Vec::new(), Vec::new());
    for words in RUNS {
        let name = words.join(" ");
        progress::heading(&format!("nightly: {name}"));
        if words == FOR_ARM64
            && let Some(why) = lacking(Arch::Arm64)?
        {
            skipped.push(format!("skipped: {name}: {why:#}"));
            continue;
        }
        let run = |_: &mut Stages| {
            let mut command = Command::new(&xtask);
            let status = command.args(words).stdin(Stdio::null()).status();
            Ok(status.with_context(|| format!("start {name}"))?.success())
        };
        if !stages.timed(&name, run)? {
            failed.push(name);
        }
    }
    progress::line(&stages.table());
    skipped.iter().for_each(|line| progress::line(line));
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Why nothing can be built for an architecture here. `None`: it can.
fn lacking(arch: Arch) -> anyhow::Result<Option<anyhow::Error>> {
    let mut why = None;
    progress::step("standard library", |progress| {
        why = arch.lacking(progress)?;
        Ok(Done::Unchanged(if why.is_some() { "lacking".to_owned() } else { arch.triple().to_owned() }))
    })?;
    Ok(why)
}
