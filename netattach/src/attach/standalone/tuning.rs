//! The chained plugin `tuning`. Former values are stored in a file with the path and format of the reference plugin,
//! so that either plugin can detach what the other has attached. netattach's file also names its owner.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chained;
use crate::attach::apply::tuning;
use crate::cni::{self, CniError, Command, code, json};
use crate::durable;
use crate::link;
use crate::netns::Netns;
use crate::plan::result::tuned;
use crate::spec::{Properties, Tune};

/// Where files are kept unless `dataDir` says otherwise.
const DIRECTORY: &str = "/run/cni/tuning";

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct Kept {
    #[serde(flatten)]
    before: Properties,
    /// The interface that the values belong to; the reference plugin ignores this. `None`: the reference plugin wrote
    /// the file, or the kernel has no cookies.
    #[serde(default, rename = "netattach", skip_serializing_if = "Option::is_none")]
    of: Option<Known>,
}

/// The identity of an interface, which its pod cannot change, unlike name, address and link group.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Known {
    /// The cookie of its namespace, which is unique during a boot.
    netns_cookie: u64,
    index: u32,
}

pub(super) struct Tuning<'a> {
    pub(super) request: &'a cni::Request,
}

impl Tuning<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        match self.request.command {
            Command::Add => self.add().map(|result| json::pretty(&result)),
            Command::Check => self.check().map(|()| String::new()),
            Command::Del => {
                self.del();
                Ok(String::new())
            }
            Command::Gc | Command::Status | Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<Value, CniError> {
        let request = self.request;
        let mut result = chained::previous(request, link::tuning::KIND)?;
        let wanted = self.wanted()?;
        tuning::check_allowed(&wanted).map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))?;
        let (netns, mut pod) = chained::sandbox(self.request)?;
        let ifname = &request.ifname;
        let before = tuning::before(&mut pod, ifname, &wanted).map_err(chained::cannot)?;
        if !before.is_empty() {
            let netns_cookie = pod.netns_cookie();
            let index = pod.link(ifname).map_err(|error| chained::cannot(error.into()))?.index;
            let of = (netns_cookie != 0).then_some(Known { netns_cookie, index });
            self.keep(&Kept { before: self.kept_of(of).or(&before), of })?;
        }
        tuning::tune(&mut pod, &netns, ifname, &wanted).map_err(chained::cannot)?;
        let of_pod = |one: &&mut cni::Interface| one.sandbox.is_some() && one.name == *ifname;
        if let Some(interface) = result.interfaces.iter_mut().find(of_pod) {
            tuned(interface, &wanted);
        }
        result.to_value(request.version)
    }

    fn check(&self) -> Result<(), CniError> {
        let request = self.request;
        chained::previous(request, link::tuning::KIND)?;
        let wanted = self.wanted()?;
        let (netns, mut pod) = chained::sandbox(self.request)?;
        let difference =
            tuning::difference(&mut pod, &netns, &request.ifname, &wanted).map_err(chained::cannot)?;
        chained::checked(request, difference)
    }

    /// Restores the former values. As with the reference plugin, this always succeeds: if the namespace is gone, the
    /// interface is gone too or has moved back earlier. The file stays while values remain to be restored.
    fn del(&self) {
        let Ok(path) = self.file() else { return };
        let Ok(text) = std::fs::read(&path) else { return };
        let kept = serde_json::from_slice::<Kept>(&text).ok();
        let is_over = kept.is_some_and(|kept| self.give_back(&kept).unwrap_or(false));
        let is_gone = || {
            let path = self.request.netns.as_deref().unwrap_or_default();
            matches!(Netns::open(path), Err(error) if error.is_gone())
        };
        if is_over || is_gone() {
            // A file that stays is lost with the boot, as its directory is in memory.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Whether nothing remains to be restored.
    fn give_back(&self, kept: &Kept) -> Result<bool, CniError> {
        let (_, mut pod) = chained::sandbox(self.request)?;
        let cookie = pod.netns_cookie();
        let index = match kept.of.filter(|_| cookie != 0) {
            // The path leads to another container's namespace now: the interface is gone with its own namespace, or
            // has moved back.
            Some(own) if own.netns_cookie != cookie => return Ok(true),
            Some(own) => Some(own.index),
            None if chained::is_anothers(self.request, &mut pod).map_err(chained::cannot)? => {
                return Ok(false);
            }
            None => None,
        };
        let interface = (self.request.ifname.as_str(), index);
        tuning::give_back(&mut pod, interface, &kept.before).map_err(chained::cannot)?;
        Ok(true)
    }

    fn wanted(&self) -> Result<Tune, CniError> {
        Ok(link::tuning::parse(&chained::request(self.request))?)
    }

    fn file(&self) -> Result<PathBuf, CniError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Holder {
            #[serde(default)]
            data_dir: Option<PathBuf>,
        }
        let request = self.request;
        let Holder { data_dir } = json::read_object(&request.config)
            .map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))?;
        let directory =
            data_dir.filter(|path| !path.as_os_str().is_empty()).unwrap_or_else(|| DIRECTORY.into());
        Ok(directory.join(format!("{}_{}.json", request.container_id, request.ifname)))
    }

    /// An earlier `tuning` in the list, or an earlier attempt of this ADD, has stored values of this interface
    /// already. The first DEL restores all of them, and later ones find no file.
    fn kept_of(&self, of: Option<Known>) -> Properties {
        let read = || serde_json::from_slice::<Kept>(&std::fs::read(self.file().ok()?).ok()?).ok();
        read().filter(|kept| kept.of.is_some() && kept.of == of).map(|kept| kept.before).unwrap_or_default()
    }

    /// Stores the values that are about to be changed, before the change.
    fn keep(&self, kept: &Kept) -> Result<(), CniError> {
        let path = self.file()?;
        let write = || -> std::io::Result<()> {
            let directory = path.parent().unwrap_or(Path::new("/"));
            std::fs::create_dir_all(directory)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            durable::replace(&path, &format!(".{name}.new"), serde_json::to_string(kept)?.as_bytes(), 0o600)
        };
        write().map_err(|error| CniError::new(code::IO_FAILURE, format!("write {}: {error}", path.display())))
    }
}
