//! What the time of a run went to: a table at its end.

use std::time::{Duration, Instant};

/// The stages of a run, in the order in which they ended.
#[derive(Debug)]
pub(crate) struct Stages {
    began: Instant,
    rows: Vec<Stage>,
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
        Self { began: Instant::now(), rows: Vec::new() }
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

    /// Adds a part of the stage that is under way.
    pub(crate) fn part(&mut self, name: &str, took: Duration) {
        self.add(name, took, true);
    }

    fn add(&mut self, name: &str, took: Duration, inner: bool) {
        self.rows.push(Stage { name: name.to_owned(), took, inner });
    }

    /// Takes over the stages of work that went on beside others.
    pub(crate) fn extend(&mut self, other: Self) {
        self.rows.extend(other.rows);
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
}
