//! Numbers of netattach's filters, in one table.
//!
//! The kernel identifies the filters of a device by numbers (`handle`). The process that attaches a filter
//! chooses its number; numbers that the kernel chooses count from 1. Here a number stands for one program at
//! one hook of one kind of device, so that a filter can be replaced, found and removed without reading its
//! program. The upper half is `na` in ASCII.
//!
//! | device | hook | number | program |
//! |---|---|---|---|
//! | node's end | ingress | [`NODE_END`] | `na_from_pod` |
//! | node's end | egress | [`NODE_END`] | `na_to_pod` |
//! | parent | ingress | [`FROM`], [`TO`] | `na_par_from`, `na_par_to` |
//! | parent | egress | [`FROM`] | `na_par_from` |
//! | macvlan in a pod | ingress | [`FROM`], [`TO`] | `na_par_from`, `na_par_to` |
//! | node's own link on a parent | ingress | [`FROM`] | `na_par_from` |
//! | device in a pod | egress | [`POD_FROM`] | `na_pod_from` |
//! | device in a pod | ingress | [`POD_TO`] | `na_pod_to` |
//! | uplink | ingress | [`UPLINK_OWN_CLSACT`] or [`UPLINK_FOREIGN_CLSACT`] | `na_wire` |

/// Bit in the number of a spare filter, which runs while the filter without this bit is moved to another
/// position.
pub(super) const SPARE: u32 = 1 << 31;
/// Each program on the node's end of a link, which belongs to the attachment alone. On a representor another
/// program's filter may have this number: see
/// [`DeviceHooks::expect_room`](super::device::DeviceHooks::expect_room).
pub(super) const NODE_END: u32 = 1;
/// Packets that pods send, on parents and macvlans.
pub(super) const FROM: u32 = 0x6e61_0001;
/// Packets that pods receive, on parents and macvlans.
pub(super) const TO: u32 = 0x6e61_0002;
/// Packets that a pod sends, on its own device.
pub(super) const POD_FROM: u32 = 0x6e61_0003;
/// Packets that a pod receives, on its own device.
pub(super) const POD_TO: u32 = 0x6e61_0004;
/// The program of uplinks, if the device's clsact was created for it and is deleted with it. No device of a
/// pod is an uplink of the node, so the number is not ambiguous.
pub(super) const UPLINK_OWN_CLSACT: u32 = 0x6e61_0003;
/// The program of uplinks, if the device's clsact existed before.
pub(super) const UPLINK_FOREIGN_CLSACT: u32 = 0x6e61_0004;
