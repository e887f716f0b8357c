//! Pods that come and go all the time, and how long each waited for its networks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Call;

/// What became of the pods that came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Came {
    /// How many ADDs succeeded.
    pub adds: usize,
    /// How long the longest took.
    pub longest: Duration,
}

/// ADD and DEL again and again, each pair on a thread of its own, until it is told to end.
#[derive(Debug)]
pub struct Coming {
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Came>>,
}

impl Coming {
    /// Starts; `calls` are an ADD and its DEL each, made by that executable.
    pub fn start(executable: &Path, calls: Vec<(Call, Call)>) -> Self {
        let ending = Arc::new(AtomicBool::new(false));
        let threads = calls.into_iter().map(|(add, del)| {
            let (executable, over) = (executable.to_owned(), Arc::clone(&ending));
            std::thread::spawn(move || {
                let mut came = Came::default();
                while !over.load(Ordering::SeqCst) {
                    let began = Instant::now();
                    add.run_by(&executable).success();
                    came.longest = came.longest.max(began.elapsed());
                    came.adds += 1;
                    del.run_by(&executable).success();
                }
                came
            })
        });
        Self { threads: threads.collect(), ending }
    }

    /// Ends; everything is detached.
    ///
    /// # Panics
    /// A call has failed.
    pub fn end(self) -> Came {
        self.ending.store(true, Ordering::SeqCst);
        let came = self.threads.into_iter().map(|thread| thread.join().expect("every call succeeds"));
        came.fold(Came::default(), |all, one| Came {
            adds: all.adds + one.adds,
            longest: all.longest.max(one.longest),
        })
    }
}
