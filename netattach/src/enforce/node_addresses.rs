//! The node's own addresses, which NetworkPolicies except: read at the start, and again after the kernel has notified a change.
//!
//! The notifications are read whenever the addresses are asked for, so an update of policies knows each address that was there
//! when it began, at the price of one system call.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::EnforceError;
use crate::error_chain::Chain;
use crate::netlink::{AddressWatch, Handle, ToldAddress};
use crate::plan::addressing::GATEWAY_V4;

/// The addresses, as they were read last. `None`: no policy needs them.
#[derive(Debug)]
pub(super) struct NodeAddresses(Mutex<Option<Followed>>);

#[derive(Debug)]
struct Followed {
    watch: AddressWatch,
    known: Arc<BTreeSet<IpAddr>>,
    /// The addresses could not be read after the last change.
    is_behind: bool,
}

impl NodeAddresses {
    /// No addresses: no policy needs them.
    pub(super) const fn none() -> Self {
        Self(Mutex::new(None))
    }

    /// Reads the addresses, and follows them.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub(super) fn of_now() -> Result<Self, EnforceError> {
        let watch = AddressWatch::open()?;
        Ok(Self(Mutex::new(Some(Followed { watch, known: Arc::new(read()?), is_behind: false }))))
    }

    /// The addresses: the same value until there are others. Those that were read last if they cannot be read again, which the
    /// next call tries.
    pub(super) fn known(&self) -> Arc<BTreeSet<IpAddr>> {
        let mut followed = self.lock();
        let Some(followed) = followed.as_mut() else { return Arc::default() };
        if let Err(error) = followed.refresh() {
            tracing::warn!(error = %Chain(&error), "addresses of the node not read; will try again");
        }
        Arc::clone(&followed.known)
    }

    /// Reads the addresses again if the kernel has notified a change. Returns whether they are others than before.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub(super) fn refresh(&self) -> Result<bool, EnforceError> {
        self.lock().as_mut().map_or(Ok(false), Followed::refresh)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Followed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Followed {
    fn refresh(&mut self) -> Result<bool, EnforceError> {
        // `None`: not all notifications were received.
        let told = self.watch.told();
        self.is_behind |= told.is_none_or(|told| told.iter().any(|it| is_news(&self.known, it)));
        if !self.is_behind {
            return Ok(false);
        }
        let now = read()?;
        self.is_behind = false;
        let are_others = now != *self.known;
        if are_others {
            self.known = Arc::new(now);
        }
        Ok(are_others)
    }
}

/// Whether the notification may change the known addresses. A repeated notification only prolongs an
/// address's lifetime.
fn is_news(known: &BTreeSet<IpAddr>, told: &ToldAddress) -> bool {
    is_global(told.address) && known.contains(&told.address) != told.is_there
}

fn read() -> Result<BTreeSet<IpAddr>, EnforceError> {
    let addresses = Handle::open()?.all_addresses()?.into_iter().map(|address| address.addr());
    // The node's address for pods on routed links, whether or not one exists yet.
    let on_links = IpAddr::V4(GATEWAY_V4);
    Ok(addresses.filter(|address| is_global(*address)).chain([on_links]).collect())
}

/// Whether an address is used by packets of other links and hosts. Link-local addresses come and go with
/// pods.
fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    #[test]
    fn only_an_address_that_comes_or_goes_and_that_others_can_use_is_news() {
        let known = BTreeSet::from(["192.0.2.1".parse().unwrap(), "fe80::1".parse().unwrap()]);
        let table = [
            ("192.0.2.1", true, false),
            ("192.0.2.1", false, true),
            ("192.0.2.2", true, true),
            ("192.0.2.2", false, false),
            ("2001:db8::2", true, true),
            ("fe80::1", false, false),
            ("fe80::2", true, false),
            ("169.254.0.9", true, false),
            ("127.0.0.2", true, false),
        ];
        for (address, is_there, expected) in table {
            let told = ToldAddress { address: address.parse().unwrap(), is_there };
            assert_eq!(is_news(&known, &told), expected, "{told:?}");
        }
    }

    #[test]
    fn addresses_are_read_again_after_the_kernel_has_notified_others() {
        let netns = Netns::private().unwrap();
        let looked = within(&netns, || {
            let addresses = NodeAddresses::of_now().unwrap();
            let mut handle = Handle::open().unwrap();
            let loopback = handle.link("lo").unwrap();
            let before = (addresses.known(), addresses.refresh().unwrap());
            handle.ensure_address(loopback.index, "192.0.2.7/32".parse().unwrap()).unwrap();
            let after = (addresses.refresh().unwrap(), addresses.refresh().unwrap(), addresses.known());
            handle.ensure_address_absent(loopback.index, "192.0.2.7/32".parse().unwrap()).unwrap();
            (before, after, addresses.known())
        });
        let (before, after, at_last) = looked.unwrap();
        let gateway = IpAddr::V4(GATEWAY_V4);
        let alone = Arc::new(BTreeSet::from([gateway]));
        assert_eq!(before, (Arc::clone(&alone), false));
        assert_eq!(after, (true, false, Arc::new([gateway, "192.0.2.7".parse().unwrap()].into())));
        assert_eq!(at_last, alone);
    }
}
