//! Hosts that have answered ARP for every address that a network's servers offered, like a router with proxy ARP.
//! Pure.
//!
//! A server does not offer a declined address to any client for a while, and the runtime retries a failed ADD:
//! without this memory each retry would make more addresses of the server's pool unusable.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::mac::Mac;

/// How long a host is remembered after it last answered for an offered address.
const KEPT: Duration = Duration::from_secs(60 * 60);
/// Time between two declined addresses for a remembered host. Such a host may have only a part of the range, for
/// example Service addresses: the server then offers others.
const DECLINED_EVERY: Duration = Duration::from_secs(10 * 60);
/// Most hosts that are remembered. Each has cost as many addresses as one exchange declines.
const MOST: usize = 64;

/// The hosts, by the network's name and their Ethernet address.
#[derive(Debug, Default)]
pub(super) struct Proxies(BTreeMap<(String, Mac), Known>);

/// Times of a host, on a monotonic clock.
#[derive(Debug)]
struct Known {
    answered: Duration,
    declined: Duration,
}

impl Proxies {
    /// Whether the address for which a host has now answered should be released instead of declined, because the host
    /// is remembered.
    pub(super) fn gives_back(&mut self, network: &str, host: Mac, now: Duration) -> bool {
        self.0.retain(|_, known| now.saturating_sub(known.answered) < KEPT);
        let Some(known) = self.0.get_mut(&(network.to_owned(), host)) else { return false };
        known.answered = now;
        if now.saturating_sub(known.declined) < DECLINED_EVERY {
            return true;
        }
        known.declined = now;
        false
    }

    /// Remembers a host that has answered for all addresses of an exchange.
    pub(super) fn note(&mut self, network: &str, host: Mac, now: Duration) {
        self.0.insert((network.to_owned(), host), Known { answered: now, declined: now });
        if self.0.len() > MOST {
            let oldest = self.0.iter().min_by_key(|(_, known)| known.answered).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.0.remove(&oldest);
            }
        }
    }

    /// Forgets the hosts of a network, after an offered address for which no host has answered.
    pub(super) fn forget(&mut self, network: &str) {
        self.0.retain(|(of, _), _| of != network);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTER: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn minutes(minutes: u64) -> Duration {
        Duration::from_secs(minutes * 60)
    }

    /// Rows: DHCP-proxy.
    #[test]
    fn a_host_is_known_on_its_network_as_long_as_it_answers_or_an_address_is_free() {
        let mut proxies = Proxies::default();
        assert!(!proxies.gives_back("lan", ROUTER, minutes(0)));
        proxies.note("lan", ROUTER, minutes(0));
        assert!(proxies.gives_back("lan", ROUTER, minutes(9)));
        assert!(!proxies.gives_back("lan", OTHER, minutes(9)));
        assert!(!proxies.gives_back("wan", ROUTER, minutes(9)));
        assert!(!proxies.gives_back("lan", ROUTER, minutes(50)), "one is declined now and then");
        assert!(proxies.gives_back("lan", ROUTER, minutes(51)));
        assert!(!proxies.gives_back("lan", ROUTER, minutes(100)), "it has answered meanwhile");
        assert!(proxies.gives_back("lan", ROUTER, minutes(101)));
        assert!(!proxies.gives_back("lan", ROUTER, minutes(161)));
        assert!(!proxies.gives_back("lan", ROUTER, minutes(161)), "it is not known any more");
        for network in ["lan", "wan"] {
            proxies.note(network, ROUTER, minutes(161));
        }
        proxies.forget("lan");
        let known = ["lan", "wan"].map(|network| proxies.gives_back(network, ROUTER, minutes(162)));
        assert_eq!(known, [false, true]);
    }

    #[test]
    fn of_many_the_newest_are_known() {
        let mut proxies = Proxies::default();
        let host = |number: u8| Mac([2, 0, 0, 0, 0, number]);
        (0..=64).for_each(|number| proxies.note("lan", host(number), Duration::from_secs(number.into())));
        let known = [0, 1, 64].map(|number| proxies.gives_back("lan", host(number), minutes(2)));
        assert_eq!(known, [false, true, true]);
    }
}
