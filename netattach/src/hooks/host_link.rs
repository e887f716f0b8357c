//! The node's own link on a parent of pods (`hostAccess`): group frames from other stations do not come in by
//! this link. The drivers of macvlan and ipvlan copy such frames to the link without passing the parent's
//! hooks, where frames of macvlans would be judged for their source. The node receives group frames from
//! outside by the parent itself.

use super::device::{DeviceHooks, HookProgram};
use super::numbers::FROM;
use crate::bpf::{Program, Side};
use crate::spec::TcHook;

/// The class of a receiver that is not an attachment: a number above those that the settings allow. Copies of
/// frames to this receiver are dropped.
const NOBODY: u16 = u16::MAX - 1;

/// The program on the node's link with that index.
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
