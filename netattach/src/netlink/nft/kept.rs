//! A pool of netfilter sockets that are reused.
//!
//! When a `NETLINK_NETFILTER` socket is closed, the kernel notifies nftables (`nft_rcv_nl_event`). nftables
//! then waits, with transactions of the namespace locked out, until the objects that earlier transactions
//! deleted have been freed. That is a grace period, some ten milliseconds, in an ADD or a DEL. So a socket of
//! the process's own namespace is kept and lent again instead of closed. Sockets of other namespaces are
//! closed, because a socket keeps its namespace alive.

use std::sync::{Mutex, PoisonError};

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_NETFILTER};

use super::super::Error;
use crate::netns::{self, NetnsId};

/// Most sockets that are kept: as many as are in use at once, except in a burst.
const MOST: usize = 4;

static KEPT: Kept<RawSocket> = Kept::new();

/// A blocking socket lent from the pool. Unless it is given back, dropping it closes the socket and discards
/// unread answers.
pub(in crate::netlink) struct Lent {
    pub(in crate::netlink) socket: RawSocket,
    /// Namespace for which the socket is kept; `None`: the socket is not kept.
    of: Option<NetnsId>,
}

impl Lent {
    /// Returns a blocking socket of the calling thread's namespace that has no unread answers.
    ///
    /// # Errors
    /// No socket is kept and none can be opened.
    pub(in crate::netlink) fn take() -> Result<Self, Error> {
        let of = netns::of_process();
        let socket = match of.and_then(|of| KEPT.take(of)) {
            Some(socket) => socket,
            None => {
                let mut socket = RawSocket::new(NETLINK_NETFILTER).map_err(Error::Open)?;
                socket.bind_auto().map_err(Error::Open)?;
                socket
            }
        };
        Ok(Self { socket, of })
    }

    /// Returns the socket to the pool. Call this only after all answers have been read.
    pub(in crate::netlink) fn give_back(self) {
        if let Some(of) = self.of
            && self.socket.set_non_blocking(false).is_ok()
        {
            KEPT.give_back(of, self.socket);
        }
    }
}

/// Values to lend, each with its namespace.
struct Kept<T>(Mutex<Vec<(NetnsId, T)>>);

impl<T> Kept<T> {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn take(&self, of: NetnsId) -> Option<T> {
        // No lock is poisoned: a panic ends the agent.
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().rposition(|(its, _)| *its == of)?;
        Some(kept.swap_remove(at).1)
    }

    /// Returns a value. If [`MOST`] are already kept, drops the value after the lock is released, because
    /// dropping takes long.
    fn give_back(&self, of: NetnsId, one: T) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MOST {
            kept.push((of, one));
            return;
        }
        drop(kept);
        drop(one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    #[test]
    fn what_is_kept_is_lent_once_to_its_namespace_alone_and_is_not_many() {
        let of = |inode| NetnsId { device: 4, inode };
        let kept = Kept::new();
        kept.give_back(of(1), 'a');
        assert_eq!([kept.take(of(2)), kept.take(of(1)), kept.take(of(1))], [None, Some('a'), None]);
        ('a'..='h').for_each(|one| kept.give_back(of(1), one));
        let lent: Vec<char> = std::iter::from_fn(|| kept.take(of(1))).collect();
        assert_eq!(lent, ['d', 'c', 'b', 'a']);
    }

    #[test]
    fn only_sockets_of_the_process_own_namespace_are_kept() {
        let of = || Lent::take().unwrap().of;
        assert_eq!(of(), Some(Netns::current().unwrap().id()));
        assert_eq!(within(&Netns::private().unwrap(), of).unwrap(), None);
    }
}
