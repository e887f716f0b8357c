//! One file per kind of interface: configuration and planning. Pure.

pub mod spec;
