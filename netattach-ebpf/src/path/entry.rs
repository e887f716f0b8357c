//! Values of the flow tables in place, which other CPUs write at the same time: no Rust reference to them is made, as
//! a reference would promise that there is no other writer, and each word is read and written whole, in program
//! order.
//!
//! A value stays mapped while the program runs, even after its removal. A removed value may be reused for another key
//! at once (Linux 6.1 and later); a program that still holds it then reads and writes a word of that key's value.

use core::ptr;

use netattach_common::{
    Address, Flow, FlowKey, Traffic,
    entry::{Entry, InPlace},
    flow::Leg,
};

/// A value of `na_ct4` or `na_ct6`.
#[derive(Clone, Copy)]
pub(crate) struct FlowEntry(*mut Flow);

impl FlowEntry {
    /// # Safety
    /// It is a value of one of these maps, which this program has looked up.
    #[inline(always)]
    pub(crate) unsafe fn new(value: *mut Flow) -> Self {
        Self(value)
    }

    /// Whether both are one value of the map.
    #[inline(always)]
    pub(crate) fn is_same(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// [`Flow::attachment`].
    #[inline(always)]
    pub(crate) fn attachment(self) -> u32 {
        // SAFETY: an aligned word of a map value (`new`).
        unsafe { (&raw const (*self.0).attachment).read_volatile() }
    }

    /// [`Flow::place`].
    #[inline(always)]
    pub(crate) fn place(self) -> u16 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).place).read_volatile() }
    }

    /// Address of the id of the policy that approved a leg.
    #[inline(always)]
    fn approval(self, leg: Leg) -> *mut u32 {
        // SAFETY: addresses within a map value; nothing is read.
        unsafe {
            match leg {
                Leg::Opener => &raw mut (*self.0).opener_approved_by,
                Leg::Responder => &raw mut (*self.0).responder_approved_by,
            }
        }
    }

    /// Address of the traffic counters of a direction.
    #[inline(always)]
    fn counters(self, forward: bool) -> *mut Traffic {
        // SAFETY: as above.
        unsafe { if forward { &raw mut (*self.0).forward } else { &raw mut (*self.0).backward } }
    }
}

impl Entry for FlowEntry {
    #[inline(always)]
    fn last_seen(&self) -> u32 {
        // SAFETY: an aligned word of a map value (`new`).
        unsafe { (&raw const (*self.0).last_seen).read_volatile() }
    }

    #[inline(always)]
    fn state(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).state).read_volatile() }
    }

    #[inline(always)]
    fn opened_by_low(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).opened_by_low).read_volatile() }
    }

    #[inline(always)]
    fn approved_by(&self, leg: Leg) -> u32 {
        // SAFETY: as above.
        unsafe { self.approval(leg).read_volatile() }
    }
}

impl InPlace for FlowEntry {
    #[inline(always)]
    fn set_last_seen(&self, second: u32) {
        // SAFETY: an aligned word of a map value (`new`).
        unsafe { (&raw mut (*self.0).last_seen).write_volatile(second) }
    }

    #[inline(always)]
    fn set_state(&self, state: u8) {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.0).state).write_volatile(state) }
    }

    #[inline(always)]
    fn set_approved_by(&self, leg: Leg, policy: u32) {
        // SAFETY: as above.
        unsafe { self.approval(leg).write_volatile(policy) }
    }

    #[inline(always)]
    fn set_origin(&self, flow: &Flow) {
        // SAFETY: as above, four of them.
        unsafe {
            (&raw mut (*self.0).opened_by_low).write_volatile(flow.opened_by_low);
            (&raw mut (*self.0).place).write_volatile(flow.place);
            (&raw mut (*self.0).opened).write_volatile(flow.opened);
            (&raw mut (*self.0).attachment).write_volatile(flow.attachment);
        }
    }

    #[inline(always)]
    fn traffic(&self, forward: bool) -> Traffic {
        let counters = self.counters(forward);
        // SAFETY: aligned words of a map value (`new`).
        unsafe {
            Traffic {
                packets: (&raw const (*counters).packets).read_volatile(),
                bytes: (&raw const (*counters).bytes).read_volatile(),
            }
        }
    }

    #[inline(always)]
    fn set_traffic(&self, forward: bool, traffic: Traffic) {
        let counters = self.counters(forward);
        // SAFETY: as above.
        unsafe {
            (&raw mut (*counters).packets).write_volatile(traffic.packets);
            (&raw mut (*counters).bytes).write_volatile(traffic.bytes);
        }
    }
}

/// A value of `na_own4` or `na_own6`: the key of the flow that took a place last. Two CPUs take the same place at the
/// same moment only if one of them has gone through all other places meanwhile. Then the key may be a mixture of two
/// keys, for which no flow is found: nothing is removed, as the key is copied before it is looked up.
#[derive(Clone, Copy)]
pub(crate) struct PlaceHolder<A>(*mut FlowKey<A>);

impl<A: Address> PlaceHolder<A> {
    /// 32 bits each.
    const WORDS: usize = {
        assert!(align_of::<FlowKey<A>>() == align_of::<u32>());
        size_of::<FlowKey<A>>() / size_of::<u32>()
    };

    /// # Safety
    /// It is a value of one of these maps, which this program has looked up.
    #[inline(always)]
    pub(crate) unsafe fn new(value: *mut FlowKey<A>) -> Self {
        Self(value)
    }

    /// Copies the key.
    #[inline(always)]
    pub(crate) fn read_into(self, key: &mut FlowKey<A>) {
        let (from, to) = (self.0.cast::<u32>(), ptr::from_mut(key).cast::<u32>());
        for word in 0..Self::WORDS {
            // SAFETY: within the map value (`new`) and within a key, which is whole words without padding (asserted beside the
            // type, and above): numbers, of which any bits are valid.
            unsafe { to.add(word).write(from.add(word).read_volatile()) };
        }
    }

    /// Writes the key.
    #[inline(always)]
    pub(crate) fn set(self, key: &FlowKey<A>) {
        let (from, to) = (ptr::from_ref(key).cast::<u32>(), self.0.cast::<u32>());
        for word in 0..Self::WORDS {
            // SAFETY: as in `read_into`.
            unsafe { to.add(word).write_volatile(from.add(word).read()) };
        }
    }
}
