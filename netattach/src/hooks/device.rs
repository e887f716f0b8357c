//! The programs on one device: one way to attach, look for and detach them, by filters or by links.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::numbers::SPARE;
use super::{AttachMode, HookError, PodDevice, Rivals};
use crate::bpf::{LinkPlace, Program, Programs, sys};
use crate::netlink::{Filter, FilterState, Handle};
use crate::netns::within;
use crate::spec::TcHook;

/// A device and the programs that run there. What differs from place to place is made by [`node_end`](super::node_end),
/// [`parent`](super::parent), [`pod`](super::pod) and [`uplink`](super::uplink).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceHooks<'a> {
    /// Index of the device in its namespace.
    pub(super) index: u32,
    /// The pod that the device is in; `None`: it is in the namespace of the handle that is passed.
    pub(super) pod: Option<&'a PodDevice>,
    /// In the order in which packets are to meet those that share a hook.
    pub(super) programs: Vec<HookProgram>,
    /// Whether packets must meet these before the programs of others, which may decide that no later program sees them.
    pub(super) first: bool,
}

/// Why a program does not judge every packet of its hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// It does not run.
    Absent(&'static str),
    /// A filter of others comes before it.
    BehindFilter(&'static str),
    /// A program of others that runs by tcx comes before it.
    BehindTcx(&'static str),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(program) => write!(f, "program {program} is not attached"),
            Self::BehindFilter(program) => write!(f, "another's filter comes before program {program}"),
            Self::BehindTcx(program) => {
                write!(f, "another's tcx program comes before program {program}, and may end the chain")
            }
        }
    }
}

/// What putting programs back has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Restored {
    /// Whether one did not judge every packet.
    pub lacked: bool,
    /// Whether one did not run.
    pub was_absent: bool,
    /// The first that still does not.
    pub left: Option<Lack>,
    /// Whether the device had no `clsact` before they were put before those of others.
    pub(super) made_clsact: bool,
}

impl Restored {
    /// Whether one was missing and none is any more.
    pub(crate) fn helped(&self) -> bool {
        self.lacked && self.left.is_none()
    }
}

/// A program at a hook of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HookProgram {
    /// For what the device receives, or sends.
    pub(super) hook: TcHook,
    /// Number of the filter that runs it.
    pub(super) number: u32,
    /// The class that the filter passes to it (`tc_classid`).
    pub(super) class: u16,
    /// The program that the filter runs.
    pub(super) program: Program,
    /// The link that runs it, or another in its place; `None`: it runs by a filter in either mode.
    pub(super) link: Option<LinkPlace>,
}

impl DeviceHooks<'_> {
    /// Runs the programs. Those that run there already are replaced in one step each. Says whether the device had no `clsact`
    /// before and has one now.
    ///
    /// # Errors
    /// The device or its pod is gone, or the kernel refused a program.
    pub(crate) fn attach(
        &self,
        mode: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<bool, HookError> {
        match mode {
            AttachMode::Clsact => {
                let filters = self.filters(programs)?;
                let ensure = |handle: &mut Handle| Ok(handle.ensure_filters(self.index, &filters)?);
                self.with_handle(handle, ensure)?.ok_or(HookError::PodGone)
            }
            AttachMode::Tcx => {
                let link = || self.links().try_for_each(|place| programs.link(place));
                match self.pod {
                    None => link()?,
                    Some(pod) => within(&pod.namespace()?.ok_or(HookError::PodGone)?, link)??,
                }
                Ok(false)
            }
        }
    }

    /// Fails where the programs cannot be attached in that mode, or would replace those of others: a device of the node that
    /// others use too, such as a representor, may have another discipline in the place of `clsact`, and a filter of theirs the
    /// number of one of these. In one datagram with others the kernel would say so when it has attached some already.
    ///
    /// # Errors
    /// It has, or the discipline or the filters cannot be read.
    pub(crate) fn expect_room(&self, mode: AttachMode, host: &mut Handle) -> Result<(), HookError> {
        if mode == AttachMode::Tcx {
            return Ok(());
        }
        host.expect_clsact(self.index)?;
        for HookProgram { hook, number, .. } in &self.programs {
            let is_taken =
                |it: &FilterState| it.handle == *number && !it.name.as_deref().is_some_and(Program::is_one);
            if host.find_filters(self.index, *hook)?.iter().any(is_taken) {
                return Err(HookError::NumberTaken { device: self.index, number: *number });
            }
        }
        Ok(())
    }

    /// Runs the programs of several devices, all in the namespace of the handle, as [`DeviceHooks::attach`] does: by filters in
    /// one datagram. Says the same of each, or how it failed.
    ///
    /// # Errors
    /// Nothing was attached, because of the device at this position.
    pub(crate) fn attach_all(
        devices: &[(AttachMode, Self)],
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<Vec<Result<bool, HookError>>, (usize, HookError)> {
        let mut filters = Vec::with_capacity(devices.len());
        for (at, (mode, device)) in devices.iter().enumerate() {
            if *mode == AttachMode::Clsact {
                filters.push((device.index, device.filters(programs).map_err(|error| (at, error))?));
            }
        }
        let each: Vec<_> = filters.iter().map(|(index, filters)| (*index, &filters[..])).collect();
        let mut by_filters = handle.ensure_filters_on(&each).map_err(|error| (0, error.into()))?.into_iter();
        let outcome = |(mode, device): &(AttachMode, Self)| match mode {
            // There is one for each of these.
            AttachMode::Clsact => by_filters.next().unwrap_or(Ok(false)).map_err(HookError::from),
            AttachMode::Tcx => device.attach(*mode, programs, handle),
        };
        Ok(devices.iter().map(outcome).collect())
    }

    /// How to run the programs where `wanted` is chosen for all devices: by tcx where programs of others run by tcx, as those
    /// come before any filter.
    ///
    /// # Errors
    /// The kernel does not show them.
    pub(crate) fn mode(&self, wanted: AttachMode) -> Result<AttachMode, HookError> {
        if wanted == AttachMode::Tcx || !self.first {
            return Ok(wanted);
        }
        for HookProgram { hook, .. } in &self.programs {
            if self.first_of_others(*hook)?.is_some() {
                return Ok(AttachMode::Tcx);
            }
        }
        Ok(wanted)
    }

    /// The first program that does not judge every packet, where `wanted` is chosen for all devices: see
    /// [`DeviceHooks::missing`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn lack(
        &self,
        wanted: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<Option<Lack>, HookError> {
        self.missing(self.present_mode(wanted, programs)?, programs, handle)
    }

    /// Has all programs judge every packet again: puts them before the filters of others, as often as `rivals` has it, and does
    /// everything else by `attach`. In a tcx link's place no other can be put while it is there.
    ///
    /// # Errors
    /// Those of [`DeviceHooks::lack`], [`DeviceHooks::bring_to_front`] and `attach`.
    pub(crate) fn restore(
        &self,
        wanted: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
        rivals: &Rivals,
        attach: impl FnOnce(&mut Handle) -> Result<(), HookError>,
    ) -> Result<Restored, HookError> {
        let mut left = self.lack(wanted, programs, handle)?;
        let was_absent = matches!(left, Some(Lack::Absent(_)));
        let mut restored = Restored { lacked: left.is_some(), was_absent, ..Restored::default() };
        if let Some(Lack::BehindFilter(_)) = left {
            if !rivals.may_answer(self.index) {
                return Ok(Restored { left, ..restored });
            }
            restored.made_clsact = self.bring_to_front(programs, handle)?;
            left = self.lack(wanted, programs, handle)?;
        }
        if let Some(Lack::Absent(_) | Lack::BehindTcx(_)) = left {
            attach(handle)?;
            left = self.lack(wanted, programs, handle)?;
        }
        Ok(Restored { left, ..restored })
    }

    /// As [`DeviceHooks::mode`] where the programs run already: those that run by tcx stay there, also when those of others are
    /// gone.
    fn present_mode(&self, wanted: AttachMode, programs: &Programs) -> Result<AttachMode, HookError> {
        if self.first && wanted == AttachMode::Clsact && self.unlinked(programs)?.is_none() {
            return Ok(AttachMode::Tcx);
        }
        self.mode(wanted)
    }

    /// The first program that does not run, or does not run first where it has to. One of an earlier object counts as running;
    /// where the pod is gone none is missing by filters.
    ///
    /// # Errors
    /// The filters, the links' pins or the programs of others cannot be read.
    pub(crate) fn missing(
        &self,
        mode: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<Option<Lack>, HookError> {
        let lack = match mode {
            AttachMode::Clsact => self.with_handle(handle, |handle| self.missing_filter(handle))?.flatten(),
            AttachMode::Tcx => self.unlinked(programs)?.map(Lack::Absent),
        };
        if lack.is_some() || !self.first {
            return Ok(lack);
        }
        self.behind_tcx(mode)
    }

    /// The first program of these that no link runs.
    fn unlinked(&self, programs: &Programs) -> Result<Option<&'static str>, HookError> {
        for place in self.links() {
            if !programs.is_linked(place)? {
                return Ok(Some(place.program().name()));
            }
        }
        Ok(None)
    }

    /// The first program that comes behind one of others by tcx.
    fn behind_tcx(&self, mode: AttachMode) -> Result<Option<Lack>, HookError> {
        for HookProgram { hook, program, link, .. } in &self.programs {
            let Some(foreign) = self.first_of_others(*hook)? else { continue };
            // Before it are ours alone, and those on this hook are linked.
            let linked = self.programs.iter().filter(|it| it.hook == *hook && it.link.is_some()).count();
            if mode == AttachMode::Clsact || foreign < linked {
                let program = link.filter(|_| mode == AttachMode::Tcx).map_or(*program, LinkPlace::program);
                return Ok(Some(Lack::BehindTcx(program.name())));
            }
        }
        Ok(None)
    }

    /// The position of the first program of others among those that run by tcx on a hook of the device, which is on the node.
    fn first_of_others(&self, hook: TcHook) -> Result<Option<usize>, HookError> {
        let shown = |source| HookError::Tcx { device: self.index, source };
        for (position, id) in sys::tcx_programs(self.index, hook).map_err(shown)?.into_iter().enumerate() {
            let name = sys::program_name(id).map_err(shown)?;
            if !name.as_deref().is_some_and(Program::is_one) {
                return Ok(Some(position));
            }
        }
        Ok(None)
    }

    /// Puts the programs before those of others, by filters; no packet passes without them.
    ///
    /// Says whether the device had no `clsact` before.
    ///
    /// # Errors
    /// The kernel refused. Some may be there twice, which counts as behind those of others.
    pub(crate) fn bring_to_front(&self, programs: &Programs, handle: &mut Handle) -> Result<bool, HookError> {
        let filters = self.filters(programs)?;
        let spare: Vec<_> = filters.iter().map(|it| Filter { handle: it.handle | SPARE, ..*it }).collect();
        let numbers =
            |filters: &[Filter<'_>]| filters.iter().map(|it| (it.hook, it.handle)).collect::<Vec<_>>();
        // The kernel inserts new filters before all others, and leaves one that is replaced where it is.
        let made_clsact = handle.ensure_filters(self.index, &spare)?;
        handle.ensure_filters_absent(self.index, &numbers(&filters), false)?;
        handle.ensure_filters(self.index, &filters)?;
        handle.ensure_filters_absent(self.index, &numbers(&spare), false)?;
        Ok(made_clsact)
    }

    /// Takes the programs off, as far as they were attached in that mode; with `clsact` that too, unless others have filters
    /// there. Filters of others with the numbers of ours stay. Idempotent; a device that is gone has none.
    ///
    /// # Errors
    /// The kernel refused, or a pin cannot be removed.
    pub(crate) fn detach(
        &self,
        mode: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
        clsact: bool,
    ) -> Result<(), HookError> {
        match mode {
            AttachMode::Clsact => {
                let one = |program: &HookProgram| (program.hook, program.number);
                // Those that an agent has left that was killed while it put the programs in another place.
                let spare = |program: &HookProgram| (program.hook, program.number | SPARE);
                let spares = self.programs.iter().filter(|_| self.first).map(spare);
                let numbers: Vec<_> = self.programs.iter().map(one).chain(spares).collect();
                let absent = |handle: &mut Handle| -> Result<(), HookError> {
                    let mut ours = Vec::new();
                    // Programs of both hooks may share a number.
                    for number in numbers.iter().map(|(_, number)| *number).collect::<BTreeSet<_>>() {
                        let found = handle.attached_programs(&[self.index], number)?.into_iter().next();
                        let found = found.transpose()?.flatten().unwrap_or_default();
                        let names = [(TcHook::Ingress, found.ingress), (TcHook::Egress, found.egress)];
                        let named = names
                            .into_iter()
                            .filter(|(_, name)| name.as_deref().is_some_and(Program::is_one));
                        ours.extend(named.map(|(hook, _)| (hook, number)).filter(|it| numbers.contains(it)));
                    }
                    Ok(handle.ensure_filters_absent(self.index, &ours, clsact)?)
                };
                self.with_handle(handle, absent).map(Option::unwrap_or_default)
            }
            AttachMode::Tcx => self.unlink(programs),
        }
    }

    /// Takes the links away. Idempotent.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub(crate) fn unlink(&self, programs: &Programs) -> Result<(), HookError> {
        Ok(self.links().try_for_each(|place| programs.unlink(place))?)
    }

    fn links(&self) -> impl Iterator<Item = LinkPlace> {
        self.programs.iter().filter_map(|program| program.link)
    }

    fn filters<'p>(&self, programs: &'p Programs) -> Result<Vec<Filter<'p>>, HookError> {
        let filter = |wanted: &HookProgram| {
            let HookProgram { hook, number, class, program, .. } = *wanted;
            Ok(Filter { hook, handle: number, class, name: program.name(), program: programs.get(program)? })
        };
        self.programs.iter().map(filter).collect()
    }

    fn missing_filter(&self, handle: &mut Handle) -> Result<Option<Lack>, HookError> {
        let mut found = BTreeMap::new();
        for HookProgram { hook, number, program, .. } in &self.programs {
            if !found.contains_key(hook) {
                found.insert(*hook, handle.find_filters(self.index, *hook)?);
            }
            let filters: &[FilterState] = &found[hook];
            let is_it = |it: &FilterState| it.name.as_deref() == Some(program.name()) && it.handle == *number;
            let is_foreign = |it: &FilterState| !it.name.as_deref().is_some_and(Program::is_one);
            // One wherever it is: putting the programs in another place was not finished.
            let is_spare = |it: &FilterState| it.handle == *number | SPARE;
            let Some(position) = filters.iter().position(is_it) else {
                return Ok(Some(Lack::Absent(program.name())));
            };
            let is_behind = filters[..position].iter().any(is_foreign) || filters.iter().any(is_spare);
            if self.first && is_behind {
                return Ok(Some(Lack::BehindFilter(program.name())));
            }
        }
        Ok(None)
    }

    /// Does something by a handle in the device's namespace; `None`: its pod is gone.
    fn with_handle<T>(
        &self,
        handle: &mut Handle,
        act: impl FnOnce(&mut Handle) -> Result<T, HookError>,
    ) -> Result<Option<T>, HookError> {
        let Some(pod) = self.pod else { return act(handle).map(Some) };
        pod.handle()?.map(|mut inside| act(&mut inside)).transpose()
    }
}
