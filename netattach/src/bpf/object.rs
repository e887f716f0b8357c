//! The compiled programs inside this executable.

use sha2::{Digest, Sha256};

use super::BpfError;

static BYTES: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/netattach.bpf.o"));

/// The object and the tag of its content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) bytes: &'static [u8],
    /// First bytes of the SHA-256; never 0.
    pub(super) tag: u64,
}

/// The embedded object.
pub(super) fn embedded() -> Result<Object, BpfError> {
    identify(BYTES)
}

/// What the embedded object is, for people: the tag by which pins are told apart, and its size.
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
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(bytes)[..8]);
    Ok(Object { bytes, tag: u64::from_be_bytes(first).max(1) })
}

#[cfg(test)]
mod tests {
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
}
