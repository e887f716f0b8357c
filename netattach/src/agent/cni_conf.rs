//! The configuration file that makes a container runtime call netattach.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::config::Settings;
use crate::cni::{self, NetworkList, Version};
use crate::durable;
use crate::rpc::shim::WAIT_KEY;

/// Key that marks a file as written by the agent, which may replace it.
const MANAGED: &str = "netattach.dev/managed";

/// World-readable: the file contains no secrets.
const MODE: u32 = 0o644;

/// The file, and the parts of its content that do not depend on the default network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CniConf {
    path: PathBuf,
    network: String,
    socket: PathBuf,
    state_dir: PathBuf,
    agent_wait_seconds: u64,
}

/// The reason why the file could not be brought up to date.
#[derive(Debug, thiserror::Error)]
pub(super) enum CniConfError {
    /// The file exists and was not written by netattach.
    #[error("{path} was not written by netattach; remove it or choose another cniConf.name")]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{action} {path}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The path it was applied to.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

impl CniConf {
    /// `None` if no file is wanted.
    ///
    /// # Errors
    /// The working directory, which relative settings refer to, cannot be determined.
    pub(super) fn of(settings: &Settings) -> io::Result<Option<Self>> {
        let conf = &settings.cni_conf;
        if conf.dir.as_os_str().is_empty() {
            return Ok(None);
        }
        Ok(Some(Self {
            path: conf.dir.join(&conf.name),
            network: conf.network.clone(),
            socket: std::path::absolute(settings.socket())?,
            state_dir: std::path::absolute(&settings.state_dir)?,
            agent_wait_seconds: conf.agent_wait_seconds,
        }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file for this default network unless it is up to date. Returns whether it was written.
    ///
    /// # Errors
    /// [`CniConfError`]; the previous file remains.
    pub(super) fn ensure(&self, default: &NetworkList) -> Result<bool, CniConfError> {
        let failed = |action| move |source| CniConfError::Io { action, path: self.path.clone(), source };
        let mut wanted = cni::json::pretty(&self.render(default));
        wanted.push('\n');
        match crate::bounded::read(&self.path, crate::budget::CONFIG.most) {
            Ok(present) if present == wanted.as_bytes() => return Ok(false),
            // An empty file is left by a writer that did not sync.
            Ok(present) if !present.is_empty() && !is_managed(&present) => {
                return Err(CniConfError::Foreign { path: self.path.clone() });
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("read")(error)),
            _ => {}
        }
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory).map_err(failed("make the directory of"))?;
        }
        // Runtimes select files by their extension, so the temporary file must not have theirs.
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        durable::replace(&self.path, &format!(".{name}.new"), wanted.as_bytes(), MODE)
            .map_err(failed("write"))?;
        Ok(true)
    }

    fn render(&self, default: &NetworkList) -> Value {
        let declared = default.plugins.iter().flat_map(|plugin| plugin.capabilities());
        // A runtime keeps a pod's hostPorts from a network that does not declare them, and the pod would be Ready with
        // its port closed: the plan decides what becomes of them.
        let capabilities: Map<String, Value> =
            declared.chain(["portMappings"]).map(|c| (c.to_owned(), true.into())).collect();
        // Lists exist since 0.3.0. A runtime that knows only `cniVersion` may be older than 1.1.0.
        let base = default.version.clamp(Version::V0_3_1, Version::V1_0_0);
        let offered: Vec<Version> = Version::ALL.into_iter().filter(|version| *version >= base).collect();
        json!({
            "cniVersion": base,
            "cniVersions": offered,
            "name": self.network,
            "disableCheck": false,
            MANAGED: true,
            "plugins": [{
                "type": "netattach",
                "capabilities": capabilities,
                "socket": self.socket,
                "stateDir": self.state_dir,
                WAIT_KEY: self.agent_wait_seconds,
            }],
        })
    }
}

fn is_managed(content: &[u8]) -> bool {
    serde_json::from_slice::<Value>(content).is_ok_and(|conf| conf[MANAGED] == true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::Chain;

    fn conf(directory: &Path) -> CniConf {
        CniConf {
            path: directory.join("deep/00-netattach.conflist"),
            network: "pods".into(),
            socket: "/run/x/netattach.sock".into(),
            state_dir: "/var/lib/x".into(),
            agent_wait_seconds: 7,
        }
    }

    fn default(version: &str) -> NetworkList {
        let plugins = json!([
            {"type": "a", "capabilities": {"portMappings": true, "mac": false}},
            {"type": "b", "capabilities": {"bandwidth": true, "portMappings": true}},
        ]);
        let list = json!({"cniVersion": version, "name": "cbr0", "plugins": plugins});
        NetworkList::parse(list.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_file_passes_on_what_the_default_network_can_do() {
        let expected = |versions: Value| {
            json!({
                "cniVersion": versions[0], "cniVersions": versions, "name": "pods", "disableCheck": false,
                "netattach.dev/managed": true,
                "plugins": [{
                    "type": "netattach", "capabilities": {"portMappings": true, "bandwidth": true},
                    "socket": "/run/x/netattach.sock", "stateDir": "/var/lib/x",
                    "agentWaitSeconds": 7
                }]
            })
        };
        let bare =
            NetworkList::parse(br#"{"cniVersion": "1.0.0", "name": "cbr0", "type": "bridge"}"#).unwrap();
        let rendered = conf(Path::new("/")).render(&bare);
        assert_eq!(
            rendered["plugins"][0]["capabilities"],
            json!({"portMappings": true}),
            "seen, so as to be refused"
        );
        let table = [
            ("0.3.1", json!(["0.3.1", "0.4.0", "1.0.0", "1.1.0"])),
            ("1.0.0", json!(["1.0.0", "1.1.0"])),
            ("1.1.0", json!(["1.0.0", "1.1.0"])),
        ];
        for (version, versions) in table {
            assert_eq!(conf(Path::new("/")).render(&default(version)), expected(versions), "{version}");
        }
    }

    #[test]
    fn the_file_is_written_once_and_replaced_only_when_it_is_ours() {
        let directory = tempfile::tempdir().unwrap();
        let conf = conf(directory.path());
        let read = || std::fs::read_to_string(conf.path()).unwrap();
        assert!(conf.ensure(&default("1.0.0")).unwrap());
        let first = read();
        assert!(!conf.ensure(&default("1.0.0")).unwrap());
        assert!(conf.ensure(&default("0.4.0")).unwrap());
        assert_ne!(read(), first);
        std::fs::write(conf.path(), "").unwrap();
        assert!(conf.ensure(&default("1.0.0")).unwrap());
        assert_eq!(read(), first);

        for foreign in ["{}", "{", r#"{"netattach.dev/managed": false}"#] {
            std::fs::write(conf.path(), foreign).unwrap();
            assert_eq!(
                Chain(&conf.ensure(&default("1.0.0")).unwrap_err()).to_string(),
                format!(
                    "{} was not written by netattach; remove it or choose another cniConf.name",
                    conf.path().display()
                )
            );
            assert_eq!(read(), foreign);
        }
        let names: Vec<_> = std::fs::read_dir(conf.path().parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing temporary is left");
    }
}
