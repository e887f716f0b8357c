//! One call of the CNI executable, and how it ended.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::node::executable;

/// A call of the CNI executable, ready to be changed and run.
#[derive(Debug, Clone)]
pub struct Call {
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Standard input.
    pub stdin: String,
}

/// The outcome of a CNI call.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Exit code.
    pub exit: i32,
    /// Its output; `null` if it printed nothing.
    pub json: Value,
}

impl Call {
    /// Adds a variable.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Removes a variable.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    /// Replaces the configuration.
    #[must_use]
    pub fn stdin(mut self, stdin: impl ToString) -> Self {
        self.stdin = stdin.to_string();
        self
    }

    /// Runs the CNI executable.
    ///
    /// # Panics
    /// The executable cannot be run, is ended by a signal, or prints something other than one JSON value.
    pub fn run(&self) -> Outcome {
        self.run_by(&executable("netattach").expect("the CNI executable is built"))
    }

    /// Runs another CNI executable.
    ///
    /// # Panics
    /// As [`Call::run`].
    pub fn run_by(&self, executable: &Path) -> Outcome {
        let mut child = Command::new(executable)
            .env_clear()
            .envs(&self.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the CNI executable starts");
        let written = child.stdin.take().map(|mut stdin| stdin.write_all(self.stdin.as_bytes()));
        let mut stdout = String::new();
        let read = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut stdout));
        let status = child.wait().expect("the CNI executable ends");
        written.expect("stdin is a pipe").expect("stdin is read");
        read.expect("stdout is a pipe").expect("stdout is text");
        let json = match stdout.trim() {
            "" => Value::Null,
            text => serde_json::from_str(text).expect("stdout is JSON"),
        };
        Outcome { exit: status.code().expect("no signal"), json }
    }
}

impl Outcome {
    /// The result of a successful call.
    ///
    /// # Panics
    /// The call failed.
    pub fn success(self) -> Value {
        assert_eq!(self.exit, 0, "{:#}", self.json);
        self.json
    }

    /// Code and message of a failed call, details appended.
    ///
    /// # Panics
    /// The call succeeded.
    pub fn failure(self) -> (u64, String) {
        assert_eq!(self.exit, 1, "{:#}", self.json);
        let text = |key: &str| self.json[key].as_str().unwrap_or_default().to_owned();
        let code = self.json["code"].as_u64().expect("an error has a code");
        let details = text("details");
        let separator = if details.is_empty() { "" } else { ": " };
        (code, format!("{}{separator}{details}", text("msg")))
    }
}
