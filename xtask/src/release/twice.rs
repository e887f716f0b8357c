//! A second build of the same sources in another directory, from nothing, and the comparison with the first.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use super::{Arch, Options, commit, oci};
use crate::progress::{Done, Progress};
use crate::{child, tree};

/// Builds the image again from a copy of the sources, and compares the archives byte by byte. The copy is removed when they
/// are the same.
pub(super) fn compare(
    arch: Arch,
    options: &Options,
    first: &Path,
    progress: &Progress,
) -> anyhow::Result<Done> {
    // Not below this tree: the directories are to have nothing in common, and cargo looks upward for configuration.
    let scratch =
        tempfile::Builder::new().prefix("netattach-twice-").tempdir().context("create a directory")?;
    let copy = scratch.path().join("another/place");
    copy_sources(&copy)?;
    fs::create_dir_all(copy.join("target")).context("create a target directory")?;
    symlink(tree::tools(), copy.join("target/tools")).context("lead to the tools")?;
    let mut again = Command::new(env::current_exe().context("find this executable")?);
    again.args(["image", "--arch", arch.name()]);
    if let Some(name) = &options.name {
        again.args(["--name", name]);
    }
    again.current_dir(&copy).env("CARGO_MANIFEST_DIR", copy.join("xtask"));
    again.env("SOURCE_DATE_EPOCH", commit::time()?.to_string());
    again.env("NETATTACH_COMMIT", commit::commit().unwrap_or_default());
    child::run(&mut again, progress).context("build again elsewhere")?;
    let name = first.file_name().context("an archive has a name")?;
    let second = copy.join("target/image").join(name);
    let (one, two) = (super::read(first)?, super::read(&second)?);
    if one != two {
        let kept = scratch.keep();
        let differing = differing(&contents(&one)?, &contents(&two)?);
        bail!(
            "two builds of the same sources differ in {}; the second one is in {}",
            differing.join(", "),
            kept.display()
        );
    }
    Ok(Done::Unchanged(format!("{} twice", oci::digest(&one))))
}

/// The sources as they are, without what git ignores.
fn copy_sources(to: &Path) -> anyhow::Result<()> {
    let mut list = Command::new("git");
    list.arg("-C").arg(tree::root());
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]);
    let list = child::stdout_of(&mut list).context("list the sources")?;
    let mut copied = 0;
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = PathBuf::from(String::from_utf8(name.to_vec()).context("a file name that is no text")?);
        let from = tree::root().join(&name);
        // Removed, but the removal is not committed yet.
        let Ok(metadata) = fs::symlink_metadata(&from) else { continue };
        let target = to.join(&name);
        let directory = target.parent().context("a file is in a directory")?;
        fs::create_dir_all(directory).context("create a directory")?;
        let done = match metadata.is_symlink() {
            true => fs::read_link(&from).and_then(|leads_to| symlink(leads_to, &target)),
            false => fs::copy(&from, &target).map(drop),
        };
        done.with_context(|| format!("copy {}", name.display()))?;
        copied += 1;
    }
    ensure!(copied > 0, "git lists no sources");
    Ok(())
}

/// The digests of an image's files, by their paths.
fn contents(archive: &[u8]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut layout = tar::Archive::new(archive);
    for entry in layout.entries().context("read an archive")? {
        let mut blob = Vec::new();
        entry.context("read an archive")?.read_to_end(&mut blob).context("read an archive")?;
        if !blob.starts_with(&[0x1f, 0x8b]) {
            continue;
        }
        let mut layer = tar::Archive::new(flate2::read::GzDecoder::new(blob.as_slice()));
        for entry in layer.entries().context("read a layer")? {
            let mut entry = entry.context("read a layer")?;
            let mut content = Vec::new();
            entry.read_to_end(&mut content).context("read a layer")?;
            found.insert(
                entry.path().context("a path in a layer")?.display().to_string(),
                oci::digest(&content),
            );
        }
    }
    Ok(found)
}

/// The paths whose contents differ; if there is none, the archives' metadata differ.
fn differing(one: &BTreeMap<String, String>, two: &BTreeMap<String, String>) -> Vec<String> {
    let all = one.keys().chain(two.keys());
    let mut paths: Vec<String> = all.filter(|path| one.get(*path) != two.get(*path)).cloned().collect();
    paths.sort();
    paths.dedup();
    if paths.is_empty() { vec!["what is not a file of the image".to_owned()] } else { paths }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_that_differ_are_named() {
        let of = |rows: &[(&str, &str)]| {
            rows.iter().map(|(path, digest)| ((*path).to_owned(), (*digest).to_owned())).collect()
        };
        let one = of(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let two = of(&[("a", "1"), ("b", "4"), ("d", "5")]);
        assert_eq!(differing(&one, &two), ["b", "c", "d"]);
        assert_eq!(differing(&one, &one), ["what is not a file of the image"]);
    }

    #[test]
    fn a_copy_has_the_sources_and_nothing_that_is_built() {
        let dir = tempfile::tempdir().unwrap();
        copy_sources(dir.path()).unwrap();
        assert!(dir.path().join("netattach/build.rs").is_file());
        assert!(dir.path().join(".cargo/config.toml").is_file());
        assert!(!dir.path().join("target").exists());
    }
}
