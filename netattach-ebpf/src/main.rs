//! Stub on any target but BPF.

fn main() {}
