//! The chained plugin `tuning`. What was before is kept in a file, at the place and in the form of the reference plugin:
//! either can detach what the other has attached.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::chained;
use crate::attach::tuning;
use crate::cni::{self, CniError, Command, code, json};
use crate::durable;
use crate::link;
use crate::netns::Netns;
use crate::plan::result::tuned;
use crate::spec::{Properties, Tune};

/// Where files are kept unless `dataDir` says otherwise.
const DIRECTORY: &str = "/run/cni/tuning";

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
            self.keep(&before)?;
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

    /// Gives back what there is to give back. As with the reference plugin it always succeeds: with the namespace the
    /// interface is gone, or went home before. Where another's has its name by now, its own is gone as well.
    fn del(&self) {
        let Ok(path) = self.file() else { return };
        let Ok(text) = std::fs::read(&path) else { return };
        let given_back = serde_json::from_slice::<Properties>(&text).ok().and_then(|before| {
            let (_, mut pod) = chained::sandbox(self.request).ok()?;
            if chained::is_anothers(self.request, &mut pod).ok()? {
                return Some(());
            }
            tuning::give_back(&mut pod, (&self.request.ifname, None), &before).ok()
        });
        let is_gone = || {
            let path = self.request.netns.as_deref().unwrap_or_default();
            matches!(Netns::open(path), Err(error) if error.is_gone())
        };
        if given_back.is_some() || is_gone() {
            // One that stays is removed with the next boot, as it lies in a directory of memory.
            let _ = std::fs::remove_file(path);
        }
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

    /// Keeps what is about to be changed, before it is.
    fn keep(&self, before: &Properties) -> Result<(), CniError> {
        let path = self.file()?;
        let write = || -> std::io::Result<()> {
            let directory = path.parent().unwrap_or(Path::new("/"));
            std::fs::create_dir_all(directory)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            durable::replace(&path, &format!(".{name}.new"), serde_json::to_string(before)?.as_bytes(), 0o600)
        };
        write().map_err(|error| CniError::new(code::IO_FAILURE, format!("write {}: {error}", path.display())))
    }
}
