//! Which rules attachments have in the tables, and the changes that establish them. Pure.
//!
//! The chains and the jumps to them are those of the reference plugin, word for word, so that neither
//! implementation adds what the other has already added. As with the reference plugin, they are never
//! removed. The exception is a chain that a definition names in the place of the administrator's: the
//! reference plugin asks it for the packets of all pods, for ever, so the author of a definition could have
//! any chain of the node judge the pods of others. Here it is asked by rules of the attachment. Every other
//! rule belongs to an attachment too, whose name is the comment, or to a bridge; a bridge's rules stay as
//! long as the comment of an attachment's rule names the bridge.

use std::collections::BTreeSet;

use super::Owner;
use crate::netlink::filter::{Ask, Change, FORWARD, Filter, Placed, Rule, TABLE, Verdict, Version, View};
use crate::step::{ADMIN_CHAIN, Admitted, Ingress};

/// Chain for the traffic that the node forwards for pods.
const CNI_FORWARD: &str = "CNI-FORWARD";
const FORWARD_COMMENT: &str = "CNI firewall plugin rules";
const ADMIN_COMMENT: &str = "CNI firewall plugin admin overrides";
/// Chains for packets that come from a closed bridge, and for those of them that leave by a different device.
const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
const STAGE_1_COMMENT: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";
/// The comment of a bridge's rules.
const BRIDGE_COMMENT: &str = "netattach ingressPolicy";

/// The chains whose rules are read.
pub(super) const CHAINS: [&str; 4] = [FORWARD, CNI_FORWARD, STAGE_1, STAGE_2];

/// An attachment and what it wants.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'w> {
    pub(super) note: &'w str,
    pub(super) admitted: &'w Admitted,
}

/// The comment of an attachment's rules, split into its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Note<'n> {
    pub(super) owner: &'n str,
    pub(super) network: &'n str,
    /// All words except that of the bridge.
    pub(super) attachment: &'n str,
    /// The closed bridge, or the device with the gateways of its VLAN, with its ingress policy.
    closed: Option<(Ingress, &'n str)>,
}

impl<'n> Note<'n> {
    pub(super) fn of(comment: &'n str) -> Option<Self> {
        let mut words = comment.splitn(5, ' ');
        let mut next = || words.next().filter(|word| !word.is_empty());
        let (owner, network, container, ifname) = (next()?, next()?, next()?, next()?);
        let last = next();
        if !owner.strip_prefix(Owner::START)?.starts_with(['-', ':']) {
            return None;
        }
        let lengths = [owner, network, container, ifname].map(str::len);
        let attachment = comment.get(..lengths.iter().sum::<usize>() + 3)?;
        let closed = last.and_then(|word| {
            let (word, bridge) = word.split_once(':')?;
            let ingress = Ingress::ALL.into_iter().find(|ingress| ingress.word() == word)?;
            Some((ingress, bridge))
        });
        Some(Self { owner, network, attachment, closed })
    }

    /// Whether the comment names that attachment.
    pub(super) fn is_of(&self, note: &str) -> bool {
        self.attachment == note
    }
}

/// Computes the changes that give the attachments their rules and remove the rules for whose note `is_gone`
/// is true, unless they are wanted.
pub(super) fn settle(
    view: &View,
    wanted: &[Wanted<'_>],
    is_gone: &dyn Fn(&Note<'_>) -> bool,
) -> Vec<(Version, Change)> {
    let of_table = |filter| Table { filter, changes: Vec::new() }.settled(wanted, is_gone);
    let of_both = view.filters.iter().map(|filter| (filter.version, of_table(filter)));
    of_both.flat_map(|(version, changes)| changes.into_iter().map(move |change| (version, change))).collect()
}

/// The table of one IP version, and the changes to make in it.
struct Table<'f> {
    filter: &'f Filter,
    changes: Vec<Change>,
}

impl<'f> Table<'f> {
    fn settled(mut self, wanted: &[Wanted<'_>], is_gone: &dyn Fn(&Note<'_>) -> bool) -> Vec<Change> {
        let version = self.filter.version;
        let wanted: Vec<&Wanted<'_>> =
            wanted.iter().filter(|wanted| own_addresses(wanted, version).next().is_some()).collect();
        // Collected once: an agent with many attachments would otherwise read all rules for each of them.
        let asked_for_all: BTreeSet<&str> =
            self.rules_in(CNI_FORWARD).filter_map(|(_, rule)| rule.leads_all_to()).collect();
        let asking =
            wanted.iter().filter(|wanted| !asked_for_all.contains(wanted.admitted.admin_chain.as_str()));
        let asking = asking.flat_map(|wanted| rules_that_ask(wanted, version));
        let passing = wanted.iter().flat_map(|wanted| rules_of(wanted, version));
        let rules: Vec<Rule> = asking.chain(passing).collect();
        let is_wanted: BTreeSet<&Rule> = rules.iter().collect();
        let noted = self.rules_in(CNI_FORWARD).filter_map(|(handle, rule)| {
            let note = Note::of(&rule.comment)?;
            Some((handle, rule, note))
        });
        let (gone, kept): (Vec<_>, Vec<_>) =
            noted.partition(|(_, rule, note)| is_gone(note) && !is_wanted.contains(rule));
        let closed: BTreeSet<(Ingress, &str)> = kept
            .iter()
            .filter_map(|(_, _, note)| note.closed)
            .chain(wanted.iter().filter_map(|it| closed(it.admitted)))
            .collect();
        let present: BTreeSet<&Rule> = kept.iter().map(|(_, rule, _)| *rule).collect();
        let missing = rules.iter().filter(|rule| !present.contains(rule));
        let (asking, passing): (Vec<&Rule>, Vec<&Rule>) =
            missing.partition(|rule| matches!(rule.verdict, Verdict::Jump(_)));
        if !rules.is_empty() {
            let admins: BTreeSet<&str> =
                wanted.iter().map(|wanted| wanted.admitted.admin_chain.as_str()).collect();
            self.make_chains(&admins, !closed.is_empty());
            self.lead_to_chains(!closed.is_empty());
            self.ask_first(&asking, admins.contains(ADMIN_CHAIN));
        }
        self.close(&closed, !rules.is_empty());
        self.changes.extend(gone.iter().map(|(handle, ..)| remove(CNI_FORWARD, *handle)));
        self.changes
            .extend(passing.into_iter().map(|rule| Change::Last(CNI_FORWARD.to_owned(), rule.clone())));
        self.changes
    }

    /// The rules of a chain that have the form that this plugin writes, with their handles.
    fn rules_in(&self, chain: &str) -> impl Iterator<Item = (u64, &'f Rule)> {
        let of_chain = self.filter.rules.iter().filter(move |placed| placed.chain == chain);
        of_chain.filter_map(|Placed { handle, rule, .. }| Some((*handle, rule.as_ref()?)))
    }

    fn make_chains(&mut self, admins: &BTreeSet<&str>, with_stages: bool) {
        if !self.filter.is_there {
            self.changes.push(Change::MakeTable);
        }
        let stages = [STAGE_1, STAGE_2].into_iter().filter(|_| with_stages);
        let chains = [FORWARD, CNI_FORWARD].into_iter().chain(admins.iter().copied()).chain(stages);
        let missing = chains.filter(|chain| !self.filter.chains.contains(*chain));
        self.changes.extend(missing.map(|chain| Change::MakeChain(chain.to_owned())));
    }

    /// Adds the jumps to the chains. Packets from a closed bridge have to be dropped before any rule accepts
    /// them.
    fn lead_to_chains(&mut self, with_stages: bool) {
        let first =
            |chain: &str, to: &str, comment: &str| Change::First(chain.to_owned(), Rule::jump(to, comment));
        let in_forward: Vec<(u64, &Rule)> = self.rules_in(FORWARD).collect();
        let position = |chain: &str| in_forward.iter().position(|(_, rule)| rule.leads_to(chain));
        let (passing, stopping) = (position(CNI_FORWARD), position(STAGE_1));
        if passing.is_none() {
            self.changes.push(first(FORWARD, CNI_FORWARD, FORWARD_COMMENT));
        }
        let is_before = matches!((stopping, passing), (Some(stopping), Some(passing)) if stopping < passing);
        let is_needed = with_stages || (stopping.is_some() && passing.is_none());
        if is_needed && !is_before {
            let late = in_forward.iter().filter(|(_, rule)| rule.leads_to(STAGE_1));
            self.changes.extend(late.map(|(handle, _)| remove(FORWARD, *handle)));
            self.changes.push(first(FORWARD, STAGE_1, STAGE_1_COMMENT));
        }
    }

    /// Adds the rules that ask chains before any rule accepts a packet: first the administrator's, if it is needed or
    /// was there, then those of attachments.
    fn ask_first(&mut self, of_attachments: &[&Rule], needs_admin: bool) {
        let first = |rule: Rule| Change::First(CNI_FORWARD.to_owned(), rule);
        let to_admin = self.rules_in(CNI_FORWARD).filter(|(_, rule)| rule.leads_to(ADMIN_CHAIN));
        let to_admin: Vec<u64> = to_admin.map(|(handle, _)| handle).collect();
        self.changes.extend(of_attachments.iter().map(|rule| first((*rule).clone())));
        let is_new = to_admin.is_empty() && needs_admin;
        let is_late = !to_admin.is_empty() && !of_attachments.is_empty();
        if is_new || is_late {
            self.changes.extend(to_admin.into_iter().map(|handle| remove(CNI_FORWARD, handle)));
            self.changes.push(first(Rule::jump(ADMIN_CHAIN, ADMIN_COMMENT)));
        }
    }

    /// Adds the rules of closed bridges, unless `adds` is false, and removes those of bridges that are no
    /// longer closed.
    fn close(&mut self, closed: &BTreeSet<(Ingress, &str)>, adds: bool) {
        let rules: BTreeSet<(&str, Rule)> = closed.iter().flat_map(rules_of_bridge).collect();
        for chain in [STAGE_1, STAGE_2] {
            let own: Vec<(u64, &Rule)> =
                self.rules_in(chain).filter(|(_, rule)| rule.comment == BRIDGE_COMMENT).collect();
            let its = || rules.iter().filter(move |(of, _)| *of == chain).map(|(_, rule)| rule);
            let gone = own.iter().filter(|(_, rule)| !its().any(|wanted| wanted == *rule));
            self.changes.extend(gone.map(|(handle, _)| remove(chain, *handle)));
            let new = its().filter(|wanted| adds && !own.iter().any(|(_, rule)| rule == wanted));
            self.changes.extend(new.map(|rule| Change::First(chain.to_owned(), rule.clone())));
        }
    }
}

/// Whether a change closes a bridge that is open without it.
pub(super) fn closes(change: &Change) -> bool {
    match change {
        Change::First(chain, rule) => [STAGE_1, STAGE_2].contains(&&**chain) || rule.leads_to(STAGE_1),
        _ => false,
    }
}

fn remove(chain: &str, handle: u64) -> Change {
    Change::Remove { chain: chain.to_owned(), handle }
}

fn closed(admitted: &Admitted) -> Option<(Ingress, &str)> {
    admitted.closed.as_ref().map(|(ingress, bridge)| (*ingress, bridge.as_str()))
}

/// The attachment's addresses of that version of IP.
fn own_addresses<'w>(
    wanted: &Wanted<'w>,
    version: Version,
) -> impl Iterator<Item = &'w std::net::IpAddr> + use<'w> {
    let admitted = wanted.admitted;
    admitted.addresses.iter().filter(move |address| address.is_ipv4() == (version == Version::V4))
}

/// The comment of an attachment's rules.
fn comment_of(wanted: &Wanted<'_>) -> String {
    match closed(wanted.admitted) {
        Some((ingress, bridge)) => format!("{} {}:{bridge}", wanted.note, ingress.word()),
        None => wanted.note.to_owned(),
    }
}

/// The rules by which an attachment's packets are judged by the chain that its definition names. None for the
/// administrator's, which is asked for all packets.
fn rules_that_ask(wanted: &Wanted<'_>, version: Version) -> Vec<Rule> {
    let chain = &wanted.admitted.admin_chain;
    if chain == ADMIN_CHAIN {
        return Vec::new();
    }
    let ask =
        |ask| Rule { asks: vec![ask], verdict: Verdict::Jump(chain.clone()), comment: comment_of(wanted) };
    own_addresses(wanted, version)
        .flat_map(|address| [ask(Ask::Destination(*address)), ask(Ask::Source(*address))])
        .collect()
}

/// The rules that accept an attachment's packets.
fn rules_of(wanted: &Wanted<'_>, version: Version) -> Vec<Rule> {
    let comment = comment_of(wanted);
    let accept = |asks| Rule { asks, verdict: Verdict::Accept, comment: comment.clone() };
    own_addresses(wanted, version)
        .flat_map(|address| {
            [accept(vec![Ask::Destination(*address), Ask::Established]), accept(vec![Ask::Source(*address)])]
        })
        .collect()
}

/// The rules of a closed bridge, each with its chain. A packet from one closed bridge to another is dropped;
/// a packet from or to any other device is not.
fn rules_of_bridge((ingress, bridge): &(Ingress, &str)) -> Vec<(&'static str, Rule)> {
    let rule = |asks, verdict| Rule { asks, verdict, comment: BRIDGE_COMMENT.to_owned() };
    let from = || Ask::In((*bridge).to_owned(), true);
    let to = |is| Ask::Out((*bridge).to_owned(), is);
    let mut rules = vec![
        (STAGE_1, rule(vec![from(), to(false)], Verdict::Jump(STAGE_2.to_owned()))),
        (STAGE_2, rule(vec![to(true)], Verdict::Drop)),
    ];
    if *ingress == Ingress::Isolated {
        rules.push((STAGE_1, rule(vec![from(), to(true)], Verdict::Drop)));
    }
    rules
}

/// Describes what the table lacks.
pub(super) fn said((version, change): &(Version, Change)) -> String {
    let table = match version {
        Version::V4 => format!("table ip {TABLE}"),
        Version::V6 => format!("table ip6 {TABLE}"),
    };
    match change {
        Change::MakeTable => format!("{table} is gone"),
        Change::MakeChain(chain) => format!("{table} lacks chain {chain}"),
        Change::Remove { chain, .. } => format!("{table} has a rule in a wrong place of chain {chain}"),
        Change::First(chain, rule) | Change::Last(chain, rule) => {
            format!("{table} lacks a rule: -A {chain} {rule}")
        }
    }
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
