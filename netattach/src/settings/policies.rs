//! The agent's settings about policies.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cidr;
use crate::objects::access::Restrictions;
use crate::objects::policy::{Direction, Inference, Peer, Peers, Ports, Rule};
use crate::policy::options::{CommonRules, OnOverflow, Options};
use crate::source::read::policy::{CommonRulesError, read_common_rules};

use super::Settings;

/// The directions that a policy without `policyTypes` isolates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyTypes {
    /// The directions that it has rules for.
    #[default]
    Presence,
    /// Ingress, and egress when it has egress rules (networking.k8s.io/v1).
    V1,
}

/// The handling of attachments whose new policy does not fit into the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// Attachments that a policy already isolates keep that policy, the others are isolated completely: traffic that
    /// the new policy revokes stays allowed.
    Keep,
    /// All of these attachments are isolated completely.
    #[default]
    Deny,
}

/// Prefixes that pass every policy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AlwaysAllow {
    /// Sources whose packets may enter pods.
    #[serde(deserialize_with = "cidr::deserialize_all")]
    pub src: Vec<IpNet>,
    /// Destinations that pods may send to.
    #[serde(deserialize_with = "cidr::deserialize_all")]
    pub dst: Vec<IpNet>,
}

/// Rules, written as in a policy, that apply in addition to the policies.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct WrittenCommonRules {
    /// Rules for ingress.
    pub ingress: Vec<Value>,
    /// Rules for egress.
    pub egress: Vec<Value>,
}

impl Settings {
    /// The options for compiling policies, except for the node's addresses.
    ///
    /// # Errors
    /// A common rule is invalid.
    pub fn policy_options(&self, restrictions: Restrictions) -> Result<Options, CommonRulesError> {
        Ok(Options {
            policy_types_inference: match self.policy_types_inference {
                PolicyTypes::Presence => Inference::Presence,
                PolicyTypes::V1 => Inference::V1,
            },
            restrictions,
            on_overflow: match self.on_overflow {
                Overflow::Keep => OnOverflow::Keep,
                Overflow::Deny => OnOverflow::Deny,
            },
            network_policy: self.network_policy(),
            node: Default::default(),
            node_may_lead_elsewhere: false,
            common: CommonRules {
                ingress: common(
                    Direction::Ingress,
                    "src",
                    &self.always_allow.src,
                    &self.common_rules.ingress,
                )?,
                egress: common(Direction::Egress, "dst", &self.always_allow.dst, &self.common_rules.egress)?,
            },
        })
    }
}

fn common(
    direction: Direction,
    key: &str,
    prefixes: &[IpNet],
    written: &[Value],
) -> Result<Vec<(String, Rule)>, CommonRulesError> {
    let block = |net: &IpNet| Peer::Block { net: net.trunc(), except: Vec::new() };
    let always = (!prefixes.is_empty()).then(|| {
        let peers = Peers::Of(prefixes.iter().map(block).collect());
        (format!("settings alwaysAllow.{key}"), Rule { peers, ports: Ports::Any })
    });
    let rules = read_common_rules(direction, written)?.into_iter().enumerate();
    let named = rules.map(|(number, rule)| (format!("settings commonRules.{direction}[{number}]"), rule));
    Ok(always.into_iter().chain(named).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::Chain;
    use serde_json::json;

    fn settings(ingress: Value) -> Settings {
        let ingress = ingress.as_array().unwrap().clone();
        let mut settings = Settings::default();
        settings.common_rules.ingress = ingress;
        settings
    }

    #[test]
    fn rules_for_all_policies_are_blocks_and_numbers() {
        let table = [
            (
                json!([{"from": [{"podSelector": {}}]}]),
                "ingress[0]: rules for all policies take address blocks and port numbers only",
            ),
            (
                json!([{}, {"ports": [{"port": "web"}]}]),
                "ingress[1]: rules for all policies take address blocks and port numbers only",
            ),
            (
                json!([{"from": [{"ipBlock": {"cidr": "10.0.0.1/24"}}]}]),
                "ingress[0].from[0].ipBlock.cidr: 10.0.0.1/24 has host bits and is read as 10.0.0.0/24",
            ),
            (json!([{"to": []}]), "ingress[0]: unknown key \"to\": matches nothing"),
        ];
        for (rules, expected) in table {
            let error = settings(rules).policy_options(Restrictions::default()).unwrap_err();
            assert_eq!(Chain(&error).to_string(), expected);
        }
    }

    #[test]
    fn a_prefix_that_some_read_in_octal_is_refused() {
        let read = |text: &str| serde_json::from_value::<AlwaysAllow>(json!({"src": [text]}));
        assert_eq!(read("10.0.0.8/32").unwrap().src, ["10.0.0.8/32".parse().unwrap()]);
        assert_eq!(
            read("10.0.0.010/32").unwrap_err().to_string(),
            "\"10.0.0.010/32\" is not an address with a prefix length"
        );
    }

    #[test]
    fn each_rule_is_called_by_its_key() {
        let mut settings = settings(json!([{"ports": [{"port": 22}]}]));
        settings.always_allow.src = vec!["192.0.2.7/24".parse().unwrap()];
        settings.always_allow.dst = vec!["2001:db8::/32".parse().unwrap()];
        let common = settings.policy_options(Restrictions::default()).unwrap().common;
        let names = |rules: &[(String, Rule)]| rules.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&common.ingress), ["settings alwaysAllow.src", "settings commonRules.ingress[0]"]);
        assert_eq!(names(&common.egress), ["settings alwaysAllow.dst"]);
        let net = "192.0.2.0/24".parse().unwrap();
        assert_eq!(
            common.ingress[0].1,
            Rule { peers: Peers::Of(vec![Peer::Block { net, except: vec![] }]), ports: Ports::Any }
        );
    }
}
