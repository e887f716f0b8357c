//! Single entries of aya's typed maps.

use std::borrow::BorrowMut;

use aya::Pod;
use aya::maps::{HashMap, MapData, MapError};

use super::BpfError;

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
