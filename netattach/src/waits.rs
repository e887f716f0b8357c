//! What an operation may have to wait for that others own, and how it says so.
//!
//! Attaching and detaching is written as if nothing else ran. Where it goes to something that may hang, it says so
//! ([`at`]), and before it has any effect it says where it will go ([`admit`]). In the agent both go to the lanes
//! (`agent::scheduler`), by way of the thread's [`Place`]; on any other thread they do nothing.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::ipam::Pool;
use crate::plan::{AttachmentPlan, Plan};
use crate::step::Step;

/// Something outside of this process that may make an operation wait.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// An executed plugin, as one network has it.
    Plugin {
        /// Its `type`.
        plugin: String,
        /// `name` of the network's configuration.
        network: String,
    },
    /// A pool: its lock, which other processes take too, and its disk.
    Pool(Pool),
    /// libcni's cache of results: its disk.
    Cache,
    /// The journal's disk, where a record has to be on it before a plugin runs.
    Sync,
}

/// What an operation needs.
pub type Footprint = BTreeSet<Resource>;

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plugin { plugin, network } => write!(f, "plugin {plugin} of network {network}"),
            Self::Pool(pool) => write!(f, "pool {pool}"),
            Self::Cache => f.write_str("cache of results"),
            Self::Sync => f.write_str("disk of the journal"),
        }
    }
}

/// What carrying a plan out, or taking it back, may wait for.
pub fn footprint(plan: &Plan) -> Footprint {
    let mut needed = Footprint::new();
    for (_, attachment, step) in plan.steps() {
        match step {
            Step::Delegate(delegate) => {
                needed.extend([Resource::Sync, plugin(attachment, &delegate.plugin)]);
            }
            Step::Lease(config) => needed.extend(config.pool().map(Resource::Pool)),
            Step::Remember(_) => drop(needed.insert(Resource::Cache)),
            _ => {}
        }
    }
    needed
}

/// An executed plugin of an attachment.
pub(crate) fn plugin(attachment: &AttachmentPlan, plugin: &str) -> Resource {
    Resource::Plugin { plugin: plugin.to_owned(), network: attachment.config_name.clone() }
}

/// Something that is needed is crowded: the operation is to be given up without effect, and begun anew later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("others wait for the same plugin or pool; try again")]
pub struct Crowded;

/// The place of one operation among all.
pub trait Place {
    /// Whether the operation may go on to what it needs.
    ///
    /// # Errors
    /// [`Crowded`].
    fn admit(&self, needs: &Footprint) -> Result<(), Crowded>;
    /// The operation goes to a resource; blocks while that is closed.
    fn arrive(&self, resource: &Resource);
    /// It is done with it; blocks until there is a place to work in.
    fn depart(&self);
    /// The containers that are being taken back by other operations.
    fn leaving(&self) -> Vec<String> {
        Vec::new()
    }
    /// The operation has failed, and taken back what it did, for what that container still has: it is to be begun anew once
    /// that one has left.
    fn put_off(&self, _container: String) {}
}

thread_local! {
    static PLACE: RefCell<Option<Arc<dyn Place>>> = const { RefCell::new(None) };
}

/// Does the work of an operation that has that place.
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

/// Says what the operation of this thread will need, before it has any effect.
///
/// # Errors
/// [`Crowded`].
pub(crate) fn admit(needs: &Footprint) -> Result<(), Crowded> {
    here().map_or(Ok(()), |place| place.admit(needs))
}

/// The operation of this thread has failed, and taken back what it did: where it was for what one of the containers has that
/// are being taken back, it is begun anew when that one has left. `holder` says which of them.
pub(crate) fn put_off(holder: impl FnOnce(&[String]) -> Option<String>) {
    let Some(place) = here() else { return };
    let leaving = place.leaving();
    if !leaving.is_empty()
        && let Some(container) = holder(&leaving)
    {
        place.put_off(container);
    }
}

/// Does what may hang at a resource.
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

/// Calls address management that may hang at its pool, if it has one.
pub(crate) fn at_pool<T>(pool: Option<Pool>, work: impl FnOnce() -> T) -> T {
    match pool {
        Some(pool) => at(&Resource::Pool(pool), work),
        None => work(),
    }
}

fn here() -> Option<Arc<dyn Place>> {
    PLACE.with_borrow(Clone::clone)
}
