//! kubectl, which renders the manifests of `deploy` in a test: unpacked below `target/tools`, never installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use crate::progress::{Done, Progress, UserError};
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
        let lacking = "this machine has no apt to get kubectl with";
        return match required {
            true => Err(UserError::new(lacking, "run the gate on Debian or Ubuntu").into()),
            false => Ok(Done::Unchanged(format!("{lacking}: tests with it are skipped"))),
        };
    }
    apt::unpack_from_suite(&["kubectl"], SUITE, &tree::tools().join("kubectl"), progress)?;
    let version = version(&kubectl()).context("the unpacked kubectl does not start")?;
    Ok(Done::Changed(format!("{version} from {SUITE}, unpacked")))
}

fn version(directory: &Path) -> Option<String> {
    let words = child::ask(Command::new(directory.join("kubectl")).args(["version", "--client"]))?;
    Some(words.lines().next()?.to_owned())
}
