//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/cni_config.rs"]
mod cni_config;

libfuzzer_sys::fuzz_target!(|data: &[u8]| cni_config::check(data));
