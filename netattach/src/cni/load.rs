//! Finds a network among the files of a configuration directory: by its name, or as a container runtime does.
//!
//! Pure: the caller reads the files ([`Files`]), and only those that are asked for, since others may have filled the
//! directory. An unusable file does not hide the others; it is reported next to the result. Lists come before single
//! plugins regardless of their file names (NPWG 3.4.1), except for runtimes, which go by the names alone.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::config::{self, ConfigError, NetworkList, PluginConf};
use crate::budget;

/// The files of a configuration directory by name. Files of a folder named after a network are stored under
/// `<network>/<file>`; deeper folders are ignored.
pub type Directory = BTreeMap<String, Vec<u8>>;

/// A configuration directory whose files are read one by one.
pub trait Files {
    /// The names of its files, in order. May contain others than configurations.
    fn names(&self) -> Vec<&str>;

    /// The content of a file, which may be in a folder. `None`: it is gone, or a directory.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], or [`ConfigError::Exceeded`] for a file that is too large.
    fn content(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>, ConfigError>;

    /// The files in the folder named after a network, in order, as `<network>/<file>`.
    ///
    /// # Errors
    /// As [`Files::content`].
    fn folder(&self, network: &str) -> Result<Vec<String>, ConfigError>;
}

impl Files for Directory {
    fn names(&self) -> Vec<&str> {
        self.keys().map(String::as_str).filter(|file| !file.contains('/')).collect()
    }

    fn content(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>, ConfigError> {
        Ok(self.get(file).map(|bytes| Cow::Borrowed(bytes.as_slice())))
    }

    fn folder(&self, network: &str) -> Result<Vec<String>, ConfigError> {
        let prefix = format!("{network}/");
        let inside = |file: &&String| file.strip_prefix(&prefix).is_some_and(|rest| !rest.contains('/'));
        Ok(self.keys().filter(inside).cloned().collect())
    }
}

/// Most files that a message names.
const MOST_SHOWN: usize = 8;

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
    /// All usable files are skipped.
    #[error("only configurations that call a multi-network plugin: {}", few(files))]
    NoneWanted {
        /// The files.
        files: Vec<String>,
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
pub fn find(files: &impl Files, network: &str) -> Result<Found, LoadError> {
    let names = files.names();
    let lists = names.iter().filter(|file| is_list(file));
    let singles = names.iter().filter(|file| is_single(file));
    let mut skipped = Vec::new();
    let mut any = false;
    for &file in lists.chain(singles) {
        let bytes = match files.content(file) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => continue,
            Err(source) => {
                any = true;
                skipped.push(Skipped { file: file.to_owned(), source });
                continue;
            }
        };
        any = true;
        match read(files, &bytes, is_list(file)) {
            Ok(list) if list.name == network => return Ok(Found { list, file: file.to_owned(), skipped }),
            Ok(_) => {}
            Err(source) if config::peek_name(&bytes).as_deref() == Some(network) => {
                return Err(LoadError::Broken { network: network.to_owned(), file: file.to_owned(), source });
            }
            Err(source) => skipped.push(Skipped { file: file.to_owned(), source }),
        }
    }
    if any {
        Err(LoadError::NotFound { network: network.to_owned(), skipped })
    } else {
        Err(LoadError::Empty)
    }
}

/// The network that a container runtime would use as its own: that of the first usable file by name (`.conflist`,
/// `.conf`, `.json`). Networks that are not `wanted` are passed over.
///
/// # Errors
/// [`LoadError`] when no file qualifies.
pub fn first(files: &impl Files, wanted: impl Fn(&NetworkList) -> bool) -> Result<Found, LoadError> {
    let (mut skipped, mut passed_over) = (Vec::new(), Vec::new());
    for (file, read) in as_runtimes_do(files) {
        match read {
            Ok(list) if wanted(&list) => return Ok(Found { list, file: file.to_owned(), skipped }),
            Ok(_) => passed_over.push(file.to_owned()),
            Err(source) => skipped.push(Skipped { file: file.to_owned(), source }),
        }
    }
    match (skipped.is_empty(), passed_over.is_empty()) {
        (true, true) => Err(LoadError::Empty),
        (true, false) => Err(LoadError::NoneWanted { files: passed_over }),
        (false, _) => Err(LoadError::NoneUsable { skipped }),
    }
}

/// The files that container runtimes read, in their order, each with its network.
pub fn as_runtimes_do(
    files: &impl Files,
) -> impl Iterator<Item = (&str, Result<NetworkList, ConfigError>)> + '_ {
    let names = files.names().into_iter().filter(|file| is_read_by_runtimes(file));
    names.filter_map(move |file| {
        let network = match files.content(file) {
            Ok(bytes) => read(files, &bytes?, is_list(file)),
            Err(error) => Err(error),
        };
        Some((file, network))
    })
}

/// Whether container runtimes read a file of that name as a network of their own.
pub fn is_read_by_runtimes(file: &str) -> bool {
    matches!(extension(file), Some("conflist" | "conf" | "json"))
}

/// The configuration files of the directory that do not contain a usable network.
pub fn unusable(files: &impl Files) -> Vec<Skipped> {
    let candidates = files.names().into_iter().filter(|file| is_candidate(file));
    candidates
        .filter_map(|file| {
            let source = match files.content(file) {
                Ok(bytes) => read(files, &bytes?, is_list(file)).err()?,
                Err(error) => error,
            };
            Some(Skipped { file: file.to_owned(), source })
        })
        .collect()
}

/// The network in one file of the directory, regardless of the file's name: a list, with the plugins of its folder, or
/// a single plugin.
///
/// # Errors
/// [`ConfigError`].
pub fn file(files: &impl Files, file: &str, bytes: &[u8]) -> Result<NetworkList, ConfigError> {
    let list = config::object(bytes)?.contains_key("plugins") || is_list(file);
    read(files, bytes, list)
}

/// Whether a file of the directory can contain a network; callers need not read the others.
pub fn is_candidate(file: &str) -> bool {
    is_list(file) || is_single(file)
}

fn read(files: &impl Files, bytes: &[u8], is_list: bool) -> Result<NetworkList, ConfigError> {
    if !is_list {
        return NetworkList::parse_single(bytes);
    }
    let mut list = NetworkList::parse_list(bytes)?;
    if !list.only_inlined {
        for file in files.folder(&list.name)? {
            if extension(&file) != Some("conf") {
                continue;
            }
            let index = list.plugins.len();
            budget::PLUGINS.check(index + 1)?;
            let plugin = match files.content(&file) {
                Ok(None) => continue,
                Ok(Some(bytes)) => PluginConf::parse(&bytes),
                Err(error) => Err(error),
            };
            let plugin = plugin.map_err(|source| ConfigError::Plugin { index, source: Box::new(source) })?;
            list.plugins.push(plugin);
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
    format!(" (unusable files: {})", few(&files))
}

/// Returns the first names of a list, and how many more there are: other programs may have filled the directory.
fn few(files: &[impl AsRef<str>]) -> String {
    let shown: Vec<&str> = files.iter().take(MOST_SHOWN).map(AsRef::as_ref).collect();
    match files.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
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

    #[test]
    fn a_message_names_a_few_files_only() {
        let names: Vec<String> = (0..20).map(|number| format!("{number:02}.conf")).collect();
        let files: Directory = names.iter().map(|name| (name.clone(), b"{".to_vec())).collect();
        assert_eq!(
            first(&files, |_| true).unwrap_err().to_string(),
            "no usable network configuration (unusable files: 00.conf, 01.conf, 02.conf, 03.conf, 04.conf, 05.conf, \
             06.conf, 07.conf and 12 more)"
        );
        let own = directory(&[("00.conflist", LIST_X), ("10.conf", SINGLE_X)]);
        assert_eq!(
            first(&own, |_| false).unwrap_err().to_string(),
            "only configurations that call a multi-network plugin: 00.conflist, 10.conf"
        );
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
