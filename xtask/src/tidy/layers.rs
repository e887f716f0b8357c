//! Which top module of `netattach` may name which: the table in docs/architecture.md, compared with the source.
//!
//! The table is the rule: a module may name the modules that its row lists, and a row may list only modules whose
//! rows stand above it. So there is no circle, and the table in the documents is always the one in force.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::Context;
use syn::visit::{self, Visit};

use super::{Violation, circles, names, report};
use crate::progress::Done;
use crate::source::{self, Source};
use crate::tree;

/// The page that has the table.
const PAGE: &str = "docs/architecture.md";
/// The lines before and after the table.
const BEGIN: &str = "<!-- layers -->";
const END: &str = "<!-- end of layers -->";

/// The directory of the modules.
const ROOT: &str = "netattach/src/";

/// Files that are no module of the library.
const NO_MODULES: [&str; 2] = ["netattach/src/lib.rs", "netattach/src/bin/"];

const LAYERS: &str = "a module names only what its row of the layers lists";
const WHY_LAYERS: &str = "what a module may know is decided once, and has no circles";
const TRUE_TABLE: &str = "the layers in docs/architecture.md are those of the source";
const WHY_TABLE: &str = "a map that is not true is worse than none";
const HEADINGS: &str = "the heading of a `mod.rs` names every module below it";
const WHY_HEADINGS: &str = "a reader must find the way from the folder's first lines";

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    module: String,
    may_name: Vec<String>,
    line: usize,
}

/// The place where a module names another for the first time.
type Uses = BTreeMap<(String, String), (String, usize)>;

pub(super) fn check() -> anyhow::Result<Done> {
    let sources = source::all()?;
    let page = fs::read_to_string(tree::root().join(PAGE)).with_context(|| format!("read {PAGE}"))?;
    let rows = rows(&page).with_context(|| format!("{PAGE} has no {BEGIN} ... {END}"))?;
    let product = product(&sources);
    let modules = modules(&product);
    let uses = uses(&product, &modules)?;
    let mut violations = compare(&rows, &modules, &uses);
    violations.extend(circles::violations(&sources)?);
    for source in &sources {
        violations.extend(unnamed_children(source)?);
    }
    report(violations, format!("{} modules, {} arrows", rows.len(), uses.len()))
}

/// The rows of the table: `| module | what it may name |`, names in backticks.
fn rows(page: &str) -> Option<Vec<Row>> {
    let lines = page.lines().enumerate();
    let table = lines.skip_while(|(_, line)| *line != BEGIN).skip(1).collect::<Vec<_>>();
    let end = table.iter().position(|(_, line)| *line == END)?;
    let in_backticks = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let row = |(index, line): &(usize, &str)| {
        let mut cells = line.trim_matches('|').split('|');
        let module = in_backticks(cells.next()?).into_iter().next()?;
        Some(Row { module, may_name: in_backticks(cells.next()?), line: index + 1 })
    };
    Some(table[..end].iter().filter_map(row).collect())
}

/// The top module of a file of the library.
fn module_of(path: &str) -> Option<&str> {
    if NO_MODULES.iter().any(|place| path.starts_with(place)) {
        return None;
    }
    path.strip_prefix(ROOT)?.split('/').next().map(|name| name.trim_end_matches(".rs"))
}

/// The files that are not for tests alone.
fn product(sources: &[Source]) -> Vec<&Source> {
    let tests = test_files(sources);
    let is_for_tests = |source: &&Source| tests.iter().any(|test| source.path.starts_with(test));
    sources.iter().filter(|source| !is_for_tests(source)).collect()
}

fn modules(product: &[&Source]) -> BTreeSet<String> {
    product.iter().filter_map(|source| module_of(&source.path)).map(str::to_owned).collect()
}

fn uses(product: &[&Source], modules: &BTreeSet<String>) -> anyhow::Result<Uses> {
    let mut uses = Uses::new();
    for source in product {
        let Some(module) = module_of(&source.path) else { continue };
        let file = syn::parse_file(&source.text).with_context(|| format!("parse {}", source.path))?;
        for named in names::named_in(&file) {
            let [root, other, ..] = &named.segments[..] else { continue };
            if root == "crate" && other != module && modules.contains(other) {
                let at = (source.path.clone(), named.line);
                uses.entry((module.to_owned(), other.clone())).or_insert(at);
            }
        }
    }
    Ok(uses)
}

/// Files and folders that only tests have: declared by `#[cfg(test)] mod name;`. Folders end in a slash.
fn test_files(sources: &[Source]) -> Vec<String> {
    let of = |source: &Source| {
        let folder = match source.path.rsplit_once('/') {
            Some((folder, "mod.rs" | "lib.rs" | "main.rs")) => folder.to_owned(),
            _ => source.path.trim_end_matches(".rs").to_owned(),
        };
        let beside = source.path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let mut found = Vec::new();
        for module in declared(source).into_iter().filter(|module| module.is_for_tests) {
            found.push(format!("{folder}/{}.rs", module.name));
            found.push(format!("{folder}/{}/", module.name));
            found.extend(module.path.map(|path| format!("{beside}/{path}")));
        }
        found
    };
    sources.iter().filter(|source| source.path.starts_with(ROOT)).flat_map(of).collect()
}

/// `mod name;`
struct Declared {
    name: String,
    /// Of `#[path = "..."]`.
    path: Option<String>,
    is_for_tests: bool,
    line: usize,
}

fn declared(source: &Source) -> Vec<Declared> {
    struct Modules(Vec<Declared>);
    impl<'ast> Visit<'ast> for Modules {
        fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
            if item.content.is_none() {
                let path = item.attrs.iter().find_map(|attribute| match &attribute.meta {
                    syn::Meta::NameValue(syn::MetaNameValue {
                        path,
                        value: syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }),
                        ..
                    }) if path.is_ident("path") => Some(text.value()),
                    _ => None,
                });
                self.0.push(Declared {
                    name: item.ident.to_string(),
                    path,
                    is_for_tests: item.attrs.iter().any(names::is_for_tests),
                    line: item.ident.span().start().line,
                });
            }
            visit::visit_item_mod(self, item);
        }
    }
    let mut modules = Modules(Vec::new());
    // Files that do not parse are reported by the check of names.
    if let Ok(file) = syn::parse_file(&source.text) {
        modules.visit_file(&file);
    }
    modules.0
}

fn compare(rows: &[Row], modules: &BTreeSet<String>, uses: &Uses) -> Vec<Violation> {
    let in_page = |line: usize, found: String| Violation {
        path: PAGE.to_owned(),
        line,
        found,
        rule: TRUE_TABLE,
        why: WHY_TABLE,
    };
    let mut violations = Vec::new();
    let mut above: BTreeSet<&str> = BTreeSet::new();
    for row in rows {
        if !modules.contains(&row.module) {
            violations.push(in_page(row.line, format!("there is no module `{}`", row.module)));
        }
        for other in &row.may_name {
            let used = uses.contains_key(&(row.module.clone(), other.clone()));
            if !above.contains(other.as_str()) {
                violations
                    .push(in_page(row.line, format!("`{other}` does not stand above `{}`", row.module)));
            } else if !used {
                violations.push(in_page(row.line, format!("`{}` names nothing of `{other}`", row.module)));
            }
        }
        above.insert(&row.module);
    }
    for module in modules.iter().filter(|module| !above.contains(module.as_str())) {
        violations.push(in_page(1, format!("module `{module}` has no row")));
    }
    for ((module, other), (path, line)) in uses {
        let row = rows.iter().find(|row| row.module == *module);
        if row.is_some_and(|row| !row.may_name.contains(other)) {
            violations.push(Violation {
                path: path.clone(),
                line: *line,
                found: format!("`{module}` names `crate::{other}`"),
                rule: LAYERS,
                why: WHY_LAYERS,
            });
        }
    }
    violations
}

/// Modules that the heading of the file that declares them does not name in backticks.
fn unnamed_children(source: &Source) -> anyhow::Result<Vec<Violation>> {
    if !source.path.ends_with("/mod.rs") && !source.path.ends_with("src/lib.rs") {
        return Ok(Vec::new());
    }
    let heading: Vec<&str> = source.text.lines().take_while(|line| line.starts_with("//!")).collect();
    let words: BTreeSet<&str> = heading
        .iter()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .flat_map(|word| word.split("::"))
        .collect();
    let unnamed =
        declared(source).into_iter().filter(|module| !module.is_for_tests && !words.contains(&*module.name));
    Ok(unnamed
        .map(|module| Violation {
            path: source.path.clone(),
            line: module.line,
            found: format!("the heading does not name `{}`", module.name),
            rule: HEADINGS,
            why: WHY_HEADINGS,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn table(text: &str) -> Vec<Row> {
        rows(&format!("# Page\n{BEGIN}\n| module | may name |\n|---|---|\n{text}\n{END}\n")).unwrap()
    }

    fn found(table_text: &str, sources: &[Source]) -> Vec<String> {
        let product = product(sources);
        let modules = modules(&product);
        let found = compare(&table(table_text), &modules, &uses(&product, &modules).unwrap());
        found.into_iter().map(|violation| format!("{}: {}", violation.path, violation.found)).collect()
    }

    #[test]
    fn a_table_that_is_true_is_silent() {
        let sources = [
            file("netattach/src/lib.rs", "//! `low` `high`\npub mod low; pub mod high;"),
            file("netattach/src/low.rs", "fn f() {}"),
            file(
                "netattach/src/high/mod.rs",
                "use crate::low::f; #[cfg(test)] mod tests; #[cfg(test)] mod rig;",
            ),
            file("netattach/src/high/tests.rs", "use crate::unknown::f;"),
            file("netattach/src/high/rig.rs", "use crate::low::f;"),
        ];
        assert_eq!(found("| `low` | |\n| `high` | `low` |", &sources), [""; 0]);
    }

    #[test]
    fn what_the_table_does_not_say_is_named_and_what_it_says_too_much() {
        let sources = [
            file("netattach/src/low.rs", "fn f() { crate::high::g(); }"),
            file("netattach/src/high.rs", "pub(crate) fn g() {}"),
            file("netattach/src/new.rs", "fn h() {}"),
        ];
        let expected = [
            "docs/architecture.md: there is no module `gone`",
            "docs/architecture.md: `high` names nothing of `low`",
            "docs/architecture.md: module `new` has no row",
            "netattach/src/low.rs: `low` names `crate::high`",
        ];
        assert_eq!(found("| `gone` | |\n| `low` | |\n| `high` | `low` |", &sources), expected);
        let circle = found("| `low` | `high` |\n| `high` | |\n| `new` | |", &sources);
        assert_eq!(circle, ["docs/architecture.md: `high` does not stand above `low`"]);
    }

    #[test]
    fn what_is_only_for_tests_names_what_it_likes() {
        let sources = [
            file(
                "netattach/src/a.rs",
                "#[cfg(test)] #[path = \"a_more.rs\"] mod more; #[cfg(test)] mod t { use crate::b::x; }",
            ),
            file("netattach/src/a_more.rs", "use crate::b::x;"),
            file("netattach/src/b.rs", "pub fn x() {}"),
        ];
        assert_eq!(found("| `a` | |\n| `b` | |", &sources), [""; 0]);
    }

    #[test]
    fn a_heading_names_its_modules() {
        let text = "//! About [`one`] and `two`.\nmod one;\nmod two;\nmod three;\n#[cfg(test)]\nmod tests;\n";
        let found = unnamed_children(&file("netattach/src/a/mod.rs", text)).unwrap();
        let found: Vec<_> =
            found.iter().map(|violation| (violation.line, violation.found.as_str())).collect();
        assert_eq!(found, [(4, "the heading does not name `three`")]);
    }
}
