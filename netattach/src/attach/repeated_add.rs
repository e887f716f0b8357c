//! An ADD for a sandbox that is already attached.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::engine::Engine;
use super::registry::protected;
use super::{AttachError, Attached};
use crate::cni::{self, CniError, Value};
use crate::journal::Record;
use crate::link::Facts;
use crate::netns::Netns;
use crate::npwg::NetworkName;
use crate::plan::compare::{as_planned, difference};
use crate::plan::resolve::{Intent, Numbers, resolve};
use crate::plan::{Plan, Sandbox};

/// The answer to an ADD for a sandbox that is already attached. The specification forbids runtimes to send one (CNI
/// 1.1, section 2, ADD); some do so after a restart nevertheless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RepeatedAdd {
    /// The ADD fails.
    #[default]
    Refuse,
    /// The ADD returns the first result if it asks for the same and the sandbox is unchanged since the first ADD.
    Return,
}

impl Engine {
    /// Answers an ADD for the attached sandbox of that record. Changes nothing.
    pub(super) fn repeat(
        &self,
        record: &Record,
        sandbox: Sandbox,
        request: &cni::Request,
        intent: &Intent,
        netns: &Netns,
    ) -> Result<(Value, Arc<Attached>), AttachError> {
        let key = record.key.clone();
        if self.repeated == RepeatedAdd::Refuse {
            return Err(AttachError::AlreadyAttached(key));
        }
        let mut numbers = Recorded::of(&record.plan);
        let numbers = self.node.enforcer.is_some().then_some(&mut numbers as &mut dyn Numbers);
        let options = as_planned(&record.plan, &self.options);
        let asked = resolve(sandbox, request, intent, (&options, &Facts::default()), numbers)?;
        if let Some(what) = difference(&record.plan, &asked) {
            return Err(AttachError::AttachedOtherwise { key, what });
        }
        self.check_sandbox(record, netns)
            .map_err(|source| AttachError::AttachedAndChanged { key, source: Box::new(source) })?;
        // A sandbox counts as attached once its result is written.
        let result = record.result.clone().unwrap_or_default();
        Ok((cni::result::in_version(&result, request.version)?, Arc::new(Attached::from(record))))
    }
}

/// Returns the numbers of a recorded plan in the same order. A plan that needs more gets 0, which belongs to no
/// attachment.
struct Recorded {
    numbers: std::vec::IntoIter<(u32, u32)>,
    zone: u32,
}

impl Recorded {
    fn of(plan: &Plan) -> Self {
        let numbers: Vec<_> = protected(plan).map(|(_, protect)| (protect.id, protect.zone)).collect();
        Self { numbers: numbers.into_iter(), zone: 0 }
    }
}

impl Numbers for Recorded {
    fn attachment(&mut self) -> Result<u32, CniError> {
        let (id, zone) = self.numbers.next().unwrap_or_default();
        self.zone = zone;
        Ok(id)
    }

    fn network(&mut self, _name: &NetworkName) -> u32 {
        self.zone
    }
}
