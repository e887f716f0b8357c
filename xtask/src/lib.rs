//! netattach's build, test and benchmark driver, as a library shared by its executables.
//!
//! | module | what it answers |
//! |---|---|
//! | [`tree`] | where things are in this repository |
//! | [`screen`] | one line per step: what, how long, what came out |
//! | [`child`] | running other programs, with their output kept until it matters |
//! | [`setup`] | what this machine lacks, and installing it |
//! | [`ebpf`], [`dist`] | the BPF object; the executables that land on a host |

pub mod child;
pub mod dist;
pub mod ebpf;
pub mod elf;
pub mod screen;
pub mod setup;
pub mod tree;
