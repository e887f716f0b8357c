//! The node's own addresses, which NetworkPolicies except. Read at the start and when the kernel notifies
//! changes, never while policies are updated.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use super::error::EnforceError;
use crate::netlink::{Handle, ToldAddress};
use crate::plan::addressing::GATEWAY_V4;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct NodeAddresses(RwLock<Option<Arc<BTreeSet<IpAddr>>>>);

impl NodeAddresses {
    /// No addresses, for options that do not need them.
    pub(super) const fn none() -> Self {
        Self(RwLock::new(None))
    }

    /// Reads the present addresses.
    ///
    /// # Errors
    /// The kernel cannot be queried.
    pub(super) fn of_now() -> Result<Self, EnforceError> {
        Ok(Self(RwLock::new(Some(Arc::new(read()?)))))
    }

    /// Returns the addresses that were read last, as a value that stays the same while they do.
    pub(super) fn known(&self) -> Arc<BTreeSet<IpAddr>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    /// Reads the addresses again if the notified ones (`None`: some notifications were lost) differ from
    /// the known ones. Returns whether the addresses have changed.
    ///
    /// # Errors
    /// The kernel cannot be queried.
    pub(super) fn look(&self, told: Option<&[ToldAddress]>) -> Result<bool, EnforceError> {
        let known = self.known();
        if told.is_some_and(|told| !told.iter().any(|it| is_news(&known, it))) {
            return Ok(false);
        }
        let now = read()?;
        let are_others = now != *known;
        if are_others {
            *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(now));
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
    fn addresses_are_read_again_when_the_kernel_has_told_of_others_or_of_none() {
        let netns = Netns::private().unwrap();
        let looked = within(&netns, || {
            let addresses = NodeAddresses::of_now().unwrap();
            let mut handle = Handle::open().unwrap();
            let loopback = handle.link("lo").unwrap();
            handle.ensure_address(loopback.index, "192.0.2.7/32".parse().unwrap()).unwrap();
            let told = [ToldAddress { address: "192.0.2.7".parse().unwrap(), is_there: true }];
            let before = addresses.known();
            let looks = [Some(&told[..0]), Some(&told[..]), Some(&told[..]), None];
            let found = looks.map(|told| addresses.look(told).unwrap());
            (before, found, addresses.known())
        });
        let (before, found, now) = looked.unwrap();
        let gateway = IpAddr::V4(GATEWAY_V4);
        assert_eq!(found, [false, true, false, false]);
        assert_eq!((&*before, &*now), (&[gateway].into(), &[gateway, "192.0.2.7".parse().unwrap()].into()));
    }
}
