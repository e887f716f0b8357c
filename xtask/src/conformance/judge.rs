//! Matches rows and tests: which tests prove each row, and which combinations are mistakes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::iter::Sum;

use super::proofs::Test;
use super::rows::{Row, Standard};
use crate::tidy::Violation;

/// A standard and the verdict on each of its rows.
pub(super) struct Judged {
    pub(super) standard: Standard,
    verdicts: BTreeMap<String, Verdict>,
}

/// What is known about a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// By these tests, sorted by name.
    Proved(Vec<Test>),
    NotApplicable(String),
    Open,
}

/// How many rows have which verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) proved: usize,
    pub(super) not_applicable: usize,
    pub(super) open: usize,
}

impl Count {
    pub(super) fn rows(self) -> usize {
        self.proved + self.not_applicable + self.open
    }
}

impl Sum for Count {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, count| Self {
            proved: sum.proved + count.proved,
            not_applicable: sum.not_applicable + count.not_applicable,
            open: sum.open + count.open,
        })
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { proved, not_applicable, open } = self;
        write!(f, "{} rows: {proved} proved, {not_applicable} do not apply, {open} open", self.rows())
    }
}

impl Judged {
    pub(super) fn verdict(&self, row: &Row) -> &Verdict {
        self.verdicts.get(&row.id).unwrap_or(&Verdict::Open)
    }

    pub(super) fn count(&self) -> Count {
        self.standard
            .rows()
            .map(|row| match self.verdict(row) {
                Verdict::Proved(_) => Count { proved: 1, ..Count::default() },
                Verdict::NotApplicable(_) => Count { not_applicable: 1, ..Count::default() },
                Verdict::Open => Count { open: 1, ..Count::default() },
            })
            .sum()
    }

    /// Id and requirement of each row that nothing proves.
    pub(super) fn open(&self) -> impl Iterator<Item = (&str, &str)> {
        let open = |row: &&Row| *self.verdict(row) == Verdict::Open;
        self.standard.rows().filter(open).map(|row| (row.id.as_str(), row.requires.as_str()))
    }
}

/// The verdict on every row, and the mistakes: unknown rows, rows listed twice, rows with a test and a reason, rows
/// whose only proof is never run.
pub(super) fn all(standards: Vec<Standard>, tests: &[Test]) -> (Vec<Judged>, Vec<Violation>) {
    let mut by_row: BTreeMap<&str, Vec<Test>> = BTreeMap::new();
    for test in tests {
        for row in &test.rows {
            by_row.entry(row).or_default().push(test.clone());
        }
    }
    let known: BTreeSet<String> = standards.iter().flat_map(|s| s.rows().map(|row| row.id.clone())).collect();
    let unknown = by_row.iter().filter(|(row, _)| !known.contains(**row));
    let mut violations: Vec<Violation> =
        unknown.flat_map(|(row, tests)| tests.iter().map(move |test| unknown_row(row, test))).collect();
    let mut seen = BTreeSet::new();
    let mut judged = Vec::new();
    for standard in standards {
        let mut verdicts = BTreeMap::new();
        for row in standard.rows() {
            let tests = by_row.get(row.id.as_str()).map_or(&[][..], Vec::as_slice);
            let twice = !seen.insert(row.id.clone());
            violations.extend(mistake(row, tests, twice).map(|(found, rule)| Violation {
                path: standard.path.clone(),
                line: standard.line_of(&row.id),
                found,
                rule,
                why: "docs/conformance.md must be true",
            }));
            verdicts.insert(row.id.clone(), verdict(row, tests));
        }
        judged.push(Judged { standard, verdicts });
    }
    (judged, violations)
}

fn verdict(row: &Row, tests: &[Test]) -> Verdict {
    match &row.not_applicable {
        Some(reason) => Verdict::NotApplicable(reason.clone()),
        None if tests.is_empty() => Verdict::Open,
        None => {
            let mut tests = tests.to_vec();
            tests.sort_by(|a, b| a.name.cmp(&b.name));
            tests.dedup();
            Verdict::Proved(tests)
        }
    }
}

fn mistake(row: &Row, tests: &[Test], twice: bool) -> Option<(String, &'static str)> {
    if twice {
        return Some((format!("{} is listed twice", row.id), "a row is listed once"));
    }
    let first = tests.first()?;
    if row.not_applicable.is_some() {
        let found = format!("{} does not apply, and is proved by {}", row.id, first.name);
        return Some((found, "a row has tests or a reason why it does not apply, not both"));
    }
    tests.iter().all(|test| test.ignored).then(|| {
        let found = format!("{} is proved only by {}, which is ignored", row.id, first.name);
        (found, "a row is proved by a test that is run")
    })
}

fn unknown_row(row: &str, test: &Test) -> Violation {
    Violation {
        path: test.path.clone(),
        line: test.line,
        found: format!("{} proves `{row}`, which is no row", test.name),
        rule: "rows are listed in tests/conformance",
        why: "a misspelt row would leave the right one open",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &str = r#"
        title = "Standard"
        complete = false
        [[section]]
        title = "First"
        rows = [
          { id = "A-1", requires = "One." },
          { id = "A-2", requires = "Two.", not_applicable = "There is none." },
          { id = "A-3", requires = "Three." },
        ]"#;

    fn standard() -> Standard {
        Standard::parse("tests/conformance/a.toml", ROWS.to_owned()).unwrap()
    }

    fn test(name: &str, rows: &[&str], ignored: bool) -> Test {
        let rows = rows.iter().map(|row| (*row).to_owned()).collect();
        Test { name: name.to_owned(), path: "tests/tests/a.rs".to_owned(), line: 3, ignored, rows }
    }

    #[test]
    fn rows_are_proved_inapplicable_or_open() {
        let tests = [test("b", &["A-1"], false), test("a", &["A-1"], true)];
        let (judged, violations) = all(vec![standard()], &tests);
        assert_eq!(violations, []);
        let verdicts: Vec<_> = judged[0].standard.rows().map(|row| judged[0].verdict(row).clone()).collect();
        let expected = [
            Verdict::Proved(vec![tests[1].clone(), tests[0].clone()]),
            Verdict::NotApplicable("There is none.".to_owned()),
            Verdict::Open,
        ];
        assert_eq!(verdicts, expected);
        assert_eq!(judged[0].count().to_string(), "3 rows: 1 proved, 1 do not apply, 1 open");
        assert_eq!(judged[0].open().collect::<Vec<_>>(), [("A-3", "Three.")]);
    }

    #[test]
    fn contradictions_are_reported_where_they_are() {
        let table = [
            (test("t", &["A-9"], false), "tests/tests/a.rs", 3, "t proves `A-9`, which is no row"),
            (
                test("t", &["A-2"], false),
                "tests/conformance/a.toml",
                8,
                "A-2 does not apply, and is proved by t",
            ),
            (
                test("t", &["A-3"], true),
                "tests/conformance/a.toml",
                9,
                "A-3 is proved only by t, which is ignored",
            ),
        ];
        for (test, path, line, found) in table {
            let (_, violations) = all(vec![standard()], &[test]);
            let places: Vec<_> =
                violations.iter().map(|v| (v.path.as_str(), v.line, v.found.as_str())).collect();
            assert_eq!(places, [(path, line, found)]);
        }
        let (_, violations) = all(vec![standard(), standard()], &[]);
        assert_eq!(violations.len(), 3);
    }
}
