//! Running other programs: their output is kept, shown live as a note, and printed when they fail.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fmt};

use anyhow::Context;

use crate::progress::Progress;
use crate::tree;

/// A program that ended badly, with everything it said.
#[derive(Debug)]
pub struct Failed {
    /// The program and its arguments, as one would type them.
    pub command: String,
    /// How it ended: `exit status: 1`, `signal: 9`.
    pub status: String,
    /// Standard output and standard error in the order they were written.
    pub output: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed ({})", tree::without_local_paths(&self.command), self.status)?;
        let telling = without_progress(&self.output);
        if telling.is_empty() {
            return Ok(());
        }
        write!(f, ":\n{}", tree::without_local_paths(telling.trim_end()))
    }
}

impl std::error::Error for Failed {}

/// Cargo, as it was called: the same toolchain that runs xtask, unless [`rustup`] chooses another. The variables that
/// name the caller's package are removed: build scripts of libraries depend on them (`ring`'s on
/// `CARGO_MANIFEST_DIR`), and the next verb, or a plain call of Cargo, would rebuild what one verb has built.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(tree::root());
    for (name, _) in env::vars_os().filter(|(name, _)| is_of_a_package(name)) {
        command.env_remove(name);
    }
    command
}

/// Whether Cargo sets the variable for a program that it runs, to name the program's package.
fn is_of_a_package(variable: &OsStr) -> bool {
    const PREFIXES: [&str; 5] =
        ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE"];
    let name = variable.to_string_lossy();
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The same command at the lowest priority, if this machine has the program for that: it gets only the processor time
/// that other processes leave.
pub fn idle(command: Command) -> Command {
    through(&["chrt", "--idle", "0"], command)
}

/// The same command at a lower priority than concurrent work, if this machine has the program for that: it gets a
/// third as much of a contended processor.
pub fn nice(command: Command) -> Command {
    through(&["nice", "-n", "5"], command)
}

/// The same command, started by a program if this machine has it.
fn through(words: &[&str], command: Command) -> Command {
    let [program, arguments @ ..] = words else { return command };
    if find(program).is_none() {
        return command;
    }
    let mut started = Command::new(program);
    started.args(arguments).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => started.env(name, value),
            None => started.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        started.current_dir(directory);
    }
    started
}

/// A command run by rustup's toolchain `toolchain`; this repository's toolchain file does not apply to it.
pub fn rustup(toolchain: &str, program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, program]).current_dir(tree::root());
    for variable in ["RUSTUP_TOOLCHAIN", "RUSTC", "CARGO"] {
        command.env_remove(variable);
    }
    command
}

/// Runs to the end; both streams are merged. Standard input is empty, so nothing can wait for an answer.
///
/// # Errors
/// The program cannot be started, or [`Failed`].
pub fn run(command: &mut Command, progress: &Progress) -> anyhow::Result<String> {
    let (output, success, status) = watch(command, |line| progress.note(line))?;
    if success {
        return Ok(output);
    }
    Err(Failed { command: spelled(command), status, output }.into())
}

/// Runs to the end, giving each line of the merged streams to `each`. Returns output, success and status text.
///
/// # Errors
/// The program cannot be started or its output cannot be read. A bad exit is not an error here.
pub fn watch(command: &mut Command, mut each: impl FnMut(&str)) -> anyhow::Result<(String, bool, String)> {
    let (reader, writer) = io::pipe().context("create a pipe")?;
    command.stdin(Stdio::null()).stderr(writer.try_clone().context("clone a pipe")?).stdout(writer);
    let spawned = command.spawn();
    // The command keeps its copies of the pipe's write end; without this the read below never ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child =
        spawned.with_context(|| format!("start `{}`", command.get_program().to_string_lossy()))?;
    let mut output = String::new();
    let mut lines = BufReader::new(reader);
    let mut bytes = Vec::new();
    while lines.read_until(b'\n', &mut bytes).context("read a child's output")? > 0 {
        let line = String::from_utf8_lossy(&bytes);
        each(line.trim_end());
        output.push_str(&line);
        bytes.clear();
    }
    let status = child.wait().context("wait for a child")?;
    Ok((output, status.success(), status.to_string()))
}

/// Standard output of a short question, trimmed, or `None` when the program is absent or fails.
pub fn ask(command: &mut Command) -> Option<String> {
    let answer = command.stdin(Stdio::null()).output().ok().filter(|answer| answer.status.success())?;
    Some(String::from_utf8_lossy(&answer.stdout).trim().to_owned())
}

/// Standard output of a program, bytes as they are.
///
/// # Errors
/// The program cannot be started, or [`Failed`] with its standard error.
pub fn stdout_of(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    let result = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start `{}`", command.get_program().to_string_lossy()))?;
    if result.status.success() {
        return Ok(result.stdout);
    }
    let output = String::from_utf8_lossy(&result.stderr).into_owned();
    Err(Failed { command: spelled(command), status: result.status.to_string(), output }.into())
}

/// Where a program is: on `PATH`, among the system's administration tools, or in cargo's own directory.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let home_bin = env::home_dir().map(|home| home.join(".cargo/bin"));
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .chain(home_bin)
        .map(|dir| dir.join(program))
        .find(|candidate| is_executable(candidate))
}

/// Whether this process has the rights of root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Leaves out cargo's progress lines.
fn without_progress(output: &str) -> String {
    const WORDS: [&str; 8] = [
        "Compiling ",
        "Checking ",
        "Downloading ",
        "Downloaded ",
        "Updating ",
        "Locking ",
        "Adding ",
        "Finished ",
    ];
    let telling = |line: &&str| {
        let words = line.trim_start();
        // Cargo indents its verbs; a compiler's message that begins with such a word is not indented.
        words.len() == line.len() || !WORDS.iter().any(|word| words.starts_with(word))
    };
    output.lines().filter(telling).map(|line| format!("{line}\n")).collect()
}

/// As one would type it: the program by its name, wherever it is.
fn spelled(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words: Vec<_> =
        std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_arrive_in_order() {
        let output = run(&mut shell("echo one; echo two >&2; echo three"), &Progress::default()).unwrap();
        assert_eq!(output, "one\ntwo\nthree\n");
    }

    #[test]
    fn a_bad_exit_carries_what_was_said() {
        let error = run(&mut shell("echo no room; exit 3"), &Progress::default()).unwrap_err();
        let failed = error.downcast_ref::<Failed>().unwrap();
        assert_eq!((failed.output.as_str(), failed.status.as_str()), ("no room\n", "exit status: 3"));
    }

    #[test]
    fn a_failure_tells_what_went_wrong_and_not_what_went_well() {
        let output = "   Compiling a v1.0.0\n Downloading crates ...\nerror: no such thing\n  --> a.rs\n";
        assert_eq!(without_progress(output), "error: no such thing\n  --> a.rs\n");
    }

    #[test]
    fn cargo_is_told_what_a_person_would_tell_it_and_not_which_package_calls() {
        let table = [
            (true, ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_BIN_NAME"]),
            (false, ["CARGO", "CARGO_HOME", "CARGO_INCREMENTAL", "CARGO_TARGET_DIR"]),
        ];
        for (expected, names) in table {
            for name in names {
                assert_eq!(is_of_a_package(OsStr::new(name)), expected, "{name}");
            }
        }
    }

    #[test]
    fn nothing_waits_for_an_answer() {
        assert_eq!(run(&mut shell("read x || echo end"), &Progress::default()).unwrap(), "end\n");
    }

    #[test]
    fn an_absent_program_has_no_answer() {
        assert_eq!(ask(&mut Command::new("no-such-program-here")), None);
    }
}
