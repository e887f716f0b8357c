//! The chained plugin `sbr`. Nothing is kept: what is to be removed are the rules for the interface's addresses.

use std::fs::{File, TryLockError};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::chained;
use crate::attach::{AttachError, by_source};
use crate::cni::{self, CniError, CniResult, Command, code, json};
use crate::link;
use crate::netns::Netns;
use crate::spec::BySource;

/// How long another process may hold the namespace's lock.
const PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks at it.
const PAUSE: Duration = Duration::from_millis(5);

pub(super) struct Sbr<'a> {
    pub(super) request: &'a cni::Request,
}

impl Sbr<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        match self.request.command {
            Command::Add => self.add(),
            Command::Check => self.check().map(|()| String::new()),
            Command::Del => self.del().map(|()| String::new()),
            Command::Gc | Command::Status | Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<String, CniError> {
        let request = self.request;
        let asked = self.asked()?;
        let result = self.previous()?.ok_or_else(|| chained::missing(link::sbr::KIND))?;
        let (netns, mut pod) = chained::sandbox(request)?;
        // The reference plugin locks the namespace in the same way: two that choose tables at once would take the same.
        let _turn = lock(&netns)?;
        let chosen =
            by_source::choose(&mut pod, &request.ifname, &asked, &result).map_err(chained::cannot)?;
        if let Err(error) = by_source::apply(&mut pod, &chosen) {
            // Without its rules the interface is what it was but for routes, which end with it; the caller is told of the
            // first error.
            let _ = pod.ensure_source_rules_absent(&chosen.rules());
            return Err(chained::cannot(error));
        }
        Ok(json::pretty(&result.to_value(request.version)?))
    }

    fn check(&self) -> Result<(), CniError> {
        let request = self.request;
        let asked = self.asked()?;
        let result = self.previous()?.ok_or_else(|| chained::missing(link::sbr::KIND))?;
        let (_, mut pod) = chained::sandbox(request)?;
        let gone = by_source::without_rule(&mut pod, &asked, &self.addresses(&result));
        match gone.map_err(chained::cannot)? {
            None => Ok(()),
            Some(address) => {
                let (ifname, network) = (request.ifname.clone(), request.name.clone());
                let what = format!("the rule for what {address} sends is gone");
                Err(AttachError::Differs { ifname, network, what }.into())
            }
        }
    }

    /// A namespace that is gone has taken its rules along.
    fn del(&self) -> Result<(), CniError> {
        let request = self.request;
        let path = request.netns.as_deref().unwrap_or_default();
        if path.is_empty() || matches!(Netns::open(path), Err(error) if error.is_gone()) {
            return Ok(());
        }
        // What ADD would have refused has left nothing; what its addresses were is then as good a guess as any.
        let asked = self.asked().unwrap_or_default();
        let had = self.previous().ok().flatten().map(|result| self.addresses(&result)).unwrap_or_default();
        let (_, mut pod) = chained::sandbox(request)?;
        by_source::forget(&mut pod, &request.ifname, &asked, &had).map_err(chained::cannot)
    }

    fn previous(&self) -> Result<Option<CniResult>, CniError> {
        self.request.prev_result()
    }

    fn addresses(&self, result: &CniResult) -> Vec<IpAddr> {
        let its = crate::plan::by_source::addresses(result, &self.request.ifname);
        its.iter().map(|(address, _)| address.addr()).collect()
    }

    fn asked(&self) -> Result<BySource, CniError> {
        Ok(link::sbr::parse(&chained::request(self.request))?)
    }
}

/// Waits for others that choose tables in the namespace, for a while: whoever is in the pod can hold the lock as well. It
/// is held for as long as what is returned.
fn lock(netns: &Netns) -> Result<File, CniError> {
    let failed = |error: std::io::Error| {
        CniError::new(code::IO_FAILURE, format!("lock the network namespace: {error}"))
    };
    let file = File::from(netns.as_fd().try_clone_to_owned().map_err(failed)?);
    let end = Instant::now() + PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                let msg = "the network namespace is locked by another process (flock)";
                return Err(CniError::new(code::TRY_AGAIN_LATER, msg));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}
