//! Splits a `List` in YAML into its items by indentation, so that they are parsed one by one: parsed as a whole, a list
//! takes several times its size of memory.
//!
//! ```yaml
//! apiVersion: v1
//! items:
//! - apiVersion: v1
//!   kind: Pod
//! kind: List
//! ```
//!
//! A document is split only if `items:` is alone on an unindented line and each item begins with a dash, all of them in
//! the same column. Whether a line with a dash starts an item is certain only if everything before it is complete: the
//! caller parses the parts in order, each on its own, and uses none of them if one does not parse. Up to that point the
//! full parser would give the same result.

/// The parts of a document.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut<'d> {
    /// Before the items.
    pub(super) before: &'d str,
    /// After the items.
    pub(super) after: &'d str,
    items: &'d str,
    /// Column of the dashes.
    indent: usize,
}

/// Splits a document; `None`: it has no items that can be split off.
pub(super) fn cut(document: &str) -> Option<Cut<'_>> {
    // Split into items, a document would lose a directive, and content on the line of the document's start.
    let text = document.strip_prefix("---").unwrap_or(document);
    let begins_with_a_line = text.len() == document.len() || text.starts_with(['\n', '\r']);
    if document.starts_with('%') || !begins_with_a_line {
        return None;
    }
    let (start, end) = lines(text).find(|(start, end)| text[*start..*end].trim_end() == "items:")?;
    let (before, items) = (&text[..start], &text[end..]);
    let first = lines(items).map(|(start, end)| &items[start..end]).find(|line| holds_something(line))?;
    let indent = indent(first);
    if !is_item(first, indent) {
        return None;
    }
    let is_behind = |line: &str| holds_something(line) && !belongs(line, indent);
    let end = lines(items)
        .find(|(start, end)| is_behind(&items[*start..*end]))
        .map_or(items.len(), |(start, _)| start);
    let after = &items[end..];
    // Nothing can follow between the column of the dashes and the margin.
    let is_at_margin = lines(after).next().is_none_or(|(start, end)| self::indent(&after[start..end]) == 0);
    is_at_margin.then_some(Cut { before, after, items: &items[..end], indent })
}

impl<'d> Cut<'d> {
    /// The items, each as a document: its dash is replaced by a space.
    pub(super) fn items(&self) -> impl Iterator<Item = String> + use<'d> {
        let (items, indent) = (self.items, self.indent);
        let ends = self.starts().skip(1).chain([items.len()]);
        self.starts().zip(ends).map(move |(start, end)| {
            let mut item = items[start..end].to_owned();
            item.replace_range(indent..=indent, " ");
            item
        })
    }

    /// Number of items.
    pub(super) fn count(&self) -> usize {
        self.starts().count()
    }

    fn starts(&self) -> impl Iterator<Item = usize> + use<'d> {
        let (items, indent) = (self.items, self.indent);
        lines(items).filter(move |(start, end)| is_item(&items[*start..*end], indent)).map(|(start, _)| start)
    }
}

/// Start and end of each line, including its line end.
fn lines(text: &str) -> impl Iterator<Item = (usize, usize)> + use<'_> {
    text.split_inclusive('\n').scan(0, |at, line| {
        let start = *at;
        *at += line.len();
        Some((start, *at))
    })
}

/// Whether a line is more than a comment.
fn holds_something(line: &str) -> bool {
    let text = line.trim();
    !text.is_empty() && !text.starts_with('#')
}

fn indent(line: &str) -> usize {
    line.bytes().take_while(|byte| *byte == b' ').count()
}

/// Whether an item begins on a line.
fn is_item(line: &str, at: usize) -> bool {
    indent(line) == at && matches!(line.as_bytes()[at..], [b'-'] | [b'-', b' ' | b'\r' | b'\n', ..])
}

/// Whether a line belongs to items whose dashes are in this column.
fn belongs(line: &str, dash: usize) -> bool {
    indent(line) > dash || is_item(line, dash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(document: &str) -> Option<(String, Vec<String>, String)> {
        let cut = cut(document)?;
        Some((cut.before.to_owned(), cut.items().collect(), cut.after.to_owned()))
    }

    #[test]
    fn items_are_cut_out_wherever_their_dashes_are() {
        let expected = |items: &[&str], before: &str, after: &str| {
            let items = items.iter().map(|item| (*item).to_owned()).collect();
            Some((before.to_owned(), items, after.to_owned()))
        };
        assert_eq!(
            parts(
                "---\napiVersion: v1\nitems:\n- a: 1\n  b:\n  - 2\n# note\n\n-   a: |\n      - 3\nkind: List\n"
            ),
            expected(
                &["  a: 1\n  b:\n  - 2\n# note\n\n", "    a: |\n      - 3\n"],
                "\napiVersion: v1\n",
                "kind: List\n"
            )
        );
        assert_eq!(
            parts("items: \r\n  # first\n  -\r\n    a: 1\n  - {a: 2}"),
            expected(&["   \r\n    a: 1\n", "    {a: 2}"], "", "")
        );
    }

    #[test]
    fn what_has_no_such_items_is_not_cut() {
        for document in [
            "",
            "a: 1\n",
            "items:\n",
            "items: []\n",
            "items:\n  a: 1\n",
            "items:\nkind: List\n",
            "items:\n-a\n",
            " items:\n - a\n",
            "items:\n  - a: 1\n b: 2\n",
            "%YAML 1.1\n---\nitems:\n- a\n",
            "--- !list\nitems:\n- a\n",
        ] {
            assert_eq!(parts(document), None, "{document:?}");
        }
    }
}
