//! The tables `filter` of `iptables-nft`, one for each version of IP: reads which of given chains exist and
//! the rules of some of them, and changes them. Chains are requested by name, since other programs may have
//! created ten thousand.
//!
//! Every caller of `iptables` shares these tables. So a change is conditional on the generation of the packet
//! filter in which it was decided, as in `iptables-nft` itself, and rules are deleted by their handle.

use std::collections::BTreeSet;

use super::super::Error;
use super::batch::{
    APPEND, CREATE, GET_CHAIN, GET_RULE, GET_TABLE, NEW_CHAIN, NEW_RULE, NEW_TABLE, number, object_in,
    transact_at,
};
use super::noted::generation_if_any;
use super::{Family, NESTED, attribute, attribute_in, dump, find, name, text};

pub use super::expression::Version;
pub use super::filter_rule::{Ask, Rule, Verdict};

/// Name of the table.
pub const TABLE: &str = "filter";

/// Chain of the packets that the node forwards.
pub const FORWARD: &str = "FORWARD";

const NAME: &str = "NFT_MSG_NEWRULE";
/// `enum nf_tables_msg_types`.
const DELETE_RULE: u16 = 8;
/// Attributes with the names of tables and chains.
const TABLE_NAME: u16 = 1;
const CHAIN_NAME: u16 = 3;
/// Attributes of rules.
const RULE_CHAIN: u16 = 2;
const HANDLE: u16 = 3;

/// A rule and its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The chain.
    pub chain: String,
    /// Handle of the rule in the table.
    pub handle: u64,
    /// The rule; `None`: the rule is not of the form that netattach writes.
    pub rule: Option<Rule>,
}

/// The table of one version of IP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// The version.
    pub version: Version,
    /// Whether the table exists.
    pub is_there: bool,
    /// Those of the requested chains that exist.
    pub chains: BTreeSet<String>,
    /// The rules of the chains that were read, in their order.
    pub rules: Vec<Placed>,
}

/// The tables as they were read.
#[derive(Debug, Clone)]
pub struct View {
    /// The packet filter's generation before the tables were read.
    generation: u32,
    /// The tables of IPv4 and of IPv6.
    pub filters: [Filter; 2],
}

impl View {
    /// The packet filter's generation before the tables were read.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Tables for tests, which were not read from the kernel.
    #[cfg(test)]
    pub(crate) fn of(filters: [Filter; 2]) -> Self {
        Self { generation: 0, filters }
    }
}

/// A change of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Create the table.
    MakeTable,
    /// Create a chain; [`FORWARD`] is created as iptables creates it, with the policy accept.
    MakeChain(String),
    /// Delete the rule with that handle.
    Remove {
        /// Chain of the rule.
        chain: String,
        /// Handle of the rule.
        handle: u64,
    },
    /// Insert a rule before all others of a chain.
    First(String, Rule),
    /// Append a rule after all others of a chain.
    Last(String, Rule),
}

/// Reads the tables: the rules of the chains `into`, and which of the chains `others` exist.
///
/// # Errors
/// The kernel does not answer, or the packet filter changed while the tables were read. Without nftables
/// there are no tables.
pub fn view(into: &[&str], others: &BTreeSet<&str>) -> Result<View, Error> {
    let generation = generation_if_any()?;
    let filters = [filter(Version::V4, into, others)?, filter(Version::V6, into, others)?];
    // Each part was a separate request: only an unchanged generation shows that the parts belong together.
    match generation_if_any()? == generation {
        true => Ok(View { generation, filters }),
        false => Err(Error::Interrupted("NFT_MSG_GETGEN")),
    }
}

fn filter(version: Version, into: &[&str], others: &BTreeSet<&str>) -> Result<Filter, Error> {
    let family = family(version);
    let is_there = has_table(family, TABLE)?;
    let (mut chains, mut rules) = (BTreeSet::new(), Vec::new());
    if !is_there {
        return Ok(Filter { version, is_there, chains, rules });
    }
    for chain in into.iter().chain(others) {
        if has_chain(family, chain)? {
            chains.insert((*chain).to_owned());
        }
    }
    for chain in into.iter().filter(|chain| chains.contains(**chain)) {
        let only = [attribute(TABLE_NAME, &text(TABLE)), attribute(RULE_CHAIN, &text(chain))].concat();
        each_rule(family, &only, &mut |shown| {
            let handle = attribute_in(shown, HANDLE).and_then(|bytes| bytes.try_into().ok());
            let is_its = is_named(shown, TABLE_NAME, TABLE) && is_named(shown, RULE_CHAIN, chain);
            if let Some(handle) = handle.filter(|_| is_its).map(u64::from_be_bytes) {
                rules.push(Placed { chain: (*chain).to_owned(), handle, rule: Rule::read(shown, version) });
            }
        })?;
    }
    Ok(Filter { version, is_there, chains, rules })
}

/// Whether a table of that name exists in a family.
///
/// # Errors
/// The kernel does not answer.
pub fn has_table(family: Family, wanted: &str) -> Result<bool, Error> {
    let named = attribute(TABLE_NAME, &text(wanted));
    Ok(find("NFT_MSG_GETTABLE", kinds(GET_TABLE, NEW_TABLE), family, &named)?.is_some())
}

/// Whether the table `filter` of a family has a chain of that name.
fn has_chain(family: Family, wanted: &str) -> Result<bool, Error> {
    let named = [attribute(TABLE_NAME, &text(TABLE)), attribute(CHAIN_NAME, &text(wanted))].concat();
    Ok(find("NFT_MSG_GETCHAIN", kinds(GET_CHAIN, NEW_CHAIN), family, &named)?.is_some())
}

fn each_rule(family: Family, only: &[u8], each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
    const RULES: &str = "NFT_MSG_GETRULE";
    match dump(RULES, kinds(GET_RULE, NEW_RULE), family, only, each)? {
        true => Ok(()),
        false => Err(Error::Interrupted(RULES)),
    }
}

fn kinds(asked: u16, answered: u16) -> [u16; 2] {
    [asked, answered].map(|kind| 10 << 8 | kind)
}

fn is_named(attributes: &[u8], kind: u16, wanted: &str) -> bool {
    attribute_in(attributes, kind).and_then(name).as_deref() == Some(wanted)
}

fn family(version: Version) -> Family {
    match version {
        Version::V4 => Family::Ip4,
        Version::V6 => Family::Ip6,
    }
}

/// Carries out changes of both tables, all of them or none. Returns `false` if the packet filter has changed
/// since the tables were read; nothing was done then.
///
/// # Errors
/// The kernel refuses: it may lack nftables, `nft_compat` or `xt_conntrack`.
pub fn change(view: &View, changes: &[(Version, Change)]) -> Result<bool, Error> {
    let messages: Vec<Vec<u8>> = changes.iter().map(|(version, change)| message(*version, change)).collect();
    let done = transact_at(NAME, view.generation, &messages)?;
    crate::crash_point!("nft", "filter");
    Ok(done)
}

fn message(version: Version, change: &Change) -> Vec<u8> {
    let table = attribute(TABLE_NAME, &text(TABLE));
    let in_chain = |chain: &str| [table.clone(), attribute(RULE_CHAIN, &text(chain))].concat();
    let made =
        |chain: &str, flags, rule: &Rule| (NEW_RULE, flags, [in_chain(chain), rule.written()].concat());
    let (kind, flags, attributes) = match change {
        Change::MakeTable => (NEW_TABLE, CREATE, table),
        Change::MakeChain(chain) => (NEW_CHAIN, CREATE, [table, described(chain)].concat()),
        Change::Remove { chain, handle } => {
            (DELETE_RULE, 0, [in_chain(chain), attribute(HANDLE, &handle.to_be_bytes())].concat())
        }
        Change::First(chain, rule) => made(chain, CREATE, rule),
        Change::Last(chain, rule) => made(chain, CREATE | APPEND, rule),
    };
    object_in(family(version), kind, flags, &attributes)
}

/// The attributes of a chain of the table.
fn described(chain: &str) -> Vec<u8> {
    /// `NF_INET_FORWARD`, `NF_IP_PRI_FILTER`, `NF_ACCEPT`.
    const HOOK: u32 = 2;
    const PRIORITY: u32 = 0;
    const ACCEPT: u32 = 1;
    let named = attribute(CHAIN_NAME, &text(chain));
    if chain != FORWARD {
        return named;
    }
    let hook = attribute(4 | NESTED, &[number(1, HOOK), number(2, PRIORITY)].concat());
    [named, hook, number(5, ACCEPT), attribute(7, &text("filter"))].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    /// Needs root, like the agent.
    #[test]
    fn of_many_chains_those_are_seen_that_were_asked_for() {
        let netns = Netns::private().unwrap();
        within(&netns, || {
            let others = BTreeSet::from(["CNI-ADMIN", "MISSING"]);
            let nothing = view(&[FORWARD], &others).unwrap();
            assert!(nothing.filters.iter().all(|filter| !filter.is_there && filter.chains.is_empty()));
            let made = [FORWARD, "CNI-ADMIN", "KUBE-SVC-A", "KUBE-SVC-B"].map(str::to_owned);
            let changes: Vec<_> = std::iter::once(Change::MakeTable)
                .chain(made.map(Change::MakeChain))
                .map(|change| (Version::V6, change))
                .collect();
            assert!(change(&nothing, &changes).unwrap());
            let [v4, v6] = view(&[FORWARD], &others).unwrap().filters;
            assert_eq!(v4, nothing.filters[0]);
            let chains = BTreeSet::from([FORWARD, "CNI-ADMIN"].map(str::to_owned));
            assert_eq!(v6, Filter { version: Version::V6, is_there: true, chains, rules: Vec::new() });
            // Changes that were decided before that are not carried out.
            assert!(!change(&nothing, &changes).unwrap());
        })
        .unwrap();
    }
}
