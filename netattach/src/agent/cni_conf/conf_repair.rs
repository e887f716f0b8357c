//! Decides what to do when other programs have renamed, removed or changed the runtime's configuration
//! file. Pure.
//!
//! The file is written again, since without it the runtime calls another plugin and pods start without
//! their networks. But a program that insists on its own configuration repeats its change as well. So the
//! file is written again only a few times, with growing pauses, and is then left to an operator, who gets a
//! description of the situation.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::attach::CILIUMS_SUFFIX;
use crate::settings::ConfRepair;

/// How often the file is written again within [`WINDOW`], at most.
const MOST_REWRITES: usize = 5;
/// See [`MOST_REWRITES`]. A repair is reported for the same time.
pub(super) const WINDOW: Duration = Duration::from_secs(600);
/// The pause before the second rewrite; it doubles with each rewrite.
const PAUSE: Duration = Duration::from_millis(500);

/// The file as it is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) enum Found {
    /// It does not exist. `copy` is a file of another name with our content.
    Missing {
        /// The name of the copy.
        copy: Option<String>,
    },
    /// It is ours, with this content. If empty, a writer that did not sync has left it.
    Ours(Vec<u8>),
    /// Another program has written it.
    Foreign,
}

/// A change of the file by another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Damage {
    /// It was removed.
    Removed,
    /// It was renamed to this name.
    Renamed(String),
    /// Its content was changed.
    Changed,
}

/// The action to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing.
    InOrder,
    /// It is to be written: for the first time, or with new content of ours.
    Write,
    /// It is to be written again.
    Repair(Damage),
    /// It is to be written again, but only after a pause.
    Wait(Damage),
    /// It was written again too often: another program keeps changing it.
    Fight(Damage),
    /// It is only reported.
    Report(Damage),
    /// It belongs to another program and is left alone.
    Foreign,
}

/// The history of the file.
#[derive(Debug, Default)]
pub(in crate::agent) struct Memory {
    /// Its content when it was last in order. `None`: it has never been.
    content: Option<Vec<u8>>,
    /// When it was written again.
    rewrites: VecDeque<Instant>,
    /// What was last repaired, and when.
    repaired: Option<(Instant, Damage)>,
}

impl Memory {
    /// Returns its content when it was last in order.
    pub(super) fn content(&self) -> Option<&[u8]> {
        self.content.as_deref()
    }

    /// Decides what to do with the file, whose content should be `wanted`.
    pub(in crate::agent) fn judge(
        &mut self,
        found: &Found,
        wanted: &[u8],
        repair: ConfRepair,
        now: Instant,
    ) -> Verdict {
        let known = self.content.as_deref();
        let damage = match found {
            Found::Foreign => return Verdict::Foreign,
            Found::Ours(content) if content == wanted => return Verdict::InOrder,
            // Written by an earlier agent, or by this one for the previous default network.
            Found::Ours(content) if known.is_none_or(|known| known == content) => return Verdict::Write,
            Found::Ours(_) => Damage::Changed,
            Found::Missing { copy: None } if known.is_none() => return Verdict::Write,
            Found::Missing { copy: None } => Damage::Removed,
            Found::Missing { copy: Some(name) } => Damage::Renamed(name.clone()),
        };
        if repair == ConfRepair::Report && known.is_some() {
            return Verdict::Report(damage);
        }
        while self.rewrites.front().is_some_and(|at| now.saturating_duration_since(*at) >= WINDOW) {
            self.rewrites.pop_front();
        }
        let count = self.rewrites.len();
        if count >= MOST_REWRITES {
            return Verdict::Fight(damage);
        }
        let pause = match count.checked_sub(1) {
            None => Duration::ZERO,
            Some(doubled) => PAUSE * (1 << doubled),
        };
        match self.rewrites.back() {
            Some(last) if now.saturating_duration_since(*last) < pause => Verdict::Wait(damage),
            _ => Verdict::Repair(damage),
        }
    }

    /// Records that the file is in order with this content.
    pub(super) fn in_order(&mut self, content: Vec<u8>) {
        self.content = Some(content);
    }

    /// Records that the file was written again.
    pub(in crate::agent) fn repaired(&mut self, damage: Damage, now: Instant) {
        self.rewrites.push_back(now);
        self.repaired = Some((now, damage));
    }

    /// Returns the last repair, if it is within [`WINDOW`].
    pub(super) fn lately(&self, now: Instant) -> Option<&Damage> {
        let recent = |at: &Instant| now.saturating_duration_since(*at) < WINDOW;
        self.repaired.as_ref().filter(|(at, _)| recent(at)).map(|(_, damage)| damage)
    }
}

/// Describes what happened to a file: the same text each time, so that it becomes one event.
pub(super) struct Became<'a>(pub(super) &'a Path, pub(super) &'a Damage);

impl fmt::Display for Became<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(path, damage) = self;
        let path = path.display();
        match damage {
            Damage::Removed => write!(f, "{path} was removed by another program"),
            Damage::Changed => write!(f, "{path} was changed by another program"),
            Damage::Renamed(to) => {
                write!(f, "{path} was renamed to {to}")?;
                if to.ends_with(CILIUMS_SUFFIX) {
                    f.write_str(
                        ", as Cilium does with the configurations of others: set its cni.exclusive to false",
                    )?;
                } else if to.ends_with(".old") {
                    f.write_str(
                        ", as Multus does with the one that it calls: run it without --rename-conf-file",
                    )?;
                }
                Ok(())
            }
        }
    }
}

/// Returns the names of possible copies of a file: the usual names of programs that move a file away.
pub(super) fn copies<'n>(file: &str, names: &'n [String]) -> impl Iterator<Item = &'n String> {
    let prefix = format!("{file}.");
    names.iter().filter(move |name| name.starts_with(&prefix)).take(MOST_COPIES)
}

/// Most copies that are read.
const MOST_COPIES: usize = 8;

/// A file that a runtime reads instead of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum InTheWay {
    /// It calls another multi-network plugin.
    MultiNetwork(&'static str),
    /// It calls these plugins.
    Other(Vec<String>),
    /// It is invalid.
    Unusable(String),
}

/// Describes the problem with a file that sorts before ours, and the remedy.
pub(super) fn in_the_way(file: &Path, ours: &str, what: &InTheWay) -> String {
    let file = file.display();
    match what {
        InTheWay::MultiNetwork(product) => format!(
            "{file} sorts before {ours}, so the runtime calls {product} in the place of netattach: remove {product} and its file, or \
             give cniConf.name a name that sorts before it"
        ),
        InTheWay::Other(types) => format!(
            "{file} sorts before {ours}, so the runtime calls {} in the place of netattach: give cniConf.name a name that sorts before \
             it",
            types.join(", ")
        ),
        InTheWay::Unusable(error) => format!(
            "{file} sorts before {ours} and cannot be used, so some runtimes, such as containerd, call no plugin at all: correct or \
             remove it ({error})"
        ),
    }
}

/// Describes that the file is changed repeatedly.
pub(super) fn fight(path: &Path, damage: &Damage) -> String {
    format!(
        "{}; it was written again {MOST_REWRITES} times within {} minutes, to no effect",
        Became(path, damage),
        WINDOW.as_secs() / 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: &[u8] = b"wanted";

    fn missing(copy: Option<&str>) -> Found {
        Found::Missing { copy: copy.map(str::to_owned) }
    }

    fn ours(content: &[u8]) -> Found {
        Found::Ours(content.to_vec())
    }

    fn renamed() -> Damage {
        Damage::Renamed("a.cilium_bak".to_owned())
    }

    #[test]
    fn the_file_is_written_when_it_should_be_another_and_repaired_when_others_changed_it() {
        let now = Instant::now();
        let (unknown, known): (Option<&[u8]>, _) = (None, Some(b"before".as_slice()));
        let table = [
            (unknown, Found::Foreign, Verdict::Foreign),
            (known, Found::Foreign, Verdict::Foreign),
            (unknown, ours(WANTED), Verdict::InOrder),
            (known, ours(WANTED), Verdict::InOrder),
            (unknown, missing(None), Verdict::Write),
            (unknown, ours(b""), Verdict::Write),
            (unknown, ours(b"of an earlier agent"), Verdict::Write),
            (known, ours(b"before"), Verdict::Write),
            (known, ours(b""), Verdict::Repair(Damage::Changed)),
            (known, ours(b"other"), Verdict::Repair(Damage::Changed)),
            (known, missing(None), Verdict::Repair(Damage::Removed)),
            (unknown, missing(Some("a.cilium_bak")), Verdict::Repair(renamed())),
            (known, missing(Some("a.cilium_bak")), Verdict::Repair(renamed())),
        ];
        for (content, found, expected) in table {
            let mut memory = Memory { content: content.map(<[u8]>::to_vec), ..Memory::default() };
            let reported = match (&expected, content) {
                (Verdict::Repair(damage), Some(_)) => Verdict::Report(damage.clone()),
                _ => expected.clone(),
            };
            assert_eq!(
                memory.judge(&found, WANTED, ConfRepair::Rewrite, now),
                expected,
                "{content:?} {found:?}"
            );
            assert_eq!(
                memory.judge(&found, WANTED, ConfRepair::Report, now),
                reported,
                "{content:?} {found:?}"
            );
        }
    }

    #[test]
    fn a_file_that_is_renamed_again_and_again_is_written_five_times_in_ten_minutes() {
        let start = Instant::now();
        let mut memory = Memory::default();
        memory.in_order(WANTED.to_vec());
        let mut seen = Vec::new();
        // Checked every tenth of a second for a quarter of an hour.
        for tenth in 0..9000 {
            let now = start + Duration::from_millis(100) * tenth;
            match memory.judge(&missing(Some("a.cilium_bak")), WANTED, ConfRepair::Rewrite, now) {
                Verdict::Repair(damage) => {
                    memory.repaired(damage, now);
                    seen.push((tenth, "repair"));
                }
                Verdict::Fight(_) if seen.last().is_none_or(|(_, last)| *last != "fight") => {
                    seen.push((tenth, "fight"));
                }
                Verdict::Wait(_) | Verdict::Fight(_) => {}
                other => panic!("{other:?}"),
            }
        }
        let repairs: Vec<u32> =
            seen.iter().filter(|(_, what)| *what == "repair").map(|(at, _)| *at).collect();
        assert_eq!(repairs, [0, 5, 15, 35, 75, 6000, 6020, 6040, 6075, 6115]);
        assert_eq!(seen[5], (76, "fight"));
        let later = start + Duration::from_secs(900);
        assert_eq!(memory.lately(later), Some(&renamed()));
        assert_eq!(memory.lately(later + WINDOW), None);
    }

    #[test]
    fn what_has_become_of_the_file_names_the_program_that_it_looks_like() {
        let path = Path::new("/n/a");
        let said = |damage: Damage| Became(path, &damage).to_string();
        assert_eq!(said(Damage::Removed), "/n/a was removed by another program");
        assert_eq!(said(Damage::Changed), "/n/a was changed by another program");
        assert_eq!(said(Damage::Renamed("a.bak".into())), "/n/a was renamed to a.bak");
        assert_eq!(
            said(renamed()),
            "/n/a was renamed to a.cilium_bak, as Cilium does with the configurations of others: set its cni.exclusive to false"
        );
        assert_eq!(
            said(Damage::Renamed("a.old".into())),
            "/n/a was renamed to a.old, as Multus does with the one that it calls: run it without --rename-conf-file"
        );
        assert_eq!(
            fight(path, &Damage::Removed),
            "/n/a was removed by another program; it was written again 5 times within 10 minutes, to no effect"
        );
    }
}
