//! Pins in a BPF filesystem.

use std::ffi::CString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Command, bpf, bpf_fd, raw};

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

#[repr(C)]
struct PinAttributes {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}
