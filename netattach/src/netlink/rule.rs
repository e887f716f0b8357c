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

impl Handle {
    /// Adds these rules to the namespace. Idempotent.
    pub fn ensure_rules(&mut self, rules: &[Rule]) -> Result<(), Error> {
        let new = |rule| NetlinkRequest::new(RouteNetlinkMessage::NewRule(message(rule)), CREATE | EXCL);
        self.socket.all_but(rules.iter().map(new).collect(), &[rustix::io::Errno::EXIST])
    }

    /// Removes these rules from the namespace. Idempotent.
    pub fn ensure_rules_absent(&mut self, rules: &[Rule]) -> Result<(), Error> {
        let gone = |rule| NetlinkRequest::new(RouteNetlinkMessage::DelRule(message(rule)), 0);
        self.socket.all_but(rules.iter().map(gone).collect(), &[rustix::io::Errno::NOENT])
    }

    /// The namespace's rules for single source addresses, both families.
    pub fn rules(&mut self) -> Result<Vec<Rule>, Error> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut all = RuleMessage::default();
            all.header.family = family;
            let answers = self.socket.dump(RouteNetlinkMessage::GetRule(all))?;
            found.extend(answers.into_iter().filter_map(observed));
        }
        Ok(found)
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
