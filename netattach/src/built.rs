//! What this executable was built from, as `--version` shows it.
//!
//! `cargo xtask build` writes the commit into the finished executables. Were it compiled in, each commit would be a
//! reason to compile everything again, and two commits with the same sources would have different code.

use std::fmt::Write;

use netattach_common::LAYOUT_VERSION;

use crate::journal;
use crate::rpc::message::PROTOCOL;

/// Bytes of the text behind [`MARK`].
const ROOM: usize = 64;
/// Begins the section, for who writes the commit into it.
const MARK: [u8; 16] = *b"netattach-commit";

/// [`MARK`], then what is known of the commit as text, filled up with zeroes: nothing until it is written.
#[used]
#[unsafe(link_section = ".netattach")]
static STAMP: Stamp = Stamp { mark: MARK, text: [0; ROOM] };

#[repr(C)]
struct Stamp {
    mark: [u8; 16],
    text: [u8; ROOM],
}

/// The commit that the executable was built from, with `modified` when the sources were not those of the commit, or that it
/// is not known: an executable of `cargo build`.
pub fn commit() -> String {
    // SAFETY: the static is initialised, aligned and never written while the program runs. It is read as memory that
    // changes, for its content is exchanged after the compiler has seen it.
    let stamp = unsafe { (&raw const STAMP).read_volatile() };
    debug_assert_eq!(stamp.mark, MARK);
    commit_in(&stamp.text)
}

fn commit_in(text: &[u8; ROOM]) -> String {
    let written = text.iter().position(|byte| *byte == 0).unwrap_or(ROOM);
    match str::from_utf8(&text[..written]) {
        Ok(text) if !text.is_empty() => text.to_owned(),
        _ => "not known, built without cargo xtask".to_owned(),
    }
}

/// What all executables share: the commit, and the versions of what they exchange with others of netattach. `more` are rows
/// that only this one has. Begins with the version, and has no newline at its end.
pub fn describe(more: &[(&str, String)]) -> String {
    let versions = journal::VERSIONS;
    let rows = [
        ("commit", commit()),
        ("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        ("maps", format!("layout {LAYOUT_VERSION}")),
        ("journal", format!("records of version {} to {}", versions.start(), versions.end())),
        ("socket", format!("protocol {PROTOCOL}")),
        ("features", features()),
    ];
    let mut text = env!("CARGO_PKG_VERSION").to_owned();
    for (key, value) in rows.iter().chain(more) {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{key:<9} {value}");
    }
    text
}

/// The features of the package that change what an executable does.
fn features() -> String {
    let known = [("crash-points", cfg!(feature = "crash-points")), ("model", cfg!(feature = "model"))];
    let with: Vec<&str> = known.iter().filter(|(_, with)| *with).map(|(name, _)| *name).collect();
    if with.is_empty() { "the usual".to_owned() } else { with.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_what_was_written_behind_the_mark() {
        let mut text = [0; ROOM];
        assert_eq!(commit_in(&text), "not known, built without cargo xtask");
        text[..13].copy_from_slice(b"1234 modified");
        assert_eq!(commit_in(&text), "1234 modified");
        assert_eq!(commit_in(&[b'a'; ROOM]), "a".repeat(ROOM));
        assert_eq!(commit_in(&[0xff; ROOM]), "not known, built without cargo xtask");
    }

    #[test]
    fn every_version_that_others_depend_on_has_a_row() {
        let features = features();
        let text = describe(&[("more", "and more".into())]);
        let expected = format!(
            "{}\ncommit    {}\ntarget    {}-linux\nmaps      layout {LAYOUT_VERSION}\njournal   records of version 1 to {}\n\
             socket    protocol {PROTOCOL}\nfeatures  {features}\nmore      and more",
            env!("CARGO_PKG_VERSION"),
            commit(),
            std::env::consts::ARCH,
            journal::VERSIONS.end()
        );
        assert_eq!(text, expected);
    }

    /// The example of docs/image.md has the rows of this version: all but the commit, and the programs, which `netattachd` has.
    #[test]
    fn the_documents_show_these_versions() {
        const PAGE: &str = include_str!("../../docs/image.md");
        let (_, shown) = PAGE.split_once("# netattachd --version\n").unwrap();
        let (shown, _) = shown.split_once("\n```").unwrap();
        let rows = |text: &str| -> Vec<(String, String)> {
            let row = |line: &str| {
                let (key, value) = line.split_once(' ').unwrap();
                let varies = ["commit", "programs"].contains(&key);
                (key.to_owned(), if varies { String::new() } else { value.trim_start().to_owned() })
            };
            text.lines().map(row).collect()
        };
        let text = format!("netattachd {}", describe(&[("programs", String::new())]));
        let usual = text.replace(&format!("features  {}", features()), "features  the usual");
        assert_eq!(rows(shown), rows(&usual));
    }
}
