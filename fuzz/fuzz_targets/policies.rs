//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/policies.rs"]
mod policies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| policies::check(data));
