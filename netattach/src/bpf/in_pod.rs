//! The programs on devices in pods, for attachments that have no end on the node.
//!
//! A device's index says nothing there, see `netattach-ebpf/src/pod.rs`. So each tcx link runs a program of its own that
//! only notes whose the packet is and goes on in the shared ones: a dozen instructions, made when the device is to be judged.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya::programs::ProgramFd;
use netattach_common::Hook;

use super::BpfError;
use super::dataplane::pick;
use super::links::{HOOKS, Links, Place};
use super::pin::{Pins, Program, map_name};
use super::sys::{self, Instruction};

/// The programs of devices in pods, and their links.
pub struct InPod {
    /// The map by which they go on.
    programs: OwnedFd,
    shared: [ProgramFd; 2],
    links: Links,
}

impl InPod {
    pub(super) fn open(pins: &Pins, links: Links, shared: [ProgramFd; 2]) -> Result<Self, BpfError> {
        let path = pins.map(map_name::IN_POD);
        let programs = sys::open_pin(&path).map_err(|source| BpfError::PinTree {
            action: "open the map",
            path,
            source,
        })?;
        Ok(Self { programs, shared, links })
    }

    /// The program to attach to a device in a pod by a filter whose class is the attachment's number.
    pub fn program(&self, hook: Hook) -> BorrowedFd<'_> {
        pick(&self.shared, hook)
    }

    /// Runs the programs on an attachment's device by tcx links, which are pinned. Those that run there already are
    /// replaced in one step each. The calling thread is in the pod's network namespace, where `ifindex` counts.
    ///
    /// # Errors
    /// Before Linux 6.6, or the device is gone.
    pub fn attach(&self, attachment: u32, ifindex: u32) -> Result<(), BpfError> {
        for hook in HOOKS {
            let failed =
                |source| BpfError::AttachLink { program: Program::InPod(hook).name(), ifindex, source };
            let first = first_program(attachment, hook, self.programs.as_fd()).map_err(failed)?;
            self.links.ensure(Place::Pod { attachment, ifindex, hook }, first.as_fd())?;
        }
        Ok(())
    }

    /// The first of the programs that no link runs on an attachment's device.
    ///
    /// # Errors
    /// The pins cannot be looked at.
    pub fn missing(&self, attachment: u32, ifindex: u32) -> Result<Option<&'static str>, BpfError> {
        for hook in HOOKS {
            if self.links.find(Place::Pod { attachment, ifindex, hook })?.is_none() {
                return Ok(Some(Program::InPod(hook).name()));
            }
        }
        Ok(None)
    }

    /// Takes an attachment's links away. Idempotent.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn detach(&self, attachment: u32) -> Result<(), BpfError> {
        HOOKS.into_iter().try_for_each(|hook| self.links.remove(Place::Pod { attachment, ifindex: 0, hook }))
    }

    /// The attachments that have links.
    ///
    /// # Errors
    /// The pins cannot be listed.
    pub fn attached(&self) -> Result<BTreeSet<u32>, BpfError> {
        self.links.attachments()
    }
}

impl fmt::Debug for InPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPod").field("links", &self.links).finish_non_exhaustive()
    }
}

/// Notes the attachment in the packet and goes on in the shared program. Where that is gone the packet is dropped.
fn first_program(attachment: u32, hook: Hook, programs: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
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
    let slot = Program::InPod(hook).slot().map_or(0, |(_, slot)| slot);
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
    sys::load_classifier(Program::InPod(hook).name(), &instructions)
}
