//! Taps, which the kernel creates by ioctl(2) on an open device file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use netlink_packet_core::{DefaultNla, Nla};
use netlink_packet_route::link::InfoTun;
use rtnetlink::LinkUnspec;

use super::{Error, Handle, LinkState, OpenError};
use crate::netns::{Netns, within};
use crate::spec::{Tap, TapAccess};

/// The device file of the driver `tun`.
const DEVICE: &str = "/dev/net/tun";

/// Frames without a packet information header (`linux/if_tun.h`).
const IFF_NO_PI: u16 = 0x1000;
const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
/// Fail if a link of the name exists; otherwise an existing tap would be opened.
const IFF_TUN_EXCL: u16 = 0x8000;

const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;

/// The part of `struct ifreq` that these requests read: the name and, as the first of a union of 24 bytes, flags.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

impl Handle {
    /// Creates a tap in the namespace, which must be this handle's, down. The tap is made persistent last,
    /// after its settings and its group: until then the tap disappears when this process ends.
    ///
    /// # Errors
    /// [`Error::NoTun`]: the driver is missing, or this process may not use it. [`Error::already_exists`]: a
    /// link of that name exists. [`Error::NoSuchLink`] and [`Error::WrongKind`]: there is no such bridge.
    pub fn create_tap(&mut self, tap: &Tap, netns: &Netns) -> Result<LinkState, OpenError> {
        let bridge = tap.bridge.as_deref().map(|name| self.bridge_of_pod(name)).transpose()?;
        let open = || OpenOptions::new().read(true).write(true).open(DEVICE);
        // The file belongs to the namespace in which it is opened.
        let file = within(netns, open)?.map_err(Error::NoTun)?;
        name(&file, tap)?;
        let made = self.link(&tap.pod_name)?;
        let mut set = LinkUnspec::new_with_index(made.index).link_group(tap.group);
        if let Some(mtu) = tap.mtu {
            set = set.mtu(mtu);
        }
        if let Some(mac) = tap.mac {
            set = set.address(mac.0.to_vec());
        }
        self.change(set)?;
        if let Some(bridge) = bridge {
            self.set_controller(made.index, bridge)?;
        }
        if let Some(owner) = tap.access.owner {
            set_number(&file, libc::TUNSETOWNER, owner, "TUNSETOWNER")?;
        }
        if let Some(group) = tap.access.group {
            set_number(&file, libc::TUNSETGROUP, group, "TUNSETGROUP")?;
        }
        Ok(self.keep_tap(&file, made.index)?)
    }

    /// Makes the tap of an open file persistent; `index` is the index of its link.
    fn keep_tap(&mut self, file: &File, index: u32) -> Result<LinkState, Error> {
        let shown = self.link_by_index(index)?;
        // The pod may have renamed the tap and given its name to another link before the index was
        // determined.
        if name_of(file)? != shown.name {
            return Err(Error::Vanished(shown.name));
        }
        set_number(file, libc::TUNSETPERSIST, 1, "TUNSETPERSIST")?;
        crate::crash_point!("ioctl", "TUNSETPERSIST");
        Ok(shown)
    }

    fn bridge_of_pod(&mut self, name: &str) -> Result<u32, Error> {
        let link = self.link(name)?;
        if link.kind != "bridge" {
            let actual =
                if link.kind.is_empty() { "a device".to_owned() } else { format!("a {}", link.kind) };
            return Err(Error::WrongKind { name: link.name, wanted: "a bridge", actual });
        }
        Ok(link.index)
    }
}

/// Makes a tap of that name out of an open device file.
fn name(file: &File, tap: &Tap) -> Result<(), Error> {
    let mut request =
        Request { name: [0; libc::IFNAMSIZ], flags: IFF_TAP | IFF_NO_PI | IFF_TUN_EXCL, rest: [0; 22] };
    if tap.access.multi_queue {
        request.flags |= IFF_MULTI_QUEUE;
    }
    // The last byte stays 0. Longer names were refused when the request was read.
    let length = tap.pod_name.len().min(libc::IFNAMSIZ - 1);
    request.name[..length].copy_from_slice(&tap.pod_name.as_bytes()[..length]);
    // SAFETY: the kernel reads and writes a `struct ifreq`, of which `request` has the layout and the size, 40 bytes.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    answered(done, "TUNSETIFF")
}

/// The current name of the tap of an open file.
fn name_of(file: &File) -> Result<String, Error> {
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags: 0, rest: [0; 22] };
    // SAFETY: the kernel writes a `struct ifreq`, of which `request` has the layout and the size, 40 bytes.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    answered(done, "TUNGETIFF")?;
    let end = request.name.iter().position(|byte| *byte == 0).unwrap_or(request.name.len());
    Ok(String::from_utf8_lossy(&request.name[..end]).into_owned())
}

fn set_number(file: &File, request: libc::Ioctl, number: u32, what: &'static str) -> Result<(), Error> {
    // SAFETY: these requests take a number and touch no memory of the process.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, libc::c_ulong::from(number)) };
    answered(done, what)
}

fn answered(done: libc::c_int, request: &'static str) -> Result<(), Error> {
    if done >= 0 {
        return Ok(());
    }
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or_default();
    // The kernel returns the same errno for a taken name and for a device in use.
    let is_taken = request == "TUNSETIFF" && errno == libc::EBUSY;
    let errno = if is_taken { libc::EEXIST } else { errno };
    Err(super::Refused { request, errno, text: None }.into())
}

/// The access settings of a tap; `None` for a tun device, which is not a tap.
pub(super) fn observed_access(data: &[InfoTun]) -> Option<TapAccess> {
    let value = |wanted: u16| {
        data.iter().find_map(|datum| match datum {
            InfoTun::Other(nla) if nla.kind() == wanted => Some(bytes(nla)),
            _ => None,
        })
    };
    let number = |wanted: u16| Some(u32::from_ne_bytes(value(wanted)?.try_into().ok()?));
    let byte = |wanted: u16| value(wanted).and_then(|bytes| bytes.first().copied());
    (byte(IFLA_TUN_TYPE) == Some(IFF_TAP as u8)).then(|| TapAccess {
        owner: number(IFLA_TUN_OWNER),
        group: number(IFLA_TUN_GROUP),
        multi_queue: byte(IFLA_TUN_MULTI_QUEUE) == Some(1),
    })
}

fn bytes(nla: &DefaultNla) -> Vec<u8> {
    let mut bytes = vec![0; nla.value_len()];
    nla.emit_value(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_tap_is_not_taken_for_the_link_that_has_its_name() {
        let netns = Netns::private().unwrap();
        let mut pod = Handle::open_in(&netns).unwrap();
        let tap = Tap {
            pod_name: "net1".into(),
            mtu: None,
            mac: None,
            group: 0,
            access: TapAccess::default(),
            bridge: None,
        };
        let opened = || {
            let open = || OpenOptions::new().read(true).write(true).open(DEVICE);
            let file = within(&netns, open).unwrap().unwrap();
            name(&file, &tap).unwrap();
            file
        };
        let first = opened();
        let index = pod.link("net1").unwrap().index;
        let renamed = LinkUnspec::new_with_index(index).name("other".to_owned());
        pod.change(renamed).unwrap();
        let second = opened();
        let named = pod.link("net1").unwrap().index;
        assert!(matches!(pod.keep_tap(&first, named), Err(Error::Vanished(name)) if name == "net1"));
        assert_eq!(pod.keep_tap(&second, named).unwrap().index, named);
        drop((first, second));
        assert_eq!(pod.find_link("other").unwrap(), None);
        assert_eq!(pod.find_link("net1").unwrap().map(|link| link.index), Some(named));
    }
}
