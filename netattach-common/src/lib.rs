//! The bytes that the BPF programs and the agent agree on.
#![cfg_attr(not(test), no_std)]
