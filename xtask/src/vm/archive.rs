//! The archive that a kernel unpacks as its first file system (`cpio`, the kernel's "newc" form:
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

/// `S_IFDIR`, `S_IFREG`, `S_IFCHR` of `linux/stat.h`.
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Files in the order in which they were added, directories made as they are needed.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    made: BTreeSet<String>,
}

impl Archive {
    /// An empty directory, absolute.
    pub(super) fn directory(&mut self, path: &str) -> anyhow::Result<()> {
        let mut parent = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            parent.push('/');
            parent.push_str(part);
            if self.made.insert(parent.clone()) {
                self.entry(&parent, DIRECTORY | 0o755, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    /// A copy of a file, executable. The second of one path is left out.
    pub(super) fn copy(&mut self, from: &Path, to: &str) -> anyhow::Result<()> {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        self.file(to, &content)
    }

    /// A file, executable.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.directory(directory)?;
        }
        if self.made.insert(path.to_owned()) {
            self.entry(path, FILE | 0o755, (0, 0), content)?;
        }
        Ok(())
    }

    /// A symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> anyhow::Result<()> {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.directory(directory)?;
        }
        self.entry(path, LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// A character device.
    pub(super) fn device(&mut self, path: &str, major: u32, minor: u32) -> anyhow::Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// The whole archive.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<u8>> {
        self.entry("/TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> anyhow::Result<()> {
        let name = path.strip_prefix('/').unwrap_or(path);
        ensure!(!name.is_empty() && !name.contains('\0'), "{path:?} cannot be the name of a file");
        let size = u32::try_from(content.len()).with_context(|| format!("{path} is too large"))?;
        // Number, mode, owner, group, links, time, size, the device it is on, the device it is, name, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            u32::try_from(name.len() + 1).context("a name is too long")?,
            0,
        ];
        self.entries += 1;
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
        Ok(())
    }

    /// Headers and contents begin at multiples of four.
    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_describes() {
        let mut archive = Archive::default();
        archive.file("/a/b", b"hello").unwrap();
        archive.file("/a/b", b"again").unwrap();
        let text = String::from_utf8(archive.finish().unwrap()).unwrap();
        assert_eq!(text.len() % 4, 0);
        assert!(text.starts_with("070701"), "{text}");
        let names: Vec<&str> = text.split("070701").skip(1).map(|entry| &entry[104..]).collect();
        assert_eq!(names, ["a\0", "a/b\0\0\0hello\0\0\0", "TRAILER!!!\0\0\0\0"]);
    }
}
