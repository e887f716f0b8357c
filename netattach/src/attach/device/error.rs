//! Errors of devices of the node, and of VFs and their physical functions.

use super::left_programs::LeftError;
use crate::cni::code;
use crate::mac::Mac;
use crate::netlink;
use crate::spec::VirtualFunction;

/// Why a device of the node cannot be taken, set up or given back.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The node has no such device with a network interface, or not yet.
    #[error(
        "the node has no network interface of device {0}: it is not there yet, has no driver, or is in another namespace"
    )]
    NotThere(String),
    /// A device that is named by its bus address has several network interfaces.
    #[error("device {device} has several network interfaces ({interfaces}): name one by device or hwaddr")]
    SeveralInterfaces {
        /// The device.
        device: String,
        /// Some of them.
        interfaces: String,
    },
    /// The node itself needs the device.
    #[error("device {device} stays on the node: {why}")]
    InUse {
        /// Its name.
        device: String,
        /// The reason.
        why: &'static str,
    },
    /// Interfaces of pods are on the device.
    #[error("device {0} stays on the node: it carries interfaces of pods")]
    ParentOfPods(String),
    /// Another sandbox holds the device.
    #[error("device {device} is taken: {who} has it")]
    Taken {
        /// The device.
        device: String,
        /// Its holder, as text.
        who: String,
        /// The holder's container.
        container: String,
    },
    /// The thread that returns a device to the node has not finished in time.
    #[error(
        "device {0} is being returned to the node, which has not ended in time: its card or driver may hang (see the \
         kernel's log)"
    )]
    Returning(String),
    /// A device refuses the requested MTU.
    #[error("key mtu: device {device} does not take {mtu}")]
    Mtu {
        /// The device.
        device: String,
        /// The requested MTU, in bytes.
        mtu: u32,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// The device's own Ethernet address could not be restored later.
    #[error(
        "key mac: device {0} has an address other than its permanent one, which only a record of netattachd can restore; without netattachd, chain tuning"
    )]
    OwnMacLost(String),
    /// A device refuses the requested Ethernet address.
    #[error("device {device} does not take the address {mac}, which its physical function has set")]
    AddressNotTaken {
        /// The device.
        device: String,
        /// The address.
        mac: Mac,
    },
    /// Another link now has the name that the device had on the node.
    #[error("cannot return the device: the node already has an interface named {0}")]
    HomeTaken(String),
    /// A device is in no known namespace.
    #[error(
        "device {device} has the driver {driver}, and its network interface is neither in the pod nor on the node{}",
        where_else(.elsewhere)
    )]
    Lost {
        /// The device.
        device: String,
        /// Its driver.
        driver: String,
        /// Whether the node's namespace is not the machine's initial one, to which the kernel moves a card when its
        /// namespace ends.
        elsewhere: bool,
    },
    /// The programs on a device of the node cannot be listed.
    #[error("the programs on device {device} are not known")]
    ProgramsUnknown {
        /// Its name on the node.
        device: String,
        /// The kernel's error.
        #[source]
        source: LeftError,
    },
    /// A program that a pod has left on a device cannot be detached: it would see the node's packets.
    #[error(
        "device {device} stays down: program {program} ({name}), which its pod has attached, cannot be taken off"
    )]
    ProgramLeft {
        /// The device's name on the node.
        device: String,
        /// Kernel's id of the program.
        program: u32,
        /// The program's name; empty if it has none, or is gone.
        name: String,
        /// The cause.
        #[source]
        source: LeftError,
    },
}

impl DeviceError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            // The device may appear soon, or be returned to the node.
            Self::NotThere(_)
            | Self::ParentOfPods(_)
            | Self::Taken { .. }
            | Self::Returning(_)
            | Self::HomeTaken(_)
            | Self::Lost { .. } => code::TRY_AGAIN_LATER,
            Self::SeveralInterfaces { .. } | Self::InUse { .. } | Self::Mtu { .. } | Self::OwnMacLost(_) => {
                code::INVALID_CONFIG
            }
            Self::AddressNotTaken { .. } | Self::ProgramsUnknown { .. } | Self::ProgramLeft { .. } => {
                code::INTERNAL
            }
        }
    }
}

/// Why a VF cannot be set up through its physical function, or is not known there.
#[derive(Debug, thiserror::Error)]
pub enum VfError {
    /// The physical function of a VF has no interface on the node, or does not know the VF.
    #[error(
        "the physical function {0} has no network interface on the node that knows the VF: it has no driver, or the interface is in a pod or in another network namespace; bind the driver, or bring the interface back"
    )]
    NoPhysicalFunction(String),
    /// A card was in another mode when the attachment was planned.
    #[error("card {0} is changing its mode (legacy, switchdev)")]
    OtherMode(String),
    /// The card of a VF is in mode switchdev, and has not created the VF's representor, or the representor is in
    /// another namespace.
    #[error(
        "the node has no representor of VF {} of {}, whose card is in mode switchdev", .0.number, .0.physical
    )]
    NoRepresentor(VirtualFunction),
    /// Several representors match a VF.
    #[error("VF {} of {} has several representors ({names})", .function.number, .function.physical)]
    SeveralRepresentors {
        /// The VF.
        function: VirtualFunction,
        /// Two of them.
        names: String,
    },
    /// A process would drive a VF with an Ethernet address that it chooses, which the programs of the representor
    /// would not know.
    #[error("key mac: needed, as the pod drives the VF itself, and its physical function has set no address")]
    NoAddress,
    /// The card refuses a setting of a VF.
    #[error("key {setting}: the card refuses it for VF {} of {}", .function.number, .function.physical)]
    Setting {
        /// The key.
        setting: &'static str,
        /// The VF.
        function: VirtualFunction,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// The card has accepted a setting of a VF, but reports another value.
    #[error(
        "key {setting}: the card has accepted it for VF {} of {}, but shows another value: its driver ignores it",
        .function.number, .function.physical
    )]
    SettingIgnored {
        /// The key.
        setting: &'static str,
        /// The VF.
        function: VirtualFunction,
    },
}

impl VfError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            // The card may be changing its mode, or its physical function may come back to the node.
            Self::NoPhysicalFunction(_) | Self::OtherMode(_) | Self::NoRepresentor(_) => {
                code::TRY_AGAIN_LATER
            }
            Self::Setting { source, .. } if source.errno() == Some(rustix::io::Errno::AGAIN) => {
                code::TRY_AGAIN_LATER
            }
            Self::Setting { .. } | Self::NoAddress => code::INVALID_CONFIG,
            Self::SettingIgnored { .. } | Self::SeveralRepresentors { .. } => code::INTERNAL,
        }
    }
}

/// Returns a hint for a card that the kernel has moved to a namespace other than the node's.
fn where_else(elsewhere: &bool) -> &'static str {
    if *elsewhere {
        "; when the pod's namespace ended, the kernel has brought it to the machine's first one, which is not the node's: move it \
         here from there (ip link set NAME netns PID)"
    } else {
        ""
    }
}
