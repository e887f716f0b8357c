//! The licences of everything that is linked into the executables, with their texts, which the licences require to be
//! passed on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde::Deserialize;

use super::arch::Arch;
use crate::{child, tree};

/// How files begin that hold terms, in capitals.
const TERMS: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
/// Debian's copyright files of the C libraries: of the CNI executable's, and of the other executables'.
const C_LIBRARIES: [(&str, &str); 2] =
    [("The GNU C library", "/usr/share/doc/libc6/copyright"), ("musl", "/usr/share/doc/musl/copyright")];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    repository: Option<String>,
    source: Option<String>,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

impl Package {
    /// A procedural macro: it runs in the compiler, and only its output is compiled.
    fn is_macro(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "proc-macro"))
    }
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// Null for dependencies that are linked; `build` and `dev` are not.
    kind: Option<String>,
}

/// The notice.
pub(super) fn text(arch: Arch) -> anyhow::Result<String> {
    let mut cargo = child::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", arch.triple()]);
    cargo.args(["--manifest-path", "netattach/Cargo.toml"]);
    let metadata: Metadata = serde_json::from_slice(&child::stdout_of(&mut cargo)?)
        .context("read cargo's description of the workspace")?;
    let linked = linked(&metadata, "netattach")?;
    let mut packages: Vec<&Package> = metadata
        .packages
        .iter()
        // A package without a source is this repository's own.
        .filter(|package| package.source.is_some() && linked.contains(package.id.as_str()))
        .collect();
    packages.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    let mut text = format!("{HEAD}\n");
    // A text that several packages share word by word is included once.
    let mut terms: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages {
        let Package { name, version, license, repository, manifest_path, .. } = package;
        let licence = license.as_deref().unwrap_or("no licence");
        let origin = repository.as_deref().unwrap_or("crates.io");
        text += &format!("{name} {version}: {licence} ({origin})\n");
        let directory = manifest_path.parent().context("a manifest is in a directory")?;
        for (file, content) in terms_in(directory)? {
            terms.entry(content).or_default().push(format!("{name} {version}: {file}"));
        }
    }
    text += &format!("\n{}", of_rust_and_c());
    let mut terms: Vec<_> = terms.into_iter().map(|(content, of)| (of, content)).collect();
    terms.sort();
    for (of, content) in terms {
        text += &format!("\n{RULE}\n{}\n{RULE}\n\n{}\n", of.join("\n"), content.trim_end());
    }
    Ok(text)
}

const RULE: &str = "--------------------------------------------------------------------------------";

const HEAD: &str = "netattach itself is licensed under the Apache License 2.0, see LICENSE.

Its executables hold code of the packages below under the terms that are named with each; where there is a choice, it
is the recipient's. The texts follow, each once, below the names of those that have it.
";

/// The packages that are linked into the executables of `root`, by their ids.
fn linked<'m>(metadata: &'m Metadata, root: &str) -> anyhow::Result<BTreeSet<&'m str>> {
    let nodes: BTreeMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let root = metadata.packages.iter().find(|package| package.name == root && package.source.is_none());
    let macros: BTreeSet<&str> = metadata
        .packages
        .iter()
        .filter(|package| package.is_macro())
        .map(|package| package.id.as_str())
        .collect();
    let mut wanted = vec![root.context("the package is not in the workspace")?.id.as_str()];
    let mut found = BTreeSet::new();
    while let Some(id) = wanted.pop() {
        if macros.contains(id) || !found.insert(id) {
            continue;
        }
        let Some(node) = nodes.get(id) else { continue };
        let is_linked = |dep: &&Dependency| dep.dep_kinds.iter().any(|kind| kind.kind.is_none());
        wanted.extend(node.deps.iter().filter(is_linked).map(|dep| dep.pkg.as_str()));
    }
    Ok(found)
}

/// The files with terms beside a manifest, by name.
fn terms_in(directory: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let entry = entry.context("list a package")?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let capital = name.to_uppercase();
        if TERMS.iter().any(|begin| capital.starts_with(begin)) && entry.path().is_file() {
            let content = fs::read(entry.path()).with_context(|| format!("read {name}"))?;
            found.push((name, String::from_utf8_lossy(&content).replace("\r\n", "\n")));
        }
    }
    found.sort();
    Ok(found)
}

/// Libraries that are linked into every static executable; neither is a cargo package.
fn of_rust_and_c() -> String {
    let compiler = child::ask(Command::new("rustc").arg("-V").current_dir(tree::root()));
    let mut text = format!(
        "The standard library of {}: MIT OR Apache-2.0 (https://github.com/rust-lang/rust)\n",
        compiler.as_deref().unwrap_or("rustc")
    );
    text += "The GNU C library: LGPL-2.1-or-later (https://www.gnu.org/software/libc). It is linked statically. All of\n\
             netattach's sources are published with what builds them (`cargo xtask build`), so that the executables can be\n\
             made with another version of the library.\n\
             musl: MIT (https://musl.libc.org). It is linked statically into the CNI executable for amd64.\n";
    for (library, terms) in C_LIBRARIES {
        if let Ok(terms) = fs::read_to_string(terms) {
            text += &format!("\n{RULE}\n{library}, as Debian describes it\n{RULE}\n\n{}\n", terms.trim_end());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_named_and_what_only_builds_is_not() {
        let text = text(Arch::host().unwrap()).unwrap();
        let is_of = |line: &str, name: &str| {
            let version = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(' '));
            version.is_some_and(|version| version.starts_with(|it: char| it.is_ascii_digit()))
        };
        let named = |name: &str| text.lines().any(|line| is_of(line, name));
        assert!(named("tokio") && named("rustls") && named("aya"), "{text}");
        // A test's, a build script's, xtask's and our own.
        for other in ["proptest", "cc", "syn", "serde_derive", "netattach", "netattach-common"] {
            assert!(!named(other), "{other}");
        }
        assert!(text.contains("Permission is hereby granted, free of charge"));
    }
}
