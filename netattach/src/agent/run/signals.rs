//! The agent's reactions to signals. No signal ends it without a log line, except those that cannot be caught.
//!
//! | signal | what it does |
//! |---|---|
//! | SIGTERM, SIGINT, SIGQUIT | ends after the operations in flight; a second one does not wait for them |
//! | SIGHUP | reloads what does not need a restart, and names changed settings that do ([`Reload`]) |
//! | SIGUSR1, SIGUSR2 | nothing |
//! | SIGPIPE | nothing: a reader of the log or of an answer has closed it |

use std::future::ready;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::reload::Reload;

/// The signals that are handled. Signals that arrive while this exists are logged, even if the agent is busy at the
/// time.
#[derive(Debug)]
pub(super) struct Signals {
    ending: [(Signal, &'static str); 3],
    /// Signals that make other daemons reload their settings.
    others: [(Signal, &'static str); 3],
    /// What SIGHUP reloads, once that is known.
    reload: Option<Reload>,
}

impl Signals {
    /// Installs the handlers, so that the signals without effect do not end the process. Needs a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub(in crate::agent) fn install() -> io::Result<Self> {
        Ok(Self {
            ending: [
                (signal(SignalKind::terminate())?, "SIGTERM"),
                (signal(SignalKind::interrupt())?, "SIGINT"),
                (signal(SignalKind::quit())?, "SIGQUIT"),
            ],
            others: [
                (signal(SignalKind::hangup())?, "SIGHUP"),
                (signal(SignalKind::user_defined1())?, "SIGUSR1"),
                (signal(SignalKind::user_defined2())?, "SIGUSR2"),
            ],
            reload: None,
        })
    }

    /// Sets what SIGHUP reloads.
    pub(super) fn reloads(&mut self, reload: Reload) {
        self.reload = Some(reload);
    }

    /// Waits for a signal that ends the agent and returns its name. Meanwhile logs each other signal, which
    /// has no effect.
    pub(in crate::agent) async fn ending(&mut self) -> &'static str {
        loop {
            // May be dropped at any time: a signal that arrives meanwhile is seen by the next call.
            tokio::select! {
                // Signals without effect that came first are logged first.
                biased;
                name = first(&mut self.others) => explain(name, self.reload.as_ref()),
                name = first(&mut self.ending) => return name,
            }
        }
    }

    /// Called at the end of the agent: logs the signals without effect that arrived since the last call of
    /// [`Self::ending`].
    pub(in crate::agent) async fn end(mut self) {
        // Let the runtime deliver signals that have reached the process but no task yet.
        tokio::task::yield_now().await;
        loop {
            tokio::select! {
                biased;
                name = first(&mut self.others) => explain(name, self.reload.as_ref()),
                () = ready(()) => return,
            }
        }
    }
}

/// The name of the first signal that arrives; if several have arrived, the first in the list.
async fn first([one, two, three]: &mut [(Signal, &'static str); 3]) -> &'static str {
    tokio::select! {
        biased;
        _ = one.0.recv() => one.1,
        _ = two.0.recv() => two.1,
        _ = three.0.recv() => three.1,
    }
}

fn explain(signal: &str, reload: Option<&Reload>) {
    if let ("SIGHUP", Some(reload)) = (signal, reload) {
        return reload.now(signal);
    }
    tracing::info!(
        signal,
        "ignored: changed manifests are read automatically; restart netattachd to read its settings, attachments keep working"
    );
}
