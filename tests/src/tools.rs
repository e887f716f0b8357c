//! Programs that tests need and that not every machine has.

use std::io::Write;
use std::path::PathBuf;

use crate::Namespace;
use crate::node::ip;

/// The directory that the environment variable names, if it has all of these files. Otherwise the test is reported as
/// skipped, with the reason, and its caller has to end it.
///
/// # Panics
/// A file is missing and `CI` is `true`: the gate skips no test.
pub fn directory(test: &str, variable: &str, files: &[&str]) -> Option<PathBuf> {
    let reason = match std::env::var_os(variable).map(PathBuf::from) {
        None => format!("{variable} is not set"),
        Some(path) => match files.iter().find(|file| !path.join(file).is_file()) {
            None => return Some(path),
            Some(file) => format!("{} is not there", path.join(file).display()),
        },
    };
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{test} must not be skipped in CI: {reason}");
    report_skipped(test, &reason);
    None
}

/// Whether the kernel makes links of that kind: few kernels have the drivers of all.
///
/// # Panics
/// There is no namespace to try it in.
pub fn has_driver(kind: &str) -> bool {
    let probe = Namespace::new().expect("a namespace");
    let made = |words: &[&str]| ip(&probe, &[&["link", "add"][..], words].concat()).is_ok();
    let on_parent = ["link", "below", "name", "probe", "type", kind];
    match kind {
        "vlan" | "ipvlan" | "macvlan" | "macvtap" => {
            let id: &[&str] = if kind == "vlan" { &["id", "9"] } else { &[] };
            made(&["below", "type", "bridge"]) && made(&[&on_parent[..], id].concat())
        }
        _ => made(&["probe", "type", kind]),
    }
}

/// Whether bridges of this kernel filter by VLAN. If not, the test is reported as skipped, and its caller has to end
/// it.
///
/// # Panics
/// There is no namespace to try it in.
pub fn bridges_filter_by_vlan(test: &str) -> bool {
    let probe = Namespace::new().expect("a namespace");
    let filter = ip(&probe, &["link", "add", "probe", "type", "bridge", "vlan_filtering", "1"]).is_ok();
    if !filter {
        report_skipped(test, "bridges of this kernel do not filter by VLAN");
    }
    filter
}

/// Reports a test as skipped, with the reason; its caller has to end it. For features that this kernel lacks.
pub fn report_skipped(test: &str, reason: &str) {
    // Written past the harness, which keeps a test's output to itself unless it fails.
    let _ = writeln!(std::io::stderr(), "\nSKIPPED: {test}: {reason}");
}
