//! Kernel-side view of a running agent: its programs and the policy words of its attachments.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// `enum bpf_cmd`.
const PROG_LOAD: i32 = 5;
const OBJ_GET: i32 = 7;
const PROG_TEST_RUN: i32 = 10;
const OBJ_GET_INFO: i32 = 15;

/// Polling interval of the kernel's map.
const TICK: Duration = Duration::from_micros(100);

/// The policies of every attachment, by its number, in the form that the programs read.
pub(super) struct Words {
    start: NonNull<AtomicU64>,
    count: usize,
}

impl Words {
    /// Opens the pinned map `na_policy`, for attachments up to this number.
    pub(super) fn open(pin: &Path, count: usize) -> anyhow::Result<Self> {
        let map = open_pin(pin)?;
        // SAFETY: a new mapping at an address of the kernel's choice; it refuses one that is longer than the map.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * size_of::<u64>(),
                libc::PROT_READ,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        ensure!(start != libc::MAP_FAILED, "map {}: {}", pin.display(), io::Error::last_os_error());
        Ok(Self { start: NonNull::new(start.cast()).context("the map is at address 0")?, count })
    }

    /// The word of an attachment.
    pub(super) fn get(&self, attachment: usize) -> u64 {
        if attachment >= self.count {
            return 0;
        }
        // SAFETY: within the mapping, which lives as long as this; the kernel's side is written as a whole.
        unsafe { self.start.add(attachment).as_ref() }.load(Ordering::Acquire)
    }

    /// Waits at most that long until an attachment's word meets the condition.
    ///
    /// # Errors
    /// It takes longer.
    pub(super) fn wait(
        &self,
        attachment: usize,
        patience: Duration,
        is_done: impl Fn(u64) -> bool,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        while !is_done(self.get(attachment)) {
            ensure!(Instant::now() < deadline, "a policy is not in force after {patience:?}");
            thread::sleep(TICK);
        }
        Ok(())
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`, which has no references any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * size_of::<u64>()) };
    }
}

/// The `test` member of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    verdict: u32,
    size_in: u32,
    size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_size_in: u32,
    context_size_out: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;

/// A loaded program.
pub(super) struct Program(OwnedFd);

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Program {
    pub(super) fn open(pin: &Path) -> anyhow::Result<Self> {
        Ok(Self(open_pin(pin)?))
    }

    /// A classifier that passes every packet: its cost is that of measuring.
    pub(super) fn that_does_nothing() -> anyhow::Result<Self> {
        // r0 = 0; exit.
        Self::load(CLASSIFIER, &[0xb7, 0x95]).context("load a program that does nothing")
    }

    /// Loads a classifier that only redirects every packet to the interface whose end on the node is this device: the
    /// minimum for a program that moves packets from pod to pod.
    pub(super) fn that_redirects(device: u32) -> anyhow::Result<Self> {
        /// `BPF_FUNC_skb_change_type`: the packet is addressed to the pod, not to the device that received it.
        const CHANGE_TYPE: u64 = 32;
        /// `BPF_FUNC_redirect_peer`.
        const REDIRECT_PEER: u64 = 155;
        let call = |helper: u64| helper << 32 | 0x85;
        let code = [
            // r2 = PACKET_HOST; the context is in r1.
            0x2b7,
            call(CHANGE_TYPE),
            // r1 = device; r2 = 0, no flags; the call's result is the verdict.
            u64::from(device) << 32 | 0x1b7,
            0x2b7,
            call(REDIRECT_PEER),
            0x95,
        ];
        Self::load(CLASSIFIER, &code).context("load a program that redirects")
    }

    /// Loads a program for the entry of a kernel function, which counts the calls whose first argument is this.
    pub(super) fn that_counts(argument: u64) -> anyhow::Result<Self> {
        /// `BPF_PROG_TYPE_KPROBE`.
        const KPROBE: u32 = 2;
        Self::load(KPROBE, &counting(argument)).context("load a program that counts calls")
    }

    /// An XDP program of these instructions.
    pub(super) fn of_xdp(code: &[u64]) -> anyhow::Result<Self> {
        /// `BPF_PROG_TYPE_XDP`.
        const XDP: u32 = 6;
        Self::load(XDP, code).context("load an XDP program")
    }

    fn load(kind: u32, code: &[u64]) -> io::Result<Self> {
        #[repr(C)]
        #[derive(Default)]
        struct Load {
            kind: u32,
            length: u32,
            instructions: u64,
            license: u64,
            rest: [u64; 12],
        }
        let load = Load {
            kind,
            length: code.len() as u32,
            instructions: code.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
            ..Load::default()
        };
        // SAFETY: the beginning of the `prog_load` member of `union bpf_attr`, the rest zero; both pointers are valid during
        // the call.
        let fd = unsafe { bpf(PROG_LOAD, &load) }?;
        // SAFETY: the kernel has just made this descriptor for us alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The number of instructions that the verifier processed.
    pub(super) fn verified_instructions(&self) -> anyhow::Result<u32> {
        #[repr(C)]
        struct InfoByFd {
            fd: u32,
            length: u32,
            info: u64,
        }
        /// Its offset in `struct bpf_prog_info`, in words of four bytes.
        const VERIFIED: usize = 54;
        let mut info = [0_u32; VERIFIED + 1];
        let request = InfoByFd {
            fd: self.0.as_raw_fd().unsigned_abs(),
            length: size_of_val(&info) as u32,
            info: info.as_mut_ptr() as u64,
        };
        // SAFETY: the `info` member of `union bpf_attr`; the kernel writes at most `length` bytes, for which there is room.
        unsafe { bpf(OBJ_GET_INFO, &request) }.context("ask for a program")?;
        Ok(info[VERIFIED])
    }

    /// Runs it on a frame that many times, as if on a device of the calling thread's namespace; returns the verdict
    /// of the last run, and the time of one.
    pub(super) fn run(&self, frame: &[u8], device: u32, repeat: u32) -> anyhow::Result<(i32, Duration)> {
        /// Words of `struct __sk_buff` up to `ifindex`, which is the eleventh.
        const CONTEXT: usize = 11;
        let mut context = [0_u32; CONTEXT];
        context[CONTEXT - 1] = device;
        let done = self.test(TestRun {
            size_in: frame.len() as u32,
            data_in: frame.as_ptr() as u64,
            repeat,
            context_size_in: size_of_val(&context) as u32,
            context_in: context.as_ptr() as u64,
            ..TestRun::default()
        })?;
        Ok((done.verdict.cast_signed(), Duration::from_nanos(done.duration.into())))
    }

    /// Runs an XDP program on that many frames, each of which is really sent to its destination.
    pub(super) fn run_live(&self, frame: &[u8], count: u32) -> anyhow::Result<()> {
        /// `BPF_F_TEST_XDP_LIVE_FRAMES`.
        const LIVE_FRAMES: u32 = 2;
        let run = TestRun {
            size_in: frame.len() as u32,
            data_in: frame.as_ptr() as u64,
            repeat: count,
            flags: LIVE_FRAMES,
            ..TestRun::default()
        };
        self.test(run).map(drop)
    }

    /// The pointers must be valid for the sizes beside them.
    fn test(&self, run: TestRun) -> anyhow::Result<TestRun> {
        let request =
            std::cell::UnsafeCell::new(TestRun { program: self.0.as_raw_fd().unsigned_abs(), ..run });
        // SAFETY: the `test` member of `union bpf_attr`; its pointers are those of borrowed slices, of the sizes beside them, and
        // what the kernel writes into the member the cell allows.
        unsafe { bpf(PROG_TEST_RUN, &request) }.context("run a program")?;
        Ok(request.into_inner())
    }
}

/// Returns instructions that return 1 if a function's first argument is this, and else 0, which is not counted.
fn counting(argument: u64) -> [u64; 7] {
    /// Offset of the first argument in `struct pt_regs`: `di`, or the first of all registers.
    const FIRST: u64 = if cfg!(target_arch = "x86_64") { 112 } else { 0 };
    [
        // r2 = the first argument; r1 points to the registers.
        FIRST << 16 | 0x1279,
        // r3 = the argument that is looked for, in two halves.
        (argument & 0xffff_ffff) << 32 | 0x318,
        argument & 0xffff_ffff_0000_0000,
        // r0 = 0; if r2 != r3 skip the next one: r0 = 1; exit.
        0xb7,
        1 << 16 | 0x325d,
        1 << 32 | 0xb7,
        0x95,
    ]
}

fn open_pin(pin: &Path) -> anyhow::Result<OwnedFd> {
    #[repr(C)]
    struct Get {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let path = CString::new(pin.as_os_str().as_bytes()).context("a path with a NUL")?;
    let get = Get { path: path.as_ptr() as u64, fd: 0, flags: 0 };
    // SAFETY: the member of `union bpf_attr` that opens pins; the path ends with NUL and outlives the call.
    let fd = unsafe { bpf(OBJ_GET, &get) }.with_context(|| format!("open {}", pin.display()))?;
    // SAFETY: the kernel has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `bpf(2)`.
///
/// # Safety
/// `T` must be laid out as the member of `union bpf_attr` that the command reads, with pointers that are valid for it.
unsafe fn bpf<T>(command: i32, attributes: &T) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer as i32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_compared_whole() {
        let code = counting(0xffff_8123_4567_89ab);
        let halves = code[1..3].iter().map(|instruction| (instruction >> 32) as u32).collect::<Vec<_>>();
        assert_eq!(halves, [0x4567_89ab, 0xffff_8123]);
        // The load from the registers: its destination, its source and its offset.
        assert_eq!(code[0] & 0xffff, 0x1279);
        assert_eq!(code[0] >> 16, if cfg!(target_arch = "x86_64") { 112 } else { 0 });
    }
}
