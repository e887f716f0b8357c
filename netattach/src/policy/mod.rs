//! Compiles policies to lookup tables, and explains them. Pure.
//!
//! [`index`] knows which attachments a policy selects and which addresses its peers have. [`compile`] resolves that into the
//! lookup tables of [`compiled`], with `tables` and `traffic` for prefixes and ports; [`compiler`] does it again only for whom
//! `changes` names. [`evaluate`] reads the tables as the kernel does, and [`diff`] orders the writes that bring the kernel there.
//! [`explain`] follows a packet through them, [`advice`] says what would let it pass, [`dump`] lists what is in force.
//! How far all of it holds for an attachment is its [`level`].
//!
//! What cannot be understood never allows anything: an unreadable item of a rule matches nothing, and a policy
//! whose selector is unreadable isolates without allowing.

pub mod advice;
mod changes;
pub mod compile;
pub mod compiled;
pub mod compiler;
pub mod diff;
pub mod dump;
pub mod evaluate;
pub mod explain;
pub mod index;
pub mod level;
#[cfg(test)]
mod scenarios;
mod tables;
mod traffic;
