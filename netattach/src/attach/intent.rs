//! From a request to what the pod wants: every reference followed, nothing decided.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::cni::load::{self, Directory, LoadError};
use crate::cni::{self, CniError, ConfigError, NetworkList, code};
use crate::npwg::{self, Definition, NETWORKS_ANNOTATION, NetworkRef, Selection, SelectionError};
use crate::plan::PodRef;
use crate::plan::resolve::{Intent, Network};
use crate::report::Chain;
use crate::source::{ObjectName, Objects, Source};

/// Where the cluster-wide default network is described.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefaultNetwork {
    /// By a definition.
    Definition(NetworkRef),
    /// By a CNI configuration file.
    File(PathBuf),
}

/// Reads intents.
pub struct IntentReader {
    /// Where pods and definitions come from.
    pub source: Arc<dyn Source>,
    /// The network that every pod gets.
    pub default: DefaultNetwork,
    /// CNI configurations for definitions that have none of their own.
    pub conf_dir: PathBuf,
    /// Attach the default network only when the annotation is invalid, as the standard's text has it, instead
    /// of failing.
    pub ignore_invalid: bool,
}

/// Why a pod's networks cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum IntentError {
    /// The source does not know the pod, or not yet.
    #[error("pod {0} is not known to the source of manifests")]
    UnknownPod(PodRef),
    /// The source has another pod of the same name.
    #[error("pod {pod} in the source has uid {known}, the runtime asks for {asked}")]
    OtherPod {
        /// Which.
        pod: PodRef,
        /// In the source.
        known: String,
        /// In `CNI_ARGS`.
        asked: String,
    },
    /// The annotation is invalid.
    #[error("pod {pod}: annotation {NETWORKS_ANNOTATION}")]
    Annotation {
        /// Which.
        pod: PodRef,
        /// What is wrong with it.
        #[source]
        source: Box<SelectionError>,
    },
    /// A network is not defined.
    #[error("network {0} is not defined")]
    UnknownNetwork(NetworkRef),
    /// The configuration in a definition is invalid.
    #[error("network {network}: spec.config")]
    Config {
        /// Which.
        network: NetworkRef,
        /// What is wrong with it.
        #[source]
        source: ConfigError,
    },
    /// A definition has no configuration, and neither has the disk.
    #[error("network {network} has no spec.config, and {directory}")]
    NotOnDisk {
        /// Which.
        network: NetworkRef,
        /// Where configurations are looked for.
        directory: PathBuf,
        /// What was found there.
        #[source]
        source: Box<LoadError>,
    },
    /// A file cannot be read.
    #[error("read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The default network's file is invalid.
    #[error("default network {path}")]
    DefaultFile {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: ConfigError,
    },
}

impl From<IntentError> for CniError {
    fn from(error: IntentError) -> Self {
        let code = match &error {
            // The source may be behind the runtime.
            IntentError::UnknownPod(_) | IntentError::OtherPod { .. } => code::TRY_AGAIN_LATER,
            IntentError::Read { .. } => code::IO_FAILURE,
            IntentError::Annotation { .. }
            | IntentError::UnknownNetwork(_)
            | IntentError::Config { .. }
            | IntentError::NotOnDisk { .. }
            | IntentError::DefaultFile { .. } => code::INVALID_CONFIG,
        };
        Self::from_chain(code, &error)
    }
}

impl IntentReader {
    /// The pod that the runtime named, and what it is to be attached to.
    ///
    /// A runtime that names no pod (podman, for one) gets the default network only.
    ///
    /// # Errors
    /// See [`IntentError`]; nothing has happened then.
    pub fn read(&self, request: &cni::Request) -> Result<(Option<PodRef>, Intent), IntentError> {
        let objects = self.source.snapshot();
        let pod = pod_of(request);
        let selections = match &pod {
            Some(pod) => self.selections(&objects, pod)?,
            None => Vec::new(),
        };
        let default = self.default_network(&objects)?;
        let mut networks = Vec::with_capacity(selections.len());
        for selection in selections {
            let network = self.network(&objects, &selection.network)?;
            networks.push((selection, network));
        }
        Ok((pod, Intent { default, selections: networks }))
    }

    /// Whether the default network could be attached now.
    ///
    /// # Errors
    /// Why not.
    pub fn check_default(&self) -> Result<(), IntentError> {
        self.default_network(&self.source.snapshot()).map(drop)
    }

    fn selections(&self, objects: &Objects, pod: &PodRef) -> Result<Vec<Selection>, IntentError> {
        let name = ObjectName::new(&pod.namespace, &pod.name);
        let known = objects.pods.get(&name).ok_or_else(|| IntentError::UnknownPod(pod.clone()))?;
        if let (Some(known), Some(asked)) = (&known.uid, &pod.uid)
            && known != asked
        {
            return Err(IntentError::OtherPod {
                pod: pod.clone(),
                known: known.clone(),
                asked: asked.clone(),
            });
        }
        let Some(annotation) = known.annotations.get(NETWORKS_ANNOTATION) else { return Ok(Vec::new()) };
        match npwg::parse_networks(annotation, &pod.namespace) {
            Ok(parsed) => {
                for warning in parsed.warnings {
                    tracing::warn!(%pod, %warning, "annotation {NETWORKS_ANNOTATION}");
                }
                Ok(parsed.selections)
            }
            Err(error) if self.ignore_invalid => {
                tracing::warn!(%pod, error = %Chain(&error), "invalid annotation {NETWORKS_ANNOTATION} ignored");
                Ok(Vec::new())
            }
            Err(source) => Err(IntentError::Annotation { pod: pod.clone(), source: Box::new(source) }),
        }
    }

    fn default_network(&self, objects: &Objects) -> Result<Network, IntentError> {
        match &self.default {
            DefaultNetwork::Definition(reference) => self.network(objects, reference),
            DefaultNetwork::File(path) => {
                let bytes =
                    std::fs::read(path).map_err(|source| IntentError::Read { path: path.clone(), source })?;
                let list = NetworkList::parse(&bytes)
                    .map_err(|source| IntentError::DefaultFile { path: path.clone(), source })?;
                Ok(Network { name: list.name.clone(), list })
            }
        }
    }

    fn network(&self, objects: &Objects, reference: &NetworkRef) -> Result<Network, IntentError> {
        let definition = objects
            .definitions
            .get(reference)
            .ok_or_else(|| IntentError::UnknownNetwork(reference.clone()))?;
        let list = match &definition.config {
            Some(config) => NetworkList::parse_with_default_name(config.as_bytes(), &definition.name)
                .map_err(|source| IntentError::Config { network: reference.clone(), source })?,
            None => self.on_disk(definition)?,
        };
        Ok(Network { name: reference.to_string(), list })
    }

    fn on_disk(&self, definition: &Definition) -> Result<NetworkList, IntentError> {
        let directory = read_directory(&self.conf_dir)
            .map_err(|source| IntentError::Read { path: self.conf_dir.clone(), source })?;
        let found = load::find(&directory, &definition.name).map_err(|source| IntentError::NotOnDisk {
            network: definition.reference(),
            directory: self.conf_dir.clone(),
            source: Box::new(source),
        })?;
        for skipped in &found.skipped {
            tracing::warn!(directory = %self.conf_dir.display(), error = %Chain(skipped), "CNI configuration skipped");
        }
        Ok(found.list)
    }
}

/// The pod that the runtime names in `CNI_ARGS`.
fn pod_of(request: &cni::Request) -> Option<PodRef> {
    let arg = |key| request.args.get(key).filter(|value| !value.is_empty()).map(str::to_owned);
    Some(PodRef { namespace: arg("K8S_POD_NAMESPACE")?, name: arg("K8S_POD_NAME")?, uid: arg("K8S_POD_UID") })
}

/// The files that may hold a CNI configuration, those in a network's own folder included. No directory is none.
fn read_directory(path: &std::path::Path) -> std::io::Result<Directory> {
    let mut files = BTreeMap::new();
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(files),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // A link to a file is a file: configuration is often linked into place.
        let kind = std::fs::metadata(entry.path())?;
        if kind.is_dir() {
            for inner in std::fs::read_dir(entry.path())? {
                let inner = inner?;
                let Ok(file) = inner.file_name().into_string() else { continue };
                if file.ends_with(".conf") && inner.path().is_file() {
                    files.insert(format!("{name}/{file}"), std::fs::read(inner.path())?);
                }
            }
        } else if kind.is_file() && load::is_candidate(&name) {
            files.insert(name, std::fs::read(entry.path())?);
        }
    }
    Ok(files)
}

impl std::fmt::Debug for IntentReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntentReader")
            .field("default", &self.default)
            .field("conf_dir", &self.conf_dir)
            .finish_non_exhaustive()
    }
}
