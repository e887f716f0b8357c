//! Where programs run on devices: by clsact filters or by tcx links.
//!
//! An attachment's programs run at its [`HookPoint`] (`point`). A `device` with its programs attaches them, says which is missing,
//! and detaches them, in either [`AttachMode`]; which programs and which device is for [`node_end`] (the node's end of a link),
//! [`parent`] (the device that macvlans share), [`pod`] (the device in a pod), [`host_link`] (the node's own on a parent) and [`uplink`] (devices of the node that are no
//! attachment's). Filters are told apart by their [`numbers`]; what goes wrong is an `error`, and who puts his filters first is one
//! of `rivals`.

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

use serde::{Deserialize, Serialize};

pub(crate) use device::{DeviceHooks, Lack, Restored};
pub use error::HookError;
pub(crate) use pod::PodDevice;
pub(crate) use point::HookPoint;
pub(crate) use rivals::Rivals;

/// How programs are to be attached.
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
    /// The mode that an earlier agent may have used instead.
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

/// How programs are attached to which devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachModes {
    /// To the node's ends of attachments, and to parents of macvlans.
    pub attachments: AttachMode,
    /// To all others: uplinks of the node, devices in pods.
    pub others: AttachMode,
}

impl AttachModes {
    /// How programs are attached there.
    pub(crate) fn at(self, point: &HookPoint) -> AttachMode {
        match point {
            HookPoint::NodeEnd(_) | HookPoint::Parent { .. } => self.attachments,
            HookPoint::Pod(_) | HookPoint::Nowhere(_) => self.others,
        }
    }
}

/// The kernel cannot attach programs as it was asked to.
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

/// Chooses by what the kernel has.
///
/// # Errors
/// It does not have what was asked for.
pub fn choose(wanted: AttachBy, clsact: bool, tcx: bool) -> Result<AttachMode, NoHook> {
    match (wanted, clsact, tcx) {
        (AttachBy::Auto | AttachBy::Clsact, true, _) => Ok(AttachMode::Clsact),
        (AttachBy::Auto | AttachBy::Tcx, _, true) => Ok(AttachMode::Tcx),
        (AttachBy::Auto, ..) => Err(NoHook::Neither),
        (AttachBy::Clsact, ..) => Err(NoHook::Clsact),
        (AttachBy::Tcx, ..) => Err(NoHook::Tcx),
    }
}

/// The same for all devices. Uplinks have tcx where there is a choice: a device drops what it is about to send in the moment in
/// which it gets its first qdisc for what it receives (`qdisc_graft`), or loses it. A pod's is new then, an uplink is in use, and
/// no request waits for its programs. A parent is in use too, but an ADD waits for its programs: three links would take it ten
/// times as long as everything else. Devices in pods have links because the pod takes clsact off as it likes, and a link it
/// cannot.
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
