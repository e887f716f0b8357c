//! The agent's end of the socket.
//!
//! One request per connection, a bounded number of connections whose request has not arrived, and a deadline for
//! everything a client must do: a client that is slow, or sends something other than a request, delays only itself. The
//! handler decides how many requests of each kind are served at a time: connections are accepted regardless of the
//! requests being served.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinSet};
use tokio_util::codec::Decoder;

use super::frame::{self, FrameError, Frames};
use super::message::{Hello, PROTOCOL, Request, Response};
use crate::durable;
use crate::error_chain::Chain;
use crate::ticks::ticks;

/// Connections that may wait to be accepted: a node that boots starts all its pods at once.
const BACKLOG: i32 = 1024;

/// How often the existence of the socket's file is checked.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Delay before the next attempt after accept(2) failed, usually for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Serves one request. Runs to its end even if the client has gone: a started request is completed. The answer is what it
    /// returns, unless it has given one to `reply` before.
    fn handle(&self, request: Request, reply: &Arc<Reply>) -> impl Future<Output = Option<Response>> + Send;
}

/// The way back to a client. Whoever has the answer sends it from its own thread: the client is woken by it, and not by another
/// thread of the agent that has to be woken first.
#[derive(Debug)]
pub struct Reply {
    stream: UnixStream,
    /// What of the answer has not been sent, once there is one.
    rest: Mutex<Option<Vec<u8>>>,
}

impl Reply {
    fn to(stream: UnixStream) -> Arc<Self> {
        Arc::new(Self { stream, rest: Mutex::default() })
    }

    fn rest(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        // A poisoned lock is usable: every change is one assignment.
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the answer without waiting; what the socket does not take is sent when the handler has ended. An answer after the
    /// first is dropped.
    pub fn send(&self, answer: &Response) {
        let mut rest = self.rest();
        if rest.is_none()
            && let Ok(mut bytes) = encoded(answer)
        {
            // The error comes again with the rest, where it is reported.
            let sent = self.stream.try_write(&bytes).unwrap_or_default();
            *rest = Some(bytes.split_off(sent));
        }
    }

    /// Sends what has not been sent: of `answer`, if none was given before.
    async fn complete(&self, answer: Option<Response>, patience: Duration) -> Result<(), ConnectionError> {
        let rest = self.rest().take();
        let bytes = match (rest, answer) {
            (Some(rest), _) => rest,
            (None, Some(answer)) => encoded(&answer)?,
            // Said like a panic: the client's connection is closed.
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

/// Limits for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections whose request has not arrived; further ones wait in the kernel's queue.
    pub unread: usize,
    /// Until the whole request has arrived.
    pub request: Duration,
    /// Until the client has taken the answer.
    pub answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { unread: 256, request: Duration::from_secs(5), answer: Duration::from_secs(5) }
    }
}

/// A listening socket; its file is removed when this is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
    _lock: OwnedFd,
}

/// The right to serve a socket: a lock on `PATH.lock`, which outlives sockets, as its holder may remove the socket of its
/// predecessor.
#[derive(Debug)]
pub struct SocketLock {
    socket: PathBuf,
    file: OwnedFd,
}

/// The socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The directory of the socket cannot be created.
    #[error("create the directory of socket {socket}{}", durable::remedy(source))]
    Directory {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another agent serves the socket.
    #[error("socket {socket} is served by another process; find it with: fuser {lock}")]
    Served {
        /// The socket.
        socket: PathBuf,
        /// The lock file it holds.
        lock: PathBuf,
    },
    /// The lock file cannot be locked.
    #[error("lock {lock}{}", durable::remedy(source))]
    Lock {
        /// The file.
        lock: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("listen on {socket}{}", durable::remedy(source))]
    Listen {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Listener {
    /// Listens on a unix stream socket that only its owner may connect to (mode 0600), replacing one left by a previous
    /// agent. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError::Listen`].
    pub fn bind(lock: SocketLock) -> Result<Self, ListenError> {
        let SocketLock { socket: path, file: lock } = lock;
        match listen(&path) {
            Ok((socket, file)) => Ok(Self { socket, path, file, _lock: lock }),
            Err(source) => Err(ListenError::Listen { socket: path, source }),
        }
    }

    /// Listens anew if another process has removed or replaced the file, since no client would find this socket.
    /// Returns whether it did.
    fn mend(&mut self) -> io::Result<bool> {
        if file_at(&self.path).is_ok_and(|file| file == self.file) {
            return Ok(false);
        }
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        (self.socket, self.file) = listen(&self.path)?;
        Ok(true)
    }
}

impl Listener {
    /// Ends it, and returns who had connected and was not accepted yet: closed, they would not know what became of their
    /// request. Whoever comes later is refused, and knows that.
    fn close(self) -> Vec<UnixStream> {
        // A socket that is shut down takes no more connections, and still gives those that it has (`unix_stream_connect` and
        // `unix_accept` of net/unix/af_unix.c).
        if rustix::net::shutdown(&self.socket, Shutdown::Read).is_err() {
            return Vec::new();
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let waiting = std::iter::from_fn(|| rustix::net::accept_with(&self.socket, flags).ok());
        waiting.filter_map(|stream| UnixStream::from_std(stream.into()).ok()).collect()
    }
}

/// Device and inode of the file at that path.
fn file_at(path: &Path) -> rustix::io::Result<(u64, u64)> {
    rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Still locked. A file that is left is replaced by the next agent.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves until `stop` resolves, then gives the socket back and returns when everybody who had connected is answered.
/// Dropping the future aborts that instead.
pub async fn serve<H: Handler>(
    mut listener: Listener,
    handler: Arc<H>,
    limits: Limits,
    stop: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(limits.unread));
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    let mut look = ticks(LOOK_INTERVAL);
    loop {
        // Dropping an arm loses nothing: a connection is accepted or stays in the kernel's queue.
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = accept(&listener, &places) => accepted,
            _ = look.tick() => {
                match listener.mend() {
                    Ok(false) => {}
                    Ok(true) => tracing::warn!(socket = %listener.path.display(), "socket was removed; created again"),
                    Err(error) => {
                        tracing::error!(socket = %listener.path.display(), %error, "socket was removed; not created again");
                    }
                }
                continue;
            }
        };
        match accepted {
            Ok((stream, place)) => {
                connections.spawn(answer(stream, place, Arc::clone(&handler), limits));
            }
            Err(error) => {
                tracing::warn!("accept on {}: {error}", listener.path.display());
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
        while let Some(ended) = connections.try_join_next() {
            report_panic(ended);
        }
    }
    for stream in listener.close() {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        connections.spawn(answer(stream, place, Arc::clone(&handler), limits));
    }
    while let Some(ended) = connections.join_next().await {
        report_panic(ended);
    }
}

async fn answer<H: Handler>(
    stream: UnixStream,
    place: OwnedSemaphorePermit,
    handler: Arc<H>,
    limits: Limits,
) {
    if let Err(error) = converse(stream, place, &*handler, limits).await {
        tracing::warn!("client: {}", Chain(&error));
    }
}

/// A panic in a request closes that client's connection and affects no other.
fn report_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!("a request was not answered: {error}");
    }
}

async fn accept(
    listener: &Listener,
    places: &Arc<Semaphore>,
) -> io::Result<(UnixStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.socket.accept().await?;
    Ok((stream, place))
}

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
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

async fn converse(
    mut stream: UnixStream,
    unread: OwnedSemaphorePermit,
    handler: &impl Handler,
    limits: Limits,
) -> Result<(), ConnectionError> {
    let received = tokio::time::timeout(limits.request, receive(&mut stream)).await;
    let received = received.unwrap_or(Err(ConnectionError::SlowRequest(limits.request)));
    drop(unread);
    let payload = match received {
        Ok(None) => return Ok(()),
        Ok(Some(payload)) => payload,
        Err(error) => {
            // The greeting informs a client with another protocol.
            send(&stream, &greeting()?, limits.answer).await?;
            return Err(error);
        }
    };
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

fn greeting() -> Result<Vec<u8>, ConnectionError> {
    let mut bytes = Vec::new();
    frame::append(&mut bytes, &Hello::ours()).map_err(ConnectionError::Send)?;
    Ok(bytes)
}

/// The payload of the request, if the greeting before it has our protocol. `None` from a client that only checked
/// whether the agent listens.
async fn receive(stream: &mut UnixStream) -> Result<Option<Bytes>, ConnectionError> {
    let mut buffer = BytesMut::new();
    let hello = match next_frame(stream, &mut buffer).await {
        Err(FrameError::Closed) => return Ok(None),
        payload => payload.map_err(ConnectionError::Receive)?,
    };
    let Hello { protocol, version } = serde_json::from_slice(&hello).map_err(ConnectionError::Greeting)?;
    if protocol != PROTOCOL {
        return Err(ConnectionError::Protocol { version, protocol });
    }
    next_frame(stream, &mut buffer).await.map(Some).map_err(ConnectionError::Receive)
}

async fn next_frame(stream: &mut UnixStream, buffer: &mut BytesMut) -> Result<Bytes, FrameError> {
    loop {
        if let Some(payload) = Frames.decode(buffer)? {
            return Ok(payload);
        }
        buffer.reserve(4096);
        if stream.read_buf(buffer).await? == 0 {
            return Frames.decode_eof(buffer)?.ok_or(FrameError::Closed);
        }
    }
}

async fn send(stream: &UnixStream, mut bytes: &[u8], patience: Duration) -> Result<(), ConnectionError> {
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
        Ok(sent) => sent.map_err(|error| ConnectionError::Send(error.into())),
        Err(_) => Err(ConnectionError::SlowAnswer(patience)),
    }
}

/// How long the lock of a dead agent may still be held: a plugin that it had just forked shares its open files until
/// the plugin is executed, and a kill reaches the agent alone.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// How often the lock is retried: at first, and after a while.
const LOCK_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_LOCK_INTERVAL: Duration = Duration::from_millis(50);

impl SocketLock {
    /// Acquires it. Blocks for up to `patience` while another process holds it.
    ///
    /// # Errors
    /// [`ListenError::Served`] if another process still holds it then.
    pub fn take(socket: &Path, patience: Duration) -> Result<Self, ListenError> {
        if let Some(directory) = socket.parent() {
            std::fs::create_dir_all(directory)
                .map_err(|source| ListenError::Directory { socket: socket.to_owned(), source })?;
        }
        let lock = super::lock_path(socket);
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = match rustix::fs::open(&lock, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => file,
            Err(error) => return Err(ListenError::Lock { lock, source: error.into() }),
        };
        let began = Instant::now();
        let mut pause = LOCK_INTERVAL;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { socket: socket.to_owned(), file }),
                Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < patience => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_LOCK_INTERVAL);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(ListenError::Served { socket: socket.to_owned(), lock });
                }
                Err(error) => return Err(ListenError::Lock { lock, source: error.into() }),
            }
        }
    }
}

fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let address = SocketAddrUnix::new(path)?;
    match rustix::fs::unlink(path) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file that bind(2) creates takes its mode from the socket: it never has a wider mode.
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok((UnixListener::from_std(fd.into())?, file_at(path)?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream as BlockingStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::JoinHandle;

    use tokio::sync::{Notify, oneshot};

    use super::*;
    use crate::rpc::client::{ClientError, Patience, call};
    use crate::rpc::message::{CniCall, CniReply};
    use crate::rpc::{pending, shim};

    const PATIENCE: Patience = Patience { connect: Duration::from_secs(10), answer: Duration::from_secs(10) };

    /// Answers CNI calls with their own stdin and holds every other request until released.
    #[derive(Default)]
    struct Echo {
        held: AtomicUsize,
        go: Notify,
    }

    impl Handler for Echo {
        async fn handle(&self, request: Request, reply: &Arc<Reply>) -> Option<Response> {
            match request {
                // From where it is found, as an ADD is.
                Request::Cni(call) => {
                    reply.send(&Response::Cni(CniReply { stdout: call.stdin, exit: 3 }));
                    None
                }
                _ => {
                    let go = self.go.notified();
                    self.held.fetch_add(1, Ordering::SeqCst);
                    go.await;
                    Some(Response::Stats(Vec::new()))
                }
            }
        }
    }

    /// An agent on a thread of its own; stops when dropped.
    struct Agent {
        dir: tempfile::TempDir,
        echo: Arc<Echo>,
        stop: Option<oneshot::Sender<()>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Agent {
        fn start(limits: Limits) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let echo = Arc::new(Echo::default());
            let (stop, stopped) = oneshot::channel();
            let (path, handler) = (dir.path().join("run/agent.sock"), echo.clone());
            let thread = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let lock = SocketLock::take(&path, LOCK_PATIENCE).unwrap();
                    let listener = Listener::bind(lock).unwrap();
                    serve(listener, handler, limits, async { drop(stopped.await) }).await;
                });
            });
            Self { dir, echo, stop: Some(stop), thread: Some(thread) }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("run/agent.sock")
        }

        fn call(&self, request: &Request) -> Result<Response, ClientError> {
            call(&self.socket(), request, PATIENCE)
        }

        /// A connection without the protocol.
        fn connect(&self) -> BlockingStream {
            self.call(&echo("warm")).unwrap();
            let stream = BlockingStream::connect(self.socket()).unwrap();
            stream.set_read_timeout(Some(PATIENCE.answer)).unwrap();
            stream
        }

        fn wait_until_held(&self, count: usize) {
            while self.echo.held.load(Ordering::SeqCst) < count {
                std::thread::yield_now();
            }
        }

        fn stop(&mut self) {
            drop(self.stop.take());
            if let Some(thread) = self.thread.take() {
                thread.join().unwrap();
            }
        }
    }

    impl Drop for Agent {
        fn drop(&mut self) {
            self.echo.go.notify_waiters();
            self.stop();
        }
    }

    fn echo(stdin: &str) -> Request {
        Request::Cni(CniCall { env: [].into(), stdin: stdin.to_owned() })
    }

    fn echoed(stdin: &str) -> Response {
        Response::Cni(CniReply { stdout: stdin.to_owned(), exit: 3 })
    }

    /// Everything that the agent sends until it closes the connection.
    fn rest(mut stream: BlockingStream) -> Vec<String> {
        let mut bytes = Vec::new();
        match stream.read_to_end(&mut bytes) {
            // The agent closed without reading everything that was sent.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            result => drop(result.unwrap()),
        }
        let mut source = bytes.as_slice();
        std::iter::from_fn(|| frame::read(&mut source).ok())
            .map(|payload| String::from_utf8(payload).unwrap())
            .collect()
    }

    fn greeting() -> String {
        serde_json::to_string(&Hello::ours()).unwrap()
    }

    #[test]
    fn requests_large_and_small_are_answered_on_a_socket_for_its_owner_alone() {
        let agent = Agent::start(Limits::default());
        for stdin in ["", "{}", &"é\"".repeat(1_000_000)] {
            assert_eq!(agent.call(&echo(stdin)).unwrap(), echoed(stdin));
        }
        let mode = std::fs::metadata(agent.socket()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_second_agent_is_refused_and_a_socket_left_behind_replaced() {
        let mut agent = Agent::start(Limits::default());
        agent.call(&echo("")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _context = runtime.enter();
        let socket = agent.socket();
        let take = || SocketLock::take(&socket, LOCK_PATIENCE);
        assert_eq!(
            take().unwrap_err().to_string(),
            format!(
                "socket {0} is served by another process; find it with: fuser {0}.lock",
                socket.display()
            )
        );
        agent.stop();
        assert!(!socket.exists());
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        Listener::bind(take().unwrap()).unwrap();
    }

    #[test]
    fn who_has_connected_is_answered_by_an_agent_that_ends_and_who_comes_later_refused() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let context = runtime.enter();
        let listener = Listener::bind(SocketLock::take(&socket, LOCK_PATIENCE).unwrap()).unwrap();
        drop(context);
        let clients: Vec<_> = (0..20)
            .map(|_| {
                let mut stream = BlockingStream::connect(&socket).unwrap();
                let mut frames = Vec::new();
                frame::append(&mut frames, &Hello::ours()).unwrap();
                frame::append(&mut frames, &echo("{}")).unwrap();
                stream.write_all(&frames).unwrap();
                stream
            })
            .collect();
        let stopped = std::future::ready(());
        runtime.block_on(serve(listener, Arc::new(Echo::default()), Limits::default(), stopped));
        for mut client in clients {
            let _: Hello = serde_json::from_slice(&frame::read(&mut client).unwrap()).unwrap();
            let answer: Response = serde_json::from_slice(&frame::read(&mut client).unwrap()).unwrap();
            assert_eq!(answer, echoed("{}"));
        }
        assert!(BlockingStream::connect(&socket).is_err());
    }

    #[test]
    fn the_lock_of_an_agent_that_was_killed_may_outlive_it_for_a_moment() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("netattach.sock");
        let held = SocketLock::take(&socket, Duration::ZERO).unwrap();
        let child = std::thread::spawn(move || {
            std::thread::sleep(LOCK_INTERVAL * 10);
            drop(held);
        });
        drop(SocketLock::take(&socket, LOCK_PATIENCE).unwrap());
        child.join().unwrap();
    }

    #[test]
    fn garbage_and_slowness_end_a_connection_and_nothing_else() {
        let agent = Agent::start(Limits { request: Duration::from_millis(50), ..Limits::default() });
        let mut hello = Vec::new();
        frame::append(&mut hello, &Hello::ours()).unwrap();
        let unknown = [&hello[..], &[0, 0, 0, 7], br#""fetch""#].concat();
        let table: [(&[u8], &[&str]); 5] = [
            (b"", &[]),
            (b"GET / HTTP/1.1\r\n\r\n", &[]),
            (&[0, 0, 0, 2, b'{', b'}'], &[]),
            (&hello, &[]),
            (
                &unknown,
                &[
                    "{\"refused\":\"the request cannot be understood: unknown variant `fetch`, expected one of `cni`, `attach`, \
                     `detach`, `attachments`, `stats`, `policy`, `policy_dump`, `explain`, `status`, `flows`, \
                     `select`, `pools`, `networks` at line 1 column 7\"}",
                ],
            ),
        ];
        for (sent, answers) in table {
            let mut stream = agent.connect();
            stream.write_all(sent).unwrap();
            let expected: Vec<_> =
                std::iter::once(greeting()).chain(answers.iter().map(|a| (*a).to_owned())).collect();
            assert_eq!(rest(stream), expected, "{:?}", String::from_utf8_lossy(sent));
        }
        assert_eq!(agent.call(&echo("still here")).unwrap(), echoed("still here"));
    }

    #[test]
    fn a_client_of_another_protocol_gets_the_greeting_only() {
        let agent = Agent::start(Limits::default());
        let mut stream = agent.connect();
        let mut sent = Vec::new();
        frame::append(&mut sent, &Hello { protocol: 2, version: "9.0.0".to_owned() }).unwrap();
        frame::append(&mut sent, &echo("not for you")).unwrap();
        stream.write_all(&sent).unwrap();
        assert_eq!(rest(stream), [greeting()]);
    }

    #[test]
    fn connections_that_send_nothing_wait_for_a_place_and_requests_that_are_served_take_none() {
        let agent = Agent::start(Limits { unread: 1, ..Limits::default() });
        std::thread::scope(|scope| {
            let held: Vec<_> =
                (0..20).map(|_| scope.spawn(|| agent.call(&Request::Stats).unwrap())).collect();
            agent.wait_until_held(20);
            assert_eq!(agent.call(&echo("beside")).unwrap(), echoed("beside"));
            let silent = agent.connect();
            let brief = Patience { connect: PATIENCE.connect, answer: Duration::from_millis(50) };
            let error = call(&agent.socket(), &echo(""), brief).unwrap_err();
            assert!(matches!(error, ClientError::Slow { .. }), "{error}");
            drop(silent);
            assert_eq!(agent.call(&echo("now")).unwrap(), echoed("now"));
            agent.echo.go.notify_waiters();
            for held in held {
                assert_eq!(held.join().unwrap(), Response::Stats(Vec::new()));
            }
        });
    }

    #[test]
    fn accepted_requests_are_answered_after_the_stop() {
        let mut agent = Agent::start(Limits::default());
        let (socket, echo) = (agent.socket(), agent.echo.clone());
        let held = std::thread::spawn({
            let socket = socket.clone();
            move || call(&socket, &Request::Stats, PATIENCE)
        });
        agent.wait_until_held(1);
        drop(agent.stop.take());
        while socket.exists() {
            std::thread::yield_now();
        }
        echo.go.notify_waiters();
        agent.stop();
        assert_eq!(held.join().unwrap().unwrap(), Response::Stats(Vec::new()));
    }

    #[test]
    fn the_cni_executable_prints_the_reply_and_exits_with_its_code() {
        let agent = Agent::start(Limits::default());
        agent.call(&echo("")).unwrap();
        let config = serde_json::json!({"socket": agent.socket(), "stateDir": agent.dir.path()}).to_string();
        let mut stdout = Vec::new();
        let variables = [("CNI_COMMAND".into(), "DEL".into())];
        let exit = shim::run(variables, config.as_bytes(), &mut stdout, &mut Vec::new());
        assert_eq!((exit, String::from_utf8(stdout).unwrap()), (3, config));
        assert_eq!(pending::list(agent.dir.path()).unwrap().len(), 0);
    }
}
