//! SIGHUP: reloads what does not need a restart, and names the changed settings that do.
//!
//! Manifests are read again from disk (a file system may have reported no change), and the connection to
//! the API server is made again with the current credentials. Settings determine how the agent's parts are
//! built, so changed settings take effect only at a restart, which loses nothing: they are read, validated
//! and named.

use std::sync::Arc;

use serde_json::Value;

use crate::error_chain::Chain;
use crate::settings::leaves;
use crate::settings::{Arguments, Settings, SettingsError};
use crate::source::Source;

/// Most changed keys that are logged.
const MOST_KEYS: usize = 20;

/// The parts that a reload affects.
pub(super) struct Reload {
    arguments: Option<Arguments>,
    running: Arc<Settings>,
    source: Arc<dyn Source>,
}

impl std::fmt::Debug for Reload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reload").finish_non_exhaustive()
    }
}

impl Reload {
    /// `arguments`: the command line that `running` was read from.
    pub(in crate::agent) fn new(
        arguments: Option<Arguments>,
        running: Arc<Settings>,
        source: Arc<dyn Source>,
    ) -> Self {
        Self { arguments, running, source }
    }

    /// Reloads, and logs one line that names what could not be reloaded.
    pub(in crate::agent) fn now(&self, signal: &str) {
        self.source.reread();
        let read = self.arguments.clone().map(Settings::read).transpose();
        match self.outcome(&read) {
            Outcome::Same => {
                tracing::info!(signal, "reloaded: objects are read again; the settings have not changed")
            }
            Outcome::Changed(keys) => tracing::warn!(
                signal,
                "reloaded: objects are read again; these settings have changed and need a restart of netattachd, which attachments \
                 survive: {keys}"
            ),
            Outcome::Unusable(error) => tracing::error!(
                signal,
                "reloaded: objects are read again; the changed settings cannot be used, and netattachd would not start with \
                 them: {error}"
            ),
        }
    }

    fn outcome(&self, read: &Result<Option<Settings>, SettingsError>) -> Outcome {
        match read {
            Ok(None) => Outcome::Same,
            Ok(Some(settings)) if *settings == *self.running => Outcome::Same,
            Ok(Some(settings)) => Outcome::Changed(changes(&self.running, settings)),
            Err(error) => Outcome::Unusable(Chain(error).to_string()),
        }
    }
}

/// The result for the settings.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Same,
    Changed(String),
    Unusable(String),
}

/// The keys that differ, with both values.
fn changes(running: &Settings, read: &Settings) -> String {
    // Cannot fail: settings are strings, numbers and lists of these.
    let value = |settings: &Settings| serde_json::to_value(settings).unwrap_or_default();
    let (before, now) = (value(running), value(read));
    let (before, now) = (leaves(&before), leaves(&now));
    let of = |all: &[(String, &Value)], key: &str| -> Option<Value> {
        all.iter().find(|(other, _)| other == key).map(|(_, value)| (*value).clone())
    };
    let shown = |value: Option<Value>| value.map_or_else(|| "unset".to_owned(), |value| value.to_string());
    let mut keys: Vec<&String> = before.iter().chain(&now).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    let mut changed: Vec<String> = keys
        .into_iter()
        .filter(|key| of(&before, key) != of(&now, key))
        .map(|key| format!("{key} from {} to {}", shown(of(&before, key)), shown(of(&now, key))))
        .collect();
    let more = changed.len().saturating_sub(MOST_KEYS);
    changed.truncate(MOST_KEYS);
    if more > 0 {
        changed.push(format!("{more} more"));
    }
    changed.join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::sync::watch;

    use super::*;
    use crate::objects::Objects;

    /// A source that counts how often it is read again.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Source for Counting {
        fn snapshot(&self) -> Arc<Objects> {
            Arc::default()
        }

        fn changes(&self) -> watch::Receiver<u64> {
            watch::channel(0).1
        }

        fn reread(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn reading(&self) -> Duration {
            Duration::ZERO
        }
    }

    #[test]
    fn objects_are_read_again_whatever_the_settings_are() {
        let source = Arc::new(Counting::default());
        let running: Settings = serde_json::from_value(serde_json::json!({"source": "/a"})).unwrap();
        let unusable =
            Arguments { config: Some("/nonexistent/netattachd.yaml".into()), ..Arguments::default() };
        for arguments in [None, Some(unusable)] {
            let source = Arc::clone(&source) as Arc<dyn Source>;
            Reload::new(arguments, Arc::new(running.clone()), source).now("SIGHUP");
        }
        assert_eq!(source.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn what_changed_is_named_with_both_values() {
        let running: Settings = serde_json::from_value(serde_json::json!({"source": "/a"})).unwrap();
        let mut read = running.clone();
        read.max_attachments += 1;
        read.delegation.timeout_seconds = 7;
        let (max, seconds) = (running.max_attachments, running.delegation.timeout_seconds);
        assert_eq!(
            changes(&running, &read),
            format!(
                "delegation.timeoutSeconds from {seconds} to 7, maxAttachments from {max} to {}",
                max + 1
            )
        );
    }
}
