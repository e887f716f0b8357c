//! Asks the kubelet which devices it gave to a pod.
//!
//! The kubelet allocates devices of an extended resource before it has the pod's sandbox made, and tells of them on its
//! PodResources socket, by the pod's name (`client`, messages in `messages`). A name may have belonged to an earlier
//! pod, so the answer is compared with the kubelet's checkpoint, which has the pods' uids ([`checkpoint`]).
//! [`allocate`] decides which network gets which device.

pub mod allocate;
pub mod checkpoint;
mod client;
pub mod messages;

pub use allocate::{ContainerDevices, Given, Shortage, Want, allocate};
pub use client::{Error, PodResources};
