//! Sends one blocking request to the agent.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{self, FrameError};
use crate::message::{Answer, Hello, PROTOCOL};

/// Timeouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until the agent accepts the connection; connecting is retried for that long.
    pub connect: Duration,
    /// From connection until the answer is complete.
    pub answer: Duration,
}

/// The agent did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket, or the caller may not connect.
    #[error("{}", unconnected(socket, source))]
    Connect {
        /// The agent's socket.
        socket: PathBuf,
        /// The error of the last attempt.
        source: io::Error,
    },
    /// The request is too long for a frame, or has no JSON form.
    #[error("prepare the request")]
    Prepare(#[source] FrameError),
    /// The connection broke; whether the agent carried out the request is unknown.
    #[error("the connection to the agent at {socket} broke")]
    Broken {
        /// The agent's socket.
        socket: PathBuf,
        /// The cause.
        source: FrameError,
    },
    /// The answer did not arrive in time; whether the agent carried out the request is unknown.
    #[error("the agent at {socket} did not answer within {waited:?}")]
    Slow {
        /// The agent's socket.
        socket: PathBuf,
        /// The timeout.
        waited: Duration,
    },
    /// Agent and client have different protocol versions.
    #[error(
        "the agent at {socket} is version {theirs} and speaks protocol {their_protocol}, this is version {ours} with \
         protocol {PROTOCOL}: install both from one release"
    )]
    Protocol {
        /// The agent's socket.
        socket: PathBuf,
        /// The agent's version.
        theirs: String,
        /// The agent's protocol.
        their_protocol: u32,
        /// Version of this software.
        ours: String,
    },
    /// The listening process does not speak this protocol.
    #[error("the listener at {socket} sent something that is not a message of the agent")]
    Garbled {
        /// The agent's socket.
        socket: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// The agent refused the request.
    #[error("the agent at {socket} refused: {reason}")]
    Refused {
        /// The agent's socket.
        socket: PathBuf,
        /// The agent's reason.
        reason: String,
    },
}

fn unconnected(socket: &Path, source: &io::Error) -> String {
    let socket = socket.display();
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("only root may talk to the agent at {socket}: run this as root")
        }
        _ => format!("the agent does not answer at {socket}: is netattachd running, and with this socket?"),
    }
}

impl ClientError {
    /// Whether no process listens on the socket, as far as the caller may see.
    pub fn is_agent_absent(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if is_absence(source))
    }
}

/// Sends one request and returns the answer. A refusal is returned as [`ClientError::Refused`].
///
/// # Errors
/// See [`ClientError`].
pub fn call<A: Answer>(
    socket: &Path,
    request: &impl Serialize,
    patience: Patience,
) -> Result<A, ClientError> {
    let mut frames = Vec::new();
    frame::append(&mut frames, &Hello::ours()).map_err(ClientError::Prepare)?;
    frame::append(&mut frames, request).map_err(ClientError::Prepare)?;

    let stream = connect(socket, Instant::now() + patience.connect)
        .map_err(|source| ClientError::Connect { socket: socket.to_owned(), source })?;
    let connection = Connection { stream, deadline: Instant::now() + patience.answer };
    let mut agent = Agent { connection: BufReader::new(connection), socket, patience };
    let sent = agent.connection.get_mut().write_all(&frames);
    // Reads the greeting first, even if not everything could be sent: an agent with another protocol sends
    // its greeting and closes the connection without reading the rest.
    agent.expect_our_protocol()?;
    sent.map_err(|error| agent.failed(error.into()))?;
    let answer: A = agent.receive()?;
    answer.taken().map_err(|reason| ClientError::Refused { socket: socket.to_owned(), reason })
}

/// The agent's end of the connection. Reads are buffered, as greeting and answer usually arrive together.
struct Agent<'a> {
    connection: BufReader<Connection>,
    socket: &'a Path,
    patience: Patience,
}

/// A connection with one deadline for all operations.
struct Connection {
    stream: UnixStream,
    deadline: Instant,
}

impl Agent<'_> {
    fn expect_our_protocol(&mut self) -> Result<(), ClientError> {
        let hello: Hello = self.receive()?;
        if hello.protocol == PROTOCOL {
            return Ok(());
        }
        Err(ClientError::Protocol {
            socket: self.socket.to_owned(),
            theirs: hello.version,
            their_protocol: hello.protocol,
            ours: Hello::ours().version,
        })
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T, ClientError> {
        let payload = frame::read(&mut self.connection).map_err(|error| self.failed(error))?;
        serde_json::from_slice(&payload)
            .map_err(|source| ClientError::Garbled { socket: self.socket.to_owned(), source })
    }

    fn failed(&self, error: FrameError) -> ClientError {
        let socket = self.socket.to_owned();
        match error {
            FrameError::Connection(error) if is_timeout(&error) => {
                ClientError::Slow { socket, waited: self.patience.answer }
            }
            source => ClientError::Broken { socket, source },
        }
    }
}

impl Connection {
    fn remaining(&self) -> io::Result<Duration> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(remaining) }
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.remaining()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.remaining()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Retries until `deadline` while no process listens: an agent that restarts is absent for a moment.
fn connect(socket: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let mut pause = Duration::from_millis(5);
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        match connect_once(socket, remaining) {
            Err(error) if is_absence(&error) && !remaining.is_zero() => {
                std::thread::sleep(pause.min(remaining));
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

fn connect_once(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(socket)?;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // With a full accept queue connect(2) waits as long as the send timeout (unix(7)).
    let patience = patience.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(patience))?;
    rustix::net::connect(&fd, &address)?;
    Ok(UnixStream::from(fd))
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
