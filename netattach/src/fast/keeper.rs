//! Keeps the fast path's maps equal to what is decided, while attachments and the node change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};

use super::decide::{Member, Mode, Node, Reason, decide};
use super::node::LookError;
use crate::bpf::{self, BpfError, FastStats, Place, Segment};
use crate::netlink::{Changes, Handle, LinkWatch};
use crate::report::Chain;

/// How long a change waits for others that come with it: attaching a pod makes several.
const GATHER: Duration = Duration::from_millis(50);
/// How often filters are looked at, which nobody tells of.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often all links are, in case a notification was missed.
const FULL_LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// How long packets take the fast path after the last look: without an agent nobody notices when they no longer should.
const LEASE: Duration = Duration::from_secs(60);

/// How an attachment stands with the fast path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// On it.
    On,
    /// Nobody has looked yet.
    Undecided,
    /// Off it.
    Off(Reason),
}

/// The attachments that could take the fast path, and those that do.
pub struct FastPaths {
    mode: Mode,
    state: Mutex<State>,
    /// Told when there is a new member.
    admitted: Notify,
}

struct State {
    maps: bpf::FastPath,
    members: BTreeMap<u32, Member>,
    off: BTreeMap<u32, Reason>,
}

impl FastPaths {
    /// With nobody on the fast path yet.
    pub fn new(mode: Mode, maps: bpf::FastPath) -> Self {
        let state = State { maps, members: BTreeMap::new(), off: BTreeMap::new() };
        Self { mode, state: Mutex::new(state), admitted: Notify::new() }
    }

    /// When the fast path is taken.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// An attachment that is in place: it takes the fast path from the next look on, if it may.
    pub fn admit(&self, member: Member) {
        let mut state = self.lock();
        state.off.remove(&member.id);
        state.members.insert(member.id, member);
        drop(state);
        self.admitted.notify_one();
    }

    /// Takes an attachment off the fast path for good, before its link goes. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn retire(&self, id: u32) -> Result<(), BpfError> {
        let mut state = self.lock();
        state.members.remove(&id);
        state.off.remove(&id);
        state.maps.remove(id)
    }

    /// Forgets an attachment and its counters. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn forget(&self, id: u32) -> Result<(), BpfError> {
        self.retire(id)?;
        self.lock().maps.forget(id)
    }

    /// How an attachment stands; `None`: it is not known here.
    pub fn standing(&self, id: u32) -> Option<Standing> {
        let state = self.lock();
        state.members.get(&id)?;
        Some(match state.off.get(&id) {
            Some(reason) => Standing::Off(reason.clone()),
            None if state.maps.places().contains_key(&id) => Standing::On,
            None => Standing::Undecided,
        })
    }

    /// The counters of an attachment.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn stats(&self, id: u32) -> Result<FastStats, BpfError> {
        self.lock().maps.stats(id)
    }

    /// Follows the node until it is dropped.
    ///
    /// # Errors
    /// The runtime cannot wait for notifications.
    pub async fn keep(self: Arc<Self>, watch: LinkWatch) -> io::Result<()> {
        let mut watch = watch.into_async()?;
        let mut tick = tokio::time::interval(LOOK_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut node = Node::default();
        let mut full_look: Option<Instant> = None;
        loop {
            // All may be dropped at any time: notifications stay in the socket, a member in the list, a tick comes again.
            let gather = tokio::select! {
                ready = watch.readable_mut() => { ready?.clear_ready(); true }
                () = self.admitted.notified() => true,
                _ = tick.tick() => false,
            };
            if gather {
                tokio::time::sleep(GATHER).await;
            }
            let changes = match watch.get_mut().changes() {
                _ if full_look.is_none_or(|last| last.elapsed() >= FULL_LOOK_INTERVAL) => Changes::Anything,
                Ok(changes) => changes,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "looking at all links instead");
                    Changes::Anything
                }
            };
            if changes == Changes::Anything {
                full_look = Some(Instant::now());
            }
            let this = Arc::clone(&self);
            let looked = tokio::task::spawn_blocking(move || {
                let done = crate::upkeep(|| this.look(&mut node, &changes));
                (node, done)
            });
            // The join error is a panic, which the panic hook has reported; everything is looked at again.
            let (seen, done) = looked.await.unwrap_or_else(|_| (Node::default(), Ok(())));
            node = seen;
            if let Err(error) = done {
                tracing::warn!(error = %Chain(&error), "the fast path is not kept up to date");
                full_look = None;
            }
        }
    }

    /// Looks at the node and brings the maps up to date.
    fn look(&self, node: &mut Node, changes: &Changes) -> Result<(), KeepError> {
        let members = self.lock().members.clone();
        let candidates: BTreeSet<u32> =
            members.values().filter(|member| member.kept_off.is_none()).map(|member| member.device).collect();
        let mut host = Handle::open().map_err(LookError::from)?;
        if self.mode != Mode::Off && !candidates.is_empty() {
            node.look_at_links(&candidates, changes, &mut host)?;
            if self.mode == Mode::Auto {
                let is_routed = |member: &Member| member.routed && member.kept_off.is_none();
                node.look_at_filters(members.values().any(is_routed))?;
            }
        }
        let decided = decide(self.mode, &members, node);
        for (id, decision) in &decided {
            if let Err(reason) = decision {
                self.keep_off(&members[id], reason.clone())?;
            }
        }
        for (id, decision) in decided {
            if let Ok(place) = decision {
                self.put_on(&members[&id], place, &mut host)?;
            }
        }
        if !candidates.is_empty() {
            self.lock().maps.renew(LEASE)?;
        }
        Ok(())
    }

    fn keep_off(&self, member: &Member, reason: Reason) -> Result<(), BpfError> {
        let mut state = self.lock();
        if state.members.get(&member.id) != Some(member) {
            return Ok(());
        }
        if state.off.get(&member.id) != Some(&reason) {
            tracing::debug!(attachment = member.id, %reason, "off the fast path");
        }
        state.maps.remove(member.id)?;
        state.off.insert(member.id, reason);
        Ok(())
    }

    fn put_on(&self, member: &Member, place: Place, host: &mut Handle) -> Result<(), BpfError> {
        if self.lock().maps.places().get(&member.id) == Some(&place) {
            return Ok(());
        }
        // What passes the bridge by does not tell it where the pod is, and what comes from outside it would be flooded
        // once it had forgotten.
        if matches!(place.segment, Segment::Bridge(_))
            && let Err(error) = host.ensure_station(member.device, place.mac)
        {
            return self.keep_off(member, Reason::Failed(Chain(&error).to_string()));
        }
        let mut state = self.lock();
        if state.members.get(&member.id) != Some(member) {
            return Ok(());
        }
        tracing::debug!(attachment = member.id, segment = ?place.segment, mtu = place.mtu, "on the fast path");
        state.maps.put(member.id, place)?;
        state.off.remove(&member.id);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two writes leaves a state that the next look repairs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error("look at the node")]
    Look(#[from] LookError),
    #[error(transparent)]
    Maps(#[from] BpfError),
}

impl fmt::Debug for FastPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastPaths").field("mode", &self.mode).finish_non_exhaustive()
    }
}
