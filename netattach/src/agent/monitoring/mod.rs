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
