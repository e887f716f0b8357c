//! `cargo xtask tidy`: what every change must satisfy before its tests are worth running.

mod invariants;
mod licences;
mod names;

use anyhow::bail;
use clap::ValueEnum;

use crate::screen::{Done, Progress, Stuck};
use crate::{child, conformance, screen};

/// One part of the check.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// rustfmt, changing nothing.
    Format,
    /// Clippy on all targets, warnings being errors.
    Lints,
    /// What the source tree promises about itself.
    Invariants,
    /// docs/conformance.md against the tests.
    Conformance,
    /// Licences of all dependencies against deny.toml.
    Licences,
}

/// Something that must be changed: where, which rule, why the rule is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Path below the repository's top directory.
    pub(crate) path: String,
    /// Line in the file, from 1.
    pub(crate) line: usize,
    /// What was found.
    pub(crate) found: String,
    /// The rule it breaks.
    pub(crate) rule: &'static str,
    /// The reason for the rule.
    pub(crate) why: &'static str,
}

/// Checks `parts`, or everything when none is named. All parts are checked even when one fails.
///
/// # Errors
/// How many parts failed; the details are printed above.
pub fn run(parts: &[Part]) -> anyhow::Result<()> {
    screen::heading("tidy");
    let wanted = |part: &Part| parts.is_empty() || parts.contains(part);
    let failed =
        Part::value_variants().iter().filter(|part| wanted(part)).filter(|part| !passes(**part)).count();
    if failed > 0 {
        bail!(Stuck::new(format!("tidy failed in {failed} of its parts"), "correct what is listed above"));
    }
    Ok(())
}

fn passes(part: Part) -> bool {
    let outcome = match part {
        Part::Format => screen::step("format", format),
        Part::Lints => screen::step("lints", lints),
        Part::Invariants => screen::step("invariants", |_| invariants::check()),
        Part::Conformance => screen::step("conformance", |_| conformance::check()),
        Part::Licences => screen::step("licences", |_| licences::check()),
    };
    outcome.inspect_err(screen::failure).is_ok()
}

fn format(progress: &Progress) -> anyhow::Result<Done> {
    child::run(child::cargo().args(["fmt", "--all", "--check", "--", "--color", "never"]), progress)
        .map_err(|cause| {
            cause.context(Stuck::new("some files are not formatted", "run `cargo fmt --all`"))
        })?;
    Ok(Done::Was(String::new()))
}

fn lints(progress: &Progress) -> anyhow::Result<Done> {
    child::run(
        child::cargo().args(["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]),
        progress,
    )?;
    Ok(Done::Was(String::new()))
}

/// Fails with all violations, one paragraph each.
pub(crate) fn report(mut violations: Vec<Violation>, checked: String) -> anyhow::Result<Done> {
    if violations.is_empty() {
        return Ok(Done::Was(checked));
    }
    violations.sort();
    let mut text = format!("{} violations", violations.len());
    for Violation { path, line, found, rule, why } in violations {
        text.push_str(&format!("\n  {path}:{line}: {found}\n      rule: {rule}\n      why:  {why}"));
    }
    bail!(text)
}
