//! Output for people: one aligned line per step with its outcome and duration.
//!
//! On a terminal the running step shows a live line; elsewhere it reports that it is alive twice a minute.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::tree;

const TITLE_WIDTH: usize = 22;
const LIVE_NOTE_WIDTH: usize = 70;

/// An error with advice for the user.
#[derive(Debug)]
pub struct UserError {
    /// The problem, in one clause.
    pub problem: String,
    /// The next thing that the reader should do.
    pub next: String,
}

impl UserError {
    /// Both halves of the message.
    pub fn new(problem: impl Into<String>, next: impl Into<String>) -> Self {
        Self { problem: problem.into(), next: next.into() }
    }
}

impl fmt::Display for UserError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl std::error::Error for UserError {}

/// The outcome of a step that succeeded.
pub enum Done {
    /// Nothing had to be changed.
    Unchanged(String),
    /// Something was made or installed.
    Changed(String),
}

/// The note of a running step; cheap to set for every line of a child's output.
#[derive(Clone, Default)]
pub struct Progress(Arc<Mutex<String>>);

impl Progress {
    /// Replaces the note shown beside the running step.
    pub fn note(&self, text: &str) {
        if let Ok(mut note) = self.0.lock() {
            text.trim().clone_into(&mut note);
        }
    }

    /// The note.
    pub(crate) fn current(&self) -> String {
        self.0.lock().map(|note| note.clone()).unwrap_or_default()
    }
}

static SILENT: AtomicBool = AtomicBool::new(false);

/// Leaves standard output to the result: headings and steps are no longer shown.
pub fn silence() {
    SILENT.store(true, Ordering::Relaxed);
}

/// Prints a heading over the steps that follow.
pub fn heading(text: &str) {
    if !is_silent() {
        line(text);
    }
}

fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed)
}

/// Runs one step and prints its line. On failure the line says so and the error is returned.
pub fn step(title: &str, work: impl FnOnce(&Progress) -> anyhow::Result<Done>) -> anyhow::Result<()> {
    let started = Instant::now();
    let progress = Progress::default();
    let result = {
        let _live = (!is_silent()).then(|| Live::start(title, progress.clone()));
        work(&progress)
    };
    let took = started.elapsed();
    match result {
        Ok(Done::Unchanged(detail)) => finished("ok", took, title, &detail),
        Ok(Done::Changed(detail)) => finished("made", took, title, &detail),
        Err(error) => {
            finished("FAIL", took, title, "");
            return Err(error);
        }
    }
    Ok(())
}

/// Prints a finished line for something that was not run through [`step`].
pub fn finished(mark: &str, took: Duration, title: &str, detail: &str) {
    if is_silent() {
        return;
    }
    let text = format!("  {mark:<4} {:>6.1} s  {title:<TITLE_WIDTH$} {detail}", took.as_secs_f64());
    line(&tree::without_local_paths(text.trim_end()));
}

/// Prints one line to standard output; a closed pipe is the reader's choice, not an error.
pub fn line(text: &str) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

/// Prints an error chain, each layer once, and the advice of a [`UserError`] in it.
pub fn failure(error: &anyhow::Error) {
    let chain: Vec<String> = error.chain().map(ToString::to_string).collect();
    let mut text = format!("error: {}", chain.join(": "));
    if let Some(stuck) = error.chain().find_map(|layer| layer.downcast_ref::<UserError>()) {
        text.push_str(&format!("\n next: {}", stuck.next));
    }
    let _ = writeln!(io::stderr().lock(), "{}", tree::without_local_paths(&text));
}

/// The live line of the running step; ends and erases itself when dropped.
struct Live {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Live {
    fn start(title: &str, progress: Progress) -> Self {
        let (stop, stopped) = mpsc::channel();
        let title = title.to_owned();
        let terminal = io::stdout().is_terminal();
        let thread = thread::spawn(move || {
            let started = Instant::now();
            let pause = if terminal { Duration::from_millis(150) } else { Duration::from_secs(30) };
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                draw(terminal, &title, started.elapsed(), &progress.current());
            }
            if terminal {
                let _ = write!(io::stdout().lock(), "\r\x1b[2K");
                let _ = io::stdout().flush();
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn draw(terminal: bool, title: &str, elapsed: Duration, note: &str) {
    let note: String =
        tree::without_local_paths(note).chars().filter(|c| !c.is_control()).take(LIVE_NOTE_WIDTH).collect();
    let text = format!("  ...  {:>6.1} s  {title:<TITLE_WIDTH$} {note}", elapsed.as_secs_f64());
    let mut out = io::stdout().lock();
    let _ = if terminal { write!(out, "\r\x1b[2K{text}") } else { writeln!(out, "{}", text.trim_end()) };
    let _ = out.flush();
}
