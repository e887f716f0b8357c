//! The least that the kernel takes for a bridge port and two macvlans: in this process, and in one spawned for it.
//!
//! Every link is made where it belongs, under its final name, in two datagrams: links from the node, addresses and
//! the default route from inside the pod. All links of a pod are in one group and go in one request.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::Contender;
use crate::bench::netlink::{self, Netlink};
use crate::bench::pods::{INTERFACES, Node, PARENT_INDEX, Pod};
use crate::screen::Progress;
use crate::{child, dist};

pub(super) const IN_PROCESS: &str = "netlink, in process";
pub(super) const SPAWNED: &str = "netlink, one process";

const BRIDGE: &str = "floor0";
const BRIDGE_INDEX: u32 = 20;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);
const PREFIX: u8 = 16;
/// Any number but 0, the group of everything else.
const GROUP: u32 = 7;
/// Indices in the pod are chosen, so that nothing has to be asked back.
const FIRST_POD_INDEX: u32 = 10;
const FIRST_NODE_INDEX: u32 = 1000;

/// The work itself, on the calling thread.
pub(super) struct InProcess {
    home: File,
}

/// The same work in one process started for each request; no shell, linked statically.
pub(super) struct Spawned {
    executable: PathBuf,
}

impl InProcess {
    pub(super) fn new(node: &Node) -> anyhow::Result<Self> {
        let home = node.namespace().try_clone_to_owned().context("keep the node's namespace")?;
        Ok(Self { home: home.into() })
    }
}

impl Contender for InProcess {
    fn name(&self) -> &'static str {
        IN_PROCESS
    }

    fn describe(&self) -> String {
        "two datagrams to the kernel for ADD, one for DEL; no process, no lease, no record".to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        add(pod.namespace(), self.home.as_fd(), pod.number, [0, 1, 2].map(|network| pod.address(network)))
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        del(pod.namespace(), self.home.as_fd())
    }
}

impl Spawned {
    pub(super) fn new(progress: &Progress) -> anyhow::Result<Self> {
        let built = dist::static_executables("xtask", &["floor"], progress)?;
        let executable = built.get("floor").context("the floor was not built")?.clone();
        Ok(Self { executable })
    }

    fn run(&self, verb: &str, pod: &Pod) -> anyhow::Result<()> {
        let mut command = Command::new(&self.executable);
        command.arg(verb).arg(pod.path()).arg(pod.number.to_string());
        command.args([0, 1, 2].map(|network| pod.address(network).to_string()));
        child::stdout_of(&mut command).map(drop)
    }
}

impl Contender for Spawned {
    fn name(&self) -> &'static str {
        SPAWNED
    }

    fn describe(&self) -> String {
        "the same, in one static process started for each request".to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        self.run("add", pod)
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        self.run("del", pod)
    }
}

/// Makes the bridge that both floors attach to, in the calling thread's namespace.
pub(super) fn make_bridge() -> anyhow::Result<()> {
    Netlink::open()?
        .send(vec![netlink::bridge(BRIDGE, BRIDGE_INDEX), netlink::address(BRIDGE_INDEX, GATEWAY, PREFIX)])
        .context("make the floor's bridge")
}

/// The whole of the spawned process: `add|del NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS`.
///
/// # Errors
/// Wrong arguments, or what the kernel refused.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(arguments.len() == 6, "usage: floor add|del NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS");
    let pod = File::open(Path::new(&arguments[1])).context("open the pod's namespace")?;
    let home = File::open("/proc/thread-self/ns/net").context("open the node's namespace")?;
    let number = arguments[2].parse().context("read the number")?;
    let address = |index: usize| arguments[index].parse::<Ipv4Addr>().context("read an address");
    match arguments[0].as_str() {
        "add" => add(pod.as_fd(), home.as_fd(), number, [address(3)?, address(4)?, address(5)?]),
        _ => del(pod.as_fd(), home.as_fd()),
    }
}

fn add(
    pod: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    number: u16,
    addresses: [Ipv4Addr; 3],
) -> anyhow::Result<()> {
    let [eth0, net1, net2] = INTERFACES;
    let [first, second, third] = [0, 1, 2].map(|offset| FIRST_POD_INDEX + offset);
    let near = format!("floor-{number}");
    Netlink::open()?
        .send(vec![
            netlink::veth(
                (&near, FIRST_NODE_INDEX + u32::from(number)),
                (eth0, first),
                Some(BRIDGE_INDEX),
                pod,
                GROUP,
            ),
            netlink::macvlan(net1, second, PARENT_INDEX, pod, GROUP),
            netlink::macvlan(net2, third, PARENT_INDEX, pod, GROUP),
        ])
        .context("create the links")?;
    Netlink::open_in(pod, home)?
        .send(vec![
            netlink::address(first, addresses[0], PREFIX),
            // The kernel cannot create the far end of a veth up.
            netlink::set_up(first),
            netlink::address(second, addresses[1], PREFIX),
            netlink::address(third, addresses[2], PREFIX),
            netlink::default_route(GATEWAY),
        ])
        .context("give the pod its addresses")
}

fn del(pod: BorrowedFd<'_>, home: BorrowedFd<'_>) -> anyhow::Result<()> {
    Netlink::open_in(pod, home)?.send(vec![netlink::delete_group(GROUP)]).context("delete the links")
}
