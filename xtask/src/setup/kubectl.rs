//! kubectl, which renders the manifests of `deploy` in a test: unpacked below `target/tools`, never installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use crate::progress::{Done, Progress};
use crate::{child, tree};

/// The suite with a current one; it runs with any C library since 2.34.
const SUITE: &str = "sid";

/// Directory of kubectl, unpacked by setup.
pub fn kubectl() -> PathBuf {
    tree::tools().join("kubectl/usr/bin")
}

/// Unpacks kubectl unless it is here. Without `required`, a machine without apt does without it.
pub(super) fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    if let Some(version) = version(&kubectl()) {
        return Ok(Done::Unchanged(version));
    }
    if !apt::is_here() {
        return apt::without("kubectl", required);
    }
    apt::unpack_from_suite(&["kubectl"], SUITE, &tree::tools().join("kubectl"), progress)?;
    let version = version(&kubectl()).context("the unpacked kubectl does not start")?;
    Ok(Done::Changed(format!("{version} from {SUITE}, unpacked")))
}

fn version(directory: &Path) -> Option<String> {
    let words = child::ask(Command::new(directory.join("kubectl")).args(["version", "--client"]))?;
    Some(words.lines().next()?.to_owned())
}
