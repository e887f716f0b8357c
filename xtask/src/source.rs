//! The files of the repository, as git knows them.

use std::fs;

use anyhow::Context;

use crate::{child, tree};

/// A file.
pub(crate) struct Source {
    /// Path below the top directory, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Every Rust file.
pub(crate) fn all() -> anyhow::Result<Vec<Source>> {
    matching("*.rs")
}

/// Every file with such a name that is in the repository or could be added to it: files that git ignores are left out.
pub(crate) fn matching(names: &str) -> anyhow::Result<Vec<Source>> {
    let mut git = std::process::Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", names]);
    let listed = child::stdout_of(git.current_dir(tree::root())).context("list the source files")?;
    let listed = String::from_utf8(listed).context("a source file's name is not UTF-8")?;
    let paths = listed.split_terminator('\0').filter(|path| tree::root().join(path).is_file());
    paths
        .map(|path| {
            let text = fs::read_to_string(tree::root().join(path)).with_context(|| format!("read {path}"))?;
            Ok(Source { path: path.to_owned(), text })
        })
        .collect()
}
