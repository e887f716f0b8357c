//! The minimum time in the kernel for a bridge port and two macvlans: in this process, in one spawned for it, and in
//! one that also attaches BPF programs where netattach does.
//!
//! Every link is made in its final namespace, under its final name, in two datagrams: links from the node, addresses
//! and the default route from inside the pod. All links of a pod are in one group and go in one request.
//!
//! Pods that only have to exist while others are measured are attached in this process, some of them by a veth that
//! is not a bridge port.

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
pub(crate) const SPAWNED: &str = "netlink, one process";
pub(crate) const WITH_PROGRAMS: &str = "the same, with programs";

const BRIDGE: &str = "floor0";
pub(super) const BRIDGE_INDEX: u32 = 20;
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);
pub(super) const PREFIX: u8 = 16;
/// Any number but 0, the default group.
pub(super) const GROUP: u32 = 7;
/// Indices in the pod are chosen, so that they need not be queried.
pub(super) const FIRST_POD_INDEX: u32 = 1000;
/// Beyond those that the kernel chooses.
pub(super) const FIRST_NODE_INDEX: u32 = 100_000;

/// A kind of network.
#[derive(Clone, Copy)]
enum Network {
    /// By a port of the bridge.
    Bridge,
    /// By a link to the node.
    Veth,
    Macvlan,
}

/// The networks of a measured pod, and those of a standing one, which has the first of them.
const MEASURED: [Network; 3] = [Network::Bridge, Network::Macvlan, Network::Macvlan];
const STANDING: [Network; 3] = [Network::Bridge, Network::Veth, Network::Macvlan];

/// The work itself, on the calling thread.
pub(super) struct InProcess {
    home: File,
}

/// The same work in one process started for each request; no shell, linked statically.
pub(crate) struct Spawned {
    executable: PathBuf,
    /// The directory of the pinned program, if programs are attached too.
    pins: Option<PathBuf>,
    /// That program, which processes inherit: opening it is not part of their work.
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
        add(pod.namespace(), self.home.as_fd(), pod.number, (&MEASURED, addresses(pod)), None)
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        del(pod.namespace(), self.home.as_fd())
    }
}

/// Builds the executable of [`Spawned`]; returns its path.
pub(super) fn build(progress: &Progress) -> anyhow::Result<PathBuf> {
    let built = dist::static_executables("netattach-bench", &["floor"], progress)?;
    built.get("floor").context("the floor was not built").cloned()
}

impl Spawned {
    pub(crate) fn new(progress: &Progress) -> anyhow::Result<Self> {
        Ok(Self::of(build(progress)?, None))
    }

    /// Returns a floor that attaches one of the programs that an agent has pinned below `pins` at the first request.
    pub(crate) fn with_programs(pins: PathBuf, progress: &Progress) -> anyhow::Result<Self> {
        Ok(Self::of(build(progress)?, Some(pins)))
    }

    /// A floor whose executable is there already, with programs if their directory is named.
    pub(super) fn of(executable: PathBuf, pins: Option<PathBuf>) -> Self {
        Self { executable, pins, program: OnceLock::new() }
    }

    fn run(&self, verb: &str, pod: &Pod) -> anyhow::Result<()> {
        let mut command = Command::new(&self.executable);
        command.arg(verb).arg(pod.path()).arg(pod.number.to_string());
        command.args(addresses(pod).map(|address| address.to_string()));
        if let Some(program) = self.program()? {
            command.arg(program.as_raw_fd().to_string());
        }
        child::stdout_of(&mut command).map(drop)
    }

    fn program(&self) -> anyhow::Result<Option<BorrowedFd<'_>>> {
        let Some(pins) = &self.pins else { return Ok(None) };
        let program = match self.program.get() {
            Some(program) => program,
            None => {
                let opened = pinned::open_program(pins)?;
                // Kept open across exec(2), for every process that is started from here on.
                rustix::io::fcntl_setfd(&opened, FdFlags::empty()).context("share the program")?;
                self.program.get_or_init(|| opened)
            }
        };
        Ok(Some(program.as_fd()))
    }

    /// Attaches a pod that will stay to that many networks, from the node's namespace and in this process.
    pub(crate) fn stand(&self, pod: &Pod, node: &Node, networks: usize) -> anyhow::Result<()> {
        let networks = &STANDING[..networks.min(STANDING.len())];
        add(pod.namespace(), node.namespace(), pod.number, (networks, addresses(pod)), self.program()?)
    }

    /// DEL while other pods stay, which need the shared programs.
    pub(crate) fn leave(&self, pod: &Pod) -> anyhow::Result<()> {
        self.run("leave", pod)
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

/// The entry point of the spawned process: `add|del|leave NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS [PROGRAM]`, the
/// last being the number of an inherited descriptor. `leave` is `del` while others stay.
///
/// # Errors
/// Wrong arguments, or a request refused by the kernel.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(
        matches!(arguments.len(), 6 | 7),
        "usage: floor add|del|leave NAMESPACE NUMBER ADDRESS ADDRESS ADDRESS [PROGRAM]"
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
            add(pod.as_fd(), home.as_fd(), number, (&MEASURED, addresses), program)
        }
        verb => {
            del(pod.as_fd(), home.as_fd())?;
            if program.is_some() && verb != "leave" {
                // Another pod of a burst may have done it already.
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

fn addresses(pod: &Pod) -> [Ipv4Addr; 3] {
    [0, 1, 2].map(|network| pod.address(network))
}

fn add(
    pod: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    number: u16,
    (networks, addresses): (&[Network], [Ipv4Addr; 3]),
    program: Option<BorrowedFd<'_>>,
) -> anyhow::Result<()> {
    let near = |network: u32| {
        let index = FIRST_NODE_INDEX + 3 * u32::from(number) + network;
        (format!("floor-{number}-{network}"), index)
    };
    let (mut links, mut settings, mut ends, mut macvlans) = (vec![], vec![], vec![], vec![]);
    for (number, ((network, name), address)) in (0..).zip(networks.iter().zip(INTERFACES).zip(addresses)) {
        let index = FIRST_POD_INDEX + number;
        settings.push(netlink::address(index, address, PREFIX));
        if let Network::Macvlan = network {
            links.push(netlink::macvlan(name, index, PARENT_INDEX, pod, GROUP));
            macvlans.push(index);
            continue;
        }
        let (near, near_index) = near(number);
        let bridge = matches!(network, Network::Bridge).then_some(BRIDGE_INDEX);
        links.push(netlink::veth((&near, near_index), (name, index), bridge, pod, GROUP));
        ends.push(near_index);
        // The kernel cannot create the far end of a veth up.
        settings.push(netlink::set_up(index));
    }
    settings.push(netlink::default_route(GATEWAY));
    let mut node = Netlink::open()?;
    if let Some(program) = program {
        let on = |index, hook, number| netlink::program(index, hook, number, program);
        for end in ends {
            links.extend([netlink::clsact(end), on(end, Hook::Ingress, 1), on(end, Hook::Egress, 1)]);
        }
        for macvlan in &macvlans {
            settings.push(netlink::clsact(*macvlan));
            settings.extend([1, 2].map(|number| on(*macvlan, Hook::Ingress, number)));
        }
        // Only the first pod of a burst finds no programs on the parent.
        let parent = [(Hook::Ingress, 1), (Hook::Ingress, 2), (Hook::Egress, 1)];
        let parent = parent.map(|(hook, number)| on(PARENT_INDEX, hook, number));
        if !macvlans.is_empty() && node.send(vec![netlink::clsact(PARENT_INDEX)]).is_ok() {
            node.send(parent.into()).context("attach programs to the parent")?;
        }
    }
    node.send(links).context("create the links")?;
    Netlink::open_in(pod, home)?.send(settings).context("give the pod its addresses")
}

fn del(pod: BorrowedFd<'_>, home: BorrowedFd<'_>) -> anyhow::Result<()> {
    Netlink::open_in(pod, home)?.send(vec![netlink::delete_group(GROUP)]).context("delete the links")
}
