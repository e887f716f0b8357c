//! Pages that are executed as they are written: their commands, in order, and their output.
//!
//! | block | |
//! |---|---|
//! | `sh` | commands that succeed |
//! | `console` | lines that begin with `# ` are commands, the lines below each its output; a line `...` stands for any lines |
//! | `yaml` that begins with a comment `# NAME.yaml` | that file, written into the working directory |
//! | any other | not run |
//!
//! A word after the kind names a part of the page, for machines with its requirements: ```` ```sh ipvlan ````. All
//! blocks of a part run in one shell on a machine of its own: namespaces for network, mounts and processes, which end
//! with the shell, and with them agent, pods, pins and files. Output is compared repeatedly until it is as shown, as
//! the effect of a command may take a moment.
//!
//! [`Operator`] runs parts on a real cluster, where the `kubectl` commands of pages go to the real one.
//!
//! With `NETATTACH_WRITE_GUIDES` set, the output is written into the page. `page` reads a page, `shell` runs its
//! parts.

mod page;
mod shell;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_norway::Value;
use tempfile::TempDir;

use self::page::{Block, Part};
use self::shell::Shell;
use crate::node::executable;
use crate::traffic::{PATIENCE, eventually};

/// The state of a machine before a page begins.
#[derive(Debug, Clone, Copy)]
pub enum Machine {
    /// `/run`, `/var/lib` and `/sys/fs/bpf` are empty. `cargo` does nothing: it would build the executables under
    /// test, which are at `target/dist` of the working directory.
    Empty,
    /// [`Machine::Empty`] without installed files: `/opt` and `/usr/local/bin` are empty, `/etc` is a copy.
    Bare,
    /// [`Machine::Bare`], on which these commands have succeeded: the prerequisites of the page. `$home/plugins` is a
    /// link to [`Tools::plugins`].
    With(&'static str),
    /// A node of a cluster, with an agent and a second network card `eth1`: `node.sh` lists the substitutes for
    /// kubelet, runtime and `kubectl`.
    Node,
}

const EMPTY: &str = include_str!("empty.sh");
const BARE: &str = include_str!("bare.sh");
const NODE: &str = include_str!("node.sh");

/// A page.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Its path from the top of the repository.
    pub path: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// Additional directories of a page's machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tools<'a> {
    /// busybox, which pods run.
    pub busybox: Option<&'a Path>,
    /// Plugins that the agent executes.
    pub plugins: Option<&'a Path>,
}

impl Page {
    /// The parts that the page has, besides the one without a name.
    pub fn parts(self) -> Vec<String> {
        page::parts(self.text)
    }

    /// Runs a part of the page, or the blocks without a part (`""`).
    ///
    /// # Errors
    /// A command fails or its output differs from the page: the error names the place and the difference.
    pub fn run(self, part: &str, machine: Machine, tools: Tools<'_>) -> Result<()> {
        run(&[self], part, machine, tools)
    }

    fn run_in(self, part: &str, home: &Path, shell: &mut Shell) -> Result<()> {
        let mut written = Vec::new();
        let mut wrong = Vec::new();
        for (number, Part { line, block }) in page::blocks(self.text, part)?.into_iter().enumerate() {
            let place = format!("{}:{line}", self.path);
            match block {
                Block::Script(text) => shell.succeed(&text).with_context(|| place.clone())?,
                Block::File { name, text } => {
                    write_file(home, number, &name, &text, shell).with_context(|| place.clone())?
                }
                Block::Shown(commands) => {
                    for command in commands {
                        let printed = compared(shell, &command).with_context(|| place.clone())?;
                        if !page::is_as_shown(&printed, &command.output) {
                            wrong.push(format!(
                                "{place}: {}\n--- printed\n{printed}--- shown\n{}",
                                command.text, command.output
                            ));
                            written.push((command, printed));
                        }
                    }
                }
            }
        }
        if std::env::var_os("NETATTACH_WRITE_GUIDES").is_some() {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(self.path);
            let page = page::with_outputs(&fs::read_to_string(&path)?, &written);
            return Ok(fs::write(path, page)?);
        }
        ensure!(wrong.is_empty(), "{}\n--- agent\n{}", wrong.join("\n"), shell.agent_log());
        Ok(())
    }
}

/// An operator who runs parts of pages in one shell, which continues from one part to the next.
#[derive(Debug)]
pub struct Operator {
    shell: Shell,
    home: PathBuf,
}

impl Operator {
    /// Starts `shell`, a shell that reads its commands from standard input, in that directory, where it also writes
    /// its files.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(shell: Command, directory: &Path) -> Result<Self> {
        Ok(Self { shell: Shell::start_as(shell, directory)?, home: directory.to_owned() })
    }

    /// Runs a part of a page, or the blocks without a part (`""`).
    ///
    /// # Errors
    /// As [`Page::run`], and the page has no such part.
    pub fn run(&mut self, page: Page, part: &str) -> Result<()> {
        ensure!(!page::blocks(page.text, part)?.is_empty(), "{} has no part {part:?}", page.path);
        page.run_in(part, &self.home, &mut self.shell)
    }
}

/// Runs a part of pages, one after the other on the same machine.
///
/// # Errors
/// As [`Page::run`].
pub fn run(pages: &[Page], part: &str, machine: Machine, tools: Tools<'_>) -> Result<()> {
    let home = tempfile::Builder::new().prefix("netattach-guide-").tempdir()?;
    let mut shell = begin(&home, machine, tools)?;
    pages.iter().try_for_each(|page| page.run_in(part, home.path(), &mut shell))
}

/// Returns a shell on a machine of its own in that state.
fn begin(home: &TempDir, machine: Machine, tools: Tools<'_>) -> Result<Shell> {
    let home = home.path();
    fs::create_dir(home.join("target"))?;
    let executables = executable("netattachd")?;
    symlink(executables.parent().context("a directory of executables")?, home.join("target/dist"))?;
    fs::create_dir_all(home.join("image"))?;
    if let Some(busybox) = tools.busybox {
        fs::copy(busybox, home.join("image/busybox"))?;
    }
    symlink(tools.plugins.unwrap_or(Path::new("/opt/cni/bin")), home.join("plugins"))?;
    let mut shell = Shell::start(home)?;
    shell.succeed(EMPTY).context("the machine")?;
    match machine {
        Machine::Empty => {}
        Machine::Bare => shell.succeed(BARE).context("the machine")?,
        Machine::With(commands) => {
            shell.succeed(BARE).and_then(|()| shell.succeed(commands)).context("the machine")?;
        }
        Machine::Node => shell.succeed(NODE).context("the node")?,
    }
    Ok(shell)
}

/// Writes a manifest where the page's commands find it, and beside it the pods that a kubelet would create from it:
/// namespace, name and command of each, one pod a line.
fn write_file(home: &Path, number: usize, name: &str, text: &str, shell: &mut Shell) -> Result<()> {
    let mut pods = String::new();
    for document in serde_norway::Deserializer::from_str(text) {
        let object: Value = serde::Deserialize::deserialize(document)?;
        if object["kind"] != "Pod" {
            continue;
        }
        let word = |value: &Value| value.as_str().map(str::to_owned);
        let (namespace, pod) = (word(&object["metadata"]["namespace"]), word(&object["metadata"]["name"]));
        let containers = object["spec"]["containers"].as_sequence().map(Vec::as_slice).unwrap_or_default();
        let [container] = containers else { bail!("a pod of a guide has one container: {object:?}") };
        let command: Vec<String> = container["command"]
            .as_sequence()
            .into_iter()
            .flatten()
            .map(|value| word(value).map(|word| format!("'{}'", word.replace('\'', r"'\''"))))
            .collect::<Option<_>>()
            .context("a command of words")?;
        let namespace = namespace.unwrap_or_else(|| "shop".to_owned());
        pods.push_str(&format!("{namespace} {} {}\n", pod.context("a pod has a name")?, command.join(" ")));
    }
    fs::write(home.join(format!("{number}.yaml")), text)?;
    fs::write(home.join(format!("{number}.pods")), pods)?;
    shell.succeed(&format!("cp $home/{number}.yaml {name}; cp $home/{number}.pods {name}.pods\n"))
}

/// Returns the output of a command once it is as shown, or after its time.
fn compared(shell: &mut Shell, command: &page::Command) -> Result<String> {
    let mut printed = String::new();
    let mut failed = None;
    eventually(PATIENCE, || match shell.output(&command.text) {
        Ok(text) => {
            let is_as_shown = page::is_as_shown(&text, &command.output);
            printed = text;
            is_as_shown
        }
        Err(error) => {
            failed = Some(error);
            true
        }
    });
    match failed {
        Some(error) => Err(error.context(command.text.clone())),
        None => Ok(printed),
    }
}

/// Returns the block of that kind of a page that contains this text, for tests that use it otherwise.
///
/// # Errors
/// There is none.
pub fn example(page: &str, kind: &str, text: &str) -> Result<String> {
    page::example(page, kind, text)
}

/// Returns the words in backticks in the first cell of each row of a page's table with this head, such as
/// `| value | default | |`.
///
/// # Errors
/// There is no such table.
pub fn first_cells(page: &str, head: &str) -> Result<Vec<Vec<String>>> {
    page::first_cells(page, head)
}

/// Path of busybox after set-up, below the directory that `NETATTACH_RUNTIMES` names.
pub const BUSYBOX: &str = "bookworm/bin/busybox";
