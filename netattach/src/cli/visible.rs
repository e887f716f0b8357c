//! Makes text of others safe to show: escapes the characters that a terminal interprets.
//!
//! Annotations, configurations and messages of a cluster's tenants are shown to the users of an agent: root
//! of the node, or an administrator of the cluster. A control character in them could move the cursor, set
//! the clipboard, or start a line that looks like one of the agent's. Data (`-o json`, `-o yaml`) is for
//! programs, and is not changed.

/// Whether a terminal interprets the character instead of showing it: the control characters of ASCII and
/// Unicode (C0, DEL, C1), further line separators, and characters that change the direction of text.
fn is_acted_on(sign: char) -> bool {
    sign.is_control()
        || matches!(
            sign,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

fn written_out(text: &str, is_wanted: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for sign in text.chars() {
        if is_acted_on(sign) && !is_wanted(sign) {
            shown.extend(sign.escape_debug());
        } else {
            shown.push(sign);
        }
    }
    shown
}

/// Escapes a text within a line, including line ends.
pub(super) fn inline(text: &str) -> String {
    written_out(text, |_| false)
}

/// Escapes a line of its own.
pub(super) fn line(text: &str) -> String {
    inline(text) + "\n"
}

/// Escapes a text, keeping its line ends.
pub(super) fn lines(text: &str) -> String {
    written_out(text, |sign| sign == '\n')
}

/// Escapes a text that arrives in pieces of bytes, keeping its line ends: a piece may end within a
/// character.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// The bytes of an incomplete character.
    begun: Vec<u8>,
}

impl Pieces {
    /// Returns the text to show for one more piece. Bytes that are not UTF-8 are shown as U+FFFD.
    pub(super) fn next(&mut self, piece: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.begun);
        bytes.extend_from_slice(piece);
        let mut text = String::with_capacity(bytes.len());
        let mut left = bytes.len();
        for chunk in bytes.utf8_chunks() {
            let invalid = chunk.invalid();
            left -= chunk.valid().len() + invalid.len();
            text.push_str(chunk.valid());
            if left == 0 && is_begun(invalid) {
                self.begun = invalid.to_vec();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        lines(&text)
    }
}

/// Whether more bytes can complete these to a character.
fn is_begun(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_written_out_and_all_else_is_as_it_was() {
        let table = [
            ("\u{1b}]52;c;eA==\u{7}", r"\u{1b}]52;c;eA==\u{7}"),
            ("a\nb\r\tc", r"a\nb\r\tc"),
            ("\u{9b}2J\u{7f}", r"\u{9b}2J\u{7f}"),
            ("\u{202e}cba\u{2066}x\u{200f}\u{61c}\u{2028}", r"\u{202e}cba\u{2066}x\u{200f}\u{61c}\u{2028}"),
            ("äöü … ├─ 漢字 'x' \"y\" \\n", "äöü … ├─ 漢字 'x' \"y\" \\n"),
            ("", ""),
        ];
        for (text, expected) in table {
            assert_eq!(inline(text), expected);
        }
        assert_eq!(line("a\nb"), "a\\nb\n");
        assert_eq!(lines("a\n\u{1b}b\n"), "a\n\\u{1b}b\n");
    }

    #[test]
    fn a_character_in_two_pieces_is_one_and_what_is_none_is_shown_as_that() {
        let shown = |pieces: &[&[u8]]| -> Vec<String> {
            let mut text = Pieces::default();
            pieces.iter().map(|piece| text.next(piece)).collect()
        };
        assert_eq!(shown(&[b"a\xe2", b"\x80", b"\xa6b"]), ["a", "", "…b"]);
        // U+009B is two bytes; the second alone is none.
        assert_eq!(shown(&[b"\xc2", b"\x9bx", b"\x9b\n"]), ["", r"\u{9b}x", "\u{fffd}\n"]);
        assert_eq!(shown(&[b"a\xe2b", b"\xe2", b"c"]), ["a\u{fffd}b", "", "\u{fffd}c"]);
        assert_eq!(shown(&[b"\x1b[", b"2J"]), [r"\u{1b}[", "2J"]);
    }
}
