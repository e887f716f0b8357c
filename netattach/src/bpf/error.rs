//! Errors of the kernel's BPF and of the pin tree.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use aya::maps::MapError;
use aya::pin::PinError;
use aya::programs::ProgramError;

use crate::error_chain::Chain;

/// Failure of one action on programs, maps or pins.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The executable was built without the object.
    #[error(
        "this executable was built without its BPF object: run `cargo xtask build-ebpf`, then build it again"
    )]
    NoObject,
    /// A logging object could not be read.
    #[error(
        "read the BPF object {path}, which `cargo xtask build-ebpf --log` writes to target/bpf/netattach-log.bpf.o"
    )]
    ReadObject {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The object does not log, although a logging one is required.
    #[error(
        "this BPF object does not log packets: build the one that does with `cargo xtask build-ebpf --log`"
    )]
    NotLogging,
    /// Pins need a BPF filesystem.
    #[error("{0} is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`")]
    NotBpffs(PathBuf),
    /// A name that a BPF filesystem does not accept.
    #[error(
        "{path}: names on a BPF filesystem have no dots (the kernel keeps them for itself), and {name:?} has one"
    )]
    DottedName {
        /// The root of the pin tree.
        path: PathBuf,
        /// The offending name.
        name: String,
    },
    /// The root contains something that is not netattach's.
    #[error(
        "{path} has {name:?} in it, which is not netattach's: name the directory that netattachd has as `bpffs`"
    )]
    ForeignPin {
        /// The configured root.
        path: PathBuf,
        /// The name that was found in it.
        name: String,
    },
    /// An action on a directory or file of the pin tree failed.
    #[error("{action} {path}")]
    PinTree {
        /// The action that failed.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A pinned map has other properties than expected.
    #[error(
        "pinned map {path} has {property} {found}, this agent needs {expected}: restore the setting it was \
         created with, or detach all pods and remove the pins with `netattachctl uninstall`"
    )]
    ForeignMap {
        /// The pin.
        path: PathBuf,
        /// The property that differs.
        property: MapProperty,
        /// The agent's value.
        expected: u32,
        /// The pinned map's value.
        found: u32,
    },
    /// A pin cannot be opened as the expected type.
    #[error("open pinned map {path}")]
    OpenMap {
        /// The pin.
        path: PathBuf,
        /// The cause.
        source: MapError,
    },
    /// As `OpenMap`, for programs.
    #[error("open pinned program {path}")]
    OpenProgram {
        /// The pin.
        path: PathBuf,
        /// The cause.
        source: ProgramError,
    },
    /// The object could not be loaded into the kernel.
    #[error("load the BPF object")]
    LoadObject(#[source] Refusal),
    /// The object lacks a program: it belongs to another version of the agent.
    #[error("the BPF object has no program {0}")]
    NoProgram(&'static str),
    /// The kernel's verifier or the load itself refused a program.
    #[error("load program {program}")]
    LoadProgram {
        /// Name of the program or map.
        program: &'static str,
        /// The reason, with the end of the verifier's log.
        source: Refusal,
    },
    /// A program could not be pinned.
    #[error("pin program {program} at {path}")]
    PinProgram {
        /// Name of the program or map.
        program: &'static str,
        /// Path of the pin.
        path: PathBuf,
        /// The cause.
        source: PinError,
    },
    /// A program could not be attached by a link.
    #[error("attach program {program} to {device} by a link")]
    AttachLink {
        /// Name of the program or map.
        program: &'static str,
        /// The device, in words.
        device: String,
        /// The cause.
        source: io::Error,
    },
    /// A map could not be written.
    #[error("write map {map}")]
    WriteMap {
        /// Name of the program or map.
        map: &'static str,
        /// The cause.
        source: MapError,
    },
    /// A map could not be read.
    #[error("read map {map}")]
    ReadMap {
        /// Name of the program or map.
        map: &'static str,
        /// The cause.
        source: MapError,
    },
    /// The policy words could not be mapped into memory.
    #[error("map na_policy into memory")]
    MapPolicyWords(#[source] io::Error),
    /// The kernel cannot wait for the programs to finish (`membarrier`).
    #[error("wait for packets that are being judged")]
    WaitForReaders(#[source] io::Error),
    /// The number of CPUs could not be read.
    #[error("read {path}")]
    CountCpus {
        /// The file.
        path: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The operation needs more entries than a map has free. Nothing was written.
    #[error("map {map} has room for {free} more entries, {needed} are needed")]
    OverCapacity {
        /// Name of the program or map.
        map: &'static str,
        /// Entries that the operation adds.
        needed: usize,
        /// Entries that are free.
        free: usize,
    },
    /// An attachment id out of range.
    #[error("attachment id {id} is not between 1 and {max}")]
    InvalidAttachment {
        /// The id.
        id: u32,
        /// The highest valid id.
        max: u32,
    },
    /// The attachment id has no record.
    #[error("attachment {0} has no record to bind a device to")]
    UnknownAttachment(u32),
    /// Policy id 0 is reserved for "not isolated".
    #[error("policy id 0 means \"not isolated\" and cannot be installed")]
    PolicyZero,
    /// The policy id is already in use: ids are never reused.
    #[error("policy {0} is already installed")]
    PolicyExists(u32),
    /// All policy ids up to the highest were handed out.
    #[error("policy ids are used up: detach all pods and remove the pins with `netattachctl uninstall`")]
    PolicyIdsUsedUp,
}

impl BpfError {
    /// Whether a program could not be attached because its device is gone.
    pub(crate) fn is_device_gone(&self) -> bool {
        matches!(self, Self::AttachLink { source, .. } if source.raw_os_error() == Some(libc::ENODEV))
    }
}

/// Why the kernel refused a program or a type. The verifier's log has tens or thousands of lines, of which
/// two are shown; all of them are logged at level debug.
#[derive(Debug)]
pub struct Refusal(Box<dyn Error + Send + Sync>);

impl Refusal {
    /// Logs the complete text.
    pub(super) fn of(what: &str, error: impl Error + Send + Sync + 'static) -> Self {
        let words = words_of(&error);
        if words.lines().count() > 1 {
            tracing::debug!(what, words, "refused by the kernel");
        }
        Self(Box::new(error))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&in_short(&words_of(&*self.0)))
    }
}

// The text already contains the source.
impl Error for Refusal {}

/// The text of the whole chain, without a last cause whose words are already in an outer error: it would
/// otherwise be the line after a verifier's log.
fn words_of(error: &(dyn Error + 'static)) -> String {
    let words = Chain(error).to_string();
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    let last = last.to_string();
    match words.strip_suffix(&format!(": {last}")) {
        Some(rest) if rest.contains(&last) => {
            rest.trim_end().trim_end_matches("Verifier output:").trim_end_matches([' ', '.']).to_owned()
        }
        _ => words,
    }
}

/// The first and the last meaningful line: a verifier's log ends with statistics.
fn in_short(words: &str) -> String {
    const STATISTICS: [&str; 4] = ["processed ", "verification time ", "stack depth ", "max_states"];
    let is_telling =
        |line: &&str| !line.is_empty() && !STATISTICS.iter().any(|beginning| line.starts_with(beginning));
    let lines: Vec<&str> = words.lines().map(str::trim).filter(is_telling).collect();
    match lines.as_slice() {
        [first, between @ .., last] if !between.is_empty() => {
            format!("{first} ... {last} (NETATTACH_LOG=debug logs all {} lines)", lines.len())
        }
        few => few.join(" "),
    }
}

/// The properties of a map that are compared before it is adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapProperty {
    /// `enum bpf_map_type`.
    Type,
    /// Bytes of a key.
    KeySize,
    /// Bytes of a value.
    ValueSize,
    /// Capacity.
    MaxEntries,
    /// `BPF_F_*` of creation.
    Flags,
}

impl fmt::Display for MapProperty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Type => "type",
            Self::KeySize => "key size",
            Self::ValueSize => "value size",
            Self::MaxEntries => "capacity",
            Self::Flags => "flags",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the syscall returned {source}. Verifier output: {log}")]
    struct Refused {
        log: &'static str,
        source: io::Error,
    }

    #[test]
    fn a_refusal_is_one_line_however_much_the_verifier_says() {
        let message = |log| {
            let source = io::Error::from_raw_os_error(libc::EACCES);
            let source = Refusal::of("na_from_pod", Refused { log, source });
            Chain(&BpfError::LoadProgram { program: "na_from_pod", source }).to_string()
        };
        let beginning = "load program na_from_pod: the syscall returned Permission denied (os error 13)";
        let log = "0: R1=ctx() R10=fp0\n0: (bf) r6 = r1\n; line of source\n1: (61) r1 = *(u32 *)(r6 +0)\n\
                   pointer arithmetic on ctx prohibited\nverification time 12 usec\nstack depth 0\n\
                   processed 2 insns (limit 1000000) max_states_per_insn 0\n\n";
        assert_eq!(
            message(log),
            format!(
                "{beginning}. Verifier output: 0: R1=ctx() R10=fp0 ... pointer arithmetic on ctx prohibited \
                 (NETATTACH_LOG=debug logs all 5 lines)"
            )
        );
        assert_eq!(message("a\nb\nprocessed 1 insns\n"), format!("{beginning}. Verifier output: a b"));
        assert_eq!(message(""), beginning);
    }
}
