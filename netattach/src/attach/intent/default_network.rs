//! The network that every pod gets unless it chooses another: its source, and how it is read from disk.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::conf_dir::{self, ConfDir};
use super::{IntentError, Network};
use crate::cni::{NetworkList, load, multi_network};
use crate::error_chain::Chain;
use crate::npwg::NetworkRef;

/// The suffix that Cilium appends to the names of other networks' configurations while it is configured as the only
/// plugin (`cni.exclusive`).
pub const CILIUMS_SUFFIX: &str = ".cilium_bak";

/// The source of the node's default network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefaultNetwork {
    /// By a definition.
    Definition(NetworkRef),
    /// By a definition of that name in the namespace of default networks, or else by the configuration of that
    /// name on disk.
    Name(String),
    /// By a CNI configuration file, or by the first usable one of a directory.
    Path(PathBuf),
    /// The agent's settings and the node's ranges: see [`crate::builtin`].
    Builtin,
    /// The runtime's list: an earlier plugin in it creates the network's interface.
    Chained,
}

/// The word for the network that the agent provides.
const BUILTIN: &str = "builtin";
/// The word for the network whose interface an earlier plugin creates.
pub(super) const CHAINED: &str = "chained";

/// The text does not name a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is neither NAMESPACE/NAME of a definition, nor the name of a network, nor an absolute path, nor builtin or chained"
)]
pub struct InvalidDefaultNetwork(pub String);

impl FromStr for DefaultNetwork {
    type Err = InvalidDefaultNetwork;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.starts_with('/') {
            return Ok(Self::Path(text.into()));
        }
        if text == BUILTIN {
            return Ok(Self::Builtin);
        }
        if text == CHAINED {
            return Ok(Self::Chained);
        }
        let invalid = || InvalidDefaultNetwork(text.to_owned());
        let part = |part: &str| if part.is_empty() { Err(invalid()) } else { Ok(part.to_owned()) };
        match text.split_once('/') {
            None => Ok(Self::Name(part(text)?)),
            Some((_, name)) if name.contains('/') => Err(invalid()),
            Some((namespace, name)) => Ok(Self::Definition(NetworkRef::new(part(namespace)?, part(name)?))),
        }
    }
}

/// Returns the directories in which new or removed files change the result for a path.
pub(super) fn directories(path: &Path) -> impl Iterator<Item = PathBuf> {
    [Some(path), path.parent()].into_iter().flatten().map(Path::to_owned)
}

/// Reads the configuration at a path: a file, or the first usable file of a directory in the order of container
/// runtimes, skipping configurations that call netattach or another multi-network plugin.
pub(super) fn read(path: &Path) -> Result<Network, IntentError> {
    let list = if path.is_dir() { of_directory(path)? } else { of_file(path)? };
    let name = list.name.clone();
    Ok(Network::of_configuration(&name, list.into()))
}

fn of_directory(path: &Path) -> Result<NetworkList, IntentError> {
    let directory = conf_dir::list(path)?;
    let is_wanted =
        |list: &NetworkList| !multi_network::is_for_runtimes(list) && multi_network::other(list).is_none();
    let found = load::first(&directory, is_wanted).map_err(|source| IntentError::DefaultDirectory {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    for skipped in &found.skipped {
        // The check of the files on disk reports it.
        tracing::debug!(directory = %path.display(), error = %Chain(skipped), "CNI configuration skipped");
    }
    Ok(found.list)
}

fn of_file(path: &Path) -> Result<NetworkList, IntentError> {
    let bytes = crate::bounded::read(path, crate::budget::CONFIG.most).map_err(|source| {
        match renamed(path).filter(|_| source.kind() == std::io::ErrorKind::NotFound) {
            Some(to) => IntentError::DefaultRenamed { path: path.to_owned(), to },
            None => IntentError::Read { path: path.to_owned(), source },
        }
    })?;
    // The folder of plugins that may be next to a list.
    let folders = ConfDir::of_folders(path.parent().unwrap_or(Path::new("/")));
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    load::file(&folders, &file, &bytes)
        .map_err(|source| IntentError::DefaultFile { path: path.to_owned(), source })
}

/// Returns the name to which Cilium has renamed a file of another network, if it has.
fn renamed(path: &Path) -> Option<PathBuf> {
    let mut to = path.as_os_str().to_owned();
    to.push(CILIUMS_SUFFIX);
    Some(PathBuf::from(to)).filter(|to| to.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::PluginConf;

    #[test]
    fn the_form_of_the_text_says_where_the_network_is_described() {
        let table = [
            ("kube-system/default", DefaultNetwork::Definition(NetworkRef::new("kube-system", "default"))),
            ("default", DefaultNetwork::Name("default".into())),
            ("/etc/cni/net.d", DefaultNetwork::Path("/etc/cni/net.d".into())),
            ("builtin", DefaultNetwork::Builtin),
            ("chained", DefaultNetwork::Chained),
            ("kube-system/builtin", DefaultNetwork::Definition(NetworkRef::new("kube-system", "builtin"))),
        ];
        for (text, expected) in table {
            assert_eq!(text.parse(), Ok(expected));
        }
        for text in ["", "a/", "a/b/c", "relative/"] {
            assert_eq!(text.parse::<DefaultNetwork>(), Err(InvalidDefaultNetwork(text.into())));
        }
    }

    fn types(path: &Path) -> Result<Vec<String>, String> {
        let plugins = |network: Network| {
            network.list.plugins.iter().map(PluginConf::plugin_type).map(str::to_owned).collect()
        };
        read(path).map(plugins).map_err(|error| Chain(&error).to_string())
    }

    /// Rows: CFG-21.
    #[test]
    fn a_directory_stands_for_its_first_usable_file_that_does_not_call_netattach() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let shown = path.display();
        assert_eq!(
            types(path),
            Err(format!("default network: {shown}: no network configuration in the directory"))
        );
        let files = [
            ("00-multus.conf", r#"{"name": "other", "type": "multus-shim", "clusterNetwork": "x"}"#),
            ("00-own.conflist", r#"{"name": "own", "plugins": [{"type": "netattach"}]}"#),
            (
                "02-chained.conflist",
                r#"{"name": "c", "plugins": [{"type": "bridge"}, {"type": "netattach"}]}"#,
            ),
            // Cilium's, chained to the first configuration that it found.
            (
                "04-cilium.conflist",
                r#"{"name": "own", "plugins": [{"type": "netattach"}, {"type": "cilium-cni"}]}"#,
            ),
            ("05-broken.conflist", "{"),
            ("06-flannel.conflist.cilium_bak", r#"{"name": "b", "type": "flannel"}"#),
        ];
        for (name, text) in files {
            std::fs::write(path.join(name), text).unwrap();
        }
        assert_eq!(
            types(path),
            Err(format!(
                "default network: {shown}: no usable network configuration (unusable files: 05-broken.conflist)"
            ))
        );
        std::fs::write(path.join("20-b.conf"), r#"{"name": "b", "type": "second"}"#).unwrap();
        std::fs::write(path.join("10-a.conflist"), r#"{"name": "a", "plugins": [{"type": "first"}]}"#)
            .unwrap();
        assert_eq!(types(path), Ok(vec!["first".into()]));
    }

    #[test]
    fn a_file_is_read_with_the_folder_of_its_network() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("default");
        std::fs::write(&file, r#"{"name": "a", "plugins": [{"type": "first"}]}"#).unwrap();
        std::fs::create_dir(directory.path().join("a")).unwrap();
        std::fs::write(directory.path().join("a/10.conf"), r#"{"type": "second"}"#).unwrap();
        assert_eq!(types(&file), Ok(vec!["first".into(), "second".into()]));
        std::fs::write(&file, r#"{"name": "a", "type": "single"}"#).unwrap();
        assert_eq!(types(&file), Ok(vec!["single".into()]));
        std::fs::rename(&file, directory.path().join("default.cilium_bak")).unwrap();
        let renamed = format!(
            "default network {0} is gone and {0}.cilium_bak is there: Cilium renames the configurations of others unless its \
             cni.exclusive is false",
            file.display()
        );
        assert_eq!(types(&file), Err(renamed));
        let missing = directory.path().join("missing");
        assert_eq!(
            types(&missing),
            Err(format!("read {}: No such file or directory (os error 2)", missing.display()))
        );
    }
}
