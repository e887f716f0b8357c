//! Converts the options of a lease for the pod: address, routes, name servers. Pure.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};

use super::codec::{Options, code};
use super::terms::Terms;
use crate::budget;
use crate::cni::{Dns, Route};
use crate::ipam::{Lease, LeasedAddress};

/// Longest domain, in bytes (RFC 1035, section 2.3.4), and longest label.
const DOMAIN: usize = 255;
const LABEL: u8 = 63;

/// Returns the lease in the form of the pod. `wanted`: the options that the client has requested; others, which
/// servers may send all the same, are ignored. `priority`: the metric of its routes.
///
/// Routes of option 121 replace the routers and the routes of option 33 (RFC 3442).
pub fn lease(terms: &Terms, options: &Options, wanted: &[u8], priority: Option<u32>) -> Lease {
    let options = &options.only(wanted);
    // Terms with a prefix longer than an address were refused.
    let net = Ipv4Net::new(terms.address, terms.prefix).unwrap_or_else(|_| terms.address.into());
    let is_default = |route: &(Ipv4Net, Ipv4Addr)| route.0.prefix_len() == 0;
    let default = |gateway: Ipv4Addr| (Ipv4Net::default(), gateway);
    let (routes, gateway) = match options.get(code::CLASSLESS_ROUTES).and_then(classless) {
        Some(routes) => {
            let gateway = routes.iter().find(|route| is_default(route)).map(|(_, gateway)| *gateway);
            (routes, gateway)
        }
        None => {
            let gateway = options.addresses(code::ROUTERS).find(|router| !router.is_unspecified());
            (classful(options).chain(gateway.map(default)).collect(), gateway)
        }
    };
    let gateway = gateway.filter(|gateway| !gateway.is_unspecified());
    let route = |(dst, gateway): (Ipv4Net, Ipv4Addr)| {
        // A route without a next hop is on-link (RFC 3442).
        let on_link = gateway.is_unspecified();
        Route {
            dst: IpNet::V4(dst),
            gw: (!on_link).then_some(IpAddr::V4(gateway)),
            mtu: None,
            advmss: None,
            priority,
            table: None,
            scope: on_link.then_some(Route::LINK),
        }
    };
    Lease {
        addresses: vec![LeasedAddress { address: IpNet::V4(net), gateway: gateway.map(IpAddr::V4) }],
        routes: routes.into_iter().map(route).take(budget::ROUTES.most).collect(),
        dns: dns(options),
        server: Some(terms.server.address),
    }
}

fn dns(options: &Options) -> Dns {
    let servers = options.addresses(code::NAME_SERVERS).take(budget::DNS.most);
    let search = options.get(code::SEARCH).and_then(domains).unwrap_or_default();
    Dns {
        nameservers: servers.map(|server| server.to_string()).collect(),
        domain: options.text(code::DOMAIN).map(str::to_owned).filter(|domain| is_domain(domain.as_bytes())),
        search,
        options: Vec::new(),
    }
}

/// Parses option 121: each route is its prefix length, the significant bytes of its prefix, and a next hop. `None`:
/// the option is malformed or contains no route, and counts as absent.
fn classless(mut value: &[u8]) -> Option<Vec<(Ipv4Net, Ipv4Addr)>> {
    let mut routes = Vec::new();
    while let Some((&length, rest)) = value.split_first() {
        let (significant, rest) = rest.split_at_checked(usize::from(length).div_ceil(8))?;
        let mut destination = [0; 4];
        destination.get_mut(..significant.len())?.copy_from_slice(significant);
        let (gateway, rest) = rest.split_first_chunk::<4>()?;
        routes.push((Ipv4Net::new(destination.into(), length).ok()?.trunc(), (*gateway).into()));
        value = rest;
    }
    Some(routes).filter(|routes| !routes.is_empty())
}

/// Parses option 33: pairs of a destination and a next hop. A destination has the prefix of its class (RFC 2132,
/// section 5.8); with more significant bits, it is a host address.
fn classful(options: &Options) -> impl Iterator<Item = (Ipv4Net, Ipv4Addr)> {
    let (pairs, _) = options.get(code::STATIC_ROUTES).unwrap_or_default().as_chunks::<8>();
    pairs.iter().filter_map(|&[a, b, c, d, e, f, g, h]| {
        let (destination, gateway) = (Ipv4Addr::new(a, b, c, d), Ipv4Addr::new(e, f, g, h));
        let class = match a {
            // The default route is not allowed there.
            _ if destination.is_unspecified() => return None,
            0..128 => 8,
            128..192 => 16,
            192..224 => 24,
            _ => return None,
        };
        let net = Ipv4Net::new(destination, class).ok()?;
        let net = if net.trunc() == net { net } else { Ipv4Net::from(destination) };
        Some((net, gateway))
    })
}

/// Parses option 119: DNS names, which may end with a pointer to an earlier one (RFC 3397, section 2). `None`:
/// malformed.
fn domains(value: &[u8]) -> Option<Vec<String>> {
    let mut domains = Vec::new();
    let mut at = 0;
    while at < value.len() && domains.len() < budget::DNS.most {
        let (domain, next) = domain(value, at)?;
        if !domain.is_empty() {
            domains.push(domain);
        }
        at = next;
    }
    Some(domains)
}

/// Returns the name at that offset, and the offset of the next one.
fn domain(value: &[u8], start: usize) -> Option<(String, usize)> {
    let mut name = String::new();
    let (mut at, mut next) = (start, None);
    // A pointer must refer to before the name that contains it, so that there is no loop.
    let mut before = start;
    loop {
        let length = *value.get(at)?;
        match length {
            0 => return Some((name, next.unwrap_or(at + 1))),
            1..=LABEL => {
                let label = value.get(at + 1..at + 1 + usize::from(length))?;
                if !is_domain(label) || name.len() + label.len() >= DOMAIN {
                    return None;
                }
                if !name.is_empty() {
                    name.push('.');
                }
                // All of it is ASCII.
                name.extend(label.iter().map(|byte| char::from(*byte)));
                at += 1 + label.len();
            }
            0xc0.. => {
                let to = usize::from(length & 0x3f) << 8 | usize::from(*value.get(at + 1)?);
                next = next.or(Some(at + 2));
                if to >= before {
                    return None;
                }
                (at, before) = (to, to);
            }
            _ => return None,
        }
    }
}

/// Whether the bytes are valid in a name: names are written to a file of lines and words.
fn is_domain(name: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    !name.is_empty() && name.len() <= DOMAIN && name.iter().all(is_plain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::ipam::dhcp::terms::Server;
    use crate::mac::Mac;

    const ALL: [u8; 6] = [
        code::ROUTERS,
        code::NAME_SERVERS,
        code::DOMAIN,
        code::STATIC_ROUTES,
        code::SEARCH,
        code::CLASSLESS_ROUTES,
    ];

    fn granted(given: &[(u8, &[u8])], priority: Option<u32>) -> Lease {
        granted_of(given, &ALL, priority)
    }

    fn granted_of(given: &[(u8, &[u8])], wanted: &[u8], priority: Option<u32>) -> Lease {
        let mut options = Options::default();
        for (code, value) in given {
            options.set(*code, *value);
        }
        let server = Server { address: [10, 1, 0, 1].into(), mac: Mac([2; 6]) };
        let terms = Terms {
            address: [10, 1, 0, 7].into(),
            prefix: 24,
            server,
            since: 0,
            seconds: 60,
            renew: 30,
            rebind: 45,
        };
        lease(&terms, &options, wanted, priority)
    }

    fn routes(lease: &Lease) -> Value {
        serde_json::to_value(&lease.routes).unwrap()
    }

    const ROUTERS: (u8, &[u8]) = (code::ROUTERS, &[10, 1, 0, 1, 10, 1, 0, 2]);
    const OLD: (u8, &[u8]) = (code::STATIC_ROUTES, &[10, 0, 0, 0, 10, 1, 0, 3, 192, 168, 7, 9, 10, 1, 0, 4]);

    /// Rows: DHCP-priority.
    #[test]
    fn the_first_router_is_the_gateway_and_leads_everywhere() {
        let lease = granted(&[ROUTERS, OLD], Some(300));
        assert_eq!(lease.server, Some([10, 1, 0, 1].into()));
        let gateway = Some("10.1.0.1".parse().unwrap());
        assert_eq!(lease.addresses, [LeasedAddress { address: "10.1.0.7/24".parse().unwrap(), gateway }]);
        let expected = json!([
            {"dst": "10.0.0.0/8", "gw": "10.1.0.3", "priority": 300},
            {"dst": "192.168.7.9/32", "gw": "10.1.0.4", "priority": 300},
            {"dst": "0.0.0.0/0", "gw": "10.1.0.1", "priority": 300},
        ]);
        assert_eq!(routes(&lease), expected);
        let nothing = granted(&[], None);
        assert_eq!((nothing.addresses[0].gateway, routes(&nothing)), (None, json!([])));
    }

    /// Rows: DHCP-routes.
    #[test]
    fn classless_routes_replace_routers_and_routes_of_classes() {
        let value = [&[24, 10, 2, 0, 10, 1, 0, 5][..], &[17, 10, 3, 255, 0, 0, 0, 0]].concat();
        let lease = granted(&[ROUTERS, OLD, (code::CLASSLESS_ROUTES, &value)], None);
        let expected =
            json!([{"dst": "10.2.0.0/24", "gw": "10.1.0.5"}, {"dst": "10.3.128.0/17", "scope": 253}]);
        assert_eq!((lease.addresses[0].gateway, routes(&lease)), (None, expected));
        let with_default = [&value[..], &[0, 10, 1, 0, 9]].concat();
        let lease = granted(&[ROUTERS, (code::CLASSLESS_ROUTES, &with_default)], None);
        assert_eq!(lease.addresses[0].gateway, Some("10.1.0.9".parse().unwrap()));
        // An option that cannot be read is ignored.
        for malformed in [&[33, 1, 2, 3, 4, 5, 10, 1, 0, 1][..], &[24, 10, 2], &[]] {
            let lease = granted(&[ROUTERS, (code::CLASSLESS_ROUTES, malformed)], None);
            assert_eq!(routes(&lease), json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]), "{malformed:?}");
        }
    }

    /// Rows: DHCP-request.
    #[test]
    fn what_a_server_sends_without_a_request_is_ignored() {
        let classless: (u8, &[u8]) = (code::CLASSLESS_ROUTES, &[8, 10, 10, 1, 0, 5]);
        let servers: (u8, &[u8]) = (code::NAME_SERVERS, &[10, 1, 0, 1]);
        let domain: (u8, &[u8]) = (code::DOMAIN, b"example.org");
        let search: (u8, &[u8]) = (code::SEARCH, b"\x01a\x00");
        let given = [ROUTERS, OLD, classless, servers, domain, search];
        let none = granted_of(&given, &[code::SUBNET_MASK], None);
        assert_eq!((none.addresses[0].gateway, routes(&none), none.dns), (None, json!([]), Dns::default()));
        // An option 121 without a request does not replace what was requested.
        let routers = granted_of(&given, &[code::SUBNET_MASK, code::ROUTERS, code::DOMAIN], None);
        assert_eq!(routers.addresses[0].gateway, Some("10.1.0.1".parse().unwrap()));
        assert_eq!(routes(&routers), json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]));
        assert_eq!(serde_json::to_value(&routers.dns).unwrap(), json!({"domain": "example.org"}));
    }

    /// Rows: DHCP-dns.
    #[test]
    fn name_servers_and_domains_are_the_dns() {
        let search = b"\x03eng\x05apple\x03com\x00\x09marketing\xc0\x04";
        let lease = granted(
            &[
                (code::NAME_SERVERS, &[10, 1, 0, 1, 10, 1, 0, 2]),
                (code::DOMAIN, b"example.org\0"),
                (code::SEARCH, search),
            ],
            None,
        );
        let expected = json!({
            "nameservers": ["10.1.0.1", "10.1.0.2"], "domain": "example.org",
            "search": ["eng.apple.com", "marketing.apple.com"],
        });
        assert_eq!(serde_json::to_value(&lease.dns).unwrap(), expected);
        for malformed in [&b"\x03eng"[..], b"\xc0\x00", b"\x01a\xc0\x00", b"\x03a b\x00", b"\x40"] {
            assert_eq!(domains(malformed), None, "{malformed:?}");
        }
        let lease = granted(&[(code::DOMAIN, b"a\nnameserver 6.6.6.6")], None);
        assert_eq!(lease.dns, Dns::default());
    }

    proptest! {
        /// Rows: DHCP-malformed.
        #[test]
        fn any_options_make_a_lease(given in prop::collection::vec((any::<u8>(), any::<Vec<u8>>()), 0..8)) {
            let given: Vec<(u8, &[u8])> = given.iter().map(|(code, value)| (*code, value.as_slice())).collect();
            let lease = granted(&given, None);
            prop_assert!(lease.routes.len() <= budget::ROUTES.most);
            prop_assert_eq!(lease.addresses.len(), 1);
        }

        #[test]
        fn any_bytes_are_domains_or_none(value: Vec<u8>) {
            for domain in domains(&value).unwrap_or_default() {
                prop_assert!(is_domain(domain.as_bytes()));
            }
        }
    }
}
