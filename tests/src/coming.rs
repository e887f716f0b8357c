//! Pods that are created and deleted all the time, and how long each waited for its networks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Call;
use crate::traffic::{PATIENCE, eventually};

/// The results of these pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Came {
    /// The number of successful ADDs.
    pub adds: usize,
    /// The longest duration.
    pub longest: Duration,
}

/// Repeats ADD and DEL, each pair on a thread of its own, until it is stopped.
#[derive(Debug)]
pub struct Coming {
    ending: Arc<AtomicBool>,
    adds: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<Came>>,
}

impl Coming {
    /// Starts; `calls` are an ADD and its DEL each, made by that executable.
    pub fn start(executable: &Path, calls: Vec<(Call, Call)>) -> Self {
        let (ending, adds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let threads = calls.into_iter().map(|(add, del)| {
            let executable = executable.to_owned();
            let (over, adds) = (Arc::clone(&ending), Arc::clone(&adds));
            std::thread::spawn(move || {
                let mut came = Came::default();
                while !over.load(Ordering::SeqCst) {
                    let began = Instant::now();
                    add.run_by(&executable).success();
                    came.longest = came.longest.max(began.elapsed());
                    came.adds += 1;
                    adds.fetch_add(1, Ordering::SeqCst);
                    del.run_by(&executable).success();
                }
                came
            })
        });
        Self { threads: threads.collect(), ending, adds }
    }

    /// Waits until that many more ADDs have succeeded.
    ///
    /// # Panics
    /// They do not succeed; [`Coming::end`] would report the reason.
    pub fn go_on(&self, adds: usize) {
        let from = self.adds.load(Ordering::SeqCst);
        let come = eventually(PATIENCE * 4, || self.adds.load(Ordering::SeqCst) >= from + adds);
        assert!(come, "{adds} more ADDs do not succeed, after {from}");
    }

    /// Ends; everything is detached.
    ///
    /// # Panics
    /// A call has failed.
    pub fn end(mut self) -> Came {
        self.ending.store(true, Ordering::SeqCst);
        let came = std::mem::take(&mut self.threads)
            .into_iter()
            .map(|thread| thread.join().expect("every call succeeds"));
        came.fold(Came::default(), |all, one| Came {
            adds: all.adds + one.adds,
            longest: all.longest.max(one.longest),
        })
    }
}

/// If a test fails meanwhile, the threads end too.
impl Drop for Coming {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
