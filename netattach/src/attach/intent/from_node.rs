//! The parts of the node's default network that come from the node itself: its ranges, and the network that the agent
//! provides if there is no other.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use ipnet::IpNet;

use super::IntentError;
use crate::builtin::network::{Facts, configuration};
use crate::builtin::{NoRange, Settings, ThisNode, pod_cidr};
use crate::cni::NetworkList;
use crate::npwg::NetworkRef;
use crate::objects::Objects;
use crate::sync::{Mutex, locked};

/// How long an ADD waits for the processing of the nodes that follows the first complete snapshot.
const LOOK_WAIT: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct FromNode {
    /// This node.
    pub this: ThisNode,
    /// The settings of the network that the agent provides.
    pub settings: Settings,
    /// MTU of the device that leads out of the node; 0: there is none.
    uplink_mtu: AtomicU32,
    /// Whether the address translation knows the destinations without masquerade.
    is_excepted: StdMutex<bool>,
    excepted: Condvar,
    /// The configuration that was generated last, as each ADD needs it.
    written: Mutex<Option<Written>>,
}

#[derive(Debug)]
struct Written {
    ranges: Vec<IpNet>,
    uplink_mtu: u32,
    list: Arc<NetworkList>,
}

impl FromNode {
    /// Starts without an uplink.
    pub fn new(this: ThisNode, settings: Settings) -> Self {
        Self { this, settings, ..Self::default() }
    }

    /// Sets the MTU of the device that leads out of the node, if there is one. Attached pods keep their MTU.
    pub fn set_uplink_mtu(&self, mtu: Option<u32>) {
        self.uplink_mtu.store(mtu.unwrap_or_default(), Ordering::Relaxed);
    }

    /// Notes that the address translation knows the destinations without masquerade. Pods that were attached earlier
    /// would reach other nodes with the node's address.
    pub fn set_excepted(&self) {
        *self.is_excepted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.excepted.notify_all();
    }

    /// Waits until [`Self::set_excepted`] is called, at most for [`LOOK_WAIT`]; returns whether it was called.
    fn await_excepted(&self) -> bool {
        let is_excepted = self.is_excepted.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.excepted.wait_timeout_while(is_excepted, LOOK_WAIT, |is_excepted| !*is_excepted);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Returns the configuration of the network that the agent provides.
    ///
    /// # Errors
    /// The ranges of this node, or those of the other nodes, are unknown.
    pub(super) fn builtin(&self, objects: &Objects) -> Result<Arc<NetworkList>, IntentError> {
        let ranges = self.this.pod_cidrs(objects).map_err(IntentError::NoRange)?;
        if self.settings.masquerade && !self.await_excepted() {
            return Err(IntentError::NoRange(NoRange::OthersUnknown));
        }
        let uplink_mtu = self.uplink_mtu.load(Ordering::Relaxed);
        let mut written = locked(&self.written);
        if let Some(known) = &*written
            && known.ranges == ranges
            && known.uplink_mtu == uplink_mtu
        {
            return Ok(Arc::clone(&known.list));
        }
        let uplink = Some(uplink_mtu).filter(|mtu| *mtu != 0);
        let facts = Facts { ranges: ranges.clone(), uplink_mtu: uplink };
        let list = Arc::new(configuration(&self.settings, &facts).map_err(IntentError::Builtin)?);
        *written = Some(Written { ranges, uplink_mtu, list: Arc::clone(&list) });
        Ok(list)
    }

    /// Adds the ranges that a definition takes from the node, and returns whether it takes any. `is_default`: it is
    /// the node's default network.
    ///
    /// # Errors
    /// It is another network, or the ranges are unknown.
    pub(super) fn fill(
        &self,
        list: &mut NetworkList,
        (network, is_inline, is_default): (&NetworkRef, bool, bool),
        objects: &Objects,
    ) -> Result<bool, IntentError> {
        if !pod_cidr::is_used(list) {
            return Ok(false);
        }
        if !(is_default && is_inline) {
            return Err(IntentError::NotFromNode { network: network.clone() });
        }
        let failed = |source| IntentError::NoRangeFor { network: network.clone(), source };
        let ranges: Vec<IpNet> = self.this.pod_cidrs(objects).map_err(failed)?;
        pod_cidr::fill(list, self.this.name.as_deref().unwrap_or("of this agent"), &ranges)
            .map_err(|source: NoRange| IntentError::NoRangeFor { network: network.clone(), source })?;
        Ok(true)
    }
}
