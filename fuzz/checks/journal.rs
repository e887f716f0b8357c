//! Records of the journal, as a disk, an editor or a loss of power may leave them.
//!
//! A panic or a hang is a finding; so is a record of an attached sandbox that is accepted as intact when bytes of it
//! are missing, changed or duplicated, or when it lies under another container's name.

use netattach::journal::format::{Verdict, judge};

const NAME: &str = "cart@eth0.jsonl";

// The first three bytes choose the damage to a record that turns out to be intact.
pub(crate) fn check(data: &[u8]) {
    let Some((harm, record)) = data.split_at_checked(3) else { return };
    let Verdict::Whole { attached: true } = judge(NAME, record) else { return };
    let at = (usize::from(harm[0]) << 8 | usize::from(harm[1])) % record.len();
    // The end of the content when it was attached; later lines may be lost by a crash as well.
    let length = record.split(|byte| *byte == b'"').filter_map(|word| std::str::from_utf8(word).ok());
    let sealed = length.filter(|word| word.len() == 20).find_map(|word| word.parse::<usize>().ok());
    let at = at % sealed.unwrap_or(record.len()).min(record.len());
    let not_whole = |record: &[u8]| {
        assert!(!matches!(judge(NAME, record), Verdict::Whole { attached: true }), "{at}");
    };
    not_whole(&record[..at]);
    let mut flipped = record.to_vec();
    flipped[at] ^= 1 << (harm[2] & 7);
    not_whole(&flipped);
    let lines: Vec<&[u8]> = record.split_inclusive(|byte| *byte == b'\n').collect();
    let line = at % lines.len();
    let mut doubled = lines.clone();
    doubled.insert(line, lines[line]);
    not_whole(&doubled.concat());
    assert!(!matches!(judge("other@eth0.jsonl", record), Verdict::Whole { .. }));
}
