//! Generic netlink: families are identified by name, and the kernel assigns each a number.

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_GENERIC};

use super::nft::{NLMSG_ERROR, REQUEST, attribute, attribute_in, errno, messages, request_of, text};
use super::receive::Receiver;
use super::{Error, Refused};

/// `linux/genetlink.h`: the controller family, and its command and attributes.
const GENL_ID_CTRL: u16 = 16;
const GET_FAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Version of the controller and of all families that are used here.
const VERSION: u8 = 1;
/// Length of `struct genlmsghdr`.
const GENERAL_LEN: usize = 4;

const LOOK_UP: &str = "CTRL_CMD_GETFAMILY";

/// A family, and a socket for requests to it, in the calling thread's namespace.
pub(super) struct Generic {
    socket: RawSocket,
    family: u16,
}

impl Generic {
    /// Opens the family of that name; `None`: the kernel does not have the family, or no generic netlink.
    pub(super) fn open(name: &str) -> Result<Option<Self>, Error> {
        let mut socket = match RawSocket::new(NETLINK_GENERIC) {
            Ok(socket) => socket,
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(None),
            Err(error) => return Err(Error::Open(error)),
        };
        socket.bind_auto().map_err(Error::Open)?;
        let name = attribute(CTRL_ATTR_FAMILY_NAME, &text(name));
        let shown = ask(&socket, LOOK_UP, (GENL_ID_CTRL, GET_FAMILY), &name)?;
        let family = shown.map(|shown| number(LOOK_UP, &shown, CTRL_ATTR_FAMILY_ID)).transpose()?.flatten();
        Ok(family.map(|family| Self { socket, family }))
    }

    /// Sends a command and returns the attributes of the answer; `None`: the device does not exist, or does
    /// not support the command.
    pub(super) fn ask(
        &mut self,
        name: &'static str,
        command: u8,
        attributes: &[u8],
    ) -> Result<Option<Vec<u8>>, Error> {
        ask(&self.socket, name, (self.family, command), attributes)
    }
}

fn ask(
    socket: &RawSocket,
    name: &'static str,
    (family, command): (u16, u8),
    attributes: &[u8],
) -> Result<Option<Vec<u8>>, Error> {
    let request = request_of(family, REQUEST, [command, VERSION, 0, 0], attributes);
    socket.send(&request, 0).map_err(|source| Error::Send(name, source))?;
    answer(name, Receiver::new().answer(socket, name)?)
}

/// Returns the attributes of an answer, as [`Generic::ask`].
pub(super) fn answer(name: &'static str, datagram: &[u8]) -> Result<Option<Vec<u8>>, Error> {
    let malformed = || Error::Malformed { request: name, what: "no message" };
    let answer = messages(datagram).next().ok_or_else(malformed)?;
    if answer.kind == NLMSG_ERROR {
        return match errno(answer.body) {
            // For the family: it does not exist. For a device: it does not exist, or does not support the
            // command.
            libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP => Ok(None),
            errno => Err(Refused { request: name, errno, text: None }.into()),
        };
    }
    Ok(Some(answer.body.get(GENERAL_LEN..).unwrap_or_default().to_vec()))
}

/// Reads a number of 16 bits from attributes, if present.
pub(super) fn number(name: &'static str, attributes: &[u8], wanted: u16) -> Result<Option<u16>, Error> {
    let Some(value) = attribute_in(attributes, wanted) else { return Ok(None) };
    let malformed = |_| Error::Malformed { request: name, what: "a number of another length" };
    let value: [u8; 2] = value.try_into().map_err(malformed)?;
    Ok(Some(u16::from_ne_bytes(value)))
}
