//! The node's state as reported by the kernel: links, filters, programs and routes, refreshed where they have
//! changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::decide::{Filters, Member, Node, Others};
use crate::bpf::Program;
use crate::bpf::sys;
use crate::mac::Mac;
use crate::netlink::{
    self, Changes, Family, FilterGeneration, ForwardingState, Handle, IpsecPolicies, Moves, hooked_chains,
};
use crate::spec::TcHook;

/// From this number of links on, all links are listed instead of requested one by one.
const MANY: usize = 64;

/// How long an address stays off the fast path after a bridge has seen it behind another port: as long as
/// bridges remember a station. Otherwise, if two stations sent from one address, they would be reached in
/// turn, and the fast path would favour one of them.
const CONTESTED: Duration = Duration::from_secs(300);

/// Why the node's state could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// Links or filters could not be read.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// Other programs' BPF programs could not be read.
    #[error("list the programs of a device")]
    Programs(#[source] io::Error),
    /// A file below `/proc` could not be read.
    #[error("read {path}")]
    Read {
        /// Path of the file.
        path: &'static str,
        /// The error.
        source: io::Error,
    },
}

/// The node's state when it was last read.
#[derive(Debug, Default)]
pub(super) struct Observation {
    /// The facts on which decisions are based.
    pub(super) node: Node,
    /// The bridges of attachments, with all of their ports in `node`.
    bridges: BTreeSet<u32>,
    /// Attachments' addresses that bridges have been asked about, with the attachments' ports.
    asked: BTreeMap<(u32, Mac), u32>,
    /// When each of these addresses was last seen behind another port.
    seen_elsewhere: BTreeMap<(u32, Mac), Instant>,
    /// Other programs' filters, for each link in `node`.
    filters: BTreeMap<u32, Others>,
    /// The links that the last read of links has read; `None`: all.
    read: Option<BTreeSet<u32>>,
    /// Whether the next read of all links keeps the known filters: see [`Observation::keep_filters`].
    keeps_filters: bool,
    /// BPF programs found so far.
    programs: Met,
    /// The nftables chains, with the packet filter's generation in which they were read.
    chains: Option<(u32, Chains)>,
    generation: FilterGeneration,
    ipsec: IpsecPolicies,
    /// Whether any bridge in `node` passes frames to iptables.
    calls_iptables: bool,
}

/// BPF programs by kernel id, and whether they are netattach's. Each is queried once, as long as every pass
/// finds it. The kernel reuses an id only after four thousand million others.
#[derive(Debug, Default)]
struct Met {
    /// Found by the previous pass.
    before: BTreeMap<u32, bool>,
    /// Found by the present pass, or the last one.
    now: BTreeMap<u32, bool>,
}

impl Met {
    /// Begins a pass. Programs that the last pass did not find are forgotten, because other processes may
    /// load new programs without end.
    fn begin(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    fn is_ours(&mut self, id: u32, ask: impl FnOnce(u32) -> io::Result<bool>) -> io::Result<bool> {
        let is_ours = match self.now.get(&id).or_else(|| self.before.get(&id)) {
            Some(known) => *known,
            None => ask(id)?,
        };
        self.now.insert(id, is_ours);
        Ok(is_ours)
    }
}

/// The relevant properties of nftables chains.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chains {
    /// There are chains for bridged frames.
    bridge: bool,
    /// There are chains for IP packets.
    ip: bool,
    /// Some of those translate addresses and ports.
    nat: bool,
    /// As [`Filters::devices`].
    devices: BTreeSet<String>,
}

impl Observation {
    /// To be called before a read of all links. If the kernel's notifications since the last read are
    /// complete (`told`), other programs' filters are only read again on the links that they name, because
    /// the kernel notifies of each change. `None`: notifications were lost, or this read has another reason.
    pub(super) fn keep_filters(&mut self, told: Option<&Changes>) {
        self.keeps_filters = matches!(told, Some(Changes::Of(_)));
        if let Some(Changes::Of(touched)) = told {
            self.filters.retain(|index, _| !touched.links.contains(index));
        }
    }

    /// To be called after a read; returns whether the next one may continue from it instead of reading all
    /// links. A read that failed may have consumed notifications without processing them, so other programs'
    /// filters are read again on every link.
    pub(super) fn stands_after(&mut self, succeeded: bool) -> bool {
        if !succeeded {
            self.filters.clear();
        }
        succeeded && !self.node.links.is_empty()
    }

    /// Reads what may have changed: the links of `devices`, their bridges with all ports, and the devices of
    /// default routes. Forgets all other links.
    pub(super) fn at_links(
        &mut self,
        devices: &BTreeSet<u32>,
        changes: &Changes,
        host: &mut Handle,
    ) -> Result<(), ObserveError> {
        let node = &mut self.node;
        let mut stale: Option<BTreeSet<u32>> = match changes {
            Changes::Anything => None,
            Changes::Of(touched) => {
                let new = devices.iter().filter(|index| !node.links.contains_key(index));
                Some(touched.links.iter().chain(new).copied().collect())
                    .filter(|stale: &BTreeSet<u32>| stale.len() < MANY)
            }
        };
        if !matches!(changes, Changes::Of(touched) if !touched.default_routes) {
            let all = host.destinations_by_link()?;
            let default = all.into_iter().filter(|(_, destination)| destination.prefix_len() == 0);
            node.default_routes = default.map(|(link, _)| link).collect();
        }
        for index in stale.iter().flatten() {
            let before = node.links.get(index).map(|link| link.name.clone());
            look_at(&mut node.links, *index, host)?;
            // Chains name devices, and older kernels do not notify of their change when a device is renamed.
            if before.as_ref() != node.links.get(index).map(|link| &link.name) {
                self.chains = None;
            }
        }
        let bridges_of = |links: &BTreeMap<u32, ForwardingState>| -> BTreeSet<u32> {
            devices.iter().filter_map(|device| links.get(device)?.controller).collect()
        };
        let mut bridges = bridges_of(&node.links);
        // Ports of a bridge that had no attachments until now are not known yet.
        if stale.is_none() || !bridges.is_subset(&self.bridges) {
            stale = None;
            let all = host.forwarding_states()?;
            node.links = all.into_iter().map(|link| (link.index, link)).collect();
            bridges = bridges_of(&node.links);
        }
        for index in bridges.iter().chain(&node.default_routes) {
            if !node.links.contains_key(index) {
                look_at(&mut node.links, *index, host)?;
            }
        }
        let is_port = |link: &ForwardingState| link.controller.is_some_and(|index| bridges.contains(&index));
        node.links.retain(|index, link| {
            devices.contains(index)
                || bridges.contains(index)
                || node.default_routes.contains(index)
                || is_port(link)
        });
        self.calls_iptables = node.links.values().filter_map(|link| link.bridge).any(|it| it.calls_iptables);
        self.bridges = bridges;
        let keeps = std::mem::take(&mut self.keeps_filters);
        let is_same = |index: &u32| stale.as_ref().map_or(keeps, |stale| !stale.contains(index));
        let current = |index: &u32| self.node.links.contains_key(index) && is_same(index);
        self.filters.retain(|index, _| current(index));
        self.read = stale;
        Ok(())
    }

    /// Asks the bridges of `members` for addresses that they have not been asked for yet. Later changes of
    /// the others arrive by [`Observation::follow`].
    pub(super) fn at_stations<'a>(
        &mut self,
        members: impl Iterator<Item = &'a Member>,
        host: &mut Handle,
    ) -> Result<(), ObserveError> {
        let links = &self.node.links;
        let station = |member: &Member| {
            let bridge = links.get(&member.device)?.controller?;
            Some(((bridge, member.mac), member.device))
        };
        let wanted: BTreeMap<(u32, Mac), u32> = members.filter_map(station).collect();
        self.asked.retain(|station, port| wanted.get(station) == Some(port));
        let new = |station: &&(u32, Mac)| !self.asked.contains_key(*station);
        let new: Vec<(u32, Mac)> = wanted.keys().filter(new).copied().collect();
        let found = host.whereabouts(&new)?;
        self.node.stations.retain(|station, _| self.asked.contains_key(station));
        let known = new.into_iter().zip(found).filter_map(|(station, port)| Some((station, port?)));
        self.node.stations.extend(known);
        let elsewhere = |(station, own): (&(u32, Mac), &u32)| {
            let port = self.node.stations.get(station)?;
            (port != own).then_some((*station, Instant::now()))
        };
        self.seen_elsewhere.extend(wanted.iter().filter_map(elsewhere));
        self.seen_elsewhere
            .retain(|station, last| wanted.contains_key(station) && last.elapsed() < CONTESTED);
        self.node.contested = self.seen_elsewhere.keys().copied().collect();
        self.asked = wanted;
        Ok(())
    }

    /// Processes what bridges have learned and forgotten; returns whether it affects an attachment.
    pub(super) fn follow(&mut self, moves: Moves) -> bool {
        let Moves::Of(moves) = moves else {
            self.asked.clear();
            return true;
        };
        let mut matters = false;
        for change in moves {
            let station = (change.bridge, change.mac);
            let Some(own) = self.asked.get(&station) else { continue };
            let elsewhere = |port: Option<u32>| port.is_some_and(|port| port != *own);
            let before = match change.port {
                Some(port) => self.node.stations.insert(station, port),
                None => self.node.stations.remove(&station),
            };
            if elsewhere(change.port) {
                self.seen_elsewhere.insert(station, Instant::now());
            }
            matters |= elsewhere(before) != elsewhere(change.port);
        }
        matters
    }

    /// Makes the next pass ask bridges for all stations, and list the chains, again.
    pub(super) fn forget(&mut self) {
        self.asked.clear();
        self.chains = None;
    }

    /// Reads XDP programs, and other programs' tc programs and filters: of the links that were just read, and of those
    /// whose filters have changed, or of `all`. The kernel notifies only of filters.
    pub(super) fn at_programs(&mut self, all: bool, host: &mut Handle) -> Result<(), ObserveError> {
        let all = all || self.read.is_none();
        // The kernel's description of a link, where it was just read, says whether an XDP program runs there.
        if all && self.read.is_some() {
            let with_xdp = host.links_with_xdp()?;
            for (index, link) in &mut self.node.links {
                link.xdp = with_xdp.contains(index);
            }
        }
        let ours = Program::ALL.map(Program::name);
        let before = std::mem::take(&mut self.node.others);
        if all {
            self.programs.begin();
        }
        let is_read = |index: &u32| self.read.as_ref().is_none_or(|read| read.contains(index));
        for (index, link) in &self.node.links {
            if let Some(known) = before.get(index)
                && !all
                && !is_read(index)
                && self.filters.contains_key(index)
            {
                self.node.others.insert(*index, *known);
                continue;
            }
            let mut others = match self.filters.get(index) {
                Some(known) => *known,
                None => Others {
                    ingress: host.has_other_filters(*index, TcHook::Ingress, &ours)?,
                    egress: host.has_other_filters(*index, TcHook::Egress, &ours)?,
                },
            };
            self.filters.insert(*index, others);
            let by_tcx = |hook| sys::tcx_programs(*index, hook).map_err(ObserveError::Programs);
            let (ingress, mut egress) = (by_tcx(TcHook::Ingress)?, by_tcx(TcHook::Egress)?);
            if link.kind == "netkit" {
                egress.extend(sys::netkit_programs(*index).map_err(ObserveError::Programs)?);
            }
            for (ids, others) in [(ingress, &mut others.ingress), (egress, &mut others.egress)] {
                for id in ids {
                    let ask = |id: u32| -> io::Result<bool> {
                        Ok(sys::program_name(id)?.as_deref().is_some_and(Program::is_one))
                    };
                    *others |= !self.programs.is_ours(id, ask).map_err(ObserveError::Programs)?;
                }
            }
            self.node.others.insert(*index, others);
        }
        Ok(())
    }

    /// Reads IPsec policies. The kernel notifies of them only listeners that have asked for it.
    pub(super) fn look_at_ipsec(&mut self) -> Result<(), ObserveError> {
        self.node.ipsec = self.ipsec.are_any()?;
        Ok(())
    }

    /// Reads packet filters. The kernel does not notify of sysctls and of the older tables. `routed`: there
    /// are links or uplinks whose packets meet the filters for IP packets without a bridge's involvement.
    pub(super) fn look_at_filters(&mut self, routed: bool) -> Result<(), ObserveError> {
        let bridges_call_ip = is_on("/proc/sys/net/bridge/bridge-nf-call-iptables")?
            || is_on("/proc/sys/net/bridge/bridge-nf-call-ip6tables")?;
        let chains = self.chains()?;
        let (mut ip, mut nat) = (false, false);
        if routed || bridges_call_ip || self.calls_iptables {
            (ip, nat) = (chains.ip, chains.nat);
            for path in ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"] {
                let tables = contents(path)?;
                ip |= !tables.is_empty();
                nat |= tables.lines().any(|table| table == "nat");
            }
        }
        let bridge = chains.bridge || has_old_ebtables();
        self.node.filters = Filters { bridge, ip, nat, bridges_call_ip, devices: chains.devices };
        Ok(())
    }

    /// The nftables chains, listed again when the packet filter's generation has changed. The kernel raises
    /// the generation with each change of the ruleset, but not when a chain disappears with its device: such
    /// a chain counts until the next change, or until [`Observation::forget`].
    fn chains(&mut self) -> Result<Chains, ObserveError> {
        // Read before the chains. A kernel without nftables has no generation.
        let generation = self.generation.read().ok();
        if let Some((of, chains)) = &self.chains
            && generation == Some(*of)
        {
            return Ok(chains.clone());
        }
        let chains = Chains::listed()?;
        self.chains = generation.map(|generation| (generation, chains.clone()));
        Ok(chains)
    }
}

impl Chains {
    fn listed() -> Result<Self, ObserveError> {
        let [inet, netdev, ip4, ip6, bridge] =
            [Family::Inet, Family::Netdev, Family::Ip4, Family::Ip6, Family::Bridge].map(hooked_chains);
        let (inet, netdev, bridge) = (inet?, netdev?, bridge?);
        let of_ip = [&inet, &ip4?, &ip6?];
        Ok(Self {
            bridge: bridge.count > 0,
            ip: of_ip.iter().any(|chains| chains.count > 0),
            nat: of_ip.iter().any(|chains| chains.nat),
            devices: inet.devices.iter().chain(&netdev.devices).cloned().collect(),
        })
    }
}

fn look_at(
    links: &mut BTreeMap<u32, ForwardingState>,
    index: u32,
    host: &mut Handle,
) -> Result<(), ObserveError> {
    match host.forwarding_state(index)? {
        Some(link) => links.insert(index, link),
        None => links.remove(&index),
    };
    Ok(())
}

/// The older ebtables cannot be queried without loading its module: if one of its table modules is loaded, it
/// counts as in use.
fn has_old_ebtables() -> bool {
    ["ebtable_filter", "ebtable_nat", "ebtable_broute"]
        .iter()
        .any(|module| Path::new("/sys/module").join(module).exists())
}

fn is_on(path: &'static str) -> Result<bool, ObserveError> {
    Ok(!matches!(contents(path)?.trim(), "" | "0"))
}

/// Contents of a file; empty if it does not exist, because the kernel lacks the feature or has not loaded it.
fn contents(path: &'static str) -> Result<String, ObserveError> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.map_err(|source| ObserveError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast_path::decide::NO_DISCIPLINE;
    use crate::netlink::{Move, Touched};

    const BRIDGE: u32 = 3;
    const OWN: u32 = 10;
    const ANOTHER: u32 = 11;
    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    #[test]
    fn filters_of_others_are_asked_for_again_where_the_kernel_has_told_of_a_change_or_may_have() {
        const LOOPBACK: u32 = 1;
        let mut host = Handle::open().unwrap();
        let mut is_kept = |told: Option<Changes>| {
            let mut observation = Observation::default();
            observation.filters.insert(LOOPBACK, Others::default());
            observation.keep_filters(told.as_ref());
            observation.at_links(&[LOOPBACK].into(), &Changes::Anything, &mut host).unwrap();
            observation.filters.contains_key(&LOOPBACK)
        };
        let touched = |links: &[u32]| {
            Changes::Of(Touched { links: links.iter().copied().collect(), ..Touched::default() })
        };
        assert!(is_kept(Some(touched(&[]))) && is_kept(Some(touched(&[LOOPBACK + 1]))));
        assert!(!is_kept(Some(touched(&[LOOPBACK]))) && !is_kept(Some(Changes::Anything)) && !is_kept(None));
    }

    #[test]
    fn a_look_that_failed_or_saw_nothing_is_not_gone_on_from() {
        const LOOPBACK: u32 = 1;
        let mut host = Handle::open().unwrap();
        let mut observation = Observation::default();
        assert!(!observation.stands_after(true), "nobody was there to look for");
        let nothing_told = Changes::Of(Touched::default());
        observation.at_links(&[LOOPBACK].into(), &Changes::Anything, &mut host).unwrap();
        observation.filters.insert(LOOPBACK, Others::default());
        let mut next = |succeeded: bool| {
            let stands = observation.stands_after(succeeded);
            // The next pass then reads all links, without a notification.
            observation.keep_filters(Some(&nothing_told));
            observation.at_links(&[LOOPBACK].into(), &Changes::Anything, &mut host).unwrap();
            (stands, observation.filters.contains_key(&LOOPBACK))
        };
        assert_eq!((next(true), next(false)), ((true, true), (false, false)));
    }

    #[test]
    fn programs_are_read_on_links_that_were_read_and_on_all_links_when_that_is_due() {
        const LOOPBACK: u32 = 1;
        let mut host = Handle::open().unwrap();
        let mut observation = Observation::default();
        let mut is_kept = |changes: &Changes, all: bool| {
            observation.node.others.insert(LOOPBACK, Others { ingress: true, egress: true });
            observation.at_links(&[LOOPBACK].into(), changes, &mut host).unwrap();
            observation.at_programs(all, &mut host).unwrap();
            observation.node.others[&LOOPBACK].ingress
        };
        let touched = |links: &[u32]| {
            Changes::Of(Touched { links: links.iter().copied().collect(), ..Touched::default() })
        };
        assert!(!is_kept(&Changes::Anything, false));
        assert!(is_kept(&touched(&[]), false));
        assert!(!is_kept(&touched(&[LOOPBACK]), false) && !is_kept(&touched(&[]), true));
    }

    #[test]
    fn a_program_is_asked_for_once_and_forgotten_when_a_look_does_not_meet_it() {
        let mut met = Met::default();
        let mut asked = Vec::new();
        let mut look = |ids: &[u32]| {
            met.begin();
            for id in ids {
                let ask = |id: u32| {
                    asked.push(id);
                    Ok(id == 1)
                };
                assert_eq!(met.is_ours(*id, ask).unwrap(), *id == 1, "{id}");
            }
            met.now.clone()
        };
        assert_eq!(look(&[1, 2, 2]), BTreeMap::from([(1, true), (2, false)]));
        assert_eq!(look(&[1, 3]), BTreeMap::from([(1, true), (3, false)]));
        assert_eq!(look(&[2]), BTreeMap::from([(2, false)]));
        assert_eq!(asked, [1, 2, 3, 2]);
    }

    /// If two stations send from one address, the bridge knows the last one: an address that was seen
    /// elsewhere is not trusted at once.
    #[test]
    fn an_address_that_was_seen_elsewhere_is_contested_when_it_is_back_too() {
        let mut host = Handle::open().unwrap();
        let (addresses, chosen, kept_off) = (Vec::new(), Vec::new(), None);
        let member = Member { id: 1, mac: MAC, addresses, chosen, device: OWN, routed: false, kept_off };
        let port = ForwardingState {
            index: OWN,
            name: "na10".into(),
            mtu: 1500,
            mac: None,
            kind: "veth".into(),
            group: 0,
            xdp: false,
            controller: Some(BRIDGE),
            discipline: NO_DISCIPLINE.into(),
            bridge: None,
            port: None,
        };
        let mut observation = Observation { asked: [((BRIDGE, MAC), OWN)].into(), ..Observation::default() };
        observation.node.links.insert(OWN, port);
        let mut after = |moved: Option<u32>| {
            let matters = observation.follow(Moves::Of(vec![Move { bridge: BRIDGE, mac: MAC, port: moved }]));
            observation.at_stations([&member].into_iter(), &mut host).unwrap();
            (matters, observation.node.contested.iter().copied().collect::<Vec<_>>())
        };
        assert_eq!(after(Some(OWN)), (false, vec![]));
        assert_eq!(after(Some(ANOTHER)), (true, vec![(BRIDGE, MAC)]));
        assert_eq!(after(Some(OWN)), (true, vec![(BRIDGE, MAC)]));
        assert_eq!(after(None), (false, vec![(BRIDGE, MAC)]));
        observation.seen_elsewhere.values_mut().for_each(|last| *last = last.checked_sub(CONTESTED).unwrap());
        observation.at_stations([&member].into_iter(), &mut host).unwrap();
        assert!(observation.node.contested.is_empty());
    }
}
