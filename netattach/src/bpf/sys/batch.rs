//! Many entries of a map with one call.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::BorrowedFd;

use super::{Command, bpf, raw};

/// The result of [`lookup_batch`].
pub(in super::super) struct Batch {
    /// How many entries were written.
    pub(in super::super) count: usize,
    /// The position of the next batch; `None` after the last entry.
    pub(in super::super) next: Option<u32>,
}

/// Copies entries of a hash map, whole buckets at a time, from where the batch before stopped (Linux 5.6). Entries that
/// come and go meanwhile may be missed or not; no other is missed or given twice.
///
/// # Errors
/// `ENOSPC` when a bucket has more entries than there is room for.
pub(in super::super) fn lookup_batch<K: aya::Pod, V: aya::Pod>(
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
    // which its opener has checked, and any bytes make valid ones; positions are 32 bits for hash maps. The kernel
    // writes the number of entries back, which the cell allows.
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
pub(in super::super) struct BatchAttributes {
    pub(in super::super) in_batch: u64,
    pub(in super::super) out_batch: u64,
    pub(in super::super) keys: u64,
    pub(in super::super) values: u64,
    pub(in super::super) count: u32,
    pub(in super::super) map_fd: u32,
    pub(in super::super) elem_flags: u64,
    pub(in super::super) flags: u64,
}
