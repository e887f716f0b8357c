//! MultiNetworkPolicy: model, selection, compilation to classes. Pure up to what acts on the dataplane: `sync` and its parts, `hooks`.
//!
//! An object is read into a [`model`] by [`manifest`], with what is wrong with it said item by item; [`index`]
//! knows who is selected and which addresses are meant; [`compiler`] turns that by [`compile`] into the lookup tables of
//! [`compiled`], again only for whom a change concerns, which [`evaluate`] reads as the kernel does; [`diff`] orders the writes that bring the kernel there.
//!
//! What cannot be understood never allows anything: an unreadable item of a rule matches nothing, and a policy
//! whose selector is unreadable isolates without allowing.

mod adoption;
pub mod advice;
pub mod budget;
mod changes;
pub mod compile;
pub mod compiled;
pub mod compiler;
mod delegated;
pub mod diff;
pub mod dump;
pub mod error;
pub mod evaluate;
pub mod explain;
pub mod guarded;
pub mod hooks;
pub mod in_force;
pub mod index;
mod keyed;
pub mod level;
pub mod manifest;
pub mod model;
mod parents;
pub mod passage;
pub mod programming;
mod routed;
#[cfg(test)]
mod scenarios;
pub mod selector;
pub mod sync;
mod tables;
mod traffic;
pub mod unenforced;
mod upkeep;
