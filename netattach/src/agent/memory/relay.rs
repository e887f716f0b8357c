//! Repeats a check, either on a thread of its own or, while the process rests, on another task that is
//! awake anyway. The thread then sleeps without a timeout.

use crate::sync::{Condvar, Mutex, PoisonError, locked};

/// A check that is repeated.
pub(super) trait Check {
    /// Checks once.
    fn check(&mut self);
    /// Whether the last checks have found the process at rest.
    fn rests(&self) -> bool;
}

/// A check that is shared by the thread and another task.
pub(super) struct Relay<C> {
    shift: Mutex<Shift<C>>,
    /// Notified when the thread may have to continue.
    on: Condvar,
}

struct Shift<C> {
    checked: C,
    /// Whether another task runs the check at rest.
    is_relieved: bool,
}

impl<C: Check> Relay<C> {
    pub(super) fn new(checked: C) -> Self {
        Self { shift: Mutex::new(Shift { checked, is_relieved: false }), on: Condvar::new() }
    }

    /// Runs one check of the thread, after `pause`, which gets whether the process is at rest. First sleeps
    /// as long as the process is at rest and another task runs the check.
    pub(super) fn turn(&self, pause: impl FnOnce(bool)) {
        let rests = {
            let mut shift = locked(&self.shift);
            while shift.is_relieved && shift.checked.rests() {
                shift = self.on.wait(shift).unwrap_or_else(PoisonError::into_inner);
            }
            shift.checked.rests()
        };
        pause(rests);
        locked(&self.shift).checked.check();
    }

    /// Lets the thread sleep at rest until this is dropped.
    pub(super) fn relief(&self) -> Relief<'_, C> {
        locked(&self.shift).is_relieved = true;
        Relief(self)
    }

    /// Runs the check from another task, only while the process is at rest. Wakes the thread when the rest
    /// ends.
    pub(super) fn check_at_rest(&self) {
        let mut shift = locked(&self.shift);
        if shift.checked.rests() {
            shift.checked.check();
            if !shift.checked.rests() {
                self.on.notify_one();
            }
        }
    }
}

/// While this exists, another task runs the check at rest.
pub(super) struct Relief<'r, C: Check>(&'r Relay<C>);

impl<C: Check> Drop for Relief<'_, C> {
    fn drop(&mut self) {
        locked(&self.0.shift).is_relieved = false;
        self.0.on.notify_one();
    }
}

/// A check that rests until the test tells it otherwise.
#[cfg(test)]
struct Scripted {
    happens: std::sync::Arc<std::sync::atomic::AtomicBool>,
    checks: u32,
    rests: bool,
}

#[cfg(test)]
impl Scripted {
    fn at_rest() -> (Self, std::sync::Arc<std::sync::atomic::AtomicBool>) {
        let happens = std::sync::Arc::default();
        (Self { happens: std::sync::Arc::clone(&happens), checks: 0, rests: true }, happens)
    }
}

#[cfg(test)]
impl Check for Scripted {
    fn check(&mut self) {
        self.checks += 1;
        self.rests = !self.happens.load(std::sync::atomic::Ordering::SeqCst);
    }

    fn rests(&self) -> bool {
        self.rests
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn checks(relay: &Relay<Scripted>) -> u32 {
        locked(&relay.shift).checked.checks
    }

    #[test]
    fn somebody_else_checks_only_while_there_is_rest() {
        let (scripted, happens) = Scripted::at_rest();
        let relay = Relay::new(scripted);
        relay.check_at_rest();
        assert_eq!(checks(&relay), 1);
        happens.store(true, Ordering::SeqCst);
        relay.check_at_rest();
        relay.check_at_rest();
        assert_eq!(checks(&relay), 2, "what happens is the thread's");
        let mut told = None;
        relay.turn(|rests| told = Some(rests));
        assert_eq!((checks(&relay), told), (3, Some(false)));
        happens.store(false, Ordering::SeqCst);
        relay.turn(|_| {});
        relay.check_at_rest();
        assert_eq!(checks(&relay), 5);
    }

    #[test]
    fn the_thread_checks_at_rest_unless_somebody_else_does() {
        let (scripted, happens) = Scripted::at_rest();
        let relay = Relay::new(scripted);
        let mut told = None;
        relay.turn(|rests| told = Some(rests));
        assert_eq!((checks(&relay), told), (1, Some(true)));
        let relief = relay.relief();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| relay.turn(|_| {}));
            relay.check_at_rest();
            assert!(!thread.is_finished(), "it sleeps while there is rest");
            happens.store(true, Ordering::SeqCst);
            relay.check_at_rest();
        });
        assert_eq!(checks(&relay), 4);
        // No other task checks any more.
        happens.store(false, Ordering::SeqCst);
        relay.turn(|_| {});
        drop(relief);
        relay.turn(|_| {});
        assert_eq!(checks(&relay), 6);
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::model::{explore, finds};
    use crate::sync::{Arc, thread};

    /// The thread gets a turn when the rest ends, asleep or not.
    fn something_happens() {
        let (scripted, happens) = Scripted::at_rest();
        let relay = Arc::new(Relay::new(scripted));
        let relief = relay.relief();
        let own = Arc::clone(&relay);
        let own = thread::spawn(move || own.turn(|_| {}));
        relay.check_at_rest();
        happens.store(true, Ordering::SeqCst);
        relay.check_at_rest();
        own.join().unwrap();
        drop(relief);
    }

    /// The thread gets a turn when the other task stops checking. The injected fault: the thread is not
    /// notified.
    fn nobody_else_checks(is_told: bool) {
        let relay = Arc::new(Relay::new(Scripted::at_rest().0));
        let relief = relay.relief();
        let own = Arc::clone(&relay);
        let own = thread::spawn(move || own.turn(|_| {}));
        if is_told {
            drop(relief);
        } else {
            locked(&relay.shift).is_relieved = false;
            std::mem::forget(relief);
        }
        own.join().unwrap();
    }

    #[test]
    fn the_thread_goes_on_when_something_happens() {
        explore(2_000, something_happens);
    }

    #[test]
    fn the_thread_goes_on_when_nobody_else_checks() {
        explore(2_000, || nobody_else_checks(true));
    }

    #[test]
    fn a_thread_that_is_not_told_is_found() {
        assert!(finds(2_000, || nobody_else_checks(false)));
    }
}
