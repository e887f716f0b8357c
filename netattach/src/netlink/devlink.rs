//! devlink: whether a card's embedded switch is in mode switchdev (`Documentation/networking/devlink`, "eswitch").
//!
//! The mode is requested from the card itself, because some drivers (mlx5, ice, netdevsim) report a switch in
//! either mode.

use super::Error;
use super::generic::{Generic, number};
use super::nft::{attribute, text};

const FAMILY: &str = "devlink";
/// `linux/devlink.h`.
const ESWITCH_GET: u8 = 29;
const DEVLINK_ATTR_BUS_NAME: u16 = 1;
const DEVLINK_ATTR_DEV_NAME: u16 = 2;
const DEVLINK_ATTR_ESWITCH_MODE: u16 = 25;
const DEVLINK_ESWITCH_MODE_SWITCHDEV: u16 = 1;

const ASK: &str = "DEVLINK_CMD_ESWITCH_GET";

/// Whether the device of that name on that bus (`pci`, `0000:03:00.0`) is a card in mode switchdev, in which
/// packets that its virtual functions send come in by their representors on the node. Needs `CAP_NET_ADMIN`.
/// The answer is no for a kernel without devlink, a device that devlink does not know, and a driver that has
/// only one mode.
///
/// # Errors
/// The kernel does not answer, or refuses for another reason.
pub fn is_switchdev(bus: &str, device: &str) -> Result<bool, Error> {
    let Some(mut devlink) = Generic::open(FAMILY)? else { return Ok(false) };
    let card =
        [attribute(DEVLINK_ATTR_BUS_NAME, &text(bus)), attribute(DEVLINK_ATTR_DEV_NAME, &text(device))];
    let Some(shown) = devlink.ask(ASK, ESWITCH_GET, &card.concat())? else { return Ok(false) };
    Ok(number(ASK, &shown, DEVLINK_ATTR_ESWITCH_MODE)? == Some(DEVLINK_ESWITCH_MODE_SWITCHDEV))
}

#[cfg(test)]
mod tests {
    use super::super::generic::answer;
    use super::super::nft::NLMSG_ERROR;
    use super::*;

    /// Length of `struct genlmsghdr`.
    const GENERAL_LEN: usize = 4;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut message = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(body);
        message
    }

    fn read(datagram: &[u8]) -> Result<Option<u16>, String> {
        let shown = answer(ASK, datagram).map_err(|error| error.to_string())?.unwrap_or_default();
        number(ASK, &shown, DEVLINK_ATTR_ESWITCH_MODE).map_err(|error| error.to_string())
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
