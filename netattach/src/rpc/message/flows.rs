//! Traffic: counters of attachments, and records of flows and drops.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::attachment::AttachmentName;
use crate::objects::ObjectName;

/// A count of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Number of packets.
    pub packets: u64,
    /// Their bytes, Ethernet header included.
    pub bytes: u64,
}

/// Traffic of one attachment since it was attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentStats {
    /// Name of the attachment.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// Traffic that reached the pod.
    pub received: Traffic,
    /// Traffic from the pod that was let through.
    pub sent: Traffic,
    /// Packets dropped in either direction, by the name of the reason; reasons without packets are left out.
    pub dropped: BTreeMap<String, u64>,
    /// The part of `received` that came by the fast path.
    #[serde(default)]
    pub fast: Traffic,
    /// The part of `sent` that went straight to an uplink.
    #[serde(default)]
    pub fast_sent: Traffic,
    /// Packets that the pod sent while it was on the fast path, or that came for it by an uplink, and that took the node's
    /// stack: by the name of the reason; reasons without packets are left out.
    #[serde(default)]
    pub left_to_stack: BTreeMap<String, u64>,
    /// Records of flows and drops that were withheld, beyond the attachment's share.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub records_withheld: u64,
    /// Records that were lost because the agent did not read fast enough.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub records_lost: u64,
    /// Flows in the flow table that were entered at the attachment, as of the last pass over it.
    #[serde(default)]
    pub flows: u64,
    /// Flows that were ever entered at the attachment.
    #[serde(default)]
    pub new_flows: u64,
    /// Flows evicted early, because the attachment entered more flows than its share of the table.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flows_displaced: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Asks for records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlowsCall {
    /// [`FlowsReport::next`] of the answer before; the last records without it.
    pub from: Option<u64>,
}

/// New flows, drops and flows that have ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowsReport {
    /// Oldest first.
    pub records: Vec<FlowRecord>,
    /// The value of `from` for the next request.
    pub next: u64,
    /// How many records before these the agent no longer holds.
    pub missed: u64,
    /// Attachments whose records were withheld or lost since the attachment or the agent began.
    #[serde(default)]
    pub untold: Vec<MissingRecords>,
    /// Ended flows without a record since the agent started, because there were too many.
    #[serde(default)]
    pub untold_ends: u64,
}

/// How many records of one attachment were withheld or lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingRecords {
    /// Name of the attachment.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// Withheld: beyond the attachment's share of records.
    pub withheld: u64,
    /// Lost: the agent did not read fast enough.
    pub lost: u64,
}

/// The reasons of ended flows in [`FlowRecord::reason`].
pub const ENDINGS: [&str; 5] = ["closed", "reset", "timeout", "detached", "displaced"];

/// A packet that opened a flow, one that was dropped, or a flow that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowRecord {
    /// The attachment; only its number if it no longer exists.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// `allowed`, `dropped` or `ended`.
    pub verdict: String,
    /// Why the packet was dropped. For an ended flow: `closed`, `reset`, `timeout`, `detached` (one of its
    /// ends), or `displaced` if its attachment entered more flows than its share of the table.
    pub reason: Option<String>,
    /// `from-pod` or `to-pod`.
    pub direction: String,
    /// `tcp` and so on, or the number of another protocol; `None` if the packet was not parsed that far.
    pub protocol: Option<String>,
    /// Source address; of an ended flow, the address of its opener.
    pub source: Option<IpAddr>,
    /// Source port, for protocols with ports.
    pub source_port: Option<u16>,
    /// Destination address.
    pub destination: Option<IpAddr>,
    /// Destination port, for protocols with ports.
    pub destination_port: Option<u16>,
    /// Id of the outer tag.
    pub vlan: Option<u16>,
    /// Length of the frame in bytes; 0 for an ended flow.
    pub length: u32,
    /// Number of the policy that decided.
    pub policy: Option<u32>,
    /// Number of the rule that allowed, in that policy.
    pub rule: Option<u32>,
    /// The pod of the source address, if it is known now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_pod: Option<ObjectName>,
    /// The pod of the destination address, if it is known now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_pod: Option<ObjectName>,
    /// The rule that allowed, `namespace/policy ingress[0]`; for a drop by policy the objects that isolate.
    /// Empty if they have changed since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decided_by: Vec<String>,
    /// Duration and traffic of an ended flow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<EndedFlow>,
}

/// A flow that has ended, as counted at the attachment where it was entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedFlow {
    /// From its first packet to its last, in seconds.
    pub seconds: u32,
    /// Traffic from the opener.
    pub forward: Traffic,
    /// Traffic to the opener.
    pub backward: Traffic,
}

#[cfg(test)]
impl FlowRecord {
    /// Makes the record of a TCP packet from a pod that its policy dropped.
    pub(crate) fn dropped(name: AttachmentName) -> Self {
        Self {
            name,
            time_ms: 0,
            verdict: "dropped".into(),
            reason: Some("egress-port".into()),
            direction: "from-pod".into(),
            protocol: Some("tcp".into()),
            source: Some([10, 0, 0, 1].into()),
            source_port: Some(4000),
            destination: Some([10, 0, 0, 2].into()),
            destination_port: Some(80),
            vlan: None,
            length: 74,
            policy: Some(12),
            rule: None,
            source_pod: None,
            destination_pod: None,
            decided_by: Vec::new(),
            ended: None,
        }
    }
}
