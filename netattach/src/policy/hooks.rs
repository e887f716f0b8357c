//! Where the programs run on a device of the node: on its clsact hooks, or as tcx links.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use super::error::EnforceError;
use crate::bpf::{self, Dataplane, Running};
use crate::netlink::{self, DevicePrograms, Handle, Hook};

/// Name of the program that judges what pods send, as `tc` and `bpftool` show it.
pub const FROM_POD: &str = "na_from_pod";
/// Name of the program that judges what pods receive.
pub const TO_POD: &str = "na_to_pod";

/// The two directions of a device with the program that runs there.
const DIRECTIONS: [(Hook, &str, bpf::Hook); 2] =
    [(Hook::Ingress, FROM_POD, bpf::Hook::FromPod), (Hook::Egress, TO_POD, bpf::Hook::ToPod)];

/// How programs are to be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttachBy {
    /// By clsact where the kernel has it, else by tcx; uplinks and devices in pods by tcx where the kernel has it ([`choose_all`]).
    #[default]
    Auto,
    /// By clsact filters: 70 us.
    Clsact,
    /// By tcx links (Linux 6.6), which nobody removes by accident: two grace periods for each device.
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
    /// As status shows it.
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
/// nobody waits for its programs. A parent is in use too, but an ADD waits for its programs: three links would take it ten
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

/// Runs the programs on a device. Those of the other mode are taken off afterwards, so that every packet is judged.
pub(super) fn attach(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    host: &mut Handle,
) -> Result<(), EnforceError> {
    match mode {
        AttachMode::Clsact => Ok(host.ensure_programs(device, &programs(dataplane))?),
        AttachMode::Tcx => Ok(dataplane.attach_by_links(device)?),
    }
}

/// Takes off a device what an agent of the other mode attached: what was found there.
pub(super) fn remove_others(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    found: &Found,
    host: &mut Handle,
) -> Result<(), EnforceError> {
    match mode {
        AttachMode::Clsact if found.links => Ok(dataplane.remove_links(device)?),
        AttachMode::Tcx if found.filters != DevicePrograms::default() => Ok(host.remove_programs(device)?),
        AttachMode::Clsact | AttachMode::Tcx => Ok(()),
    }
}

/// What an earlier agent left on a device, in whatever mode it was.
#[derive(Debug)]
pub(super) struct Found {
    /// Filters at our place.
    pub(super) filters: DevicePrograms,
    /// Whether there are pins of links.
    pub(super) links: bool,
}

impl Found {
    /// Whether any program of ours may run.
    pub(super) fn anything(&self) -> bool {
        self.links || self.filters != DevicePrograms::default()
    }

    /// Whether both programs run as they are to in this mode. Those of an earlier object count.
    pub(super) fn is_whole(
        &self,
        mode: AttachMode,
        dataplane: &Dataplane,
        device: u32,
    ) -> Result<bool, EnforceError> {
        match mode {
            AttachMode::Clsact => {
                let DevicePrograms { ingress, egress } = &self.filters;
                Ok((ingress.as_deref(), egress.as_deref()) == (Some(FROM_POD), Some(TO_POD)))
            }
            AttachMode::Tcx => {
                for (_, _, program) in DIRECTIONS {
                    if !self.links || dataplane.running_by_link(device, program)? == Running::Nothing {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

/// The first program that does not run on a device. One of an earlier object counts as running.
pub(super) fn missing(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    host: &mut Handle,
) -> Result<Option<&'static str>, EnforceError> {
    for (hook, name, program) in DIRECTIONS {
        let runs = match mode {
            AttachMode::Clsact => {
                host.find_program(device, hook)?.and_then(|found| found.name).as_deref() == Some(name)
            }
            AttachMode::Tcx => dataplane.running_by_link(device, program)? != Running::Nothing,
        };
        if !runs {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Removes the links of devices that nobody knows: theirs are gone, or never became anybody's.
pub(super) fn sweep(dataplane: &Dataplane, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
    for device in dataplane.linked_devices()?.difference(known) {
        dataplane.remove_links(*device)?;
    }
    Ok(())
}

/// The programs of an attachment and where they run.
pub(super) fn programs(dataplane: &Dataplane) -> [(netlink::Hook, &'static str, BorrowedFd<'_>); 2] {
    DIRECTIONS.map(|(hook, name, program)| (hook, name, dataplane.program(program)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_had_or_refused() {
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
