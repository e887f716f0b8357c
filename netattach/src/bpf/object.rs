//! The compiled programs inside this executable.

use sha2::{Digest, Sha256};

use super::BpfError;
use super::packet_fields::{self, Fields};
use super::probe;

static BYTES: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/netattach.bpf.o"));

/// The object and the tag of its content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    bytes: &'static [u8],
    /// First bytes of the SHA-256; never 0.
    tag: u64,
}

/// What is written into an object before it is loaded: what the kernel lets programs do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Means {
    /// As `NA_COOKIES` in `netattach-ebpf`.
    pub(super) cookies: u8,
    /// As `NA_SKB` there.
    pub(super) fields: Fields,
}

impl Means {
    /// Those of the running kernel. Where it cannot be asked they are none, which another start may find otherwise.
    pub(super) fn of_kernel() -> Self {
        Self {
            cookies: probe::has_netns_cookie().into(),
            fields: packet_fields::of_kernel().unwrap_or_default(),
        }
    }
}

/// An object as it is loaded, with these means.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fitted {
    pub(super) bytes: &'static [u8],
    pub(super) means: Means,
    /// By which pins are told apart: programs that were loaded with other means are others, though of the same bytes. Never 0.
    pub(super) tag: u64,
}

impl Object {
    /// With what is written into it.
    pub(super) fn fitted(self, means: Means) -> Fitted {
        let hash = Sha256::new().chain_update(self.tag.to_be_bytes()).chain_update([means.cookies]);
        let hash = means.fields.iter().fold(hash, |hash, field| hash.chain_update(field.to_be_bytes()));
        Fitted { bytes: self.bytes, means, tag: tag(hash) }
    }
}

/// The embedded object.
pub(super) fn embedded() -> Result<Object, BpfError> {
    identify(BYTES)
}

/// What the embedded object is, for people: the tag of its content, and its size.
pub fn embedded_object() -> String {
    match embedded() {
        Ok(object) => format!("{:016x}, {} bytes", object.tag, object.bytes.len()),
        Err(error) => error.to_string(),
    }
}

/// An object and its tag.
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

    /// Otherwise programs would stay that an agent loaded which found less.
    #[test]
    fn the_tag_of_what_is_loaded_follows_what_is_written_into_it() {
        let tag = |bytes: &'static [u8], cookies, fields| {
            identify(bytes).unwrap().fitted(Means { cookies, fields }).tag
        };
        let blind = [0; 4];
        let tags = [
            tag(b"abc", 0, blind),
            tag(b"abd", 0, blind),
            tag(b"abc", 1, blind),
            tag(b"abc", 0, [1, 2, 3, 4]),
            tag(b"abc", 0, [1, 2, 4, 3]),
        ];
        assert_eq!(BTreeSet::from(tags).len(), tags.len(), "{tags:x?}");
        assert_eq!(tag(b"abc", 1, blind), tags[2]);
    }
}
