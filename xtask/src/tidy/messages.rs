//! Checks the messages in docs/troubleshooting.md: each must be a message of the product.

use super::Violation;
use crate::source::Source;

const PAGE: &str = "docs/troubleshooting.md";
/// The heading of a table's first column.
const HEADING: &str = "| message contains |";

/// The page, if it is among these.
pub(super) fn page(pages: &[Source]) -> Option<&Source> {
    pages.iter().find(|page| page.path == PAGE)
}

/// Messages in the tables that no source contains.
pub(super) fn check(page: &Source, sources: &[Source]) -> Vec<Violation> {
    let product = sources.iter().filter(|source| source.path.starts_with("netattach"));
    let text: String = product.map(|source| joined(&source.text)).collect();
    messages(&page.text)
        .filter(|(_, message)| !parts(message).all(|part| is_in(&part, &text)))
        .map(|(line, message)| Violation {
            path: page.path.clone(),
            line,
            found: message.to_owned(),
            rule: "a message of the page is one of the product",
            why: "who has the message looks for it here; words change",
        })
        .collect()
}

/// Text with string literals that continue on the next line joined.
fn joined(text: &str) -> String {
    let mut pieces = text.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.trim_start())
}

/// The messages in first columns, with their lines.
fn messages(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_table = false;
    page.lines()
        .enumerate()
        .filter(move |(_, line)| {
            is_table = line.starts_with(HEADING) || is_table && line.starts_with('|');
            is_table
        })
        .flat_map(|(at, line)| {
            let cell = line.trim_start_matches("| ").split(" | ").next().unwrap_or_default();
            cell.split('`').skip(1).step_by(2).map(move |message| (at + 1, message))
        })
}

/// The words between dots, which stand for variable text, and names in capitals.
fn parts(message: &str) -> impl Iterator<Item = Vec<&str>> {
    let ends = |sign: char| sign.is_whitespace() || [':', ';', ',', '(', ')'].contains(&sign);
    let parts = message.split("...").flat_map(|part| part.split("DIR"));
    parts.map(move |part| part.trim_matches(ends).split_whitespace().collect())
}

/// Whether at least half of the words occur consecutively: the others may be values that the message has filled in.
fn is_in(words: &[&str], text: &str) -> bool {
    words.is_empty() || words.windows(words.len().div_ceil(2)).any(|run| text.contains(&run.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_message_that_the_product_does_not_have_is_found() {
        let page = source(
            PAGE,
            "| message contains | code |\n|---|---|\n| `pod ... is not known yet`, `table x is another agent's` | 11 |\n\
             | `no such words anywhere` | |\n\n| reason | |\n|---|---|\n| `a thing of another table` | |\n",
        );
        let code = source(
            "netattach/src/a.rs",
            "\"pod {pod} is not known \\\n     yet\" \"table {T} is another agent's\"",
        );
        let elsewhere = source("tests/a.rs", "no such words anywhere");
        let found = check(&page, &[code, elsewhere]);
        let found: Vec<_> = found.into_iter().map(|violation| (violation.line, violation.found)).collect();
        assert_eq!(found, [(4, "no such words anywhere".to_owned())]);
    }
}
