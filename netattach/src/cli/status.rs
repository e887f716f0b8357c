//! `netattachctl status`: the agent's readiness.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;

use super::output::Format;
use super::policy::problems;
use super::table::{self, Align::Left, Align::Prose, Align::Right};
use super::{Answer, CliError, Exit, ask, other, time};
use crate::rpc::message::{PolicyChange, Request, Response, Status};

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(250);

/// Whether to wait, and for what.
#[derive(Debug, Args)]
pub(super) struct Wait {
    /// Wait until the agent answers and is ready
    #[arg(long)]
    wait: bool,
    /// Wait for this condition only, as status names it: journal, "default network"; several with commas
    #[arg(long = "for", value_name = "CONDITION", requires = "wait", value_delimiter = ',')]
    conditions: Vec<String>,
    /// How long to wait; on timeout exit code 1 if the agent is not ready, 4 if no agent answers
    #[arg(long, value_name = "DURATION", requires = "wait", default_value = "60s", value_parser = time::duration)]
    timeout: Duration,
}

impl Wait {
    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let is_last = !self.wait || Instant::now() >= deadline;
            match ask(socket, &Request::Status) {
                Ok(Response::Status(report)) => {
                    let readiness = self.readiness(&report)?;
                    if readiness.is_ok() || is_last {
                        return Ok((format.show(&report, |_| render(&report))?, readiness));
                    }
                }
                Ok(_) => return other(&Request::Status),
                // One that starts is not there yet; one that hangs may answer the next time.
                Err(error) if is_last || error.exit() != Exit::NoAgent => return Err(error),
                Err(_) => {}
            }
            std::thread::sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    /// The unmet conditions among those that are waited for.
    ///
    /// # Errors
    /// There is no such condition.
    fn readiness(&self, status: &Status) -> Result<Result<(), CliError>, CliError> {
        let exists = |name: &&String| status.ready.iter().any(|it| it.condition == **name);
        if let Some(unknown) = self.conditions.iter().find(|name| !exists(name)) {
            let known: Vec<&str> = status.ready.iter().map(|it| it.condition.as_str()).collect();
            return Err(CliError::NotFound(format!(
                "there is no condition {unknown:?}; there are {}",
                known.join(", ")
            )));
        }
        if self.conditions.is_empty() {
            return Ok(readiness(status));
        }
        let unmet = status.ready.iter().filter(|it| !it.met && self.conditions.contains(&it.condition));
        let unmet: Vec<String> = unmet.map(|it| it.condition.clone()).collect();
        Ok(if unmet.is_empty() { Ok(()) } else { Err(CliError::NotReady(unmet)) })
    }
}

/// A summary of the agent in a few lines, then unmet conditions, unreadable objects and kernel features.
fn render(status: &Status) -> String {
    let ready = if readiness(status).is_ok() { "ready" } else { "not ready" };
    let mut text = format!(
        "netattachd {}: {ready}, {} attachment{}, {} MiB resident\nkernel {}, programs attached by {}\n",
        status.version,
        status.attachments,
        if status.attachments == 1 { "" } else { "s" },
        mebibytes(status.memory_bytes),
        status.kernel.release,
        attached_by(status)
    );
    if status.programs_put_back > 0 {
        text.push_str(&format!(
            "programs put back on devices after another program removed them: {}\n",
            status.programs_put_back
        ));
    }
    if status.collected > 0 {
        text.push_str(&format!("sandboxes detached that no runtime asked for: {}\n", status.collected));
    }
    if let Some(change) = &status.policy_change {
        text.push_str(&last_change(change));
    }
    let conditions: Vec<_> =
        status.ready.iter().map(|r| [r.condition.clone(), yes_no(r.met), r.detail.clone()]).collect();
    let features: Vec<_> = status
        .kernel
        .features
        .iter()
        .map(|f| [f.name.clone(), yes_no(f.present), f.detail.clone()])
        .collect();
    let fast_path: Vec<_> = status
        .fast_path
        .iter()
        .map(|row| [row.standing.state.clone(), row.attachments.to_string(), row.standing.detail.clone()])
        .collect();
    let uplinks: Vec<_> = status
        .uplinks
        .iter()
        .map(|row| {
            let crate::rpc::message::Uplink { device, leads_to, standing, xdp } = row;
            [device, leads_to, &standing.state, xdp, &standing.detail].map(String::clone)
        })
        .collect();
    let flows: Vec<_> = status
        .flows
        .iter()
        .map(|f| {
            // The kernel evicts flows before the last entry of the map is used.
            let state =
                if f.entries * 10 >= f.capacity * 9 { "full: new flows may be refused" } else { "ok" };
            [f.family.clone(), f.entries.to_string(), f.capacity.to_string(), state.to_owned()]
        })
        .collect();
    let flows_header = [("FLOWS", Left), ("ENTRIES", Right), ("CAPACITY", Right), ("STATE", Left)];
    let sections = [
        (!conditions.is_empty())
            .then(|| table::render([("CONDITION", Left), ("MET", Left), ("DETAIL", Prose)], &conditions)),
        (!fast_path.is_empty()).then(|| {
            let columns = [("FAST-PATH", Left), ("ATTACHMENTS", Right), ("DETAIL", Prose)];
            format!("fastPath: {}\n{}", status.fast_path_mode, table::render(columns, &fast_path))
        }),
        (!uplinks.is_empty()).then(|| {
            let columns =
                [("UPLINK", Left), ("LEADS-TO", Left), ("FAST-PATH", Left), ("XDP", Left), ("DETAIL", Prose)];
            table::render(columns, &uplinks)
        }),
        (!status.troubles.is_empty()).then(|| problems(&status.troubles)),
        (!status.source.is_empty()).then(|| problems(&status.source)),
        (!flows.is_empty()).then(|| table::render(flows_header, &flows)),
        (!features.is_empty())
            .then(|| table::render([("FEATURE", Left), ("PRESENT", Left), ("DETAIL", Prose)], &features)),
    ];
    for section in sections.into_iter().flatten() {
        text.push('\n');
        text.push_str(&section);
    }
    text
}

/// The modes in which programs are attached, and where.
fn attached_by(status: &Status) -> String {
    let Status { attach_mode, attach_mode_others, .. } = status;
    if attach_mode == attach_mode_others || attach_mode_others.is_empty() {
        return attach_mode.clone();
    }
    format!("{attach_mode}; to uplinks and in pods by {attach_mode_others}")
}

fn last_change(change: &PolicyChange) -> String {
    let ms = |us: u64| format!("{:.1}", us as f64 / 1000.0);
    format!(
        "last change of policies: {} new, {} attachments; read in {} ms, compiled in {}, written in {}, switched in {}\n",
        change.policies,
        change.attachments,
        ms(change.read_us),
        ms(change.compile_us),
        ms(change.write_us),
        ms(change.switch_us)
    )
}

/// Returns an error that names the unmet conditions.
fn readiness(status: &Status) -> Result<(), CliError> {
    let unmet: Vec<_> = status.ready.iter().filter(|r| !r.met).map(|r| r.condition.clone()).collect();
    if unmet.is_empty() { Ok(()) } else { Err(CliError::NotReady(unmet)) }
}

fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

/// Mebibytes with one decimal.
fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::{
        Condition, FastPath, FastPathCount, Feature, FlowTableUse, Kernel, Readiness, Uplink,
    };

    fn status(journal: bool) -> Status {
        let readiness = |condition: &str, met, detail: &str| Readiness {
            condition: condition.to_owned(),
            met,
            detail: detail.to_owned(),
        };
        let feature = |name: &str, present, detail: &str| Feature {
            name: name.to_owned(),
            present,
            detail: detail.to_owned(),
        };
        Status {
            version: "0.1.0".to_owned(),
            ready: vec![readiness("source", true, ""), readiness("journal", journal, "2 sandboxes to undo")],
            source: vec![Condition {
                object: "/etc/netattach/pods/a.yaml".to_owned(),
                problem: "no kind".to_owned(),
            }],
            troubles: vec![Condition {
                object: "network shop/db".to_owned(),
                problem: "no address is available".to_owned(),
            }],
            kernel: Kernel {
                release: "5.15.0".to_owned(),
                features: vec![
                    feature("tcx", false, "clsact is used instead; since 6.6"),
                    feature("btf", true, ""),
                ],
            },
            attach_mode: "clsact".to_owned(),
            attach_mode_others: "tcx".to_owned(),
            programs_put_back: 2,
            collected: 3,
            memory_bytes: 13_002_342,
            attachments: 3,
            fast_path_mode: "auto".to_owned(),
            fast_path: vec![FastPathCount {
                standing: FastPath { state: "plugin".to_owned(), detail: "by the stack".to_owned() },
                attachments: 3,
            }],
            uplinks: vec![Uplink {
                device: "eth1".to_owned(),
                leads_to: "bridge".to_owned(),
                standing: FastPath { state: "programs".to_owned(), detail: "others look".to_owned() },
                xdp: "native".to_owned(),
            }],
            flows: [("IPv4", 100), ("IPv6", 900)]
                .map(|(family, entries)| FlowTableUse { family: family.to_owned(), entries, capacity: 1000 })
                .into(),
            policy_change: Some(PolicyChange {
                read_us: 1_250,
                compile_us: 700,
                write_us: 90,
                switch_us: 4,
                policies: 1,
                attachments: 2,
            }),
        }
    }

    #[test]
    fn everything_is_shown_in_sections() {
        assert_eq!(
            render(&status(false)),
            "\
netattachd 0.1.0: not ready, 3 attachments, 12.4 MiB resident
kernel 5.15.0, programs attached by clsact; to uplinks and in pods by tcx
programs put back on devices after another program removed them: 2
sandboxes detached that no runtime asked for: 3
last change of policies: 1 new, 2 attachments; read in 1.2 ms, compiled in 0.7, written in 0.1, switched in 0.0

CONDITION  MET  DETAIL
source     yes
journal    no   2 sandboxes to undo

fastPath: auto
FAST-PATH  ATTACHMENTS  DETAIL
plugin               3  by the stack

UPLINK  LEADS-TO  FAST-PATH  XDP     DETAIL
eth1    bridge    programs   native  others look

OBJECT           PROBLEM
network shop/db  no address is available

OBJECT                      PROBLEM
/etc/netattach/pods/a.yaml  no kind

FLOWS  ENTRIES  CAPACITY  STATE
IPv4       100      1000  ok
IPv6       900      1000  full: new flows may be refused

FEATURE  PRESENT  DETAIL
tcx      no       clsact is used instead; since 6.6
btf      yes
"
        );
    }

    #[test]
    fn conditions_are_waited_for_by_name() {
        let wait = |conditions: &[&str]| Wait {
            wait: true,
            conditions: conditions.iter().map(|it| (*it).to_owned()).collect(),
            timeout: Duration::ZERO,
        };
        let said = |wait: Wait, journal| match wait.readiness(&status(journal)) {
            Ok(readiness) => readiness.map_err(|error| (error.exit(), error.to_string())),
            Err(error) => Err((error.exit(), error.to_string())),
        };
        assert_eq!(said(wait(&["source"]), false), Ok(()));
        assert_eq!(said(wait(&[]), true), Ok(()));
        let not_ready = Err((Exit::Failed, "the agent is not ready: journal".to_owned()));
        assert_eq!(said(wait(&["source", "journal"]), false), not_ready);
        assert_eq!(said(wait(&[]), false), not_ready);
        let unknown = "there is no condition \"nope\"; there are source, journal".to_owned();
        assert_eq!(said(wait(&["nope"]), true), Err((Exit::NotFound, unknown)));
    }

    #[test]
    fn unmet_conditions_make_the_command_fail_by_name() {
        assert!(readiness(&status(true)).is_ok());
        assert_eq!(readiness(&status(false)).unwrap_err().to_string(), "the agent is not ready: journal");
    }
}
