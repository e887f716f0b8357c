//! The table in the kernel: its actual and its wanted contents.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use rustix::io::Errno;

use super::wish::Left;
use super::{NatError, exceptions};
use crate::netlink::nat::{self, Element, Set, Shape};
use crate::netlink::{Error, filter_generation};

/// Attempts to read the table while other processes change it.
const TRIES: u32 = 5;

/// The table as the agent last left it.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// The owner: the agent's state directory.
    owner: String,
    /// Chains and rules as the kernel listed them after they had been made; `None`: they have to be made.
    shape: Option<Shape>,
    /// The packet filter's generation in which the table was last found correct.
    seen: Option<u32>,
    /// The table may have elements of attachments whose records could not be read.
    has_strangers: bool,
    /// The kernel's table may differ from what is recorded here, because [`Table::begin`] has failed half
    /// way, or because the result of a transaction is unknown. `Some(all)`: the next call first runs
    /// [`Table::begin`] again with this `all`.
    pending: Option<bool>,
}

/// Result of [`Table::repair`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repaired {
    /// The table is as it should be.
    Nothing,
    /// [`Table::begin`] had failed and was run again.
    BegunAnew,
    /// Something was missing and has been put back.
    PutBack,
}

/// The wanted elements, each with the number of attachments that want it.
type Users = BTreeMap<Element, usize>;

impl Table {
    /// The table of the agent with that state directory.
    pub(super) fn new(owner: &str) -> Self {
        Self { owner: owner.to_owned(), ..Self::default() }
    }

    /// Takes over the table of an earlier agent: replaces it by one with these elements, or removes it if
    /// there are none. Without `all`, elements that no known attachment wants stay, since an unknown one may
    /// want them. If this fails, the next call retries.
    pub(super) fn begin(&mut self, users: &Users, all: bool) -> Result<(), NatError> {
        self.begin_without(users, &[], all)
    }

    /// As [`Table::begin`]; the elements `gone` are removed in any case.
    fn begin_without(&mut self, users: &Users, gone: &[Element], all: bool) -> Result<(), NatError> {
        self.pending = Some(all);
        self.has_strangers = !all;
        self.shape = None;
        self.take_over(users, gone, all)?;
        self.pending = None;
        Ok(())
    }

    fn take_over(&mut self, users: &Users, gone: &[Element], all: bool) -> Result<(), NatError> {
        if all {
            return match users.is_empty() {
                // Without nftables there is no table.
                true if nat::shape()?.is_empty() => Ok(()),
                // Another agent's table does not matter while no element is wanted.
                true if nat::comment_of_another(&self.owner)?.is_some() => Ok(()),
                true => Ok(nat::uninstall()?),
                false => self.install(users),
            };
        }
        if users.is_empty() && (nat::shape()?.is_empty() || nat::comment_of_another(&self.owner)?.is_some()) {
            return Ok(());
        }
        self.check_owner()?;
        let mut kept: Users = nat::all_elements()?.into_iter().map(|element| (element, 1)).collect();
        kept.retain(|element, _| !gone.contains(element));
        // Where the table has another value for a key, the value that a known attachment wants wins. An
        // unknown attachment may follow the exceptions of the node.
        let has_exceptions = users.keys().any(exceptions::is_of_list);
        kept.retain(|element, _| !(has_exceptions && exceptions::is_of_list(element)));
        kept.retain(|element, _| {
            let same = |other: &&Element| other.set == element.set && other.key == element.key;
            users.keys().find(same).is_none_or(|wanted| wanted == element)
        });
        kept.extend(users.iter().map(|(element, users)| (element.clone(), *users)));
        match (kept.is_empty(), gone.is_empty()) {
            (false, _) => self.install(&kept),
            (true, false) => Ok(nat::uninstall()?),
            (true, true) => Ok(()),
        }
    }

    /// Reads the exceptions of the node from the kernel; empty if there is no table.
    pub(super) fn exceptions() -> Result<Vec<IpNet>, Error> {
        let read = || Ok([nat::elements(Set::Prefixes4)?, nat::elements(Set::Prefixes6)?]);
        let mut found = read();
        for _ in 1..TRIES {
            match &found {
                Err(Error::Interrupted(_)) => found = read(),
                _ => break,
            }
        }
        Ok(found?.iter().flat_map(exceptions::nets_of).collect())
    }

    /// Removes elements and adds others; `users` are all elements that are wanted afterwards.
    pub(super) fn change(
        &mut self,
        users: &Users,
        gone: &[Element],
        new: &[Element],
    ) -> Result<(), NatError> {
        if let Some(all) = self.pending {
            return self.begin_without(users, gone, all);
        }
        if users.is_empty() && !self.has_strangers {
            self.shape = None;
            let is_gone = gone.is_empty() || nat::comment_of_another(&self.owner)?.is_some();
            return if is_gone { Ok(()) } else { self.known(nat::uninstall()) };
        }
        if self.shape.is_none() {
            return self.make(users, gone);
        }
        if gone.is_empty() && new.is_empty() {
            return Ok(());
        }
        match nat::change(gone, new) {
            // The table is gone, or an element to remove is gone, or another element has the same key:
            // another program has changed the table.
            Err(error) if error.not_found() || is_occupied(&error) => self.make(users, gone),
            other => self.known(other),
        }
    }

    /// Whether [`Table::begin`] has succeeded, or was not called yet.
    pub(super) fn is_begun(&self) -> bool {
        self.pending.is_none()
    }

    /// Whether the kernel's table may have elements that no known attachment wants.
    pub(super) fn may_have_strangers(&self) -> bool {
        self.has_strangers || self.pending.is_some()
    }

    /// Removes and returns those elements of an attachment that was not taken over which no known attachment wants.
    pub(super) fn sweep(&mut self, users: &Users, left: &Left<'_>) -> Result<Vec<Element>, NatError> {
        // Another agent's table has nothing of the attachment, and without nftables there is no table.
        if nat::shape()?.is_empty() || nat::comment_of_another(&self.owner)?.is_some() {
            return Ok(Vec::new());
        }
        let mut found = nat::all_elements()?;
        found.retain(|element| !users.contains_key(element));
        let gone = left.among(&found);
        if !gone.is_empty() {
            self.change(users, &gone, &[])?;
        }
        Ok(gone)
    }

    /// Puts back what is missing. `allowed` says whether elements that other programs removed may be put back
    /// now.
    pub(super) fn repair(
        &mut self,
        users: &Users,
        allowed: impl FnOnce() -> Result<(), NatError>,
    ) -> Result<Repaired, NatError> {
        if let Some(all) = self.pending {
            self.begin(users, all)?;
            return Ok(Repaired::BegunAnew);
        }
        if users.is_empty() {
            return Ok(Repaired::Nothing);
        }
        let generation = filter_generation()?;
        if self.shape.is_some() && self.seen == Some(generation) {
            return Ok(Repaired::Nothing);
        }
        self.seen = None;
        if self.shape.is_none() {
            self.make(users, &[])?;
            return Ok(Repaired::PutBack);
        }
        if self.shape != Some(nat::shape()?) {
            allowed()?;
            self.make(users, &[])?;
            return Ok(Repaired::PutBack);
        }
        let found = nat::all_elements()?;
        let missing: Vec<&Element> = users.keys().filter(|element| !found.contains(element)).collect();
        if missing.is_empty() {
            // Changes after this generation are handled at the next call.
            self.seen = Some(generation);
            return Ok(Repaired::Nothing);
        }
        allowed()?;
        match nat::change([], missing) {
            // Another element has the same key.
            Err(error) if error.not_found() || is_occupied(&error) => self.make(users, &[])?,
            other => self.known(other)?,
        }
        Ok(Repaired::PutBack)
    }

    /// Returns the first of the wanted elements that the kernel does not have.
    pub(super) fn missing(&self, wanted: &BTreeSet<Element>) -> Result<Option<Element>, Error> {
        for set in Set::ALL {
            let mut of_set = wanted.iter().filter(|element| element.set == set).peekable();
            if of_set.peek().is_none() {
                continue;
            }
            let found = nat::elements(set)?;
            if let Some(missing) = of_set.find(|element| !found.contains(element)) {
                return Ok(Some(missing.clone()));
            }
        }
        Ok(None)
    }

    /// Makes the table anew with the wanted elements. If records could not be read, keeps the table's other
    /// elements too, except `gone`, since they may belong to an unknown attachment.
    fn make(&mut self, users: &Users, gone: &[Element]) -> Result<(), NatError> {
        if self.has_strangers { self.begin_without(users, gone, false) } else { self.install(users) }
    }

    fn install(&mut self, users: &Users) -> Result<(), NatError> {
        self.shape = None;
        self.check_owner()?;
        self.known(nat::install(&self.owner, users.keys()))?;
        self.seen = None;
        // The table is there. If its shape cannot be read now, because other processes are changing the
        // packet filter, the next call makes the table once more.
        self.shape = nat::shape().ok();
        Ok(())
    }

    /// Evaluates the result of a transaction. The kernel carries out a transaction as a whole or not at all,
    /// but if its answer is lost, the result is unknown.
    fn known(&mut self, done: Result<(), Error>) -> Result<(), NatError> {
        if done.as_ref().is_err_and(|error| !matches!(error, Error::Refused(_) | Error::Send(..))) {
            self.pending = self.pending.or(Some(!self.has_strangers));
        }
        Ok(done?)
    }

    /// Refuses the table of another agent: a table has one agent, and each agent replaces its table as a
    /// whole when it starts.
    fn check_owner(&self) -> Result<(), NatError> {
        nat::comment_of_another(&self.owner)?.map_or(Ok(()), |comment| Err(NatError::Foreign { comment }))
    }
}

fn is_occupied(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::BUSY | Errno::EXIST | Errno::NOTEMPTY))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::wish::Wish;
    use super::*;
    use crate::netns::{Netns, within};
    use crate::step::LeasedAddress;

    /// The elements that masquerading this address takes.
    fn masqueraded(address: &str) -> Users {
        let asked = json!({"device": "br0", "bridged": true, "masquerade": []});
        let leased = [LeasedAddress { address: address.parse().unwrap(), gateway: None }];
        let wish = Wish::new(&serde_json::from_value(asked).unwrap(), &leased).unwrap();
        wish.elements.into_iter().map(|element| (element, 1)).collect()
    }

    fn not_asked() -> Result<(), NatError> {
        panic!("nothing is put back that another program has removed")
    }

    /// At first another agent's table is in the way. Needs root, like the agent.
    #[test]
    fn what_has_failed_to_begin_is_begun_anew_by_whichever_call_comes_next() {
        let (stranger, own) = (masqueraded("10.1.0.2/24"), masqueraded("10.1.0.3/24"));
        let elements = |of: &Users| of.keys().cloned().collect::<BTreeSet<_>>();
        let begun_in_vain = |all| {
            nat::install("other", stranger.keys()).unwrap();
            let mut table = Table::new("own");
            let begun = table.begin(&own, all);
            assert!(matches!(begun, Err(NatError::Foreign { .. })), "{begun:?}");
            assert_eq!(table.pending, Some(all));
            // That agent goes away, and the remaining table is that of an earlier agent with the same
            // directory.
            nat::install("own", stranger.keys()).unwrap();
            table
        };
        within(&Netns::private().unwrap(), || {
            // Every record was read: elements that no attachment wants are removed.
            let mut table = begun_in_vain(true);
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::BegunAnew);
            assert_eq!(nat::all_elements().unwrap(), elements(&own));
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::Nothing);
            let mut table = begun_in_vain(true);
            table.change(&own, &[], &[]).unwrap();
            assert_eq!(nat::all_elements().unwrap(), elements(&own));
            let mut table = begun_in_vain(true);
            assert_eq!(table.repair(&Users::new(), not_asked).unwrap(), Repaired::BegunAnew);
            assert!(nat::shape().unwrap().is_empty());
            // Some records were not read: elements that no known attachment wants stay, except those that are
            // removed just now.
            let both = elements(&stranger).union(&elements(&own)).cloned().collect::<BTreeSet<_>>();
            let mut table = begun_in_vain(false);
            assert_eq!(table.repair(&own, not_asked).unwrap(), Repaired::BegunAnew);
            assert_eq!(nat::all_elements().unwrap(), both);
            let mut table = begun_in_vain(false);
            table.change(&own, &[], &[]).unwrap();
            assert_eq!(nat::all_elements().unwrap(), both);
            let mut table = begun_in_vain(false);
            let gone: Vec<Element> = stranger.keys().filter(|it| !own.contains_key(it)).cloned().collect();
            table.change(&own, &gone, &[]).unwrap();
            assert_eq!((nat::all_elements().unwrap(), table.pending), (elements(&own), None));
            // None is wanted any more, and those that are removed are all.
            let mut table = begun_in_vain(false);
            let gone: Vec<Element> = stranger.keys().cloned().collect();
            table.change(&Users::new(), &gone, &[]).unwrap();
            assert!(nat::all_elements().unwrap().is_empty());
        })
        .unwrap();
    }

    /// Its record was damaged, or its DEL had begun under an earlier agent. Needs root, like the agent.
    #[test]
    fn what_no_agent_has_taken_over_goes_with_its_del_and_nothing_of_others() {
        use super::super::wish::{HostPort, translated};
        use super::super::{Holder, Key, Nat};

        let asked = |port: Option<u16>| -> crate::step::Translate {
            let port = port.map(|port| json!({"hostPort": port, "containerPort": 80, "protocol": "tcp"}));
            let ports: Vec<_> = port.into_iter().collect();
            let asked = json!({"device": "", "bridged": true, "masquerade": [], "ports": ports});
            serde_json::from_value(asked).unwrap()
        };
        let holder = |container: &str| Holder {
            key: Key { container: container.to_owned(), ifname: "eth0".to_owned() },
            who: container.to_owned(),
        };
        let pods = [("a", Some(1), 2), ("b", Some(2), 3), ("c", Some(3), 4), ("d", None, 5)];
        let wish = |port: Option<u16>, last: u8| {
            let address = format!("10.1.0.{last}/24").parse().unwrap();
            Wish::new(&asked(port), &[LeasedAddress { address, gateway: None }]).unwrap()
        };
        // The last byte of each pod's address to which an element leads, or which it translates.
        let there = || -> Vec<u8> {
            let of = |it: &Element| HostPort::of(it).map(|port| port.to.ip()).or_else(|| translated(it));
            let all: BTreeSet<_> = nat::all_elements().unwrap().iter().filter_map(of).collect();
            let last = |address| match address {
                std::net::IpAddr::V4(v4) => v4.octets()[3],
                std::net::IpAddr::V6(_) => 0,
            };
            all.into_iter().map(last).collect()
        };
        within(&Netns::private().unwrap(), || {
            let earlier = Nat::new("own");
            for (container, port, last) in pods {
                earlier.attach(&holder(container), wish(port, last)).unwrap();
            }
            assert_eq!(there(), [2, 3, 4, 5]);
            let nat = Nat::new("own");
            nat.adopt(&holder("a"), wish(Some(1), 2));
            nat.guard(&holder("b"), "br0");
            nat.begin(false).unwrap();
            assert_eq!(there(), [2, 3, 4, 5]);
            let has_left = |of: &str| nat.may_have_left(&holder(of).key);
            assert_eq!(["a", "b", "c", "d"].map(has_left), [false, true, true, true]);
            let sweep = |port: Option<u16>, addresses: &[u8]| {
                let addresses = addresses.iter().map(|last| [10, 1, 0, *last].into()).collect();
                nat.sweep(&Left { translate: &asked(port), addresses }).unwrap();
                there()
            };
            // The record knows no address of the second; the third has another one than the port leads to.
            assert_eq!(sweep(Some(2), &[]), [2, 4, 5]);
            assert_eq!(sweep(Some(3), &[9]), [2, 4, 5]);
            assert_eq!(sweep(Some(3), &[4]), [2, 5]);
            assert_eq!(sweep(None, &[5]), [2]);
            // What an attachment that is known wants stays, whatever the record of another one says.
            assert_eq!(sweep(Some(1), &[2]), [2]);
            assert_eq!(nat.difference(&wish(Some(1), 2)).unwrap(), None);
        })
        .unwrap();
    }

    #[test]
    fn a_transaction_whose_answer_is_lost_is_begun_anew_and_one_that_was_refused_is_not() {
        use crate::netlink::Refused;

        let lost = || Error::Malformed { request: "NFT_MSG_NEWSETELEM", what: "the kernel did not answer" };
        let refused =
            || Error::from(Refused { request: "NFT_MSG_NEWSETELEM", errno: libc::ENOENT, text: None });
        let after = |has_strangers: bool, done: Result<(), Error>| {
            let mut table = Table { has_strangers, ..Table::new("own") };
            // The caller's result is passed through.
            let _ = table.known(done);
            table.pending
        };
        assert_eq!([after(false, Ok(())), after(false, Err(refused()))], [None, None]);
        assert_eq!([after(false, Err(lost())), after(true, Err(lost()))], [Some(true), Some(false)]);
    }
}
