//! Whole packets through the real programs and maps (`BPF_PROG_TEST_RUN`).
//!
//! Needs root. Every test has its own pins below `/sys/fs/bpf` and removes them.

#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use netattach::bpf::{
    Attachment, BpfError, Checks, Config, Dataplane, DropReason, Limits, MapProperty, PolicyIds, Rate,
    Record, Side, Stats, Traffic, remove_all_pins, sys,
};
use netattach::mac::Mac;
use netattach::policy::lookup::{self, CompiledPolicy, Origin, PortPrefix};
use netattach_common::decide::NOTHING;
use netattach_common::{Flow, FlowKey, FragmentKey, Fragmented, Ip4, LAYOUT_VERSION, PlaceKey, Port, Share};
use netattach_tests::packet::{
    PEER_MAC, POD_MAC, Packet, any_frame, arp_request, dhcp, other_ethertype, tcp,
};

use Side::{FromPod, ToPod};

mod ends;
mod ethertypes;
mod fast;
mod flows;
mod fragments;
mod generated;
mod limits;
mod link_control;
mod parents;
mod pins;
mod policies;
mod random;
mod rig;
mod roles;
mod routed;
mod sender;
mod shares;
mod shortcut;
mod swaps;
mod vlans;
mod wire;
mod xdp;

use rig::*;
