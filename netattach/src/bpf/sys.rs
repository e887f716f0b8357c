//! The few `bpf(2)` and memory calls that aya does not offer: tcx links by device index, what a link is
//! attached to, and the memory map of an array.

use std::cell::UnsafeCell;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the kernel says about a link (`struct bpf_link_info`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkInfo {
    /// Id of the link.
    pub id: u32,
    /// Id of the program it runs.
    pub program_id: u32,
    /// Index of the device, 0 when the device is gone.
    pub ifindex: u32,
    /// `enum bpf_attach_type`.
    pub attach_type: u32,
}

/// A hook of a device, as the device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What comes in by the device.
    Ingress,
    /// What leaves by it.
    Egress,
}

/// Attaches a program to a device by tcx (Linux 6.6): right after a link that is there, or before all others. The link lives
/// as long as its descriptor or a pin of it. `ifindex` counts in the calling thread's network namespace.
///
/// # Errors
///
/// `EEXIST` when the program is attached there already; `EINVAL` before Linux 6.6; `ENODEV`; `ENOENT` when the other link
/// is not on that hook any more.
pub fn tcx_attach(
    program: BorrowedFd<'_>,
    ifindex: u32,
    direction: Direction,
    after: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct LinkCreate {
        prog_fd: u32,
        target_ifindex: u32,
        attach_type: u32,
        flags: u32,
        relative_fd: u32,
        pad: u32,
        expected_revision: u64,
    }
    /// With no relative program: before the first.
    const BPF_F_BEFORE: u32 = 8;
    const BPF_F_AFTER: u32 = 1 << 4;
    /// What it is relative to is a link, not a program.
    const BPF_F_LINK: u32 = 1 << 13;
    let attributes = LinkCreate {
        prog_fd: raw(program),
        target_ifindex: ifindex,
        attach_type: attach_type(direction),
        flags: if after.is_some() { BPF_F_AFTER | BPF_F_LINK } else { BPF_F_BEFORE },
        relative_fd: after.map_or(0, raw),
        ..LinkCreate::default()
    };
    // SAFETY: `LinkCreate` is the `link_create` member of `union bpf_attr` as far as tcx reads it; it holds
    // no pointers.
    unsafe { bpf_fd(Command::LinkCreate, &attributes) }
}

/// How a device runs an XDP program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XdpMode {
    /// By its driver, before there is a packet of the kernel's.
    Native,
    /// By the kernel, as the first that it does with a packet: on every device, for little gain.
    Generic,
}

/// Attaches an XDP program to a device. The link lives as long as its descriptor or a pin of it.
///
/// # Errors
/// `EOPNOTSUPP` when the driver has no native mode; `EBUSY` when another program runs there; `EINVAL` when the device is not
/// in a state in which it could; `ENODEV`.
pub fn xdp_attach(program: BorrowedFd<'_>, ifindex: u32, mode: XdpMode) -> io::Result<OwnedFd> {
    /// `BPF_XDP` of `enum bpf_attach_type`.
    const BPF_XDP: u32 = 37;
    // `linux/if_link.h`: `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE`.
    let flags = match mode {
        XdpMode::Generic => 1 << 1,
        XdpMode::Native => 1 << 2,
    };
    let attributes = [raw(program), ifindex, BPF_XDP, flags];
    // SAFETY: the beginning of the `link_create` member of `union bpf_attr`, without pointers; the command returns a new
    // descriptor.
    unsafe { bpf_fd(Command::LinkCreate, &attributes) }
}

/// Replaces the program of a link. No packet passes between the old and the new one.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct LinkUpdate {
        link_fd: u32,
        new_prog_fd: u32,
        flags: u32,
        old_prog_fd: u32,
    }
    let attributes = LinkUpdate { link_fd: raw(link), new_prog_fd: raw(program), flags: 0, old_prog_fd: 0 };
    // SAFETY: `LinkUpdate` is the `link_update` member of `union bpf_attr`; it holds no pointers.
    unsafe { bpf(Command::LinkUpdate, &attributes) }.map(drop)
}

/// The device of a link does not run its program any more when this returns; the link itself is gone with its last pin and
/// descriptor, which the kernel sees to in its own time.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let link_fd: u32 = raw(link);
    // SAFETY: the `link_detach` member of `union bpf_attr`, one descriptor without pointers.
    unsafe { bpf(Command::LinkDetach, &link_fd) }.map(drop)
}

/// An instruction (`struct bpf_insn`), in the byte order of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// What it does.
    pub code: u8,
    /// The destination in the lower half, the source in the upper one.
    pub registers: u8,
    /// Of memory or of a jump.
    pub offset: i16,
    /// The immediate operand.
    pub constant: i32,
}

/// Loads a classifier of so few instructions that it needs no object. It lives as long as its descriptor or a link that
/// runs it. `name`: letters, digits and underscores, 15 at most.
///
/// # Errors
/// The verifier refuses it.
pub fn load_classifier(name: &str, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    /// The beginning of the `prog_load` member of `union bpf_attr`.
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
    }
    /// `BPF_PROG_TYPE_SCHED_CLS`.
    const CLASSIFIER: u32 = 3;
    let mut load = Load {
        kind: CLASSIFIER,
        count: u32::try_from(instructions.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        ..Load::default()
    };
    // The last byte stays zero.
    for (to, from) in load.name[..15].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: the pointers are to `count` instructions and to a string that ends in zero, both valid during the call.
    unsafe { bpf_fd(Command::ProgLoad, &load) }
}

/// Pins a program, map or link. Names in a BPF filesystem hold no dots.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = PinAttributes { pathname: path.as_ptr() as u64, bpf_fd: raw(object), file_flags: 0 };
    // SAFETY: `pathname` points to a NUL-terminated string that outlives the call.
    unsafe { bpf(Command::ObjectPin, &attributes) }.map(drop)
}

/// Opens a pin.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = PinAttributes { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    // SAFETY: as in `pin`; the command returns a new descriptor.
    unsafe { bpf_fd(Command::ObjectGet, &attributes) }
}

/// What a tcx link is attached to.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
        program_id: u32,
        pad: u32,
        ifindex: u32,
        attach_type: u32,
    }
    let mut info = Info::default();
    let attributes =
        InfoByFd { bpf_fd: raw(link), info_len: size_of::<Info>() as u32, info: (&raw mut info) as u64 };
    // SAFETY: `info` is valid for `info_len` bytes, which bounds what the kernel writes, and is not otherwise
    // used during the call; any bytes make a valid `Info`.
    unsafe { bpf(Command::ObjectInfo, &attributes) }?;
    Ok(LinkInfo {
        id: info.id,
        program_id: info.program_id,
        ifindex: info.ifindex,
        attach_type: info.attach_type,
    })
}

/// Kernel's ids of the programs that run on a hook of a device by tcx, in the order in which packets meet them. None before
/// Linux 6.6, and none where the device is gone.
pub fn tcx_programs(ifindex: u32, direction: Direction) -> io::Result<Vec<u32>> {
    /// `BPF_MPROG_MAX`.
    const MOST: usize = 64;
    let mut ids = [0_u32; MOST];
    let query = UnsafeCell::new(Query {
        prog_ids: ids.as_mut_ptr() as u64,
        count: MOST as u32,
        ..Query::of(ifindex, attach_type(direction))
    });
    // SAFETY: the `query` member of `union bpf_attr`; `prog_ids` has room for `count` numbers and is not otherwise used
    // during the call. The kernel writes into the member and not beyond, which the cell allows.
    match unsafe { bpf(Command::ProgQuery, &query) } {
        Ok(_) => {
            let count = query.into_inner().count as usize;
            Ok(ids.into_iter().take(count).collect())
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP | libc::ENODEV) => Ok(Vec::new()),
            _ => Err(error),
        },
    }
}

/// The `query` member of `union bpf_attr`, to its end in Linux 6.18: the kernel writes counts back.
#[repr(C)]
#[derive(Default)]
pub(super) struct Query {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

impl Query {
    /// Asks whether there are any.
    pub(super) fn of(device: u32, attach_type: u32) -> Self {
        Self { target_ifindex: device, attach_type, ..Self::default() }
    }
}

/// Name of the program with that id, `None` when it is gone.
pub fn program_name(id: u32) -> io::Result<Option<String>> {
    /// The beginning of `struct bpf_prog_info`, to the name.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind_and_id: [u32; 2],
        tag: [u8; 8],
        lengths: [u32; 2],
        pointers_and_time: [u64; 3],
        owner_and_maps: [u32; 2],
        map_ids: u64,
        name: [u8; 16],
    }
    // SAFETY: the member of `union bpf_attr` that begins with the id, without pointers; the command returns a new
    // descriptor.
    let program = match unsafe { bpf_fd(Command::ProgGetFdById, &[id, 0, 0]) } {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        other => other?,
    };
    let mut info = Info::default();
    let attributes = InfoByFd {
        bpf_fd: program.as_raw_fd().unsigned_abs(),
        info_len: size_of::<Info>() as u32,
        info: (&raw mut info) as u64,
    };
    // SAFETY: `info` is valid for `info_len` bytes, which bounds what the kernel writes, and is not otherwise used
    // during the call; any bytes make a valid `Info`.
    unsafe { bpf(Command::ObjectInfo, &attributes) }?;
    let end = info.name.iter().position(|byte| *byte == 0).unwrap_or(info.name.len());
    Ok(Some(String::from_utf8_lossy(&info.name[..end]).into_owned()))
}

/// What [`lookup_batch`] found.
pub(super) struct Batch {
    /// How many entries were written.
    pub(super) count: usize,
    /// Where to go on; `None` after the last entry.
    pub(super) next: Option<u32>,
}

/// Copies entries of a hash map, whole buckets at a time, from where the batch before stopped (Linux 5.6). Entries that come
/// and go meanwhile may be missed or not; no other is missed or given twice.
///
/// # Errors
/// `ENOSPC` when a bucket has more entries than there is room for.
pub(super) fn lookup_batch<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    from: Option<u32>,
    keys: &mut [K],
    values: &mut [V],
) -> io::Result<Batch> {
    let mut next = 0_u32;
    let cursor = from.unwrap_or_default();
    let room = u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX);
    let attributes = UnsafeCell::new(BatchAttributes {
        in_batch: if from.is_some() { (&raw const cursor) as u64 } else { 0 },
        out_batch: (&raw mut next) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: room,
        map_fd: raw(map),
        ..BatchAttributes::default()
    });
    // SAFETY: the `batch` member of `union bpf_attr`. Keys and values have room for `count` entries of the map's sizes,
    // which its opener has checked, and any bytes make valid ones; positions are 32 bits for hash maps. The kernel writes the
    // number of entries back, which the cell allows.
    let result = unsafe { bpf(Command::MapLookupBatch, &attributes) };
    let count = attributes.into_inner().count as usize;
    match result {
        Ok(_) => Ok(Batch { count, next: Some(next) }),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Batch { count, next: None }),
        Err(error) => Err(error),
    }
}

/// The `batch` member of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct BatchAttributes {
    pub(super) in_batch: u64,
    pub(super) out_batch: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) count: u32,
    pub(super) map_fd: u32,
    pub(super) elem_flags: u64,
    pub(super) flags: u64,
}

/// Kernel's id of a loaded program.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    /// The beginning of `struct bpf_prog_info`.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
    }
    let mut info = Info::default();
    let attributes =
        InfoByFd { bpf_fd: raw(program), info_len: size_of::<Info>() as u32, info: (&raw mut info) as u64 };
    // SAFETY: `info` is valid for `info_len` bytes, which bounds what the kernel writes, and is not otherwise
    // used during the call; any bytes make a valid `Info`.
    unsafe { bpf(Command::ObjectInfo, &attributes) }?;
    Ok(info.id)
}

/// An array of 64-bit words shared with the kernel: a `BPF_F_MMAPABLE` array map with 8-byte values.
#[derive(Debug)]
pub(super) struct SharedWords {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the memory is only reached through `AtomicU64`, from any thread, and stays mapped until `drop`.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the first `len` words of an array map.
    pub(super) fn map(array: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice; the kernel refuses a length beyond the
        // map's.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len * size_of::<AtomicU64>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                array.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
        Ok(Self { start, len })
    }

    /// How many words there are.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.len).unwrap_or(u32::MAX)
    }

    /// The word at an index.
    pub(super) fn get(&self, index: u32) -> Option<u64> {
        self.word(index).map(|word| word.load(Ordering::Acquire))
    }

    /// Replaces the word at an index, whole. `None`: no such index.
    pub(super) fn set(&self, index: u32, value: u64) -> Option<()> {
        self.word(index).map(|word| word.store(value, Ordering::Release))
    }

    fn word(&self, index: u32) -> Option<&AtomicU64> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.len)?;
        // SAFETY: index < len, and the mapping is page-aligned and lives as long as `self`.
        Some(unsafe { self.start.add(index).as_ref() })
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len * size_of::<AtomicU64>()) };
    }
}

/// Gives memory that was freed back to the kernel. Loading programs parses the kernel's type information,
/// tens of megabytes that glibc would keep for the rest of the agent's life.
pub(super) fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no arguments that could be wrong; glibc locks its arenas itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// `enum bpf_cmd`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum Command {
    MapCreate = 0,
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    MapGetNextKey = 4,
    ProgLoad = 5,
    ObjectPin = 6,
    ObjectGet = 7,
    ProgGetFdById = 13,
    ObjectInfo = 15,
    ProgQuery = 16,
    BtfLoad = 18,
    MapLookupBatch = 24,
    MapUpdateBatch = 26,
    MapDeleteBatch = 27,
    LinkCreate = 28,
    LinkUpdate = 29,
    LinkDetach = 34,
}

/// The `info` member of `union bpf_attr`.
#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

#[repr(C)]
struct PinAttributes {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
fn attach_type(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => 46,
        Direction::Egress => 47,
    }
}

pub(super) fn raw(fd: BorrowedFd<'_>) -> u32 {
    // A descriptor that is open is never negative.
    fd.as_raw_fd().unsigned_abs()
}

/// Calls `bpf(2)`.
///
/// # Safety
///
/// `T` must be laid out as the member of `union bpf_attr` that `command` reads, and its pointers must be valid
/// for what the kernel reads and writes through them.
pub(super) unsafe fn bpf<T>(command: Command, attributes: &T) -> io::Result<i32> {
    // SAFETY: the kernel copies `size_of::<T>()` bytes from `attributes`; the rest is the caller's promise.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as i32, std::ptr::from_ref(attributes), size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// Calls `bpf(2)` with a command that returns a descriptor.
///
/// # Safety
///
/// As for [`bpf`].
pub(super) unsafe fn bpf_fd<T>(command: Command, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has just created this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
