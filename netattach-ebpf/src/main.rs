//! The packet programs: `path`. Built for the kernel by `cargo xtask build-ebpf`.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
// The standard library does not offer atomic operations for this target yet, although the target has them.
#![cfg_attr(target_arch = "bpf", feature(core_intrinsics), allow(internal_features))]

#[cfg(target_arch = "bpf")]
mod path;

/// Any other target gets a program that only prints an explanation, so that the workspace builds everywhere.
#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("this is a BPF program: build it with `cargo xtask build-ebpf`");
    std::process::exit(2);
}
