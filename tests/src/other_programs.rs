//! Programs of other agents: BPF that this crate loads and attaches as another agent would.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use netattach::bpf::sys::{self, Instruction};
use netattach::spec::TcHook;

use crate::Namespace;

/// `enum bpf_cmd`.
const LINK_CREATE: i32 = 28;
/// `enum bpf_attach_type`.
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;

/// The verdict of a program on every packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `TCX_NEXT`, which is `TC_ACT_UNSPEC`: later programs decide.
    Next = -1,
    /// `TCX_PASS`, which is `TC_ACT_OK`: no later program runs.
    Pass = 0,
    /// `TCX_DROP`, which is `TC_ACT_SHOT`.
    Drop = 2,
}

/// A program that returns one verdict for every packet.
///
/// # Errors
/// The kernel refuses the program.
pub fn program(verdict: Verdict) -> Result<OwnedFd> {
    let instruction = |code, constant| Instruction { code, registers: 0, offset: 0, constant };
    // r0 = verdict; exit
    let instructions = [instruction(0xb7, verdict as i32), instruction(0x95, 0)];
    sys::load_classifier("foreign", &instructions).context("load a program")
}

/// Runs an XDP program on a frame, as if it came in by the loopback device; returns its answer (`enum xdp_action`).
///
/// # Errors
/// There is no such pin, or the kernel refuses.
pub fn run_xdp(pin: &Path, frame: &[u8]) -> Result<u32> {
    /// `BPF_PROG_TEST_RUN`.
    const PROG_TEST_RUN: i32 = 10;
    #[repr(C)]
    struct Run {
        program: u32,
        answer: u32,
        length: u32,
        length_out: u32,
        frame: u64,
        frame_out: u64,
        repeat: u32,
        duration: u32,
    }
    let program = sys::open_pin(pin)?;
    let mut run = Run {
        program: program.as_raw_fd().cast_unsigned(),
        answer: 0,
        length: frame.len() as u32,
        length_out: 0,
        frame: frame.as_ptr() as u64,
        frame_out: 0,
        repeat: 1,
        duration: 0,
    };
    // SAFETY: the beginning of the `test` member of `union bpf_attr`, which the kernel writes the answer into; the frame
    // outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_bpf, PROG_TEST_RUN, &raw mut run, size_of::<Run>()) };
    ensure!(done == 0, "run {}: {}", pin.display(), io::Error::last_os_error());
    Ok(run.answer)
}

/// Attaches a program by tcx, after those already there. The link ends with the descriptor.
///
/// # Errors
/// The kernel refuses.
pub fn attach_tcx(namespace: &Namespace, device: u32, ingress: bool, program: &OwnedFd) -> Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Create {
        program: u32,
        device: u32,
        hook: u32,
        flags: u32,
        relative: u32,
        pad: u32,
        revision: u64,
    }
    let create = Create {
        program: program.as_raw_fd().cast_unsigned(),
        device,
        hook: if ingress { TCX_INGRESS } else { TCX_EGRESS },
        ..Create::default()
    };
    // SAFETY: the `link_create` member of `union bpf_attr` as far as tcx reads it, without pointers.
    namespace.run(|| unsafe { bpf(LINK_CREATE, &create) }).context("attach a program by tcx")
}

/// Names of a device's tcx programs, in the order in which packets meet them.
///
/// # Errors
/// The kernel refuses.
pub fn tcx_programs(namespace: &Namespace, device: u32, hook: TcHook) -> Result<Vec<String>> {
    let ids = namespace.run(|| sys::tcx_programs(device, hook))?;
    // A program that has gone meanwhile has no name.
    ids.into_iter().filter_map(|id| sys::program_name(id).transpose()).map(|name| Ok(name?)).collect()
}

/// Attaches a program as a clsact filter of that priority.
///
/// # Errors
/// `tc` refuses.
pub fn attach_filter(
    namespace: &Namespace,
    device: &str,
    ingress: bool,
    priority: u32,
    verdict: Verdict,
) -> Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = format!("/sys/fs/bpf/netattach-foreign-{}-{number}", std::process::id());
    let path = Path::new(&path);
    sys::pin(program(verdict)?.as_fd(), path)?;
    let hook = if ingress { "ingress" } else { "egress" };
    let words = format!(
        "filter add dev {device} {hook} prio {priority} bpf direct-action object-pinned {}",
        path.display()
    );
    let attached = tc(namespace, &words);
    fs::remove_file(path)?;
    attached
}

/// Runs `tc` in a namespace, with arguments separated by blanks.
///
/// # Errors
/// `tc` fails.
pub fn tc(namespace: &Namespace, words: &str) -> Result<()> {
    let output = namespace.run(|| Command::new("tc").args(words.split(' ')).output())?;
    ensure!(output.status.success(), "tc {words}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Index of a device by its name.
///
/// # Errors
/// There is no such device.
pub fn index_of(namespace: &Namespace, device: &str) -> Result<u32> {
    Ok(netattach::netlink::Handle::open_in(namespace.netns())?.link(device)?.index)
}

/// Calls `bpf(2)` with a command that returns a descriptor.
///
/// # Safety
/// `T` must be laid out as the member of `union bpf_attr` that `command` reads, its pointers valid.
unsafe fn bpf<T>(command: i32, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel copies `size_of::<T>()` bytes; the rest is the caller's promise.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
