//! `netattachd --check`: shows what this node offers an agent with these settings, each feature with its
//! use and the remedy if it is missing. Features are found by trying them (`looks`), in a netns and a pin
//! directory of its own; a running agent and its attachments are not affected.

mod looks;

use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use crate::settings::{CheckFormat, Settings};

/// Whether a feature is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    Ok,
    Missing,
    /// It could not be determined.
    Unknown,
}

/// A feature that the agent uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Row {
    /// Its name.
    what: String,
    /// Whether it is available.
    state: State,
    /// Whether an agent with these settings does without it.
    needed: bool,
    /// Its use.
    #[serde(rename = "for")]
    purpose: String,
    /// Details: why it is missing, or where it is.
    detail: String,
    /// The remedy, if it is missing.
    remedy: String,
}

impl Row {
    /// Makes a row for a feature used for `purpose`; `remedy` is shown only if it is missing.
    fn new(what: impl Into<String>, needed: bool, purpose: &str, remedy: &str, found: Found) -> Self {
        let (state, detail) = match found {
            Ok(detail) => (State::Ok, detail),
            Err(Lack::Missing(why)) => (State::Missing, why),
            Err(Lack::Unknown(why)) => (State::Unknown, why),
        };
        let remedy = if state == State::Ok { String::new() } else { remedy.to_owned() };
        Self { what: what.into(), state, needed, purpose: purpose.to_owned(), detail, remedy }
    }

    /// Whether it counts as missing; a feature that could not be determined does.
    fn is_lacking(&self) -> bool {
        self.needed && self.state != State::Ok
    }
}

/// Details of an available feature, or why it is not available.
type Found = Result<String, Lack>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Lack {
    /// The reason, if it says more.
    Missing(String),
    Unknown(String),
}

/// The output as JSON.
#[derive(Debug, Serialize)]
struct Report<'r> {
    /// Release of the kernel.
    kernel: &'r str,
    /// Whether everything needed is available.
    ok: bool,
    checks: &'r [Row],
}

/// Checks everything, prints the result, and fails if a needed feature is missing.
pub(in crate::agent) fn run(settings: &Settings, format: CheckFormat) -> ExitCode {
    let rows = looks::all(settings);
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let is_ok = !rows.iter().any(Row::is_lacking);
    let text = match format {
        CheckFormat::Table => table(&kernel, &rows),
        CheckFormat::Json => match json(&kernel, is_ok, &rows) {
            Ok(text) => text,
            Err(error) => {
                tracing::error!("encode the answer: {error}");
                return ExitCode::FAILURE;
            }
        },
    };
    // A reader that closes the pipe early is no failure; the exit code still shows the result.
    let _ = io::stdout().write_all(text.as_bytes());
    if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn json(kernel: &str, is_ok: bool, rows: &[Row]) -> serde_json::Result<String> {
    let report = Report { kernel, ok: is_ok, checks: rows };
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

/// Formats one line for each feature, the remedy below a missing one, and a summary.
fn table(kernel: &str, rows: &[Row]) -> String {
    let width = |cell: fn(&Row) -> &str| rows.iter().map(|row| cell(row).chars().count()).max().unwrap_or(0);
    let (what, purpose) = (width(|row| &row.what), width(|row| &row.purpose));
    let mut text = format!("kernel {kernel}\n");
    for row in rows {
        let state = match (row.state, row.needed) {
            (State::Ok, _) => "ok",
            (State::Missing, true) => "MISSING",
            (State::Missing, false) => "missing",
            (State::Unknown, true) => "UNKNOWN",
            (State::Unknown, false) => "unknown",
        };
        let line = format!("{:<what$}  {state:<7}  {:<purpose$}  {}", row.what, row.purpose, row.detail);
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
        if !row.remedy.is_empty() {
            let _ = writeln!(text, "{:what$}  -> {}", "", row.remedy);
        }
    }
    let lacking: Vec<&str> =
        rows.iter().filter(|row| row.is_lacking()).map(|row| row.what.as_str()).collect();
    text += &match lacking.as_slice() {
        [] => "everything that these settings need is there\n".to_owned(),
        lacking => format!("an agent with these settings lacks: {}\n", lacking.join(", ")),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [Row; 3] {
        [
            Row::new("veth", true, "networks", "load it", Ok("loaded".into())),
            Row::new("tcx", false, "uplinks", "Linux 6.6", Err(Lack::Missing(String::new()))),
            Row::new("bpffs", true, "everything", "mount it", Err(Lack::Unknown("no such file".into()))),
        ]
    }

    #[test]
    fn each_thing_that_is_missing_has_its_remedy_below_it() {
        let expected = "\
kernel 6.1.0
veth   ok       networks    loaded
tcx    missing  uplinks
       -> Linux 6.6
bpffs  UNKNOWN  everything  no such file
       -> mount it
an agent with these settings lacks: bpffs
";
        assert_eq!(table("6.1.0", &rows()), expected);
        assert!(table("6.1.0", &rows()[..2]).ends_with("everything that these settings need is there\n"));
    }

    /// `NETATTACH_WRITE_GOLDEN=1` writes the file.
    #[test]
    fn its_form_for_programs_is_pinned_and_documented() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/agent/node/check/golden.json");
        let text = json("6.1.0", false, &rows()).unwrap();
        if std::env::var_os("NETATTACH_WRITE_GOLDEN").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        assert_eq!(text, std::fs::read_to_string(&path).unwrap());
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let document = include_str!("../../../../../docs/image.md");
        for object in [&value, &value["checks"][0]] {
            for key in object.as_object().unwrap().keys() {
                assert!(document.contains(&format!("`{key}`")), "docs/image.md lacks {key}");
            }
        }
        for state in [State::Ok, State::Missing, State::Unknown] {
            let word = serde_json::to_value(state).unwrap();
            let word = word.as_str().unwrap();
            assert!(document.contains(&format!("`{word}`")), "docs/image.md lacks {word}");
        }
    }
}
