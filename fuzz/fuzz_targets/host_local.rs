//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/host_local.rs"]
mod host_local;

libfuzzer_sys::fuzz_target!(|data: &[u8]| host_local::check(data));
