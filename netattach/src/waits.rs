//! Resources that an operation may have to wait for because other processes or operations use them.
//!
//! Code that attaches and detaches is written as if nothing else ran. It marks each call that may hang with [`at`],
//! and announces the resources that it will need with [`admit`] before it has any effect. In the agent both are
//! passed to the lanes (`agent::admission::scheduler`) through the thread's [`Place`]; on any other thread they do
//! nothing.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::ipam::{self, Pool};
use crate::plan::{AttachmentPlan, Plan};
use crate::step::Step;

/// A resource outside this process that an operation may have to wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// A plugin, per network: one that is executed, or native IPAM that waits for a service like an executed plugin.
    Plugin {
        /// Its `type`.
        plugin: String,
        /// `name` of the network's configuration.
        network: String,
    },
    /// A pool: its lock, which other processes also take, and its disk.
    Pool(Pool),
    /// libcni's cache of results: its disk.
    Cache,
    /// The journal's disk: a record has to be durable before a plugin runs, and a pool has to be noted before it is
    /// leased from.
    Sync,
    /// Duplicate address detection of IPv6 on a network, which takes seconds.
    Detection {
        /// `name` of the network's configuration.
        network: String,
    },
    /// The locks of a network's VFs, which sriov-cni holds during a whole ADD.
    VfLocks {
        /// `name` of the network's configuration.
        network: String,
    },
    /// A network's devices: while another thread gives one back, the card or its driver may hang.
    Devices {
        /// `name` of the network's configuration.
        network: String,
    },
    /// The node's packet filter, which other programs change concurrently.
    PacketFilter,
    /// The publication of pods' network-status: an ADD may have to wait for its own.
    Publication,
}

/// The resources that an operation needs.
pub type Footprint = BTreeSet<Resource>;

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plugin { plugin, network } => write!(f, "plugin {plugin} of network {network}"),
            Self::Pool(pool) => write!(f, "pool {pool}"),
            Self::Cache => f.write_str("cache of results"),
            Self::Sync => f.write_str("disk of the journal"),
            Self::Detection { network } => write!(f, "detection of duplicate addresses on network {network}"),
            Self::VfLocks { network } => write!(f, "sriov-cni's locks of VFs of network {network}"),
            Self::Devices { network } => write!(f, "device of network {network} that is being given back"),
            Self::PacketFilter => f.write_str("packet filter of the node"),
            Self::Publication => f.write_str("publication of network-status"),
        }
    }
}

/// The resources that executing or undoing a plan may wait for.
pub fn footprint(plan: &Plan) -> Footprint {
    let mut needed = Footprint::new();
    for (_, attachment, step) in plan.steps() {
        match step {
            Step::Delegate(delegate) => {
                needed.extend([Resource::Sync, plugin(attachment, &delegate.plugin)]);
            }
            Step::Lease(config) => needed.extend(of_lease(attachment, config)),
            Step::Remember(_) => drop(needed.insert(Resource::Cache)),
            Step::Admit(_) => drop(needed.insert(Resource::PacketFilter)),
            Step::ClaimDevice(device) => {
                needed.insert(devices(attachment));
                if device.function.is_some() {
                    needed.insert(vf_locks(attachment));
                }
            }
            Step::Configure(configure) if configure.detect_duplicates => {
                needed.insert(detection(attachment));
            }
            Step::TakeMade(_)
            | Step::EnsureBridge(_)
            | Step::CreateLink(_)
            | Step::SetDevice(_)
            | Step::MoveDevice
            | Step::RaiseLoopback
            | Step::PrepareDeviceInfo(_)
            | Step::Gateway { .. }
            | Step::EnsureForwarding
            | Step::RouteToPod
            | Step::FindReach
            | Step::Translate(_)
            | Step::RestrictSender
            | Step::FindDevice
            | Step::Protect(_)
            | Step::ProtectAddresses
            | Step::ChooseHostAccess
            | Step::GiveHostAccess
            | Step::Configure(_)
            | Step::ReadDeviceInfo(_)
            | Step::NoteProperties(_)
            | Step::Tune(_)
            | Step::ChooseTables(_)
            | Step::UseTables(_)
            | Step::ChooseVrf(_)
            | Step::JoinVrf(_)
            | Step::MoveDefaultRoutes { .. }
            | Step::RouteBySource => {}
        }
    }
    needed
}

/// Returns the resource that leasing with that configuration may wait for.
pub(crate) fn of_lease(attachment: &AttachmentPlan, config: &ipam::Config) -> Option<Resource> {
    match config.pool() {
        Some(pool) => Some(Resource::Pool(pool)),
        None => config.asks_the_network().then(|| plugin(attachment, config.kind().name())),
    }
}

/// An executed plugin of an attachment.
pub(crate) fn plugin(attachment: &AttachmentPlan, plugin: &str) -> Resource {
    Resource::Plugin { plugin: plugin.to_owned(), network: attachment.config_name.clone() }
}

/// Returns the resource for duplicate address detection of an attachment.
pub(crate) fn detection(attachment: &AttachmentPlan) -> Resource {
    Resource::Detection { network: attachment.config_name.clone() }
}

/// Returns the resource for waiting for sriov-cni.
pub(crate) fn vf_locks(attachment: &AttachmentPlan) -> Resource {
    Resource::VfLocks { network: attachment.config_name.clone() }
}

/// Returns the resource for waiting until another thread has given the attachment's device back.
pub(crate) fn devices(attachment: &AttachmentPlan) -> Resource {
    Resource::Devices { network: attachment.config_name.clone() }
}

/// A needed resource is crowded: the operation gives up without effect and is retried later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many operations wait for the same plugin or pool; try again")]
pub struct Crowded;

/// One operation's access to the scheduler.
pub trait Place {
    /// Whether the operation may proceed to the resources that it needs.
    ///
    /// # Errors
    /// [`Crowded`].
    fn admit(&self, needs: &Footprint) -> Result<(), Crowded>;
    /// The operation starts using a resource; blocks while the resource is closed.
    fn arrive(&self, resource: &Resource);
    /// The operation has finished using the resource; blocks until a worker slot is free.
    fn depart(&self);
    /// The containers that other operations are removing.
    fn leaving(&self) -> Vec<String> {
        Vec::new()
    }
    /// The operation failed because of a resource that this container, which is being removed, still holds, and was
    /// rolled back: it must be retried once the container is gone.
    fn put_off(&self, _container: String) {}
    /// The operation failed because of a resource that this container holds, whether or not it is being removed.
    /// `who`: the container as the author of the refused pod may be told of it.
    fn held_by(&self, _container: String, _who: String) {}
}

thread_local! {
    static PLACE: RefCell<Option<Arc<dyn Place>>> = const { RefCell::new(None) };
}

/// Runs `work` on behalf of the operation with that place.
pub(crate) fn within<T>(place: Arc<dyn Place>, work: impl FnOnce() -> T) -> T {
    struct Outside;
    impl Drop for Outside {
        fn drop(&mut self) {
            PLACE.set(None);
        }
    }
    PLACE.set(Some(place));
    let _outside = Outside;
    work()
}

/// Announces the resources that this thread's operation will need, before it has any effect.
///
/// # Errors
/// [`Crowded`].
pub(crate) fn admit(needs: &Footprint) -> Result<(), Crowded> {
    here().map_or(Ok(()), |place| place.admit(needs))
}

/// Called after this thread's operation has failed and was rolled back: if the cause is a resource of a container
/// that is being removed, the operation is retried when that container is gone. `holder` selects the container from
/// the list of those being removed; it is returned.
pub(crate) fn put_off(holder: impl FnOnce(&[String]) -> Option<String>) -> Option<String> {
    let place = here()?;
    let leaving = place.leaving();
    let container = if leaving.is_empty() { None } else { holder(&leaving) }?;
    place.put_off(container.clone());
    Some(container)
}

/// This thread's operation has failed because of a resource of this container, of which the refused pod is told as
/// `who`.
pub(crate) fn held_by(container: String, who: String) {
    if let Some(place) = here() {
        place.held_by(container, who);
    }
}

/// Runs work that may hang at a resource.
pub(crate) fn at<T>(resource: &Resource, work: impl FnOnce() -> T) -> T {
    struct There(Arc<dyn Place>);
    impl Drop for There {
        fn drop(&mut self) {
            self.0.depart();
        }
    }
    let _there = here().map(|place| {
        place.arrive(resource);
        There(place)
    });
    work()
}

/// Calls IPAM, which may hang at its pool, if it has one.
pub(crate) fn at_pool<T>(pool: Option<Pool>, work: impl FnOnce() -> T) -> T {
    at_any(pool.map(Resource::Pool).as_ref(), work)
}

/// Runs work that may hang at that resource, if there is one.
pub(crate) fn at_any<T>(resource: Option<&Resource>, work: impl FnOnce() -> T) -> T {
    match resource {
        Some(resource) => at(resource, work),
        None => work(),
    }
}

fn here() -> Option<Arc<dyn Place>> {
    PLACE.with_borrow(Clone::clone)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;
    use crate::plan::fixtures::{self, attachment, sandbox};
    use crate::spec::{Device, VirtualFunction};
    use crate::step::{Admit, Configure};

    /// A place that keeps the resources at which its operation has been.
    #[derive(Debug, Default)]
    pub(crate) struct Visits(Mutex<Vec<Resource>>);

    impl Visits {
        pub(crate) fn all(&self) -> Vec<Resource> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }
    }

    impl Place for Visits {
        fn admit(&self, _: &Footprint) -> Result<(), Crowded> {
            Ok(())
        }

        fn arrive(&self, resource: &Resource) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(resource.clone());
        }

        fn depart(&self) {}
    }

    #[test]
    fn what_others_hold_up_is_said_before_it_is_waited_for() {
        let network = || "lan".to_owned();
        let device = |function: bool| {
            let physical = "0000:03:00.0".to_owned();
            let function = function.then_some(VirtualFunction { physical, number: 1 });
            Step::ClaimDevice(Device { function, ..fixtures::device() })
        };
        let configure =
            |detects| Step::Configure(Configure { detect_duplicates: detects, ..Configure::default() });
        let (locks, devices) =
            (Resource::VfLocks { network: network() }, Resource::Devices { network: network() });
        for (step, expected) in [
            (configure(true), vec![Resource::Detection { network: network() }]),
            (configure(false), Vec::new()),
            (device(true), vec![locks, devices.clone()]),
            (device(false), vec![devices]),
            (Step::Admit(Admit::default()), vec![Resource::PacketFilter]),
        ] {
            let attachments = vec![attachment("bridge", vec![step.clone()])];
            let plan = Plan { sandbox: sandbox("c1"), attachments, dynamic: None };
            assert_eq!(footprint(&plan), expected.into_iter().collect::<Footprint>(), "{step:?}");
        }
    }
}
