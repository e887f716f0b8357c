//! Network namespaces: opening, identifying, entering. The only module that calls `setns`.
//!
//! A namespace is entered for the duration of a blocking closure ([`within`]), never across an `await`: no task ever
//! runs in a pod's namespace. A thread that cannot return would serve others from inside a pod, so in that case the
//! process is ended; the journal makes this safe at any time.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use serde::{Deserialize, Serialize};

use crate::error_chain::Chain;
use crate::{bounded, timing};

/// `f_type` of the filesystem that namespaces live on (`NSFS_MAGIC`, linux/magic.h).
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// `f_type` of procfs, seen for `/proc/PID/ns/net` on kernels before 3.19.
const PROC_MAGIC: u64 = 0x9fa0;

/// `NS_GET_NSTYPE` of linux/nsfs.h (kernel 4.11): the `CLONE_NEW*` flag of a namespace's type.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// `SO_NETNS_COOKIE` of asm-generic/socket.h (kernel 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The namespace that a file refers to, under any path: device and inode of the nsfs file.
///
/// The kernel does not reuse an inode while the namespace lives, but does after its end: compare it together with
/// something that dies with the pod, or with [`Netns::cookie`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// Device number of the nsfs filesystem.
    pub device: u64,
    /// Inode of the namespace.
    pub inode: u64,
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}]", self.inode)
    }
}

/// Returns the namespace of the calling thread, if it is that of the process, that is, of its first thread. Costs two
/// `stat` calls.
pub fn of_process() -> Option<NetnsId> {
    let id =
        |path: &str| std::fs::metadata(path).ok().map(|it| NetnsId { device: it.dev(), inode: it.ino() });
    id("/proc/thread-self/ns/net").filter(|its| id("/proc/self/ns/net").as_ref() == Some(its))
}

/// An open network namespace. Holding it keeps the namespace alive.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
    id: NetnsId,
}

/// Why a namespace could not be opened or entered.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// The path does not exist: the namespace is gone.
    #[error("network namespace {path} does not exist")]
    Gone {
        /// The path as the caller passed it.
        path: PathBuf,
    },
    /// The file at that path is not a namespace, such as the plain file that an unmounted bind leaves.
    #[error("{path} is not a network namespace")]
    NotANamespace {
        /// The path as the caller passed it.
        path: PathBuf,
    },
    /// The path could not be opened or examined.
    #[error("open network namespace {path}")]
    Open {
        /// The path as the caller passed it.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// `unshare(2)` failed, or no thread could be started for it.
    #[error("make a network namespace")]
    Make(#[source] io::Error),
    /// `setns(2)` failed.
    #[error("enter network namespace {path}")]
    Enter {
        /// The path as the caller passed it.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl NetnsError {
    /// Whether the namespace is gone for good, so that a DEL may proceed without it (DEL-07).
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::NotANamespace { .. })
    }
}

/// The two names of the directory of named namespaces. On most systems `/var/run` is a symlink to `/run`; in a
/// container it may be a separate directory, and only one of the two may be mounted.
const NAMED: [&str; 2] = ["/var/run/netns", "/run/netns"];

/// Returns the path under which the namespace at `path` can be opened: `path` itself, unless it does not exist and
/// the namespace with that name is in the other directory of [`NAMED`].
pub fn reachable(path: &Path) -> Cow<'_, Path> {
    match twin(path) {
        Some(twin) if is_nothing_at(path) && !is_nothing_at(&twin) => Cow::Owned(twin),
        _ => Cow::Borrowed(path),
    }
}

/// Returns the same name in the other directory of [`NAMED`].
fn twin(path: &Path) -> Option<PathBuf> {
    let [first, second] = NAMED;
    [(first, second), (second, first)].into_iter().find_map(|(directory, other)| {
        let name = path.strip_prefix(directory).ok()?;
        // A name, not a way out of the directory.
        let is_name = matches!(name.components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        is_name.then(|| Path::new(other).join(name))
    })
}

fn is_nothing_at(path: &Path) -> bool {
    path.metadata().is_err_and(|error| bounded::is_absent(&error))
}

/// When the kernel made the file of a namespace, in seconds and nanoseconds. While a path leads to one namespace, this
/// does not change; another one that has the inode number later has another time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Since(i64, i64);

/// Returns since when a namespace with this id is at `path`, or at the path that it is [`reachable`] by; `None`: it is
/// not. Costs one `stat` call.
///
/// # Errors
/// The path cannot be examined, so nothing is known.
pub fn found_at(path: &Path, id: NetnsId) -> io::Result<Option<Since>> {
    let found = match path.metadata() {
        Err(error) if bounded::is_absent(&error) => twin(path).map_or(Err(error), |twin| twin.metadata()),
        found => found,
    };
    match found {
        Ok(found) => {
            let is_it = NetnsId { device: found.dev(), inode: found.ino() } == id;
            Ok(is_it.then_some(Since(found.ctime(), found.ctime_nsec())))
        }
        Err(error) if bounded::is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The namespaces of processes, each with a path to it.
#[derive(Debug, Default)]
pub struct Inhabited {
    /// A path of each namespace, valid while the process lives.
    pub paths: HashMap<NetnsId, PathBuf>,
    /// Whether every process of the node could be examined.
    pub complete: bool,
}

impl Inhabited {
    /// Examines all threads of all processes that the caller can see.
    ///
    /// # Errors
    /// The processes cannot be listed.
    pub fn look() -> io::Result<Self> {
        let mut found = Self { paths: HashMap::new(), complete: sees_all_processes() };
        for process in std::fs::read_dir("/proc")? {
            let process = process?;
            if !process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                continue;
            }
            match std::fs::read_dir(process.path().join("task")) {
                Ok(threads) => {
                    threads.flatten().for_each(|thread| found.look_at(thread.path().join("ns/net")))
                }
                Err(error) => found.complete &= is_process_gone(&error),
            }
        }
        Ok(found)
    }

    fn look_at(&mut self, path: PathBuf) {
        match path.metadata() {
            Ok(at) => {
                self.paths.entry(NetnsId { device: at.dev(), inode: at.ino() }).or_insert(path);
            }
            Err(error) => self.complete &= is_process_gone(&error),
        }
    }
}

/// Whether the caller is in the node's PID namespace: in a container with a PID namespace of its own, `/proc` shows
/// none of the other processes.
fn sees_all_processes() -> bool {
    /// `PROC_PID_INIT_INO` (`include/linux/proc_ns.h`).
    const OF_THE_NODE: u64 = 0xEFFF_FFFC;
    Path::new("/proc/self/ns/pid").metadata().is_ok_and(|it| it.ino() == OF_THE_NODE)
}

fn is_process_gone(error: &io::Error) -> bool {
    bounded::is_absent(error) || error.raw_os_error() == Some(libc::ESRCH)
}

impl Netns {
    /// Opens the namespace at `path`, or at the path that it is [`reachable`] by.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, NetnsError> {
        let path = path.as_ref();
        match Self::open_at(path) {
            Err(NetnsError::Gone { path: asked }) => match reachable(path) {
                Cow::Owned(other) => Self::open_at(&other),
                Cow::Borrowed(_) => Err(NetnsError::Gone { path: asked }),
            },
            opened => opened,
        }
    }

    /// Like [`Netns::open`]; `None`: there is no namespace.
    ///
    /// # Errors
    /// It cannot be determined whether there is one, for example without a free descriptor: the contents of the
    /// namespace must not count as gone.
    pub fn if_there(path: impl AsRef<Path>) -> Result<Option<Self>, NetnsError> {
        match Self::open(path) {
            Err(error) if error.is_gone() => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Opens the namespace at `path` if it is still the one with this id. `None`: it is gone, or another one is at
    /// the path. The kernel reuses the number of a namespace that has ended; the [cookie](Netns::cookie)
    /// distinguishes the two if both the caller and the kernel have one.
    ///
    /// # Errors
    /// It cannot be determined, see [`Netns::if_there`].
    pub fn of(path: impl AsRef<Path>, id: NetnsId, cookie: Option<u64>) -> Result<Option<Self>, NetnsError> {
        let Some(found) = Self::if_there(path)?.filter(|netns| netns.id() == id) else { return Ok(None) };
        let Some(cookie) = cookie else { return Ok(Some(found)) };
        let is_it = found.cookie()?.is_none_or(|its| its == cookie);
        Ok(is_it.then_some(found))
    }

    fn open_at(path: &Path) -> Result<Self, NetnsError> {
        // Does not wait for the other end of a FIFO.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
        let file = file.map_err(|source| match bounded::is_absent(&source) {
            true => NetnsError::Gone { path: path.to_owned() },
            false => NetnsError::Open { path: path.to_owned(), source },
        })?;
        let failed =
            |source: rustix::io::Errno| NetnsError::Open { path: path.to_owned(), source: source.into() };
        let magic = rustix::fs::fstatfs(&file).map_err(failed)?.f_type as u64;
        if magic != NSFS_MAGIC && magic != PROC_MAGIC {
            return Err(NetnsError::NotANamespace { path: path.to_owned() });
        }
        if magic == NSFS_MAGIC && kind_of(&file).map_err(failed)? != libc::CLONE_NEWNET {
            return Err(NetnsError::NotANamespace { path: path.to_owned() });
        }
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        Ok(Self { file, path: path.to_owned(), id: NetnsId { device: stat.st_dev, inode: stat.st_ino } })
    }

    /// Creates an unnamed namespace that lasts as long as the returned value.
    pub fn private() -> Result<Self, NetnsError> {
        let made = std::thread::Builder::new().name("netns-make".into()).spawn(|| {
            // SAFETY: of what threads share only the network namespace is unshared, and this thread ends here; no
            // memory and no descriptor table is touched.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(io::Error::from)?;
            Self::current().map_err(io::Error::other)
        });
        let made =
            made.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("panicked"))));
        made.map_err(NetnsError::Make)
    }

    /// Opens the namespace of the calling thread.
    pub fn current() -> Result<Self, NetnsError> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// Returns the namespace's identity.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Returns a number that no other namespace has had or will have during this boot; `None` if the kernel has none
    /// (before Linux 5.14).
    ///
    /// # Errors
    /// The namespace cannot be entered, or no socket can be opened in it.
    pub fn cookie(&self) -> Result<Option<u64>, NetnsError> {
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM);
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let socket = within(self, || rustix::net::socket_with(family, kind, flags, None))?;
        let failed =
            |source: rustix::io::Errno| NetnsError::Open { path: self.path.clone(), source: source.into() };
        Ok(cookie_of(&socket.map_err(failed)?))
    }

    /// Returns the path that the namespace was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

thread_local! {
    /// The namespace to which [`within`] returns, opened once per thread: nothing else changes a thread's namespace.
    /// `None` before the first call, and inside a namespace that was entered.
    static HOME: RefCell<Option<Netns>> = const { RefCell::new(None) };
}

/// Runs `work` inside `netns` on the calling thread and returns its result.
///
/// Sockets opened by `work` stay in that namespace, and its accesses to `/proc/sys/net` apply there. Entering and
/// leaving cost a few microseconds.
pub fn within<T>(netns: &Netns, work: impl FnOnce() -> T) -> Result<T, NetnsError> {
    let home = match HOME.take() {
        Some(home) => home,
        None => Netns::current()?,
    };
    let entered = timing::part("namespace", || {
        move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|source| NetnsError::Enter { path: netns.path.clone(), source: source.into() })
    });
    match entered {
        Ok(()) => {
            let _back = Back(Some(home));
            Ok(work())
        }
        Err(error) => {
            HOME.set(Some(home));
            Err(error)
        }
    }
}

/// Returns to a namespace when dropped, also if the work in the other one panicked.
struct Back(Option<Netns>);

impl Drop for Back {
    fn drop(&mut self) {
        let Some(home) = self.0.take() else { return };
        if let Err(error) = move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Network)) {
            tracing::error!(error = %Chain(&error), "cannot leave a pod's network namespace; ending");
            std::process::abort();
        }
        // Not while the thread ends, which drops what it has.
        let _ = HOME.try_with(|kept| kept.replace(Some(home)));
    }
}

/// Returns the `CLONE_NEW*` flag for the type of a namespace file.
fn kind_of(file: &File) -> rustix::io::Result<libc::c_int> {
    // SAFETY: the descriptor is open, and this request takes no argument and writes nothing.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    // A failed libc call sets errno.
    if kind < 0 { Err(last_errno()) } else { Ok(kind) }
}

/// Returns the cookie of a socket's namespace; `None` if the kernel has none.
pub(crate) fn cookie_of(socket: &impl AsRawFd) -> Option<u64> {
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, the size of `cookie`, and the length it wrote.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cookie)
}

fn last_errno() -> rustix::io::Errno {
    let code = io::Error::last_os_error().raw_os_error();
    code.map_or(rustix::io::Errno::IO, rustix::io::Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_returns_from_each_namespace_to_where_it_was() {
        let [one, other] = [(); 2].map(|()| Netns::private().unwrap());
        let here = || Netns::current().unwrap().id();
        let before = here();
        for _ in 0..2 {
            let inside = within(&one, || ([(); 2].map(|()| within(&other, here).unwrap()), here()));
            assert_eq!((inside.unwrap(), here()), (([other.id(); 2], one.id()), before));
        }
    }

    #[test]
    fn a_plain_file_is_not_a_namespace() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Netns::open(file.path()).unwrap_err();
        assert!(matches!(error, NetnsError::NotANamespace { .. }));
        assert!(error.is_gone());
    }

    /// A socket is no file that can be opened, as if no descriptor were left for it.
    #[test]
    fn a_namespace_of_which_nothing_can_be_told_is_not_gone() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) = (Netns::current().unwrap(), Netns::private().unwrap());
        let path = "/proc/thread-self/ns/net";
        let cookie = own.cookie().unwrap();
        let of = |path: &Path, id, cookie| match Netns::of(path, id, cookie) {
            Ok(found) => Some(found.map(|netns| netns.id())),
            Err(error) => {
                assert!(matches!(error, NetnsError::Open { .. }), "{error:?}");
                None
            }
        };
        let there = Path::new(path);
        assert_eq!(of(there, own.id(), None), Some(Some(own.id())));
        assert_eq!(of(there, own.id(), cookie), Some(Some(own.id())));
        assert_eq!(of(there, other.id(), None), Some(None));
        let another = cookie.map(|cookie| cookie + 1);
        assert_eq!(of(there, own.id(), another), Some(another.is_none().then_some(own.id())));
        let gone = directory.path().join("gone");
        assert_eq!(of(&gone, own.id(), cookie), Some(None));
        std::fs::write(&gone, "").unwrap();
        assert_eq!(of(&gone, own.id(), cookie), Some(None), "what an unmounted bind leaves");
        let socket = directory.path().join("socket");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(of(&socket, own.id(), cookie), None);
        assert!(matches!(Netns::if_there(&socket), Err(NetnsError::Open { .. })));
    }

    #[test]
    fn another_kind_of_namespace_is_not_one() {
        let error = Netns::open("/proc/self/ns/uts").unwrap_err();
        assert!(matches!(error, NetnsError::NotANamespace { .. }), "{error:?}");
    }

    #[test]
    fn a_path_under_which_nothing_can_be_is_gone() {
        let long = format!("/{}", "x".repeat(300));
        for path in ["/nonexistent/netns", "/proc/self/comm/netns", &long] {
            assert!(matches!(Netns::open(path), Err(NetnsError::Gone { .. })), "{path}");
        }
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        let (opened, is_opened) = std::sync::mpsc::channel();
        // The thread is left behind if it blocks.
        std::thread::spawn(move || opened.send(Netns::open(&fifo).map(|netns| netns.id())));
        let outcome = is_opened.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        assert!(matches!(outcome, Err(NetnsError::NotANamespace { .. })), "{outcome:?}");
    }

    #[test]
    fn a_named_namespace_has_a_name_in_either_directory_and_nothing_else_has() {
        let table = [
            ("/var/run/netns/cni-1", Some("/run/netns/cni-1")),
            ("/run/netns/cni-1", Some("/var/run/netns/cni-1")),
            ("/run/netns", None),
            ("/run/netns/", None),
            ("/run/netns/../x", None),
            ("/run/netns/a/b", None),
            ("/run/netnsx/a", None),
            ("/proc/1/ns/net", None),
            ("", None),
        ];
        for (path, expected) in table {
            assert_eq!(twin(Path::new(path)), expected.map(PathBuf::from), "{path}");
        }
        let nowhere = Path::new("/run/netns/netattach-test-nowhere");
        assert_eq!(reachable(nowhere), nowhere);
        assert!(matches!(Netns::open(nowhere), Err(NetnsError::Gone { path }) if path == nowhere));
    }

    #[test]
    fn a_namespace_is_at_its_paths_and_at_no_other() {
        let own = Netns::current().unwrap().id();
        let other = Netns::private().unwrap().id();
        let path = Path::new("/proc/self/ns/net");
        assert_eq!([own, other].map(|id| found_at(path, id).unwrap().is_some()), [true, false]);
        assert!(found_at(Path::new("/run/netns/netattach-test-nowhere"), own).unwrap().is_none());
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(found_at(file.path(), own).unwrap().is_none(), "what an unmounted bind leaves");
        let inhabited = Inhabited::look().unwrap();
        let found = inhabited.paths.get(&own).map(|path| Netns::open(path).unwrap().id());
        assert_eq!(found, Some(own));
        assert!(!inhabited.paths.contains_key(&other), "nobody is in it, though it is held");
    }

    #[test]
    fn a_path_names_the_same_namespace_as_any_other() {
        let by_thread = Netns::current().unwrap();
        let by_process = Netns::open("/proc/self/ns/net").unwrap();
        assert_eq!(by_thread.id(), by_process.id());
    }
}
