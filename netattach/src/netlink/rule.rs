//! Rules that select the routing table of traffic.

use std::net::IpAddr;

use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{CREATE, EXCL, NetlinkRequest};
use super::{Error, Handle};

/// A rule that makes traffic from one address use one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The address.
    pub source: IpAddr,
    /// The table.
    pub table: u32,
    /// Rules with lower numbers apply first; the main table has 32766.
    pub priority: u32,
}

/// Most rules for one address and table that are removed: there is one, unless other programs have added
/// rules.
const OF_ONE: usize = 64;

impl Handle {
    /// Adds these rules to the namespace. Idempotent.
    pub fn ensure_rules(&mut self, rules: &[Rule]) -> Result<(), Error> {
        let new = |rule| NetlinkRequest::new(RouteNetlinkMessage::NewRule(message(rule)), CREATE | EXCL);
        self.socket.all_but(rules.iter().map(new).collect(), &[rustix::io::Errno::EXIST])
    }

    /// Adds a rule for each of these addresses and its table, if missing. The kernel puts a rule without a
    /// priority before all rules that it has, except the first. Idempotent.
    pub fn ensure_source_rules(&mut self, rules: &[(IpAddr, u32)]) -> Result<(), Error> {
        let present = self.rules()?;
        let is_there =
            |wanted: &&(IpAddr, u32)| present.iter().any(|rule| (rule.source, rule.table) == **wanted);
        let mut requests = Vec::new();
        for (source, table) in rules.iter().filter(|wanted| !is_there(wanted)) {
            let message = unnumbered(&Rule { source: *source, table: *table, priority: 0 });
            requests.push(NetlinkRequest::new(RouteNetlinkMessage::NewRule(message), CREATE | EXCL));
        }
        self.socket.all_but(requests, &[rustix::io::Errno::EXIST])
    }

    /// Removes the rules that select these tables for packets from these addresses, whatever their
    /// priorities: for each address and table the first [`OF_ONE`] rules. Does not list rules. Idempotent.
    pub fn ensure_source_rules_absent(&mut self, rules: &[(IpAddr, u32)]) -> Result<(), Error> {
        let one = |(source, table): &(IpAddr, u32)| {
            unnumbered(&Rule { source: *source, table: *table, priority: 0 })
        };
        self.ensure_none_like(rules.iter().map(one).collect())
    }

    /// As [`Handle::ensure_source_rules_absent`], for rules that select any table: for each address the first
    /// [`OF_ONE`] rules.
    pub fn ensure_rules_from_absent(&mut self, sources: &[IpAddr]) -> Result<(), Error> {
        let one = |source: &IpAddr| {
            let mut message = unnumbered(&Rule { source: *source, table: 0, priority: 0 });
            message.attributes.retain(|attribute| !matches!(attribute, RuleAttribute::Table(_)));
            message
        };
        self.ensure_none_like(sources.iter().map(one).collect())
    }

    fn ensure_none_like(&mut self, mut left: Vec<RuleMessage>) -> Result<(), Error> {
        for _ in 0..OF_ONE {
            let gone =
                |like: &RuleMessage| NetlinkRequest::new(RouteNetlinkMessage::DelRule(like.clone()), 0);
            let replies = self.socket.batch(left.iter().map(gone).collect())?;
            let mut again = Vec::new();
            for (like, reply) in left.into_iter().zip(replies) {
                match reply {
                    // There may be another rule like this.
                    Ok(_) => again.push(like),
                    Err(refused) if refused.errno == rustix::io::Errno::NOENT.raw_os_error() => {}
                    Err(refused) => return Err(refused.into()),
                }
            }
            left = again;
        }
        Ok(())
    }

    /// Removes these rules from the namespace. Idempotent.
    pub fn ensure_rules_absent(&mut self, rules: &[Rule]) -> Result<(), Error> {
        let gone = |rule| NetlinkRequest::new(RouteNetlinkMessage::DelRule(message(rule)), 0);
        self.socket.all_but(rules.iter().map(gone).collect(), &[rustix::io::Errno::NOENT])
    }

    /// Returns the tables that the namespace's rules of any kind select, both families.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn tables_of_rules(&mut self) -> Result<Vec<u32>, Error> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for answer in self.list_rules(family)? {
                let RouteNetlinkMessage::NewRule(rule) = answer else { continue };
                let wide = rule.attributes.iter().find_map(|attribute| match attribute {
                    RuleAttribute::Table(number) => Some(*number),
                    _ => None,
                });
                found.push(wide.unwrap_or(rule.header.table.into()));
            }
        }
        Ok(found)
    }

    /// The namespace's rules for single source addresses, both families.
    pub fn rules(&mut self) -> Result<Vec<Rule>, Error> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            found.extend(self.list_rules(family)?.into_iter().filter_map(observed));
        }
        Ok(found)
    }

    /// A kernel without a family, such as one started without IPv6 (`ipv6.disable=1`), counts as having no
    /// rules of that family.
    fn list_rules(&mut self, family: AddressFamily) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut all = RuleMessage::default();
        all.header.family = family;
        match self.socket.dump(RouteNetlinkMessage::GetRule(all)) {
            Err(error) if error.errno() == Some(rustix::io::Errno::AFNOSUPPORT) => Ok(Vec::new()),
            answers => answers,
        }
    }
}

fn message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    let (family, length) = match rule.source {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    message.header.family = family;
    message.header.src_len = length;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Source(rule.source),
        RuleAttribute::Table(rule.table),
        RuleAttribute::Priority(rule.priority),
    ];
    message
}

/// A rule without a priority: the kernel chooses one for a new rule, and removes the first rule of any
/// priority.
fn unnumbered(rule: &Rule) -> RuleMessage {
    let mut message = message(rule);
    message.attributes.retain(|attribute| !matches!(attribute, RuleAttribute::Priority(_)));
    message
}

fn observed(message: RouteNetlinkMessage) -> Option<Rule> {
    let RouteNetlinkMessage::NewRule(rule) = message else { return None };
    let mut source = None;
    let (mut table, mut priority) = (u32::from(rule.header.table), 0);
    for attribute in rule.attributes {
        match attribute {
            RuleAttribute::Source(address) => source = Some(address),
            RuleAttribute::Table(number) => table = number,
            RuleAttribute::Priority(number) => priority = number,
            _ => {}
        }
    }
    let source = source?;
    let is_single = u32::from(rule.header.src_len) == if source.is_ipv4() { 32 } else { 128 };
    is_single.then_some(Rule { source, table, priority })
}
