//! The agent's log, and the variable `NETATTACH_LOG` that configures it.

use std::env::{self, VarError};
use std::io::{self, Write};
use std::panic::PanicHookInfo;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use crate::settings::LogFormat;

/// The variable that configures the log.
const VARIABLE: &str = "NETATTACH_LOG";
/// The filter if the variable is missing or empty.
const DEFAULT: &str = "info,kube_client=off";
/// Prefixes of the log targets that exist.
const TARGETS: [&str; 1] = ["netattach"];
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The variable is invalid.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The variable is not UTF-8.
    #[error("{VARIABLE} is not UTF-8")]
    NotText,
    /// The variable does not have the expected form.
    #[error("{VARIABLE}={0:?} is not LEVEL or MODULE=LEVEL, several separated by commas")]
    Form(String, #[source] ParseError),
    /// A word matches no log target.
    #[error(
        "{VARIABLE}: {0:?} would log nothing: give a level ({levels}) or a module of netattach and its level, such as \
         netattach::policy=debug",
        levels = LEVELS.join(", ")
    )]
    Nothing(String),
}

/// Starts logging to standard error. After this call a panic is logged, and ends the process.
///
/// # Errors
/// The variable is invalid; the default filter is then used.
pub(in crate::agent) fn start(format: LogFormat) -> Result<(), LogError> {
    let filter = match env::var(VARIABLE) {
        Ok(text) => filter(&text),
        Err(VarError::NotPresent) => Ok(EnvFilter::new(DEFAULT)),
        Err(VarError::NotUnicode(_)) => Err(LogError::NotText),
    };
    let (filter, outcome) = match filter {
        Ok(filter) => (filter, Ok(())),
        Err(error) => (EnvFilter::new(DEFAULT), Err(error)),
    };
    // If the reader of the log is gone, that must not end the agent: by default such an error is printed to standard
    // error, which panics.
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => lines.init(),
        // Fields are at the top level, beside the message, as log collectors expect.
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    std::panic::set_hook(Box::new(|panic| {
        let line = last_line(panic);
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!("{line}");
        } else {
            // Printed directly, because the log filter might hide the reason why the agent has ended.
            let _ = writeln!(io::stderr(), "{line}");
        }
        // Also ends test executables, whose panics would otherwise unwind.
        std::process::abort();
    }));
    outcome
}

/// Returns the log line for a panic: its location and message.
fn last_line(panic: &PanicHookInfo<'_>) -> String {
    let panicked = panic.to_string().replace('\n', " ");
    format!("the agent {panicked}; it ends, attachments keep working")
}

fn filter(text: &str) -> Result<EnvFilter, LogError> {
    if text.trim().is_empty() {
        return Ok(EnvFilter::new(DEFAULT));
    }
    let filter = EnvFilter::try_new(text).map_err(|error| LogError::Form(text.to_owned(), error))?;
    // A span's fields may contain commas; such filters are not checked, their authors are expected to know the syntax.
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

/// Whether a word is a numeric level, 0 to 5.
fn is_number(word: &str) -> bool {
    matches!(word.parse::<u8>(), Ok(0..=5))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::error_chain::Chain;

    #[test]
    fn a_panic_is_one_line_with_its_place() {
        // The panic hook belongs to the process: panics of other tests keep the old hook.
        let (this, others) = (std::thread::current().id(), std::panic::take_hook());
        let (sender, told) = mpsc::channel();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().id() == this {
                let _ = sender.send(last_line(panic));
            } else {
                others(panic);
            }
        }));
        let line = line!() + 1;
        assert!(std::panic::catch_unwind(|| panic!("on\npurpose")).is_err());
        let file = file!();
        let place = told.recv().unwrap();
        let place = place.strip_prefix(&format!("the agent panicked at {file}:{line}:")).unwrap();
        let (column, rest) = place.split_once(": ").unwrap();
        assert!(column.parse::<u32>().is_ok(), "{place}");
        assert_eq!(rest, "on purpose; it ends, attachments keep working");
    }

    #[test]
    fn a_filter_that_would_log_nothing_is_refused() {
        for good in ["", " ", "debug", "WARN", "3", "off", "info,netattach::policy=debug", "netattach=trace"]
        {
            assert!(filter(good).is_ok(), "{good}");
        }
        let message = |text: &str| filter(text).map(drop).map_err(|error| Chain(&error).to_string());
        let form = message("foo=bar=baz").unwrap_err();
        let start =
            "NETATTACH_LOG=\"foo=bar=baz\" is not LEVEL or MODULE=LEVEL, several separated by commas: ";
        assert!(form.starts_with(start), "{form}");
        assert!(
            message("info,netattach=loud")
                .unwrap_err()
                .starts_with("NETATTACH_LOG=\"info,netattach=loud\" is not")
        );
        for word in ["inf", "policy=debug", "7"] {
            assert_eq!(
                message(word),
                Err(format!(
                    "NETATTACH_LOG: {word:?} would log nothing: give a level (off, error, warn, info, debug, trace) or a module of \
                     netattach and its level, such as netattach::policy=debug"
                ))
            );
        }
    }
}
