//! Work that needs processors and measures no time: done beside the live tests, with the processor time that they
//! leave.
//!
//! Cargo allows one compile at a time in a directory. Tests are run through cargo, which locks the directory for a
//! moment before the first of them: compiles into the same directory wait until tests that take minutes have begun,
//! so that cargo never has to wait. Compiles into directories of their own run independently of that, at the lowest
//! priority if the machine has the program for it.

use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::ensure;

use super::{Count, FEATURES, Stages, Tally, beside, compile, first_suites, of_suites, selected, watched};
use crate::ebpf::{self, Flavour};
use crate::{child, progress, tidy};

/// The stages of computed work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// The suites that are run first are compiled. No test and no other stage here begins before that.
    FirstTests,
    /// The BPF object is built whose stages log: one of the other tests takes it.
    LoggingObject,
    /// All other tests are compiled, while those with a cluster run.
    OtherTests,
    /// Data structures shared by threads are compiled with a model checker and run under it, while the other tests
    /// run.
    Model,
    /// Clippy, in the gate, independently of the tests.
    Lints,
}

/// The stages that wait for tests, and that tests wait for.
const IN_TURN: [Work; 3] = [Work::LoggingObject, Work::OtherTests, Work::Model];

impl Work {
    /// Its name in the table of the run.
    fn stage(self) -> &'static str {
        match self {
            Self::FirstTests => "compile the tests that come first",
            Self::LoggingObject => "BPF object that logs",
            Self::OtherTests => "compile the other tests",
            Self::Model => "tests under a model checker",
            Self::Lints => "lints",
        }
    }
}

/// The computing side's ends: what it reports to the tests, and what it waits for.
pub(super) struct Computing {
    first_compiled: Sender<bool>,
    others_compiled: Sender<bool>,
    cluster_begun: Receiver<()>,
    others_begun: Receiver<()>,
}

/// The testing side's ends.
pub(super) struct Testing {
    /// Receives when the tests that run first are compiled, or cannot be.
    pub(super) first_compiled: Receiver<bool>,
    /// Receives when the other tests are compiled, or cannot be.
    pub(super) others_compiled: Receiver<bool>,
    /// To be sent, or dropped, when the tests with a cluster run.
    pub(super) cluster_begun: Sender<()>,
    /// To be sent, or dropped, when the other tests run.
    pub(super) others_begun: Sender<()>,
}

/// Both ends.
pub(super) fn turns() -> (Computing, Testing) {
    let (first, first_compiled) = mpsc::channel();
    let (others, others_compiled) = mpsc::channel();
    let (cluster_begun, cluster) = mpsc::channel();
    let (others_begun, begun) = mpsc::channel();
    let computing = Computing {
        first_compiled: first,
        others_compiled: others,
        cluster_begun: cluster,
        others_begun: begun,
    };
    (computing, Testing { first_compiled, others_compiled, cluster_begun, others_begun })
}

/// Waits until tests are compiled.
///
/// # Errors
/// They could not be compiled: the stage that compiles them has printed why.
pub(super) fn compiled(tests: &Receiver<bool>) -> anyhow::Result<()> {
    ensure!(tests.recv() == Ok(true), "they were not compiled");
    Ok(())
}

impl Computing {
    /// Waits until the tests named by the stage have begun. If they will not begin any more, nothing conflicts.
    fn wait_before(&self, work: Work) {
        let _ = match work {
            Work::OtherTests => self.cluster_begun.recv(),
            Work::Model => self.others_begun.recv(),
            Work::FirstTests | Work::LoggingObject | Work::Lints => return,
        };
    }

    /// Reports the outcome to the waiting side. There is no receiver if the executables could not be built.
    fn tell(&self, work: Work, well: bool) {
        let _ = match work {
            Work::FirstTests => self.first_compiled.send(well),
            Work::OtherTests => self.others_compiled.send(well),
            Work::LoggingObject | Work::Model | Work::Lints => return,
        };
    }
}

/// Does all stages by `work`; `strict`: also those of the gate alone. Failures are recorded with the stages, and the
/// other stages are done nevertheless.
pub(super) fn beside_tests(
    strict: bool,
    turns: &Computing,
    stages: &mut Stages,
    work: impl Fn(Work) -> anyhow::Result<Count> + Sync,
) -> Count {
    let done = |next: Work, stages: &mut Stages| stages.tried(next.stage(), |_| work(next));
    let in_turn = |next: Work, stages: &mut Stages| {
        turns.wait_before(next);
        let done = done(next, stages);
        turns.tell(next, done.is_some());
        done.unwrap_or_default()
    };
    let mut total = in_turn(Work::FirstTests, stages);
    let lints = |stages: &mut Stages| match strict {
        true => done(Work::Lints, stages).unwrap_or_default(),
        false => Count::default(),
    };
    let others = |stages: &mut Stages| IN_TURN.map(|next| in_turn(next, stages));
    let (lints, others) = beside(stages, lints, others);
    others.into_iter().chain(lints).for_each(|count| total += count);
    total
}

/// Does it.
///
/// # Errors
/// Code does not compile, or the lints found something. A failed test is counted.
pub(super) fn work(work: Work) -> anyhow::Result<Count> {
    let no_tests = |()| Count::default();
    match work {
        Work::FirstTests => {
            progress::heading("test");
            compile(&selected(of_suites(&first_suites()))).map(no_tests)
        }
        Work::LoggingObject => ebpf::build(Flavour::Log).map(no_tests),
        Work::OtherTests => compile(&["--workspace", "--features", FEATURES]).map(no_tests),
        Work::Model => orders(),
        Work::Lints => tidy::run(&[tidy::Part::Lints], None).map(no_tests),
    }
}

/// Data structures shared by threads, in many interleavings. These are no live tests: a failed one is not run again.
fn orders() -> anyhow::Result<Count> {
    const SELECTION: [&str; 5] = ["--package", "netattach", "--features", "model", "--lib"];
    progress::heading("test what threads share, under a model checker");
    // Not at the lowest priority: cargo needs the directory again for later tests.
    compile(&SELECTION)?;
    let mut cargo = child::cargo();
    cargo.arg("test").args(SELECTION).args(["--color", "never", "--", "model::"]);
    Ok(watched(&mut child::idle(cargo), Tally::default())?.total())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    const TESTED: Count = Count { passed: 1, unsteady: 0, failed: 0, skipped: 0 };

    /// Runs the stages while each of `failing` fails; returns the sum and the names of the failed stages.
    fn compute(
        strict: bool,
        turns: &Computing,
        failing: &[Work],
        note: impl Fn(Work) + Sync,
    ) -> (Count, Vec<String>) {
        let mut stages = Stages::new();
        let total = beside_tests(strict, turns, &mut stages, |next| {
            note(next);
            ensure!(!failing.contains(&next), "{next:?}");
            Ok(TESTED)
        });
        (total, stages.failed().into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn what_is_compiled_beside_tests_waits_until_they_have_begun() {
        let (computing, testing) = turns();
        let log = Mutex::new(Vec::new());
        let note = |what: String| log.lock().unwrap().push(what);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Moved, so that it is dropped when this thread ends.
                let Testing { first_compiled, others_compiled, cluster_begun, others_begun } = testing;
                compiled(&first_compiled).unwrap();
                note("cluster".to_owned());
                cluster_begun.send(()).unwrap();
                compiled(&others_compiled).unwrap();
                note("others".to_owned());
                others_begun.send(()).unwrap();
            });
            let (total, failed) = compute(true, &computing, &[], |work| note(format!("{work:?}")));
            assert_eq!((total.passed, failed), (5, Vec::new()));
        });
        let log = log.into_inner().unwrap();
        let at = |what: &str| log.iter().position(|it| it == what).unwrap();
        assert!(at("FirstTests") < at("cluster") && at("cluster") < at("OtherTests"), "{log:?}");
        assert!(at("OtherTests") < at("others") && at("others") < at("Model"), "{log:?}");
        assert!(at("FirstTests") < at("LoggingObject") && at("LoggingObject") < at("OtherTests"), "{log:?}");
        assert!(at("FirstTests") < at("Lints"), "{log:?}");
        assert_eq!(log.len(), 7, "{log:?}");
    }

    #[test]
    fn what_fails_keeps_nothing_from_being_done() {
        let failing = [Work::LoggingObject, Work::Lints];
        let (computing, testing) = turns();
        testing.cluster_begun.send(()).unwrap();
        testing.others_begun.send(()).unwrap();
        let (total, failed) = compute(true, &computing, &failing, |_| ());
        assert_eq!(total.passed, 3);
        assert_eq!(failed, ["BPF object that logs", "lints"]);
        assert!(compiled(&testing.first_compiled).is_ok());
        assert!(compiled(&testing.others_compiled).is_ok());
    }

    #[test]
    fn nobody_waits_for_what_cannot_be_compiled() {
        let (computing, testing) = turns();
        drop((testing.cluster_begun, testing.others_begun));
        let failing = [Work::FirstTests, Work::OtherTests];
        let (total, failed) = compute(true, &computing, &failing, |_| ());
        assert_eq!(total.passed, 3);
        assert_eq!(failed, ["compile the tests that come first", "compile the other tests"]);
        for tests in [testing.first_compiled, testing.others_compiled] {
            assert_eq!(compiled(&tests).unwrap_err().to_string(), "they were not compiled");
        }
    }

    #[test]
    fn tests_that_have_ended_early_are_not_waited_for_and_outside_of_the_gate_there_is_less() {
        let (computing, testing) = turns();
        drop(testing);
        let log = Mutex::new(Vec::new());
        let (total, failed) = compute(false, &computing, &[], |work| log.lock().unwrap().push(work));
        assert_eq!((total.passed, failed), (4, Vec::new()));
        let expected = [Work::FirstTests, Work::LoggingObject, Work::OtherTests, Work::Model];
        assert_eq!(log.into_inner().unwrap(), expected);
    }
}
