//! `cargo xtask vm`: a selection of the tests under an older kernel, Debian 12's Linux 6.1, in a virtual machine.
//!
//! The machine is emulated, so that it runs wherever the tests run: inside other virtual machines too. All it has is in
//! its memory: test executables as cargo built them, the static executables under test, `ip`, and the libraries that
//! these name. It has no disk and no network; what it prints comes out of its serial line.

mod archive;
pub mod guest;
mod modules;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

use self::archive::Archive;
use crate::screen::Done;
use crate::setup::{self, Machine, Scope};
use crate::suite::{Count, Tally, failures_in};
use crate::{child, dist, screen, tree};

/// The modules that attachments, policies and the tests' own links use.
const MODULES: [&str; 8] =
    ["veth", "bridge", "macvlan", "8021q", "dummy", "sch_ingress", "cls_bpf", "sch_tbf"];

/// Test executables with the tests taken from each, by parts of their names; none: all of them. What matters is what
/// differs by kernel: the verifier, the hooks, the links and their removal. An emulated machine is slow, so every
/// selection costs.
const TESTS: [(&str, &[&str]); 5] = [
    ("netlink", &[]),
    (
        "packets",
        &[
            "pins::the_verifier",
            "pins::other_programs",
            "sender::a_pod_speaks",
            "policies::icmp_errors",
            "fragments::later_fragments",
        ],
    ),
    ("attach", &["del_needs_neither", "a_second_add"]),
    ("policy_live", &["ingress_lets_in", "a_change_of_the_policy", "policies_stay_in_force"]),
    ("restart", &["programs_and_maps"]),
];

/// Memory of the machine in MiB: most of it holds the test executables, twice while they are unpacked.
const MEMORY: &str = "2048";
/// Longer than everything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// Test executables with parts of the names of the tests to run; none: all of them.
type Selection = Vec<(String, Vec<String>)>;

/// Sets up, builds, runs the selection, or one test executable, and prints the sum. The executables under test are those
/// of the directory `executables`, or built.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn run(test: Option<String>, filters: Vec<String>, executables: Option<PathBuf>) -> anyhow::Result<()> {
    setup::run(Scope::Machine)?;
    if executables.is_none() {
        dist::build()?;
    }
    let selection = test.map_or_else(usual, |test| vec![(test, filters)]);
    let total = run_selection(&selection, &executables.unwrap_or_else(tree::dist))?;
    screen::line(&total.to_string());
    if total.failed > 0 {
        bail!("tests failed");
    }
    Ok(())
}

/// Runs the selection in a machine that is there.
///
/// # Errors
/// The machine could not be started or ended before its tests.
pub fn tests() -> anyhow::Result<Count> {
    run_selection(&usual(), &tree::dist())
}

fn usual() -> Selection {
    let owned = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect();
    TESTS.iter().map(|(name, parts)| ((*name).to_owned(), owned(parts))).collect()
}

fn run_selection(selection: &Selection, executables: &Path) -> anyhow::Result<Count> {
    let Some(machine) = setup::machine() else {
        screen::line("  SKIPPED: the tests under an older kernel: this machine has no emulator for them");
        return Ok(Count { skipped: 1, ..Count::default() });
    };
    screen::heading(&format!("test under Linux {}", machine.release));
    let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
    let initrd = scratch.path().join("initrd");
    screen::step("pack", |progress| {
        let archive = pack(&machine, selection, &test_executables(selection, progress)?, executables)?;
        fs::write(&initrd, &archive).context("write the machine's files")?;
        Ok(Done::Was(format!("{} MiB", archive.len() >> 20)))
    })?;
    let started = Instant::now();
    let mut tally = Tally::default();
    let (output, _, status) = child::watch(&mut emulator(&machine, &initrd), |line| {
        if let Some(finished) = tally.read(line) {
            finished.print();
        }
    })
    .context("run the virtual machine")?;
    if let Some(died) = tally.end() {
        died.print();
    }
    if !output.lines().any(|line| line.trim_end() == guest::ENDED) {
        let tail: Vec<&str> = output.lines().rev().take(40).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("the virtual machine ended early ({status}):\n{}", tail.join("\n"));
    }
    if tally.total().failed > 0 {
        screen::line(&failures_in(&output));
    }
    screen::finished("ok", started.elapsed(), "virtual machine", "ended");
    Ok(tally.total())
}

/// The test executables of the selection, built.
fn test_executables(selection: &Selection, progress: &screen::Progress) -> anyhow::Result<Vec<PathBuf>> {
    let mut cargo = child::cargo();
    cargo.args(["test", "--package", "netattach-tests", "--no-run", "--message-format", "json"]);
    for (name, _) in selection {
        cargo.args(["--test", name]);
    }
    progress.note("compile");
    let output = child::stdout_of(&mut cargo).context("build the tests")?;
    let artifacts: Vec<Value> =
        String::from_utf8_lossy(&output).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let path_of = |name: &String| {
        let built =
            artifacts.iter().find(|it| it["target"]["name"] == **name && it["executable"].is_string());
        let path = built.and_then(|it| it["executable"].as_str());
        Ok(PathBuf::from(path.with_context(|| format!("cargo built no test {name}"))?))
    };
    selection.iter().map(|(name, _)| path_of(name)).collect()
}

fn pack(
    machine: &Machine,
    selection: &Selection,
    tests: &[PathBuf],
    executables: &Path,
) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["/proc", "/sys", "/dev", "/tmp", "/run", "/var/lib"] {
        archive.directory(directory)?;
    }
    // Before anything is mounted, the first process speaks through this.
    archive.device("/dev/console", 5, 1)?;
    let mut order = String::new();
    for module in modules::closure(&machine.modules, &MODULES)? {
        let path = format!("/modules/{}", module.file_name().unwrap_or_default().to_string_lossy());
        archive.copy(&module, &path)?;
        order.push_str(&format!("{path}\n"));
    }
    archive.file(guest::MODULES, order.as_bytes())?;

    let mut list = String::new();
    for ((name, filters), executable) in selection.iter().zip(tests) {
        let path = format!("/tests/{name}");
        with_libraries(&mut archive, executable, &path)?;
        list.push_str(&format!("{name} on Linux {}\t{path}", machine.release));
        filters.iter().for_each(|part| list.push_str(&format!("\t{part}")));
        list.push('\n');
    }
    archive.file(guest::TESTS, list.as_bytes())?;

    for executable in dist::names() {
        with_libraries(
            &mut archive,
            &executables.join(executable),
            &format!("{}/{executable}", guest::DIST),
        )?;
    }
    for tool in ["ip", "tc"] {
        let path = child::find(tool).with_context(|| format!("{tool} is not installed"))?;
        with_libraries(&mut archive, &path, &format!("/usr/sbin/{tool}"))?;
    }
    with_libraries(&mut archive, &guest_executable()?, "/init")?;
    archive.finish()
}

/// The first process, built as xtask itself was.
fn guest_executable() -> anyhow::Result<PathBuf> {
    let mut cargo = child::cargo();
    cargo.args(["build", "--package", "xtask", "--bin", "guest", "--message-format", "json"]);
    let output = child::stdout_of(&mut cargo).context("build the guest's first process")?;
    let path = String::from_utf8_lossy(&output)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find_map(|artifact| Some(artifact["executable"].as_str()?.to_owned()));
    Ok(path.context("cargo built no executable")?.into())
}

/// Adds an executable and the libraries that it names, where the dynamic loader finds them.
fn with_libraries(archive: &mut Archive, executable: &Path, to: &str) -> anyhow::Result<()> {
    archive.copy(executable, to)?;
    // A static executable has none, and `ldd` says so by failing.
    let libraries = child::ask(Command::new("ldd").arg(executable)).unwrap_or_default();
    for library in libraries.lines().filter_map(library_in) {
        archive.copy(Path::new(library), library)?;
    }
    Ok(())
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)`, `/lib64/ld-linux-x86-64.so.2 (0x...)`.
fn library_in(line: &str) -> Option<&str> {
    let path = line.rsplit_once(" => ").map_or(line, |(_, path)| path).trim();
    path.starts_with('/').then(|| path.split(" (").next().unwrap_or(path))
}

fn emulator(machine: &Machine, initrd: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string()).arg(&machine.emulator);
    command.env("LD_LIBRARY_PATH", &machine.libraries);
    for directory in &machine.firmware {
        command.arg("-L").arg(directory);
    }
    // Emulated whatever the host's processor offers: hardware that only half offers it fails late and in odd ways.
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", MEMORY, "-M", "q35"]);
    command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command.arg("-kernel").arg(&machine.kernel).arg("-initrd").arg(initrd);
    command.args(["-append", "console=ttyS0 loglevel=3 panic=-1 mitigations=off tsc=unstable"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_what_the_loader_says() {
        let table = [
            ("\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f53eae82000)", Some("/lib/x/libc.so.6")),
            ("\t/lib64/ld-linux-x86-64.so.2 (0x00007f53eb20d000)", Some("/lib64/ld-linux-x86-64.so.2")),
            ("\tlinux-vdso.so.1 (0x00007ffd)", None),
            ("\tlibx.so => not found", None),
        ];
        for (line, expected) in table {
            assert_eq!(library_in(line), expected, "{line:?}");
        }
    }
}
