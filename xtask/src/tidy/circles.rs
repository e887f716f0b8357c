//! Finds files of one crate that import each other, directly or indirectly: such files can only be read together.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;

use super::{Violation, names};
use crate::source::Source;

/// The crates whose files form no circle, by the folder of their source.
const CRATES: [&str; 3] = ["netattach-common/src/", "netattach-ebpf/src/", "netattach-shim/src/"];

const RULE: &str = "files do not import each other, directly or by way of others";
const WHY: &str = "each file can be read with only those that it imports";

/// A file as a path of modules: `["path", "maps"]`.
type Module = Vec<String>;

/// The files that each file imports, and where it names them first.
type Imports<'a> = BTreeMap<Module, (&'a str, BTreeMap<Module, usize>)>;

/// Every import that is part of a circle.
pub(super) fn violations(sources: &[Source]) -> anyhow::Result<Vec<Violation>> {
    let mut violations = Vec::new();
    for root in CRATES {
        violations.extend(in_circles(&imports(sources, root)?));
    }
    Ok(violations)
}

fn imports<'a>(sources: &'a [Source], root: &str) -> anyhow::Result<Imports<'a>> {
    let files: BTreeMap<Module, &Source> =
        sources.iter().filter_map(|source| Some((module(source.path.strip_prefix(root)?), source))).collect();
    let mut imports = Imports::new();
    for (module, source) in &files {
        let file = syn::parse_file(&source.text).with_context(|| format!("parse {}", source.path))?;
        let mut named: BTreeMap<Module, usize> = BTreeMap::new();
        for name in names::named_in(&file) {
            if let Some(other) = file_of(&absolute(module, &name.segments), &files).filter(|it| it != module)
            {
                named.entry(other).or_insert(name.line);
            }
        }
        imports.insert(module.clone(), (&source.path, named));
    }
    Ok(imports)
}

fn module(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    path.split('/').filter(|name| !["mod", "lib", "main"].contains(name)).map(str::to_owned).collect()
}

/// A path from the crate's root; empty if it does not begin with `crate`, `self` or `super`.
fn absolute(module: &[String], segments: &[String]) -> Vec<String> {
    let mut base = match segments.first().map(String::as_str) {
        Some("crate") => Vec::new(),
        Some("self" | "super") => module.to_vec(),
        _ => return Vec::new(),
    };
    for segment in segments {
        match segment.as_str() {
            "crate" | "self" => {}
            "super" => drop(base.pop()),
            name => base.push(name.to_owned()),
        }
    }
    base
}

/// The file that an item is in; `None` for the crate's own, which only declares and re-exports.
fn file_of<T>(path: &[String], files: &BTreeMap<Module, T>) -> Option<Module> {
    (1..=path.len()).rev().map(|length| path[..length].to_vec()).find(|module| files.contains_key(module))
}

/// Removes files that import none of the remaining files, until every remaining file imports another: they are in a
/// circle, or lead to one. Removing likewise the files that no remaining file imports leaves the circles and the
/// files between them.
fn in_circles(imports: &Imports) -> Vec<Violation> {
    let mut left: BTreeSet<&Module> = imports.keys().collect();
    loop {
        let within = |module: &Module| imports[module].1.keys().filter(|other| left.contains(other));
        let imported: BTreeSet<&Module> = left.iter().flat_map(|module| within(module)).collect();
        let still: BTreeSet<&Module> = left
            .iter()
            .copied()
            .filter(|module| within(module).next().is_some() && imported.contains(module))
            .collect();
        if still.len() == left.len() {
            break;
        }
        left = still;
    }
    let arrows = left.iter().flat_map(|module| {
        let (path, named) = &imports[*module];
        named.iter().filter(|(other, _)| left.contains(other)).map(move |(other, line)| (path, other, *line))
    });
    arrows
        .map(|(path, other, line)| Violation {
            path: (*path).to_owned(),
            line,
            found: format!("a circle by way of `{}`", other.join("::")),
            rule: RULE,
            why: WHY,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let source = |(path, text): &(&str, &str)| Source {
            path: format!("netattach-ebpf/src/{path}"),
            text: (*text).to_owned(),
        };
        let sources: Vec<Source> = files.iter().map(source).collect();
        let violations = violations(&sources).unwrap();
        violations.into_iter().map(|it| format!("{}:{}: {}", it.path, it.line, it.found)).collect()
    }

    #[test]
    fn files_that_import_downwards_are_silent() {
        let files = [
            ("main.rs", "mod path;"),
            ("path/mod.rs", "mod low; mod middle; mod high; pub(crate) use high::h;"),
            ("path/low.rs", "pub(crate) fn l() {}"),
            ("path/middle/mod.rs", "mod inner; use crate::path::low::l; pub(crate) trait Called {}"),
            ("path/middle/inner.rs", "use super::Called; use crate::path::high::h;"),
            ("path/high.rs", "use crate::path::{low, middle::Called}; pub(crate) fn h() { low::l() }"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn each_import_of_a_circle_is_named_and_nothing_that_leads_there_or_away() {
        let files = [
            ("path/mod.rs", "mod a; mod b; mod c; mod low; mod high;"),
            ("path/low.rs", "fn l() {}"),
            ("path/a.rs", "use crate::path::{\n    b::x,\n    low::l,\n};"),
            ("path/b.rs", "fn x() {\n    crate::path::c::y();\n}"),
            ("path/c.rs", "use super::a;"),
            ("path/high.rs", "use crate::path::a;"),
        ];
        let expected = [
            "netattach-ebpf/src/path/a.rs:2: a circle by way of `path::b`",
            "netattach-ebpf/src/path/b.rs:2: a circle by way of `path::c`",
            "netattach-ebpf/src/path/c.rs:1: a circle by way of `path::a`",
        ];
        assert_eq!(found(&files), expected);
    }
}
