//! `--bpf-log`: logs how the stages of the packet path treat packets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::attach::Engine;
use crate::bpf::{BpfError, Decline, DropReason, Followed, PacketLog};
use crate::error_chain::Chain;
use crate::sync::{Mutex, locked};

/// How often log lines are fetched.
const FETCH_EVERY: Duration = Duration::from_millis(50);
/// How often the attachments are read, for their names and for the one that is followed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The names of attachments, as the log has them: `NAMESPACE/POD/INTERFACE`.
#[derive(Debug, Default)]
pub(in crate::agent) struct Names(Mutex<BTreeMap<u32, String>>);

impl Names {
    /// Writes a line of the programs to the agent's log, with names for numbers.
    pub(in crate::agent) fn say(&self, line: &str) {
        tracing::info!(target: "netattach::packet", "{}", self.spelled_out(line));
    }

    /// Replaces the numbers after `attachment=`, `reason=` and `decline=` by names.
    fn spelled_out(&self, line: &str) -> String {
        let known = locked(&self.0);
        let word = |word: &str| {
            let (key, number) = word.split_once('=')?;
            let number: u32 = number.trim_end_matches(',').parse().ok()?;
            let after = if word.ends_with(',') { "," } else { "" };
            let name = match key {
                "attachment" => known.get(&number).map(String::as_str),
                "reason" => DropReason::ALL.iter().find(|one| **one as u32 == number).map(|one| one.name()),
                "decline" => Decline::ALL.iter().find(|one| **one as u32 == number).map(|one| one.name()),
                _ => None,
            };
            name.map(|name| format!("{key}={name}{after}"))
        };
        let words = line.split(' ').map(|text| word(text).unwrap_or_else(|| text.to_owned()));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Reads the attachments of the node.
    fn look(&self, engine: &Engine) {
        let mut found = BTreeMap::new();
        for sandbox in engine.registry().all() {
            let Some(pod) = &sandbox.plan.sandbox.pod else { continue };
            for attachment in &sandbox.plan.attachments {
                if let Some(number) = attachment.number() {
                    found.insert(number, format!("{}/{}", pod.name, attachment.ifname));
                }
            }
        }
        *locked(&self.0) = found;
    }

    /// Returns which attachment's packets are logged: that of `of`, if given.
    fn followed(&self, of: Option<&str>) -> Followed {
        let Some(of) = of else { return Followed::Every };
        let known = locked(&self.0);
        let number = known.iter().find(|(_, name)| **name == of).map(|(number, _)| *number);
        number.map_or(Followed::Nobodys, Followed::Attachment)
    }
}

/// Writes lines to the log until the process ends, on a thread of its own: while packets arrive faster than
/// lines can be written, fetching does not end. `of`: the only attachment whose packets are logged, as in
/// [`Names`]; `None`: all attachments.
pub(in crate::agent) fn keep(
    mut log: PacketLog,
    names: Arc<Names>,
    of: Option<String>,
    engine: Arc<Engine>,
) -> std::io::Result<()> {
    tracing::warn!(
        of = of.as_deref().unwrap_or("every attachment"),
        "packets are logged, which slows them down"
    );
    let mut followed = Followed::Nobodys;
    let mut look = move |log: &mut PacketLog| {
        names.look(&engine);
        let wanted = names.followed(of.as_deref());
        if wanted != followed {
            log.follow(wanted)?;
            followed = wanted;
        }
        Ok::<(), BpfError>(())
    };
    // Existing attachments are followed from the start.
    let mut failed = look(&mut log).err();
    let forever = move || {
        let mut next_look = Instant::now() + LOOK_EVERY;
        loop {
            if let Some(error) = &failed {
                tracing::error!(error = %Chain(error), "the log of packets cannot follow its attachment; will try again");
            }
            while Instant::now() < next_look {
                log.flush();
                thread::sleep(FETCH_EVERY);
            }
            next_look = Instant::now() + LOOK_EVERY;
            failed = look(&mut log).err();
        }
    };
    thread::Builder::new().name("packet-log".into()).spawn(forever).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_names_where_they_are_known() {
        let names = Names::default();
        locked(&names.0).insert(7, "default/web/net1".into());
        let spelled = |line| names.spelled_out(line);
        assert_eq!(
            spelled("attachment=7 verdict: dropped, reason=4"),
            "attachment=default/web/net1 verdict: dropped, reason=source-mac"
        );
        let unknown = "attachment=8 fast path: to attachment=9, reason=250";
        assert_eq!(spelled(unknown), unknown);
        assert_eq!(
            spelled("attachment=7, decline=1"),
            format!("attachment=default/web/net1, decline={}", Decline::ALL[1].name())
        );
    }

    #[test]
    fn one_attachment_is_followed_from_when_it_is_there() {
        let names = Names::default();
        assert_eq!(names.followed(None), Followed::Every);
        assert_eq!(names.followed(Some("default/web/net1")), Followed::Nobodys);
        locked(&names.0).insert(7, "default/web/net1".into());
        assert_eq!(names.followed(Some("default/web/net1")), Followed::Attachment(7));
    }
}
