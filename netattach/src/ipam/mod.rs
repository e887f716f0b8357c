//! Address management.
//!
//! [`host_local`] is the one kind that is built in; others are executed.

pub mod host_local;
