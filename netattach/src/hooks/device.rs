//! The programs on one device: one way to attach, look for and detach them, by filters or by links.

use std::collections::BTreeMap;

use super::{AttachMode, HookError, PodDevice};
use crate::bpf::{LinkPlace, Program, Programs};
use crate::netlink::{Filter, Handle};
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
    /// Whether a filter of others before one of ours counts as ours missing.
    pub(super) first: bool,
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
                    Some(pod) => within(&pod.namespace().ok_or(HookError::PodGone)?, link)??,
                }
                Ok(false)
            }
        }
    }

    /// Runs the programs of several devices, all in the namespace of the handle, as [`DeviceHooks::attach`] does: by filters in
    /// one datagram. Says the same of each, or how it failed.
    ///
    /// # Errors
    /// Nothing was attached, because of the device at this position.
    pub(crate) fn attach_all(
        devices: &[Self],
        mode: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<Vec<Result<bool, HookError>>, (usize, HookError)> {
        match mode {
            AttachMode::Clsact => {
                let mut filters = Vec::with_capacity(devices.len());
                for (at, device) in devices.iter().enumerate() {
                    filters.push((device.index, device.filters(programs).map_err(|error| (at, error))?));
                }
                let each: Vec<_> = filters.iter().map(|(index, filters)| (*index, &filters[..])).collect();
                let outcomes = handle.ensure_filters_on(&each).map_err(|error| (0, error.into()))?;
                Ok(outcomes.into_iter().map(|outcome| outcome.map_err(HookError::from)).collect())
            }
            AttachMode::Tcx => {
                Ok(devices.iter().map(|device| device.attach(mode, programs, handle)).collect())
            }
        }
    }

    /// The name of the first program that does not run. One of an earlier object counts as running; where the pod is gone none
    /// is missing by filters.
    ///
    /// # Errors
    /// The filters or the links' pins cannot be read.
    pub(crate) fn missing(
        &self,
        mode: AttachMode,
        programs: &Programs,
        handle: &mut Handle,
    ) -> Result<Option<&'static str>, HookError> {
        match mode {
            AttachMode::Clsact => {
                Ok(self.with_handle(handle, |handle| self.missing_filter(handle))?.flatten())
            }
            AttachMode::Tcx => {
                for place in self.links() {
                    if !programs.is_linked(place)? {
                        return Ok(Some(place.program().name()));
                    }
                }
                Ok(None)
            }
        }
    }

    /// Takes the programs off, as far as they were attached in that mode; with `clsact` that too, unless others have filters
    /// there. Idempotent; a device that is gone has none.
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
                let numbers: Vec<_> =
                    self.programs.iter().map(|program| (program.hook, program.number)).collect();
                let absent =
                    |handle: &mut Handle| Ok(handle.ensure_filters_absent(self.index, &numbers, clsact)?);
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

    fn missing_filter(&self, handle: &mut Handle) -> Result<Option<&'static str>, HookError> {
        let mut found = BTreeMap::new();
        for HookProgram { hook, number, program, .. } in &self.programs {
            if !found.contains_key(hook) {
                found.insert(*hook, handle.find_filters(self.index, *hook)?);
            }
            let is_it = |name: Option<&str>, handle| name == Some(program.name()) && handle == *number;
            let position = found[hook].iter().position(|it| is_it(it.name.as_deref(), it.handle));
            if position.is_none_or(|position| self.first && position > 0) {
                return Ok(Some(program.name()));
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
        match self.pod.map(PodDevice::namespace) {
            None => act(handle).map(Some),
            Some(Some(netns)) => act(&mut Handle::open_in(&netns)?).map(Some),
            Some(None) => Ok(None),
        }
    }
}
