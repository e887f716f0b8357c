//! Work with only the capabilities that a container may be given.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// All capabilities over its own network namespace that a container can be given; none of them reaches beyond it.
pub const OVER_THE_NETWORK: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::BPF);

/// Runs `work` on a thread of the calling thread's namespaces that has exactly these capabilities, as have the programs
/// that it starts.
///
/// # Errors
/// The other capabilities could not be dropped, or the work's own error.
pub fn with_only<T: Send>(kept: CapabilitySet, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let limited = || {
        for given_up in CapabilitySet::all().difference(kept).iter() {
            match rustix::thread::remove_capability_from_bounding_set(given_up) {
                // The kernel does not know this capability.
                Err(rustix::io::Errno::INVAL) => {}
                removed => removed.with_context(|| format!("give up {given_up:?}"))?,
            }
        }
        let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
        rustix::thread::set_capabilities(None, sets).context("set capabilities")?;
        work()
    };
    std::thread::scope(|scope| match scope.spawn(limited).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Loads a classifier that passes every packet and keeps later programs from running (`TCX_PASS`).
///
/// # Errors
/// The kernel refuses.
pub fn load_pass_everything() -> io::Result<OwnedFd> {
    const BPF_PROG_LOAD: libc::c_int = 5;
    const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
    /// `mov r0, 0` and `exit` (`linux/bpf.h`, `struct bpf_insn`).
    const INSTRUCTIONS: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    /// The beginning of the `prog_load` member of `union bpf_attr`.
    #[repr(C)]
    struct Load {
        kind: u32,
        instructions: u32,
        code: u64,
        license: u64,
    }
    let load = Load {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        instructions: INSTRUCTIONS.len() as u32,
        code: INSTRUCTIONS.as_ptr() as u64,
        license: c"MIT".as_ptr() as u64,
    };
    // SAFETY: the kernel reads as many bytes of `load` as it is long; both pointers are to constants.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const load, size_of::<Load>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us alone; descriptors fit.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
