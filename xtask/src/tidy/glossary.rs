//! The glossary: every kind of step in the journal and every verb of removal in the log and in the command line has its entry.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::Violation;
use super::names::{attributes, is_for_tests};
use crate::source::Source;

/// The page that is compared.
const PAGE: &str = "docs/glossary.md";
/// The enum `Step`: its variants are kinds of steps.
const STEPS: &str = "netattach/src/step/mod.rs";
/// The enum `Link`, whose variants are written as steps.
const LINKS: &str = "netattach/src/spec.rs";
/// A cell of the row of kinds of steps, and the heading of the section of verbs.
const KINDS_ROW: &str = "kinds of steps";
const VERBS_SECTION: &str = "## Putting away";

/// Verbs of removal, and the beginnings of their forms.
const VERBS: [(&str, &[&str]); 12] = [
    ("roll back", &["roll back", "rolled back", "rolls back", "rolling back"]),
    ("take back", &["take back", "taken back", "takes back", "took back"]),
    ("undo", &["undo", "undid"]),
    ("detach", &["detach"]),
    ("retire", &["retire"]),
    ("forget", &["forget", "forgot"]),
    ("release", &["release"]),
    ("withdraw", &["withdraw"]),
    ("collect", &["collect"]),
    ("sweep", &["sweep", "swept"]),
    ("remove", &["remov", "delet"]),
    ("uninstall", &["uninstall"]),
];

/// Compares the page with the sources.
pub(super) fn check(page: &Source, sources: &[Source]) -> anyhow::Result<Vec<Violation>> {
    let mut violations = Vec::new();
    let mut kinds = BTreeSet::new();
    for (path, name) in [(STEPS, "Step"), (LINKS, "Link")] {
        if let Some(source) = sources.iter().find(|source| source.path == path) {
            kinds.extend(variants(&syn::parse_file(&source.text)?, name));
        }
    }
    let (line, listed) = listed_kinds(&page.text);
    for kind in kinds.symmetric_difference(&listed) {
        violations.push(Violation {
            path: page.path.clone(),
            line,
            found: kind.clone(),
            rule: "the glossary lists the kinds of steps that the journal has, and no others",
            why: "records keep these words whatever the source calls them",
        });
    }
    let explained = explained_verbs(&page.text);
    let of_product =
        |source: &&Source| source.path.starts_with("netattach/src/") && !source.path.ends_with("tests.rs");
    for source in sources.iter().filter(of_product) {
        for (line, verb) in verbs_in(source)? {
            if !explained.contains(verb) {
                violations.push(Violation {
                    path: source.path.clone(),
                    line,
                    found: verb.to_owned(),
                    rule: "a verb of removal in the log or the command line has its row in the glossary",
                    why: "each has one meaning, and two for the same thing confuse",
                });
            }
        }
    }
    Ok(violations)
}

/// The page among all pages, if it is there.
pub(super) fn page(pages: &[Source]) -> Option<&Source> {
    pages.iter().find(|page| page.path == PAGE)
}

/// The written names of an enum's variants: `rename`, or the name in kebab case; none for variants that are skipped.
fn variants(file: &syn::File, name: &str) -> BTreeSet<String> {
    let is_named = |item: &&syn::ItemEnum| item.ident == name;
    let enums = file.items.iter().filter_map(|item| match item {
        syn::Item::Enum(item) => Some(item),
        _ => None,
    });
    enums.filter(is_named).flat_map(|item| item.variants.iter().filter_map(written)).collect()
}

fn written(variant: &syn::Variant) -> Option<String> {
    let mut name = Some(kebab(&variant.ident.to_string()));
    for attribute in variant.attrs.iter().filter(|attribute| attribute.path().is_ident("serde")) {
        // Attributes that take other forms say nothing about the name.
        let _ = attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                name = None;
            } else if meta.path.is_ident("rename") {
                name = Some(meta.value()?.parse::<syn::LitStr>()?.value());
            }
            Ok(())
        });
    }
    name
}

fn kebab(name: &str) -> String {
    let mut kebab = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.extend(letter.to_lowercase());
    }
    kebab
}

/// The words in backquotes of the first cell of the row of kinds, and its line.
fn listed_kinds(page: &str) -> (usize, BTreeSet<String>) {
    let row = page.lines().enumerate().find(|(_, line)| line.starts_with('|') && line.contains(KINDS_ROW));
    let Some((index, row)) = row else { return (1, BTreeSet::new()) };
    let cell = row.split('|').nth(1).unwrap_or_default();
    (index + 1, cell.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

/// The verbs in the first cells of the section's table.
fn explained_verbs(page: &str) -> BTreeSet<&str> {
    let section = page.split(VERBS_SECTION).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with('|'));
    rows.filter_map(|row| row.split('|').nth(1)).flat_map(|cell| cell.split(',')).map(str::trim).collect()
}

/// The verbs of removal in the log messages of a file, and in all texts of the command line.
fn verbs_in(source: &Source) -> anyhow::Result<Vec<(usize, &'static str)>> {
    let mut texts = Texts { found: Vec::new(), all: source.path.starts_with("netattach/src/cli/") };
    texts.visit_file(&syn::parse_file(&source.text)?);
    Ok(texts.found.iter().flat_map(|(line, text)| verbs(text).map(|verb| (*line, verb))).collect())
}

fn verbs(text: &str) -> impl Iterator<Item = &'static str> {
    let text = text.to_lowercase();
    let begins = move |stem: &str| {
        text.match_indices(stem)
            .any(|(at, _)| !text[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_'))
    };
    VERBS.into_iter().filter(move |(_, stems)| stems.iter().any(|stem| begins(stem))).map(|(verb, _)| verb)
}

/// Collects texts with their lines: of log messages, or `all` strings and help texts.
struct Texts {
    found: Vec<(usize, String)>,
    all: bool,
}

impl Texts {
    fn tokens(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Literal(literal) => {
                    let line = literal.span().start().line;
                    if let syn::Lit::Str(text) = syn::Lit::new(literal) {
                        self.found.push((line, text.value()));
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Texts {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !attributes(item).iter().any(is_for_tests) {
            visit::visit_item(self, item);
        }
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        let is_log = item.path.segments.first().is_some_and(|segment| segment.ident == "tracing");
        if self.all || is_log {
            self.tokens(item.tokens.clone());
        }
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        if self.all {
            self.found.push((text.span().start().line, text.value()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn page(kinds: &str, verbs: &str) -> Source {
        let text = format!(
            "# Glossary\n\n## Putting away\n\n| verb | of what |\n|---|---|\n{verbs}\n## On disk\n\n| {kinds} | kinds of steps |\n"
        );
        source(PAGE, &text)
    }

    fn found(page: &Source, sources: &[Source]) -> Vec<(String, String)> {
        let violations = check(page, sources).unwrap();
        violations.into_iter().map(|violation| (violation.path, violation.found)).collect()
    }

    #[test]
    fn kinds_of_steps_are_those_of_the_journal() {
        let steps = "enum Step { #[serde(skip)] CreateLink(Link), RaiseLoopback, #[serde(rename = \"remember\")] Cache }";
        let links = "enum Link { #[serde(rename = \"create-veth\")] Veth }";
        let sources = [source(STEPS, steps), source(LINKS, links)];
        assert_eq!(found(&page("`raise-loopback`, `remember`, `create-veth`", ""), &sources), []);
        let others = page("`raise-loopback`, `create-veth`, `lease`", "");
        assert_eq!(
            found(&others, &sources),
            ["lease", "remember"].map(|kind| (PAGE.to_owned(), kind.to_owned()))
        );
    }

    #[test]
    fn verbs_of_the_log_and_of_the_command_line_are_explained() {
        let log = "fn f() { tracing::warn!(%error, \"record not removed\"); let x = \"swept\"; }\n\
                   #[cfg(test)] mod tests { fn f() { tracing::info!(\"released\") } }";
        let line = "/// Detaches a network.\nfn f() { print(\"2 taken back\", \"undetached\") }";
        let sources = [source("netattach/src/agent/a.rs", log), source("netattach/src/cli/b.rs", line)];
        let all = page("", "| remove | files |\n| roll back, take back | plans |\n| detach | networks |\n");
        assert_eq!(found(&all, &sources), []);
        let some = page("", "| roll back, take back | plans |\n");
        let missing = [("netattach/src/agent/a.rs", "remove"), ("netattach/src/cli/b.rs", "detach")];
        assert_eq!(found(&some, &sources), missing.map(|(path, verb)| (path.to_owned(), verb.to_owned())));
    }
}
