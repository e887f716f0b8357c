//! The tables `filter` of `iptables-nft`, one for each version of IP: which of some chains they have, the rules of those, and
//! changes. Chains are asked for by name: others may have made ten thousand.
//!
//! The tables belong to everybody who calls `iptables`. So a change names the generation of the packet filter that it was
//! decided in, as `iptables-nft` itself does, and rules are removed by their number.

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

/// The name of the table.
pub const TABLE: &str = "filter";

/// The chain of packets that the node forwards.
pub const FORWARD: &str = "FORWARD";

const NAME: &str = "NFT_MSG_NEWRULE";
/// `enum nf_tables_msg_types`.
const DELETE_RULE: u16 = 8;
/// Names of tables and chains.
const TABLE_NAME: u16 = 1;
const CHAIN_NAME: u16 = 3;
/// Of rules.
const RULE_CHAIN: u16 = 2;
const HANDLE: u16 = 3;

/// A rule in its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The chain.
    pub chain: String,
    /// Its number in the table.
    pub handle: u64,
    /// `None`: it is of a form that netattach does not write.
    pub rule: Option<Rule>,
}

/// The table of one version of IP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// The version.
    pub version: Version,
    /// Whether there is the table.
    pub is_there: bool,
    /// Which chains it has of those that were asked for.
    pub chains: BTreeSet<String>,
    /// The rules of the chains that were looked into, in their order.
    pub rules: Vec<Placed>,
}

/// The tables as they were read.
#[derive(Debug, Clone)]
pub struct View {
    /// The packet filter's generation before they were read.
    generation: u32,
    /// Of IPv4 and of IPv6.
    pub filters: [Filter; 2],
}

impl View {
    /// The packet filter's generation before the tables were read.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Tables that nobody has read, for tests.
    #[cfg(test)]
    pub(crate) fn of(filters: [Filter; 2]) -> Self {
        Self { generation: 0, filters }
    }
}

/// What is to be done to a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The table is made.
    MakeTable,
    /// A chain is made; [`FORWARD`] as iptables makes it, which lets everything pass.
    MakeChain(String),
    /// The rule of that number goes.
    Remove {
        /// Its chain.
        chain: String,
        /// Its number.
        handle: u64,
    },
    /// A rule comes before all others of a chain.
    First(String, Rule),
    /// A rule comes behind all others of a chain.
    Last(String, Rule),
}

/// Reads the tables: the rules of the chains to look `into`, and which of the `others` there are.
///
/// # Errors
/// The kernel does not answer, or something in the packet filter changed while the tables were read. Without nftables there are
/// no tables.
pub fn view(into: &[&str], others: &BTreeSet<&str>) -> Result<View, Error> {
    let generation = generation_if_any()?;
    let filters = [filter(Version::V4, into, others)?, filter(Version::V6, into, others)?];
    // Each part was asked for by itself: nothing else tells that they belong together.
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

/// Whether there is a table of that name in a family.
///
/// # Errors
/// The kernel does not answer.
pub fn has_table(family: Family, wanted: &str) -> Result<bool, Error> {
    let named = attribute(TABLE_NAME, &text(wanted));
    Ok(find("NFT_MSG_GETTABLE", kinds(GET_TABLE, NEW_TABLE), family, &named)?.is_some())
}

/// Whether the table of a family has a chain of that name.
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

/// Carries out changes of both tables, all of them or none. `false`: something in the packet filter has changed since the
/// tables were read, and nothing was done.
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

/// The attributes of a chain, in its table.
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
            // Changes decided before are not carried out.
            assert!(!change(&nothing, &changes).unwrap());
        })
        .unwrap();
    }
}
