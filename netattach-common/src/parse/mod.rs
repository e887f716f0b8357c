//! Parses the headers that the packet path judges by: frames, IP packets, ICMP messages, options.
//!
//! The programs read the kernel's buffer, fuzzing and tests read memory; only the implementation of [`Bytes`] differs.
//! Unreadable data is [`DropReason::Malformed`](crate::DropReason::Malformed).
//!
//! Every function is inlined where it is called: the programs' stack is small, and cut where the kernel's verifier
//! needs it.
//!
//! In the order of a frame: `bytes` for access, `frame`, `arp` or `packet` with its `options`, and `icmp`.

pub mod arp;
pub mod bytes;
pub mod frame;
pub mod icmp;
pub mod options;
pub mod packet;

pub use bytes::{Bytes, InMemory, Plain};
pub use frame::{ETHERNET_LEN, EthernetHeader, Payload, ethertype};
pub use packet::{Kind, Packet, Room, Version};
