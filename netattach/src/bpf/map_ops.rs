//! Single entries of maps.

use std::borrow::BorrowMut;

use aya::Pod;
use aya::maps::{HashMap, MapData, MapError};

use super::BpfError;

/// A map of which the agent remembers what it wrote: the kernel's, or under the model checker one in memory.
pub(super) trait MapOps<K, V>: Send {
    /// The value of a key, if there is one.
    fn get(&self, key: &K) -> Result<Option<V>, BpfError>;
    /// Enters or replaces one.
    fn put(&mut self, key: K, value: V) -> Result<(), BpfError>;
    /// Takes one out. What is not there is as good as taken out.
    fn remove(&mut self, key: &K) -> Result<(), BpfError>;
    /// The same for many at once.
    fn remove_all(&mut self, keys: &[K]) -> Result<(), BpfError>;
    /// Every entry.
    fn all(&mut self) -> Result<Vec<(K, V)>, BpfError>;
}

#[cfg(test)]
impl<K: Ord + Copy + Send, V: Copy + Send> MapOps<K, V> for std::collections::BTreeMap<K, V> {
    fn get(&self, key: &K) -> Result<Option<V>, BpfError> {
        Ok(self.get(key).copied())
    }

    fn put(&mut self, key: K, value: V) -> Result<(), BpfError> {
        self.insert(key, value);
        Ok(())
    }

    fn remove(&mut self, key: &K) -> Result<(), BpfError> {
        self.remove(key);
        Ok(())
    }

    fn remove_all(&mut self, keys: &[K]) -> Result<(), BpfError> {
        self.retain(|key, _| !keys.contains(key));
        Ok(())
    }

    fn all(&mut self) -> Result<Vec<(K, V)>, BpfError> {
        Ok(self.iter().map(|(key, value)| (*key, *value)).collect())
    }
}

/// The keys of a map that a condition holds for. Collected first: deleting while walking restarts the walk.
pub(super) fn keys<K>(
    keys: impl Iterator<Item = Result<K, MapError>>,
    map: &'static str,
    wanted: impl Fn(&K) -> bool,
) -> Result<Vec<K>, BpfError> {
    keys.filter(|key| key.as_ref().map_or(true, &wanted))
        .collect::<Result<_, _>>()
        .map_err(|source| BpfError::ReadMap { map, source })
}

/// Deleting what is not there is done.
pub(super) fn absent(error: MapError) -> Result<(), MapError> {
    match error {
        MapError::KeyNotFound => Ok(()),
        MapError::SyscallError(ref call) if call.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => Err(other),
    }
}

pub(super) fn insert<K: Pod, V: Pod, M: BorrowMut<MapData>>(
    map: &mut HashMap<M, K, V>,
    name: &'static str,
    key: K,
    value: V,
) -> Result<(), BpfError> {
    map.insert(key, value, 0).map_err(|source| BpfError::WriteMap { map: name, source })?;
    crate::crash_point!("map", name);
    Ok(())
}
