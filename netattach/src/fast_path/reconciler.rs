//! Keeps the fast path's maps equal to the decisions while attachments and the node change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::decide::{Member, Mode, decide};
use super::node::{Observation, ObserveError};
use super::reason::Reason;
use super::uplink::{self, Uplink, Uplinks};
use super::xdp::{self, Xdp};
use crate::bpf::{self, BpfError, Dataplane, FastStats, Place, Programs, Segment, XdpMode};
use crate::error_chain::Chain;
use crate::hooks::{AttachMode, HookError, uplink as hook};
use crate::netlink::{self, Changes, Handle, LinkWatch, Moves, StationWatch};
use crate::pace;
use crate::rounds::{self, Begun};
use crate::ticks::ticks;

/// Interval at which packet filters and IPsec policies are read, of which the kernel does not notify.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest pause between two passes that also read programs, which take two requests per device. The pause
/// follows [`pace`].
const PROGRAMS_LEAST_PAUSE: Duration = Duration::from_secs(5);
/// Longest pause, however long a pass takes.
const PROGRAMS_MOST_PAUSE: Duration = Duration::from_secs(60);
/// Shortest pause between two reads of all links, a precaution against missed notifications: the kernel
/// reports when it drops notifications, so none should be missed.
const FULL_LOOK_LEAST_PAUSE: Duration = Duration::from_secs(30);
/// Longest pause, however long a read takes.
const FULL_LOOK_MOST_PAUSE: Duration = Duration::from_secs(180);
/// How long lists may keep changing while they are read before this is reported.
const IN_MOTION: Duration = Duration::from_secs(20);
/// How long packets take the fast path after an observation: without an agent, nothing else would take them
/// off it.
const LEASE: Duration = Duration::from_secs(60);

/// Whether an attachment is on the fast path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// On the fast path.
    On,
    /// The node's state has not been read yet.
    Undecided,
    /// Off the fast path.
    Off(Reason),
}

/// The attachments that could take the fast path, and those that take it.
pub struct FastPaths {
    mode: Mode,
    xdp: Xdp,
    attach: AttachMode,
    programs: Arc<Programs>,
    state: Mutex<State>,
    /// Notified when there is a new member.
    admitted: Notify,
    /// Whether nothing can be on the fast path, and nothing is left there: no notification matters then. Written
    /// under the lock.
    has_nothing: AtomicBool,
}

struct State {
    maps: bpf::FastPath,
    members: BTreeMap<u32, Member>,
    off: BTreeMap<u32, Reason>,
    uplinks: BTreeMap<u32, Uplink>,
    /// The devices that run the uplinks' program; `None`: not determined yet.
    running: Option<BTreeSet<u32>>,
    xdp: xdp::XdpStates,
}

/// Consecutive failed passes.
#[derive(Debug, Default)]
struct Failing {
    since: Option<Instant>,
}

impl Failing {
    /// Whether the failure should be reported. A list that changes while it is read is read again within a
    /// second. This happens while many pods start at once; only if it lasts is something else wrong.
    fn is_worth_telling(&mut self, error: &KeepError) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let is_in_motion =
            matches!(error, KeepError::Observation(ObserveError::Netlink(netlink::Error::Interrupted(_))));
        !is_in_motion || since.elapsed() >= IN_MOTION
    }
}

/// Handles lost notifications about stations.
fn lost(error: netlink::Error) -> Moves {
    tracing::warn!(error = %Chain(&error), "station notifications lost; listing all stations of bridges");
    Moves::Anything
}

/// Returns until when packets may take the fast path after an observation that began at `observed_at`. Both
/// times are of the clock [`bpf::FastPath::now`].
///
/// # Errors
/// [`KeepError::Late`].
fn lease(observed_at: Duration, now: Duration) -> Result<Duration, KeepError> {
    let until = observed_at.saturating_add(LEASE);
    if until > now { Ok(until) } else { Err(KeepError::Late) }
}

/// The last read of all links.
#[derive(Debug, Clone, Copy)]
struct FullLook {
    ended: Instant,
    worked: Duration,
}

impl FullLook {
    /// Whether all links have to be read again.
    fn is_long_ago(&self) -> bool {
        let pause = pace::pause_between(FULL_LOOK_LEAST_PAUSE, FULL_LOOK_MOST_PAUSE, self.worked);
        // The read ended shortly after its tick.
        self.ended.elapsed() + LOOK_INTERVAL / 2 >= pause
    }
}

/// The last pass that read the programs of all links.
#[derive(Debug, Clone, Copy, Default)]
struct LastLook {
    ended: Option<Instant>,
    worked: Duration,
}

impl LastLook {
    /// Whether programs have to be read again.
    fn is_long_ago(&self) -> bool {
        let pause = pace::pause_between(PROGRAMS_LEAST_PAUSE, PROGRAMS_MOST_PAUSE, self.worked);
        // The last pass ended shortly after its tick.
        self.ended.is_none_or(|ended| ended.elapsed() + LOOK_INTERVAL / 2 >= pause)
    }
}

/// Why the reconciler goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// A link has changed, or there is a new member.
    Told,
    /// A bridge has learned or forgotten stations.
    OfStations,
    Tick,
}

/// What a pass reads.
#[derive(Debug, Clone, Copy)]
struct Pass {
    /// Only packet filters and IPsec policies.
    is_light: bool,
    /// The programs of all links too.
    with_programs: bool,
    /// All links.
    is_full: bool,
}

impl Pass {
    const LIGHT: Self = Self { is_light: true, with_programs: false, is_full: false };

    /// What it is called in the log.
    fn name(self) -> &'static str {
        match self {
            Self { is_light: true, .. } => "fast path: packet filters",
            Self { is_full: true, .. } => "fast path: everything",
            Self { with_programs: true, .. } => "fast path: programs",
            _ => "fast path: what has changed",
        }
    }
}

/// The outcome of a pass.
struct Passed {
    node: Observation,
    done: Result<(), KeepError>,
    took: Duration,
    worked: Duration,
}

/// The passes so far.
#[derive(Debug, Default)]
struct Passes {
    full_look: Option<FullLook>,
    last: LastLook,
    /// How long the last complete pass took.
    lasted: Duration,
    failing: Failing,
}

impl Passes {
    /// Notes how a pass went, and returns what it has observed.
    fn note(&mut self, passed: Passed, pass: Pass) -> Observation {
        let Passed { mut node, done, took, worked } = passed;
        if !pass.is_light {
            self.lasted = took;
        }
        if pass.with_programs {
            self.last = LastLook { ended: Some(Instant::now()), worked };
        }
        if pass.is_full {
            self.full_look = Some(FullLook { ended: Instant::now(), worked });
        }
        match &done {
            Ok(()) => self.failing = Failing::default(),
            Err(error) if self.failing.is_worth_telling(error) => {
                tracing::warn!(error = %Chain(error), "fast path not updated");
            }
            Err(_) => {}
        }
        if !node.stands_after(done.is_ok()) {
            self.full_look = None;
        }
        node
    }
}

impl FastPaths {
    /// Creates the state with no attachment on the fast path yet.
    ///
    /// # Errors
    /// The maps cannot be opened.
    pub fn new(mode: Mode, xdp: Xdp, attach: AttachMode, dataplane: &Dataplane) -> Result<Self, BpfError> {
        let programs = Arc::clone(dataplane.programs());
        let state = State {
            maps: dataplane.fast_path()?,
            members: BTreeMap::new(),
            off: BTreeMap::new(),
            uplinks: BTreeMap::new(),
            running: None,
            xdp: BTreeMap::new(),
        };
        let (state, admitted, has_nothing) = (Mutex::new(state), Notify::new(), AtomicBool::new(false));
        Ok(Self { mode, xdp, attach, programs, state, admitted, has_nothing })
    }

    /// When packets take the fast path.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Registers an attachment that is complete: it takes the fast path from the next pass on, if it may.
    pub fn admit(&self, member: Member) {
        let mut state = self.lock();
        state.off.remove(&member.id);
        state.members.insert(member.id, member);
        self.has_nothing.store(false, Ordering::Relaxed);
        drop(state);
        self.admitted.notify_one();
    }

    /// Takes an attachment off the fast path for good, before its link is deleted: neither other attachments
    /// nor uplinks lead to it any more. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn retire(&self, id: u32) -> Result<(), BpfError> {
        let mut state = self.lock();
        state.members.remove(&id);
        state.off.remove(&id);
        state.maps.forget(id)
    }

    /// Forgets an attachment; with the last one also the uplinks. Idempotent.
    ///
    /// # Errors
    /// A map could not be written, or a program could not be removed from an uplink.
    pub fn forget(&self, id: u32) -> Result<(), KeepError> {
        self.retire(id)?;
        let mut state = self.lock();
        if state.members.is_empty() && !state.uplinks.is_empty() {
            let mut host = Handle::open().map_err(ObserveError::from)?;
            state.set_uplinks(self.attach, &self.programs, Uplinks::default(), &mut host)?;
        }
        Ok(())
    }

    /// The uplinks and their states. For uplinks that should run XDP: the mode in which they do, or why they
    /// do not.
    pub fn uplinks(&self) -> Vec<(Uplink, Option<Result<XdpMode, String>>)> {
        let state = self.lock();
        state.uplinks.iter().map(|(index, uplink)| (uplink.clone(), state.xdp.get(index).cloned())).collect()
    }

    /// Status of an attachment; `None`: the attachment is not registered here.
    pub fn status(&self, id: u32) -> Option<Status> {
        let state = self.lock();
        state.members.get(&id)?;
        Some(match state.off.get(&id) {
            Some(reason) => Status::Off(reason.clone()),
            None if state.maps.places().contains_key(&id) => Status::On,
            None => Status::Undecided,
        })
    }

    /// The counters of an attachment.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn stats(&self, id: u32) -> Result<FastStats, BpfError> {
        self.lock().maps.stats(id)
    }

    /// Follows the node's changes until the future is dropped.
    ///
    /// # Errors
    /// The runtime cannot wait for notifications.
    pub async fn keep(self: Arc<Self>, mut watch: LinkWatch, mut stations: StationWatch) -> io::Result<()> {
        let mut tick = ticks(LOOK_INTERVAL);
        let mut passes = Passes::default();
        let mut node = Observation::default();
        // A light look, whose outcome nobody needs before there is something else to do.
        let mut light: Option<Begun<Passed>> = None;
        loop {
            // Each branch may be cancelled at any time: notifications stay in the socket, members in the
            // list, and ticks recur.
            let woken = tokio::select! {
                ready = watch.readable() => ready.map(|()| Woken::Told)?,
                ready = stations.readable() => ready.map(|()| Woken::OfStations)?,
                () = self.admitted.notified() => Woken::Told,
                _ = tick.tick() => Woken::Tick,
            };
            if let Some(light) = light.take() {
                node = passes.note(light.result().await, Pass::LIGHT);
            }
            // Bridges learn many stations that are not attachments.
            if woken == Woken::OfStations && !node.follow(stations.moves().unwrap_or_else(lost)) {
                continue;
            }
            let gather = woken != Woken::Tick;
            if gather {
                tokio::time::sleep(pace::gather(passes.lasted)).await;
            }
            let is_due = passes.full_look.is_none_or(|last| last.is_long_ago());
            let observed_at = bpf::FastPath::now();
            // Read whatever has caused the wake-up, so that it is not delayed while another source is always
            // ready.
            let moves = stations.moves().unwrap_or_else(lost);
            let told = watch.changes();
            if self.has_nothing.load(Ordering::Relaxed) {
                // The pass that follows an admission reads everything.
                continue;
            }
            let is_moved = node.follow(moves);
            node.keep_filters(told.as_ref().ok().filter(|_| is_due));
            let changes = match told {
                Ok(_) if is_due => Changes::Anything,
                Ok(changes) => changes,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "link notifications lost; checking all links");
                    Changes::Anything
                }
            };
            let is_full = changes == Changes::Anything;
            let with_programs = is_full || passes.last.is_long_ago();
            let is_light = !gather && !is_moved && changes.is_none() && !with_programs;
            let pass = Pass { is_light, with_programs, is_full };
            let this = Arc::clone(&self);
            let mut observed = std::mem::take(&mut node);
            let take = move || {
                let look = || match is_light {
                    true => this.look_lightly(&mut observed, &changes, observed_at),
                    false => this.look(&mut observed, &changes, with_programs, observed_at),
                };
                // Excludes the time during which other tasks have had their turn.
                let begun = Instant::now();
                let (done, worked) = pace::measured(pass.name(), || crate::upkeep(look));
                Passed { node: observed, done, took: begun.elapsed(), worked }
            };
            let begun = rounds::begin(!gather && !is_moved, take).await;
            if is_light {
                light = Some(begun);
            } else {
                node = passes.note(begun.result().await, pass);
            }
        }
    }

    /// Reads only packet filters and IPsec policies, while the kernel has not notified of any change: if they
    /// are unchanged, all decisions still hold.
    fn look_lightly(
        &self,
        observation: &mut Observation,
        changes: &Changes,
        observed_at: Duration,
    ) -> Result<(), KeepError> {
        let is_routed = |member: &Member| member.routed && member.kept_off.is_none();
        let (is_none, has_routed) = {
            let state = self.lock();
            (state.members.is_empty(), state.members.values().any(is_routed))
        };
        if self.mode == Mode::Off || is_none {
            return self.look(observation, changes, true, observed_at);
        }
        let before = (observation.node.ipsec, observation.node.filters.clone());
        observation.look_at_ipsec()?;
        observation.look_at_filters(has_routed || !observation.node.default_routes.is_empty())?;
        if before.0 != observation.node.ipsec || before.1 != observation.node.filters {
            return self.look(observation, changes, true, observed_at);
        }
        self.renew(observed_at)
    }

    /// Reads the node's state and brings the maps up to date. `all_programs`: programs are read on all links, and not
    /// only where links are read.
    fn look(
        &self,
        observation: &mut Observation,
        changes: &Changes,
        all_programs: bool,
        observed_at: Duration,
    ) -> Result<(), KeepError> {
        let members = self.lock().members.clone();
        let xdp = self.xdp != Xdp::Off;
        let matters = |member: &&Member| xdp || member.kept_off.is_none();
        let candidates: BTreeSet<u32> =
            members.values().filter(matters).map(|member| member.device).collect();
        let mut host = Handle::open().map_err(ObserveError::from)?;
        if (self.mode != Mode::Off || xdp) && !candidates.is_empty() {
            observation.at_links(&candidates, changes, &mut host)?;
            if *changes == Changes::Anything {
                observation.forget();
            }
            observation.at_stations(
                members.values().filter(|member| !member.routed && matters(member)),
                &mut host,
            )?;
            observation.look_at_ipsec()?;
            if self.mode == Mode::Auto {
                observation.at_programs(all_programs, &mut host)?;
            }
            if self.mode != Mode::Off {
                let is_routed = |member: &Member| member.routed && member.kept_off.is_none();
                let routed = members.values().any(is_routed) || !observation.node.default_routes.is_empty();
                observation.look_at_filters(routed)?;
            }
        } else {
            // Notifications are consumed here without being processed, so the earlier state is no longer valid.
            *observation = Observation::default();
        }
        let decided = decide(self.mode, &members, &observation.node);
        let uplinks = uplink::decide(self.mode, self.xdp, &members, &decided, &observation.node);
        for (id, decision) in &decided {
            if let Err(reason) = decision {
                self.keep_off(&members[id], reason.clone())?;
            }
        }
        // A process may be stopped for any length of time. No attachment is put on the fast path by an
        // outdated state.
        lease(observed_at, bpf::FastPath::now())?;
        for (id, decision) in decided {
            if let Ok(place) = decision {
                self.put_on(&members[&id], place, &mut host)?;
            }
        }
        {
            let mut state = self.lock();
            // An attachment that was removed meanwhile may have been the last.
            if state.members == members {
                state.set_uplinks(self.attach, &self.programs, uplinks, &mut host)?;
                self.has_nothing.store(candidates.is_empty() && state.is_bare(), Ordering::Relaxed);
            }
        }
        if !candidates.is_empty() {
            self.renew(observed_at)?;
        }
        Ok(())
    }

    /// Extends the time for which packets take the fast path, by an observation that began at `observed_at`.
    fn renew(&self, observed_at: Duration) -> Result<(), KeepError> {
        let mut state = self.lock();
        let until = lease(observed_at, bpf::FastPath::now())?;
        Ok(state.maps.renew(until)?)
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
        // Packets that bypass the bridge do not teach it where the pod is: once the bridge has forgotten the
        // pod, it would flood packets that come from outside.
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
        // No lock is poisoned: a panic ends the agent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether neither attachments nor uplinks have anything on the fast path.
    fn is_bare(&self) -> bool {
        let runs_nothing = self.running.as_ref().is_some_and(BTreeSet::is_empty);
        self.maps.places().is_empty() && self.uplinks.is_empty() && self.xdp.is_empty() && runs_nothing
    }

    /// Brings uplinks and the programs' map of them in line with the decisions.
    fn set_uplinks(
        &mut self,
        mode: AttachMode,
        programs: &Programs,
        uplinks: Uplinks,
        host: &mut Handle,
    ) -> Result<(), HookError> {
        let wanted = uplinks.running();
        let first = self.running.is_none();
        let mut running = match self.running.take() {
            Some(running) => running,
            None => {
                let own = self.members.values().map(|member| member.device).collect();
                hook::running(programs, &own, host)?
            }
        };
        for (index, uplink) in &uplinks.uplinks {
            if self.uplinks.get(index) != Some(uplink) {
                tracing::debug!(device = uplink.name, status = ?uplink.status, "uplink");
            }
        }
        let xdp = uplinks.xdp();
        self.uplinks = uplinks.uplinks;
        let changed =
            self.maps.set_uplinks(uplinks.entries).and_then(|()| self.maps.set_locals(uplinks.locals));
        let moved = changed.map_err(HookError::from).and_then(|()| {
            for device in running.difference(&wanted).copied().collect::<Vec<_>>() {
                for mode in [AttachMode::Tcx, AttachMode::Clsact] {
                    hook::detach(mode, programs, device, host)?;
                }
                running.remove(&device);
            }
            for device in wanted {
                if first {
                    hook::attach(mode, programs, device, host)?;
                    // The other mode is detached last, so that each packet is judged by at least one of the
                    // two.
                    hook::detach(mode.other(), programs, device, host)?;
                } else if !running.contains(&device) || !hook::runs(mode, programs, device, host)? {
                    hook::attach(mode, programs, device, host)?;
                }
                running.insert(device);
            }
            Ok(())
        });
        self.running = Some(running);
        moved?;
        let xdp = xdp::keep(&self.maps, &xdp, first)?;
        for (index, status) in &xdp {
            if let Err(error) = status
                && self.xdp.get(index) != Some(status)
            {
                let device =
                    self.uplinks.get(index).map_or_else(|| index.to_string(), |uplink| uplink.name.clone());
                tracing::warn!(device, error, "program of an uplink not attached");
            }
        }
        self.xdp = xdp;
        Ok(())
    }
}

/// Why the fast path could not be kept up to date.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// The node's state could not be read.
    #[error("read the state of the node")]
    Observation(#[from] ObserveError),
    /// A map could not be written.
    #[error(transparent)]
    Maps(#[from] BpfError),
    /// A program could not be attached to or removed from an uplink.
    #[error(transparent)]
    Uplink(#[from] HookError),
    /// The pass took so long that its observation may be outdated. The next pass begins anew.
    #[error("the check of the node took longer than {} s", LEASE.as_secs())]
    Late,
}

impl fmt::Debug for FastPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastPaths").field("mode", &self.mode).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_change_while_they_are_read_are_told_when_that_lasts() {
        let in_motion: KeepError = ObserveError::from(netlink::Error::Interrupted("RTM_GETLINK")).into();
        let other: KeepError = ObserveError::Programs(io::Error::from_raw_os_error(libc::EPERM)).into();
        let mut failing = Failing::default();
        assert!(!failing.is_worth_telling(&in_motion) && failing.is_worth_telling(&other));
        failing.since = Instant::now().checked_sub(IN_MOTION);
        assert!(failing.is_worth_telling(&in_motion));
    }

    #[test]
    fn the_fast_path_is_taken_for_a_time_from_when_the_node_was_observed_and_not_from_when_that_ended() {
        let at = Duration::from_secs(1_000);
        let moment = Duration::from_millis(1);
        for now in [at, at + LEASE - moment] {
            assert_eq!(lease(at, now).ok(), Some(at + LEASE));
        }
        for now in [at + LEASE, at + LEASE * 60] {
            assert!(matches!(lease(at, now), Err(KeepError::Late)), "{now:?}");
        }
    }

    #[test]
    fn the_pages_say_how_soon_programs_of_others_are_noticed() {
        let pages = [include_str!("../../../docs/configuration.md"), include_str!("../../../docs/limits.md")];
        let [configuration, limits] = pages.map(|page| page.split_whitespace().collect::<Vec<_>>().join(" "));
        let [least, most] = [PROGRAMS_LEAST_PAUSE, PROGRAMS_MOST_PAUSE].map(|pause| pause.as_secs());
        let every = format!(
            "every {least} s, or as rarely as uses a ten-thousandth of a processor, but at least every {most} s"
        );
        assert!(configuration.contains(&every), "docs/configuration.md lacks: {every}");
        let within = format!("within {least} s, on a node with hundreds of attachments within {most} s");
        assert!(limits.contains(&within), "docs/limits.md lacks: {within}");
    }

    #[test]
    fn a_look_that_ended_a_moment_after_its_tick_is_not_put_off_by_another_tick() {
        let moment = Duration::from_millis(20);
        for (ago, is_due) in [(FULL_LOOK_LEAST_PAUSE - moment, true), (FULL_LOOK_LEAST_PAUSE / 2, false)] {
            let ended = Instant::now().checked_sub(ago).unwrap();
            assert_eq!(FullLook { ended, worked: Duration::ZERO }.is_long_ago(), is_due, "{ago:?}");
        }
        for (ago, is_due) in [(PROGRAMS_LEAST_PAUSE - moment, true), (PROGRAMS_LEAST_PAUSE / 2, false)] {
            let ended = Instant::now().checked_sub(ago);
            assert_eq!(LastLook { ended, ..LastLook::default() }.is_long_ago(), is_due, "{ago:?}");
        }
    }
}
