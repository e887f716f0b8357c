//! Plans the pod's default network if a plugin earlier in the runtime's list has created its interface: nothing is
//! created, and the dataplane treats the interface as another plugin's. Pure.

use serde_json::Value;

use super::attachment::{self, Wanted};
use super::resolve::{Numbers, Options};
use super::{AttachmentPlan, Sandbox};
use crate::cni::{self, CniArgs, CniError, code};
use crate::link::{self, dataplane};
use crate::step::{MadeBefore, Step};

/// Kind of such an attachment, for display: the plugin's type is unknown.
const KIND: &str = "chained";

/// Plans the attachment that this result, the `prevResult` of the request, describes.
///
/// # Errors
/// The error names the key; nothing has been done yet.
pub(super) fn planned(
    wanted: &Wanted<'_>,
    result: &Value,
    (sandbox, cni_args): (&Sandbox, &CniArgs),
    options: &Options,
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<AttachmentPlan, CniError> {
    let Wanted { network, ifname, .. } = *wanted;
    let list = &network.list;
    cni::identifier::check_network_name(&list.name)?;
    let Some(plugin) = list.plugins.first() else {
        return Err(CniError::new(code::INVALID_CONFIG, "plugins: the list is empty"));
    };
    let config = wanted.config(plugin, &wanted.offered)?;
    attachment::check_offered(dataplane::KIND, &config)?;
    let mut steps = vec![Step::TakeMade(MadeBefore { result: result.into() })];
    let is_asked = dataplane::asks(&config);
    match numbers {
        Some(numbers) => {
            let when = network.enforce.unwrap_or(options.enforce);
            let mut protect = attachment::protect(network, numbers, false, when)?;
            if is_asked {
                attachment::check_dataplane_runs(true, when)?;
                let request = link::Request {
                    container_id: &sandbox.container_id,
                    ifname,
                    config: &config,
                    group: sandbox.link_group(),
                    cni_args,
                    exec: &options.exec,
                    protect: Some(&protect),
                    facts: wanted.facts,
                    recorded: true,
                };
                protect = dataplane::parse(&request)?.unwrap_or(protect);
            }
            steps.extend([Step::FindDevice, Step::Protect(protect)]);
        }
        None if is_asked => attachment::check_dataplane_runs(false, options.enforce)?,
        None => {}
    }
    Ok(AttachmentPlan {
        network: network.name.clone(),
        config_name: list.name.clone(),
        default: wanted.default,
        ifname: ifname.to_owned(),
        version: list.version,
        kind: KIND.to_owned(),
        disable_check: list.disable_check,
        disable_gc: list.disable_gc,
        steps,
        yields_to: None,
        warnings: attachment::without_effect(plugin).into_iter().collect(),
        device: None,
    })
}
