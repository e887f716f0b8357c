//! Requests to the agent and its answers, as JSON.
//!
//! These types belong to the protocol. The agent's internal types are separate, so that renaming one of
//! them does not change the messages; [`crate::wire`] converts between the two.
//!
//! Fields and requests may be added: readers ignore unknown fields, and an agent refuses unknown requests.
//! Any other change raises [`PROTOCOL`]. Golden files (`rpc/golden`) hold every message.
//!
//! | module | messages |
//! |---|---|
//! | [`call`] | CNI calls; one more network for a live sandbox |
//! | [`attachment`] | the list of attachments |
//! | [`flows`] | counters, records of flows and drops |
//! | [`policy`], [`dump`], [`explain`] | policies of attachments; compiled policies; why traffic is allowed or dropped |
//! | [`pools`] | pools of addresses |
//! | [`status`] | the agent's state |

pub mod attachment;
pub mod call;
pub mod dump;
pub mod explain;
pub mod flows;
pub mod policy;
pub mod pools;
pub mod status;

use netattach_shim::message::Answer;
use serde::{Deserialize, Serialize};

use crate::objects::ObjectName;

pub use attachment::{Attachment, AttachmentName, FastPath, Kind, Level, State};
pub use call::{AttachCall, DetachCall, Dynamic, Failure, SandboxName};
pub use dump::Dump;
pub use explain::{Path, Question};
pub use flows::{
    AttachmentStats, ENDINGS, EndedFlow, FlowRecord, FlowsCall, FlowsReport, MissingRecords, Traffic,
};
pub use netattach_shim::message::{CniCall, CniReply, Hello, PROTOCOL};
pub use policy::{AttachmentPolicy, PolicyReport, RuleFlows};
pub use pools::{Network, Pool};
pub use status::{
    Condition, FastPathCount, Feature, FlowTableUse, Kernel, PolicyChange, Readiness, Status, Uplink,
};

/// The second frame of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// One call of the CNI executable.
    Cni(CniCall),
    /// Attach a live sandbox to one more network.
    Attach(AttachCall),
    /// Detach an attachment made by [`Request::Attach`].
    Detach(DetachCall),
    /// Every attachment on this node.
    Attachments,
    /// The counters of each attachment.
    Stats,
    /// Which policies apply to each attachment.
    Policy,
    /// The compiled policies: all, the one with a number, or those of an object.
    PolicyDump(Option<String>),
    /// Why traffic is allowed or dropped.
    Explain(Question),
    /// The agent's state.
    Status,
    /// Records of new flows, drops and ended flows.
    Flows(FlowsCall),
    /// The pods that a label selector selects: `app=web,!canary`.
    Select(String),
    /// Pools of addresses, and the holders of their addresses.
    Pools,
    /// The networks that are defined.
    Networks,
}

/// The second frame of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// To [`Request::Cni`].
    Cni(CniReply),
    /// To [`Request::Attach`].
    Attached(Box<Dynamic>),
    /// To [`Request::Detach`]; also if nothing was attached, unless the call asks for an error.
    Detached,
    /// To [`Request::Attach`] and [`Request::Detach`] that failed; nothing of the attachment is left unless
    /// the failure says so. To [`Request::Explain`] of an unknown pod (code 3).
    Failed(Failure),
    /// To [`Request::Attachments`].
    Attachments(Vec<Attachment>),
    /// To [`Request::Stats`].
    Stats(Vec<AttachmentStats>),
    /// To [`Request::Policy`].
    Policy(PolicyReport),
    /// To [`Request::PolicyDump`].
    PolicyDump(Vec<Dump>),
    /// To [`Request::Explain`]: every path that the flow can take.
    Explanation(Vec<Path>),
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Flows`].
    Flows(FlowsReport),
    /// To [`Request::Select`]: the pods of this node with matching labels, attached or not.
    Selected(Vec<ObjectName>),
    /// To [`Request::Pools`].
    Pools(Vec<Pool>),
    /// To [`Request::Networks`]: networks with a readable configuration, the default network first.
    Networks(Vec<Network>),
    /// Refusal of a request that was not understood or could not be served: the reason, on one line.
    Refused(String),
}

impl Answer for Response {
    fn taken(self) -> Result<Self, String> {
        match self {
            Self::Refused(reason) => Err(reason),
            answer => Ok(answer),
        }
    }
}

impl Request {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cni(_) => "cni",
            Self::Attach(_) => "attach",
            Self::Detach(_) => "detach",
            Self::Attachments => "attachments",
            Self::Stats => "stats",
            Self::Policy => "policy",
            Self::PolicyDump(_) => "policy dump",
            Self::Explain(_) => "explain",
            Self::Status => "status",
            Self::Flows(_) => "flows",
            Self::Select(_) => "select",
            Self::Pools => "pools",
            Self::Networks => "networks",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_is_one_flat_object_and_unknown_fields_are_passed_over() {
        let value = json!({
            "id": 7, "pod": {"namespace": "shop", "name": "cart-0"}, "network": "shop/storage", "ifname": "net1",
            "container_id": "abc", "kind": "exec:sriov", "mac": "02:00:00:00:00:01", "addresses": ["10.0.0.2/24"],
            "host_interface": null, "enforcement": "none", "state": "attached"
        });
        let attachment: Attachment = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(attachment.kind, Kind::Exec("sriov".to_owned()));
        assert_eq!(serde_json::to_value(&attachment).unwrap(), value);
        let mut newer = value;
        newer["vlan"] = json!(5);
        assert_eq!(serde_json::from_value::<Attachment>(newer).unwrap(), attachment);
    }

    #[test]
    fn requests_have_stable_names() {
        for request in [Request::Attachments, Request::Stats, Request::Policy, Request::Status] {
            assert_eq!(serde_json::to_value(&request).unwrap(), json!(request.name()));
        }
        let call = CniCall { env: BTreeMap::new(), stdin: "{}".to_owned() };
        assert_eq!(
            serde_json::to_value(Request::Cni(call)).unwrap(),
            json!({"cni": {"env": {}, "stdin": "{}"}})
        );
    }
}

#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden_tests;
