//! What an executable was built from, as `--version` shows it.
//!
//! `cargo xtask build` writes the commit into the finished executables. Were it compiled in, each commit would be a
//! reason to compile everything again, and two commits with the same sources would have different code.

use std::fmt::Write;

use crate::message::PROTOCOL;

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

/// What all executables share: the commit, the target, and the protocol that they speak on the socket. `more` are rows that only
/// this one has. Begins with the version, and has no newline at its end.
pub fn describe(more: &[(&str, String)]) -> String {
    let rows = [
        ("commit", commit()),
        ("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        ("socket", format!("protocol {PROTOCOL}")),
    ];
    let mut text = env!("CARGO_PKG_VERSION").to_owned();
    for (key, value) in rows.iter().chain(more) {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{key:<9} {value}");
    }
    text
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
    fn what_executables_share_has_a_row() {
        let expected = format!(
            "{}\ncommit    {}\ntarget    {}-linux\nsocket    protocol {PROTOCOL}\nmore      and more",
            env!("CARGO_PKG_VERSION"),
            commit(),
            std::env::consts::ARCH,
        );
        assert_eq!(describe(&[("more", "and more".into())]), expected);
    }
}
