//! Operations on single entries of maps.

use std::borrow::BorrowMut;

use aya::Pod;
use aya::maps::{HashMap, MapData, MapError};

use super::BpfError;

/// A map whose entries the agent caches: the kernel's, or a map in memory under the model checker.
pub(super) trait MapOps<K, V>: Send {
    /// The value of a key, if present.
    fn get(&self, key: &K) -> Result<Option<V>, BpfError>;
    /// Inserts or replaces an entry.
    fn put(&mut self, key: K, value: V) -> Result<(), BpfError>;
    /// Deletes an entry. Idempotent.
    fn remove(&mut self, key: &K) -> Result<(), BpfError>;
    /// Deletes many entries. Idempotent.
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

/// The keys of a map for which a condition holds. Collected first: deleting during a walk restarts it.
pub(super) fn keys<K>(
    keys: impl Iterator<Item = Result<K, MapError>>,
    map: &'static str,
    wanted: impl Fn(&K) -> bool,
) -> Result<Vec<K>, BpfError> {
    keys.filter(|key| key.as_ref().map_or(true, &wanted))
        .collect::<Result<_, _>>()
        .map_err(|source| BpfError::ReadMap { map, source })
}

/// Treats deleting an absent entry as success.
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
