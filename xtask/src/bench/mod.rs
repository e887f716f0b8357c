//! `cargo xtask bench`: netattach beside its alternatives, in network namespaces made for the run.
//!
//! The contenders take turns within one run, so that whatever else the machine does hits all alike.

mod agent;
pub mod attach;
pub mod dataplane;
mod document;
mod netlink;
mod pods;

/// How the result is printed.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// A table.
    Table,
    /// Every sample, for a program.
    Json,
}
