//! The errors of plugin calls, and their form in a report to a container runtime.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use super::child::{ChildError, Invocation, Output, STDOUT_LIMIT};
use super::{Call, find};
use crate::budget;
use crate::cni::json::count_values;
use crate::cni::version::VersionError;
use crate::cni::{CniError, Command, Value, code};
use crate::error_chain::Chain;

/// How much of an unreadable stdout is quoted, in bytes.
const EXCERPT: usize = 256;

/// Calling a plugin failed.
#[derive(Debug, thiserror::Error)]
pub enum DelegateError {
    /// The configuration's `type` is empty.
    #[error("no plugin name provided")]
    NoType,
    /// The configuration's `type` is not a file name.
    #[error("invalid plugin name: {plugin:?}")]
    InvalidType {
        /// The `type`.
        plugin: String,
    },
    /// There is no directory to search.
    #[error("no paths provided to find plugin {plugin:?} in")]
    NoSearchPath {
        /// The `type`.
        plugin: String,
    },
    /// No directory holds a regular file of that name.
    #[error("failed to find plugin {plugin:?} in path [{}]{}", join(search), list(not_files))]
    NotFound {
        /// The `type`.
        plugin: String,
        /// The directories that were searched.
        search: Vec<PathBuf>,
        /// Paths with that name that are not regular files.
        not_files: Vec<PathBuf>,
    },
    /// The executable could not be started.
    #[error("start plugin {plugin:?} ({})", path.display())]
    Spawn {
        /// The `type`.
        plugin: String,
        /// The executable.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The executable exists, but its loader or interpreter does not.
    #[error(
        "start plugin {plugin:?}: {} is there, but the loader or interpreter that it names is not{}",
        path.display(),
        elsewhere(*in_root)
    )]
    NoLoader {
        /// The `type`.
        plugin: String,
        /// The executable.
        path: PathBuf,
        /// Whether it was started in a root directory that the settings name.
        in_root: bool,
    },
    /// The executable was still open for writing when the wait ended.
    #[error("start plugin {plugin:?}: {} is still being written after {waited:.1?}", path.display())]
    Busy {
        /// The `type`.
        plugin: String,
        /// The executable.
        path: PathBuf,
        /// How long starting it was retried.
        waited: Duration,
    },
    /// Communication with the running plugin failed.
    #[error("talk to plugin {plugin:?} ({command})")]
    Pipe {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The plugin did not end in time; it and its process group were killed.
    #[error("plugin {plugin:?} ({command}) did not end within {timeout:?} and was killed")]
    TimedOut {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The timeout.
        timeout: Duration,
        /// The end of its stderr.
        stderr: String,
    },
    /// The kernel killed the plugin: all plugins together had taken more memory than they may.
    #[error(
        "plugin {plugin:?} ({command}) was killed by the kernel: plugins took more than {} MiB of memory together; see \
         delegation.memoryLimitMiB",
        limit >> 20
    )]
    OutOfMemory {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The limit, in bytes.
        limit: u64,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin exceeded the size limit of stdout; it was killed.
    #[error("plugin {plugin:?} ({command}) wrote more than {STDOUT_LIMIT} bytes to stdout and was killed")]
    TooMuchOutput {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin reported an error in the form of the specification.
    #[error("plugin {plugin:?} failed ({command})")]
    Reported {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The error it reported.
        #[source]
        source: CniError,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin failed and printed nothing on stdout.
    #[error("plugin {plugin:?} failed ({command}) {}: {status}", quote(stderr))]
    Silent {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// Exit status.
        status: ExitStatus,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin failed and printed something other than an error object.
    #[error("plugin {plugin:?} failed ({command}, {status}) and its message {stdout:?} is not a CNI error")]
    Unreadable {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// Exit status.
        status: ExitStatus,
        /// The beginning of its stdout.
        stdout: String,
        /// The problem.
        #[source]
        source: serde_json::Error,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin succeeded but did not print JSON.
    #[error("plugin {plugin:?} ({command}) succeeded but printed {stdout:?}")]
    Garbage {
        /// The `type`.
        plugin: String,
        /// The verb.
        command: Command,
        /// The beginning of its stdout.
        stdout: String,
        /// The problem.
        #[source]
        source: serde_json::Error,
        /// The end of its stderr.
        stderr: String,
    },
    /// The plugin printed JSON that is not a result.
    #[error("decode the result of plugin {plugin:?}")]
    Result {
        /// The `type`.
        plugin: String,
        /// The problem.
        #[source]
        source: CniError,
    },
    /// The answer to VERSION is invalid.
    #[error("decode the versions that plugin {plugin:?} supports")]
    VersionReply {
        /// The `type`.
        plugin: String,
        /// The problem.
        #[source]
        source: VersionReplyError,
    },
}

/// An answer to VERSION cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VersionReplyError {
    /// A key has the wrong type.
    #[error("decode the answer")]
    Shape(#[source] crate::cni::json::KeyError),
    /// `cniVersion` is absent or empty.
    #[error("key cniVersion: missing")]
    NoVersion,
    /// `supportedVersions` is absent although the version requires it.
    #[error("key supportedVersions: missing in an answer of version {version:?}")]
    NoSupportedVersions {
        /// The `cniVersion` of the answer.
        version: String,
    },
    /// An entry is not a version number.
    #[error("key supportedVersions[{index}]")]
    Entry {
        /// Position of the entry, from zero.
        index: usize,
        /// The problem.
        #[source]
        source: VersionError,
    },
}

impl DelegateError {
    /// Whether the plugin ran to its end and reported a failure.
    pub fn is_by_the_plugin(&self) -> bool {
        matches!(self, Self::Reported { .. } | Self::Silent { .. } | Self::Unreadable { .. })
    }

    /// The error that the plugin itself reported.
    pub fn reported(&self) -> Option<&CniError> {
        match self {
            Self::Reported { source, .. } => Some(source),
            _ => None,
        }
    }

    /// The end of the plugin's stderr; empty if it wrote nothing or never ran.
    pub fn stderr(&self) -> &str {
        match self {
            Self::TimedOut { stderr, .. }
            | Self::OutOfMemory { stderr, .. }
            | Self::TooMuchOutput { stderr, .. }
            | Self::Reported { stderr, .. }
            | Self::Silent { stderr, .. }
            | Self::Unreadable { stderr, .. }
            | Self::Garbage { stderr, .. } => stderr,
            _ => "",
        }
    }

    /// The code that reports this error to a container runtime: the plugin's own where it gave one.
    pub fn code(&self) -> u32 {
        match self {
            // The plugin reported an error without a code; 0 means success elsewhere.
            Self::Reported { source, .. } if source.code == 0 => code::INTERNAL,
            Self::Reported { source, .. } => source.code,
            Self::NoType | Self::InvalidType { .. } | Self::NoSearchPath { .. } | Self::NotFound { .. } => {
                code::INVALID_CONFIG
            }
            Self::Busy { .. } | Self::TimedOut { .. } | Self::OutOfMemory { .. } => code::TRY_AGAIN_LATER,
            Self::Spawn { .. } | Self::NoLoader { .. } | Self::Pipe { .. } => code::IO_FAILURE,
            Self::TooMuchOutput { .. }
            | Self::Garbage { .. }
            | Self::Result { .. }
            | Self::VersionReply { .. } => code::DECODING_FAILURE,
            Self::Silent { .. } | Self::Unreadable { .. } => code::INTERNAL,
        }
    }

    pub(super) fn from_child(call: &Call<'_>, invocation: &Invocation<'_>, error: ChildError) -> Self {
        let &Invocation { program, root, timeout, .. } = invocation;
        let plugin = call.plugin_type.to_owned();
        let (command, path) = (call.command, program.to_owned());
        let is_there = || find::is_file(program, root) == Some(true);
        match error {
            ChildError::Spawn(source) if source.kind() == io::ErrorKind::NotFound && is_there() => {
                Self::NoLoader { plugin, path, in_root: root.is_some() }
            }
            ChildError::Spawn(source) => Self::Spawn { plugin, path, source },
            ChildError::Busy(waited) => Self::Busy { plugin, path, waited },
            ChildError::Pipe(source) => Self::Pipe { plugin, command, source },
            ChildError::TimedOut { stderr } => Self::TimedOut { plugin, command, timeout, stderr },
            ChildError::TooMuchOutput { stderr } => Self::TooMuchOutput { plugin, command, stderr },
        }
    }

    pub(super) fn garbage(call: &Call<'_>, stdout: &[u8], source: serde_json::Error, stderr: String) -> Self {
        Self::Garbage {
            plugin: call.plugin_type.to_owned(),
            command: call.command,
            stdout: excerpt(stdout),
            source,
            stderr,
        }
    }
}

impl From<DelegateError> for CniError {
    fn from(error: DelegateError) -> Self {
        Self::from(&error)
    }
}

impl From<&DelegateError> for CniError {
    /// Keeps the plugin's own code and message, names the plugin, and adds its stderr to the details.
    fn from(error: &DelegateError) -> Self {
        let (msg, details) = match error {
            DelegateError::Reported { source, .. } => {
                (format!("{error}: {}", source.msg), source.details.as_str())
            }
            _ => (Chain(error).to_string(), ""),
        };
        let stderr = match error {
            // Already part of the message.
            DelegateError::Silent { .. } => String::new(),
            _ if error.stderr().is_empty() => String::new(),
            _ => format!("stderr: {}", error.stderr()),
        };
        let separator = if details.is_empty() || stderr.is_empty() { "" } else { "; " };
        Self { code: error.code(), msg, details: format!("{details}{separator}{stderr}") }
    }
}

/// Interprets the exit of a plugin: returns its stdout, or an error.
pub(super) fn judge(call: &Call<'_>, output: Output) -> Result<Vec<u8>, DelegateError> {
    let Output { status, stdout, stderr, .. } = output;
    let (plugin, command) = (call.plugin_type.to_owned(), call.command);
    if !status.success() {
        if stdout.trim_ascii().is_empty() {
            return Err(DelegateError::Silent { plugin, command, status, stderr });
        }
        return Err(match CniError::parse(&stdout) {
            Ok(source) => DelegateError::Reported { plugin, command, source, stderr },
            Err(source) => {
                let stdout = excerpt(&stdout);
                DelegateError::Unreadable { plugin, command, status, stdout, source, stderr }
            }
        });
    }
    let expects_json = matches!(command, Command::Add | Command::Version);
    if expects_json && let Err(error) = budget::RESULT_VALUES.check(count_values(&stdout)) {
        let source = CniError::new(code::DECODING_FAILURE, error.to_string());
        return Err(DelegateError::Result { plugin, source });
    }
    if expects_json && let Err(source) = serde_json::from_slice::<Value>(&stdout) {
        return Err(DelegateError::garbage(call, &stdout, source, stderr));
    }
    if !stderr.is_empty() {
        tracing::info!(plugin, command = command.as_str(), stderr, "plugin wrote to stderr");
    }
    Ok(stdout)
}

fn excerpt(stdout: &[u8]) -> String {
    let text = String::from_utf8_lossy(stdout.get(..EXCERPT).unwrap_or(stdout));
    if stdout.len() > EXCERPT { format!("{text}...") } else { text.into_owned() }
}

fn quote(stderr: &str) -> String {
    if stderr.is_empty() { "with no error message".into() } else { format!("saying {stderr:?}") }
}

fn join(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
}

/// Returns a hint for a plugin that does not start in this process's own root directory.
fn elsewhere(in_root: bool) -> &'static str {
    if in_root {
        ""
    } else {
        ": in a container, have plugins started in the node's root directory (delegation.root)"
    }
}

fn list(not_files: &[PathBuf]) -> String {
    if not_files.is_empty() {
        return String::new();
    }
    let verb = if not_files.len() == 1 { "is not a regular file" } else { "are not regular files" };
    format!(" ({} {verb})", join(not_files))
}
