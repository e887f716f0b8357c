//! DEL of pods that Multus, or another plugin, attached before netattach replaced it on the node.
//!
//! Multus keeps the configurations with which it called plugins, and libcni keeps their results. From these, every
//! plugin gets the DEL that Multus would have sent, in reverse order. The files are removed only after all plugins
//! have succeeded, so that a DEL that failed or was interrupted can be sent again: plugins allow DEL to be repeated.
//!
//! For a container that Multus does not know either, the container runtime's own libcni may have cached configuration
//! and result of the previous plugin: its DEL uses these.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::attach::apply::{PluginError, runner};
use crate::attach::engine::Engine;
use crate::attach::{AttachError, Doing, StepError, standalone};
use crate::cni::cache::{Entry, Key};
use crate::cni::result::in_version;
use crate::cni::{self, CniArgs, Command, ConfigError, Map, NetworkList, PluginConf, Value};
use crate::delegate::{CacheError, Call, Listing, ResultCache};
use crate::multus::{Attachment, ScratchError, scratch};
use crate::netns::Netns;
use crate::waits::{self, Resource};
use crate::{bounded, budget, durable};

/// The files that Multus has left in its state directory.
#[derive(Debug)]
pub struct Inheritance {
    directory: PathBuf,
    /// Results of its plugins: Multus keeps them below its own directory.
    results: ResultCache,
}

/// Why the files of a container cannot be used or removed. They are kept.
#[derive(Debug, thiserror::Error)]
pub enum InheritanceError {
    /// The kernel refuses to read the file.
    #[error("read {path}, in which Multus recorded the container")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The file has other contents.
    #[error(
        "{path}, in which Multus recorded the container; remove it once its attachments are removed by hand"
    )]
    Scratch {
        /// The file.
        path: PathBuf,
        /// The error in it.
        #[source]
        source: ScratchError,
    },
    /// The results cannot be used.
    #[error("results that Multus cached for the container")]
    Cache(#[from] CacheError),
    /// The attachment by another plugin, which libcni has cached, cannot be used.
    #[error(
        "what libcni remembers of the container; once its attachment is taken back by hand, remove the file"
    )]
    Libcni(#[source] CacheError),
    /// The configuration that libcni has cached cannot be used.
    #[error(
        "{path}, in which libcni remembers the container; once its attachment is taken back by hand, remove it"
    )]
    LibcniConfig {
        /// The file.
        path: PathBuf,
        /// The error in it.
        #[source]
        source: ConfigError,
    },
    /// The file cannot be removed.
    #[error("remove {path}, in which Multus recorded the container{}", durable::remedy(source))]
    Remove {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
}

/// Plugin types whose attachments are not removed by libcni's cache: their attachments are recorded elsewhere, and
/// one of the plugins is netattach itself.
const META: [&str; 3] = ["netattach", "multus", "multus-shim"];

/// One attachment and the parameters of its ADD.
struct Inherited {
    attachment: Attachment,
    /// `CNI_ARGS` of the ADD.
    args: String,
    /// The capability arguments that were offered to the plugins.
    capabilities: Map,
    /// The result of the last plugin.
    result: Option<Value>,
}

impl Inheritance {
    /// The state files in Multus's directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        Self { results: ResultCache::new(&directory), directory }
    }

    /// The attachments of a container in the order of its ADD. Multus drops its own file even when DEL fails; the
    /// cached results then still show the attachments whose ADD succeeded.
    fn of(&self, libcni: &ResultCache, request: &cni::Request) -> Result<Vec<Inherited>, InheritanceError> {
        let path = self.scratch(request);
        let remembered = match read(&path)? {
            Some(bytes) => scratch::read(&bytes, &request.ifname, request.version)
                .map_err(|source| InheritanceError::Scratch { path, source })?,
            None => self.of_results(request)?,
        };
        remembered.into_iter().map(|attachment| self.with_result(libcni, request, attachment)).collect()
    }

    /// Returns the attachment of the container and interface that libcni has cached for the previous plugin.
    ///
    /// netattach writes to the same cache, but only for containers in the journal, which are not looked up here.
    fn of_libcni(
        &self,
        libcni: &ResultCache,
        request: &cni::Request,
    ) -> Result<Vec<Inherited>, InheritanceError> {
        let Listing { found, unreadable } =
            libcni.list(&request.container_id).map_err(InheritanceError::Libcni)?;
        let own = format!("{}-{}-{}", request.name, request.container_id, request.ifname);
        let end = format!("-{}-{}", request.container_id, request.ifname);
        let is_other = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // netattach's own entry has the request's network name.
            name.ends_with(&end) && name != own
        };
        if let Some(error) = unreadable.into_iter().find(|error| error.path().is_some_and(is_other)) {
            return Err(InheritanceError::Libcni(error));
        }
        let mut inherited = Vec::new();
        for cached in found {
            if cached.entry.key.ifname != request.ifname {
                continue;
            }
            let (path, entry) = (cached.path, cached.entry);
            let list = entry.network().map_err(|source| InheritanceError::LibcniConfig { path, source })?;
            let is_meta = |plugin: &PluginConf| META.contains(&plugin.plugin_type());
            if !list.plugins.iter().any(is_meta) {
                inherited.push(Inherited::cached(list, entry));
            }
        }
        Ok(inherited)
    }

    fn of_results(&self, request: &cni::Request) -> Result<Vec<Attachment>, InheritanceError> {
        let Listing { found, .. } = self.results.list(&request.container_id)?;
        let mut remembered = Vec::new();
        for cached in found {
            let path = cached.path;
            let list = cached.entry.network().map_err(|source| InheritanceError::Scratch {
                path,
                source: ScratchError::Config { index: 0, source },
            })?;
            remembered.push(Attachment {
                network: list.name.clone(),
                list,
                ifname: cached.entry.key.ifname,
                requests: Map::new(),
            });
        }
        // The other attachments depend on the sandbox's own interface.
        remembered.sort_by_key(|attachment| attachment.ifname != request.ifname);
        Ok(remembered)
    }

    fn with_result(
        &self,
        libcni: &ResultCache,
        request: &cni::Request,
        attachment: Attachment,
    ) -> Result<Inherited, InheritanceError> {
        let key = key(request, &attachment);
        // Multus 3 stored them in libcni's directory.
        let entry = match self.results.read(&key)? {
            None => libcni.read(&key)?,
            found => found,
        };
        Ok(match entry {
            Some(entry) => Inherited {
                args: entry.args_text(),
                capabilities: entry.capability_args,
                result: entry.result,
                attachment,
            },
            // The ADD failed or never ran; DEL is needed nevertheless.
            None => Inherited {
                args: request.args.raw().to_owned(),
                capabilities: attachment.requests.clone(),
                result: None,
                attachment,
            },
        })
    }

    /// Removes the files about the container, the list of its attachments last.
    fn forget(
        &self,
        libcni: &ResultCache,
        request: &cni::Request,
        found: &[Inherited],
    ) -> Result<(), InheritanceError> {
        for inherited in found {
            crate::crash_point!("forget", inherited.attachment.ifname);
            let key = key(request, &inherited.attachment);
            self.results.remove(&key)?;
            libcni.remove(&key)?;
        }
        crate::crash_point!("forget", "scratch");
        let path = self.scratch(request);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(InheritanceError::Remove { path, source })
            }
            _ => Ok(()),
        }
    }

    fn scratch(&self, request: &cni::Request) -> PathBuf {
        self.directory.join(&request.container_id)
    }
}

impl Inherited {
    /// Makes an entry from libcni's cache.
    fn cached(list: NetworkList, entry: Entry) -> Self {
        let attachment = Attachment {
            network: list.name.clone(),
            list,
            ifname: entry.key.ifname.clone(),
            requests: Map::new(),
        };
        Self {
            args: entry.args_text(),
            capabilities: entry.capability_args,
            result: entry.result,
            attachment,
        }
    }
}

impl Engine {
    /// Rolls back a container's attachments that Multus made, or another plugin that the container runtime called. A
    /// container that neither Multus nor libcni knows is success.
    ///
    /// # Errors
    /// Every plugin that failed, or the files cannot be read. The files are kept then.
    pub(in crate::attach) fn del_inherited(&self, request: &cni::Request) -> Result<(), AttachError> {
        let mut found = self.inheritance.of(&self.node.cache, request)?;
        let mut attached_by = "Multus";
        if found.is_empty() && !self.is_ours(&request.container_id)? {
            found = self.inheritance.of_libcni(&self.node.cache, request)?;
            attached_by = "another plugin";
        }
        if found.is_empty() {
            return Ok(());
        }
        let plugins =
            |of: &Inherited| of.attachment.list.plugins.iter().map(|it| resource(of, it)).collect::<Vec<_>>();
        waits::admit(&found.iter().flat_map(plugins).collect())?;
        let container = &request.container_id;
        tracing::info!(
            container,
            attached_by,
            attachments = found.len(),
            "not attached by netattach; rolling it back"
        );
        let mut errors = Vec::new();
        for inherited in found.iter().rev() {
            for plugin in inherited.attachment.list.plugins.iter().rev() {
                crate::crash_point!("inherited", (&inherited.attachment.ifname, plugin.plugin_type()));
                let failed = |source: StepError| AttachError::Step {
                    doing: Doing::Detach,
                    ifname: inherited.attachment.ifname.clone(),
                    network: inherited.attachment.network.clone(),
                    step: String::new(),
                    source: Box::new(source),
                };
                errors.extend(self.del_plugin(request, inherited, plugin).map_err(failed).err());
            }
        }
        if !errors.is_empty() {
            return Err(AttachError::Undo(errors));
        }
        Ok(self.inheritance.forget(&self.node.cache, request, &found)?)
    }

    /// Whether the journal knows the container, under any interface.
    fn is_ours(&self, container: &str) -> Result<bool, AttachError> {
        Ok(self.journal.keys()?.iter().any(|key| key.container_id == container))
    }

    fn del_plugin(
        &self,
        request: &cni::Request,
        inherited: &Inherited,
        plugin: &PluginConf,
    ) -> Result<(), StepError> {
        let Inherited { attachment, args, capabilities, result } = inherited;
        let plugin_type = plugin.plugin_type();
        let runner = runner(&self.node, &request.path);
        let version = attachment.list.version;
        let told = result.as_ref().map(|result| in_version(result, version)).transpose();
        let told = told.map_err(|source| PluginError::Result { plugin: plugin_type.into(), source })?;
        let config = |told: Option<&Value>| cni::request_config(&attachment.list, plugin, told, capabilities);
        let request = cni::Request {
            command: Command::Del,
            container_id: request.container_id.clone(),
            // Some plugins would use a path that is no longer a namespace.
            netns: request.netns.clone().filter(|path| Netns::open(path).is_ok()),
            ifname: attachment.ifname.clone(),
            args: CniArgs::parse(args).unwrap_or_else(|_| CniArgs::unread(args)),
            path: request.path.clone(),
            netns_override: false,
            // Includes the result, although DEL of old versions has none: plugins in this process identify links by
            // it.
            config: config(told.as_ref()),
            version,
            name: attachment.list.name.clone(),
            valid_attachments: None,
            tolerated: None,
        };
        let in_process = !self.options.exec.iter().any(|name| name == plugin_type)
            && (result.is_some() || runner.find(plugin_type).is_err());
        if in_process && let Some(done) = standalone::del(plugin_type, &request, &self.node) {
            return done.map_err(|source| {
                StepError::Plugin(PluginError::InProcess { plugin: plugin_type.into(), source })
            });
        }
        let told = told.as_ref().filter(|_| version.has_prev_result_at_del());
        let stdin = Value::Object(config(told)).to_string();
        let call = Call {
            command: Command::Del,
            plugin_type,
            container_id: &request.container_id,
            netns: request.netns.as_deref(),
            ifname: &request.ifname,
            args,
            netns_override: false,
            stdin: stdin.as_bytes(),
        };
        waits::at(&resource(inherited, plugin), || runner.run(&call))?;
        Ok(())
    }
}

fn resource(inherited: &Inherited, plugin: &PluginConf) -> Resource {
    Resource::Plugin {
        plugin: plugin.plugin_type().to_owned(),
        network: inherited.attachment.list.name.clone(),
    }
}

fn key(request: &cni::Request, attachment: &Attachment) -> Key {
    Key {
        network: attachment.list.name.clone(),
        container_id: request.container_id.clone(),
        ifname: attachment.ifname.clone(),
    }
}

/// `None` if there is no file, and for the directory of results, which a container's name may match.
fn read(path: &Path) -> Result<Option<Vec<u8>>, InheritanceError> {
    match bounded::read(path, budget::MULTUS_STATE.most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if bounded::is_absent(&error) || error.kind() == ErrorKind::IsADirectory => Ok(None),
        Err(source) => Err(InheritanceError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniError, code};

    #[test]
    fn a_file_of_all_bytes_that_there_may_be_is_read_and_one_more_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c1");
        let most = budget::MULTUS_STATE.most;
        std::fs::write(&path, vec![b' '; most]).unwrap();
        assert_eq!(read(&path).unwrap(), Some(vec![b' '; most]));
        std::fs::write(&path, vec![b' '; most + 1]).unwrap();
        let refused = CniError::from(AttachError::from(read(&path).unwrap_err()));
        let message = format!(
            "read {}, in which Multus recorded the container: longer than {most} bytes",
            path.display()
        );
        assert_eq!((refused.code, refused.msg), (code::IO_FAILURE, message));
    }
}
