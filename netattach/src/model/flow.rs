//! Packets of one flow on several CPUs, which read and write the words of its entry at the same time
//! (`netattach_common::entry`). Any other CPU may go on before each word.

use std::sync::atomic::{AtomicBool, Ordering};

use netattach_common::entry::{Entry, InPlace};
use netattach_common::flow::{Leg, Signal, state, tcp};
use netattach_common::{Flow, Traffic, protocol};

use super::{explore, finds};
use crate::sync::{Arc, step, thread};

/// Numbers of policies.
const BEFORE: u32 = 7;
const OTHER: u32 = 8;
const AFTER: u32 = 9;
const ACK: Signal = Signal { flags: tcp::ACK };
const FIN: Signal = Signal { flags: tcp::FIN | tcp::ACK };

/// An entry of which each word is read and written in one step.
struct Shared(std::sync::Mutex<Flow>);

impl Shared {
    fn of(flow: Flow) -> Arc<Self> {
        Arc::new(Self(std::sync::Mutex::new(flow)))
    }

    fn read<T>(&self, word: impl FnOnce(&Flow) -> T) -> T {
        step();
        word(&self.0.lock().unwrap())
    }

    fn write(&self, word: impl FnOnce(&mut Flow)) {
        step();
        word(&mut self.0.lock().unwrap());
    }
}

impl Entry for Shared {
    fn last_seen(&self) -> u32 {
        self.read(|flow| flow.last_seen)
    }

    fn state(&self) -> u8 {
        self.read(|flow| flow.state)
    }

    fn opened_by_low(&self) -> u8 {
        self.read(|flow| flow.opened_by_low)
    }

    fn approved_by(&self, leg: Leg) -> u32 {
        self.read(|flow| flow.approved_by(leg))
    }
}

impl InPlace for Shared {
    fn set_last_seen(&self, second: u32) {
        self.write(|flow| flow.last_seen = second);
    }

    fn set_state(&self, state: u8) {
        self.write(|flow| flow.state = state);
    }

    fn set_approved_by(&self, leg: Leg, policy: u32) {
        self.write(|flow| match leg {
            Leg::Opener => flow.opener_approved_by = policy,
            Leg::Responder => flow.responder_approved_by = policy,
        });
    }

    fn set_origin(&self, other: &Flow) {
        self.write(|flow| flow.opened_by_low = other.opened_by_low);
        self.write(|flow| flow.place = other.place);
        self.write(|flow| flow.opened = other.opened);
        self.write(|flow| flow.attachment = other.attachment);
    }

    fn traffic(&self, forward: bool) -> Traffic {
        self.read(|flow| if forward { flow.forward } else { flow.backward })
    }

    fn set_traffic(&self, forward: bool, traffic: Traffic) {
        self.write(|flow| if forward { flow.forward = traffic } else { flow.backward = traffic });
    }
}

/// Runs the work of one CPU while the caller does that of another.
fn beside(entry: &Arc<Shared>, one: impl FnOnce(&Shared) + Send + 'static, other: impl FnOnce(&Shared)) {
    let shared = Arc::clone(entry);
    let first = thread::spawn(move || one(&shared));
    other(entry);
    first.join().unwrap();
}

/// An expired flow of the lower end gives its entry to one that the other end opens, while a packet reads the
/// approval of the opener's leg. The fault: the words are written in the order of their offsets.
fn renews(begin: fn(&Shared, &Flow)) {
    let before = Flow { attachment: 1, ..Flow::entered(0, true, Leg::Opener, BEFORE, state::REPLIED) };
    let after = Flow { attachment: 2, ..Flow::entered(500, false, Leg::Opener, AFTER, 0) };
    let entry = Shared::of(before);
    beside(
        &entry,
        move |entry| begin(entry, &after),
        |entry| {
            let is_after = entry.opened_by_low() == after.opened_by_low;
            let approved_by = entry.approved_by(Leg::Opener);
            assert!(!is_after || approved_by != BEFORE, "approved by a policy of the other end");
        },
    );
    assert_eq!(*entry.0.lock().unwrap(), after);
}

fn in_order_of_place(entry: &Shared, flow: &Flow) {
    entry.set_last_seen(flow.last_seen);
    entry.set_origin(flow);
    entry.set_state(flow.state);
    entry.set_approved_by(Leg::Opener, flow.opener_approved_by);
    entry.set_approved_by(Leg::Responder, flow.responder_approved_by);
    entry.set_traffic(true, flow.forward);
    entry.set_traffic(false, flow.backward);
}

/// A flow's entry is renewed while another CPU displaces the flow and enters another one, which gets the same memory.
/// The fault: it is not checked whether the entry still has the key.
fn renews_what_is_displaced(looks: bool) {
    const NOW: u32 = 500;
    let renewed = Flow::entered(NOW, true, Leg::Responder, AFTER, 0);
    let other = Flow::entered(NOW, false, Leg::Opener, OTHER, 0);
    let entry = Shared::of(Flow::entered(0, true, Leg::Responder, BEFORE, 0));
    let is_displaced = Arc::new(AtomicBool::new(false));
    let displaced = Arc::clone(&is_displaced);
    beside(
        &entry,
        // The kernel writes an entry completely before other CPUs can find it.
        move |entry| {
            entry.write(|flow| {
                *flow = other;
                displaced.store(true, Ordering::SeqCst);
            });
        },
        |entry| {
            entry.begin(&renewed);
            step();
            if looks && is_displaced.load(Ordering::SeqCst) {
                entry.give_up(NOW);
            }
        },
    );
    let flow = *entry.0.lock().unwrap();
    let is_unapproved = flow.opener_approved_by == 0 && flow.responder_approved_by == 0;
    let is_expired = flow.life().is_expired(protocol::TCP, NOW);
    assert!(flow == other || is_unapproved && is_expired, "{flow:?}");
}

/// A leg that no policy judged at its own end is approved elsewhere, while its end reads whether it has approved the
/// leg itself, which it never has. The faults: the approval is written before the mark is cleared, or read after it.
fn is_approved_elsewhere(approve: fn(&Shared), is_kept: fn(&Shared) -> bool) {
    let entry = Shared::of(Flow::entered(0, true, Leg::Opener, 0, state::OPENER_AT_END));
    beside(&entry, approve, |entry| {
        assert!(!is_kept(entry), "its end has not approved it");
    });
    let flow = *entry.0.lock().unwrap();
    assert_eq!((flow.approved_by(Leg::Opener), flow.state), (OTHER, 0));
}

fn approve_elsewhere(entry: &Shared) {
    entry.approve(Leg::Opener, OTHER, false);
}

fn approve_before_the_mark_goes(entry: &Shared) {
    entry.set_approved_by(Leg::Opener, OTHER);
    entry.set_state(0);
}

fn is_kept(entry: &Shared) -> bool {
    entry.is_kept(Leg::Opener)
}

fn is_kept_by_the_mark_first(entry: &Shared) -> bool {
    let at_end = entry.life().is_at_end(Leg::Opener);
    at_end && !matches!(entry.approved_by(Leg::Opener), 0 | Flow::REFUSED..)
}

/// One end refuses a conversation while the other sends a packet of it, which approves its own leg under a new
/// policy. The fault: the packet writes the whole entry as it was read.
fn is_refused_and_sent(sends: fn(&Shared)) {
    let before = Flow {
        responder_approved_by: BEFORE,
        ..Flow::entered(0, true, Leg::Opener, BEFORE, state::REPLIED | state::ESTABLISHED)
    };
    let entry = Shared::of(before);
    beside(&entry, |entry| entry.refuse(Leg::Responder), sends);
    let flow = *entry.0.lock().unwrap();
    assert_eq!((flow.opener_approved_by, flow.responder_approved_by), (AFTER, Flow::REFUSED));
    assert_eq!(flow.state, before.state | state::OPENER_FIN);
    assert_eq!(flow.forward, Traffic { packets: 1, bytes: 60 });
    // Seen before the refusal, or after it.
    assert!(matches!(flow.last_seen, 0 | 5), "{flow:?}");
}

fn send(entry: &Shared) {
    entry.approve(Leg::Opener, AFTER, false);
    let goes_on = entry.go_on(true, |_| {});
    entry.count(true, 60);
    let life = entry.life();
    entry.note(life, FIN, true, if goes_on { 5 } else { life.last_seen });
}

fn send_and_write_all(entry: &Shared) {
    let read = entry.read(|flow| *flow);
    let copy = Shared(std::sync::Mutex::new(read));
    send(&copy);
    entry.write(|flow| *flow = *copy.0.lock().unwrap());
}

/// Two packets of one direction: each word is one that a packet has written.
fn both_send() {
    let entry = Shared::of(Flow::entered(0, true, Leg::Opener, BEFORE, state::REPLIED));
    let note = |second| move |entry: &Shared| entry.note(entry.life(), ACK, true, second);
    beside(&entry, note(5), note(6));
    let flow = *entry.0.lock().unwrap();
    assert!(matches!(flow.last_seen, 5 | 6), "{flow:?}");
    assert_eq!((flow.state, flow.opener_approved_by), (state::REPLIED | state::ESTABLISHED, BEFORE));
}

/// A reset while another CPU handles a packet that shows that the connection goes on: one of them is noted last, and
/// nothing else is lost.
fn is_reset_and_sent() {
    const NOW: u32 = 5;
    const RST: Signal = Signal { flags: tcp::RST };
    let lasts = state::REPLIED | state::ESTABLISHED;
    let before = Flow {
        responder_approved_by: OTHER,
        ..Flow::entered(0, true, Leg::Opener, BEFORE, lasts | state::RST)
    };
    let entry = Shared::of(before);
    let note = |signal, forward| move |entry: &Shared| entry.note(entry.life(), signal, forward, NOW);
    beside(&entry, note(RST, false), note(ACK, true));
    let flow = *entry.0.lock().unwrap();
    assert!([lasts, lasts | state::RST].contains(&flow.state), "{flow:?}");
    assert_eq!(Flow { state: before.state, last_seen: 0, ..flow }, before);
    assert_eq!(flow.last_seen, NOW);
}

#[test]
fn a_reset_and_a_packet_that_contradicts_it_leave_all_other_words() {
    explore(1_000, is_reset_and_sent);
}

#[test]
fn no_approval_of_the_flow_before_is_found_in_an_entry_that_is_renewed() {
    explore(2_000, || renews(Shared::begin));
}

#[test]
fn an_entry_that_is_renewed_word_by_word_in_any_order_is_found() {
    assert!(finds(2_000, || renews(in_order_of_place)));
}

#[test]
fn what_is_written_of_a_flow_that_another_cpu_displaces_is_not_said_of_the_next_one() {
    explore(2_000, || renews_what_is_displaced(true));
}

#[test]
fn an_entry_that_nobody_looks_for_again_is_found() {
    assert!(finds(2_000, || renews_what_is_displaced(false)));
}

#[test]
fn a_leg_is_not_kept_by_an_approval_that_is_not_of_its_end() {
    explore(2_000, || is_approved_elsewhere(approve_elsewhere, is_kept));
}

#[test]
fn an_approval_that_is_written_too_early_is_found() {
    assert!(finds(2_000, || is_approved_elsewhere(approve_before_the_mark_goes, is_kept)));
}

#[test]
fn an_approval_that_is_read_too_late_is_found() {
    assert!(finds(2_000, || is_approved_elsewhere(approve_elsewhere, is_kept_by_the_mark_first)));
}

#[test]
fn a_refusal_stays_whatever_the_other_end_sends_meanwhile() {
    explore(2_000, || is_refused_and_sent(send));
}

#[test]
fn a_packet_that_writes_words_which_it_has_not_changed_is_found() {
    assert!(finds(2_000, || is_refused_and_sent(send_and_write_all)));
}

#[test]
fn two_packets_leave_words_that_one_of_them_has_written() {
    explore(1_000, both_send);
}
