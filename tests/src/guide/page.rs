//! The blocks of a page, and the parts of their output that may differ.

use anyhow::{Context, Result, bail};

/// A block and the number of its first line in the page.
#[derive(Debug, PartialEq)]
pub(super) struct Part {
    pub(super) line: usize,
    pub(super) block: Block,
}

/// A fenced block.
#[derive(Debug, PartialEq)]
pub(super) enum Block {
    /// Commands that succeed.
    Script(String),
    /// A file.
    File { name: String, text: String },
    /// Commands with their output.
    Shown(Vec<Command>),
}

/// A command with the output that is shown for it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Command {
    /// The number of its line.
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) output: String,
}

/// The names of parts.
pub(super) fn parts(page: &str) -> Vec<String> {
    let mut parts: Vec<String> = fences(page)
        .filter(|fence| ["sh", "console", "yaml"].contains(&fence.kind))
        .filter(|fence| !fence.part.is_empty())
        .map(|fence| fence.part.to_owned())
        .collect();
    parts.sort();
    parts.dedup();
    parts
}

/// The blocks of a part that are run, in order.
pub(super) fn blocks(page: &str, part: &str) -> Result<Vec<Part>> {
    let mut blocks = Vec::new();
    for Fence { line, kind, part: of, content } in fences(page) {
        if of != part {
            continue;
        }
        let text = || content.iter().map(|line| format!("{line}\n")).collect::<String>();
        let block = match kind {
            "sh" => Block::Script(text()),
            "console" => Block::Shown(commands(line, &content).with_context(|| format!("line {line}"))?),
            "yaml" => match content.first().and_then(|first| first.strip_prefix("# ")) {
                Some(name) if name.ends_with(".yaml") && !name.contains(['/', ' ']) => {
                    Block::File { name: name.to_owned(), text: text() }
                }
                _ => continue,
            },
            _ => continue,
        };
        blocks.push(Part { line, block });
    }
    Ok(blocks)
}

/// The block of that kind that has this text in it.
pub(super) fn example(page: &str, kind: &str, text: &str) -> Result<String> {
    let mut found = fences(page).filter(|fence| fence.kind == kind);
    let fence = found.find(|fence| fence.content.iter().any(|line| line.contains(text)));
    let fence = fence.with_context(|| format!("the page has no block {kind} with {text}"))?;
    Ok(fence.content.iter().map(|line| format!("{line}\n")).collect())
}

/// The words in backticks in the first cell of each row of the table with this head.
pub(super) fn first_cells(page: &str, head: &str) -> Result<Vec<Vec<String>>> {
    let mut lines = page.lines().skip_while(|line| *line != head);
    // The head, and the line below it.
    lines.nth(1).with_context(|| format!("the page has no table {head}"))?;
    let rows = lines.take_while(|line| line.starts_with('|'));
    Ok(rows
        .map(|row| {
            let cell = row.trim_start_matches('|').split('|').next().unwrap_or_default();
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        })
        .collect())
}

/// A fenced block as written in the page.
struct Fence<'p> {
    /// The number of the line that opens it.
    line: usize,
    kind: &'p str,
    part: &'p str,
    content: Vec<&'p str>,
}

fn fences(page: &str) -> impl Iterator<Item = Fence<'_>> {
    let mut lines = page.lines().enumerate();
    std::iter::from_fn(move || {
        let (at, opened) = lines.by_ref().find(|(_, line)| line.starts_with("```"))?;
        let content = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let mut words = opened.trim_start_matches('`').split(' ');
        let (kind, part) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        Some(Fence { line: at + 1, kind, part, content })
    })
}

fn commands(opened: usize, lines: &[&str]) -> Result<Vec<Command>> {
    let mut commands: Vec<Command> = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        match (line.strip_prefix("# "), commands.last_mut()) {
            (Some(text), _) => {
                let (text, output) = (text.to_owned(), String::new());
                commands.push(Command { line: opened + 1 + at, text, output });
            }
            (None, Some(command)) => command.output += &format!("{line}\n"),
            (None, None) => bail!("a line of output before the first command: {line}"),
        }
    }
    Ok(commands)
}

/// Returns the page with the output of these commands instead of the output that it shows.
pub(super) fn with_outputs(page: &str, printed: &[(Command, String)]) -> String {
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    for (command, output) in printed.iter().rev() {
        let shown = command.output.lines().count();
        lines.splice(
            command.line..command.line + shown,
            output.lines().map(|line| line.trim_end().to_owned()),
        );
    }
    lines.join("\n") + "\n"
}

/// Whether the output of a command equals the shown output, except for parts that differ with each run.
pub(super) fn is_as_shown(printed: &str, shown: &str) -> bool {
    fn matches(printed: &[String], shown: &[String]) -> bool {
        match shown.split_first() {
            None => printed.is_empty(),
            Some((any, rest)) if any == "..." => (0..=printed.len()).any(|at| matches(&printed[at..], rest)),
            Some((line, rest)) => printed.first() == Some(line) && matches(&printed[1..], rest),
        }
    }
    matches(&without_what_varies(printed), &without_what_varies(shown))
}

/// Returns output without values that differ with each run: Ethernet addresses, times, the client's port, indices of
/// links; whether the fast path is decided on yet; how often a line is repeated, as with a packet that is not
/// answered; column widths.
fn without_what_varies(output: &str) -> Vec<String> {
    let mut lines: Vec<String> = output
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().skip_while(|word| is_index(word)).collect();
            let words = words.iter().enumerate().map(|(at, word)| match *word {
                "undecided" => "on".to_owned(),
                word if is_ethernet(word) => "MAC".to_owned(),
                word if is_time(word) => "TIME".to_owned(),
                word if is_from(&words[at + 1..]) => {
                    word.rsplit_once(':').map_or(word, |(address, _)| address).to_owned()
                }
                word => without_index(word).to_owned(),
            });
            words.collect::<Vec<_>>().join(" ")
        })
        .collect();
    lines.dedup();
    lines
}

/// Whether a word followed by these is the source of a packet: `10.0.0.1:47908 (shop/cart) >`.
fn is_from(followed: &[&str]) -> bool {
    match followed {
        [">", ..] => true,
        [pod, ">", ..] => pod.starts_with('('),
        _ => false,
    }
}

/// `12:` before a link.
fn is_index(word: &str) -> bool {
    word.strip_suffix(':')
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

/// `net1` of `net1@if12`.
fn without_index(word: &str) -> &str {
    match word.split_once("@if") {
        Some((name, index)) if index.trim_end_matches(':').bytes().all(|digit| digit.is_ascii_digit()) => {
            name
        }
        _ => word,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: usize, text: &str, output: &str) -> Command {
        Command { line, text: text.to_owned(), output: output.to_owned() }
    }

    #[test]
    fn blocks_are_those_of_the_page() {
        let page = "a\n```sh\nb \\\n  c\n```\n```text\nd\n```\n```console\n# e\nf\n\ng\n# h\n```\n\
            ```yaml\n# i.yaml\nj: k\n```\n```yaml\n# not a name\n```\n```sh vm\nl\n```\n";
        let block = |line, block| Part { line, block };
        let expected = [
            block(2, Block::Script("b \\\n  c\n".to_owned())),
            block(9, Block::Shown(vec![command(10, "e", "f\n\ng\n"), command(14, "h", "")])),
            block(16, Block::File { name: "i.yaml".to_owned(), text: "# i.yaml\nj: k\n".to_owned() }),
        ];
        assert_eq!(blocks(page, "").unwrap(), expected);
        assert_eq!(blocks(page, "vm").unwrap(), [block(23, Block::Script("l\n".to_owned()))]);
        assert_eq!(parts(page), ["vm"]);
        let printed =
            [(command(10, "e", "f\n\ng\n"), "x\n".to_owned()), (command(14, "h", ""), "y \nz\n".to_owned())];
        let written = with_outputs(page, &printed);
        assert!(written.contains("```console\n# e\nx\n# h\ny\nz\n```\n"), "{written}");
        assert!(blocks("```console\nx\n```\n", "").is_err());
    }

    #[test]
    fn an_example_is_found_by_what_it_has() {
        let page = "```toml\na = 1\n```\n```toml\na = 2\nb = 3\n```\n";
        assert_eq!(example(page, "toml", "a = 2").unwrap(), "a = 2\nb = 3\n");
        assert!(example(page, "json", "a = 2").is_err());
    }

    #[test]
    fn first_cells_are_those_of_one_table() {
        let page = "| a | b |\n|---|---|\n| `x.y`, `.z` | `no` |\n| word | `no` |\n\n| `other` | |\n";
        let expected = [vec!["x.y".to_owned(), ".z".to_owned()], Vec::new()];
        assert_eq!(first_cells(page, "| a | b |").unwrap(), expected);
        assert!(first_cells(page, "| a |").is_err());
    }

    #[test]
    fn what_varies_is_little() {
        let printed = "4: 2026-11-22T13:37:51.544Z x@if4  02:00:0a:ff:00:01  undecided tcp 10.0.0.1:47908 (a/b) > 10.0.0.2:80\n";
        let again = "17: 2027-01-01T00:00:00.000Z x@if7  02:00:0a:ff:00:02  on        tcp 10.0.0.1:47910 (a/b) > 10.0.0.2:80\n";
        assert!(is_as_shown(printed, again));
        assert!(is_as_shown(&format!("{printed}{printed}"), again));
        assert!(!is_as_shown(&again.replace(":80\n", ":81\n"), again));
    }

    #[test]
    fn three_dots_stand_for_any_lines() {
        let table = [
            ("a\nb\nc\n", "a\n...\nc\n", true),
            ("a\nc\n", "a\n...\nc\n", true),
            ("a\nb\n", "...\n", true),
            ("a\nb\n", "a\n...\nc\n", false),
            ("a\nb\n", "a\n", false),
            ("", "...\n", true),
        ];
        for (printed, shown, expected) in table {
            assert_eq!(is_as_shown(printed, shown), expected, "{printed:?} {shown:?}");
        }
    }
}
