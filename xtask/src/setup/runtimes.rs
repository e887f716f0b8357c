//! Container runtimes that the tests let call netattach: unpacked below `target/tools`, never installed, so that no
//! daemon starts and nothing of the machine's own changes.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use crate::progress::{Done, Progress};
use crate::{child, tree};

/// The suites, each with the packages taken from it. Their directories below [`runtimes`] have their names.
///
/// Bookworm's runtimes run with any C library since 2.34, and its podman is the last one that still calls CNI
/// plugins. The libraries are those that a minimal system lacks.
const SUITES: [(&str, &[&str]); 2] = [
    (
        "bookworm",
        &[
            "containerd",
            "runc",
            "podman",
            "conmon",
            "busybox-static",
            "libsubid4",
            "libgpgme11",
            "libassuan0",
        ],
    ),
    // A containerd that knows CNI 1.1 and asks for STATUS.
    ("sid", &["containerd"]),
];

/// The programs that have to start, with their directories.
const PROGRAMS: [&str; 5] = [
    "bookworm/usr/bin/containerd",
    "bookworm/usr/sbin/runc",
    "bookworm/usr/bin/podman",
    "bookworm/usr/bin/conmon",
    "sid/usr/bin/containerd",
];

/// Directory of the container runtimes, unpacked by setup: a file tree for each suite.
pub fn runtimes() -> PathBuf {
    tree::tools().join("runtimes")
}

/// Unpacks the runtimes unless they are here. Without `required`, a machine without apt does without them.
pub(super) fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    if let Ok(versions) = versions() {
        return Ok(Done::Unchanged(versions));
    }
    if !apt::is_here() {
        return apt::without("container runtimes", required);
    }
    for (suite, packages) in SUITES {
        apt::unpack_from_suite(packages, suite, &runtimes().join(suite), progress)?;
    }
    Ok(Done::Changed(format!("{} unpacked", versions()?)))
}

fn versions() -> anyhow::Result<String> {
    let told = PROGRAMS.map(|program| version(&runtimes(), program).context(program));
    let told: Vec<String> = told.into_iter().collect::<anyhow::Result<_>>()?;
    Ok(told.join(", "))
}

fn version(runtimes: &Path, program: &str) -> anyhow::Result<String> {
    let (suite, _) = program.split_once('/').context("a program without a suite")?;
    let libraries = runtimes.join(suite).join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH));
    let mut ask = Command::new(runtimes.join(program));
    ask.arg("--version").env("LD_LIBRARY_PATH", libraries);
    let words = child::ask(&mut ask).context("it is not here or does not start")?;
    let name = program.rsplit('/').next().unwrap_or(program);
    Ok(format!("{name} {}", number_in(&words).unwrap_or_default()))
}

/// The first word of the first line that begins with a digit, without the suffix of a distribution.
fn number_in(words: &str) -> Option<&str> {
    let numbers =
        words.lines().next()?.split(' ').filter(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    numbers.into_iter().next()?.split(['~', '+']).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_found_in_what_each_program_says() {
        let table = [
            ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", Some("1.6.20")),
            ("runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1\nspec: 1.0.2-dev", Some("1.1.5")),
            ("podman version 4.3.1", Some("4.3.1")),
            ("", None),
        ];
        for (words, expected) in table {
            assert_eq!(number_in(words), expected, "{words:?}");
        }
    }
}
