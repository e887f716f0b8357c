//! Plans one attachment of a pod: from its network's configuration and the pod's request to steps. Pure.

use serde_json::{Map, Value};

use super::device::{DEVICE_ID, Device};
use super::resolve::{Network, Numbers, Options, PORT_MAPPINGS, needs_device};
use super::{AttachmentPlan, CachedResults, Sandbox, chained, pod_sources};
use crate::budget;
use crate::cni::{self, CniArgs, CniError, PluginConf, code};
use crate::link::{self, Driver, Facts, PlanError, Wanted as Fact, Wishes, sbr, tuning};
use crate::npwg::{self, Selection, device_info};
use crate::spec::{Properties, Tune};
use crate::step::{Delegate, EnforceWhen, Protect, Role, Step};

/// The capabilities of `runtimeConfig` that the native plugins carry out. A plugin must not declare a capability and
/// ignore it. The path of the device information is offered by netattach, not requested; a plugin that creates no
/// device may ignore it.
const NATIVE_CAPABILITIES: [&str; 4] = ["ips", "ipRanges", MAC, device_info::CAPABILITY];

/// The capability, and the key of arguments, that requests an Ethernet address.
const MAC: &str = "mac";

/// An attachment that is to be planned.
pub(super) struct Wanted<'a> {
    pub(super) network: &'a Network,
    pub(super) ifname: &'a str,
    pub(super) default: bool,
    pub(super) remembered: CachedResults,
    /// The values that the runtime offers to plugins with the matching capability.
    pub(super) offered: Map<String, Value>,
    /// The pod's selection.
    pub(super) asked: Option<&'a Selection>,
    /// Facts about the node that the driver needs.
    pub(super) facts: &'a Facts,
}

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
    planned(sandbox, wanted, cni_args, options, numbers).map_err(|error| CniError {
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
    let Wanted { network, ifname, asked, .. } = *wanted;
    let list = &network.list;
    cni::identifier::check_network_name(&list.name)?;
    // The longest file name that contains these names is that of libcni's cache.
    budget::FILE_NAME.check(list.name.len() + sandbox.container_id.len() + ifname.len() + 2)?;
    let mut capabilities = wanted.capabilities()?;
    wanted.check_mac_is_permitted(cni_args)?;
    let device = Device::of(network, asked, needs_device(network, options))?;
    let takes_none =
        |kind: &str| is_native(kind, options) && !native(kind, options).is_some_and(Driver::takes_device);
    device.check_plugin_takes_device(list, takes_none)?;
    let files = device.files(list, &options.device_info_dir, &network.name, &sandbox.container_id, ifname);
    device.offer(&mut capabilities, files.as_ref());
    let mut plugins = Vec::with_capacity(list.plugins.len());
    for plugin in &list.plugins {
        plugins.push((plugin.plugin_type(), wanted.config(plugin, &capabilities)?));
    }
    let mut plugins = plugins.into_iter().enumerate();
    let Some((_, (kind, mut config))) = plugins.next() else {
        return Err(CniError::new(code::INVALID_CONFIG, "plugins: the list is empty"));
    };
    let mut chained: Vec<_> = plugins.collect();
    if let Some(driver) = native(kind, options) {
        chained.retain(|(_, (kind, asked))| {
            options.exec.iter().any(|name| name == kind) || !chained::fold(driver, &mut config, kind, asked)
        });
    }
    let is_judged = native(kind, options).is_some_and(|driver| driver.is_judged(&config));
    let place = (sandbox, &network.name, is_judged);
    pod_sources::apply(&mut config, place, asked, &options.pod_sources)?;
    let config = &config;

    if is_chained(kind, options) {
        let msg = format!("plugins[0].type: {kind} changes an interface that a plugin before it has made");
        return Err(CniError::new(code::INVALID_CONFIG, msg));
    }
    let mut steps: Vec<Step> = files.iter().cloned().map(Step::PrepareDeviceInfo).collect();
    let mut judged_from_without = None;
    let request = link::Request {
        container_id: &sandbox.container_id,
        ifname,
        config,
        group: sandbox.link_group(),
        cni_args,
        exec: &options.exec,
        protect: None,
        facts: wanted.facts,
        recorded: true,
    };
    match native(kind, options) {
        Some(driver) => {
            check_carried_out(driver, config)?;
            let mut config = config.clone();
            if driver.takes_device() {
                device.check_choice(&config, options.in_cluster)?;
                device.insert_into(&mut config);
            }
            let config = &config;
            let numbers = numbers.filter(|_| driver.is_judged(config));
            let protect =
                numbers.map(|numbers| protect(network, numbers, true, EnforceWhen::Always)).transpose()?;
            steps.extend(driver.plan(&link::Request { config, protect: protect.as_ref(), ..request })?);
        }
        None => {
            judged_from_without = numbers;
            steps.push(delegate(kind, config, device));
        }
    }
    for (position, (kind, config)) in &chained {
        if is_chained(kind, options) {
            check_offered(kind, config)?;
        }
        if is_own(sbr::KIND, kind, options) {
            let asked = sbr::parse(&link::Request { config, ..request })?;
            routed_by_source(&steps, *position)?;
            steps.extend([Step::ChooseTables(asked.clone()), Step::UseTables(asked)]);
            continue;
        }
        if is_own(tuning::KIND, kind, options) {
            let mut tune = tuning::parse(&link::Request { config, ..request })?;
            tuned(&mut steps, &mut tune)?;
            steps.push(Step::Tune(tune));
            continue;
        }
        if native(kind, options).is_some() {
            let msg = format!(
                "plugins[{position}].type: {kind} makes an interface and can only be the first of a list"
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        steps.push(delegate(kind, config, device));
    }
    steps.extend(files.map(Step::ReadDeviceInfo));
    if let Some(numbers) = judged_from_without {
        let when = network.enforce.unwrap_or(options.enforce);
        steps.push(Step::FindDevice);
        steps.push(Step::Protect(protect(network, numbers, false, when)?));
    }
    steps.extend(wanted.remembered.step(&steps, list, capabilities));
    let kind = kind.to_owned();
    Ok(AttachmentPlan {
        network: network.name.clone(),
        config_name: list.name.clone(),
        default: wanted.default,
        ifname: ifname.to_owned(),
        version: list.version,
        kind,
        disable_check: list.disable_check,
        disable_gc: list.disable_gc,
        warnings: asked.and_then(|selection| claim_without_effect(selection, &steps)).into_iter().collect(),
        steps,
        yields_to: None,
        device: network.device.clone(),
    })
}

impl Wanted<'_> {
    /// Merges offered and requested values, by capability. A requested value is never dropped silently (D14).
    fn capabilities(&self) -> Result<Map<String, Value>, CniError> {
        let list = &self.network.list;
        let asked = self.asked.map(npwg::runtime_config).unwrap_or_default();
        let missing = cni::capability::undeclared(list, asked.keys().map(String::as_str));
        if !missing.is_empty() {
            let msg = format!(
                "{} asked for, but no plugin of network {} declares that capability",
                missing.join(", "),
                list.name
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        let mut capabilities = self.offered.clone();
        capabilities.extend(asked);
        Ok(capabilities)
    }

    /// A network declares the capability `mac` to let its attachments choose their Ethernet addresses (NPWG
    /// 4.1.2.1.4). This applies to every way in which a pod or its runtime can request one. Plugins in Go read keys in
    /// any case.
    fn check_mac_is_permitted(&self, cni_args: &CniArgs) -> Result<(), CniError> {
        let argument = self
            .asked
            .and_then(|asked| asked.cni_args.as_ref())
            .and_then(|arguments| arguments.keys().find(|key| key.eq_ignore_ascii_case(MAC)));
        let way = match argument {
            Some(key) => format!("cni-args.{key}"),
            None if self.default && cni_args.get("MAC").is_some_and(|mac| !mac.is_empty()) => {
                "MAC in CNI_ARGS".to_owned()
            }
            None => return Ok(()),
        };
        let list = &self.network.list;
        if cni::capability::undeclared(list, [MAC]).is_empty() {
            return Ok(());
        }
        let msg = format!(
            "key {way}: a MAC address is asked for, but no plugin of network {} declares the capability mac",
            list.name
        );
        Err(CniError::new(code::INVALID_CONFIG, msg))
    }

    /// The configuration that one of the network's plugins receives.
    fn config(
        &self,
        plugin: &PluginConf,
        capabilities: &Map<String, Value>,
    ) -> Result<Map<String, Value>, CniError> {
        let mut config = cni::request_config(&self.network.list, plugin, None, capabilities);
        let arguments = self.asked.map(Selection::arguments).unwrap_or_default();
        if !arguments.is_empty() {
            merge_args(&mut config, &arguments)?;
        }
        Ok(config)
    }
}

/// The facts about the node that the driver of a network needs.
pub(super) fn wishes(network: &Network, selection: Option<&Selection>, options: &Options) -> Wishes {
    let asked = |plugin: &PluginConf| -> Vec<Fact> {
        let Some(driver) = native(plugin.plugin_type(), options) else { return Vec::new() };
        // A device that is lacking is reported when the attachment is planned.
        match Device::of(network, selection, false).ok().filter(|_| driver.takes_device()) {
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

/// Whether netattach carries the type out itself, as an interface or chained.
pub(super) fn is_native(kind: &str, options: &Options) -> bool {
    native(kind, options).is_some() || is_chained(kind, options)
}

fn is_chained(kind: &str, options: &Options) -> bool {
    link::CHAINED.iter().any(|own| is_own(own, kind, options))
}

/// Whether the type is this one and is not executed.
fn is_own(own: &str, kind: &str, options: &Options) -> bool {
    kind == own && !options.exec.iter().any(|name| name == kind)
}

/// Refuses tables by source where they cannot be: loopback is not routed, and there is one rule for an address.
fn routed_by_source(steps: &[Step], position: usize) -> Result<(), CniError> {
    let why = if steps.contains(&Step::RaiseLoopback) {
        "loopback has no routes of its own"
    } else if steps.iter().any(|step| matches!(step, Step::UseTables(_))) {
        "the list has it already"
    } else {
        return Ok(());
    };
    Err(CniError::new(code::INVALID_CONFIG, format!("plugins[{position}].type: sbr: {why}")))
}

/// The driver of a type; `None` if netattach has none or the type is in `exec`.
pub(super) fn native(kind: &str, options: &Options) -> Option<&'static dyn Driver> {
    link::driver(kind).filter(|_| !options.exec.iter().any(|name| name == kind))
}

/// Prepares for an interface to be tuned. A link that netattach makes is made with its Ethernet address, by which it is
/// judged and which nobody else may have then; its end is its own. Another plugin's interface may be a device that goes
/// home, so what it was is noted.
fn tuned(steps: &mut Vec<Step>, tune: &mut Tune) -> Result<(), CniError> {
    let is_lo = steps.contains(&Step::RaiseLoopback);
    let refused = |what: &str| {
        CniError::new(
            code::INVALID_CONFIG,
            format!("key mac: {what} cannot have an Ethernet address of its own"),
        )
    };
    if is_lo && tune.properties != Properties::default() {
        return Err(CniError::new(code::INVALID_CONFIG, "tuning: of loopback only settings can be changed"));
    }
    let made = steps.iter_mut().find_map(|step| match step {
        Step::CreateLink(link) => Some(link),
        _ => None,
    });
    match (made, tune.properties.mac) {
        (Some(link), Some(mac)) => {
            let kind = link.kind();
            if !link.set_mac(mac) {
                return Err(refused(&format!("a link of kind {kind}")));
            }
            tune.properties.mac = None;
        }
        (Some(_), None) => {}
        (None, _) if !tune.properties.is_empty() => steps.push(Step::NoteProperties(tune.clone())),
        (None, _) => {}
    }
    Ok(())
}

/// Checks that a chained plugin of ours supports every capability that it receives.
fn check_offered(kind: &str, config: &Map<String, Value>) -> Result<(), PlanError> {
    let kind = link::CHAINED.into_iter().find(|own| *own == kind).unwrap_or_default();
    let asked = config.get("runtimeConfig").and_then(Value::as_object);
    let is_known = |key: &str| key == device_info::CAPABILITY || (key == MAC && kind == tuning::KIND);
    match asked.and_then(|asked| asked.keys().find(|key| !is_known(key))) {
        Some(capability) => Err(PlanError::Capability { capability: capability.clone(), kind }),
        None => Ok(()),
    }
}

fn delegate(kind: &str, config: &Map<String, Value>, device: Device<'_>) -> Step {
    let mut config = config.clone();
    device.insert_into(&mut config);
    Step::Delegate(Delegate { plugin: kind.to_owned(), config, role: Role::Plugin })
}

fn protect(
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
        ethertypes: network.ethertypes.clone(),
    })
}

/// Checks that one of our own kinds of interface supports every capability that it receives.
fn check_carried_out(driver: &dyn Driver, config: &Map<String, Value>) -> Result<(), PlanError> {
    let is_carried_out = |capability: &str| {
        NATIVE_CAPABILITIES.contains(&capability)
            || (capability == "bandwidth" && driver.is_judged(config))
            || (capability == PORT_MAPPINGS && driver.maps_ports())
            || (capability == DEVICE_ID && driver.takes_device())
    };
    let asked = config.get("runtimeConfig").and_then(Value::as_object);
    match asked.and_then(|asked| asked.keys().find(|key| !is_carried_out(key))) {
        Some(capability) => {
            Err(PlanError::Capability { capability: capability.clone(), kind: driver.kind() })
        }
        None => Ok(()),
    }
}

/// Merges a selection's `cni-args` over the `args.cni` of the configuration, key by key.
fn merge_args(config: &mut Map<String, Value>, extra: &Map<String, Value>) -> Result<(), CniError> {
    let wrong = |key: &str| CniError::new(code::INVALID_CONFIG, format!("key {key}: must be an object"));
    let args = config.entry("args").or_insert_with(|| Value::Object(Map::new()));
    let args = args.as_object_mut().ok_or_else(|| wrong("args"))?;
    let cni = args.entry("cni").or_insert_with(|| Value::Object(Map::new()));
    let cni = cni.as_object_mut().ok_or_else(|| wrong("args.cni"))?;
    for (key, value) in extra {
        cni.insert(key.clone(), value.clone());
    }
    Ok(())
}

/// A warning if the pod claims an address and netattach's own address management serves the attachment: it does not
/// support claims. The standard lets such an attachment succeed (section 4.1.2.1.11).
fn claim_without_effect(selection: &Selection, steps: &[Step]) -> Option<String> {
    let claim = selection.ipam_claim_reference.as_deref()?;
    let kind = steps.iter().find_map(|step| match step {
        Step::Lease(config) => Some(config.kind().name()),
        _ => None,
    })?;
    Some(format!("ipam-claim-reference {claim:?} has no effect: {kind} keeps no claims"))
}
