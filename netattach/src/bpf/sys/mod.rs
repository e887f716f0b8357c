//! The `bpf(2)` calls that aya does not provide.
//!
//! | module | calls |
//! |---|---|
//! | `links` | tcx and XDP links by device index, and the device and program of a link; programs without links |
//! | `programs` | programs of a few instructions; ids and names of loaded programs |
//! | `pins` | pins of any object |
//! | `batch` | many entries of a map |
//! | `shared_words` | the memory map of an array |

mod batch;
mod links;
mod pins;
mod programs;
mod shared_words;

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub(super) use batch::{Batch, BatchAttributes, lookup_batch};
pub(super) use links::Query;
pub use links::{
    LinkInfo, OnHook, SharedHook, XdpMode, detach_program, link_by_id, link_detach, link_info, link_update,
    netkit_programs, next_link, programs_on, tcx_attach, tcx_programs, xdp_attach,
};
pub use pins::{open_pin, pin};
pub use programs::{
    Instruction, LoadedProgram, load_classifier, loaded_program, program_by_id, program_id, program_name,
};
pub(super) use shared_words::SharedWords;

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
    ProgDetach = 9,
    ProgGetFdById = 13,
    ObjectInfo = 15,
    ProgQuery = 16,
    BtfLoad = 18,
    MapLookupBatch = 24,
    MapUpdateBatch = 26,
    MapDeleteBatch = 27,
    LinkCreate = 28,
    LinkUpdate = 29,
    LinkGetFdById = 30,
    LinkGetNextId = 31,
    LinkDetach = 34,
}

pub(super) fn raw(fd: BorrowedFd<'_>) -> u32 {
    // An open descriptor is never negative.
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

/// Reads the kernel's information about an object: the beginning of `struct bpf_prog_info` or `struct
/// bpf_link_info`. Fields that an older kernel does not fill keep their defaults.
///
/// # Safety
///
/// `T` must be laid out as that beginning, any bytes must make a valid one, and no pointer in it may be set by default:
/// the kernel would write through it.
unsafe fn object_info<T: Default>(object: BorrowedFd<'_>) -> io::Result<T> {
    /// The `info` member of `union bpf_attr`.
    #[repr(C)]
    struct InfoByFd {
        bpf_fd: u32,
        info_len: u32,
        info: u64,
    }
    let mut info = T::default();
    let attributes = UnsafeCell::new(InfoByFd {
        bpf_fd: raw(object),
        info_len: size_of::<T>() as u32,
        info: (&raw mut info) as u64,
    });
    // SAFETY: `info` is valid for `info_len` bytes, which bounds what the kernel writes, and is not otherwise used during
    // the call. The kernel writes the length back into the attributes, which the cell allows; the rest is the caller's
    // promise.
    unsafe { bpf(Command::ObjectInfo, &attributes) }?;
    Ok(info)
}
