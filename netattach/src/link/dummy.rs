//! `dummy`: an interface of the pod without a connection, for addresses that the pod should have.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, and `mtu`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Driver, PlanError, Request, Wanted, check_mtu, sources};
use crate::spec;
use crate::step::{Configure, Step};

pub(super) struct Dummy;

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    mtu: Option<u32>,
}

impl Driver for Dummy {
    fn kind(&self) -> &'static str {
        "dummy"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn wants(&self, _: &Map<String, Value>) -> Vec<Wanted> {
        Vec::new()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        sources::refuse_vlans(request, self)?;
        let config: Config = request.read()?;
        let ipam = request.ipam()?.ok_or(PlanError::IpamMissing("a dummy"))?;
        let made = spec::Dummy {
            pod_name: request.ifname.to_owned(),
            mtu: check_mtu(config.mtu)?,
            mac: request.mac()?,
            group: request.group,
        };
        let mut steps = vec![Step::CreateLink(spec::Link::Dummy(made)), ipam];
        let configure = Configure { dns: request.dns()?, ..Configure::default() };
        steps.extend(request.finish(true, configure)?);
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made =
            spec::Dummy { pod_name: request.ifname.to_owned(), mtu: None, mac: None, group: request.group };
        request.link_remains(spec::Link::Dummy(made))
    }
}
