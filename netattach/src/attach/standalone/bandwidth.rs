//! The chained plugin `bandwidth`, implemented like the reference plugin: a queueing discipline on the node's end of
//! the pod's veth shapes what the pod receives, and one on an intermediate device (ifb) what the pod sends. Without
//! an agent there are no programs that could enforce a limit.

use std::os::fd::AsFd;

use sha2::{Digest, Sha256, Sha512};

use super::chained;
use crate::attach::{AttachError, StepError};
use crate::cni::{self, AttachmentId, CniError, Command, code, json};
use crate::enforce;
use crate::link::bandwidth::{self, KIND};
use crate::nat::without_agent::{attachment_words, network_word};
use crate::netlink::{Error, Handle, LinkState};
use crate::netns::Netns;
use crate::spec::Pace;

/// Prefix of the names of intermediate devices, the same as the reference plugin's.
const PREFIX: &str = "bwp";
/// Number of hexadecimal digits after the prefix.
const DIGITS: usize = 12;
/// Prefix of their aliases; the network, the container and the interface follow.
const ALIAS: &str = "netattach bandwidth:";
/// Kind of these devices.
const IFB: &str = "ifb";

pub(super) struct Bandwidth<'a> {
    pub(super) request: &'a cni::Request,
}

/// The rate limits of both directions.
struct Paces {
    received: Option<Pace>,
    sent: Option<Pace>,
}

impl Bandwidth<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => self.add(),
            Command::Check => self.check().map(done),
            Command::Del => self.del().map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<String, CniError> {
        let limits = bandwidth::parse(&chained::request(self.request))?;
        let mut result = chained::previous(self.request, KIND)?;
        if let Some(limits) = limits {
            let (netns, mut pod) = chained::sandbox(self.request)?;
            let mut host = open()?;
            let end = self.node_end(&mut host, &mut pod, &netns)?;
            let (received, sent) = enforce::paces(limits, end.mtu);
            let paces = Paces { received, sent };
            match self.limit(&mut host, &end, &paces) {
                Ok(made) => result.interfaces.extend(made.map(|ifb| cni::Interface {
                    name: ifb.name,
                    mac: ifb.mac.map(|mac| mac.to_string()),
                    ..Default::default()
                })),
                Err(error) => {
                    // The caller gets the first error.
                    let _ = self.unlimit(&mut host, Some(&end));
                    if paces.received.is_some() {
                        let _ = host.ensure_not_paced(end.index);
                    }
                    return Err(failed(error));
                }
            }
        }
        Ok(json::pretty(&result.to_value(self.request.version)?))
    }

    /// Limits both directions; returns the intermediate device, if there is one.
    fn limit(&self, host: &mut Handle, end: &LinkState, paces: &Paces) -> Result<Option<LinkState>, Error> {
        if let Some(pace) = &paces.received {
            host.ensure_paced(end.index, pace)?;
        }
        let Some(pace) = &paces.sent else { return Ok(None) };
        if let Some(priority) = host.filter_before_redirection(end.index, &enforce::names_of_programs())? {
            return Err(Error::FilteredBefore { device: end.name.clone(), priority });
        }
        let name = self.device();
        // Deletes a device of an earlier attempt.
        host.ensure_link_absent(&name)?;
        let made = host.create_ifb(&name, end.mtu, &self.alias())?;
        host.ensure_paced(made.index, pace)?;
        host.ensure_redirected(end.index, made.index)?;
        Ok(Some(made))
    }

    fn check(&self) -> Result<(), CniError> {
        let limits = bandwidth::parse(&chained::request(self.request))?;
        chained::previous(self.request, KIND)?;
        let Some(limits) = limits else { return Ok(()) };
        let (netns, mut pod) = chained::sandbox(self.request)?;
        let mut host = open()?;
        let end = self.node_end(&mut host, &mut pod, &netns)?;
        let (received, sent) = enforce::paces(limits, end.mtu);
        let differs = self.difference(&mut host, &end, &Paces { received, sent });
        chained::checked(self.request, differs.map_err(failed)?)
    }

    fn difference(&self, host: &mut Handle, end: &LinkState, paces: &Paces) -> Result<Option<String>, Error> {
        let is_paced = |host: &mut Handle, index: u32, pace: &Pace| -> Result<bool, Error> {
            Ok(host.find_pace(index)? == Some((pace.rate, pace.queue)))
        };
        if let Some(pace) = &paces.received
            && !is_paced(host, end.index, pace)?
        {
            return Ok(Some(format!("{} is not paced as asked for", end.name)));
        }
        let Some(pace) = &paces.sent else { return Ok(None) };
        let name = self.device();
        let Some(made) = host.find_link(&name)?.filter(|link| link.kind == IFB) else {
            return Ok(Some(format!("device {name}, which paces what the pod sends, is gone")));
        };
        if !is_paced(host, made.index, pace)? {
            return Ok(Some(format!("{name} is not paced as asked for")));
        }
        let is_redirected = host.redirected_to(end.index)? == Some(made.index);
        Ok((!is_redirected).then(|| format!("what {} receives is not sent on by {name}", end.name)))
    }

    /// Needs neither the configuration nor `prevResult` nor the namespace.
    fn del(&self) -> Result<(), CniError> {
        let mut host = open()?;
        let end = self.node_end_if_there(&mut host);
        self.unlimit(&mut host, end.as_ref()).map_err(failed)
    }

    /// Removes the intermediate device, and the filter that redirects to it. The path of a namespace that is gone may
    /// lead to another pod's namespace now, so a filter that redirects elsewhere is left alone. So is the queueing
    /// discipline on the node's end, which is deleted with that end.
    fn unlimit(&self, host: &mut Handle, end: Option<&LinkState>) -> Result<(), Error> {
        let mut made = Vec::new();
        for name in [self.device(), self.device_of_reference()] {
            made.extend(host.find_link(&name)?.filter(|link| link.kind == IFB));
        }
        if let Some(end) = end
            && let Some(to) = host.redirected_to(end.index)?
            && made.iter().any(|link| link.index == to)
        {
            // Removed before the device that packets are redirected to: packets would be dropped in between.
            host.ensure_not_redirected(end.index)?;
        }
        made.iter().try_for_each(|link| host.ensure_link_absent(&link.name))
    }

    fn gc(&self) -> Result<(), CniError> {
        let Some(valid) = &self.request.valid_attachments else { return Ok(()) };
        let network = &self.request.name;
        let alias = |it: &AttachmentId| alias(network, &it.container_id, &it.ifname);
        let valid: Vec<String> = valid.iter().map(alias).collect();
        let ours = alias_of_network(network);
        let mut host = open()?;
        for device in host.devices().map_err(failed)? {
            let alias = device.alias.filter(|alias| alias.starts_with(&ours));
            if device.link.kind == IFB && alias.is_some_and(|alias| !valid.contains(&alias)) {
                host.ensure_link_absent(&device.link.name).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn status(&self) -> Result<(), CniError> {
        bandwidth::parse(&chained::request(self.request))?;
        match open()?.has_pacing().map_err(failed)? {
            true => Ok(()),
            false => Err(CniError::new(code::NOT_AVAILABLE, "the kernel has no tbf")),
        }
    }

    /// The node's end of the pod's veth.
    fn node_end(&self, host: &mut Handle, pod: &mut Handle, netns: &Netns) -> Result<LinkState, CniError> {
        let ifname = &self.request.ifname;
        let link = pod.link(ifname).map_err(failed)?;
        host.find_peer(&link, netns.as_fd()).map_err(failed)?.ok_or_else(|| {
            let msg = format!("type: bandwidth: {ifname} is not a veth whose other end is on the node");
            CniError::new(code::INVALID_CONFIG, msg)
        })
    }

    fn node_end_if_there(&self, host: &mut Handle) -> Option<LinkState> {
        let netns = Netns::open(self.request.netns.as_deref()?).ok()?;
        if chained::is_nodes_own(&netns, self.request).unwrap_or(true) {
            return None;
        }
        let link = Handle::open_in(&netns).ok()?.find_link(&self.request.ifname).ok()??;
        host.find_peer(&link, netns.as_fd()).ok()?
    }

    /// Returns the name of the intermediate device: always the same for one interface of a container.
    fn device(&self) -> String {
        let cni::Request { name, container_id, ifname, .. } = self.request;
        let digest = Sha256::new();
        let digest = [name, container_id, ifname]
            .into_iter()
            .fold(digest, |digest, word| digest.chain_update(word).chain_update([0]));
        named_by(&digest.finalize())
    }

    /// Returns the name that the reference plugin uses, which is the same for all interfaces of a container on a
    /// network.
    fn device_of_reference(&self) -> String {
        let cni::Request { name, container_id, .. } = self.request;
        named_by(&Sha512::new().chain_update(name).chain_update(container_id).finalize())
    }

    fn alias(&self) -> String {
        alias(&self.request.name, &self.request.container_id, &self.request.ifname)
    }
}

/// An alias has less than 256 bytes (`IFALIASZ`), which long names would exceed.
fn alias(network: &str, container: &str, ifname: &str) -> String {
    format!("{ALIAS} {}", attachment_words(network, container, ifname))
}

/// Prefix of the aliases of all devices of a network.
fn alias_of_network(network: &str) -> String {
    format!("{ALIAS} {} ", network_word(network))
}

fn named_by(digest: &[u8]) -> String {
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{}", &digits[..DIGITS.min(digits.len())])
}

fn open() -> Result<Handle, CniError> {
    Ok(Handle::open().map_err(|error| AttachError::Open(error.into()))?)
}

fn failed(error: Error) -> CniError {
    chained::cannot(StepError::Netlink(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_fits_whatever_the_names_are() {
        let [long, other] = ["n", "m"].map(|letter| letter.repeat(200));
        let made = alias(&long, &"c".repeat(220), "i23456789012345");
        assert!(made.len() < 256, "{}", made.len());
        for (network, expected) in [(&long, true), (&other, false)] {
            assert_eq!(made.starts_with(&alias_of_network(network)), expected, "{network}");
        }
        assert_ne!(made, alias(&long, &"c".repeat(221), "i23456789012345"));
        assert_eq!(alias("lan", "c1", "eth0"), "netattach bandwidth: lan c1 eth0");
    }
}
