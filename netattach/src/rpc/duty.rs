//! Decides which of several accepting threads may serve a request: at any time all but one.

use crate::sync::{Mutex, locked};

/// Counts the threads that are accepting.
#[derive(Debug)]
pub(super) struct Duty(Mutex<usize>);

/// A thread that does not accept until this guard is dropped.
#[derive(Debug)]
pub(super) struct OffDuty<'d>(&'d Duty);

impl Duty {
    /// `threads` threads, all accepting.
    pub(super) fn of(threads: usize) -> Self {
        Self(Mutex::new(threads))
    }

    /// Lets the calling thread stop accepting. `None`: it is the last accepting thread.
    pub(super) fn leave(&self) -> Option<OffDuty<'_>> {
        let mut there = locked(&self.0);
        if *there <= 1 {
            return None;
        }
        *there -= 1;
        Some(OffDuty(self))
    }
}

impl Drop for OffDuty<'_> {
    fn drop(&mut self) {
        *locked(&self.0.0) += 1;
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;

    #[test]
    fn all_may_leave_but_the_last_and_come_back() {
        let duty = Duty::of(3);
        let [one, two] = [(); 2].map(|()| duty.leave().unwrap());
        assert!(duty.leave().is_none());
        drop(one);
        drop(duty.leave().unwrap());
        drop(two);
        assert_eq!(*locked(&duty.0), 3);
        assert!(Duty::of(1).leave().is_none() && Duty::of(0).leave().is_none());
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model {
    use super::*;
    use crate::model::{explore, finds};
    use crate::sync::{Arc, step, thread};

    /// Threads leave and return; `leave` decides whether one may. At least one is always
    /// accepting.
    fn come_and_go(leave: impl Fn(&Duty) -> bool + Copy + Send + 'static) {
        const THREADS: usize = 3;
        let (duty, away) = (Arc::new(Duty::of(THREADS)), Arc::new(Mutex::new(0)));
        let visits = |_| {
            let (duty, away) = (Arc::clone(&duty), Arc::clone(&away));
            thread::spawn(move || {
                for _ in 0..2 {
                    if !leave(&duty) {
                        continue;
                    }
                    *locked(&away) += 1;
                    assert!(*locked(&away) < THREADS, "nobody is at the door");
                    step();
                    *locked(&away) -= 1;
                    drop(OffDuty(&duty));
                }
            })
        };
        let threads: Vec<_> = (0..THREADS).map(visits).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*locked(&duty.0), THREADS);
    }

    #[test]
    fn somebody_is_always_at_the_door() {
        explore(4_000, || come_and_go(|duty| duty.leave().map(std::mem::forget).is_some()));
    }

    /// The fault: a thread looks whether others are there, and leaves without another look.
    #[test]
    fn a_look_before_leaving_is_not_enough() {
        let looks = |duty: &Duty| {
            let are_others_there = *locked(&duty.0) > 1;
            if are_others_there {
                *locked(&duty.0) -= 1;
            }
            are_others_there
        };
        assert!(finds(4_000, move || come_and_go(looks)));
    }
}
