//! The first process of the virtual machine that `cargo xtask vm` starts.

fn main() {
    // Success ends the machine, not this function.
    let Err(error) = xtask::vm::guest::main();
    xtask::progress::failure(&error);
}
