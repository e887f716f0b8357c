//! The transcript: numbered steps, commands, their output, and a tick for each expectation that is met.

use std::fmt::{self, Debug};
use std::io::{self, IsTerminal};

use crate::progress;

const INDENT: &str = "    ";

/// An observation differs from the expectation.
#[derive(Debug)]
struct Unexpected {
    what: String,
    expected: String,
    seen: String,
}

impl fmt::Display for Unexpected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not as expected: {}\n expected: {}\n     seen: {}", self.what, self.expected, self.seen)
    }
}

impl std::error::Error for Unexpected {}

/// Writes the transcript to standard output.
pub struct Transcript {
    colours: bool,
    steps: u8,
    ticks: u16,
}

impl Transcript {
    /// An empty one; in colour when a person looks at it.
    pub fn begin() -> Self {
        Self { colours: io::stdout().is_terminal(), steps: 0, ticks: 0 }
    }

    /// Begins the next step.
    pub fn step(&mut self, title: &str, why: &str) {
        self.steps += 1;
        progress::line("");
        progress::line(&self.painted("1", &format!("{}. {title}", self.steps)));
        progress::line(&format!("   {why}"));
        progress::line("");
    }

    /// A command as one would type it; may have several lines.
    pub fn command(&self, line: &str) {
        for (number, part) in line.lines().enumerate() {
            let prompt = if number == 0 { "$ " } else { "  " };
            progress::line(&format!("{INDENT}{}", self.painted("36", &format!("{prompt}{part}"))));
        }
    }

    /// Output of a command, or text of the demonstration.
    pub fn output(&self, text: &str) {
        for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
            progress::line(&format!("{INDENT}  {line}"));
        }
    }

    /// Lines of words in aligned columns.
    pub fn columns<const N: usize>(&self, rows: &[[String; N]]) {
        self.output(&aligned(rows));
    }

    /// Compares the observation with the expectation.
    ///
    /// # Errors
    /// They differ.
    pub fn expect<T: PartialEq + Debug>(&mut self, what: &str, expected: &T, seen: &T) -> anyhow::Result<()> {
        if expected == seen {
            self.ticks += 1;
            progress::line(&format!("{INDENT}{} {what}", self.painted("32", "✓")));
            return Ok(());
        }
        progress::line(&format!("{INDENT}{} {what}", self.painted("31", "✗")));
        let (expected, seen) = (format!("{expected:?}"), format!("{seen:?}"));
        Err(Unexpected { what: what.to_owned(), expected, seen }.into())
    }

    /// How many things were as expected.
    pub fn ticks(&self) -> u16 {
        self.ticks
    }

    fn painted(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_word() {
        let rows = [["a", "long word", "x"], ["bcd", "w", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(aligned(&rows), "a    long word  x\nbcd  w\n");
    }

    #[test]
    fn a_difference_says_what_was_expected_and_what_was_seen() {
        let mut transcript = Transcript::begin();
        transcript.expect("one is one", &1, &1).unwrap();
        let error = transcript.expect("links left", &vec!["lo"], &vec!["lo", "eth0"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "not as expected: links left\n expected: [\"lo\"]\n     seen: [\"lo\", \"eth0\"]"
        );
        assert_eq!(transcript.ticks(), 1);
    }
}
