//! A payload prefixed by its length: four bytes, big-endian, then that many bytes.
//!
//! Memory is allocated as bytes arrive, not by the announced length: a peer must send the bytes that it
//! wants stored.

use std::io::{self, Read};

use serde::Serialize;

/// Longest payload in bytes: twice what the CNI executable accepts on stdin, as JSON escapes lengthen text.
pub const MAX_PAYLOAD: usize = 8 << 20;

/// Length of the length prefix, in bytes.
pub const HEADER: usize = size_of::<u32>();

/// A frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The announced, or intended, length is over [`MAX_PAYLOAD`].
    #[error("a frame of {length} bytes is longer than the {MAX_PAYLOAD} allowed")]
    TooLong {
        /// Length of the payload in bytes.
        length: usize,
    },
    /// The peer closed the connection between frames.
    #[error("the connection was closed")]
    Closed,
    /// The peer closed the connection within a frame.
    #[error("the connection was closed within a frame")]
    Truncated,
    /// The connection failed.
    #[error("the connection failed")]
    Connection(#[from] io::Error),
    /// A message cannot be encoded as JSON.
    #[error("encode a message")]
    Encode(#[source] serde_json::Error),
}

/// Reads one payload, blocking.
///
/// # Errors
/// [`FrameError::Closed`] before the first byte, [`FrameError::Truncated`] after it; [`FrameError::TooLong`]
/// before anything of the payload is read.
pub fn read(source: &mut impl Read) -> Result<Vec<u8>, FrameError> {
    let mut header = Vec::with_capacity(HEADER);
    source.take(HEADER as u64).read_to_end(&mut header)?;
    let length = match header.first_chunk::<HEADER>() {
        Some(header) => announced(*header)?,
        None if header.is_empty() => return Err(FrameError::Closed),
        None => return Err(FrameError::Truncated),
    };
    let mut payload = Vec::new();
    source.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length { Err(FrameError::Truncated) } else { Ok(payload) }
}

/// Appends a message as one frame.
///
/// # Errors
/// [`FrameError::TooLong`] when the JSON is too long; `frames` is then unchanged.
pub fn append(frames: &mut Vec<u8>, message: &impl Serialize) -> Result<(), FrameError> {
    let payload = serde_json::to_vec(message).map_err(FrameError::Encode)?;
    let length = payload.len();
    let header = u32::try_from(length).ok().filter(|_| length <= MAX_PAYLOAD);
    frames.extend_from_slice(&header.ok_or(FrameError::TooLong { length })?.to_be_bytes());
    frames.extend_from_slice(&payload);
    Ok(())
}

/// Decodes the length prefix of a frame, in bytes.
///
/// # Errors
/// [`FrameError::TooLong`].
pub fn announced(header: [u8; HEADER]) -> Result<usize, FrameError> {
    let length = u32::from_be_bytes(header) as usize;
    if length > MAX_PAYLOAD { Err(FrameError::TooLong { length }) } else { Ok(length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_too_long_is_not_begun() {
        let mut frames = vec![1, 2, 3];
        let error = append(&mut frames, &"x".repeat(MAX_PAYLOAD)).unwrap_err();
        assert_eq!(error.to_string(), "a frame of 8388610 bytes is longer than the 8388608 allowed");
        assert_eq!(frames, [1, 2, 3]);
    }
}
