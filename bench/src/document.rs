//! Tables, on the screen and in docs/performance.md.

use std::fmt::Write;
use std::fs;

use anyhow::{Context, ensure};
use xtask::progress::UserError;
use xtask::tree;

const DOCUMENT: &str = "docs/performance.md";

/// Replaces the text in docs/performance.md between the marks of `bench`, with the command that made it.
pub(super) fn update(bench: &str, command: &str, table: &str) -> anyhow::Result<()> {
    let path = tree::root().join(DOCUMENT);
    let old = fs::read_to_string(&path).with_context(|| format!("read {DOCUMENT}"))?;
    let new = replaced(&old, bench, &format!("`{command} --write`\n\n{table}"))?;
    fs::write(&path, new).with_context(|| format!("write {DOCUMENT}"))
}

/// A Markdown table that also reads well as plain text.
pub(super) fn aligned(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count(), 3]).max().unwrap_or(3)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &[&str]| {
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let _ = if column == 0 {
                write!(text, "| {cell:<width$} ")
            } else {
                write!(text, "| {cell:>width$} ")
            };
        }
        text.push_str("|\n");
    };
    line(header);
    let rules: Vec<String> = widths
        .iter()
        .enumerate()
        .map(
            |(column, width)| {
                if column == 0 { "-".repeat(*width) } else { format!("{}:", "-".repeat(width - 1)) }
            },
        )
        .collect();
    line(&rules.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

fn replaced(old: &str, bench: &str, content: &str) -> anyhow::Result<String> {
    let (begin, end) = (format!("<!-- begin: bench {bench} -->"), format!("<!-- end: bench {bench} -->"));
    let marked = old.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    ensure!(
        marked.is_some(),
        UserError::new(
            format!("{DOCUMENT} has no place for the table"),
            format!("put `{begin}` and `{end}` into it")
        )
    );
    let (before, after) = marked.unwrap_or_default();
    Ok(format!("{before}{begin}\n{}\n{end}{after}", content.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let text = |content: &str| {
            format!("before\n<!-- begin: bench x -->\n{content}\n<!-- end: bench x -->\nafter\n")
        };
        assert_eq!(replaced(&text("old"), "x", "new\n\n").unwrap(), text("new"));
        assert_eq!(
            replaced("no marks", "x", "new").unwrap_err().to_string(),
            "docs/performance.md has no place for the table"
        );
    }

    #[test]
    fn columns_are_aligned() {
        let expected = "| x    |  ADD |\n| ---- | ---: |\n| long | 1.00 |\n";
        assert_eq!(aligned(&["x", "ADD"], &[vec!["long".to_owned(), "1.00".to_owned()]]), expected);
    }
}
