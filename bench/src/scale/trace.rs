//! Counts the datagrams that a process sends to the kernel's route netlink, from outside of the process.
//!
//! All threads are traced by ptrace(2), as by a debugger: no report of the process itself is used, and work on other
//! threads counts too. The process runs several times slower meanwhile, so nothing else is measured then. The kernel
//! has to know `PTRACE_GET_SYSCALL_INFO` (5.3) and `pidfd_getfd` (5.6).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use rustix::net::{AddressFamily, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::pods::joined;

/// Pause when no thread has stopped.
const PAUSE: Duration = Duration::from_micros(100);
/// All threads are followed within this time.
const PATIENCE: Duration = Duration::from_secs(10);
/// System calls are distinguished from other traps, and new threads are traced too.
const OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
/// Signal number of a stop at a system call (`PTRACE_O_TRACESYSGOOD`).
const AT_CALL: i32 = libc::SIGTRAP | 0x80;
/// The stop of a newly traced or an interrupted thread (`linux/ptrace.h`).
const EVENT_STOP: i32 = 128;

/// Traces all threads of a process while `work` runs, which gets the number of datagrams so far.
///
/// # Errors
/// The process cannot be traced, or ends; or the work's own error.
pub(super) fn following<T>(
    process: libc::pid_t,
    work: impl FnOnce(&AtomicU64) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (sent, ending) = (AtomicU64::new(0), AtomicBool::new(false));
    let (ready, when_ready) = mpsc::channel();
    thread::scope(|scope| {
        // Threads are let go when the one that follows them ends.
        let tracer = scope.spawn(|| Tracer::begin(process, &sent)?.run(&ready_once(ready), &ending));
        let done =
            when_ready.recv().map_err(|_| anyhow!("it could not be followed")).and_then(|()| work(&sent));
        ending.store(true, Ordering::Relaxed);
        joined(tracer.join()).context("count datagrams")?;
        done
    })
}

/// Signals once; the receiver notices too when the sender is dropped.
fn ready_once(sender: Sender<()>) -> impl Fn() {
    move || {
        // The receiver is gone if the work has ended.
        let _ = sender.send(());
    }
}

struct Tracer<'a> {
    process: OwnedFd,
    sent: &'a AtomicU64,
    /// Threads that have not stopped yet since they are followed.
    awaited: BTreeSet<libc::pid_t>,
}

impl<'a> Tracer<'a> {
    fn begin(process: libc::pid_t, sent: &'a AtomicU64) -> anyhow::Result<Self> {
        let pid = Pid::from_raw(process).context("no process has this number")?;
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).context("open a process")?;
        let mut tracer = Self { process: descriptor, sent, awaited: BTreeSet::new() };
        let mut known = BTreeSet::new();
        // Repeated until there is no thread that an untraced one has created.
        loop {
            let news: Vec<_> = threads(process)?.into_iter().filter(|thread| known.insert(*thread)).collect();
            if news.is_empty() {
                break;
            }
            for thread in news {
                if follow(thread)? {
                    tracer.awaited.insert(thread);
                }
            }
        }
        ensure!(!tracer.awaited.is_empty(), "no thread can be followed");
        Ok(tracer)
    }

    /// Until it shall end.
    fn run(mut self, ready: &dyn Fn(), ending: &AtomicBool) -> anyhow::Result<()> {
        let (deadline, mut is_ready) = (Instant::now() + PATIENCE, false);
        loop {
            if !is_ready && self.awaited.is_empty() {
                is_ready = true;
                ready();
            }
            match next_change()? {
                Some((thread, status)) => self.go_on(thread, status)?,
                None if ending.load(Ordering::Relaxed) => return Ok(()),
                None if !is_ready && Instant::now() > deadline => bail!("not all threads stop"),
                None => thread::sleep(PAUSE),
            }
        }
    }

    /// Handles a thread's stop, and lets it continue.
    fn go_on(&mut self, thread: libc::pid_t, status: i32) -> anyhow::Result<()> {
        self.awaited.remove(&thread);
        if !libc::WIFSTOPPED(status) {
            // It has ended.
            return Ok(());
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let mut delivered = 0;
        if signal == AT_CALL {
            if let Some((descriptor, count)) = sending(thread)?
                && self.is_route(descriptor)?
            {
                self.sent.fetch_add(count, Ordering::Relaxed);
            }
        } else if event == EVENT_STOP && signal != libc::SIGTRAP {
            // The whole process is stopped, as by SIGSTOP, and stays so.
            request(libc::PTRACE_LISTEN, thread, 0, 0)?;
            return Ok(());
        } else if event == 0 {
            delivered = signal;
        }
        request(libc::PTRACE_SYSCALL, thread, 0, delivered.cast_unsigned() as usize)?;
        Ok(())
    }

    /// Whether a descriptor of the process is a socket of the route netlink. The descriptor is duplicated into this
    /// process to find out: its number shows nothing, and its namespace may be any.
    fn is_route(&self, descriptor: i32) -> anyhow::Result<bool> {
        let Ok(copy) = pidfd_getfd(&self.process, descriptor, PidfdGetfdFlags::empty()) else {
            // It is no descriptor: the call will fail.
            return Ok(false);
        };
        match sockopt::socket_domain(&copy) {
            Ok(AddressFamily::NETLINK) => {}
            // Another kind of socket, or no socket.
            _ => return Ok(false),
        }
        // `NETLINK_ROUTE` is 0, which is no number of a `Protocol`.
        Ok(sockopt::socket_protocol(&copy).context("ask for a socket's protocol")?.is_none())
    }
}

fn threads(process: libc::pid_t) -> anyhow::Result<Vec<libc::pid_t>> {
    let tasks = format!("/proc/{process}/task");
    let names = fs::read_dir(&tasks).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let names = names.with_context(|| format!("list {tasks}"))?;
    let numbers = names.iter().map(|task| task.file_name().to_string_lossy().parse());
    numbers.collect::<Result<_, _>>().context("read the number of a thread")
}

/// Traces a thread; returns whether it exists and is not traced yet. Threads that a traced thread creates are traced
/// from the start.
fn follow(thread: libc::pid_t) -> anyhow::Result<bool> {
    let options = OPTIONS.cast_unsigned() as usize;
    match request(libc::PTRACE_SEIZE, thread, 0, options) {
        Ok(true) => {}
        Ok(false) => return Ok(false),
        Err(_) if is_followed(thread) => return Ok(false),
        Err(error) => return Err(error),
    }
    request(libc::PTRACE_INTERRUPT, thread, 0, 0)
}

/// Whether it is followed by the calling thread.
fn is_followed(thread: libc::pid_t) -> bool {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    status.lines().filter_map(|line| line.strip_prefix("TracerPid:")).any(|by| by.trim() == own)
}

/// Returns the next thread with an unhandled stop, if there is one.
fn next_change() -> anyhow::Result<Option<(libc::pid_t, i32)>> {
    let mut status = 0;
    // Only threads that this thread traces: other threads wait for processes of their own.
    let flags = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    // SAFETY: the status is written to a variable that lives through the call.
    match unsafe { libc::waitpid(-1, &raw mut status, flags) } {
        0 => Ok(None),
        thread @ 1.. => Ok(Some((thread, status))),
        _ => Err(io::Error::last_os_error()).context("no thread is left to follow"),
    }
}

/// Returns the descriptor to which a thread begins to write or to send, and the number of datagrams if it is a
/// datagram socket; `None` at any other system call, and at the end of one.
fn sending(thread: libc::pid_t) -> anyhow::Result<Option<(i32, u64)>> {
    let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
    let size = size_of_val(&info);
    if !request(libc::PTRACE_GET_SYSCALL_INFO, thread, size, info.as_mut_ptr().expose_provenance())? {
        return Ok(None);
    }
    // SAFETY: all of its bits are numbers, and those that the kernel has not written are zero.
    let info = unsafe { info.assume_init() };
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: at the entry of a call the kernel fills this member.
    let call = unsafe { info.u.entry };
    let count = match call.nr.cast_signed() {
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_write | libc::SYS_writev => 1,
        // The number that it wants to send.
        libc::SYS_sendmmsg => call.args[2],
        _ => return Ok(None),
    };
    // The kernel uses only the lower half.
    Ok(Some((call.args[0] as u32 as i32, count)))
}

/// Makes a request of ptrace(2); returns whether the thread still exists.
fn request(number: libc::c_uint, thread: libc::pid_t, address: usize, data: usize) -> anyhow::Result<bool> {
    // SAFETY: of the requests made here only PTRACE_GET_SYSCALL_INFO writes, at most as many bytes as its address says,
    // where its data leads; the others read and write no memory.
    if unsafe { libc::ptrace(number, thread, address, data) } >= 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        // It has ended, or is being ended.
        error if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        error => Err(error).with_context(|| format!("follow thread {thread}")),
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{Read, Write};
    use std::net::UdpSocket;
    use std::process::{Command, Stdio};

    use netlink_sys::{Socket, protocols::NETLINK_GENERIC};

    use super::*;
    use crate::netlink::Netlink;

    /// Makes the process with this variable the one that is followed.
    const FOLLOWED: &str = "NETATTACH_BENCH_FOLLOWED";
    const NAME: &str =
        "scale::trace::tests::datagrams_of_the_route_netlink_count_on_every_thread_and_no_others";

    /// Three datagrams of the route netlink, one by a new thread, and some others.
    fn followed() {
        let (mut line, mut route) = ([0], Netlink::open().unwrap());
        io::stdin().read_exact(&mut line).unwrap();
        let mut generic = Socket::new(NETLINK_GENERIC).unwrap();
        generic.bind_auto().unwrap();
        generic.send(&[0; 16], 0).unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.send_to(&[1], udp.local_addr().unwrap()).unwrap();
        route.link_names().unwrap();
        route.link_names().unwrap();
        thread::spawn(|| Netlink::open().unwrap().link_names().unwrap()).join().unwrap();
        fs::write("/dev/null", "done").unwrap();
        io::stderr().write_all(b".").unwrap();
        io::stdin().read_exact(&mut line).unwrap();
    }

    #[test]
    fn datagrams_of_the_route_netlink_count_on_every_thread_and_no_others() {
        if env::var_os(FOLLOWED).is_some() {
            return followed();
        }
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--nocapture", NAME])
            .env(FOLLOWED, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdin, mut stderr) = (child.stdin.take().unwrap(), child.stderr.take().unwrap());
        let count = following(child.id().cast_signed(), |sent| {
            let before = sent.load(Ordering::Relaxed);
            stdin.write_all(b"\n")?;
            stderr.read_exact(&mut [0])?;
            Ok((before, sent.load(Ordering::Relaxed)))
        });
        // It runs on by itself, and ends well.
        stdin.write_all(b"\n").unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(count.unwrap(), (0, 3));
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        let mut child = Command::new("true").spawn().unwrap();
        let number = child.id().cast_signed();
        child.wait().unwrap();
        let error = following(number, |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "count datagrams");
    }
}
