//! Runs work with only the capabilities that a container may have, or with fewer features of the kernel.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// All capabilities over networks that a container can be given.
pub const OVER_THE_NETWORK: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::BPF);

/// Runs `work` on a thread of the calling thread's namespaces that has exactly these capabilities; programs that it
/// starts have the same.
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
    on_its_own_thread(limited)
}

/// Runs `work` on a thread of the calling thread's namespaces for which, as for the programs that it starts, bpf(2)
/// is missing, as with a kernel that was built without `CONFIG_BPF_SYSCALL`.
///
/// # Errors
/// The kernel accepts no filter of system calls, or the work's own error.
pub fn without_bpf<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    filtered(&[(NUMBER, libc::SYS_bpf as u32)], libc::ENOSYS, work)
}

/// The same without sockets of nftables, as with a kernel that was built without `CONFIG_NETFILTER_NETLINK`.
///
/// # Errors
/// The kernel accepts no filter of system calls, or the work's own error.
pub fn without_nftables<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let family = (argument(0), libc::AF_NETLINK as u32);
    let protocol = (argument(2), libc::NETLINK_NETFILTER as u32);
    filtered(&[(NUMBER, libc::SYS_socket as u32), family, protocol], libc::EPROTONOSUPPORT, work)
}

/// Offset of the system call's number in `struct seccomp_data` (`linux/seccomp.h`).
const NUMBER: u32 = 0;

/// Offset there of the lower half of an argument, on a little-endian machine.
const fn argument(number: u32) -> u32 {
    16 + 8 * number
}

/// Runs `work` on a thread for which system calls that have all these words at these offsets fail with that number.
fn filtered<T: Send>(words: &[(u32, u32)], errno: i32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let limited = || {
        let mut steps = Vec::new();
        for (at, (place, word)) in words.iter().enumerate() {
            steps.push(step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, *place));
            // Past the words that follow, each of two steps, and past the refusal.
            let pass = 2 * (words.len() - at - 1) + 1;
            steps.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, u8::try_from(pass)?, *word));
        }
        steps.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
        steps.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the kernel reads the filter, whose pointer is to as many steps as it says.
        let set =
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter) };
        if set != 0 {
            return Err(io::Error::last_os_error()).context("filter system calls");
        }
        work()
    };
    on_its_own_thread(limited)
}

/// A thread cannot regain the privileges that it gives up, so the work has its own thread.
fn on_its_own_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| match scope.spawn(work).join() {
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
