//! Pages whose commands are run as written, in order, and their output compared.
//!
//! A block `sh` is run, and succeeds. In a block `console`, a line that begins with `# ` is a command and the lines
//! below it are its output. All of them run in one shell on a machine of its own: namespaces for network, mounts and
//! processes, which end with the shell, and with them agent, pods, pins and files.
//!
//! Nothing in the text is replaced, but its surroundings are: the executables under test are at `target/dist` of the working
//! directory, and what a page says before its commands is made by a script in front of them.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use netattach_tests::node::executable;

/// The machine's state before a page begins. Its own errors and those of the blocks go to standard error.
const MACHINE: &str = r"
set -euo pipefail
for directory in /run /var/lib; do mount -t tmpfs tmpfs $directory; done
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
";

/// A page, and what is around it.
pub(super) struct Page {
    /// Its name, for errors.
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    /// Commands that are run before.
    pub(super) before: String,
    /// Where its agent logs to.
    pub(super) log: &'static str,
}

/// A fenced block of the page.
#[derive(Debug, PartialEq)]
enum Block {
    /// Commands that succeed.
    Script(String),
    /// Commands with their output.
    Shown(Vec<(String, String)>),
}

impl Page {
    /// Runs it, and compares what is printed with what is shown.
    ///
    /// # Panics
    /// A command fails, or prints something else.
    pub(super) fn run(&self) {
        let blocks = blocks(self.text);
        let home = tempfile::Builder::new().prefix("netattach-page-").tempdir().unwrap();
        fs::create_dir(home.path().join("target")).unwrap();
        symlink(executable("netattachd").unwrap().parent().unwrap(), home.path().join("target/dist"))
            .unwrap();

        let output = Command::new("unshare")
            .args(["--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc", "bash", "-c", &self.script(&blocks)])
            .current_dir(home.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        let log = fs::read_to_string(home.path().join("agent.log")).unwrap_or_default();
        assert!(output.status.success(), "{}: {complaint}\n--- agent\n{log}", output.status);

        let shown: Vec<(String, String)> = blocks
            .into_iter()
            .flat_map(|block| match block {
                Block::Script(_) => Vec::new(),
                Block::Shown(commands) => commands,
            })
            .collect();
        let printed: Vec<(String, String)> = shown
            .iter()
            .enumerate()
            .map(|(number, (command, _))| {
                let printed = fs::read_to_string(home.path().join(number.to_string())).unwrap();
                (command.clone(), without_what_varies(&printed))
            })
            .collect();
        let shown: Vec<(String, String)> =
            shown.into_iter().map(|(command, output)| (command, without_what_varies(&output))).collect();
        assert_eq!(printed, shown, "printed, left, and {}, right", self.name);
    }

    /// One script of all blocks; the output of the commands that are shown goes to files by number.
    fn script(&self, blocks: &[Block]) -> String {
        let Self { before, log, .. } = self;
        let mut script = format!(
            "home=$PWD{MACHINE}trap 'cp {log} $home/agent.log 2> /dev/null || true' EXIT\n{before}\n"
        );
        let mut number = 0;
        for block in blocks {
            match block {
                Block::Script(text) => script += text,
                Block::Shown(commands) => {
                    for (command, _) in commands {
                        script += &format!("{{ {command}\n}} > $home/{number} 2>&1\n");
                        number += 1;
                    }
                }
            }
        }
        script
    }
}

#[test]
fn blocks_are_those_of_the_page() {
    let page = "a\n```sh\nb \\\n  c\n```\n```text\nd\n```\n```console\n# e\nf\n\ng\n# h\n```\n";
    let shown = vec![("e".to_owned(), "f\n\ng\n".to_owned()), ("h".to_owned(), String::new())];
    assert_eq!(blocks(page), [Block::Script("b \\\n  c\n".to_owned()), Block::Shown(shown)]);
}

#[test]
fn what_varies_is_little() {
    let printed =
        "2026-11-22T13:37:51.544Z x  02:00:0a:ff:00:01  undecided tcp 10.0.0.1:47908 (a/b) > 10.0.0.2:80\n";
    let again =
        "2027-01-01T00:00:00.000Z x  02:00:0a:ff:00:02  on        tcp 10.0.0.1:47910 (a/b) > 10.0.0.2:80\n";
    assert_eq!(without_what_varies(printed), without_what_varies(again));
    assert_eq!(without_what_varies(&format!("{printed}{printed}")), without_what_varies(again));
    let other = again.replace(":80\n", ":81\n");
    assert_ne!(without_what_varies(&other), without_what_varies(again));
}

/// The blocks `sh` and `console` of a page, in order.
fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else { continue };
        let content: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        match kind {
            "sh" => blocks.push(Block::Script(content.join("\n") + "\n")),
            "console" => blocks.push(Block::Shown(commands(&content))),
            _ => {}
        }
    }
    blocks
}

fn commands(lines: &[&str]) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in lines {
        match (line.strip_prefix("# "), commands.last_mut()) {
            (Some(command), _) => commands.push((command.to_owned(), String::new())),
            (None, Some((_, output))) => *output += &format!("{line}\n"),
            (None, None) => panic!("a line of output before the first command: {line}"),
        }
    }
    commands
}

/// Output without values that differ with each run: Ethernet addresses, times, the client's port; whether the fast path
/// is decided on yet; how often a line is repeated, as with a packet that is not answered; column widths.
fn without_what_varies(output: &str) -> String {
    let mut lines: Vec<String> = output
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let words = words.iter().enumerate().map(|(at, word)| match *word {
                "undecided" => "on".to_owned(),
                word if is_ethernet(word) => "MAC".to_owned(),
                word if is_time(word) => "TIME".to_owned(),
                word if is_from(&words[at + 1..]) => {
                    word.rsplit_once(':').map_or(word, |(address, _)| address).to_owned()
                }
                word => word.to_owned(),
            });
            words.collect::<Vec<_>>().join(" ")
        })
        .collect();
    lines.dedup();
    lines.join("\n")
}

/// Whether a word that is followed by these names where a packet comes from: `10.0.0.1:47908 (shop/cart) >`.
fn is_from(followed: &[&str]) -> bool {
    match followed {
        [">", ..] => true,
        [pod, ">", ..] => pod.starts_with('('),
        _ => false,
    }
}

/// Six pairs of hexadecimal digits.
fn is_ethernet(word: &str) -> bool {
    let parts: Vec<&str> = word.split(':').collect();
    parts.len() == 6
        && parts.iter().all(|part| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// `2026-11-22T13:37:51.544Z`.
fn is_time(word: &str) -> bool {
    word.len() == 24 && word.ends_with('Z') && word.as_bytes()[10] == b'T'
}
