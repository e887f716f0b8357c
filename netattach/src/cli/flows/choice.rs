//! Selects the records that `flows` shows.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use ipnet::IpNet;

use super::super::attach::WordsError;
use super::super::filter::Chosen;
use super::super::time;
use crate::bpf::DropReason;
use crate::objects::ObjectName;
use crate::rpc::message::{ENDINGS, FlowRecord};

/// Properties of records, all of which have to hold.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct Choice {
    /// Only records with this verdict
    #[arg(long, value_enum)]
    pub(super) verdict: Option<Verdict>,
    /// Only drops or ended flows with this reason
    #[arg(long, value_parser = reasons())]
    pub(super) reason: Option<String>,
    /// Only records whose source is this pod, address or network of addresses
    #[arg(long, value_name = "NAMESPACE/POD|ADDRESS[/PREFIX]")]
    pub(super) from: Option<End>,
    /// Only records whose destination is this pod, address or network of addresses
    #[arg(long, value_name = "NAMESPACE/POD|ADDRESS[/PREFIX]")]
    pub(super) to: Option<End>,
    /// Only records with this source or destination port
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) port: Option<u16>,
    /// Only records of the time since then: 30s, 5m, 2h, or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "DURATION|TIME")]
    pub(super) since: Option<Since>,
    /// Only that many of the latest records that match
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) last: Option<u32>,
}

/// What the agent noted of a packet or flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Verdict {
    /// New flows
    Allowed,
    /// Drops
    Dropped,
    /// Ended flows
    Ended,
}

/// One end of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Pod(ObjectName),
    Net(IpNet),
}

/// The earliest time of records, as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Since {
    /// That long ago.
    Ago(Duration),
    /// Milliseconds since 1970.
    At(u64),
}

impl Verdict {
    /// The verdict's name in records.
    pub(super) fn name(self) -> &'static str {
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

impl FromStr for End {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Net(address.into()));
        }
        if let Ok(net) = text.parse::<IpNet>() {
            return Ok(Self::Net(net));
        }
        text.parse().map(Self::Pod).map_err(|_| {
            format!("{text:?} is neither NAMESPACE/POD nor an address nor a network of addresses")
        })
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(at) = time::from_rfc3339(text) {
            return Ok(Self::At(at));
        }
        time::duration(text).map(Self::Ago)
    }
}

impl Since {
    /// The time in milliseconds since 1970.
    fn at(self, now_ms: u64) -> u64 {
        match self {
            Self::Ago(ago) => now_ms.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX)),
            Self::At(at) => at,
        }
    }
}

impl End {
    fn is(&self, pod: Option<&ObjectName>, address: Option<IpAddr>) -> bool {
        match self {
            Self::Pod(wanted) => pod == Some(wanted),
            Self::Net(net) => address.is_some_and(|address| net.contains(&address)),
        }
    }
}

impl Choice {
    /// Refuses a verdict and a reason that no record can have together.
    pub(super) fn check(&self) -> Result<(), WordsError> {
        let (Some(verdict), Some(reason)) = (self.verdict, &self.reason) else { return Ok(()) };
        let possible = match verdict {
            Verdict::Allowed => false,
            Verdict::Ended => ENDINGS.contains(&reason.as_str()),
            Verdict::Dropped => !ENDINGS.contains(&reason.as_str()),
        };
        let contradiction = WordsError::Contradiction { verdict: verdict.name(), reason: reason.clone() };
        if possible { Ok(()) } else { Err(contradiction) }
    }

    /// Whether a record has all requested properties; their number is limited elsewhere ([`Choice::skipped`]).
    pub(super) fn shows(&self, record: &FlowRecord, chosen: &Chosen, now_ms: u64) -> bool {
        let port =
            |wanted: u16| record.source_port == Some(wanted) || record.destination_port == Some(wanted);
        let (source, destination) = (record.source_pod.as_ref(), record.destination_pod.as_ref());
        self.verdict.is_none_or(|verdict| record.verdict == verdict.name())
            && chosen.matches(&record.name)
            && self.reason.as_ref().is_none_or(|reason| record.reason.as_ref() == Some(reason))
            && self.port.is_none_or(port)
            && self.from.as_ref().is_none_or(|end| end.is(source, record.source))
            && self.to.as_ref().is_none_or(|end| end.is(destination, record.destination))
            && self.since.is_none_or(|since| record.time_ms >= since.at(now_ms))
    }

    /// Returns how many of that many matching records are skipped at the start.
    pub(super) fn skipped(&self, matching: usize) -> usize {
        self.last.map_or(0, |last| matching.saturating_sub(last as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{over, record};
    use super::*;

    fn shown(choice: &Choice, chosen: &Chosen) -> [bool; 3] {
        let allowed = FlowRecord { verdict: "allowed".into(), reason: None, ..record() };
        [record(), allowed, over()].map(|record| choice.shows(&record, chosen, 2_000_000))
    }

    #[test]
    fn filters_leave_what_matches_all_of_them() {
        let none = Choice::default;
        let verdict = |verdict| Choice { verdict: Some(verdict), ..none() };
        let reason = |reason: &str| Choice { reason: Some(reason.into()), ..none() };
        let from = |end: &str| Choice { from: Some(end.parse().unwrap()), ..none() };
        let to = |end: &str| Choice { to: Some(end.parse().unwrap()), ..none() };
        let port = |port| Choice { port: Some(port), ..none() };
        let since = |since: &str| Choice { since: Some(since.parse().unwrap()), ..none() };
        let (all, nothing) = ([true; 3], [false; 3]);
        let cases = [
            (none(), all),
            (verdict(Verdict::Dropped), [true, false, false]),
            (verdict(Verdict::Allowed), [false, true, false]),
            (verdict(Verdict::Ended), [false, false, true]),
            (reason("closed"), [false, false, true]),
            (reason("source-mac"), nothing),
            (from("shop/cart"), all),
            (from("shop/db"), nothing),
            (from("10.0.0.1"), all),
            (from("10.0.0.0/24"), all),
            (from("10.0.0.2"), nothing),
            (to("shop/db"), all),
            (to("10.0.0.2"), all),
            (to("fd00::/8"), nothing),
            (port(80), all),
            (port(4000), all),
            (port(81), nothing),
            // The records are from 1,000,123 ms, and the time is 2,000,000 ms.
            (since("999s"), nothing),
            (since("17m"), all),
            (since("1970-01-01T00:16:40.123Z"), all),
            (since("1970-01-01T00:16:40.124Z"), nothing),
        ];
        for (choice, expected) in cases {
            assert_eq!(shown(&choice, &Chosen::default()), expected, "{choice:?}");
        }
        let pod = |pod: &str| Chosen { pod: Some(pod.parse().unwrap()), ..Chosen::default() };
        assert_eq!(shown(&none(), &pod("shop/cart")), all);
        assert_eq!(shown(&none(), &pod("shop/db")), nothing);
    }

    #[test]
    fn the_latest_are_left() {
        let last = |last| Choice { last, ..Choice::default() };
        assert_eq!([None, Some(3), Some(10)].map(|it| last(it).skipped(5)), [0, 2, 0]);
    }

    #[test]
    fn words_that_are_no_end_or_time_are_refused() {
        for text in ["", "db", "a/b/c", "10.0.0"] {
            assert!(text.parse::<End>().is_err(), "{text}");
        }
        for text in ["", "5", "m", "5 m", "-5m", "5d5", "2026-01-31", "yesterday"] {
            assert!(text.parse::<Since>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_reason_that_there_is_not_is_refused_with_those_there_are_and_so_is_one_of_another_verdict() {
        use clap::Parser;
        let parse = |words: &[&str]| {
            super::super::super::Arguments::try_parse_from(["netattachctl", "flows"].iter().chain(words))
        };
        let refused = parse(&["--reason", "nonsense"]).unwrap_err().to_string();
        for reason in DropReason::ALL.iter().map(|reason| reason.name()).chain(ENDINGS) {
            assert!(refused.contains(reason), "{refused}");
            assert!(parse(&["--reason", reason]).is_ok(), "{reason}");
        }
        let check = |verdict, reason: &str| {
            let choice = Choice { verdict, reason: Some(reason.to_owned()), ..Choice::default() };
            choice.check().map_err(|error| error.to_string())
        };
        let refused = |text: &str| Err(format!("no flow or packet that is {text}"));
        assert_eq!(check(None, "timeout"), Ok(()));
        assert_eq!(check(Some(Verdict::Ended), "timeout"), Ok(()));
        assert_eq!(check(Some(Verdict::Dropped), "malformed"), Ok(()));
        assert_eq!(check(Some(Verdict::Dropped), "timeout"), refused("dropped has the reason timeout"));
        assert_eq!(check(Some(Verdict::Ended), "malformed"), refused("ended has the reason malformed"));
        assert_eq!(check(Some(Verdict::Allowed), "malformed"), refused("allowed has the reason malformed"));
    }
}
