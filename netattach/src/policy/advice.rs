//! Advice: the rule or setting that would allow a denied flow.

use std::fmt;
use std::net::IpAddr;

use netattach_common::protocol::{ICMP, ICMPV6};

use super::explain::{Asked, Leg, Missing, Named, Path};
use crate::objects::policy::Direction;

/// A change that would allow a flow at the end that denies it. Shown as a sentence without a full stop.
///
/// One of the named changes is enough: a rule in one of the policies, a rule in another policy that isolates the end in
/// that direction, or the agent's setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The end that denies the flow.
    pub of: Named,
    /// The direction of the flow at that end.
    pub direction: Direction,
    /// The objects whose rules count there.
    pub policies: Vec<String>,
    /// The peer that a rule has to name.
    pub peer: IpAddr,
    /// Whether rules name the peer already, for other traffic.
    pub is_named: bool,
    /// The traffic that the rule has to name.
    pub traffic: Asked,
}

impl Path {
    /// Returns the changes that would allow the flow. All of them are needed.
    pub fn advice(&self) -> Vec<Advice> {
        let ends = [
            (Direction::Egress, &self.from, &self.to, &self.egress),
            (Direction::Ingress, &self.to, &self.from, &self.ingress),
        ];
        let advice = ends.into_iter().filter_map(|(direction, of, peer, leg)| {
            let Leg::Denied { selected_by, missing, .. } = leg else { return None };
            Some(Advice {
                of: of.clone(),
                direction,
                policies: selected_by.clone(),
                peer: peer.address,
                is_named: matches!(missing, Missing::Port(_)),
                traffic: self.traffic.as_rules_name_it(),
            })
        });
        advice.collect()
    }
}

impl Advice {
    /// Returns the agent's setting that is sufficient on its own, if there is one.
    pub fn setting(&self) -> Option<&'static str> {
        match self.traffic.protocol {
            ICMP => Some("acceptICMP"),
            ICMPV6 => Some("acceptICMPv6"),
            _ => None,
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, direction, policies, peer, is_named, traffic } = self;
        let peers = match direction {
            Direction::Ingress => "from",
            Direction::Egress => "to",
        };
        // An item of `ports` is about a protocol that has ports: no such item means ICMP.
        match (is_named, traffic.port) {
            (true, Some(_)) => write!(f, "{traffic} in `ports` of such a rule")?,
            (true, None) => write!(f, "such a rule without `ports`")?,
            (false, Some(_)) => write!(f, "a rule with {peer} in `{peers}` and {traffic} in `ports`")?,
            (false, None) => write!(f, "a rule with {peer} in `{peers}` and without `ports`")?,
        }
        let whose = if policies.is_empty() { "a policy".to_owned() } else { policies.join(" or ") };
        write!(f, " would allow it, in {whose} or in another policy on {of}")?;
        match self.setting() {
            Some(setting) => write!(f, "; so would {setting}: true in the agent's settings, for all pods"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "advice_tests.rs"]
mod tests;
