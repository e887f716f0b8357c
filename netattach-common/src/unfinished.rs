//! Access of the programs to the kernel's own packet (`struct sk_buff`), to detect bytes that are written after the
//! verdict.

/// Number of bytes of a `struct sk_buff` that are read at once, where a program cannot read single fields.
pub const WINDOW: usize = 64;

/// The number by which programs call the kernel's function [`CAST_NAME`]: no helper has it. Before the agent loads
/// the programs, it replaces this number by the function's number in the running kernel, if that kernel has the
/// function.
pub const CAST: i32 = 0x6e61_6b66;

/// The kernel's function that turns a program's context into the kernel's packet (Linux 6.2).
pub const CAST_NAME: &str = "bpf_cast_to_kern_ctx";
