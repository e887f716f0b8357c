//! The programs that run on devices, and their tcx links.
//!
//! A device in a pod has an index that means nothing outside the pod, see `netattach-ebpf/src/path/pod.rs`.
//! Each tcx link there runs a program of its own, which stores the attachment's number in the packet and
//! tail-calls the shared program: eight instructions, loaded when the link is created.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use aya::programs::{ProgramFd, SchedClassifier};
use netattach_common::Side;

use super::BpfError;
use super::links::{LinkPlace, Links};
use super::map_table::map_name;
use super::pin::Pins;
use super::program_table::{Entry, Program};
use super::sys::{self, Instruction};

/// The opened programs that run on devices, and the pins of their links.
pub struct Programs {
    on_device: [ProgramFd; 2],
    on_parent: [ProgramFd; 2],
    /// In the order of [`Entry::ALL`].
    entries: [ProgramFd; 3],
    in_pod: [ProgramFd; 2],
    uplink: ProgramFd,
    /// The map through which programs in pods tail-call the shared ones.
    pod_calls: OwnedFd,
    links: Links,
}

impl Programs {
    pub(super) fn open(pins: &Pins, links: Links) -> Result<Self, BpfError> {
        let open = |program| open_program(&pins.program(program));
        let pair = |program: fn(Side) -> Program| -> Result<_, BpfError> {
            Ok([open(program(Side::FromPod))?, open(program(Side::ToPod))?])
        };
        let path = pins.map(map_name::IN_POD);
        let [first, second, third] = Entry::ALL.map(Program::Entry);
        Ok(Self {
            on_device: pair(Program::At)?,
            on_parent: pair(Program::OnParent)?,
            entries: [open(first)?, open(second)?, open(third)?],
            in_pod: pair(Program::InPod)?,
            uplink: open(Program::Uplink)?,
            pod_calls: sys::open_pin(&path).map_err(|source| BpfError::PinTree {
                action: "open the map",
                path,
                source,
            })?,
            links,
        })
    }

    /// The program to attach to a device in direct-action mode.
    ///
    /// # Errors
    /// [`BpfError::NoProgram`]: the program does not run on devices by traffic control.
    pub fn get(&self, program: Program) -> Result<BorrowedFd<'_>, BpfError> {
        let [in_from, in_to, out] = &self.entries;
        let program = match program {
            Program::At(side) => pick(&self.on_device, side),
            Program::OnParent(side) => pick(&self.on_parent, side),
            Program::InPod(side) => pick(&self.in_pod, side),
            Program::Entry(Entry::InFrom) => in_from,
            Program::Entry(Entry::InTo) => in_to,
            Program::Entry(Entry::Out) => out,
            Program::Uplink => &self.uplink,
            Program::Xdp | Program::Routed | Program::Forwarded | Program::Fast => {
                return Err(BpfError::NoProgram(program.name()));
            }
        };
        Ok(program.as_fd())
    }

    /// Runs a program by a tcx link and pins the link. A program that runs there already is replaced in one
    /// step. The calling thread must be in the network namespace of the device.
    ///
    /// # Errors
    /// [`BpfError::AttachLink`]: the kernel is older than Linux 6.6, or the device is gone.
    pub fn link(&self, place: LinkPlace) -> Result<(), BpfError> {
        let program = place.program();
        let failed =
            |source| BpfError::AttachLink { program: program.name(), device: place.in_words(), source };
        if let LinkPlace::Pod { attachment, side, .. } = place {
            let first = first_program(attachment, side, self.pod_calls.as_fd()).map_err(failed)?;
            return self.links.ensure(place, first.as_fd());
        }
        self.links.ensure(place, self.get(program)?)
    }

    /// Whether a link of netattach runs there. The link may run the program of an earlier object.
    ///
    /// # Errors
    /// The pin cannot be opened.
    pub fn is_linked(&self, place: LinkPlace) -> Result<bool, BpfError> {
        Ok(self.links.find(place)?.is_some())
    }

    /// Removes a link. Idempotent. On a device that still exists this takes a grace period.
    ///
    /// # Errors
    /// The pin cannot be removed.
    pub fn unlink(&self, place: LinkPlace) -> Result<(), BpfError> {
        self.links.remove(place)
    }

    /// Returns the devices of the node for which links of these programs are pinned, whether or not the
    /// devices still exist.
    ///
    /// # Errors
    /// The pins cannot be listed.
    pub fn linked_devices(&self, programs: &[Program]) -> Result<BTreeSet<u32>, BpfError> {
        self.links.devices_with(programs)
    }

    /// Returns the attachments for whose devices in pods links are pinned.
    ///
    /// # Errors
    /// The pins cannot be listed.
    pub fn linked_attachments(&self) -> Result<BTreeSet<u32>, BpfError> {
        self.links.attachments()
    }
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs").field("links", &self.links).finish_non_exhaustive()
    }
}

fn pick([from_pod, to_pod]: &[ProgramFd; 2], side: Side) -> &ProgramFd {
    match side {
        Side::FromPod => from_pod,
        Side::ToPod => to_pod,
    }
}

pub(super) fn open_program(path: &Path) -> Result<ProgramFd, BpfError> {
    SchedClassifier::from_pin(path)
        .and_then(|program| program.fd()?.try_clone().map_err(Into::into))
        .map_err(|source| BpfError::OpenProgram { path: path.to_path_buf(), source })
}

/// A program that stores the attachment in the packet and tail-calls the shared program. If the shared
/// program is missing, the packet is dropped.
fn first_program(attachment: u32, side: Side, programs: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    /// `BPF_ALU | BPF_MOV | BPF_K`.
    const SET: u8 = 0xb4;
    /// `BPF_STX | BPF_MEM | BPF_W`.
    const STORE: u8 = 0x63;
    /// `BPF_LD | BPF_DW | BPF_IMM`: two instructions, with `BPF_PSEUDO_MAP_FD` as the source register.
    const MAP: u8 = 0x18;
    /// `BPF_JMP | BPF_CALL`.
    const CALL: u8 = 0x85;
    /// `BPF_JMP | BPF_EXIT`.
    const EXIT: u8 = 0x95;
    /// Offset of `tc_classid` in `struct __sk_buff`.
    const CLASS: i16 = 72;
    /// `BPF_FUNC_tail_call`: context in register 1, map in 2, slot in 3.
    const TAIL_CALL: i32 = 12;
    /// `TC_ACT_SHOT`.
    const DROP: i32 = 2;
    let slot = Program::InPod(side).slot().map_or(0, |(_, slot)| slot);
    let with = |code, registers, offset, constant| Instruction { code, registers, offset, constant };
    // Numbers of attachments are below 2^16, and descriptors below 2^31.
    let instructions = [
        with(SET, 2, 0, attachment.cast_signed()),
        with(STORE, 2 << 4 | 1, CLASS, 0),
        with(MAP, 1 << 4 | 2, 0, sys::raw(programs).cast_signed()),
        with(0, 0, 0, 0),
        with(SET, 3, 0, slot.cast_signed()),
        with(CALL, 0, 0, TAIL_CALL),
        with(SET, 0, 0, DROP),
        with(EXIT, 0, 0, 0),
    ];
    sys::load_classifier(Program::InPod(side).name(), &instructions)
}
