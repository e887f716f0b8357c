//! Splits a stream of bytes into the payloads of [`frame`](super::frame)s, as they arrive.

use bytes::{Buf, Bytes, BytesMut};
use netattach_shim::frame::{FrameError, HEADER, announced};
use tokio_util::codec::Decoder;

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

#[cfg(test)]
mod tests {
    use netattach_shim::frame::{MAX_PAYLOAD, read};
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
