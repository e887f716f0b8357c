//! Programs of other agents: BPF that this crate loads and attaches as another agent would.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use netattach::bpf::sys::{self, Instruction, XdpMode};
use netattach::netlink::Handle;
use netattach::spec::TcHook;

use crate::Namespace;
use crate::node::ip;

/// `enum bpf_cmd`.
const PROG_LOAD: i32 = 5;
const PROG_ATTACH: i32 = 8;
const LINK_CREATE: i32 = 28;
/// `enum bpf_attach_type`.
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const NETKIT_PEER: u32 = 55;

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
    sys::load_classifier("foreign", &returns(verdict as i32)).context("load a program")
}

/// An XDP program that passes every frame on.
///
/// # Errors
/// The kernel refuses the program.
pub fn xdp_program() -> Result<OwnedFd> {
    /// `BPF_PROG_TYPE_XDP`, and `XDP_PASS` of `enum xdp_action`.
    const XDP: u32 = 6;
    const PASS: i32 = 2;
    /// The beginning of the `prog_load` member of `union bpf_attr`.
    #[repr(C)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
    }
    let instructions = returns(PASS);
    let load = Load {
        kind: XDP,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
    };
    // SAFETY: the pointers are to `count` instructions and to a string that ends in zero, both valid during the call.
    unsafe { bpf(PROG_LOAD, &load) }.context("load an XDP program")
}

/// r0 = `value`; exit
fn returns(value: i32) -> [Instruction; 2] {
    let instruction = |code, constant| Instruction { code, registers: 0, offset: 0, constant };
    [instruction(0xb7, value), instruction(0x95, 0)]
}

/// Runs an XDP program on a frame, as if received on the loopback device; returns its verdict (`enum xdp_action`).
///
/// # Errors
/// There is no such pin, or the kernel refuses.
pub fn run_xdp(pin: &Path, frame: &[u8]) -> Result<u32> {
    answer(pin, frame)
}

/// Runs a program of any kind on a frame, as if received on the loopback device; returns its answer. A socket filter
/// sees the packet from its network header on.
///
/// # Errors
/// There is no such pin, or the kernel refuses.
pub fn answer(pin: &Path, frame: &[u8]) -> Result<u32> {
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
    let hook = if ingress { TCX_INGRESS } else { TCX_EGRESS };
    attach_link(namespace, (device, hook), program).context("attach a program by tcx")
}

/// Attaches a program to packets sent by the peer of a netkit, through its primary end. The link ends with the
/// descriptor.
///
/// # Errors
/// The kernel refuses, for example if the device is not the primary end.
pub fn attach_netkit_peer(namespace: &Namespace, device: u32, program: &OwnedFd) -> Result<OwnedFd> {
    attach_link(namespace, (device, NETKIT_PEER), program).context("attach a program to a netkit")
}

fn attach_link(namespace: &Namespace, (device, hook): (u32, u32), program: &OwnedFd) -> Result<OwnedFd> {
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
    let create = Create { program: program.as_raw_fd().cast_unsigned(), device, hook, ..Create::default() };
    // SAFETY: the `link_create` member of `union bpf_attr` as far as tcx and netkit read it, without pointers.
    Ok(namespace.run(|| unsafe { bpf(LINK_CREATE, &create) })?)
}

/// Attaches a program by tcx without a link, after those already there.
///
/// # Errors
/// The kernel refuses.
pub fn attach_tcx_for_good(
    namespace: &Namespace,
    device: u32,
    ingress: bool,
    program: &OwnedFd,
) -> Result<()> {
    #[repr(C)]
    #[derive(Default)]
    struct Attach {
        device: u32,
        program: u32,
        hook: u32,
        flags: u32,
        replaced: u32,
        relative: u32,
        revision: u64,
    }
    let attach = Attach {
        device,
        program: program.as_raw_fd().cast_unsigned(),
        hook: if ingress { TCX_INGRESS } else { TCX_EGRESS },
        ..Attach::default()
    };
    namespace
        .run(|| {
            // SAFETY: the member of `union bpf_attr` for attaching, without pointers; the kernel only reads it.
            let done = unsafe {
                libc::syscall(libc::SYS_bpf, PROG_ATTACH, std::ptr::from_ref(&attach), size_of::<Attach>())
            };
            if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        })
        .context("attach a program by tcx without a link")
}

/// Attaches programs to a device in a pod that has the capabilities for it: of XDP, and by tcx on both hooks.
/// `by_link`: links hold that of XDP and one of tcx, and end with the returned descriptors.
///
/// # Errors
/// The kernel refuses.
pub fn occupy(namespace: &Namespace, device: &str, by_link: bool) -> Result<Vec<OwnedFd>> {
    let index = index_of(namespace, device)?;
    let (xdp, classifier) = (xdp_program()?, program(Verdict::Next)?);
    attach_tcx_for_good(namespace, index, true, &classifier)?;
    if by_link {
        let xdp = namespace.run(|| sys::xdp_attach(xdp.as_fd(), index, XdpMode::Generic))?;
        return Ok(vec![xdp, attach_tcx(namespace, index, false, &classifier)?]);
    }
    attach_tcx_for_good(namespace, index, false, &classifier)?;
    let attached =
        pinned(&xdp, |path| ip(namespace, &["link", "set", "dev", device, "xdpgeneric", "pinned", path]));
    attached.map(|()| Vec::new())
}

/// Kernel's ids of all programs on a device: of XDP, by tcx, and those of the first filters.
///
/// # Errors
/// The kernel refuses.
pub fn all_programs(namespace: &Namespace, device: &str) -> Result<Vec<u32>> {
    let index = index_of(namespace, device)?;
    let mut handle = Handle::open_in(namespace.netns())?;
    let mut ids: Vec<u32> = handle.xdp_programs(index)?.into_iter().map(|(_, id)| id).collect();
    for hook in [TcHook::Ingress, TcHook::Egress] {
        ids.extend(namespace.run(|| sys::tcx_programs(index, hook))?);
        ids.extend(handle.find_filters(index, hook)?.into_iter().filter_map(|filter| filter.program_id));
    }
    Ok(ids)
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
    let hook = if ingress { "ingress" } else { "egress" };
    let filter = format!("filter add dev {device} {hook} prio {priority} bpf direct-action object-pinned");
    pinned(&program(verdict)?, |path| tc(namespace, &format!("{filter} {path}")))
}

/// Calls `work` with the path of a pin of the program, which ends with the call.
fn pinned(program: &OwnedFd, work: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = format!("/sys/fs/bpf/netattach-foreign-{}-{number}", std::process::id());
    sys::pin(program.as_fd(), Path::new(&path))?;
    let worked = work(&path);
    fs::remove_file(&path)?;
    worked
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
    Ok(Handle::open_in(namespace.netns())?.link(device)?.index)
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
