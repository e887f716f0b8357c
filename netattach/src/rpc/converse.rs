//! Serves an accepted connection: reads the request, runs the handler and sends the answer.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SendFlags;
use tokio::sync::OwnedSemaphorePermit;

use super::frame::{self, FrameError};
use super::incoming::Incoming;
use super::message::{Hello, PROTOCOL, Response};
use super::server::{Handler, Limits};
use crate::sync::{Mutex, MutexGuard, locked};

/// The client's end of a request, for sending the answer. The thread that has the answer sends it itself,
/// which wakes the client without waking another thread of the agent first.
#[derive(Debug)]
pub struct Reply {
    stream: UnixStream,
    /// The bytes of the answer that have not been sent; `None` until there is an answer.
    rest: Mutex<Option<Vec<u8>>>,
}

impl Reply {
    /// `stream` is non-blocking.
    fn to(stream: UnixStream) -> Arc<Self> {
        Arc::new(Self { stream, rest: Mutex::default() })
    }

    fn rest(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        locked(&self.rest)
    }

    /// Whether the client has closed the connection, so that the answer would not be read. A client that
    /// has only shut down its sending side still reads.
    pub fn is_abandoned(&self) -> bool {
        // poll(2) reports `POLLHUP` even if no events are requested.
        let mut polled = [PollFd::new(&self.stream, PollFlags::empty())];
        let asked = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        asked.is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    /// Sends the answer without blocking; bytes that the socket does not take are sent after the handler
    /// has ended. Only the first answer is sent, later ones are dropped.
    pub fn send(&self, answer: &Response) {
        let mut rest = self.rest();
        if rest.is_none()
            && let Ok(mut bytes) = encoded(answer)
        {
            // An error occurs again when the rest is sent, and is reported then.
            let sent = rustix::net::send(&self.stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            let sent = sent.unwrap_or_default();
            *rest = Some(bytes.split_off(sent));
        }
    }

    /// Sends the remaining bytes of an answer given before, or else `answer`.
    async fn complete(&self, answer: Option<Response>, patience: Duration) -> Result<(), ConnectionError> {
        let rest = self.rest().take();
        let bytes = match (rest, answer) {
            (Some(rest), _) => rest,
            (None, Some(answer)) => encoded(&answer)?,
            // The caller closes the connection.
            (None, None) => return Err(ConnectionError::Unanswered),
        };
        send(&self.stream, &bytes, patience).await
    }
}

/// Encodes greeting and answer in one buffer, so that one write wakes the client once.
fn encoded(answer: &Response) -> Result<Vec<u8>, ConnectionError> {
    let mut bytes = greeting()?;
    match frame::append(&mut bytes, answer) {
        Err(error @ FrameError::TooLong { .. }) => {
            bytes = greeting()?;
            let refused = Response::Refused(format!("the answer does not fit: {error}"));
            frame::append(&mut bytes, &refused).map_err(ConnectionError::Send)?;
        }
        appended => appended.map_err(ConnectionError::Send)?,
    }
    Ok(bytes)
}

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("read the request")]
    Receive(#[source] FrameError),
    #[error("no request within {0:?}")]
    SlowRequest(Duration),
    #[error("parse the greeting")]
    Greeting(#[source] serde_json::Error),
    #[error("version {version} speaks protocol {protocol}, not {PROTOCOL}")]
    Protocol { version: String, protocol: u32 },
    #[error("send the answer")]
    Send(#[source] FrameError),
    #[error("the handler gave no answer")]
    Unanswered,
    #[error("answer not read within {0:?}")]
    SlowAnswer(Duration),
}

/// Serves a request that has arrived completely.
///
/// # Errors
/// The handler gives no answer, or the client does not read it in time.
pub(super) async fn serve<H: Handler>(
    stream: UnixStream,
    payload: Bytes,
    handler: Arc<H>,
    limits: Limits,
) -> Result<(), ConnectionError> {
    let reply = Reply::to(stream);
    let request = serde_json::from_slice(&payload);
    // Freed now: the payload may be large, and the handler may run long.
    drop(payload);
    let answer = match request {
        Ok(request) => handler.handle(request, &reply).await,
        Err(error) => Some(Response::Refused(format!("the request cannot be understood: {error}"))),
    };
    reply.complete(answer, limits.answer).await
}

/// Waits for the rest of a request, holding a slot for connections whose request has not arrived, then
/// serves it.
///
/// # Errors
/// As [`serve`]; or the client sends no request of our protocol, or not in time.
pub(super) async fn receive<H: Handler>(
    stream: UnixStream,
    incoming: Incoming,
    place: OwnedSemaphorePermit,
    handler: Arc<H>,
    limits: Limits,
) -> Result<(), ConnectionError> {
    let mut stream = in_runtime(stream)?;
    let received = tokio::time::timeout(limits.request, incoming.read(&mut stream)).await;
    let stream = stream.into_std().map_err(|error| ConnectionError::Receive(error.into()))?;
    drop(place);
    match received.unwrap_or(Err(ConnectionError::SlowRequest(limits.request))) {
        Ok(None) => Ok(()),
        Ok(Some(payload)) => serve(stream, payload, handler, limits).await,
        Err(error) => refuse(stream, error, limits.answer).await,
    }
}

/// Ends a connection without a request. The greeting tells a client with another protocol the agent's
/// version.
///
/// # Errors
/// `why`, or the client does not read the greeting.
pub(super) async fn refuse(
    stream: UnixStream,
    why: ConnectionError,
    patience: Duration,
) -> Result<(), ConnectionError> {
    send(&stream, &greeting()?, patience).await?;
    Err(why)
}

fn in_runtime(stream: UnixStream) -> Result<tokio::net::UnixStream, ConnectionError> {
    tokio::net::UnixStream::from_std(stream).map_err(|error| ConnectionError::Receive(error.into()))
}

fn greeting() -> Result<Vec<u8>, ConnectionError> {
    let mut bytes = Vec::new();
    frame::append(&mut bytes, &Hello::ours()).map_err(ConnectionError::Send)?;
    Ok(bytes)
}

/// Sends all bytes. Waits in the runtime only for bytes that the socket does not take at once.
async fn send(stream: &UnixStream, mut bytes: &[u8], patience: Duration) -> Result<(), ConnectionError> {
    let failed = |error: io::Error| ConnectionError::Send(error.into());
    if bytes.is_empty() {
        return Ok(());
    }
    match rustix::net::send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) if sent == bytes.len() => return Ok(()),
        Ok(sent) => bytes = &bytes[sent..],
        Err(Errno::AGAIN | Errno::INTR) => {}
        Err(error) => return Err(failed(error.into())),
    }
    let stream = stream.try_clone().and_then(tokio::net::UnixStream::from_std).map_err(failed)?;
    let sent = tokio::time::timeout(patience, async {
        while !bytes.is_empty() {
            stream.writable().await?;
            match stream.try_write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    });
    match sent.await {
        Ok(sent) => sent.map_err(failed),
        Err(_) => Err(ConnectionError::SlowAnswer(patience)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn a_client_has_hung_up_when_it_reads_no_more_and_not_when_it_sends_no_more() {
        let (mut client, agent) = UnixStream::pair().unwrap();
        agent.set_nonblocking(true).unwrap();
        let reply = Reply::to(agent);
        assert!(!reply.is_abandoned());
        client.write_all(b"what nobody reads").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert!(!reply.is_abandoned());
        drop(client);
        assert!(reply.is_abandoned());
    }
}
