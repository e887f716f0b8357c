//! devlink: whether a card's embedded switch is in mode switchdev (`Documentation/networking/devlink`, "eswitch").
//!
//! Asked of the card itself: that a card has a switch is shown by some drivers (mlx5, ice, netdevsim) in either mode.

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_GENERIC};

use super::nft::{NLMSG_ERROR, REQUEST, attribute, attribute_in, errno, messages, receive, request_of, text};
use super::{Error, Refused};

/// `linux/genetlink.h`: the family of families, and what it is asked.
const GENL_ID_CTRL: u16 = 16;
const GET_FAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const FAMILY: &str = "devlink";
/// `linux/devlink.h`.
const ESWITCH_GET: u8 = 29;
const DEVLINK_ATTR_BUS_NAME: u16 = 1;
const DEVLINK_ATTR_DEV_NAME: u16 = 2;
const DEVLINK_ATTR_ESWITCH_MODE: u16 = 25;
const DEVLINK_ESWITCH_MODE_SWITCHDEV: u16 = 1;
/// Length of `struct genlmsghdr`.
const GENERAL_LEN: usize = 4;
/// The description of a family is the longest answer: with its commands some 2 KiB.
const BUFFER: usize = 32 * 1024;

const LOOK_UP: &str = "CTRL_CMD_GETFAMILY";
const ASK: &str = "DEVLINK_CMD_ESWITCH_GET";

/// Whether the device of that name on that bus (`pci`, `0000:03:00.0`) is a card in mode switchdev: what its virtual
/// functions send comes in by their representors on the node. Needs `CAP_NET_ADMIN`. A kernel without devlink, a device that
/// it does not know, and a driver that has but one mode are none.
///
/// # Errors
/// The kernel does not answer, or refuses for another reason.
pub fn is_switchdev(bus: &str, device: &str) -> Result<bool, Error> {
    let mut socket = match RawSocket::new(NETLINK_GENERIC) {
        Ok(socket) => socket,
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(false),
        Err(error) => return Err(Error::Open(error)),
    };
    socket.bind_auto().map_err(Error::Open)?;
    let name = attribute(CTRL_ATTR_FAMILY_NAME, &text(FAMILY));
    let family = ask(&mut socket, LOOK_UP, (GENL_ID_CTRL, GET_FAMILY, 1), &name, CTRL_ATTR_FAMILY_ID)?;
    let Some(family) = family else { return Ok(false) };
    let card =
        [attribute(DEVLINK_ATTR_BUS_NAME, &text(bus)), attribute(DEVLINK_ATTR_DEV_NAME, &text(device))];
    let mode = ask(&mut socket, ASK, (family, ESWITCH_GET, 1), &card.concat(), DEVLINK_ATTR_ESWITCH_MODE)?;
    Ok(mode == Some(DEVLINK_ESWITCH_MODE_SWITCHDEV))
}

/// A number of 16 bits that the answer has; `None`: there is no such thing, or nobody who knows.
fn ask(
    socket: &mut RawSocket,
    name: &'static str,
    (family, command, version): (u16, u8, u8),
    attributes: &[u8],
    wanted: u16,
) -> Result<Option<u16>, Error> {
    let request = request_of(family, REQUEST, [command, version, 0, 0], attributes);
    socket.send(&request, 0).map_err(|source| Error::Send(name, source))?;
    let mut buffer = vec![0; BUFFER];
    let length = receive(socket, name, &mut buffer)?;
    answer(name, &buffer[..length], wanted)
}

fn answer(name: &'static str, datagram: &[u8], wanted: u16) -> Result<Option<u16>, Error> {
    let malformed = |what| Error::Malformed { request: name, what };
    let answer = messages(datagram).next().ok_or_else(|| malformed("no message"))?;
    if answer.kind == NLMSG_ERROR {
        return match errno(answer.body) {
            // Of the family: there is none. Of the device: it has no devlink, or no embedded switch.
            libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP => Ok(None),
            errno => Err(Refused { request: name, errno, text: None }.into()),
        };
    }
    let attributes = answer.body.get(GENERAL_LEN..).unwrap_or_default();
    let Some(value) = attribute_in(attributes, wanted) else { return Ok(None) };
    let value = value.try_into().map_err(|_| malformed("a number of another length"))?;
    Ok(Some(u16::from_ne_bytes(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut message = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(body);
        message
    }

    fn read(datagram: &[u8]) -> Result<Option<u16>, String> {
        answer(ASK, datagram, DEVLINK_ATTR_ESWITCH_MODE).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_has_the_mode_or_says_that_there_is_none() {
        let mode = |value: &[u8]| {
            let card = attribute(DEVLINK_ATTR_DEV_NAME, &text("0000:03:00.0"));
            let body = [vec![0; GENERAL_LEN], card, attribute(DEVLINK_ATTR_ESWITCH_MODE, value)];
            read(&message(27, &body.concat()))
        };
        assert_eq!(mode(&1_u16.to_ne_bytes()), Ok(Some(1)));
        assert_eq!(mode(&0_u16.to_ne_bytes()), Ok(Some(0)));
        let malformed = "the answer to DEVLINK_CMD_ESWITCH_GET is malformed: ";
        assert_eq!(mode(&[1]), Err(format!("{malformed}a number of another length")));
        assert_eq!(read(&message(27, &[0; GENERAL_LEN])), Ok(None));
        assert_eq!(read(&[]), Err(format!("{malformed}no message")));
        let refused = |errno: i32| {
            read(&message(NLMSG_ERROR, &[(-errno).to_ne_bytes().to_vec(), vec![0; 16]].concat()))
        };
        for nobody in [libc::ENOENT, libc::ENODEV, libc::EOPNOTSUPP] {
            assert_eq!(refused(nobody), Ok(None));
        }
        assert!(refused(libc::EPERM).unwrap_err().starts_with("DEVLINK_CMD_ESWITCH_GET: "));
    }

    /// Needs root, like the agent.
    #[test]
    fn a_device_that_is_not_there_is_in_no_mode() {
        assert!(!is_switchdev("pci", "ffff:ff:1f.7").unwrap());
    }
}
