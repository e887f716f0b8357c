//! `netattachctl import`: shows the netattach equivalent of a Multus configuration, or writes it. Changes nothing of
//! Multus.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use super::output::Format;
use super::table::{self, Align::Left, Align::Prose};
use super::{Answer, CliError};
use crate::multus::config::{Configuration, ConfigurationError};
use crate::multus::imported::{Fate, Imported, Row, Wanted};
use crate::multus::mapping::import;
use crate::{bounded, budget, cni, durable};

/// Where Multus installs its configuration, by CNI version.
const INSTALLED: [&str; 2] = ["/etc/cni/net.d/00-multus.conf", "/etc/cni/net.d/00-multus.conflist"];

/// Which files to read.
#[derive(Debug, Args)]
pub(super) struct Import {
    /// CNI configuration of Multus [default: 00-multus.conf or 00-multus.conflist in /etc/cni/net.d]
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// Configuration of Multus's daemon, daemon-config.json, which overrides it
    #[arg(long, value_name = "FILE")]
    daemon_config: Option<PathBuf>,
    /// Use a directory of manifests as the source instead of the API server that Multus asks
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
    /// Write config.yaml, and a file for each of Multus's delegates, to this directory
    #[arg(long, value_name = "DIR")]
    write: Option<PathBuf>,
}

/// The settings file that is written.
const SETTINGS: &str = "config.yaml";

/// The Multus configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A file cannot be read.
    #[error("read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// A different file exists already.
    #[error("{0} is there already: remove it, or give --write another directory")]
    Exists(PathBuf),
    /// A directory of the command line is not UTF-8, or cannot be made absolute.
    #[error("{0:?} cannot be written into settings")]
    Path(PathBuf),
    /// A file cannot be written.
    #[error("write {path}")]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A file is not a Multus configuration.
    #[error("{path} is not a configuration of Multus")]
    Configuration {
        /// Path of the file.
        path: PathBuf,
        /// The error in the file.
        #[source]
        source: ConfigurationError,
    },
}

impl Import {
    /// Returns the table, or as data the settings file; and whether every key has an equivalent.
    pub(super) fn run(&self, format: Format) -> Result<Answer, CliError> {
        let (source, directory) = (absolute(self.source.as_deref())?, absolute(self.write.as_deref())?);
        let wanted = Wanted { source: source.as_deref(), directory: directory.as_deref() };
        let imported = import(&self.read()?, wanted);
        let written = match &directory {
            Some(directory) => write(&imported, Path::new(directory))?,
            None => String::new(),
        };
        let text = format.show(&imported.settings, |_| render(&imported) + &written)?;
        let lost =
            imported.rows.iter().filter(|row| matches!(row.fate, Fate::NoEquivalent(_) | Fate::Unknown));
        let lost: Vec<String> = lost.map(|row| row.key.clone()).collect();
        Ok((text, if lost.is_empty() { Ok(()) } else { Err(CliError::NoEquivalent(lost)) }))
    }

    fn read(&self) -> Result<Configuration, ImportError> {
        let installed = || INSTALLED.into_iter().map(PathBuf::from).find(|path| path.exists());
        let conf = match (&self.conf, &self.daemon_config) {
            (Some(path), _) => Some(path.clone()),
            // The daemon's file alone is enough.
            (None, Some(_)) => installed(),
            (None, None) => Some(installed().unwrap_or_else(|| INSTALLED[0].into())),
        };
        let mut configuration = match &conf {
            Some(path) => Configuration::of_cni(&bytes(path)?)
                .map_err(|source| ImportError::Configuration { path: path.clone(), source })?,
            None => Configuration::default(),
        };
        if let Some(path) = &self.daemon_config {
            configuration
                .overlay(&bytes(path)?)
                .map_err(|source| ImportError::Configuration { path: path.clone(), source })?;
        }
        Ok(configuration)
    }
}

fn absolute(path: Option<&Path>) -> Result<Option<String>, ImportError> {
    let text = |path: &Path| {
        let whole = std::path::absolute(path).ok()?;
        whole.to_str().map(str::to_owned)
    };
    path.map(|path| text(path).ok_or_else(|| ImportError::Path(path.to_owned()))).transpose()
}

/// Writes settings and delegates, each atomically. Writes nothing if a different file of one of these names
/// exists. Returns the message.
fn write(imported: &Imported, directory: &Path) -> Result<String, ImportError> {
    let settings = (SETTINGS.to_owned(), Value::Object(imported.settings.clone()));
    let files: Vec<(PathBuf, Vec<u8>)> = imported
        .files
        .iter()
        .chain([&settings])
        // JSON is YAML.
        .map(|(name, value)| (directory.join(name), format!("{}\n", cni::json::pretty(value)).into_bytes()))
        .collect();
    for (path, content) in &files {
        match bounded::read(path, budget::CONFIG.most) {
            Ok(present) if present == *content => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            _ => return Err(ImportError::Exists(path.clone())),
        }
    }
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ImportError::Write { path, source }
    };
    std::fs::create_dir_all(directory).map_err(failed(directory))?;
    let mut said = String::new();
    for (path, content) in &files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        durable::replace(path, &format!(".{name}.new"), content, 0o644).map_err(failed(path))?;
        said += &format!("Written: {}\n", path.display());
    }
    Ok(said)
}

fn bytes(path: &Path) -> Result<Vec<u8>, ImportError> {
    bounded::read(path, budget::CONFIG.most)
        .map_err(|source| ImportError::Read { path: path.to_owned(), source })
}

fn render(imported: &Imported) -> String {
    let rows: Vec<[String; 3]> = imported.rows.iter().map(|row| cells(row, imported)).collect();
    table::render([("MULTUS", Left), ("VALUE", Left), ("NETATTACH", Prose)], &rows)
}

fn cells(row: &Row, imported: &Imported) -> [String; 3] {
    let value = row.value.as_ref().map_or_else(|| "-".to_owned(), Value::to_string);
    let fate = match &row.fate {
        Fate::Becomes { setting, note } => {
            let value = imported.settings.get(*setting).map(Value::to_string).unwrap_or_default();
            let separator = if note.is_empty() { "" } else { "; " };
            format!("{setting}: {value}{separator}{note}")
        }
        Fate::Else(what) => format!("to be set otherwise: {what}"),
        Fate::NotNeeded(why) => format!("not needed: {why}"),
        Fate::NoEquivalent(what) => format!("no equivalent: {what}"),
        Fate::Unknown => "unknown, to Multus too: leave it out".to_owned(),
    };
    [row.key.clone(), value, fate]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::tests::{is_narrow, same_as_golden};
    use super::super::{Arguments, CliError, run};
    use crate::error_chain::Chain;
    use crate::settings::{Arguments as AgentArguments, Settings};
    use crate::{bounded, budget};

    fn run_with(words: &[&str]) -> (String, Result<(), CliError>) {
        let mut out = Vec::new();
        let words = ["netattachctl", "import"].iter().chain(words);
        let result = run(&Arguments::try_parse_from(words).unwrap(), &mut out);
        (String::from_utf8(out).unwrap(), result)
    }

    fn file(directory: &tempfile::TempDir, name: &str, text: &str) -> String {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    #[test]
    fn each_key_is_a_line_and_the_exit_says_whether_something_is_lost() {
        let directory = tempfile::tempdir().unwrap();
        let conf = file(
            &directory,
            "00-multus.conf",
            r#"{"type": "multus", "clusterNetwork": "default", "kubeconfig": "/k", "binDir": "/b", "x": 1}"#,
        );
        let (text, result) = run_with(&["--conf", &conf]);
        assert_eq!(
            text,
            "\
MULTUS          VALUE      NETATTACH
clusterNetwork  \"default\"  defaultNetwork: \"default\"
binDir          \"/b\"       cniBinDirs: [\"/b\"]
x               1          unknown, to Multus too: leave it out
kubeconfig      \"/k\"       kubernetes: {\"enabled\":true}; by the service account of the agent's pod; on a node itself add
                           kubeconfig: a file of netattach's own, as this one has Multus's rights and goes with it
confDir         -          cniConfDir: \"/etc/cni/multus/net.d\"; the default of Multus
cniDir          -          multusStateDir: \"/var/lib/cni/multus\"; the default of Multus
cniConfigDir    -          cniConf: {\"dir\":\"/etc/cni/net.d\"}; the default of Multus
(its macvlans)  -          otherMacvlans: \"pass\"; Multus's macvlans keep their network beside netattach's; set back to
                           the default, drop, when no Multus pod is left
"
        );
        assert_eq!(
            result.unwrap_err().to_string(),
            "these keys have no equivalent, and the table says what to do: x"
        );
        let conf = file(&directory, "good", r#"{"type": "multus", "clusterNetwork": "default"}"#);
        assert!(run_with(&["--conf", &conf]).1.is_ok());
    }

    #[test]
    fn the_agent_takes_the_settings() {
        let directory = tempfile::tempdir().unwrap();
        let conf = file(
            &directory,
            "00-multus.conf",
            r#"{"type": "multus-shim", "namespaceIsolation": true, "globalNamespaces": "default,ops",
                "multusNamespace": "net", "confDir": "/c", "cniDir": "/d", "binDir": "/host/b"}"#,
        );
        let daemon = file(
            &directory,
            "daemon-config.json",
            r#"{"multusAutoconfigDir": "/host/etc/cni/net.d", "socketDir": "/host/run/multus",
                "cniConfigDir": "/host/etc/cni/net.d"}"#,
        );
        let (text, result) = run_with(&["--conf", &conf, "--daemon-config", &daemon, "-o", "json"]);
        result.unwrap();
        let settings = file(&directory, "netattachd.yaml", &text);
        let settings =
            Settings::read(AgentArguments::parse_from(["netattachd", "--config", &settings])).unwrap();
        let expected = serde_json::json!({
            "separatePools": false, "defaultNetwork": "/etc/cni/net.d",
            "namespaceIsolation": true, "globalNamespaces": ["default", "ops"], "defaultNetworkNamespace": "net",
            "cniConfDir": "/c", "multusStateDir": "/d", "cniBinDirs": ["/b"],
            "cniConf": {"dir": "/etc/cni/net.d", "name": "00-netattach.conflist", "network": "netattach", "repair": "rewrite", "remove": false, "agentWaitSeconds": 5},
            "networkStatus": {"everyInterface": true, "multusKeys": true, "prefixLengths": false},
            "otherMacvlans": "pass",
        });
        let read = serde_json::to_value(&settings).unwrap();
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&read[key], value, "{key}");
        }
        assert_eq!(read["kubernetes"]["enabled"], true);
    }

    #[test]
    fn settings_and_delegates_are_written_once_and_the_agent_takes_them() {
        let directory = tempfile::tempdir().unwrap();
        let conf = file(
            &directory,
            "00-multus.conf",
            r#"{"type": "multus", "cniVersion": "0.3.1", "name": "m", "delegates": [{"type": "bridge", "name": "cbr0"}]}"#,
        );
        let to = directory.path().join("etc/netattach");
        let words = ["--conf", &conf, "--source", "/manifests", "--write", to.to_str().unwrap()];
        let (text, result) = run_with(&words);
        assert_eq!(
            result.unwrap_err().to_string(),
            "these keys have no equivalent, and the table says what to do: kubeconfig"
        );
        let written = [to.join("default-network.conf"), to.join("config.yaml")];
        let said: String = written.iter().map(|path| format!("Written: {}\n", path.display())).collect();
        assert!(text.ends_with(&said), "{text}");
        let words_of_agent = ["netattachd", "--config", written[1].to_str().unwrap()];
        let settings = Settings::read(AgentArguments::parse_from(words_of_agent)).unwrap();
        assert_eq!(settings.source, std::path::PathBuf::from("/manifests"));
        let default = serde_json::to_value(&settings).unwrap()["defaultNetwork"].clone();
        assert_eq!(default, written[0].to_str().unwrap());
        // Repeating the import is harmless; settings that were changed since are kept.
        assert_eq!(run_with(&words).0, text);
        std::fs::write(&written[1], "mine").unwrap();
        std::fs::remove_file(&written[0]).unwrap();
        let error = run_with(&words).1.unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{} is there already: remove it, or give --write another directory",
                written[1].display()
            )
        );
        assert!(!written[0].exists());
    }

    #[test]
    fn its_form_for_programs_is_pinned() {
        let directory = tempfile::tempdir().unwrap();
        let conf = file(
            &directory,
            "00-multus.conf",
            r#"{"type": "multus", "clusterNetwork": "default", "kubeconfig": "/k", "binDir": "/b", "confDir": "/c",
                "namespaceIsolation": true, "globalNamespaces": "default,ops"}"#,
        );
        let (json, result) = run_with(&["--conf", &conf, "-o", "json"]);
        result.unwrap();
        same_as_golden("import", &json);
    }

    #[test]
    fn its_table_is_no_wider_than_others() {
        let directory = tempfile::tempdir().unwrap();
        let long = "x".repeat(200);
        let conf =
            format!(r#"{{"type": "multus", "clusterNetwork": "{long}", "binDir": "/{long}", "{long}": 1}}"#);
        let conf = file(&directory, "00-multus.conf", &conf);
        is_narrow(&run_with(&["--conf", &conf]).0);
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let conf = file(&directory, "other.conf", r#"{"type": "bridge"}"#);
        assert_eq!(
            Chain(&run_with(&["--conf", &conf]).1.unwrap_err()).to_string(),
            format!(
                "{conf} is not a configuration of Multus: key type: expected multus or multus-shim, found \"bridge\""
            )
        );
        assert_eq!(run_with(&["--conf", "/nonexistent"]).1.unwrap_err().to_string(), "read /nonexistent");
    }

    #[test]
    fn files_that_never_end_are_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let message = |words: [&str; 2]| run_with(&words).1.map_err(|error| Chain(&error).to_string());
        let whole = r#"{"type": "multus", "clusterNetwork": "default"}"#;
        let most = budget::CONFIG.most;
        let fits = file(&directory, "fits", &bounded::padded(whole, most));
        let long = file(&directory, "long", &bounded::padded(whole, most + 1));
        let fifo = directory.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let fifo = fifo.to_str().unwrap();
        assert_eq!(message(["--conf", &fits]), Ok(()));
        for option in ["--conf", "--daemon-config"] {
            assert_eq!(message([option, &long]), Err(format!("read {long}: longer than {most} bytes")));
            assert_eq!(message([option, fifo]), Err(format!("read {fifo}: is no regular file")));
            assert_eq!(message([option, "/dev/zero"]), Err("read /dev/zero: is no regular file".to_owned()));
        }
    }
}
