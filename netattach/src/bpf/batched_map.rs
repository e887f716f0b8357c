//! A map with many entries, which are written, read and deleted with as few system calls as the kernel
//! allows.
//!
//! Linux 5.6 accepts thousands of entries of a hash map at once, 5.13 those of a trie. Whether this kernel
//! accepts batches for this map is determined by one attempt; otherwise entries are processed one by one.

use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use aya::Pod;
use aya::maps::{MapData, MapError};
use aya::sys::SyscallError;

use super::BpfError;
use super::map_ops::MapOps;
use super::pin::Pins;
use super::sys::{self, Command};

/// Entries per system call: enough to make the cost of the call negligible, few enough for one allocation in
/// the kernel.
const BATCH: usize = 8192;

/// Words in which the kernel stores its position: a key, or a number.
const POSITION: usize = 8;

/// One map.
pub(super) struct BatchedMap<K, V> {
    data: MapData,
    name: &'static str,
    /// Whether the kernel accepts batches, as far as is known.
    batches: bool,
    entries: PhantomData<fn(K) -> V>,
}

/// The outcome of one batch call.
struct Done {
    /// Number of processed entries.
    count: usize,
    outcome: io::Result<()>,
}

impl<K: Pod, V: Pod> BatchedMap<K, V> {
    /// Opens a pinned map whose keys and values are known to have these types' sizes ([`Pins::verify`]).
    pub(super) fn open(pins: &Pins, name: &'static str) -> Result<Self, BpfError> {
        const { assert!(size_of::<K>() <= POSITION * size_of::<u64>()) };
        let path = pins.map(name);
        let data = MapData::from_pin(&path).map_err(|source| BpfError::OpenMap { path, source })?;
        Ok(Self { data, name, batches: true, entries: PhantomData })
    }

    /// Writes entries; keys and values correspond by position. After a failure, any of the entries may exist.
    pub(super) fn write(&mut self, keys: &[K], values: &[V]) -> Result<(), BpfError> {
        for (keys, values) in keys.chunks(BATCH).zip(values.chunks(BATCH)) {
            self.write_some(keys, values).map_err(|error| self.not_written("bpf_map_update", error))?;
            crate::crash_point!("map", self.name);
        }
        Ok(())
    }

    fn write_some(&mut self, keys: &[K], values: &[V]) -> io::Result<()> {
        if self.batches && keys.len() > 1 {
            match self.batch(Command::MapUpdateBatch, keys, values).outcome {
                Err(error) if is_unknown(&error) => self.batches = false,
                outcome => return outcome,
            }
        }
        keys.iter().zip(values).try_for_each(|(key, value)| {
            // SAFETY: a key and a value, which the kernel reads.
            unsafe { self.one(Command::MapUpdate, key, (&raw const *value) as u64) }
        })
    }

    /// Deletes entries. A missing entry counts as deleted.
    pub(super) fn delete(&mut self, keys: &[K]) -> Result<(), BpfError> {
        let mut rest = keys;
        while self.batches && rest.len() > 1 {
            let some = &rest[..rest.len().min(BATCH)];
            let Done { count, outcome } = self.batch(Command::MapDeleteBatch, some, &[]);
            rest = match outcome {
                Ok(()) => &rest[some.len()..],
                // The kernel stops at the first missing entry.
                Err(error) if is_absent(&error) => rest.get(count + 1..).unwrap_or_default(),
                Err(error) if is_unknown(&error) => {
                    self.batches = false;
                    rest
                }
                Err(error) => return Err(self.not_written("bpf_map_delete", error)),
            };
            crate::crash_point!("unmap", self.name);
        }
        for key in rest {
            // SAFETY: a key, which the kernel reads; there is no value.
            match unsafe { self.one(Command::MapDelete, key, 0) } {
                Err(error) if !is_absent(&error) => return Err(self.not_written("bpf_map_delete", error)),
                _ => crate::crash_point!("unmap", self.name),
            }
        }
        Ok(())
    }

    /// The value of a key, if present.
    fn find(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = MaybeUninit::<V>::uninit();
        // SAFETY: a key that the kernel reads, and room for a value, which it writes.
        match unsafe { self.one(Command::MapLookup, key, value.as_mut_ptr() as u64) } {
            Err(error) if is_absent(&error) => Ok(None),
            // SAFETY: written above.
            outcome => outcome.map(|()| Some(unsafe { value.assume_init() })),
        }
    }

    /// Returns all entries. Entries that are written during the call may or may not be included.
    pub(super) fn read(&mut self) -> Result<Vec<(K, V)>, BpfError> {
        let read = if self.batches { self.read_batches() } else { self.read_one_by_one() };
        let read = match read {
            Err(error) if self.batches && is_unknown(&error) => {
                self.batches = false;
                self.read_one_by_one()
            }
            read => read,
        };
        read.map_err(|error| self.not_read(error))
    }

    /// Returns the owners, according to `owner`, of entries that differ from the given ones; keys and values
    /// correspond by position.
    pub(super) fn different(
        &mut self,
        keys: &[K],
        values: &[V],
        owner: impl Fn(&K) -> u32,
    ) -> Result<BTreeSet<u32>, BpfError>
    where
        K: Ord,
        V: PartialEq,
    {
        if keys.is_empty() {
            return Ok(BTreeSet::new());
        }
        let mut found = self.read()?;
        found.sort_unstable_by_key(|(key, _)| *key);
        let is_there = |key: &K, value: &V| {
            let place = found.binary_search_by_key(key, |(key, _)| *key);
            place.ok().and_then(|place| found.get(place)).is_some_and(|(_, there)| there == value)
        };
        let others = keys.iter().zip(values).filter(|(key, value)| !is_there(key, value));
        Ok(others.map(|(key, _)| owner(key)).collect())
    }

    fn read_batches(&self) -> io::Result<Vec<(K, V)>> {
        let mut all = Vec::new();
        let (mut keys, mut values) = (Vec::<K>::with_capacity(BATCH), Vec::<V>::with_capacity(BATCH));
        let (mut from, mut to) = ([0_u64; POSITION], [0_u64; POSITION]);
        let mut is_first = true;
        loop {
            let request = UnsafeCell::new(Batch {
                in_batch: if is_first { 0 } else { from.as_ptr() as u64 },
                out_batch: to.as_mut_ptr() as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: BATCH as u32,
                map_fd: sys::raw(self.data.fd().as_fd()),
                ..Batch::default()
            });
            // SAFETY: the `batch` member of `union bpf_attr`. The buffers have room for `count` keys and values of the
            // map's sizes, and a position is at most as long as a key or four bytes. The kernel writes the count back,
            // which the cell allows.
            let is_last = match unsafe { sys::bpf(Command::MapLookupBatch, &request) } {
                Ok(_) => false,
                Err(error) if is_absent(&error) => true,
                Err(error) => return Err(error),
            };
            let count = (request.into_inner().count as usize).min(BATCH);
            // SAFETY: the kernel has filled as many of both, and every byte pattern is a valid key and value.
            unsafe {
                keys.set_len(count);
                values.set_len(count);
            }
            all.extend(keys.drain(..).zip(values.drain(..)));
            if is_last {
                return Ok(all);
            }
            std::mem::swap(&mut from, &mut to);
            is_first = false;
        }
    }

    fn read_one_by_one(&self) -> io::Result<Vec<(K, V)>> {
        let mut all = Vec::new();
        let mut before: Option<K> = None;
        loop {
            let mut key = MaybeUninit::<K>::uninit();
            let before_it = before.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: a key that the kernel reads, or none for the first; and room for the next, which it writes.
            match unsafe { self.one(Command::MapGetNextKey, before_it, key.as_mut_ptr() as u64) } {
                Err(error) if is_absent(&error) => return Ok(all),
                other => other?,
            }
            // SAFETY: written above.
            let key = unsafe { key.assume_init() };
            // None if the entry was deleted in between.
            all.extend(self.find(&key)?.map(|value| (key, value)));
            before = Some(key);
        }
    }

    /// One call for as many entries as there are keys; `values` has the same length, or is empty if the
    /// command takes no values.
    fn batch(&self, command: Command, keys: &[K], values: &[V]) -> Done {
        let request = UnsafeCell::new(Batch {
            keys: keys.as_ptr() as u64,
            values: values.as_ptr() as u64,
            count: keys.len() as u32,
            map_fd: sys::raw(self.data.fd().as_fd()),
            ..Batch::default()
        });
        // SAFETY: the `batch` member of `union bpf_attr`; the kernel reads `count` keys of the map's size, and as many
        // values when it writes them. It writes the count back, which the cell allows.
        let outcome = unsafe { sys::bpf(command, &request) }.map(drop);
        Done { count: request.into_inner().count as usize, outcome }
    }

    /// One call for one entry.
    ///
    /// # Safety
    /// `key` and `other` must be valid for what the command reads and writes there.
    unsafe fn one(&self, command: Command, key: *const K, other: u64) -> io::Result<()> {
        let request = Element {
            map_fd: sys::raw(self.data.fd().as_fd()),
            pad: 0,
            key: key as u64,
            value_or_next_key: other,
            flags: 0,
        };
        // SAFETY: the member of `union bpf_attr` for single elements; its pointers are the caller's promise.
        unsafe { sys::bpf(command, &request) }.map(drop)
    }

    fn not_read(&self, error: io::Error) -> BpfError {
        BpfError::ReadMap { map: self.name, source: call("bpf_map_lookup", error) }
    }

    fn not_written(&self, name: &'static str, error: io::Error) -> BpfError {
        BpfError::WriteMap { map: self.name, source: call(name, error) }
    }
}

impl<K: Pod, V: Pod> MapOps<K, V> for BatchedMap<K, V> {
    fn get(&self, key: &K) -> Result<Option<V>, BpfError> {
        self.find(key).map_err(|error| self.not_read(error))
    }

    fn put(&mut self, key: K, value: V) -> Result<(), BpfError> {
        self.write(&[key], &[value])
    }

    fn remove(&mut self, key: &K) -> Result<(), BpfError> {
        self.delete(std::slice::from_ref(key))
    }

    fn remove_all(&mut self, keys: &[K]) -> Result<(), BpfError> {
        self.delete(keys)
    }

    fn all(&mut self) -> Result<Vec<(K, V)>, BpfError> {
        self.read()
    }
}

/// `batch` of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The member of `union bpf_attr` for one entry.
#[repr(C)]
struct Element {
    map_fd: u32,
    pad: u32,
    key: u64,
    value_or_next_key: u64,
    flags: u64,
}

fn call(name: &'static str, io_error: io::Error) -> MapError {
    MapError::SyscallError(SyscallError { call: name, io_error })
}

fn is_absent(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOENT)
}

/// Whether the kernel does not support the command, or not for this map type. If the call is wrong for
/// another reason, writing the entries one by one returns the error again.
fn is_unknown(error: &io::Error) -> bool {
    /// `ENOTSUPP`, an errno internal to the kernel without a name in libc.
    const NOT_SUPPORTED: i32 = 524;
    matches!(error.raw_os_error(), Some(libc::EINVAL | NOT_SUPPORTED))
}

#[cfg(test)]
mod tests {
    use netattach_common::{Ip4, PolicyAddress};

    use super::super::policy_rows::Prefix;
    use super::*;

    /// `enum bpf_map_type`.
    const HASH: u32 = 1;
    const TRIE: u32 = 11;
    const DEVICES: u32 = 25;

    /// A new map. Creating it needs root, as the agent does.
    fn table<K: Pod, V: Pod>(kind: u32, flags: u32) -> BatchedMap<K, V> {
        #[repr(C)]
        struct Create {
            kind: u32,
            key_size: u32,
            value_size: u32,
            max_entries: u32,
            flags: u32,
        }
        let (key_size, value_size) = (size_of::<K>() as u32, size_of::<V>() as u32);
        let create = Create { kind, key_size, value_size, max_entries: 40_000, flags };
        // SAFETY: the beginning of the `map_create` member of `union bpf_attr`, which holds no pointers.
        let map = unsafe { sys::bpf_fd(Command::MapCreate, &create) }.unwrap();
        BatchedMap { data: MapData::from_fd(map).unwrap(), name: "test", batches: true, entries: PhantomData }
    }

    fn prefix(number: u32) -> Prefix<PolicyAddress<Ip4>> {
        Prefix { bits: 64, of: PolicyAddress { policy: 7, address: Ip4 { octets: number.to_be_bytes() } } }
    }

    /// Writes, reads and deletes more than one batch; some of the deleted keys do not exist.
    fn check<K: Pod>(mut table: BatchedMap<K, u32>, key: impl Fn(u32) -> K, number: impl Fn(&K) -> u32) {
        let all: Vec<u32> = (0..20_000).collect();
        let keys = |numbers: &[u32]| -> Vec<K> { numbers.iter().map(|number| key(*number)).collect() };
        let found = |table: &mut BatchedMap<K, u32>| -> Vec<(u32, u32)> {
            let mut found: Vec<_> =
                table.read().unwrap().iter().map(|(key, value)| (number(key), *value)).collect();
            found.sort_unstable();
            found
        };
        let both = |numbers: &[u32]| -> Vec<(u32, u32)> { numbers.iter().map(|it| (*it, *it)).collect() };
        table.write(&keys(&all), &all).unwrap();
        assert_eq!(found(&mut table), both(&all));
        let doomed: Vec<u32> = (0..30_000).step_by(2).collect();
        table.delete(&keys(&doomed)).unwrap();
        table.delete(&keys(&doomed[..3])).unwrap();
        let kept: Vec<u32> = all.iter().copied().filter(|number| number % 2 == 1).collect();
        assert_eq!(found(&mut table), both(&kept));
        table.delete(&keys(&kept)).unwrap();
        assert_eq!(found(&mut table), []);
    }

    #[test]
    fn many_at_once_and_one_by_one_come_to_the_same() {
        /// `BPF_F_NO_PREALLOC`.
        const SPARSE: u32 = 1;
        for batches in [true, false] {
            check(BatchedMap { batches, ..table::<u32, u32>(HASH, SPARSE) }, |number| number, |key| *key);
            let trie = BatchedMap { batches, ..table::<Prefix<PolicyAddress<Ip4>>, u32>(TRIE, SPARSE) };
            check(trie, prefix, |key| u32::from_be_bytes(key.of.address.octets));
        }
    }

    /// No kernel version accepts batches for this map type.
    #[test]
    fn where_the_kernel_takes_no_batches_entries_go_one_by_one() {
        const LOOPBACK: u32 = 1;
        let mut devices = table::<u32, u32>(DEVICES, 0);
        let keys: Vec<u32> = (0..100).collect();
        devices.write(&keys, &[LOOPBACK; 100]).unwrap();
        assert!(!devices.batches, "found out by trying");
        devices.batches = true;
        assert_eq!(devices.read().unwrap().len(), 100);
        devices.batches = true;
        devices.delete(&keys).unwrap();
        assert_eq!(devices.read().unwrap().len(), 0);
    }
}
