//! What other programs see of the agent: probes, metrics, traces, events of the cluster, and the log of packets.
//!
//! | module | what it does |
//! |---|---|
//! | `http` | serves probes and metrics |
//! | `metrics` | the counters |
//! | `traces` | sends traces of requests to a collector |
//! | `events` | the problems that become events of the cluster |
//! | `packet_log` | logs how each stage of the packet path treats packets, if that is enabled |

pub(super) mod events;
pub(super) mod http;
pub(super) mod metrics;
pub(super) mod packet_log;
pub(super) mod traces;

use std::sync::Arc;
use std::time::Duration;

use self::http::Http;
use self::metrics::Metrics;
use self::traces::{Trace, Traces};
use crate::cni::CniError;
use crate::rpc::message::Condition;

/// Probes and metrics, and the exporter of traces.
#[derive(Debug)]
pub(super) struct Monitoring {
    /// Probes and metrics, if they are served.
    server: Option<Arc<Http>>,
    metrics: Arc<Metrics>,
    /// The exporter of traces, if traces are sent.
    traces: Option<Traces>,
}

impl Monitoring {
    pub(super) fn new(server: Option<Arc<Http>>, metrics: Arc<Metrics>, traces: Option<Traces>) -> Self {
        Self { server, metrics, traces }
    }

    /// The counters.
    pub(super) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns why probes and metrics are not served, if they should be.
    pub(super) fn condition(&self) -> Option<Condition> {
        self.server.as_ref().and_then(|server| server.condition())
    }

    /// Begins the trace of a request. `parent`: that of the runtime, if it names one.
    pub(super) fn begin(&self, parent: Option<&str>) -> Trace {
        Traces::begin(self.traces.as_ref(), parent)
    }

    /// Counts a request that is answered, and ends its trace.
    pub(super) fn answered(
        &self,
        trace: &Trace,
        verb: &str,
        attributes: impl FnOnce() -> Vec<(&'static str, String)>,
        error: Option<&CniError>,
        took: Duration,
    ) {
        self.metrics.answered(verb, error, took);
        if let Some(traces) = &self.traces {
            traces.end(trace, verb, attributes(), error.map(ToString::to_string));
        }
    }
}
