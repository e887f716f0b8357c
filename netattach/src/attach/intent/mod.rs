//! Determines the networks that a pod wants from a request: follows every reference and makes no decisions.
//!
//! | module | what it does |
//! |---|---|
//! | `weight` | estimates the memory that an ADD takes, before it begins |
//! | `read_networks` | the networks that were read last |
//! | `default_network`, [`conf_dir`], `from_node` | the network that every pod gets: its source, the directory or the node's own data |
//! | `made_before` | that network if an earlier plugin of the runtime's list has created its interface |

pub mod conf_dir;
pub(super) mod default_network;
pub(super) mod from_node;
mod made_before;
pub(super) mod read_networks;
pub(super) mod weight;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::default_network::DefaultNetwork;
use self::from_node::FromNode;
use self::read_networks::ReadNetworks;
use crate::builtin::{self, NoRange};
use crate::cni::load::{self, LoadError};
use crate::cni::multi_network::{self, OWN_TYPE};
use crate::cni::{self, CniError, ConfigError, NetworkList, Value, code};
use crate::error_chain::Chain;
use crate::npwg::{
    self, DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, NetworkName, NetworkRef, Parsed,
    RESOURCE_ANNOTATION, Selection, SelectionError, SelectionWarning,
};
use crate::objects::Pod;
use crate::objects::access::{Forbidden, Restrictions};
use crate::objects::{ObjectName, Objects};
use crate::plan::cluster_routes::Known;
use crate::plan::ethertypes::{self, ETHERTYPES_ANNOTATION, InvalidEthertypes};
use crate::plan::gc::Defined;
pub(super) use crate::plan::resolve::Network;
use crate::plan::resolve::{Intent, Warning};
use crate::plan::{PodRef, pools};
use crate::source::{NotSynced, Source, WantedPod};
use crate::step::ENFORCE_ANNOTATION;
use crate::step::EnforceWhen;

/// How long an ADD waits for the definition of a network that its pod names. A definition that is never created costs
/// this wait at each ADD.
const DEFINITION_LAG: Duration = Duration::from_millis(500);

/// Most unusable files of a directory that are reported.
const MOST_UNUSABLE: usize = 100;

/// Reads intents.
pub struct IntentReader {
    /// The source of pods and definitions.
    pub source: Arc<dyn Source>,
    /// How long an ADD waits for a pod that the source does not have.
    pub pod_wait: Duration,
    /// The default network of pods that choose no other.
    pub default: DefaultNetwork,
    /// Namespace of default networks that are named without one.
    pub default_namespace: String,
    /// The parts of the default network that come from the node.
    pub from_node: Arc<FromNode>,
    /// Which namespaces may use which networks.
    pub restrictions: Restrictions,
    /// CNI configurations for definitions that have none of their own.
    pub conf_dir: PathBuf,
    /// Attach only the default network when the annotation is invalid, as the standard's text says, instead of
    /// failing.
    pub ignore_invalid: bool,
    /// Whether definitions with the same name in two namespaces have separate pools: see [`pools::separate`].
    pub separate_pools: bool,
    /// The networks that were read last.
    pub known: ReadNetworks,
}

/// Why a pod's networks cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum IntentError {
    /// The source has not read all objects yet.
    #[error("source")]
    Source(#[source] NotSynced),
    /// The source does not have the pod (yet).
    #[error("pod {0} is not known yet")]
    UnknownPod(PodRef),
    /// The source has another pod of the same name.
    #[error("pod {pod} in the source has uid {known}, the runtime asks for {asked}")]
    OtherPod {
        /// The pod.
        pod: PodRef,
        /// The UID in the source.
        known: String,
        /// The UID in `CNI_ARGS`.
        asked: String,
    },
    /// An annotation is invalid.
    #[error("pod {pod}: annotation {annotation}")]
    Annotation {
        /// The pod.
        pod: PodRef,
        /// The annotation.
        annotation: &'static str,
        /// The error in it.
        #[source]
        source: Box<SelectionError>,
    },
    /// The pod chooses a default network, but already has one when netattach is called.
    #[error(
        "pod {0}: annotation {DEFAULT_NETWORK_ANNOTATION}: defaultNetwork is chained, so a plugin before netattach has made the pod's interface already"
    )]
    ChosenBehind(PodRef),
    /// A plugin earlier in the list has created the interface that netattach is to create.
    #[error(
        "key prevResult: a plugin before netattach in the runtime's list has made the pod's interface, and defaultNetwork names a network that netattach would attach as well: set defaultNetwork to chained, or let netattach be the first plugin of the list"
    )]
    MadeTwice,
    /// No plugin earlier in the list has created the pod's interface.
    #[error(
        "key prevResult: missing, and defaultNetwork is chained: netattach comes behind the plugin that makes the pod's interface, in the runtime's list; where it is to be the first, defaultNetwork names the network"
    )]
    NotMade,
    /// The result of the plugin earlier in the list cannot be read.
    #[error("key prevResult")]
    MadeBefore(#[source] CniError),
    /// The entry of the runtime's list that calls netattach is not a valid plugin configuration.
    #[error("the entry of the runtime's list")]
    Entry(#[source] ConfigError),
    /// The request for a further network is invalid.
    #[error("selection")]
    Selection(#[source] SelectionError),
    /// The request does not give the namespace in which the network is defined.
    #[error("network {0}: it has no namespace, and the sandbox has no pod to take one from")]
    NoNamespace(String),
    /// A network is not defined.
    #[error("network {0} is not defined")]
    UnknownNetwork(NetworkRef),
    /// The node's default network cannot be attached at present. The pod is not at fault, so the ADD is retried.
    #[error("the node's default network is not ready")]
    DefaultNotReady(#[source] Box<IntentError>),
    /// The pod's namespace may not use a network.
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    /// A network's plugin is netattach itself, which would call itself recursively.
    #[error("network {network}: plugin type {OWN_TYPE} is netattach itself")]
    Itself {
        /// Its name.
        network: NetworkName,
    },
    /// The default network's plugin is another one that attaches pods to multiple networks.
    #[error(
        "network {network} calls {product}, which attaches the pod's other networks too: name the network that it has as its own default"
    )]
    OtherMultiNetwork {
        /// Its name.
        network: NetworkName,
        /// The other product.
        product: &'static str,
    },
    /// The configuration in a definition is invalid.
    #[error("network {network}: spec.config")]
    Config {
        /// The network.
        network: NetworkRef,
        /// The error in it.
        #[source]
        source: ConfigError,
    },
    /// The network that the agent provides has no range.
    #[error("defaultNetwork builtin")]
    NoRange(#[source] NoRange),
    /// The network that the agent provides is not a valid configuration: a bug of the agent.
    #[error("defaultNetwork builtin")]
    Builtin(#[source] ConfigError),
    /// A definition takes its range from the node, which has no range for it.
    #[error("network {network}: usePodCidr")]
    NoRangeFor {
        /// The network.
        network: NetworkRef,
        /// The reason.
        #[source]
        source: NoRange,
    },
    /// A network that is not the node's default network takes its range from the node.
    #[error(
        "network {network}: usePodCidr is for the spec.config of the definition of the node's default network: two networks of \
         one range would give the same addresses"
    )]
    NotFromNode {
        /// The network.
        network: NetworkRef,
    },
    /// A definition's enforcement annotation has an unknown value.
    #[error("network {network}: annotation {ENFORCE_ANNOTATION} is {word:?}, not selected, always or never")]
    Enforce {
        /// The network.
        network: NetworkRef,
        /// The value as written.
        word: String,
    },
    /// A definition lists ethertypes that do not exist or cannot be let pass.
    #[error("network {network}: annotation {ETHERTYPES_ANNOTATION}")]
    Ethertypes {
        /// The network.
        network: NetworkRef,
        /// The error in it.
        #[source]
        source: InvalidEthertypes,
    },
    /// A definition contains no configuration, and there is none on disk either.
    #[error("network {network} has no spec.config, and {directory}")]
    NotOnDisk {
        /// The network.
        network: NetworkRef,
        /// The directory that was searched.
        directory: PathBuf,
        /// The outcome of the search.
        #[source]
        source: Box<LoadError>,
    },
    /// The default network is neither defined nor on disk.
    #[error("default network {network} is not defined, and {directory}")]
    NoDefault {
        /// The reference that its definition would have.
        network: NetworkRef,
        /// The directory that was searched.
        directory: PathBuf,
        /// The outcome of the search.
        #[source]
        source: Box<LoadError>,
    },
    /// A file cannot be read.
    #[error("read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The default network's directory has no usable file.
    #[error("default network: {path}")]
    DefaultDirectory {
        /// The directory.
        path: PathBuf,
        /// The outcome of the search.
        #[source]
        source: Box<LoadError>,
    },
    /// Cilium has renamed the default network's file.
    #[error(
        "default network {path} is gone and {to} is there: Cilium renames the configurations of others unless its cni.exclusive is false"
    )]
    DefaultRenamed {
        /// The file.
        path: PathBuf,
        /// The name that it has now.
        to: PathBuf,
    },
    /// The default network's file is invalid.
    #[error("default network {path}")]
    DefaultFile {
        /// The file.
        path: PathBuf,
        /// The error in it.
        #[source]
        source: ConfigError,
    },
}

impl From<IntentError> for CniError {
    fn from(error: IntentError) -> Self {
        let code = match &error {
            // The source may lag behind the runtime.
            IntentError::Source(_)
            | IntentError::UnknownPod(_)
            | IntentError::OtherPod { .. }
            | IntentError::NoRange(_)
            | IntentError::NoRangeFor { .. }
            | IntentError::DefaultNotReady(_) => code::TRY_AGAIN_LATER,
            IntentError::Read { .. } => code::IO_FAILURE,
            IntentError::MadeBefore(error) => error.code,
            IntentError::Annotation { .. }
            | IntentError::ChosenBehind(_)
            | IntentError::MadeTwice
            | IntentError::Entry(_)
            | IntentError::NotMade
            | IntentError::Selection(_)
            | IntentError::NoNamespace(_)
            | IntentError::UnknownNetwork(_)
            | IntentError::Builtin(_)
            | IntentError::NotFromNode { .. }
            | IntentError::Config { .. }
            | IntentError::Enforce { .. }
            | IntentError::Ethertypes { .. }
            | IntentError::Forbidden(_)
            | IntentError::Itself { .. }
            | IntentError::OtherMultiNetwork { .. }
            | IntentError::NotOnDisk { .. }
            | IntentError::NoDefault { .. }
            | IntentError::DefaultDirectory { .. }
            | IntentError::DefaultRenamed { .. }
            | IntentError::DefaultFile { .. } => code::INVALID_CONFIG,
        };
        Self::from_chain(code, &error)
    }
}

impl IntentReader {
    /// Returns the pod that the runtime named, and its intended attachments.
    ///
    /// A runtime that names no pod (for example podman) gets only the default network.
    ///
    /// # Errors
    /// See [`IntentError`]; nothing has been changed then.
    pub fn read(&self, request: &cni::Request) -> Result<(Option<PodRef>, Intent), IntentError> {
        let objects = self.objects()?;
        let made_before = self.made_before(request)?;
        let default = |objects: &Objects| made_before.map_or_else(|| self.ready_default(objects), Ok);
        let Some(pod) = pod_of(request) else {
            let default = default(&objects)?;
            return Ok((
                None,
                Intent {
                    default,
                    default_selection: None,
                    selections: Vec::new(),
                    warnings: Vec::new(),
                    cluster: None,
                },
            ));
        };
        let known = known_pod(&objects, &pod)?;
        let mut warnings = Vec::new();
        let chosen = self.chosen_default(&pod, known, &mut warnings)?;
        let default = match &chosen {
            Some(selection) => self.network_for(&objects, &pod.name.namespace, &selection.network)?,
            None => default(&objects)?,
        };
        // Many attachments may use one network, whose configuration may be large, so each network is read once.
        let mut networks: BTreeMap<NetworkRef, Network> = BTreeMap::new();
        let mut selections = Vec::new();
        for selection in self.selections(&pod, known, &mut warnings)? {
            let network = match networks.get(&selection.network) {
                Some(known) => known.clone(),
                None => {
                    let network = self.network_for(&objects, &pod.name.namespace, &selection.network)?;
                    networks.entry(selection.network.clone()).or_insert(network).clone()
                }
            };
            selections.push((selection, network));
        }
        let cluster = self.cluster(&objects);
        Ok((Some(pod), Intent { default, default_selection: chosen, selections, warnings, cluster }))
    }

    /// Returns the address ranges of the cluster that are known. If the agent provides the network between nodes, it
    /// knows all of them.
    fn cluster(&self, objects: &Objects) -> Option<Known> {
        let ranges = objects.cluster_ranges.as_ref()?;
        let nodes = objects.nodes.values().flat_map(|node| node.ranges());
        Some(Known {
            services: ranges.services.clone(),
            nodes: ranges.own_node.iter().copied().chain(nodes).collect(),
            all_nodes: self.default == DefaultNetwork::Builtin,
        })
    }

    /// Checks that the networks of a pod can be determined, without a CNI request.
    ///
    /// # Errors
    /// See [`IntentError`].
    pub fn check_pod(&self, pod: &PodRef) -> Result<(), IntentError> {
        let objects = self.objects()?;
        let known = known_pod(&objects, pod)?;
        let mut warnings = Vec::new();
        let chosen = self.chosen_default(pod, known, &mut warnings)?;
        let selections = self.selections(pod, known, &mut warnings)?;
        for selection in chosen.iter().chain(&selections) {
            self.network_for(&objects, &pod.name.namespace, &selection.network)?;
        }
        Ok(())
    }

    /// Waits for the pod that the runtime named, for at most [`IntentReader::pod_wait`], if the source does not have
    /// it yet, and then briefly for the definitions of its networks. [`IntentReader::read`] then reports what is
    /// still missing. Returns the pod with the networks that it names; `None`: no pod is named, or the pod is
    /// unknown.
    pub async fn await_pod(&self, request: &cni::Request) -> Option<(PodRef, Vec<NetworkRef>)> {
        let pod = pod_of(request)?;
        // `read` refuses the request immediately.
        self.objects().ok()?;
        let wanted = WantedPod { name: pod.name.clone(), uid: pod.uid.clone() };
        let deadline = Instant::now() + self.pod_wait;
        let known = self.source.pod(&wanted, deadline).await?;
        let networks = self.selected(&known);
        let moment = deadline.min(Instant::now() + DEFINITION_LAG);
        self.await_definitions(&networks, moment).await;
        Some((pod, networks))
    }

    /// Waits until all networks are defined. Each kind has its own watch, so a pod may arrive before a definition
    /// that was created earlier.
    async fn await_definitions(&self, networks: &[NetworkRef], deadline: Instant) {
        let mut changes = self.source.changes();
        loop {
            // Marked as seen before the snapshot is read: the next change may come meanwhile.
            changes.borrow_and_update();
            let objects = self.source.snapshot();
            let are_defined = networks.iter().all(|network| objects.definitions.get(network).is_some());
            let changed = tokio::time::timeout_at(deadline.into(), changes.changed());
            if are_defined || !matches!(changed.await, Ok(Ok(()))) {
                return;
            }
        }
    }

    /// Returns the newest snapshot, if it is complete.
    fn objects(&self) -> Result<Arc<Objects>, IntentError> {
        match self.source.synced() {
            Err(error @ NotSynced::Incomplete(_)) => Err(IntentError::Source(error)),
            Err(NotSynced::Stale(_)) | Ok(()) => Ok(self.source.snapshot()),
        }
    }

    /// Returns the network requested for a live pod, as an element of its annotation would select it.
    ///
    /// # Errors
    /// See [`IntentError`].
    pub fn one_more(
        &self,
        pod: Option<&PodRef>,
        element: &Value,
    ) -> Result<(Selection, Network), IntentError> {
        let objects = self.objects()?;
        let namespace = pod.map(|pod| pod.name.namespace.as_str()).unwrap_or_default();
        let (selection, warnings) =
            npwg::parse_selection(element, namespace).map_err(IntentError::Selection)?;
        for warning in warnings {
            tracing::warn!(network = %selection.network, %warning, "request for another network");
        }
        if selection.network.namespace.is_empty() {
            return Err(IntentError::NoNamespace(selection.network.name));
        }
        let network = match pod {
            Some(pod) => self.network_for(&objects, &pod.name.namespace, &selection.network)?,
            // Without a pod there is no namespace to check.
            None => self.network(&objects, &selection.network)?,
        };
        Ok((selection, network))
    }

    /// Returns the node's default network as it would be attached now.
    ///
    /// # Errors
    /// The reason why it cannot be attached.
    pub fn check_default(&self) -> Result<Network, IntentError> {
        self.node_default(&self.source.snapshot())
    }

    /// Returns the files on disk that should describe networks but cannot be used, by path. They do not affect other
    /// networks.
    pub fn unusable_files(&self) -> Vec<(PathBuf, ConfigError)> {
        let default = match &self.default {
            DefaultNetwork::Path(path) if path.is_dir() => Some(path),
            _ => None,
        };
        let mut unusable = Vec::new();
        for path in [&self.conf_dir].into_iter().chain(default) {
            // A directory that cannot be read is reported by the operation that needs it.
            let Ok(directory) = conf_dir::list(path) else { continue };
            let files = load::unusable(&directory).into_iter().take(MOST_UNUSABLE);
            unusable.extend(files.map(|found| (path.join(found.file), found.source)));
        }
        unusable
    }

    /// Returns the directories whose files determine the default network, without those that contain definitions.
    pub fn default_directories(&self) -> Vec<PathBuf> {
        match &self.default {
            DefaultNetwork::Path(path) => default_network::directories(path).collect(),
            DefaultNetwork::Name(_) => vec![self.conf_dir.clone()],
            DefaultNetwork::Definition(_) | DefaultNetwork::Builtin | DefaultNetwork::Chained => Vec::new(),
        }
    }

    /// Returns every network whose configuration can be read now, the default network first. Networks that cannot be
    /// read are left out; the checks of definitions and of the default network report them.
    pub fn defined(&self) -> Vec<Defined> {
        let objects = self.source.snapshot();
        let default = self.node_default(&objects);
        let default_name = default.as_ref().ok().and_then(|network| network.name.definition().cloned());
        let others = objects.definitions.keys().filter(|name| Some(*name) != default_name.as_ref());
        let read = others.map(|name| (self.network(&objects, name), false));
        let readable =
            std::iter::once((default, true)).chain(read).filter_map(|(network, default)| match network {
                Ok(network) => Some(Defined { network, default }),
                Err(error) => {
                    tracing::debug!(error = %Chain(&error), "network left out");
                    None
                }
            });
        readable.collect()
    }

    /// Returns a network for pods of a namespace.
    ///
    /// # Errors
    /// The namespace may not use the network, the network does not exist, or its configuration is unusable.
    pub fn network_for(
        &self,
        objects: &Objects,
        namespace: &str,
        reference: &NetworkRef,
    ) -> Result<Network, IntentError> {
        let definition = objects.definitions.get(reference).map(AsRef::as_ref);
        self.restrictions.check(reference, definition, namespace, &objects.namespace_labels(namespace))?;
        self.known_network(objects, reference)
    }

    /// Like [`Self::network`], but uses the stored network if its definition has not changed.
    fn known_network(&self, objects: &Objects, reference: &NetworkRef) -> Result<Network, IntentError> {
        let definition = objects.definitions.get(reference);
        if let Some(known) = definition.and_then(|definition| self.known.of(definition)) {
            return Ok(known);
        }
        let (network, is_in_definition) = self.read_network(objects, reference)?;
        if let Some(definition) = definition.filter(|_| is_in_definition) {
            self.known.keep(definition, &network);
        }
        Ok(network)
    }

    /// Returns the networks that the pod selects in addition to the default network.
    fn selections(
        &self,
        pod: &PodRef,
        known: &Pod,
        warnings: &mut Vec<Warning>,
    ) -> Result<Vec<Selection>, IntentError> {
        let Some(text) = known.annotations.get(NETWORKS_ANNOTATION) else { return Ok(Vec::new()) };
        let parsed = npwg::parse_networks(text, &pod.name.namespace);
        let parsed = self.usable(pod, NETWORKS_ANNOTATION, parsed, warnings)?;
        warnings.extend(
            parsed
                .warnings
                .iter()
                .map(|warning| Warning { selection: Some(warning.index()), text: warning.to_string() }),
        );
        Ok(parsed.selections)
    }

    /// Returns the default network that the pod chooses for itself.
    fn chosen_default(
        &self,
        pod: &PodRef,
        known: &Pod,
        warnings: &mut Vec<Warning>,
    ) -> Result<Option<Selection>, IntentError> {
        let Some(text) = known.annotations.get(DEFAULT_NETWORK_ANNOTATION) else { return Ok(None) };
        let parsed = npwg::parse_default_network(text, &self.default_namespace);
        let mut parsed = self.usable(pod, DEFAULT_NETWORK_ANNOTATION, parsed, warnings)?;
        if self.default == DefaultNetwork::Chained && !parsed.selections.is_empty() {
            return Err(IntentError::ChosenBehind(pod.clone()));
        }
        let about_default =
            |warning: &SelectionWarning| Warning { selection: None, text: warning.to_string() };
        warnings.extend(parsed.warnings.iter().map(about_default));
        Ok(parsed.selections.pop())
    }

    /// Returns the selections of an annotation; none, with a warning, for an invalid annotation if such are ignored.
    fn usable(
        &self,
        pod: &PodRef,
        annotation: &'static str,
        parsed: Result<Parsed, SelectionError>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Parsed, IntentError> {
        match parsed {
            Ok(parsed) => {
                for warning in &parsed.warnings {
                    tracing::warn!(%pod, %warning, "annotation {annotation}");
                }
                Ok(parsed)
            }
            Err(error) if self.ignore_invalid => {
                tracing::warn!(%pod, error = %Chain(&error), "invalid annotation {annotation} ignored");
                let text = format!("invalid annotation {annotation} ignored: {}", Chain(&error));
                warnings.push(Warning { selection: None, text });
                Ok(Parsed::default())
            }
            Err(source) => {
                Err(IntentError::Annotation { pod: pod.clone(), annotation, source: Box::new(source) })
            }
        }
    }

    fn ready_default(&self, objects: &Objects) -> Result<Network, IntentError> {
        self.node_default(objects).map_err(|error| IntentError::DefaultNotReady(Box::new(error)))
    }

    fn node_default(&self, objects: &Objects) -> Result<Network, IntentError> {
        let network = self.any_node_default(objects)?;
        match multi_network::other(&network.list) {
            Some(product) => Err(IntentError::OtherMultiNetwork { network: network.name, product }),
            None => Ok(network),
        }
    }

    fn any_node_default(&self, objects: &Objects) -> Result<Network, IntentError> {
        let network = match &self.default {
            DefaultNetwork::Definition(reference) => return self.known_network(objects, reference),
            DefaultNetwork::Name(name) => {
                let reference = NetworkRef::new(&self.default_namespace, name);
                if objects.definitions.contains_key(&reference) {
                    return self.known_network(objects, &reference);
                }
                let list = self.on_disk(name, |directory, source| IntentError::NoDefault {
                    network: reference,
                    directory,
                    source,
                })?;
                Network::of_configuration(name, list.into())
            }
            DefaultNetwork::Path(path) => default_network::read(path)?,
            DefaultNetwork::Chained => return made_before::any(),
            DefaultNetwork::Builtin => {
                return Ok(Network::of_configuration(builtin::NAME, self.from_node.builtin(objects)?));
            }
        };
        not_itself(network)
    }

    /// Returns a network, without checking which namespaces may use it.
    ///
    /// # Errors
    /// The network does not exist, or its configuration is unusable.
    pub fn network(&self, objects: &Objects, reference: &NetworkRef) -> Result<Network, IntentError> {
        self.read_network(objects, reference).map(|(network, _)| network)
    }

    /// Like [`Self::network`]; also returns whether the definition contains the whole network, without parts from the
    /// node or a disk.
    fn read_network(
        &self,
        objects: &Objects,
        reference: &NetworkRef,
    ) -> Result<(Network, bool), IntentError> {
        let definition = objects
            .definitions
            .get(reference)
            .ok_or_else(|| IntentError::UnknownNetwork(reference.clone()))?;
        let mut list = match &definition.config {
            Some(config) => NetworkList::parse_with_default_name(config.as_bytes(), &definition.name)
                .map_err(|source| IntentError::Config { network: reference.clone(), source })?,
            None => self.on_disk(&definition.name, |directory, source| IntentError::NotOnDisk {
                network: reference.clone(),
                directory,
                source,
            })?,
        };
        let is_default = self.restrictions.default_network.as_ref() == Some(reference);
        let is_inline = definition.config.is_some();
        let is_from_node = self.from_node.fill(&mut list, (reference, is_inline, is_default), objects)?;
        if self.separate_pools && list.name_is_default {
            pools::separate(&mut list, &definition.namespace);
        }
        let resource =
            definition.annotations.get(RESOURCE_ANNOTATION).filter(|name| !name.is_empty()).cloned();
        let enforce = match definition.annotations.get(ENFORCE_ANNOTATION) {
            None => None,
            Some(word) => Some(
                EnforceWhen::named(word)
                    .ok_or_else(|| IntentError::Enforce { network: reference.clone(), word: word.clone() })?,
            ),
        };
        let ethertypes = match definition.annotations.get(ETHERTYPES_ANNOTATION) {
            None => Vec::new(),
            Some(text) => ethertypes::parse(text)
                .map_err(|source| IntentError::Ethertypes { network: reference.clone(), source })?,
        };
        let (name, list) = (reference.clone().into(), Arc::new(list));
        let network = not_itself(Network { name, list, resource, enforce, ethertypes, device: None })?;
        Ok((network, is_inline && !is_from_node))
    }

    fn on_disk(
        &self,
        name: &str,
        failed: impl FnOnce(PathBuf, Box<LoadError>) -> IntentError,
    ) -> Result<NetworkList, IntentError> {
        let directory = conf_dir::list(&self.conf_dir)?;
        let found =
            load::find(&directory, name).map_err(|source| failed(self.conf_dir.clone(), Box::new(source)))?;
        for skipped in &found.skipped {
            // The check of the files on disk reports it.
            tracing::debug!(directory = %self.conf_dir.display(), error = %Chain(skipped), "CNI configuration skipped");
        }
        Ok(found.list)
    }
}

fn not_itself(network: Network) -> Result<Network, IntentError> {
    if multi_network::calls_itself(&network.list) {
        Err(IntentError::Itself { network: network.name })
    } else {
        Ok(network)
    }
}

fn known_pod<'a>(objects: &'a Objects, pod: &PodRef) -> Result<&'a Pod, IntentError> {
    let known = objects.pods.get(&pod.name).ok_or_else(|| IntentError::UnknownPod(pod.clone()))?;
    match &pod.uid {
        Some(asked) if !known.has_uid(asked) => Err(IntentError::OtherPod {
            pod: pod.clone(),
            known: known.uid.clone().unwrap_or_default(),
            asked: asked.clone(),
        }),
        _ => Ok(known),
    }
}

/// Returns the pod that the runtime names in `CNI_ARGS`.
pub fn pod_of(request: &cni::Request) -> Option<PodRef> {
    let arg = |key| request.args.get(key).filter(|value| !value.is_empty()).map(str::to_owned);
    let name = ObjectName { namespace: arg("K8S_POD_NAMESPACE")?, name: arg("K8S_POD_NAME")? };
    Some(PodRef { name, uid: arg("K8S_POD_UID") })
}

impl std::fmt::Debug for IntentReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntentReader")
            .field("default", &self.default)
            .field("conf_dir", &self.conf_dir)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
