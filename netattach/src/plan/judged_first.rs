//! Attaches programs to an interface before it comes up to request its address. Pure.
//!
//! `dhcp` sets the interface up and waits for a server, for up to 10 s. In a new pod no process can use the interface
//! meanwhile, but in a live pod processes run: they would bypass every policy.

use crate::step::Step;

/// Reorders the steps of an interface so that its policy and its programs come before an address is requested on its
/// link. The addresses are then added to the dataplane afterwards.
pub(super) fn judged_first(mut steps: Vec<Step>) -> Vec<Step> {
    let asks = steps.iter().position(Step::asks_the_network);
    let protects = steps.iter().position(|step| matches!(step, Step::Protect(_)));
    if let (Some(asks), Some(protects)) = (asks, protects)
        && asks < protects
        && let Some(protect) = steps.get_mut(protects)
    {
        let protect = std::mem::replace(protect, Step::ProtectAddresses);
        steps.insert(asks, protect);
    }
    steps
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cni::{self, CniArgs, CniError};
    use crate::link::Facts;
    use crate::npwg::NetworkName;
    use crate::plan::attachment::attachment;
    use crate::plan::compare::difference;
    use crate::plan::resolve::{Network, Numbers, Options};
    use crate::plan::{Plan, fixtures};

    struct First;

    impl Numbers for First {
        fn attachment(&mut self) -> Result<u32, CniError> {
            Ok(1)
        }

        fn network(&mut self, _: &NetworkName) -> u32 {
            1
        }
    }

    /// The steps of an interface with these keys, from its link on; `executed`: its address is another plugin's to ask for.
    fn planned(kind: &str, keys: Value, executed: bool) -> Vec<Step> {
        let mut config =
            json!({"name": "lan", "cniVersion": "1.0.0", "type": kind, "ipam": {"type": "dhcp"}});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let network = Network {
            name: "shop/lan".into(),
            list: cni::NetworkList::from_map(config.as_object().unwrap().clone()).unwrap().into(),
            resource: None,
            enforce: None,
            ethertypes: Vec::new(),
            device: None,
        };
        let facts = Facts::default();
        let wanted = fixtures::wanted(&network, &facts);
        let exec = executed.then(|| "dhcp".to_owned()).into_iter().collect();
        let options = Options { exec, ..Options::default() };
        let (sandbox, args) = (fixtures::sandbox("a"), CniArgs::default());
        attachment(&sandbox, &wanted, &args, &options, Some(&mut First)).unwrap().steps
    }

    /// Rows: DHCP-judged.
    #[test]
    fn an_interface_that_comes_up_for_its_address_is_judged_before() {
        let (protect, addresses, configure) =
            ("load policy and counters", "load its addresses", "configure the pod's interface");
        for (kind, keys) in [
            ("bridge", json!({})),
            ("vlan", json!({"master": "eth1", "vlanId": 5})),
            ("ipvlan", json!({"master": "eth1"})),
            ("macvlan", json!({"master": "eth1"})),
            ("host-device", json!({"device": "eth1"})),
        ] {
            for (executed, asks) in
                [(false, "lease an address by DHCP in network lan"), (true, "run plugin dhcp")]
            {
                let steps = planned(kind, keys.clone(), executed);
                let said: Vec<String> = steps.iter().map(Step::describe).collect();
                assert_eq!(
                    said.last_chunk().map(|last: &[String; 4]| last.each_ref().map(String::as_str)),
                    Some([protect, asks, addresses, configure]),
                    "{kind} {said:?}"
                );
            }
        }
    }

    #[test]
    fn an_address_that_nobody_is_asked_for_comes_before_the_programs() {
        let ipam = json!({"ipam": {"type": "static", "addresses": [{"address": "10.1.0.2/24"}]}});
        let steps = planned("bridge", ipam, false);
        assert!(!steps.contains(&Step::ProtectAddresses), "{steps:?}");
        assert!(matches!(steps[..], [.., Step::Lease(_), Step::Protect(_), Step::Configure(_)]), "{steps:?}");
    }

    /// As it is recorded of pods that an earlier agent attached, and asked for again.
    #[test]
    fn the_order_of_earlier_agents_is_the_same_request() {
        let today = planned("ptp", json!({"ipMasq": true}), false);
        assert!(today.iter().any(|step| matches!(step, Step::Translate(_))), "{today:?}");
        let mut before = today.clone();
        let first = before.iter().position(|step| matches!(step, Step::Protect(_))).unwrap();
        let protect = before.remove(first);
        let then = before.iter().position(|step| *step == Step::ProtectAddresses).unwrap();
        before[then] = protect;
        let plan = |steps: &Vec<Step>| Plan {
            sandbox: fixtures::sandbox("a"),
            attachments: vec![fixtures::attachment("ptp", steps.clone())],
            dynamic: None,
        };
        assert_eq!(difference(&plan(&before), &plan(&today)), None);
        assert!(difference(&plan(&before), &plan(&today[1..].to_vec())).is_some());
    }
}
