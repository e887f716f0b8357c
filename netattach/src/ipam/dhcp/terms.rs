//! The terms of a lease, and what is due for it as time passes (RFC 2131, section 4.4.5). Pure.

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use super::codec::{Message, code};
use super::exchange::Purpose;
use crate::mac::Mac;

/// The duration of an unlimited lease (RFC 2131, section 3.3), in seconds.
const FOR_EVER: u32 = u32::MAX;
/// The shortest lease that is accepted, in seconds: each renewal is written to disk.
const SHORTEST: u32 = 4;
/// The shortest prefix that is accepted: the whole subnet is on-link at the pod's interface.
const LARGEST_SUBNET: u8 = 8;
/// The shortest pause between two attempts to renew a lease that is long enough (RFC 2131, section 4.4.5). A server
/// may name a shorter time until the first attempt.
const PAUSE: Duration = Duration::from_secs(60);
/// How long the client waits for the reply to a renewal.
const WINDOW: Duration = Duration::from_secs(4);
/// How long the agent requests a lease again that had expired when the agent started.
const AGAIN: Duration = Duration::from_secs(10);

/// A server, as it is reached on the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// The server identifier.
    pub address: Ipv4Addr,
    /// The source of the server's replies: its own Ethernet address, or that of a relay or router.
    pub mac: Mac,
}

/// The terms of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// The address.
    pub address: Ipv4Addr,
    /// Length of the subnet's prefix.
    pub prefix: u8,
    /// The server that leased the address.
    pub server: Server,
    /// When the lease was requested, in milliseconds since the node's boot.
    pub since: u64,
    /// The duration from `since`, in seconds; `u32::MAX`: unlimited.
    pub seconds: u32,
    /// When to renew with the same server, in milliseconds from `since` (T1).
    pub renew: u64,
    /// When to renew with any server, in milliseconds from `since` (T2).
    pub rebind: u64,
}

/// The next action for a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing until then; `None`: nothing ever.
    At(Option<Duration>),
    /// An exchange, until that moment.
    Ask(Purpose, Duration),
    /// The lease has expired: the address must not be used.
    Over,
}

impl Terms {
    /// Reads the terms that a server offers or acknowledges for a request sent at `since`. `known`: the prefix length
    /// that the client has already.
    ///
    /// # Errors
    /// Describes what the message lacks.
    pub fn of(
        message: &Message,
        server: Server,
        since: Duration,
        known: Option<u8>,
    ) -> Result<Self, &'static str> {
        let address = message.yiaddr;
        if address.is_unspecified()
            || address.is_multicast()
            || address.is_broadcast()
            || address.is_loopback()
        {
            return Err("no address for an interface");
        }
        let options = &message.options;
        let prefix = match known {
            Some(prefix) => prefix,
            None => prefix_of(options.address(code::SUBNET_MASK).ok_or("no subnet mask")?)?,
        };
        let subnet = Ipv4Net::new(address, prefix).map_err(|_| "no subnet mask")?;
        if prefix < LARGEST_SUBNET {
            return Err("a subnet larger than 255.0.0.0 makes it");
        }
        let is_of_subnet = prefix < 31 && [subnet.network(), subnet.broadcast()].contains(&address);
        if is_of_subnet || address == server.address {
            return Err("an address that is the subnet's or the server's own");
        }
        let seconds = options.number(code::LEASE_TIME).filter(|seconds| *seconds != 0);
        let seconds = seconds.ok_or("no lease time")?;
        if seconds < SHORTEST {
            return Err("a lease time of less than 4 s");
        }
        let whole = u64::from(seconds) * 1000;
        let (usual_renew, usual_rebind) = (whole / 2, whole / 8 * 7);
        let named = |code| options.number(code).map(|seconds| u64::from(seconds) * 1000);
        let rebind = named(code::REBIND_AFTER).filter(|at| (1..whole).contains(at)).unwrap_or(usual_rebind);
        let renew = named(code::RENEW_AFTER).unwrap_or(usual_renew);
        let renew = if (1..=rebind).contains(&renew) { renew } else { usual_renew.min(rebind) };
        Ok(Self {
            address,
            prefix,
            server,
            since: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            seconds,
            renew,
            rebind,
        })
    }

    /// Returns the terms with T1 and T2 earlier by up to a tenth of the time before each, derived from
    /// `random`: clients whose leases began together then renew at different times (RFC 2131, section 4.4.5).
    pub(super) fn fuzzed(self, random: u64) -> Self {
        let part = |of: u64, random: u16| of / 10 * u64::from(random) / u64::from(u16::MAX);
        let renew = self.renew - part(self.renew, random as u16);
        // `Self::of` ensures that T1 is not later than T2.
        let rebind = self.rebind - part(self.rebind.saturating_sub(self.renew), (random >> 16) as u16);
        Self { renew, rebind, ..self }
    }

    /// Whether the lease has expired at `now`.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.seconds != FOR_EVER && now >= self.since_begin(u64::from(self.seconds) * 1000)
    }

    /// Returns the moment `millis` milliseconds after the request.
    fn since_begin(&self, millis: u64) -> Duration {
        Duration::from_millis(self.since.saturating_add(millis))
    }

    /// Returns the action that is due at `now`. `tried`: the last failed attempt of this process.
    pub(super) fn due(&self, now: Duration, tried: Option<Duration>) -> Due {
        if self.seconds == FOR_EVER {
            return Due::At(None);
        }
        let (renew, rebind) = (self.since_begin(self.renew), self.since_begin(self.rebind));
        let end = self.since_begin(u64::from(self.seconds) * 1000);
        let ask = |purpose: Purpose, until: Duration| {
            let again = tried.filter(|at| *at >= renew).map(|at| at + self.pause(until, at)).unwrap_or(now);
            if again.min(until) > now {
                return Due::At(Some(again.min(until)));
            }
            Due::Ask(purpose, until.min(now + WINDOW))
        };
        if now < renew {
            Due::At(Some(renew))
        } else if now < rebind {
            ask(Purpose::Renew(*self), rebind)
        } else if now < end {
            // When T2 is reached, ask at once, however recent the last attempt before T2 was.
            let tried_now = tried.filter(|at| *at >= rebind);
            match tried_now {
                Some(_) => ask(Purpose::Rebind(*self), end),
                None => Due::Ask(Purpose::Rebind(*self), end.min(now + WINDOW)),
            }
        } else if tried.is_none() {
            // The agent was not running when the lease was due: the server may still have it for this client.
            Due::Ask(Purpose::Again(*self), now + AGAIN)
        } else {
            Due::Over
        }
    }

    /// Returns the pause after an attempt at `tried`, for attempts that are repeated until `until`: half of the
    /// remaining time, and at least [`PAUSE`] unless the whole lease is short.
    fn pause(&self, until: Duration, tried: Duration) -> Duration {
        let least = PAUSE.min(Duration::from_secs(self.seconds.into()) / 16);
        (until.saturating_sub(tried) / 2).max(least)
    }
}

fn prefix_of(mask: Ipv4Addr) -> Result<u8, &'static str> {
    let ones = u32::from(mask).leading_ones();
    match ones {
        0 => Err("an empty subnet mask"),
        _ if ones + u32::from(mask).trailing_zeros() < 32 => Err("a subnet mask with gaps"),
        // At most 32.
        _ => Ok(ones as u8),
    }
}

#[cfg(test)]
mod tests {
    use super::super::codec::Kind;
    use super::*;

    const SERVER: Server = Server { address: Ipv4Addr::new(10, 1, 0, 1), mac: Mac([2, 0, 0, 0, 0, 1]) };

    fn message(options: &[(u8, &[u8])]) -> Message {
        let mut message = Message::of(Kind::Ack, 1, Mac([2; 6]));
        message.yiaddr = [10, 1, 0, 7].into();
        for (code, value) in options {
            message.options.set(*code, *value);
        }
        message
    }

    /// A lease of so many seconds, asked for at 100 s.
    fn lease(seconds: u32) -> Terms {
        let options: [(u8, &[u8]); 2] =
            [(code::SUBNET_MASK, &[255, 255, 0, 0]), (code::LEASE_TIME, &seconds.to_be_bytes())];
        Terms::of(&message(&options), SERVER, Duration::from_secs(100), None).unwrap()
    }

    #[test]
    fn what_a_server_says_of_its_lease_is_taken_where_it_can_be_meant() {
        let terms = lease(3600);
        let expected = Terms {
            address: [10, 1, 0, 7].into(),
            prefix: 16,
            server: SERVER,
            since: 100_000,
            seconds: 3600,
            renew: 1_800_000,
            rebind: 3_150_000,
        };
        assert_eq!(terms, expected);
        // T1 and T2 that the server names, in seconds, and what counts, in milliseconds.
        for (named, counts) in [
            ((600, 1200), (600_000, 1_200_000)),
            ((0, 1200), (1_200_000, 1_200_000)),
            ((1, 1200), (1_000, 1_200_000)),
            ((30, 45), (30_000, 45_000)),
            ((600, 3600), (600_000, 3_150_000)),
            ((3500, 1200), (1_200_000, 1_200_000)),
        ] {
            let (renew, rebind): (u32, u32) = named;
            let options: [(u8, &[u8]); 4] = [
                (code::SUBNET_MASK, &[255, 255, 0, 0]),
                (code::LEASE_TIME, &3600_u32.to_be_bytes()),
                (code::RENEW_AFTER, &renew.to_be_bytes()),
                (code::REBIND_AFTER, &rebind.to_be_bytes()),
            ];
            let terms = Terms::of(&message(&options), SERVER, Duration::ZERO, None).unwrap();
            assert_eq!((terms.renew, terms.rebind), counts, "{named:?}");
        }
    }

    /// Rows: DHCP-fuzz.
    #[test]
    fn leases_that_begin_together_are_not_renewed_together() {
        let terms = lease(3600);
        let times = |random| {
            let Terms { renew, rebind, .. } = terms.fuzzed(random);
            (renew, rebind)
        };
        assert_eq!(times(0), (1_800_000, 3_150_000));
        assert_eq!(times(u64::MAX), (1_620_000, 3_015_000));
        assert_eq!(times(0xffff), (1_620_000, 3_150_000));
        assert_eq!(times(0x7fff_0000).0, 1_800_000);
        let short = lease(4).fuzzed(u64::MAX);
        assert_eq!((short.renew, short.rebind), (1800, 3350));
        assert_eq!(
            Terms { renew: terms.renew, rebind: terms.rebind, ..terms.fuzzed(7) },
            terms,
            "nothing else"
        );
    }

    #[test]
    fn terms_that_lack_something_are_refused_by_its_name() {
        let time: (u8, &[u8]) = (code::LEASE_TIME, &[0, 0, 0, 9]);
        for (options, expected) in [
            (vec![time], "no subnet mask"),
            (vec![(code::SUBNET_MASK, &[0, 0, 0, 0][..]), time], "an empty subnet mask"),
            (vec![(code::SUBNET_MASK, &[255, 0, 255, 0][..]), time], "a subnet mask with gaps"),
            (vec![(code::SUBNET_MASK, &[255, 255, 255, 255][..])], "no lease time"),
            (
                vec![(code::SUBNET_MASK, &[255, 255, 255, 0][..]), (code::LEASE_TIME, &[0, 0, 0, 3])],
                "a lease time of less than 4 s",
            ),
            (vec![(code::SUBNET_MASK, &[254, 0, 0, 0][..]), time], "a subnet larger than 255.0.0.0 makes it"),
            (
                vec![(code::SUBNET_MASK, &[255, 255, 255, 248][..]), time],
                "an address that is the subnet's or the server's own",
            ),
        ] {
            let found = Terms::of(&message(&options), SERVER, Duration::ZERO, None);
            assert_eq!(found, Err(expected));
        }
        let nobody = Message { yiaddr: Ipv4Addr::UNSPECIFIED, ..message(&[time]) };
        let found = Terms::of(&nobody, SERVER, Duration::ZERO, Some(24));
        assert_eq!(found, Err("no address for an interface"));
        assert_eq!(Terms::of(&message(&[time]), SERVER, Duration::ZERO, Some(24)).unwrap().prefix, 24);
    }

    /// One row for each moment of a lease of an hour that was asked for at 100 s.
    #[test]
    fn what_is_due_follows_from_the_time_and_the_last_attempt() {
        let terms = lease(3600);
        let at = |seconds| Due::At(Some(Duration::from_secs(seconds)));
        let ask = |purpose: fn(Terms) -> Purpose, until| Due::Ask(purpose(terms), Duration::from_secs(until));
        for (now, tried, expected) in [
            (100, None, at(1900)),
            (1899, None, at(1900)),
            (1900, None, ask(Purpose::Renew, 1904)),
            // Half of what is left until T2.
            (1904, Some(1904), at(1904 + 673)),
            (2577, Some(1904), ask(Purpose::Renew, 2581)),
            (3200, Some(3200), at(3250)),
            (3250, Some(3200), ask(Purpose::Rebind, 3254)),
            (3254, Some(3254), at(3254 + 223)),
            (3640, Some(3640), at(3700)),
            (3700, Some(3640), Due::Over),
            (3700, None, ask(Purpose::Again, 3710)),
            (9000, Some(9000), Due::Over),
        ] {
            let tried = tried.map(Duration::from_secs);
            assert_eq!(terms.due(Duration::from_secs(now), tried), expected, "{now} {tried:?}");
        }
        assert_eq!(lease(u32::MAX).due(Duration::from_secs(1 << 40), None), Due::At(None));
        let over = [3699, 3700, 9000].map(|now| terms.is_over(Duration::from_secs(now)));
        assert_eq!((over, lease(u32::MAX).is_over(Duration::MAX)), ([false, true, true], false));
    }

    #[test]
    fn a_short_lease_is_asked_for_again_within_its_time() {
        let terms = lease(8);
        let at = |millis| Duration::from_millis(millis);
        assert_eq!(terms.due(at(104_000), None), Due::Ask(Purpose::Renew(terms), at(107_000)));
        assert_eq!(terms.due(at(105_000), Some(at(105_000))), Due::At(Some(at(106_000))));
        assert_eq!(terms.due(at(107_000), Some(at(105_000))), Due::Ask(Purpose::Rebind(terms), at(108_000)));
    }
}
