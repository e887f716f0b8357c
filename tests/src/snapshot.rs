//! Everything that attachments leave on a machine, in a form that can be compared.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use ipnet::IpNet;
use netattach::bpf::{self, Dataplane, PolicyIds};
use netattach::mac::Mac;
use netattach::netlink::{Handle, filter, nat};
use netattach::netns::Netns;
use netattach::spec::TcHook;

use crate::node::WIRE;
use crate::{Namespace, Node, Pod};

/// The state of a node and its pods. Two are equal if no attachment was added or removed in between.
///
/// Left out are changes that the kernel makes with a delay (link-local addresses) and state that is meant to stay: the
/// allocator's position, the list of its pools, remembered flows.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// The node's namespace.
    pub node: Network,
    /// The pods' namespaces, by container.
    pub pods: BTreeMap<String, Network>,
    /// Journal, recorded DELs, leases and published status: path and content.
    pub files: BTreeMap<String, String>,
    /// The state of the packet programs.
    pub dataplane: Maps,
    /// Every pin.
    pub pins: BTreeSet<String>,
    /// Elements of the table that translates addresses.
    pub translation: BTreeSet<nat::Element>,
    /// Rules by which the node forwards for pods, with their comments.
    pub forwarding: BTreeSet<String>,
}

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// The links by name.
    pub links: BTreeMap<String, Link>,
    /// The routes of the main table, as text.
    pub routes: BTreeSet<String>,
    /// The rules by source address, as text.
    pub rules: BTreeSet<String>,
}

/// A link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// `veth`, `bridge`, ...
    pub kind: String,
    /// Ethernet address.
    pub mac: Option<Mac>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Index of its bridge.
    pub controller: Option<u32>,
    /// Without link-local ones of IPv6.
    pub addresses: BTreeSet<IpNet>,
    /// Names of our filters, by hook.
    pub programs: BTreeSet<(TcHook, String)>,
}

/// The maps of the packet programs, without flows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Maps {
    /// Device to attachment.
    pub links: BTreeMap<u32, u32>,
    /// Attachments that have an address on a parent.
    pub macvlans: BTreeSet<u32>,
    /// Parents that run the programs.
    pub parents: BTreeSet<u32>,
    /// Entries about macvlans, their parents and their namespaces.
    pub parent_entries: usize,
    /// Attachments with a record, as text.
    pub records: BTreeMap<u32, String>,
    /// Allowed source addresses.
    pub addresses: BTreeMap<u32, BTreeSet<IpAddr>>,
    /// Policies other than "none".
    pub policies: BTreeMap<u32, PolicyIds>,
    /// Free numbers that have counters above zero. When the first packet of an attachment is counted depends on the
    /// kernel at each end.
    pub counted: BTreeSet<u32>,
}

impl Snapshot {
    /// Takes a snapshot of everything.
    ///
    /// # Errors
    /// Part of it cannot be read.
    pub fn take(node: &Node, pods: &[&Pod]) -> Result<Self> {
        let mut files = BTreeMap::new();
        for directory in ["leases", "state", "cni-cache", "run/network-status", "devinfo/cni"] {
            read_files(&node.path(""), &node.path(directory), &mut files)?;
        }
        files.retain(|path, content| {
            let stays = path.ends_with("/lock")
                || path.contains("/last_reserved_ip.")
                || path == "state/journal/pools.jsonl"
                || path == "state/journal/boot";
            // The files of released reservations, kept empty for the next.
            let spare = path.contains("/.netattach-reservation.");
            !(stays || spare && content.is_empty())
        });
        let mut pins = BTreeSet::new();
        list(node.bpffs(), &mut pins)?;
        Ok(Self {
            node: Network::of(&node.namespace)?,
            pods: pods
                .iter()
                .map(|pod| Ok((pod.container.clone(), Network::of(&pod.namespace)?)))
                .collect::<Result<_>>()?,
            files,
            dataplane: Maps::of(node)?,
            pins,
            translation: node.namespace.run(nat::all_elements)?,
            forwarding: node.namespace.run(forwarding)?,
        })
    }

    /// Checks that no attachment has left anything behind: only loopback, bridges and the test's own wire remain on the
    /// node, and only loopback in the pods.
    ///
    /// # Panics
    /// Something is left.
    pub fn assert_nothing_is_left(&self) {
        let stays = |name: &str, kind: &str| matches!(kind, "" | "bridge") || matches!(name, WIRE | "wire1");
        let left: Vec<_> = self.node.links.iter().filter(|(name, link)| !stays(name, &link.kind)).collect();
        assert!(left.is_empty(), "links on the node: {left:?}");
        let programs = self.node.links.values().flat_map(|link| &link.programs);
        assert_eq!(programs.collect::<Vec<_>>(), Vec::<&(TcHook, String)>::new(), "programs on the node");
        for (container, pod) in &self.pods {
            assert_eq!(pod.links.keys().collect::<Vec<_>>(), ["lo"], "links of {container}");
            assert_eq!(pod.routes, BTreeSet::new(), "routes of {container}");
        }
        assert_eq!(self.files, BTreeMap::new());
        assert_eq!(self.dataplane, Maps::default());
        assert_eq!(self.translation, BTreeSet::new());
        assert_eq!(self.forwarding, BTreeSet::new());
    }
}

/// Returns the rules of iptables whose comments mark them as netattach's.
fn forwarding() -> Result<BTreeSet<String>> {
    let chains = ["CNI-FORWARD", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"];
    let view = filter::view(&chains, &BTreeSet::new())?;
    let rules =
        view.filters.iter().flat_map(|filter| &filter.rules).filter_map(|placed| placed.rule.as_ref());
    let own = rules.filter(|rule| rule.comment.starts_with("netattach"));
    Ok(own.map(|rule| format!("{rule} {}", rule.comment)).collect())
}

impl Network {
    /// Takes a snapshot of a namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn of(namespace: &Namespace) -> Result<Self> {
        Self::of_netns(namespace.netns())
    }

    /// Takes a snapshot of a namespace that the test has not made itself.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn of_netns(netns: &Netns) -> Result<Self> {
        let mut handle = Handle::open_in(netns)?;
        let mut links = BTreeMap::new();
        let mut names = BTreeMap::new();
        for link in handle.links()? {
            let addresses = handle.addresses(link.index)?;
            names.insert(link.index, link.name.clone());
            let mut programs = BTreeSet::new();
            for hook in [TcHook::Ingress, TcHook::Egress] {
                let found = handle.find_filters(link.index, hook)?;
                programs.extend(found.into_iter().filter_map(|filter| Some((hook, filter.name?))));
            }
            let shown = Link {
                kind: link.kind,
                mac: link.mac,
                mtu: link.mtu,
                up: link.up,
                controller: link.controller,
                addresses: addresses.into_iter().filter(|net| !is_link_local_v6(net.addr())).collect(),
                programs,
            };
            links.insert(link.name, shown);
        }
        let shown = |route: netattach::netlink::RouteState| {
            let gateway = route.gateway.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
            let device = route.interface.and_then(|index| names.get(&index)).map_or("", String::as_str);
            format!("{}{gateway} dev {device}", route.destination)
        };
        let routes = handle
            .routes()?
            .into_iter()
            .filter(|route| !is_link_local_v6(route.destination.addr()))
            .map(shown)
            .collect();
        let rules = handle.rules()?.iter().map(|rule| format!("{rule:?}")).collect();
        Ok(Self { links, routes, rules })
    }
}

impl Maps {
    fn of(node: &Node) -> Result<Self> {
        let Some(dataplane) = dataplane(node)? else { return Ok(Self::default()) };
        let mut maps = Self {
            links: dataplane.attachments().bound(),
            macvlans: dataplane.parents().attachments(),
            parents: dataplane.parents().covered().into_keys().collect(),
            parent_entries: dataplane.parents().entries(),
            records: dataplane
                .attachments()
                .records()
                .into_iter()
                .map(|(id, record)| (id, format!("{record:?}")))
                .collect(),
            addresses: dataplane.attachments().addresses(),
            ..Self::default()
        };
        for id in 1..node.max_attachments() {
            let policy = dataplane.policies().of(id)?;
            if policy != PolicyIds::default() {
                maps.policies.insert(id, policy);
            }
            // A packet that was on its way when an attachment went may be counted until the number is free.
            let is_resting = dataplane.attachments().resting_since(id).is_some();
            if maps.records.contains_key(&id) || is_resting {
                continue;
            }
            let stats = dataplane.stats(id)?;
            if stats.dropped().next().is_some() || stats.from_pod.packets + stats.to_pod.packets > 0 {
                maps.counted.insert(id);
            }
        }
        Ok(maps)
    }
}

/// Numbers of the policies that have entries in the maps. Not part of a snapshot: unreferenced ones are removed by the
/// agent after a delay.
///
/// # Errors
/// The maps cannot be read.
pub fn installed_policies(node: &Node) -> Result<BTreeSet<u32>> {
    Ok(dataplane(node)?.map(|dataplane| dataplane.policies().installed()).unwrap_or_default())
}

/// Whether numbers of ended attachments are not free yet. Not part of a snapshot, as above.
///
/// # Errors
/// The maps cannot be read.
pub fn has_resting_numbers(node: &Node) -> Result<bool> {
    Ok(dataplane(node)?.is_some_and(|dataplane| dataplane.attachments().has_resting()))
}

fn dataplane(node: &Node) -> Result<Option<Dataplane>> {
    // Opening would create missing maps; it changes nothing as long as agent and test hold the same BPF object.
    if !node.bpffs().exists() {
        return Ok(None);
    }
    let max_attachments = node.max_attachments();
    let config = bpf::Config { max_attachments, ..bpf::Config::new(node.bpffs().to_owned()) };
    Ok(Some(Dataplane::open(&config)?))
}

fn is_link_local_v6(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast())
}

fn read_files(root: &Path, directory: &Path, files: &mut BTreeMap<String, String>) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            read_files(root, &path, files)?;
        } else {
            let content = match fs::read(&path) {
                // The agent may have removed the file since the directory was listed.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                content => content?,
            };
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            files.insert(name, String::from_utf8_lossy(&content).into_owned());
        }
    }
    Ok(())
}

fn list(directory: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, found)?;
        } else {
            found.insert(path.to_string_lossy().into_owned());
        }
    }
    Ok(())
}
