//! `static`: addresses from the configuration or the pod. Pure: nothing is stored, so nothing is released.
//!
//! The keys are those of `containernetworking/plugins`, `plugins/ipam/static`. The agent prevents two pods from using
//! the same address, as for all chosen addresses ([`super::Config::is_chosen`]); the plain executable cannot, nor can
//! the reference plugin.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::keys::{ConfigObject, Item, KeyError, holds_many_addresses, parse_address};
use super::{Lease, LeasedAddress, Owner};
use crate::cni::{self, CniArgs};
use crate::{budget, cidr};

/// A validated configuration; addresses requested by the runtime replace its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// In the order of the sources. Never empty, without duplicates.
    pub addresses: Vec<LeasedAddress>,
    /// `ipam.addresses`, that is, the network author's own addresses, if the pod or the runtime requests others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<Vec<LeasedAddress>>,
    /// `ipam.routes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<cni::Route>,
    /// `ipam.dns`.
    #[serde(default)]
    pub dns: cni::Dns,
}

/// A configuration cannot be used. Every variant names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing, or its value cannot be read.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// No source contains an address.
    #[error("no addresses: one of ipam.addresses, IP of CNI_ARGS, args.cni.ips, runtimeConfig.ips is needed")]
    NoAddresses,
    /// An address cannot belong to a single interface.
    #[error("{key}: {address} is not the address of one interface")]
    NotUnicast {
        /// Path of the key.
        key: String,
        /// Its address.
        address: IpAddr,
    },
    /// An address occurs twice.
    #[error("{key}: {address} occurs twice")]
    Repeated {
        /// Path of the second occurrence.
        key: String,
        /// The address.
        address: IpAddr,
    },
    /// Results before 0.3.0 have one address per family.
    #[error("cniVersion {0:?} allows one address per address family: use 0.3.0 or newer")]
    ManyPerFamily(String),
}

/// A requested address would determine an address of the node: the gateway of its subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GatewayError {
    /// The network's author has configured no such subnet.
    #[error(
        "{0} is asked for, and no address of ipam.addresses is in that subnet: the pod would choose an address and a route of the \
         node; ipam.addresses names the subnets that pods may choose in"
    )]
    OtherSubnet(IpNet),
    /// It is the gateway's own address.
    #[error("{0} is asked for, but is the gateway's address, which is the node's")]
    Gateway(IpAddr),
    /// The executed plugin would use another gateway.
    #[error(
        "{address} is asked for, and the executed plugin cannot be told its gateway, {gateway}: have the agent carry static out, or \
         have ipam.addresses name the first address of the subnet as the gateway"
    )]
    Untold {
        /// The requested address.
        address: IpNet,
        /// The gateway that `ipam.addresses` names.
        gateway: IpAddr,
    },
}

/// CHECK: the attachment lacks an address of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("address {address} of the configuration is not among those of {owner}")]
pub struct NotHeld {
    /// The address.
    pub address: IpAddr,
    /// The owner that should have it.
    pub owner: Owner,
}

impl Config {
    /// Reads the configuration from a plugin's stdin.
    ///
    /// `IP` of `CNI_ARGS` adds addresses to those of `ipam.addresses`, and `GATEWAY` is the gateway of each of them in
    /// whose subnet it lies. `args.cni.ips` replaces all these, `runtimeConfig.ips` replaces all others.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(config: &Map<String, Value>, args: &CniArgs) -> Result<Self, ConfigError> {
        let root = ConfigObject::root(config);
        let ipam = root.needed_object("ipam")?;
        let mut named = configured(&ipam, args)?;
        let by_author = named.iter().filter(|named| named.key != IP_OF_ARGS);
        let own: Vec<LeasedAddress> = by_author.map(|named| named.leased.clone()).collect();
        for asked in root.asked_ips()?.iter().filter(|asked| !asked.is_empty()) {
            named = asked.iter().map(Named::asked).collect::<Result<_, _>>()?;
        }
        check(&named)?;
        let addresses: Vec<LeasedAddress> = named.into_iter().map(|named| named.leased).collect();
        let version = root.text("cniVersion")?.unwrap_or_default();
        let ipv4 = addresses.iter().filter(|leased| leased.address.addr().is_ipv4()).count();
        if (ipv4 > 1 || addresses.len() - ipv4 > 1) && !holds_many_addresses(version) {
            return Err(ConfigError::ManyPerFamily(version.to_owned()));
        }
        let own = Some(own).filter(|own| *own != addresses);
        Ok(Self { addresses, own, routes: ipam.parsed_routes()?, dns: ipam.dns()? })
    }

    /// Makes a configuration from the result of a plugin earlier in the list; `key` names the addresses in error
    /// messages.
    ///
    /// # Errors
    /// There are no addresses, an address cannot belong to a single interface, or an address occurs twice.
    pub fn given(key: &str, lease: Lease) -> Result<Self, ConfigError> {
        let Lease { addresses, routes, dns, server: _ } = lease;
        let named = addresses.iter().enumerate();
        let named: Vec<Named> = named
            .map(|(position, leased)| Named { key: format!("{key}[{position}]"), leased: leased.clone() })
            .collect();
        check(&named)?;
        Ok(Self { addresses, own: None, routes, dns })
    }

    /// Returns the lease: exactly the configured addresses, routes and name servers.
    pub fn lease(&self) -> Lease {
        Lease {
            addresses: self.addresses.clone(),
            routes: self.routes.clone(),
            dns: self.dns.clone(),
            server: None,
        }
    }

    /// Returns the addresses that the pod or the runtime requests outside of the subnets of `ipam.addresses`.
    pub fn asked_elsewhere(&self) -> Vec<IpAddr> {
        let Some(own) = &self.own else { return Vec::new() };
        let addresses = self.addresses.iter().map(|leased| leased.address.addr());
        addresses.filter(|address| !own.iter().any(|own| own.address.contains(address))).collect()
    }

    /// Returns an address with the prefix length of the smallest subnet of `ipam.addresses` that contains it,
    /// whatever length the request has; `None`: no subnet of the network's author contains it.
    pub fn subnet_of(&self, address: IpNet) -> Option<IpNet> {
        let Some(own) = &self.own else { return Some(address) };
        let named = own.iter().filter(|own| own.address.contains(&address.addr()));
        let length = named.map(|own| own.address.prefix_len()).max()?;
        IpNet::new(address.addr(), length).ok()
    }

    /// Returns the same addresses for a network whose gateways are addresses of the node. A requested address gets
    /// the gateway that `ipam.addresses` names in its subnet.
    ///
    /// # Errors
    /// A requested address is in none of the subnets of `ipam.addresses`, or is the gateway's.
    pub fn behind_own_gateways(mut self) -> Result<Self, GatewayError> {
        let Some(own) = &self.own else { return Ok(self) };
        for leased in self.addresses.iter_mut().filter(|leased| !own.contains(leased)) {
            let address = leased.address;
            let mut beside = own.iter().filter(|own| own.address.trunc() == address.trunc()).peekable();
            if beside.peek().is_none() {
                return Err(GatewayError::OtherSubnet(address));
            }
            leased.gateway = leased.gateway.or_else(|| beside.find_map(|own| own.gateway));
            if leased.gateway.or_else(|| cidr::first_host(address)) == Some(address.addr()) {
                return Err(GatewayError::Gateway(address.addr()));
            }
        }
        Ok(self)
    }

    /// Refuses what [`Self::behind_own_gateways`] refuses, if the plugin is executed: that plugin reports a requested
    /// address without the gateway of `ipam.addresses`, so the node would use the first address of the subnet.
    ///
    /// # Errors
    /// As there; or a requested address has a gateway other than the first address of its subnet.
    pub fn behind_untold_gateways(self) -> Result<(), GatewayError> {
        let gateway = |leased: &LeasedAddress| leased.gateway.or_else(|| cidr::first_host(leased.address));
        let reported: Vec<Option<IpAddr>> = self.addresses.iter().map(gateway).collect();
        for (leased, reported) in self.behind_own_gateways()?.addresses.iter().zip(reported) {
            if let Some(gateway) = gateway(leased).filter(|gateway| reported != Some(*gateway)) {
                return Err(GatewayError::Untold { address: leased.address, gateway });
            }
        }
        Ok(())
    }

    /// Verifies that the attachment has every address of the configuration.
    ///
    /// # Errors
    /// The first address that is missing.
    pub fn check(&self, owner: &Owner, addresses: &[IpAddr]) -> Result<(), NotHeld> {
        let mut own = self.addresses.iter().map(|leased| leased.address.addr());
        match own.find(|address| !addresses.contains(address)) {
            Some(address) => Err(NotHeld { address, owner: owner.clone() }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, leased) in self.addresses.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{}", leased.address)?;
        }
        Ok(())
    }
}

/// An address, and the path of its key.
struct Named {
    key: String,
    leased: LeasedAddress,
}

impl Named {
    fn new(key: &str, text: &str) -> Result<Self, KeyError> {
        let address = prefixed(text)
            .ok_or_else(|| KeyError::NoPrefix { key: key.to_owned(), value: text.to_owned() })?;
        Ok(Self { key: key.to_owned(), leased: LeasedAddress { address, gateway: None } })
    }

    fn asked(item: &Item<'_>) -> Result<Self, KeyError> {
        Self::new(&item.key, item.text()?)
    }

    /// Reads an element of `ipam.addresses`.
    fn configured(item: &Item<'_>) -> Result<Self, KeyError> {
        let object = item.object()?;
        let (key, text) = object.needed_text("address")?;
        let mut named = Self::new(&key, text)?;
        named.leased.gateway = object.address("gateway")?.map(|gateway| gateway.to_canonical());
        Ok(named)
    }
}

/// The source of addresses that the runtime adds to those of the configuration.
const IP_OF_ARGS: &str = "IP of CNI_ARGS";

/// `ipam.addresses`, then those of `CNI_ARGS`.
fn configured(ipam: &ConfigObject<'_>, args: &CniArgs) -> Result<Vec<Named>, ConfigError> {
    let of_arg = |name: &str| args.get(name).into_iter().flat_map(|text| text.split(',')).map(str::trim);
    let mut named: Vec<Named> = ipam
        .few("addresses", &budget::ADDRESSES)?
        .map(|item| Named::configured(&item))
        .collect::<Result<_, _>>()?;
    let asked: Vec<&str> = of_arg("IP").filter(|text| !text.is_empty()).collect();
    budget::IPS.check(asked.len()).map_err(KeyError::Exceeded)?;
    for text in asked {
        named.push(Named::new(IP_OF_ARGS, text)?);
    }
    for text in of_arg("GATEWAY").filter(|text| !text.is_empty()) {
        let gateway = parse_address("GATEWAY of CNI_ARGS", text)?.to_canonical();
        for leased in named.iter_mut().map(|named| &mut named.leased) {
            if leased.address.contains(&gateway) {
                leased.gateway = Some(gateway);
            }
        }
    }
    Ok(named)
}

fn check(named: &[Named]) -> Result<(), ConfigError> {
    if named.is_empty() {
        return Err(ConfigError::NoAddresses);
    }
    for (position, Named { key, leased }) in named.iter().enumerate() {
        let (key, address) = (key.clone(), leased.address.addr());
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            return Err(ConfigError::NotUnicast { key, address });
        }
        if named[..position].iter().any(|before| before.leased.address.addr() == address) {
            return Err(ConfigError::Repeated { key, address });
        }
    }
    Ok(())
}

/// Parses an address with its prefix length. An IPv4 address in IPv6 form becomes an IPv4 address.
fn prefixed(text: &str) -> Option<IpNet> {
    let network = cidr::parse(text)?;
    match network.addr().to_canonical() {
        IpAddr::V4(address) if network.addr().is_ipv6() => {
            let length = network.prefix_len().checked_sub(96)?;
            Ipv4Net::new(address, length).ok().map(IpNet::V4)
        }
        _ => Some(network),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain::Chain;

    fn parse(config: &Value, args: &str) -> Result<Config, String> {
        let args = CniArgs::parse(args).unwrap();
        Config::parse(config.as_object().unwrap(), &args).map_err(|error| Chain(&error).to_string())
    }

    fn two() -> Value {
        json!([{"address": "10.1.0.7/24"}, {"address": "fd00:1::7/64", "gateway": "fd00:1::1"}])
    }

    /// Rows: STC-asked-for.
    #[test]
    fn each_source_adds_to_or_replaces_those_before() {
        let with = |args: Value, runtime: Value| {
            json!({
                "cniVersion": "1.0.0", "name": "n", "ipam": {"type": "static", "addresses": two()},
                "args": {"cni": {"ips": args}}, "runtimeConfig": {"ips": runtime},
            })
        };
        let own = [("10.1.0.7/24", None), ("fd00:1::7/64", Some("fd00:1::1"))];
        type Expected<'a> = &'a [(&'a str, Option<&'a str>)];
        let table: [(Value, Value, &str, Expected<'_>); 6] = [
            (json!(null), json!(null), "", &own),
            (json!([]), json!([]), "IP=;GATEWAY=", &own),
            (
                json!([]),
                json!([]),
                "IP=10.2.0.7/24, 10.3.0.7/24;GATEWAY=10.2.0.1,10.1.0.1",
                &[
                    ("10.1.0.7/24", Some("10.1.0.1")),
                    own[1],
                    ("10.2.0.7/24", Some("10.2.0.1")),
                    ("10.3.0.7/24", None),
                ],
            ),
            (json!(["10.4.0.7/24"]), json!([]), "IP=10.2.0.7/24", &[("10.4.0.7/24", None)]),
            (json!(["10.4.0.7/24"]), json!(["10.5.0.7/24"]), "GATEWAY=10.5.0.1", &[("10.5.0.7/24", None)]),
            (json!(["::ffff:10.4.0.7/120"]), json!([]), "", &[("10.4.0.7/24", None)]),
        ];
        for (by_args, by_runtime, cni_args, expected) in table {
            let config = with(by_args, by_runtime);
            let parsed =
                parse(&config, cni_args).unwrap_or_else(|error| panic!("{config} {cni_args}: {error}"));
            let leased = |(address, gateway): &(&str, Option<&str>)| LeasedAddress {
                address: address.parse().unwrap(),
                gateway: gateway.map(|gateway| gateway.parse().unwrap()),
            };
            let addresses: Vec<LeasedAddress> = expected.iter().map(leased).collect();
            assert_eq!(parsed.addresses, addresses, "{config} {cni_args}");
        }
    }

    /// Returns the configuration with requests by `runtimeConfig.ips`, and by `IP` of `CNI_ARGS`.
    fn asked(own: &Value, ips: &[&str], args: &str) -> Config {
        let config = json!({
            "cniVersion": "1.0.0", "name": "n", "ipam": {"type": "static", "addresses": own},
            "runtimeConfig": {"ips": ips},
        });
        parse(&config, args).unwrap_or_else(|error| panic!("{config} {args}: {error}"))
    }

    /// Rows: STC-node-links.
    #[test]
    fn what_is_asked_for_is_elsewhere_unless_an_address_of_the_author_is_in_its_subnet() {
        let table: [(Value, &[&str], &str, &[&str]); 8] = [
            (two(), &[], "", &[]),
            (two(), &["10.1.0.7/24", "fd00:1::7/64"], "", &[]),
            // Of any prefix, as the node has a route to the address alone.
            (two(), &["10.1.0.8/32", "fd00:1::8/3"], "", &[]),
            (two(), &["10.1.0.8/24", "10.1.1.8/16"], "", &["10.1.1.8"]),
            (two(), &[], "IP=10.1.0.9/24,10.2.0.9/24", &["10.2.0.9"]),
            (json!([]), &["10.1.0.8/24", "fd00:1::8/64"], "", &["10.1.0.8", "fd00:1::8"]),
            (Value::Null, &[], "IP=10.1.0.8/24", &["10.1.0.8"]),
            (json!([{"address": "10.1.0.7/0"}]), &["192.0.2.7/24"], "", &[]),
        ];
        for (own, ips, args, expected) in table {
            let expected: Vec<IpAddr> = expected.iter().map(|text| text.parse().unwrap()).collect();
            assert_eq!(asked(&own, ips, args).asked_elsewhere(), expected, "{own} {ips:?} {args}");
        }
    }

    /// Rows: STC-masquerade.
    #[test]
    fn the_subnet_of_an_address_that_is_asked_for_is_the_authors() {
        let nested = json!([{"address": "10.1.0.7/16"}, {"address": "10.1.0.8/24"}]);
        for (own, ips, expected) in [
            (two(), "10.1.0.8/0", Some("10.1.0.8/24")),
            (two(), "10.1.0.8/32", Some("10.1.0.8/24")),
            (two(), "fd00:1::8/3", Some("fd00:1::8/64")),
            (nested.clone(), "10.1.0.9/8", Some("10.1.0.9/24")),
            (nested, "10.1.1.9/8", Some("10.1.1.9/16")),
            (two(), "10.2.0.8/24", None),
            (json!([]), "10.1.0.8/24", None),
        ] {
            let asked = asked(&own, &[ips], "");
            let expected: Option<IpNet> = expected.map(|text| text.parse().unwrap());
            assert_eq!(asked.subnet_of(ips.parse().unwrap()), expected, "{own} {ips}");
        }
        // Nothing is asked for: they are the author's own.
        let own: IpNet = "10.1.0.7/24".parse().unwrap();
        assert_eq!(asked(&two(), &[], "").subnet_of(own), Some(own));
    }

    /// Rows: BRG-chosen.
    #[test]
    fn behind_gateways_of_the_node_what_is_asked_for_is_in_a_subnet_of_the_author_and_has_his_gateway() {
        type Expected<'a> = Result<&'a [(&'a str, Option<&'a str>)], GatewayError>;
        let other = |net: &str| Err(GatewayError::OtherSubnet(net.parse().unwrap()));
        let gateway = |address: &str| Err(GatewayError::Gateway(address.parse().unwrap()));
        let table: [(Value, &[&str], &str, Expected<'_>); 10] = [
            (two(), &[], "", Ok(&[("10.1.0.7/24", None), ("fd00:1::7/64", Some("fd00:1::1"))])),
            (two(), &["10.1.0.8/24"], "", Ok(&[("10.1.0.8/24", None)])),
            (two(), &["fd00:1::8/64"], "", Ok(&[("fd00:1::8/64", Some("fd00:1::1"))])),
            (two(), &["10.1.0.8/24", "192.168.1.77/25"], "", other("192.168.1.77/25")),
            // The node's address, and its route, would have the pod's prefix.
            (two(), &["10.1.0.8/25"], "", other("10.1.0.8/25")),
            (two(), &["fd00:1::8/3"], "", other("fd00:1::8/3")),
            (json!([]), &["10.1.0.8/24"], "", other("10.1.0.8/24")),
            (two(), &[], "IP=10.2.0.9/24", other("10.2.0.9/24")),
            (two(), &["10.1.0.1/24"], "", gateway("10.1.0.1")),
            (two(), &["fd00:1::1/64"], "", gateway("fd00:1::1")),
        ];
        for (own, ips, args, expected) in table {
            let found = asked(&own, ips, args).behind_own_gateways().map(|config| config.addresses);
            let leased = |(address, gateway): &(&str, Option<&str>)| LeasedAddress {
                address: address.parse().unwrap(),
                gateway: gateway.map(|gateway| gateway.parse().unwrap()),
            };
            let expected = expected.map(|all| all.iter().map(leased).collect::<Vec<_>>());
            assert_eq!(found, expected, "{own} {ips:?} {args}");
        }
    }

    /// Rows: STC-addresses.
    #[test]
    fn routes_and_name_servers_come_with_the_addresses_and_survive_the_journal() {
        let config = json!({"cniVersion": "1.0.0", "name": "n", "ipam": {
            "type": "static", "addresses": two(),
            "routes": [{"dst": "10.9.0.0/16", "gw": "10.1.0.1", "mtu": 1400}],
            "dns": {"nameservers": ["10.0.0.53"], "domain": "a"},
        }});
        let parsed = super::super::Config::Static(parse(&config, "").unwrap());
        let super::super::Config::Static(config) = &parsed else { unreachable!() };
        let Lease { addresses, routes, dns, server: _ } = config.lease();
        assert_eq!(
            json!({"addresses": addresses, "routes": routes, "dns": dns}),
            json!({
                "addresses": two(),
                "routes": [{"dst": "10.9.0.0/16", "gw": "10.1.0.1", "mtu": 1400}],
                "dns": {"nameservers": ["10.0.0.53"], "domain": "a"},
            })
        );
        let journal = serde_json::to_value(&parsed).unwrap();
        assert_eq!(journal["ipam"], json!("static"));
        assert_eq!(serde_json::from_value::<super::super::Config>(journal).unwrap(), parsed);
    }

    /// Rows: STC-refused.
    #[test]
    fn refusals_name_the_key() {
        let ipam = |ipam: Value| json!({"cniVersion": "1.0.0", "name": "n", "ipam": ipam});
        let address = |address: &str| ipam(json!({"addresses": [{"address": address}]}));
        let table = [
            (json!({"name": "n"}), "", "ipam is missing"),
            (
                ipam(json!({})),
                "",
                "no addresses: one of ipam.addresses, IP of CNI_ARGS, args.cni.ips, runtimeConfig.ips is needed",
            ),
            (ipam(json!({"addresses": {}})), "", "ipam.addresses must be a list"),
            (ipam(json!({"addresses": [{}]})), "", "ipam.addresses[0].address is missing"),
            (
                address("10.1.0.7"),
                "",
                "ipam.addresses[0].address: \"10.1.0.7\" is not an address with a prefix length such as 10.1.0.7/16",
            ),
            (
                ipam(json!({"addresses": [{"address": "10.1.0.7/24", "gateway": "x"}]})),
                "",
                "ipam.addresses[0].gateway: \"x\" is not an IP address",
            ),
            (
                address("224.0.0.1/24"),
                "",
                "ipam.addresses[0].address: 224.0.0.1 is not the address of one interface",
            ),
            (
                address("127.0.0.1/8"),
                "",
                "ipam.addresses[0].address: 127.0.0.1 is not the address of one interface",
            ),
            (address("10.1.0.7/24"), "IP=10.1.0.7/16", "IP of CNI_ARGS: 10.1.0.7 occurs twice"),
            (
                address("10.1.0.7/24"),
                "IP=10.1.0.7",
                "IP of CNI_ARGS: \"10.1.0.7\" is not an address with a prefix length such as 10.1.0.7/16",
            ),
            (address("10.1.0.7/24"), "GATEWAY=x", "GATEWAY of CNI_ARGS: \"x\" is not an IP address"),
            (
                json!({"name": "n", "ipam": {"addresses": [{"address": "10.1.0.7/24"}]}, "runtimeConfig": {"ips": [7]}}),
                "",
                "runtimeConfig.ips[0] must be a string",
            ),
            (
                json!({"name": "n", "ipam": {"addresses": [{"address": "10.1.0.7/24"}, {"address": "10.1.0.8/24"}]}}),
                "",
                "cniVersion \"\" allows one address per address family: use 0.3.0 or newer",
            ),
            (
                ipam(json!({"addresses": [{"address": "10.1.0.7/24"}], "routes": [{"dst": "x"}]})),
                "",
                "ipam.routes[0].dst: \"x\" is not a network such as 10.1.0.0/16",
            ),
            (
                ipam(json!({"addresses": [{"address": "10.1.0.7/24"}], "dns": {"search": 1}})),
                "",
                "ipam.dns: invalid type: integer `1`, expected a sequence",
            ),
        ];
        for (config, args, expected) in table {
            assert_eq!(parse(&config, args), Err(expected.to_owned()), "{config} {args}");
        }
    }

    #[test]
    fn an_attachment_has_to_have_every_address_of_the_configuration() {
        let config = parse(&json!({"cniVersion": "1.0.0", "ipam": {"addresses": two()}}), "").unwrap();
        let owner = Owner { container_id: "c1".into(), ifname: "eth0".into() };
        let [v4, v6]: [IpAddr; 2] = ["10.1.0.7", "fd00:1::7"].map(|text| text.parse().unwrap());
        assert_eq!(config.check(&owner, &[v6, v4]), Ok(()));
        assert_eq!(config.check(&owner, &[v4]), Err(NotHeld { address: v6, owner }));
    }
}
