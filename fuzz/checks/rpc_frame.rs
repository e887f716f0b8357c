//! The bytes on the agent's socket.
//!
//! A panic, a hang or memory beyond what was sent is a finding; so is a stream that is split differently when it
//! arrives in pieces, or a request that changes on its way.

use bytes::BytesMut;
use netattach::rpc::frame;
use netattach::rpc::frames::Frames;
use netattach::rpc::message::{Hello, Request, Response};
use tokio_util::codec::Decoder;

// The first byte says how long the pieces are.
pub(crate) fn check(data: &[u8]) {
    let Some((piece, stream)) = data.split_first() else { return };
    let at_once = blocking(stream);
    assert_eq!(at_once, piecewise(stream, usize::from(*piece) + 1));
    for payload in at_once {
        let _ = serde_json::from_slice::<Hello>(&payload);
        let _ = serde_json::from_slice::<Response>(&payload);
        if let Ok(request) = serde_json::from_slice::<Request>(&payload) {
            there_and_back(&request);
        }
    }
}

fn blocking(mut stream: &[u8]) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| frame::read(&mut stream).ok()).collect()
}

fn piecewise(stream: &[u8], length: usize) -> Vec<Vec<u8>> {
    let (mut decoder, mut arrived, mut payloads) = (Frames, BytesMut::new(), Vec::new());
    for piece in stream.chunks(length) {
        arrived.extend_from_slice(piece);
        loop {
            match decoder.decode(&mut arrived) {
                Ok(Some(payload)) => payloads.push(payload.to_vec()),
                Ok(None) => break,
                Err(_) => return payloads,
            }
        }
    }
    payloads
}

fn there_and_back(request: &Request) {
    let mut sent = Vec::new();
    frame::append(&mut sent, request).expect("a request that fitted into a frame fits into a frame");
    let received = frame::read(&mut sent.as_slice()).expect("what was framed can be read");
    assert_eq!(&serde_json::from_slice::<Request>(&received).expect("what was written can be read"), request);
}
