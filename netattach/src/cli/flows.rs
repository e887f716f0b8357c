//! `netattachctl flows`

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{CliError, Filter, PATIENCE, or_dash};
use crate::rpc::client;
use crate::rpc::message::{FlowRecord, FlowsCall, FlowsReport, Request, Response};

/// How often the agent is asked for more.
const PAUSE: Duration = Duration::from_millis(200);

/// Which records to show.
#[derive(Debug, Default, Args)]
pub(super) struct Flows {
    #[command(flatten)]
    filter: Filter,
    /// Only packets that became this
    #[arg(long, value_enum)]
    verdict: Option<Verdict>,
    /// Only packets that were dropped for this reason, such as ingress-port
    #[arg(long)]
    reason: Option<String>,
    /// Go on until interrupted
    #[arg(long, short)]
    follow: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Verdict {
    /// New flows
    Allowed,
    /// Drops
    Dropped,
}

impl Flows {
    /// Writes what the agent knows, and with `--follow` what it hears from then on: a line, or a JSON object, for each
    /// record.
    pub(super) fn run(&self, socket: &Path, json: bool, out: &mut impl Write) -> Result<(), CliError> {
        let mut from = None;
        loop {
            let report = ask(socket, from)?;
            if report.missed > 0 {
                let note = format!("{} records came too fast and are not shown", report.missed);
                let note = if json { serde_json::json!({"missed": report.missed}).to_string() } else { note };
                writeln!(out, "{note}")?;
            }
            for record in report.records.iter().filter(|record| self.shows(record)) {
                let line = if json { serde_json::to_string(record)? } else { line(record) };
                writeln!(out, "{line}")?;
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

    fn shows(&self, record: &FlowRecord) -> bool {
        let wanted = match self.verdict {
            None => true,
            Some(Verdict::Allowed) => record.reason.is_none(),
            Some(Verdict::Dropped) => record.reason.is_some(),
        };
        wanted
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

/// `12:00:00.123 shop/cart net1 from-pod dropped egress-port tcp 10.0.0.1:4000 > 10.0.0.2:80`
fn line(record: &FlowRecord) -> String {
    let seconds = record.time_ms / 1000;
    let time = format!(
        "{:02}:{:02}:{:02}.{:03}",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
        record.time_ms % 1000
    );
    let end = |address: Option<std::net::IpAddr>, port: Option<u16>| match (address, port) {
        (Some(address), Some(port)) => std::net::SocketAddr::new(address, port).to_string(),
        (address, _) => or_dash(address),
    };
    let outcome = match (&record.reason, record.policy, record.rule) {
        (Some(reason), _, _) => reason.clone(),
        (None, Some(policy), Some(rule)) => format!("policy {policy} rule {rule}"),
        _ => "-".to_owned(),
    };
    format!(
        "{time} {} {} {} {} {outcome} {} {} > {}",
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

    fn record() -> FlowRecord {
        FlowRecord {
            name: name(1, "shop/cart", "shop/blue", "net1"),
            time_ms: 1_000_123,
            verdict: "dropped".into(),
            reason: Some("egress-port".into()),
            direction: "from-pod".into(),
            protocol: Some("tcp".into()),
            source: Some([10, 0, 0, 1].into()),
            source_port: Some(4000),
            destination: Some([10, 0, 0, 2].into()),
            destination_port: Some(80),
            vlan: None,
            length: 74,
            policy: Some(12),
            rule: None,
        }
    }

    #[test]
    fn a_record_is_a_line() {
        assert_eq!(
            line(&record()),
            "00:16:40.123 shop/cart net1 from-pod dropped egress-port tcp 10.0.0.1:4000 > 10.0.0.2:80"
        );
        let opened = FlowRecord { verdict: "allowed".into(), reason: None, rule: Some(3), ..record() };
        assert_eq!(
            line(&opened),
            "00:16:40.123 shop/cart net1 from-pod allowed policy 12 rule 3 tcp 10.0.0.1:4000 > 10.0.0.2:80"
        );
    }

    #[test]
    fn filters_leave_what_matches_all_of_them() {
        let allowed = FlowRecord { reason: None, ..record() };
        let none = Flows::default();
        let drops = Flows { verdict: Some(Verdict::Dropped), ..Flows::default() };
        let flows = Flows { verdict: Some(Verdict::Allowed), ..Flows::default() };
        let spoofed = Flows { reason: Some("source-mac".into()), ..Flows::default() };
        let pod = |pod: &str| Flows {
            filter: Filter { pod: Some(pod.parse().unwrap()), network: None },
            ..Flows::default()
        };
        let cases = [
            (&none, true, true),
            (&drops, true, false),
            (&flows, false, true),
            (&spoofed, false, false),
            (&pod("shop/cart"), true, true),
            (&pod("shop/db"), false, false),
        ];
        for (flows, drop, open) in cases {
            assert_eq!((flows.shows(&record()), flows.shows(&allowed)), (drop, open), "{flows:?}");
        }
    }
}
