//! The kernel's minimum for each kind of interface: the objects that the plugin creates, with every number chosen
//! before.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::Context;
use netlink_packet_route::RouteNetlinkMessage;

use super::kind::{Kind, SIDES, Side, TAG};
use super::{GIVEN, OTHER_PARENT_INDEX};
use crate::attach::Contender;
use crate::attach::floor::{BRIDGE_INDEX, FIRST_NODE_INDEX, FIRST_POD_INDEX, GATEWAY, GROUP, PREFIX};
use crate::netlink::interfaces::{self, Driver};
use crate::netlink::{self, Netlink, enter};
use crate::pods::{INTERFACES, Node, PARENT_INDEX, Pod};

const NAME: &str = INTERFACES[0];
const INDEX: u32 = FIRST_POD_INDEX;
/// The node's end of a veth.
const NEAR: (&str, u32) = ("floor-near", FIRST_NODE_INDEX);
/// The gateway of `veth`.
const LINK_GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const LOOPBACK_INDEX: u32 = 1;

/// Flags of `TUNSETIFF` (`linux/if_tun.h`): a tap, without a header before each frame.
const TAP: u16 = 0x0002 | 0x1000;

/// The floor of a kind, on the calling thread.
pub(super) struct Floor {
    kind: Kind,
    home: File,
}

impl Floor {
    pub(super) fn new(kind: Kind, node: &Node) -> anyhow::Result<Self> {
        let home = node.namespace().try_clone_to_owned().context("keep the node's namespace")?;
        Ok(Self { kind, home: home.into() })
    }

    fn send_from_pod(&self, pod: &Pod, requests: Vec<RouteNetlinkMessage>) -> anyhow::Result<()> {
        Netlink::open_in(pod.namespace(), self.home.as_fd())?.send(requests)
    }

    /// Returns the requests sent from the node, and from the pod.
    fn requests(&self, pod: &Pod) -> [Vec<RouteNetlinkMessage>; 2] {
        let inside = pod.namespace();
        // A masqueraded bridge is one as any other here.
        let network = if self.kind == Kind::Masqueraded { Kind::Bridge } else { self.kind };
        let address = pod.address(network as u8);
        let [a, b, ..] = address.octets();
        let (subnet, gateway) = (Ipv4Addr::new(a, b, 0, 0), Ipv4Addr::new(a, b, 0, 1));
        let veth = |bridge| netlink::veth(NEAR, (NAME, INDEX), bridge, inside, GROUP);
        let made = |driver, parent| interfaces::made_in(driver, (NAME, INDEX), parent, inside, GROUP);
        let own = netlink::address(INDEX, address, PREFIX);
        let up = netlink::set_up(INDEX);
        // To the pod, and from its gateway.
        let near = |gateway| -> Vec<RouteNetlinkMessage> {
            let gateway = netlink::address(NEAR.1, gateway, 32);
            [veth(None), gateway, interfaces::route(NEAR.1, (address, 32), None)].into()
        };
        match self.kind {
            Kind::Bridge | Kind::Masqueraded => {
                [vec![veth(Some(BRIDGE_INDEX))], vec![own, up, netlink::default_route(GATEWAY)]]
            }
            Kind::Ptp => {
                let routes = [
                    interfaces::route(INDEX, (gateway, 32), None),
                    interfaces::route(INDEX, (subnet, PREFIX), Some(gateway)),
                ];
                let own = interfaces::address_alone(INDEX, address, PREFIX);
                [near(gateway), [up, own].into_iter().chain(routes).collect()]
            }
            Kind::Veth => {
                let own = netlink::address(INDEX, address, 32);
                let route = interfaces::route(INDEX, (subnet, PREFIX), Some(LINK_GATEWAY));
                [near(LINK_GATEWAY), vec![up, own, route]]
            }
            Kind::Macvlan => [vec![made(Driver::Macvlan, Some(PARENT_INDEX))], vec![own]],
            Kind::Macvtap => [vec![made(Driver::Macvtap, Some(PARENT_INDEX))], vec![own]],
            Kind::Ipvlan => [vec![made(Driver::Ipvlan, Some(OTHER_PARENT_INDEX))], vec![own]],
            Kind::Vlan => [vec![made(Driver::Vlan(TAG), Some(OTHER_PARENT_INDEX))], vec![own]],
            Kind::Dummy => [vec![made(Driver::Dummy, None)], vec![own]],
            Kind::Tap => [Vec::new(), vec![own, up]],
            Kind::HostDevice => {
                // The device keeps its index.
                let device = given(Side::Floor);
                let settings = vec![netlink::address(device, address, PREFIX), netlink::set_up(device)];
                [vec![interfaces::moved(device, NAME, inside)], settings]
            }
            Kind::Loopback => [Vec::new(), vec![netlink::set_up(LOOPBACK_INDEX)]],
        }
    }
}

impl Contender for Floor {
    fn name(&self) -> &'static str {
        Side::Floor.name()
    }

    fn describe(&self) -> String {
        Side::Floor.description().to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        let [from_node, from_pod] = self.requests(pod);
        if self.kind == Kind::Tap {
            make_tap(pod, &self.home)?;
        }
        if !from_node.is_empty() {
            Netlink::open()?.send(from_node).context("make the link")?;
        }
        self.send_from_pod(pod, from_pod).context("set the link up")
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        let request = match self.kind {
            Kind::Loopback => return Ok(()),
            Kind::HostDevice => {
                interfaces::moved(given(Side::Floor), &Side::Floor.device(), self.home.as_fd())
            }
            _ => interfaces::deleted(INDEX),
        };
        self.send_from_pod(pod, vec![request])
    }
}

/// Creates the permanent devices on the node: the parent of ipvlans, a device for the pods of each side, and the
/// devices that connect them.
pub(super) fn prepare(other_parent: &str) -> anyhow::Result<()> {
    crate::attach::floor::make_bridge()?;
    let wire = OTHER_PARENT_INDEX + 1;
    let mut requests =
        vec![netlink::pair((other_parent, OTHER_PARENT_INDEX), ("wire1", wire)), netlink::set_up(wire)];
    for side in SIDES {
        let device = given(side);
        let far = device + SIDES.len() as u32;
        let name = format!("far{}", side as u8);
        requests.push(netlink::pair((&side.device(), device), (&name, far)));
        requests.push(netlink::set_up(far));
    }
    Netlink::open()?.send(requests).context("prepare the node for each kind")
}

/// Prepares a kind before each ADD, for any side: a device that is up, and a pod whose `lo` is down.
pub(super) fn before(kind: Kind, side: Side, pod: &Pod, node: &Node) -> anyhow::Result<()> {
    match kind {
        Kind::HostDevice => Netlink::open()?.send(vec![netlink::set_up(given(side))]),
        Kind::Loopback => Netlink::open_in(pod.namespace(), node.namespace())?
            .send(vec![interfaces::set_down(LOOPBACK_INDEX)]),
        _ => Ok(()),
    }
    .with_context(|| format!("prepare {} for {}", kind.name(), side.name()))
}

/// Whether a kind failed for want of its driver.
pub(super) fn is_without_driver(kind: Kind, error: &anyhow::Error) -> bool {
    let code = error.chain().find_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error());
    match kind {
        // There is no device file, or no driver behind it.
        Kind::Tap => matches!(code, Some(libc::ENOENT | libc::ENODEV)),
        _ => code == Some(libc::EOPNOTSUPP),
    }
}

/// Returns the index of the device that a side's pods get.
fn given(side: Side) -> u32 {
    GIVEN + side as u32
}

/// Makes a tap with the index and the name of the pod's interface, which stays.
fn make_tap(pod: &Pod, home: &File) -> anyhow::Result<()> {
    const KEEP: libc::c_ulong = 1;
    // The file belongs to the namespace in which it is opened.
    enter(pod.namespace())?;
    let opened = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    enter(home.as_fd())?;
    let file = opened.context("open /dev/net/tun")?;
    let index: libc::c_int = INDEX.cast_signed();
    let mut request = [0_u8; size_of::<libc::ifreq>()];
    request[..NAME.len()].copy_from_slice(NAME.as_bytes());
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&TAP.to_ne_bytes());
    // SAFETY: the first request reads a number, the second reads and writes a `struct ifreq`, of which `request` has the
    // size and the layout (the name, then flags), and both live through the calls. The third takes its argument by value.
    let done = unsafe {
        let file = file.as_raw_fd();
        libc::ioctl(file, libc::TUNSETIFINDEX, &raw const index) == 0
            && libc::ioctl(file, libc::TUNSETIFF, request.as_mut_ptr()) == 0
            && libc::ioctl(file, libc::TUNSETPERSIST, KEEP) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()).context("make a tap") }
}
