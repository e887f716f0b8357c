//! The entry of libFuzzer: see the check.
#![no_main]

#[path = "../checks/rpc_frame.rs"]
mod rpc_frame;

libfuzzer_sys::fuzz_target!(|data: &[u8]| rpc_frame::check(data));
