//! nftables: which hooks of the packet path have chains, and the tables that netattach writes.
//!
//! `iptables-nft` and `ebtables-nft` create nftables chains too.
//!
//! | module | contents |
//! |---|---|
//! | `batch` | messages of nftables, and transactions |
//! | `expression` | the expressions of rules |
//! | `nat_table`, `nat` | the table that translates addresses: its sets, chains and rules; its transactions |
//! | `noted` | the same table for processes without an agent, which share it: comments of elements name their owner |
//! | `kept` | a pool of netfilter sockets |
//! | `senders` | the Ethernet addresses that may be sent from a bridge port, for processes without an agent |
//! | `filter`, `filter_rule` | the tables `filter` of `iptables-nft`, whose rules have another form |

mod batch;
mod expression;
pub mod filter;
mod filter_rule;
mod kept;
pub mod nat;
mod nat_table;
mod noted;
pub mod senders;

use std::collections::BTreeSet;

use rustix::io::Errno;

use super::Error;
use super::answer::end_of_list;
use super::guard;
use super::receive::Receiver;
pub(super) use batch::{NESTED, attribute, nested, object, text, transact};
pub(super) use kept::Lent;
pub(super) use nat_table::{comment_of, is_of_agent, named};

const NAME: &str = "NFT_MSG_GETCHAIN";
/// `NFNL_SUBSYS_NFTABLES` in the upper byte, and the message type in the lower.
const GET_CHAIN: u16 = 10 << 8 | 4;
const NEW_CHAIN: u16 = 10 << 8 | 3;
/// `NFT_MSG_GETGEN` and its answer.
const GET_GENERATION: u16 = 10 << 8 | 16;
const NEW_GENERATION: u16 = 10 << 8 | 15;
const GENERATION: &str = "NFT_MSG_GETGEN";
const NFTA_GEN_ID: u16 = 1;
pub(super) const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
pub(super) const REQUEST: u16 = 0x1;
const REQUEST_DUMP: u16 = REQUEST | 0x300;
const DUMP_INTERRUPTED: u16 = 0x10;
const HEADER_LEN: usize = 16;
/// `struct nfgenmsg`.
const GENERAL_LEN: usize = 4;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
/// Chains that translate addresses and ports.
const NAT: &[u8] = b"nat\0";
const NFTA_HOOK_DEV: u16 = 3;
const NFTA_HOOK_DEVS: u16 = 4;
const NFTA_DEVICE_NAME: u16 = 1;
const TRIES: u32 = 5;

/// A family of tables (`NFPROTO_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Family {
    /// Any family.
    Any = 0,
    /// Both versions of IP.
    Inet = 1,
    /// IPv4.
    Ip4 = 2,
    /// Devices.
    Netdev = 5,
    /// Bridges.
    Bridge = 7,
    /// IPv6.
    Ip6 = 10,
}

/// The chains of a family that packets traverse.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HookedChains {
    /// Number of chains.
    pub count: usize,
    /// Whether any of them translates addresses and ports.
    pub nat: bool,
    /// Devices that these chains name; a name that ends in `*` is a prefix.
    pub devices: BTreeSet<String>,
}

/// Returns the chains of a family that are attached to a hook, in the calling thread's namespace. Leaves out
/// netattach's own tables that do not affect packets that an agent's programs judge. A kernel without
/// nftables has no chains.
///
/// # Errors
/// The kernel did not answer, or the chains kept changing while they were listed.
pub fn hooked_chains(family: Family) -> Result<HookedChains, Error> {
    for _ in 0..TRIES {
        if let Some(found) = dump_chains(family)? {
            return Ok(found);
        }
    }
    Err(Error::Interrupted(NAME))
}

fn dump_chains(family: Family) -> Result<Option<HookedChains>, Error> {
    let mut found = HookedChains::default();
    let own = match family {
        Family::Inet => guard::is_of_agent()?.then_some(guard::TABLE),
        Family::Bridge => match senders::is_as_made() {
            // The table changed while it was read.
            Err(Error::Interrupted(_)) => return Ok(None),
            is_as_made => is_as_made?.then_some(senders::TABLE),
        },
        _ => None,
    };
    let whole = dump(NAME, [GET_CHAIN, NEW_CHAIN], family, &[], &mut |chain| found.add(chain, own))?;
    Ok(whole.then_some(found))
}

/// Dumps all objects of a kind: `kinds` are the message types of the request and of its answers, `only` the
/// attributes that restrict the dump. Passes the attributes of each answer to `each`. Returns `false` if
/// objects changed during the dump. A kernel without nftables has no objects.
pub(super) fn dump(
    request_name: &'static str,
    kinds: [u16; 2],
    family: Family,
    only: &[u8],
    each: &mut dyn FnMut(&[u8]),
) -> Result<bool, Error> {
    let Some(lent) = lent_if_any()? else { return Ok(true) };
    let [asked, answered] = kinds;
    let request = request(asked, REQUEST_DUMP, family, only);
    lent.socket.send(&request, 0).map_err(|source| Error::Send(request_name, source))?;
    let mut interrupted = false;
    let mut receiver = Receiver::new();
    loop {
        for message in messages(receiver.answer(&lent.socket, request_name)?) {
            interrupted |= message.flags & DUMP_INTERRUPTED != 0;
            match message.kind {
                // Either message is the last answer.
                NLMSG_DONE => {
                    lent.give_back();
                    let end = |what| Error::Malformed { request: request_name, what };
                    return match end_of_list(message.body).map_err(end)? {
                        0 => Ok(!interrupted),
                        // An object of the dump was deleted meanwhile (`nf_tables_dump_set`): that is a change.
                        libc::ENOENT => Ok(false),
                        _ => refused(request_name, message.body).map(|()| !interrupted),
                    };
                }
                NLMSG_ERROR => {
                    lent.give_back();
                    return refused(request_name, message.body).map(|()| true);
                }
                kind if kind == answered => each(message.body.get(GENERAL_LEN..).unwrap_or_default()),
                _ => {}
            }
        }
    }
}

/// Looks one object up: `kinds` as for [`dump`], `named` the attributes that name the object. Returns `None`
/// if there is no such object. The cost does not depend on the number of other objects.
pub(super) fn find(
    request_name: &'static str,
    kinds: [u16; 2],
    family: Family,
    named: &[u8],
) -> Result<Option<Vec<u8>>, Error> {
    let Some(lent) = lent_if_any()? else { return Ok(None) };
    let [asked, answered] = kinds;
    let request = request(asked, REQUEST, family, named);
    lent.socket.send(&request, 0).map_err(|source| Error::Send(request_name, source))?;
    let mut receiver = Receiver::new();
    let answer = receiver.answer(&lent.socket, request_name)?;
    // A request without an acknowledgement gets exactly one answer.
    lent.give_back();
    for message in messages(answer) {
        match message.kind {
            NLMSG_ERROR => return refused(request_name, message.body).map(|()| None),
            kind if kind == answered => {
                return Ok(Some(message.body.get(GENERAL_LEN..).unwrap_or_default().to_vec()));
            }
            _ => {}
        }
    }
    Err(Error::Malformed { request: request_name, what: "no object" })
}

/// A socket to the packet filter; `None`: the kernel does not support it.
fn lent_if_any() -> Result<Option<Lent>, Error> {
    match Lent::take() {
        Err(Error::Open(error)) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
        lent => lent.map(Some),
    }
}

/// The packet filter's generation, which the kernel raises with each change in the calling thread's namespace.
///
/// # Errors
/// The kernel did not answer, or has no nftables.
pub fn filter_generation() -> Result<u32, Error> {
    FilterGeneration::default().read()
}

/// The packet filter's generation, for a reader that asks every second: keeps the socket and the room for the answer.
#[derive(Default)]
pub struct FilterGeneration(Option<(Lent, Receiver)>);

impl FilterGeneration {
    /// Reads the generation in the namespace of the thread that called this first.
    ///
    /// # Errors
    /// As of [`filter_generation`]. The next call takes another socket.
    pub fn read(&mut self) -> Result<u32, Error> {
        let (lent, mut receiver) = match self.0.take() {
            Some(kept) => kept,
            None => (Lent::take()?, Receiver::new()),
        };
        let request = request(GET_GENERATION, REQUEST, Family::Any, &[]);
        lent.socket.send(&request, 0).map_err(|source| Error::Send(GENERATION, source))?;
        let generation = generation_in(receiver.answer(&lent.socket, GENERATION)?);
        // The request gets one answer.
        self.0 = Some((lent, receiver));
        generation
    }
}

impl Drop for FilterGeneration {
    fn drop(&mut self) {
        if let Some((lent, _)) = self.0.take() {
            lent.give_back();
        }
    }
}

impl std::fmt::Debug for FilterGeneration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilterGeneration").finish_non_exhaustive()
    }
}

fn generation_in(answer: &[u8]) -> Result<u32, Error> {
    let malformed = Error::Malformed { request: GENERATION, what: "no generation" };
    let answer = match messages(answer).next() {
        Some(answer) if answer.kind == NEW_GENERATION => answer,
        Some(answer) if answer.kind == NLMSG_ERROR => {
            return Err(super::Refused { request: GENERATION, errno: errno(answer.body), text: None }.into());
        }
        _ => return Err(malformed),
    };
    let number = attributes_of(answer.body.get(GENERAL_LEN..).unwrap_or_default())
        .find_map(|(kind, value)| (kind == NFTA_GEN_ID).then(|| value.try_into().ok()).flatten());
    number.map(u32::from_be_bytes).ok_or(malformed)
}

/// Converts the errno of an answer to a result. A missing table, a missing family and missing nftables all
/// mean that there are no objects.
pub(super) fn refused(request: &'static str, body: &[u8]) -> Result<(), Error> {
    let errno = errno(body);
    let is_empty = match errno {
        libc::EOPNOTSUPP | libc::ENOENT => true,
        // The kernel returns EINVAL for every request if nftables is missing (`nfnetlink_rcv_msg`), otherwise
        // only for a malformed request.
        libc::EINVAL => filter_generation().is_err_and(|error| error.errno() == Some(Errno::INVAL)),
        _ => false,
    };
    if is_empty { Ok(()) } else { Err(super::Refused { request, errno, text: None }.into()) }
}

/// The positive errno of an answer of type [`NLMSG_ERROR`] or [`NLMSG_DONE`].
pub(super) fn errno(body: &[u8]) -> i32 {
    let code = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_ne_bytes);
    code.saturating_neg()
}

pub(super) fn request(kind: u16, flags: u16, family: Family, attributes: &[u8]) -> Vec<u8> {
    request_of(kind, flags, [family as u8, 0, 0, 0], attributes)
}

/// A request of any netfilter protocol whose messages begin with a four-byte header.
pub(super) fn request_of(kind: u16, flags: u16, general: [u8; GENERAL_LEN], attributes: &[u8]) -> Vec<u8> {
    let length = HEADER_LEN + GENERAL_LEN + attributes.len();
    let mut request = Vec::with_capacity(length);
    request.extend((length as u32).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(general);
    request.extend(attributes);
    request
}

impl HookedChains {
    /// Counts a chain if it is attached to a hook; other chains are only jump targets. Skips chains of the
    /// table `own`, which is netattach's and does not affect packets that are judged elsewhere.
    fn add(&mut self, attributes: &[u8], own: Option<&str>) {
        let table = attribute_in(attributes, NFTA_CHAIN_TABLE).and_then(name);
        if table.is_some() && table.as_deref() == own {
            return;
        }
        for (kind, hook) in attributes_of(attributes) {
            if kind == NFTA_CHAIN_TYPE {
                self.nat |= hook == NAT;
            }
            if kind != NFTA_CHAIN_HOOK {
                continue;
            }
            self.count += 1;
            for (kind, value) in attributes_of(hook) {
                match kind {
                    NFTA_HOOK_DEV => self.devices.extend(name(value)),
                    NFTA_HOOK_DEVS => {
                        self.devices.extend(attributes_of(value).filter_map(|(kind, value)| {
                            // An attribute other than a full name is a prefix (Linux 6.16).
                            let name = name(value)?;
                            Some(if kind == NFTA_DEVICE_NAME { name } else { format!("{name}*") })
                        }))
                    }
                    _ => {}
                }
            }
        }
    }
}

pub(super) fn name(value: &[u8]) -> Option<String> {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    (end > 0).then(|| String::from_utf8_lossy(&value[..end]).into_owned())
}

pub(super) struct Message<'a> {
    pub(super) kind: u16,
    flags: u16,
    pub(super) body: &'a [u8],
}

pub(super) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok()?;
        let message = bytes.get(..length).filter(|message| message.len() >= HEADER_LEN)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([message[4], message[5]]),
            flags: u16::from_ne_bytes([message[6], message[7]]),
            body: &message[HEADER_LEN..],
        })
    })
}

/// Returns the value of the first attribute of that kind.
pub(super) fn attribute_in(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes_of(attributes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

pub(super) fn attributes_of(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = bytes.get(..4)?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        // The upper two bits mark nesting and byte order.
        let kind = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn chains_on_hooks_are_distinguished_from_those_that_are_jumped_to() {
        let mut found = HookedChains::default();
        found.add(&attribute(3, b"jumped-to\0"), None);
        assert_eq!(found, HookedChains::default());
        let devices = [attribute(1, b"eth0\0"), attribute(2, b"na\0")].concat();
        let hook = [attribute(1, &[0; 4]), attribute(0x8000 | 4, &devices)].concat();
        found.add(&[attribute(3, b"filter\0"), attribute(0x8000 | 4, &hook)].concat(), None);
        found.add(&attribute(4, &attribute(3, b"eth1\0")), None);
        let devices = BTreeSet::from(["eth0", "eth1", "na*"].map(str::to_owned));
        assert_eq!(found, HookedChains { count: 2, nat: false, devices: devices.clone() });
        found.add(&[attribute(4, &attribute(2, &[0; 4])), attribute(7, b"nat\0")].concat(), None);
        let own = [attribute(1, b"netattach\0"), attribute(4, &attribute(2, &[0; 4]))].concat();
        found.add(&own, Some("netattach"));
        assert_eq!(found, HookedChains { count: 3, nat: true, devices: devices.clone() });
        // Another program's table of that name.
        found.add(&own, None);
        assert_eq!(found, HookedChains { count: 4, nat: true, devices });
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            for message in messages(&bytes) {
                HookedChains::default().add(message.body, None);
            }
        }
    }
}
