//! What the agent logs: the variable `NETATTACH_LOG`.

use std::env::{self, VarError};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// Name of the variable.
const VARIABLE: &str = "NETATTACH_LOG";
/// Without the variable, or with an empty one.
const DEFAULT: &str = "info";
/// Beginnings of what logs: nothing else does.
const TARGETS: [&str; 1] = ["netattach"];
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The variable has no meaning.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Not text.
    #[error("{VARIABLE} is not UTF-8")]
    NotText,
    /// Not of the form that it should have.
    #[error("{VARIABLE}={0:?} is not LEVEL or MODULE=LEVEL, several separated by commas")]
    Form(String, #[source] ParseError),
    /// A word that would log nothing.
    #[error(
        "{VARIABLE}: {0:?} would log nothing: say a level ({levels}) or a module of netattach and its level, such as \
         netattach::policy=debug",
        levels = LEVELS.join(", ")
    )]
    Nothing(String),
}

/// Logs to standard error from now on.
///
/// # Errors
/// The variable has no meaning; then the default is logged.
pub(super) fn start() -> Result<(), LogError> {
    let filter = match env::var(VARIABLE) {
        Ok(text) => filter(&text),
        Err(VarError::NotPresent) => Ok(EnvFilter::new(DEFAULT)),
        Err(VarError::NotUnicode(_)) => Err(LogError::NotText),
    };
    let (filter, outcome) = match filter {
        Ok(filter) => (filter, Ok(())),
        Err(error) => (EnvFilter::new(DEFAULT), Err(error)),
    };
    // A reader of the log that is gone must not end the agent: the default says so on standard error, and panics.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .init();
    outcome
}

fn filter(text: &str) -> Result<EnvFilter, LogError> {
    if text.trim().is_empty() {
        return Ok(EnvFilter::new(DEFAULT));
    }
    let filter = EnvFilter::try_new(text).map_err(|error| LogError::Form(text.to_owned(), error))?;
    // A span's fields may have commas; who writes those knows what they are for.
    let plain = text.split(',').map(str::trim).filter(|word| !word.is_empty() && !text.contains('['));
    for word in plain {
        let target = word.split('=').next().unwrap_or_default();
        let is_level = LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word)) || is_number(word);
        if !is_level && !TARGETS.iter().any(|known| target.starts_with(known)) {
            return Err(LogError::Nothing(word.to_owned()));
        }
    }
    Ok(filter)
}

/// Levels have numbers too, 0 to 5.
fn is_number(word: &str) -> bool {
    matches!(word.parse::<u8>(), Ok(0..=5))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::Chain;

    #[test]
    fn what_would_log_nothing_is_refused_by_the_name_of_the_variable() {
        for good in ["", " ", "debug", "WARN", "3", "off", "info,netattach::policy=debug", "netattach=trace"]
        {
            assert!(filter(good).is_ok(), "{good}");
        }
        let said = |text: &str| filter(text).map(drop).map_err(|error| Chain(&error).to_string());
        let form = said("foo=bar=baz").unwrap_err();
        let start =
            "NETATTACH_LOG=\"foo=bar=baz\" is not LEVEL or MODULE=LEVEL, several separated by commas: ";
        assert!(form.starts_with(start), "{form}");
        assert!(
            said("info,netattach=loud")
                .unwrap_err()
                .starts_with("NETATTACH_LOG=\"info,netattach=loud\" is not")
        );
        for word in ["inf", "policy=debug", "7"] {
            assert_eq!(
                said(word),
                Err(format!(
                    "NETATTACH_LOG: {word:?} would log nothing: say a level (off, error, warn, info, debug, trace) or a module of \
                     netattach and its level, such as netattach::policy=debug"
                ))
            );
        }
    }
}
