//! Parses the headers that the packet path judges by: frames, IP packets, ICMP messages, options.
//!
//! The programs read the kernel's buffer, fuzzing and tests read memory; only the implementation of [`Bytes`] differs.
//! Unreadable data is [`DropReason::Malformed`](crate::DropReason::Malformed).
//!
//! Every function is inlined where it is called: the programs' stack is small, and cut where the kernel's verifier
//! needs it.
//!
//! In the order of a frame: `bytes` for access, `frame`, then `arp`, a `carrier` of encapsulated packets, or an IP packet.
//! `walk` reads the `header`s of an IP packet into a `packet`, with the differences of each `version`, the numbers that an
//! `echo` has instead of ports, the kinds of `icmp` and the `options` of IPv4; `dhcp` reads the client's claims behind them.
//! Most packets are `plain`, and need none of that.

pub mod arp;
pub mod bytes;
pub mod carrier;
pub mod dhcp;
mod echo;
pub mod frame;
pub mod header;
pub mod icmp;
pub mod options;
pub mod packet;
pub mod plain;
mod version;
pub mod walk;

pub use bytes::{Bytes, InMemory, Plain};
pub use frame::{ETHERNET_LEN, EthernetHeader, Payload, ethertype};
pub use packet::{Kind, Packet, Room};
pub use version::Version;
