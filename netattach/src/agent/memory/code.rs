//! The executable's own pages: code and constants, which equal its file.

use std::ffi::{c_int, c_void};
use std::ops::Range;

/// Tells the kernel that these pages are not needed: the kernel reclaims them first when it needs memory,
/// and they do not count as this process's memory. Pages that are used again are mapped again, from the
/// page cache while they are in it.
pub(super) fn give_back() {
    for part in parts() {
        for advice in [libc::MADV_COLD, libc::MADV_DONTNEED] {
            // SAFETY: whole pages of a file mapping that no code can have written to: they are read from
            // the file again. Linux before 5.4 refuses the first advice, which is harmless.
            unsafe { libc::madvise(part.start as *mut c_void, part.len(), advice) };
        }
    }
}

/// Returns the segments of the executable that are never written, in whole pages. Excludes segments that
/// are write-protected only after relocation, as their content differs from the file.
fn parts() -> Vec<Range<usize>> {
    /// Reads the first object, which is the executable, and stops.
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, parts: *mut c_void) -> c_int {
        // SAFETY: the C library passes an object for as long as this runs, and `parts` is that of the caller.
        let (info, parts) = unsafe { (&*info, &mut *parts.cast::<Vec<Range<usize>>>()) };
        if info.dlpi_phdr.is_null() {
            return 1;
        }
        // SAFETY: the object has so many headers there.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        for header in headers {
            if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0 {
                let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
                parts.extend(whole_pages(start, header.p_filesz as usize, rustix::param::page_size()));
            }
        }
        1
    }
    let mut parts = Vec::new();
    // SAFETY: `visit` keeps nothing of what it is passed.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut parts).cast()) };
    parts
}

/// Returns the pages that lie entirely in a range; `None` if there are none.
fn whole_pages(start: usize, length: usize, page: usize) -> Option<Range<usize>> {
    let end = start.checked_add(length)? / page * page;
    let start = start.checked_next_multiple_of(page)?;
    (start < end).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A constant in the executable's file, on pages that other tests do not need.
    static CONSTANT: [u8; 3 * 4096] = [7; 3 * 4096];

    #[test]
    fn only_whole_pages_are_given_back() {
        let pages = |start, length| whole_pages(start, length, 4096);
        assert_eq!(pages(4096, 8192), Some(4096..12288));
        assert_eq!(pages(4097, 8192), Some(8192..12288));
        assert_eq!(pages(4097, 8190), None);
        assert_eq!(pages(0, 4095), None);
        assert_eq!(pages(usize::MAX - 1, 4096), None);
    }

    #[test]
    fn what_is_given_back_is_there_again_when_it_is_used() {
        let constant = std::hint::black_box(&CONSTANT);
        let at = constant.as_ptr() as usize;
        assert!(parts().iter().any(|part| part.contains(&at)), "constants are among what is never written");
        let code = give_back as fn() as usize;
        assert!(parts().iter().any(|part| part.contains(&code)), "and code is");
        static WRITTEN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let written = std::ptr::from_ref(&WRITTEN) as usize;
        assert!(!parts().iter().any(|part| part.contains(&written)), "and what is written is not");
        give_back();
        assert!(constant.iter().all(|byte| *byte == 7));
    }
}
