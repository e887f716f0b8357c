//! Starts a program in a control group. The standard library can only move a process that runs already: its memory
//! use before the move is not counted there, and the move waits for a grace period of the kernel. clone3(2) starts it
//! in the group.
//!
//! Between clone and exec the child has a copy of this process with one thread, in which locks may be held that are
//! never released: so it makes only system calls, on data that was prepared before (signal-safety(7)).

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::ptr;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};

/// A program that was started, and the other ends of its standard streams.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) process: Process,
    pub(super) stdin: File,
    pub(super) stdout: File,
    pub(super) stderr: File,
}

/// A child process that must be reaped.
#[derive(Debug)]
pub(super) struct Process(Pid);

impl Process {
    pub(super) fn id(&self) -> Pid {
        self.0
    }

    /// Waits for the exit of the process.
    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            match waitpid(Some(self.0), WaitOptions::empty()) {
                Ok(Some((_, status))) => return Ok(ExitStatus::from_raw(status.as_raw())),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Returns the exit status, if the process has exited.
    pub(super) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let ended = waitpid(Some(self.0), WaitOptions::NOHANG)?;
        Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
    }
}

/// `struct clone_args` of `linux/sched.h`, up to `cgroup`: Linux 5.7.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// `CLONE_INTO_CGROUP` of `linux/sched.h`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `_NSIG` of Linux.
const LAST_SIGNAL: i32 = 64;

/// The data that the child needs, prepared before the clone.
struct Prepared {
    program: CString,
    argv: [*const libc::c_char; 2],
    envp: Vec<*const libc::c_char>,
    /// The child's root directory; null: that of this process.
    root: *const libc::c_char,
    /// The child's ends of the standard streams.
    streams: [i32; 3],
    /// The pipe on which the child reports why execve(2) failed; closed by a successful execve(2).
    failed: i32,
}

/// Starts a program in a group, as the leader of a process group of its own, and in another root directory if one is named.
///
/// # Errors
/// The kernel's: of clone3(2), chroot(2) or execve(2).
pub(super) fn in_group(
    group: BorrowedFd<'_>,
    program: &Path,
    root: Option<&Path>,
    environment: Vec<(OsString, OsString)>,
) -> io::Result<Started> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC);
    let ((child_in, stdin), (stdout, child_out), (stderr, child_err)) = (pipe()?, pipe()?, pipe()?);
    let (failure, failed) = pipe()?;
    let no_nul = |text: Vec<u8>| {
        CString::new(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
    };
    let program = no_nul(program.as_os_str().as_bytes().to_vec())?;
    let variable = |(name, value): (OsString, OsString)| {
        let mut text = name.into_vec();
        text.push(b'=');
        text.extend(value.into_vec());
        no_nul(text)
    };
    let environment: Vec<CString> = environment.into_iter().map(variable).collect::<io::Result<_>>()?;
    let root = root.map(|root| no_nul(root.as_os_str().as_bytes().to_vec())).transpose()?;
    let argv = [program.as_ptr(), ptr::null()];
    let envp = environment.iter().map(|it| it.as_ptr()).chain([ptr::null()]).collect();
    let streams = [&child_in, &child_out, &child_err].map(AsRawFd::as_raw_fd);
    let prepared = Prepared {
        program,
        argv,
        envp,
        root: root.as_ref().map_or(ptr::null(), |it| it.as_ptr()),
        streams,
        failed: failed.as_raw_fd(),
    };
    let arguments = CloneArgs {
        flags: CLONE_INTO_CGROUP,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: group.as_raw_fd() as u64,
        ..CloneArgs::default()
    };
    let pid = clone_and_execute(&arguments, &prepared)?;
    drop((child_in, child_out, child_err, failed));
    let mut process = Process(pid);
    let mut reason = [0; 4];
    match File::from(failure).read(&mut reason) {
        Ok(4) => {
            process.wait()?;
            Err(io::Error::from_raw_os_error(i32::from_ne_bytes(reason)))
        }
        // Closed by execve.
        _ => Ok(Started { process, stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into() }),
    }
}

/// Blocks all signals of this thread around the clone: a handler of the agent must not run in the child, which has
/// reset its handlers by the time it unblocks signals.
fn clone_and_execute(arguments: &CloneArgs, prepared: &Prepared) -> io::Result<Pid> {
    // SAFETY: a set of signals is plain data, which sigfillset and pthread_sigmask fill.
    let (mut all, mut before) =
        unsafe { (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>()) };
    // SAFETY: both point to sets of this function.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
    }
    // SAFETY: the arguments are valid for the call, and ask for no shared memory and no stack: the child goes on here with
    // a copy of everything. It makes system calls only, on what was prepared, and never returns.
    let cloned = unsafe {
        let cloned = libc::syscall(libc::SYS_clone3, ptr::from_ref(arguments), size_of::<CloneArgs>());
        if cloned == 0 {
            execute(prepared);
        }
        cloned
    };
    let failed = io::Error::last_os_error();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    match i32::try_from(cloned).ok().and_then(Pid::from_raw) {
        Some(pid) if cloned > 0 => Ok(pid),
        _ => Err(failed),
    }
}

/// The code of the child: never returns.
///
/// # Safety
/// The process is a child that shares nothing with another, and the pointers of `prepared` are valid in it.
unsafe fn execute(prepared: &Prepared) -> ! {
    // SAFETY: system calls on descriptors and strings that the caller vouches for.
    unsafe {
        // A signal before execve(2) is meant for the plugin, and has its default effect. Ignored signals stay
        // ignored.
        for signal in 1..=LAST_SIGNAL {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            let is_ignored = libc::sigaction(signal, ptr::null(), &raw mut action) == 0
                && action.sa_sigaction == libc::SIG_IGN;
            if !is_ignored {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
        let mut is_well = libc::setpgid(0, 0) == 0;
        for (number, stream) in (0..).zip(prepared.streams) {
            is_well = is_well && libc::dup2(stream, number) == number;
        }
        if is_well && !prepared.root.is_null() {
            is_well = libc::chroot(prepared.root) == 0 && libc::chdir(c"/".as_ptr()) == 0;
        }
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        if is_well {
            libc::execve(prepared.program.as_ptr(), prepared.argv.as_ptr(), prepared.envp.as_ptr());
        }
        let errno = (*errno()).to_ne_bytes();
        libc::write(prepared.failed, errno.as_ptr().cast(), errno.len());
        libc::_exit(127)
    }
}

unsafe fn errno() -> *mut i32 {
    // SAFETY: it has no preconditions.
    unsafe { libc::__errno_location() }
}

/// Takes over a child of the standard library.
pub(super) fn adopted(mut child: std::process::Child) -> io::Result<Started> {
    let none = || io::Error::other("a stream of the child is missing");
    let file = |stream: Option<OwnedFd>| stream.map(File::from).ok_or_else(none);
    Ok(Started {
        stdin: file(child.stdin.take().map(OwnedFd::from))?,
        stdout: file(child.stdout.take().map(OwnedFd::from))?,
        stderr: file(child.stderr.take().map(OwnedFd::from))?,
        // The standard library also waits by the process id.
        process: Process(Pid::from_child(&child)),
    })
}
