//! Plans one attachment of a pod: derives its steps from its network's configuration and the pod's request. Pure.

use serde_json::{Map, Value};

use super::device::{DEVICE_ID, Device};
use super::judged_first::judged_first;
use super::resolve::{Network, Numbers, Options, PORT_MAPPINGS, needs_device};
use super::{AttachmentPlan, CachedResults, Sandbox, chained, made_before, pod_sources};
use crate::budget;
use crate::cni::{self, CniArgs, CniError, PluginConf, code};
use crate::link::{
    self, Driver, Facts, PlanError, Wanted as Fact, Wishes, bandwidth, dataplane, firewall, portmap, sbr,
    tuning, vrf,
};
use crate::mac::Mac;
use crate::npwg::selection::Bandwidth;
use crate::npwg::{self, Selection, device_info};
use crate::spec::{Properties, Tune};
use crate::step::{Delegate, EnforceWhen, Protect, Role, SetDevice, Step};

/// The capabilities of `runtimeConfig` that the native plugins implement. A plugin must not declare a capability and
/// ignore it. The path of the device information is offered by netattach, not requested; a plugin that creates no
/// device may ignore it.
const NATIVE_CAPABILITIES: [&str; 4] = [IPS, "ipRanges", MAC, device_info::CAPABILITY];

/// The capability, and the key of arguments, that requests an Ethernet address.
const MAC: &str = "mac";

/// The capability, and the key of arguments, that requests IP addresses.
const IPS: &str = "ips";

/// Most keys that a warning lists.
const SHOWN_KEYS: usize = 8;

/// An attachment to plan.
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
    /// The result of the plugin that created the interface before netattach was called, if any.
    pub(super) made_before: Option<&'a Value>,
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

/// A plugin in a network's list.
struct Configured<'a> {
    /// Its position in the list, from 0.
    position: usize,
    kind: &'a str,
    /// The configuration that it receives.
    config: Map<String, Value>,
}

/// The plugins of a network's list, without those that are folded into the interface before them as properties.
struct Plugins<'a> {
    /// The driver that creates the interface, if netattach does.
    driver: Option<&'static dyn Driver>,
    first: Configured<'a>,
    chained: Vec<Configured<'a>>,
    /// Whether the list enables the dataplane for an interface that netattach creates.
    has_dataplane: bool,
}

fn configured<'a>(
    wanted: &Wanted<'a>,
    capabilities: &Map<String, Value>,
) -> Result<Vec<Configured<'a>>, CniError> {
    let plugins = wanted.network.list.plugins.iter().enumerate();
    let configured = |(position, plugin): (usize, &'a PluginConf)| {
        let config = wanted.config(plugin, capabilities)?;
        Ok(Configured { position, kind: plugin.plugin_type(), config })
    };
    plugins.map(configured).collect()
}

/// Folds plugins that only set properties of the interface into its configuration ([`chained::fold`]).
fn folded<'a>(plugins: Vec<Configured<'a>>, options: &Options) -> Result<Plugins<'a>, CniError> {
    let mut plugins = plugins.into_iter();
    let Some(mut first) = plugins.next() else {
        return Err(CniError::new(code::INVALID_CONFIG, "plugins: the list is empty"));
    };
    let chained: Vec<_> = plugins.collect();
    let is_ours = |plugin: &Configured<'_>| is_own(plugin.kind, plugin.kind, options);
    let by_us = chained.iter().filter(|plugin| is_ours(plugin));
    chained::check_once(by_us.map(|plugin| (plugin.position, plugin.kind, &plugin.config)))?;
    let Some(driver) = native(first.kind, options) else {
        return Ok(Plugins { driver: None, first, chained, has_dataplane: false });
    };
    let mut has_dataplane = false;
    let mut rest = Vec::with_capacity(chained.len());
    for plugin in chained {
        if plugin.kind == dataplane::KIND {
            check_offered(plugin.kind, &plugin.config)?;
            has_dataplane = true;
        }
        if !is_ours(&plugin) || !chained::fold(driver, &mut first.config, plugin.kind, &plugin.config)? {
            rest.push(plugin);
        }
    }
    Ok(Plugins { driver: Some(driver), first, chained: rest, has_dataplane })
}

/// Adds the pod's requests about source checks to the configuration of the plugin that enables the dataplane.
fn ask_sources(
    plugins: &mut Plugins<'_>,
    sandbox: &Sandbox,
    wanted: &Wanted<'_>,
    options: &Options,
) -> Result<(), CniError> {
    let behind = plugins.chained.iter_mut().find(|plugin| plugin.kind == dataplane::KIND);
    let (sources, is_judged) = match behind {
        Some(plugin) => (&mut plugin.config, true),
        None => {
            let config = &mut plugins.first.config;
            let is_judged = plugins.driver.is_some_and(|driver| driver.is_judged(config));
            (config, is_judged)
        }
    };
    let place = (sandbox, &wanted.network.name, is_judged);
    pod_sources::apply(sources, place, wanted.asked, &options.pod_sources)
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

/// The interface that chained plugins follow.
struct Place<'a> {
    request: link::Request<'a>,
    device: Device<'a>,
    /// Whether netattach creates the interface.
    is_own: bool,
    /// Whether another plugin creates the interface and the agent has a dataplane that can enforce policies on it.
    has_numbers: bool,
    /// When programs run for such an interface.
    when: EnforceWhen,
    /// The network's plugins as its author has written them.
    plugins: &'a [PluginConf],
}

/// The requests of chained plugins for the programs of an interface that another plugin creates.
#[derive(Default)]
struct Asked<'a> {
    limits: Option<Bandwidth>,
    /// The configuration of netattach as a chained plugin.
    dataplane: Option<&'a Map<String, Value>>,
}

/// Adds the steps of the chained plugins to those of the interface.
fn add_chained<'a>(
    steps: &mut Vec<Step>,
    chained: &'a [Configured<'_>],
    place: &Place<'_>,
    options: &Options,
) -> Result<Asked<'a>, CniError> {
    let has_dataplane = place.has_numbers && place.when != EnforceWhen::Never;
    let mut asked = Asked::default();
    for Configured { position, kind, config } in chained {
        let request = link::Request { config, ..place.request };
        let is_executed = chained::is_executed(kind, config, place.is_own, has_dataplane);
        let is_carried_out = is_chained(kind, options) && !is_executed;
        if is_carried_out {
            check_offered(kind, config)?;
        }
        match *kind {
            portmap::KIND if is_carried_out => {
                if chained::ports(config).is_some() {
                    let translate = portmap::parse(&request)?;
                    steps.extend([Step::FindReach, Step::Translate(translate)]);
                }
            }
            bandwidth::KIND if is_carried_out => {
                asked.limits = asked.limits.or(bandwidth::parse(&request)?);
            }
            dataplane::KIND => {
                check_dataplane_runs(place.has_numbers, place.when)?;
                asked.dataplane = Some(config);
            }
            firewall::KIND if is_carried_out => chained::admit(steps, firewall::parse(&request)?),
            sbr::KIND if is_carried_out => {
                let by_source = sbr::parse(&request)?;
                check_routed_otherwise(steps, (*position, kind))?;
                steps.extend([Step::ChooseTables(by_source.clone()), Step::UseTables(by_source)]);
            }
            vrf::KIND if is_carried_out => {
                let vrf = vrf::parse(&request)?;
                check_routed_otherwise(steps, (*position, kind))?;
                steps.extend([Step::ChooseVrf(vrf.clone()), Step::JoinVrf(vrf)]);
            }
            tuning::KIND if is_carried_out => {
                let mut tune = tuning::parse(&request)?;
                note_authors(&mut tune, place.plugins.get(*position), &request);
                tuned(steps, &mut tune)?;
                steps.push(Step::Tune(tune));
            }
            _ => {
                check_can_follow((*position, kind), place.is_own, options)?;
                steps.push(delegate(kind, config, place.device));
            }
        }
    }
    Ok(asked)
}

/// Records that a pod does not ask for settings that the network's author has under `args.cni` with the same values.
fn note_authors(tune: &mut Tune, plugin: Option<&PluginConf>, request: &link::Request<'_>) {
    let Some(plugin) = plugin.filter(|_| tune.sysctls.iter().any(|one| one.asked)) else { return };
    // If the configuration cannot be read, no setting counts as the author's.
    let own = tuning::parse(&link::Request { config: plugin.raw(), ..*request });
    let own = own.map(|own| own.sysctls).unwrap_or_default();
    for one in tune.sysctls.iter_mut().filter(|one| one.asked) {
        one.asked = !own.iter().any(|own| own.path == one.path && own.value == one.value);
    }
}

/// Refuses a chained plugin that makes an interface of its own.
fn check_can_follow(
    (position, kind): (usize, &str),
    is_behind_own: bool,
    options: &Options,
) -> Result<(), CniError> {
    // A plugin that follows another one is executed, because the result of that one is known only then. After an
    // interface that netattach creates there is nothing for it to create.
    let follows = |driver: &dyn Driver| !is_behind_own && driver.lacks_alone().is_some();
    if native(kind, options).is_some_and(|driver| !follows(driver)) {
        let msg = format!(
            "plugins[{position}].type: {kind} makes an interface and can only be the first of a list"
        );
        return Err(CniError::new(code::INVALID_CONFIG, msg));
    }
    Ok(())
}

/// Returns the steps that attach the dataplane to an interface that another plugin creates.
fn judged_from_without(
    asked: &Asked<'_>,
    place: &Place<'_>,
    network: &Network,
    numbers: &mut (dyn Numbers + '_),
) -> Result<[Step; 2], CniError> {
    // The programs enforce the rate limit, so they must not wait for a policy.
    let when = if asked.limits.is_some() { EnforceWhen::Always } else { place.when };
    let mut protect = protect(network, numbers, false, when)?;
    if let Some(config) = asked.dataplane {
        let request = link::Request { config, protect: Some(&protect), ..place.request };
        protect = dataplane::parse(&request)?.unwrap_or(protect);
    }
    protect.bandwidth = asked.limits.or(protect.bandwidth);
    Ok([Step::FindDevice, Step::Protect(protect)])
}

/// Warnings about parts of the configuration and of the pod's request that have no effect.
fn warnings(wanted: &Wanted<'_>, steps: &[Step], options: &Options) -> Vec<String> {
    let plugins = wanted.network.list.plugins.iter();
    let own = plugins.filter(|plugin| is_native(plugin.plugin_type(), options));
    let claim = wanted.asked.and_then(|selection| claim_without_effect(selection, steps));
    own.filter_map(without_effect).chain(claim).collect()
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

    /// Checks that the pod may choose its addresses: a network declares the capabilities `mac` and `ips` to permit
    /// that (NPWG 4.1.2.1.3, 4.1.2.1.4). This covers every way in which a pod can request an address, and its runtime
    /// an Ethernet address. Plugins in Go read keys in any case ([`cni::keys::is_same`]).
    fn check_addresses_are_permitted(&self, cni_args: &CniArgs) -> Result<(), CniError> {
        let argument = |name: &str| {
            let arguments = self.asked?.cni_args.as_ref()?;
            let key = arguments.keys().find(|key| cni::keys::is_same(key, name))?;
            Some(format!("cni-args.{key}"))
        };
        let of_runtime = || {
            let is_asked = self.default && cni_args.get("MAC").is_some_and(|mac| !mac.is_empty());
            is_asked.then(|| "MAC in CNI_ARGS".to_owned())
        };
        let list = &self.network.list;
        for (capability, way, what) in [
            (MAC, argument(MAC).or_else(of_runtime), "a MAC address is"),
            (IPS, argument(IPS), "IP addresses are"),
        ] {
            let Some(way) = way else { continue };
            if !cni::capability::undeclared(list, [capability]).is_empty() {
                let msg = format!(
                    "key {way}: {what} asked for, but no plugin of network {} declares the capability {capability}",
                    list.name
                );
                return Err(CniError::new(code::INVALID_CONFIG, msg));
            }
        }
        Ok(())
    }

    /// Returns the configuration that one of the network's plugins receives.
    pub(super) fn config(
        &self,
        plugin: &PluginConf,
        capabilities: &Map<String, Value>,
    ) -> Result<Map<String, Value>, CniError> {
        let mut config = cni::request_config(&self.network.list, plugin, None, capabilities);
        let arguments = self.asked.map(Selection::arguments).unwrap_or_default();
        if !arguments.is_empty() {
            merge_args(&mut config, &arguments)?;
            cni::keys::as_documented(&mut config);
        }
        Ok(config)
    }
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

/// Whether netattach implements the type itself, as an interface plugin or a chained one.
pub(super) fn is_native(kind: &str, options: &Options) -> bool {
    native(kind, options).is_some() || is_chained(kind, options)
}

fn is_chained(kind: &str, options: &Options) -> bool {
    link::chained(kind).is_some_and(|own| is_own(own, kind, options))
}

/// Whether the type is `own` and is not executed as a plugin.
fn is_own(own: &str, kind: &str, options: &Options) -> bool {
    kind == own && !options.exec.iter().any(|name| name == kind)
}

/// Refuses netattach after another plugin's interface if the dataplane would not run.
pub(super) fn check_dataplane_runs(is_there: bool, when: EnforceWhen) -> Result<(), CniError> {
    let why = match (is_there, when) {
        (false, _) => "the agent has no dataplane",
        (true, EnforceWhen::Never) => {
            "enforce is never, by the network's definition or the agent's settings; one of the two"
        }
        (true, _) => return Ok(()),
    };
    Err(CniError::new(code::INVALID_CONFIG, format!("plugin {} behind another: {why}", dataplane::KIND)))
}

/// Refuses a chained plugin that routes an interface that cannot be routed so: loopback is not routed, an address can
/// have only one rule, and the table of a VRF applies to all addresses.
fn check_routed_otherwise(steps: &[Step], (position, kind): (usize, &str)) -> Result<(), CniError> {
    let by_source = steps.iter().any(|step| matches!(step, Step::UseTables(_)));
    let by_vrf = steps.iter().any(|step| matches!(step, Step::JoinVrf(_)));
    let why = if steps.contains(&Step::RaiseLoopback) {
        "loopback has no routes of its own"
    } else if (by_source && kind == sbr::KIND) || (by_vrf && kind == vrf::KIND) {
        "the list has it already"
    } else if by_vrf {
        "vrf before it routes the interface by the VRF's table; one of the two"
    } else if kind == vrf::KIND && steps.contains(&Step::ChooseHostAccess) {
        "hostAccess leads between pod and node by the main tables, which the interface leaves; one of the two"
    } else if by_source {
        "sbr before it routes the interface by tables of its addresses; one of the two"
    } else {
        return Ok(());
    };
    Err(CniError::new(code::INVALID_CONFIG, format!("plugins[{position}].type: {kind}: {why}")))
}

/// Returns the driver of a type; `None` if netattach has none or the type is in `exec`.
pub(super) fn native(kind: &str, options: &Options) -> Option<&'static dyn Driver> {
    link::driver(kind).filter(|_| !options.exec.iter().any(|name| name == kind))
}

/// Plans the tuning of an interface. A link that netattach creates gets its Ethernet address at creation, because the
/// dataplane checks that address and other links must not have it; the link need not be restored. A device of the
/// node gets the address before the pod has the device, from its physical function if there is one. Another plugin's
/// interface may be a device that goes back to the node, so its former properties are stored.
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
    if let Some(mac) = tune.properties.mac
        && let Some(at) = steps.iter().position(|step| matches!(step, Step::ClaimDevice(_)))
    {
        set_device(steps, at, mac)?;
        tune.properties.mac = None;
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

/// Adds the Ethernet address to the settings of the device that is claimed at that position.
fn set_device(steps: &mut Vec<Step>, claimed_at: usize, mac: Mac) -> Result<(), PlanError> {
    if let Some(Step::ClaimDevice(device)) = steps.get(claimed_at) {
        link::check_mac_can_be_set(device)?;
    }
    match steps.get_mut(claimed_at + 1) {
        Some(Step::SetDevice(set)) => set.mac = Some(mac),
        _ => steps
            .insert(claimed_at + 1, Step::SetDevice(SetDevice { mac: Some(mac), ..SetDevice::default() })),
    }
    Ok(())
}

/// Checks that a chained plugin of netattach supports every capability that it receives.
pub(super) fn check_offered(kind: &str, config: &Map<String, Value>) -> Result<(), PlanError> {
    let kind = link::chained(kind).unwrap_or_default();
    let asked = config.get("runtimeConfig").and_then(Value::as_object);
    let own = match kind {
        tuning::KIND => MAC,
        portmap::KIND => PORT_MAPPINGS,
        bandwidth::KIND | dataplane::KIND => bandwidth::CAPABILITY,
        _ => device_info::CAPABILITY,
    };
    let is_known = |key: &str| key == device_info::CAPABILITY || key == own;
    match asked.into_iter().flatten().find(|(key, value)| !is_known(key) && is_something(value)) {
        Some((capability, _)) => Err(PlanError::Capability { capability: capability.clone(), kind }),
        None => Ok(()),
    }
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

/// Checks that a native interface plugin supports every capability that it receives.
pub(super) fn check_carried_out(driver: &dyn Driver, config: &Map<String, Value>) -> Result<(), PlanError> {
    let is_carried_out = |capability: &str| {
        NATIVE_CAPABILITIES.contains(&capability)
            || (capability == bandwidth::CAPABILITY && driver.is_judged(config))
            || (capability == PORT_MAPPINGS && driver.maps_ports())
            || (capability == DEVICE_ID && driver.takes_device())
    };
    let asked = config.get("runtimeConfig").and_then(Value::as_object).into_iter().flatten();
    let mut lost = asked.filter(|(capability, value)| is_something(value) && !is_carried_out(capability));
    match lost.next() {
        Some((capability, _)) => {
            Err(PlanError::Capability { capability: capability.clone(), kind: driver.kind() })
        }
        None => Ok(()),
    }
}

/// Whether the value of a capability contains a request.
fn is_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

/// Merges a selection's `cni-args` over the `args.cni` of the configuration, key by key.
fn merge_args(config: &mut Map<String, Value>, extra: &Map<String, Value>) -> Result<(), CniError> {
    let args = object_at(config, "args", "args")?;
    let cni = object_at(args, "cni", "args.cni")?;
    for (key, value) in extra {
        cni.insert(key.clone(), value.clone());
    }
    Ok(())
}

/// Returns the object that is the value of a key, which is inserted if the key is missing or null. `path`: for the
/// error.
fn object_at<'v>(
    within: &'v mut Map<String, Value>,
    key: &str,
    path: &str,
) -> Result<&'v mut Map<String, Value>, CniError> {
    let value = within.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    let wrong = || CniError::new(code::INVALID_CONFIG, format!("key {path}: must be an object"));
    value.as_object_mut().ok_or_else(wrong)
}

/// Returns a warning if the configuration of a plugin that netattach implements has keys that it does not know, which
/// may be misspelt.
pub(super) fn without_effect(plugin: &PluginConf) -> Option<String> {
    let unknown = cni::keys::unknown(plugin.raw());
    let (shown, more) = unknown.split_at(unknown.len().min(SHOWN_KEYS));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let plural = if unknown.len() > 1 { "s" } else { "" };
    let kind = plugin.plugin_type();
    (!unknown.is_empty()).then(|| {
        format!(
            "key{plural} {}{more}: without effect, netattach's own {kind} plugin has no such key",
            shown.join(", ")
        )
    })
}

/// Returns a warning if the pod claims an address and netattach's own IPAM serves the attachment, which does not
/// support claims. The standard lets such an attachment succeed (section 4.1.2.1.11).
fn claim_without_effect(selection: &Selection, steps: &[Step]) -> Option<String> {
    let claim = selection.ipam_claim_reference.as_deref()?;
    let kind = steps.iter().find_map(|step| match step {
        Step::Lease(config) => Some(config.kind().name()),
        _ => None,
    })?;
    Some(format!("ipam-claim-reference {claim:?} has no effect: {kind} keeps no claims"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::fixtures;

    #[test]
    fn an_interface_in_a_vrf_has_no_host_access() {
        let steps = [Step::ChooseHostAccess, Step::GiveHostAccess];
        let said = |kind| check_routed_otherwise(&steps, (1, kind)).map_err(|error| (error.code, error.msg));
        let why = "hostAccess leads between pod and node by the main tables, which the interface leaves; one of the two";
        let expected = (code::INVALID_CONFIG, format!("plugins[1].type: vrf: {why}"));
        assert_eq!(said(vrf::KIND), Err(expected));
        assert_eq!(said(sbr::KIND), Ok(()));
        assert_eq!(check_routed_otherwise(&[], (1, vrf::KIND)).ok(), Some(()));
    }

    #[test]
    fn arguments_of_a_pod_are_merged_into_those_of_the_definition_key_by_key() {
        let merged = |mut config: Value| {
            let extra = json!({"mtu": 1400, "mac": null});
            let merged = merge_args(config.as_object_mut().unwrap(), extra.as_object().unwrap());
            merged.map(|()| config).map_err(|error| (error.code, error.msg))
        };
        let alone = json!({"args": {"cni": {"mtu": 1400, "mac": null}}});
        for absent in [json!({}), json!({"args": null}), json!({"args": {}}), json!({"args": {"cni": null}})]
        {
            assert_eq!(merged(absent.clone()), Ok(alone.clone()), "{absent}");
        }
        let beside = json!({"args": {"cni": {"mtu": 9000, "promisc": true}, "labels": {}}});
        let expected = json!({"args": {"cni": {"mtu": 1400, "mac": null, "promisc": true}, "labels": {}}});
        assert_eq!(merged(beside), Ok(expected));
        for (config, path) in [(json!({"args": 7}), "args"), (json!({"args": {"cni": []}}), "args.cni")] {
            let refused = (code::INVALID_CONFIG, format!("key {path}: must be an object"));
            assert_eq!(merged(config), Err(refused));
        }
    }

    fn network(config: &Value) -> Network {
        Network {
            name: "shop/lan".into(),
            list: cni::NetworkList::from_map(config.as_object().unwrap().clone()).unwrap().into(),
            resource: None,
            enforce: None,
            ethertypes: Vec::new(),
            device: None,
        }
    }

    #[test]
    fn an_interface_is_limited_by_one_plugin() {
        let limited = json!({"type": "bandwidth", "ingressRate": 5000});
        let check = |first: &Value, last: &Value, exec: &[&str]| {
            let plugins = [first, &limited, &json!({"type": "other"}), last];
            let network = network(&json!({"name": "lan", "cniVersion": "1.0.0", "plugins": plugins}));
            let facts = Facts::default();
            let wanted = fixtures::wanted(&network, &facts);
            let exec = exec.iter().map(|kind| (*kind).to_owned()).collect();
            let options = Options { exec, ..Options::default() };
            let sandbox = fixtures::sandbox("a");
            let planned = attachment(&sandbox, &wanted, &CniArgs::default(), &options, None);
            planned.map(drop).map_err(|error| (error.code, error.msg))
        };
        let msg = "attach net1 (shop/lan): plugins[3].type: bandwidth: a plugin before it limits the interface already";
        let other = json!({"type": "bandwidth", "egressRate": 6000});
        let bridge =
            json!({"type": "bridge", "ipam": {"type": "static", "addresses": [{"address": "10.1.0.2/24"}]}});
        let executed = json!({"type": "flannel"});
        for first in [&bridge, &executed] {
            for last in [&limited, &other] {
                assert_eq!(check(first, last, &[]), Err((code::INVALID_CONFIG, msg.to_owned())), "{first}");
            }
        }
        assert_eq!(check(&executed, &json!({"type": "bandwidth"}), &[]), Ok(()));
        assert_eq!(check(&executed, &other, &[bandwidth::KIND]), Ok(()));
    }

    /// Rows: IVL-chained.
    #[test]
    fn an_interface_plugin_is_the_first_of_a_list_or_executed_where_it_can_follow_another() {
        let planned = |first: &Value, last: &Value| {
            let plugins = [first, last];
            let network = network(&json!({"name": "lan", "cniVersion": "1.0.0", "plugins": plugins}));
            let facts = Facts::default();
            let wanted = fixtures::wanted(&network, &facts);
            let sandbox = fixtures::sandbox("a");
            let planned = attachment(&sandbox, &wanted, &CniArgs::default(), &Options::default(), None);
            let executed = |step: &Step| match step {
                Step::Delegate(delegate) => Some(delegate.plugin.clone()),
                _ => None,
            };
            planned
                .map(|planned| planned.steps.iter().filter_map(executed).collect::<Vec<_>>())
                .map_err(|error| (error.code, error.msg))
        };
        let refused = |kind: &str| {
            let why = "makes an interface and can only be the first of a list";
            Err((code::INVALID_CONFIG, format!("attach net1 (shop/lan): plugins[1].type: {kind} {why}")))
        };
        let (executed, ipvlan) = (json!({"type": "makes-a-card"}), json!({"type": "ipvlan"}));
        assert_eq!(planned(&executed, &ipvlan), Ok(vec!["makes-a-card".to_owned(), "ipvlan".to_owned()]));
        assert_eq!(planned(&executed, &json!({"type": "macvlan"})), refused("macvlan"));
        assert_eq!(planned(&json!({"type": "macvlan"}), &ipvlan), refused("ipvlan"));
    }

    /// The key may be in another letter case: it is read as Go reads it.
    ///
    /// Rows: TUN-asked-for.
    #[test]
    fn a_setting_is_asked_for_by_a_pod_where_its_author_has_it_neither_as_a_key_nor_as_an_argument() {
        let asked = |arguments: &Value| -> Vec<(String, String, bool)> {
            let tuning = json!({
                "type": "tuning", "sysctl": {"net.core.somaxconn": "500"},
                "args": {"cni": {"sysctl": {"net.ipv4.ip_forward": "1"}}},
            });
            let plugins = json!([{"type": "bridge"}, tuning]);
            let network = network(&json!({"name": "lan", "cniVersion": "1.0.0", "plugins": plugins}));
            let selection = json!({"namespace": "shop", "name": "lan", "cni-args": arguments});
            let selection: Selection = serde_json::from_value(selection).unwrap();
            let facts = Facts::default();
            let wanted = Wanted { asked: Some(&selection), ..fixtures::wanted(&network, &facts) };
            let sandbox = fixtures::sandbox("a");
            let planned = attachment(&sandbox, &wanted, &CniArgs::default(), &Options::default(), None);
            let settings = planned.unwrap().steps.into_iter().find_map(|step| match step {
                Step::Tune(tune) => Some(tune.sysctls),
                _ => None,
            });
            settings.unwrap().into_iter().map(|one| (one.key, one.value, one.asked)).collect()
        };
        let row = |key: &str, value: &str, asked: bool| (format!("net.{key}"), value.to_owned(), asked);
        let (somaxconn, forward) = (row("core.somaxconn", "500", false), row("ipv4.ip_forward", "1", false));
        let both = vec![somaxconn.clone(), forward];
        assert_eq!(asked(&json!({"mtu": 1400})), both);
        assert_eq!(asked(&json!({"sysctl": {"net.ipv4.ip_forward": "1"}})), both);
        let of_pod = vec![somaxconn, row("ipv4.ip_forward", "0", true)];
        for key in ["sysctl", "SYSCTL", "\u{17f}ysctl"] {
            assert_eq!(asked(&json!({key: {"net.ipv4.ip_forward": "0"}})), of_pod, "{key}");
        }
    }

    /// Returns the error for a pod with these `cni-args` on a network that declares these capabilities.
    fn refused(capabilities: &Value, arguments: &Value) -> Option<String> {
        let config = json!({"name": "lan", "cniVersion": "1.0.0", "type": "macvlan",
            "capabilities": capabilities, "ipam": {"type": "static"}});
        let network = network(&config);
        let selection: Selection =
            serde_json::from_value(json!({"namespace": "shop", "name": "lan", "cni-args": arguments}))
                .unwrap();
        let facts = Facts::default();
        let wanted = Wanted { asked: Some(&selection), ..fixtures::wanted(&network, &facts) };
        let error = wanted.check_addresses_are_permitted(&CniArgs::default()).err()?;
        assert_eq!(error.code, code::INVALID_CONFIG);
        Some(error.msg)
    }

    #[test]
    fn a_pod_chooses_addresses_only_where_the_network_lets_it() {
        let both = json!({"ips": true, "mac": true});
        let said = |start: &str, capability: &str| {
            Some(format!(
                "key cni-args.{start} asked for, but no plugin of network lan declares the capability {capability}"
            ))
        };
        for key in ["ips", "IPs", "ip\u{17f}", "IP\u{17f}"] {
            let arguments = json!({key: ["10.244.1.5/0"]});
            let expected = said(&format!("{key}: IP addresses are"), "ips");
            assert_eq!(refused(&json!({"mac": true}), &arguments), expected);
            assert_eq!(refused(&both, &arguments), None);
        }
        let arguments = json!({"MAC": "02:00:00:00:00:01"});
        assert_eq!(refused(&json!({"ips": true}), &arguments), said("MAC: a MAC address is", "mac"));
        assert_eq!(refused(&both, &arguments), None);
        assert_eq!(refused(&json!({}), &json!({"colour": "red"})), None);
    }
}
