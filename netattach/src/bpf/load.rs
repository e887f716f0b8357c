//! Loads the embedded programs into the kernel and pins them.

use std::collections::BTreeMap;
use std::fs;
use std::thread;

use aya::maps::{MapData, ProgramArray};
use aya::programs::{Program as AnyProgram, ProgramError};
use aya::{Ebpf, EbpfLoader};

use super::error::{BpfError, Refusal};
use super::map_table::MapSpec;
use super::object::Fitted;
use super::packet_log::{self, Detail};
use super::pin::Pins;
use super::program_table::Program;

/// Programs verified at once. For each the kernel takes tens of megabytes, which are charged to the agent.
const VERIFIED_AT_ONCE: usize = 2;

/// Loads the object with the pinned maps, creates and pins missing maps, and replaces the pinned programs.
/// `log`: the level of detail, for a logging object. Returns the object, with the maps that are not pinned.
pub(super) fn load(
    object: &Fitted,
    log: Option<Detail>,
    pins: &Pins,
    specs: &[MapSpec],
) -> Result<Ebpf, BpfError> {
    let loaded = load_and_pin(object, log, pins, specs);
    release_free_memory();
    loaded
}

fn load_and_pin(
    object: &Fitted,
    log: Option<Detail>,
    pins: &Pins,
    specs: &[MapSpec],
) -> Result<Ebpf, BpfError> {
    let mut ebpf = verified(object, log, Some(pins), specs)?;
    for which in Program::ALL {
        let name = which.name();
        let failed = |source| refused(name, source);
        let program = ebpf.program_mut(name).ok_or(BpfError::NoProgram(name))?;
        if let Some((map, slot)) = which.slot() {
            let mut slots: ProgramArray<MapData> = pins.open(map)?;
            let fd = program.fd().map_err(failed)?;
            slots.set(slot, fd, 0).map_err(|source| BpfError::WriteMap { map, source })?;
        }
        replace_pin(program, pins, which)?;
    }
    Ok(ebpf)
}

/// Checks whether the kernel accepts the programs of the object: loads them with maps of their own, and frees
/// both again.
pub(super) fn try_out(object: &Fitted, log: Option<Detail>, specs: &[MapSpec]) -> Result<(), BpfError> {
    let tried = verified(object, log, None, specs).map(drop);
    release_free_memory();
    tried
}

/// Loads the object with the pinned maps, or with maps without pins, and has the kernel verify its programs.
fn verified(
    object: &Fitted,
    log: Option<Detail>,
    pins: Option<&Pins>,
    specs: &[MapSpec],
) -> Result<Ebpf, BpfError> {
    let level = log.map(Detail::level);
    let mut loader = EbpfLoader::new();
    loader.override_global("NA_COOKIES", &object.means.cookies, true);
    loader.override_global("NA_SKB", &object.means.fields, true);
    let has_cast = u8::from(object.means.cast != 0);
    loader.override_global("NA_CAST", &has_cast, true);
    if let Some(level) = &level {
        loader.override_global(aya_log::LEVEL, level, false);
    }
    for spec in specs {
        if let Some(pins) = pins {
            loader.map_pin_path(spec.name, pins.map(spec.name));
        }
        loader.map_max_entries(spec.name, spec.max_entries);
    }
    let mut ebpf = loader
        .load(&object.bytes())
        .map_err(|error| BpfError::LoadObject(Refusal::of("the object", error)))?;
    if log.is_some() && !packet_log::logs(&ebpf) {
        return Err(BpfError::NotLogging);
    }
    load_programs(&mut ebpf)?;
    Ok(ebpf)
}

/// Has the kernel verify the programs, several in parallel: verification is most of the time of an upgrade.
fn load_programs(ebpf: &mut Ebpf) -> Result<(), BpfError> {
    let mut programs: BTreeMap<&str, _> = ebpf.programs_mut().collect();
    let wanted = Program::ALL.map(|which| {
        let name = which.name();
        Ok((name, programs.remove(name).ok_or(BpfError::NoProgram(name))?))
    });
    let mut wanted = wanted.into_iter().collect::<Result<Vec<_>, BpfError>>()?;
    wanted.chunks_mut(VERIFIED_AT_ONCE).try_for_each(|some| {
        thread::scope(|scope| {
            let load = |(name, program): &mut (&'static str, &mut AnyProgram)| {
                let loaded = match program {
                    AnyProgram::SchedClassifier(classifier) => classifier.load(),
                    AnyProgram::Xdp(xdp) => xdp.load(),
                    AnyProgram::SocketFilter(filter) => filter.load(),
                    _ => Err(ProgramError::UnexpectedProgramType),
                };
                loaded.map_err(|source| refused(name, source))
            };
            let loading: Vec<_> = some.iter_mut().map(|one| scope.spawn(move || load(one))).collect();
            loading.into_iter().try_for_each(|loading| {
                loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    })
}

/// Returns freed memory to the kernel. Loading programs parses the kernel's type information, tens of
/// megabytes that glibc would keep for the rest of the agent's life.
fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no arguments that could be wrong; glibc locks its arenas itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn refused(program: &'static str, error: ProgramError) -> BpfError {
    BpfError::LoadProgram { program, source: Refusal::of(program, error) }
}

/// Pins under another name, then renames: at every moment the old or the new program is pinned.
fn replace_pin(program: &mut AnyProgram, pins: &Pins, which: Program) -> Result<(), BpfError> {
    let next = pins.next_program(which);
    // Left by an agent that was killed here.
    match fs::remove_file(&next) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(BpfError::PinTree { action: "remove", path: next, source });
        }
        _ => {}
    }
    program.pin(&next).map_err(|source| BpfError::PinProgram {
        program: which.name(),
        path: next.clone(),
        source,
    })?;
    fs::rename(&next, pins.program(which)).map_err(|source| BpfError::PinTree {
        action: "put a new program in place of",
        path: pins.program(which),
        source,
    })
}
