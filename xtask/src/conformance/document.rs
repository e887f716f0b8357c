//! docs/conformance.md.

use std::fmt::Write;

use super::proofs::Test;
use super::rows::Section;
use super::{Judged, Verdict};

const HEAD: &str = "\
# Conformance

What the standards ask, row by row, and the test that fails when a row is violated. `cargo xtask conformance` writes
this page from `tests/conformance/*.toml` and the doc comments of the tests; `cargo xtask tidy` fails when it is out of
date. `cargo xtask conformance --open` lists the rows that nothing proves yet.
";

pub(super) fn of(judged: &[Judged]) -> String {
    let mut text = HEAD.to_owned();
    text.push_str("\n| | rows | proved | do not apply | open |\n|---|--:|--:|--:|--:|\n");
    for judged in judged {
        let count = judged.count();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            judged.standard.title,
            count.rows(),
            count.proved,
            count.not_applicable,
            count.open
        );
    }
    for judged in judged {
        let _ = write!(text, "\n## {}\n", judged.standard.title);
        for part in &judged.standard.sections {
            section(&mut text, judged, part);
        }
    }
    text
}

fn section(text: &mut String, judged: &Judged, section: &Section) {
    let _ =
        write!(text, "\n### {}\n\n| row | what is required | proved by |\n|---|---|---|\n", section.title);
    for row in &section.rows {
        let proof = match judged.verdict(row) {
            Verdict::Proved(tests) => tests.iter().map(link).collect::<Vec<_>>().join("<br>"),
            Verdict::NotApplicable(reason) => format!("does not apply: {}", cell(reason)),
            Verdict::Open => "**open**".to_owned(),
        };
        let _ = writeln!(text, "| {} | {} | {proof} |", row.id, cell(&row.requires));
    }
}

fn link(test: &Test) -> String {
    format!("[{}](../{})", test.name, test.path)
}

/// A bar would end the cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::super::judge;
    use super::super::rows::Standard;
    use super::*;

    #[test]
    fn each_row_is_one_line_with_its_proofs_or_its_reason() {
        let rows = r#"
            title = "Standard"
            complete = false
            [[section]]
            title = "First"
            rows = [
              { id = "A-1", requires = "One | two." },
              { id = "A-2", requires = "Two.", not_applicable = "There is none." },
              { id = "A-3", requires = "Three." },
            ]"#;
        let standard = Standard::parse("a.toml", rows.to_owned()).unwrap();
        let test = |name: &str| Test {
            name: name.to_owned(),
            path: "tests/tests/a.rs".to_owned(),
            line: 1,
            ignored: false,
            rows: vec!["A-1".to_owned()],
        };
        let (judged, _) = judge::all(vec![standard], &[test("tests::a::x"), test("tests::a::y")]);
        let expected = "
| | rows | proved | do not apply | open |
|---|--:|--:|--:|--:|
| Standard | 3 | 1 | 1 | 1 |

## Standard

### First

| row | what is required | proved by |
|---|---|---|
| A-1 | One \\| two. | [tests::a::x](../tests/tests/a.rs)<br>[tests::a::y](../tests/tests/a.rs) |
| A-2 | Two. | does not apply: There is none. |
| A-3 | Three. | **open** |
";
        assert_eq!(of(&judged).strip_prefix(HEAD), Some(expected));
    }
}
