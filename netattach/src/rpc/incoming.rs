//! Reads a request as it arrives: the greeting, then one frame.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio_util::codec::Decoder;

use super::converse::ConnectionError;
use super::frame::FrameError;
use super::frames::Frames;
use super::message::{Hello, PROTOCOL};

/// How many bytes one read asks for.
const PIECE: usize = 4096;

/// The received part of a request.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    buffer: BytesMut,
    is_greeted: bool,
}

/// How much of a request has arrived.
#[derive(Debug)]
pub(super) enum Arrived {
    /// All of it; the payload.
    Whole(Bytes),
    /// Part of it, or nothing yet.
    Partly,
    /// The client closed the connection without sending anything: it only checked whether the
    /// agent listens.
    Nothing,
}

impl Incoming {
    /// Reads without the async runtime, for at most `patience`.
    ///
    /// # Errors
    /// The connection fails or ends within the request, or the client does not speak our
    /// protocol.
    pub(super) fn read_within(
        &mut self,
        stream: &impl AsFd,
        patience: Duration,
    ) -> Result<Arrived, ConnectionError> {
        let until = Instant::now() + patience;
        loop {
            if let Some(payload) = self.payload()? {
                return Ok(Arrived::Whole(payload));
            }
            let at = self.buffer.len();
            self.buffer.resize(at + PIECE, 0);
            // The socket is non-blocking.
            let received = rustix::io::read(stream, &mut self.buffer[at..]);
            self.buffer.truncate(at + received.unwrap_or(0));
            match received {
                Ok(0) => return self.ended().map(|()| Arrived::Nothing),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !may_be_read(stream.as_fd(), until) => return Ok(Arrived::Partly),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Reads the rest of the request. `None`: the client only checked whether the agent
    /// listens.
    ///
    /// # Errors
    /// As [`Incoming::read_within`].
    pub(super) async fn read(mut self, stream: &mut UnixStream) -> Result<Option<Bytes>, ConnectionError> {
        loop {
            if let Some(payload) = self.payload()? {
                return Ok(Some(payload));
            }
            self.buffer.reserve(PIECE);
            if stream.read_buf(&mut self.buffer).await.map_err(failed)? == 0 {
                return self.ended().map(|()| None);
            }
        }
    }

    /// Returns the payload of the request once it is complete and the greeting before it has
    /// our protocol.
    fn payload(&mut self) -> Result<Option<Bytes>, ConnectionError> {
        if !self.is_greeted {
            let Some(hello) = Frames.decode(&mut self.buffer).map_err(ConnectionError::Receive)? else {
                return Ok(None);
            };
            let Hello { protocol, version } =
                serde_json::from_slice(&hello).map_err(ConnectionError::Greeting)?;
            if protocol != PROTOCOL {
                return Err(ConnectionError::Protocol { version, protocol });
            }
            self.is_greeted = true;
        }
        Frames.decode(&mut self.buffer).map_err(ConnectionError::Receive)
    }

    /// Interprets the end of the stream: fine before the first byte, an error later.
    fn ended(&self) -> Result<(), ConnectionError> {
        match (self.buffer.is_empty(), self.is_greeted) {
            (true, false) => Ok(()),
            (true, true) => Err(ConnectionError::Receive(FrameError::Closed)),
            (false, _) => Err(ConnectionError::Receive(FrameError::Truncated)),
        }
    }
}

fn failed(error: io::Error) -> ConnectionError {
    ConnectionError::Receive(error.into())
}

/// Waits until `until` for bytes or the end of the connection.
fn may_be_read(stream: BorrowedFd<'_>, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // `None` (wait forever) only if the kernel cannot represent the timeout.
        let timeout = rustix::event::Timespec::try_from(left).ok();
        let mut polled = [PollFd::from_borrowed_fd(stream, PollFlags::IN)];
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(ready) => return ready > 0,
            Err(Errno::INTR) => {}
            // The next read reports the reason.
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream as BlockingStream;

    use super::*;
    use crate::rpc::frame;

    const MOMENT: Duration = Duration::from_millis(1);

    /// The greeting, and a request of several pieces behind it.
    fn frames() -> [Vec<u8>; 2] {
        let (mut hello, mut request) = (Vec::new(), Vec::new());
        frame::append(&mut hello, &Hello::ours()).unwrap();
        frame::append(&mut request, &"x".repeat(3 * PIECE)).unwrap();
        [hello, request]
    }

    fn connected() -> (BlockingStream, BlockingStream) {
        let (client, agent) = BlockingStream::pair().unwrap();
        agent.set_nonblocking(true).unwrap();
        (client, agent)
    }

    #[test]
    fn what_comes_late_is_read_on_from_where_the_first_reader_was() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let whole = frames().concat();
        let of_hello = frames()[0].len();
        for split in [0, 1, of_hello - 1, of_hello, of_hello + 2, of_hello + PIECE, whole.len() - 1] {
            let (mut client, agent) = connected();
            client.write_all(&whole[..split]).unwrap();
            let mut incoming = Incoming::default();
            let arrived = incoming.read_within(&agent, MOMENT).unwrap();
            assert!(matches!(arrived, Arrived::Partly), "{split}: {arrived:?}");
            client.write_all(&whole[split..]).unwrap();
            let rest = runtime.block_on(async {
                let mut agent = UnixStream::from_std(agent).unwrap();
                incoming.read(&mut agent).await
            });
            assert_eq!(rest.unwrap().map(|payload| payload.len()), Some(3 * PIECE + 2), "{split}");
        }
    }

    #[test]
    fn an_end_before_the_greeting_is_a_look_and_one_within_the_request_an_error() {
        let read = |sent: &[u8]| {
            let (mut client, agent) = connected();
            client.write_all(sent).unwrap();
            drop(client);
            Incoming::default().read_within(&agent, MOMENT)
        };
        let [hello, request] = frames();
        assert!(matches!(read(&[]), Ok(Arrived::Nothing)));
        assert!(matches!(read(&hello[..1]), Err(ConnectionError::Receive(FrameError::Truncated))));
        assert!(matches!(read(&hello), Err(ConnectionError::Receive(FrameError::Closed))));
        let [some, all] = [PIECE, request.len()].map(|length| [&hello[..], &request[..length]].concat());
        assert!(matches!(read(&some), Err(ConnectionError::Receive(FrameError::Truncated))));
        assert!(matches!(read(&all), Ok(Arrived::Whole(payload)) if payload.len() == 3 * PIECE + 2));
    }
}
