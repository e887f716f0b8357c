//! The compiled programs that are embedded in this executable.

use std::borrow::Cow;

use netattach_common::unfinished::CAST;
use sha2::{Digest, Sha256};

use super::BpfError;
use super::packet_fields::{self, Fields};
use super::probe;

static BYTES: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/netattach.bpf.o"));

/// An object and the tag of its content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    bytes: &'static [u8],
    /// First bytes of the SHA-256; never 0.
    tag: u64,
}

/// Values that are written into an object before it is loaded: features of the kernel that programs use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Means {
    /// Value of `NA_COOKIES` in `netattach-ebpf`.
    pub(super) cookies: u8,
    /// Value of `NA_SKB` in `netattach-ebpf`.
    pub(super) fields: Fields,
    /// BTF id of the kernel function that the programs call at [`CAST`]; 0: it is not called.
    pub(super) cast: u32,
}

impl Means {
    /// The features of the running kernel. A feature that cannot be determined counts as missing; another
    /// start may find it.
    pub(super) fn of_kernel() -> Self {
        let fields = packet_fields::of_kernel();
        Self {
            cookies: probe::has_netns_cookie().into(),
            fields: fields.unwrap_or_default(),
            cast: fields.and_then(packet_fields::cast_for).unwrap_or_default(),
        }
    }
}

/// An object in the form in which it is loaded, with these features.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fitted {
    bytes: &'static [u8],
    pub(super) means: Means,
    /// Tag that identifies pins: programs loaded with other features differ, although they have the same
    /// bytes. Never 0.
    pub(super) tag: u64,
}

impl Object {
    /// The object with these features.
    pub(super) fn fitted(self, means: Means) -> Fitted {
        let hash = Sha256::new().chain_update(self.tag.to_be_bytes()).chain_update([means.cookies]);
        let hash = means.fields.iter().fold(hash, |hash, field| hash.chain_update(field.to_be_bytes()));
        let hash = hash.chain_update(means.cast.to_be_bytes());
        Fitted { bytes: self.bytes, means, tag: tag(hash) }
    }
}

impl Fitted {
    /// The bytes of the object, with the id of the kernel function inserted where programs call it.
    pub(super) fn bytes(&self) -> Cow<'static, [u8]> {
        match self.means.cast {
            0 => self.bytes.into(),
            cast => with_function(self.bytes, cast).into(),
        }
    }
}

/// `struct bpf_insn` of a call of the helper with that number (`BPF_JMP | BPF_CALL`), or of the kernel
/// function with that id if the source register says so (`BPF_PSEUDO_KFUNC_CALL`).
fn call(source: u8, number: u32) -> [u8; 8] {
    let [a, b, c, d] = number.to_ne_bytes();
    [0x85, source << 4, 0, 0, a, b, c, d]
}

/// Returns an object whose calls of [`CAST`] are replaced by calls of the kernel function with that id.
/// Instructions are aligned to their length.
fn with_function(object: &[u8], function: u32) -> Vec<u8> {
    let (placeholder, call) = (call(0, CAST.cast_unsigned()), call(2, function));
    let mut fitted = object.to_vec();
    for instruction in fitted.chunks_exact_mut(call.len()).filter(|it| **it == placeholder) {
        instruction.copy_from_slice(&call);
    }
    fitted
}

/// The embedded object.
pub(super) fn embedded() -> Result<Object, BpfError> {
    identify(BYTES)
}

/// Identifies the embedded object in messages: the tag of its content, and its size.
pub fn embedded_object() -> String {
    match embedded() {
        Ok(object) => format!("{:016x}, {} bytes", object.tag, object.bytes.len()),
        Err(error) => error.to_string(),
    }
}

/// Computes the tag of an object.
pub(super) fn identify(bytes: &'static [u8]) -> Result<Object, BpfError> {
    if bytes.is_empty() {
        return Err(BpfError::NoObject);
    }
    Ok(Object { bytes, tag: tag(Sha256::new_with_prefix(bytes)) })
}

fn tag(hash: Sha256) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    u64::from_be_bytes(first).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_stub_is_refused_with_the_command_that_helps() {
        let error = identify(&[]).unwrap_err();
        assert!(matches!(error, BpfError::NoObject));
        assert!(error.to_string().contains("cargo xtask build-ebpf"));
    }

    #[test]
    fn the_tag_follows_the_content() {
        assert_eq!(identify(b"abc").unwrap().tag, 0xba78_16bf_8f01_cfea);
    }

    /// Otherwise programs that an agent loaded with fewer features would stay.
    #[test]
    fn the_tag_of_what_is_loaded_follows_what_is_written_into_it() {
        let tag = |bytes: &'static [u8], cookies, fields, cast| {
            identify(bytes).unwrap().fitted(Means { cookies, fields, cast }).tag
        };
        let blind = [0; 4];
        let tags = [
            tag(b"abc", 0, blind, 0),
            tag(b"abd", 0, blind, 0),
            tag(b"abc", 1, blind, 0),
            tag(b"abc", 0, [1, 2, 3, 4], 0),
            tag(b"abc", 0, [1, 2, 4, 3], 0),
            tag(b"abc", 0, [1, 2, 4, 3], 7),
        ];
        assert_eq!(BTreeSet::from(tags).len(), tags.len(), "{tags:x?}");
        assert_eq!(tag(b"abc", 1, blind, 0), tags[2]);
    }

    #[test]
    fn the_kernels_function_is_called_where_programs_say_so_and_nowhere_else() {
        let [ours, other] = [CAST.cast_unsigned(), 113].map(|number| call(0, number));
        let object = [other, ours, other, ours].concat();
        let expected = [other, call(2, 7), other, call(2, 7)].concat();
        assert_eq!(with_function(&object, 7), expected);
        // A pattern that is not aligned is not an instruction.
        let beside = [&[0][..], &ours, &[0; 7]].concat();
        assert_eq!(with_function(&beside, 7), beside);
        // The embedded object calls the function; otherwise no field would be read in place.
        let calls =
            |bytes: &[u8]| bytes.chunks_exact(8).filter(|it| **it == call(0, CAST.cast_unsigned())).count();
        assert!(BYTES.is_empty() || calls(BYTES) > 0);
        assert_eq!(calls(&with_function(BYTES, 7)), 0);
    }
}
