//! `cargo xtask tidy`: the checks that every change must pass before its tests run.
//!
//! `invariants` are the promises about the source tree, checked on the `names` that files use, and
//! `layers` which module may name which, with the `circles` of files; `licences` those of dependencies,
//! `advisories` their known vulnerabilities; `documents` the links and widths of pages, and the words
//! of the `glossary`, the `messages` of the page on troubleshooting, and the functions of the `chart`.

mod advisories;
mod chart;
mod circles;
mod documents;
mod glossary;
mod invariants;
mod layers;
mod licences;
mod messages;
mod names;

use std::path::Path;

use anyhow::bail;
use clap::ValueEnum;

use crate::progress::{Done, Progress, UserError};
use crate::{child, conformance, progress, suite};

/// One part of the check.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// rustfmt, changing nothing.
    Format,
    /// Clippy on all targets, warnings being errors.
    Lints,
    /// The invariants of the source tree.
    Invariants,
    /// Links, width and length of the documents; the words of the glossary; the messages of the page on troubleshooting.
    Documents,
    /// The layers of modules, against docs/architecture.md; the modules that headings of folders name.
    Layers,
    /// docs/conformance.md against the tests.
    Conformance,
    /// Licences of all dependencies against deny.toml.
    Licences,
    /// Known vulnerabilities of all dependencies, where a database is given.
    Advisories,
}

/// Something that must be changed: where, which rule, why the rule is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Path below the repository's top directory.
    pub(crate) path: String,
    /// Line in the file, from 1.
    pub(crate) line: usize,
    /// The finding.
    pub(crate) found: String,
    /// The rule it breaks.
    pub(crate) rule: &'static str,
    /// The reason for the rule.
    pub(crate) why: &'static str,
}

/// All parts but [`Part::Lints`], which takes minutes where these take seconds.
pub(crate) fn quick() -> Vec<Part> {
    Part::value_variants().iter().copied().filter(|part| *part != Part::Lints).collect()
}

/// Checks `parts`, or everything when none is named; `advisories` is a copy of an advisory database. All parts are
/// checked even when one fails.
///
/// # Errors
/// How many parts failed; the details are printed above.
pub fn run(parts: &[Part], advisories: Option<&Path>) -> anyhow::Result<()> {
    progress::heading("tidy");
    let wanted = |part: &Part| parts.is_empty() || parts.contains(part);
    let failed = Part::value_variants()
        .iter()
        .filter(|part| wanted(part))
        .filter(|part| !passes(**part, advisories))
        .count();
    if failed > 0 {
        bail!(UserError::new(
            format!("tidy failed in {failed} of its parts"),
            "correct what is listed above"
        ));
    }
    Ok(())
}

fn passes(part: Part, advisories: Option<&Path>) -> bool {
    let outcome = match part {
        Part::Format => progress::step("format", format),
        Part::Lints => progress::step("lints", lints),
        Part::Invariants => progress::step("invariants", |_| invariants::check()),
        Part::Documents => progress::step("documents", |_| documents::check()),
        Part::Layers => progress::step("layers", |_| layers::check()),
        Part::Conformance => progress::step("conformance", |_| conformance::check()),
        Part::Licences => progress::step("licences", |_| licences::check()),
        Part::Advisories => progress::step("advisories", |_| advisories::check(advisories)),
    };
    outcome.inspect_err(progress::failure).is_ok()
}

/// The fuzz targets are a workspace of their own. What they check is also compiled, and so linted, as a part of the suite
/// `inputs`.
const WORKSPACES: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

fn format(progress: &Progress) -> anyhow::Result<Done> {
    for manifest in WORKSPACES {
        let next = format!("run `cargo fmt --all --manifest-path {manifest}`");
        let check = ["fmt", "--all", "--check", "--manifest-path", manifest, "--", "--color", "never"];
        child::run(child::cargo().args(check), progress)
            .map_err(|cause| cause.context(UserError::new("some files are not formatted", next)))?;
    }
    Ok(Done::Unchanged(String::new()))
}

/// At the lowest priority, if the machine has the program for that: the gate runs its tests meanwhile.
fn lints(progress: &Progress) -> anyhow::Result<Done> {
    let mut cargo = child::idle(child::cargo());
    cargo.args(["clippy", "--workspace", "--all-targets", "--quiet", "--features", suite::FEATURES]);
    // A directory of its own, so that no other cargo waits for it.
    child::run(cargo.args(["--target-dir", "target/lints", "--", "-D", "warnings"]), progress)?;
    Ok(Done::Unchanged(String::new()))
}

/// Fails with all violations, one paragraph each.
pub(crate) fn report(mut violations: Vec<Violation>, checked: String) -> anyhow::Result<Done> {
    if violations.is_empty() {
        return Ok(Done::Unchanged(checked));
    }
    violations.sort();
    let mut text = format!("{} violations", violations.len());
    for Violation { path, line, found, rule, why } in violations {
        text.push_str(&format!("\n  {path}:{line}: {found}\n      rule: {rule}\n      why:  {why}"));
    }
    bail!(text)
}
