//! The native plugins as plain CNI executables: one call, no agent, no dataplane, and but for VFs no record.
//!
//! ADD plans with the same drivers as the agent, carries out the plan with its progress in memory, and rolls it back
//! when a step fails. DEL derives from the configuration what an ADD may have left, and rolls that back. CHECK turns
//! `prevResult` back into the outputs of the steps and compares as the agent does. The only state kept between calls
//! is the former state of a device that is moved into a pod (`kept`); with it GC gives back a device whose DEL never
//! came (`left_devices`). `sriov` keeps records as the agent does (`recorded`).
//!
//! `interface` implements the interface plugins; `tuning`, `sbr`, `vrf`, `portmap`, `bandwidth` and `firewall` the
//! chained ones (`chained` contains what they share); `ipam` the IPAM plugins. `install` links the plugins' names in
//! a directory, `copy` copies executables to a node, `conflist` writes the configuration for a runtime.

mod bandwidth;
mod chained;
mod conflist;
pub mod copy;
mod firewall;
pub mod install;
mod interface;
mod ipam;
mod kept;
mod left_devices;
mod portmap;
mod recorded;
mod sbr;
mod tuning;
mod vrf;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::time::Duration;

use netattach_shim::shim::{self, ShimError};

use self::kept::KeptHome;
use super::{Bridges, Devices, Forwarding, HostAccesses, Node, Occupied, Progress};
use crate::cni::{self, CniError, Command, Request, Version, code, json};
use crate::delegate::{self, Caller, Delegate, ResultCache};
use crate::ipam::{Kind, Leases};
use crate::journal::JournalError;
use crate::link::{self, Driver};
use crate::plan::Plan;
use crate::step::{Home, Output, Outputs, StepRef};

/// How long the IPAM plugin of a configuration may take.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the types that netattach implements.
pub fn built_in() -> impl Iterator<Item = &'static str> {
    link::kinds().chain(link::CHAINED).chain(Kind::ALL.map(Kind::name))
}

/// Returns the names under which the plugins are executed: those that need no agent.
pub fn names() -> impl Iterator<Item = &'static str> {
    let addresses = Kind::ALL.into_iter().filter(|kind| kind.is_plain()).map(Kind::name);
    link::kinds().chain(link::CHAINED).chain(addresses)
}

/// Whether a program of others with that name keeps state of pods that it alone can read: it is not replaced.
fn has_state_elsewhere(name: &str) -> bool {
    link::driver(name).is_some_and(Driver::is_recorded)
}

/// Whether there is a plugin of that name.
pub fn is_plugin(name: &str) -> bool {
    names().any(|known| known == name)
}

/// Whether calls by that name are answered: includes plugins that need an agent, which are refused.
pub fn is_answered(name: &str) -> bool {
    built_in().any(|known| known == name)
}

/// Runs one call as the plugin `name` and returns the exit code. `environment` is that of the process.
pub fn run(
    name: &str,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    stdin: impl Read,
    stdout: &mut impl Write,
    stderr: &mut impl Write,
) -> u8 {
    let mut version = Version::LATEST;
    let answer = variables(environment).and_then(|env| match env.get("CNI_COMMAND").map(String::as_str) {
        None | Some("") => Ok(None),
        Some(verb) => {
            // VERSION may come with a stdin that the caller never closes.
            let input = if verb == Command::Version.as_str() {
                Vec::new()
            } else {
                shim::bounded_stdin(stdin).map_err(refused)?
            };
            version = cni::request::error_version(&input);
            answer(name, &Request::parse(&env, &input)?, stderr).map(Some)
        }
    });
    let (text, exit) = match answer {
        Ok(Some(text)) => (text, 0),
        Ok(None) => {
            let about = cni::request::about(&format!("{name} of netattach {}", env!("CARGO_PKG_VERSION")));
            // The message is for a person. If it cannot be written, there is no other place to report that.
            let _ = writeln!(stderr, "{about}");
            return 0;
        }
        Err(error) => (error.to_json(version), 1),
    };
    let ended = if text.is_empty() { text } else { text + "\n" };
    match stdout.write_all(ended.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => exit,
        Err(error) => {
            let _ = writeln!(stderr, "{name}: write stdout: {error}");
            1
        }
    }
}

fn answer(name: &str, request: &Request, stderr: &mut impl Write) -> Result<String, CniError> {
    if request.command == Command::Version {
        return Ok(json::pretty(&cni::request::version_reply()));
    }
    if let Some(refused) = &request.tolerated {
        // ADD refuses the same configuration, so there is nothing to roll back.
        return Err(refused.clone());
    }
    let node = node(request, link::driver(name));
    match (link::driver(name), Kind::named(name)) {
        (Some(driver), _) if driver.is_recorded() => {
            recorded::Recorded { driver, request }.answer(node, stderr)
        }
        (Some(driver), _) => interface::Interface { driver, request, node: &node }.answer(stderr),
        (None, Some(kind)) => ipam::Addresses { kind, request, leases: node.leases }.answer(),
        (None, None) if name == link::tuning::KIND => tuning::Tuning { request }.answer(),
        (None, None) if name == link::sbr::KIND => sbr::Sbr { request }.answer(),
        (None, None) if name == link::vrf::KIND => vrf::VrfPlugin { request }.answer(),
        (None, None) if name == link::portmap::KIND => portmap::Portmap { request }.answer(),
        (None, None) if name == link::bandwidth::KIND => bandwidth::Bandwidth { request }.answer(),
        (None, None) if name == link::firewall::KIND => firewall::FirewallPlugin { request }.answer(),
        (None, None) => {
            Err(CniError::new(code::INTERNAL, format!("netattach-cni has no plugin named {name}")))
        }
    }
}

/// The node as one call of a plugin sees it. `driver`: that of the plugin, if it makes interfaces.
fn node(request: &Request, driver: Option<&dyn Driver>) -> Node {
    let records = driver.is_some_and(Driver::is_recorded);
    Node {
        leases: Leases::default(),
        delegate: Delegate {
            search: request.path.clone(),
            timeout: PLUGIN_TIMEOUT,
            caller: Caller::OneCall,
            root: None,
            watcher: None,
        },
        // The runtime's own cache directory.
        cache: ResultCache::new(delegate::DEFAULT_DIRECTORY),
        bridges: Bridges::default(),
        occupied: Occupied::default(),
        host_accesses: HostAccesses::default(),
        devices: if records { Devices::beside_an_agent() } else { Devices::default() },
        records,
        nat: None,
        firewall: None,
        enforcer: None,
        links: None,
        forwarding: Forwarding::default(),
        announces_late: false,
        departures: None,
    }
}

/// Runs DEL of the native plugin of that type, on behalf of another meta plugin that ran an ADD. `None` if there is
/// no such plugin, if it would have refused the configuration, or if it would have a record: then another
/// implementation, or the plugin's executable, made the attachment, and only that one knows all of it.
pub(super) fn del(plugin: &str, request: &Request, node: &Node) -> Option<Result<(), CniError>> {
    let interface = interface::Interface { driver: link::driver(plugin)?, request, node };
    let may_have_made_it = !interface.driver.is_recorded() && interface.is_supported();
    may_have_made_it.then(|| {
        interface.del()?;
        // The agent uses a table of its own for translation.
        chained::forget_translation(request)
    })
}

fn variables(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<BTreeMap<String, String>, CniError> {
    let mut variables = BTreeMap::new();
    for (name, value) in environment {
        let Ok(name) = name.into_string() else { continue };
        if let Some(value) = shim::cni_variable(&name, value).map_err(refused)? {
            variables.insert(name, value);
        }
    }
    Ok(variables)
}

/// Returns the error for a call that cannot be read, the same in both executables.
fn refused(error: ShimError) -> CniError {
    CniError::from_chain(error.code(""), &error)
}

/// Progress that ends with the process. Effects that outlive the process are found by name: see [`super::undo`].
#[derive(Debug, Default)]
struct Memory {
    begun: BTreeSet<StepRef>,
    outputs: Outputs,
    /// The file for a device's former state, for a plugin that takes one.
    kept: Option<KeptHome>,
    /// The content of that file, written by this process or the one that carried out the ADD.
    home: Option<Home>,
}

impl Memory {
    /// Assumes that any step of `plan` may have begun; `outputs` are the known outputs.
    fn of_unknown(plan: &Plan, outputs: Outputs) -> Self {
        Self { begun: plan.steps().map(|(at, _, _)| at).collect(), outputs, ..Self::default() }
    }

    /// Removes the stored state of a device that has been given back.
    fn forget(&self) {
        if let (Some(kept), Some(_)) = (&self.kept, &self.home) {
            kept.remove();
        }
    }
}

impl Progress for Memory {
    fn begin(&mut self, steps: &[StepRef]) -> Result<(), JournalError> {
        self.begun.extend(steps);
        Ok(())
    }

    fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError> {
        if let (Output::Claimed(claim), Some(kept)) = (&output, &self.kept)
            && let Some(home) = &claim.home
        {
            kept.write(home)?;
            self.home = Some(home.clone());
        }
        self.outputs.insert(step, output);
        Ok(())
    }

    fn wait_durable(&mut self) -> Result<(), JournalError> {
        Ok(())
    }

    fn has_begun(&self, step: StepRef) -> bool {
        self.begun.contains(&step)
    }

    fn note_namespace(&mut self, _: u64) -> Result<(), JournalError> {
        Ok(())
    }

    /// The request names the namespace, which is therefore known.
    fn netns_cookie(&self) -> Option<u64> {
        Some(0)
    }

    fn outputs(&self) -> &Outputs {
        &self.outputs
    }

    fn home(&self) -> Option<&Home> {
        self.home.as_ref()
    }
}

#[cfg(test)]
mod tests;
