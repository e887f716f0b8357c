//! Whether pods can be served, and telling the container runtime when they can.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::cni_conf::{CniConf, CniConfError};
use crate::attach::{AttachError, Engine, IntentError, IntentReader};
use crate::plan::resolve::Network;
use crate::report::Chain;
use crate::rpc::message;

/// How often the files of the default network are looked at. Looking is cheap, and finds directories that are yet to
/// be made, which a watch does not.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Knows whether the default network is ready, and keeps the runtime's configuration file.
#[derive(Debug)]
pub(super) struct Readiness {
    engine: Arc<Engine>,
    intents: Arc<IntentReader>,
    conf: Option<CniConf>,
    /// What the last look found.
    found: Mutex<Found>,
}

/// Why pods cannot be served.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReady {
    /// The default network cannot be read.
    #[error(transparent)]
    Network(#[from] Box<IntentError>),
    /// The default network cannot be attached.
    #[error(transparent)]
    Attach(#[from] Box<AttachError>),
    /// The runtime's file is not as it should be.
    #[error(transparent)]
    Conf(#[from] CniConfError),
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Found {
    /// Nobody has looked yet.
    #[default]
    Nothing,
    Ready,
    Not(String),
}

impl Readiness {
    pub(super) fn new(engine: Arc<Engine>, intents: Arc<IntentReader>, conf: Option<CniConf>) -> Self {
        Self { engine, intents, conf, found: Mutex::default() }
    }

    /// The node's default network, if it can be attached.
    pub(super) fn default_network(&self) -> Result<Network, NotReady> {
        let network = self.intents.check_default().map_err(Box::new)?;
        self.engine.rehearse(network.clone()).map_err(Box::new)?;
        Ok(network)
    }

    /// The conditions that depend on the default network, for people.
    pub(super) fn conditions(&self) -> Vec<message::Readiness> {
        let condition = |name: &str, found: Result<String, String>| message::Readiness {
            condition: name.to_owned(),
            met: found.is_ok(),
            detail: found.unwrap_or_else(|problem| problem),
        };
        let default = self.default_network().map(|network| network.name);
        let mut conditions =
            vec![condition("default network", default.map_err(|error| Chain(&error).to_string()))];
        if let Some(conf) = &self.conf {
            let found = match &*self.found.lock().unwrap_or_else(PoisonError::into_inner) {
                Found::Ready => Ok(conf.path().display().to_string()),
                Found::Nothing => Err("not looked at yet".to_owned()),
                Found::Not(problem) => Err(problem.clone()),
            };
            conditions.push(condition("CNI configuration", found));
        }
        conditions
    }

    /// Brings the runtime's file up to date for as long as the source lives. To be started when requests are served.
    pub(super) async fn follow(self: Arc<Self>, mut changes: watch::Receiver<u64>) {
        if self.conf.is_none() {
            return;
        }
        let mut look = tokio::time::interval(LOOK_INTERVAL);
        loop {
            let readiness = Arc::clone(&self);
            // The join error is a panic, which the panic hook has reported; the next look tries again.
            let _ = tokio::task::spawn_blocking(move || readiness.look()).await;
            // Both may be dropped at any time: a change stays marked as unseen, a tick comes again.
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                _ = look.tick() => {}
            }
        }
    }

    /// Writes the file when the default network is ready. It is never taken away: a runtime without it would take
    /// another plugin's.
    fn look(&self) {
        let Some(conf) = &self.conf else { return };
        let ensured = self.default_network().and_then(|network| Ok(conf.ensure(&network.list)?));
        let now = match ensured {
            Ok(written) => {
                if written {
                    tracing::info!(path = %conf.path().display(), "configuration for the container runtime written");
                }
                Found::Ready
            }
            Err(error) => Found::Not(Chain(&error).to_string()),
        };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Found::Not(problem) = &now
            && now != *found
        {
            tracing::warn!(problem, "not ready for pods");
        }
        *found = now;
    }
}
