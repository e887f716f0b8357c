//! Tables with columns as wide as their content, separated by two spaces, without borders.
//!
//! A table is at most [`MOST_COLUMNS`] characters wide, unless the wide form is requested: names are
//! shortened in the middle, as their beginnings and ends distinguish them, and prose is wrapped. Numbers
//! are never cut. Control characters are escaped ([`visible`]), and count as printed.

use super::visible;

/// Most characters of a line, as far as numbers and titles allow.
pub(super) const MOST_COLUMNS: usize = 120;

/// Least characters of a shortened name.
const LEAST_NAME: usize = 12;

/// Least width of a prose column.
const LEAST_PROSE: usize = 40;

/// Indentation of a sentence's continuation lines: more than that of lines that belong to the sentence.
const FURTHER: usize = 4;

/// Alignment of a column's cells, and what happens to them if the line is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    /// For names: cut in the middle.
    Left,
    /// For numbers: kept.
    Right,
    /// For sentences, in the last column: wrapped.
    Prose,
}

/// How wide a table may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// [`MOST_COLUMNS`].
    Limited,
    /// As wide as the cells.
    Unlimited,
}

/// A column that may be left out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    title: &'static str,
    align: Align,
    /// Whether it is shown only in the wide form.
    only_wide: bool,
}

impl Column {
    /// A column that both forms have.
    pub(super) const fn new(title: &'static str, align: Align) -> Self {
        Self { title, align, only_wide: false }
    }

    /// A column of the wide form.
    pub(super) const fn wide(title: &'static str, align: Align) -> Self {
        Self { title, align, only_wide: true }
    }
}

/// Renders the columns of a form: all of them in the wide form.
pub(super) fn of_columns<const N: usize>(columns: [Column; N], rows: &[[String; N]], width: Width) -> String {
    let is_shown = |column: &Column| width == Width::Unlimited || !column.only_wide;
    let titles: Vec<_> = columns.iter().filter(|it| is_shown(it)).map(|it| (it.title, it.align)).collect();
    let shown = |row: &[String; N]| {
        columns.iter().zip(row).filter(|(it, _)| is_shown(it)).map(|(_, cell)| cell.clone()).collect()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(shown).collect();
    within(&titles, &rows, width)
}

/// Renders one line per row under the titles, without trailing white space, within [`MOST_COLUMNS`].
pub(super) fn render<const N: usize>(columns: [(&str, Align); N], rows: &[[String; N]]) -> String {
    within(&columns, rows, Width::Limited)
}

fn within<R: AsRef<[String]>>(columns: &[(&str, Align)], rows: &[R], width: Width) -> String {
    let printed = |row: &R| row.as_ref().iter().map(|cell| visible::inline(cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(printed).collect();
    let widest = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([columns[column].0.chars().count()]).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..columns.len()).map(widest).collect();
    if width == Width::Limited {
        shrink(columns, &mut widths);
    }
    let mut text = String::new();
    let titles: Vec<String> = columns.iter().map(|(title, _)| (*title).to_owned()).collect();
    line(&mut text, columns, &widths, &titles);
    for row in &rows {
        line(&mut text, columns, &widths, row);
    }
    text
}

/// Takes characters from prose, then always from the widest name, until the line fits or nothing can be taken.
fn shrink(columns: &[(&str, Align)], widths: &mut [usize]) {
    let between = 2 * columns.len().saturating_sub(1);
    let mut excess = (widths.iter().sum::<usize>() + between).saturating_sub(MOST_COLUMNS);
    for ((title, align), width) in columns.iter().zip(widths.iter_mut()) {
        if *align == Align::Prose {
            let least = LEAST_PROSE.max(title.chars().count());
            let taken = excess.min(width.saturating_sub(least));
            *width -= taken;
            excess -= taken;
        }
    }
    while excess > 0 {
        let can_give = |at: &usize| {
            let (title, align) = columns[*at];
            align == Align::Left && widths[*at] > LEAST_NAME.max(title.chars().count())
        };
        let Some(widest) = (0..columns.len()).filter(can_give).max_by_key(|at| widths[*at]) else { return };
        widths[widest] -= 1;
        excess -= 1;
    }
}

/// Appends a row: one line, or several where prose is wrapped.
fn line(text: &mut String, columns: &[(&str, Align)], widths: &[usize], row: &[String]) {
    let mut line = String::new();
    let mut more = Vec::new();
    for (((_, align), width), cell) in columns.iter().zip(widths).zip(row) {
        match align {
            Align::Left => line.push_str(&format!("{:<width$}  ", cut(cell, *width), width = *width)),
            Align::Right => line.push_str(&format!("{cell:>width$}  ", width = *width)),
            Align::Prose => {
                let indent = line.chars().count();
                let mut lines = wrap(cell, *width).into_iter();
                line.push_str(&lines.next().unwrap_or_default());
                more.extend(lines.map(|rest| format!("{:indent$}{rest}", "")));
            }
        }
    }
    for line in std::iter::once(line).chain(more) {
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// Returns the text, shortened to `width` characters with an ellipsis in the middle.
pub(super) fn cut(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (front, back) = (kept.div_ceil(2), kept / 2);
    let head = text.chars().take(front);
    head.chain(['…']).chain(text.chars().skip(length - back)).collect()
}

/// Formats sentences, each on a line with its own indentation; a long one continues on further lines,
/// indented more. Texts of others in them have been escaped, line by line.
pub(super) fn sentences(text: &str, width: Width) -> String {
    let mut wrapped = String::new();
    for line in text.lines() {
        if width == Width::Unlimited || line.chars().count() <= MOST_COLUMNS {
            wrapped.push_str(line);
            wrapped.push('\n');
            continue;
        }
        let words = line.trim_start();
        let indent = line.len() - words.len();
        for (number, part) in wrap(words, MOST_COLUMNS - indent - FURTHER).into_iter().enumerate() {
            let further = if number == 0 { indent } else { indent + FURTHER };
            wrapped.push_str(&format!("{:further$}{part}\n", ""));
        }
    }
    wrapped
}

/// Returns lines of at most `width` characters, broken at spaces; a longer word is on a line of its own.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_widest_cell_and_numbers_stand_right() {
        let row = |a: &str, b: &str, c: &str| [a, b, c].map(str::to_owned);
        let columns = [("NAME", Align::Left), ("COUNT", Align::Right), ("NOTE", Align::Left)];
        assert_eq!(
            render(columns, &[row("a", "7", ""), row("äöü-long", "1234567", "x y")]),
            "NAME        COUNT  NOTE\n\
             a               7\n\
             äöü-long  1234567  x y\n"
        );
    }

    /// The author of a cell's text can neither add lines nor shift columns.
    #[test]
    fn what_a_terminal_acts_on_is_written_out_and_columns_stay_where_they_are() {
        let row = |a: &str, b: &str, c: &str| [a, b, c].map(str::to_owned);
        let columns = [("OBJECT", Align::Left), ("N", Align::Right), ("PROBLEM", Align::Prose)];
        assert_eq!(
            render(columns, &[row("a", "1", "is\nready\u{1b}[2J"), row("\u{9b}\u{202e}", "\u{7}", "x y")]),
            "\
OBJECT              N  PROBLEM
a                   1  is\\nready\\u{1b}[2J
\\u{9b}\\u{202e}  \\u{7}  x y
"
        );
        let long = [row(&"\u{1b}".repeat(100), "1", &"\u{7} ".repeat(60))];
        let text = render(columns, &long);
        assert!(text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
        assert_eq!(text.matches(r"\u{7}").count(), 60);
    }

    #[test]
    fn a_line_that_is_too_long_loses_the_middle_of_its_longest_names_and_the_wide_form_none() {
        let columns = [
            Column::new("POD", Align::Left),
            Column::new("N", Align::Right),
            Column::wide("ID", Align::Left),
        ];
        let long = format!("shop/{}-xyz12", "a".repeat(150));
        let rows = [[long.clone(), "123456789".into(), "c1".into()]];
        let text = of_columns(columns, &rows, Width::Limited);
        let line = text.lines().nth(1).unwrap();
        assert_eq!(line.chars().count(), MOST_COLUMNS, "{line}");
        assert!(line.starts_with("shop/aaa") && line.contains("…aaa") && line.ends_with("-xyz12  123456789"));
        let wide = of_columns(columns, &rows, Width::Unlimited);
        assert_eq!(wide.lines().nth(1).unwrap(), format!("{long}  123456789  c1"));
    }

    #[test]
    fn prose_is_wrapped_and_never_cut() {
        let columns = [("OBJECT", Align::Left), ("PROBLEM", Align::Prose)];
        let words = "word ".repeat(40);
        let text = render(columns, &[["network shop/lan".to_owned(), words.trim().to_owned()]]);
        assert!(text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
        assert_eq!(text.matches("word").count(), 40);
        assert!(text.lines().nth(2).unwrap().starts_with("                  word"), "{text}");
        assert_eq!(wrap("a bb ccc", 4), ["a bb", "ccc"]);
        assert_eq!(wrap("incomprehensibilities", 4), ["incomprehensibilities"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn a_sentence_that_is_too_long_goes_on_further_in() {
        let long = format!("  {}", "word ".repeat(30));
        let text = format!("short\n\n{}\n", long.trim_end());
        let words = |count: usize| vec!["word"; count].join(" ");
        let expected = format!("short\n\n  {}\n      {}\n", words(23), words(7));
        assert_eq!(sentences(&text, Width::Limited), expected);
        assert_eq!(sentences(&text, Width::Unlimited), text);
    }

    #[test]
    fn a_cut_text_keeps_both_ends() {
        assert_eq!(cut("shop/cart-7d9f-xyz", 18), "shop/cart-7d9f-xyz");
        assert_eq!(cut("shop/cart-7d9f-xyz", 9), "shop…-xyz");
        assert_eq!(cut("äöüäöü", 3), "ä…ü");
    }
}
