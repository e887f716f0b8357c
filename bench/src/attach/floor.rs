//! The minimum time in the kernel for a bridge port and two macvlans: in this process, in one spawned for it, and in
//! one that also attaches BPF programs where netattach does.
//!
//! Every link is made in its final namespace, under its final name, in two datagrams: links from the node, addresses
//! and the default route from inside the pod. All links of a pod are in one group and go in one request.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, ensure};
use rustix::io::FdFlags;
use xtask::progress::Progress;
use xtask::{child, dist};

use super::{Contender, pinned};
use crate::netlink::{self, Hook, Netlink};
use crate::pods::{INTERFACES, Node, PARENT_INDEX, Pod};

pub(super) const IN_PROCESS: &str = "netlink, in process";
pub(super) const SPAWNED: &str = "netlink, one process";
pub(super) const WITH_PROGRAMS: &str = "the same, with programs";

const BRIDGE: &str = "floor0";
const BRIDGE_INDEX: u32 = 20;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);
const PREFIX: u8 = 16;
/// Any number but 0, the default group.
const GROUP: u32 = 7;
/// Indices in the pod are chosen, so that they need not be queried.
const FIRST_POD_INDEX: u32 = 10;
const FIRST_NODE_INDEX: u32 = 1000;

/// The work itself, on the calling thread.
pub(super) struct InProcess {
    home: File,
}

/// The same work in one process started for each request; no shell, linked statically.
pub(crate) struct Spawned {
    executable: PathBuf,
    /// The directory of the pinned program, if programs are attached too.
    pins: Option<PathBuf>,
    /// That program, for the processes to inherit: opening it is not part of their work.
    program: OnceLock<OwnedFd>,
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
    pub(crate) fn new(progress: &Progress) -> anyhow::Result<Self> {
        let built = dist::static_executables("netattach-bench", &["floor"], progress)?;
        let executable = built.get("floor").context("the floor was not built")?.clone();
        Ok(Self { executable, pins: None, program: OnceLock::new() })
    }

    /// A floor that attaches one of the programs that an agent has pinned below `pins` by the time of the first
    /// request.
    pub(super) fn with_programs(pins: PathBuf, progress: &Progress) -> anyhow::Result<Self> {
        Ok(Self { pins: Some(pins), ..Self::new(progress)? })
    }

    fn run(&self, verb: &str, pod: &Pod) -> anyhow::Result<()> {
        let mut command = Command::new(&self.executable);
        command.arg(verb).arg(pod.path()).arg(pod.number.to_string());
        command.args([0, 1, 2].map(|network| pod.address(network).to_string()));
        if let Some(pins) = &self.pins {
            let program = match self.program.get() {
                Some(program) => program,
                None => {
                    let opened = pinned::open_program(pins)?;
                    // Kept open across exec(2), for every process that is started from here on.
                    rustix::io::fcntl_setfd(&opened, FdFlags::empty()).context("share the program")?;
                    self.program.get_or_init(|| opened)
                }
            };
            command.arg(program.as_raw_fd().to_string());
        }
        child::stdout_of(&mut command).map(drop)
    }
}

impl Contender for Spawned {
    fn name(&self) -> &'static str {
        if self.pins.is_some() { WITH_PROGRAMS } else { SPAWNED }
    }

    fn describe(&self) -> String {
        match self.pins {
            None => "the same, in one static process started for each request",
            Some(_) => {
                "and BPF programs on the hooks where netattach has its own: all of netattach's netlink work"
            }
        }
        .to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        self.run("add", pod)
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        self.run("del", pod)
    }
}

/// Makes the bridge of both floors, in the calling thread's namespace.
pub(crate) fn make_bridge() -> anyhow::Result<()> {
    Netlink::open()?
        .send(vec![netlink::bridge(BRIDGE, BRIDGE_INDEX), netlink::address(BRIDGE_INDEX, GATEWAY, PREFIX)])
        .context("make the floor's bridge")
}

/// The whole of the spawned process: `add|del NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS [PROGRAM]`, the last being the
/// number of an inherited descriptor.
///
/// # Errors
/// Wrong arguments, or a request refused by the kernel.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(
        matches!(arguments.len(), 6 | 7),
        "usage: floor add|del NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS [PROGRAM]"
    );
    let pod = File::open(Path::new(&arguments[1])).context("open the pod's namespace")?;
    let home = File::open("/proc/thread-self/ns/net").context("open the node's namespace")?;
    let number = arguments[2].parse().context("read the number")?;
    let address = |index: usize| arguments[index].parse::<Ipv4Addr>().context("read an address");
    let program = match arguments.get(6) {
        Some(descriptor) => Some(inherited(descriptor)?),
        None => None,
    };
    let program = program.as_ref().map(AsFd::as_fd);
    match arguments[0].as_str() {
        "add" => {
            let addresses = [address(3)?, address(4)?, address(5)?];
            add_with(pod.as_fd(), home.as_fd(), number, addresses, program)
        }
        _ => {
            del(pod.as_fd(), home.as_fd())?;
            if program.is_some() {
                // Another pod of a burst may have been quicker.
                let _ = Netlink::open()?.send(vec![netlink::no_clsact(PARENT_INDEX)]);
            }
            Ok(())
        }
    }
}

/// Takes ownership of a descriptor that the parent left open.
fn inherited(descriptor: &str) -> anyhow::Result<File> {
    let number: u32 = descriptor.parse().context("read the number of the program's descriptor")?;
    // A program cannot be opened by this path, but the path shows whether the descriptor exists.
    ensure!(Path::new(&format!("/proc/self/fd/{number}")).exists(), "descriptor {number} is not open");
    // SAFETY: the descriptor is open, and has no other owner in this process: it was inherited.
    Ok(unsafe { File::from_raw_fd(number.cast_signed()) })
}

fn add(
    pod: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    number: u16,
    addresses: [Ipv4Addr; 3],
) -> anyhow::Result<()> {
    add_with(pod, home, number, addresses, None)
}

fn add_with(
    pod: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    number: u16,
    addresses: [Ipv4Addr; 3],
    program: Option<BorrowedFd<'_>>,
) -> anyhow::Result<()> {
    let [eth0, net1, net2] = INTERFACES;
    let [first, second, third] = [0, 1, 2].map(|offset| FIRST_POD_INDEX + offset);
    let near = format!("floor-{number}");
    let near_index = FIRST_NODE_INDEX + u32::from(number);
    let mut links = vec![
        netlink::veth((&near, near_index), (eth0, first), Some(BRIDGE_INDEX), pod, GROUP),
        netlink::macvlan(net1, second, PARENT_INDEX, pod, GROUP),
        netlink::macvlan(net2, third, PARENT_INDEX, pod, GROUP),
    ];
    let mut settings = vec![
        netlink::address(first, addresses[0], PREFIX),
        // The kernel cannot create the far end of a veth up.
        netlink::set_up(first),
        netlink::address(second, addresses[1], PREFIX),
        netlink::address(third, addresses[2], PREFIX),
        netlink::default_route(GATEWAY),
    ];
    let mut node = Netlink::open()?;
    if let Some(program) = program {
        let on = |index, hook, number| netlink::program(index, hook, number, program);
        links.extend([
            netlink::clsact(near_index),
            on(near_index, Hook::Ingress, 1),
            on(near_index, Hook::Egress, 1),
        ]);
        for macvlan in [second, third] {
            settings.push(netlink::clsact(macvlan));
            settings.extend([1, 2].map(|number| on(macvlan, Hook::Ingress, number)));
        }
        // The first pod of a burst finds no programs on the parent, the others do.
        let parent = [(Hook::Ingress, 1), (Hook::Ingress, 2), (Hook::Egress, 1)];
        let parent = parent.map(|(hook, number)| on(PARENT_INDEX, hook, number));
        if node.send(vec![netlink::clsact(PARENT_INDEX)]).is_ok() {
            node.send(parent.into()).context("attach programs to the parent")?;
        }
    }
    node.send(links).context("create the links")?;
    Netlink::open_in(pod, home)?.send(settings).context("give the pod its addresses")
}

fn del(pod: BorrowedFd<'_>, home: BorrowedFd<'_>) -> anyhow::Result<()> {
    Netlink::open_in(pod, home)?.send(vec![netlink::delete_group(GROUP)]).context("delete the links")
}
