//! Traffic that is judged after the node has translated addresses: the attachment of each address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use aya::programs::ProgramFd;
use netattach_common::{Address, Gate, Ip4, Ip6};

use super::BpfError;
use super::batched_map::BatchedMap;
use super::map_ops::MapOps;
use super::map_table::map_name;
use super::pin::{Pins, exists};
use super::program_table::Program;
use super::programs::open_program;

/// The program and its maps, with a cache of their entries: one owner at a time.
pub struct Routed {
    program: Box<dyn AsFd + Send>,
    gates: Box<dyn MapOps<u32, u64>>,
    addresses: Box<dyn MapOps<Ip6, u32>>,
    known_gates: BTreeMap<u32, Gate>,
    known_addresses: BTreeMap<Ip6, u32>,
}

impl Routed {
    /// Opens the maps and reads the entries of an earlier agent.
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        let program = open_program(&pins.program(Program::Routed))?;
        let gates = Box::new(BatchedMap::open(pins, map_name::GATE)?);
        Self::over(Box::new(Opened(program)), gates, Box::new(BatchedMap::open(pins, map_name::GUARD)?))
    }

    /// Reads the entries of any maps.
    pub(super) fn over(
        program: Box<dyn AsFd + Send>,
        mut gates: Box<dyn MapOps<u32, u64>>,
        mut addresses: Box<dyn MapOps<Ip6, u32>>,
    ) -> Result<Self, BpfError> {
        let mut known_gates: BTreeMap<u32, Gate> =
            gates.all()?.into_iter().map(|(id, word)| (id, Gate::from_word(word))).collect();
        known_gates.retain(|_, gate| *gate != Gate::NONE);
        let known_addresses = addresses.all()?.into_iter().collect();
        Ok(Self { program, gates, addresses, known_gates, known_addresses })
    }

    /// With these gates open, and nothing that runs.
    ///
    /// # Panics
    /// There is no /dev/null.
    #[cfg(test)]
    pub(crate) fn in_memory(gates: &[(u32, Gate)]) -> Self {
        let nothing = std::fs::File::open("/dev/null").unwrap();
        let gates: BTreeMap<u32, u64> = gates.iter().map(|(id, gate)| (*id, gate.to_word())).collect();
        Self::over(Box::new(nothing), Box::new(gates), Box::new(BTreeMap::new())).unwrap()
    }

    /// The program that the node's packet filter is to run.
    pub fn program(&self) -> BorrowedFd<'_> {
        (*self.program).as_fd()
    }

    /// Judges the traffic that the node routes from and to these addresses, and no others, for an attachment.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn guard(&mut self, id: u32, addresses: &[IpAddr]) -> Result<(), BpfError> {
        let wanted: BTreeSet<Ip6> = addresses.iter().map(|address| widened(*address)).collect();
        for address in &wanted {
            if self.known_addresses.get(address) != Some(&id) {
                self.addresses.put(*address, id)?;
                self.known_addresses.insert(*address, id);
            }
        }
        self.remove_addresses(|address, of| of == id && !wanted.contains(address))
    }

    /// Sets the traffic that an attachment's device leaves to the packet filter. Addresses are guarded before the gate
    /// opens, and released after it has closed.
    ///
    /// # Errors
    /// The map could not be written.
    pub fn set_gate(&mut self, id: u32, gate: Gate) -> Result<(), BpfError> {
        if self.known_gates.get(&id).copied().unwrap_or(Gate::NONE) == gate {
            return Ok(());
        }
        self.gates.put(id, gate.to_word())?;
        if gate == Gate::NONE {
            self.known_gates.remove(&id);
        } else {
            self.known_gates.insert(id, gate);
        }
        Ok(())
    }

    /// Judges all traffic of an attachment at its device, and none elsewhere. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn forget(&mut self, id: u32) -> Result<(), BpfError> {
        self.set_gate(id, Gate::NONE)?;
        self.remove_addresses(|_, of| of == id)
    }

    /// The attachments with devices that leave packets to the packet filter.
    pub fn open_gates(&self) -> Vec<u32> {
        self.known_gates.keys().copied().collect()
    }

    /// The gate of an attachment.
    #[cfg(test)]
    pub(crate) fn gate(&self, id: u32) -> Gate {
        self.known_gates.get(&id).copied().unwrap_or(Gate::NONE)
    }

    /// The attachments that have a gate or addresses here.
    pub fn known(&self) -> BTreeSet<u32> {
        self.known_gates.keys().chain(self.known_addresses.values()).copied().collect()
    }

    fn remove_addresses(&mut self, goes: impl Fn(&Ip6, u32) -> bool) -> Result<(), BpfError> {
        let going: Vec<Ip6> = self
            .known_addresses
            .iter()
            .filter(|(address, id)| goes(address, **id))
            .map(|(it, _)| *it)
            .collect();
        for address in going {
            self.addresses.remove(&address)?;
            self.known_addresses.remove(&address);
        }
        Ok(())
    }
}

/// A program of the kernel's.
struct Opened(ProgramFd);

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl std::fmt::Debug for Routed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Routed").field("gates", &self.known_gates).finish_non_exhaustive()
    }
}

fn widened(address: IpAddr) -> Ip6 {
    match address {
        IpAddr::V4(address) => Ip4::from(address).widen(),
        IpAddr::V6(address) => Ip6::from(address),
    }
}

/// Has devices judge everything again, below the pins of an agent that has ended: the packet filter is about to do it
/// no more.
///
/// # Errors
/// A map could not be read or written.
pub fn close_gates(root: &Path) -> Result<(), BpfError> {
    let pins = Pins::new(root);
    if !exists(&pins.map(map_name::GATE))? || !exists(&pins.program(Program::Routed))? {
        return Ok(());
    }
    let mut routed = Routed::open(&pins)?;
    routed.known().into_iter().try_for_each(|id| routed.forget(id))
}
