//! Background tasks of the agent. Each is watched, because a task that ends unnoticed would be missed too
//! late.

use std::future::pending;

use tokio::task::{Id, JoinSet};

use crate::error_chain::Chain;
use crate::own_thread;

/// The background tasks; dropping this ends them.
#[derive(Debug, Default)]
pub(super) struct Background {
    tasks: JoinSet<Result<End, String>>,
    names: Vec<(Id, &'static str)>,
}

/// How a task has ended.
#[derive(Debug)]
enum End {
    /// A task that runs once has finished.
    Done,
    /// A task that should run as long as the agent has ended.
    TooEarly,
}

/// A task has ended that should run as long as the agent, or a task that runs once has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{task} ended unexpectedly: {why}; the agent shuts down, attachments keep working")]
pub struct EndedEarly {
    /// Name of the task.
    pub task: &'static str,
    /// The reason, as far as the task gave one.
    pub why: String,
}

/// The value that a task returns when it ends.
pub(in crate::agent) trait Outcome: Send + 'static {
    /// The reason why it could not continue.
    fn why(self) -> Result<(), String>;
}

impl Outcome for () {
    fn why(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: std::error::Error + Send + 'static> Outcome for Result<(), E> {
    fn why(self) -> Result<(), String> {
        self.map_err(|error| Chain(&error).to_string())
    }
}

impl Background {
    /// Starts a task that runs as long as the agent.
    pub(in crate::agent) fn keep<T: Outcome>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) {
        let task = self.tasks.spawn(async move { work.await.why().map(|()| End::TooEarly) });
        self.names.push((task.id(), name));
    }

    /// Starts a task that runs once.
    pub(in crate::agent) fn once<T: Outcome>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) {
        let task = self.tasks.spawn(async move { work.await.why().map(|()| End::Done) });
        self.names.push((task.id(), name));
    }

    /// Waits for a task that ends early or fails. May be dropped at any time and called again.
    pub(super) async fn ended_early(&mut self) -> EndedEarly {
        loop {
            let Some(joined) = self.tasks.join_next_with_id().await else { return pending().await };
            // A task that was aborted; none is.
            let Some((id, ended)) = own_thread::joined(joined) else { continue };
            let why = match ended {
                Ok(End::Done) => continue,
                Ok(End::TooEarly) => "it gave no reason".to_owned(),
                Err(why) => why,
            };
            let named = self.names.iter().find(|(of, _)| *of == id);
            return EndedEarly { task: named.map_or("work", |(_, name)| name), why };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("ask the kernel")]
    struct Unanswered(#[source] io::Error);

    async fn early(start: impl FnOnce(&mut Background)) -> EndedEarly {
        let mut background = Background::default();
        background.keep("endless", pending::<()>());
        start(&mut background);
        background.ended_early().await
    }

    #[tokio::test]
    async fn a_task_that_ends_unexpectedly_is_named() {
        let ended = |task, why: &str| EndedEarly { task, why: why.to_owned() };
        let fails = async { Err::<(), _>(Unanswered(io::Error::other("no socket"))) };
        let found = early(|all| all.keep("following links", fails)).await;
        assert_eq!(found, ended("following links", "ask the kernel: no socket"));
        let found = early(|all| all.keep("looks", async {})).await;
        assert_eq!(found, ended("looks", "it gave no reason"));
        assert_eq!(
            found.to_string(),
            "looks ended unexpectedly: it gave no reason; the agent shuts down, attachments keep working"
        );
    }

    #[tokio::test]
    async fn a_task_that_runs_once_may_end_but_not_fail() {
        let found = early(|all| {
            all.once("one", async {});
            all.once("another", async { Err(io::Error::other("disk full")) });
        })
        .await;
        assert_eq!(found, EndedEarly { task: "another", why: "disk full".to_owned() });
    }
}
