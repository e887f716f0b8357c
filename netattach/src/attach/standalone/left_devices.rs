//! Gives back devices of the node whose DEL never came, using their [stored state](super::kept).

use std::io;

use super::kept::{DIRECTORY, KeptHome, Left, Whose};
use crate::attach::StepError;
use crate::attach::device::give_back::{Unrecorded, find_home, give_back_by_alias, is_nowhere};
use crate::attach::error::step_code;
use crate::cni::{CniError, code};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::link_group;
use crate::spec::OWN_GROUPS;
use crate::step::Home;

/// A device was not given back.
#[derive(Debug, thiserror::Error)]
pub(super) enum LeftError {
    /// The stored states of devices cannot be read.
    #[error("read {}", DIRECTORY)]
    Read(#[source] io::Error),
    /// A device cannot be given back.
    #[error("return {device}, which was {ifname} of container {container}")]
    GiveBack {
        /// Its name on the node.
        device: String,
        /// The container that the device was taken for, and the interface there.
        container: String,
        /// See `container`.
        ifname: String,
        /// The cause.
        #[source]
        source: Box<StepError>,
    },
    /// The node's namespace cannot be examined.
    #[error("open the node's namespace")]
    Open(#[source] Box<StepError>),
}

impl From<LeftError> for CniError {
    fn from(error: LeftError) -> Self {
        let code = match &error {
            LeftError::Read(_) => code::IO_FAILURE,
            LeftError::GiveBack { source, .. } => step_code(source),
            LeftError::Open(source) => step_code(source),
        };
        Self::from_chain(code, &error)
    }
}

/// Gives back the devices of a network's attachments that are not `valid`, as their DEL would.
///
/// # Errors
/// A device was not given back; the others were.
pub(super) fn collect(network: &str, valid: &[(&str, &str)]) -> Result<(), LeftError> {
    give_back_each(|whose, place| is_collected(whose, network, valid) && !matches!(place, Place::Own))
}

/// Gives back the devices that the kernel has moved back because their sandbox's namespace has ended, before one of
/// them is taken again: otherwise the changes made by the pod would be stored as the device's former state.
///
/// # Errors
/// As for [`collect`].
pub(super) fn settle() -> Result<(), LeftError> {
    give_back_each(|_, place| matches!(place, Place::Gone))
}

/// Returns the namespace that an attachment's device was moved to, if it still exists and is not the node's own.
///
/// # Errors
/// It cannot be determined whether it exists.
pub(super) fn namespace_of(whose: &Whose) -> Result<Option<Netns>, StepError> {
    Ok(match Place::of(whose)? {
        Place::There(netns) => Some(netns),
        Place::Gone | Place::Own => None,
    })
}

/// Whether an attachment's device was moved to another namespace than `netns`, which the path of a DEL leads to.
/// `false` where nothing tells: the kernel has no cookies.
///
/// # Errors
/// The namespace cannot be examined.
pub(super) fn is_elsewhere(whose: &Whose, netns: &Netns) -> Result<bool, StepError> {
    Ok(are_different(whose.cookie, netns.cookie()?))
}

/// Whether these are the cookies of two namespaces; absent ones tell nothing.
fn are_different(own: Option<u64>, found: Option<u64>) -> bool {
    matches!((own, found), (Some(own), Some(found)) if own != found)
}

/// Whether the stored state of a device is not needed any more, after the device was given back if it was found: in
/// `netns`, if that exists, or on the node. A card may be in a namespace that processes still keep alive, and comes
/// back when they end. One that was unplugged or given to a userspace driver does not come back.
///
/// # Errors
/// The node's devices cannot be listed.
pub(super) fn is_settled(home: &Home, netns: Option<&Netns>) -> Result<bool, StepError> {
    let is_card = home.parent.is_some() || home.permanent.is_some();
    let is_done = netns.is_some() || !is_card || is_nowhere(home);
    Ok(is_done || find_home(&mut Handle::open()?, home)?.is_some())
}

fn is_collected(whose: &Whose, network: &str, valid: &[(&str, &str)]) -> bool {
    whose.network == network && !valid.contains(&(&*whose.container, &*whose.ifname))
}

/// The state of the path of a sandbox's namespace.
#[derive(Debug)]
enum Place {
    There(Netns),
    /// The path leads to no namespace, or to another one.
    Gone,
    /// The path leads to the node's own namespace: a DEL with the right path may follow.
    Own,
}

impl Place {
    fn of(whose: &Whose) -> Result<Self, StepError> {
        let Some(netns) = Netns::if_there(&whose.netns)? else { return Ok(Self::Gone) };
        if are_different(whose.cookie, netns.cookie()?) {
            return Ok(Self::Gone);
        }
        Ok(if netns.id() == Netns::current()?.id() { Self::Own } else { Self::There(netns) })
    }
}

fn give_back_each(is_due: impl Fn(&Whose, &Place) -> bool) -> Result<(), LeftError> {
    let mut host = Handle::open().map_err(|error| LeftError::Open(Box::new(error.into())))?;
    let left = Left::of_node(host.netns_cookie()).map_err(LeftError::Read)?;
    let mut ended = Ok(());
    for (kept, home) in &left.devices {
        let whose = kept.whose();
        let given_back = Place::of(whose).and_then(|place| match is_due(whose, &place) {
            true => give_back(&mut host, (kept, home), &place),
            false => Ok(()),
        });
        ended = ended.and(given_back.map_err(|source| LeftError::GiveBack {
            device: home.name.clone(),
            container: whose.container.clone(),
            ifname: whose.ifname.clone(),
            source: Box::new(source),
        }));
    }
    ended
}

fn give_back(host: &mut Handle, (kept, home): (&KeptHome, &Home), place: &Place) -> Result<(), StepError> {
    let Whose { container, ifname, .. } = kept.whose();
    let group = link_group(container, ifname);
    let netns = match place {
        Place::There(netns) if !has_anothers(netns, ifname, group)? => Some(netns),
        Place::There(_) | Place::Gone | Place::Own => None,
    };
    let unrecorded = Unrecorded {
        of: (container.as_str(), ifname.as_str()),
        others: &[],
        card: false,
        has_mac: false,
        home: Some(home),
        group,
    };
    give_back_by_alias(host, unrecorded, netns)?;
    if is_settled(home, netns)? {
        kept.remove();
    }
    Ok(())
}

/// Whether the device's name in the pod belongs to a link that is marked as another container's, whose namespace has
/// the same path.
fn has_anothers(netns: &Netns, ifname: &str, group: u32) -> Result<bool, StepError> {
    let found = Handle::open_in(netns)?.find_told(ifname)?;
    Ok(found.is_some_and(|it| it.group & OWN_GROUPS != 0 && it.group != group))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::netns::within;

    fn whose(netns: &str, cookie: Option<u64>) -> Whose {
        let [network, container, ifname] = ["net", "c1", "eth0"].map(str::to_owned);
        Whose { network, container, ifname, netns: netns.to_owned(), cookie }
    }

    #[test]
    fn what_is_collected_is_of_the_network_and_not_in_use() {
        let whose = whose("/run/netns/c1", None);
        let is_collected = |network, valid: &[(&str, &str)]| is_collected(&whose, network, valid);
        assert!(is_collected("net", &[]));
        assert!(is_collected("net", &[("c1", "eth1"), ("c2", "eth0")]));
        assert!(!is_collected("net", &[("c2", "eth0"), ("c1", "eth0")]));
        assert!(!is_collected("another", &[]));
    }

    /// Rows: HDV-twice.
    #[test]
    fn what_is_stored_of_a_card_that_is_neither_in_its_pod_nor_at_home_stays() {
        let [node, pod] = [(); 2].map(|()| Netns::private().unwrap());
        let home = |permanent: Option<&str>, parent: Option<&str>| -> Home {
            let written = json!({
                "name": "card", "index": 4, "mtu": 1500, "up": true, "permanent": permanent, "parent": parent,
            });
            serde_json::from_value(written).unwrap()
        };
        let (card, other) = (home(Some("02:00:00:00:00:07"), None), home(None, None));
        let unplugged = home(None, Some("ffff:ff:1f.7"));
        let cases =
            [(&card, None), (&card, Some(&pod)), (&other, None), (&other, Some(&pod)), (&unplugged, None)];
        let settled = within(&node, || cases.map(|(home, netns)| is_settled(home, netns).unwrap())).unwrap();
        assert_eq!(settled, [false, true, true, true, true]);
    }

    #[test]
    fn namespaces_are_two_where_both_have_cookies_that_differ() {
        let cases = [(Some(7), Some(8)), (Some(7), Some(7)), (Some(7), None), (None, Some(7)), (None, None)];
        let different = cases.map(|(own, found)| are_different(own, found));
        assert_eq!(different, [true, false, false, false, false]);
    }

    /// The path of a DEL leads to a namespace that was made after the device's, which a process keeps alive.
    #[test]
    fn a_device_is_elsewhere_where_the_path_leads_to_a_later_namespace() {
        let [own, later] = [(); 2].map(|()| Netns::private().unwrap());
        let cookie = own.cookie().unwrap();
        let are_elsewhere = |cookie| {
            let whose = whose("/run/netns/c1", cookie);
            [&own, &later].map(|netns| is_elsewhere(&whose, netns).unwrap())
        };
        assert_eq!(are_elsewhere(cookie), [false, cookie.is_some()]);
        assert_eq!(are_elsewhere(None), [false, false]);
    }

    #[test]
    fn a_namespace_has_ended_where_none_is_or_another_one() {
        let (path, own) = ("/proc/thread-self/ns/net", Netns::current().unwrap().cookie().unwrap());
        let place = |netns: &str, cookie: Option<u64>| match Place::of(&whose(netns, cookie)).unwrap() {
            Place::There(_) => "there",
            Place::Gone => "gone",
            Place::Own => "own",
        };
        assert_eq!(place("/nonexistent/netns", own), "gone");
        assert_eq!([place(path, own), place(path, None)], ["own", "own"]);
        // Without cookies nothing tells.
        let other = own.map(|cookie| cookie + 1);
        assert_eq!(place(path, other), if own.is_some() { "gone" } else { "own" });
        let private = Netns::private().unwrap();
        let path =
            format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&private)));
        assert_eq!(place(&path, private.cookie().unwrap()), "there");
    }
}
