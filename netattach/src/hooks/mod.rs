//! The hooks of devices at which programs run: clsact filters or tcx links.
//!
//! An attachment's programs run at its [`HookPoint`] (`point`). A `device` with its programs attaches them,
//! reports which is missing, and detaches them, in either [`AttachMode`]. The other modules choose programs
//! and device: [`node_end`] (the node's end of a link), [`parent`] (the device that macvlans share), [`pod`]
//! (the device in a pod), [`host_link`] (the node's own link on a parent) and [`uplink`] (devices of the node
//! that belong to no attachment). [`numbers`] identify filters; failures are an `error`; `rivals` are other
//! programs that put their filters first; `whole_filters` knows whose filters have not changed.

mod device;
mod error;
pub(crate) mod host_link;
pub(crate) mod node_end;
mod numbers;
pub(crate) mod parent;
pub(crate) mod pod;
mod point;
mod rivals;
pub(crate) mod uplink;
mod whole_filters;

use serde::{Deserialize, Serialize};

pub(crate) use device::{DeviceHooks, Lack, Restored};
pub use error::HookError;
pub(crate) use pod::PodDevice;
pub(crate) use point::HookPoint;
pub(crate) use rivals::Rivals;
pub(crate) use whole_filters::WholeFilters;

/// How programs should be attached, as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttachBy {
    /// By clsact where the kernel has it, else by tcx; uplinks and devices in pods by tcx where the kernel has it ([`choose_all`]).
    #[default]
    Auto,
    /// By clsact filters: 70 us.
    Clsact,
    /// By tcx links (Linux 6.6), which are not removed by accident: two grace periods for each device.
    Tcx,
}

/// How programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// By clsact filters.
    Clsact,
    /// By tcx links.
    Tcx,
}

impl AttachMode {
    /// The other mode, which an earlier agent may have used.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Clsact => Self::Tcx,
            Self::Tcx => Self::Clsact,
        }
    }

    /// Its name in `netattachctl status`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clsact => "clsact",
            Self::Tcx => "tcx",
        }
    }
}

/// How programs are attached to each kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachModes {
    /// To the node's ends of attachments, and to parents of macvlans.
    pub attachments: AttachMode,
    /// To all other devices: uplinks of the node, devices in pods.
    pub others: AttachMode,
}

impl AttachModes {
    /// How programs are attached at that point.
    pub(crate) fn at(self, point: &HookPoint) -> AttachMode {
        match point {
            HookPoint::NodeEnd(_) | HookPoint::Parent { .. } => self.attachments,
            HookPoint::Pod(_) | HookPoint::Nowhere(_) => self.others,
        }
    }
}

/// The kernel cannot attach programs in the configured way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoHook {
    /// `attach: tcx` before Linux 6.6.
    #[error("attach: this kernel has no tcx, which came with Linux 6.6: choose clsact or auto")]
    Tcx,
    /// `attach: clsact` without `CONFIG_NET_CLS_BPF` or `CONFIG_NET_SCH_INGRESS`.
    #[error("attach: this kernel has no clsact (sch_ingress, cls_bpf): choose tcx or auto")]
    Clsact,
    /// `attach: auto` with neither.
    #[error("this kernel has neither clsact (sch_ingress, cls_bpf) nor tcx: nothing could be enforced")]
    Neither,
}

/// Chooses a mode that the kernel supports.
///
/// # Errors
/// The kernel does not support the configured mode.
pub fn choose(wanted: AttachBy, clsact: bool, tcx: bool) -> Result<AttachMode, NoHook> {
    match (wanted, clsact, tcx) {
        (AttachBy::Auto | AttachBy::Clsact, true, _) => Ok(AttachMode::Clsact),
        (AttachBy::Auto | AttachBy::Tcx, _, true) => Ok(AttachMode::Tcx),
        (AttachBy::Auto, ..) => Err(NoHook::Neither),
        (AttachBy::Clsact, ..) => Err(NoHook::Clsact),
        (AttachBy::Tcx, ..) => Err(NoHook::Tcx),
    }
}

/// Chooses modes for all devices. Uplinks use tcx where there is a choice: when a device gets or loses its
/// first ingress qdisc (`qdisc_graft`), it drops the packets that it is about to send. A pod's device is new
/// at that time, but an uplink is in use, and no request waits for its programs. A parent is in use too, but
/// an ADD waits for its programs: three links would take ten times as long as the rest of the ADD. Devices in
/// pods use links because a process in the pod can remove clsact, but not a link.
///
/// # Errors
/// As [`choose`].
pub fn choose_all(wanted: AttachBy, clsact: bool, tcx: bool) -> Result<AttachModes, NoHook> {
    let attachments = choose(wanted, clsact, tcx)?;
    let others = if wanted == AttachBy::Auto && tcx { AttachMode::Tcx } else { attachments };
    Ok(AttachModes { attachments, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requested_attach_mode_is_used_or_refused() {
        use AttachBy::{Auto, Clsact, Tcx};
        let table = [
            (Auto, true, true, Ok(AttachMode::Clsact)),
            (Auto, false, true, Ok(AttachMode::Tcx)),
            (Auto, false, false, Err(NoHook::Neither)),
            (Clsact, true, false, Ok(AttachMode::Clsact)),
            (Clsact, false, true, Err(NoHook::Clsact)),
            (Tcx, true, true, Ok(AttachMode::Tcx)),
            (Tcx, true, false, Err(NoHook::Tcx)),
        ];
        for (wanted, clsact, tcx, expected) in table {
            assert_eq!(choose(wanted, clsact, tcx), expected, "{wanted:?} {clsact} {tcx}");
        }
    }

    #[test]
    fn uplinks_and_pods_have_tcx_where_there_is_a_choice() {
        let modes = |attachments, others| Ok(AttachModes { attachments, others });
        assert_eq!(choose_all(AttachBy::Auto, true, true), modes(AttachMode::Clsact, AttachMode::Tcx));
        assert_eq!(choose_all(AttachBy::Auto, true, false), modes(AttachMode::Clsact, AttachMode::Clsact));
        assert_eq!(choose_all(AttachBy::Clsact, true, true), modes(AttachMode::Clsact, AttachMode::Clsact));
        assert_eq!(choose_all(AttachBy::Tcx, true, false), Err(NoHook::Tcx));
    }
}
