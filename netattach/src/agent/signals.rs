//! What the agent does at signals. None ends it without a line in the log, but for those that nobody can hear.
//!
//! | signal | what it does |
//! |---|---|
//! | SIGTERM, SIGINT, SIGQUIT | ends when what was begun is done; a second one does not wait for that |
//! | SIGHUP, SIGUSR1, SIGUSR2 | nothing: manifests are followed by themselves, settings are read at the start |
//! | SIGPIPE | nothing: a reader of the log or of an answer is gone |

use std::future::ready;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that are heard. What came before this goes is told in the log, whatever the agent was at meanwhile.
#[derive(Debug)]
pub(super) struct Signals {
    ending: [(Signal, &'static str); 3],
    /// Those that elsewhere make a daemon read its settings again.
    others: [(Signal, &'static str); 3],
}

impl Signals {
    /// Hears them from now on, so that those that do nothing end nothing. Needs a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub(super) fn hear() -> io::Result<Self> {
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
        })
    }

    /// Waits for one that ends the agent and names it. Says of each other that comes meanwhile that it does nothing.
    pub(super) async fn told(&mut self) -> &'static str {
        loop {
            // May be dropped at any time: a signal that arrives meanwhile is seen by the next call.
            tokio::select! {
                // What came before the end is told before it.
                biased;
                name = first(&mut self.others) => explain(name),
                name = first(&mut self.ending) => return name,
            }
        }
    }

    /// The end of the agent: says it of those that came since anybody was listening.
    pub(super) async fn end(mut self) {
        // A turn for what has reached the process and nobody in it yet.
        tokio::task::yield_now().await;
        loop {
            tokio::select! {
                biased;
                name = first(&mut self.others) => explain(name),
                () = ready(()) => return,
            }
        }
    }
}

/// The first that arrives, by its name; of several that have, the first here.
async fn first([one, two, three]: &mut [(Signal, &'static str); 3]) -> &'static str {
    tokio::select! {
        biased;
        _ = one.0.recv() => one.1,
        _ = two.0.recv() => two.1,
        _ = three.0.recv() => three.1,
    }
}

fn explain(signal: &str) {
    tracing::info!(
        signal,
        "ignored: manifests are followed by themselves; for other settings restart netattachd, which loses nothing"
    );
}
