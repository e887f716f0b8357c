//! The pools that leases may have been taken from: in memory, and in a file that an agent reads after a power
//! failure.
//!
//! A pool is written to the file, and the file is synced, before the pool counts as noted in memory. A pool is
//! removed from memory before the file is rewritten without it. So the file contains every pool that a lease was
//! taken from, whenever the agent ends.

use std::collections::BTreeMap;
use std::io;

use super::files::Files;
use crate::ipam::Pool;
use crate::sync::{Arc, Mutex, locked};

/// File with the pools, in the directory of records. No record has this name: records have an `@` in their names.
pub(super) const POOLS: &str = "pools.jsonl";

/// The new content, before it is renamed to [`POOLS`]; left behind if the agent is killed before the rename.
const NEXT_POOLS: &str = "pools.jsonl.new";

/// Up to this many pools are kept without checking whether any lease needs them: noting a pool again costs an ADD a
/// sync.
const FEW_POOLS: usize = 64;

/// Most pools that can be noted. The authors of networks name pools; unneeded pools are forgotten at much smaller
/// numbers ([`Pools::are_many`]), so more than this means that pods hold addresses of that many pools.
pub(super) const MOST_POOLS: usize = 16_384;

/// The pools, and the file of them.
#[derive(Debug)]
pub(super) struct Pools {
    files: Arc<dyn Files>,
    /// Never locked during disk I/O.
    known: Mutex<Known>,
    /// Locked while the file changes, which includes disk I/O. Locked before `known`.
    file: Mutex<Written>,
}

#[derive(Debug, Default)]
struct Known {
    pools: BTreeMap<Pool, Use>,
    /// The number of the last check for unneeded pools.
    look: u64,
    /// The number of pools that this check has left.
    left: usize,
}

/// The use of a pool by operations that lease from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Use {
    /// The number of operations that are about to lease from the pool.
    by: usize,
    /// The number of the last check that had begun when the last of these operations began or ended.
    last: u64,
}

/// The known state of the file.
#[derive(Debug, Default)]
struct Written {
    /// The length in bytes after the last write, at the end of a line.
    end: Option<u64>,
    /// Whether the file's directory entry survives a power failure.
    is_named: bool,
}

/// A noted pool, which is not forgotten until this is dropped.
#[derive(Debug)]
pub struct NotedPool<'s> {
    pools: &'s Pools,
    pool: Pool,
}

impl Drop for NotedPool<'_> {
    fn drop(&mut self) {
        locked(&self.pools.known).leave(&self.pool);
    }
}

/// Why a pool was not noted.
#[derive(Debug)]
pub(super) enum NotNoted {
    /// There are [`MOST_POOLS`].
    Many,
    /// The file could not be written.
    File(io::Error),
}

impl Pools {
    /// Reads the file.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub(super) fn read(files: Arc<dyn Files>) -> io::Result<Self> {
        let text = match files.open(POOLS).and_then(|mut file| file.read()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let mut pools = BTreeMap::new();
        // A last line without its newline was cut off by a crash: its pool was not noted yet.
        for (number, line) in text[..whole(&text)].split_inclusive(|byte| *byte == b'\n').enumerate() {
            match serde_json::from_slice(line) {
                Ok(pool) => drop(pools.insert(pool, Use { by: 0, last: 0 })),
                Err(error) => tracing::error!(
                    file = POOLS, line = number + 1, %error,
                    "line is not a pool: leases there of containers whose record was lost in a power failure are not released"
                ),
            }
        }
        let known = Known { pools, look: 0, left: 0 };
        Ok(Self { files, known: Mutex::new(known), file: Mutex::default() })
    }

    /// All pools, in order.
    pub(super) fn all(&self) -> Vec<Pool> {
        locked(&self.known).pools.keys().cloned().collect()
    }

    /// Whether the pool is noted.
    pub(super) fn has(&self, pool: &Pool) -> bool {
        locked(&self.known).pools.contains_key(pool)
    }

    /// Whether there are enough pools for a check which of them are unneeded: more than a few, and twice as many as
    /// the last check has left, or an eighth of [`MOST_POOLS`] more; or so many that no other can be noted.
    pub(super) fn are_many(&self) -> bool {
        let known = locked(&self.known);
        let more = known.left.min(MOST_POOLS / 8);
        // A check may have left almost the maximum, and the pools may be unneeded since.
        known.pools.len() >= MOST_POOLS || known.pools.len() > (known.left + more).max(FEW_POOLS)
    }

    /// Notes a pool. If the pool is not noted yet, waits for the disk; operations that need a noted pool do not wait
    /// meanwhile.
    pub(super) fn note(&self, pool: Pool) -> Result<NotedPool<'_>, NotNoted> {
        let is_known = locked(&self.known).enter(&pool);
        if is_known {
            return Ok(NotedPool { pools: self, pool });
        }
        let mut file = locked(&self.file);
        let is_known = {
            let mut known = locked(&self.known);
            // Another operation may have noted the pool meanwhile.
            let is_known = known.enter(&pool);
            if !is_known && known.pools.len() >= MOST_POOLS {
                return Err(NotNoted::Many);
            }
            is_known
        };
        if !is_known {
            file.append(&*self.files, &pool).map_err(NotNoted::File)?;
            crate::crash_point!("journal", "pool");
            locked(&self.known).add(&pool);
        }
        Ok(NotedPool { pools: self, pool })
    }

    /// Forgets the pools for which `is_needed` is false, if there are more than [`FEW_POOLS`], except pools that an
    /// operation has noted since this began or is about to lease from. Returns how many were forgotten.
    ///
    /// # Errors
    /// The file cannot be rewritten; all pools are still known then.
    pub(super) fn keep(&self, is_needed: impl Fn(&Pool) -> bool) -> io::Result<usize> {
        let (look, all) = {
            let mut known = locked(&self.known);
            if known.pools.len() <= FEW_POOLS {
                return Ok(0);
            }
            known.look += 1;
            (known.look, known.pools.keys().cloned().collect::<Vec<_>>())
        };
        let unneeded: Vec<Pool> = all.into_iter().filter(|pool| !is_needed(pool)).collect();
        let mut file = locked(&self.file);
        // After this, an operation that leases from one of these pools notes it again, once the file is written.
        let (forgotten, kept) = {
            let mut known = locked(&self.known);
            let forgotten = known.take_out(unneeded, look);
            known.left = known.pools.len();
            (forgotten, known.pools.clone())
        };
        if forgotten.is_empty() {
            return Ok(0);
        }
        let written = file.write_anew(&*self.files, |pool| kept.contains_key(pool));
        if let Err(error) = written {
            let mut known = locked(&self.known);
            known.pools.extend(forgotten);
            known.left = known.pools.len();
            return Err(error);
        }
        Ok(forgotten.len())
    }
}

impl Known {
    /// Notes that an operation is about to lease from a pool. Returns whether the pool is known.
    fn enter(&mut self, pool: &Pool) -> bool {
        let Some(of) = self.pools.get_mut(pool) else { return false };
        *of = Use { by: of.by + 1, last: self.look };
        true
    }

    /// Adds a pool that an operation is about to lease from.
    fn add(&mut self, pool: &Pool) {
        self.pools.insert(pool.clone(), Use { by: 1, last: self.look });
    }

    /// Notes that an operation that was about to lease from a pool has finished, with or without a lease.
    fn leave(&mut self, pool: &Pool) {
        if let Some(of) = self.pools.get_mut(pool) {
            *of = Use { by: of.by.saturating_sub(1), last: self.look };
        }
    }

    /// Removes and returns those of the given pools that no operation has used since check `look` began. That check
    /// has seen leases that were taken before.
    fn take_out(&mut self, unneeded: Vec<Pool>, look: u64) -> Vec<(Pool, Use)> {
        let is_unused = |of: &Use| of.by == 0 && of.last < look;
        let unused = unneeded.into_iter().filter(|pool| self.pools.get(pool).is_some_and(is_unused));
        let unused: Vec<Pool> = unused.collect();
        unused.into_iter().filter_map(|pool| self.pools.remove_entry(&pool)).collect()
    }
}

impl Written {
    /// Appends a pool's line, and syncs the file and its directory entry.
    fn append(&mut self, files: &dyn Files, pool: &Pool) -> io::Result<()> {
        let mut line = serde_json::to_vec(pool)?;
        line.push(b'\n');
        let mut file = match files.open(POOLS) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *self = Self::default();
                files.create(POOLS)?
            }
            other => other?,
        };
        let length = file.length()?;
        let end = match self.end.filter(|end| *end == length) {
            Some(end) => end,
            // Overwrites a line that a crash has cut off.
            None => {
                let end = whole(&file.read()?) as u64;
                file.cut(end)?;
                end
            }
        };
        let written = file.write_at(end, &line).and_then(|()| file.sync());
        let written = written.and_then(|()| if self.is_named { Ok(()) } else { files.sync() });
        match written {
            Ok(()) => *self = Self { end: Some(end + line.len() as u64), is_named: true },
            Err(error) => {
                // Otherwise each retry on a failing disk would leave a line.
                let _ = file.cut(end);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Rewrites the file with the pools to keep and with the lines that cannot be parsed: a later version may have
    /// written them.
    fn write_anew(&mut self, files: &dyn Files, is_kept: impl Fn(&Pool) -> bool) -> io::Result<()> {
        let text = files.open(POOLS)?.read()?;
        let stays = |line: &&[u8]| {
            line.ends_with(b"\n") && serde_json::from_slice(line).map_or(true, |pool: Pool| is_kept(&pool))
        };
        let lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').filter(stays).collect();
        let text = lines.concat();
        files.remove(NEXT_POOLS)?;
        let mut file = files.create(NEXT_POOLS)?;
        file.write_at(0, &text)?;
        file.sync()?;
        crate::crash_point!("journal", "pools");
        files.rename(NEXT_POOLS, POOLS)?;
        // The file is renamed, so the state in memory must match it. A power failure may restore the previous file,
        // which contains all of these pools and more; noting the next pool syncs the directory.
        *self = Self { end: Some(text.len() as u64), is_named: files.sync().is_ok() };
        Ok(())
    }
}

/// Returns the length of the complete lines.
fn whole(text: &[u8]) -> usize {
    text.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::journal::full_disk::{Disk, Takes};

    fn pool(number: usize) -> Pool {
        Pool::directory("/leases", &format!("net-{number:05}"))
    }

    fn line(number: usize) -> String {
        format!("{}\n", serde_json::to_string(&pool(number)).unwrap())
    }

    fn open(disk: &Disk) -> Pools {
        Pools::read(Arc::new(disk.clone())).unwrap()
    }

    fn text(directory: &Path) -> String {
        fs::read_to_string(directory.join(POOLS)).unwrap()
    }

    #[test]
    fn a_pool_that_somebody_leases_from_is_not_forgotten_whenever_he_began() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        fs::write(directory.join(POOLS), (0..100).map(line).collect::<String>()).unwrap();
        let pools = open(&Disk::at(directory));
        let before = pools.note(pool(1)).unwrap();
        drop(pools.note(pool(2)).unwrap());
        let (held, meanwhile) = (Cell::new(Some(pools.note(pool(3)).unwrap())), Cell::new(None));
        let is_needed = |of: &Pool| {
            if *of == pool(9) {
                meanwhile.set(Some(pools.note(pool(4)).unwrap()));
                // An operation that leases during the check, and ends before it.
                drop(pools.note(pool(5)).unwrap());
                drop(held.take());
            }
            *of == pool(6)
        };
        assert_eq!(pools.keep(is_needed).unwrap(), 95);
        assert_eq!(pools.all(), [1, 3, 4, 5, 6].map(pool));
        assert_eq!(text(directory), [1, 3, 4, 5, 6].map(line).concat());
        drop((before, meanwhile));
        // A forgotten pool is in the file again before an operation leases from it.
        drop(pools.note(pool(2)).unwrap());
        assert_eq!(open(&Disk::at(directory)).all(), [1, 2, 3, 4, 5, 6].map(pool));
    }

    #[test]
    fn a_pool_whose_line_does_not_survive_is_not_known_and_leaves_no_line() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        // The second line was cut off by a crash.
        fs::write(directory.join(POOLS), [line(1), "{\"data".to_owned()].concat()).unwrap();
        let disk = Disk::at(directory);
        let pools = open(&disk);
        disk.fails_to_sync(true);
        for _ in 0..2 {
            assert!(matches!(pools.note(pool(2)), Err(NotNoted::File(_))));
            assert_eq!((pools.all(), text(directory)), (vec![pool(1)], line(1)));
        }
        disk.fails_to_sync(false);
        drop(pools.note(pool(2)).unwrap());
        assert_eq!((pools.all(), text(directory)), (vec![pool(1), pool(2)], line(1) + &line(2)));
        // The name survives a power failure now.
        disk.fails_to_sync(true);
        drop(pools.note(pool(3)).unwrap());
        disk.fails_to_sync(false);
        disk.takes(Takes::UpTo(text(directory).len() as u64 + 3));
        assert!(matches!(pools.note(pool(4)), Err(NotNoted::File(_))));
        disk.takes(Takes::Everything);
        // Another program has truncated the file.
        fs::write(directory.join(POOLS), line(1) + "{").unwrap();
        drop(pools.note(pool(4)).unwrap());
        assert_eq!(text(directory), line(1) + &line(4));
    }

    #[test]
    fn where_the_file_cannot_be_written_anew_nothing_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        fs::write(directory.join(POOLS), (0..100).map(line).collect::<String>()).unwrap();
        let disk = Disk::at(directory);
        let pools = open(&disk);
        disk.takes(Takes::NoMore);
        assert!(pools.keep(|_| false).is_err());
        assert_eq!(pools.all(), (0..100).map(pool).collect::<Vec<_>>());
        disk.takes(Takes::Everything);
        assert_eq!(pools.keep(|_| false).unwrap(), 100);
        assert_eq!((pools.all(), text(directory)), (Vec::new(), String::new()));
    }

    #[test]
    fn a_look_is_worth_it_when_there_are_twice_as_many_as_it_has_left() {
        let directory = tempfile::tempdir().unwrap();
        let pools = open(&Disk::at(directory.path()));
        let is_worth = |count: usize, left: usize| {
            let of = (0..count).map(|number| (pool(number), Use { by: 0, last: 0 }));
            *locked(&pools.known) = Known { pools: of.collect(), look: 0, left };
            pools.are_many()
        };
        for (count, left, expected) in [
            (64, 0, false),
            (65, 0, true),
            (65, 40, false),
            (81, 40, true),
            (200, 100, false),
            (201, 100, true),
            (8_048, 6_000, false),
            (8_049, 6_000, true),
            (MOST_POOLS - 1, 15_000, false),
            (MOST_POOLS, 15_000, true),
        ] {
            assert_eq!(is_worth(count, left), expected, "{count} after {left}");
        }
        is_worth(MOST_POOLS, 0);
        drop(pools.note(pool(7)).unwrap());
        assert!(matches!(pools.note(pool(MOST_POOLS)), Err(NotNoted::Many)));
    }
}
