//! The agent's counters, and the text of `/metrics`.
//!
//! | module | what it does |
//! |---|---|
//! | `catalogue` | every metric, its labels and its bound; `docs/metrics.md` |
//! | `family` | series that are kept between scrapes, or gathered for one, within the bound |
//! | `totals` | the counters of the packet programs, by network |
//! | `scrape` | reads the values for one scrape |
//!
//! Events are counted where they happen. Present state is read at a scrape: from memory, from the maps for
//! the counters of packet programs, and from the last check of the networks for values that need files to
//! be read.

mod catalogue;
mod family;
mod scrape;
mod totals;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;

use self::family::{Durations, Numbers};
use self::totals::Totals;
use crate::agent::Agent;
use crate::attach::Departures;
use crate::cni::CniError;
use crate::delegate;
use crate::enforce::enforcer::Enforcer;
use crate::enforce::policies::Change;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::kube::Watcher as ApiWatcher;
use crate::plan::AttachmentPlan;
use crate::settings::OfAttachments;
use crate::sync::{Mutex, locked};
use crate::timing::Times;

/// All counters.
#[derive(Debug)]
pub(in crate::agent) struct Metrics {
    operation: Durations,
    stage: Durations,
    plugin: Durations,
    policy_change: Durations,
    api: Durations,
    totals: Mutex<Totals>,
    started: SystemTime,
    /// Duration of the work for the last scrape.
    scraped: Mutex<Duration>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            operation: Durations::new(&catalogue::OPERATION),
            stage: Durations::with_bounds(&catalogue::STAGE, &family::FEW_SECONDS),
            plugin: Durations::new(&catalogue::PLUGIN),
            policy_change: Durations::new(&catalogue::POLICY_CHANGE),
            api: Durations::new(&catalogue::API),
            totals: Mutex::default(),
            started: SystemTime::now(),
            scraped: Mutex::default(),
        }
    }
}

/// The values of the label for verbs.
const VERBS: [&str; 8] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "attach", "detach"];

impl Metrics {
    /// Counts an answered request.
    pub(in crate::agent) fn answered(&self, verb: &str, failure: Option<&CniError>, took: Duration) {
        let verb = VERBS.into_iter().find(|known| *known == verb).unwrap_or(catalogue::OTHER);
        let result = failure.map_or(Cow::Borrowed("ok"), |error| Cow::Owned(error.code.to_string()));
        self.operation.observe(vec![verb.into(), result], took);
    }

    /// Counts a successful ADD, with its timings.
    pub(in crate::agent) fn added(&self, times: &Times) {
        for (stage, took) in times.parts() {
            self.stage.observe(vec![stage.into()], took);
        }
    }

    /// Counts a change of policies.
    pub(in crate::agent) fn policies_changed(&self, change: &Change) {
        let Change { read, compiled, written, switched, .. } = *change;
        let all = read + compiled + written + switched;
        let phases =
            [("read", read), ("compile", compiled), ("write", written), ("switch", switched), ("all", all)];
        for (phase, took) in phases {
            self.policy_change.observe(vec![phase.into()], took);
        }
    }

    /// Returns all metrics in OpenMetrics' text format.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub(in crate::agent) fn text(
        self: &Arc<Self>,
        agent: &Agent,
        of_attachments: OfAttachments,
    ) -> Result<String, String> {
        let begun = Instant::now();
        let gathered =
            scrape::gather(self, agent, of_attachments).map_err(|error| Chain(&error).to_string())?;
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Scrape { metrics: Arc::clone(self), gathered }));
        let mut written = String::new();
        // Writing to memory does not fail.
        text::encode(&mut written, &registry).map_err(|error| error.to_string())?;
        *locked(&self.scraped) = begun.elapsed();
        Ok(written)
    }

    fn kept(&self) -> [&Durations; 5] {
        [&self.operation, &self.stage, &self.plugin, &self.policy_change, &self.api]
    }
}

/// Adds the counters of attachments that end, before they are lost.
#[derive(Debug)]
pub(in crate::agent) struct LastCounts {
    metrics: Arc<Metrics>,
    enforcer: Arc<Enforcer>,
}

impl LastCounts {
    pub(in crate::agent) fn of(metrics: Arc<Metrics>, enforcer: Arc<Enforcer>) -> Self {
        Self { metrics, enforcer }
    }
}

impl Departures for LastCounts {
    fn ends(&self, record: &JournalKey, number: u16, of: &AttachmentPlan, id: u32) {
        // Locked while the counters are read and added, as in a scrape.
        let mut totals = locked(&self.metrics.totals);
        // A map that cannot be read does not prevent the detachment.
        if let Ok(stats) = self.enforcer.stats(id) {
            totals.add_last((record.clone(), number), &of.network.to_string(), &stats);
        }
    }
}

impl delegate::Watcher for Metrics {
    fn ended(&self, plugin: &str, verb: &'static str, succeeded: bool, took: Duration) {
        let result = if succeeded { "ok" } else { "failed" };
        self.plugin.observe(vec![plugin.to_owned().into(), verb.into(), result.into()], took);
    }
}

impl ApiWatcher for Metrics {
    fn answered(&self, verb: &'static str, resource: &str, code: Option<u16>, took: Duration) {
        let code = code.map_or(Cow::Borrowed("none"), |code| Cow::Owned(code.to_string()));
        self.api.observe(vec![verb.into(), resource.to_owned().into(), code], took);
    }
}

/// One scrape.
#[derive(Debug)]
struct Scrape {
    metrics: Arc<Metrics>,
    gathered: Vec<Numbers>,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kept = self.metrics.kept();
        for durations in kept {
            durations.encode(&mut encoder)?;
        }
        for numbers in &self.gathered {
            numbers.encode(&mut encoder)?;
        }
        let mut over = Numbers::of(&catalogue::SERIES_OVER);
        let bounds =
            kept.map(Durations::over_bound).into_iter().chain(self.gathered.iter().map(Numbers::over_bound));
        for (metric, values) in bounds.filter(|(_, values)| *values > 0) {
            over.add(vec![metric.name.into()], values as f64);
        }
        over.encode(&mut encoder)
    }
}
