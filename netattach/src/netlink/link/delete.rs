//! Deletion of links, of all that a sandbox has at once or one by one.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::LinkUnspec;

use super::super::socket::{NetlinkRequest, Reply};
use super::super::{Error, Handle};
use crate::error_chain::Chain;

impl Handle {
    /// Deletes all links of `group`, if given, in this namespace for the cost of one grace period. Then
    /// deletes, one by one, the links with these indices that still exist: a process in the pod may have
    /// changed their group, or may have added a link to the group that cannot be deleted. Returns once the
    /// links are gone, with the outcome for each index. Links that are already absent count as deleted.
    ///
    /// # Errors
    /// The socket failed: it is unknown which links remain.
    pub fn delete_links(
        &mut self,
        group: Option<u32>,
        links: &[u32],
    ) -> Result<Vec<Result<(), Error>>, Error> {
        if let Some(group) = group {
            let mut all = LinkMessage::default();
            all.attributes.push(LinkAttribute::Group(group));
            match self.socket.request(RouteNetlinkMessage::DelLink(all), 0) {
                Err(error) if !error.not_found() => {
                    tracing::debug!(error = %Chain(&error), "no deletion by group, deleting links one by one");
                }
                _ => {}
            }
        }
        let delete = |index: &u32| {
            NetlinkRequest::new(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(*index).build()), 0)
        };
        let replies = self.socket.batch(links.iter().map(delete).collect())?;
        let outcome = |reply: Reply| match reply.map_err(Error::from) {
            Err(error) if !error.not_found() => Err(error),
            _ => Ok(()),
        };
        Ok(replies.into_iter().map(outcome).collect())
    }

    /// Deletes the link of that name. Returns whether it existed.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn delete_link_named(&mut self, name: &str) -> Result<bool, Error> {
        let named = LinkUnspec::new_with_name(name).build();
        match self.socket.request(RouteNetlinkMessage::DelLink(named), 0) {
            Err(error) if error.not_found() => Ok(false),
            deleted => deleted.map(|_| true),
        }
    }

    /// Deletes the link of that name if it exists.
    pub fn ensure_link_absent(&mut self, name: &str) -> Result<(), Error> {
        self.delete_link_named(name).map(drop)
    }
}
