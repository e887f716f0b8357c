//! Which commit the sources are, and the text about it in executables.

use std::env;
use std::process::Command;

use anyhow::{Context, ensure};
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};

use crate::progress::UserError;
use crate::{child, tree};

/// The section of `netattach-shim/src/built.rs`, and how it begins.
const SECTION: &str = ".netattach";
const MARK: &[u8] = b"netattach-commit";
/// Names the commit where the sources are no working tree of git, such as an unpacked archive.
const COMMIT: &str = "NETATTACH_COMMIT";
/// Timestamp of everything in the built files, in seconds since 1970 (reproducible-builds.org).
const TIME: &str = "SOURCE_DATE_EPOCH";

/// The commit of the sources, with ` modified` if they differ from it; `None` if that cannot be known.
pub(crate) fn commit() -> Option<String> {
    if let Some(given) = env::var(COMMIT).ok().filter(|given| !given.is_empty()) {
        return Some(given);
    }
    let head = child::ask(&mut git(&["rev-parse", "--verify", "HEAD"]))?;
    let changes = child::ask(&mut git(&["status", "--porcelain"]))?;
    Some(if changes.is_empty() { head } else { format!("{head} modified") })
}

/// The time of the commit, or that of the variable `SOURCE_DATE_EPOCH`.
pub(super) fn time() -> anyhow::Result<u64> {
    if let Ok(given) = env::var(TIME) {
        return given.parse().with_context(|| format!("{TIME}={given} is no number of seconds"));
    }
    let asked = child::ask(&mut git(&["log", "-1", "--format=%ct"]));
    let time = asked.and_then(|time| time.parse().ok()).ok_or_else(|| {
        UserError::new(
            "these sources are no working tree of git, so the time of the image is not known",
            format!("set {TIME}, and {COMMIT} to the commit that they are of"),
        )
    })?;
    Ok(time)
}

/// `git` on this repository, and on none around it.
fn git(words: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(tree::root()).args(words);
    if let Some(above) = tree::root().parent() {
        command.env("GIT_CEILING_DIRECTORIES", above);
    }
    command
}

/// Writes the commit into an executable of netattach.
///
/// # Errors
/// It has no section for that, or too small a one.
pub(crate) fn write_into(executable: &mut [u8], commit: &str) -> anyhow::Result<()> {
    let file = ElfFile64::<Endianness>::parse(&*executable).context("not a 64-bit ELF file")?;
    let section = file.section_by_name(SECTION).with_context(|| format!("it has no section {SECTION}"))?;
    let (start, length) = section.file_range().with_context(|| format!("{SECTION} is not in the file"))?;
    let (start, length) = (usize::try_from(start)?, usize::try_from(length)?);
    let section =
        executable.get_mut(start..start + length).context("a section beyond the end of the file")?;
    ensure!(section.starts_with(MARK), "{SECTION} begins with another mark");
    let text = &mut section[MARK.len()..];
    ensure!(commit.len() <= text.len(), "{commit:?} is longer than {} bytes", text.len());
    text.fill(0);
    text[..commit.len()].copy_from_slice(commit.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_with_the_section_are_written_into() {
        let mut own = std::fs::read(env::current_exe().unwrap()).unwrap();
        assert_eq!(write_into(&mut own, "1234").unwrap_err().to_string(), "it has no section .netattach");
        assert_eq!(write_into(&mut [], "1234").unwrap_err().to_string(), "not a 64-bit ELF file");
    }
}
