//! `cargo xtask release`: the image and, for nodes that run the agent themselves, an archive of the executables with
//! manual, completions and unit, the manifest by which krew installs the command line from it, and the checksums of
//! all files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::tarball::{Tarball, gzip};
use super::{Arch, Options, assemble, commit, krew, notice, oci, put, read, version};
use crate::progress::Done;
use crate::{child, dist, progress, tree};

/// Files of this repository in the archive, with their places there.
const OWN: [(&str, &str); 5] = [
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("deploy/systemd/netattach.service", "systemd/netattach.service"),
    ("deploy/systemd/config.yaml", "systemd/config.yaml"),
];

/// Builds everything into `target/release-files`. `url` is where the files will be found.
///
/// # Errors
/// As [`super::image`], something weighs more than it may, or the manual cannot be made.
pub fn release(arch: Option<Arch>, url: &str) -> anyhow::Result<()> {
    let arch = arch.map_or_else(Arch::host, Ok)?;
    let image = assemble(arch, &Options { check: true, ..Options::default() })?;
    progress::heading("release");
    let directory = tree::root().join("target/release-files");
    let manual = tempfile::tempdir().context("create a directory")?;
    progress::step("manual", |progress| {
        let mut cargo = child::cargo();
        cargo.args(["run", "--quiet", "--package", "netattach", "--features", "manual"]);
        cargo.args(["--bin", "netattach-manual", "--"]).arg(manual.path());
        child::run(&mut cargo, progress).context("write the manual")?;
        Ok(Done::Unchanged(format!("{} files", files_below(manual.path())?.len())))
    })?;
    let archive = directory.join(format!("netattach-{}-linux-{}.tar.gz", version(), arch.name()));
    let copy = directory.join(image.file_name().context("an archive has a name")?);
    progress::step("files", |_| {
        let content = tarball(arch, &dist::directory(arch), manual.path())?.finish(commit::time()?)?;
        put(&archive, &gzip(&content)?)?;
        put(&copy, &read(&image)?)?;
        Ok(Done::Changed(archive.display().to_string()))
    })?;
    let manifest = directory.join("netattach.krew.yaml");
    progress::step("manifest for krew", |_| {
        let file = archive.file_name().context("an archive has a name")?.to_string_lossy();
        let text = krew::manifest(arch, url, &file, &oci::sha256(&read(&archive)?));
        put(&manifest, text.as_bytes())?;
        Ok(Done::Changed(manifest.display().to_string()))
    })?;
    progress::step("SHA256SUMS", |_| {
        let sums = sums(&[&archive, &copy, &manifest])?;
        put(&directory.join("SHA256SUMS"), sums.as_bytes())?;
        Ok(Done::Changed(format!("{} files", sums.lines().count())))
    })
}

/// The archive's content: one directory.
fn tarball(arch: Arch, dist: &Path, manual: &Path) -> anyhow::Result<Tarball> {
    let top = format!("netattach-{}", version());
    let mut files = Tarball::default();
    for name in dist::names() {
        files.file(&format!("{top}/bin/{name}"), 0o755, read(&dist.join(name))?)?;
    }
    for (from, to) in OWN {
        files.file(&format!("{top}/{to}"), 0o644, read(&tree::root().join(from))?)?;
    }
    files.file(&format!("{top}/THIRD-PARTY-NOTICES"), 0o644, notice::text(arch)?)?;
    for path in files_below(manual)? {
        let place = path.strip_prefix(manual).context("a file is below its directory")?;
        files.file(&format!("{top}/{}", place.display()), 0o644, read(&path)?)?;
    }
    Ok(files)
}

/// As `sha256sum` writes them and `sha256sum --check` reads them, by name.
fn sums(paths: &[&PathBuf]) -> anyhow::Result<String> {
    let mut lines = Vec::new();
    for path in paths {
        let name = path.file_name().context("a file has a name")?.to_string_lossy().into_owned();
        lines.push((name, oci::sha256(&read(path)?)));
    }
    lines.sort();
    Ok(lines.into_iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect())
}

/// All files below a directory, sorted.
fn files_below(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut wanted = vec![directory.to_owned()];
    while let Some(directory) = wanted.pop() {
        for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let path = entry.context("list a directory")?.path();
            if path.is_dir() { wanted.push(path) } else { found.push(path) }
        }
    }
    ensure!(!found.is_empty(), "there is nothing below {}", directory.display());
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_sha256sum_in_the_order_of_names() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("b"), dir.path().join("a"));
        fs::write(&one, "words").unwrap();
        fs::write(&two, "").unwrap();
        let expected = "\
e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a
dba36bffa5cab0f922d087a3aeb179f9d4e745df40b323e1b1471402848c8a3e  b
";
        assert_eq!(sums(&[&one, &two]).unwrap(), expected);
    }

    #[test]
    fn the_archive_has_the_executables_the_manual_and_the_unit() {
        let (dist, manual) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        dist::names().for_each(|name| fs::write(dist.path().join(name), name).unwrap());
        fs::create_dir_all(manual.path().join("man/man8")).unwrap();
        fs::write(manual.path().join("man/man8/netattachd.8"), "page").unwrap();
        let files = tarball(Arch::host().unwrap(), dist.path(), manual.path()).unwrap();
        let bytes = files.finish(0).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let names: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .filter(|name| !name.ends_with('/'))
            .collect();
        let top = format!("netattach-{}/", version());
        let expected = [
            "CHANGELOG.md",
            "LICENSE",
            "README.md",
            "THIRD-PARTY-NOTICES",
            "bin/netattach",
            "bin/netattach-cni",
            "bin/netattachctl",
            "bin/netattachd",
            "man/man8/netattachd.8",
            "systemd/config.yaml",
            "systemd/netattach.service",
        ];
        assert_eq!(names, expected.map(|name| format!("{top}{name}")));
    }
}
