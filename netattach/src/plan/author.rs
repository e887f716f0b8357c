//! Determines which of an attachment's addresses its network's author has configured, and which its pod has chosen.
//! Pure.

use ipnet::{IpNet, Ipv6Net};

use super::{AttachmentPlan, Sandbox};
use crate::cni::CniArgs;
use crate::ipam;
use crate::step::Step;

/// The shortest prefix of an IPv6 address that a pod has chosen outside of the author's subnets: that of a link (RFC
/// 4291, section 2.5.1). Neighbours in it are no more than those in the link-local prefix of every link.
const WIDEST: u8 = 64;

/// Returns an address of an attachment, with the prefix length of its subnet as the network's author, a pool or a
/// server defines it; `None`: a pod or its runtime has requested the address, and no such subnet contains it. For a
/// plugin that creates the interface itself, every requested address counts as chosen: the plugin's own subnets are
/// unknown.
pub fn subnet(sandbox: &Sandbox, attachment: &AttachmentPlan, address: IpNet) -> Option<IpNet> {
    let by_step = |step: &Step| match step {
        Step::Lease(config) => Some(config.subnet_of(address)),
        Step::Delegate(delegate) => {
            // Unreadable arguments may request anything.
            let args = CniArgs::parse(&sandbox.args_of(attachment)).ok();
            let of =
                |args: CniArgs| ipam::subnet_of_plugin(&delegate.plugin, &delegate.config, &args, address);
            Some(args.and_then(of))
        }
        _ => None,
    };
    // Of several plugins the first determines the addresses; later ones only change its interface.
    attachment.steps.iter().find_map(by_step).unwrap_or(Some(address))
}

/// Returns the on-link IPv6 prefix of an address: [`subnet`], or for an address chosen outside of those, a prefix
/// that is no shorter than a link's. The pod chooses the length, and must not make neighbour discovery cover more
/// addresses than a link can have.
pub fn prefix_v6(sandbox: &Sandbox, attachment: &AttachmentPlan, address: Ipv6Net) -> Ipv6Net {
    match subnet(sandbox, attachment, address.into()) {
        Some(IpNet::V6(named)) => named.trunc(),
        _ => {
            let length = address.prefix_len().max(WIDEST);
            // The length is that of an existing address.
            Ipv6Net::new(address.addr(), length).map_or(address, |net| net.trunc())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::plan::fixtures;
    use crate::step::{Delegate, Role};

    fn plugin(kind: &str, role: Role, config: &Value) -> Step {
        Step::Delegate(Delegate {
            plugin: kind.to_owned(),
            config: config.as_object().unwrap().clone(),
            role,
        })
    }

    /// A configuration of `static` in which the author names these, and the pod asks for that.
    fn config(own: &Value, asked: &[&str]) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": "n", "ipam": {"type": "static", "addresses": own},
            "runtimeConfig": {"ips": asked},
        })
    }

    fn lease(config: &Value) -> Step {
        let kind = ipam::Kind::of(config.as_object().unwrap()).unwrap();
        Step::Lease(kind.parse(config.as_object().unwrap(), &CniArgs::default()).unwrap())
    }

    /// Rows: STC-on-link.
    #[test]
    fn what_is_on_the_link_is_the_authors_to_say_and_no_more_than_a_link_where_he_has_not() {
        let named = json!([{"address": "fd00:1::2/56"}]);
        let own = config(&named, &[]);
        let inside = config(&named, &["fd00:1::7/3"]);
        let outside = config(&named, &["2001:db8::5/1"]);
        let unnamed = config(&json!([]), &["2001:db8::5/1"]);
        let longer = config(&json!([]), &["2001:db8::5/80"]);
        let pool =
            json!({"name": "n", "ipam": {"type": "host-local", "ranges": [[{"subnet": "fd00:2::/48"}]]}});
        let by_args = Step::Lease(
            ipam::Kind::Static
                .parse(config(&named, &[]).as_object().unwrap(), &CniArgs::parse("IP=2001:db8::5/1").unwrap())
                .unwrap(),
        );
        for (step, address, expected) in [
            (lease(&own), "fd00:1::2/56", "fd00:1::/56"),
            (lease(&inside), "fd00:1::7/3", "fd00:1::/56"),
            (lease(&outside), "2001:db8::5/1", "2001:db8::/64"),
            (lease(&unnamed), "2001:db8::5/1", "2001:db8::/64"),
            (lease(&longer), "2001:db8::5/80", "2001:db8::/80"),
            (lease(&pool), "fd00:2::7/48", "fd00:2::/48"),
            (by_args, "2001:db8::5/1", "2001:db8::/64"),
            (plugin("static", Role::Ipam, &inside), "fd00:1::7/3", "fd00:1::/56"),
            (plugin("static", Role::Ipam, &outside), "2001:db8::5/1", "2001:db8::/64"),
            (plugin("whereabouts", Role::Ipam, &unnamed), "2001:db8::5/1", "2001:db8::/64"),
            // An address that such a plugin assigns itself, and a requested one.
            (plugin("bridge", Role::Plugin, &inside), "fd00:9::7/48", "fd00:9::/48"),
            (plugin("bridge", Role::Plugin, &inside), "fd00:1::7/3", "fd00:1::/64"),
            (Step::FindDevice, "fd00:9::7/48", "fd00:9::/48"),
        ] {
            let attachment = fixtures::attachment("bridge", vec![step.clone()]);
            let expected: Ipv6Net = expected.parse().unwrap();
            let found = prefix_v6(&fixtures::sandbox("c1"), &attachment, address.parse().unwrap());
            assert_eq!(found, expected, "{address} {step:?}");
        }
    }

    #[test]
    fn of_arguments_that_cannot_be_read_nothing_is_the_authors() {
        let step = plugin("static", Role::Ipam, &config(&json!([{"address": "10.1.0.7/24"}]), &[]));
        let attachment = AttachmentPlan { default: true, ..fixtures::attachment("bridge", vec![step]) };
        let address: IpNet = "10.1.0.7/24".parse().unwrap();
        for (args, expected) in [("", Some(address)), ("IP", None)] {
            let sandbox = Sandbox { cni_args: args.to_owned(), ..fixtures::sandbox("c1") };
            assert_eq!(subnet(&sandbox, &attachment, address), expected, "{args:?}");
        }
    }
}
