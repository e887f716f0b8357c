//! Loaded programs: their ids and names, and programs of a few instructions.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Command, bpf_fd, object_info};

/// An instruction (`struct bpf_insn`), in the byte order of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// Operation code.
    pub code: u8,
    /// The destination in the lower half, the source in the upper one.
    pub registers: u8,
    /// Offset in memory or of a jump.
    pub offset: i16,
    /// The immediate operand.
    pub constant: i32,
}

/// Loads a classifier that is short enough to need no object file. It lives as long as its descriptor or a
/// link that runs it. `name`: letters, digits and underscores, 15 at most.
///
/// # Errors
/// The verifier refuses it.
pub fn load_classifier(name: &str, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    /// The beginning of the `prog_load` member of `union bpf_attr`.
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
    }
    /// `BPF_PROG_TYPE_SCHED_CLS`.
    const CLASSIFIER: u32 = 3;
    let mut load = Load {
        kind: CLASSIFIER,
        count: u32::try_from(instructions.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        ..Load::default()
    };
    // The last byte stays zero.
    for (to, from) in load.name[..15].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: the pointers are to `count` instructions and to a string that ends in zero, both valid during the call.
    unsafe { bpf_fd(Command::ProgLoad, &load) }
}

/// Kernel's id of a loaded program.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    /// The beginning of `struct bpf_prog_info`.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
    }
    // SAFETY: `Info` is laid out as that beginning, of numbers alone.
    let info: Info = unsafe { object_info(program) }?;
    Ok(info.id)
}

/// The program with that id, `None` when it is gone.
///
/// # Errors
/// The kernel refuses.
pub fn program_by_id(id: u32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: the member of `union bpf_attr` that begins with the id, without pointers; the command returns a new
    // descriptor.
    match unsafe { bpf_fd(Command::ProgGetFdById, &[id, 0, 0]) } {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        found => found.map(Some),
    }
}

/// The kernel's information about a loaded program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedProgram {
    /// Its name; empty: it has none.
    pub name: String,
    /// When it was loaded, in nanoseconds since boot, suspended time included (`CLOCK_BOOTTIME`). `None`
    /// before Linux 4.15.
    pub loaded: Option<u64>,
}

/// Name of the program with that id, `None` when it is gone.
///
/// # Errors
/// The kernel refuses.
pub fn program_name(id: u32) -> io::Result<Option<String>> {
    Ok(loaded_program(id)?.map(|program| program.name))
}

/// The program with that id, `None` when it is gone.
///
/// # Errors
/// The kernel refuses.
pub fn loaded_program(id: u32) -> io::Result<Option<LoadedProgram>> {
    /// The beginning of `struct bpf_prog_info`, to the name.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind_and_id: [u32; 2],
        tag: [u8; 8],
        lengths: [u32; 2],
        instructions: [u64; 2],
        load_time: u64,
        owner_and_maps: [u32; 2],
        map_ids: u64,
        name: [u8; 16],
    }
    let Some(program) = program_by_id(id)? else { return Ok(None) };
    // SAFETY: `Info` is laid out as that beginning, of numbers alone. Those that the kernel takes for lengths of buffers and
    // for pointers to them are zero: it writes nothing there.
    let info: Info = unsafe { object_info(program.as_fd()) }?;
    let end = info.name.iter().position(|byte| *byte == 0).unwrap_or(info.name.len());
    let name = String::from_utf8_lossy(&info.name[..end]).into_owned();
    Ok(Some(LoadedProgram { name, loaded: Some(info.load_time).filter(|at| *at != 0) }))
}
