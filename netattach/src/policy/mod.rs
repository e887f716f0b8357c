//! MultiNetworkPolicy: model, selection, compilation to classes. Pure up to `sync` and `hooks`.
//!
//! An object is read into a [`model`] by [`manifest`], with what is wrong with it said item by item; [`index`]
//! finds who is selected and which addresses are meant; [`compile`] turns that into the lookup tables of
//! [`compiled`], which [`evaluate`] reads as the kernel does; [`diff`] orders the writes that bring the kernel there.
//!
//! What cannot be understood never allows anything: an unreadable item of a rule matches nothing, and a policy
//! whose selector is unreadable isolates without allowing.

pub mod compile;
pub mod compiled;
pub mod diff;
pub mod dump;
pub mod evaluate;
pub mod explain;
pub mod guarded;
pub mod hooks;
pub mod index;
pub mod manifest;
pub mod model;
mod parents;
pub mod passage;
#[cfg(test)]
mod scenarios;
pub mod selector;
pub mod sync;
mod tables;
mod traffic;
pub mod unenforced;
