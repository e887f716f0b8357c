//! Runs other CNI plugins as the specification says. The only module that starts processes.
//!
//! A plugin is foreign code: it may hang, flood its output, print garbage, or leave a child behind that holds its
//! pipes. Time and memory of a call are bounded in every case, and every failure is a [`DelegateError`] with the
//! plugin, the problem and the plugin's stderr.
//!
//! That holds for as long as the caller lives. A plugin that outlives a [`Caller`] that was killed has no time limit,
//! and may take effect after the DEL that is to undo it: either the caller's successor ends it, or the kernel does.
//!
//! `find` finds an executable, `probe` queries its versions, `child` runs it within its limits, `spawn` starts it in a
//! control `group` of the plugins or tied to its caller, `cache` keeps libcni's cache files, `orphans` ends plugins of
//! an agent that died, `error` defines the errors.

mod cache;
mod child;
mod error;
mod find;
mod group;
mod orphans;
mod probe;
mod spawn;

use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use cache::{CacheError, Cached, DEFAULT_DIRECTORY, Listing, ResultCache};
pub use child::{STDERR_LIMIT, STDOUT_LIMIT};
pub use error::{DelegateError, VersionReplyError};
pub use group::{NoGroup, PluginGroup};
pub use orphans::{Orphan, end_orphans};
pub use probe::{UnfitPlugin, UnfitPlugins};

use crate::cni::{CniError, CniResult, Command, NetworkList, Value, Version};
use crate::netns;
use child::Invocation;

/// Receives a notification of every call that has ended.
pub trait Watcher: fmt::Debug + Send + Sync {
    /// A call of that plugin and verb has ended after this time.
    fn ended(&self, plugin: &str, verb: &'static str, succeeded: bool, took: Duration);
}

/// The directories with plugins, and the time limit of a call.
#[derive(Debug, Clone)]
pub struct Delegate {
    /// The directories to search, in order: the runtime's `CNI_PATH`.
    pub search: Vec<PathBuf>,
    /// Time limit of one call from start to exit. Then the plugin and its process group are killed.
    pub timeout: Duration,
    /// The process that starts the plugins.
    pub caller: Caller,
    /// The root directory that plugins are started in ([`chroot(2)`]): the node's, if this process has another one.
    /// None: this process's own. Plugins are searched there, by the paths of `search`.
    ///
    /// [`chroot(2)`]: https://man7.org/linux/man-pages/man2/chroot.2.html
    pub root: Option<PathBuf>,
    /// Notified of every call.
    pub watcher: Option<Arc<dyn Watcher>>,
}

/// The process that starts plugins: decides what ends those that are running when it is killed.
#[derive(Debug, Clone)]
pub enum Caller {
    /// An agent. The next one of its name ends them, by [`end_orphans`].
    Agent {
        /// Its name.
        name: String,
        /// The control group that plugins are started in; `None`: that of the agent.
        group: Option<Arc<PluginGroup>>,
    },
    /// A process of one call, after which none comes that would end them: the kernel kills a plugin when the thread
    /// that waits for it ends, as it does with its process.
    OneCall,
}

impl Caller {
    /// The control group that plugins are started in, if it is not that of this process.
    fn group(&self) -> Option<&PluginGroup> {
        match self {
            Self::Agent { group, .. } => group.as_deref(),
            Self::OneCall => None,
        }
    }
}

/// One call of a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    /// The verb.
    pub command: Command,
    /// The name of the executable.
    pub plugin_type: &'a str,
    /// `CNI_CONTAINERID`. This and the next three are not passed on for GC and STATUS.
    pub container_id: &'a str,
    /// `CNI_NETNS`.
    pub netns: Option<&'a str>,
    /// `CNI_IFNAME`.
    pub ifname: &'a str,
    /// `CNI_ARGS`, as text.
    pub args: &'a str,
    /// `CNI_NETNS_OVERRIDE`: `netns` may be the namespace of this process.
    pub netns_override: bool,
    /// The configuration, as encoded.
    pub stdin: &'a [u8],
}

impl<'a> Call<'a> {
    /// A call of a verb without a container: GC, STATUS, VERSION.
    pub fn without_container(command: Command, plugin_type: &'a str, stdin: &'a [u8]) -> Self {
        Self {
            command,
            plugin_type,
            container_id: "",
            netns: None,
            ifname: "",
            args: "",
            netns_override: false,
            stdin,
        }
    }
}

/// The answer to an ADD.
#[derive(Debug, Clone, PartialEq)]
pub struct Added {
    /// The result as printed, keys that netattach does not know included: the next plugin's `prevResult`.
    pub raw: Value,
    /// The parsed result.
    pub result: CniResult,
}

impl Delegate {
    /// Runs a plugin to its end, blocking, and returns its stdout. For ADD and VERSION that is JSON.
    ///
    /// # Errors
    /// The plugin was not found, did not start, did not end in time, wrote too much, failed, or returned something
    /// other than JSON for a verb that requires JSON.
    pub fn run(&self, call: &Call<'_>) -> Result<Vec<u8>, DelegateError> {
        let program = self.find(call.plugin_type)?;
        let invocation = Invocation {
            program: &program,
            root: self.root.as_deref(),
            env: self.environment(call),
            stdin: call.stdin,
            timeout: self.timeout,
            caller: &self.caller,
        };
        let group = self.caller.group();
        let ended_before = group.map(PluginGroup::ended_for_memory);
        let started = Instant::now();
        let outcome = child::run(&invocation);
        let (plugin, command) = (call.plugin_type, call.command.as_str());
        let took = started.elapsed();
        let elapsed_ms = took.as_millis();
        if let Some(watcher) = &self.watcher {
            let succeeded = outcome.as_ref().is_ok_and(|output| output.status.success());
            watcher.ended(plugin, command, succeeded, took);
        }
        let output = outcome.map_err(|error| DelegateError::from_child(call, &invocation, error))?;
        tracing::debug!(plugin, command, elapsed_ms, status = %output.status, "plugin ended");
        if output.status.signal() == Some(rustix::process::Signal::KILL.as_raw())
            && let Some((group, before)) = group.zip(ended_before)
            && group.ended_for_memory() > before
        {
            let (plugin, command, limit) = (plugin.to_owned(), call.command, group.limit());
            return Err(DelegateError::OutOfMemory { plugin, command, limit, stderr: output.stderr });
        }
        if output.held_open {
            tracing::warn!(plugin, command, "plugin left a process behind that holds its output open");
        }
        let stdout = error::judge(call, output)?;
        Ok(stdout)
    }

    /// Returns the executable of a plugin, without calling it: its path in [`root`](Self::root).
    ///
    /// # Errors
    /// The name is not a file name, or there is no such file.
    pub fn find(&self, plugin_type: &str) -> Result<PathBuf, DelegateError> {
        find::plugin(plugin_type, &self.search, self.root.as_deref())
    }

    /// Runs ADD and parses the result. `version` is that of the configuration; it is assumed for a result without a
    /// version.
    ///
    /// # Errors
    /// As [`run`](Self::run), and a result that cannot be decoded.
    pub fn add(&self, call: &Call<'_>, version: Version) -> Result<Added, DelegateError> {
        let stdout = self.run(&Call { command: Command::Add, ..*call })?;
        let undecodable =
            |source: CniError| DelegateError::Result { plugin: call.plugin_type.to_owned(), source };
        // `run` has already seen that this is JSON.
        let raw: Value = serde_json::from_slice(&stdout)
            .map_err(|source| DelegateError::garbage(call, &stdout, source, String::new()))?;
        let result = CniResult::parse(&raw, version).map_err(undecodable)?;
        Ok(Added { raw: crate::cni::result::with_version(&raw, version), result })
    }

    /// Queries the versions that a plugin supports, as text: a plugin may know newer ones than netattach.
    ///
    /// # Errors
    /// As [`run`](Self::run), and an invalid answer.
    pub fn version(&self, plugin_type: &str) -> Result<Vec<String>, DelegateError> {
        probe::version(self, plugin_type)
    }

    /// Checks that every plugin of a list exists and supports the list's version; plugins that netattach implements
    /// (`is_native`) are not called. Returns the capabilities that the list declares.
    ///
    /// # Errors
    /// Every unfit plugin, with its reason.
    pub fn validate(
        &self,
        list: &NetworkList,
        is_native: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, UnfitPlugins> {
        probe::validate(self, list, is_native)
    }

    /// The environment of this process with the variables of the call set over it.
    fn environment(&self, call: &Call<'_>) -> Vec<(&'static str, OsString)> {
        let is_attachment = call.command.is_about_an_attachment();
        let only_attachment = |text: &str| OsString::from(if is_attachment { text } else { "" });
        let mut env = vec![
            ("CNI_COMMAND", call.command.as_str().into()),
            ("CNI_CONTAINERID", only_attachment(call.container_id)),
            ("CNI_NETNS", if is_attachment { netns_of(call) } else { OsString::new() }),
            ("CNI_IFNAME", only_attachment(call.ifname)),
            ("CNI_ARGS", only_attachment(call.args)),
            ("CNI_PATH", find::join(&self.search)),
            ("CNI_NETNS_OVERRIDE", if call.netns_override { "1" } else { "" }.into()),
        ];
        if let Caller::Agent { name, .. } = &self.caller {
            env.push((orphans::VARIABLE, OsString::from(name)));
        }
        if call.command == Command::Version {
            for (_, value) in env.iter_mut().filter(|(name, _)| probe::DUMMIES.contains(name)) {
                *value = "dummy".into();
            }
        }
        env
    }
}

/// The path of the sandbox's namespace, as a plugin in this mount namespace can open it.
fn netns_of(call: &Call<'_>) -> OsString {
    call.netns.map(|path| netns::reachable(Path::new(path)).into_owned().into()).unwrap_or_default()
}
