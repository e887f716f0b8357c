//! `network-status` of attached pods, as files: what a cluster would find in the pod's annotation.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Attached;
use crate::cni::Value;
use crate::npwg::status::{self, Form, StatusEntry};
use crate::plan::{AttachmentPlan, Output, PodRef, StepRef, result, routing};

/// A directory with one file for each attached pod: `<namespace>/<name>.json`, replaced as a whole.
#[derive(Debug, Clone)]
pub struct StatusFiles {
    directory: PathBuf,
    form: Form,
}

/// A status file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("publish network-status {path}")]
pub struct StatusFileError {
    /// Its path.
    pub path: PathBuf,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// The entries of what is attached, in the order of the attachments.
fn entries(attached: &Attached, form: Form) -> Vec<StatusEntry> {
    let mut entries = Vec::new();
    let dynamic = attached.plan.dynamic.as_ref().map(|dynamic| status::Dynamic { by: dynamic.by.clone() });
    for (number, attachment) in attached.plan.attachments.iter().enumerate() {
        // Attachment numbers fit: see `Plan::steps`.
        let number = number as u16;
        let result = result::result(&attached.plan.sandbox, number, attachment, &attached.outputs);
        let described = status::Attached {
            name: attachment.network.clone(),
            default: attachment.default,
            ifname: attachment.ifname.clone(),
            result: result.unwrap_or_default(),
            default_route: default_route(number, attachment, &attached.outputs),
            device_info: device_info(number, &attached.outputs),
            warnings: attachment.warnings.clone(),
            dynamic: dynamic.clone(),
        };
        entries.extend(described.entries(form));
    }
    entries
}

/// The gateways that the kernel showed when the default routes had been moved to the attachment.
fn default_route(
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &BTreeMap<StepRef, Output>,
) -> Option<Vec<IpAddr>> {
    attachment.yields_to.filter(|at| at.0 == number)?;
    let moved = routing::moved(attachment.yields_to, outputs);
    Some(moved.iter().filter_map(|route| route.gateway).collect())
}

fn device_info(number: u16, outputs: &BTreeMap<StepRef, Output>) -> Option<Value> {
    outputs.iter().filter(|(at, _)| at.0 == number).find_map(|(_, output)| match output {
        Output::DeviceInfo { info } => Some(info.clone()),
        _ => None,
    })
}

impl StatusFiles {
    /// Files below `directory`, in that form.
    pub fn new(directory: impl Into<PathBuf>, form: Form) -> Self {
        Self { directory: directory.into(), form }
    }

    /// Publishes the status of a pod's sandbox: what its ADD attached, and what came later. Nothing is published
    /// of nothing.
    ///
    /// # Errors
    /// [`StatusFileError`].
    pub fn publish(&self, attached: &[Arc<Attached>]) -> Result<(), StatusFileError> {
        let pod = attached.first().and_then(|sandbox| sandbox.plan.sandbox.pod.as_ref());
        let Some(path) = pod.and_then(|pod| self.path(pod)) else { return Ok(()) };
        let entries: Vec<StatusEntry> =
            attached.iter().flat_map(|attached| entries(attached, self.form)).collect();
        let text = status::render(&entries);
        // After a restart most files are as they should be, and writing is what takes time.
        if std::fs::read(&path).is_ok_and(|published| published == text.as_bytes()) {
            return Ok(());
        }
        let write = || {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            let temporary = path.with_extension("tmp");
            std::fs::write(&temporary, &text)?;
            crate::crash_point!("status", "written");
            std::fs::rename(&temporary, &path)?;
            crate::crash_point!("status", "published");
            Ok(())
        };
        write().map_err(|source| StatusFileError { path: path.clone(), source })
    }

    /// Withdraws the status of a pod.
    ///
    /// # Errors
    /// [`StatusFileError`].
    pub fn withdraw(&self, pod: &PodRef) -> Result<(), StatusFileError> {
        let Some(path) = self.path(pod) else { return Ok(()) };
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StatusFileError { path, source }),
            _ => {
                crate::crash_point!("status", "withdrawn");
                // Gone when it was the namespace's last pod, refused when it was not.
                let _ = path.parent().map(std::fs::remove_dir);
                Ok(())
            }
        }
    }

    /// Withdraws the status of every pod that is not among `attached`: of pods that an earlier agent had begun to
    /// detach when it ended.
    ///
    /// # Errors
    /// [`StatusFileError`] for a file or directory that cannot be read or removed.
    pub fn withdraw_others(&self, attached: &[Arc<Attached>]) -> Result<(), StatusFileError> {
        let known: BTreeSet<PathBuf> =
            attached.iter().filter_map(|attached| self.path(attached.plan.sandbox.pod.as_ref()?)).collect();
        for namespace in entries_of(&self.directory)? {
            for file in entries_of(&namespace)? {
                if !known.contains(&file) {
                    std::fs::remove_file(&file).map_err(|source| StatusFileError { path: file, source })?;
                }
            }
            // Refused while a file is left.
            let _ = std::fs::remove_dir(&namespace);
        }
        Ok(())
    }

    /// The pod's file; `None` for names that no pod can have and no path should.
    fn path(&self, pod: &PodRef) -> Option<PathBuf> {
        let plain = |name: &str| !name.is_empty() && !name.contains('/') && name != "." && name != "..";
        let named = plain(&pod.namespace) && plain(&pod.name);
        named.then(|| Path::new(&self.directory).join(&pod.namespace).join(format!("{}.json", pod.name)))
    }
}

/// What a directory holds; nothing when there is none.
fn entries_of(directory: &Path) -> Result<Vec<PathBuf>, StatusFileError> {
    let failed = |source| StatusFileError { path: directory.to_owned(), source };
    match std::fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(failed(error)),
        Ok(entries) => entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect(),
    }
}
