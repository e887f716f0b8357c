//! The checks of the fuzz targets without libFuzzer: each with the seeds that are kept for it, and with seeds that are
//! harmed at random. Needs neither root nor another tool.
//!
//! libFuzzer looks for inputs that reach new code, which takes instrumented dependencies and hours. What it has found is
//! kept, and a change that breaks a check breaks it mostly for those.

#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::path::Path;

use netattach_tests::reading;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

#[path = "../../../fuzz/checks/annotation.rs"]
mod annotation;
#[path = "../../../fuzz/checks/cni_config.rs"]
mod cni_config;
#[path = "../../../fuzz/checks/dhcp.rs"]
mod dhcp;
#[path = "../../../fuzz/checks/host_local.rs"]
mod host_local;
#[path = "../../../fuzz/checks/journal.rs"]
mod journal;
#[path = "../../../fuzz/checks/packet.rs"]
mod packet;
#[path = "../../../fuzz/checks/policies.rs"]
mod policies;
#[path = "../../../fuzz/checks/rpc_frame.rs"]
mod rpc_frame;

/// Inputs are not longer, in bytes.
const LONGEST: usize = 4096;
/// How often an input is harmed at most.
const HARMS: usize = 4;

/// Checks the seeds of a target, and so many inputs made of them. Prints the input that fails.
fn run(target: &str, made: usize, check: fn(&[u8])) {
    let seeds = seeds(target);
    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let harmed = (0..made).map(|_| {
        let mut input = seeds[below(&mut random, seeds.len())].clone();
        let other = &seeds[below(&mut random, seeds.len())];
        for _ in 0..=below(&mut random, HARMS) {
            harm(&mut random, &mut input, other);
        }
        input
    });
    for input in seeds.iter().cloned().chain(harmed) {
        let failing = Failing(&input);
        check(&input);
        std::mem::forget(failing);
    }
}

/// Says which input it is when its check panics.
struct Failing<'i>(&'i [u8]);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        eprintln!("the input: {}", self.0.escape_ascii());
    }
}

/// The inputs that are kept for a target, in the order of their names, so that a run is like the one before it; at least an
/// empty one.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no seeds", directory.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Does one of the things to an input that a disk, a person or a hostile sender may do.
fn harm(random: &mut TestRng, input: &mut Vec<u8>, other: &[u8]) {
    /// Bytes that mean something to one of the formats.
    const KNOWN: &[u8] = b"\0\n\r ,:@/\"'[]{}-.0129azAZ\x01\x7f\x80\xff";
    let (from, to) = range(random, input.len());
    match below(random, 7) {
        0 => input.truncate(from),
        1 => drop(input.drain(from..to)),
        2 => input.extend_from_within(from..to),
        3 => input.insert(from, KNOWN[below(random, KNOWN.len())]),
        4 => {
            let (first, last) = range(random, other.len());
            input.splice(from..to, other[first..last].iter().copied());
        }
        kind => {
            let Some(byte) = input.get_mut(from) else { return };
            *byte = match kind {
                5 => *byte ^ 1 << below(random, 8),
                _ => KNOWN[below(random, KNOWN.len())],
            };
        }
    }
    input.truncate(LONGEST);
}

/// A range within that length: mostly a short one, as most fields are.
fn range(random: &mut TestRng, length: usize) -> (usize, usize) {
    let from = below(random, length + 1);
    let longest = if below(random, 4) == 0 { length } else { 16 };
    (from, from + below(random, (length - from).min(longest) + 1))
}

/// A number below `limit`, which is not 0.
fn below(random: &mut TestRng, limit: usize) -> usize {
    random.next_u64() as usize % limit
}

#[test]
fn annotations_are_the_same_when_they_are_written_and_read_again() {
    run("annotation", 100_000, annotation::check);
}

#[test]
fn configurations_and_results_are_the_same_when_they_are_written_and_read_again() {
    run("cni_config", 100_000, cni_config::check);
}

#[test]
fn what_a_dhcp_client_hears_is_bounded() {
    run("dhcp", 300_000, dhcp::check);
}

#[test]
fn no_file_of_a_pool_gives_an_address_twice() {
    run("host_local", 10_000, host_local::check);
}

#[test]
fn no_damaged_record_is_taken_for_a_whole_one() {
    run("journal", 100_000, journal::check);
}

#[test]
fn the_programs_parser_agrees_with_another_one() {
    run("packet", 200_000, packet::check);
}

#[test]
fn compiled_policies_agree_with_an_interpreter() {
    run("policies", 2_000, policies::check);
}

#[test]
fn frames_are_the_same_in_pieces() {
    run("rpc_frame", 200_000, rpc_frame::check);
}
