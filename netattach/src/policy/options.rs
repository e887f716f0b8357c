//! Choices that the policies leave open, from the agent's settings.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::objects::access::Restrictions;
use crate::objects::policy::{Inference, Rule};

/// Choices that the policies leave open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// What a policy without `policyTypes` isolates.
    pub policy_types_inference: Inference,
    /// Which networks the policies of a namespace may name.
    pub restrictions: Restrictions,
    /// Whether NetworkPolicies hold on the pods' default networks.
    pub network_policy: bool,
    /// Addresses of this node: NetworkPolicies never keep a pod from its own node, nor the node from the pod.
    pub node: BTreeSet<IpAddr>,
    /// What is sent to this node may end elsewhere, without anybody asking policies again: then it is not excepted from them.
    pub node_may_lead_elsewhere: bool,
    /// What applies beside the policies wherever one isolates.
    pub common: CommonRules,
    /// What becomes of attachments whose new policy does not fit into the maps.
    pub on_overflow: OnOverflow,
}

/// What becomes of attachments whose new policy does not fit into the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOverflow {
    /// In the direction that could not be written those that a policy isolates stay under it, and others are isolated
    /// completely: what the new policy revokes stays open.
    Keep,
    /// All of them are isolated completely in that direction.
    #[default]
    Deny,
}

/// Rules that apply beside the policies of every isolated attachment: blocks and port numbers only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommonRules {
    /// For what comes in.
    pub ingress: Vec<(String, Rule)>,
    /// For what goes out.
    pub egress: Vec<(String, Rule)>,
}
