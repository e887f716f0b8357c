//! `loopback`: brings the pod's `lo` up.

use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, Wanted, bandwidth, sources};
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

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        // No program judges packets on this interface.
        let unseen = [
            (bandwidth::CAPABILITY, json!({})),
            ("fastPath", json!(false)),
            (sources::CHECK, json!("full")),
            (sources::ALLOWED, json!([])),
            (sources::VLANS, json!([])),
        ];
        request.refuse(self.kind(), &unseen)?;
        Ok(vec![Step::RaiseLoopback])
    }

    fn remains(&self, _request: &Request<'_>) -> Vec<Step> {
        Vec::new()
    }
}
