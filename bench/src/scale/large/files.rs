//! Policies with the maximum number of rules, as manifests in a directory.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Value, json};
use xtask::progress::Progress;

use super::{Author, Figures, NAME, Subject};
use crate::agent::{self, Agent, NAMESPACE};
use crate::pods::{Node, make_directory};

/// The maximum number of rules of one policy.
const RULES: u32 = 100_000;
/// The addresses that the rules are about, spread over a prefix of ten bits.
const PEERS: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 0);
/// An odd number, so that no two rules are about the same.
const SPREAD: u32 = 37;
/// The lowest port of any rule.
const FIRST_PORT: u32 = 1024;
/// Ports of a range, which is one entry of the maps: it begins at a multiple of that.
const RANGE: u32 = 8;

/// The part that differs between the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// An address, and a range of ports.
    Ranges,
    /// A prefix of 28 to 30 bits, and a port.
    Prefixes,
}

impl Rules {
    pub(super) fn name(self) -> String {
        match self {
            Self::Ranges => format!("{RULES} rules with ranges of ports"),
            Self::Prefixes => format!("{RULES} rules with prefixes"),
        }
    }

    /// A rule of a round: its block and its ports, the first and the last.
    fn rule(self, number: u32, round: u32) -> (String, [u32; 2]) {
        let base = u32::from(PEERS);
        match self {
            Self::Ranges => {
                let host = Ipv4Addr::from(base | number.wrapping_mul(SPREAD) & 0x3f_ffff);
                let first = FIRST_PORT + RANGE * ((number + round) % 8_000);
                (format!("{host}/32"), [first, first + RANGE - 1])
            }
            Self::Prefixes => {
                let net = Ipv4Addr::from(base | (number.wrapping_mul(SPREAD) & 0x3_ffff) << 4);
                let port = FIRST_PORT + (number + round) % 60_000;
                (format!("{net}/{}", 28 + number % 3), [port, port])
            }
        }
    }

    /// A manifest as programs write it, rule by rule.
    fn manifest(self, round: u32, pod: u16) -> String {
        let mut text = format!(
            "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata:\n  name: {NAME}\n  namespace: {NAMESPACE}\n  \
             annotations:\n    k8s.v1.cni.cncf.io/policy-for: kube-system/default\nspec:\n  podSelector:\n    matchLabels:\n      \
             number: \"{pod}\"\n  policyTypes:\n  - Ingress\n  ingress:\n"
        );
        for number in 0..RULES {
            let (block, [first, last]) = self.rule(number, round);
            let _ = write!(
                text,
                "  - from:\n    - ipBlock:\n        cidr: {block}\n    ports:\n    - protocol: TCP\n      port: {first}\n"
            );
            if last > first {
                let _ = writeln!(text, "      endPort: {last}");
            }
        }
        text
    }
}

/// Measures on a node of its own, whose agent has one pod.
pub(super) fn measure(rules: Rules, cycles: u16, progress: &Progress) -> anyhow::Result<Figures> {
    let node = Node::enter()?;
    let pods = node.pods(1)?;
    let pod = pods.first().context("no pod was made")?;
    let leases = make_directory(&node.scratch().join("leases"))?;
    let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": "10.110.0.0/16"}]]});
    let network = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam});
    let mut objects: Vec<Value> = agent::namespaces().into();
    objects.push(agent::network("kube-system", "default", &network));
    objects.push(agent::pod(pod, ""));
    let agent = Agent::start(&node, &objects)?;
    agent.call("ADD", pod, &pod.new_container())?;
    let mut author = OfFiles {
        rules,
        pod: pod.number,
        draft: agent.source().with_file_name("draft"),
        place: agent.source().join(format!("{NAME}.yaml")),
    };
    let figures = Subject::of(&agent, pod, "eth0")?.cycles(rules.name(), cycles, &mut author, progress)?;
    agent.call("DEL", pod, &pod.container())?;
    Ok(figures)
}

struct OfFiles {
    rules: Rules,
    pod: u16,
    /// The path of a manifest before it is renamed, and after.
    draft: PathBuf,
    place: PathBuf,
}

impl Author for OfFiles {
    fn write(&mut self, round: u32) -> anyhow::Result<()> {
        fs::write(&self.draft, self.rules.manifest(round, self.pod)).context("write a manifest")
    }

    fn put(&mut self) -> anyhow::Result<()> {
        fs::rename(&self.draft, &self.place).context("put a manifest into its place")
    }

    fn remove(&mut self) -> anyhow::Result<()> {
        fs::remove_file(&self.place).context("remove the policy")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Bytes of a manifest that is read.
    const MOST: usize = 16 << 20;

    #[test]
    fn every_rule_is_about_something_of_its_own() {
        for rules in [Rules::Ranges, Rules::Prefixes] {
            let blocks: BTreeSet<String> = (0..RULES).map(|number| rules.rule(number, 0).0).collect();
            assert_eq!(blocks.len(), RULES as usize, "{rules:?}");
        }
    }

    #[test]
    fn prefixes_are_apart() {
        let slots: BTreeSet<u32> = (0..RULES)
            .map(|number| {
                let (block, _) = Rules::Prefixes.rule(number, 0);
                let address: Ipv4Addr = block.split('/').next().unwrap().parse().unwrap();
                u32::from(address) >> 4
            })
            .collect();
        assert_eq!(slots.len(), RULES as usize);
    }

    #[test]
    fn a_range_is_one_block_of_ports_and_no_rule_is_as_in_the_round_before() {
        for number in [0, 1, 7_999, 99_999] {
            for round in 0..40 {
                let (_, [first, last]) = Rules::Ranges.rule(number, round);
                assert!(first.is_multiple_of(RANGE) && last == first + RANGE - 1 && last <= 65_535);
                for rules in [Rules::Ranges, Rules::Prefixes] {
                    assert_ne!(rules.rule(number, round), rules.rule(number, round + 1), "{rules:?}");
                }
            }
        }
    }

    #[test]
    fn the_manifest_is_one_that_is_read_and_has_all_rules() {
        for rules in [Rules::Ranges, Rules::Prefixes] {
            let text = rules.manifest(39, 0);
            assert!(text.len() <= MOST, "{rules:?}: {} bytes", text.len());
            assert_eq!(text.matches("  - from:\n").count(), RULES as usize);
        }
    }
}
