//! The commands of `netattachctl`: each asks the agent one question and shows the answer as a table or as JSON.
//!
//! The JSON is that of [`crate::rpc::message`]; its field names are stable.
//!
//! | module | what it shows or does |
//! |---|---|
//! | `status`, `attachments`, `stats`, `flows`, `pools` | the agent's readiness; attachments; counters; flows; pools of addresses |
//! | `policy`, `explain` | policies in force; why traffic passes or does not |
//! | `attach` | attaches a live pod to one more network, or detaches it |
//! | `connectivity` | attaches two sandboxes of its own, and sends traffic between them |
//! | `top`, `graph` | live traffic; pods, networks and policies as a picture |
//! | `doctor`, `validate`, `sysdump` | problems of a node or of manifests, with remedies; an archive with all of it |
//! | [`kubectl`] | the same commands in the pods of agents, as `kubectl netattach` |
//! | `completion` | completion of command lines in shells |
//! | `import`, `uninstall` | converts a configuration of Multus; removes netattach from a node |
//! | `filter`, `missing` | selects the attachments of a command; messages for names that do not exist |
//! | `error`, `exit` | why a command failed; exit codes |
//! | `output`, `table`, `visible`, `time` | forms of output; escaping of characters that a terminal interprets |

mod attach;
mod attachments;
mod completion;
mod connectivity;
mod doctor;
mod error;
mod exit;
mod explain;
mod filter;
mod flows;
mod graph;
mod import;
pub mod kubectl;
mod missing;
mod output;
mod policy;
mod pools;
mod stats;
mod status;
mod sysdump;
mod table;
mod time;
mod top;
mod uninstall;
mod validate;
mod visible;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};

use crate::built;
use crate::rpc::DEFAULT_SOCKET;
use crate::rpc::client::{self, Patience};
use crate::rpc::message::{AttachmentName, Request, Response};
use crate::rpc::shim::ANSWER_PATIENCE;
use filter::Filter;
use output::Format;

pub use error::CliError;
pub use exit::Exit;
pub use filter::ContainerIdError;

const PATIENCE: Patience = Patience { connect: Duration::from_millis(500), answer: Duration::from_secs(10) };

/// Shows what netattach has attached on this node, what passes and which policies apply.
#[derive(Debug, Parser)]
#[command(name = "netattachctl", version, long_version = long_version(), after_help = exit::help())]
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

fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| built::describe(&[]));
    &TEXT
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
    /// Show how full the pools of addresses are, and who holds what
    Pools(pools::Pools),
    /// Explain whether a flow passes: by which rule, or what would have to allow it
    Explain(explain::Explain),
    /// Show new flows, ended flows and drops: the latest thousand, or as they happen
    ///
    /// Records drops for any reason, and the begin and end of flows of attachments that a policy isolates in either direction.
    /// Traffic of attachments that no policy isolates is not recorded; stats counts it.
    Flows(flows::Flows),
    /// Show live traffic of attachments, the busiest first; a single sample if the output is no terminal
    Top(top::Top),
    /// Draw pods, networks, attachments and policies: as text, or as SVG for a browser
    Graph(graph::Graph),
    /// Show the state of the agent; exit code 1 while it is not ready
    Status(status::Wait),
    /// Check everything that netattach needs on this node, with an agent or without; exit code 1 if something fails
    Doctor(doctor::Doctor),
    /// Attach two test sandboxes to each network, send traffic between them, and detach them
    Test(connectivity::Test),
    /// Write an archive for diagnosing this node, without secrets; with an agent or without
    Sysdump(sysdump::Sysdump),
    /// Check manifests and settings without an agent; exit code 1 if there is a problem
    Validate(validate::Validate),
    /// Print a script that completes command lines, for a shell to read
    Completion(completion::Completion),
    /// Show how a Multus configuration translates into settings, or with -o json print the settings file; changes nothing
    ///
    /// Exit code 1 when a key has no equivalent.
    Import(import::Import),
    /// Remove netattach from this node after its agent has stopped and its pods are detached: its pins, files and kernel objects
    Uninstall(uninstall::Uninstall),
}

/// The command line as clap describes it, for man pages and completions.
pub fn command() -> clap::Command {
    Arguments::command()
}

impl Arguments {
    /// Returns the command line under another name, with a text at the end of its help.
    fn described(name: &'static str, help: &'static str) -> clap::Command {
        command().name(name).bin_name(name).after_help(help)
    }
}

/// Sends the request to the agent and writes the answer.
///
/// # Errors
/// See [`CliError`]; in that case nothing has been written, except for [`CliError::NotReady`],
/// [`CliError::NoEquivalent`], and the empty list of `-o json` before [`CliError::NotFound`]. A reader that closes the
/// pipe early (`| head`) is not an error.
pub fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), CliError> {
    let (socket, format) = (&arguments.socket, arguments.output);
    if format == Format::Name && !arguments.command.is_list() {
        return Err(CliError::Usage("-o name is for commands that list objects".to_owned()));
    }
    let written = match &arguments.command {
        Command::Flows(flows) => Some(flows.run(socket, format, out)),
        Command::Top(top) => Some(top.run(socket, format, out)),
        _ => None,
    };
    match written {
        Some(Err(CliError::Write(error))) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
        Some(result) => return result,
        None => {}
    }
    let (text, outcome) = arguments.command.answer(socket, format)?;
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => outcome,
    }
}

/// The text to show, and the command's outcome after it is shown.
type Answer = (String, Result<(), CliError>);

impl Command {
    /// Whether the output is a list of objects.
    fn is_list(&self) -> bool {
        match self {
            Self::Attachments(_) | Self::Stats(_) | Self::Pools(_) | Self::Flows(_) => true,
            Self::Top(_) | Self::Graph(_) => true,
            Self::Policy(policy) => !policy.is_dump(),
            _ => false,
        }
    }

    fn answer(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        match self {
            Self::Attachments(filter) => attachments::run(filter, socket, format),
            Self::Stats(filter) => stats::run(filter, socket, format),
            Self::Policy(policy) => policy.run(socket, format),
            Self::Pools(pools) => pools.run(socket, format),
            Self::Explain(explain) => explain.run(socket, format),
            Self::Status(wait) => wait.run(socket, format),
            Self::Doctor(doctor) => doctor.run(socket, format),
            Self::Test(test) => test.run(socket, format),
            Self::Sysdump(sysdump) => sysdump.run(socket, format),
            Self::Validate(validate) => validate.run(format),
            Self::Completion(completion) => Ok((completion.script(), Ok(()))),
            Self::Attach(attach) => attach.run(socket, format),
            Self::Detach(detach) => detach.run(socket, format),
            Self::Import(import) => import.run(format),
            Self::Uninstall(uninstall) => {
                let removed = uninstall.run(socket)?;
                Ok((format.show(&removed, |width| removed.text(width))?, Ok(())))
            }
            Self::Graph(graph) => graph.run(socket, format),
            // `run` writes these in portions.
            Self::Flows(_) | Self::Top(_) => Ok((String::new(), Ok(()))),
        }
    }
}

/// Asks the agent.
///
/// # Errors
/// It does not answer, or answers that it failed.
fn ask(socket: &Path, request: &Request) -> Result<Response, CliError> {
    let patience = match request {
        // These run plugins, as ADD and DEL do.
        Request::Attach(_) | Request::Detach(_) | Request::Cni(_) => {
            Patience { answer: ANSWER_PATIENCE, ..PATIENCE }
        }
        _ => PATIENCE,
    };
    match client::call(socket, request, patience)? {
        Response::Failed(failure) => Err(CliError::Failed(failure)),
        response => Ok(response),
    }
}

/// Returns the error for an answer that does not belong to the request.
fn other<T>(request: &Request) -> Result<T, CliError> {
    Err(CliError::OtherAnswer { request: request.name() })
}

impl Filter {
    /// The text to show if there are no rows; empty if the filter is set, because the error explains that.
    fn nothing(&self) -> &'static str {
        if self.is_set() { "" } else { NOTHING }
    }
}
const NOTHING: &str = "No attachments on this node.\n\
                       A pod gets one from its k8s.v1.cni.cncf.io/networks annotation, through a container runtime that \
                       calls netattach.\n\
                       Whether the agent is ready, and what it could not read: netattachctl status\n";

/// The first columns of every table about attachments.
fn name_cells(name: &AttachmentName) -> [String; 3] {
    [or_dash(name.pod.as_ref()), name.network.clone(), name.ifname.clone()]
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests;
