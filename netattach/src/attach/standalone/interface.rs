//! The interface plugins: `loopback`, `veth`, `bridge`, `macvlan`, `ipvlan` and others. All but `loopback` and
//! `ipvlan` can only be the first plugin of a list.

use std::io::Write;
use std::path::PathBuf;

use super::kept::{KeptHome, Whose};
use super::{Memory, chained, left_devices};
use crate::attach::apply::{DelegateCall, apply};
use crate::attach::check::{check_delegates, compare};
use crate::attach::status_verb::{check_node, lease_error};
use crate::attach::undo::undo;
use crate::attach::{AttachError, Doing, Node, StepError, facts};
use crate::cni::{self, CniError, CniResult, Command, code, json};
use crate::error_chain::Chain;
use crate::firewall::senders;
use crate::ipam::{self, InUse};
use crate::journal::Record;
use crate::link::{Driver, Facts};
use crate::mac::Mac;
use crate::nat::without_agent::{self, Plugin};
use crate::netlink::{Handle, LinkState};
use crate::netns::{Netns, NetnsError, NetnsId};
use crate::plan::check::expected;
use crate::plan::resolve::{one, remains_of_one};
use crate::plan::{AttachmentPlan, Plan, Sandbox, result};
use crate::spec::OWN_GROUPS;
use crate::step::{Output, Outputs, Step};

pub(super) struct Interface<'a> {
    pub(super) driver: &'static dyn Driver,
    pub(super) request: &'a cni::Request,
    pub(super) node: &'a Node,
}

/// The sandbox's namespace, as far as it can be used.
enum Place {
    There(Netns),
    /// The request names no namespace, or the namespace is gone.
    Gone,
    /// The namespace is the one in which this process runs.
    Own(PathBuf),
}

impl Interface<'_> {
    pub(super) fn answer(&self, stderr: &mut impl Write) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => {
                let result = self.add(stderr)?;
                Ok(json::pretty(&result))
            }
            Command::Del => self.del().map(done),
            Command::Check => self.check().map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            // VERSION is answered before a plugin is chosen.
            Command::Version => Ok(String::new()),
        }
    }

    /// Plans the interface for ADD. Returns the plan, the sandbox's namespace, and the `prevResult` of the request.
    ///
    /// # Errors
    /// ADD has to refuse the request; nothing has been done.
    pub(super) fn plan(&self) -> Result<(Plan, Netns, Option<CniResult>), CniError> {
        let request = self.request;
        let previous = request.prev_result()?;
        let netns = match self.place()? {
            Place::There(netns) => netns,
            Place::Gone => return Err(gone(request).into()),
            Place::Own(path) => return Err(AttachError::HostNetns { path }.into()),
        };
        let sandbox = sandbox(request, netns.id());
        let attachment = one(&sandbox, self.driver, request, &self.facts()?)?;
        self.check_args(&attachment)?;
        if previous.is_some() && !self.is_loopback() && self.driver.lacks_alone().is_none() {
            let msg = format!(
                "key prevResult: {} makes an interface and can only be the first plugin of a list",
                self.driver.kind()
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        Ok((Plan { sandbox, attachments: vec![attachment], dynamic: None }, netns, previous))
    }

    fn is_loopback(&self) -> bool {
        self.driver.kind() == "loopback"
    }

    fn add(&self, stderr: &mut impl Write) -> Result<cni::Value, CniError> {
        let (plan, netns, previous) = self.plan()?;
        if self.keeps_home()
            && let Err(error) = left_devices::settle()
        {
            // The remaining device may be another one than the requested.
            let _ = writeln!(stderr, "{}: a device that was left: {}", self.driver.kind(), Chain(&error));
        }
        let mut progress = Memory { kept: self.kept(Some(&netns))?, ..Memory::default() };
        let carried_out =
            apply(self.node, &plan, &netns, &mut progress).map_err(CniError::from).and_then(|()| {
                let result = match previous {
                    Some(previous) if self.is_loopback() => previous,
                    _ => result::result(&plan.sandbox, &plan.attachments[0], progress.outputs.of(0))?,
                };
                result.to_value(self.request.version)
            });
        let roll_back = || {
            undo(self.node, &plan, Some(&netns), &progress)?;
            progress.forget();
            self.node.bridges.remove_made(&progress.outputs).map_err(|error| AttachError::Open(error.into()))
        };
        carried_out.map_err(|error| match roll_back() {
            Ok(()) => error,
            Err(left) => {
                // The runtime gets the error of the ADD; the DEL that follows tries the rollback again.
                let _ = writeln!(stderr, "{}: not rolled back: {}", self.driver.kind(), Chain(&left));
                error
            }
        })
    }

    /// Gathers the facts about the node that the driver needs.
    fn facts(&self) -> Result<Facts, AttachError> {
        facts::gather(&self.driver.wants(&self.request.config).into_iter().collect())
    }

    /// Whether ADD would accept the configuration.
    pub(super) fn is_supported(&self) -> bool {
        one(&sandbox(self.request, NOWHERE), self.driver, self.request, &Facts::default()).is_ok()
    }

    pub(super) fn del(&self) -> Result<(), CniError> {
        let request = self.request;
        let kept = self.kept(None)?;
        let stored = kept.as_ref().and_then(KeptHome::read);
        let place = match (self.place()?, stored.as_ref().and_then(|it| it.attachment.as_ref())) {
            // The device is not lost with the path, nor is it where a path leads that has been reused since.
            (place, Some(whose)) if leads_past(&place, whose)? => {
                let netns = left_devices::namespace_of(whose).map_err(chained::cannot)?;
                netns.map_or(Place::Gone, Place::There)
            }
            (place, _) => place,
        };
        let is_anothers = match &place {
            Place::There(netns) => self.has_anothers_device(netns)?,
            Place::Gone | Place::Own(_) => false,
        };
        let netns = match &place {
            Place::There(netns) if !is_anothers => Some(netns),
            Place::There(_) | Place::Gone | Place::Own(_) => None,
        };
        let sandbox = sandbox(request, netns.map_or(NOWHERE, Netns::id));
        let attachment = remains_of_one(&sandbox, self.driver, request);
        let outputs = match netns {
            Some(netns) => self.made_according_to_result((&sandbox, &attachment), netns)?,
            None => Outputs::default(),
        };
        let plan = Plan { sandbox, attachments: vec![attachment], dynamic: None };
        let home = stored.map(|it| it.home);
        let progress = Memory { kept, home, ..Memory::of_unknown(&plan, outputs) };
        undo(self.node, &plan, netns, &progress)?;
        // Otherwise a DEL with the right path may follow, or the device may come home later.
        if let Some(home) = &progress.home
            && !is_anothers
            && !matches!(place, Place::Own(_))
            && left_devices::is_settled(home, netns).map_err(chained::cannot)?
        {
            progress.forget();
        }
        match place {
            Place::Own(path) => Err(AttachError::HostNetns { path }.into()),
            Place::There(_) | Place::Gone => Ok(()),
        }
    }

    /// Whether a file keeps the former state of the device that the plugin takes. A record contains it too.
    fn keeps_home(&self) -> bool {
        self.driver.takes_device() && !self.driver.is_recorded()
    }

    /// Returns the file with the device's former state; `None`: there is no such file. `netns`: the namespace
    /// that the device is moved to.
    fn kept(&self, netns: Option<&Netns>) -> Result<Option<KeptHome>, CniError> {
        if !self.keeps_home() {
            return Ok(None);
        }
        let cookie = netns.map(Netns::cookie).transpose().map_err(AttachError::from)?.flatten();
        KeptHome::of(self.request, cookie).map(Some)
    }

    /// Whether the device's name in the pod belongs to a link that is marked as another container's: the path of a
    /// late DEL may lead to that container's namespace now. The Ethernet address does not identify the device,
    /// because `tuning` or the container may have changed it. A device that is left in the pod ends with the
    /// namespace, unless it is a card. A plugin with records marks whatever it takes: without a record, a device that
    /// is not marked is an agent's or another plugin's.
    fn has_anothers_device(&self, netns: &Netns) -> Result<bool, CniError> {
        if !self.driver.takes_device() {
            return Ok(false);
        }
        let mut pod = Handle::open_in(netns).map_err(AttachError::Open)?;
        let found = pod.find_told(&self.request.ifname).map_err(|error| chained::cannot(error.into()))?;
        Ok(found.is_some_and(|it| {
            chained::is_marked_anothers(self.request, &it).unwrap_or(self.driver.is_recorded())
        }))
    }

    /// Returns the link of `prevResult`, if the pod has it. Links that this plugin created are recognised by their
    /// group, see [`Sandbox::link_group`]; this function finds links that another implementation created before
    /// netattach replaced it, by their Ethernet address, or by an IP address: a plugin behind this one may have changed
    /// the former, and its DEL has restored it. A reused namespace may contain another container's link of that name,
    /// and all ipvlans and VLANs of a parent have its Ethernet address.
    fn made_according_to_result(
        &self,
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
        netns: &Netns,
    ) -> Result<Outputs, CniError> {
        let Some(previous) = self.request.prev_result().ok().flatten() else { return Ok(Outputs::default()) };
        let known = result::from_prev_result(attachment, &previous).ok();
        let Some(mut outputs) = known else { return Ok(Outputs::default()) };
        let mut pod = Handle::open_in(netns).map_err(AttachError::Open)?;
        let failed = |error| {
            AttachError::step(Doing::Detach, attachment, "read the kernel's state", StepError::Netlink(error))
        };
        let found = pod.find_told(&attachment.ifname).map_err(failed)?;
        let has_ip = match &found {
            Some(link) => {
                chained::has_ip_of(&previous, &attachment.ifname, link, &mut pod).map_err(failed)?
            }
            None => false,
        };
        let is_its = |link: &LinkState, mac: Option<Mac>| {
            let is_of_kind = attachment.link().is_none_or(|made| link.kind == made.shown_kind());
            let is_anothers = link.group & OWN_GROUPS != 0 && link.group != sandbox.link_group();
            mac.is_some() && (link.mac == mac || has_ip) && is_of_kind && !is_anothers
        };
        outputs.retain(|_, output| match output {
            Output::Link { pod, .. } => found.as_ref().is_some_and(|link| is_its(link, pod.mac)),
            _ => false,
        });
        Ok(outputs)
    }

    fn check(&self) -> Result<(), CniError> {
        let last = self.last_result()?;
        let netns =
            Netns::open(self.request.netns.as_deref().unwrap_or_default()).map_err(AttachError::from)?;
        let sandbox = sandbox(self.request, netns.id());
        let attachment = one(&sandbox, self.driver, self.request, &self.facts()?)?;
        let outputs = result::from_prev_result(&attachment, &last)?;
        self.compare((&sandbox, &attachment), (&outputs, &last), &netns)?;
        Ok(check_delegates(self.node, &sandbox, &attachment, None)?)
    }

    /// Like [`Interface::check`], for an attachment whose steps' outputs are recorded; `prevResult` has what the
    /// plugins after this one have changed.
    pub(super) fn check_recorded(&self, record: &Record, netns: &Netns) -> Result<(), CniError> {
        let last = self.last_result()?;
        let sandbox = &record.plan.sandbox;
        for attachment in &record.plan.attachments {
            self.compare((sandbox, attachment), (&record.outputs, &last), netns)?;
            let told = last.to_value(attachment.version)?;
            check_delegates(self.node, sandbox, attachment, Some(&told))?;
        }
        Ok(())
    }

    /// Returns `prevResult`, which CHECK needs.
    fn last_result(&self) -> Result<CniResult, CniError> {
        match self.request.prev_result()? {
            Some(last) => Ok(last),
            // All that it made is `lo`.
            None if self.is_loopback() => Ok(CniResult::default()),
            None => Err(CniError::new(code::INVALID_CONFIG, "key prevResult: missing, but CHECK needs it")),
        }
    }

    /// Compares the kernel with what the steps of an attachment and the plugins after them have left.
    ///
    /// # Errors
    /// [`AttachError::Differs`] with the first difference.
    fn compare(
        &self,
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
        (outputs, last): (&Outputs, &CniResult),
        netns: &Netns,
    ) -> Result<(), CniError> {
        let request = self.request;
        let want = expected(attachment, outputs.of(0), last, &sandbox.netns)?;
        // A recorded device may be driven by a process, and have no interface.
        if want.pod.is_none() && !want.loopback && want.device.is_none() {
            let msg = format!("key prevResult.interfaces: has no {} with a sandbox", request.ifname);
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
        let mut pod = Handle::open_in(netns).map_err(AttachError::Open)?;
        let difference = compare(self.node, sandbox, attachment, &want, &mut host, &mut pod, netns)
            .map_err(|error| AttachError::step(Doing::Check, attachment, "read the kernel's state", error))?;
        match difference {
            Some(what) => {
                let (ifname, network) = (request.ifname.clone(), request.name.clone());
                Err(AttachError::Differs { ifname, network, what }.into())
            }
            None => Ok(()),
        }
    }

    /// Removes what can be left over: addresses, their translation, restrictions of Ethernet source addresses, and
    /// devices of the node. Interfaces disappear with their namespaces.
    pub(super) fn gc(&self) -> Result<(), CniError> {
        let Some(valid) = &self.request.valid_attachments else { return Ok(()) };
        let in_use = InUse::from(valid.as_slice());
        let sandbox = sandbox(self.request, NOWHERE);
        let attachment = remains_of_one(&sandbox, self.driver, self.request);
        for step in &attachment.steps {
            if let Step::Lease(config) = step {
                let collected = config.pool().map(|pool| self.node.leases.collect(&pool, &in_use));
                collected.transpose().map_err(lease_error)?;
            }
            if let Step::Translate(_) = step {
                chained::collect(Plugin::Link, &self.request.name, valid)?;
            }
            if let Step::RestrictSender = step {
                senders::collect(&self.request.name, &chained::pairs(valid))
                    .map_err(|error| chained::cannot(error.into()))?;
            }
        }
        if self.keeps_home() {
            left_devices::collect(&self.request.name, &chained::pairs(valid))?;
        }
        self.forward(&sandbox, &attachment)
    }

    /// Whether an ADD could succeed: the configuration is valid, the node has what it depends on, and an address is
    /// free.
    fn status(&self) -> Result<(), CniError> {
        let sandbox = sandbox(self.request, NOWHERE);
        let mut request = self.request.clone();
        // The name does not matter: STATUS concerns no interface.
        request.ifname = "eth0".into();
        let attachment = match one(&sandbox, self.driver, &request, &Facts::default()) {
            Err(error) if self.is_completed_at_add(&error) => return Ok(()),
            planned => planned?,
        };
        check_node(self.node, &attachment)?;
        if attachment.steps.iter().any(|step| matches!(step, Step::Translate(_))) {
            without_agent::check_possible()
                .map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &StepError::from(error)))?;
        }
        if attachment.steps.contains(&Step::RestrictSender) {
            senders::check_possible().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))?;
        }
        self.forward(&sandbox, &attachment)
    }

    /// Whether ADD may complete the configuration, from the runtime or from a plugin before this one.
    fn is_completed_at_add(&self, error: &CniError) -> bool {
        let of_others = self.driver.lacks_alone().map(CniError::from);
        ipam::is_completed_at_add(&self.request.config) || of_others.as_ref() == Some(error)
    }

    /// Forwards the request to the IPAM plugin of the configuration, if there is one.
    fn forward(&self, sandbox: &Sandbox, attachment: &AttachmentPlan) -> Result<(), CniError> {
        for step in &attachment.steps {
            let Step::Delegate(delegate) = step else { continue };
            let call = DelegateCall { command: self.request.command, netns: None, attachment, delegate };
            call.run(self.node, sandbox, None).map_err(|error| CniError::from_chain(error.code(), &error))?;
        }
        Ok(())
    }

    fn place(&self) -> Result<Place, CniError> {
        let Some(path) = &self.request.netns else { return Ok(Place::Gone) };
        let netns = match Netns::open(path) {
            Err(error) if error.is_gone() && self.request.command == Command::Del => return Ok(Place::Gone),
            other => other.map_err(AttachError::from)?,
        };
        let own = Netns::current().map_err(AttachError::from)?;
        if netns.id() == own.id() && !self.request.netns_override {
            return Ok(Place::Own(path.into()));
        }
        Ok(Place::There(netns))
    }

    /// Refuses unknown keys in `CNI_ARGS`, unless a plugin that is executed may know them.
    fn check_args(&self, attachment: &AttachmentPlan) -> Result<(), CniError> {
        let mut known = vec!["MAC", "IP"];
        for step in &attachment.steps {
            match step {
                Step::Delegate(_) | Step::RaiseLoopback => return Ok(()),
                Step::Lease(config) => known.extend(config.kind().args()),
                _ => {}
            }
        }
        self.request.args.refuse_unknown(&known)
    }
}

/// Whether the request's path does not lead to the namespace that the device was moved to.
fn leads_past(place: &Place, whose: &Whose) -> Result<bool, CniError> {
    match place {
        Place::There(netns) => left_devices::is_elsewhere(whose, netns).map_err(chained::cannot),
        Place::Gone => Ok(true),
        // Refused whatever is stored: a DEL with the right path may follow.
        Place::Own(_) => Ok(false),
    }
}

/// An id that no namespace has.
const NOWHERE: NetnsId = NetnsId { device: 0, inode: 0 };

fn sandbox(request: &cni::Request, netns_id: NetnsId) -> Sandbox {
    Sandbox {
        container_id: request.container_id.clone(),
        ifname: request.ifname.clone(),
        netns: request.netns.clone().unwrap_or_default(),
        netns_id,
        cni_args: request.args.raw().to_owned(),
        cni_path: request.path.clone(),
        config_name: request.name.clone(),
        pod: None,
    }
}

fn gone(request: &cni::Request) -> AttachError {
    NetnsError::Gone { path: request.netns.clone().unwrap_or_default().into() }.into()
}
