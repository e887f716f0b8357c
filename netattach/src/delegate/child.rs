//! One child process, from start to end, with bounded time and memory.
//!
//! A single thread feeds stdin, reads stdout and stderr and watches for the exit through a pidfd. The call ends with
//! the exit of the child, not with the end of its output: a grandchild may hold the pipes for ever.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::Caller;
use super::spawn::{self, Process, Started};

/// Maximum size of a plugin's stdout, in bytes.
pub const STDOUT_LIMIT: usize = crate::budget::RESULT.most;

/// How many of the last bytes of a plugin's stderr are kept.
pub const STDERR_LIMIT: usize = 16 << 10;

/// How long after the exit output may still arrive from a process that the plugin left behind: the `tee` of a wrapper
/// script is late by milliseconds.
const LATE_OUTPUT: Duration = Duration::from_millis(200);

/// How long starting an executable that is still being written is retried before that is an error.
const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// How long to wait for a killed child. One that stays in the kernel longer is left to a thread.
const KILL_WAIT: Duration = Duration::from_secs(1);

/// Used when this process has no `PATH`; plugins call `ip`, `iptables`, `nft`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An executable to start, and its deadline.
pub(super) struct Invocation<'a> {
    pub(super) program: &'a Path,
    /// The root directory of the child; this process's by default.
    pub(super) root: Option<&'a Path>,
    /// Set over the environment of this process; an empty `CNI_NETNS_OVERRIDE` removes that variable.
    pub(super) env: Vec<(&'static str, OsString)>,
    pub(super) stdin: &'a [u8],
    pub(super) timeout: Duration,
    pub(super) caller: &'a Caller,
}

/// The exit status and output of a child that ended.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) status: ExitStatus,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
    /// Whether another process still held the output open after the exit.
    pub(super) held_open: bool,
}

/// Reasons for a missing [`Output`]. The child is dead in every case.
#[derive(Debug)]
pub(super) enum ChildError {
    Spawn(io::Error),
    Busy(Duration),
    Pipe(io::Error),
    TimedOut { stderr: String },
    TooMuchOutput { stderr: String },
}

/// Runs the program to its end.
pub(super) fn run(invocation: &Invocation<'_>) -> Result<Output, ChildError> {
    let deadline = Instant::now() + invocation.timeout;
    let Started { mut process, stdin, stdout, stderr } = spawn(invocation, deadline)?;
    crate::crash_point!("plugin", "started");
    let conversation = Conversation::begin(&process, (stdin, stdout, stderr), invocation.stdin)
        .map_err(ChildError::Pipe)
        .and_then(|conversation| conversation.hold(deadline));
    match conversation {
        Ok(ended) => match process.wait() {
            Ok(status) => Ok(Output {
                status,
                stdout: ended.stdout,
                stderr: ended.stderr.text(),
                held_open: ended.held_open,
            }),
            Err(error) => Err(ChildError::Pipe(error)),
        },
        Err(error) => {
            kill(process);
            Err(error)
        }
    }
}

fn spawn(invocation: &Invocation<'_>, deadline: Instant) -> Result<Started, ChildError> {
    let environment = environment(invocation);
    let started = Instant::now();
    let give_up = deadline.min(started + BUSY_LIMIT);
    let mut pause = Duration::from_millis(5);
    loop {
        match start(invocation, environment.clone()) {
            Ok(child) => {
                crate::descriptors::lower_for(child.process.id());
                return Ok(child);
            }
            // An installer is writing the file, or another thread of this process is between fork and exec while it
            // has the file open for writing (containernetworking/cni#763).
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                if Instant::now() + pause > give_up {
                    return Err(ChildError::Busy(started.elapsed()));
                }
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(500));
            }
            Err(error) => return Err(ChildError::Spawn(error)),
        }
    }
}

/// Starts the program in a process group of its own, so that its child processes are killed with it on a timeout.
fn start(invocation: &Invocation<'_>, environment: Vec<(OsString, OsString)>) -> io::Result<Started> {
    let Caller::Agent { group: None, .. } = invocation.caller else {
        return spawn::cloned(invocation.caller, invocation.program, invocation.root, environment);
    };
    let mut command = Command::new(invocation.program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).env_clear().envs(environment);
    if let Some(root) = invocation.root {
        enter_root(&mut command, root)?;
    }
    spawn::adopted(command.spawn()?)
}

/// The environment of this process with the variables of the call set over it.
fn environment(invocation: &Invocation<'_>) -> Vec<(OsString, OsString)> {
    let mut all: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    let path = all.entry("PATH".into()).or_default();
    if path.is_empty() {
        *path = DEFAULT_PATH.into();
    }
    for (name, value) in &invocation.env {
        if *name == "CNI_NETNS_OVERRIDE" && value.is_empty() {
            all.remove(std::ffi::OsStr::new(name));
        } else {
            all.insert(name.into(), value.clone());
        }
    }
    all.into_iter().collect()
}

/// Makes the child start in another root directory, in which its program is searched.
fn enter_root(command: &mut Command, root: &Path) -> io::Result<()> {
    let root = CString::new(root.as_os_str().as_bytes())?;
    let enter = move || {
        rustix::process::chroot(root.as_c_str())?;
        Ok(rustix::process::chdir(c"/")?)
    };
    // SAFETY: between fork and exec only chroot(2) and chdir(2) are called, which allocate nothing and take no lock.
    unsafe { command.pre_exec(enter) };
    Ok(())
}

/// The pipes of a running child and the data read and written so far.
struct Conversation<'a> {
    exit: Option<OwnedFd>,
    stdin: Option<File>,
    unsent: &'a [u8],
    stdout: Option<File>,
    stderr: Option<File>,
    heard: Heard,
}

#[derive(Default)]
struct Heard {
    stdout: Vec<u8>,
    stderr: Tail,
    held_open: bool,
}

impl<'a> Conversation<'a> {
    fn begin(child: &Process, streams: (File, File, File), unsent: &'a [u8]) -> io::Result<Self> {
        let exit = pidfd_open(child.id(), PidfdFlags::empty())?;
        let (stdin, stdout, stderr) = streams;
        let mut conversation = Self {
            exit: Some(exit),
            stdin: Some(stdin),
            unsent,
            stdout: Some(stdout),
            stderr: Some(stderr),
            heard: Heard::default(),
        };
        let fds = [
            conversation.stdin.as_ref().map(AsFd::as_fd),
            conversation.stdout.as_ref().map(AsFd::as_fd),
            conversation.stderr.as_ref().map(AsFd::as_fd),
        ];
        for fd in fds.into_iter().flatten() {
            fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        }
        conversation.send()?;
        Ok(conversation)
    }

    /// Runs until the child and its output have ended, or until one of the limits is reached.
    fn hold(mut self, deadline: Instant) -> Result<Heard, ChildError> {
        let mut limit = deadline;
        loop {
            if self.exit.is_none() && self.stdout.is_none() && self.stderr.is_none() {
                return Ok(self.heard);
            }
            let now = Instant::now();
            if now >= limit {
                if self.exit.is_some() {
                    return Err(ChildError::TimedOut { stderr: self.heard.stderr.text() });
                }
                self.heard.held_open = true;
                return Ok(self.heard);
            }
            let has_exited = self.step(limit - now)?;
            if has_exited {
                self.exit = None;
                self.stdin = None;
                limit = deadline.min(Instant::now() + LATE_OUTPUT);
            }
        }
    }

    /// Waits for an event, handles it, and returns whether it was the exit.
    fn step(&mut self, wait: Duration) -> Result<bool, ChildError> {
        let ready = self.wait_ready(wait).map_err(ChildError::Pipe)?;
        if ready.stdin {
            self.send().map_err(ChildError::Pipe)?;
        }
        let mut buffer = [0; 16 << 10];
        if ready.stdout {
            let stdout = &mut self.heard.stdout;
            let ended = drain(self.stdout.as_mut(), &mut buffer, |bytes| {
                stdout.extend_from_slice(bytes);
                stdout.len() <= STDOUT_LIMIT
            });
            match ended.map_err(ChildError::Pipe)? {
                Drained::Stopped => {
                    let stderr = std::mem::take(&mut self.heard.stderr).text();
                    return Err(ChildError::TooMuchOutput { stderr });
                }
                Drained::Ended => self.stdout = None,
                Drained::Open => {}
            }
        }
        if ready.stderr {
            let stderr = &mut self.heard.stderr;
            // One buffer at a time: a child that never stops writing must not keep us from checking the deadline.
            let ended = drain(self.stderr.as_mut(), &mut buffer, |bytes| {
                stderr.push(bytes);
                false
            });
            if matches!(ended.map_err(ChildError::Pipe)?, Drained::Ended) {
                self.stderr = None;
            }
        }
        Ok(ready.exit)
    }

    fn wait_ready(&self, wait: Duration) -> io::Result<Ready> {
        fn watch<'f>(fd: BorrowedFd<'f>, flags: PollFlags) -> PollFd<'f> {
            PollFd::from_borrowed_fd(fd, flags)
        }
        let sources = [
            self.exit.as_ref().map(|fd| watch(fd.as_fd(), PollFlags::IN)),
            self.stdin.as_ref().map(|fd| watch(fd.as_fd(), PollFlags::OUT)),
            self.stdout.as_ref().map(|fd| watch(fd.as_fd(), PollFlags::IN)),
            self.stderr.as_ref().map(|fd| watch(fd.as_fd(), PollFlags::IN)),
        ];
        let watched = sources.each_ref().map(Option::is_some);
        let mut fds: Vec<PollFd<'_>> = sources.into_iter().flatten().collect();
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        let [exit, stdin, stdout, stderr] =
            watched.map(|is_watched| is_watched && events.next().unwrap_or(false));
        Ok(Ready { exit, stdin, stdout, stderr })
    }

    /// Writes as much as the pipe takes, and closes it after the last byte. A child that does not read its
    /// configuration is not an error: VERSION needs none.
    fn send(&mut self) -> io::Result<()> {
        let Some(stdin) = self.stdin.as_mut() else { return Ok(()) };
        while !self.unsent.is_empty() {
            match stdin.write(self.unsent) {
                Ok(written) => self.unsent = self.unsent.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
                Err(error) => return Err(error),
            }
        }
        self.stdin = None;
        Ok(())
    }
}

struct Ready {
    exit: bool,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

enum Drained {
    /// No more data for now.
    Open,
    /// The other end is closed.
    Ended,
    /// The sink accepts no more for now.
    Stopped,
}

/// Reads until the pipe is empty, closed, or `sink` says `false`.
fn drain(
    pipe: Option<&mut impl Read>,
    buffer: &mut [u8],
    mut sink: impl FnMut(&[u8]) -> bool,
) -> io::Result<Drained> {
    let Some(pipe) = pipe else { return Ok(Drained::Ended) };
    loop {
        match pipe.read(buffer) {
            Ok(0) => return Ok(Drained::Ended),
            Ok(length) => {
                if !sink(buffer.get(..length).unwrap_or_default()) {
                    return Ok(Drained::Stopped);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Drained::Open),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Kills the child's process group and reaps the child.
fn kill(mut child: Process) {
    // Not reaped yet, so the number still identifies this group. The group may be gone already; then there is nothing
    // to kill.
    let _ = kill_process_group(child.id(), Signal::KILL);
    let give_up = Instant::now() + KILL_WAIT;
    let mut pause = Duration::from_millis(1);
    while Instant::now() < give_up {
        match child.try_wait() {
            Ok(None) => thread::sleep(pause),
            Ok(Some(_)) | Err(_) => return,
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    tracing::warn!(
        pid = child.id().as_raw_nonzero().get(),
        "killed plugin has not ended; it hangs in the kernel"
    );
    // Reaped as soon as the kernel lets it exit. If no thread can be started it stays a zombie.
    let _ = thread::Builder::new().name("plugin-reaper".into()).spawn(move || child.wait());
}

/// The last bytes of a stream, and how many came before.
#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
    dropped: usize,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // Discards in large steps, so that a flood costs one move per limit and not one per read.
        if self.bytes.len() > 4 * STDERR_LIMIT {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let surplus = self.bytes.len().saturating_sub(STDERR_LIMIT);
        self.bytes.drain(..surplus);
        self.dropped += surplus;
    }

    fn text(mut self) -> String {
        self.cut();
        let text = String::from_utf8_lossy(&self.bytes);
        let text = text.trim();
        if self.dropped == 0 { text.to_owned() } else { format!("({} bytes cut) {text}", self.dropped) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn only_the_end_of_a_long_stream_is_kept() {
        let mut tail = Tail::default();
        for _ in 0..1000 {
            tail.push(&[b'x'; 1000]);
        }
        tail.push(b"the cause\n");
        let text = tail.text();
        let dropped = 1_000_010 - STDERR_LIMIT;
        assert!(text.starts_with(&format!("({dropped} bytes cut) xxx")), "{}", &text[..40]);
        assert!(text.ends_with("xthe cause"));
        assert!(text.len() < STDERR_LIMIT + 40);
    }

    #[test]
    fn a_plugin_may_print_as_much_as_it_may_and_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let printed = |bytes: usize| {
            let program = directory.path().join(format!("prints-{bytes}"));
            std::fs::write(&program, format!("#!/bin/sh\nexec head -c {bytes} /dev/zero\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            let timeout = Duration::from_secs(60);
            run(&Invocation {
                program: &program,
                root: None,
                env: Vec::new(),
                stdin: b"",
                timeout,
                caller: &Caller::OneCall,
            })
        };
        let most = printed(STDOUT_LIMIT).unwrap();
        assert!(most.status.success());
        assert!(most.stdout == vec![0; STDOUT_LIMIT]);
        assert!(matches!(printed(STDOUT_LIMIT + 1), Err(ChildError::TooMuchOutput { .. })));
    }

    /// Has a thread start a plugin and end while the plugin waits for the end of its stdin, which comes after
    /// `patience`. Returns the signal that has ended the plugin.
    fn outlives_its_thread(caller: &Caller, patience: Duration) -> Option<i32> {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("waits");
        std::fs::write(&program, "#!/bin/sh\nread line\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let timeout = Duration::from_secs(60);
        let invocation =
            Invocation { program: &program, root: None, env: Vec::new(), stdin: b"", timeout, caller };
        let starting =
            || thread::scope(|scope| scope.spawn(|| spawn(&invocation, Instant::now() + timeout)).join());
        let Started { mut process, stdin, .. } = starting().unwrap().unwrap();
        let due = Instant::now() + patience;
        while Instant::now() < due {
            if let Some(status) = process.try_wait().unwrap() {
                return status.signal();
            }
            thread::sleep(Duration::from_millis(5));
        }
        drop(stdin);
        process.wait().unwrap().signal()
    }

    /// Rows: EXE-18.
    #[test]
    fn a_plugin_ends_with_the_thread_that_waits_for_it_unless_an_agent_has_called_it() {
        let killed = Some(Signal::KILL.as_raw());
        assert_eq!(outlives_its_thread(&Caller::OneCall, Duration::from_secs(20)), killed);
        let agent = Caller::Agent { name: "unit".to_owned(), group: None };
        assert_eq!(outlives_its_thread(&agent, Duration::from_millis(200)), None);
    }

    #[test]
    fn a_short_stream_is_kept_whole() {
        let mut tail = Tail::default();
        tail.push(b" warning: x\n");
        assert_eq!(tail.text(), "warning: x");
    }
}
