//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/annotation.rs"]
mod annotation;

libfuzzer_sys::fuzz_target!(|data: &[u8]| annotation::check(data));
