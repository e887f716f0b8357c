//! Prints a whole chain of errors on one line, once.

use std::error::Error;
use std::fmt;

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

#[cfg(test)]
mod tests {
    use super::*;

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
