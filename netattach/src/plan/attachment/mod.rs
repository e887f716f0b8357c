//! Plans one attachment of a pod: derives its steps from its network's configuration and the pod's request. Pure.
//!
//! In the order of planning: `wanted` has the pod's request and merges it into the configuration of each plugin,
//! `plugins` folds the list, `chain` plans the chained plugins that remain, with `tuned` for `tuning`, and `warnings`
//! names what has no effect. `native` says which plugins are netattach's own, `capability` what those can be asked for.

mod capability;
mod chain;
mod native;
mod plugins;
mod tuned;
mod wanted;
mod warnings;

use serde_json::{Map, Value};

use self::chain::{Place, add_chained, judged_from_without};
use self::native::is_chained;
use self::plugins::{Plugins, ask_sources, configured, folded};
use self::warnings::warnings;
use super::device::Device;
use super::judged_first::judged_first;
use super::resolve::{Network, Numbers, Options, needs_device};
use super::{AttachmentPlan, Sandbox, made_before};
use crate::budget;
use crate::cni::{self, CniArgs, CniError, PluginConf, code};
use crate::link::{self, Driver, Wanted as Fact, Wishes};
use crate::npwg::Selection;
use crate::step::{Delegate, EnforceWhen, Protect, Role, Step};

pub(super) use self::capability::{check_carried_out, check_offered};
pub(super) use self::chain::check_dataplane_runs;
pub(super) use self::native::{is_native, native};
pub(super) use self::wanted::Wanted;
pub(super) use self::warnings::without_effect;

/// Plans the attachment.
///
/// # Errors
/// The error names the attachment and the key; nothing has been done yet.
pub(super) fn attachment(
    sandbox: &Sandbox,
    wanted: &Wanted<'_>,
    cni_args: &CniArgs,
    options: &Options,
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<AttachmentPlan, CniError> {
    let planned = match wanted.made_before {
        Some(result) => made_before::planned(wanted, result, (sandbox, cni_args), options, numbers),
        None => planned(sandbox, wanted, cni_args, options, numbers),
    };
    planned.map_err(|error| CniError {
        msg: format!("attach {} ({}): {}", wanted.ifname, wanted.network.name, error.msg),
        ..error
    })
}

fn planned(
    sandbox: &Sandbox,
    wanted: &Wanted<'_>,
    cni_args: &CniArgs,
    options: &Options,
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<AttachmentPlan, CniError> {
    let Wanted { network, ifname, .. } = *wanted;
    let list = &network.list;
    cni::identifier::check_network_name(&list.name)?;
    // The longest file name that contains these names is that of libcni's cache.
    budget::FILE_NAME.check(list.name.len() + sandbox.container_id.len() + ifname.len() + 2)?;
    let mut capabilities = wanted.capabilities()?;
    wanted.check_addresses_are_permitted(cni_args)?;
    let device = device(wanted, options)?;
    let files = device.files(list, &options.device_info_dir, &network.name, &sandbox.container_id, ifname);
    device.offer(&mut capabilities, files.as_ref());
    let mut plugins = folded(configured(wanted, &capabilities)?, options)?;
    ask_sources(&mut plugins, sandbox, wanted, options)?;
    let Plugins { driver, first, chained, has_dataplane } = &plugins;
    if is_chained(first.kind, options) {
        let msg =
            format!("plugins[0].type: {} changes an interface that a plugin before it has made", first.kind);
        return Err(CniError::new(code::INVALID_CONFIG, msg));
    }

    let request = link::Request {
        container_id: &sandbox.container_id,
        ifname,
        config: &first.config,
        group: sandbox.link_group(),
        cni_args,
        exec: &options.exec,
        protect: None,
        facts: wanted.facts,
        recorded: true,
    };
    let (made, from_without) = match *driver {
        Some(driver) => (own_interface(driver, &request, (network, device), *has_dataplane, numbers)?, None),
        None => (vec![delegate(first.kind, &first.config, device)], numbers),
    };
    let mut steps: Vec<Step> = files.iter().cloned().map(Step::PrepareDeviceInfo).chain(made).collect();
    let place = Place {
        request,
        device,
        is_own: driver.is_some(),
        has_numbers: from_without.is_some(),
        when: network.enforce.unwrap_or(options.enforce),
        plugins: &list.plugins,
    };
    let asked = add_chained(&mut steps, chained, &place, options)?;
    steps.extend(files.map(Step::ReadDeviceInfo));
    if let Some(numbers) = from_without {
        steps.extend(judged_from_without(&asked, &place, network, numbers)?);
    }
    steps.extend(wanted.remembered.step(&steps, list, capabilities));
    Ok(AttachmentPlan {
        network: network.name.clone(),
        config_name: list.name.clone(),
        default: wanted.default,
        ifname: ifname.to_owned(),
        version: list.version,
        kind: first.kind.to_owned(),
        disable_check: list.disable_check,
        disable_gc: list.disable_gc,
        warnings: warnings(wanted, &steps, options),
        steps,
        yields_to: None,
        device: network.device.clone(),
    })
}

/// Returns the attachment's device, if its plugins accept one.
fn device<'a>(wanted: &Wanted<'a>, options: &Options) -> Result<Device<'a>, CniError> {
    let Wanted { network, asked, .. } = *wanted;
    let list = &network.list;
    let device = Device::of(network, asked, needs_device(network, options), options.in_cluster)?;
    let takes_none =
        |kind: &str| is_native(kind, options) && !native(kind, options).is_some_and(Driver::takes_device);
    device.check_plugin_takes_device(list, takes_none)?;
    let takers = list.plugins.iter().filter(|plugin| !takes_none(plugin.plugin_type()));
    device.check_choice(takers.map(PluginConf::raw), options.in_cluster)?;
    Ok(device)
}

/// Returns the steps of an interface that netattach creates. `needs_dataplane`: planning fails without the dataplane.
fn own_interface(
    driver: &dyn Driver,
    request: &link::Request<'_>,
    (network, device): (&Network, Device<'_>),
    needs_dataplane: bool,
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<Vec<Step>, CniError> {
    check_carried_out(driver, request.config)?;
    let mut config = request.config.clone();
    if driver.takes_device() {
        device.insert_into(&mut config);
    }
    let numbers = numbers.filter(|_| driver.is_judged(&config));
    let protect = numbers.map(|numbers| protect(network, numbers, true, EnforceWhen::Always)).transpose()?;
    let protect = protect.map(|protect| Protect { needed: needs_dataplane, ..protect });
    let request = link::Request { config: &config, protect: protect.as_ref(), ..*request };
    Ok(judged_first(driver.plan(&request)?))
}

fn delegate(kind: &str, config: &Map<String, Value>, device: Device<'_>) -> Step {
    let mut config = config.clone();
    device.insert_into(&mut config);
    Step::Delegate(Delegate { plugin: kind.to_owned(), config, role: Role::Plugin })
}

pub(super) fn protect(
    network: &Network,
    numbers: &mut (dyn Numbers + '_),
    fast_path: bool,
    when: EnforceWhen,
) -> Result<Protect, CniError> {
    Ok(Protect {
        id: numbers.attachment()?,
        zone: numbers.network(&network.name),
        check_mac: true,
        check_addresses: true,
        allowed: Vec::new(),
        vlans: Vec::new(),
        bandwidth: None,
        fast_path,
        when,
        needed: false,
        ethertypes: network.ethertypes.clone(),
    })
}

/// Returns the facts about the node that the driver of a network needs.
pub(super) fn wishes(network: &Network, selection: Option<&Selection>, options: &Options) -> Wishes {
    let asked = |plugin: &PluginConf| -> Vec<Fact> {
        let Some(driver) = native(plugin.plugin_type(), options) else { return Vec::new() };
        // A missing device is reported when the attachment is planned.
        let device = Device::of(network, selection, false, options.in_cluster);
        match device.ok().filter(|_| driver.takes_device()) {
            Some(device) => {
                let mut config = plugin.raw().clone();
                device.insert_into(&mut config);
                driver.wants(&config)
            }
            None => driver.wants(plugin.raw()),
        }
    };
    network.list.plugins.first().map(asked).unwrap_or_default().into_iter().collect()
}
