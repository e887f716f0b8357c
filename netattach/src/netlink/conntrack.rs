//! Conntrack entries: deletes those that lead to a wrong destination.
//!
//! UDP only: a UDP sender keeps its entry alive for as long as it sends, wherever the entry leads.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::Error;
use super::nft::{
    Family, Lent, NLMSG_ERROR, REQUEST, attribute, attributes_of, dump, messages, refused, request,
};
use super::receive::Receiver;

const LIST: &str = "IPCTNL_MSG_CT_GET";
const FORGET: &str = "IPCTNL_MSG_CT_DELETE";
/// `NFNL_SUBSYS_CTNETLINK` and the messages within it.
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
const ACK: u16 = 0x4;
/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_ID`, `CTA_ZONE`.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const UDP: u8 = 17;

/// A tracked connection of UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Destination of its first packet.
    pub to: SocketAddr,
    /// Source of the answers; differs from `to` if the destination was translated.
    pub answers: SocketAddr,
}

/// Deletes the UDP connections for which `stale` holds; returns their number. Dumps all conntrack entries.
///
/// # Errors
/// The kernel does not answer.
pub fn forget_udp(stale: &mut dyn FnMut(&Connection) -> bool) -> Result<usize, Error> {
    let mut found = Vec::new();
    // Both families at once, because the kernel walks its whole table for each dump. Changes during the dump
    // do not matter: a new connection already leads to the right destination.
    dump(LIST, [GET, NEW], Family::Any, &[], &mut |tracked| {
        if let Some(connection) = read(tracked).filter(|connection| stale(connection)) {
            let family = if connection.to.is_ipv4() { Family::Ip4 } else { Family::Ip6 };
            found.push((family, name_of(tracked)));
        }
    })?;
    if found.is_empty() {
        return Ok(0);
    }
    let lent = Lent::take()?;
    let mut receiver = Receiver::new();
    for (family, attributes) in &found {
        let request = request(DELETE, REQUEST | ACK, *family, attributes);
        lent.socket.send(&request, 0).map_err(|source| Error::Send(FORGET, source))?;
        let answers = messages(receiver.answer(&lent.socket, FORGET)?);
        for answer in answers.filter(|answer| answer.kind == NLMSG_ERROR) {
            // A connection that has ended meanwhile is not an error.
            refused_unless_done(answer.body)?;
        }
    }
    lent.give_back();
    Ok(found.len())
}

fn refused_unless_done(body: &[u8]) -> Result<(), Error> {
    if body.get(..4) == Some(&[0; 4]) { Ok(()) } else { refused(FORGET, body) }
}

/// The attributes that identify a connection to the kernel.
fn name_of(tracked: &[u8]) -> Vec<u8> {
    const NESTED: u16 = 0x8000;
    let wanted = attributes_of(tracked).filter(|(kind, _)| [ORIGINAL, ID, ZONE].contains(kind));
    wanted
        .flat_map(|(kind, value)| attribute(if kind == ORIGINAL { kind | NESTED } else { kind }, value))
        .collect()
}

fn read(tracked: &[u8]) -> Option<Connection> {
    let tuple = |wanted| attributes_of(tracked).find(|(kind, _)| *kind == wanted).map(|(_, tuple)| tuple);
    let (original, reply) = (End::read(tuple(ORIGINAL)?)?, End::read(tuple(REPLY)?)?);
    (original.protocol == UDP).then_some(Connection { to: original.destination, answers: reply.source })
}

/// Both endpoints of one direction.
struct End {
    protocol: u8,
    source: SocketAddr,
    destination: SocketAddr,
}

impl End {
    fn read(tuple: &[u8]) -> Option<Self> {
        let part = |wanted| attributes_of(tuple).find(|(kind, _)| *kind == wanted).map(|(_, part)| part);
        let (addresses, ports) = (part(1)?, part(2)?);
        let address = |kinds: [u16; 2]| {
            let (_, bytes) = attributes_of(addresses).find(|(kind, _)| kinds.contains(kind))?;
            match bytes.len() {
                4 => Some(IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?))),
                16 => Some(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?))),
                _ => None,
            }
        };
        let number = |wanted| attributes_of(ports).find(|(kind, _)| *kind == wanted).map(|(_, it)| it);
        let port = |wanted| Some(u16::from_be_bytes(number(wanted)?.try_into().ok()?));
        Some(Self {
            protocol: *number(1)?.first()?,
            source: SocketAddr::new(address([1, 3])?, port(2)?),
            destination: SocketAddr::new(address([2, 4])?, port(3)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(kind: u16, source: [u8; 4], destination: [u8; 4], protocol: u8, ports: [u16; 2]) -> Vec<u8> {
        let addresses = [attribute(1, &source), attribute(2, &destination)].concat();
        let ports = [
            attribute(1, &[protocol]),
            attribute(2, &ports[0].to_be_bytes()),
            attribute(3, &ports[1].to_be_bytes()),
        ];
        attribute(kind, &[attribute(1, &addresses), attribute(2, &ports.concat())].concat())
    }

    #[test]
    fn a_connection_is_read_by_both_of_its_directions() {
        let tracked = |protocol| {
            [
                tuple(ORIGINAL, [192, 0, 2, 2], [192, 0, 2, 1], protocol, [4000, 53]),
                tuple(REPLY, [10, 1, 0, 2], [192, 0, 2, 2], protocol, [5353, 4000]),
                attribute(ID, &[1, 2, 3, 4]),
            ]
            .concat()
        };
        let wanted =
            Connection { to: "192.0.2.1:53".parse().unwrap(), answers: "10.1.0.2:5353".parse().unwrap() };
        assert_eq!(read(&tracked(UDP)), Some(wanted));
        assert_eq!(read(&tracked(6)), None);
        let name = name_of(&tracked(UDP));
        let kinds: Vec<u16> = attributes_of(&name).map(|(kind, _)| kind).collect();
        assert_eq!(kinds, [ORIGINAL, ID]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            read(&bytes);
            name_of(&bytes);
        }
    }
}
