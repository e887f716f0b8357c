//! Links: programs on devices by tcx and by XDP.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Command, bpf, bpf_fd, object_info, raw};
use crate::spec::TcHook;

/// Attaches a program to a device by tcx (Linux 6.6): directly after an existing link, or before all others.
/// The link lives as long as its descriptor or a pin of it. `ifindex` counts in the calling thread's network
/// namespace.
///
/// # Errors
///
/// `EEXIST` when the program is attached there already; `EINVAL` before Linux 6.6; `ENODEV`; `ENOENT` when the other
/// link is not on that hook any more.
pub fn tcx_attach(
    program: BorrowedFd<'_>,
    ifindex: u32,
    hook: TcHook,
    after: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct LinkCreate {
        prog_fd: u32,
        target_ifindex: u32,
        attach_type: u32,
        flags: u32,
        relative_fd: u32,
        pad: u32,
        expected_revision: u64,
    }
    /// With no relative program: before the first.
    const BPF_F_BEFORE: u32 = 8;
    const BPF_F_AFTER: u32 = 1 << 4;
    /// The relative descriptor is a link, not a program.
    const BPF_F_LINK: u32 = 1 << 13;
    let attributes = LinkCreate {
        prog_fd: raw(program),
        target_ifindex: ifindex,
        attach_type: SharedHook::Tcx(hook).attach_type(),
        flags: if after.is_some() { BPF_F_AFTER | BPF_F_LINK } else { BPF_F_BEFORE },
        relative_fd: after.map_or(0, raw),
        ..LinkCreate::default()
    };
    // SAFETY: `LinkCreate` is the `link_create` member of `union bpf_attr` as far as tcx reads it; it holds
    // no pointers.
    unsafe { bpf_fd(Command::LinkCreate, &attributes) }
}

/// How a device runs an XDP program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XdpMode {
    /// In the driver, before the kernel allocates a packet.
    Native,
    /// In the kernel, as the first step with a packet: on every device, with little gain.
    Generic,
}

/// Attaches an XDP program to a device. The link lives as long as its descriptor or a pin of it.
///
/// # Errors
/// `EOPNOTSUPP` when the driver has no native mode; `EBUSY` when another program runs there; `EINVAL` when the device
/// is not in a state in which it could; `ENODEV`.
pub fn xdp_attach(program: BorrowedFd<'_>, ifindex: u32, mode: XdpMode) -> io::Result<OwnedFd> {
    /// `BPF_XDP` of `enum bpf_attach_type`.
    const BPF_XDP: u32 = 37;
    // `linux/if_link.h`: `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE`.
    let flags = match mode {
        XdpMode::Generic => 1 << 1,
        XdpMode::Native => 1 << 2,
    };
    let attributes = [raw(program), ifindex, BPF_XDP, flags];
    // SAFETY: the beginning of the `link_create` member of `union bpf_attr`, without pointers; the command returns a
    // new descriptor.
    unsafe { bpf_fd(Command::LinkCreate, &attributes) }
}

/// Replaces the program of a link. No packet passes between the old and the new one.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct LinkUpdate {
        link_fd: u32,
        new_prog_fd: u32,
        flags: u32,
        old_prog_fd: u32,
    }
    let attributes = LinkUpdate { link_fd: raw(link), new_prog_fd: raw(program), flags: 0, old_prog_fd: 0 };
    // SAFETY: `LinkUpdate` is the `link_update` member of `union bpf_attr`; it holds no pointers.
    unsafe { bpf(Command::LinkUpdate, &attributes) }.map(drop)
}

/// Detaches a link from its device at once. The kernel releases the link itself later, after its last pin and
/// descriptor.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let link_fd: u32 = raw(link);
    // SAFETY: the `link_detach` member of `union bpf_attr`, one descriptor without pointers.
    unsafe { bpf(Command::LinkDetach, &link_fd) }.map(drop)
}

/// The kernel's information about a link (`struct bpf_link_info`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkInfo {
    /// Id of the link.
    pub id: u32,
    /// Id of the program it runs.
    pub program_id: u32,
    /// Index of the device, 0 when the device is gone.
    pub ifindex: u32,
    /// `enum bpf_attach_type`; 0 for a link of XDP.
    pub attach_type: u32,
    /// Whether it runs an XDP program.
    pub is_xdp: bool,
}

/// Returns the device, hook and program of a tcx or XDP link. For other links only the ids are meaningful.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    /// `BPF_LINK_TYPE_XDP`.
    const XDP: u32 = 6;
    /// The beginning of `struct bpf_link_info`, of which no kind of link has a pointer that is followed when zero.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
        program_id: u32,
        pad: u32,
        ifindex: u32,
        attach_type: u32,
    }
    // SAFETY: `Info` is the beginning of `struct bpf_link_info` for these kinds of links, of numbers alone.
    let info: Info = unsafe { object_info(link) }?;
    Ok(LinkInfo {
        id: info.id,
        program_id: info.program_id,
        ifindex: info.ifindex,
        attach_type: info.attach_type,
        is_xdp: info.kind == XDP,
    })
}

/// The link with that id; `None` when it is gone (Linux 5.8).
///
/// # Errors
/// The kernel refuses.
pub fn link_by_id(id: u32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: the member of `union bpf_attr` that begins with the id, without pointers; the command returns a new
    // descriptor.
    match unsafe { bpf_fd(Command::LinkGetFdById, &[id, 0, 0]) } {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        found => found.map(Some),
    }
}

/// Returns the id of the next link on this machine after that one, of any kind; `None` after the last (Linux
/// 5.8).
///
/// # Errors
/// The kernel refuses.
pub fn next_link(after: u32) -> io::Result<Option<u32>> {
    /// The beginning of the member of `union bpf_attr` for ids.
    #[repr(C)]
    struct NextId {
        start: u32,
        next: u32,
    }
    let attributes = UnsafeCell::new(NextId { start: after, next: 0 });
    // SAFETY: `NextId` is laid out as the member, without pointers. The kernel writes the next id into it, which the cell
    // allows.
    match unsafe { bpf(Command::LinkGetNextId, &attributes) } {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        done => done.map(|_| Some(attributes.into_inner().next)),
    }
}

/// A hook of a device that programs of several owners share; they run one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedHook {
    /// By tcx.
    Tcx(TcHook),
    /// Egress of the primary end of a netkit pair, addressed by the primary end.
    Primary,
    /// Egress of the peer of a netkit pair, addressed by the primary end.
    Peer,
}

impl SharedHook {
    /// Every hook.
    pub const ALL: [Self; 4] =
        [Self::Tcx(TcHook::Ingress), Self::Tcx(TcHook::Egress), Self::Primary, Self::Peer];

    /// `enum bpf_attach_type`.
    fn attach_type(self) -> u32 {
        match self {
            Self::Tcx(TcHook::Ingress) => 46,
            Self::Tcx(TcHook::Egress) => 47,
            Self::Primary => 54,
            Self::Peer => 55,
        }
    }
}

/// A program on a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnHook {
    /// Kernel's id of the program.
    pub program: u32,
    /// Kernel's id of the link that holds it there; `None`: it was attached without one.
    pub link: Option<u32>,
}

/// Kernel's ids of the programs that run on a hook of a device by tcx, in the order in which packets meet them. None
/// before Linux 6.6, and none where the device is gone.
pub fn tcx_programs(ifindex: u32, hook: TcHook) -> io::Result<Vec<u32>> {
    let found = programs_on(ifindex, SharedHook::Tcx(hook))?;
    Ok(found.into_iter().map(|it| it.program).collect())
}

/// Returns the kernel's ids of the programs that run on what either end of a netkit pair sends, by the
/// primary end's index. Empty if the device is not the primary end of a pair.
///
/// # Errors
/// The kernel refuses.
pub fn netkit_programs(ifindex: u32) -> io::Result<Vec<u32>> {
    let [primary, peer] = [SharedHook::Primary, SharedHook::Peer].map(|end| programs_on(ifindex, end));
    Ok(primary?.into_iter().chain(peer?).map(|it| it.program).collect())
}

/// Returns the programs on a hook of a device, in the order in which packets meet them. Empty if the kernel
/// or the device does not have the hook, or the device is gone. `ifindex` counts in the calling thread's
/// network namespace.
///
/// # Errors
/// The kernel refuses.
pub fn programs_on(ifindex: u32, hook: SharedHook) -> io::Result<Vec<OnHook>> {
    /// `BPF_MPROG_MAX`.
    const MOST: usize = 64;
    let (mut programs, mut links) = ([0_u32; MOST], [0_u32; MOST]);
    let query = UnsafeCell::new(Query {
        prog_ids: programs.as_mut_ptr() as u64,
        link_ids: links.as_mut_ptr() as u64,
        count: MOST as u32,
        ..Query::of(ifindex, hook.attach_type())
    });
    // SAFETY: the `query` member of `union bpf_attr`; `prog_ids` and `link_ids` have room for `count` numbers and are not
    // otherwise used during the call. The kernel writes into the member and not beyond, which the cell allows.
    match unsafe { bpf(Command::ProgQuery, &query) } {
        Ok(_) => {
            let count = query.into_inner().count as usize;
            let one = |(program, link)| OnHook { program, link: Some(link).filter(|it| *it != 0) };
            Ok(programs.into_iter().zip(links).take(count).map(one).collect())
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP | libc::ENODEV) => Ok(Vec::new()),
            // For the hooks of netkit: the device is not a netkit, or is the peer of its pair.
            Some(libc::ENXIO | libc::EACCES) => Ok(Vec::new()),
            // A kernel without BPF.
            Some(libc::ENOSYS) => Ok(Vec::new()),
            _ => Err(error),
        },
    }
}

/// Detaches a program from a hook of a device if no link holds it. `ifindex` counts in the calling thread's
/// network namespace.
///
/// # Errors
/// `ENOENT` when it is not there; `EBUSY` when a link holds it; `ENODEV`.
pub fn detach_program(program: BorrowedFd<'_>, ifindex: u32, hook: SharedHook) -> io::Result<()> {
    /// The member of `union bpf_attr` for attaching without a link.
    #[repr(C)]
    #[derive(Default)]
    struct Detach {
        target_ifindex: u32,
        program_fd: u32,
        attach_type: u32,
        flags: u32,
        replaced_fd: u32,
        relative_fd: u32,
        expected_revision: u64,
    }
    let attributes = Detach {
        target_ifindex: ifindex,
        program_fd: raw(program),
        attach_type: hook.attach_type(),
        ..Detach::default()
    };
    // SAFETY: `Detach` is laid out as the member; it holds no pointers.
    unsafe { bpf(Command::ProgDetach, &attributes) }.map(drop)
}

/// The `query` member of `union bpf_attr`, to its end in Linux 6.18: the kernel writes counts back.
#[repr(C)]
#[derive(Default)]
pub(in super::super) struct Query {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

impl Query {
    /// A query that only asks whether there are any programs.
    pub(in super::super) fn of(device: u32, attach_type: u32) -> Self {
        Self { target_ifindex: device, attach_type, ..Self::default() }
    }
}
