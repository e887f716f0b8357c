//! Reads and writes the content of a record's file, and detects damage. Pure.
//!
//! Version 2 begins with a header line of fixed length: the version, whether the sandbox is attached and the length
//! of the file at that moment, and a checksum. The header is rewritten in place once, when the sandbox is attached; a
//! file that is shorter afterwards has lost lines. (If no line can be appended for the removal, the header gets its
//! former content, and the line of the attachment is removed.) Every other line is a JSON array of a checksum and an
//! event. A checksum covers the name of the file, its own line and the previous checksum, so that changed, reordered,
//! repeated and foreign lines are detected. Version 1 had no checksums and no header: each line was an event.
//! Versions 3 to 10 are version 2 with plans that an earlier version cannot express.
//!
//! A last line without its newline was cut off by a crash: the step it announced had not begun or can be repeated. Any
//! other deviation from the written form is damage: the remaining lines are read, and nothing is concluded from
//! missing ones.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::plan::{AttachmentPlan, Plan};
use crate::spec::Link;
use crate::step::{Configure, Output, Step, StepRef, Style};

/// The versions that are written: see [`version_of`]. They differ only in the plans that they can express.
const WRITTEN: [u32; 9] = [2, 3, 4, 5, 6, 7, 8, 9, 10];

/// The versions that are read.
pub const VERSIONS: RangeInclusive<u32> = 1..=WRITTEN[WRITTEN.len() - 1];

/// Returns the version in which a plan is written: the lowest that can express the whole plan, so that an agent of
/// that version can read it, and an older agent reports the version that it would need. Version 3 adds leases of
/// kinds other than `host-local`, and ipvlans; version 4 address translation by the node; version 5 exceptions from
/// masquerade that follow the node's, and several gateways on a bridge; version 6 the kinds and properties of links
/// that were added later; version 7 devices of the node, and tables by source; version 8 macvlans whose programs are
/// attached before they have addresses, and pods on a parent that reach the node; version 9 VRFs, taps and netkits,
/// port mappings to interfaces of other plugins, and the choice of masqueraded senders; version 10 interfaces that a
/// plugin earlier in the runtime's list has created, forwarding past a filter that drops, pods on ipvlans that reach
/// the node, VFs with a representor, and leases of `dhcp`.
pub(super) fn version_of(plan: &Plan) -> u32 {
    let [second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth] = WRITTEN;
    let needed = |step: &Step| match step {
        // The last is used only by executables, which keep no record.
        Step::TakeMade(_) | Step::Admit(_) | Step::RestrictSender => tenth,
        Step::Translate(translate) if !translate.senders.is_usual() => ninth,
        Step::FindReach => ninth,
        Step::Translate(translate) if translate.follows_node => fifth,
        Step::Gateway { beside: true, .. } => fifth,
        Step::Translate(_) => fourth,
        Step::Lease(config) if config.asks_the_network() => tenth,
        Step::Lease(config) if config.is_tagged() => third,
        Step::CreateLink(Link::Vlan(_) | Link::Dummy(_)) => sixth,
        Step::CreateLink(Link::Macvlan(macvlan)) if macvlan.tap || macvlan.in_pod => sixth,
        Step::CreateLink(Link::Ipvlan(ipvlan)) if ipvlan.in_pod => sixth,
        Step::CreateLink(Link::Ipvlan(_)) => third,
        Step::NoteProperties(_) | Step::Tune(_) => sixth,
        Step::ChooseTables(_) | Step::UseTables(_) => seventh,
        Step::Configure(configure) if is_new(configure) => sixth,
        Step::Gateway { vlan: Some(_), .. } => sixth,
        Step::EnsureBridge(bridge) if bridge.vlan_filtering => sixth,
        Step::CreateLink(link) if link.port().is_some_and(|it| it.isolated || it.vlans.is_some()) => sixth,
        Step::ClaimDevice(device) if device.switchdev => tenth,
        Step::ClaimDevice(_) | Step::SetDevice(_) | Step::MoveDevice => seventh,
        Step::ProtectAddresses | Step::ChooseHostAccess | Step::GiveHostAccess => eighth,
        Step::ChooseVrf(_) | Step::JoinVrf(_) | Step::CreateLink(Link::Tap(_) | Link::Netkit(_)) => ninth,
        Step::Lease(_)
        | Step::CreateLink(Link::Veth(_) | Link::Macvlan(_))
        | Step::EnsureBridge(_)
        | Step::RaiseLoopback
        | Step::PrepareDeviceInfo(_)
        | Step::Delegate(_)
        | Step::Gateway { .. }
        | Step::EnsureForwarding
        | Step::RouteToPod
        | Step::FindDevice
        | Step::Protect(_)
        | Step::Configure(_)
        | Step::Remember(_)
        | Step::ReadDeviceInfo(_)
        | Step::MoveDefaultRoutes { .. }
        | Step::RouteBySource => second,
    };
    let is_reached_on_ipvlan = |of: &AttachmentPlan| {
        of.steps.contains(&Step::GiveHostAccess) && matches!(of.link(), Some(Link::Ipvlan(_)))
    };
    if plan.attachments.iter().any(is_reached_on_ipvlan) {
        return tenth;
    }
    plan.steps().map(|(_, _, step)| needed(step)).max().unwrap_or(second)
}

/// Whether the interface is configured in a way that versions before the sixth cannot express. An agent that does not
/// know `v4_alone` can ignore it: it is used only while the interface is created.
fn is_new(configure: &Configure) -> bool {
    let Configure { style, detect_duplicates, down, default_route: _, dns: _, v4_alone: _ } = configure;
    *style == Style::PointToPoint || *detect_duplicates || *down
}

/// One event of a record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Line {
    Planned {
        version: u32,
        boot: String,
        /// Time of writing, in milliseconds since 1970: for people only.
        at: u64,
        /// Time of writing, in nanoseconds since that boot. Not in version 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since_boot: Option<u64>,
        #[serde(with = "shared")]
        plan: Arc<Plan>,
    },
    /// Cookie of the sandbox's namespace.
    Namespace(u64),
    Began(StepRef),
    Done(StepRef, Box<Output>),
    Attached(Value),
    Removing,
}

/// Serialises a shared value as the value itself.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        T::serialize(value, serializer)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// A part of a record that differs from what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Number of the line, from 1.
    pub line: usize,
    /// The problem.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

/// The state of a record's file, for tests of reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The file ends before its plan does.
    Torn,
    /// The file has a version that this code does not know.
    Foreign(u64),
    /// The file differs from what was written.
    Damaged(Vec<Damage>),
    /// The file is as it was written.
    Whole {
        /// Whether the header says that the sandbox is attached.
        attached: bool,
    },
}

/// Reads the content of the file of that name and judges it.
pub fn judge(name: &str, bytes: &[u8]) -> Verdict {
    match read(name, bytes) {
        Content::Torn => Verdict::Torn,
        Content::Foreign(version) => Verdict::Foreign(version),
        Content::Lines(Read { damage, .. }) if !damage.is_empty() => Verdict::Damaged(damage),
        Content::Lines(Read { sealed, .. }) => Verdict::Whole { attached: sealed },
    }
}

/// The encoder of one file's lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Writer {
    version: u32,
    /// Checksum of the name and of all lines so far.
    sum: u32,
}

/// The lines of a readable file.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) lines: Vec<Line>,
    pub(super) damage: Vec<Damage>,
    /// The header says that the sandbox is attached.
    pub(super) sealed: bool,
    /// Bytes up to the end of the last whole line.
    pub(super) length: usize,
    pub(super) writer: Writer,
    /// The file before the line that marks the sandbox as attached, if there is such a line: its length, and the
    /// encoder for the next line.
    pub(super) before_attached: Option<(usize, Writer)>,
}

/// The content of a file.
#[derive(Debug)]
pub(super) enum Content {
    /// The file ends before its plan does: its writer died while writing it.
    Torn,
    /// The file has a version that this code does not know.
    Foreign(u64),
    /// The file could be read.
    Lines(Read),
}

const SUM_DIGITS: usize = 8;
const BEFORE_SUM: &str = "\",\"sum\":\"";

/// The header line, with its newline.
pub(super) fn head(name: &str, version: u32, attached_at: Option<u64>) -> String {
    let state = if attached_at.is_some() { "attached" } else { "applying" };
    let length = attached_at.unwrap_or(0);
    let message =
        format!("{{\"planned\":{{\"version\":{version}}},\"state\":\"{state}\",\"length\":\"{length:020}");
    let sum = checksum(checksum(0, name.as_bytes()), message.as_bytes());
    format!("{message}{BEFORE_SUM}{sum:08x}\"}}\n")
}

impl Writer {
    /// Makes the encoder for a new file with this name.
    pub(super) fn new(name: &str, version: u32) -> Self {
        Self { version, sum: checksum(0, name.as_bytes()) }
    }

    /// The version of the file.
    pub(super) fn version(self) -> u32 {
        self.version
    }

    /// Whether files of this version begin with a header.
    pub(super) fn has_head(self) -> bool {
        self.version >= 2
    }

    /// Appends the encoded line to `to`.
    pub(super) fn encode(&mut self, line: &Line, to: &mut Vec<u8>) -> serde_json::Result<()> {
        if self.version < 2 {
            serde_json::to_writer(&mut *to, line)?;
            to.push(b'\n');
            return Ok(());
        }
        let begin = to.len();
        to.extend_from_slice(b"[\"00000000\",");
        let body = to.len();
        serde_json::to_writer(&mut *to, line)?;
        self.sum = checksum(self.sum, &to[body..]);
        let sum = format!("{:08x}", self.sum);
        to[begin + 2..begin + 2 + SUM_DIGITS].copy_from_slice(sum.as_bytes());
        to.extend_from_slice(b"]\n");
        Ok(())
    }
}

/// Reads the content of the file with this name.
pub(super) fn read(name: &str, bytes: &[u8]) -> Content {
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    if let Some(version) = foreign_version(&bytes[..whole]) {
        return Content::Foreign(version);
    }
    if WRITTEN.iter().any(|version| head(name, *version, None).as_bytes().starts_with(bytes)) {
        return Content::Torn;
    }
    if is_of_first_version(bytes) {
        return read_first_version(bytes, whole);
    }
    let first = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |newline| newline + 1);
    let mut damage = Vec::new();
    let (version, sealed) =
        WRITTEN.iter().find_map(|version| first_line(name, *version, &bytes[..first])).unwrap_or_else(|| {
            damage.push(Damage { line: 1, what: "it is not the first line that was written".to_owned() });
            (WRITTEN[0], None)
        });
    if whole <= first && sealed.is_none() && damage.is_empty() {
        return Content::Torn;
    }
    let begin = first.min(whole);
    let Chained { lines, sum, attached } = chained(name, &bytes[begin..whole], &mut damage);
    let writer = Writer { version, sum };
    let before_attached = attached.map(|(at, sum)| (begin + at, Writer { version, sum }));
    let count = bytes[..whole].split(|byte| *byte == b'\n').count();
    if sealed.is_some_and(|length| (whole as u64) < length) {
        damage.push(Damage { line: count, what: "lines are missing at the end".to_owned() });
    }
    Content::Lines(Read { lines, damage, sealed: sealed.is_some(), length: whole, writer, before_attached })
}

/// Returns the version, if this is the header of a file of that version, and the stated length if the sandbox is
/// attached.
fn first_line(name: &str, version: u32, line: &[u8]) -> Option<(u32, Option<u64>)> {
    if line == head(name, version, None).as_bytes() {
        return Some((version, None));
    }
    let text = std::str::from_utf8(line).ok()?;
    let (_, after) = text.split_once("\"length\":\"")?;
    let length = after.get(..20)?.parse().ok()?;
    (head(name, version, Some(length)) == text).then_some((version, Some(length)))
}

/// The lines after the header.
struct Chained {
    lines: Vec<Line>,
    /// The checksum of the last.
    sum: u32,
    /// Offset of the line that marks the sandbox as attached, and the checksum of the line before it.
    attached: Option<(usize, u32)>,
}

/// Reads the lines after the header. A line is accepted if it follows from the previous line's checksum, either as stored or
/// as computed.
fn chained(name: &str, text: &[u8], damage: &mut Vec<Damage>) -> Chained {
    let mut lines = Vec::new();
    let mut before = [checksum(0, name.as_bytes()); 2];
    let (mut end, mut attached) = (0, None);
    for (number, line) in whole_lines(text).enumerate() {
        // With its newline.
        let begin = end;
        end += line.len() + 1;
        let [follows, _] = before;
        // Line 1 is the header, which is not among these.
        let at = number + 2;
        let mut fail = |what: &str| damage.push(Damage { line: at, what: what.to_owned() });
        let Some((written, body)) = taken_apart(line) else {
            fail("it is not a line of a record");
            continue;
        };
        let counted = before.map(|before| checksum(before, body));
        before = [written, counted[0]];
        if !counted.contains(&written) {
            fail("its checksum does not match");
            continue;
        }
        before = [written; 2];
        match serde_json::from_slice(body) {
            Ok(line @ Line::Planned { .. }) if number > 0 => {
                let _: Line = line;
                fail("a second plan");
            }
            Ok(line) => {
                if matches!(line, Line::Attached(_)) {
                    attached = Some((begin, follows));
                }
                lines.push(line);
            }
            Err(_) => fail("its checksum is right, but it is not a line of a record"),
        }
    }
    Chained { lines, sum: before[0], attached }
}

fn taken_apart(line: &[u8]) -> Option<(u32, &[u8])> {
    let rest = line.strip_prefix(b"[\"")?;
    let sum = rest.get(..SUM_DIGITS)?;
    let lower = sum.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let body = rest[SUM_DIGITS..].strip_prefix(b"\",")?.strip_suffix(b"]")?;
    let sum = u32::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    lower.then_some((sum, body))
}

/// Whether a file begins like one of version 1, and not like one of a version such as 10.
fn is_of_first_version(bytes: &[u8]) -> bool {
    let rest = bytes.strip_prefix(b"{\"planned\":{\"version\":1");
    rest.is_some_and(|rest| !rest.first().is_some_and(u8::is_ascii_digit))
}

fn read_first_version(bytes: &[u8], whole: usize) -> Content {
    if whole == 0 {
        return Content::Torn;
    }
    let writer = Writer { version: 1, sum: 0 };
    let mut damage = Vec::new();
    let mut lines = Vec::new();
    let (mut end, mut before_attached) = (0, None);
    for (number, line) in whole_lines(&bytes[..whole]).enumerate() {
        let begin = end;
        end += line.len() + 1;
        match serde_json::from_slice(line) {
            Ok(Line::Planned { .. }) if number > 0 => {
                damage.push(Damage { line: number + 1, what: "a second plan".to_owned() });
            }
            Ok(line) => {
                if matches!(line, Line::Attached(_)) {
                    before_attached = Some((begin, writer));
                }
                lines.push(line);
            }
            Err(_) => {
                damage.push(Damage { line: number + 1, what: "it is not a line of a record".to_owned() })
            }
        }
    }
    Content::Lines(Read { lines, damage, sealed: false, length: whole, writer, before_attached })
}

/// The complete lines, without their newlines.
fn whole_lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\n").unwrap_or(line))
}

/// Returns the version in a complete header, if this code does not know that version. A header with a checksum was
/// written by version 2 or later: if it names a lower version, it is damaged.
fn foreign_version(text: &[u8]) -> Option<u64> {
    let first = text.split(|byte| *byte == b'\n').next()?;
    let line: Value = serde_json::from_slice(first).ok()?;
    let version = line.get("planned")?.get("version")?.as_u64()?;
    let is_later = version > u64::from(*VERSIONS.end());
    let is_earlier = version < u64::from(*VERSIONS.start()) && line.get("sum").is_none();
    (is_later || is_earlier).then_some(version)
}

/// CRC-32 of these bytes, continued from the previous sum.
fn checksum(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}
