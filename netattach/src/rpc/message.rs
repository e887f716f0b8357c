//! What the agent is asked and what it answers.
//!
//! Fields and requests may be added: a reader passes over fields that it does not know, and an agent refuses requests
//! that it does not know. Anything else raises [`PROTOCOL`].

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::mac::Mac;
use crate::objects::ObjectName;
use crate::policy::dump::Dump;
use crate::policy::explain::{Path, Question};
use crate::policy::level::Level;

/// Number of this protocol. Peers with different numbers do not talk.
pub const PROTOCOL: u32 = 1;

/// The first frame of each side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u32,
    /// Version of the sender's software, for messages.
    pub version: String,
}

/// The second frame of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// One call of the CNI executable.
    Cni(CniCall),
    /// Attach a live sandbox to one more network.
    Attach(AttachCall),
    /// Take back what [`Request::Attach`] attached.
    Detach(DetachCall),
    /// Every attachment on this node.
    Attachments,
    /// What each attachment has sent and received.
    Stats,
    /// Which policies apply to each attachment.
    Policy,
    /// The compiled policies: all, that of a number, or those of an object.
    PolicyDump(Option<String>),
    /// Why traffic passes or does not.
    Explain(Question),
    /// How the agent is doing.
    Status,
    /// What the packet path told of new flows and drops.
    Flows(FlowsCall),
}

/// The second frame of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// To [`Request::Cni`].
    Cni(CniReply),
    /// To [`Request::Attach`].
    Attached(Box<Dynamic>),
    /// To [`Request::Detach`]; what is not attached is as good as detached, unless the call says otherwise.
    Detached,
    /// To [`Request::Attach`] and [`Request::Detach`] that failed; nothing of the attachment is left unless it says so. To
    /// [`Request::Explain`] of a pod that is not known (code 3).
    Failed(Failure),
    /// To [`Request::Attachments`].
    Attachments(Vec<Attachment>),
    /// To [`Request::Stats`].
    Stats(Vec<AttachmentStats>),
    /// To [`Request::Policy`].
    Policy(PolicyReport),
    /// To [`Request::PolicyDump`].
    PolicyDump(Vec<Dump>),
    /// To [`Request::Explain`]: every way that the flow can take.
    Explanation(Vec<Path>),
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Flows`].
    Flows(FlowsReport),
    /// To a request that was not understood or could not be served: the reason, on one line.
    Refused(String),
}

/// A call of the CNI executable as the container runtime made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniCall {
    /// The `CNI_*` variables of its environment and no others.
    pub env: BTreeMap<String, String>,
    /// All of its standard input.
    pub stdin: String,
}

/// What the CNI executable shall do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniReply {
    /// Written to standard output as it is.
    pub stdout: String,
    /// Exit code.
    pub exit: i32,
}

/// One more attachment for a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachCall {
    /// Whose.
    pub sandbox: SandboxName,
    /// What is wanted, as an element of the annotation `k8s.v1.cni.cncf.io/networks`. A network without a namespace is
    /// in the pod's.
    pub selection: serde_json::Value,
    /// Who asks, for the record and the pod's status: printable, at most 253 bytes.
    pub by: String,
}

/// An attachment of a live sandbox to be taken back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetachCall {
    /// Whose.
    pub sandbox: SandboxName,
    /// Its interface in the pod.
    pub ifname: String,
    /// Whether it is a failure (code 3) if there is nothing to take back, as people expect; a controller that repeats itself
    /// leaves this out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub must_be_attached: bool,
}

/// How a live sandbox is named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxName {
    /// By its pod, which must have one sandbox on this node.
    Pod(ObjectName),
    /// By `CNI_CONTAINERID`.
    Container(String),
}

/// An attachment that a live sandbox was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// Which.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// Its CNI result, in the newest version.
    pub result: serde_json::Value,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// A code of the CNI specification: 11 is worth another try.
    pub code: u32,
    /// What was wrong and where, on one line.
    pub message: String,
    /// Whether something that the request names is not there, as with code 3 in any case.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_there: bool,
}

/// Which attachment a row is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentName {
    /// Number of the attachment in the kernel's maps; none for an attachment that the dataplane does not see.
    pub id: Option<u32>,
    /// The pod, where the runtime said which.
    pub pod: Option<ObjectName>,
    /// Name of the network: `namespace/definition`, or that of a cluster-wide network.
    pub network: String,
    /// Interface in the pod.
    pub ifname: String,
}

/// One attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Which.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// How the interface was made.
    pub kind: Kind,
    /// Ethernet address of the interface in the pod, where it has one.
    pub mac: Option<Mac>,
    /// Addresses in the pod with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// The interface on the host that carries its traffic: the other end of a veth, the parent of a macvlan.
    pub host_interface: Option<String>,
    /// How far policies hold.
    pub enforcement: Level,
    /// Why not further, for people; empty when nothing is in the way.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub enforcement_detail: String,
    /// Whether its packet programs wait for the first policy that selects it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub programs_wait: bool,
    /// How it stands with the fast path; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_path: Option<FastPath>,
    /// How far it is.
    pub state: State,
}

/// How an attachment stands with the fast path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastPath {
    /// `on`, `undecided` or the short name of what keeps it off.
    pub state: String,
    /// What keeps it off, for people; empty when nothing does.
    pub detail: String,
}

/// What made an interface: `bridge` and so on in process, `exec:TYPE` by another plugin's executable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Kind {
    /// One of our own, by its plugin type.
    Native(String),
    /// The executable of this type.
    Exec(String),
}

/// How far an attachment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// ADD is under way.
    Attaching,
    /// ADD succeeded.
    Attached,
    /// DEL is under way, or has failed and waits for the next.
    Detaching,
}

/// Traffic of one attachment since it was attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentStats {
    /// Which.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// What reached the pod.
    pub received: Traffic,
    /// What the pod sent and was let through.
    pub sent: Traffic,
    /// Packets dropped in either direction, by the name of the reason; reasons without packets are left out.
    pub dropped: BTreeMap<String, u64>,
    /// What of `received` came by the fast path.
    #[serde(default)]
    pub fast: Traffic,
    /// What of `sent` went straight to an uplink.
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
    /// Flows that were forgotten before their time, because the attachment entered more than it has places for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flows_displaced: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// From where on to tell.
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
    /// Where to go on.
    pub next: u64,
    /// How many records before these the agent no longer has.
    pub missed: u64,
    /// What was not told since attachment or agent began, where that is anything.
    #[serde(default)]
    pub untold: Vec<Untold>,
    /// Ended flows that were too many to be told since the agent started.
    #[serde(default)]
    pub untold_ends: u64,
}

/// Records of one attachment that nobody was told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untold {
    /// At whose attachment.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// Beyond its share of records.
    pub withheld: u64,
    /// The agent did not read fast enough.
    pub lost: u64,
}

/// Why flows end: what [`FlowRecord::reason`] says of them.
pub const ENDINGS: [&str; 5] = ["closed", "reset", "timeout", "detached", "displaced"];

/// A packet that opened a flow, one that was dropped, or a flow that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowRecord {
    /// At whose attachment; one that is gone has its number only.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// `allowed`, `dropped` or `ended`.
    pub verdict: String,
    /// Why it was dropped. Of an ended flow: `closed`, `reset`, `timeout`, `detached` with one of its
    /// ends, or `displaced` where its attachment has more flows than places.
    pub reason: Option<String>,
    /// `from-pod` or `to-pod`.
    pub direction: String,
    /// `tcp` and so on; the number of others; none for a packet that was not read that far.
    pub protocol: Option<String>,
    /// Where it comes from; the opener of an ended flow.
    pub source: Option<IpAddr>,
    /// For protocols with ports.
    pub source_port: Option<u16>,
    /// Where it goes.
    pub destination: Option<IpAddr>,
    /// For protocols with ports.
    pub destination_port: Option<u16>,
    /// Id of the outer tag.
    pub vlan: Option<u16>,
    /// Length of the frame in bytes; 0 for an ended flow.
    pub length: u32,
    /// Number of the policy that decided.
    pub policy: Option<u32>,
    /// Number of the rule that allowed, in that policy.
    pub rule: Option<u32>,
    /// What an ended flow was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<EndedFlow>,
}

/// A flow that has ended, as counted at the attachment where it was entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedFlow {
    /// From its first packet to its last, in seconds.
    pub seconds: u32,
    /// What its opener sent.
    pub forward: Traffic,
    /// What came back.
    pub backward: Traffic,
}

/// How often a rule has allowed a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleFlows {
    /// Number of the policy in the kernel's maps.
    pub policy: u32,
    /// Number of the rule in it.
    pub rule: u32,
    /// `namespace/policy direction[number]`.
    pub text: String,
    /// Flows since the policy was installed.
    pub flows: u64,
}

/// A count of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// How many.
    pub packets: u64,
    /// Their bytes, Ethernet header included.
    pub bytes: u64,
}

/// Policies as they are in force.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PolicyReport {
    /// One row per attachment.
    pub attachments: Vec<AttachmentPolicy>,
    /// What each rule in force has allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RuleFlows>,
    /// What is wrong with policies and the objects they refer to.
    pub conditions: Vec<Condition>,
}

/// Policies of one attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentPolicy {
    /// Which.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// Number in the kernel's maps of the rules for traffic to the pod; without one all of it is let through.
    pub ingress: Option<u32>,
    /// The same for traffic from the pod.
    pub egress: Option<u32>,
    /// How far policies hold.
    pub enforcement: Level,
    /// The policies that select it: `namespace/name`, sorted.
    pub selected_by: Vec<String>,
}

/// A problem with an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// Kind and name, `MultiNetworkPolicy shop/db`, or a file.
    pub object: String,
    /// What is wrong and what that means, on one line.
    pub problem: String,
}

/// How the agent is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Version of its software.
    pub version: String,
    /// What must hold before it serves, in the order of its start.
    pub ready: Vec<Readiness>,
    /// Problems with what it reads: manifests, watches.
    pub source: Vec<Condition>,
    /// What is wrong with single networks, pools and attachments: of no concern to others.
    #[serde(default)]
    pub troubles: Vec<Condition>,
    /// What this kernel can do, as probed.
    pub kernel: Kernel,
    /// How programs are attached to the node's ends of attachments and to parents of macvlans: `tcx` or `clsact`.
    pub attach_mode: String,
    /// How programs are attached to uplinks and to devices in pods.
    #[serde(default)]
    pub attach_mode_others: String,
    /// How often programs were put back on a device since the agent's start, after somebody took them off.
    #[serde(default)]
    pub programs_put_back: u64,
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Number of attachments.
    pub attachments: u64,
    /// When the fast path is taken: `auto`, `on` or `off`.
    #[serde(default)]
    pub fast_path_mode: String,
    /// How many attachments stand how with it.
    #[serde(default)]
    pub fast_path: Vec<FastPathCount>,
    /// The devices of the node by which packets may take the fast path from and to elsewhere.
    #[serde(default)]
    pub uplinks: Vec<Uplink>,
    /// How full the flow table is, for each address family.
    #[serde(default)]
    pub flows: Vec<FlowTableUse>,
    /// What the last change of policies took; none before the first that made a difference to an attachment.
    #[serde(default)]
    pub policy_change: Option<PolicyChange>,
}

/// What a change of policies took, from the manifests to the maps; in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyChange {
    /// Reading what changed of the manifests.
    pub read_us: u64,
    /// Compiling whom it concerns.
    pub compile_us: u64,
    /// Writing new policies into the maps.
    pub write_us: u64,
    /// Switching attachments to them.
    pub switch_us: u64,
    /// New policies.
    pub policies: u64,
    /// Attachments that were switched.
    pub attachments: u64,
}

/// Attachments that stand alike with the fast path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastPathCount {
    /// How.
    #[serde(flatten)]
    pub standing: FastPath,
    /// How many.
    pub attachments: u64,
}

/// A device of the node that leads elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// Its name.
    pub device: String,
    /// What it leads to: `bridge` for a port of a bridge with attachments, `routes` for the device of a default route.
    pub leads_to: String,
    /// How it stands with the fast path.
    #[serde(flatten)]
    pub standing: FastPath,
    /// How it drops early: `native`, `generic`, or why it does not; empty where it is not to.
    #[serde(default)]
    pub xdp: String,
}

/// How full one map of the flow table is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowTableUse {
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Flows in it, as of the last pass over it.
    pub entries: u64,
    /// As many as it can hold. Attachments have shares of it, so that it is full for all only where more of them begin at once.
    pub capacity: u64,
}

/// One condition of readiness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// Short name.
    pub condition: String,
    /// Whether it holds.
    pub met: bool,
    /// Why not, or what was found; may be empty.
    pub detail: String,
}

/// The running kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// `uname -r`.
    pub release: String,
    /// What was probed.
    pub features: Vec<Feature>,
}

/// Something that a kernel may lack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    /// Short name.
    pub name: String,
    /// Whether it is there.
    pub present: bool,
    /// What its absence means and since which kernel it exists; may be empty.
    pub detail: String,
}

impl Hello {
    /// That of this software.
    pub fn ours() -> Self {
        Self { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() }
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
        }
    }
}

impl CniCall {
    /// A variable; empty counts as absent, as everywhere in CNI.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

impl fmt::Display for SandboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {pod}"),
            Self::Container(id) => write!(f, "container {id}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native(kind) => f.write_str(kind),
            Self::Exec(kind) => write!(f, "exec:{kind}"),
        }
    }
}

impl FromStr for Kind {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.strip_prefix("exec:") {
            Some(kind) => Self::Exec(kind.to_owned()),
            None => Self::Native(text.to_owned()),
        })
    }
}

impl From<String> for Kind {
    fn from(text: String) -> Self {
        let Ok(kind) = text.parse();
        kind
    }
}

impl From<Kind> for String {
    fn from(kind: Kind) -> Self {
        kind.to_string()
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attaching => "attaching",
            Self::Attached => "attached",
            Self::Detaching => "detaching",
        })
    }
}

#[cfg(test)]
impl FlowRecord {
    /// A TCP packet of a pod's that its policy did not allow.
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
            ended: None,
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn pods_are_named_with_their_namespace() {
        assert_eq!("a/b".parse::<ObjectName>().unwrap().to_string(), "a/b");
        for text in ["", "b", "a/", "/b", "a/b/c"] {
            assert_eq!(text.parse::<ObjectName>(), Err(crate::objects::InvalidObjectName(text.to_owned())));
        }
    }
}

#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden_tests;
