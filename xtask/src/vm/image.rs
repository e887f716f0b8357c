//! The files in a guest's memory: test executables as cargo built them, the static executables under test, a few
//! tools, and the libraries that these name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde_json::Value;

use super::archive::Archive;
use super::guests::Guest;
use super::{Program, Selection, guest};
use crate::progress::Progress;
use crate::setup::{self, Kernel};
use crate::{child, dist, nightly};

/// Factor by which deadlines of tests are extended: processors are emulated, and the host has other work.
const SLOWNESS: &str = "6";
/// Directory of the executables that the first process starts.
const PROGRAMS: &str = "/tests";
/// Directory of the static executables under test.
const DIST: &str = "/dist";
/// Where busybox is, as below the directory of the runtimes, and its directory there.
const RUNTIMES: &str = "/runtimes";
const BUSYBOX: &str = "bookworm/bin/busybox";
const OF_BUSYBOX: &str = "/runtimes/bookworm/bin";
/// Executables that tests start: the scripted plugin, and an agent and a plugin with crash points.
const COMPANIONS: [&str; 3] = ["fake-plugin", "crash-agent", "crash-cni"];
/// Directory of the reference plugins.
const PLUGINS: &str = "/plugins";

/// Writes the archive that the guest's kernel unpacks as its first file system; returns its bytes. `executables`: the
/// directory of those under test.
pub(super) fn pack(
    guest: &Guest,
    kernel: &Kernel,
    selection: &Selection,
    executables: &Path,
    (progress, to): (&Progress, File),
) -> anyhow::Result<u64> {
    progress.note("compile");
    let Built { tests, companions } = test_executables(selection)?;
    let mut archive = machine(guest, kernel, executables, to)?;
    let mut list = String::new();
    for ((name, filters), executable) in selection.tests.iter().zip(&tests) {
        list.push_str(&started(&mut archive, kernel, (name, executable), filters)?);
    }
    archive.file(guest::TESTS, list.as_bytes())?;
    // Tests know them by the paths that they have here, or beside the directory that they are in.
    for (name, path) in COMPANIONS.into_iter().zip(&companions) {
        let there = format!("/{name}");
        with_libraries(&mut archive, path, &there)?;
        archive.link(&path.to_string_lossy(), &there)?;
    }
    archive.file(guest::VARIABLES, variables(guest, selection.is_longer).as_bytes())?;
    archive.finish()
}

/// The same for a machine in which a program is run.
pub(super) fn pack_program(
    guest: &Guest,
    kernel: &Kernel,
    program: &Program<'_>,
    executables: &Path,
    to: File,
) -> anyhow::Result<u64> {
    let mut archive = machine(guest, kernel, executables, to)?;
    let line = started(&mut archive, kernel, (program.name, program.executable), program.arguments)?;
    for executable in program.beside {
        let name = executable.file_name().unwrap_or_default().to_string_lossy();
        with_libraries(&mut archive, executable, &format!("{PROGRAMS}/{name}"))?;
    }
    archive.file(guest::TESTS, line.as_bytes())?;
    archive.file(guest::VARIABLES, variables(guest, false).as_bytes())?;
    archive.finish()
}

/// Adds an executable that the first process starts; returns its line in the list of those.
fn started(
    archive: &mut Archive,
    kernel: &Kernel,
    (name, executable): (&str, &Path),
    arguments: &[String],
) -> anyhow::Result<String> {
    let path = format!("{PROGRAMS}/{name}");
    with_libraries(archive, executable, &path)?;
    let mut line = format!("{name} on Linux {}\t{path}", kernel.release);
    arguments.iter().for_each(|argument| line.push_str(&format!("\t{argument}")));
    line.push('\n');
    Ok(line)
}

/// Adds the files that every machine has: its first process, modules, the executables under test and their
/// companions.
fn machine(guest: &Guest, kernel: &Kernel, executables: &Path, to: File) -> anyhow::Result<Archive> {
    let mut archive = Archive::new(to);
    for directory in ["/proc", "/sys", "/dev", "/mnt", "/tmp", "/run", "/var/lib"] {
        archive.directory(directory)?;
    }
    // Before anything is mounted, the first process writes its output to this device.
    archive.device("/dev/console", 5, 1)?;
    let mut order = String::new();
    for module in &kernel.modules {
        let path = format!("/modules/{}", module.file_name().unwrap_or_default().to_string_lossy());
        archive.copy(module, &path)?;
        order.push_str(&format!("{path}\n"));
    }
    archive.file(guest::MODULES, order.as_bytes())?;
    for executable in dist::names() {
        with_libraries(&mut archive, &executables.join(executable), &format!("{DIST}/{executable}"))?;
    }
    for plugin in guest.plugins {
        let path = setup::reference_plugins().join(plugin);
        with_libraries(&mut archive, &path, &format!("{PLUGINS}/{plugin}"))?;
    }
    for tool in ["ip", "tc"] {
        let path = child::find(tool).with_context(|| format!("{tool} is not installed"))?;
        with_libraries(&mut archive, &path, &format!("/usr/sbin/{tool}"))?;
    }
    for program in guest.programs {
        let path = child::find(program).with_context(|| format!("{program} is not installed"))?;
        with_libraries(&mut archive, &path, &format!("/usr/bin/{program}"))?;
    }
    if !guest.programs.is_empty() {
        let busybox = setup::runtimes().join(BUSYBOX);
        archive.copy(&busybox, &format!("{RUNTIMES}/{BUSYBOX}"))?;
    }
    with_libraries(&mut archive, &guest_executable()?, "/init")?;
    Ok(archive)
}

/// The variables for the tests, one `NAME=value` in each line.
fn variables(guest: &Guest, is_longer: bool) -> String {
    let usual = [("NETATTACH_DIST", DIST), ("NETATTACH_TEST_SLOWNESS", SLOWNESS), ("RUST_BACKTRACE", "1")];
    let plugins = (!guest.plugins.is_empty()).then_some(("NETATTACH_REFERENCE_PLUGINS", PLUGINS));
    let of_busybox = [("NETATTACH_RUNTIMES", RUNTIMES), ("NETATTACH_BUSYBOX", OF_BUSYBOX)];
    let runtimes = of_busybox.into_iter().filter(|_| !guest.programs.is_empty());
    let longer = is_longer.then_some(nightly::VARIABLE);
    let own = guest.variables.iter().copied();
    let all = usual.into_iter().chain(plugins).chain(runtimes).chain(longer).chain(own);
    all.map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// The executables that cargo has built for a selection.
struct Built {
    tests: Vec<PathBuf>,
    /// [`COMPANIONS`], in that order.
    companions: Vec<PathBuf>,
}

/// The test executables of the selection, and what they start, built.
fn test_executables(selection: &Selection) -> anyhow::Result<Built> {
    let mut cargo = child::cargo();
    cargo.args(["test", "--package", "netattach-tests", "--no-run", "--message-format", "json"]);
    for (name, _) in &selection.tests {
        cargo.args(["--test", name]);
    }
    let output = child::stdout_of(&mut cargo).context("build the tests")?;
    let artifacts: Vec<Value> =
        String::from_utf8_lossy(&output).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let path_of = |name: &str| {
        let built = artifacts.iter().find(|it| it["target"]["name"] == *name && it["executable"].is_string());
        let path = built.and_then(|it| it["executable"].as_str());
        path.map(PathBuf::from).with_context(|| format!("cargo built no {name}"))
    };
    let tests = selection.tests.iter().map(|(name, _)| path_of(name)).collect::<anyhow::Result<_>>()?;
    let companions = COMPANIONS.into_iter().map(path_of).collect::<anyhow::Result<_>>()?;
    Ok(Built { tests, companions })
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
