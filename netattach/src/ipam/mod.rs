//! Address management.

pub mod host_local;
