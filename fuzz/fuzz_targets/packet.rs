//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/packet.rs"]
mod packet;
/// Shared with live tests.
#[path = "../../tests/src/reading.rs"]
mod reading;

libfuzzer_sys::fuzz_target!(|data: &[u8]| packet::check(data));
