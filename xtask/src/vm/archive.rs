//! The archive that a kernel unpacks as its first file system (`cpio`, the kernel's "newc" form:
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, ensure};

/// `S_IFDIR`, `S_IFREG`, `S_IFCHR` of `linux/stat.h`.
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Files in the order in which they were added, directories made as they are needed. Written to a file as it is
/// built: in memory it would be hundreds of MiB, which the kernel would count for every process started later
/// (`ru_maxrss`).
pub(super) struct Archive {
    to: BufWriter<File>,
    /// Bytes so far.
    length: u64,
    entries: u32,
    made: BTreeSet<String>,
}

impl Archive {
    /// An archive that is that file.
    pub(super) fn new(file: File) -> Self {
        Self { to: BufWriter::new(file), length: 0, entries: 0, made: BTreeSet::new() }
    }

    /// An empty directory, absolute.
    pub(super) fn directory(&mut self, path: &str) -> anyhow::Result<()> {
        let mut parent = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            parent.push('/');
            parent.push_str(part);
            if self.made.insert(parent.clone()) {
                self.entry(&parent, DIRECTORY | 0o755, (0, 0), (0, &mut io::empty()))?;
            }
        }
        Ok(())
    }

    /// A copy of a file, executable. The second of one path is left out.
    pub(super) fn copy(&mut self, from: &Path, to: &str) -> anyhow::Result<()> {
        let opened = File::open(from).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (size, mut content) = opened.with_context(|| format!("read {}", from.display()))?;
        self.read(to, size, &mut content)
    }

    /// A file, executable.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        self.read(path, content.len() as u64, &mut &*content)
    }

    fn read(&mut self, path: &str, size: u64, content: &mut dyn Read) -> anyhow::Result<()> {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.directory(directory)?;
        }
        if self.made.insert(path.to_owned()) {
            self.entry(path, FILE | 0o755, (0, 0), (size, content))?;
        }
        Ok(())
    }

    /// A symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> anyhow::Result<()> {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.directory(directory)?;
        }
        let content = &mut target.as_bytes();
        self.entry(path, LINK | 0o777, (0, 0), (target.len() as u64, content))
    }

    /// A character device.
    pub(super) fn device(&mut self, path: &str, major: u32, minor: u32) -> anyhow::Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), (0, &mut io::empty()))
    }

    /// Ends the archive; returns how many bytes it has.
    pub(super) fn finish(mut self) -> anyhow::Result<u64> {
        self.entry("/TRAILER!!!", 0, (0, 0), (0, &mut io::empty()))?;
        self.to.flush().context("write an archive")?;
        Ok(self.length)
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        device: (u32, u32),
        (size, content): (u64, &mut dyn Read),
    ) -> anyhow::Result<()> {
        let name = path.strip_prefix('/').unwrap_or(path);
        ensure!(!name.is_empty() && !name.contains('\0'), "{path:?} cannot be the name of a file");
        let field = u32::try_from(size).with_context(|| format!("{path} is too large"))?;
        // Number, mode, owner, group, links, time, size, the device it is on, the device it is, name, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            field,
            0,
            0,
            device.0,
            device.1,
            u32::try_from(name.len() + 1).context("a name is too long")?,
            0,
        ];
        self.entries += 1;
        let fields = fields.map(|field| format!("{field:08x}")).concat();
        self.write(&[b"070701", fields.as_bytes(), name.as_bytes(), &[0]].concat())?;
        self.align()?;
        let copied = io::copy(&mut content.take(size), &mut self.to).context("write an archive")?;
        ensure!(copied == size, "{path} became shorter while it was read");
        self.length += size;
        self.align()
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.to.write_all(bytes).context("write an archive")?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Headers and contents begin at multiples of four.
    fn align(&mut self) -> anyhow::Result<()> {
        let missing = self.length.next_multiple_of(4) - self.length;
        self.write(&[0; 3][..missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_describes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        let mut archive = Archive::new(File::create(&path).unwrap());
        archive.file("/a/b", b"hello").unwrap();
        archive.file("/a/b", b"again").unwrap();
        let length = archive.finish().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.len() as u64, length);
        assert_eq!(text.len() % 4, 0);
        assert!(text.starts_with("070701"), "{text}");
        let names: Vec<&str> = text.split("070701").skip(1).map(|entry| &entry[104..]).collect();
        assert_eq!(names, ["a\0", "a/b\0\0\0hello\0\0\0", "TRAILER!!!\0\0\0\0"]);
    }
}
