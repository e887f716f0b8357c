//! Devices of the node in pods: VFs, and any other interface that a pod takes whole. A device leaves the node with the
//! ADD and goes back in its former state with the DEL.
//!
//! | module | what it does |
//! |---|---|
//! | `which_device`, `identity` | determine which device a configuration names, and recognise a claimed device wherever it is; pure |
//! | `claims` | tracks which attachment holds which device, and gives back those whose pods are gone |
//! | `take_device` | claims a device, sets it up and moves it to the pod |
//! | `bus`, `card`, `representor` | the device on its bus; the physical function of a VF, and the VF's representor in switchdev mode |
//! | `sriov_cni` | the files in which sriov-cni records the holder of each VF |
//! | `give_back`, `above`, `left_programs` | give a device back, without the links and programs that the pod has left on it |
//! | `error` | errors, and their CNI codes |

mod above;
pub(super) mod bus;
pub(super) mod card;
pub(super) mod claims;
mod error;
pub(super) mod give_back;
mod identity;
mod left_programs;
pub(super) mod representor;
mod sriov_cni;
pub(super) mod take_device;
mod which_device;

pub(super) use self::error::{DeviceError, VfError};
pub(super) use self::sriov_cni::SriovCniError;
