//! The time of each stage of a run, and the stages that failed: a table and a list at the end of the run.

use std::time::{Duration, Instant};

use crate::progress;

/// The stages of a run, in the order in which they ended.
#[derive(Debug)]
pub(crate) struct Stages {
    began: Instant,
    rows: Vec<Stage>,
    /// The stages that failed while others continued, by name.
    failed: Vec<(String, anyhow::Error)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stage {
    name: String,
    took: Duration,
    /// It is a part of the stage that comes after it.
    inner: bool,
}

impl Stages {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), rows: Vec::new(), failed: Vec::new() }
    }

    /// Does the work of a stage.
    pub(crate) fn timed<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let began = Instant::now();
        let done = work(self);
        self.add(name, began.elapsed(), false);
        done
    }

    /// Does the work of a stage whose failure does not end the run. `None`: it failed, see [`Self::fail`].
    pub(crate) fn tried<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> Option<T> {
        match self.timed(name, work) {
            Ok(done) => Some(done),
            Err(error) => {
                self.fail(name, error);
                None
            }
        }
    }

    /// Prints the error of a stage at once, and keeps it for the end of the run.
    pub(crate) fn fail(&mut self, name: &str, error: anyhow::Error) {
        progress::failure(&error);
        self.failed.push((name.to_owned(), error));
    }

    /// The names of the stages that failed.
    pub(crate) fn failed(&self) -> Vec<&str> {
        self.failed.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// A line for each stage that failed: its name, and the first line of its error.
    pub(crate) fn failures(&self) -> Vec<String> {
        let line = |(name, error): &(String, anyhow::Error)| {
            let error = format!("{error:#}");
            format!("{name}: {}", error.lines().next().unwrap_or_default())
        };
        self.failed.iter().map(line).collect()
    }

    /// Adds a part of the stage that is under way.
    pub(crate) fn part(&mut self, name: &str, took: Duration) {
        self.add(name, took, true);
    }

    fn add(&mut self, name: &str, took: Duration, inner: bool) {
        self.rows.push(Stage { name: name.to_owned(), took, inner });
    }

    /// Adds the stages of concurrent work.
    pub(crate) fn extend(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.failed.extend(other.failed);
    }

    /// The table: each stage with its parts below it, and the whole. Parts of less than a tenth of a minute are left out.
    pub(crate) fn table(&self) -> String {
        let mut text = "minutes of each stage; some go on beside each other\n".to_owned();
        let mut parts: Vec<&Stage> = Vec::new();
        for stage in &self.rows {
            if stage.inner {
                parts.push(stage);
                continue;
            }
            text.push_str(&line("", stage.took, &stage.name));
            let mut own = std::mem::take(&mut parts);
            own.retain(|part| part.took >= LEAST);
            own.sort_by_key(|part| std::cmp::Reverse(part.took));
            own.iter().for_each(|part| text.push_str(&line("  ", part.took, &part.name)));
        }
        text.push_str(&line("", self.began.elapsed(), "all"));
        text
    }
}

/// The shortest part that is shown.
const LEAST: Duration = Duration::from_secs(6);

fn line(indent: &str, took: Duration, name: &str) -> String {
    format!("  {:>6.1}  {indent}{name}\n", took.as_secs_f64() / 60.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_below_their_stage_the_longest_first() {
        let mut stages = Stages::new();
        stages.add("set-up", Duration::from_secs(30), false);
        stages.part("a", Duration::from_secs(60));
        stages.part("b", Duration::from_secs(90));
        stages.part("short", Duration::from_secs(1));
        stages.add("tests", Duration::from_secs(180), false);
        let mut beside = Stages::new();
        beside.add("fuzz", Duration::from_secs(66), false);
        stages.extend(beside);
        let expected = "\
minutes of each stage; some go on beside each other
     0.5  set-up
     3.0  tests
     1.5    b
     1.0    a
     1.1  fuzz
     0.0  all
";
        assert_eq!(stages.table(), expected);
    }

    #[test]
    fn a_stage_that_fails_is_shown() {
        let mut stages = Stages::new();
        let done: anyhow::Result<()> = stages.timed("tests", |_| anyhow::bail!("no"));
        assert_eq!(done.unwrap_err().to_string(), "no");
        assert!(stages.table().contains("  tests\n"));
    }

    #[test]
    fn all_stages_that_failed_are_told_at_the_end() {
        let mut stages = Stages::new();
        assert_eq!(stages.tried("image", |_| Ok(1)), Some(1));
        assert_eq!((stages.failed(), stages.failures()), (Vec::new(), Vec::new()));
        let two_lines = |_: &mut Stages| -> anyhow::Result<()> {
            Err(anyhow::anyhow!("this failed:\nall that it said").context("compile"))
        };
        assert_eq!(stages.tried("tests", two_lines), None);
        let mut beside = Stages::new();
        beside.fail("lints", anyhow::anyhow!("no"));
        stages.extend(beside);
        assert_eq!(stages.failed(), ["tests", "lints"]);
        assert_eq!(stages.failures(), ["tests: compile: this failed:", "lints: no"]);
    }
}
