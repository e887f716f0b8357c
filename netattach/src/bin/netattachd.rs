//! Placeholder entry point; see the library.

fn main() {}
