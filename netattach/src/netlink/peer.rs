//! Finds the other end of a veth or netkit, and verifies for a veth that this end is in a given namespace.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use rtnetlink::LinkUnspec;

use super::link::{observed, show};
use super::{Error, Handle, LinkState};

/// The kernel's answer for a namespace without a number (`NETNSA_NSID_NOT_ASSIGNED`).
const NOT_ASSIGNED: i32 = -1;

/// Whether links of the kind come in pairs.
fn is_pair(kind: &str) -> bool {
    matches!(kind, "veth" | "netkit")
}

impl Handle {
    /// Returns the veth of this namespace whose other end is `far`, a link of the namespace `pod`; `None` if
    /// `far` is not a veth or its other end is elsewhere. Indices alone are not sufficient, because every
    /// namespace uses the same ones.
    ///
    /// Not for a netkit: its own programs see the pod's packets before its other end does, and may redirect
    /// them.
    pub fn find_peer(&mut self, far: &LinkState, pod: BorrowedFd<'_>) -> Result<Option<LinkState>, Error> {
        let Some(index) = far.link.filter(|_| far.kind == "veth") else { return Ok(None) };
        // This request comes first, because describing a link makes the kernel assign a number to the
        // namespace of its other end.
        let mut shown = match self.socket.request(show(LinkUnspec::new_with_index(index)), 0) {
            Err(error) if error.not_found() => return Ok(None),
            other => other?,
        };
        let in_namespace = shown.iter().find_map(namespace_of_the_other_end);
        let Some(near) = shown.drain(..).find_map(observed) else { return Ok(None) };
        let is_end = near.kind == far.kind && near.link == Some(far.index);
        let is_there = in_namespace.is_some() && in_namespace == self.number_of(pod)?;
        Ok(Some(near).filter(|_| is_end && is_there))
    }

    /// Returns the other end of a veth or netkit of this namespace if it is in this namespace too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn find_end_here(&mut self, end: &LinkState) -> Result<Option<LinkState>, Error> {
        let Some(index) = end.link.filter(|_| is_pair(&end.kind)) else { return Ok(None) };
        let shown = match self.socket.request(show(LinkUnspec::new_with_index(index)), 0) {
            Err(error) if error.not_found() => return Ok(None),
            other => other?,
        };
        // The kernel reports the namespace of the other end only if it differs from the link's.
        let is_here = |message: &RouteNetlinkMessage| namespace_of_the_other_end(message).is_none();
        let other = shown.into_iter().find(is_here).and_then(observed);
        Ok(other.filter(|other| other.kind == end.kind && other.link == Some(end.index)))
    }

    /// Returns the number that this namespace has for another namespace, if any.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn number_of(&mut self, netns: BorrowedFd<'_>) -> Result<Option<i32>, Error> {
        let mut message = NsidMessage::default();
        // A file descriptor is never negative.
        message.attributes.push(NsidAttribute::Fd(netns.as_raw_fd().cast_unsigned()));
        let answers = self.socket.request(RouteNetlinkMessage::GetNsId(message), 0)?;
        let number = answers.into_iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewNsId(told) => {
                told.attributes.into_iter().find_map(|attribute| match attribute {
                    NsidAttribute::Id(number) => Some(number),
                    _ => None,
                })
            }
            _ => None,
        });
        Ok(number.filter(|number| *number != NOT_ASSIGNED))
    }
}

fn namespace_of_the_other_end(message: &RouteNetlinkMessage) -> Option<i32> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkNetNsId(number) => Some(*number),
        _ => None,
    })
}
