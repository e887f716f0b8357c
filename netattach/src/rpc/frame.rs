//! A payload prefixed by its length: four bytes, big-endian, then that many bytes.
//!
//! Memory is allocated as bytes arrive, never by the announced length: a peer must send the bytes it wants stored.

use std::io::{self, Read};

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;
use tokio_util::codec::Decoder;

/// Longest payload in bytes: twice what the CNI executable accepts on stdin, as JSON escapes lengthen text.
pub const MAX_PAYLOAD: usize = 8 << 20;

const HEADER: usize = size_of::<u32>();

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
    /// A message has no JSON form.
    #[error("encode a message")]
    Encode(#[source] serde_json::Error),
}

/// Splits a stream of bytes into payloads.
#[derive(Debug, Clone, Copy, Default)]
pub struct Frames;

impl Decoder for Frames {
    type Item = Bytes;
    type Error = FrameError;

    fn decode(&mut self, source: &mut BytesMut) -> Result<Option<Bytes>, FrameError> {
        let Some(header) = source.first_chunk::<HEADER>() else { return Ok(None) };
        let length = announced(*header)?;
        if source.len() - HEADER < length {
            return Ok(None);
        }
        source.advance(HEADER);
        Ok(Some(source.split_to(length).freeze()))
    }

    fn decode_eof(&mut self, source: &mut BytesMut) -> Result<Option<Bytes>, FrameError> {
        match self.decode(source)? {
            None if !source.is_empty() => Err(FrameError::Truncated),
            payload => Ok(payload),
        }
    }
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
/// [`FrameError::TooLong`] when its JSON is; `frames` is then as it was.
pub fn append(frames: &mut Vec<u8>, message: &impl Serialize) -> Result<(), FrameError> {
    let payload = serde_json::to_vec(message).map_err(FrameError::Encode)?;
    let length = payload.len();
    let header = u32::try_from(length).ok().filter(|_| length <= MAX_PAYLOAD);
    frames.extend_from_slice(&header.ok_or(FrameError::TooLong { length })?.to_be_bytes());
    frames.extend_from_slice(&payload);
    Ok(())
}

fn announced(header: [u8; HEADER]) -> Result<usize, FrameError> {
    let length = u32::from_be_bytes(header) as usize;
    if length > MAX_PAYLOAD { Err(FrameError::TooLong { length }) } else { Ok(length) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let frame = |payload: &Vec<u8>| [&(payload.len() as u32).to_be_bytes(), payload.as_slice()].concat();
        payloads.iter().flat_map(frame).collect()
    }

    /// Feeds the pieces one by one and returns every payload, then the result at the end of the stream.
    fn decode<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, Result<(), FrameError>) {
        let (mut buffer, mut payloads) = (BytesMut::new(), Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            loop {
                match Frames.decode(&mut buffer) {
                    Ok(Some(payload)) => payloads.push(payload.to_vec()),
                    Ok(None) => break,
                    Err(error) => return (payloads, Err(error)),
                }
            }
        }
        (payloads, Frames.decode_eof(&mut buffer).map(|rest| assert_eq!(rest, None)))
    }

    #[test]
    fn an_announced_length_takes_no_memory() {
        let mut buffer = BytesMut::from(&(MAX_PAYLOAD as u32).to_be_bytes()[..]);
        assert!(matches!(Frames.decode(&mut buffer), Ok(None)));
        assert!(buffer.capacity() < 64, "{}", buffer.capacity());
    }

    #[test]
    fn a_message_that_is_too_long_is_not_begun() {
        let mut frames = vec![1, 2, 3];
        let error = append(&mut frames, &"x".repeat(MAX_PAYLOAD)).unwrap_err();
        assert_eq!(error.to_string(), "a frame of 8388610 bytes is longer than the 8388608 allowed");
        assert_eq!(frames, [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn payloads_survive_any_split_of_the_stream(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
            size in 1usize..20,
        ) {
            let stream = framed(&payloads);
            let (decoded, end) = decode(stream.chunks(size));
            prop_assert!(end.is_ok());
            prop_assert_eq!(&decoded, &payloads);

            let mut source = stream.as_slice();
            for payload in payloads {
                prop_assert_eq!(read(&mut source).unwrap(), payload);
            }
            prop_assert!(matches!(read(&mut source), Err(FrameError::Closed)));
        }

        #[test]
        fn a_stream_cut_within_a_frame_is_truncated(
            payload in prop::collection::vec(any::<u8>(), 1..40),
            cut in any::<prop::sample::Index>(),
        ) {
            let stream = framed(&[payload]);
            let cut = &stream[..1 + cut.index(stream.len() - 1)];
            let (decoded, end) = decode(std::iter::once(cut));
            prop_assert!(decoded.is_empty());
            prop_assert!(matches!(end, Err(FrameError::Truncated)));
            prop_assert!(matches!(read(&mut &*cut), Err(FrameError::Truncated)));
        }

        #[test]
        fn a_length_over_the_limit_is_refused_before_its_payload(length in MAX_PAYLOAD as u32 + 1..) {
            let header = length.to_be_bytes();
            let (_, end) = decode(std::iter::once(&header[..]));
            for result in [end, read(&mut &header[..]).map(drop)] {
                let refused = matches!(result, Err(FrameError::TooLong { length: l }) if l == length as usize);
                prop_assert!(refused);
            }
        }

        #[test]
        fn garbage_neither_panics_nor_is_read_differently_by_the_two_readers(
            stream in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..200),
            size in 1usize..50,
        ) {
            let (decoded, _) = decode(stream.chunks(size));
            let mut source = stream.as_slice();
            let blocking: Vec<_> = std::iter::from_fn(|| read(&mut source).ok()).collect();
            prop_assert_eq!(decoded, blocking);
        }
    }
}
