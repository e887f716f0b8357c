//! `netattachctl doctor`: checks everything that netattach needs on a node, with or without an agent, and
//! prints remedies.
//!
//! It changes nothing. Each check has a result in any case: if it cannot be carried out, that is its
//! result.
//!
//! | module | what it checks |
//! |---|---|
//! | `agent` | whether the agent answers, what it lacks, its problems; its settings |
//! | `disk` | whether the agent's directories are writable |
//! | `machine` | privileges, kernel, the BPF file system and its pins |
//! | `runtime` | the order of CNI configurations, and the executables that they name |
//! | `records` | the journal, and leftovers of sandboxes without a record: namespaces, links |
//! | `pools` | leases of containers without a record, and pools that do not answer |
//! | `cluster` | the agent's rights in the cluster |

mod agent;
mod cluster;
mod disk;
mod machine;
mod pools;
mod records;
mod runtime;

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::output::Format;
use super::table::{self, Align};
use super::{Answer, CliError};
use crate::settings::Settings;

/// What to look at.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// Settings of the agent [default: those of the netattachd that runs, else the built-in ones]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// All is well.
    Ok,
    /// Something works less well than it could, or is left over.
    Warning,
    /// Something does not work.
    Failed,
    /// It could not be carried out, or does not apply.
    Skipped,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    /// Short name.
    pub(super) check: &'static str,
    /// The outcome.
    pub(super) state: State,
    /// The finding.
    pub(super) detail: String,
    /// The remedy; empty if there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) remedy: String,
}

impl Check {
    pub(super) fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, state: State::Ok, detail: detail.into(), remedy: String::new() }
    }

    pub(super) fn skipped(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, state: State::Skipped, detail: detail.into(), remedy: String::new() }
    }

    pub(super) fn warning(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Warning, detail: detail.into(), remedy: remedy.into() }
    }

    pub(super) fn failed(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Failed, detail: detail.into(), remedy: remedy.into() }
    }
}

impl Doctor {
    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let checks = checks(socket, self.config.as_deref());
        let failed = checks.iter().filter(|check| check.state == State::Failed).count();
        let outcome = if failed == 0 { Ok(()) } else { Err(CliError::Unwell(failed)) };
        Ok((format.show(&checks, |_| render(&checks))?, outcome))
    }
}

/// Returns all checks, in the order of their importance.
pub(super) fn checks(socket: &Path, config: Option<&Path>) -> Vec<Check> {
    let agent::Known { settings, check, is_apart } = agent::settings(config);
    let mut checks = vec![machine::privileges(), check];
    checks.extend(agent::checks(socket));
    checks.extend(machine::checks(&settings));
    let records = records::read(&settings);
    checks.push(disk::check(&settings, records.as_ref().map_or(&[][..], |found| found.pools.as_slice())));
    checks.extend(runtime::checks(&settings));
    checks.extend(records::checks(&settings, records));
    checks.push(cluster::check(&settings, is_apart));
    checks
}

/// Returns the settings on which the checks are based.
pub(super) fn settings(config: Option<&Path>) -> Settings {
    agent::settings(config).settings
}

fn render(checks: &[Check]) -> String {
    let word = |state| match state {
        State::Ok => "ok",
        State::Warning => "warning",
        State::Failed => "FAILED",
        State::Skipped => "skipped",
    };
    let text = |check: &Check| match check.remedy.as_str() {
        "" => check.detail.clone(),
        remedy => format!("{}; remedy: {remedy}", check.detail),
    };
    let rows: Vec<_> = checks
        .iter()
        .map(|check| [check.check.to_owned(), word(check.state).to_owned(), text(check)])
        .collect();
    table::render([("CHECK", Align::Left), ("STATE", Align::Left), ("DETAIL", Align::Prose)], &rows)
}

/// Where things are, for a message.
fn shown(settings: &Settings) -> String {
    format!("state in {}, pins at {}", settings.state_dir.display(), settings.bpffs.display())
}

#[cfg(test)]
mod tests {
    use super::super::tests::is_pinned;
    use super::*;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let failed =
            Check::failed("bpf file system", "/sys/fs/bpf is not mounted", "mount -t bpf bpf /sys/fs/bpf");
        is_pinned("doctor", &[Check::ok("kernel", "6.12.1"), failed]);
    }

    #[test]
    fn a_check_is_a_line_with_its_remedy() {
        let checks = [
            Check::ok("kernel", "6.12.1"),
            Check::failed("bpffs", "/sys/fs/bpf is not mounted", "mount -t bpf bpf /sys/fs/bpf"),
        ];
        assert_eq!(
            render(&checks),
            "\
CHECK   STATE   DETAIL
kernel  ok      6.12.1
bpffs   FAILED  /sys/fs/bpf is not mounted; remedy: mount -t bpf bpf /sys/fs/bpf
"
        );
    }

    /// A remedy with a nonexistent setting is worse for an operator than none.
    #[test]
    fn every_setting_that_a_check_names_is_one() {
        // Another test compares the first with the settings; the second has the keys of networks.
        const PAGES: [&str; 2] =
            [include_str!("../../../../docs/configuration.md"), include_str!("../../../../docs/plugins.md")];
        let sources = [
            include_str!("agent.rs"),
            include_str!("cluster.rs"),
            include_str!("disk.rs"),
            include_str!("machine.rs"),
            include_str!("pools.rs"),
            include_str!("records.rs"),
            include_str!("runtime.rs"),
        ];
        // Words such as `cniConf.dir`, which Rust has none of.
        let is_key = |word: &&str| {
            word.starts_with(|first: char| first.is_ascii_lowercase())
                && word.contains(|c: char| c.is_ascii_uppercase())
                && !word.contains('_')
        };
        let mut named = std::collections::BTreeSet::new();
        for source in sources {
            let (source, _) = source.split_once("#[cfg(test)]").unwrap_or((source, ""));
            let words = source.split(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '_');
            named.extend(words.map(|word| word.trim_matches('.')).filter(is_key));
        }
        assert!(named.contains("cniConf.dir") && named.contains("stateDir"), "{named:?}");
        named.retain(|key| !PAGES.iter().any(|page| page.contains(&format!("\n| `{key}` | "))));
        assert_eq!(named, std::collections::BTreeSet::new(), "keys that are in no page");
    }

    #[test]
    fn without_an_agent_every_part_answers_and_every_failure_has_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("netattachd.yaml");
        let text = format!(
            "source: {0}\nstateDir: {0}/state\nbpffs: {0}/bpf\ncniConfDir: {0}/conf\ncniConf: {{dir: {0}/net.d}}\ncniBinDirs: [{0}/bin]\n",
            dir.path().display()
        );
        std::fs::write(&config, text).unwrap();
        let checks = checks(&dir.path().join("agent.sock"), Some(&config));
        let names: Vec<_> = checks.iter().map(|check| check.check).collect();
        let expected = [
            "privileges",
            "settings",
            "agent",
            "kernel",
            "bpf file system",
            "pins",
            "disk",
            "CNI configuration",
            "CNI executables",
            "journal",
            "cluster access",
        ];
        assert_eq!(names, expected, "{checks:#?}");
        for check in &checks {
            let needs_remedy = matches!(check.state, State::Failed | State::Warning);
            assert_eq!(needs_remedy, !check.remedy.is_empty(), "{check:?}");
        }
        let state = |name: &str| checks.iter().find(|check| check.check == name).unwrap().state;
        assert_eq!(state("agent"), State::Failed);
        assert_eq!(state("settings"), State::Ok);
        assert_eq!(state("CNI configuration"), State::Failed);
        assert_eq!(state("journal"), State::Ok);
        assert_eq!(state("cluster access"), State::Skipped);
    }
}
