//! `loopback`: brings the pod's `lo` up.

use super::{Driver, PlanError, Request};
use crate::plan::Step;

pub(super) struct Loopback;

impl Driver for Loopback {
    fn kind(&self) -> &'static str {
        "loopback"
    }

    fn plan(&self, _request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        Ok(vec![Step::RaiseLoopback])
    }

    fn remains(&self, _request: &Request<'_>) -> Vec<Step> {
        Vec::new()
    }
}
