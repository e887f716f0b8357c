//! The commands of `netattachctl`: each asks the agent one question and shows the answer as a table or as JSON.
//!
//! The JSON is that of [`crate::rpc::message`]; its field names are stable.
//!
//! | module | what it shows or does |
//! |---|---|
//! | `status`, `attachments`, `stats`, `flows` | the agent's readiness; attachments; counters; flows |
//! | `policy`, `explain` | policies in force; why traffic passes or does not |
//! | `attach` | gives a live pod one more network, or takes it back |
//! | `import`, `uninstall` | reads a configuration of Multus; takes netattach off a node |
//! | `exit`, `missing` | exit codes; messages for names that do not exist |
//! | `table`, `time` | formatting |

mod attach;
mod attachments;
mod exit;
mod explain;
mod flows;
mod import;
mod missing;
mod policy;
mod stats;
mod status;
mod table;
mod time;
mod uninstall;

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::bpf::BpfError;
use crate::cni::code;
use crate::journal::JournalError;
use crate::netlink;
use crate::objects::ObjectName;
use crate::rpc::DEFAULT_SOCKET;
use crate::rpc::client::{self, ClientError, Patience};
use crate::rpc::message::{AttachmentName, Failure, Request, Response};
use crate::rpc::shim::ANSWER_PATIENCE;

pub use exit::Exit;

const PATIENCE: Patience = Patience { connect: Duration::from_millis(500), answer: Duration::from_secs(10) };

/// Shows what netattach has attached on this node, what passes and which policies apply.
#[derive(Debug, Parser)]
#[command(name = "netattachctl", version, after_help = exit::help())]
pub struct Arguments {
    /// Socket of the agent
    #[arg(long, global = true, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Output format
    #[arg(long, short, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Aligned columns
    Table,
    /// For programs: the field names are stable
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the interfaces of pods, their addresses and where they are enforced
    Attachments(Filter),
    /// Attach a live pod to another network, until it is detached or the pod ends
    Attach(attach::Attach),
    /// Detach a network that attach attached
    Detach(attach::Detach),
    /// Show packets and bytes of each attachment, and drops by reason
    Stats(Filter),
    /// Show which policies apply to each attachment, and problems with policies
    Policy(policy::Policy),
    /// Explain whether a flow passes: by which rule, or what would have to allow it
    Explain(explain::Explain),
    /// Show new flows, ended flows and drops: the latest thousand, or as they happen
    ///
    /// Recorded are drops for any reason, and the begin and end of flows of attachments that a policy isolates in either direction.
    /// Traffic of attachments that no policy isolates is not recorded; stats counts it.
    Flows(flows::Flows),
    /// Show the state of the agent; exit code 1 while it is not ready
    Status,
    /// Show how a Multus configuration translates into settings, or with -o json print the settings file; changes nothing
    ///
    /// Exit code 1 when a key has no equivalent.
    Import(import::Import),
    /// Remove the pinned programs and maps of an agent that has stopped, once its pods are detached
    Uninstall(uninstall::Uninstall),
}

/// Which attachments to show.
#[derive(Debug, Default, Args)]
struct Filter {
    /// Only attachments of this pod
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<ObjectName>,
    /// Only attachments to this network; without a namespace, to every network of that name
    #[arg(long, value_name = "[NAMESPACE/]NAME", value_parser = NonEmptyStringValueParser::new())]
    network: Option<String>,
}

/// Reasons why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The agent did not answer.
    #[error(transparent)]
    Agent(#[from] ClientError),
    /// The agent reported a failure.
    #[error("{} (code {})", .0.message, .0.code)]
    Failed(Failure),
    /// The command line names no sandbox, or has an invalid argument.
    #[error(transparent)]
    Words(#[from] attach::WordsError),
    /// The configuration of Multus cannot be read.
    #[error(transparent)]
    Import(#[from] import::ImportError),
    /// `import` of keys that netattach has no equivalent for.
    #[error("these keys have no equivalent, and the table says what to do: {}", .0.join(", "))]
    NoEquivalent(Vec<String>),
    /// `uninstall` while an agent runs.
    #[error("an agent serves {0}: stop it first, and detach its pods")]
    AgentRuns(PathBuf),
    /// `uninstall` while pods are attached.
    #[error(
        "pods are attached, and their devices would keep programs that no agent maintains: {}; detach them first, or give --force",
        missing::list(.0)
    )]
    Attached(Vec<String>),
    /// `uninstall` cannot determine whether pods are attached.
    #[error("check for attached pods; --force skips the check")]
    Journal(#[from] JournalError),
    /// An object that the command line names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// `uninstall` could not remove something.
    #[error("remove pins")]
    Pins(#[from] BpfError),
    /// `uninstall` could not take the table out of the node's packet filter.
    #[error("remove the table of the packet filter")]
    Table(#[from] netlink::Error),
    /// The agent sent an answer of the wrong kind.
    #[error("the agent's answer is not one to {request}")]
    OtherAnswer {
        /// Name of the request.
        request: &'static str,
    },
    /// The answer cannot be encoded as JSON.
    #[error("encode the answer")]
    Encode(#[from] serde_json::Error),
    /// Writing to standard output failed.
    #[error("write stdout")]
    Write(#[from] io::Error),
    /// `status` of an agent that is not ready.
    #[error("the agent is not ready: {}", .0.join(", "))]
    NotReady(Vec<String>),
}

impl CliError {
    /// The exit code of the command.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Agent(ClientError::Refused { .. } | ClientError::Prepare(_)) => Exit::Failed,
            Self::Agent(_) => Exit::NoAgent,
            Self::Failed(failure) if failure.not_there || failure.code == code::UNKNOWN_CONTAINER => {
                Exit::NotFound
            }
            Self::NotFound(_) => Exit::NotFound,
            Self::Words(_) => Exit::Usage,
            Self::AgentRuns(_) | Self::Attached(_) => Exit::InUse,
            Self::Failed(_)
            | Self::Import(_)
            | Self::NoEquivalent(_)
            | Self::Journal(_)
            | Self::Pins(_)
            | Self::OtherAnswer { .. }
            | Self::Encode(_)
            | Self::Write(_)
            | Self::NotReady(_)
            | Self::Table(_) => Exit::Failed,
        }
    }
}

/// Sends the request to the agent and writes the answer.
///
/// # Errors
/// See [`CliError`]; in that case nothing has been written, except for [`CliError::NotReady`],
/// [`CliError::NoEquivalent`], and the empty list of `-o json` before [`CliError::NotFound`]. A reader that closes the
/// pipe early (`| head`) is not an error.
pub fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), CliError> {
    if let Command::Flows(flows) = &arguments.command {
        return match flows.run(&arguments.socket, arguments.output == Format::Json, out) {
            Err(CliError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        };
    }
    let (text, outcome) = answer(arguments)?;
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => outcome,
    }
}

/// The text to show, and the command's outcome after it is shown.
fn answer(arguments: &Arguments) -> Result<(String, Result<(), CliError>), CliError> {
    let request = match &arguments.command {
        Command::Attach(attach) => attach.request()?,
        Command::Detach(detach) => detach.request()?,
        Command::Attachments(_) => Request::Attachments,
        Command::Stats(_) => Request::Stats,
        Command::Policy(policy) => policy.request()?,
        Command::Explain(explain) => explain.request(),
        Command::Status => Request::Status,
        Command::Import(import) => return import.run(arguments.output == Format::Json),
        // `run` writes these records as they arrive.
        Command::Flows(_) => return Ok((String::new(), Ok(()))),
        Command::Uninstall(uninstall) => {
            let removed = uninstall.run(&arguments.socket)?;
            let json = arguments.output == Format::Json;
            return Ok((if json { pretty(&removed)? } else { removed.to_string() }, Ok(())));
        }
    };
    let patience = match &request {
        // These run plugins, as ADD and DEL do.
        Request::Attach(_) | Request::Detach(_) => Patience { answer: ANSWER_PATIENCE, ..PATIENCE },
        _ => PATIENCE,
    };
    let response = client::call(&arguments.socket, &request, patience)?;
    let json = arguments.output == Format::Json;
    let text = match (&arguments.command, response) {
        (_, Response::Failed(failure)) => return Err(CliError::Failed(failure)),
        (Command::Attach(_), Response::Attached(attached)) => {
            if json {
                pretty(&attached.result)?
            } else {
                attach::render(&attached)
            }
        }
        (Command::Detach(detach), Response::Detached) => {
            if json {
                pretty(&serde_json::json!({}))?
            } else {
                detach.confirm()
            }
        }
        (Command::Attachments(filter), Response::Attachments(rows)) => {
            let found = filter.found(rows.iter().map(|row| &row.name));
            let rows = filter.retain(rows, |row| &row.name);
            return Ok((
                if json { pretty(&rows)? } else { attachments::render(&rows, filter.nothing()) },
                found,
            ));
        }
        (Command::Stats(filter), Response::Stats(rows)) => {
            let found = filter.found(rows.iter().map(|row| &row.name));
            let rows = filter.retain(rows, |row| &row.name);
            return Ok((if json { pretty(&rows)? } else { stats::render(&rows, filter.nothing()) }, found));
        }
        (Command::Policy(policy), Response::PolicyDump(dumps)) => {
            let found = policy.found(&dumps, &arguments.socket)?;
            return Ok((if json { pretty(&dumps)? } else { policy::render_dumps(&dumps) }, found));
        }
        (Command::Explain(_), Response::Explanation(paths)) => {
            let found = explain::found(&paths);
            return Ok((if json { pretty(&paths)? } else { explain::render(paths) }, found));
        }
        (Command::Policy(policy::Policy { filter, .. }), Response::Policy(mut report)) => {
            let found = filter.found(report.attachments.iter().map(|row| &row.name));
            report.attachments = filter.retain(report.attachments, |row| &row.name);
            let text = match &found {
                _ if json => pretty(&report)?,
                Ok(()) => policy::render(&report, filter.nothing()),
                // The request was for attachments that do not exist, so rules and problems are not shown.
                Err(_) => String::new(),
            };
            return Ok((text, found));
        }
        (Command::Status, Response::Status(report)) => {
            let text = if json { pretty(&report)? } else { status::render(&report) };
            return Ok((text, status::readiness(&report)));
        }
        _ => return Err(CliError::OtherAnswer { request: request.name() }),
    };
    Ok((text, Ok(())))
}

impl Filter {
    fn retain<T>(&self, mut rows: Vec<T>, name: impl Fn(&T) -> &AttachmentName) -> Vec<T> {
        rows.retain(|row| self.matches(name(row)));
        rows
    }

    fn matches(&self, name: &AttachmentName) -> bool {
        let pod = self.pod.as_ref().is_none_or(|pod| name.pod.as_ref() == Some(pod));
        let network = self.network.as_ref().is_none_or(|network| {
            let bare = name.network.rsplit('/').next();
            name.network == *network || bare == Some(network)
        });
        pod && network
    }

    /// Returns an error if no attachment matches the filter.
    fn found<'n>(&self, names: impl Iterator<Item = &'n AttachmentName> + Clone) -> Result<(), CliError> {
        self.missing(names).map_or(Ok(()), |missing| Err(CliError::NotFound(missing)))
    }

    /// The text to show if there are no rows; empty if the filter is set, because the error explains that.
    fn nothing(&self) -> &'static str {
        if self.is_set() { "" } else { NOTHING }
    }
}

const NOTHING: &str = "No attachments on this node. A pod gets one from its k8s.v1.cni.cncf.io/networks annotation, \
                       through a container runtime that calls netattach.\n\
                       Whether the agent is ready, and what it could not read: netattachctl status\n";

fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(value).map(|text| text + "\n")
}

/// The first columns of every table about attachments.
fn name_cells(name: &AttachmentName) -> [String; 3] {
    [or_dash(name.pod.as_ref()), name.network.clone(), name.ifname.clone()]
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::*;
    use crate::error_chain::Chain;
    use crate::rpc::frame;
    use crate::rpc::message::{AttachmentStats, Hello, Traffic};

    pub(super) fn name(id: u32, pod: &str, network: &str, ifname: &str) -> AttachmentName {
        AttachmentName {
            id: Some(id),
            pod: pod.parse().ok(),
            network: network.to_owned(),
            ifname: ifname.to_owned(),
        }
    }

    fn arguments(socket: &Path, words: &[&str]) -> Arguments {
        let socket = socket.to_str().unwrap();
        Arguments::try_parse_from(["netattachctl", "--socket", socket].iter().chain(words)).unwrap()
    }

    /// Runs the command against an agent that gives this answer.
    fn run_against(answer: &Response, words: &[&str]) -> (String, Result<(), CliError>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut frames = Vec::new();
        frame::append(&mut frames, &Hello::ours()).unwrap();
        frame::append(&mut frames, answer).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut client, _) = listener.accept().unwrap();
                client.write_all(&frames).unwrap();
                frame::read(&mut client).unwrap();
                frame::read(&mut client).unwrap();
            });
            let mut out = Vec::new();
            let result = run(&arguments(&socket, words), &mut out);
            (String::from_utf8(out).unwrap(), result)
        })
    }

    /// Statistics of an attachment without traffic.
    pub(super) fn idle(name: AttachmentName) -> AttachmentStats {
        AttachmentStats {
            name,
            received: Traffic::default(),
            sent: Traffic::default(),
            dropped: [].into(),
            fast: Traffic::default(),
            fast_sent: Default::default(),
            left_to_stack: [].into(),
            records_withheld: 0,
            records_lost: 0,
            flows: 0,
            new_flows: 0,
            flows_displaced: 0,
        }
    }

    fn stats() -> Response {
        let row = |name| AttachmentStats { sent: Traffic { packets: 1, bytes: 60 }, ..idle(name) };
        Response::Stats(vec![
            row(name(1, "shop/cart-0", "shop/blue", "net1")),
            row(name(2, "shop/cart-1", "shop/blue", "net1")),
            row(name(3, "shop/cart-1", "ops/blue", "net2")),
        ])
    }

    fn shown(words: &[&str]) -> Vec<u64> {
        let words: Vec<_> = ["-o", "json", "stats"].iter().chain(words).copied().collect();
        let (out, result) = run_against(&stats(), &words);
        assert_eq!(result.is_ok(), out != "[]\n");
        let rows: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
        rows.iter().map(|row| row["id"].as_u64().unwrap()).collect()
    }

    #[test]
    fn filters_leave_what_matches_all_of_them() {
        assert_eq!(shown(&[]), [1, 2, 3]);
        assert_eq!(shown(&["--pod", "shop/cart-1"]), [2, 3]);
        assert_eq!(shown(&["--network", "blue"]), [1, 2, 3]);
        assert_eq!(shown(&["--network", "ops/blue"]), [3]);
        assert_eq!(shown(&["--pod", "shop/cart-0", "--network", "ops/blue"]), [] as [u64; 0]);
    }

    #[test]
    fn json_is_an_object_per_row_with_stable_names() {
        let (out, result) = run_against(&stats(), &["stats", "--pod", "shop/cart-0", "-o", "json"]);
        result.unwrap();
        assert_eq!(
            out,
            r#"[
  {
    "id": 1,
    "pod": {
      "namespace": "shop",
      "name": "cart-0"
    },
    "network": "shop/blue",
    "ifname": "net1",
    "received": {
      "packets": 0,
      "bytes": 0
    },
    "sent": {
      "packets": 1,
      "bytes": 60
    },
    "dropped": {},
    "fast": {
      "packets": 0,
      "bytes": 0
    },
    "fast_sent": {
      "packets": 0,
      "bytes": 0
    },
    "left_to_stack": {},
    "flows": 0,
    "new_flows": 0
  }
]
"#
        );
    }

    #[test]
    fn nothing_to_show_says_what_to_do_next() {
        let (out, result) = run_against(&Response::Attachments(vec![]), &["attachments"]);
        result.unwrap();
        assert_eq!(
            out,
            "No attachments on this node. A pod gets one from its k8s.v1.cni.cncf.io/networks annotation, \
             through a container runtime that calls netattach.\n\
             Whether the agent is ready, and what it could not read: netattachctl status\n"
        );
    }

    #[test]
    fn a_filter_that_matches_nothing_is_an_error_with_its_own_code_in_either_form() {
        for (form, shown) in [("table", ""), ("json", "[]\n")] {
            let (out, result) =
                run_against(&stats(), &["stats", "--pod", "a/b", "--network", "c", "-o", form]);
            let error = result.unwrap_err();
            assert_eq!(
                error.to_string(),
                "pod a/b is not attached on this node; attached pods: shop/cart-0, shop/cart-1"
            );
            assert_eq!((error.exit(), out.as_str()), (Exit::NotFound, shown));
        }
        let failure = |code, not_there| Failure { code, message: "pod a/b is not known".into(), not_there };
        for words in
            [&["detach", "a/b", "net1"][..], &["attach", "a/b", "lan"], &["explain", "a/b", "c/d", "80"]]
        {
            for (code, not_there, exit) in [
                (code::UNKNOWN_CONTAINER, false, Exit::NotFound),
                (code::INVALID_CONFIG, true, Exit::NotFound),
                (code::INVALID_CONFIG, false, Exit::Failed),
            ] {
                let (_, result) = run_against(&Response::Failed(failure(code, not_there)), words);
                assert_eq!(result.unwrap_err().exit(), exit, "{words:?}");
            }
        }
    }

    #[test]
    fn an_absent_agent_is_one_line() {
        let arguments = arguments(Path::new("/nonexistent/agent.sock"), &["status"]);
        let error = run(&arguments, &mut Vec::new()).unwrap_err();
        assert_eq!(
            Chain(&error).to_string(),
            "the agent does not answer at /nonexistent/agent.sock: is netattachd running, and with this socket?: \
             No such file or directory (os error 2)"
        );
        assert_eq!(error.exit(), Exit::NoAgent);
    }

    #[test]
    fn another_answer_than_asked_for_is_an_error() {
        let (_, result) = run_against(&stats(), &["attachments"]);
        assert_eq!(result.unwrap_err().to_string(), "the agent's answer is not one to attachments");
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
