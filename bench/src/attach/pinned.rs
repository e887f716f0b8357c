//! A BPF program that an agent has pinned.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

/// `BPF_OBJ_GET` (`linux/bpf.h`).
const OBJECT_GET: libc::c_int = 7;
/// Below the directory of a layout's version.
const PROGRAM: &str = "prog/na_from_pod";

/// The attributes of `BPF_OBJ_GET`; omitted fields of the kernel's union count as 0.
#[repr(C)]
struct ObjectGet {
    /// Address of a path that ends with a zero byte.
    path: u64,
    descriptor: u32,
    flags: u32,
}

/// The agent may not have loaded its programs yet; it answers afterwards.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Opens the program for a pod's outgoing packets, of the only layout version pinned below `pins`.
pub(super) fn open_program(pins: &Path) -> anyhow::Result<OwnedFd> {
    let deadline = Instant::now() + crate::stretched(START_TIMEOUT);
    loop {
        match try_open(pins) {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            result => return result,
        }
    }
}

fn try_open(pins: &Path) -> anyhow::Result<OwnedFd> {
    let mut versions = fs::read_dir(pins).with_context(|| format!("list {}", pins.display()))?;
    let version = versions.next().with_context(|| format!("nothing is pinned below {}", pins.display()))?;
    let path = version.context("list the agent's pins")?.path().join(PROGRAM);
    open(&path).with_context(|| format!("open the program {}", path.display()))
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let mut text = path.as_os_str().as_bytes().to_vec();
    text.push(0);
    let attributes = ObjectGet { path: text.as_ptr().addr() as u64, descriptor: 0, flags: 0 };
    // SAFETY: the kernel reads the attributes, which live through the call and have the size that is passed, and the
    // path, which also lives through it and ends with a zero byte; it writes nothing.
    let opened =
        unsafe { libc::syscall(libc::SYS_bpf, OBJECT_GET, &raw const attributes, size_of::<ObjectGet>()) };
    match i32::try_from(opened) {
        // SAFETY: the kernel has just opened it for us.
        Ok(descriptor @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}
