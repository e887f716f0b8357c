//! The memory map of an array.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// An array of 64-bit words shared with the kernel: a `BPF_F_MMAPABLE` array map with 8-byte values.
#[derive(Debug)]
pub(in super::super) struct SharedWords {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the memory is only reached through `AtomicU64`, from any thread, and stays mapped until `drop`.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the first `len` words of an array map.
    pub(in super::super) fn map(array: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
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

    /// Number of words.
    pub(in super::super) fn len(&self) -> u32 {
        u32::try_from(self.len).unwrap_or(u32::MAX)
    }

    /// The word at an index.
    pub(in super::super) fn get(&self, index: u32) -> Option<u64> {
        self.word(index).map(|word| word.load(Ordering::Acquire))
    }

    /// Replaces the word at an index, whole. `None`: no such index.
    pub(in super::super) fn set(&self, index: u32, value: u64) -> Option<()> {
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
