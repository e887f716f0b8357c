//! Links that come up: the request, and the wait until they carry packets.

use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, State};
use rtnetlink::LinkUnspec;

use super::super::socket::NetlinkRequest;
use super::super::{Error, Handle};
use super::show;
use crate::timing;

/// Maximum time for a link to carry packets once both its ends are up.
const CARRIER_WAIT: Duration = Duration::from_secs(1);
/// Most links that are requested in one datagram: each answer takes some kilobytes of the receive queue.
const SHOWN_AT_ONCE: usize = 32;
/// Time between two checks of the carrier.
const CARRIER_POLL: Duration = Duration::from_millis(1);

impl Handle {
    /// Brings a link up.
    pub fn ensure_up(&mut self, index: u32) -> Result<(), Error> {
        let up = LinkUnspec::new_with_index(index).up().build();
        self.socket.request(RouteNetlinkMessage::SetLink(up), 0)?;
        Ok(())
    }

    /// Waits at most [`CARRIER_WAIT`] until a link whose far end has just come up carries packets. Returns whether it
    /// does.
    ///
    /// The kernel processes this change asynchronously (`net/core/link_watch.c`), late on a busy node. Until then the
    /// link has no queue and loses packets that it should send, and a bridge accepts nothing from it: the pod's first
    /// request for its gateway's address would be lost, and repeated only after a second. From Linux 6.8 on, the
    /// kernel processes the change when the link is queried.
    pub fn await_carrier(&mut self, index: u32) -> Result<bool, Error> {
        self.await_carriers(&[index])?.into_iter().next().unwrap_or(Ok(false))
    }

    /// As [`Handle::await_carrier`], for several links at once, in their order.
    ///
    /// # Errors
    /// The socket failed.
    pub fn await_carriers(&mut self, links: &[u32]) -> Result<Vec<Result<bool, Error>>, Error> {
        timing::part("carrier", || self.poll_carriers(links))
    }

    fn poll_carriers(&mut self, links: &[u32]) -> Result<Vec<Result<bool, Error>>, Error> {
        let deadline = Instant::now() + CARRIER_WAIT;
        let mut found: Vec<Result<bool, Error>> = links.iter().map(|_| Ok(false)).collect();
        loop {
            let waiting: Vec<usize> = (0..links.len()).filter(|at| matches!(found[*at], Ok(false))).collect();
            for some in waiting.chunks(SHOWN_AT_ONCE) {
                let ask = |at: &usize| NetlinkRequest::new(show(LinkUnspec::new_with_index(links[*at])), 0);
                let replies = self.socket.batch(some.iter().map(ask).collect())?;
                for (at, reply) in some.iter().zip(replies) {
                    found[*at] = reply.map(|shown| shown.iter().any(is_operational)).map_err(Error::from);
                }
            }
            if !found.iter().any(|it| matches!(it, Ok(false))) || Instant::now() > deadline {
                return Ok(found);
            }
            std::thread::sleep(CARRIER_POLL);
        }
    }
}

/// Uses the operational state (RFC 2863), which the kernel changes only after the link has its queue. The flags are no
/// substitute: they say that a link runs although its first change of carrier has not been processed yet.
fn is_operational(message: &RouteNetlinkMessage) -> bool {
    matches!(message, RouteNetlinkMessage::NewLink(link)
        if link.attributes.contains(&LinkAttribute::OperState(State::Up)))
}
