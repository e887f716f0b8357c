//! The agent's end of the socket.
//!
//! Each connection carries one request. The number of connections whose request has not arrived is bounded,
//! and each step of a client has a deadline: a client that is slow, or sends something other than a
//! request, delays only itself. The handler decides how many requests of each kind are served at a time;
//! connections are accepted independently of that.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::task::JoinSet;

pub use super::acceptors::ACCEPTORS;
use super::acceptors::Acceptors;
pub use super::converse::Reply;
use super::door::Door;
use super::message::{Request, Response};
use crate::error_chain::Chain;
use crate::ticks::ticks;
use crate::{durable, flock, own_thread};

/// Length of the accept queue: a node that boots starts all its pods at once.
const BACKLOG: i32 = 1024;

/// How often the server checks that the socket's file exists.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Serves one request. Runs to its end even if the client has hung up, as a started request is
    /// completed; a request that still waits need not be started ([`Reply::is_abandoned`]). The answer is
    /// the returned one, unless the handler has already sent one through `reply`.
    fn handle(&self, request: Request, reply: &Arc<Reply>) -> impl Future<Output = Option<Response>> + Send;
}

/// Limits for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections whose request has not arrived; further ones wait in the kernel's queue.
    pub unread: usize,
    /// Until the whole request has arrived.
    pub request: Duration,
    /// Until the client has read the answer.
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
    door: Door,
    file: SocketFile,
}

/// The file of a listening socket. Removed when this is dropped.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
    _lock: OwnedFd,
}

/// The lock that allows this process to serve a socket: on `PATH.lock`, which outlives the socket, so that
/// its holder may remove the socket of its predecessor.
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
    /// Listens on a unix stream socket that only its owner may connect to (mode 0600). Replaces the socket
    /// of a previous agent.
    ///
    /// # Errors
    /// [`ListenError::Listen`].
    pub fn bind(lock: SocketLock) -> Result<Self, ListenError> {
        let SocketLock { socket: path, file: lock } = lock;
        match listen(&path) {
            Ok((door, file)) => Ok(Self { door, file: SocketFile { path, file, _lock: lock } }),
            Err(source) => Err(ListenError::Listen { socket: path, source }),
        }
    }
}

impl SocketFile {
    /// Listens on a new socket if another process has removed or replaced the file, since no client would
    /// find the old one.
    fn mend(&mut self) -> io::Result<Option<Door>> {
        if file_at(&self.path).is_ok_and(|file| file == self.file) {
            return Ok(None);
        }
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let (door, file) = listen(&self.path)?;
        self.file = file;
        Ok(Some(door))
    }
}

/// Returns device and inode of the file at that path.
fn file_at(path: &Path) -> rustix::io::Result<(u64, u64)> {
    rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The lock is still held. If the file cannot be removed, the next agent replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves until `stop` resolves, then closes the socket and returns when all accepted connections are
/// answered. Takes [`ACCEPTORS`] blocking threads of the runtime. Dropping the future aborts the waiting
/// connections instead.
pub async fn serve<H: Handler>(
    listener: Listener,
    handler: Arc<H>,
    limits: Limits,
    stop: impl Future<Output = ()>,
) {
    /// Aborts the connections also when this future is dropped.
    struct Ends<H: Handler>(Arc<Acceptors<H>>);

    impl<H: Handler> Drop for Ends<H> {
        fn drop(&mut self) {
            self.0.abort();
        }
    }

    let Listener { door, mut file } = listener;
    let door = Arc::new(door);
    let acceptors = Acceptors::of(Arc::clone(&door), handler, limits);
    let _ends = Ends(Arc::clone(&acceptors));
    let mut threads = JoinSet::new();
    for _ in 0..ACCEPTORS {
        let (acceptors, door) = (Arc::clone(&acceptors), Arc::clone(&door));
        threads.spawn_blocking(move || acceptors.accept(door));
    }
    // Dropped so that the threads alone hold the listener: its last thread closes the descriptor.
    drop(door);
    let mut stop = std::pin::pin!(stop);
    let mut look = ticks(LOOK_INTERVAL);
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = look.tick() => {}
        }
        acceptors.forget_ended();
        let path = &file.path.clone();
        match file.mend() {
            Ok(None) => {}
            Ok(Some(door)) => {
                acceptors.replace(door);
                tracing::warn!(socket = %path.display(), "socket was removed; created again");
            }
            Err(error) => {
                tracing::error!(
                    socket = %path.display(), error = %Chain(&error),
                    "socket was removed; not created again"
                );
            }
        }
    }
    acceptors.close();
    drop(file);
    while let Some(ended) = threads.join_next().await {
        own_thread::joined(ended);
    }
    acceptors.answered().await;
}

/// How long to wait for the lock of a killed agent: a plugin that it had just forked shares its open files
/// until the plugin is executed, and the kill reaches only the agent.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(1);

impl SocketLock {
    /// Acquires the lock. Blocks for up to `patience` while another process holds it.
    ///
    /// # Errors
    /// [`ListenError::Served`] if another process still holds the lock after `patience`.
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
        match flock::lock(&file, patience) {
            Ok(true) => Ok(Self { socket: socket.to_owned(), file }),
            Ok(false) => Err(ListenError::Served { socket: socket.to_owned(), lock }),
            Err(source) => Err(ListenError::Lock { lock, source }),
        }
    }
}

/// Returns a listening socket, with device and inode of its file.
fn listen(path: &Path) -> io::Result<(Door, (u64, u64))> {
    let address = SocketAddrUnix::new(path)?;
    match rustix::fs::unlink(path) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file that bind(2) creates takes its mode from the socket, so it never has a wider mode.
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok((Door::of(fd)?, file_at(path)?))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream as BlockingStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, Mutex};
    use std::thread::{JoinHandle, ThreadId};
    use std::time::Instant;

    use tokio::sync::{Notify, oneshot};

    use super::*;
    use crate::rpc::client::{ClientError, Patience, call};
    use crate::rpc::frame;
    use crate::rpc::message::{CniCall, CniReply, Hello};
    use crate::rpc::{pending, shim};

    const PATIENCE: Patience = Patience { connect: Duration::from_secs(10), answer: Duration::from_secs(10) };

    /// Answers CNI calls with their own stdin, holds `Pools` on the thread that works on it, and every other request without a
    /// thread, until released.
    #[derive(Default)]
    struct Echo {
        held: Arc<AtomicUsize>,
        go: Notify,
        /// Whether what blocks may go on.
        released: Arc<(Mutex<bool>, Condvar)>,
        /// Who has given answers.
        answered_by: Mutex<HashSet<ThreadId>>,
    }

    impl Echo {
        fn release(&self) {
            let (released, changed) = &*self.released;
            *released.lock().unwrap() = true;
            changed.notify_all();
        }

        fn answers(&self) {
            self.answered_by.lock().unwrap().insert(std::thread::current().id());
        }
    }

    impl Handler for Echo {
        async fn handle(&self, request: Request, reply: &Arc<Reply>) -> Option<Response> {
            match request {
                // From where it is found, as an ADD is.
                Request::Cni(call) => {
                    self.answers();
                    reply.send(&Response::Cni(CniReply { stdout: call.stdin, exit: 3 }));
                    None
                }
                // As an operation whose plugin hangs.
                Request::Pools => {
                    let (held, released) = (Arc::clone(&self.held), Arc::clone(&self.released));
                    let work = move || {
                        held.fetch_add(1, Ordering::SeqCst);
                        let (released, changed) = &*released;
                        drop(changed.wait_while(released.lock().unwrap(), |released| !*released).unwrap());
                    };
                    own_thread::blocking(work).await.unwrap();
                    Some(Response::Stats(Vec::new()))
                }
                _ => {
                    let go = self.go.notified();
                    self.held.fetch_add(1, Ordering::SeqCst);
                    go.await;
                    self.answers();
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
            let since = Instant::now();
            while self.echo.held.load(Ordering::SeqCst) < count {
                assert!(since.elapsed() < PATIENCE.answer * 2, "not all {count} are served");
                std::thread::yield_now();
            }
        }

        /// The thread of its runtime.
        fn runtime(&self) -> ThreadId {
            self.thread.as_ref().unwrap().thread().id()
        }

        /// More requests than there are threads that accept hang on their threads, and the next one is answered.
        fn answers_beside_those_that_hang(&self) {
            const HANGING: usize = 10;
            let before = self.echo.held.load(Ordering::SeqCst);
            std::thread::scope(|scope| {
                let hanging: Vec<_> =
                    (0..HANGING).map(|_| scope.spawn(|| self.call(&Request::Pools).unwrap())).collect();
                self.wait_until_held(before + HANGING);
                assert_eq!(self.call(&echo("beside")).unwrap(), echoed("beside"));
                self.echo.release();
                for hanging in hanging {
                    assert_eq!(hanging.join().unwrap(), Response::Stats(Vec::new()));
                }
            });
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
            self.echo.release();
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
        let listener = Listener::bind(SocketLock::take(&socket, LOCK_PATIENCE).unwrap()).unwrap();
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
            std::thread::sleep(Duration::from_millis(100));
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
            // One has the place, and each thread that accepts waits with another.
            let silent: Vec<_> =
                (0..=ACCEPTORS).map(|_| BlockingStream::connect(agent.socket()).unwrap()).collect();
            let brief = Patience { connect: PATIENCE.connect, answer: Duration::from_millis(50) };
            let error = call::<Response>(&agent.socket(), &echo(""), brief).unwrap_err();
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
    fn a_request_is_answered_by_who_accepted_it_and_one_that_has_to_wait_by_the_runtime() {
        let agent = Agent::start(Limits::default());
        let runtime = agent.runtime();
        // On a machine that is busy a request may be late, or the other threads at theirs.
        let is_own = |_| {
            agent.call(&echo("")).unwrap();
            agent.echo.answered_by.lock().unwrap().iter().any(|thread| *thread != runtime)
        };
        assert!((0..100).any(is_own), "each was handed on");
        agent.echo.answered_by.lock().unwrap().clear();
        std::thread::scope(|scope| {
            let held: Vec<_> =
                (0..20).map(|_| scope.spawn(|| agent.call(&Request::Stats).unwrap())).collect();
            agent.wait_until_held(20);
            // All but four at most, which may be about to wait, have been handed on with a waker.
            agent.echo.go.notify_waiters();
            for held in held {
                assert_eq!(held.join().unwrap(), Response::Stats(Vec::new()));
            }
        });
        assert!(agent.echo.answered_by.lock().unwrap().contains(&runtime));
    }

    #[test]
    fn requests_that_hang_on_their_threads_keep_no_other_waiting() {
        Agent::start(Limits::default()).answers_beside_those_that_hang();
    }

    #[test]
    fn all_threads_accept_at_the_socket_that_takes_the_place_of_one_that_was_removed() {
        let agent = Agent::start(Limits::default());
        agent.call(&echo("")).unwrap();
        std::fs::remove_file(agent.socket()).unwrap();
        agent.answers_beside_those_that_hang();
    }

    #[test]
    fn an_agent_that_is_given_up_accepts_nobody_and_leaves_no_thread() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = Listener::bind(SocketLock::take(&socket, LOCK_PATIENCE).unwrap()).unwrap();
        let serving = serve(listener, Arc::new(Echo::default()), Limits::default(), std::future::pending());
        let given_up =
            runtime.block_on(async { tokio::time::timeout(Duration::from_millis(50), serving).await });
        assert!(given_up.is_err());
        assert!(BlockingStream::connect(&socket).is_err());
        // Waits for the threads.
        drop(runtime);
    }

    #[test]
    fn accepted_requests_are_answered_after_the_stop() {
        let mut agent = Agent::start(Limits::default());
        let (socket, echo) = (agent.socket(), agent.echo.clone());
        let held = std::thread::spawn({
            let socket = socket.clone();
            move || call::<Response>(&socket, &Request::Stats, PATIENCE)
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
