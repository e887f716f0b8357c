//! What STATUS answers: the outcome of looks that are taken beside the requests, so that nothing that hangs, a disk
//! or another plugin, holds an answer up.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use crate::attach::{Engine, IntentReader};
use crate::cni::{CniError, code};
use crate::plan::resolve::Network;

/// How often is looked without being asked.
const INTERVAL: Duration = Duration::from_secs(5);
/// An answer that is older makes the question a reason to look again.
const FRESH: Duration = Duration::from_secs(1);
/// Longest that one plugin is waited for. STATUS is to be cheap; a plugin that takes longer is not well.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(5);
/// A look that takes longer hangs, and what was seen before it counts no more.
const LONGEST_LOOK: Duration = Duration::from_secs(30);

/// What was seen last.
#[derive(Debug)]
pub(super) struct Health {
    engine: Arc<Engine>,
    intents: Arc<IntentReader>,
    /// The node's own part: dataplane, configuration, pools, parents.
    node: Look,
    /// What the default network's other plugins say.
    plugins: Look,
    /// `CNI_PATH` of the runtime, as far as it was heard of.
    cni_path: Mutex<Vec<PathBuf>>,
}

/// One kind of look.
#[derive(Debug)]
struct Look {
    what: &'static str,
    last: Mutex<Option<(Instant, Result<(), CniError>)>>,
    wanted: Notify,
}

impl Health {
    pub(super) fn new(engine: Arc<Engine>, intents: Arc<IntentReader>) -> Self {
        Self {
            engine,
            intents,
            node: Look::new("the node"),
            plugins: Look::new("the default network's plugins"),
            cni_path: Mutex::default(),
        }
    }

    /// STATUS, from memory. A limited dataplane comes first: it concerns the pods that are there.
    ///
    /// # Errors
    /// Code 50 or 51 with the reason, or what a plugin answered; how long ago that was is in the details.
    pub(super) fn answer(&self, cni_path: &[PathBuf]) -> Result<(), CniError> {
        let is_new = {
            let mut known = lock(&self.cni_path);
            let is_new = *known != cni_path;
            cni_path.clone_into(&mut known);
            is_new
        };
        let answers = [&self.node, &self.plugins].map(|look| look.answer(is_new));
        answers.into_iter().collect()
    }

    /// The first look, before anything is served.
    pub(super) fn look_first(&self) {
        self.node.take(|| self.look_at_node());
        if !self.default_network().is_ok_and(|network| self.engine.has_plugins_to_ask(&network)) {
            self.plugins.take(|| Ok(()));
        }
    }

    /// Looks, again and again, until the source of manifests ends.
    pub(super) async fn keep_looking(self: Arc<Self>, changes: watch::Receiver<u64>) {
        let (node, plugins) = (Arc::clone(&self), self);
        tokio::join!(
            follow(changes.clone(), node, |health| &health.node, |health| health.look_at_node()),
            follow(changes, plugins, |health| &health.plugins, |health| health.ask_plugins()),
        );
    }

    fn look_at_node(&self) -> Result<(), CniError> {
        self.engine.check_dataplane()?;
        let cni_path = lock(&self.cni_path).clone();
        self.engine
            .check_network(&self.default_network()?, &cni_path)
            .map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })
    }

    fn ask_plugins(&self) -> Result<(), CniError> {
        // What is wrong with the configuration is told by the other look.
        let Ok(network) = self.default_network() else { return Ok(()) };
        let cni_path = lock(&self.cni_path).clone();
        let patience = PLUGIN_PATIENCE.min(self.engine.node().delegate.timeout);
        self.engine.ask_plugins(&network, &cni_path, patience)
    }

    fn default_network(&self) -> Result<Network, CniError> {
        self.intents.check_default().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))
    }
}

impl Look {
    fn new(what: &'static str) -> Self {
        Self { what, last: Mutex::default(), wanted: Notify::new() }
    }

    fn take(&self, look: impl FnOnce() -> Result<(), CniError>) {
        let seen = look();
        let mut last = lock(&self.last);
        let before = last.replace((Instant::now(), seen)).map(|(_, seen)| seen);
        let Some((_, now)) = &*last else { return };
        match (before, now) {
            (Some(Err(_)), Ok(())) => tracing::info!("STATUS: {} can serve ADD again", self.what),
            (before, Err(error)) if before.as_ref() != Some(now) => {
                tracing::warn!(code = error.code, msg = error.msg, details = error.details, "STATUS");
            }
            _ => {}
        }
    }

    fn answer(&self, look_again: bool) -> Result<(), CniError> {
        let last = lock(&self.last);
        let not_known = |how: String| {
            Err(CniError::new(code::NOT_AVAILABLE, format!("STATUS of {} is not known {how}", self.what)))
        };
        let Some((at, seen)) = &*last else { return not_known("yet".into()) };
        let age = at.elapsed();
        if look_again || age > FRESH {
            self.wanted.notify_one();
        }
        if age > INTERVAL + LONGEST_LOOK {
            return not_known(format!("for {} s", age.as_secs()));
        }
        seen.clone().map_err(|error| {
            let seen = format!("seen {:.1} s ago", age.as_secs_f32());
            let separator = if error.details.is_empty() { "" } else { "; " };
            CniError { details: format!("{}{separator}{seen}", error.details), ..error }
        })
    }
}

/// Takes looks on a thread that may block: when the source changes, when somebody asks, and now and then.
async fn follow(
    mut changes: watch::Receiver<u64>,
    health: Arc<Health>,
    which: fn(&Health) -> &Look,
    look: fn(&Health) -> Result<(), CniError>,
) {
    loop {
        let looking = Arc::clone(&health);
        // The join error is a panic, which the panic hook has reported; the next look is another try.
        let _ = tokio::task::spawn_blocking(move || which(&looking).take(|| look(&looking))).await;
        // All three may be dropped at any time: a change stays unseen, a wish is kept, time goes on.
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = which(&health).wanted.notified() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ago: Duration, outcome: Result<(), CniError>) -> Look {
        let look = Look::new("the node");
        *lock(&look.last) = Instant::now().checked_sub(ago).map(|at| (at, outcome));
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
        assert_eq!(seen(Duration::ZERO, Ok(())).answer(false), Ok(()));
        assert_eq!(
            refused(&seen(Duration::from_secs(3), limited)),
            (51, "no pins".into(), "as told; seen 3.0 s ago".into())
        );
        let said = |text: &str| (50, format!("STATUS of the node is not known {text}"), String::new());
        assert_eq!(refused(&Look::new("the node")), said("yet"));
        assert_eq!(refused(&seen(Duration::from_secs(100), Ok(()))), said("for 100 s"));
    }
}
