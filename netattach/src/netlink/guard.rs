//! The nftables table in which a BPF program judges packets that the node routes, after address translation.
//!
//! The table uses nftables with one iptables match, `bpf` (`xt_bpf`, through `nft_compat`), which every
//! kernel has had since long before Linux 5.15. The table belongs to the agent alone; it is replaced as a
//! whole, in one transaction.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::Error;
use super::nft::nat::{comment, is_dormant};
use super::nft::{
    self, Family, NESTED, attribute, attributes_of, comment_of, dump, name, named, object, text, transact,
};

/// The name of the table, in the family that covers both versions of IP.
pub const TABLE: &str = "netattach";

const NAME: &str = "NFT_MSG_NEWRULE";
const RULES: &str = "NFT_MSG_GETRULE";

/// `NFNL_SUBSYS_NFTABLES`.
const NFTABLES: u16 = 10;
/// `enum nf_tables_msg_types`.
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;

const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// A chain of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Chain {
    name: &'static str,
    /// `NF_INET_*`.
    hook: u32,
    priority: i32,
}

/// `NF_INET_FORWARD`.
const FORWARD: u32 = 2;

/// After destination translation (-100) and the usual filters (0), before source translation (100) and before IPVS
/// takes answers (99) or has taken packets (98).
const CHAINS: [Chain; 3] = [
    Chain { name: "input", hook: 1, priority: 99 },
    Chain { name: "forward", hook: FORWARD, priority: 90 },
    Chain { name: "output", hook: 3, priority: 90 },
];

/// `struct xt_bpf_info_v1` of `linux/netfilter/xt_bpf.h`: mode, number of instructions, descriptor, room for
/// instructions or a path, and a pointer for the kernel.
const INFO_LEN: usize = 2 + 2 + 4 + 512 + 8;
/// `XT_BPF_MODE_FD_ELF`: the program is given as a descriptor.
const BY_DESCRIPTOR: u16 = 2;
const INFO_REVISION: u32 = 1;

/// Installs the table, replacing any of the same name; it drops packets for which a program returns 1.
/// `owner`: the state directory of the agent. The first program judges packets to the node itself and from it, the
/// second one those that the node forwards.
///
/// # Errors
/// The kernel refuses: it may lack nftables, `nft_compat` or `xt_bpf`.
pub fn install_guard(owner: &str, programs: [BorrowedFd<'_>; 2]) -> Result<(), Error> {
    let programs = programs.map(|program| program.as_raw_fd());
    transact(NAME, &[remove(), install(owner, programs)].concat())
}

/// Describes the owner of the table of that name, if the table exists and does not belong to this agent.
/// Earlier versions wrote no comment: a table without a comment that has exactly the agent's chains counts as
/// this agent's.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn guard_of_another(owner: &str) -> Result<Option<String>, Error> {
    if let Some(comment) = comment(TABLE)? {
        return Ok((comment != comment_of(owner)).then_some(comment));
    }
    let is_there = nft::filter::has_table(Family::Inet, TABLE)?;
    let is_earlier = is_there && chains()? == wanted_chains();
    Ok((is_there && !is_earlier).then(|| "it does not say whose it is".to_owned()))
}

/// Whether the table of that name belongs to an agent, whichever one.
pub(super) fn is_of_agent() -> Result<bool, Error> {
    Ok(comment(TABLE)?.is_some_and(|comment| nft::is_of_agent(&comment)))
}

/// Deletes the table. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn remove_guard() -> Result<(), Error> {
    match transact(NAME, &remove()) {
        // Without nftables there is no table.
        Err(error) if is_unsupported(&error) => Ok(()),
        other => other,
    }
}

/// Whether the table is as [`install_guard`] creates it, as far as this can be read back: it has its chains, and in
/// each of them one rule, which drops the packets for which a program returns 1; it belongs to that agent; and it is
/// not dormant. An administrator can make a table dormant, which takes its chains off their hooks.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn guard_is_whole(owner: &str) -> Result<bool, Error> {
    let mut rules: BTreeMap<String, Vec<Vec<String>>> = BTreeMap::new();
    let chains = chains()?;
    let is_own = comment(TABLE)?.is_some_and(|comment| comment == comment_of(owner));
    let is_awake = !is_dormant(Family::Inet, TABLE)?;
    let table = attribute(1, &text(TABLE));
    let all_seen = dump(RULES, kinds(GET_RULE, NEW_RULE), Family::Inet, &table, &mut |rule| {
        if let Some((chain, expressions)) = own_rule(rule) {
            rules.entry(chain).or_default().push(expressions);
        }
    })?;
    if !all_seen {
        // The table changed while it was read. The caller repeats the check soon.
        return Err(Error::Interrupted(RULES));
    }
    let rule = || vec![["match", "immediate"].map(str::to_owned).to_vec()];
    Ok(is_own
        && is_awake
        && chains == wanted_chains()
        && rules == CHAINS.map(|chain| (chain.name.to_owned(), rule())).into())
}

/// Names, hooks and priorities of chains.
type Chains = BTreeMap<String, (u32, i32)>;

/// Reads the table's chains from the kernel.
fn chains() -> Result<Chains, Error> {
    const NAME: &str = "NFT_MSG_GETCHAIN";
    let mut chains = Chains::new();
    let seen = dump(NAME, kinds(GET_CHAIN, NEW_CHAIN), Family::Inet, &[], &mut |chain| {
        chains.extend(own_chain(chain));
    })?;
    if seen { Ok(chains) } else { Err(Error::Interrupted(NAME)) }
}

fn wanted_chains() -> Chains {
    CHAINS.map(|chain| (chain.name.to_owned(), (chain.hook, chain.priority))).into()
}

fn kinds(get: u16, new: u16) -> [u16; 2] {
    [NFTABLES << 8 | get, NFTABLES << 8 | new]
}

/// Whether the table exists, complete or not.
///
/// # Errors
/// The kernel does not answer.
pub fn guard_exists() -> Result<bool, Error> {
    nft::filter::has_table(Family::Inet, TABLE)
}

/// Whether all bridges pass packets to the IP packet filter of that family: `iptables` or `ip6tables`.
pub fn bridges_call(family: &str) -> bool {
    let path = format!("/proc/sys/net/bridge/bridge-nf-call-{family}");
    // Without the file, bridges pass no packets to the filter.
    std::fs::read_to_string(path).is_ok_and(|value| !matches!(value.trim(), "" | "0"))
}

fn is_unsupported(error: &Error) -> bool {
    use rustix::io::Errno;
    let open = matches!(error, Error::Open(source) if source.raw_os_error() == Some(libc::EPROTONOSUPPORT));
    open || matches!(error.errno(), Some(Errno::OPNOTSUPP | Errno::INVAL))
}

/// Name, hook and priority of a chain, if it belongs to the table.
fn own_chain(attributes: &[u8]) -> Option<(String, (u32, i32))> {
    let (mut table, mut chain, mut at) = (None, None, None);
    for (kind, value) in attributes_of(attributes) {
        match kind {
            1 => table = name(value),
            3 => chain = name(value),
            4 => {
                let number = |wanted| {
                    let (_, value) = attributes_of(value).find(|(kind, _)| *kind == wanted)?;
                    <[u8; 4]>::try_from(value).ok()
                };
                at = number(1).map(u32::from_be_bytes).zip(number(2).map(i32::from_be_bytes));
            }
            _ => {}
        }
    }
    (table? == TABLE).then_some((chain?, at?))
}

/// Chain of a rule and the names of its expressions, if the rule belongs to the table.
fn own_rule(attributes: &[u8]) -> Option<(String, Vec<String>)> {
    let (mut table, mut chain, mut expressions) = (None, None, Vec::new());
    for (kind, value) in attributes_of(attributes) {
        match kind {
            1 => table = name(value),
            2 => chain = name(value),
            4 => {
                let of = |expression| attributes_of(expression).find(|(kind, _)| *kind == 1);
                let names = attributes_of(value).filter_map(|(_, expression)| name(of(expression)?.1));
                expressions = names.collect();
            }
            _ => {}
        }
    }
    (table? == TABLE).then_some((chain?, expressions))
}

/// The messages that delete the table, whether or not it exists.
fn remove() -> Vec<Vec<u8>> {
    let table = attribute(1, &text(TABLE));
    vec![object(NEW_TABLE, CREATE, &table), object(DELETE_TABLE, 0, &table)]
}

fn install(owner: &str, [ends, forwarded]: [i32; 2]) -> Vec<Vec<u8>> {
    let program = |chain: &Chain| if chain.hook == FORWARD { forwarded } else { ends };
    let mut messages = vec![object(NEW_TABLE, CREATE, &named(TABLE, &comment_of(owner)))];
    messages.extend(CHAINS.iter().map(|chain| object(NEW_CHAIN, CREATE, &chain_attributes(chain))));
    messages.extend(
        CHAINS.iter().map(|chain| object(NEW_RULE, CREATE | APPEND, &rule_attributes(chain, program(chain)))),
    );
    messages
}

fn chain_attributes(chain: &Chain) -> Vec<u8> {
    /// `NF_ACCEPT`: the policy for packets that no rule drops.
    const ACCEPT: u32 = 1;
    let hook = [attribute(1, &chain.hook.to_be_bytes()), attribute(2, &chain.priority.to_be_bytes())];
    [
        attribute(1, &text(TABLE)),
        attribute(3, &text(chain.name)),
        attribute(4 | NESTED, &hook.concat()),
        attribute(5, &ACCEPT.to_be_bytes()),
        attribute(7, &text("filter")),
    ]
    .concat()
}

fn rule_attributes(chain: &Chain, program: i32) -> Vec<u8> {
    /// `NF_DROP`, and the register of verdicts.
    const ZERO: [u8; 4] = [0; 4];
    let mut info = BY_DESCRIPTOR.to_ne_bytes().to_vec();
    info.extend([0; 2]);
    info.extend(program.to_ne_bytes());
    info.resize(INFO_LEN, 0);
    let condition =
        [attribute(1, &text("bpf")), attribute(2, &INFO_REVISION.to_be_bytes()), attribute(3, &info)];
    let verdict = attribute(2 | NESTED, &attribute(2 | NESTED, &attribute(1, &ZERO)));
    let verdict = [attribute(1, &ZERO), verdict];
    let expression = |kind: &str, data: &[u8]| {
        attribute(1 | NESTED, &[attribute(1, &text(kind)), attribute(2 | NESTED, data)].concat())
    };
    let expressions = [expression("match", &condition.concat()), expression("immediate", &verdict.concat())];
    [
        attribute(1, &text(TABLE)),
        attribute(2, &text(chain.name)),
        attribute(4 | NESTED, &expressions.concat()),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::super::nft::messages;
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        for chain in &CHAINS {
            let read = own_chain(&chain_attributes(chain)).unwrap();
            assert_eq!(read, (chain.name.to_owned(), (chain.hook, chain.priority)));
            let rule = own_rule(&rule_attributes(chain, 7)).unwrap();
            assert_eq!(rule, (chain.name.to_owned(), vec!["match".to_owned(), "immediate".to_owned()]));
        }
        let others = [attribute(1, &text("filter")), attribute(3, &text("input"))].concat();
        assert_eq!(own_chain(&others), None);
        assert_eq!(own_rule(&others), None);
    }

    #[test]
    fn messages_are_whole() {
        let batch = install("/state", [7, 8]).concat();
        let kinds: Vec<u16> = messages(&batch).map(|message| message.kind & 0xff).collect();
        assert_eq!(kinds, [NEW_TABLE, NEW_CHAIN, NEW_CHAIN, NEW_CHAIN, NEW_RULE, NEW_RULE, NEW_RULE]);
        let length = messages(&batch).map(|message| message.body.len() + 16).sum::<usize>();
        assert_eq!(length, batch.len());
    }

    /// Needs root, like the agent.
    #[test]
    fn a_table_of_that_name_says_whose_it_is() {
        use crate::netns::{Netns, within};

        let made = |comment: Option<&str>, chains: &[Chain]| {
            let table = comment.map_or_else(|| attribute(1, &text(TABLE)), |comment| named(TABLE, comment));
            let mut messages = remove();
            messages.push(object(NEW_TABLE, CREATE, &table));
            messages.extend(chains.iter().map(|chain| object(NEW_CHAIN, CREATE, &chain_attributes(chain))));
            transact(NAME, &messages).unwrap();
            let is_skipped = nft::hooked_chains(Family::Inet).unwrap().count == 0;
            (guard_of_another("/state").unwrap(), guard_is_whole("/state").unwrap(), is_skipped)
        };
        let other = |said: &str| Some(said.to_owned());
        let nobody = "it does not say whose it is";
        within(&Netns::private().unwrap(), || {
            assert_eq!(guard_of_another("/state").unwrap(), None, "there is none");
            // A table without rules is never complete.
            assert_eq!(made(Some("netattach, state in /state"), &CHAINS), (None, false, true));
            let of_agent = "netattach, state in /other";
            assert_eq!(made(Some(of_agent), &CHAINS), (other(of_agent), false, true));
            assert_eq!(made(Some("mine"), &CHAINS), (other("mine"), false, false));
            assert_eq!(made(None, &CHAINS), (None, false, false), "of an earlier version");
            assert_eq!(made(None, &CHAINS[..1]), (other(nobody), false, false));
            assert_eq!(made(None, &[]), (other(nobody), false, true));
        })
        .unwrap();
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            own_chain(&bytes);
            own_rule(&bytes);
        }
    }
}
