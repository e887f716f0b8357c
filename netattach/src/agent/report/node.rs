//! What the agent tells of the node: features of the kernel, the fast path and its uplinks, its memory, its socket.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;

use super::Reporter;
use super::attachments::each;
use crate::agent::memory::Resident;
use crate::attach::Engine;
use crate::bpf;
use crate::bpf::{Segment, XdpMode};
use crate::error_chain::Chain;
use crate::fast_path;
use crate::fast_path::uplink;
use crate::netlink::{Handle, LOOPBACK};
use crate::rpc::message::{FastPath, FastPathCount, Feature, Readiness, Uplink};

/// The state of an attachment on the fast path.
const ON: &str = "on";

impl Reporter {
    /// Number of attachments in each fast-path state; those on the fast path first, then by name.
    pub(super) fn fast_path(&self, engine: &Engine) -> Vec<FastPathCount> {
        let mut counts: BTreeMap<(bool, String, String), u64> = BTreeMap::new();
        let standings = each(engine, |row| self.enforcer.fast_paths().status(row.id()?));
        for FastPath { state, detail } in standings.into_iter().map(fast_path) {
            *counts.entry((state != ON, state, detail)).or_default() += 1;
        }
        let count = |((_, state, detail), attachments)| FastPathCount {
            standing: FastPath { state, detail },
            attachments,
        };
        counts.into_iter().map(count).collect()
    }
}

pub(super) fn uplink((found, xdp): (uplink::Uplink, Option<Result<XdpMode, String>>)) -> Uplink {
    let leads_to = match found.segment {
        Segment::Bridge(_) => "bridge",
        Segment::Routed => "routes",
    };
    let standing = fast_path(found.status.map_or_else(fast_path::Status::Off, |()| fast_path::Status::On));
    let xdp = match xdp {
        None => String::new(),
        Some(Ok(XdpMode::Native)) => "native".into(),
        Some(Ok(XdpMode::Generic)) => "generic".into(),
        Some(Err(error)) => error,
    };
    Uplink { device: found.name, leads_to: leads_to.into(), standing, xdp }
}

pub(super) fn fast_path(status: fast_path::Status) -> FastPath {
    match status {
        fast_path::Status::On => FastPath { state: ON.into(), detail: String::new() },
        fast_path::Status::Undecided => {
            FastPath { state: "undecided".into(), detail: "the node has not been checked yet".into() }
        }
        fast_path::Status::Off(reason) => {
            FastPath { state: reason.name().into(), detail: reason.to_string() }
        }
    }
}

/// The kernel's features, probed now.
pub fn features() -> Vec<Feature> {
    let shown = |name: &str, absence: &str, present: Result<bool, String>| Feature {
        name: name.to_owned(),
        detail: match &present {
            Ok(true) => String::new(),
            Ok(false) => absence.to_owned(),
            Err(problem) => format!("cannot be determined: {problem}"),
        },
        present: present == Ok(true),
    };
    let clsact = Handle::open()
        .map_err(|error| Chain(&error).to_string())
        .and_then(|mut node| node.has_clsact().map_err(|error| Chain(&error).to_string()));
    let tbf = Handle::open()
        .map_err(|error| Chain(&error).to_string())
        .and_then(|mut node| node.has_pacing().map_err(|error| Chain(&error).to_string()));
    let mut features = vec![
        shown("clsact", "tcx is used if it is available; since 4.5", clsact),
        shown("tbf", "traffic above a bandwidth limit is dropped, not delayed", tbf),
    ];
    features.extend(bpf::probe::features(LOOPBACK).into_iter().map(|feature| {
        shown(feature.name, feature.absence, feature.present.map_err(|error| error.to_string()))
    }));
    features
}

pub(super) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Resident set of this process in bytes; 0 if it cannot be read.
pub(super) fn resident_memory() -> u64 {
    Resident::now().map_or(0, |resident| resident.all as u64)
}

/// Whether the runtime finds the agent: another process may have removed the socket's file, which the agent
/// then creates again.
pub(super) fn sockets(socket: &std::path::Path) -> Readiness {
    let path = socket.display();
    let found = std::fs::symlink_metadata(socket);
    let found = found.map(|found| found.file_type().is_socket());
    let problem = match found {
        Ok(true) => None,
        Ok(false) => Some(format!("{path} is no socket")),
        Err(error) => Some(format!("{path}: {error}")),
    };
    let met = problem.is_none();
    Readiness { condition: "sockets".into(), met, detail: problem.unwrap_or_else(|| path.to_string()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_runtime_finds_a_socket_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netattach.sock");
        let shown = path.display();
        let found = || {
            let Readiness { condition, met, detail } = sockets(&path);
            assert_eq!(condition, "sockets");
            (met, detail)
        };
        assert_eq!(found(), (false, format!("{shown}: No such file or directory (os error 2)")));
        std::fs::write(&path, "").unwrap();
        assert_eq!(found(), (false, format!("{shown} is no socket")));
        std::fs::remove_file(&path).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert_eq!(found(), (true, shown.to_string()));
    }
}
