//! `loopback`: brings the pod's `lo` up.

use serde_json::{Map, Value};

use super::{Driver, PlanError, Request, Wanted};
use crate::step::Step;

pub(super) struct Loopback;

impl Driver for Loopback {
    fn kind(&self) -> &'static str {
        "loopback"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        false
    }

    fn wants(&self, _: &Map<String, Value>) -> Vec<Wanted> {
        Vec::new()
    }

    fn plan(&self, _request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        Ok(vec![Step::RaiseLoopback])
    }

    fn remains(&self, _request: &Request<'_>) -> Vec<Step> {
        Vec::new()
    }
}
