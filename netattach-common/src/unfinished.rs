//! How programs reach the kernel's own packet (`struct sk_buff`), for what is written into it after they have judged it.

/// Bytes of a packet that are read at once, where a program cannot read single ones.
pub const WINDOW: usize = 64;

/// The number by which programs call the kernel's function [`CAST_NAME`]: no helper has it. Before the programs are loaded the
/// agent puts the number in its place that the function has in the running kernel, where that one has it.
pub const CAST: i32 = 0x6e61_6b66;

/// The kernel's function that turns a program's context into the kernel's packet (Linux 6.2).
pub const CAST_NAME: &str = "bpf_cast_to_kern_ctx";
