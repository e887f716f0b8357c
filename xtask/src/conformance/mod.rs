//! `cargo xtask conformance`: which test proves which row of the standards.
//!
//! The rows are in `tests/conformance/*.toml`; a test names those it proves in its doc comment. docs/conformance.md
//! is generated from both, so that each is checked against the other.
//!
//! `rows` are read from the tables, `proofs` from the tests, `judge` brings them together, `document` writes the page.

mod document;
mod judge;
mod proofs;
mod rows;

use std::fs;

use anyhow::{Context, bail};

use self::judge::{Judged, Verdict};
use crate::progress::{self, Done, UserError};
use crate::tidy::{self, Violation};
use crate::{source, tree};

const DOCUMENT: &str = "docs/conformance.md";

/// Writes docs/conformance.md, or with `only_open` lists the rows that nothing proves.
///
/// # Errors
/// Tests that name unknown rows, rows judged twice, files that cannot be read or written.
pub fn run(only_open: bool) -> anyhow::Result<()> {
    let (judged, violations) = judge_all()?;
    if only_open {
        for (row, requires) in judged.iter().flat_map(Judged::open) {
            progress::line(&format!("{row}  {requires}"));
        }
    } else {
        let path = tree::root().join(DOCUMENT);
        fs::write(&path, document::of(&judged)).with_context(|| format!("write {DOCUMENT}"))?;
        for judged in &judged {
            progress::line(&format!("{}: {}", judged.standard.title, judged.count()));
        }
    }
    tidy::report(violations, String::new()).map(|_| ())
}

/// Whether docs/conformance.md is what the tests say, and whether a standard that calls itself complete is.
pub(crate) fn check() -> anyhow::Result<Done> {
    let (judged, mut violations) = judge_all()?;
    for complete in judged.iter().filter(|judged| judged.standard.complete) {
        violations.extend(complete.open().map(|(row, requires)| Violation {
            path: complete.standard.path.clone(),
            line: complete.standard.line_of(row),
            found: format!("{row} is open: {requires}"),
            rule: "every row of a complete standard has a test or a reason why it does not apply",
            why: "`complete = true` is a promise to operators",
        }));
    }
    let written = fs::read_to_string(tree::root().join(DOCUMENT)).unwrap_or_default();
    if violations.is_empty() && written != document::of(&judged) {
        bail!(UserError::new(
            format!("{DOCUMENT} is not what the tests say"),
            "run `cargo xtask conformance` and commit what it writes"
        ));
    }
    let count = judged.iter().map(Judged::count).sum::<judge::Count>();
    tidy::report(violations, count.to_string())
}

fn judge_all() -> anyhow::Result<(Vec<Judged>, Vec<Violation>)> {
    let standards = rows::read_all()?;
    let mut tests = Vec::new();
    let mut violations = Vec::new();
    for source in source::all()? {
        let found = proofs::in_source(&source)?;
        tests.extend(found.tests);
        violations.extend(found.misplaced);
    }
    let (judged, wrong) = judge::all(standards, &tests);
    violations.extend(wrong);
    Ok((judged, violations))
}
