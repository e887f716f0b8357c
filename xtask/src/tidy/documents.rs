//! Checks the documents: links and names of files exist, prose is narrow enough for a side-by-side review, the README
//! stays short.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::{Violation, chart, glossary, messages, report};
use crate::progress::Done;
use crate::source::{self, Source};
use crate::tree;

/// Widest line of prose. Tables and code may be wider.
const COLUMNS: usize = 100;
/// Longest README.
const README_LINES: usize = 150;
/// Pages that lead to places of the source by their names.
const NAMES_PLACES: [&str; 2] = ["CONTRIBUTING.md", "docs/architecture.md"];
/// Where such a name begins: at the top, or in the library.
const BEGINNINGS: [&str; 2] = ["", "netattach/src/"];
/// Pages by which somebody builds for the first time, and what they have to name: a distribution's cargo does not read
/// `rust-toolchain.toml`, and is too old for the edition.
const BUILDS: [&str; 3] = ["CONTRIBUTING.md", "README.md", "docs/runtimes.md"];
const TOOLCHAIN: &str = "https://rustup.rs";
/// Pages without a width limit: one is generated, one is history.
const ANY_WIDTH: [&str; 2] = ["docs/conformance.md", "CHANGELOG.md"];

pub(super) fn check() -> anyhow::Result<Done> {
    let pages = source::matching("*.md")?;
    let exists = |path: &str| tree::root().join(path).exists();
    let mut violations = Vec::new();
    for page in &pages {
        violations.extend(links(page, &pages, exists));
        violations.extend(places(page, exists));
        violations.extend(wide(page));
        violations.extend(long(page));
        violations.extend(toolchain(page));
    }
    if let Some(page) = glossary::page(&pages) {
        violations.extend(glossary::check(page, &source::all()?)?);
    }
    if let Some(page) = messages::page(&pages) {
        violations.extend(messages::check(page, &source::all()?)?);
    }
    let templates = chart::templates()?;
    violations.extend(templates.iter().flat_map(chart::violations));
    report(violations, format!("{} pages, {} templates", pages.len(), templates.len()))
}

/// Links to places in this repository that are not there.
fn links(page: &Source, pages: &[Source], exists: impl Fn(&str) -> bool) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (line, text) in prose(&page.text) {
        for target in targets(text).filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { page.path.clone() } else { beside(&page.path, path) };
            let is_there = exists(&path)
                && (anchor.is_empty()
                    || pages.iter().any(|other| other.path == path && anchors(&other.text).contains(anchor)));
            if !is_there {
                violations.push(Violation {
                    path: page.path.clone(),
                    line,
                    found: target.to_owned(),
                    rule: "a link leads to a file of the repository and to a heading in it",
                    why: "who follows it looks for an answer; pages and headings move",
                });
            }
        }
    }
    violations
}

/// Files and folders in backticks that are not there, on the pages that lead to them. A name counts as one of these if its first
/// part is a folder of the repository; names with capitals, such as `link/NAME.rs`, stand for others.
fn places(page: &Source, exists: impl Fn(&str) -> bool) -> Vec<Violation> {
    if !NAMES_PLACES.contains(&page.path.as_str()) {
        return Vec::new();
    }
    let is_of_path = |sign: char| sign.is_ascii_lowercase() || sign.is_ascii_digit() || "_-./".contains(sign);
    let is_missing = |named: &str| {
        let path = named.split("::").next().unwrap_or_default().trim_end_matches('/');
        // Built files do not always exist.
        let first = path.split_once('/').map(|(first, _)| first).filter(|it| !["", "target"].contains(it));
        let Some(first) = first.filter(|_| path.chars().all(is_of_path)) else { return false };
        let mut within = BEGINNINGS.iter().filter(|begin| exists(&format!("{begin}{first}"))).peekable();
        // A module may be a file or a folder.
        let is_there = |begin: &&str| ["", ".rs"].iter().any(|end| exists(&format!("{begin}{path}{end}")));
        within.peek().is_some() && !within.any(is_there)
    };
    let in_backticks = |(line, text): (usize, &str)| {
        let named = text.split('`').skip(1).step_by(2).filter(|named| is_missing(named));
        named.map(|named| (line, named.to_owned())).collect::<Vec<_>>()
    };
    let missing = prose(&page.text).flat_map(in_backticks);
    missing
        .map(|(line, found)| Violation {
            path: page.path.clone(),
            line,
            found,
            rule: "a file or folder that the page names is there",
            why: "who changes something begins at what the page names; files move",
        })
        .collect()
}

fn wide(page: &Source) -> Vec<Violation> {
    if ANY_WIDTH.contains(&page.path.as_str()) {
        return Vec::new();
    }
    let wide = |text: &str| !text.starts_with('|') && text.chars().count() > COLUMNS;
    // The output of commands may be wider.
    let mut is_written = false;
    let by_hand = prose(&page.text).filter(move |(_, text)| {
        is_written = text.starts_with("<!-- begin: ") || is_written && !text.starts_with("<!-- end: ");
        !is_written
    });
    by_hand
        .filter(|(_, text)| wide(text))
        .map(|(line, text)| Violation {
            path: page.path.clone(),
            line,
            found: format!("{} columns", text.chars().count()),
            rule: "prose is at most 100 columns wide",
            why: "a change of a page is reviewed side by side",
        })
        .collect()
}

fn long(page: &Source) -> Option<Violation> {
    let lines = page.text.lines().count();
    (page.path == "README.md" && lines > README_LINES).then(|| Violation {
        path: page.path.clone(),
        line: README_LINES + 1,
        found: format!("{lines} lines"),
        rule: "the README has at most 150 lines",
        why: "it is for those who come first; what is looked up has pages of its own",
    })
}

fn toolchain(page: &Source) -> Option<Violation> {
    let lacks = BUILDS.contains(&page.path.as_str()) && !page.text.contains(TOOLCHAIN);
    lacks.then(|| Violation {
        path: page.path.clone(),
        line: 1,
        found: format!("no {TOOLCHAIN}"),
        rule: "a page by which somebody builds for the first time says where the compiler comes from",
        why: "the first command fails with the cargo of a distribution",
    })
}

/// The lines outside of fenced blocks, by number.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fence && !fenced).then_some((index + 1, line))
    })
}

/// The targets of links.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

/// The names by which GitHub links to headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|(_, line)| {
        let heading = line.trim_start_matches('#');
        (heading.len() < line.len()).then(|| heading.strip_prefix(' '))?
    });
    let kept = |letter: &char| letter.is_alphanumeric() || ['-', '_', ' '].contains(letter);
    headings
        .map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-"))
        .collect()
}

/// A path as it is written in a page, from the top directory.
fn beside(page: &str, path: &str) -> String {
    let directory = Path::new(page).parent().unwrap_or(Path::new(""));
    let mut whole = PathBuf::new();
    for part in directory.join(path).components() {
        match part {
            Component::ParentDir => drop(whole.pop()),
            part => whole.push(part),
        }
    }
    whole.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn found(violations: Vec<Violation>) -> Vec<(usize, String)> {
        violations.into_iter().map(|violation| (violation.line, violation.found)).collect()
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let pages = [
            page(
                "docs/a.md",
                "# A, `b` and c\n[x](b.md) [x](../README.md#what-it-is) [x](#a-b-and-c)\n[x](c.md)\n[x](#d)\n",
            ),
            page(
                "README.md",
                "# What it is\n```\n# not one\n```\n[x](docs/a.md#not-one) [x](https://a.b/c)\n",
            ),
        ];
        let exists = |path: &str| ["docs/a.md", "docs/b.md", "README.md"].contains(&path);
        let missing = [(3, "c.md".to_owned()), (4, "#d".to_owned())];
        assert_eq!(found(links(&pages[0], &pages, exists)), missing);
        assert_eq!(found(links(&pages[1], &pages, exists)), [(5, "docs/a.md#not-one".to_owned())]);
    }

    #[test]
    fn places_that_a_page_names_are_there() {
        let text = "`source/mod.rs`, `agent/scheduler`, `deploy/metrics`, `attach/apply.rs::check`, `read/`\n\
                    `link/NAME.rs` `pods/status` `target/dist` `/proc/self` `alerts.yaml`\n\
                    ```\nsource/gone.rs\n```\n| `source/kube` | `source/read/`, `link/gone.rs::f` |\n";
        let there = [
            "source",
            "source/mod.rs",
            "source/read",
            "agent",
            "agent/scheduler.rs",
            "deploy",
            "deploy/metrics",
            "link",
            "attach",
            "attach/apply.rs",
            "target",
        ];
        let exists = |path: &str| {
            let library = path.strip_prefix("netattach/src/");
            there.contains(&library.unwrap_or(path)) && library.is_some() != path.starts_with("deploy")
        };
        let missing = [(6, "source/kube".to_owned()), (6, "link/gone.rs::f".to_owned())];
        assert_eq!(found(places(&page("CONTRIBUTING.md", text), exists)), missing);
        assert_eq!(found(places(&page("docs/a.md", text), exists)), []);
    }

    #[test]
    fn prose_is_measured_and_tables_and_code_are_not() {
        let (fits, wide_line) = ("ü".repeat(COLUMNS), "u".repeat(COLUMNS + 1));
        let text = format!("{fits}\n{wide_line}\n| {wide_line} |\n```sh\n{wide_line}\n```\n{wide_line}\n");
        let columns = "101 columns".to_owned();
        assert_eq!(found(wide(&page("docs/a.md", &text))), [(2, columns.clone()), (7, columns.clone())]);
        assert!(wide(&page("CHANGELOG.md", &text)).is_empty());
        let written = format!("<!-- begin: bench -->\n{wide_line}\n<!-- end: bench -->\n{wide_line}\n");
        assert_eq!(found(wide(&page("docs/a.md", &written))), [(4, columns)]);
    }

    #[test]
    fn pages_by_which_one_builds_say_where_the_compiler_comes_from() {
        let named = |path: &str, text: &str| found(toolchain(&page(path, text)).into_iter().collect());
        let lacks = [(1, "no https://rustup.rs".to_owned())];
        assert_eq!(named("README.md", "They need only cargo:"), lacks);
        assert_eq!(named("README.md", "They need [rustup](https://rustup.rs):"), []);
        assert_eq!(named("docs/a.md", "They need only cargo:"), []);
    }

    #[test]
    fn only_the_readme_has_a_length() {
        let text = "a\n".repeat(README_LINES);
        assert!(long(&page("README.md", &text)).is_none());
        let text = text + "a\n";
        assert_eq!(
            found(long(&page("README.md", &text)).into_iter().collect()),
            [(151, "151 lines".to_owned())]
        );
        assert!(long(&page("docs/a.md", &text)).is_none());
    }
}
