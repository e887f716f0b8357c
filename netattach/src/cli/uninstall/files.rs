//! The files that netattach has written on a node: configurations for the container runtime, state,
//! executables.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::Stays;
use crate::agent::{Caller, callers};
use crate::attach::standalone::copy::{NAMES, before, fresh, is_netattach};
use crate::attach::standalone::names;
use crate::cli::CliError;
use crate::ipam::Pool;

/// The agent's files below its state directory, and those beside its socket.
const STATE: [&str; 3] = ["journal", "pending", "dhcp"];
const RUN: [&str; 3] = ["netattach.sock", "netattach.sock.lock", "network-status"];

/// The files found.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Configurations that an agent has written.
    pub(super) configurations: Vec<PathBuf>,
    /// State of agents, in files and directories.
    pub(super) state: Vec<PathBuf>,
    /// The directories of these files.
    around: Vec<PathBuf>,
    /// Executables.
    pub(super) executables: Vec<PathBuf>,
    /// What is kept.
    pub(super) stays: Vec<Stays>,
}

impl Files {
    /// Looks for configurations in the runtime's directory.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub(super) fn look_for_configurations(&mut self, directory: &Path) -> Result<(), CliError> {
        for (path, caller) in callers(directory).map_err(failed("list", directory))? {
            match caller {
                Caller::Managed => self.configurations.push(path),
                Caller::Other => self.stays.push(Stays::new(
                    path.display(),
                    "no agent has written it, and it calls netattach: remove it, or new pods fail",
                )),
                Caller::Behind => self.stays.push(Stays::new(
                    path.display(),
                    "it is of another network, and calls netattach behind its plugins: take that entry out of it, and leave the \
                     rest, or new pods fail",
                )),
            }
        }
        Ok(())
    }

    /// Looks for the agent's state on disk. If `needed` is set (the reason), all of the state is kept.
    pub(super) fn look_for_state(&mut self, state: &Path, run: Option<&Path>, needed: Option<String>) {
        let mut find = |directory: &Path, names: &[&str]| {
            let found: Vec<PathBuf> =
                names.iter().map(|name| directory.join(name)).filter(|path| is_there(path)).collect();
            if directory.is_dir() {
                self.around.push(directory.to_owned());
            }
            self.state.extend(found);
        };
        match needed {
            Some(what) => self.stays.push(Stays::new(state.display(), what)),
            None => find(state, &STATE),
        }
        if let Some(run) = run {
            find(run, &RUN);
        }
    }

    /// Checks the pools from which leases were ever taken.
    pub(super) fn look_at_pools(&mut self, pools: &[Pool]) {
        for path in pools.iter().map(Pool::path) {
            let Ok(entries) = fs::read_dir(&path) else { continue };
            let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
            let why = match names.filter(|name| name.parse::<IpAddr>().is_ok()).count() {
                0 => "no address is taken there, but networks of others may use it".to_owned(),
                held => format!("addresses taken there: {held}"),
            };
            self.stays.push(Stays::new(path.display(), why));
        }
    }

    /// Looks for executables in a directory of plugins.
    ///
    /// # Errors
    /// One cannot be read.
    pub(super) fn look_for_executables(&mut self, directory: &Path) -> Result<(), CliError> {
        let ours = |path: &Path| is_netattach(path).map_err(failed("read", path));
        let mut linked = Vec::new();
        for name in names() {
            let path = directory.join(name);
            for beside in [before(name), fresh(name)].map(|name| directory.join(name)) {
                if ours(&beside)? {
                    self.executables.push(beside);
                } else if is_there(&beside) {
                    self.stays
                        .push(Stays::new(beside.display(), format!("it was {name} before netattach's")));
                }
            }
            if !ours(&path)? {
                continue;
            }
            linked.extend(fs::read_link(&path).is_ok().then(|| name.to_owned()));
            self.stays.push(Stays::new(
                path.display(),
                "it is netattach's plugin under a name that configurations of others use: containerd calls loopback for every pod",
            ));
        }
        for name in NAMES {
            let path = directory.join(name);
            let beside = [before(name), fresh(name)].map(|name| directory.join(name));
            if ours(&path)? {
                if name == "netattach-cni" && !linked.is_empty() {
                    let why = format!("{} lead to it", linked.join(", "));
                    self.stays.push(Stays::new(path.display(), why));
                } else {
                    self.executables.push(path);
                }
            }
            self.executables.extend(beside.into_iter().filter(|path| is_there(path)));
        }
        Ok(())
    }

    /// Removes the configurations, so that netattach does not attach new pods.
    ///
    /// # Errors
    /// One cannot be removed.
    pub(super) fn remove_configurations(&self) -> Result<(), CliError> {
        self.configurations.iter().try_for_each(|path| remove(path))
    }

    /// Removes the rest.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub(super) fn remove_rest(&self) -> Result<(), CliError> {
        self.state.iter().chain(&self.executables).try_for_each(|path| remove(path))?;
        for directory in &self.around {
            // Fails if the directory is a mount of this container, or contains other files.
            let _ = fs::remove_dir(directory);
        }
        Ok(())
    }
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CliError {
    let path = path.to_owned();
    move |source| CliError::File { action, path, source }
}

fn remove(path: &Path) -> Result<(), CliError> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
    let removed = if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}
