//! Finds a network by name among the files of a configuration directory.
//!
//! Pure: the caller reads the directory. An unusable file does not hide the others; it is reported next to the result.
//! Lists come before single plugins regardless of their file names (NPWG 3.4.1).

use std::collections::BTreeMap;

use super::config::{self, ConfigError, NetworkList, PluginConf};
use crate::budget;

/// The files of a configuration directory by name. Files of a folder named after a network are stored under
/// `<network>/<file>`; deeper folders are ignored.
pub type Directory = BTreeMap<String, Vec<u8>>;

/// The network found.
#[derive(Debug)]
pub struct Found {
    /// The network.
    pub list: NetworkList,
    /// The file it came from.
    pub file: String,
    /// The unusable files met on the way.
    pub skipped: Vec<Skipped>,
}

/// A file that could not be used.
#[derive(Debug, thiserror::Error)]
#[error("skip {file}")]
pub struct Skipped {
    /// Its name in the directory.
    pub file: String,
    /// The cause.
    #[source]
    pub source: ConfigError,
}

/// Why a network was not found.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The directory holds no configuration at all.
    #[error("no network configuration in the directory")]
    Empty,
    /// Every file is unusable.
    #[error("no usable network configuration{}", list_skipped(skipped))]
    NoneUsable {
        /// The files.
        skipped: Vec<Skipped>,
    },
    /// No usable file carries the name.
    #[error("no network configuration with name {network:?}{}", list_skipped(skipped))]
    NotFound {
        /// The name looked for.
        network: String,
        /// The unusable files; the wanted one may be among them.
        skipped: Vec<Skipped>,
    },
    /// The file with that name is unusable.
    #[error("load network {network:?} from {file}")]
    Broken {
        /// The name looked for.
        network: String,
        /// Its file.
        file: String,
        /// The cause.
        #[source]
        source: ConfigError,
    },
}

/// Finds the network called `network`: list files (`.conflist`, `.configlist`) first, then single plugins
/// (`.conf`, `.config`, `.json`), each group by file name.
///
/// # Errors
/// [`LoadError`]. A file with that name that is otherwise unusable is an error; it is not skipped.
pub fn find(directory: &Directory, network: &str) -> Result<Found, LoadError> {
    let lists = directory.iter().filter(|(file, _)| is_list(file)).map(|entry| (entry, true));
    let singles = directory.iter().filter(|(file, _)| is_single(file)).map(|entry| (entry, false));
    let mut skipped = Vec::new();
    let mut any = false;
    for ((file, bytes), is_list) in lists.chain(singles) {
        any = true;
        match read(directory, bytes, is_list) {
            Ok(list) if list.name == network => return Ok(Found { list, file: file.clone(), skipped }),
            Ok(_) => {}
            Err(source) if config::peek_name(bytes).as_deref() == Some(network) => {
                return Err(LoadError::Broken { network: network.to_owned(), file: file.clone(), source });
            }
            Err(source) => skipped.push(Skipped { file: file.clone(), source }),
        }
    }
    if any {
        Err(LoadError::NotFound { network: network.to_owned(), skipped })
    } else {
        Err(LoadError::Empty)
    }
}

/// The network that a container runtime would use as its own: that of the first usable file by name (`.conflist`,
/// `.conf`, `.json`). Networks that are not `wanted` are skipped.
///
/// # Errors
/// [`LoadError`] when no file qualifies.
pub fn first(directory: &Directory, wanted: impl Fn(&NetworkList) -> bool) -> Result<Found, LoadError> {
    let mut skipped = Vec::new();
    let runtimes_read = |file: &str| matches!(extension(file), Some("conflist" | "conf" | "json"));
    let files = directory.iter().filter(|(file, _)| !file.contains('/') && runtimes_read(file));
    for (file, bytes) in files {
        match read(directory, bytes, is_list(file)) {
            Ok(list) if wanted(&list) => return Ok(Found { list, file: file.clone(), skipped }),
            Ok(_) => {}
            Err(source) => skipped.push(Skipped { file: file.clone(), source }),
        }
    }
    if skipped.is_empty() { Err(LoadError::Empty) } else { Err(LoadError::NoneUsable { skipped }) }
}

/// The configuration files of the directory that do not contain a usable network.
pub fn unusable(directory: &Directory) -> impl Iterator<Item = Skipped> {
    directory.iter().filter(|(file, _)| is_candidate(file)).filter_map(|(file, bytes)| {
        let source = read(directory, bytes, is_list(file)).err()?;
        Some(Skipped { file: file.clone(), source })
    })
}

/// The network in one file of the directory, regardless of the file's name: a list, with the plugins of its folder, or
/// a single plugin.
///
/// # Errors
/// [`ConfigError`]. A missing file is treated as empty.
pub fn file(directory: &Directory, file: &str) -> Result<NetworkList, ConfigError> {
    let bytes = directory.get(file).map(Vec::as_slice).unwrap_or_default();
    let list = config::object(bytes)?.contains_key("plugins") || is_list(file);
    read(directory, bytes, list)
}

/// Whether a file of the directory can contain a network; callers need not read the others.
pub fn is_candidate(file: &str) -> bool {
    is_list(file) || is_single(file)
}

fn read(directory: &Directory, bytes: &[u8], is_list: bool) -> Result<NetworkList, ConfigError> {
    if !is_list {
        return NetworkList::parse_single(bytes);
    }
    let mut list = NetworkList::parse_list(bytes)?;
    if !list.only_inlined {
        let prefix = format!("{}/", list.name);
        for (file, bytes) in directory {
            let in_folder = file.strip_prefix(&prefix).filter(|rest| !rest.contains('/'));
            if in_folder.and_then(extension) == Some("conf") {
                let index = list.plugins.len();
                budget::PLUGINS.check(index + 1)?;
                let plugin = PluginConf::parse(bytes)
                    .map_err(|source| ConfigError::Plugin { index, source: Box::new(source) })?;
                list.plugins.push(plugin);
            }
        }
    }
    if list.plugins.is_empty() { Err(ConfigError::NoPlugins) } else { Ok(list) }
}

fn is_list(file: &str) -> bool {
    !file.contains('/') && matches!(extension(file), Some("conflist" | "configlist"))
}

fn is_single(file: &str) -> bool {
    !file.contains('/') && matches!(extension(file), Some("conf" | "config" | "json"))
}

fn extension(file: &str) -> Option<&str> {
    Some(file.rsplit_once('.')?.1)
}

fn list_skipped(skipped: &[Skipped]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let files: Vec<&str> = skipped.iter().map(|skipped| skipped.file.as_str()).collect();
    format!(" (unusable files: {})", files.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::Chain;

    fn directory(files: &[(&str, &str)]) -> Directory {
        files.iter().map(|(file, text)| ((*file).to_owned(), text.as_bytes().to_vec())).collect()
    }

    fn types(found: &Found) -> Vec<&str> {
        found.list.plugins.iter().map(PluginConf::plugin_type).collect()
    }

    const LIST_X: &str = r#"{"name":"x","plugins":[{"type":"from-list"}]}"#;
    const SINGLE_X: &str = r#"{"name":"x","type":"from-single"}"#;

    /// Rows: CFG-14, NPWG-3.4.1-r2-list-before-single.
    #[test]
    fn a_list_wins_over_a_single_plugin_that_sorts_first() {
        for list in ["20-x.conflist", "20-x.configlist"] {
            let found = find(&directory(&[("10-x.conf", SINGLE_X), (list, LIST_X)]), "x").unwrap();
            assert_eq!((found.file.as_str(), types(&found)), (list, vec!["from-list"]));
        }
    }

    /// Rows: CFG-13, NPWG-3.4.1-r3-single.
    #[test]
    fn a_single_plugin_is_used_when_no_list_has_the_name() {
        for file in ["x.conf", "x.config", "x.json"] {
            let other = ("a.conflist", r#"{"name":"y","plugins":[{"type":"y"}]}"#);
            let found = find(&directory(&[other, (file, SINGLE_X)]), "x").unwrap();
            assert_eq!((found.file.as_str(), types(&found)), (file, vec!["from-single"]));
        }
    }

    /// Rows: CFG-12.
    #[test]
    fn the_first_file_by_name_wins_within_a_group() {
        let other = r#"{"name":"x","plugins":[{"type":"second"}]}"#;
        let found = find(&directory(&[("20.conflist", other), ("10.conflist", LIST_X)]), "x").unwrap();
        assert_eq!(types(&found), ["from-list"]);
    }

    /// Rows: NPWG-3.4.1-other-file-broken.
    #[test]
    fn a_broken_neighbour_is_reported_and_skipped() {
        let files = directory(&[("00.conflist", "{"), ("01.conf", r#"{"name":"y"}"#), ("10.conf", SINGLE_X)]);
        let found = find(&files, "x").unwrap();
        let skipped: Vec<&str> = found.skipped.iter().map(|skipped| skipped.file.as_str()).collect();
        assert_eq!((types(&found), skipped), (vec!["from-single"], vec!["00.conflist", "01.conf"]));
    }

    /// Rows: CFG-16, NPWG-3.4.1-r4-none-fails.
    #[test]
    fn a_name_that_no_file_carries_is_an_error_that_lists_unusable_files() {
        let files = directory(&[("00.conflist", "{"), ("10.conf", SINGLE_X)]);
        assert_eq!(
            find(&files, "z").unwrap_err().to_string(),
            "no network configuration with name \"z\" (unusable files: 00.conflist)"
        );
    }

    #[test]
    fn an_unusable_file_that_carries_the_name_is_the_error() {
        let files = directory(&[("00.conflist", r#"{"name":"x","plugins":[{}]}"#), ("10.conf", SINGLE_X)]);
        assert_eq!(
            Chain(&find(&files, "x").unwrap_err()).to_string(),
            "load network \"x\" from 00.conflist: plugin 0 of the list: key type: expected a string, found null"
        );
    }

    /// Rows: CFG-15, CFG-17.
    #[test]
    fn a_directory_without_configurations_is_empty() {
        for files in [&[][..], &[("README", "x"), ("x.conf.bak", SINGLE_X), ("sub/x.conf", SINGLE_X)]] {
            assert!(matches!(find(&directory(files), "x"), Err(LoadError::Empty)));
        }
    }

    /// Rows: CFG-09, CFG-10, CFG-06.
    #[test]
    fn the_folder_named_after_the_network_adds_plugins_after_the_inlined_ones() {
        let folder = [
            ("x/20.conf", r#"{"type":"second"}"#),
            ("x/10.conf", r#"{"type":"first"}"#),
            ("x/30.json", r#"{"type":"not conf"}"#),
            ("x/deep/10.conf", r#"{"type":"too deep"}"#),
        ];
        let mut files = directory(&folder);
        files.insert("a.conflist".into(), LIST_X.into());
        assert_eq!(types(&find(&files, "x").unwrap()), ["from-list", "first", "second"]);
        files.insert("a.conflist".into(), br#"{"name":"x"}"#.to_vec());
        assert_eq!(types(&find(&files, "x").unwrap()), ["first", "second"]);
        let only = r#"{"name":"x","loadOnlyInlinedPlugins":true,"plugins":[{"type":"a"}]}"#;
        files.insert("a.conflist".into(), only.into());
        assert_eq!(types(&find(&files, "x").unwrap()), ["a"]);
    }

    /// Rows: CFG-09, CFG-11.
    #[test]
    fn a_folder_that_is_bad_or_empty_makes_its_list_unusable() {
        let files = directory(&[("a.conflist", r#"{"name":"x"}"#), ("x/1.conf", "{}")]);
        assert!(matches!(
            find(&files, "x"),
            Err(LoadError::Broken { source: ConfigError::Plugin { index: 0, .. }, .. })
        ));
        let files = directory(&[("a.conflist", r#"{"name":"x"}"#)]);
        assert!(matches!(find(&files, "x"), Err(LoadError::Broken { source: ConfigError::NoPlugins, .. })));
    }
}
