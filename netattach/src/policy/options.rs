//! Choices that the policies leave open, from the agent's settings.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::objects::access::Restrictions;
use crate::objects::policy::{Inference, Rule};

/// Choices that the policies leave open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// The directions that a policy without `policyTypes` isolates.
    pub policy_types_inference: Inference,
    /// The networks that the policies of a namespace may name.
    pub restrictions: Restrictions,
    /// Whether NetworkPolicies hold on the pods' default networks.
    pub network_policy: bool,
    /// Addresses of this node: NetworkPolicies never deny traffic between a pod and its own node.
    pub node: BTreeSet<IpAddr>,
    /// Traffic to this node may be forwarded elsewhere without being judged again, so it is not excepted
    /// from egress policies.
    pub node_may_lead_elsewhere: bool,
    /// Rules that apply wherever a policy isolates.
    pub common: CommonRules,
    /// The treatment of attachments whose new policy does not fit into the maps.
    pub on_overflow: OnOverflow,
}

impl Options {
    /// Whether the two differ only in the addresses of the node and in where traffic to them may lead.
    pub(super) fn differ_by_node_alone(&self, other: &Self) -> bool {
        let Self {
            policy_types_inference,
            restrictions,
            network_policy,
            node: _,
            node_may_lead_elsewhere: _,
            common,
            on_overflow,
        } = self;
        *policy_types_inference == other.policy_types_inference
            && *restrictions == other.restrictions
            && *network_policy == other.network_policy
            && *common == other.common
            && *on_overflow == other.on_overflow
    }
}

/// The treatment of attachments whose new policy does not fit into the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOverflow {
    /// In the direction that could not be written, attachments that a policy isolates stay under it, and others are
    /// isolated completely: traffic that the new policy revokes stays allowed.
    Keep,
    /// All of them are isolated completely in that direction.
    #[default]
    Deny,
}

/// Rules that apply beside the policies of every isolated attachment: blocks and port numbers only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommonRules {
    /// Ingress rules.
    pub ingress: Vec<(String, Rule)>,
    /// Egress rules.
    pub egress: Vec<(String, Rule)>,
}
