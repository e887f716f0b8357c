//! What the agent does at signals. None ends it without a line in the log, but for those that nobody can hear.
//!
//! | signal | what it does |
//! |---|---|
//! | SIGTERM, SIGINT, SIGQUIT | ends when what was begun is done; a second one does not wait for that |
//! | SIGHUP, SIGUSR1, SIGUSR2 | nothing: manifests are followed by themselves, settings are read at the start |
//! | SIGPIPE | nothing: a reader of the log or of an answer is gone |

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end the agent.
#[derive(Debug)]
pub(super) struct Ending {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
}

impl Ending {
    /// Hears them from now on. Needs a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub(super) fn hear() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
        })
    }

    /// Waits for one of them and names it.
    pub(super) async fn told(&mut self) -> &'static str {
        // All are safe to drop: a signal that arrives meanwhile is seen by the next call.
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.quit.recv() => "SIGQUIT",
        }
    }
}

/// Signals that elsewhere make a daemon read its settings again.
#[derive(Debug)]
pub(super) struct Others {
    hangup: Signal,
    user: [Signal; 2],
}

impl Others {
    /// Hears them from now on, so that they end nothing. Needs a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub(super) fn hear() -> io::Result<Self> {
        let user = [signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?];
        Ok(Self { hangup: signal(SignalKind::hangup())?, user })
    }

    /// Says of each that it does nothing.
    pub(super) async fn explain(mut self) {
        loop {
            let [first, second] = &mut self.user;
            let name = tokio::select! {
                _ = self.hangup.recv() => "SIGHUP",
                _ = first.recv() => "SIGUSR1",
                _ = second.recv() => "SIGUSR2",
            };
            tracing::info!(
                signal = name,
                "ignored: manifests are followed by themselves; for other settings restart netattachd, which loses nothing"
            );
        }
    }
}
