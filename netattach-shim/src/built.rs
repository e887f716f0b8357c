//! The build information that `--version` prints.
//!
//! `cargo xtask build` writes the commit into the finished executables. If the commit were compiled in,
//! each commit would recompile everything, and two commits with the same sources would have different code.

use std::fmt::Write;

use crate::message::PROTOCOL;

/// Length of the text after [`MARK`], in bytes.
const ROOM: usize = 64;
/// Begins the section, so that `cargo xtask build` finds where to write the commit.
const MARK: [u8; 16] = *b"netattach-commit";

/// [`MARK`], then the commit as text, padded with zero bytes; only zero bytes until it is written.
#[used]
#[unsafe(link_section = ".netattach")]
static STAMP: Stamp = Stamp { mark: MARK, text: [0; ROOM] };

#[repr(C)]
struct Stamp {
    mark: [u8; 16],
    text: [u8; ROOM],
}

/// Returns the commit that the executable was built from, with `modified` if the sources differed from the
/// commit. For an executable of `cargo build` returns a text that says that the commit is not known.
pub fn commit() -> String {
    // SAFETY: the static is initialised, aligned and never written while the program runs. The read is
    // volatile because `cargo xtask build` replaces the content after compilation.
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

/// Returns the build information of an executable: version, commit, target, and the protocol of the socket,
/// followed by the executable's own rows `more`. Starts with the version, and does not end with a newline.
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
