//! Leftovers at the end, and growth in the meantime.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::rig::Rig;
use crate::Node;
use crate::node::WIRE;
use crate::snapshot::{Maps, Snapshot, has_resting_numbers, installed_policies};
use crate::traffic::eventually;

/// Every half minute, the agent checks for sandboxes that no DEL was sent for, and collects one at the second
/// finding.
const PATIENCE: Duration = Duration::from_secs(150);
/// How much more an agent may use in the last third than in the first: a quarter, and the memory that it keeps free
/// while working.
const MEMORY: u64 = 4 << 20;
/// More descriptors that it may have open.
const DESCRIPTORS: u64 = 12;
/// With fewer moments than these, nothing can be concluded.
const MOMENTS: usize = 12;

/// The resources that an agent uses in a quiet moment.
#[derive(Debug, Clone, Copy)]
struct Use {
    process: u32,
    /// Its own memory, in bytes: how much of its executable is resident depends on the code that ran last.
    own: u64,
    descriptors: u64,
}

/// The resources that the agents used.
#[derive(Debug, Default)]
pub(super) struct Resources([Vec<Use>; 2]);

impl Resources {
    /// Looks at the agents.
    pub(super) fn look(&mut self, rig: &Rig) -> Result<()> {
        for (uses, node) in self.0.iter_mut().zip(&rig.nodes) {
            let process = node.agent_pid();
            let status = fs::read_to_string(format!("/proc/{process}/status"))?;
            let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
            let own = own.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            let own = own.context("a process has RssAnon")? * 1024;
            let descriptors = fs::read_dir(format!("/proc/{process}/fd"))?.count() as u64;
            uses.push(Use { process, own, descriptors });
        }
        Ok(())
    }

    /// The last third uses no more than the first, of the moments of one process.
    ///
    /// # Errors
    /// It does.
    pub(super) fn check(&self) -> Result<String> {
        let mut said = Vec::new();
        for (number, uses) in self.0.iter().enumerate() {
            let last = uses.last().map(|it| it.process);
            let uses: Vec<Use> = uses.iter().copied().filter(|it| Some(it.process) == last).collect();
            if uses.len() < MOMENTS {
                continue;
            }
            let third = uses.len() / 3;
            let (first, last) = (&uses[..third], &uses[uses.len() - third..]);
            let median = |uses: &[Use], of: fn(&Use) -> u64| {
                let mut all: Vec<u64> = uses.iter().map(of).collect();
                all.sort_unstable();
                all[all.len() / 2]
            };
            let memory = [first, last].map(|uses| median(uses, |it| it.own));
            let descriptors = [first, last].map(|uses| median(uses, |it| it.descriptors));
            said.push(format!(
                "node {number}: {} then {} KiB, {} then {} descriptors",
                memory[0] >> 10,
                memory[1] >> 10,
                descriptors[0],
                descriptors[1]
            ));
            ensure!(
                memory[1] <= memory[0] + memory[0] / 4 + MEMORY,
                "the agent of node {number} grows: {memory:?} bytes"
            );
            ensure!(
                descriptors[1] <= descriptors[0] + DESCRIPTORS,
                "the agent of node {number} has ever more open: {descriptors:?} descriptors"
            );
        }
        Ok(said.join("; "))
    }
}

/// Checks that nothing is left of ended pods, on either node.
pub(super) fn nothing_is_left(rig: &Rig) -> Result<()> {
    for (number, node) in rig.nodes.iter().enumerate() {
        let mut left = String::new();
        let is_clean = eventually(PATIENCE, || {
            left = match of_node(node) {
                Ok(()) => return true,
                Err(error) => format!("{error:#}"),
            };
            std::thread::sleep(Duration::from_millis(200));
            false
        });
        if !is_clean {
            bail!("left on node {number}: {left}");
        }
    }
    Ok(())
}

fn of_node(node: &Node) -> Result<()> {
    let now = Snapshot::take(node, &[])?;
    let stays = |name: &str, kind: &str| matches!(kind, "" | "bridge") || matches!(name, WIRE | "wire1");
    let links: Vec<_> = now.node.links.iter().filter(|(name, link)| !stays(name, &link.kind)).collect();
    ensure!(links.is_empty(), "links: {links:?}");
    let programs: BTreeSet<_> = now.node.links.values().flat_map(|link| &link.programs).collect();
    ensure!(programs.is_empty(), "programs: {programs:?}");
    ensure!(now.files.is_empty(), "files: {:?}", now.files);
    ensure!(now.dataplane == Maps::default(), "entries of maps: {:?}", now.dataplane);
    let policies = installed_policies(node)?;
    ensure!(policies.is_empty(), "policies in the maps: {policies:?}");
    ensure!(!has_resting_numbers(node)?, "numbers that are not free");
    Ok(())
}
