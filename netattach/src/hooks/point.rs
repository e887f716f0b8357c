//! Where the programs of an attachment run.

use super::device::DeviceHooks;
use super::{HookError, PodDevice, node_end, pod};
use crate::bpf::{Device, OnParent};
use crate::netlink::Handle;
use crate::step::{HookKind, NotObservable};

/// Where the programs of an attachment run: a device that all its packets pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HookPoint {
    /// On the node's end of its link: index of that device.
    NodeEnd(u32),
    /// On the parent of its macvlan; copies of group frames are judged on the macvlan itself.
    Parent {
        /// Its entry in the map of parents.
        on: OnParent,
        /// The macvlan.
        macvlan: PodDevice,
    },
    /// On its device in the pod.
    Pod(PodDevice),
    /// Nowhere, and why.
    Nowhere(NotObservable),
}

impl HookPoint {
    /// The same in the form that is shown to users.
    pub(crate) fn vantage(&self) -> HookKind {
        match self {
            Self::NodeEnd(_) => HookKind::Node,
            Self::Parent { .. } => HookKind::Parent,
            Self::Pod(_) => HookKind::Pod,
            Self::Nowhere(why) => HookKind::Nowhere(why.clone()),
        }
    }

    /// The same in the form of the maps.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::NodeEnd(index) => Device::Own(*index),
            Self::Parent { on, .. } => Device::Parent(on.clone()),
            Self::Pod(_) => Device::InPod,
            Self::Nowhere(_) => Device::Nowhere,
        }
    }

    /// The programs on the device that belongs to the attachment alone. A parent is shared: see
    /// [`Parents`](super::parent::Parents).
    ///
    /// # Errors
    /// [`HookError::NoClass`]
    pub(crate) fn own_device(&self, attachment: u32) -> Result<Option<DeviceHooks<'_>>, HookError> {
        match self {
            Self::NodeEnd(index) => Ok(Some(node_end::on(*index))),
            Self::Pod(device) => pod::on(attachment, device).map(Some),
            Self::Parent { .. } | Self::Nowhere(_) => Ok(None),
        }
    }

    /// Index of the device in the node's namespace; 0 if the device is not in that namespace.
    pub(crate) fn host_index(&self) -> u32 {
        match self {
            Self::NodeEnd(index) => *index,
            Self::Parent { on, .. } => on.parent,
            Self::Pod(_) | Self::Nowhere(_) => 0,
        }
    }

    /// Whether no program runs.
    pub(crate) fn is_nowhere(&self) -> bool {
        matches!(self, Self::Nowhere(_))
    }

    /// Whether the device on which frames arrive is gone. For an attachment on a parent this is the pod's own
    /// device, not the parent.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub(crate) fn is_gone(&self, host: &mut Handle) -> Result<bool, HookError> {
        let found = match self {
            Self::Nowhere(_) => return Ok(false),
            Self::NodeEnd(index) => host.link_by_index(*index),
            Self::Parent { macvlan: device, .. } | Self::Pod(device) => match device.handle()? {
                Some(mut inside) => inside.link_by_index(device.index),
                None => return Ok(true),
            },
        };
        match found {
            Err(error) if error.not_found() => Ok(true),
            // The device exists, whatever a process in its pod has changed.
            Err(error) if error.is_untold() => Ok(false),
            other => Ok(other.map(|_| false)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::*;
    use crate::netns::{Netns, NetnsError};

    /// A socket is no file that can be opened, as if no descriptor were left for it.
    #[test]
    fn a_device_is_gone_with_its_pod_but_not_where_nobody_can_tell() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let _bound = UnixListener::bind(&socket).unwrap();
        let own = Netns::current().unwrap();
        let cookie = own.cookie().unwrap();
        let another = cookie.map(|cookie| cookie + 1);
        let there = Path::new("/proc/thread-self/ns/net");
        // Of loopback, which every namespace has, and of an index that none has.
        let table = [
            (there, cookie, 1, Some(false)),
            (there, None, 1, Some(false)),
            (there, another, 1, Some(another.is_some())),
            (there, cookie, i32::MAX as u32, Some(true)),
            (Path::new("/nonexistent"), cookie, 1, Some(true)),
            (socket.as_path(), cookie, 1, None),
        ];
        let mut host = Handle::open().unwrap();
        for (netns, netns_cookie, index, expected) in table {
            let device = PodDevice { netns: netns.to_owned(), netns_id: own.id(), netns_cookie, index };
            let found = HookPoint::Pod(device).is_gone(&mut host);
            if expected.is_none() {
                let is_untold = matches!(&found, Err(HookError::Netns(NetnsError::Open { .. })));
                assert!(is_untold, "{found:?}");
            }
            assert_eq!(found.ok(), expected, "{} {index}", netns.display());
        }
    }
}
