//! An agent that is killed where a test says, as by `kill -9`, or panics there: the executable `crash-agent`, which counts the
//! points of what it does.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use crate::{Node, Outcome, Pod};

/// What the agent is told its directory by.
const VARIABLE: &str = "NETATTACH_CRASH_DIR";
/// Where, below the node's directory.
const DIRECTORY: &str = "crash";
const SIGKILL: i32 = 9;

impl Node {
    /// Starts the agent with crash points.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub fn start_with_points(&mut self, agent: &Path) -> Result<()> {
        let directory = self.path(DIRECTORY);
        fs::create_dir_all(&directory)?;
        // What an earlier agent came to.
        let _ = fs::remove_file(directory.join("log"));
        let directory = directory.to_string_lossy();
        self.start_as(agent, &[(VARIABLE, &*directory)])
    }

    /// From now on the agent counts points, and dies at this one; or that which is started next.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn arm(&self, point: usize) -> Result<()> {
        self.arm_with(&point.to_string())
    }

    /// As [`Node::arm`], but it panics at the point.
    ///
    /// # Errors
    /// As there.
    pub fn arm_with_panic(&self, point: usize) -> Result<()> {
        self.arm_with(&format!("{point} panic"))
    }

    fn arm_with(&self, wanted: &str) -> Result<()> {
        let within = |name: &str| self.path(DIRECTORY).join(name);
        fs::create_dir_all(self.path(DIRECTORY))?;
        let _ = fs::remove_file(within("log"));
        // Renamed into place, so that the agent never reads half of it.
        fs::write(within("to-be"), wanted)?;
        Ok(fs::rename(within("to-be"), within("at"))?)
    }

    /// From now on it dies nowhere.
    ///
    /// # Errors
    /// It was not armed.
    pub fn disarm(&self) -> Result<()> {
        Ok(fs::remove_file(self.path(DIRECTORY).join("at"))?)
    }

    /// Names of the points since the agent was armed, or else since it was started.
    pub fn points(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path(DIRECTORY).join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Has the agent die at that point of an operation on a pod; returns the caller's answer; [`Node::was_killed_at`] is to
    /// follow. `None`: the operation has no such point, and is complete.
    ///
    /// # Panics
    /// A file cannot be written.
    pub fn comes_to(&self, point: usize, pod: &Pod, operation: impl FnOnce() -> Outcome) -> Option<Outcome> {
        self.arm(point).expect("the agent is told where to die");
        let outcome = operation();
        // The point is noted before the agent dies there. One that has answered may die in later work: a call for the same
        // container waits for that. It is not made where it could only wait for an agent that is dead.
        let is_dead = self.points().len() > point;
        let mut config = self.cni_config("1.0.0");
        config["agentWaitSeconds"] = json!(0);
        let next = || self.call("CHECK", pod).with("CNI_IFNAME", "nothing").stdin(config).run();
        let has_ended = is_dead || outcome.json["code"] == 11 || next().json["code"] == 11;
        self.disarm().expect("the agent was armed");
        // What no call waits for, as that a status is published, may have come to the point since.
        (has_ended || self.points().len() > point).then_some(outcome)
    }

    /// Waits until the agent is dead that has come to that point, and names it.
    ///
    /// # Panics
    /// It is not, or has gone on.
    pub fn was_killed_at(&mut self, point: usize) -> String {
        let (status, log) = self.wait_for_end().expect("the agent ends");
        assert_eq!(status.signal(), Some(SIGKILL), "{log}");
        let points = self.points();
        assert_eq!(points.len(), point + 1, "{points:?}");
        format!("point {point}, {}", points[point])
    }
}
