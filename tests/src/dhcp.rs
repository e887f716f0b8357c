//! A DHCP server of busybox, the daemon of the reference's `dhcp`, and the messages on their link.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use netattach::ipam::dhcp::{Message, MessageKind};
use tempfile::TempDir;

use crate::raw::RawSocket;
use crate::traffic::eventually;
use crate::{Namespace, tools};

/// Where the payload of a UDP datagram without IPv4 options begins in a frame.
const PAYLOAD: usize = 14 + 20 + 8;

/// How long a server or a daemon may take to start.
const START: Duration = Duration::from_secs(20);

/// The directory of busybox; `None`: the test is reported as skipped.
pub fn busybox(test: &str) -> Option<PathBuf> {
    tools::directory(test, "NETATTACH_BUSYBOX", &["busybox"]).map(|directory| directory.join("busybox"))
}

/// A process that ends when this is dropped.
#[derive(Debug)]
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program that goes on without anybody who reads its output.
fn start(mut command: Command, namespace: &Namespace) -> Result<Process> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let program = command.get_program().to_string_lossy().into_owned();
    namespace.run(|| command.spawn()).map(Process).with_context(|| format!("start {program}"))
}

/// A running `udhcpd`, which ends when this is dropped. It keeps its leases in memory.
#[derive(Debug)]
pub struct Server {
    _process: Process,
    _directory: TempDir,
}

impl Server {
    /// Starts a server on an interface that has an address, with these lines of configuration: `start`, `end`, `opt`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(busybox: &Path, namespace: &Namespace, interface: &str, lines: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = |name: &str| directory.path().join(name);
        let (leases, pid, file) = (path("leases"), path("pid"), path("conf"));
        fs::write(&leases, "")?;
        let own = [
            format!("interface {interface}"),
            format!("lease_file {}", leases.display()),
            format!("pidfile {}", pid.display()),
        ];
        let lines = own.iter().map(String::as_str).chain(lines.iter().copied());
        fs::write(&file, lines.flat_map(|line| [line, "\n"]).collect::<String>())?;
        let mut command = Command::new(busybox);
        // No address of the range is in use without the server's knowledge.
        command.args(["udhcpd", "-f", "-a", "1"]).arg(&file);
        let server = Self { _process: start(command, namespace)?, _directory: directory };
        anyhow::ensure!(eventually(START, || pid.exists()), "udhcpd does not start");
        Ok(server)
    }
}

/// The running daemon of the reference's `dhcp`, which ends when this is dropped.
#[derive(Debug)]
pub struct Daemon {
    _process: Process,
}

impl Daemon {
    /// Starts the daemon of that plugin on a node, and waits until it serves the socket.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(plugin: &Path, node: &Namespace, socket: &Path) -> Result<Self> {
        let mut command = Command::new(plugin);
        command.args(["daemon", "-socketpath"]).arg(socket);
        let daemon = Self { _process: start(command, node)? };
        let serves = eventually(START, || UnixStream::connect(socket).is_ok());
        anyhow::ensure!(serves, "the daemon of dhcp does not start");
        Ok(daemon)
    }
}

/// The messages of clients and servers on a link, from the moment at which it is opened.
#[derive(Debug)]
pub struct Heard {
    socket: RawSocket,
    messages: Vec<Said>,
}

/// A message, and whether it was a broadcast.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The kind of the message.
    pub kind: Option<MessageKind>,
    /// The message.
    pub message: Message,
    /// Whether its Ethernet destination was the broadcast address.
    pub to_everybody: bool,
}

impl Heard {
    /// Listens on a device.
    ///
    /// # Errors
    /// There is no such device.
    pub fn open(namespace: &Namespace, device: &str) -> Result<Self> {
        Ok(Self { socket: RawSocket::open(namespace, device)?, messages: Vec::new() })
    }

    /// Returns all messages so far.
    ///
    /// # Panics
    /// The socket fails.
    pub fn all(&mut self) -> &[Said] {
        let said = |frame: Vec<u8>| {
            let is_dhcp = frame.get(34..38).is_some_and(|ports| matches!(ports, [0, 67 | 68, 0, 67 | 68]));
            let message = Message::read(frame.get(PAYLOAD..)?).ok().filter(|_| is_dhcp)?;
            Some(Said { kind: message.options.kind(), to_everybody: frame[..6] == [0xff; 6], message })
        };
        self.messages.extend(self.socket.frames().expect("the socket receives").into_iter().filter_map(said));
        &self.messages
    }

    /// Waits until that many messages of that kind have been heard, and returns the last.
    pub fn await_number(&mut self, kind: MessageKind, number: usize, patience: Duration) -> Option<Said> {
        let of_kind = |said: &&Said| said.kind == Some(kind);
        eventually(patience, || self.all().iter().filter(of_kind).count() >= number);
        self.all().iter().filter(of_kind).nth(number.checked_sub(1)?).cloned()
    }

    /// Returns the number of messages of that kind that have been heard.
    pub fn count(&mut self, kind: MessageKind) -> usize {
        self.all().iter().filter(|said| said.kind == Some(kind)).count()
    }
}
