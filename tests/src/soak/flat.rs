//! The resources of the agents while attachments stay: descriptors, threads, memory, entries of the BPF maps.
//! Compares medians: the last third of the time may exceed the first third by at most the tolerance of each figure.

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use aya::maps::MapData;

use super::rig::Rig;
use crate::Node;

/// With fewer samples than these, nothing can be concluded.
const LOOKS: usize = 12;
/// More than any map has.
const MOST_ENTRIES: u64 = 1 << 20;

/// The maps of attachments: their entries are created and deleted with the attachments.
const OF_ATTACHMENTS: [&str; 9] = [
    "na_link",
    "na_addr4",
    "na_addr6",
    "na_par",
    "na_vlan",
    "na_fast_mac",
    "na_uplink",
    "na_local",
    "na_guard",
];
/// The maps of policies.
const OF_POLICIES: [&str; 6] = ["na_peer4", "na_peer6", "na_cidr4", "na_cidr6", "na_l4", "na_rule"];
/// The flow tables.
const OF_FLOWS: [&str; 2] = ["na_ct4", "na_ct6"];

/// One figure of an agent or of its maps.
struct Figure {
    name: &'static str,
    /// The tolerance.
    more: Option<u64>,
    /// Whether the figure belongs to a process, and starts again with the next one.
    of_process: bool,
}

/// In the order of [`Look::figures`].
const FIGURES: [Figure; 6] = [
    // Connections to the API server are opened and closed, and so are pods' namespaces while they are inspected.
    Figure { name: "descriptors", more: Some(12), of_process: true },
    // Threads that have served a call stay for ten seconds.
    Figure { name: "threads", more: Some(4), of_process: true },
    // How much of the executable is resident depends on the code that ran last.
    Figure { name: "KiB resident", more: Some(5 << 10), of_process: true },
    // The last third may have more of the changing pods: eleven with six attachments each have fewer than three
    // hundred entries.
    Figure { name: "entries of attachments", more: Some(150), of_process: false },
    // Policies are at random, up to six at a time.
    Figure { name: "entries of policies", more: Some(1000), of_process: false },
    // Flows are removed by time and under pressure, independently of attachments.
    Figure { name: "flows", more: None, of_process: false },
];

/// An agent in a quiet moment.
#[derive(Debug, Clone, Copy)]
struct Look {
    process: u32,
    figures: [u64; FIGURES.len()],
}

/// All samples of both agents.
#[derive(Debug, Default)]
pub(super) struct Flat([Vec<Look>; 2]);

impl Flat {
    /// Looks at the agents.
    pub(super) fn look(&mut self, rig: &Rig) -> Result<()> {
        for (looks, node) in self.0.iter_mut().zip(&rig.nodes) {
            looks.push(Look::at(node)?);
        }
        Ok(())
    }

    /// Returns the last sample as text.
    pub(super) fn told(&self) -> String {
        let mut text = String::new();
        for (node, looks) in self.0.iter().enumerate() {
            let Some(look) = looks.last() else { continue };
            let figures =
                FIGURES.iter().zip(look.figures).map(|(figure, it)| format!("{it} {}", figure.name));
            let separator = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{separator}node {node}: {}", figures.collect::<Vec<_>>().join(", "));
        }
        text
    }

    /// Compares the last third with the first.
    ///
    /// # Errors
    /// Something has grown by more than its bound.
    pub(super) fn check(&self) -> Result<String> {
        let mut said = Vec::new();
        for (node, looks) in self.0.iter().enumerate() {
            let process = looks.last().map(|look| look.process);
            for (at, figure) in FIGURES.iter().enumerate() {
                let counts = |look: &&Look| !figure.of_process || Some(look.process) == process;
                let all: Vec<u64> = looks.iter().filter(counts).map(|look| look.figures[at]).collect();
                let Some([first, last]) = thirds(&all) else { continue };
                let bound = figure.more.map_or_else(String::new, |more| format!(" (at most {more} more)"));
                said.push(format!("node {node}: {first} then {last} {}{bound}", figure.name));
                ensure!(
                    figure.more.is_none_or(|more| last <= first + more),
                    "{} of node {node} grow: {first} in the first third, {last} in the last{bound}",
                    figure.name
                );
            }
        }
        Ok(said.join("\n  "))
    }
}

/// Returns the medians of the first third and of the last; `None`: there are too few samples.
fn thirds(all: &[u64]) -> Option<[u64; 2]> {
    if all.len() < LOOKS {
        return None;
    }
    let third = all.len() / 3;
    Some([&all[..third], &all[all.len() - third..]].map(|part| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part[part.len() / 2]
    }))
}

impl Look {
    fn at(node: &Node) -> Result<Self> {
        let process = node.agent_pid();
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let word = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            word.with_context(|| format!("a process has {name}"))
        };
        let descriptors = fs::read_dir(format!("/proc/{process}/fd"))?.count() as u64;
        let figures = [
            descriptors,
            field("Threads:")?,
            field("VmRSS:")?,
            entries_of(node, &OF_ATTACHMENTS)?,
            entries_of(node, &OF_POLICIES)?,
            entries_of(node, &OF_FLOWS)?,
        ];
        Ok(Self { process, figures })
    }
}

/// The entries of some maps together.
fn entries_of(node: &Node, maps: &[&str]) -> Result<u64> {
    // The pins of one version of the layout, and those of links.
    let directories = fs::read_dir(node.bpffs())?.collect::<io::Result<Vec<_>>>()?;
    let layout = directories.iter().map(|entry| entry.path()).find(|path| path.join(maps[0]).exists());
    let layout = layout.with_context(|| format!("{} is not pinned", maps[0]))?;
    let mut sum = 0;
    for map in maps {
        sum += entries(&layout.join(map)).with_context(|| format!("count the entries of {map}"))?;
    }
    Ok(sum)
}

/// Returns the number of keys of a pinned map. The keys themselves do not matter, so no type is needed for them.
fn entries(pin: &Path) -> Result<u64> {
    /// `BPF_MAP_GET_NEXT_KEY`, and the attributes that it reads.
    const NEXT_KEY: i32 = 4;
    #[repr(C)]
    struct NextKey {
        map: u32,
        pad: u32,
        key: u64,
        next: u64,
        flags: u64,
    }
    let map = MapData::from_pin(pin)?;
    let mut key = vec![0_u8; map.info()?.key_size() as usize];
    let mut next = key.clone();
    for count in 0..MOST_ENTRIES {
        let request = NextKey {
            map: map.fd().as_fd().as_raw_fd().cast_unsigned(),
            pad: 0,
            // Without a key, the first.
            key: if count == 0 { 0 } else { key.as_ptr() as u64 },
            next: next.as_mut_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the member of `union bpf_attr` that this command reads; both buffers are as long as a key of the map.
        let done =
            unsafe { libc::syscall(libc::SYS_bpf, NEXT_KEY, &raw const request, size_of::<NextKey>()) };
        if done < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::NotFound { Ok(count) } else { Err(error.into()) };
        }
        std::mem::swap(&mut key, &mut next);
    }
    bail!("there is no end of them")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(figures: impl Fn(u64) -> [u64; FIGURES.len()], process: impl Fn(u64) -> u32) -> Flat {
        let looks = (0..30).map(|at| Look { process: process(at), figures: figures(at) }).collect();
        Flat([looks, Vec::new()])
    }

    #[test]
    fn thirds_are_compared_by_their_medians() {
        let all: Vec<u64> = [vec![7; 4], vec![100; 5], vec![9, 9, 9, 500]].concat();
        assert_eq!(thirds(&all), Some([7, 9]));
        assert_eq!(thirds(&all[..LOOKS - 1]), None);
    }

    #[test]
    fn what_has_grown_by_its_bound_is_flat_and_by_more_is_not() {
        let grown = |by: u64| flat(|at| [30, 9 + if at < 10 { 0 } else { by }, 1 << 14, 2000, 0, 5], |_| 1);
        let said = grown(4).check().unwrap();
        assert!(said.contains("node 0: 9 then 13 threads (at most 4 more)"), "{said}");
        assert!(said.ends_with("node 0: 5 then 5 flows"), "{said}");
        let error = grown(5).check().unwrap_err().to_string();
        assert_eq!(error, "threads of node 0 grow: 9 in the first third, 14 in the last (at most 4 more)");
    }

    #[test]
    fn a_process_is_compared_with_itself_and_maps_outlive_it() {
        let flat =
            flat(|at| [if at < 20 { 10 } else { 100 }, 9, 1 << 14, 2000, 0, 0], |at| u32::from(at >= 20));
        let said = flat.check().unwrap();
        assert_eq!(said.lines().count(), 3, "ten looks at a process are too few: {said}");
        assert!(
            said.starts_with("node 0: 2000 then 2000 entries of attachments (at most 150 more)"),
            "{said}"
        );
    }
}
