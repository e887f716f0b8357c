//! The steps of the plugins chained behind the interface, carried out by netattach or executed, and of the dataplane on
//! an interface that another plugin creates.

use serde_json::{Map, Value};

use super::super::chained;
use super::super::device::Device;
use super::super::resolve::{Network, Numbers, Options};
use super::capability::check_offered;
use super::native::{is_chained, native};
use super::plugins::Configured;
use super::tuned::tuned;
use super::{delegate, protect};
use crate::cni::{CniError, PluginConf, code};
use crate::link::{self, Driver, bandwidth, dataplane, firewall, portmap, sbr, tuning, vrf};
use crate::npwg::selection::Bandwidth;
use crate::spec::Tune;
use crate::step::{EnforceWhen, Step};

/// The interface that chained plugins follow.
pub(super) struct Place<'a> {
    pub(super) request: link::Request<'a>,
    pub(super) device: Device<'a>,
    /// Whether netattach creates the interface.
    pub(super) is_own: bool,
    /// Whether another plugin creates the interface and the agent has a dataplane that can enforce policies on it.
    pub(super) has_numbers: bool,
    /// When programs run for such an interface.
    pub(super) when: EnforceWhen,
    /// The network's plugins as its author has written them.
    pub(super) plugins: &'a [PluginConf],
}

/// The requests of chained plugins for the programs of an interface that another plugin creates.
#[derive(Default)]
pub(super) struct Asked<'a> {
    limits: Option<Bandwidth>,
    /// The configuration of netattach as a chained plugin.
    dataplane: Option<&'a Map<String, Value>>,
}

/// Adds the steps of the chained plugins to those of the interface.
pub(super) fn add_chained<'a>(
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

/// Refuses netattach after another plugin's interface if the dataplane would not run.
pub(in crate::plan) fn check_dataplane_runs(is_there: bool, when: EnforceWhen) -> Result<(), CniError> {
    let why = match (is_there, when) {
        (false, _) => "the agent has no dataplane",
        (true, EnforceWhen::Never) => {
            "enforce is never, by the network's definition or the agent's settings; one of the two"
        }
        (true, _) => return Ok(()),
    };
    Err(CniError::new(code::INVALID_CONFIG, format!("plugin {} behind another: {why}", dataplane::KIND)))
}

/// Returns the steps that attach the dataplane to an interface that another plugin creates.
pub(super) fn judged_from_without(
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cni::CniArgs;
    use crate::link::Facts;
    use crate::npwg::Selection;
    use crate::plan::attachment::{Wanted, attachment};
    use crate::plan::fixtures::{self, network};

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
}
