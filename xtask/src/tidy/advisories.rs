//! Known vulnerabilities of the dependencies, from a copy of an advisory database in RustSec's format.
//!
//! The database is given as a directory, because the checks work without a network: files `RUSTSEC-*.md` anywhere
//! below it, each beginning with its data in a block of TOML. A vulnerability fails the check. An advisory that is
//! only informational (an unmaintained crate) is counted.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use semver::{Version, VersionReq};
use serde::Deserialize;

use super::{Violation, report};
use crate::progress::Done;
use crate::tree;

const LOCK: &str = "Cargo.lock";

/// The data of one advisory. Keys that are not named here are about something else.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Advisory {
    advisory: About,
    #[serde(default)]
    versions: Versions,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct About {
    id: String,
    package: String,
    /// The kind of an advisory that is no vulnerability.
    informational: Option<String>,
    /// When it was taken back.
    withdrawn: Option<String>,
}

/// Every version that none of these holds is affected.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
struct Versions {
    #[serde(default)]
    patched: Vec<VersionReq>,
    #[serde(default)]
    unaffected: Vec<VersionReq>,
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Package>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Package {
    name: String,
    version: Version,
    /// Where it comes from; none for our own.
    source: Option<String>,
}

/// Compares Cargo.lock with the database. `None`: there is no database, which is printed.
pub(super) fn check(database: Option<&Path>) -> anyhow::Result<Done> {
    let Some(database) = database else {
        return Ok(Done::Unchanged(
            "not checked: name a copy of the database by --advisories DIR".to_owned(),
        ));
    };
    let advisories = read(database)?;
    ensure!(!advisories.is_empty(), "there are no files RUSTSEC-*.md below {}", database.display());
    let lock = fs::read_to_string(tree::root().join(LOCK)).context("read Cargo.lock")?;
    let packages = packages(&lock)?;
    let (violations, informational) = judge(&packages, &advisories);
    let checked = format!(
        "{} packages, {} advisories, {informational} informational",
        packages.len(),
        advisories.len()
    );
    report(violations, checked)
}

fn packages(lock: &str) -> anyhow::Result<Vec<Package>> {
    let lock: Lock = toml::from_str(lock).context("read Cargo.lock")?;
    Ok(lock.package.into_iter().filter(|package| package.source.is_some()).collect())
}

fn read(directory: &Path) -> anyhow::Result<Vec<(PathBuf, Advisory)>> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let entry = entry.with_context(|| format!("list {}", directory.display()))?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(path);
            } else if name.starts_with("RUSTSEC-") && name.ends_with(".md") {
                let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                let advisory = parse(&text).with_context(|| format!("read {}", path.display()))?;
                found.push((path, advisory));
            }
        }
    }
    found.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(found)
}

fn parse(text: &str) -> anyhow::Result<Advisory> {
    let data = text.trim_start().strip_prefix("```toml").context("it does not begin with a block of TOML")?;
    let (data, _) = data.split_once("\n```").context("its block of TOML does not end")?;
    Ok(toml::from_str(data)?)
}

/// The vulnerabilities that concern a package, and how many advisories are informational.
fn judge(packages: &[Package], advisories: &[(PathBuf, Advisory)]) -> (Vec<Violation>, usize) {
    let (mut violations, mut informational) = (Vec::new(), 0);
    for (_, Advisory { advisory, versions }) in advisories {
        if advisory.withdrawn.is_some() {
            continue;
        }
        let is_safe = |version: &Version| {
            versions.patched.iter().chain(&versions.unaffected).any(|safe| safe.matches(version))
        };
        let affected = packages.iter().filter(|package| package.name == advisory.package);
        for package in affected.filter(|package| !is_safe(&package.version)) {
            if advisory.informational.is_some() {
                informational += 1;
                continue;
            }
            let patched: Vec<String> = versions.patched.iter().map(ToString::to_string).collect();
            let mended =
                if patched.is_empty() { "nowhere".to_owned() } else { format!("in {}", patched.join(", ")) };
            violations.push(Violation {
                path: LOCK.to_owned(),
                line: 1,
                found: format!("{} {}: {}, mended {mended}", package.name, package.version, advisory.id),
                rule: "no dependency has a known vulnerability",
                why: "the agent runs as root on every node",
            });
        }
    }
    (violations, informational)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advisory(id: &str, package: &str, more: &str, versions: &str) -> String {
        format!(
            "```toml\n[advisory]\nid = \"{id}\"\npackage = \"{package}\"\ndate = \"2026-01-02\"\n{more}\n\n\
             [versions]\n{versions}\n```\n\n# A title\n\nWhat it is about.\n"
        )
    }

    fn locked(version: &str) -> Vec<Package> {
        let source = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
        packages(&format!(
            "version = 4\n[[package]]\nname = \"netattach\"\nversion = \"0.1.0\"\n\
             [[package]]\nname = \"parser\"\nversion = \"{version}\"\n{source}\n"
        ))
        .unwrap()
    }

    #[test]
    fn a_version_is_affected_unless_it_is_patched_or_was_never() {
        let text =
            advisory("RUSTSEC-2026-0001", "parser", "", "patched = [\">= 1.4.2\"]\nunaffected = [\"< 1.2\"]");
        let all = [(PathBuf::new(), parse(&text).unwrap())];
        for (version, expected) in [
            ("1.1.9", None),
            ("1.2.0", Some("parser 1.2.0: RUSTSEC-2026-0001, mended in >=1.4.2")),
            ("1.4.1", Some("parser 1.4.1: RUSTSEC-2026-0001, mended in >=1.4.2")),
            ("1.4.2", None),
        ] {
            let (violations, informational) = judge(&locked(version), &all);
            let found: Vec<&str> = violations.iter().map(|violation| violation.found.as_str()).collect();
            assert_eq!((found, informational), (expected.into_iter().collect(), 0), "{version}");
        }
    }

    #[test]
    fn what_is_taken_back_or_informational_or_about_others_fails_nothing() {
        let table = [
            (advisory("RUSTSEC-2026-0002", "parser", "withdrawn = \"2026-02-02\"", "patched = []"), 0),
            (advisory("RUSTSEC-2026-0003", "parser", "informational = \"unmaintained\"", "patched = []"), 1),
            (advisory("RUSTSEC-2026-0004", "netattach", "", "patched = []"), 0),
        ];
        for (text, informational) in table {
            let all = [(PathBuf::new(), parse(&text).unwrap())];
            assert_eq!(judge(&locked("1.0.0"), &all), (Vec::new(), informational), "{text}");
        }
    }

    #[test]
    fn a_database_is_a_directory_of_files() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("crates/parser");
        fs::create_dir_all(&below).unwrap();
        fs::write(directory.path().join("README.md"), "No advisory.").unwrap();
        let text = advisory("RUSTSEC-2026-0005", "parser", "", "patched = []");
        fs::write(below.join("RUSTSEC-2026-0005.md"), &text).unwrap();
        let read_in = read(directory.path()).unwrap();
        assert_eq!(read_in, [(below.join("RUSTSEC-2026-0005.md"), parse(&text).unwrap())]);
        let (violations, _) = judge(&locked("1.0.0"), &read_in);
        assert_eq!(violations[0].found, "parser 1.0.0: RUSTSEC-2026-0005, mended nowhere");
        fs::write(below.join("RUSTSEC-2026-0006.md"), "# No data\n").unwrap();
        let error = format!("{:#}", read(directory.path()).unwrap_err());
        assert!(error.ends_with("RUSTSEC-2026-0006.md: it does not begin with a block of TOML"), "{error}");
        assert!(check(Some(&directory.path().join("crates/none"))).is_err());
    }

    #[test]
    fn without_a_database_it_says_that_nothing_was_checked() {
        let Done::Unchanged(said) = check(None).unwrap() else { panic!("nothing was made") };
        assert_eq!(said, "not checked: name a copy of the database by --advisories DIR");
    }
}
