//! One kind of check ("look"): its latest result, and when it is repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::own_node::OwnNode;
use super::{Health, INTERVAL};
use crate::builtin::ThisNode;
use crate::cni::{CniError, code};
use crate::npwg::NetworkRef;
use crate::objects::{Definition, Identity, Objects};
use crate::pace;
use crate::rounds;
use crate::sync::{Mutex, locked};
use crate::ticks;

/// A request that finds an older result triggers a new check.
const FRESH: Duration = Duration::from_secs(1);
/// A check that takes longer counts as hanging, and its previous result expires. Calls to other plugins may
/// use all of this time.
const LONGEST_LOOK: Duration = Duration::from_secs(30);
/// The same limit for a check that makes only a few system calls.
const LONGEST_SHORT_LOOK: Duration = Duration::from_secs(10);
/// After a check that is repeated because definitions have changed, or because of a request, the next one
/// is delayed by this many times its duration; after a requested one by at most [`INTERVAL`].
const PAUSE: u32 = 9;
/// Of the duration of a check that calls other plugins, one part in this many counts as work.
const OTHERS: u32 = 6;

/// The result of a check: a description if all is well, or the problem.
pub(super) type Seen = Result<String, CniError>;

/// One kind of check, and its latest result.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) what: &'static str,
    every: Duration,
    longest: Duration,
    pub(super) last: Mutex<Option<(Instant, Seen)>>,
    /// When the running check began.
    begun: Mutex<Option<Instant>>,
    pub(super) wanted: Notify,
    /// Whether a request wants the next check, or none has run yet.
    pub(super) is_wanted: AtomicBool,
}

impl Look {
    pub(super) fn new(what: &'static str, every: Duration) -> Self {
        let longest = LONGEST_LOOK;
        Self {
            what,
            every,
            longest,
            last: Mutex::default(),
            begun: Mutex::default(),
            wanted: Notify::new(),
            is_wanted: AtomicBool::new(true),
        }
    }

    /// A check that makes only a few system calls.
    pub(super) fn short(what: &'static str) -> Self {
        Self { longest: LONGEST_SHORT_LOOK, ..Self::new(what, INTERVAL) }
    }

    /// Requests the check soon.
    pub(super) fn want(&self) {
        self.is_wanted.store(true, Ordering::Relaxed);
        self.wanted.notify_one();
    }

    pub(super) fn take(&self, look: impl FnOnce() -> Seen) {
        *locked(&self.begun) = Some(Instant::now());
        let seen = look();
        *locked(&self.begun) = None;
        let mut last = locked(&self.last);
        let before = last.replace((Instant::now(), seen)).map(|(_, seen)| seen);
        let Some((_, now)) = &*last else { return };
        match (before, now) {
            (Some(Err(_)), Ok(_)) => tracing::info!("{}: healthy again", self.what),
            (before, Err(error)) if before.as_ref() != Some(now) => {
                let CniError { code, msg, details } = error;
                tracing::warn!(code, msg, details, "{}: not healthy", self.what);
            }
            _ => {}
        }
    }

    /// Returns the last result and its age. Triggers a new check unless the result is fresh.
    ///
    /// # Errors
    /// As [`Look::known`].
    pub(super) fn seen(&self, look_again: bool) -> Result<(Duration, Seen), CniError> {
        let age = locked(&self.last).as_ref().map(|(at, _)| at.elapsed());
        if age.is_some_and(|age| look_again || age > FRESH) {
            self.want();
        }
        self.known()
    }

    /// Returns the last result and its age.
    ///
    /// # Errors
    /// There is no result, or no recent one.
    pub(super) fn known(&self) -> Result<(Duration, Seen), CniError> {
        let last = locked(&self.last);
        let not_known = |how: String| {
            Err(CniError::new(code::NOT_AVAILABLE, format!("state of {} is not known {how}", self.what)))
        };
        let Some((at, seen)) = &*last else { return not_known("yet".into()) };
        let age = at.elapsed();
        let hangs = locked(&self.begun).is_some_and(|begun| begun.elapsed() > self.longest);
        if hangs || age > pace::longest(self.every) + LONGEST_LOOK {
            return not_known(format!("for {} s", age.as_secs()));
        }
        Ok((age, seen.clone()))
    }

    pub(super) fn answer(&self, look_again: bool) -> Result<(), CniError> {
        let (age, seen) = self.seen(look_again)?;
        seen.map(drop).map_err(|error| {
            let seen = format!("seen {:.1} s ago", age.as_secs_f32());
            let separator = if error.details.is_empty() { "" } else { "; " };
            CniError { details: format!("{}{separator}{seen}", error.details), ..error }
        })
    }
}

pub(super) fn not_available(msg: String) -> CniError {
    CniError::new(code::NOT_AVAILABLE, msg)
}

/// Runs checks on a blocking thread: when definitions change, when a request wants one, and once in the
/// check's interval, or as often as [`pace`] allows.
pub(super) async fn follow(
    mut changes: watch::Receiver<u64>,
    health: Arc<Health>,
    which: fn(&Health) -> &Look,
    look: fn(&Health) -> Seen,
) {
    // No request waits for a periodic check; at the start a request may.
    let mut is_routine = false;
    loop {
        let looking = Arc::clone(&health);
        let known = Known::of(&health.source.snapshot(), &health.intents.from_node.this);
        // Processor time, without the time in which other threads ran.
        let take = move || {
            let began = Instant::now();
            let what = which(&looking).what;
            let ((), worked) = pace::measured(what, || which(&looking).take(|| look(&looking)));
            (began.elapsed(), worked)
        };
        let (took, worked) = rounds::take(is_routine, take).await;
        // Work that other plugins do for a check counts as well.
        let worked = if which(&health).longest == LONGEST_LOOK { worked.max(took / OTHERS) } else { worked };
        let pause = took * PAUSE;
        let changed = async {
            let changed = other_networks(&mut changes, &health, known).await;
            // Thousands of definitions that arrive one by one do not trigger a check each.
            tokio::time::sleep(pause).await;
            changed
        };
        // A process that repeatedly removes programs triggers a check each time; the pause bounds the
        // processor time for it.
        let soonest = tokio::time::Instant::now() + pause.min(INTERVAL);
        let wanted = async {
            which(&health).wanted.notified().await;
            tokio::time::sleep_until(soonest).await;
        };
        // All three futures may be dropped at any time: a change stays unseen, a request is kept or
        // answered by the check that runs instead, and the sleep starts anew.
        is_routine = tokio::select! {
            changed = changed => {
                if changed.is_err() {
                    return;
                }
                false
            }
            () = wanted => false,
            () = ticks::pause(pace::pause(which(&health).every, worked)) => true,
        };
    }
}

/// The objects that checks depend on.
struct Known {
    definitions: Identity<NetworkRef, Arc<Definition>>,
    /// The default network can take its ranges from this node.
    node: OwnNode,
}

impl Known {
    fn of(objects: &Objects, this: &ThisNode) -> Self {
        Self { definitions: objects.definitions.identity(), node: OwnNode::of(objects, this) }
    }

    fn is_of(&self, objects: &Objects, this: &ThisNode) -> bool {
        self.definitions.is_of(&objects.definitions) && self.node.is_of(objects, this)
    }
}

/// Waits until the source has different definitions or another object of this node. No check depends on
/// pods, policies and other nodes, which change more often.
async fn other_networks(
    changes: &mut watch::Receiver<u64>,
    health: &Health,
    known: Known,
) -> Result<(), watch::error::RecvError> {
    while known.is_of(&health.source.snapshot(), &health.intents.from_node.this) {
        changes.changed().await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ago: Duration, outcome: Seen) -> Look {
        let look = Look::new("dataplane", INTERVAL);
        *locked(&look.last) = Instant::now().checked_sub(ago).map(|at| (at, outcome));
        look
    }

    fn refused(look: &Look) -> (u32, String, String) {
        let CniError { code, msg, details } = look.answer(false).unwrap_err();
        (code, msg, details)
    }

    /// Rows: STA-06.
    #[test]
    fn an_answer_is_that_of_the_last_look_with_its_age_while_it_is_not_too_old() {
        let limited = Err(CniError::new(51, "no pins").with_details("as told"));
        assert_eq!(seen(Duration::ZERO, Ok("pinned".into())).answer(false), Ok(()));
        assert_eq!(
            refused(&seen(Duration::from_secs(3), limited)),
            (51, "no pins".into(), "as told; seen 3.0 s ago".into())
        );
        let said = |text: &str| (50, format!("state of dataplane is not known {text}"), String::new());
        assert_eq!(refused(&Look::new("dataplane", INTERVAL)), said("yet"));
        assert_eq!(refused(&seen(Duration::from_secs(100), Ok(String::new()))), said("for 100 s"));
    }
}
