//! Requests that change something, and their answers: attaching a live sandbox to one more network, and
//! detaching it. The calls of the CNI executable are defined in [`netattach_shim::message`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::attachment::AttachmentName;
use crate::objects::ObjectName;

/// One more attachment for a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachCall {
    /// The sandbox.
    pub sandbox: SandboxName,
    /// The network, as an element of the annotation `k8s.v1.cni.cncf.io/networks`. A network without a namespace is
    /// in the pod's.
    pub selection: serde_json::Value,
    /// The caller's name, for the record and the pod's status: printable, at most 253 bytes.
    pub by: String,
    /// The trace that the request belongs to, as in `TRACEPARENT` (W3C Trace Context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// Detaches an attachment of a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetachCall {
    /// The sandbox.
    pub sandbox: SandboxName,
    /// The interface in the pod.
    pub ifname: String,
    /// Whether it is a failure (code 3) if there is nothing to detach, as a person expects. A controller that repeats
    /// its calls leaves this out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub must_be_attached: bool,
    /// The trace that the request belongs to, as in `TRACEPARENT` (W3C Trace Context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// The name of a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxName {
    /// Its pod, which must have one sandbox on this node.
    Pod(ObjectName),
    /// `CNI_CONTAINERID`.
    Container(String),
}

/// The attachment that was made for a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// Name of the attachment.
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
    /// The reason and its place, on one line.
    pub message: String,
    /// Whether something that the request names does not exist. With code 3 that is so in any case.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_there: bool,
}

impl fmt::Display for SandboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {pod}"),
            Self::Container(id) => write!(f, "container {id}"),
        }
    }
}
