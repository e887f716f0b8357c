//! `netattachctl flows`: records of new flows, drops and ended flows. `choice` selects those that are shown.

mod choice;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::filter::{Chosen, Filter, line_name};
use super::output::Format;
use super::{CliError, filter, or_dash, other, time, visible};
use crate::objects::ObjectName;
use crate::rpc::message::{AttachmentName, EndedFlow, FlowRecord, FlowsCall, FlowsReport, Request, Response};
use choice::Choice;

/// The output when there are no records.
const NOTHING: &str = "No records. Drops are recorded, and flows of attachments that a policy isolates; netattachctl stats \
                       counts other traffic.";

/// Interval between requests to the agent.
const PAUSE: Duration = Duration::from_millis(200);

/// Which records to show.
#[derive(Debug, Default, Args)]
pub(super) struct Flows {
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    choice: Choice,
    /// Keep showing new records until interrupted
    #[arg(long, short)]
    follow: bool,
}

/// The last known counts of records that were not shown.
#[derive(Debug, Default)]
struct Silence {
    /// Withheld and lost records, by the attachment's number.
    of: BTreeMap<Option<u32>, (u64, u64)>,
    ends: u64,
}

/// Records that were not shown since the last answer.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Missing {
    #[serde(flatten)]
    name: AttachmentName,
    withheld: u64,
    lost: u64,
}

impl Flows {
    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Whether new records are shown until the command is interrupted.
    pub(super) fn follows(&self) -> bool {
        self.follow
    }

    /// Writes the agent's records, and with `--follow` continues with new ones: one line, or one value, for each record.
    pub(super) fn run(&self, socket: &Path, format: Format, out: &mut impl Write) -> Result<(), CliError> {
        self.choice.check()?;
        let mut chosen = self.filter.choose(socket)?;
        let mut from = None;
        let mut silence = Silence::default();
        loop {
            let report = ask(socket, from)?;
            let is_first = from.is_none();
            if !is_first && !report.records.is_empty() && self.filter.selector.is_some() {
                // Pods that have been created meanwhile may have the labels.
                chosen = self.filter.choose(socket)?;
            }
            self.write_unshown(&mut silence, &report, is_first, &chosen, format, out)?;
            let now = time::now_ms();
            let matching: Vec<_> =
                report.records.iter().filter(|record| self.choice.shows(record, &chosen, now)).collect();
            let skipped = if is_first { self.choice.skipped(matching.len()) } else { 0 };
            for record in &matching[skipped..] {
                let text = match format {
                    Format::Name => visible::inline(&line_name(&record.name)),
                    _ => format.element(record)?.unwrap_or_else(|| visible::inline(&line(record))),
                };
                writeln!(out, "{text}")?;
            }
            if is_first && matching.is_empty() {
                self.explain_nothing(socket, &chosen, format, out)?;
            }
            out.flush()?;
            if !self.follow {
                return Ok(());
            }
            if report.records.is_empty() {
                std::thread::sleep(PAUSE);
            }
            from = Some(report.next);
        }
    }

    /// Reports the records that are missing between this report and the one before.
    fn write_unshown(
        &self,
        silence: &mut Silence,
        report: &FlowsReport,
        is_first: bool,
        chosen: &Chosen,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), CliError> {
        let mut note = |data: serde_json::Value, text: String| -> Result<(), CliError> {
            // `-o name` prints only names.
            if format != Format::Name {
                writeln!(out, "{}", format.element(&data)?.unwrap_or_else(|| visible::inline(&text)))?;
            }
            Ok(())
        };
        if report.missed > 0 {
            let text = format!("{} records came too fast and are not shown", report.missed);
            note(serde_json::json!({"missed": report.missed}), text)?;
        }
        let (missing, ends) = silence.hear(report);
        // Records that were not shown before following started are in the counters of `stats`.
        if is_first {
            return Ok(());
        }
        for missing in missing.iter().filter(|missing| chosen.matches(&missing.name)) {
            note(serde_json::to_value(missing)?, missing_line(missing))?;
        }
        if ends > 0 {
            let text = format!("{ends} ended flows came too fast and are not shown");
            note(serde_json::json!({"untold_ends": ends}), text)?;
        }
        Ok(())
    }

    /// Explains why no record is shown: the filter matches no attachment, which with `--follow` may still appear, or
    /// nothing happened.
    fn explain_nothing(
        &self,
        socket: &Path,
        chosen: &Chosen,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), CliError> {
        let missing = if self.filter.is_set() {
            let rows = filter::attachments(socket)?;
            chosen.missing(rows.iter().map(|row| &row.name))
        } else {
            None
        };
        match missing {
            Some(missing) if !self.follow => Err(CliError::NotFound(missing)),
            // Standard output is for records only.
            Some(missing) => {
                // If standard error fails, there is no other place to report it.
                let missing = visible::inline(&missing);
                let _ = writeln!(io::stderr(), "netattachctl: {missing}; waiting for an attachment");
                Ok(())
            }
            None if format.is_data() || format == Format::Name || self.follow => Ok(()),
            None => Ok(writeln!(out, "{NOTHING}")?),
        }
    }
}

fn ask(socket: &Path, from: Option<u64>) -> Result<FlowsReport, CliError> {
    let request = Request::Flows(FlowsCall { from });
    match super::ask(socket, &request)? {
        Response::Flows(report) => Ok(report),
        _ => other(&request),
    }
}

impl Silence {
    /// Returns the records that were not shown since the last report, and likewise the number of ended flows.
    fn hear(&mut self, report: &FlowsReport) -> (Vec<Missing>, u64) {
        let mut heard = Self { ends: report.untold_ends, ..Self::default() };
        let mut missing = Vec::new();
        for untold in &report.untold {
            let id = untold.name.id;
            let (withheld, lost) = self.of.get(&id).copied().unwrap_or_default();
            heard.of.insert(id, (untold.withheld, untold.lost));
            // If the number now belongs to another attachment, its counters start at zero.
            let (withheld, lost) =
                (untold.withheld.saturating_sub(withheld), untold.lost.saturating_sub(lost));
            if withheld + lost > 0 {
                missing.push(Missing { name: untold.name.clone(), withheld, lost });
            }
        }
        let ends = heard.ends.saturating_sub(self.ends);
        *self = heard;
        (missing, ends)
    }
}

fn missing_line(missing: &Missing) -> String {
    let Missing { name, withheld, lost } = missing;
    format!(
        "{} {}: {withheld} records beyond its share and {lost} that came too fast are not shown",
        or_dash(name.pod.as_ref()),
        name.ifname
    )
}

/// Formats a record:
/// `2026-01-31T12:00:00.123Z shop/cart net1 from-pod dropped egress-port (shop/out) tcp 10.0.0.1:4000 (shop/cart) > 10.0.0.2:80 (shop/db)`
fn line(record: &FlowRecord) -> String {
    let time = time::rfc3339(record.time_ms);
    let end = |address: Option<std::net::IpAddr>, port: Option<u16>, pod: &Option<ObjectName>| {
        let address = match (address, port) {
            (Some(address), Some(port)) => std::net::SocketAddr::new(address, port).to_string(),
            (address, _) => or_dash(address),
        };
        pod.as_ref().map_or(address.clone(), |pod| format!("{address} ({pod})"))
    };
    let outcome = match (&record.reason, record.policy, record.rule) {
        (Some(reason), _, _) => reason.clone(),
        (None, Some(policy), Some(rule)) => format!("policy {policy} rule {rule}"),
        _ => "-".to_owned(),
    };
    let decided = match record.decided_by.as_slice() {
        [] => String::new(),
        by => format!(" ({})", by.join(", ")),
    };
    let more = record.ended.map_or_else(String::new, |ended| {
        let EndedFlow { seconds, forward, backward } = ended;
        format!(
            ", {seconds} s, {} packets {} bytes, back {} packets {} bytes",
            forward.packets, forward.bytes, backward.packets, backward.bytes
        )
    });
    format!(
        "{time} {} {} {} {} {outcome}{decided} {} {} > {}{more}",
        or_dash(record.name.pod.as_ref()),
        record.name.ifname,
        record.direction,
        record.verdict,
        or_dash(record.protocol.as_ref()),
        end(record.source, record.source_port, &record.source_pod),
        end(record.destination, record.destination_port, &record.destination_pod),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;
    use crate::rpc::message::{MissingRecords, Traffic};

    pub(super) fn record() -> FlowRecord {
        FlowRecord {
            time_ms: 1_000_123,
            source_pod: "shop/cart".parse().ok(),
            destination_pod: "shop/db".parse().ok(),
            ..FlowRecord::dropped(name(1, "shop/cart", "shop/blue", "net1"))
        }
    }

    pub(super) fn over() -> FlowRecord {
        let traffic = |packets, bytes| Traffic { packets, bytes };
        let ended = EndedFlow { seconds: 30, forward: traffic(5, 500), backward: traffic(4, 4000) };
        FlowRecord {
            verdict: "ended".into(),
            reason: Some("closed".into()),
            policy: None,
            ended: Some(ended),
            ..record()
        }
    }

    #[test]
    fn a_record_is_a_line() {
        assert_eq!(
            line(&FlowRecord { decided_by: vec!["shop/out".into(), "shop/web".into()], ..record() }),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod dropped egress-port (shop/out, shop/web) tcp 10.0.0.1:4000 \
             (shop/cart) > 10.0.0.2:80 (shop/db)"
        );
        let opened = FlowRecord {
            verdict: "allowed".into(),
            reason: None,
            rule: Some(3),
            decided_by: vec!["shop/out egress[0]".into()],
            destination_pod: None,
            ..record()
        };
        assert_eq!(
            line(&opened),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod allowed policy 12 rule 3 (shop/out egress[0]) tcp \
             10.0.0.1:4000 (shop/cart) > 10.0.0.2:80"
        );
        assert_eq!(
            line(&over()),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod ended closed tcp 10.0.0.1:4000 (shop/cart) > 10.0.0.2:80 \
             (shop/db), 30 s, 5 packets 500 bytes, back 4 packets 4000 bytes"
        );
    }

    #[test]
    fn what_was_not_told_is_said_once() {
        let untold = |withheld, lost| MissingRecords { name: record().name, withheld, lost };
        let report =
            |untold, untold_ends| FlowsReport { records: vec![], next: 0, missed: 0, untold, untold_ends };
        let mut silence = Silence::default();
        let missing = |withheld, lost| Missing { name: record().name, withheld, lost };
        assert_eq!(silence.hear(&report(vec![untold(5, 1)], 2)), (vec![missing(5, 1)], 2));
        assert_eq!(silence.hear(&report(vec![untold(5, 1)], 2)), (vec![], 0));
        assert_eq!(silence.hear(&report(vec![untold(9, 1)], 3)), (vec![missing(4, 0)], 1));
        assert_eq!(silence.hear(&report(vec![], 3)), (vec![], 0));
        assert_eq!(silence.hear(&report(vec![untold(2, 0)], 0)), (vec![missing(2, 0)], 0), "counted anew");
        assert_eq!(
            missing_line(&missing(2, 3)),
            "shop/cart net1: 2 records beyond its share and 3 that came too fast are not shown"
        );
    }
}
