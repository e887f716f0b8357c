//! netattach's build, test and demo driver, as a library shared by its executables and by the benchmarks (`bench`).
//!
//! | module | task |
//! |---|---|
//! | [`tree`] | paths in this repository |
//! | [`progress`] | one line per step on the terminal: title, time, result |
//! | [`child`] | running other programs, with their output kept until it matters |
//! | [`setup`] | installs tools that this machine lacks |
//! | [`ebpf`], [`elf`], [`dist`] | the BPF object; the executables that land on a host |
//! | [`bpf_stack`] | whether the object's functions fit the kernel's stack |
//! | [`release`] | the container image and the other files of a release |
//! | [`tidy`] | formatting, lints, the invariants of the source tree, conformance, licences |
//! | [`conformance`] | which test proves which row of the standards |
//! | [`suite`], [`fuzz`] | the tests, summed; the fuzz targets |
//! | [`soak`] | pods that come and go at random on two nodes, for minutes |
//! | [`nightly`] | checks that take too long for the gate |
//! | [`vm`] | selections of the tests in virtual machines: an older kernel, a card with VFs |
//! | [`demo`] | a demonstration of netattach in eight steps |
//!
//! [`source`] lists the Rust files for `tidy` and `conformance`.

pub mod bpf_stack;
pub mod child;
pub mod conformance;
pub mod demo;
pub mod dist;
pub mod ebpf;
pub mod elf;
pub mod fuzz;
pub mod nightly;
pub mod progress;
pub mod release;
pub mod setup;
pub mod soak;
mod source;
pub mod suite;
pub mod tidy;
pub mod tree;
pub mod vm;
