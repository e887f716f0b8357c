//! The CNI executable: passes environment and stdin to the agent, and the agent's reply to stdout.
//!
//! All decisions are left to the agent. The executable only does what an absent agent cannot: it reports
//! the absence with the right error code, and it records a DEL for later and then reports success. Two
//! commands need no agent: `VERSION`, and an empty command, which people use.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::client::{self, ClientError, Patience};
use crate::cni::{NEWEST, VERSIONS, code};
use crate::error_chain::Chain;
use crate::identifier::{Invalid, check_container_id, check_link_name};
use crate::message::{CniCall, CniReply, Request, Response};
use crate::pending::{self, PendingError};
use crate::{DEFAULT_SOCKET, DEFAULT_STATE_DIR};

/// Longest standard input in bytes.
pub const MAX_STDIN: u64 = crate::budget::STDIN.most as u64;

/// How long connecting to an absent agent is retried. Container runtimes wait for it, so it is well below a
/// second.
pub const CONNECT_PATIENCE: Duration = Duration::from_millis(700);

/// How long ADD and CHECK wait for an agent that has served before, in seconds, unless the configuration
/// sets [`WAIT_KEY`]. A restart of the agent takes a few seconds, and a kubelet repeats a failed ADD only
/// after ten.
pub const DEFAULT_AGENT_WAIT: u64 = 5;

/// Maximum of [`WAIT_KEY`], in seconds: well below the timeout that a kubelet gives its runtime.
pub const MAX_AGENT_WAIT: u64 = 60;

/// The configuration's key for the wait of [`DEFAULT_AGENT_WAIT`].
pub const WAIT_KEY: &str = "agentWaitSeconds";

/// Timeout of an answer: as long as the kubelet gives a container runtime to set up a sandbox, which is twice
/// its `runtimeRequestTimeout`. The environment variable [`TIMEOUT_VARIABLE`] overrides it.
pub const ANSWER_PATIENCE: Duration = Duration::from_secs(240);

/// Timeout of the answer to a DEL. To stop a sandbox, the kubelet gives a runtime its `runtimeRequestTimeout`
/// (2 minutes), CRI-O gives a DEL 1 minute of it (`networkStop`), and containerd 2 gives 1 minute to the DEL
/// of a sandbox that could not be started (`deferCleanupTimeout`). Then the executable is killed, so the DEL
/// of an agent that hangs has to be recorded before. [`TIMEOUT_VARIABLE`] overrides it.
pub const DEL_PATIENCE: Duration = Duration::from_secs(50);

/// Timeout of STATUS, which runtimes call every few seconds and wait for. A healthy agent answers from
/// memory as soon as it is scheduled; an agent that is starting, hanging or absent counts as not available.
pub const STATUS_PATIENCE: Duration = Duration::from_secs(5);

/// Overrides [`ANSWER_PATIENCE`] and [`DEL_PATIENCE`]: seconds, decimals allowed.
pub const TIMEOUT_VARIABLE: &str = "NETATTACH_TIMEOUT";

/// The variable with the trace of the caller (W3C Trace Context, `traceparent`); passed to the agent.
pub const TRACE_VARIABLE: &str = "TRACEPARENT";
/// Longest value of [`TRACE_VARIABLE`] that is passed on, in bytes; a value of version 00 has 55.
const LONGEST_TRACE: usize = 256;

/// The call could not be passed to the agent.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// A variable is not UTF-8.
    #[error("environment variable {0} is not UTF-8")]
    Variable(String),
    /// [`TIMEOUT_VARIABLE`] is not a number of seconds.
    #[error("environment variable {TIMEOUT_VARIABLE}: {0:?} is not a number of seconds")]
    Timeout(String),
    /// Reading standard input failed.
    #[error("read stdin")]
    ReadStdin(#[source] std::io::Error),
    /// Standard input is longer than [`MAX_STDIN`].
    #[error("stdin is longer than {MAX_STDIN} bytes")]
    LongStdin,
    /// Standard input is not UTF-8.
    #[error("stdin is not UTF-8")]
    BinaryStdin(#[source] std::string::FromUtf8Error),
    /// Standard input is not a JSON object.
    #[error("stdin is not a network configuration")]
    Decode(#[source] serde_json::Error),
    /// An identifier is invalid by the specification.
    #[error("{}{}", .0.msg, after_colon(&.0.details))]
    Identifier(Invalid),
    /// A key of netattach must be an absolute path and is not.
    #[error("{0} must be an absolute path")]
    Path(&'static str),
    /// [`WAIT_KEY`] is not a whole number of seconds up to [`MAX_AGENT_WAIT`].
    #[error("{WAIT_KEY} must be a whole number of seconds from 0 to {MAX_AGENT_WAIT}")]
    Wait,
    /// The agent did not answer.
    #[error("{verb}")]
    Agent {
        /// The CNI command.
        verb: String,
        /// The cause.
        source: ClientError,
    },
    /// The agent did not answer a DEL, and the DEL could not be recorded either.
    #[error("DEL is not done and could not be recorded ({}): repeat it", Chain(.unrecorded))]
    NotRecorded {
        /// Why it could not be recorded.
        unrecorded: Box<PendingError>,
        /// The agent's failure.
        source: ClientError,
    },
}

impl ShimError {
    /// The error code of the CNI specification for this error, which depends on the failed command `verb`.
    pub fn code(&self, verb: &str) -> u32 {
        match self {
            Self::Variable(_) | Self::Timeout(_) => code::INVALID_ENVIRONMENT,
            Self::Identifier(error) => error.code,
            Self::ReadStdin(_) => code::IO_FAILURE,
            Self::LongStdin | Self::BinaryStdin(_) | Self::Decode(_) => code::DECODING_FAILURE,
            Self::Path(_) | Self::Wait => code::INVALID_CONFIG,
            Self::Agent { .. } if verb == "STATUS" => code::NOT_AVAILABLE,
            Self::Agent { .. } | Self::NotRecorded { .. } => code::TRY_AGAIN_LATER,
        }
    }
}

/// Runs one call and returns the exit code.
pub fn run(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    stdin: impl Read,
    stdout: &mut impl Write,
    stderr: &mut impl Write,
) -> u8 {
    let reply = match Environment::read(environment) {
        Err(error) => failure(NEWEST, "", &error),
        Ok(environment) => match environment.verb() {
            "" => {
                // The text is for people; a failure to write it cannot be reported.
                let _ = writeln!(stderr, "{}", about());
                return 0;
            }
            "VERSION" => CniReply { stdout: versions(), exit: 0 },
            _ => reply(environment, stdin, stderr),
        },
    };
    match stdout.write_all(reply.stdout.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => u8::try_from(reply.exit).unwrap_or(1),
        Err(error) => {
            let _ = writeln!(stderr, "netattach: write stdout: {error}");
            1
        }
    }
}

/// The error object for a panic, code 999.
pub fn panic_text(panic: &std::panic::PanicHookInfo<'_>) -> String {
    error_text(NEWEST, code::INTERNAL, &format!("netattach panicked: {panic}").replace('\n', " "))
}

/// The values taken from the environment.
struct Environment {
    cni: BTreeMap<String, String>,
    /// Of [`TIMEOUT_VARIABLE`].
    timeout: Option<Duration>,
}

impl Environment {
    fn read(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, ShimError> {
        let mut environment = Self { cni: BTreeMap::new(), timeout: None };
        for (name, value) in variables {
            let Ok(name) = name.into_string() else { continue };
            if name == TIMEOUT_VARIABLE {
                let value = value.to_string_lossy();
                let seconds = value.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
                environment.timeout = Some(seconds.ok_or_else(|| ShimError::Timeout(value.into()))?);
            } else if name == TRACE_VARIABLE {
                // An invalid trace context is useless to the agent, but no reason to fail the call.
                if let Ok(value) = value.into_string() {
                    environment.cni.extend((value.len() <= LONGEST_TRACE).then_some((name, value)));
                }
            } else if let Some(value) = cni_variable(&name, value)? {
                environment.cni.insert(name, value);
            }
        }
        Ok(environment)
    }

    fn verb(&self) -> &str {
        self.cni.get("CNI_COMMAND").map_or("", String::as_str)
    }

    /// How long an answer is waited for.
    fn answer_patience(&self) -> Duration {
        match self.verb() {
            "STATUS" => self.timeout.map_or(STATUS_PATIENCE, |timeout| timeout.min(STATUS_PATIENCE)),
            "DEL" => self.timeout.unwrap_or(DEL_PATIENCE),
            _ => self.timeout.unwrap_or(ANSWER_PATIENCE),
        }
    }
}

/// The values taken from the configuration.
struct Config {
    version: String,
    socket: PathBuf,
    state_dir: PathBuf,
    agent_wait: Duration,
}

impl Config {
    fn parse(stdin: &str) -> Result<Self, ShimError> {
        let object: Map<String, Value> = serde_json::from_str(stdin).map_err(ShimError::Decode)?;
        Ok(Self {
            // The agent validates the version; here it only selects the format of an error.
            version: object.get("cniVersion").and_then(Value::as_str).unwrap_or(NEWEST).to_owned(),
            socket: absolute_path(&object, "socket", DEFAULT_SOCKET)?,
            state_dir: absolute_path(&object, "stateDir", DEFAULT_STATE_DIR)?,
            agent_wait: agent_wait(&object)?,
        })
    }

    /// How long connecting is retried for a command. STATUS is not retried, as it asks whether the agent is
    /// available; DEL is recorded instead.
    fn connect_patience(&self, verb: &str) -> Duration {
        match verb {
            "STATUS" => Duration::ZERO,
            "ADD" | "CHECK" if has_served(&self.socket, &self.state_dir) => {
                self.agent_wait.max(CONNECT_PATIENCE)
            }
            _ => CONNECT_PATIENCE,
        }
    }
}

/// Returns the agent's reply, or an error object if there is none.
fn reply(environment: Environment, stdin: impl Read, stderr: &mut impl Write) -> CniReply {
    let verb = environment.verb().to_owned();
    match read_stdin(stdin).and_then(|stdin| Ok((Config::parse(&stdin)?, stdin))) {
        Err(error) => failure(NEWEST, &verb, &error),
        Ok((config, stdin)) => hand_over(environment, &config, stdin, stderr)
            .unwrap_or_else(|error| failure(&config.version, &verb, &error)),
    }
}

fn hand_over(
    environment: Environment,
    config: &Config,
    stdin: String,
    stderr: &mut impl Write,
) -> Result<CniReply, ShimError> {
    let verb = environment.verb().to_owned();
    let answer = environment.answer_patience();
    let deadline = Instant::now() + answer;
    let patience = Patience { connect: config.connect_patience(&verb), answer };
    let call = CniCall { env: environment.cni, stdin };
    let request = Request::Cni(&call);
    let answer = match client::call(&config.socket, &request, patience) {
        Err(source) if verb == "DEL" && may_be_lost(&source) => {
            let kept = keep_del(&config.state_dir, &call, source, || {
                let answer = deadline.saturating_duration_since(Instant::now());
                client::call(&config.socket, &request, Patience { connect: Duration::ZERO, answer })
            })?;
            match kept {
                Kept::Answered(answer) => answer,
                Kept::Recorded { record, why } => {
                    // Runtimes log stderr for people; a failure to write it cannot be reported.
                    let _ = writeln!(stderr, "{}", recorded(&record, &why));
                    return Ok(CniReply { stdout: String::new(), exit: 0 });
                }
            }
        }
        answer => answer.map_err(|source| ShimError::Agent { verb: verb.clone(), source })?,
    };
    match answer {
        Response::Cni(reply) => Ok(reply),
        // `client::call` turns a refusal into the same error, so this case does not occur.
        Response::Refused(reason) => Err(ShimError::Agent {
            verb,
            source: ClientError::Refused { socket: config.socket.clone(), reason },
        }),
    }
}

/// Refuses a DEL with invalid identifiers, which no agent would carry out. Such a DEL is not recorded
/// either, since files are named after containers.
fn check_identifiers(call: &CniCall) -> Result<(), ShimError> {
    let variable = |name| call.variable(name).unwrap_or_default();
    check_container_id(variable("CNI_CONTAINERID"))
        .and_then(|()| check_link_name(variable("CNI_IFNAME")))
        .map_err(ShimError::Identifier)
}

fn after_colon(details: &str) -> String {
    if details.is_empty() { String::new() } else { format!(": {details}") }
}

/// Whether the DEL was not carried out, or its outcome is unknown. A refusal is a decision of the agent.
fn may_be_lost(error: &ClientError) -> bool {
    !matches!(error, ClientError::Refused { .. } | ClientError::Prepare(_))
}

/// The outcome of a DEL that no agent answered at first.
enum Kept {
    /// An agent answered the second attempt.
    Answered(Response),
    /// The DEL is recorded durably, so it will be carried out.
    Recorded {
        /// The file that holds the request.
        record: PathBuf,
        /// The agent's failure.
        why: ClientError,
    },
}

fn recorded(record: &Path, why: &ClientError) -> String {
    format!(
        "netattach: DEL is recorded in {} for the agent, which carries it out when it runs: {}",
        record.display(),
        Chain(why)
    )
}

/// Records a DEL, then calls the agent once more: an agent that began to listen in between may have read
/// the records before this one existed.
fn keep_del(
    state_dir: &Path,
    call: &CniCall,
    first: ClientError,
    try_again: impl FnOnce() -> Result<Response, ClientError>,
) -> Result<Kept, ShimError> {
    check_identifiers(call)?;
    let record = match pending::record(state_dir, call) {
        Ok(record) => record,
        Err(unrecorded) => {
            return Err(ShimError::NotRecorded { unrecorded: Box::new(unrecorded), source: first });
        }
    };
    match try_again() {
        Ok(answer) => {
            // Repeating a DEL is harmless.
            let _ = pending::remove(&record);
            Ok(Kept::Answered(answer))
        }
        Err(_) => Ok(Kept::Recorded { record, why: first }),
    }
}

/// Returns the value of a variable `CNI_*` as text; `None` for any other variable.
///
/// # Errors
/// [`ShimError::Variable`].
pub fn cni_variable(name: &str, value: OsString) -> Result<Option<String>, ShimError> {
    if !name.starts_with("CNI_") {
        return Ok(None);
    }
    value.into_string().map(Some).map_err(|_| ShimError::Variable(name.to_owned()))
}

/// Reads all of standard input, at most [`MAX_STDIN`] bytes.
///
/// # Errors
/// [`ShimError::ReadStdin`], [`ShimError::LongStdin`].
pub fn bounded_stdin(stdin: impl Read) -> Result<Vec<u8>, ShimError> {
    let mut bytes = Vec::new();
    stdin.take(MAX_STDIN + 1).read_to_end(&mut bytes).map_err(ShimError::ReadStdin)?;
    if bytes.len() as u64 > MAX_STDIN { Err(ShimError::LongStdin) } else { Ok(bytes) }
}

fn read_stdin(stdin: impl Read) -> Result<String, ShimError> {
    String::from_utf8(bounded_stdin(stdin)?).map_err(ShimError::BinaryStdin)
}

/// Whether an agent has served this node before: its socket, the lock file beside it (which outlives the
/// socket) or its journal exists. A path that cannot be checked counts as absent.
fn has_served(socket: &Path, state_dir: &Path) -> bool {
    let lock = crate::lock_path(socket);
    [socket, &lock, &state_dir.join("journal")].iter().any(|trace| trace.symlink_metadata().is_ok())
}

fn agent_wait(config: &Map<String, Value>) -> Result<Duration, ShimError> {
    let seconds = match config.get(WAIT_KEY) {
        None | Some(Value::Null) => DEFAULT_AGENT_WAIT,
        Some(value) => value.as_u64().filter(|seconds| *seconds <= MAX_AGENT_WAIT).ok_or(ShimError::Wait)?,
    };
    Ok(Duration::from_secs(seconds))
}

fn absolute_path(
    config: &Map<String, Value>,
    key: &'static str,
    default: &str,
) -> Result<PathBuf, ShimError> {
    match config.get(key) {
        None | Some(Value::Null) => Ok(default.into()),
        Some(Value::String(path)) if path.starts_with('/') => Ok(path.into()),
        Some(_) => Err(ShimError::Path(key)),
    }
}

fn about() -> String {
    format!(
        "netattach {}: hands CNI calls to the agent netattachd\nCNI protocol versions supported: {}",
        env!("CARGO_PKG_VERSION"),
        VERSIONS.join(", ")
    )
}

fn versions() -> String {
    let versions = VERSIONS.join("\",\"");
    format!("{{\"cniVersion\":\"{NEWEST}\",\"supportedVersions\":[\"{versions}\"]}}\n")
}

fn failure(version: &str, verb: &str, error: &ShimError) -> CniReply {
    CniReply { stdout: error_text(version, error.code(verb), &Chain(error).to_string()), exit: 1 }
}

/// The error object of the CNI specification, indented like that of the Go plugins.
fn error_text(version: &str, code: u32, message: &str) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct ErrorObject<'a> {
        cni_version: &'a str,
        code: u32,
        msg: &'a str,
    }
    let mut text = Vec::new();
    let indented = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, indented);
    let object = ErrorObject { cni_version: version, code, msg: message };
    // Serializing strings and a number to memory cannot fail.
    let _ = object.serialize(&mut serializer);
    text.push(b'\n');
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_with(variables: &[(&str, &str)], stdin: &str) -> (u8, String, String) {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        let exit = run(variables, stdin.as_bytes(), &mut stdout, &mut stderr);
        (exit, String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    }

    /// Rows: ENV-24.
    #[test]
    fn a_panic_is_an_error_of_code_999_on_one_line() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (this, others) = (std::thread::current().id(), std::panic::take_hook());
        // The hook is global to the process: other tests keep theirs.
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().id() == this {
                let _ = sender.send(panic_text(panic));
            } else {
                others(panic);
            }
        }));
        assert!(std::panic::catch_unwind(|| panic!("on\npurpose")).is_err());
        let text = receiver.recv().unwrap();
        let error: serde_json::Value = serde_json::from_str(&text).unwrap();
        let msg = error["msg"].as_str().unwrap();
        assert_eq!(error["code"], 999);
        assert!(msg.starts_with("netattach panicked: ") && msg.ends_with("on purpose"), "{msg}");
    }

    /// A stdin that must not be read.
    struct Untouchable;

    impl Read for Untouchable {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            panic!("stdin was read")
        }
    }

    #[test]
    fn version_is_answered_without_stdin_and_without_an_agent() {
        let mut stdout = Vec::new();
        let variables = [("CNI_COMMAND".into(), "VERSION".into())];
        assert_eq!(run(variables, Untouchable, &mut stdout, &mut Vec::new()), 0);
        assert_eq!(
            String::from_utf8(stdout).unwrap(),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn without_a_command_the_executable_describes_itself() {
        for variables in [&[][..], &[("CNI_COMMAND", "")]] {
            let expected = format!(
                "netattach {}: hands CNI calls to the agent netattachd\n\
                 CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n",
                env!("CARGO_PKG_VERSION")
            );
            assert_eq!(run_with(variables, ""), (0, String::new(), expected));
        }
    }

    #[test]
    fn an_invalid_call_has_a_code_and_names_the_key() {
        let add = ("CNI_COMMAND", "ADD");
        let table = [
            (
                &[add][..],
                "{",
                6,
                "stdin is not a network configuration: EOF while parsing an object at line 1 column 1",
            ),
            (
                &[add],
                "[]",
                6,
                "stdin is not a network configuration: invalid type: sequence, expected a map at line 1 column 0",
            ),
            (&[add], "{\"socket\":\"run/x\"}", 7, "socket must be an absolute path"),
            (&[add], "{\"stateDir\":7}", 7, "stateDir must be an absolute path"),
            (
                &[add],
                "{\"agentWaitSeconds\":61}",
                7,
                "agentWaitSeconds must be a whole number of seconds from 0 to 60",
            ),
            (
                &[add, (TIMEOUT_VARIABLE, "soon")],
                "{}",
                4,
                "environment variable NETATTACH_TIMEOUT: \"soon\" is not a number of seconds",
            ),
        ];
        for (variables, stdin, code, message) in table {
            let expected = error_text("1.1.0", code, message);
            assert_eq!(run_with(variables, stdin), (1, expected, String::new()));
        }
        // Input of the maximum length is parsed as far as its keys.
        let padded = |bytes: usize| crate::bounded::padded(r#"{"socket": 7}"#, bytes);
        let (exit, stdout, _) = run_with(&[add], &padded(MAX_STDIN as usize));
        assert_eq!((exit, stdout), (1, error_text("1.1.0", 7, "socket must be an absolute path")));
        let (exit, stdout, _) = run_with(&[add], &padded(MAX_STDIN as usize + 1));
        assert_eq!((exit, stdout), (1, error_text("1.1.0", 6, "stdin is longer than 4194304 bytes")));
    }

    #[test]
    fn only_add_and_check_wait_longer_and_only_for_an_agent_that_has_served() {
        let dir = tempfile::tempdir().unwrap();
        let config = |wait: &str| {
            let socket = dir.path().join("run/agent.sock");
            Config::parse(&format!("{{\"socket\":{socket:?},\"stateDir\":{:?}{wait}}}", dir.path())).unwrap()
        };
        let waits = |config: Config| {
            ["ADD", "CHECK", "DEL", "GC", "STATUS"].map(|verb| config.connect_patience(verb).as_millis())
        };
        assert_eq!(waits(config("")), [700, 700, 700, 700, 0]);
        std::fs::create_dir(dir.path().join("run")).unwrap();
        for trace in ["run/agent.sock", "run/agent.sock.lock", "journal"] {
            std::fs::write(dir.path().join(trace), "").unwrap();
            assert_eq!(waits(config("")), [5000, 5000, 700, 700, 0], "{trace}");
            assert_eq!(waits(config(",\"agentWaitSeconds\":60"))[0], 60_000);
            assert_eq!(waits(config(",\"agentWaitSeconds\":0"))[0], 700);
            std::fs::remove_file(dir.path().join(trace)).unwrap();
        }
    }

    #[test]
    fn a_del_is_recorded_before_any_runtime_kills_the_executable() {
        let patience = |verb: &str, timeout: Option<&str>| {
            let timeout = timeout.map(|seconds| (TIMEOUT_VARIABLE, seconds));
            let variables = [("CNI_COMMAND", verb)].into_iter().chain(timeout);
            let environment = Environment::read(variables.map(|(name, value)| (name.into(), value.into())));
            environment.unwrap().answer_patience().as_millis()
        };
        // Of CRI-O's minute the rest is for connecting and for the disk.
        assert!(patience("DEL", None) + CONNECT_PATIENCE.as_millis() < 55_000);
        let others = ["ADD", "CHECK", "GC", "STATUS"].map(|verb| patience(verb, None));
        assert_eq!(others, [240_000, 240_000, 240_000, 5000]);
        let set = |seconds: &str| ["ADD", "DEL", "STATUS"].map(|verb| patience(verb, Some(seconds)));
        assert_eq!([set("0.2"), set("300")], [[200; 3], [300_000, 300_000, 5000]]);
    }

    #[test]
    fn errors_are_indented_like_those_of_the_go_plugins() {
        assert_eq!(
            error_text("1.0.0", 11, "say \"why\""),
            "{\n    \"cniVersion\": \"1.0.0\",\n    \"code\": 11,\n    \"msg\": \"say \\\"why\\\"\"\n}\n"
        );
    }
}
