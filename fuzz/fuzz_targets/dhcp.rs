//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/dhcp.rs"]
mod dhcp;

libfuzzer_sys::fuzz_target!(|data: &[u8]| dhcp::check(data));
