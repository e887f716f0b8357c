//! Traffic that is judged after the node has translated addresses: the attachment that each address belongs
//! to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
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

/// The programs and their maps, with a cache of their entries. Only one owner at a time.
pub struct Routed {
    programs: [Box<dyn AsFd + Send>; 2],
    gates: Box<dyn MapOps<u32, u64>>,
    addresses: Box<dyn MapOps<Ip6, u32>>,
    known_gates: BTreeMap<u32, Gate>,
    known_addresses: BTreeMap<Ip6, u32>,
    /// Attachments that wait for an address that belongs to another attachment, by address: nearly always
    /// empty.
    waiting: BTreeMap<Ip6, BTreeSet<u32>>,
}

impl Routed {
    /// Opens the maps and reads the entries of an earlier agent.
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        Self::with(pins, [Program::Routed, Program::Forwarded])
    }

    fn with(pins: &Pins, [ends, forwarded]: [Program; 2]) -> Result<Self, BpfError> {
        let open = |program| Ok::<_, BpfError>(Box::new(Opened(open_program(&pins.program(program))?)));
        let (ends, forwarded) = (open(ends)?, open(forwarded)?);
        let gates = Box::new(BatchedMap::open(pins, map_name::GATE)?);
        Self::over([ends, forwarded], gates, Box::new(BatchedMap::open(pins, map_name::GUARD)?))
    }

    /// Reads the entries of the given maps.
    pub(super) fn over(
        programs: [Box<dyn AsFd + Send>; 2],
        mut gates: Box<dyn MapOps<u32, u64>>,
        mut addresses: Box<dyn MapOps<Ip6, u32>>,
    ) -> Result<Self, BpfError> {
        let mut known_gates: BTreeMap<u32, Gate> =
            gates.all()?.into_iter().map(|(id, word)| (id, Gate::from_word(word))).collect();
        known_gates.retain(|_, gate| *gate != Gate::NONE);
        let known_addresses = addresses.all()?.into_iter().collect();
        Ok(Self { programs, gates, addresses, known_gates, known_addresses, waiting: BTreeMap::new() })
    }

    /// A value with these gates open, whose programs are placeholders.
    ///
    /// # Panics
    /// There is no /dev/null.
    #[cfg(test)]
    pub(crate) fn in_memory(gates: &[(u32, Gate)]) -> Self {
        let nothing = || -> Box<dyn AsFd + Send> { Box::new(std::fs::File::open("/dev/null").unwrap()) };
        let gates: BTreeMap<u32, u64> = gates.iter().map(|(id, gate)| (*id, gate.to_word())).collect();
        Self::over([nothing(), nothing()], Box::new(gates), Box::new(BTreeMap::new())).unwrap()
    }

    /// The programs for the node's packet filter: for packets to the node itself and from it, and for those that
    /// it forwards.
    pub fn programs(&self) -> [BorrowedFd<'_>; 2] {
        self.programs.each_ref().map(|program| (**program).as_fd())
    }

    /// The attachment that each address leads to.
    pub fn leads(&self) -> BTreeMap<IpAddr, u32> {
        let address = |it: &Ip6| Ipv6Addr::from(it.octets).to_canonical();
        self.known_addresses.iter().map(|(it, id)| (address(it), *id)).collect()
    }

    /// Returns the first of these addresses that belongs to another attachment, with that attachment's
    /// number.
    pub fn holder(&self, id: u32, addresses: &[IpAddr]) -> Option<(IpAddr, u32)> {
        let of = |address: &IpAddr| Some((*address, *self.known_addresses.get(&widened(*address))?));
        addresses.iter().filter_map(of).find(|(_, holder)| *holder != id)
    }

    /// Judges the traffic that the node routes from and to these addresses, and no others, for an attachment.
    /// An address that belongs to another attachment is not taken over until that one is removed.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn guard(&mut self, id: u32, addresses: &[IpAddr]) -> Result<(), BpfError> {
        let wanted: BTreeSet<Ip6> = addresses.iter().map(|address| widened(*address)).collect();
        self.stop_waiting(|address, of| of == id && !wanted.contains(address));
        for address in &wanted {
            match self.known_addresses.get(address) {
                Some(of) if *of == id => {}
                Some(_) => {
                    self.waiting.entry(*address).or_default().insert(id);
                }
                None => self.lead(*address, id)?,
            }
        }
        self.give_up(|address, of| of == id && !wanted.contains(address))
    }

    /// Sets where the node receives an attachment's frames, and which traffic its device leaves to the packet
    /// filter. Addresses have to be guarded before the gate opens, and may be released only after it has closed.
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

    /// Makes all devices judge all of their traffic again, which still know where the node receives frames.
    ///
    /// # Errors
    /// The map could not be written.
    pub fn close(&mut self) -> Result<(), BpfError> {
        let open: Vec<(u32, Gate)> = self
            .known_gates
            .iter()
            .filter(|(_, gate)| gate.is_open())
            .map(|(id, gate)| (*id, *gate))
            .collect();
        open.into_iter().try_for_each(|(id, gate)| self.set_gate(id, gate.to_closed()))
    }

    /// Makes the attachment's device judge all of its traffic again. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn forget(&mut self, id: u32) -> Result<(), BpfError> {
        self.set_gate(id, Gate::NONE)?;
        self.stop_waiting(|_, of| of == id);
        self.give_up(|_, of| of == id)
    }

    /// The attachments whose devices leave packets to the packet filter.
    #[cfg(test)]
    pub(crate) fn open_gates(&self) -> Vec<u32> {
        self.known_gates.iter().filter(|(_, gate)| gate.is_open()).map(|(id, _)| *id).collect()
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

    /// Makes an address belong to an attachment.
    fn lead(&mut self, address: Ip6, id: u32) -> Result<(), BpfError> {
        self.addresses.put(address, id)?;
        self.known_addresses.insert(address, id);
        Ok(())
    }

    /// Releases addresses of attachments. An address for which another attachment waits passes to it
    /// directly, without a moment in which it belongs to none.
    fn give_up(&mut self, goes: impl Fn(&Ip6, u32) -> bool) -> Result<(), BpfError> {
        let going: Vec<Ip6> = self
            .known_addresses
            .iter()
            .filter(|(address, id)| goes(address, **id))
            .map(|(it, _)| *it)
            .collect();
        for address in going {
            match self.waiting.get(&address).and_then(|ids| ids.first().copied()) {
                Some(next) => {
                    self.lead(address, next)?;
                    self.stop_waiting(|at, of| *at == address && of == next);
                }
                None => {
                    self.addresses.remove(&address)?;
                    self.known_addresses.remove(&address);
                }
            }
        }
        Ok(())
    }

    fn stop_waiting(&mut self, goes: impl Fn(&Ip6, u32) -> bool) {
        self.waiting.retain(|address, ids| {
            ids.retain(|id| !goes(address, *id));
            !ids.is_empty()
        });
    }
}

/// A program in the kernel.
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

/// Makes devices judge all of their traffic again, in the pins of an agent that has ended: the packet filter
/// is about to stop judging.
///
/// # Errors
/// A map could not be read or written.
pub fn close_gates(root: &Path) -> Result<(), BpfError> {
    let pins = Pins::new(root);
    if !exists(&pins.map(map_name::GATE))? || !exists(&pins.program(Program::Routed))? {
        return Ok(());
    }
    // No program is run here, and an earlier agent has one of them only.
    let mut routed = Routed::with(&pins, [Program::Routed; 2])?;
    routed.known().into_iter().try_for_each(|id| routed.forget(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The attachment that each address belongs to in the map.
    fn leads(routed: &mut Routed) -> BTreeMap<IpAddr, u32> {
        let entered: BTreeMap<Ip6, u32> = routed.addresses.all().unwrap().into_iter().collect();
        assert_eq!(entered, routed.known_addresses, "the cache is what the map has");
        routed.leads()
    }

    fn expected(entries: &[(&str, u32)]) -> BTreeMap<IpAddr, u32> {
        entries.iter().map(|(text, id)| (text.parse().unwrap(), *id)).collect()
    }

    /// Rows: SVC-one-owner.
    #[test]
    fn an_address_leads_to_the_first_that_has_it_until_that_one_goes() {
        let mut routed = Routed::in_memory(&[]);
        let (both, other) = (ips(&["10.0.0.7", "fd00::7"]), ips(&["10.0.0.7", "10.0.0.8"]));
        routed.guard(1, &both).unwrap();
        assert_eq!(routed.holder(1, &both), None);
        assert_eq!(routed.holder(2, &other), Some((other[0], 1)));
        for _ in 0..2 {
            routed.guard(2, &other).unwrap();
            routed.guard(3, &other).unwrap();
            routed.guard(1, &both).unwrap();
            let first = [("10.0.0.7", 1), ("10.0.0.8", 2), ("fd00::7", 1)];
            assert_eq!(leads(&mut routed), expected(&first), "nobody takes one");
        }
        // An address that one attachment releases passes to the next, and stays with that one.
        routed.guard(1, &both[1..]).unwrap();
        let second = [("10.0.0.7", 2), ("10.0.0.8", 2), ("fd00::7", 1)];
        assert_eq!(leads(&mut routed), expected(&second));
        routed.guard(1, &both).unwrap();
        assert_eq!(leads(&mut routed), expected(&second));
        // A waiting attachment that is removed gets nothing.
        routed.forget(3).unwrap();
        routed.forget(2).unwrap();
        let third = [("10.0.0.7", 1), ("fd00::7", 1)];
        assert_eq!(leads(&mut routed), expected(&third));
        routed.forget(1).unwrap();
        assert_eq!((leads(&mut routed), routed.known()), (BTreeMap::new(), BTreeSet::new()));
        assert_eq!(routed.waiting, BTreeMap::new());
    }

    /// Rows: SVC-one-owner.
    #[test]
    fn who_wants_an_address_no_more_is_not_handed_it() {
        let mut routed = Routed::in_memory(&[]);
        let address = ips(&["10.0.0.7"]);
        for id in [1, 2, 3] {
            routed.guard(id, &address).unwrap();
        }
        routed.guard(2, &ips(&["10.0.0.9"])).unwrap();
        routed.forget(1).unwrap();
        assert_eq!(leads(&mut routed), expected(&[("10.0.0.7", 3), ("10.0.0.9", 2)]));
    }
}
