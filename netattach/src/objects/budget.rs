//! Limits on the size of policies. All of them are in this table: `docs/budgets.md` lists the same rows, and a test
//! compares the two.
//!
//! An excess over a limit is reported by name and never allows anything: an oversized policy isolates the pods it
//! selects, and none of its rules applies; an attachment whose rules expand to too much is isolated in that direction.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Rules of one policy, both directions together.
pub const RULES: usize = 100_000;
/// Items of `from` and `to` of one policy, including the exceptions of blocks.
pub const PEERS: usize = 131_072;
/// Items of `ports` of one policy.
pub const PORTS: usize = 131_072;
/// Requirements of one selector.
pub const REQUIREMENTS: usize = 64;
/// Values of one requirement of a selector.
pub const VALUES: usize = 1024;
/// Networks that one policy is for.
pub const NETWORKS: usize = 256;
/// Findings that are reported for one policy, and for the expansion of one attachment's rules; the others are counted.
pub const FINDINGS: usize = 100;
/// Characters of a word that a finding quotes.
pub const SHOWN: usize = 253;
/// Unknown keys that are reported for one object.
pub(crate) const UNKNOWN_KEYS: usize = 16;
/// Policies of a node, of both kinds.
pub const POLICIES: usize = 16_384;
/// Rules of all policies of a node.
pub const RULES_OF_NODE: usize = 200_000;
/// Addresses and prefixes that one direction of one attachment's policies expands to, before equal ones are merged.
pub const PREFIXES: usize = 524_288;
/// Port entries that one direction expands to: the capacity of the map.
pub const ENTRIES: usize = netattach_common::capacity::PORTS;
/// Ports and blocks of ports that the rules of one direction expand to, before equal ones are merged: of a range each
/// aligned block, of a port name each number. As many ranges as two policies may have fit, whatever their length. Those
/// that hold for one address alone count [`OF_ADDRESS`] times.
pub const TRAFFIC: usize = 16 * PREFIXES;
/// How many ports one counts for that is kept with the address it holds for: of a port name in an egress rule. It takes so
/// much more memory.
pub const OF_ADDRESS: usize = 4;
/// Comparisons allowed while compiling one direction: of blocks and numbers, and for each requirement of a selector a
/// lookup of its label and as many comparisons as finding one of its values takes.
pub const WORK: usize = 50_000_000;
/// The same for all tables of one namespace together, but for those that are refused. [`ENTRY`] is added for each prefix
/// and port entry.
pub const WORK_OF_NAMESPACE: usize = 4 * WORK;
/// The same in one update, with what is refused: an update compiles under a lock that attaching and detaching pods of
/// other namespaces wait for. Twice as much, as a table that found no room is tried again when others have gone. All
/// namespaces together may take as much for what had been refused before, in turn: it suffices for three attachments,
/// whatever they take.
pub const WORK_OF_UPDATE: usize = 2 * WORK_OF_NAMESPACE;
/// The comparisons that sorting and storing one prefix or port entry counts as.
pub const ENTRY: usize = 16;

/// Pods of other nodes.
pub const REMOTE_PODS: usize = 131_072;
/// Addresses of all pods of other nodes.
pub const REMOTE_ADDRESSES: usize = 524_288;
/// Addresses of a pod of another node, on all its networks.
pub const ADDRESSES_OF_REMOTE_POD: usize = 64;
/// Bytes of the status annotation of a pod of another node.
pub const REMOTE_STATUS_ANNOTATION: usize = 64 << 10;
/// Bytes of the annotation with its ports.
pub const REMOTE_PORTS_ANNOTATION: usize = 16 << 10;
/// Named ports of a pod of another node.
pub const PORTS_OF_REMOTE_POD: usize = 256;
/// Bytes of its labels, keys and values together.
pub const LABELS_OF_REMOTE_POD: usize = 16 << 10;

/// Names of namespaces in the list of a definition, or values of all requirements of its selector.
pub const ALLOWED_NAMESPACES: usize = 1024;

/// Pods that can claim one address of a network, and selectors that select all of them allow it.
pub const CLAIMANTS: usize = 256;

/// The limit that is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Excess {
    /// [`RULES`].
    Rules,
    /// [`PEERS`].
    Peers,
    /// [`PORTS`].
    Ports,
    /// [`NETWORKS`].
    Networks,
    /// [`POLICIES`].
    Policies,
    /// [`RULES_OF_NODE`].
    RulesOfNode,
    /// [`PREFIXES`].
    Prefixes,
    /// [`ENTRIES`].
    Entries,
    /// [`TRAFFIC`].
    Traffic,
    /// [`WORK`].
    Work,
    /// [`WORK_OF_NAMESPACE`].
    WorkOfNamespace,
    /// [`WORK_OF_UPDATE`].
    WorkOfUpdate,
}

impl Excess {
    /// Whether the same rules may be within it with fewer peers, or beside fewer others.
    pub(crate) fn is_of_work(self) -> bool {
        matches!(self, Self::Work | Self::WorkOfNamespace | Self::WorkOfUpdate)
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rules => write!(f, "has more than {RULES} rules"),
            Self::Peers => write!(f, "has more than {PEERS} peers and exceptions"),
            Self::Ports => write!(f, "has more than {PORTS} ports"),
            Self::Networks => write!(f, "is for more than {NETWORKS} networks, which counts as for all"),
            Self::Policies => write!(f, "is one of more than {POLICIES} policies of the node"),
            Self::RulesOfNode => {
                write!(f, "has more rules than the {RULES_OF_NODE} of a node leave its namespace")
            }
            Self::Prefixes => write!(f, "leads to more than {PREFIXES} addresses and prefixes"),
            Self::Entries => write!(f, "leads to more than {ENTRIES} port entries"),
            Self::Traffic => {
                write!(
                    f,
                    "leads to more than {TRAFFIC} ports, counting what a port name stands for at each peer"
                )
            }
            Self::Work => write!(f, "takes more than {WORK} comparisons to work out"),
            Self::WorkOfNamespace => write!(
                f,
                "takes more comparisons to work out than what is in force leaves of the {WORK_OF_NAMESPACE} of its \
                 namespace"
            ),
            Self::WorkOfUpdate => write!(
                f,
                "is left to further updates, which follow by themselves, as it takes more comparisons to work out \
                 than are left of the {WORK_OF_UPDATE} of one"
            ),
        }
    }
}

/// Counts the cost of compiling one direction.
#[derive(Debug)]
pub(crate) struct Meter {
    prefixes: usize,
    entries: usize,
    traffic: usize,
    work: usize,
    /// The most that [`Meter::spent`] may become.
    left: Left,
}

/// What other tables leave for one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Left {
    /// Of [`WORK_OF_NAMESPACE`].
    pub(crate) of_namespace: usize,
    /// Of [`WORK_OF_UPDATE`].
    pub(crate) of_update: usize,
}

impl Meter {
    /// Begins to count.
    pub(crate) fn new(left: Left) -> Self {
        Self { prefixes: 0, entries: 0, traffic: 0, work: 0, left }
    }

    /// Adds addresses and prefixes.
    pub(crate) fn prefixes(&mut self, more: usize) -> Result<(), Excess> {
        count(&mut self.prefixes, more, PREFIXES, Excess::Prefixes)?;
        self.is_within()
    }

    /// Adds port entries.
    pub(crate) fn entries(&mut self, more: usize) -> Result<(), Excess> {
        count(&mut self.entries, more, ENTRIES, Excess::Entries)?;
        self.is_within()
    }

    /// Adds ports and blocks of ports, and as many comparisons: sorting them takes no more. To be called before they are
    /// kept.
    pub(crate) fn traffic(&mut self, more: usize) -> Result<(), Excess> {
        count(&mut self.traffic, more, TRAFFIC, Excess::Traffic)?;
        self.work(more)
    }

    /// Adds comparisons.
    pub(crate) fn work(&mut self, more: usize) -> Result<(), Excess> {
        count(&mut self.work, more, WORK, Excess::Work)?;
        self.is_within()
    }

    /// What it has taken, in comparisons: no more than the bounds.
    pub(crate) fn spent(&self) -> usize {
        let entries = self.prefixes.min(PREFIXES) + self.entries.min(ENTRIES);
        self.work.min(WORK) + ENTRY * entries
    }

    /// The most comparisons that can still be added.
    pub(crate) fn rest(&self) -> usize {
        let left = self.left.of_namespace.min(self.left.of_update);
        WORK.saturating_sub(self.work).min(left.saturating_sub(self.spent()))
    }

    /// What exceeds both bounds is not tried again by itself.
    fn is_within(&self) -> Result<(), Excess> {
        let spent = self.spent();
        if spent > self.left.of_namespace {
            Err(Excess::WorkOfNamespace)
        } else if spent > self.left.of_update {
            Err(Excess::WorkOfUpdate)
        } else {
            Ok(())
        }
    }
}

fn count(counted: &mut usize, more: usize, most: usize, excess: Excess) -> Result<(), Excess> {
    *counted = counted.saturating_add(more);
    if *counted > most { Err(excess) } else { Ok(()) }
}

/// A list that keeps at most `MOST` items while it is read, and records whether there were more.
#[derive(Debug)]
pub(crate) struct Bounded<T, const MOST: usize> {
    pub(crate) items: Vec<T>,
    pub(crate) has_more: bool,
}

impl<T, const MOST: usize> Default for Bounded<T, MOST> {
    fn default() -> Self {
        Self { items: Vec::new(), has_more: false }
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Bounded<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MOST: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
            type Value = Bounded<T, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut written: A) -> Result<Self::Value, A::Error> {
                let mut list = Bounded::default();
                while list.items.len() < MOST {
                    match written.next_element()? {
                        Some(item) => list.items.push(item),
                        None => return Ok(list),
                    }
                }
                list.has_more = pass_over(&mut written)? > 0;
                Ok(list)
            }
        }

        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// A map that keeps at most `MOST` entries while it is read, and records whether there were more.
#[derive(Debug)]
pub(crate) struct BoundedMap<const MOST: usize> {
    pub(crate) entries: BTreeMap<String, String>,
    pub(crate) has_more: bool,
}

impl<'de, const MOST: usize> Deserialize<'de> for BoundedMap<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<const MOST: usize>;

        impl<'de, const MOST: usize> Visitor<'de> for Entries<MOST> {
            type Value = BoundedMap<MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut written: A) -> Result<Self::Value, A::Error> {
                let mut map = BoundedMap { entries: BTreeMap::new(), has_more: false };
                while map.entries.len() < MOST {
                    match written.next_entry()? {
                        Some((key, value)) => drop(map.entries.insert(key, value)),
                        None => return Ok(map),
                    }
                }
                while written.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    map.has_more = true;
                }
                Ok(map)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// User-written text for a message: its first [`SHOWN`] characters.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Reads to the end of a list without keeping anything; returns the number of items.
pub(crate) fn pass_over<'de, A: SeqAccess<'de>>(written: &mut A) -> Result<usize, A::Error> {
    let mut number = 0;
    while written.next_element::<IgnoredAny>()?.is_some() {
        number += 1;
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use crate::objects::budget::*;

    #[test]
    fn the_page_has_every_bound() {
        let page = include_str!("../../../docs/budgets.md");
        let section = page.split("\n## ").find(|section| section.starts_with("Policies")).unwrap();
        let bounds = section.lines().filter(|line| line.starts_with("| ")).filter_map(|row| {
            let mut cells = row.trim_matches('|').split(" | ").map(str::trim);
            cells.nth(1)?.parse::<usize>().ok()
        });
        let expected = [
            RULES,
            PEERS,
            PORTS,
            NETWORKS,
            REQUIREMENTS,
            VALUES,
            FINDINGS,
            SHOWN,
            16 << 20, // `source::tree`
            POLICIES,
            RULES_OF_NODE,
            PREFIXES,
            ENTRIES,
            TRAFFIC,
            WORK,
            WORK_OF_NAMESPACE,
            WORK_OF_UPDATE,
            REMOTE_PODS,
            REMOTE_ADDRESSES,
            ADDRESSES_OF_REMOTE_POD,
            REMOTE_STATUS_ANNOTATION,
            REMOTE_PORTS_ANNOTATION,
            PORTS_OF_REMOTE_POD,
            LABELS_OF_REMOTE_POD,
            CLAIMANTS,
            ALLOWED_NAMESPACES,
        ];
        assert_eq!(bounds.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lists_end_at_their_bound_and_say_so() {
        let read = |text: &str| {
            let list: Bounded<u8, 3> = serde_json::from_str(text).unwrap();
            (list.items, list.has_more)
        };
        assert_eq!(read("[]"), (vec![], false));
        assert_eq!(read("[1, 2, 3]"), (vec![1, 2, 3], false));
        assert_eq!(read("[1, 2, 3, {\"any\": [1]}]"), (vec![1, 2, 3], true));
        assert!(serde_json::from_str::<Bounded<u8, 3>>("[1, 2, 3, {]").is_err());
    }

    #[test]
    fn maps_end_at_their_bound_and_say_so_and_words_are_cut() {
        let read = |text: &str| {
            let map: BoundedMap<1> = serde_json::from_str(text).unwrap();
            (map.entries.into_keys().collect::<String>(), map.has_more)
        };
        assert_eq!(read(r#"{"a": "1"}"#), ("a".to_owned(), false));
        assert_eq!(read(r#"{"a": "1", "b": [2]}"#), ("a".to_owned(), true));
        assert_eq!(shown(&"ä".repeat(SHOWN)), "ä".repeat(SHOWN));
        assert_eq!(shown(&"ä".repeat(SHOWN + 1)), format!("{}...", "ä".repeat(SHOWN)));
    }

    fn meter(of_namespace: usize) -> Meter {
        Meter::new(Left { of_namespace, of_update: WORK_OF_UPDATE })
    }

    #[test]
    fn a_meter_takes_its_bound_and_not_one_more() {
        let mut meter = meter(WORK_OF_NAMESPACE);
        assert_eq!(meter.prefixes(PREFIXES), Ok(()));
        assert_eq!(meter.prefixes(1), Err(Excess::Prefixes));
        assert_eq!(meter.entries(ENTRIES), Ok(()));
        assert_eq!(meter.entries(usize::MAX), Err(Excess::Entries));
        assert_eq!((meter.work(WORK), meter.work(1)), (Ok(()), Err(Excess::Work)));
        assert_eq!(meter.spent(), WORK + ENTRY * (PREFIXES + ENTRIES), "refused ones count up to the bounds");
        assert!(meter.spent() <= WORK_OF_NAMESPACE, "one direction may have all that it may have");
    }

    #[test]
    fn ports_have_a_bound_and_take_as_many_comparisons() {
        let mut metered = meter(WORK_OF_NAMESPACE);
        assert_eq!((metered.traffic(TRAFFIC), metered.spent()), (Ok(()), TRAFFIC));
        assert_eq!((metered.traffic(1), metered.spent()), (Err(Excess::Traffic), TRAFFIC));
        let mut metered = meter(WORK_OF_NAMESPACE);
        assert_eq!((metered.work(WORK - 1), metered.traffic(1)), (Ok(()), Ok(())));
        assert_eq!(metered.traffic(1), Err(Excess::Work));
        let mut metered = meter(1);
        assert_eq!((metered.traffic(1), metered.traffic(1)), (Ok(()), Err(Excess::WorkOfNamespace)));
    }

    #[test]
    fn a_meter_takes_what_the_namespace_has_left_and_not_one_more() {
        let mut metered = meter(100);
        assert_eq!((metered.prefixes(2), metered.entries(2)), (Ok(()), Ok(())));
        assert_eq!(metered.rest(), 100 - 4 * ENTRY);
        assert_eq!(metered.work(100 - 4 * ENTRY), Ok(()));
        assert_eq!((metered.rest(), metered.work(1)), (0, Err(Excess::WorkOfNamespace)));
        assert_eq!(meter(0).work(0), Ok(()), "a policy that allows nothing needs none");
        assert_eq!(meter(ENTRY - 1).prefixes(1), Err(Excess::WorkOfNamespace));
        assert_eq!(meter(ENTRY - 1).entries(1), Err(Excess::WorkOfNamespace));
        assert_eq!(meter(WORK_OF_NAMESPACE).rest(), WORK);
    }

    #[test]
    fn a_meter_says_which_bound_is_exceeded() {
        let table = [
            (10, 9, 10, Err(Excess::WorkOfUpdate)),
            (9, 10, 10, Err(Excess::WorkOfNamespace)),
            (9, 9, 10, Err(Excess::WorkOfNamespace)),
            (9, 9, 9, Ok(())),
        ];
        for (of_namespace, of_update, work, expected) in table {
            let left = Left { of_namespace, of_update };
            assert_eq!(Meter::new(left).work(work), expected, "{left:?} {work}");
        }
    }
}
