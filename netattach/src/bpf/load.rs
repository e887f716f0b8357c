//! Brings the embedded programs into the kernel and pins them.

use std::fs;

use aya::EbpfLoader;
use aya::maps::{MapData, ProgramArray};
use aya::programs::SchedClassifier;

use super::BpfError;
use super::object::Object;
use super::pin::{MapSpec, Pins, Program};
use super::{probe, sys};

/// Loads the object on the pinned maps, creating and pinning those that are missing, and puts its programs in
/// the place of the pinned ones.
pub(super) fn load(object: &Object, pins: &Pins, specs: &[MapSpec]) -> Result<(), BpfError> {
    let loaded = load_and_pin(object, pins, specs);
    sys::release_free_memory();
    loaded
}

fn load_and_pin(object: &Object, pins: &Pins, specs: &[MapSpec]) -> Result<(), BpfError> {
    let cookies = u8::from(probe::has_netns_cookie());
    let mut loader = EbpfLoader::new();
    loader.override_global("NA_COOKIES", &cookies, true);
    for spec in specs {
        loader.map_pin_path(spec.name, pins.map(spec.name));
        loader.map_max_entries(spec.name, spec.max_entries);
    }
    let mut ebpf = loader.load(object.bytes).map_err(|error| BpfError::LoadObject(Box::new(error)))?;
    for which in Program::ALL {
        let name = which.name();
        let failed = |source| BpfError::LoadProgram { program: name, source };
        let program: &mut SchedClassifier =
            ebpf.program_mut(name).ok_or(BpfError::NoProgram(name))?.try_into().map_err(failed)?;
        program.load().map_err(failed)?;
        if let Some((map, slot)) = which.slot() {
            let mut slots: ProgramArray<MapData> = pins.open(map)?;
            let fd = program.fd().map_err(failed)?;
            slots.set(slot, fd, 0).map_err(|source| BpfError::WriteMap { map, source })?;
        }
        replace_pin(program, pins, which)?;
    }
    Ok(())
}

/// Pins beside, then renames over: at every moment the old or the new program is pinned.
fn replace_pin(program: &mut SchedClassifier, pins: &Pins, which: Program) -> Result<(), BpfError> {
    let next = pins.next_program(which);
    // Left behind by an agent that was killed here.
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
