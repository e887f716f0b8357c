//! `netattachctl flows`: records of new flows, drops and ended flows.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::attach::WordsError;
use super::{CliError, Filter, PATIENCE, or_dash, time};
use crate::bpf::DropReason;
use crate::rpc::client;
use crate::rpc::message::{
    AttachmentName, ENDINGS, EndedFlow, FlowRecord, FlowsCall, FlowsReport, Request, Response,
};

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
    /// Only records with this verdict
    #[arg(long, value_enum)]
    verdict: Option<Verdict>,
    /// Only drops or ended flows with this reason
    #[arg(long, value_parser = reasons())]
    reason: Option<String>,
    /// Keep showing new records until interrupted
    #[arg(long, short)]
    follow: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Verdict {
    /// New flows
    Allowed,
    /// Drops
    Dropped,
    /// Ended flows
    Ended,
}

impl Verdict {
    /// The verdict's name in records.
    fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Dropped => "dropped",
            Self::Ended => "ended",
        }
    }
}

/// Every reason that a record can have.
fn reasons() -> PossibleValuesParser {
    DropReason::ALL.iter().map(|reason| reason.name()).chain(ENDINGS).into()
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
    /// Writes the agent's records, and with `--follow` continues with new ones: one line, or one JSON object, for each
    /// record.
    pub(super) fn run(&self, socket: &Path, json: bool, out: &mut impl Write) -> Result<(), CliError> {
        self.check()?;
        let mut from = None;
        let mut silence = Silence::default();
        loop {
            let report = ask(socket, from)?;
            let is_first = from.is_none();
            if report.missed > 0 {
                let note = format!("{} records came too fast and are not shown", report.missed);
                let note = if json { serde_json::json!({"missed": report.missed}).to_string() } else { note };
                writeln!(out, "{note}")?;
            }
            let (missing, ends) = silence.hear(&report);
            // Records that were not shown before following started are in the counters of `stats`.
            if !is_first {
                for missing in missing.iter().filter(|missing| self.filter.matches(&missing.name)) {
                    let note = if json { serde_json::to_string(missing)? } else { missing_line(missing) };
                    writeln!(out, "{note}")?;
                }
                if ends > 0 {
                    let note = format!("{ends} ended flows came too fast and are not shown");
                    let note = if json { serde_json::json!({"untold_ends": ends}).to_string() } else { note };
                    writeln!(out, "{note}")?;
                }
            }
            let mut shown = 0;
            for record in report.records.iter().filter(|record| self.shows(record)) {
                let line = if json { serde_json::to_string(record)? } else { line(record) };
                writeln!(out, "{line}")?;
                shown += 1;
            }
            if is_first && shown == 0 {
                self.explain_nothing(socket, json, out)?;
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

    /// Refuses a verdict and a reason that no record has together.
    fn check(&self) -> Result<(), WordsError> {
        let (Some(verdict), Some(reason)) = (self.verdict, &self.reason) else { return Ok(()) };
        let possible = match verdict {
            Verdict::Allowed => false,
            Verdict::Ended => ENDINGS.contains(&reason.as_str()),
            Verdict::Dropped => !ENDINGS.contains(&reason.as_str()),
        };
        let contradiction = WordsError::Contradiction { verdict: verdict.name(), reason: reason.clone() };
        if possible { Ok(()) } else { Err(contradiction) }
    }

    /// Explains why no record is shown: the filter matches no attachment, which with `--follow` may still appear, or
    /// nothing happened.
    fn explain_nothing(&self, socket: &Path, json: bool, out: &mut impl Write) -> Result<(), CliError> {
        let missing = if self.filter.is_set() {
            let Response::Attachments(rows) = client::call(socket, &Request::Attachments, PATIENCE)? else {
                return Err(CliError::OtherAnswer { request: Request::Attachments.name() });
            };
            self.filter.missing(rows.iter().map(|row| &row.name))
        } else {
            None
        };
        match missing {
            Some(missing) if !self.follow => Err(CliError::NotFound(missing)),
            // Standard output is for records only.
            Some(missing) => {
                // If standard error fails, there is no other place to report it.
                let _ = writeln!(io::stderr(), "netattachctl: {missing}; waiting for an attachment");
                Ok(())
            }
            None if json || self.follow => Ok(()),
            None => Ok(writeln!(out, "{NOTHING}")?),
        }
    }

    fn shows(&self, record: &FlowRecord) -> bool {
        self.verdict.is_none_or(|verdict| record.verdict == verdict.name())
            && self.filter.matches(&record.name)
            && self.reason.as_ref().is_none_or(|reason| record.reason.as_ref() == Some(reason))
    }
}

fn ask(socket: &Path, from: Option<u64>) -> Result<FlowsReport, CliError> {
    let request = Request::Flows(FlowsCall { from });
    match client::call(socket, &request, PATIENCE)? {
        Response::Flows(report) => Ok(report),
        _ => Err(CliError::OtherAnswer { request: request.name() }),
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

/// `2026-01-31T12:00:00.123Z shop/cart net1 from-pod dropped egress-port tcp 10.0.0.1:4000 > 10.0.0.2:80`
fn line(record: &FlowRecord) -> String {
    let time = time::rfc3339(record.time_ms);
    let end = |address: Option<std::net::IpAddr>, port: Option<u16>| match (address, port) {
        (Some(address), Some(port)) => std::net::SocketAddr::new(address, port).to_string(),
        (address, _) => or_dash(address),
    };
    let outcome = match (&record.reason, record.policy, record.rule) {
        (Some(reason), _, _) => reason.clone(),
        (None, Some(policy), Some(rule)) => format!("policy {policy} rule {rule}"),
        _ => "-".to_owned(),
    };
    let more = record.ended.map_or_else(String::new, |ended| {
        let EndedFlow { seconds, forward, backward } = ended;
        format!(
            ", {seconds} s, {} packets {} bytes, back {} packets {} bytes",
            forward.packets, forward.bytes, backward.packets, backward.bytes
        )
    });
    format!(
        "{time} {} {} {} {} {outcome} {} {} > {}{more}",
        or_dash(record.name.pod.as_ref()),
        record.name.ifname,
        record.direction,
        record.verdict,
        or_dash(record.protocol.as_ref()),
        end(record.source, record.source_port),
        end(record.destination, record.destination_port),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;
    use crate::rpc::message::{MissingRecords, Traffic};

    fn record() -> FlowRecord {
        FlowRecord { time_ms: 1_000_123, ..FlowRecord::dropped(name(1, "shop/cart", "shop/blue", "net1")) }
    }

    fn over() -> FlowRecord {
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
            line(&record()),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod dropped egress-port tcp 10.0.0.1:4000 > 10.0.0.2:80"
        );
        let opened = FlowRecord { verdict: "allowed".into(), reason: None, rule: Some(3), ..record() };
        assert_eq!(
            line(&opened),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod allowed policy 12 rule 3 tcp 10.0.0.1:4000 > 10.0.0.2:80"
        );
        assert_eq!(
            line(&over()),
            "1970-01-01T00:16:40.123Z shop/cart net1 from-pod ended closed tcp 10.0.0.1:4000 > 10.0.0.2:80, 30 s, \
             5 packets 500 bytes, back 4 packets 4000 bytes"
        );
    }

    #[test]
    fn filters_leave_what_matches_all_of_them() {
        let allowed = FlowRecord { verdict: "allowed".into(), reason: None, ..record() };
        let none = Flows::default();
        let drops = Flows { verdict: Some(Verdict::Dropped), ..Flows::default() };
        let flows = Flows { verdict: Some(Verdict::Allowed), ..Flows::default() };
        let ended = Flows { verdict: Some(Verdict::Ended), ..Flows::default() };
        let closed = Flows { reason: Some("closed".into()), ..Flows::default() };
        let spoofed = Flows { reason: Some("source-mac".into()), ..Flows::default() };
        let pod = |pod: &str| Flows {
            filter: Filter { pod: Some(pod.parse().unwrap()), network: None },
            ..Flows::default()
        };
        let cases = [
            (&none, [true, true, true]),
            (&drops, [true, false, false]),
            (&flows, [false, true, false]),
            (&ended, [false, false, true]),
            (&closed, [false, false, true]),
            (&spoofed, [false, false, false]),
            (&pod("shop/cart"), [true, true, true]),
            (&pod("shop/db"), [false, false, false]),
        ];
        for (flows, expected) in cases {
            assert_eq!(
                [record(), allowed.clone(), over()].map(|record| flows.shows(&record)),
                expected,
                "{flows:?}"
            );
        }
    }

    #[test]
    fn a_reason_that_there_is_not_is_refused_with_those_there_are_and_so_is_one_of_another_verdict() {
        use clap::Parser;
        let parse = |words: &[&str]| {
            super::super::Arguments::try_parse_from(["netattachctl", "flows"].iter().chain(words))
        };
        let refused = parse(&["--reason", "nonsense"]).unwrap_err().to_string();
        for reason in DropReason::ALL.iter().map(|reason| reason.name()).chain(ENDINGS) {
            assert!(refused.contains(reason), "{refused}");
            assert!(parse(&["--reason", reason]).is_ok(), "{reason}");
        }
        let check = |verdict, reason: &str| {
            let flows = Flows { verdict, reason: Some(reason.to_owned()), ..Flows::default() };
            flows.check().map_err(|error| error.to_string())
        };
        let refused = |text: &str| Err(format!("no flow or packet that is {text}"));
        assert_eq!(check(None, "timeout"), Ok(()));
        assert_eq!(check(Some(Verdict::Ended), "timeout"), Ok(()));
        assert_eq!(check(Some(Verdict::Dropped), "malformed"), Ok(()));
        assert_eq!(check(Some(Verdict::Dropped), "timeout"), refused("dropped has the reason timeout"));
        assert_eq!(check(Some(Verdict::Ended), "malformed"), refused("ended has the reason malformed"));
        assert_eq!(check(Some(Verdict::Allowed), "malformed"), refused("allowed has the reason malformed"));
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
