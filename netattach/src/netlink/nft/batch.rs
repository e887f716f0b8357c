//! Messages of nftables, and transactions.

use std::io;

use netlink_sys::Socket as RawSocket;
use rustix::net::sockopt;

use super::super::receive::Receiver;
use super::super::{Error, Refused};
use super::kept::Lent;
use super::{Family, NLMSG_ERROR, errno, messages};

/// `linux/netfilter/nfnetlink.h`: a transaction.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFNL_SUBSYS_NFTABLES`.
const NFTABLES: u16 = 10;
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
/// Byte range of the flags in the header that each message begins with.
const FLAGS: std::ops::Range<usize> = 6..8;
/// Kinds of messages (`enum nf_tables_msg_types`).
pub(super) const NEW_TABLE: u16 = 0;
pub(super) const GET_TABLE: u16 = 1;
pub(super) const NEW_CHAIN: u16 = 3;
pub(super) const GET_CHAIN: u16 = 4;
pub(super) const NEW_RULE: u16 = 6;
pub(super) const GET_RULE: u16 = 7;
/// `NLM_F_CREATE` and `NLM_F_APPEND`.
pub(super) const CREATE: u16 = 0x400;
pub(super) const APPEND: u16 = 0x800;
/// Flag in the type of an attribute whose value consists of attributes.
pub(in crate::netlink) const NESTED: u16 = 0x8000;

/// `NFNL_BATCH_GENID`: the packet filter's generation on which the transaction is conditional.
const GENERATION: u16 = 1;

/// Carries out messages (see [`object`]) as one transaction: all of them or none. The kernel acknowledges
/// only the last message and those that it refuses, since a thousand acknowledgements would not fit into the
/// socket's queue.
///
/// # Errors
/// The kernel refuses one of them; `name` names the transaction.
pub(in crate::netlink) fn transact(name: &'static str, transaction: &[Vec<u8>]) -> Result<(), Error> {
    send(name, &[], transaction)
}

/// As [`transact`], on the condition that the packet filter is still in that generation. Returns `false` if
/// it is not; nothing was done then.
///
/// # Errors
/// As [`transact`].
pub(in crate::netlink) fn transact_at(
    name: &'static str,
    generation: u32,
    transaction: &[Vec<u8>],
) -> Result<bool, Error> {
    match send(name, &number(GENERATION, generation), transaction) {
        Err(Error::Refused(Refused { errno: libc::ERESTART, .. })) => Ok(false),
        other => other.map(|()| true),
    }
}

fn send(name: &'static str, condition: &[u8], transaction: &[Vec<u8>]) -> Result<(), Error> {
    let Some((last, before)) = transaction.split_last() else { return Ok(()) };
    let lent = Lent::take()?;
    let socket = &lent.socket;
    let mut last = last.clone();
    if let Some(flags) = last.get_mut(FLAGS) {
        flags[0] |= ACK as u8;
    }
    let begin = message(BATCH_BEGIN, 0, 0, NFTABLES, condition);
    let end = message(BATCH_END, 0, 0, NFTABLES, &[]);
    let batch = [begin, before.concat(), last, end].concat();
    make_room(socket, batch.len());
    socket.send(&batch, 0).map_err(|source| Error::Send(name, source))?;
    // The kernel processes the messages during the send, so all answers are already in the socket.
    socket.set_non_blocking(true).map_err(Error::Open)?;
    let mut receiver = Receiver::new();
    let (mut acknowledged, mut refused) = (false, None);
    loop {
        match receiver.receive(socket) {
            Ok(()) => {
                for answer in messages(receiver.bytes()).filter(|answer| answer.kind == NLMSG_ERROR) {
                    match errno(answer.body) {
                        0 => acknowledged = true,
                        errno => refused = refused.or(Some(Refused { request: name, errno, text: None })),
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(source) => return Err(Error::Receive(name, source)),
        }
    }
    // The socket is not given back, because the missing answer may still arrive.
    if !acknowledged && refused.is_none() {
        return Err(Error::Malformed { request: name, what: "the kernel did not answer" });
    }
    lent.give_back();
    refused.map_or(Ok(()), |refused| Err(refused.into()))
}

/// Raises the socket's send buffer for that many bytes; the default is 208 KiB. Without the privilege the
/// send fails.
fn make_room(socket: &RawSocket, bytes: usize) {
    if bytes < 64 << 10 {
        return;
    }
    // The kernel charges more than the bytes themselves.
    let _ = sockopt::set_socket_send_buffer_size_force(socket, bytes.saturating_mul(2));
}

/// A message about a table of the family `inet`, or about an object of such a table.
pub(in crate::netlink) fn object(kind: u16, flags: u16, attributes: &[u8]) -> Vec<u8> {
    object_in(Family::Inet, kind, flags, attributes)
}

/// As [`object`], for a table of that family.
pub(super) fn object_in(family: Family, kind: u16, flags: u16, attributes: &[u8]) -> Vec<u8> {
    message(NFTABLES << 8 | kind, flags, family as u8, 0, attributes)
}

/// `struct nlmsghdr`, `struct nfgenmsg`, attributes.
fn message(kind: u16, flags: u16, family: u8, resource: u16, attributes: &[u8]) -> Vec<u8> {
    let mut message = ((20 + attributes.len()) as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((flags | REQUEST).to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family, 0]);
    message.extend(resource.to_be_bytes());
    message.extend(attributes);
    message
}

/// Most bytes of an attribute's value: the length field has 16 bits and includes the four bytes of the
/// header.
pub(super) const MOST_VALUE: usize = u16::MAX as usize - 4;

/// Bytes of an attribute with a value of that length.
pub(super) const fn attribute_length(value: usize) -> usize {
    (4 + value).next_multiple_of(4)
}

/// An attribute, padded to a multiple of four bytes. Callers ensure that the value has at most [`MOST_VALUE`]
/// bytes.
pub(in crate::netlink) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = ((4 + value.len()) as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// An attribute that consists of attributes.
pub(in crate::netlink) fn nested(kind: u16, values: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NESTED, &values.concat())
}

/// An attribute with a number, big-endian as always in nftables.
pub(in crate::netlink) fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

/// A text with its terminating zero, as the kernel expects it.
pub(in crate::netlink) fn text(words: &str) -> Vec<u8> {
    [words.as_bytes(), &[0]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    /// The kernel repeats it. Needs root, like the agent.
    #[test]
    fn a_message_that_is_as_long_as_a_message_may_be_is_refused_as_what_it_is() {
        const NAME: u16 = 1;
        let table = object(NEW_TABLE, 0, &attribute(NAME, &[b'a'; MOST_VALUE]));
        let sent = within(&Netns::private().unwrap(), || transact("a table", &[table])).unwrap();
        assert!(matches!(sent, Err(Error::Refused(_))), "{sent:?}");
    }
}
