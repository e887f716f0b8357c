//! The soak: pods are created and deleted at random on two nodes, while the server fails and agents die; a model that
//! shares no code with the product states the expected result.
//!
//! | module | does |
//! |---|---|
//! | `random`, `network`, `policies` | numbers of a seed; the networks; policies at random |
//! | `decide` | the next actions, by the seed alone |
//! | `rig`, `act` | two nodes and a server; carries out the actions |
//! | `stranger` | a host between the nodes that has addresses of deleted pods |
//! | `standing` | pods that stay, if requested |
//! | `model` | the expected state |
//! | `probe`, `check` | packets; comparison of the actual with the expected state |
//! | `leaks` | leftovers at the end, memory and descriptors |
//! | `flat` | figures that must not grow while pods stay: the same, threads and entries of maps |
//!
//! Between two quiet moments a few actions happen at once, and packets are sent on all paths: none may arrive that no
//! agent could have allowed at any moment. Then all faults end, and the state has to become the one of the model.
//!
//! Faults that were put into the agent as a check of the soak, and the resulting failures:
//!
//! | fault | what failed | seen with seed |
//! |---|---|---|
//! | a deleted pod of another node is kept, with its addresses | a packet to the stranger passes | 21 |
//! | a list does not remove objects that it lacks | a policy that was removed still drops packets | 22 |
//! | a status whose write fails is not written again | a completed pod keeps its status | 13 |

mod act;
mod check;
mod decide;
mod flat;
mod leaks;
mod model;
mod network;
mod policies;
mod probe;
mod random;
mod rig;
mod standing;
mod stranger;

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use self::act::Calls;
use self::decide::{Action, Decisions, Ending, Key};
use self::flat::Flat;
use self::leaks::Resources;
use self::model::World;
use self::probe::Prober;
use self::rig::Rig;
use self::standing::Standing;

/// Steps that are shown when something is wrong.
const STORY: usize = 25;
/// Interval of the progress lines.
const LINES: Duration = Duration::from_secs(10);
/// Interval of the lines with the resources of the agents while attachments stay.
const MINUTE: Duration = Duration::from_secs(60);
/// Pause between datagrams while things change.
const PAUSE: Duration = Duration::from_millis(10);
/// Datagrams at a time meanwhile.
const AT_ONCE: usize = 100;

/// The options of a run.
#[derive(Debug)]
pub struct Options {
    /// How long pods are created and deleted.
    pub time: Duration,
    /// Decides everything.
    pub seed: u64,
    /// Most batches; `None`: as many as fit into the time. The same number repeats the same decisions to their end.
    pub batches: Option<usize>,
    /// Attachments that stay, in addition to those that are created and deleted: with them, the resources of the
    /// agents are printed each minute, and must not grow. They do not influence the decisions.
    pub attachments: u32,
    /// The directory of logs, which are written after a failure.
    pub logs: PathBuf,
}

/// The events so far.
#[derive(Debug, Default)]
struct Told {
    /// Everything that happened, numbered.
    story: Vec<String>,
    batch: usize,
}

/// Runs the soak; progress goes to standard output.
///
/// # Errors
/// An expectation was not met: the error names the seed, the step, the last steps and the directory of the logs.
pub fn run(options: &Options) -> Result<()> {
    say(&format!("soak: seed {}", options.seed));
    let reference = rig::reference();
    let mut rig = Rig::new(reference.as_deref(), options.attachments)?;
    let mut told = Told::default();
    let outcome = soak(options, &mut rig, &mut told);
    let Err(error) = outcome else { return Ok(()) };
    let logs = options.logs.join(format!("seed-{}", options.seed));
    let written = rig.write_logs(&logs, &told.story).map(|()| logs.display().to_string());
    let written = written.unwrap_or_else(|error| format!("not written: {error:#}"));
    let first = told.story.len().saturating_sub(STORY);
    Err(anyhow!(
        "the last steps:\n  {}\nlogs: {written}\nseed {}, batch {}, step {}: {error:#}",
        told.story[first..].join("\n  "),
        options.seed,
        told.batch,
        told.story.len(),
    ))
}

/// Prints a line; ignores a closed output.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

fn soak(options: &Options, rig: &mut Rig, told: &mut Told) -> Result<()> {
    let prober = Arc::new(Mutex::new(Prober::default()));
    let mut decisions = Decisions::new(options.seed, rig.reference);
    let mut resources = Resources::default();
    let mut flat = Flat::default();
    let mut calls = Calls::default();
    let mut forged = Vec::new();
    rig.standing = Standing::attach(rig, options.attachments as usize)?;
    let began = Instant::now();
    let mut line = Instant::now();
    let mut minutes = 0;
    let mut before = check::settle(rig, &prober, Duration::ZERO)?;
    while began.elapsed() < options.time && options.batches.is_none_or(|batches| told.batch < batches) {
        told.batch += 1;
        let since = Instant::now();
        let traffic = Traffic::start(&prober);
        let mut worlds = vec![before];
        for action in decisions.batch() {
            let text = match &action {
                Action::PutPolicy(policy) => format!("PutPolicy {policy}"),
                other => format!("{other:?}"),
            };
            told.story.push(format!("{}.{} {text}", told.batch, told.story.len() + 1));
            rig.act(&action, &mut calls, &prober)?;
            worlds.push(rig.world());
            match action {
                Action::Forge { spec, .. } => forged.push(spec.key),
                Action::Unforge(key) => forged.retain(|it| *it != key),
                _ => {}
            }
        }
        rig.heal(&mut calls)?;
        worlds.push(rig.world());
        traffic.end();
        before = quiet(rig, &prober, worlds, since.elapsed())?;
        resources.look(rig)?;
        if !rig.standing.is_empty() {
            flat.look(rig)?;
            if began.elapsed() >= MINUTE * (minutes + 1) {
                minutes = (began.elapsed().as_secs() / MINUTE.as_secs()) as u32;
                say(&format!("soak: minute {minutes}: {}", flat.told()));
            }
        }
        if line.elapsed() > LINES {
            line = Instant::now();
            let (arrived, answered) = {
                let prober = prober.lock().unwrap_or_else(PoisonError::into_inner);
                (prober.found().0.len(), prober.found().1.len())
            };
            say(&format!(
                "soak: {:3} s, batch {}, step {}: {} pods, {arrived} ways open, {answered} answered",
                began.elapsed().as_secs(),
                told.batch,
                told.story.len(),
                rig.live.len()
            ));
        }
    }
    say(&format!("soak: {} batches, {} steps; all pods end", told.batch, told.story.len()));
    end(rig, &prober, &forged).context("while all pods end")?;
    std::mem::take(&mut rig.standing).end(rig).context("while pods end that have stayed")?;
    leaks::nothing_is_left(rig).context("when all pods had ended")?;
    let used = resources.check()?;
    let stayed = flat.check()?;
    if !stayed.is_empty() {
        say(&format!("soak: the first third and the last, by medians:\n  {stayed}"));
    }
    say(&format!("soak: nothing is left. {used}"));
    Ok(())
}

/// Checks the packets that passed while things changed, and waits until everything is as expected.
fn quiet(rig: &mut Rig, prober: &Mutex<Prober>, mut worlds: Vec<World>, after: Duration) -> Result<World> {
    // Packets that arrive meanwhile belong to this batch too.
    let passed = prober.lock().unwrap_or_else(PoisonError::into_inner).passed();
    let world = check::settle(rig, prober, after)?;
    worlds.push(world.clone());
    check::nothing_passed_that_never_might(prober, &passed, &worlds)?;
    Ok(world)
}

/// Ends every pod.
fn end(rig: &mut Rig, prober: &Mutex<Prober>, forged: &[Key]) -> Result<()> {
    let mut calls = Calls::default();
    for pod in rig.live.keys().cloned().collect::<Vec<_>>() {
        rig.act(&Action::End { pod, how: Ending::InOrder }, &mut calls, prober)?;
    }
    for pod in forged {
        rig.act(&Action::Unforge(pod.clone()), &mut calls, prober)?;
    }
    for pod in rig.finished.keys().cloned().collect::<Vec<_>>() {
        rig.act(&Action::Discard(pod), &mut calls, prober)?;
    }
    calls.wait(rig)?;
    // The agent of the other node itself finds sandboxes for which no DEL was sent.
    rig.collect(0).context("the last GC")
}

/// Datagrams along all ways while things change.
struct Traffic {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Traffic {
    fn start(prober: &Arc<Mutex<Prober>>) -> Self {
        let ending = Arc::new(AtomicBool::new(false));
        let (over, prober) = (Arc::clone(&ending), Arc::clone(prober));
        prober.lock().unwrap_or_else(PoisonError::into_inner).forget();
        let thread = std::thread::spawn(move || {
            let mut at = 0;
            while !over.load(Ordering::SeqCst) {
                let mut prober = prober.lock().unwrap_or_else(PoisonError::into_inner);
                let ways = prober.ways();
                if at >= ways.len() {
                    at = 0;
                }
                let part = &ways[at..ways.len().min(at + AT_ONCE)];
                prober.send(part);
                at += AT_ONCE;
                prober.take();
                drop(prober);
                std::thread::sleep(PAUSE);
            }
        });
        Self { ending, thread }
    }

    fn end(self) {
        self.ending.store(true, Ordering::SeqCst);
        // A panic there is one of this process: it has been printed.
        let _ = self.thread.join();
    }
}
