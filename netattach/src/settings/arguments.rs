//! The command line of `netattachd`, which takes precedence over the configuration file.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Parser, ValueEnum};

use super::{BpfLog, Settings, SettingsError, file};
use crate::bpf;
use crate::built;

/// Attaches pods to their networks.
///
/// Every option can also be set in the configuration file; the command line takes precedence.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "netattachd", version, long_version = long_version())]
pub struct Arguments {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of manifests: Pod, NetworkAttachmentDefinition, Namespace, MultiNetworkPolicy, NetworkPolicy.
    #[arg(long, value_name = "DIR")]
    pub source: Option<PathBuf>,
    /// Read pods, networks and policies from the Kubernetes API, as the service account of the agent's pod.
    #[arg(long, conflicts_with = "source")]
    pub kubernetes: bool,
    /// The same, as this kubeconfig says.
    #[arg(long, value_name = "FILE", conflicts_with = "source")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of this node in the cluster [default: the variable NODE_NAME, else the host's name].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Directory of the socket and the published network-status [default: /run/netattach].
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Directory of the journal [default: /var/lib/netattach].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory of the pinned BPF programs and maps [default: /sys/fs/bpf/netattach].
    #[arg(long, value_name = "DIR")]
    pub bpffs: Option<PathBuf>,
    /// The network that every pod gets: NAMESPACE/NAME or NAME of a definition, the path of a CNI configuration or of a
    /// directory of them, builtin, or chained [default: kube-system/default].
    #[arg(long, value_name = "NETWORK")]
    pub default_network: Option<String>,
    /// Directory of other CNI plugins; may be repeated [default: /opt/cni/bin].
    #[arg(long = "cni-bin-dir", value_name = "DIR")]
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Directory of CNI configurations for definitions without one [default: /etc/cni/netattach.d].
    #[arg(long, value_name = "DIR")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Start other plugins in this root directory, where the node's is mounted in a container.
    #[arg(long, value_name = "DIR")]
    pub plugin_root: Option<PathBuf>,
    /// Log what becomes of packets: their verdicts, or what every stage makes of them. Needs --bpf-log-object.
    #[arg(long, value_name = "HOW", value_enum)]
    pub bpf_log: Option<BpfLog>,
    /// The BPF object that logs, from `cargo xtask build-ebpf --log`.
    #[arg(long, value_name = "FILE")]
    pub bpf_log_object: Option<PathBuf>,
    /// Log the packets of this attachment only.
    #[arg(long, value_name = "NAMESPACE/POD/INTERFACE")]
    pub bpf_log_of: Option<String>,
    /// While another agent serves this node, check what can be checked, and take over when it ends; be refused if it has
    /// not ended after so many seconds [default: 0, be refused at once].
    #[arg(long, value_name = "SECONDS")]
    pub stand_by: Option<u64>,
    /// Show what this node offers an agent with these settings, and what to do about what is missing; changes nothing.
    /// Exit code 1 if something needed is missing.
    #[arg(long)]
    pub check: bool,
    /// Output of --check.
    #[arg(long, short, value_enum, default_value_t, requires = "check")]
    pub output: CheckFormat,
    /// Mount a BPF file system on DIR, unless there is one, and end.
    #[arg(long, value_name = "DIR", exclusive = true)]
    pub mount_bpffs: Option<PathBuf>,
}

/// Output of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CheckFormat {
    /// Aligned columns.
    #[default]
    Table,
    /// For programs: the field names are stable.
    Json,
}

fn long_version() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| built::describe(&[("programs", format!("object {}", bpf::embedded_object()))]));
    &TEXT
}

impl Settings {
    /// Merges the configuration file with the command line.
    ///
    /// # Errors
    /// [`SettingsError`], naming the key or option.
    pub fn read(arguments: Arguments) -> Result<Self, SettingsError> {
        let settings = Self::unvalidated(arguments)?;
        settings.validate()?;
        Ok(settings)
    }

    /// Merges without checking whether an agent could run with the settings: a node is checked before it
    /// has a source.
    ///
    /// # Errors
    /// The file cannot be read, or has unknown keys or invalid values.
    pub(crate) fn unvalidated(arguments: Arguments) -> Result<Self, SettingsError> {
        let mut settings = match arguments.config {
            Some(path) => file::read(&path).map_err(|source| SettingsError::File { path, source })?,
            None => Self::default(),
        };
        let replace = |setting: &mut PathBuf, argument: Option<PathBuf>| {
            if let Some(argument) = argument {
                *setting = argument;
            }
        };
        replace(&mut settings.source, arguments.source);
        settings.kubernetes.enabled |= arguments.kubernetes || arguments.kubeconfig.is_some();
        replace(&mut settings.kubernetes.kubeconfig, arguments.kubeconfig);
        if let Some(name) = arguments.node_name {
            settings.kubernetes.node_name = name;
        }
        replace(&mut settings.run_dir, arguments.run_dir);
        replace(&mut settings.state_dir, arguments.state_dir);
        replace(&mut settings.bpffs, arguments.bpffs);
        replace(&mut settings.cni_conf_dir, arguments.cni_conf_dir);
        replace(&mut settings.bpf_log_object, arguments.bpf_log_object);
        replace(&mut settings.delegation.root, arguments.plugin_root);
        if let Some(how) = arguments.bpf_log {
            settings.bpf_log = how;
        }
        if let Some(of) = arguments.bpf_log_of {
            settings.bpf_log_of = of;
        }
        if let Some(seconds) = arguments.stand_by {
            settings.stand_by_seconds = seconds;
        }
        if let Some(network) = arguments.default_network {
            settings.default_network = network;
        }
        if !arguments.cni_bin_dirs.is_empty() {
            settings.cni_bin_dirs = arguments.cni_bin_dirs;
        }
        Ok(settings)
    }
}
