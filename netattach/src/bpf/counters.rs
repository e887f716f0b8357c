//! The counters of attachments, which have a copy for each processor.

use aya::maps::{MapData, MapError, PerCpuArray, PerCpuValues};
use aya::{Pod, util};
use netattach_common::{FastStats, Stats};

use super::BpfError;
use super::map_table::map_name;
use super::pin::Pins;

/// The maps of packets, and of packets on the fast path.
pub(super) struct Counters {
    stats: PerCpuArray<MapData, Stats>,
    fast: PerCpuArray<MapData, FastStats>,
    cpus: usize,
}

impl Counters {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        let cpus = util::nr_cpus().map_err(|(path, source)| BpfError::CountCpus { path, source })?;
        Ok(Self { stats: pins.open(map_name::STATS)?, fast: pins.open(map_name::FAST_STATS)?, cpus })
    }

    /// The counters of packets of an attachment, summed over processors.
    pub(super) fn of(&self, id: u32) -> Result<Stats, BpfError> {
        let failed = |source| BpfError::ReadMap { map: map_name::STATS, source };
        let mut total = Stats::default();
        for part in self.stats.get(&id, 0).map_err(failed)?.iter() {
            total.add(part);
        }
        Ok(total)
    }

    /// Clears all counters of a number.
    pub(super) fn clear(&mut self, id: u32) -> Result<(), BpfError> {
        let failed = |map| move |source| BpfError::WriteMap { map, source };
        let zeros = self.zeros().map_err(failed(map_name::STATS))?;
        self.stats.set(id, zeros, 0).map_err(failed(map_name::STATS))?;
        let zeros = self.zeros().map_err(failed(map_name::FAST_STATS))?;
        self.fast.set(id, zeros, 0).map_err(failed(map_name::FAST_STATS))
    }

    fn zeros<T: Pod + Default>(&self) -> Result<PerCpuValues<T>, MapError> {
        Ok(PerCpuValues::try_from(vec![T::default(); self.cpus])?)
    }
}
