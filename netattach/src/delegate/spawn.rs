//! Starts a program as the standard library cannot.
//!
//! In a control group: the standard library can only move a process that runs already. Its memory use before the move
//! is not counted there, and the move waits for a grace period of the kernel. clone3(2) starts it in the group.
//!
//! Tied to the thread that waits for it (`PR_SET_PDEATHSIG`): whatever has to be called in the child makes the standard
//! library execute the program by execvp(3), which has a shell interpret files that the kernel refuses.
//!
//! Between clone and exec the child has a copy of this process with one thread, in which locks may be held that are
//! never released: so it makes only system calls, on data that was prepared before (signal-safety(7)).

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::ptr;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, getpid, waitpid};

use super::Caller;

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
    /// The process that the child must not outlive; 0: none.
    tied_to: libc::pid_t,
    /// The child's ends of the standard streams.
    streams: [i32; 3],
    /// The pipe on which the child reports why execve(2) failed; closed by a successful execve(2).
    failed: i32,
}

/// Starts a program as the leader of a process group of its own, and in another root directory if one is named: in the
/// control group of an agent, or for a call of one process until the thread ends that starts it.
///
/// The kernel kills such a program before the end of this process can be waited for (`exit_notify` in
/// `kernel/exit.c`): whoever has waited for that finds a program that was sent SIGKILL. Left running are
/// processes that the program has started, and a program whose privileges or SELinux domain change when it is executed
/// ([`PR_SET_PDEATHSIG`]). The thread is to wait for the program: one that ended earlier would have it killed.
///
/// # Errors
/// The kernel's: of clone3(2), chroot(2) or execve(2).
///
/// [`PR_SET_PDEATHSIG`]: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
pub(super) fn cloned(
    caller: &Caller,
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
        tied_to: match caller {
            Caller::Agent { .. } => 0,
            Caller::OneCall => getpid().as_raw_nonzero().get(),
        },
        streams,
        failed: failed.as_raw_fd(),
    };
    let alone = CloneArgs { exit_signal: libc::SIGCHLD as u64, ..CloneArgs::default() };
    let arguments = match caller.group() {
        Some(group) => {
            let cgroup = group.descriptor().as_raw_fd() as u64;
            CloneArgs { flags: CLONE_INTO_CGROUP, cgroup, ..alone }
        }
        None => alone,
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
    // SAFETY: functions of signal-safety(7), and chroot(2) and prctl(2), which are bare system calls as well: they
    // allocate nothing and take no lock. Their arguments are numbers, and descriptors and strings that the caller
    // vouches for.
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
        if is_well && prepared.tied_to != 0 {
            // In this order: a caller that ended before the first call sends no signal, and is no longer the parent.
            is_well = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) == 0;
            if is_well && libc::getppid() != prepared.tied_to {
                *errno() = libc::ESRCH;
                is_well = false;
            }
        }
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
