//! The switches between the nodes, used as a host that no agent knows: it has addresses that pods had before. An
//! agent that still takes these addresses for those pods lets packets pass that must be dropped. The host has the
//! addresses only in quiet moments, so that no address is in use twice.

use std::collections::VecDeque;
use std::net::IpAddr;

use anyhow::{Context, Result};

use super::decide::Key;
use super::model::Attachment;
use super::network::{NETWORKS, Network};
use super::rig::UPLINK;
use crate::node::{WIRE, ip};
use crate::{Namespace, Node};

/// Addresses that it has at a time.
const ADDRESSES: usize = 8;
/// Addresses that are remembered; those beyond the newest are of pods that went long ago.
const REMEMBERED: usize = 48;
/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Stranger {
    pub(super) namespace: Namespace,
    /// Addresses that pods have had, the last one at the front.
    gone: VecDeque<(Network, IpAddr)>,
    /// The number of its appearances.
    times: usize,
}

/// The name under which it sends: no pod's.
pub(super) fn key() -> Key {
    (String::new(), "stranger".to_owned())
}

/// Whether that is its name.
pub(super) fn is_it(key: &Key) -> bool {
    key.0.is_empty()
}

impl Stranger {
    /// Connects the nodes: by [`WIRE`], the parent of their macvlans, and by [`UPLINK`], a port of their bridges.
    pub(super) fn between(nodes: &[Node; 2]) -> Result<Self> {
        let namespace = Namespace::new()?;
        namespace.loopback_up()?;
        for (network, link) in [(Network::Seg, WIRE), (Network::Lan, UPLINK)] {
            let switch = network.name();
            let here = |words: &[&str]| ip(&namespace, words).with_context(|| format!("a switch for {link}"));
            here(&["link", "add", switch, "up", "type", "bridge"])?;
            for (number, node) in nodes.iter().enumerate() {
                let port = format!("{switch}-{number}");
                let task = node.namespace.task();
                here(&["link", "add", &port, "type", "veth", "peer", "name", link, "netns", &task])?;
                here(&["link", "set", &port, "master", switch, "up"])?;
                ip(&node.namespace, &["link", "set", link, "up"])?;
            }
        }
        Ok(Self { namespace, gone: VecDeque::new(), times: 0 })
    }

    /// Records that a pod no longer has that address.
    pub(super) fn note(&mut self, network: Network, address: IpAddr) {
        self.gone.retain(|it| *it != (network, address));
        self.gone.push_front((network, address));
        self.gone.truncate(REMEMBERED);
    }

    /// The addresses that pods have had, the last one first.
    pub(super) fn gone(&self) -> impl Iterator<Item = (Network, IpAddr)> {
        self.gone.iter().copied()
    }

    /// Takes some of these addresses: the first ones, and alternating ones of the others.
    pub(super) fn come(&mut self, free: &[(Network, IpAddr)]) -> Result<Vec<Attachment>> {
        let (new, old) = free.split_at(free.len().min(ADDRESSES / 2));
        let first = self.times * ADDRESSES / 2 % old.len().max(1);
        self.times += 1;
        let old = old.iter().cycle().skip(first).take(old.len().min(ADDRESSES - new.len()));
        let mut had: Vec<Attachment> = Vec::new();
        for (network, address) in new.iter().chain(old) {
            let length = if address.is_ipv4() { 24 } else { 64 };
            let mut words = vec!["address".to_owned(), "add".to_owned(), format!("{address}/{length}")];
            words.extend(["dev", network.name()].map(str::to_owned));
            // No other host has the address, and it must be usable at once.
            words.extend((!address.is_ipv4()).then(|| "nodad".to_owned()));
            ip(&self.namespace, &words.iter().map(String::as_str).collect::<Vec<_>>())?;
            let name = format!("{NETWORKS}/{}", network.name());
            match had.iter_mut().find(|it| it.network == name) {
                Some(there) => there.addresses.push(*address),
                None => had.push(Attachment {
                    node: 0,
                    pod: key(),
                    uid: String::new(),
                    network: name,
                    addresses: vec![*address],
                }),
            }
        }
        Ok(had)
    }

    /// Gives its addresses back.
    pub(super) fn go(&self) -> Result<()> {
        for network in [Network::Seg, Network::Lan] {
            ip(&self.namespace, &["address", "flush", "dev", network.name(), "scope", "global"])?;
        }
        Ok(())
    }
}
