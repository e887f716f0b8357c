//! The node's own link on a parent of pods (`hostAccess`): what stations send to groups does not come in by it. The drivers of
//! macvlan and ipvlan copy such frames to it past the parent's hooks, where those of macvlans would be judged for their senders;
//! the node has those from outside by the parent itself.

use super::device::{DeviceHooks, HookProgram};
use super::numbers::FROM;
use crate::bpf::{Program, Side};
use crate::spec::TcHook;

/// The class of a receiver that no attachment is: a number above those that the settings allow. What it is sent as a copy is
/// dropped.
const NOBODY: u16 = u16::MAX - 1;

/// The program on the node's link of that index.
pub(crate) fn on(index: u32) -> DeviceHooks<'static> {
    let program = HookProgram {
        hook: TcHook::Ingress,
        number: FROM,
        class: NOBODY,
        program: Program::OnParent(Side::FromPod),
        link: None,
    };
    DeviceHooks { index, pod: None, programs: vec![program], first: false }
}
