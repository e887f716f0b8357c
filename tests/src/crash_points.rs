//! An agent that is killed at a point of the test's choice, as by `kill -9`, or panics there: the executable
//! `crash-agent`, which counts the points that it passes.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use crate::{Node, Outcome, Pod};

/// The variable that tells the agent its directory.
const VARIABLE: &str = "NETATTACH_CRASH_DIR";
/// The directory, below the node's.
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
        // The points of an earlier agent.
        let _ = fs::remove_file(directory.join("log"));
        let directory = directory.to_string_lossy();
        self.start_as(agent, &[(VARIABLE, &*directory)])
    }

    /// From now on the agent, or the next one that is started, counts points and dies at this one.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn arm(&self, point: usize) -> Result<()> {
        self.arm_with(&point.to_string())
    }

    /// As [`Node::arm`], but it panics at the point.
    ///
    /// # Errors
    /// As for [`Node::arm`].
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

    /// From now on it dies at no point.
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

    /// Makes the agent die at that point of an operation on a pod; returns the caller's answer;
    /// [`Node::was_killed_at`] must follow. `None`: the operation has no such point, and is complete.
    ///
    /// # Panics
    /// A file cannot be written.
    pub fn comes_to(&self, point: usize, pod: &Pod, operation: impl FnOnce() -> Outcome) -> Option<Outcome> {
        self.arm(point).expect("the agent is told where to die");
        let outcome = operation();
        // The point is recorded before the agent dies there. An agent that has answered may die in later work: a call
        // for the same container waits for that. The call is not made if it could only wait for a dead agent.
        let is_dead = self.points().len() > point;
        let mut config = self.cni_config("1.0.0");
        config["agentWaitSeconds"] = json!(0);
        let next = || self.call("CHECK", pod).with("CNI_IFNAME", "nothing").stdin(config).run();
        let has_ended = is_dead || outcome.json["code"] == 11 || next().json["code"] == 11;
        self.disarm().expect("the agent was armed");
        // Work that no call waits for, such as publishing a status, may have reached the point since.
        (has_ended || self.points().len() > point).then_some(outcome)
    }

    /// Waits until the agent that has reached that point is dead, and returns the point's name.
    ///
    /// # Panics
    /// It is not dead, or has continued.
    pub fn was_killed_at(&mut self, point: usize) -> String {
        let (status, log) = self.wait_for_end().expect("the agent ends");
        assert_eq!(status.signal(), Some(SIGKILL), "{log}");
        let points = self.points();
        assert_eq!(points.len(), point + 1, "{points:?}");
        format!("point {point}, {}", points[point])
    }
}
