//! Archives with the same bytes on every machine: entries sorted by name, without an owner, with one timestamp.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// The value of the operating system in a gzip header that means unknown (RFC 1952, 2.3.1).
const UNKNOWN_SYSTEM: u8 = 255;

/// Files by their paths, with the directories above them.
#[derive(Debug, Default)]
pub(super) struct Tarball {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
enum Entry {
    Directory,
    File { mode: u32, content: Vec<u8> },
}

impl Tarball {
    /// Adds a file; `path` is relative, with `/` between its parts.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) -> anyhow::Result<()> {
        let is_plain = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        ensure!(is_plain, "{path:?} is no path in an archive");
        for (end, _) in path.match_indices('/') {
            self.entries.entry(path[..end].to_owned()).or_insert(Entry::Directory);
        }
        let before = self.entries.insert(path.to_owned(), Entry::File { mode, content: content.into() });
        ensure!(before.is_none(), "{path} is in the archive twice");
        Ok(())
    }

    /// The bytes of all files.
    pub(super) fn content_bytes(&self) -> u64 {
        let size = |entry: &Entry| match entry {
            Entry::Directory => 0,
            Entry::File { content, .. } => content.len() as u64,
        };
        self.entries.values().map(size).sum()
    }

    /// The archive; `time` is that of every entry, in seconds since 1970.
    pub(super) fn finish(&self, time: u64) -> anyhow::Result<Vec<u8>> {
        let mut archive = Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            let mut header = Header::new_ustar();
            let (kind, mode, content) = match entry {
                Entry::Directory => (EntryType::Directory, 0o755, &[][..]),
                Entry::File { mode, content } => (EntryType::Regular, *mode, content.as_slice()),
            };
            header.set_entry_type(kind);
            let name = if kind == EntryType::Directory { format!("{path}/") } else { path.clone() };
            header.set_path(Path::new(&name)).with_context(|| format!("name {path}"))?;
            header.set_mode(mode);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(time);
            header.set_size(content.len() as u64);
            header.set_cksum();
            archive.append(&header, content).with_context(|| format!("add {path}"))?;
        }
        archive.into_inner().context("end an archive")
    }
}

/// Compressed, without a name and a time of its own.
pub(super) fn gzip(content: &[u8]) -> anyhow::Result<Vec<u8>> {
    let builder = GzBuilder::new().mtime(0).operating_system(UNKNOWN_SYSTEM);
    let mut encoder = builder.write(Vec::new(), Compression::best());
    encoder.write_all(content).context("compress")?;
    encoder.finish().context("compress")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn listed(archive: &[u8]) -> Vec<(String, u32, u64, u64, String)> {
        let mut archive = tar::Archive::new(archive);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            let header = entry.header();
            let path = header.path().unwrap().display().to_string();
            (path, header.mode().unwrap(), header.mtime().unwrap(), header.uid().unwrap(), text)
        });
        entries.collect()
    }

    #[test]
    fn entries_are_sorted_with_the_directories_above_them() {
        let mut tarball = Tarball::default();
        tarball.file("usr/share/doc", 0o644, *b"words").unwrap();
        tarball.file("usr/bin/tool", 0o755, *b"program").unwrap();
        assert_eq!(tarball.content_bytes(), 12);
        let row = |path: &str, mode, text: &str| (path.to_owned(), mode, 1000, 0, text.to_owned());
        let expected = [
            row("usr/", 0o755, ""),
            row("usr/bin/", 0o755, ""),
            row("usr/bin/tool", 0o755, "program"),
            row("usr/share/", 0o755, ""),
            row("usr/share/doc", 0o644, "words"),
        ];
        assert_eq!(listed(&tarball.finish(1000).unwrap()), expected);
    }

    #[test]
    fn paths_that_lead_out_and_double_ones_are_refused() {
        let mut tarball = Tarball::default();
        for path in ["/etc/passwd", "../x", "a//b", "a/./b", ""] {
            assert!(tarball.file(path, 0o644, *b"").is_err(), "{path:?}");
        }
        tarball.file("a", 0o644, *b"").unwrap();
        assert_eq!(tarball.file("a", 0o644, *b"").unwrap_err().to_string(), "a is in the archive twice");
    }

    #[test]
    fn compressed_bytes_name_no_time_and_no_system() {
        let compressed = gzip(b"words").unwrap();
        assert_eq!(compressed[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 255]);
        let mut text = String::new();
        flate2::read::GzDecoder::new(compressed.as_slice()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "words");
    }
}
