//! The configuration file that makes a container runtime call netattach: its content, and how it is read
//! and written.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::conf_repair::{Found, copies};
use crate::attach::conf_dir;
use crate::cni::load::is_read_by_runtimes;
use crate::cni::{self, NetworkList, Version};
use crate::rpc::DEFAULT_SOCKET;
use crate::rpc::shim::WAIT_KEY;
use crate::settings::{ConfRepair, Settings};
use crate::{bounded, budget, durable};

/// Key that marks a file as written by the agent, which may replace it.
const MANAGED: &str = "netattach.dev/managed";

/// World-readable: the file contains no secrets.
const MODE: u32 = 0o644;

/// The file, and the parts of its content that do not depend on the default network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) struct CniConf {
    path: PathBuf,
    network: String,
    socket: PathBuf,
    state_dir: PathBuf,
    agent_wait_seconds: u64,
    repair: ConfRepair,
    remove: bool,
}

/// Device and inode of a file.
pub(in crate::agent) type Identity = (u64, u64);

/// The reason why the file could not be brought up to date.
#[derive(Debug, thiserror::Error)]
pub(in crate::agent) enum CniConfError {
    /// The file exists and was not written by netattach.
    #[error("{path} was not written by netattach; remove it or choose another cniConf.name")]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{action} {path}{}", durable::remedy(source))]
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
    /// Returns the file of these settings; `None` if no file is wanted.
    ///
    /// # Errors
    /// The working directory, which relative settings refer to, cannot be determined.
    pub(in crate::agent) fn of(settings: &Settings) -> io::Result<Option<Self>> {
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
            repair: conf.repair,
            remove: conf.remove,
        }))
    }

    pub(in crate::agent) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's name in the directory.
    pub(in crate::agent) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The runtime's directory.
    pub(in crate::agent) fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    pub(in crate::agent) fn repair(&self) -> ConfRepair {
        self.repair
    }

    /// Whether the settings ask for the removal of the file.
    pub(in crate::agent) fn is_to_go(&self) -> bool {
        self.remove
    }

    /// Removes the file if netattach has written it, and those of [`CniConf::remove_former`]. Returns what it removed.
    ///
    /// # Errors
    /// [`CniConfError`].
    pub(in crate::agent) fn remove(&self) -> Result<Vec<PathBuf>, CniConfError> {
        // Former files may sort behind this one, and the runtime would take them next.
        let mut removed = self.remove_former(&self.names()?)?;
        if remove_managed(&self.path).map_err(self.failed("remove"))? {
            removed.push(self.path.clone());
        }
        Ok(removed)
    }

    /// Removes the files that an agent with our socket has written under other names, among these names of the
    /// directory, before `cniConf.name` was changed: the runtime would read one that sorts before ours. Returns what
    /// it removed.
    ///
    /// # Errors
    /// [`CniConfError`].
    pub(super) fn remove_former(&self, names: &[String]) -> Result<Vec<PathBuf>, CniConfError> {
        let own = self.name();
        let mut removed = Vec::new();
        for name in names.iter().filter(|name| is_read_by_runtimes(name) && **name != own) {
            let path = self.directory().join(name);
            // A file that cannot be read makes no runtime call netattach.
            let Ok(content) = bounded::read(&path, budget::CONFIG.most) else { continue };
            if self.is_former(&content) {
                match unlink(&path) {
                    Ok(true) => removed.push(path),
                    Ok(false) => {}
                    Err(source) => return Err(CniConfError::Io { action: "remove", path, source }),
                }
            }
        }
        Ok(removed)
    }

    /// Whether netattach has written this for an agent with our socket. A file with another socket is of another
    /// agent; one without a socket, as the installation writes, means the usual one.
    fn is_former(&self, content: &[u8]) -> bool {
        serde_json::from_slice::<Value>(content).is_ok_and(|conf| {
            let socket = conf["plugins"][0]["socket"].as_str().unwrap_or(DEFAULT_SOCKET);
            conf[MANAGED] == true && Path::new(socket) == self.socket
        })
    }

    /// The content of the file for this default network.
    pub(super) fn content(&self, default: &NetworkList) -> Vec<u8> {
        let mut wanted = cni::json::pretty(&self.render(default));
        wanted.push('\n');
        wanted.into_bytes()
    }

    /// The names in the runtime's directory, in order.
    ///
    /// # Errors
    /// [`CniConfError`].
    pub(in crate::agent) fn names(&self) -> Result<Vec<String>, CniConfError> {
        conf_dir::entries(self.directory()).map_err(self.failed("list the directory of"))
    }

    /// Returns the state of the file, among these names of its directory. A copy is the file with the
    /// identity `known`, which it had under our name; if that is not known, a file with our content.
    ///
    /// # Errors
    /// [`CniConfError`].
    pub(in crate::agent) fn find(
        &self,
        names: &[String],
        known: Option<Identity>,
    ) -> Result<Found, CniConfError> {
        match bounded::read(&self.path, budget::CONFIG.most) {
            // An empty file is left by a writer that did not sync.
            Ok(present) if present.is_empty() || is_managed(&present) => Ok(Found::Ours(present)),
            Ok(_) => Ok(Found::Foreign),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let is_ours = |name: &&String| {
                    let path = self.directory().join(name);
                    match known {
                        Some(known) => identity(&path) == Some(known),
                        None => bounded::read(&path, budget::CONFIG.most).is_ok_and(|it| is_managed(&it)),
                    }
                };
                Ok(Found::Missing { copy: copies(&self.name(), names).find(is_ours).cloned() })
            }
            Err(error) => Err(self.failed("read")(error)),
        }
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// [`CniConfError`]; the previous file remains.
    pub(in crate::agent) fn write(&self, content: &[u8]) -> Result<(), CniConfError> {
        std::fs::create_dir_all(self.directory()).map_err(self.failed("make the directory of"))?;
        // Runtimes select files by their extension, so the temporary file must not have that extension.
        durable::replace(&self.path, &format!(".{}.new", self.name()), content, MODE)
            .map_err(self.failed("write"))
    }

    /// Device and inode of the file, if it exists.
    pub(in crate::agent) fn identity(&self) -> Option<Identity> {
        identity(&self.path)
    }

    /// The error for a file of another program under this name.
    pub(super) fn foreign(&self) -> CniConfError {
        CniConfError::Foreign { path: self.path.clone() }
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> CniConfError + '_ {
        move |source| CniConfError::Io { action, path: self.path.clone(), source }
    }

    fn render(&self, default: &NetworkList) -> Value {
        let declared = default.plugins.iter().flat_map(|plugin| plugin.capabilities());
        // A runtime withholds a pod's hostPorts from a network that does not declare the capability, and
        // the pod would be Ready with its port closed. So it is always declared, and the plan decides what
        // happens to the ports.
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

fn identity(path: &Path) -> Option<Identity> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Removes a file that an agent has written for the runtime, durably. Returns whether it did. A file of
/// another program is kept, and so is an empty file, whose author is unknown.
///
/// # Errors
/// The system's error.
fn remove_managed(path: &Path) -> io::Result<bool> {
    match bounded::read(path, budget::CONFIG.most) {
        Ok(content) if is_managed(&content) => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    unlink(path)
}

/// Removes a file. Returns whether it was there.
///
/// # Errors
/// The system's error.
fn unlink(path: &Path) -> io::Result<bool> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        removed => removed?,
    }
    durable::sync_directory(path.parent().unwrap_or(Path::new("/")))?;
    Ok(true)
}

/// The author of a configuration that calls netattach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// An agent.
    Managed,
    /// The administrator or another program; netattach is its only plugin, or the first.
    Other,
    /// The administrator or another program; netattach follows the plugin that makes the pod's interface.
    Behind,
}

/// Returns the configurations in a runtime's directory that an agent has written or that call netattach.
///
/// # Errors
/// The directory cannot be listed.
pub fn callers(directory: &Path) -> io::Result<Vec<(PathBuf, Caller)>> {
    let mut found = Vec::new();
    for name in conf_dir::entries(directory)?.into_iter().filter(|name| is_read_by_runtimes(name)) {
        let path = directory.join(name);
        // A file that cannot be read makes no runtime call netattach.
        let Ok(content) = bounded::read(&path, budget::CONFIG.most) else { continue };
        let Ok(conf) = serde_json::from_slice::<Value>(&content) else { continue };
        let alone = [conf.clone()];
        let plugins = conf["plugins"].as_array().map_or(&alone[..], Vec::as_slice);
        if conf[MANAGED] == true {
            found.push((path, Caller::Managed));
        } else if let Some(place) = plugins.iter().position(|plugin| plugin["type"] == "netattach") {
            found.push((path, if place == 0 { Caller::Other } else { Caller::Behind }));
        }
    }
    Ok(found)
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
            repair: ConfRepair::Rewrite,
            remove: false,
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

    /// The file is found under its own name or under another one.
    #[test]
    fn the_file_is_found_under_its_name_or_under_another_and_told_from_that_of_others() {
        let directory = tempfile::tempdir().unwrap();
        let conf = conf(directory.path());
        let find =
            |known| conf.find(&conf.names().unwrap(), known).map_err(|error| Chain(&error).to_string());
        let missing = |copy: Option<&str>| Ok(Found::Missing { copy: copy.map(str::to_owned) });
        assert_eq!(find(None), missing(None));
        let content = conf.content(&default("1.0.0"));
        conf.write(&content).unwrap();
        assert_eq!(find(None), Ok(Found::Ours(content.clone())));
        let identity = conf.identity();
        let to = |suffix: &str| directory.path().join(format!("deep/00-netattach.conflist{suffix}"));
        std::fs::rename(to(""), to(".cilium_bak")).unwrap();
        assert_eq!(find(identity), missing(Some("00-netattach.conflist.cilium_bak")));
        assert_eq!(find(None), missing(Some("00-netattach.conflist.cilium_bak")));
        // There is a new file under the name, so the old copy no longer counts.
        conf.write(&content).unwrap();
        let identity = conf.identity();
        std::fs::remove_file(to("")).unwrap();
        assert_eq!(find(identity), missing(None));

        std::fs::write(to(""), "").unwrap();
        assert_eq!(find(None), Ok(Found::Ours(Vec::new())));
        for foreign in ["{}", "{", r#"{"netattach.dev/managed": false}"#] {
            std::fs::write(to(""), foreign).unwrap();
            assert_eq!(find(identity), Ok(Found::Foreign), "{foreign}");
        }
        std::fs::remove_file(to("")).unwrap();
        std::fs::create_dir(to("")).unwrap();
        assert_eq!(find(None), Err(format!("read {}: Is a directory (os error 21)", to("").display())));
        let names = conf.names().unwrap();
        assert_eq!(names.len(), 2, "nothing temporary is left: {names:?}");
    }

    #[test]
    fn files_under_former_names_go_and_those_of_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let conf = conf(directory.path());
        let written = conf.content(&default("1.0.0"));
        let of_another = CniConf { socket: "/run/y/netattach.sock".into(), ..conf.clone() };
        let of_another = of_another.content(&default("1.0.0"));
        conf.write(&written).unwrap();
        let at = |name: &str| directory.path().join("deep").join(name);
        let stay: [(&str, &[u8]); 5] = [
            ("00-another-agent.conflist", &of_another),
            // What a program that moves files away has left of ours, which no runtime reads.
            ("00-netattach.conflist.cilium_bak", &written),
            (
                "05-by-hand.conflist",
                br#"{"plugins": [{"type": "netattach", "socket": "/run/x/netattach.sock"}]}"#,
            ),
            ("06-torn.conflist", b"{"),
            ("10-flannel.conflist", br#"{"plugins": [{"type": "flannel"}]}"#),
        ];
        for (name, content) in stay {
            std::fs::write(at(name), content).unwrap();
        }
        // The installation writes none of the socket's usual place.
        let installed = br#"{"netattach.dev/managed": true, "plugins": [{"type": "netattach"}]}"#;
        let usual = CniConf { socket: DEFAULT_SOCKET.into(), ..conf.clone() };
        assert_eq!((conf.is_former(installed), usual.is_former(installed)), (false, true));
        let former = ["00-former.conflist", "01-netattach.conflist"].map(at);
        for path in &former {
            std::fs::write(path, &written).unwrap();
        }
        assert_eq!(conf.remove_former(&conf.names().unwrap()).unwrap(), former);
        let mut left = stay.map(|(name, _)| name.to_owned()).to_vec();
        left.push(conf.name());
        left.sort();
        assert_eq!(conf.names().unwrap(), left);
        assert!(conf.remove_former(&conf.names().unwrap()).unwrap().is_empty());

        std::fs::write(&former[1], &written).unwrap();
        assert_eq!(conf.remove().unwrap(), [former[1].clone(), conf.path().to_owned()]);
        left.retain(|name| *name != conf.name());
        assert_eq!(conf.names().unwrap(), left);
    }
}
