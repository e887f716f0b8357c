//! `cargo xtask image` and `cargo xtask release`: the files of a release.
//!
//! Two builds of one commit have the same bytes, wherever they are made by the same compiler: paths of the machine are
//! mapped to others, archives have the time of the commit, and nothing asks a clock.
//!
//! | module | task |
//! |---|---|
//! | `arch` | the architectures, and the tools that a build for another one needs |
//! | `commit` | the commit of the sources, and the text about it in executables |
//! | `files` | the archive of executables with their manual, and the checksums |
//! | `krew` | the manifest by which kubectl's package manager installs `kubectl netattach` |
//! | `notice` | the licences of linked code |
//! | `tarball`, `oci` | archives; the layout of a container image |
//! | `twice` | another build elsewhere, and the comparison |

mod arch;
pub(crate) mod commit;
mod files;
mod krew;
mod notice;
mod oci;
mod tarball;
mod twice;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

pub use self::arch::Arch;
pub use self::files::release;
pub use self::krew::NOWHERE;
use self::oci::{Archive, Image};
use self::tarball::Tarball;
use crate::progress::{Done, UserError};
use crate::{dist, ebpf, progress, tree};

/// The only directory of the image with executables: the image has no shell.
const BIN: &str = "usr/bin";
/// Where licences lie in the image.
const DOC: &str = "usr/share/doc/netattach";

/// Mebibytes that may not be exceeded, see [`Sizes`].
const MOST: Sizes = Sizes { archive: 16, unpacked: 36, netattachd: 18, netattachctl: 12 };

/// The files whose size is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    /// The archive of the image, compressed.
    archive: u64,
    /// The files in it.
    unpacked: u64,
    /// The agent.
    netattachd: u64,
    /// The command line.
    netattachctl: u64,
}

/// How the image is built.
#[derive(Debug, Default)]
pub struct Options {
    /// For which machines; this machine's by default.
    pub arch: Option<Arch>,
    /// Registry, name and tag; `localhost/netattach:VERSION` by default.
    pub name: Option<String>,
    /// The executables of a directory, built before.
    pub dist: Option<PathBuf>,
    /// Fail when something weighs more than it may.
    pub check: bool,
    /// Build a second time in another directory, and compare.
    pub twice: bool,
}

/// Builds the image and writes its archive below `target/image`.
///
/// # Errors
/// A compile error, a compiler for another architecture that cannot be had, a size with `check`, a difference with `twice`.
pub fn image(options: &Options) -> anyhow::Result<()> {
    let arch = options.arch.map_or_else(Arch::host, Ok)?;
    let path = assemble(arch, options)?;
    if options.twice {
        progress::step("the same elsewhere", |progress| twice::compare(arch, options, &path, progress))?;
    }
    Ok(())
}

/// The image of the executables that are built already, for this machine.
///
/// # Errors
/// The archive cannot be written.
pub fn image_of_built() -> anyhow::Result<()> {
    let options = Options { dist: Some(tree::dist()), check: true, ..Options::default() };
    assemble(Arch::host()?, &options).map(drop)
}

/// Builds executables and image; returns the path of its archive.
fn assemble(arch: Arch, options: &Options) -> anyhow::Result<PathBuf> {
    progress::heading("image");
    let dist = match &options.dist {
        Some(dist) => dist.clone(),
        None => {
            progress::step("compiler", |progress| arch.ensure(progress))?;
            ebpf::build(ebpf::Flavour::Normal)?;
            dist::executables(arch)?
        }
    };
    let path = tree::images().join(archive_name(arch));
    progress::step("archive", |_| {
        let archive = archive(arch, &dist, options.name.as_deref())?;
        put(&path, &archive.bytes)?;
        let sizes = sizes(&archive, &dist)?;
        if options.check {
            within(&sizes, &MOST)?;
        }
        let mebibytes = dist::mebibytes;
        Ok(Done::Changed(format!(
            "{}: {}, {} unpacked, {}{}",
            path.display(),
            mebibytes(sizes.archive),
            mebibytes(sizes.unpacked),
            archive.digest,
            if arch.is_tested() { "" } else { "; untested" }
        )))
    })?;
    Ok(path)
}

/// The name of the image's archive.
pub(crate) fn archive_name(arch: Arch) -> String {
    format!("netattach-{}-{}.oci.tar", version(), arch.name())
}

/// Version of the workspace.
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

fn archive(arch: Arch, dist: &Path, name: Option<&str>) -> anyhow::Result<Archive> {
    let name = name.map_or_else(|| format!("localhost/netattach:{}", version()), str::to_owned);
    let has_tag = name.rsplit_once(':').is_some_and(|(_, tag)| !tag.is_empty() && !tag.contains('/'));
    ensure!(
        has_tag && !name.contains(char::is_whitespace),
        UserError::new(format!("{name:?} is no name of an image"), "give REGISTRY/NAME:TAG")
    );
    let mut files = Tarball::default();
    for executable in dist::names() {
        files.file(&format!("{BIN}/{executable}"), 0o755, read(&dist.join(executable))?)?;
    }
    files.file(&format!("{DOC}/LICENSE"), 0o644, read(&tree::root().join("LICENSE"))?)?;
    files.file(&format!("{DOC}/THIRD-PARTY-NOTICES"), 0o644, notice::text(arch)?)?;
    let mut labels = vec![
        ("org.opencontainers.image.description", "A Kubernetes multi-network CNI plugin".to_owned()),
        ("org.opencontainers.image.licenses", "Apache-2.0".to_owned()),
        ("org.opencontainers.image.title", "netattach".to_owned()),
        ("org.opencontainers.image.version", version().to_owned()),
    ];
    if let Some(commit) = commit::commit() {
        labels.push(("org.opencontainers.image.revision", commit));
    }
    let image = Image {
        name,
        architecture: arch.name(),
        entrypoint: format!("/{BIN}/netattachd"),
        path: format!("/{BIN}"),
        labels,
        time: commit::time()?,
    };
    oci::archive(&image, &files)
}

fn sizes(archive: &Archive, dist: &Path) -> anyhow::Result<Sizes> {
    let weight = |name: &str| -> anyhow::Result<u64> {
        let path = dist.join(name);
        Ok(fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?.len())
    };
    Ok(Sizes {
        archive: archive.bytes.len() as u64,
        unpacked: archive.unpacked,
        netattachd: weight("netattachd")?,
        netattachctl: weight("netattachctl")?,
    })
}

/// Compares bytes with mebibytes.
fn within(sizes: &Sizes, most: &Sizes) -> anyhow::Result<()> {
    let rows = [
        ("the archive of the image", sizes.archive, most.archive),
        ("the image's files", sizes.unpacked, most.unpacked),
        ("netattachd", sizes.netattachd, most.netattachd),
        ("netattachctl", sizes.netattachctl, most.netattachctl),
    ];
    let heavy = rows.into_iter().filter(|(_, size, most)| *size >= *most * 1024 * 1024);
    let heavy: Vec<String> = heavy
        .map(|(what, size, most)| format!("{what}: {} of less than {most} MiB", dist::mebibytes(size)))
        .collect();
    ensure!(heavy.is_empty(), "too large: {}", heavy.join("; "));
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Writes a file whole or not at all, with the directory above it.
fn put(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let directory = path.parent().context("a file is in a directory")?;
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let mut fresh = tempfile::NamedTempFile::new_in(directory).context("create a file")?;
    std::io::Write::write_all(&mut fresh, content).with_context(|| format!("write {}", path.display()))?;
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fresh.as_file().set_permissions(permissions).context("let others read a file")?;
    fresh.persist(path).with_context(|| format!("put {} in place", path.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with a file of some bytes for each executable.
    fn dist() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        dist::names().for_each(|name| fs::write(dir.path().join(name), name).unwrap());
        dir
    }

    #[test]
    fn an_image_has_the_executables_and_the_licences_and_nothing_else() {
        let (one, two) = (dist(), dist());
        let arch = Arch::host().unwrap();
        let archive = archive(arch, one.path(), None).unwrap();
        assert_eq!(archive.bytes, super::archive(arch, two.path(), None).unwrap().bytes);
        let sizes = sizes(&archive, one.path()).unwrap();
        assert_eq!((sizes.netattachd, sizes.netattachctl), (10, 12));
        let layer = tempfile::tempdir().unwrap();
        tar::Archive::new(archive.bytes.as_slice()).unpack(layer.path()).unwrap();
        let blobs =
            fs::read_dir(layer.path().join("blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
        let largest = blobs.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
        let file = fs::File::open(largest).unwrap();
        let mut layer = tar::Archive::new(flate2::read::GzDecoder::new(file));
        let entries = layer.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let mode = entry.header().mode().unwrap();
            (entry.path().unwrap().display().to_string(), mode)
        });
        let row = |path: &str, mode| (path.to_owned(), mode);
        let expected = [
            row("usr/", 0o755),
            row("usr/bin/", 0o755),
            row("usr/bin/netattach", 0o755),
            row("usr/bin/netattach-cni", 0o755),
            row("usr/bin/netattachctl", 0o755),
            row("usr/bin/netattachd", 0o755),
            row("usr/share/", 0o755),
            row("usr/share/doc/", 0o755),
            row("usr/share/doc/netattach/", 0o755),
            row("usr/share/doc/netattach/LICENSE", 0o644),
            row("usr/share/doc/netattach/THIRD-PARTY-NOTICES", 0o644),
        ];
        assert_eq!(entries.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_name_without_a_tag_is_refused() {
        let dist = dist();
        for name in ["netattach", "localhost:5000/netattach", "localhost/netattach:", "a b:1"] {
            let error = archive(Arch::host().unwrap(), dist.path(), Some(name)).unwrap_err();
            assert_eq!(error.to_string(), format!("{name:?} is no name of an image"));
        }
    }

    #[test]
    fn everything_that_weighs_too_much_is_named() {
        const MIB: u64 = 1024 * 1024;
        let most = Sizes { archive: 2, unpacked: 4, netattachd: 3, netattachctl: 1 };
        let light = Sizes { archive: 1, unpacked: 4 * MIB - 1, netattachd: 0, netattachctl: 0 };
        assert!(within(&light, &most).is_ok());
        let heavy = Sizes { unpacked: 4 * MIB, netattachctl: 3 * MIB / 2, ..light };
        assert_eq!(
            within(&heavy, &most).unwrap_err().to_string(),
            "too large: the image's files: 4.0 MiB of less than 4 MiB; netattachctl: 1.5 MiB of less than 1 MiB"
        );
    }
}
