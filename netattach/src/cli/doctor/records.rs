//! Checks the journal, and leftovers of sandboxes: records without a namespace, links without a record.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::super::missing::list;
use super::{Check, pools};
use crate::error_chain::Chain;
use crate::ipam::Pool;
use crate::journal::{JournalError, JournalKey, Loaded, Store};
use crate::settings::Settings;
use crate::step::Output;

/// The contents of the journal.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The containers that have a record.
    containers: BTreeSet<String>,
    /// Records whose DEL fails: the plan cannot be read, or the result of another plugin is lost.
    damaged: Vec<String>,
    /// Records with other damaged lines: DEL rolls back what the plan names.
    partly: Vec<String>,
    /// Records of unknown versions.
    foreign: Vec<String>,
    /// Records whose namespace is gone, by container.
    without_namespace: Vec<String>,
    /// The node's ends of their links.
    links: BTreeSet<String>,
    /// The pools from which leases were taken.
    pub(super) pools: Vec<Pool>,
}

pub(super) fn checks(settings: &Settings, found: Result<Found, JournalError>) -> Vec<Check> {
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let remedy = "see that stateDir is on a file system that can be read; run this as root";
            return vec![Check::failed("journal", Chain(&error).to_string(), remedy)];
        }
    };
    let mut checks = Vec::new();
    if !found.foreign.is_empty() {
        let detail = format!("records of other versions: {}", list(&found.foreign));
        let remedy = "run the agent that wrote them until their pods have ended, or remove each together with its container \
                      (docs/upgrade.md)";
        checks.push(Check::warning("journal", detail, remedy));
    }
    if !found.damaged.is_empty() {
        let detail = format!("records that cannot be read: {}", list(&found.damaged));
        let remedy = "put each file back as it was; else remove by hand what is left of the container (links, addresses), then \
                      the file, and have the DEL repeated: until then its pod cannot be deleted (docs/troubleshooting.md)";
        checks.push(Check::warning("journal", detail, remedy));
    }
    if !found.partly.is_empty() {
        let detail = format!("records with a damaged line behind their plan: {}", list(&found.partly));
        let remedy = "put each file back as it was, or delete its pod, which runs on meanwhile: DEL rolls back all that the \
                      plan names (docs/failure-and-restart.md)";
        checks.push(Check::warning("journal", detail, remedy));
    }
    if checks.is_empty() {
        let detail = format!("{} records in {}", found.containers.len(), journal(settings).display());
        checks.push(Check::ok("journal", detail));
    }
    if !found.without_namespace.is_empty() {
        let detail =
            format!("attached sandboxes whose namespace is gone: {}", list(&found.without_namespace));
        let remedy = "a running agent detaches them within minutes (collectAfterSeconds); start it";
        checks.push(Check::warning("namespaces", detail, remedy));
    }
    let strangers: Vec<String> =
        ends_on_the_node().into_iter().filter(|name| !found.links.contains(name)).collect();
    if !strangers.is_empty() {
        let unread = [&found.damaged, &found.partly, &found.foreign];
        checks.push(strange_links(&strangers, unread.iter().all(|records| records.is_empty())));
    }
    checks.extend(pools::checks(&found.pools, &found.containers));
    checks
}

/// Returns a warning about links that no record names. If records could not all be read, such a link may be that of a
/// live pod.
fn strange_links(names: &[String], all_are_read: bool) -> Check {
    let names = list(names);
    if all_are_read {
        let remedy =
            "if another agent with another stateDir runs here, nothing; else remove them with ip link delete";
        return Check::warning("links", format!("links of netattach's without a record: {names}"), remedy);
    }
    Check::warning(
        "links",
        format!("links of netattach's without a record, or of one that cannot be read: {names}"),
        "leave them until every record can be read: live pods may have them",
    )
}

fn journal(settings: &Settings) -> PathBuf {
    settings.state_dir.join("journal")
}

/// Reads the journal.
pub(super) fn read(settings: &Settings) -> Result<Found, JournalError> {
    let journal = journal(settings);
    let mut found = Found::default();
    if !journal.exists() {
        return Ok(found);
    }
    let store = Store::open(journal)?;
    found.pools = store.pools();
    for key in store.keys()? {
        found.containers.insert(key.container_id.clone());
        match store.peek(&key) {
            Ok(Loaded::Whole(record)) => {
                // The same condition as in DEL.
                let is_lost = !record.is_of_earlier_boot() && record.check_undoable().is_err();
                match record.check_whole() {
                    Ok(()) => {}
                    Err(error) if is_lost => found.damaged.push(damaged(&key, &error)),
                    Err(_) => {
                        found.partly.push(format!("{} ({})", key.container_id, record.path().display()));
                    }
                }
                let sandbox = &record.plan.sandbox;
                if !sandbox.netns.is_empty() && !Path::new(&sandbox.netns).exists() {
                    let pod = sandbox.pod.as_ref().map(|pod| format!(" (pod {pod})")).unwrap_or_default();
                    found.without_namespace.push(format!("{}{pod}", key.container_id));
                }
                let outputs = record.outputs.values();
                found.links.extend(outputs.filter_map(|output| match output {
                    Output::Link { host: Some(host), .. } => Some(host.name.clone()),
                    _ => None,
                }));
            }
            Ok(Loaded::Torn { .. } | Loaded::Absent) => {}
            Err(JournalError::Version { path, version }) => {
                found.foreign.push(format!("{} (version {version})", path.display()));
            }
            Err(error) => found.damaged.push(damaged(&key, &error)),
        }
    }
    Ok(found)
}

fn damaged(key: &JournalKey, error: &JournalError) -> String {
    format!("{} ({})", key.container_id, Chain(error))
}

/// Returns the links of this namespace whose names have the agent's form: `na` and thirteen hexadecimal digits.
fn ends_on_the_node() -> Vec<String> {
    let is_ours = |name: &String| {
        name.len() == 15
            && name.strip_prefix("na").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let links = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<String> =
        links.map(|link| link.file_name().to_string_lossy().into_owned()).filter(is_ours).collect();
    names.sort();
    names
}
