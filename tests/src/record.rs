//! Records of the journal, for tests that change them.

/// The record in version 1: without checksums, so that a test can write any content.
///
/// # Panics
/// The record has no header of a later version.
#[must_use]
pub fn first_version(record: &str) -> String {
    let mut lines = record.lines();
    let head = lines.next().unwrap_or_default();
    let begun =
        ["2", "3", "4", "5", "6", "7", "8"].map(|version| format!("{{\"planned\":{{\"version\":{version}"));
    let begun = begun.iter().find(|begun| head.starts_with(&format!("{begun}}}"))).expect("has a header");
    // Version 1 had no line for the namespace.
    let written = |line: &&str| !line[12..].starts_with("{\"namespace\":");
    let lines = lines.filter(written).map(|line| {
        let line = &line["[\"01234567\",".len()..line.len() - 1];
        format!("{}\n", line.replacen(begun, "{\"planned\":{\"version\":1", 1))
    });
    lines.collect()
}

/// The record with lines changed by `edit`, as if it had been written so: with checksums and the mark that it is
/// attached.
///
/// # Panics
/// The record is not of version 2.
#[must_use]
pub fn rewritten(name: &str, record: &str, edit: impl Fn(&str) -> String) -> String {
    let first = record.lines().next().unwrap_or_default();
    let mut sum = crc32(0, name.as_bytes());
    let mut lines = String::new();
    for line in record.lines().skip(1) {
        let body = edit(&line["[\"01234567\",".len()..line.len() - 1]);
        sum = crc32(sum, body.as_bytes());
        lines.push_str(&format!("[\"{sum:08x}\",{body}]\n"));
    }
    assert!(first.contains("\"state\":\"attached\""), "{record}");
    let (said, _) = first.split_once("\",\"sum\"").expect("the first line has a checksum");
    let (said, _) = said.split_once("\"length\":\"").expect("the first line has a length");
    let said = format!("{said}\"length\":\"{:020}", first.len() + 1 + lines.len());
    let sum = crc32(crc32(0, name.as_bytes()), said.as_bytes());
    format!("{said}\",\"sum\":\"{sum:08x}\"}}\n{lines}")
}

/// CRC-32 of ISO 3309, continued from that of the preceding bytes.
fn crc32(before: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!before, |sum, byte| {
        (0..8).fold(
            sum ^ u32::from(*byte),
            |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 },
        )
    })
}
