//! Prints a chain of errors on one line, and truncates long texts from other sources.

use std::error::Error;
use std::fmt;

/// Longest problem text that is kept or shown, in bytes. The note of a Kubernetes event has the same limit.
pub const MOST_TEXT: usize = 1024;

/// Displays an error followed by each of its causes, separated by `: `.
///
/// Each layer's `Display` prints only its own part, so the line reads as a path from the operation to the kernel's
/// error.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

/// Truncates a text to [`MOST_TEXT`] bytes, as it may repeat long input from others.
pub fn clipped(mut problem: String) -> String {
    const MORE: char = '…';
    if problem.len() > MOST_TEXT {
        problem.truncate(problem.floor_char_boundary(MOST_TEXT - MORE.len_utf8()));
        problem.push(MORE);
    }
    problem
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_problems_are_cut_off_between_characters() {
        assert_eq!(clipped("x".repeat(MOST_TEXT)), "x".repeat(MOST_TEXT));
        let long = clipped(format!("x{}", "ä".repeat(MOST_TEXT)));
        assert_eq!(long, format!("x{}…", "ä".repeat(MOST_TEXT / 2 - 2)));
        assert_eq!(long.len(), MOST_TEXT);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("create macvlan on eno2")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn chain_reads_from_operation_to_cause() {
        let error = Outer(std::io::Error::from_raw_os_error(16));
        assert_eq!(
            Chain(&error).to_string(),
            "create macvlan on eno2: Device or resource busy (os error 16)"
        );
    }
}
