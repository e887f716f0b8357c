//! Turns a pod's networks into a plan. Pure.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::attachment::{self, Wanted, attachment};
use super::cluster_routes::{self, Keep, Known};
use super::pod_sources::Permission;
use super::{AttachmentPlan, CachedResults, Dynamic, Plan, Sandbox, routing, vrf};
use crate::budget;
use crate::cni::multi_network;
use crate::cni::{self, CniArgs, CniError, CniResult, NetworkList, PluginConf, Version, code};
use crate::ipam;
use crate::link::{self, Driver, Facts, Wishes};
use crate::netns::NetnsId;
use crate::npwg::status::Device;
use crate::npwg::{self, NetworkName, Selection};
use crate::step::{EnforceWhen, Step, StepRef};

/// The capability by which a runtime passes the hostPorts of a pod.
pub(super) const PORT_MAPPINGS: &str = "portMappings";
/// The usual name of pods' interfaces.
const USUAL_INTERFACE: &str = "eth0";
/// Most ports that a message lists.
const SHOWN_PORTS: usize = 8;

/// A network to attach a pod to.
#[derive(Debug, Clone)]
pub struct Network {
    /// Name of its definition, or the `name` of the configuration itself.
    pub name: NetworkName,
    /// Its configuration, shared by all its attachments.
    pub list: Arc<NetworkList>,
    /// The extended resource that provides its devices ([`npwg::RESOURCE_ANNOTATION`]).
    pub resource: Option<String>,
    /// When programs run for its attachments that other plugins create, if the network's definition sets that.
    pub enforce: Option<EnforceWhen>,
    /// Ethertypes that its attachments may exchange besides IP and ARP.
    pub ethertypes: Vec<u16>,
    /// The device that this attachment of the network gets, if it needs one.
    pub device: Option<Device>,
}

impl Network {
    /// Makes a network without a definition.
    pub fn of_configuration(name: &str, list: Arc<NetworkList>) -> Self {
        let name = NetworkName::Configuration(name.to_owned());
        Self { name, list, resource: None, enforce: None, ethertypes: Vec::new(), device: None }
    }
}

/// The networks of a pod, with all references resolved.
#[derive(Debug, Clone)]
pub struct Intent {
    /// The default network: the node's, or the one that the pod selected.
    pub default: Network,
    /// The pod's selection of the default network, if the pod selected it.
    pub default_selection: Option<Selection>,
    /// The additional networks in the order of the annotation.
    pub selections: Vec<(Selection, Network)>,
    /// Warnings for the pod's author; they prevent nothing.
    pub warnings: Vec<Warning>,
    /// The cluster's ranges; `None`: not known yet.
    pub cluster: Option<Known>,
}

impl Intent {
    /// Returns the networks, the default network first.
    pub fn networks(&self) -> impl Iterator<Item = &Network> {
        std::iter::once(&self.default).chain(self.selections.iter().map(|(_, network)| network))
    }

    /// Returns the networks with the pod's selections of them, the default network first.
    pub fn selected(&self) -> impl Iterator<Item = (Option<&Selection>, &Network)> {
        let default = (self.default_selection.as_ref(), &self.default);
        let others = self.selections.iter().map(|(selection, network)| (Some(selection), network));
        std::iter::once(default).chain(others)
    }
}

/// A problem in a pod's selections that is tolerated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Position of the selection, from 0; `None`: the warning concerns all of them, or the default network's.
    pub selection: Option<usize>,
    /// The text for the user.
    pub text: String,
}

/// The agent's settings that apply to all plans.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Plugin types that are always executed although netattach implements them (`delegation.exec`).
    pub exec: Vec<String>,
    /// Which attachments are written to libcni's cache (`delegation.resultCache`).
    pub remembered: CachedResults,
    /// Directory of device information (`deviceInfoDir`).
    pub device_info_dir: PathBuf,
    /// When programs run for attachments that other plugins create (`delegation.enforce`).
    pub enforce: EnforceWhen,
    /// The effect of a hostPort that the default network cannot open (`unsupportedPortMappings`).
    pub port_mappings: UnsupportedPortMappings,
    /// The routes that stay on the cluster's interface when the default routes of a pod move (`keepClusterRoutes`).
    pub keep_cluster_routes: Option<Keep>,
    /// Whether pods and definitions belong to a cluster, where their authors are not the node's administrators.
    pub in_cluster: bool,
    /// The exceptions from the source check that pods may request (`podSources`).
    pub pod_sources: Vec<Permission>,
}

/// The effect of a hostPort that no plugin of the default network can open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnsupportedPortMappings {
    /// The pod fails: otherwise it would be Ready although its port is closed.
    #[default]
    Fail,
    /// The pod is attached, with a warning in its network-status: another program may open its ports.
    Warn,
}

/// Assigns numbers to attachments and networks. Absent if there is no dataplane.
pub trait Numbers {
    /// A number for a new attachment.
    ///
    /// # Errors
    /// None is free.
    fn attachment(&mut self) -> Result<u32, CniError>;
    /// The number of a network, the same for the same name while any attachment of it exists.
    fn network(&mut self, name: &NetworkName) -> u32;
}

/// Returns the facts about the node that are needed to plan attachments of these networks with these selections.
pub fn wishes<'n>(
    wanted: impl IntoIterator<Item = (Option<&'n Selection>, &'n Network)>,
    options: &Options,
) -> Wishes {
    wanted.into_iter().flat_map(|(asked, network)| attachment::wishes(network, asked, options)).collect()
}

/// Whether attachments of the network need a device of its resource. Most native plugins take no device: a resource
/// of their networks only determines the nodes on which pods can run.
pub fn needs_device(network: &Network, options: &Options) -> bool {
    let may_take_it = |plugin: &PluginConf| {
        let kind = plugin.plugin_type();
        !attachment::is_native(kind, options)
            || attachment::native(kind, options).is_some_and(Driver::takes_device)
    };
    network.resource.is_some() && network.list.plugins.iter().any(may_take_it)
}

/// Plans the attachments of a sandbox: the default network first, then the selections in order.
///
/// # Errors
/// The error names the attachment and the key; nothing has been done yet.
pub fn resolve(
    sandbox: Sandbox,
    request: &cni::Request,
    intent: &Intent,
    (options, facts): (&Options, &Facts),
    mut numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<Plan, CniError> {
    check_extent(intent)?;
    let selections: Vec<Selection> =
        intent.selections.iter().map(|(selection, _)| selection.clone()).collect();
    let names = npwg::interface_names(&selections, &["lo", &request.ifname])
        .map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))?;
    let mut attachments =
        vec![default_attachment(&sandbox, request, intent, (options, facts), numbers.as_deref_mut())?];
    // Only the default network's result is returned to the runtime.
    for default in &attachments {
        check_result_is_expressible(request.version, &default.steps)?;
    }
    for ((selection, network), ifname) in intent.selections.iter().zip(&names) {
        attachments.push(selected(
            &sandbox,
            selection,
            network,
            ifname,
            (options, facts),
            numbers.as_deref_mut(),
        )?);
    }
    vrf::check_names(&attachments)?;
    for warning in &intent.warnings {
        let about = warning.selection.map_or(0, |selection| selection + 1);
        if let Some(attachment) = attachments.get_mut(about) {
            attachment.warnings.push(warning.text.clone());
        }
    }
    settle_routing(&mut attachments, intent, options)?;
    Ok(Plan { sandbox, attachments, dynamic: None })
}

/// Checks the size of the plan: it contains the network's configuration once per attachment.
fn check_extent(intent: &Intent) -> Result<(), CniError> {
    let extents = intent.networks().map(|network| network.list.extent());
    let (values, bytes) = extents.fold((0, 0), |(values, bytes), (more, text)| (values + more, bytes + text));
    budget::POD_TEXT.check(bytes)?;
    Ok(budget::POD_VALUES.check(values)?)
}

/// Appends the last steps, which concern the pod as a whole.
fn settle_routing(
    attachments: &mut [AttachmentPlan],
    intent: &Intent,
    options: &Options,
) -> Result<(), CniError> {
    let of_cluster = attachments.first().and_then(vrf::asked_for).map(|vrf| vrf.name.clone());
    for (position, (selection, _)) in intent.selections.iter().enumerate() {
        // At most one selection has the key.
        let Some(gateways) = &selection.default_route else { continue };
        let Some(attachment) = attachments.get_mut(position + 1) else { continue };
        if routing::tables_asked_for(attachment).is_some_and(|asked| asked.table.is_none()) {
            let msg = format!(
                "attach {} ({}): key default-route: sbr behind the interface moves its routes to tables by source address; \
                 one of the two",
                attachment.ifname, attachment.network
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        if let Some(asked) = vrf::asked_for(attachment) {
            let msg = format!(
                "attach {} ({}): key default-route: vrf behind the interface moves its routes to the table of VRF {}; one of \
                 the two",
                attachment.ifname, attachment.network, asked.name
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        // Numbers fit: see `Plan::steps`.
        let at = StepRef(position as u16 + 1, attachment.steps.len() as u16);
        let keep = options.keep_cluster_routes.as_ref();
        if let (Some(_), Some(vrf)) = (keep, &of_cluster) {
            let msg = format!(
                "attach {} ({}): key default-route: the cluster's interface is in VRF {vrf}, so its routes cannot stay in the \
                 main table (keepClusterRoutes)",
                attachment.ifname, attachment.network
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        let keep =
            keep.map(|keep| cluster_routes::destinations(keep, intent.cluster.as_ref())).transpose()?;
        let (keep, missing) = keep.map(|keep| (keep.ranges, keep.missing)).unzip();
        attachment.warnings.extend(missing.flatten());
        attachment.steps.push(Step::MoveDefaultRoutes { gateways: gateways.clone(), keep });
        for attachment in &mut *attachments {
            attachment.yields_to = Some(at);
        }
    }
    let keeps = |step: &Step| matches!(step, Step::MoveDefaultRoutes { keep: Some(_), .. });
    let keeps = attachments.iter().flat_map(|attachment| &attachment.steps).any(keeps);
    let mut own =
        attachments.iter_mut().filter(|attachment| routing::own_configuration(attachment).is_some());
    // A conflict needs at least two attachments, or one and what is kept of the cluster.
    let last = own.next_back();
    if let Some(last) = last.filter(|_| keeps || own.next().is_some()) {
        last.steps.push(Step::RouteBySource);
    }
    Ok(())
}

/// Plans an attachment of a network without a request, to check whether it would be possible. `None`: the pod
/// completes the configuration at ADD, so it cannot be judged earlier.
///
/// # Errors
/// As for [`resolve`].
pub fn rehearse(network: &Network, options: &Options) -> Result<Option<AttachmentPlan>, CniError> {
    // Any sandbox will do.
    let sandbox = Sandbox {
        container_id: "rehearsal".to_owned(),
        ifname: USUAL_INTERFACE.to_owned(),
        netns: String::new(),
        netns_id: NetnsId { device: 0, inode: 0 },
        cni_args: String::new(),
        cni_path: Vec::new(),
        config_name: String::new(),
        pod: None,
    };
    // Devices are allocated to pods.
    let network = Network { resource: None, ..network.clone() };
    // Any result will do.
    let anything = Value::Object(Map::new());
    let wanted = Wanted {
        network: &network,
        ifname: &sandbox.ifname,
        default: true,
        remembered: CachedResults::Off,
        offered: Map::new(),
        asked: None,
        facts: &Facts::default(),
        made_before: Some(&anything).filter(|_| multi_network::calls_itself(&network.list)),
    };
    let is_completed =
        |plugin: &PluginConf| ipam::is_completed_at_add(&cni::status_config(&network.list, plugin));
    match attachment(&sandbox, &wanted, &CniArgs::default(), options, Some(&mut NoNumbers)) {
        Err(_) if network.list.plugins.iter().any(is_completed) => Ok(None),
        planned => planned.map(Some),
    }
}

/// Numbers for a rehearsal, which no attachment gets: so a plan that needs the dataplane is not refused.
struct NoNumbers;

impl Numbers for NoNumbers {
    fn attachment(&mut self) -> Result<u32, CniError> {
        Ok(0)
    }

    fn network(&mut self, _: &NetworkName) -> u32 {
        0
    }
}

/// Plans an additional attachment of a live sandbox; its interface name is that of `sandbox`.
///
/// # Errors
/// The error names the attachment and the key; nothing has been done yet.
pub fn one_more(
    sandbox: Sandbox,
    dynamic: Dynamic,
    (selection, network): &(Selection, Network),
    (options, facts): (&Options, &Facts),
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<Plan, CniError> {
    if selection.default_route.is_some() {
        let msg = format!(
            "attach {} ({}): key default-route: the default routes of a live pod are not moved; detaching would \
             have to bring them back",
            sandbox.ifname, network.name
        );
        return Err(CniError::new(code::UNSUPPORTED_FIELD, msg));
    }
    let attachment = selected(&sandbox, selection, network, &sandbox.ifname, (options, facts), numbers)?;
    Ok(Plan { sandbox, attachments: vec![attachment], dynamic: Some(dynamic) })
}

fn selected(
    sandbox: &Sandbox,
    selection: &Selection,
    network: &Network,
    ifname: &str,
    (options, facts): (&Options, &Facts),
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<AttachmentPlan, CniError> {
    let wanted = Wanted {
        network,
        ifname,
        default: false,
        remembered: options.remembered,
        offered: Map::new(),
        asked: Some(selection),
        facts,
        made_before: None,
    };
    // Other arguments of the runtime apply only to the default network.
    let of_pod = CniArgs::from(sandbox.cni_args.clone()).of_pod();
    attachment(sandbox, &wanted, &of_pod, options, numbers)
}

/// Plans the default network. Only the default network gets the runtime's arguments (NPWG 7.5); the pod's selection of
/// a default network overrides them.
fn default_attachment(
    sandbox: &Sandbox,
    request: &cni::Request,
    intent: &Intent,
    (options, facts): (&Options, &Facts),
    numbers: Option<&mut (dyn Numbers + '_)>,
) -> Result<AttachmentPlan, CniError> {
    let (network, ifname) = (&intent.default, &request.ifname);
    let chosen = intent.default_selection.as_ref();
    let wish = chosen.and_then(|selection| selection.interface.as_ref());
    if let Some(wish) = wish.filter(|wish| *wish != ifname) {
        let msg = format!(
            "attach {ifname} ({}): key interface: {wish:?}, but the runtime names the default network's interface {ifname}",
            network.name
        );
        return Err(CniError::new(code::INVALID_CONFIG, msg));
    }
    let offered = request.config.get("runtimeConfig").and_then(Value::as_object).cloned();
    let warning = match (closed_ports(&network.list, offered.as_ref()), options.port_mappings) {
        (None, _) => None,
        (Some(msg), UnsupportedPortMappings::Warn) => Some(msg),
        (Some(msg), UnsupportedPortMappings::Fail) => {
            let msg = format!("attach {ifname} ({}): {msg}", network.name);
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
    };
    let wanted = Wanted {
        network,
        ifname,
        default: true,
        // The runtime itself writes the cache file of its own configuration.
        remembered: if network.list.name == request.name { CachedResults::Off } else { options.remembered },
        offered: offered.unwrap_or_default(),
        asked: chosen,
        facts,
        made_before: request.config.get("prevResult").filter(|_| multi_network::calls_itself(&network.list)),
    };
    let mut planned = attachment(sandbox, &wanted, &request.args, options, numbers)?;
    planned.warnings.extend(warning);
    Ok(planned)
}

/// Describes the node's ports that the runtime requests and that no plugin of the network would open. The runtime
/// passes a plugin only declared capabilities, and netattach declares `portMappings` for every default network in
/// order to see them.
fn closed_ports(list: &NetworkList, offered: Option<&Map<String, Value>>) -> Option<String> {
    let asked = offered?.get(PORT_MAPPINGS)?.as_array()?;
    if asked.is_empty() || cni::capability::undeclared(list, [PORT_MAPPINGS]).is_empty() {
        return None;
    }
    let ports: Vec<String> =
        asked.iter().map(|mapping| mapping["hostPort"].to_string()).filter(|port| port != "0").collect();
    let (shown, more) = ports.split_at(ports.len().min(SHOWN_PORTS));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let msg = format!(
        "hostPort {}{more} asked for, but no plugin of network {} declares the capability {PORT_MAPPINGS}: nothing would \
         open it (unsupportedPortMappings)",
        shown.join(", "),
        list.name
    );
    (!ports.is_empty()).then_some(msg)
}

/// Plans the interface that a plain CNI executable creates, from its input alone.
///
/// # Errors
/// The error names the key; nothing has been done yet.
pub fn one(
    sandbox: &Sandbox,
    driver: &dyn Driver,
    request: &cni::Request,
    facts: &Facts,
) -> Result<AttachmentPlan, CniError> {
    attachment::check_carried_out(driver, &request.config)?;
    let steps = driver.plan(&plain(sandbox, request, facts))?;
    check_result_is_expressible(request.version, &steps)?;
    Ok(alone(driver, request, steps))
}

/// Returns the possible remains of [`one`], as a plan whose inverses remove them. The plan exists even if the
/// configuration is no longer valid.
pub fn remains_of_one(sandbox: &Sandbox, driver: &dyn Driver, request: &cni::Request) -> AttachmentPlan {
    alone(driver, request, driver.remains(&plain(sandbox, request, &Facts::default())))
}

fn plain<'a>(sandbox: &'a Sandbox, request: &'a cni::Request, facts: &'a Facts) -> link::Request<'a> {
    link::Request {
        container_id: &request.container_id,
        ifname: &request.ifname,
        config: &request.config,
        group: sandbox.link_group(),
        cni_args: &request.args,
        exec: &[],
        protect: None,
        facts,
        recorded: false,
    }
}

fn alone(driver: &dyn Driver, request: &cni::Request, steps: Vec<Step>) -> AttachmentPlan {
    AttachmentPlan {
        network: NetworkName::Configuration(request.name.clone()),
        config_name: request.name.clone(),
        default: true,
        ifname: request.ifname.clone(),
        version: request.version,
        kind: driver.kind().to_owned(),
        disable_check: false,
        disable_gc: false,
        steps,
        yields_to: None,
        warnings: Vec::new(),
        device: None,
    }
}

/// Refuses a result without addresses in the two oldest versions, which cannot express it (CNV-05): before the
/// effects rather than after them.
fn check_result_is_expressible(version: Version, steps: &[Step]) -> Result<(), CniError> {
    let brings_addresses = |step: &Step| {
        matches!(step, Step::Lease(_) | Step::Delegate(_) | Step::TakeMade(_) | Step::RaiseLoopback)
    };
    if steps.iter().any(brings_addresses) {
        return Ok(());
    }
    CniResult::default().to_value(version).map(drop)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_host_port_needs_a_plugin_that_opens_it() {
        let list = |capabilities: Value| {
            let plugins = json!([{"type": "bridge"}, {"type": "other", "capabilities": capabilities}]);
            NetworkList::parse(json!({"name": "pods", "plugins": plugins}).to_string().as_bytes()).unwrap()
        };
        let closed = |list: &NetworkList, mappings: Value| {
            closed_ports(list, json!({"portMappings": mappings, "bandwidth": {}}).as_object())
        };
        let port = |number: u16| json!({"hostPort": number, "containerPort": 80, "protocol": "tcp"});
        let (able, unable) = (list(json!({"portMappings": true})), list(json!({"portMappings": false})));
        assert_eq!(closed(&able, json!([port(8080)])), None);
        // Runtimes send an empty list for a pod without ports, and 0 for a port that is not mapped.
        assert_eq!(closed(&unable, json!([])), None);
        assert_eq!(closed(&unable, json!([port(0)])), None);
        assert_eq!(closed_ports(&unable, None), None);
        let told = |ports: &str| {
            Some(format!(
                "hostPort {ports} asked for, but no plugin of network pods declares the capability portMappings: nothing \
                 would open it (unsupportedPortMappings)"
            ))
        };
        assert_eq!(closed(&unable, json!([port(8080), port(0), port(53)])), told("8080, 53"));
        let many: Vec<Value> = (1..=10).map(port).collect();
        assert_eq!(closed(&unable, json!(many)), told("1, 2, 3, 4, 5, 6, 7, 8 and 2 more"));
    }

    #[test]
    fn what_the_pod_completes_is_neither_planned_nor_refused() {
        let rehearsed = |subnet: Value, declared: bool| {
            let plugin = json!({
                "type": "bridge", "ipam": {"type": "host-local", "subnet": subnet}, "capabilities": {"ipRanges": declared},
            });
            let list = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [plugin]}).to_string();
            let network =
                Network::of_configuration("pods", NetworkList::parse(list.as_bytes()).unwrap().into());
            rehearse(&network, &Options::default()).map(|plan| plan.is_some()).ok()
        };
        assert_eq!(rehearsed(json!("10.9.0.0/24"), true), Some(true));
        assert_eq!(rehearsed(Value::Null, true), Some(false));
        assert_eq!(rehearsed(Value::Null, false), None);
        assert_eq!(rehearsed(json!("10.9.0.0"), true), None);
    }
}
