//! Checks manifests and settings without an agent: finds what an agent would refuse, or would not carry out
//! as written.
//!
//! The agent's own code reads everything; of the node only the named files are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::de::Deserialize;
use serde_json::Value;

use crate::agent::health::trouble;
use crate::attach::{IntentError, IntentReader};
use crate::error_chain::Chain;
use crate::npwg::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION};
use crate::objects::policy::Policy;
use crate::objects::{ObjectName, Objects, Origin};
use crate::plan::PodRef;
use crate::plan::resolve::rehearse;
use crate::policy::desired::Subject;
use crate::settings::{Arguments, Settings, SettingsError};
use crate::source::files::{FilesError, Timing};
use crate::source::{Files, Source};
use crate::{bounded, budget};

/// Most problems that are reported.
pub const MOST_FINDINGS: usize = 1000;

/// A problem of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Finding {
    /// The file; for an object without a file, the directory.
    pub file: PathBuf,
    /// Index of the document in it, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<usize>,
    /// Kind and name of the object; empty: the file as a whole.
    pub object: String,
    /// The path in the object: `spec.config`; empty: the object as a whole.
    pub path: String,
    /// The problem.
    pub problem: String,
    /// The remedy.
    pub remedy: String,
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Validated {
    /// Objects that were read, by kind.
    pub objects: BTreeMap<&'static str, usize>,
    /// Problems, by file.
    pub findings: Vec<Finding>,
    /// How many more findings there are.
    #[serde(skip_serializing_if = "is_zero")]
    pub more: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Nothing could be checked.
#[derive(Debug, thiserror::Error)]
pub enum ValidateError {
    /// The directory cannot be read.
    #[error(transparent)]
    Directory(#[from] FilesError),
    /// The default settings cannot be used here.
    #[error("settings")]
    Settings(#[source] SettingsError),
}

/// Checks a directory of manifests, and settings if there is a settings file. `networks`: the directory of
/// configurations of definitions without one; by default that of the settings.
///
/// # Errors
/// [`ValidateError`]; problems of the directory's content are not errors.
pub fn validate(
    directory: &Path,
    config: Option<&Path>,
    networks: Option<&Path>,
) -> Result<Validated, ValidateError> {
    let mut findings = Vec::new();
    let arguments = Arguments { config: config.map(Path::to_owned), ..Arguments::default() };
    let mut settings = match Settings::read(arguments) {
        Ok(settings) => settings,
        // The source of the manifests is the directory that is being checked.
        Err(SettingsError::NoSource) => Settings::read(Arguments {
            config: config.map(Path::to_owned),
            source: Some(directory.to_owned()),
            ..Arguments::default()
        })
        .map_err(ValidateError::Settings)?,
        Err(error) => {
            findings.push(of_settings(config, &error));
            Settings::default()
        }
    };
    if let Some(networks) = networks {
        networks.clone_into(&mut settings.cni_conf_dir);
    }
    let files = Arc::new(Files::open(directory, Timing::default())?);
    let objects = files.snapshot();
    let places = Places::of(directory);
    let check = Check { settings: &settings, objects: &objects, places: &places, directory };
    findings.extend(check.unreadable());
    match settings.intents(Arc::clone(&files) as Arc<dyn Source>) {
        Ok(intents) => {
            // Does not wait for pods, and reports what the settings might let the agent ignore.
            let intents = IntentReader { pod_wait: Duration::ZERO, ignore_invalid: false, ..intents };
            findings.extend(check.definitions(&intents));
            findings.extend(check.pods(&intents));
            findings.extend(check.policies(&intents));
        }
        Err(error) => findings.push(of_settings(config, &error)),
    }
    findings.sort();
    findings.dedup();
    let more = findings.len().saturating_sub(MOST_FINDINGS);
    findings.truncate(MOST_FINDINGS);
    let count = [
        ("pods", objects.pods.len()),
        ("networks", objects.definitions.len()),
        ("policies", objects.policies.len()),
        ("network_policies", objects.network_policies.len()),
        ("namespaces", objects.namespaces.len()),
    ];
    Ok(Validated { objects: count.into(), findings, more })
}

fn of_settings(config: Option<&Path>, error: &SettingsError) -> Finding {
    let text = Chain(error).to_string();
    Finding {
        file: config.map(Path::to_owned).unwrap_or_default(),
        document: None,
        object: "settings".to_owned(),
        path: key_in(&text).unwrap_or_default(),
        problem: text,
        remedy:
            "write the key as docs/configuration.md has it; everything else was checked with the defaults"
                .to_owned(),
    }
}

/// Returns the key that an error message names: `key a.b is not known`, `a.b: ...`.
fn key_in(text: &str) -> Option<String> {
    let is_key = |word: &str| {
        word.chars().next().is_some_and(char::is_alphabetic)
            && word.chars().all(|it| it.is_ascii_alphanumeric() || ".[]_-".contains(it))
    };
    let after = text.split("key ").nth(1).and_then(|rest| rest.split([' ', ':']).next());
    after.filter(|word| is_key(word)).map(str::to_owned)
}

/// The input of a check.
struct Check<'a> {
    settings: &'a Settings,
    objects: &'a Objects,
    places: &'a Places,
    directory: &'a Path,
}

impl Check<'_> {
    fn finding(&self, kind: &str, name: &str, path: &str, problem: String, remedy: &str) -> Finding {
        let place = self.places.0.get(&(kind.to_owned(), name.to_owned()));
        let (file, document) =
            place.cloned().map_or_else(|| (self.directory.to_owned(), None), |(file, at)| (file, Some(at)));
        Finding {
            file,
            document,
            object: format!("{kind} {name}"),
            path: path.to_owned(),
            problem,
            remedy: remedy.to_owned(),
        }
    }

    /// Returns the objects that could not be read.
    fn unreadable(&self) -> impl Iterator<Item = Finding> {
        self.objects.problems.iter().map(|problem| {
            let (file, document, object) = match &problem.origin {
                Origin::File { path, document } => (path.clone(), *document, String::new()),
                Origin::Api { kind, name } => (self.directory.to_owned(), None, format!("{kind} {name}")),
            };
            Finding {
                file,
                document,
                object,
                path: key_in(&problem.message).unwrap_or_default(),
                problem: problem.message.clone(),
                remedy: "correct the manifest: while it cannot be read, its earlier version stays in force, or none".to_owned(),
            }
        })
    }

    /// Returns the definitions by which no pod could be attached.
    fn definitions(&self, intents: &IntentReader) -> Vec<Finding> {
        let options = self.settings.options();
        let names = self.objects.definitions.keys();
        let unusable = names.filter_map(|name| {
            let network = intents.network(self.objects, name);
            let problem = match network {
                Ok(network) => rehearse(&network, &options).err()?.to_string(),
                Err(error) => Chain(&error).to_string(),
            };
            let name = name.to_string();
            let remedy = "no pod can be attached by it: correct the configuration (docs/plugins.md has the keys of each plugin)";
            Some(self.finding("NetworkAttachmentDefinition", &name, "spec.config", problem, remedy))
        });
        unusable.collect()
    }

    /// Returns the pods whose networks cannot be determined.
    fn pods(&self, intents: &IntentReader) -> Vec<Finding> {
        let mut findings = Vec::new();
        for pod in self.objects.pods.values().filter(|pod| !pod.host_network && !pod.phase.has_ended()) {
            let reference = PodRef { name: pod.name.clone(), uid: pod.uid.clone() };
            let Err(error) = intents.check_pod(&reference) else { continue };
            let is_of_definition = matches!(
                error,
                IntentError::Config { .. }
                    | IntentError::NotOnDisk { .. }
                    | IntentError::Enforce { .. }
                    | IntentError::Ethertypes { .. }
            );
            if is_of_definition {
                continue;
            }
            let problem = Chain(&error).to_string();
            let annotation = match problem.contains(DEFAULT_NETWORK_ANNOTATION) {
                true => DEFAULT_NETWORK_ANNOTATION,
                false => NETWORKS_ANNOTATION,
            };
            let path = format!("metadata.annotations[{annotation}]");
            let remedy = "the pod would not start: correct the annotation, define the network, or let its namespace use it";
            findings.push(self.finding("Pod", &pod.name.to_string(), &path, problem, remedy));
        }
        findings
    }

    /// Returns the policies that are not in force as written.
    fn policies(&self, intents: &IntentReader) -> Vec<Finding> {
        let mut findings = Vec::new();
        let kinds = [
            ("MultiNetworkPolicy", &self.objects.policies),
            ("NetworkPolicy", &self.objects.network_policies),
        ];
        for (kind, policies) in kinds {
            for (name, policy) in policies.iter() {
                findings.extend(self.problems_of(kind, name, policy));
            }
        }
        let default = intents.restrictions.default_network.as_ref();
        for row in trouble::of_no_network(self.objects, default) {
            let name = row.object.rsplit(' ').next().unwrap_or_default().to_owned();
            let remedy = "define the network, or correct the annotation k8s.v1.cni.cncf.io/policy-for";
            let path = "metadata.annotations[k8s.v1.cni.cncf.io/policy-for]";
            findings.push(self.finding("MultiNetworkPolicy", &name, path, row.problem, remedy));
        }
        let unlabelled = trouble::without_object(self.objects);
        for row in trouble::of_unlabelled(self.objects, &unlabelled, self.settings.network_policy()) {
            let name = row.object.rsplit(' ').next().unwrap_or_default().to_owned();
            let remedy =
                "add a manifest of the namespace with its labels, or select by kubernetes.io/metadata.name";
            findings.push(self.finding("Namespace", &name, "metadata.labels", row.problem, remedy));
        }
        findings
    }

    fn problems_of(&self, kind: &str, name: &ObjectName, policy: &Policy) -> Vec<Finding> {
        let problems = policy.problems.iter().map(|problem| {
            let text = problem.to_string();
            let subject = Subject::Policy(policy.name.clone());
            let remedy = format!(
                "correct the manifest: what cannot be read of {subject} matches nothing, so it allows less"
            );
            let path = key_in(&text).unwrap_or_else(|| "spec".to_owned());
            self.finding(kind, &name.to_string(), &path, text, &remedy)
        });
        problems.collect()
    }
}

/// The file and document of each object, by kind and name. Of two objects with one name, the first in
/// order, which is the one in force.
#[derive(Default)]
struct Places(BTreeMap<(String, String), (PathBuf, usize)>);

impl Places {
    fn of(directory: &Path) -> Self {
        let mut files = Vec::new();
        list(directory, 0, &mut files);
        files.sort();
        let mut places = Self::default();
        for file in files {
            let Ok(bytes) = bounded::read(&file, budget::MANIFEST.most) else { continue };
            let Ok(text) = std::str::from_utf8(&bytes) else { continue };
            for (at, document) in serde_norway::Deserializer::from_str(text).enumerate() {
                // The documents after a YAML error cannot be read.
                let Ok(value) = Value::deserialize(document) else { break };
                places.note(&value, &file, at);
            }
        }
        places
    }

    fn note(&mut self, value: &Value, file: &Path, at: usize) {
        if let Some(items) = value.get("items").and_then(Value::as_array) {
            items.iter().for_each(|item| self.note(item, file, at));
            return;
        }
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str);
        let (Some(kind), Some(name)) = (text("/kind"), text("/metadata/name")) else { return };
        let name = match kind {
            "Namespace" => name.to_owned(),
            _ => format!("{}/{name}", text("/metadata/namespace").unwrap_or("default")),
        };
        self.0.entry((kind.to_owned(), name)).or_insert_with(|| (file.to_owned(), at));
    }
}

/// Deepest directory level of manifests, as for the source.
const DEEPEST: usize = 16;

/// Most files that are searched for objects.
const MOST_FILES: usize = 100_000;

fn list(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if found.len() >= MOST_FILES || depth > DEEPEST {
            return;
        }
        // A symbolic link is followed once, to a file.
        match path.metadata() {
            Ok(metadata) if metadata.is_dir() => list(&path, depth + 1, found),
            Ok(metadata) if metadata.is_file() => found.push(path),
            _ => {}
        }
    }
}
