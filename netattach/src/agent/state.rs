//! The state that requests are answered from.

use std::sync::Arc;

use super::admission::places::Admission;
use super::cleanup::collector::Collector;
use super::cleanup::left_over::Earlier;
use super::health::Health;
use super::monitoring::Monitoring;
use super::pods::RunningPods;
use super::pods::missed::Repairs;
use super::report::Reporter;
use super::request::after_add::AfterAdd;
use super::request::publication::Statuses;
use crate::attach::{Engine, IntentReader};
use crate::journal::JournalKey;
use crate::kubelet::PodResources;
use crate::rpc::message::Condition;

/// The agent's connections to the rest of the node, and what the start has found.
#[derive(Debug)]
pub(super) struct Outside {
    /// Recorded DELs, and sandboxes that no runtime will ask for.
    pub(super) collector: Collector,
    /// Devices of pods.
    pub(super) kubelet: PodResources,
    /// Pods that run without their networks.
    pub(super) repairs: Repairs,
    /// Probes, metrics and traces.
    pub(super) monitoring: Monitoring,
    /// Why executed plugins have no control group, if they should have one.
    pub(super) no_group: Option<Condition>,
    /// Records that could not be taken over, with the reason.
    pub(super) left_alone: Vec<(JournalKey, String)>,
}

/// The state that requests are answered from. Modules add methods to it; its parts keep their own fields.
#[derive(Debug)]
pub(super) struct Agent {
    /// Attaches and detaches.
    pub(super) engine: Arc<Engine>,
    /// Finds the networks of pods.
    pub(super) intents: Arc<IntentReader>,
    /// Devices of pods.
    pub(super) kubelet: PodResources,
    /// Which request may begin, and which has to wait.
    pub(super) admission: Admission,
    /// The network-status of pods.
    pub(super) statuses: Statuses,
    /// Limits on the work after the answers to ADDs.
    pub(super) after_add: AfterAdd,
    /// The pods that are running.
    pub(super) pods: RunningPods,
    /// Recorded DELs, and sandboxes that no runtime will ask for.
    pub(super) collector: Collector,
    /// What earlier agents have left over.
    pub(super) earlier: Earlier,
    /// The results of checks.
    pub(super) health: Arc<Health>,
    /// Answers questions about the agent.
    pub(super) reporter: Reporter,
    /// Probes, metrics and traces.
    pub(super) monitoring: Monitoring,
    /// Why executed plugins have no control group, if they should have one.
    pub(super) no_group: Option<Condition>,
}

impl Agent {
    pub(super) fn new(
        engine: Arc<Engine>,
        intents: Arc<IntentReader>,
        statuses: Statuses,
        reporter: Reporter,
        health: Arc<Health>,
        outside: Outside,
        parallel_adds: usize,
    ) -> Self {
        Self {
            engine,
            intents,
            kubelet: outside.kubelet,
            admission: Admission::new(parallel_adds),
            statuses,
            after_add: AfterAdd::default(),
            pods: RunningPods::new(outside.repairs),
            collector: outside.collector,
            earlier: Earlier::new(outside.left_alone),
            health,
            reporter,
            monitoring: outside.monitoring,
            no_group: outside.no_group,
        }
    }
}
