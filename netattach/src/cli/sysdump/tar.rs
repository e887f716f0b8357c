//! Writes archives in the format of POSIX (ustar): files only.

use std::io::{self, Write};

const BLOCK: usize = 512;

/// Longest name of a file: of a longer name, the end is kept.
const NAME: usize = 100;

/// An archive that is being written.
pub(super) struct Writer<W> {
    out: W,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out }
    }

    /// Appends a file that was changed at that time, in seconds since 1970.
    pub(super) fn file(&mut self, name: &str, content: &[u8], changed_s: u64) -> io::Result<()> {
        self.out.write_all(&header(name, content.len() as u64, changed_s))?;
        self.out.write_all(content)?;
        let rest = content.len().next_multiple_of(BLOCK) - content.len();
        self.out.write_all(&[0; BLOCK][..rest])
    }

    /// Writes the end of the archive.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        Ok(self.out)
    }
}

fn header(name: &str, size: u64, changed_s: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    let name = name.as_bytes();
    put(0, &name[name.len().saturating_sub(NAME)..]);
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    // Both numbers fit: a file has at most a few megabytes, and eleven octal digits of seconds last until 2242.
    put(124, format!("{:011o}\0", size.min((1 << 33) - 1)).as_bytes());
    put(136, format!("{:011o}\0", changed_s.min((1 << 33) - 1)).as_bytes());
    // The checksum is computed with spaces in its place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The files of an archive, whose headers are checked.
    pub(in crate::cli::sysdump) fn read(mut archive: &[u8]) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        while archive[0] != 0 {
            let (header, rest) = archive.split_at(BLOCK);
            let text = |at: std::ops::Range<usize>| {
                let field = &header[at];
                let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
                String::from_utf8(field[..end].to_vec()).unwrap()
            };
            let mut blank = header.to_vec();
            blank[148..156].fill(b' ');
            let sum: u32 = blank.iter().map(|byte| u32::from(*byte)).sum();
            assert_eq!(u32::from_str_radix(text(148..156).trim(), 8).unwrap(), sum);
            assert_eq!(&header[257..263], b"ustar\0");
            let size = usize::from_str_radix(&text(124..136), 8).unwrap();
            files.insert(text(0..100), String::from_utf8_lossy(&rest[..size]).into_owned());
            archive = &rest[size.next_multiple_of(BLOCK)..];
        }
        assert!(archive.len() == 2 * BLOCK && archive.iter().all(|byte| *byte == 0));
        files
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let mut writer = Writer::new(Vec::new());
        writer.file("a/b.txt", b"hello", 1_700_000_000).unwrap();
        writer.file("empty", b"", 0).unwrap();
        let long = "x".repeat(1024);
        writer.file(&format!("{}/end", "d".repeat(200)), long.as_bytes(), u64::MAX).unwrap();
        let files = read(&writer.finish().unwrap());
        assert_eq!(files["a/b.txt"], "hello");
        assert_eq!(files["empty"], "");
        let name = files.keys().find(|name| name.ends_with("/end")).unwrap();
        assert_eq!((name.len(), &files[name]), (100, &long));
    }
}
