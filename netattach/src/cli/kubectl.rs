//! `kubectl netattach`: the commands of `netattachctl`, run in the pods of agents through the API server.
//!
//! The executable is the same, under the name `kubectl-netattach`, by which kubectl finds it. A command
//! line is parsed here first, so that errors are reported at once, and is passed on unchanged to
//! `netattachctl` in the agent's pod.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{FromArgMatches, Parser};
use serde_json::{Map, Value};
use tokio::task::JoinSet;

use super::error::CliError;
use super::filter::Filter;
use super::output::Format;
use super::{Arguments, Command, missing, visible};
use crate::error_chain::Chain;
use crate::kube::exec::{AbsentAgent, Agents, Remote, Sink, Target};
use crate::objects::ObjectName;

/// The executable in the agent's image.
pub(super) const REMOTE: &str = "netattachctl";

/// Nodes that are queried at a time.
const AT_ONCE: usize = 8;

/// Most bytes of one node's output, if there are several.
const MOST_OUTPUT: usize = 16 << 20;

/// Options of `kubectl netattach` alone, in front of or behind those of the command.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "kubectl netattach", no_binary_name = true)]
struct Options {
    /// The kubeconfig [default: as kubectl]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The node to ask [default: that of the pod that the command names; -A: every node]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Namespace of the agents' pods: those of other namespaces are nobody's to trust
    #[arg(long, value_name = "NAME", default_value = "kube-system")]
    agents_namespace: String,
    /// Labels of the agents' pods
    #[arg(long, value_name = "LABELS", default_value = "app.kubernetes.io/name=netattach")]
    agents: String,
}

/// A command line, split.
#[derive(Debug)]
struct Split {
    options: Options,
    arguments: Arguments,
    /// The command line to pass on.
    remote: Vec<String>,
    /// Whether every node is queried.
    everywhere: bool,
}

/// Runs a command line of `kubectl netattach`, without its first word. Returns the exit code of the command.
///
/// # Errors
/// No agent could be queried.
pub fn run(words: Vec<String>, out: &mut (impl Write + Send)) -> Result<u8, CliError> {
    let split = match split(words) {
        Ok(split) => split,
        // Prints the error, or the requested help.
        Err(error) => error.exit(),
    };
    if split.arguments.command.is_local() {
        return super::run(&split.arguments, out).map(|()| 0);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(ask(&split, out))
}

/// Separates the options of `kubectl netattach` from the command, and checks the command.
fn split(words: Vec<String>) -> Result<Split, clap::Error> {
    const OURS: [&str; 5] = ["--kubeconfig", "--context", "--node", "--agents-namespace", "--agents"];
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let name = word.split('=').next().unwrap_or_default();
        if !OURS.contains(&name) {
            theirs.push(word);
            continue;
        }
        let has_value = word.contains('=');
        ours.push(word);
        ours.extend((!has_value).then(|| words.next()).flatten());
    }
    let options = Options::try_parse_from(ours)?;
    let described = Arguments::described("kubectl netattach", KUBECTL_HELP);
    let named = std::iter::once("kubectl netattach".to_owned()).chain(theirs.iter().cloned());
    // A word of one letter may stand among others: -A is found by clap, and left out below if it stands alone.
    let is_everywhere = |word: &String| word == "-A" || word == "--all-namespaces";
    let everywhere = theirs.iter().any(is_everywhere);
    let checked: Vec<String> = named.clone().filter(|word| !is_everywhere(word)).collect();
    let arguments = Arguments::from_arg_matches(&described.try_get_matches_from(checked)?)?;
    theirs.retain(|word| !is_everywhere(word));
    Ok(Split { options, arguments, remote: theirs, everywhere })
}

const KUBECTL_HELP: &str = "\
Further options:
      --kubeconfig FILE  The kubeconfig [default: as kubectl]
      --context NAME     The context of the kubeconfig [default: the current one]
      --node NAME        The node to ask [default: that of the pod that the command names]
  -A, --all-namespaces   Ask every node
      --agents-namespace NAME
                         Namespace of the agents' pods [default: kube-system]
      --agents LABELS    Labels of the agents' pods [default: app.kubernetes.io/name=netattach]";

async fn ask(split: &Split, out: &mut (impl Write + Send)) -> Result<u8, CliError> {
    let Options { kubeconfig, context, node, agents_namespace: namespace, agents: labels } = &split.options;
    let target = Target { kubeconfig: kubeconfig.clone(), context: context.clone() };
    let remote = Remote::new(&target).await?;
    let Agents { running: agents, absent } = remote.agents(namespace, labels).await?;
    if agents.is_empty() && absent.is_empty() {
        return Err(CliError::NotFound(format!(
            "no agent's pod with labels {labels} runs in namespace {namespace}; --agents-namespace names another namespace, \
             --agents other labels"
        )));
    }
    let node = match (node, split.arguments.command.pod()) {
        (Some(node), _) => Some(node.clone()),
        (None, _) if split.everywhere => None,
        (None, Some(pod)) => {
            let node = remote.node_of(&pod).await?;
            Some(node.ok_or_else(|| CliError::NotFound(format!("pod {pod} is on no node")))?)
        }
        (None, None) if agents.len() == 1 && absent.is_empty() => Some(agents[0].node.clone()),
        (None, None) if agents.is_empty() => return Err(not_running(&absent)),
        (None, None) => {
            return Err(CliError::Usage(format!(
                "name the node by --node, or ask every node by -A; agents run on {}",
                missing::list(agents.iter().map(|agent| &agent.node))
            )));
        }
    };
    let is_one_nodes = matches!(split.arguments.command, Command::Sysdump(_));
    match node {
        Some(node) => {
            let agent = agents.iter().find(|agent| agent.node == node).ok_or_else(|| {
                if let Some(absent) = absent.iter().find(|absent| absent.node.as_ref() == Some(&node)) {
                    return not_running(std::slice::from_ref(absent));
                }
                let known = missing::list(agents.iter().map(|agent| &agent.node));
                CliError::NotFound(format!("no agent runs on node {node}; agents run on {known}"))
            })?;
            let Arguments { socket, output, command: asked } = &split.arguments;
            let local = match asked {
                Command::Sysdump(sysdump) => sysdump.local()?,
                Command::Test(test) => return test.through(&remote, agent, socket, *output, out).await,
                _ => None,
            };
            match local {
                Some((path, mut file)) => {
                    let command = [REMOTE, "sysdump", "--file", "-"].map(str::to_owned);
                    let ended = remote.run(agent, &command, &mut Passed::data(&mut file)).await;
                    match ended {
                        Ok(0) => writeln!(out, "{}: of node {node}", path.display())?,
                        // A partial file is of no use.
                        _ => drop(std::fs::remove_file(&path)),
                    }
                    Ok(ended?)
                }
                None => {
                    let is_data = output.is_data() || matches!(asked, Command::Sysdump(_));
                    let mut passed = if is_data { Passed::data(out) } else { Passed::text(out) };
                    Ok(remote.run(agent, &command(split), &mut passed).await?)
                }
            }
        }
        None if is_one_nodes || split.arguments.command.has_no_end() => {
            Err(CliError::Usage("this command asks one node: name it by --node".to_owned()))
        }
        None => everywhere(split, remote, Agents { running: agents, absent }, out).await,
    }
}

/// Returns the error for nodes that cannot be queried.
fn not_running(absent: &[AbsentAgent]) -> CliError {
    CliError::NotRunning(absent.iter().map(|one| format!("{}: {}", one.place(), one.problem())).collect())
}

/// Returns the command to run in the pod.
fn command(split: &Split) -> Vec<String> {
    std::iter::once(REMOTE.to_owned()).chain(split.remote.iter().cloned()).collect()
}

/// The outcome at one node.
struct Outcome {
    out: Vec<u8>,
    err: String,
    code: u8,
}

impl Outcome {
    /// Whether there is no answer, as opposed to an answer that there is nothing.
    fn is_unknown(&self) -> bool {
        let answered = [0, super::Exit::NotFound.code()].contains(&self.code);
        self.code == super::Exit::NoAgent.code() || (!answered && self.out.is_empty())
    }
}

/// The outcomes, by node.
type Outcomes = std::collections::BTreeMap<String, Outcome>;

/// Queries all agents, a few at a time, and shows their answers by node; for agents that do not run, the
/// reason. The exit code is the highest.
async fn everywhere(
    split: &Split,
    remote: Remote,
    agents: Agents,
    out: &mut impl Write,
) -> Result<u8, CliError> {
    let remote = std::sync::Arc::new(remote);
    let not_asked = |absent: &AbsentAgent| Outcome {
        out: Vec::new(),
        err: absent.problem(),
        code: super::Exit::NoAgent.code(),
    };
    let mut outcomes: Outcomes =
        agents.absent.iter().map(|absent| (absent.place(), not_asked(absent))).collect();
    let mut waiting = agents.running.into_iter();
    let mut running = JoinSet::new();
    let command = command(split);
    loop {
        while running.len() < AT_ONCE
            && let Some(agent) = waiting.next()
        {
            let (remote, command) = (std::sync::Arc::clone(&remote), command.clone());
            running.spawn(async move {
                let mut kept = Kept::default();
                let ended = remote.run(&agent, &command, &mut kept).await;
                let code = ended.unwrap_or_else(|error| {
                    kept.err.extend_from_slice(Chain(&error).to_string().as_bytes());
                    super::Exit::NoAgent.code()
                });
                let err = String::from_utf8_lossy(&kept.err).trim_end().to_owned();
                (agent.node, Outcome { out: kept.out, err, code })
            });
        }
        match running.join_next().await {
            None => break,
            Some(Ok((node, outcome))) => drop(outcomes.insert(node, outcome)),
            Some(Err(error)) => return Err(CliError::Usage(error.to_string())),
        }
    }
    forget_where_it_is_not(&mut outcomes);
    let code = outcomes.values().map(|outcome| outcome.code).max().unwrap_or_default();
    out.write_all(shown(split.arguments.output, &outcomes)?.as_bytes())?;
    for (node, outcome) in outcomes.iter().filter(|(_, outcome)| !outcome.err.is_empty()) {
        // If standard error fails, there is no other place to report it.
        let _ = writeln!(io::stderr(), "{}: {}", visible::inline(node), visible::lines(&outcome.err));
    }
    Ok(code)
}

/// The object of the command line exists on some nodes only: its absence on others is an error only if no
/// node that answered has it.
fn forget_where_it_is_not(outcomes: &mut Outcomes) {
    let is_absent = |outcome: &Outcome| outcome.code == super::Exit::NotFound.code();
    let mut answered = outcomes.values().filter(|outcome| outcome.code != super::Exit::NoAgent.code());
    if answered.all(is_absent) {
        return;
    }
    for outcome in outcomes.values_mut().filter(|outcome| is_absent(outcome)) {
        outcome.err.clear();
        outcome.code = 0;
    }
}

/// Formats the answers of all nodes: for people under the nodes' names, for programs as one object.
fn shown(format: Format, outcomes: &Outcomes) -> Result<String, CliError> {
    if format.is_data() {
        let mut nodes = Map::new();
        for (node, outcome) in outcomes {
            if outcome.is_unknown() {
                nodes.insert(node.clone(), Value::Null);
                continue;
            }
            let text = String::from_utf8_lossy(&outcome.out);
            let values: Vec<Value> = match format {
                // In YAML, an empty text would be null.
                _ if text.trim().is_empty() => Vec::new(),
                Format::Yaml => serde_norway::Deserializer::from_str(&text)
                    .map(serde::Deserialize::deserialize)
                    .collect::<Result<_, _>>()
                    .map_err(CliError::Yaml)?,
                _ => serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<_, _>>()?,
            };
            // `flows` prints a sequence of values.
            let value = match <[Value; 1]>::try_from(values) {
                Ok([value]) => value,
                Err(values) => Value::Array(values),
            };
            nodes.insert(node.clone(), value);
        }
        return format.data(&nodes).map(Option::unwrap_or_default);
    }
    let one = |(node, outcome): (&String, &Outcome)| {
        let text = visible::lines(&String::from_utf8_lossy(&outcome.out));
        match format {
            Format::Name => text,
            _ => format!("NODE {}\n{text}\n", visible::inline(node)),
        }
    };
    Ok(outcomes.iter().filter(|(_, outcome)| !outcome.out.is_empty()).map(one).collect())
}

/// Passes the output on.
struct Passed<'a, W> {
    out: &'a mut W,
    /// Escapes text for people, whichever version of netattachctl the agent has; `None`: data, which is
    /// passed on unchanged.
    text: Option<visible::Pieces>,
    errors: visible::Pieces,
}

impl<'a, W: Write> Passed<'a, W> {
    fn data(out: &'a mut W) -> Self {
        Self { out, text: None, errors: visible::Pieces::default() }
    }

    fn text(out: &'a mut W) -> Self {
        Self { text: Some(visible::Pieces::default()), ..Self::data(out) }
    }
}

impl<W: Write> Sink for Passed<'_, W> {
    fn out(&mut self, piece: &[u8]) -> io::Result<()> {
        match &mut self.text {
            Some(text) => self.out.write_all(text.next(piece).as_bytes())?,
            None => self.out.write_all(piece)?,
        }
        self.out.flush()
    }

    fn err(&mut self, piece: &[u8]) -> io::Result<()> {
        io::stderr().write_all(self.errors.next(piece).as_bytes())
    }
}

/// Keeps output.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) out: Vec<u8>,
    pub(super) err: Vec<u8>,
}

impl Sink for Kept {
    fn out(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.out.len() + piece.len() > MOST_OUTPUT {
            return Err(io::Error::other(format!("the output is larger than {MOST_OUTPUT} bytes")));
        }
        self.out.extend_from_slice(piece);
        Ok(())
    }

    fn err(&mut self, piece: &[u8]) -> io::Result<()> {
        let room = MOST_OUTPUT.saturating_sub(self.err.len());
        self.err.extend_from_slice(&piece[..piece.len().min(room)]);
        Ok(())
    }
}

impl Command {
    /// Whether the command needs no agent: it reads files of this machine.
    fn is_local(&self) -> bool {
        matches!(self, Self::Validate(_) | Self::Import(_) | Self::Completion(_))
    }

    /// Whether the command runs until it is interrupted.
    fn has_no_end(&self) -> bool {
        matches!(self, Self::Flows(flows) if flows.follows())
    }

    /// The pod that the command is about.
    fn pod(&self) -> Option<ObjectName> {
        let of = |filter: &Filter| filter.whole_pod();
        match self {
            Self::Attachments(filter) | Self::Stats(filter) => of(filter),
            Self::Policy(policy) => of(policy.filter()),
            Self::Flows(flows) => of(flows.filter()),
            Self::Pools(pools) => of(pools.filter()),
            Self::Top(top) => of(top.filter()),
            Self::Graph(graph) => of(graph.filter()),
            Self::Attach(attach) => attach.pod(),
            Self::Detach(detach) => detach.pod(),
            Self::Explain(explain) => explain.pod(),
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "kubectl_tests.rs"]
mod against_a_server;

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn options_of_kubectl_stay_and_the_command_is_passed_on() {
        let of = |text: &str| split(words(text)).unwrap();
        let one = of("--context=test attachments -A --node n1 -o wide --pod shop/cart --kubeconfig /k");
        assert_eq!(command(&one), words("netattachctl attachments -o wide --pod shop/cart"));
        assert_eq!(one.options.context.as_deref(), Some("test"));
        assert_eq!(one.options.node.as_deref(), Some("n1"));
        assert_eq!(one.options.kubeconfig, Some("/k".into()));
        assert!(one.everywhere);
        assert_eq!(one.arguments.command.pod(), Some(ObjectName::new("shop", "cart")));
        assert_eq!(
            of("attachments -n shop --pod cart").arguments.command.pod(),
            Some(ObjectName::new("shop", "cart"))
        );
        assert_eq!(
            of("explain shop/cart 10.0.0.1 80").arguments.command.pod(),
            Some(ObjectName::new("shop", "cart"))
        );
        assert_eq!(
            of("explain 10.0.0.1 shop/db 80").arguments.command.pod(),
            Some(ObjectName::new("shop", "db"))
        );
        assert_eq!(
            of("detach shop/cart net1").arguments.command.pod(),
            Some(ObjectName::new("shop", "cart"))
        );
        assert_eq!(of("status -A").arguments.command.pod(), None);
        assert!(of("flows --follow").arguments.command.has_no_end());
        assert!(of("validate dir").arguments.command.is_local());
    }

    #[test]
    fn mistakes_are_said_before_anybody_is_asked() {
        for text in ["nonsense", "attachments --nope", "stats --pod", "attachments --node", "--context"] {
            assert!(split(words(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn that_something_is_nowhere_is_an_error_and_that_it_is_not_everywhere_is_none() {
        let kept = |codes: &[u8]| {
            let outcome = |code: u8| Outcome { out: Vec::new(), err: format!("said {code}"), code };
            let named = codes.iter().enumerate().map(|(node, code)| (format!("n{node}"), outcome(*code)));
            let mut outcomes: Outcomes = named.collect();
            forget_where_it_is_not(&mut outcomes);
            outcomes.into_values().map(|outcome| (outcome.code, outcome.err)).collect::<Vec<_>>()
        };
        let told = |code: u8| (code, format!("said {code}"));
        let silent = || (0, String::new());
        assert_eq!(kept(&[3, 3]), [told(3), told(3)]);
        // It is unknown whether a node that does not answer has it.
        assert_eq!(kept(&[3, 4]), [told(3), told(4)]);
        assert_eq!(kept(&[3, 0, 3]), [silent(), told(0), silent()]);
        assert_eq!(kept(&[3, 1, 0]), [silent(), told(1), told(0)]);
        assert_eq!(kept(&[3, 0, 4]), [silent(), told(0), told(4)]);
    }

    #[test]
    fn answers_of_several_nodes_are_one_object_or_stand_under_their_names() {
        let outcome = |out: &str| Outcome { out: out.as_bytes().to_vec(), err: String::new(), code: 0 };
        let outcomes =
            [("n1".to_owned(), outcome("[1]\n")), ("n2".to_owned(), outcome("{\"a\":1}\n{\"a\":2}\n"))]
                .into();
        let json: Value = serde_json::from_str(&shown(Format::Json, &outcomes).unwrap()).unwrap();
        assert_eq!(json, serde_json::json!({"n1": [1], "n2": [{"a": 1}, {"a": 2}]}));
        // One node without an agent, one whose answer was cut off, one that refused, and two without the
        // object.
        let ended = |code, out| Outcome { code, ..outcome(out) };
        let outcomes = [("n1", 4, ""), ("n2", 4, "[{"), ("n3", 1, ""), ("n4", 3, ""), ("n5", 0, "")]
            .map(|(node, code, out)| (node.to_owned(), ended(code, out)))
            .into();
        let expected = serde_json::json!({"n1": null, "n2": null, "n3": null, "n4": [], "n5": []});
        let json: Value = serde_json::from_str(&shown(Format::Json, &outcomes).unwrap()).unwrap();
        assert_eq!(json, expected);
        let yaml: Value = serde_norway::from_str(&shown(Format::Yaml, &outcomes).unwrap()).unwrap();
        assert_eq!(yaml, expected);
        let outcomes = [("n1".to_owned(), outcome("POD\nx\n")), ("n2".to_owned(), outcome(""))].into();
        assert_eq!(shown(Format::Table, &outcomes).unwrap(), "NODE n1\nPOD\nx\n\n");
        assert_eq!(shown(Format::Name, &outcomes).unwrap(), "POD\nx\n");
    }
}
