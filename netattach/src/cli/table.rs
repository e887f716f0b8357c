//! Tables with columns as wide as their content, separated by two spaces, without borders.

use std::fmt::Write;

/// Alignment of a column's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// Renders one line per row under the titles, without trailing white space.
pub(super) fn render<const N: usize>(columns: [(&str, Align); N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([columns[column].0.chars().count()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let titles = columns.map(|(title, _)| title.to_owned());

    let mut text = String::new();
    for row in std::iter::once(&titles).chain(rows) {
        let mut line = String::new();
        for ((cell, width), (_, align)) in row.iter().zip(widths).zip(columns) {
            let padded = match align {
                Align::Left => write!(line, "{cell:<width$}  "),
                Align::Right => write!(line, "{cell:>width$}  "),
            };
            // Writing to memory does not fail.
            debug_assert!(padded.is_ok());
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
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
}
