//! What is said on a connection once it has been accepted.

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

/// The way back to a client. Whoever has the answer sends it from its own thread: the client is woken by it, and not by another
/// thread of the agent that has to be woken first.
#[derive(Debug)]
pub struct Reply {
    stream: UnixStream,
    /// What of the answer has not been sent, once there is one.
    rest: Mutex<Option<Vec<u8>>>,
}

impl Reply {
    /// `stream` does not block.
    fn to(stream: UnixStream) -> Arc<Self> {
        Arc::new(Self { stream, rest: Mutex::default() })
    }

    fn rest(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        locked(&self.rest)
    }

    /// Whether the client has hung up, so that nobody reads the answer. One that only sends nothing more has not.
    pub fn is_abandoned(&self) -> bool {
        // The kernel tells of a hang-up whatever it is asked for.
        let mut polled = [PollFd::new(&self.stream, PollFlags::empty())];
        let asked = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        asked.is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    /// Sends the answer without waiting; what the socket does not take is sent when the handler has ended. An answer after the
    /// first is dropped.
    pub fn send(&self, answer: &Response) {
        let mut rest = self.rest();
        if rest.is_none()
            && let Ok(mut bytes) = encoded(answer)
        {
            // The error comes again with the rest, where it is reported.
            let sent = rustix::net::send(&self.stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            let sent = sent.unwrap_or_default();
            *rest = Some(bytes.split_off(sent));
        }
    }

    /// Sends what has not been sent: of `answer`, if none was given before.
    async fn complete(&self, answer: Option<Response>, patience: Duration) -> Result<(), ConnectionError> {
        let rest = self.rest().take();
        let bytes = match (rest, answer) {
            (Some(rest), _) => rest,
            (None, Some(answer)) => encoded(&answer)?,
            // Its connection is closed.
            (None, None) => return Err(ConnectionError::Unanswered),
        };
        send(&self.stream, &bytes, patience).await
    }
}

/// An answer behind our greeting. In one piece: a client that waits for its answer is woken once.
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

/// Serves one request: all of it has arrived.
///
/// # Errors
/// There is no answer, or the client does not take it.
pub(super) async fn serve<H: Handler>(
    stream: UnixStream,
    payload: Bytes,
    handler: Arc<H>,
    limits: Limits,
) -> Result<(), ConnectionError> {
    let reply = Reply::to(stream);
    let request = serde_json::from_slice(&payload);
    // It may be large, and serving may take long.
    drop(payload);
    let answer = match request {
        Ok(request) => handler.handle(request, &reply).await,
        Err(error) => Some(Response::Refused(format!("the request cannot be understood: {error}"))),
    };
    reply.complete(answer, limits.answer).await
}

/// Waits for the rest of a request, with a place for those who wait, and serves it.
///
/// # Errors
/// As [`serve`]; or there is no request of our protocol, or not in time.
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

/// Ends a connection on which no request came. The greeting informs a client with another protocol.
///
/// # Errors
/// The reason, or that the client does not take the greeting.
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

/// Sends all of it. The runtime is asked to wait only for what the socket does not take.
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
