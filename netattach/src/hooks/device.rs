//! The programs on one device: attaches, checks and detaches them, by filters or by links.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::numbers::SPARE;
use super::{AttachMode, HookError, PodDevice, Rivals, WholeFilters};
use crate::bpf::{LinkPlace, Program, Programs, sys};
use crate::netlink::{Filter, FilterState, Handle};
use crate::netns::within;
use crate::spec::TcHook;

/// A device and its programs. Differences between the kinds of devices are handled by
/// [`node_end`](super::node_end), [`parent`](super::parent), [`pod`](super::pod) and
/// [`uplink`](super::uplink), which construct this value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceHooks<'a> {
    /// Index of the device in its namespace.
    pub(super) index: u32,
    /// The pod that contains the device; `None`: the device is in the namespace of the handle that is passed.
    pub(super) pod: Option<&'a PodDevice>,
    /// The programs; those that share a hook are in the order in which packets should meet them.
    pub(super) programs: Vec<HookProgram>,
    /// Whether packets must meet these programs before those of other agents or tools, which may decide that
    /// no later program sees a packet.
    pub(super) first: bool,
}

/// Why a program does not judge every packet of its hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// The program does not run.
    Absent(&'static str),
    /// Another program's filter comes before it.
    BehindFilter(&'static str),
    /// Another program that runs by tcx comes before it.
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

/// Result of [`DeviceHooks::restore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Restored {
    /// Whether a program did not judge every packet.
    pub lacked: bool,
    /// Whether a program did not run.
    pub was_absent: bool,
    /// The first program that still does not judge every packet.
    pub left: Option<Lack>,
    /// Whether the device had no `clsact` before the programs were put before other filters.
    pub(super) made_clsact: bool,
}

impl Restored {
    /// Whether something was missing and everything is complete now.
    pub(crate) fn helped(&self) -> bool {
        self.lacked && self.left.is_none()
    }
}

/// A program at a hook of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HookProgram {
    /// The hook: ingress or egress of the device.
    pub(super) hook: TcHook,
    /// Number of the filter that runs the program.
    pub(super) number: u32,
    /// The class that the filter passes to the program (`tc_classid`).
    pub(super) class: u16,
    /// The program that the filter runs.
    pub(super) program: Program,
    /// The link that runs the program, or a different program in its place; `None`: the program runs by a
    /// filter in either mode.
    pub(super) link: Option<LinkPlace>,
}

impl DeviceHooks<'_> {
    /// Attaches the programs. Programs that already run there are replaced, each in one step. Returns whether
    /// the device had no `clsact` before and has one now.
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

    /// Fails if the programs cannot be attached in that mode, or would replace other programs' filters. On a
    /// device of the node that other programs use too, such as a representor, a different queueing discipline
    /// may have the handle of `clsact`, and another program's filter may have one of these numbers. In a
    /// datagram with other devices the kernel would report this only after it has attached some programs.
    ///
    /// # Errors
    /// There is such a conflict, or the discipline or the filters cannot be read.
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

    /// Attaches the programs of several devices, all in the namespace of the handle, as
    /// [`DeviceHooks::attach`] does; filters in one datagram. Returns the same result, or the error, for each
    /// device.
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
            // The iterator has one result for each device in this mode.
            AttachMode::Clsact => by_filters.next().unwrap_or(Ok(false)).map_err(HookError::from),
            AttachMode::Tcx => device.attach(*mode, programs, handle),
        };
        Ok(devices.iter().map(outcome).collect())
    }

    /// Returns how to attach the programs if `wanted` is the mode for all devices: by tcx if other programs
    /// run by tcx on the device, because tcx programs come before any filter.
    ///
    /// # Errors
    /// The kernel does not list the tcx programs.
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

    /// Returns the first program that does not judge every packet, if `wanted` is the mode for all devices:
    /// see [`DeviceHooks::missing`]. `known`: what the kernel's word suffices for; `None`: it is asked for
    /// everything.
    ///
    /// # Errors
    /// As [`DeviceHooks::missing`].
    pub(crate) fn lack(
        &self,
        wanted: AttachMode,
        programs: &Programs,
        known: Option<&WholeFilters>,
        handle: &mut Handle,
    ) -> Result<Option<Lack>, HookError> {
        // Where nothing runs by tcx, as on most devices, neither the pins of links nor other programs' need a look.
        if self.first && wanted == AttachMode::Clsact && self.is_without_tcx()? {
            let mut ask = || -> Result<Option<Lack>, HookError> {
                Ok(self.with_handle(handle, |handle| self.missing_filter(handle))?.flatten())
            };
            return match (known, self.programs.first()) {
                (Some(known), Some(first)) => known.lack((self.index, first.number), ask),
                _ => ask(),
            };
        }
        self.missing(self.present_mode(wanted, programs)?, programs, handle)
    }

    /// Makes all programs judge every packet again. Puts them before other programs' filters, as often as
    /// `rivals` allows, and does everything else by `attach`. A tcx link cannot be overtaken while it exists.
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
        let mut left = self.lack(wanted, programs, None, handle)?;
        let was_absent = matches!(left, Some(Lack::Absent(_)));
        let mut restored = Restored { lacked: left.is_some(), was_absent, ..Restored::default() };
        if let Some(Lack::BehindFilter(_)) = left {
            if !rivals.may_answer(self.index) {
                return Ok(Restored { left, ..restored });
            }
            restored.made_clsact = self.bring_to_front(programs, handle)?;
            left = self.lack(wanted, programs, None, handle)?;
        }
        if let Some(Lack::Absent(_) | Lack::BehindTcx(_)) = left {
            attach(handle)?;
            left = self.lack(wanted, programs, None, handle)?;
        }
        Ok(Restored { left, ..restored })
    }

    /// As [`DeviceHooks::mode`] for programs that run already: those that run by tcx stay there, even when
    /// other programs' tcx links are gone.
    fn present_mode(&self, wanted: AttachMode, programs: &Programs) -> Result<AttachMode, HookError> {
        if self.first && wanted == AttachMode::Clsact && self.unlinked(programs)?.is_none() {
            return Ok(AttachMode::Tcx);
        }
        self.mode(wanted)
    }

    /// Returns the first program that does not run, or does not run first although it has to. A program of an
    /// earlier object counts as running. If the pod is gone, no program counts as missing in filter mode.
    ///
    /// # Errors
    /// The filters, the links' pins or other programs' tcx programs cannot be read.
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

    /// Returns the first of these programs that no link runs.
    fn unlinked(&self, programs: &Programs) -> Result<Option<&'static str>, HookError> {
        for place in self.links() {
            if !programs.is_linked(place)? {
                return Ok(Some(place.program().name()));
            }
        }
        Ok(None)
    }

    /// Returns the first program that comes after another program's tcx program.
    fn behind_tcx(&self, mode: AttachMode) -> Result<Option<Lack>, HookError> {
        for HookProgram { hook, program, link, .. } in &self.programs {
            let Some(foreign) = self.first_of_others(*hook)? else { continue };
            // Only netattach's programs come before it, and those on this hook that are linked are counted
            // here.
            let linked = self.programs.iter().filter(|it| it.hook == *hook && it.link.is_some()).count();
            if mode == AttachMode::Clsact || foreign < linked {
                let program = link.filter(|_| mode == AttachMode::Tcx).map_or(*program, LinkPlace::program);
                return Ok(Some(Lack::BehindTcx(program.name())));
            }
        }
        Ok(None)
    }

    /// Whether no program at all runs by tcx on the hooks of the device, which is on the node: neither netattach's nor
    /// another's.
    fn is_without_tcx(&self) -> Result<bool, HookError> {
        for HookProgram { hook, .. } in &self.programs {
            if !self.by_tcx(*hook)?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The ids of the programs that run by tcx on a hook of the device, which is on the node, in their order.
    fn by_tcx(&self, hook: TcHook) -> Result<Vec<u32>, HookError> {
        sys::tcx_programs(self.index, hook).map_err(|source| HookError::Tcx { device: self.index, source })
    }

    /// The position of the first program that is not netattach's among the tcx programs on a hook of the
    /// device, which is on the node.
    fn first_of_others(&self, hook: TcHook) -> Result<Option<usize>, HookError> {
        let shown = |source| HookError::Tcx { device: self.index, source };
        for (position, id) in self.by_tcx(hook)?.into_iter().enumerate() {
            let name = sys::program_name(id).map_err(shown)?;
            if !name.as_deref().is_some_and(Program::is_one) {
                return Ok(Some(position));
            }
        }
        Ok(None)
    }

    /// Puts the programs before other programs' filters, by filters; at no time does a packet pass unjudged.
    ///
    /// Returns whether the device had no `clsact` before.
    ///
    /// # Errors
    /// The kernel refused. Some programs may be attached twice, which counts as being behind other filters.
    pub(crate) fn bring_to_front(&self, programs: &Programs, handle: &mut Handle) -> Result<bool, HookError> {
        let filters = self.filters(programs)?;
        let spare: Vec<_> = filters.iter().map(|it| Filter { handle: it.handle | SPARE, ..*it }).collect();
        let numbers =
            |filters: &[Filter<'_>]| filters.iter().map(|it| (it.hook, it.handle)).collect::<Vec<_>>();
        // The kernel inserts new filters before all others, and keeps the position of a filter that is
        // replaced.
        let made_clsact = handle.ensure_filters(self.index, &spare)?;
        handle.ensure_filters_absent(self.index, &numbers(&filters), false)?;
        handle.ensure_filters(self.index, &filters)?;
        handle.ensure_filters_absent(self.index, &numbers(&spare), false)?;
        Ok(made_clsact)
    }

    /// Detaches the programs, as far as they were attached in that mode; with `clsact`, deletes `clsact` too
    /// unless other programs have filters there. Other programs' filters with the same numbers stay.
    /// Idempotent; a device that is gone has no programs.
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
                // Filters that an agent left when it was killed while it moved the programs to the front.
                let spare = |program: &HookProgram| (program.hook, program.number | SPARE);
                let spares = self.programs.iter().filter(|_| self.first).map(spare);
                let numbers: Vec<_> = self.programs.iter().map(one).chain(spares).collect();
                let absent = |handle: &mut Handle| -> Result<(), HookError> {
                    let mut ours = Vec::new();
                    // Programs of both hooks may have the same number.
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

    /// Removes the links. Idempotent.
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
            // A spare at any position: moving the programs to the front was not finished.
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

    /// Runs `act` with a handle in the device's namespace; `None`: its pod is gone.
    fn with_handle<T>(
        &self,
        handle: &mut Handle,
        act: impl FnOnce(&mut Handle) -> Result<T, HookError>,
    ) -> Result<Option<T>, HookError> {
        let Some(pod) = self.pod else { return act(handle).map(Some) };
        pod.handle()?.map(|mut inside| act(&mut inside)).transpose()
    }
}
