//! The rules that netattach writes in tables of `iptables-nft`, and the parser that reads them back. Pure
//! apart from the encoding.
//!
//! `iptables-nft` reads a rule only in the form that it writes itself: addresses and devices as nftables
//! expressions, everything else as iptables extensions (`match`), and a counter before the verdict. If a rule
//! has any other expression, `iptables-nft` refuses to list the table. Here the comment is user data of the
//! rule: `iptables-nft` reads user data as well as its extension `comment`, and user data costs nothing per
//! packet. A rule that was saved and restored has the extension.

use std::fmt;
use std::net::IpAddr;

use super::batch::NESTED;
use super::expression::{
    Address, Is, Meta, Version, compare, count, give_verdict, if_match, load_address, load_meta,
};
use super::nat_table::{comment_of_data, user_data};
use super::{attribute, attribute_in, attributes_of, name};

/// `NFTA_RULE_EXPRESSIONS` and `NFTA_RULE_USERDATA`.
const EXPRESSIONS: u16 = 4;
const RULE_DATA: u16 = 7;

/// `NF_DROP`, `NF_ACCEPT`, `NFT_JUMP`, `NFT_RETURN`.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const JUMP: u32 = -3_i32 as u32;
const RETURN: u32 = -5_i32 as u32;

/// The extension `conntrack`, in the revision that Linux has had since 2.6.39.
const CONNTRACK: &str = "conntrack";
const CONNTRACK_REVISION: u32 = 3;
/// Length of `struct xt_conntrack_mtinfo3` (`linux/netfilter/xt_conntrack.h`), as the kernel aligns it.
const CONNTRACK_LENGTH: usize = 168;
/// Offsets of `match_flags`, `invert_flags` and `state_mask`, each of two bytes in the byte order of the
/// machine.
const MATCH_FLAGS: usize = 146;
const INVERT_FLAGS: usize = 148;
const STATE_MASK: usize = 150;
/// `XT_CONNTRACK_STATE`.
const BY_STATE: u16 = 1;
/// `XT_CONNTRACK_STATE_BIT` of `IP_CT_ESTABLISHED` and of `IP_CT_RELATED`.
const ESTABLISHED_OR_RELATED: u16 = 1 << 1 | 1 << 2;

/// A condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ask {
    /// The source address equals this one.
    Source(IpAddr),
    /// The destination address equals this one.
    Destination(IpAddr),
    /// The packet came in by the device of that name (`true`), or by another one (`false`).
    In(String, bool),
    /// The packet leaves by the device of that name (`true`), or by another one (`false`).
    Out(String, bool),
    /// The packet belongs or relates to an established connection.
    Established,
}

/// The verdict of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Accept the packet in this table.
    Accept,
    /// Drop the packet.
    Drop,
    /// Return to the calling chain.
    Return,
    /// Jump to that chain.
    Jump(String),
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// Conditions in the order of `iptables`: devices, addresses, extensions.
    pub asks: Vec<Ask>,
    /// The verdict on packets that meet all conditions.
    pub verdict: Verdict,
    /// Comment of at most 254 bytes; empty: no comment.
    pub comment: String,
}

impl Rule {
    /// A jump without conditions.
    pub fn jump(chain: &str, comment: &str) -> Self {
        Self { asks: Vec::new(), verdict: Verdict::Jump(chain.to_owned()), comment: comment.to_owned() }
    }

    /// Whether the rule sends every packet to that chain.
    pub fn leads_to(&self, chain: &str) -> bool {
        self.leads_all_to() == Some(chain)
    }

    /// Returns the chain that the rule sends every packet to, if it does.
    pub fn leads_all_to(&self) -> Option<&str> {
        match &self.verdict {
            Verdict::Jump(to) if self.asks.is_empty() => Some(to),
            _ => None,
        }
    }

    /// The attributes of a message that creates the rule, except its position.
    pub(super) fn written(&self) -> Vec<u8> {
        let mut expressions: Vec<u8> = self.asks.iter().flat_map(asked).collect();
        expressions.extend(count());
        expressions.extend(match &self.verdict {
            Verdict::Accept => give_verdict(ACCEPT, None),
            Verdict::Drop => give_verdict(DROP, None),
            Verdict::Return => give_verdict(RETURN, None),
            Verdict::Jump(chain) => give_verdict(JUMP, Some(chain)),
        });
        let mut attributes = attribute(EXPRESSIONS | NESTED, &expressions);
        if !self.comment.is_empty() {
            attributes.extend(attribute(RULE_DATA, &user_data(&self.comment)));
        }
        attributes
    }

    /// Parses a rule; `None`: the rule is not of the form that netattach writes.
    pub(super) fn read(attributes: &[u8], version: Version) -> Option<Self> {
        let mut rule = Reading::of(version);
        for (_, expression) in attributes_of(attribute_in(attributes, EXPRESSIONS)?) {
            let told = attribute_in(expression, 2).unwrap_or_default();
            rule.take(&name(attribute_in(expression, 1)?)?, told)?;
        }
        let of_data = attribute_in(attributes, RULE_DATA).and_then(comment_of_data);
        let comment = rule.comment.or(of_data).unwrap_or_default();
        // An expression that loads a value without comparing it has no effect; netattach never writes one.
        rule.verdict.filter(|_| rule.loaded.is_none()).map(|verdict| Self {
            asks: rule.asks,
            verdict,
            comment,
        })
    }
}

/// Formats the rule as arguments of `iptables`, without the comment.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ask in &self.asks {
            let bits = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
            let not = |is: &bool| if *is { "" } else { "! " };
            match ask {
                Ask::Source(address) => write!(f, "-s {address}/{} ", bits(address)),
                Ask::Destination(address) => write!(f, "-d {address}/{} ", bits(address)),
                Ask::In(device, is) => write!(f, "{}-i {device} ", not(is)),
                Ask::Out(device, is) => write!(f, "{}-o {device} ", not(is)),
                Ask::Established => write!(f, "-m conntrack --ctstate RELATED,ESTABLISHED "),
            }?;
        }
        match &self.verdict {
            Verdict::Accept => write!(f, "-j ACCEPT"),
            Verdict::Drop => write!(f, "-j DROP"),
            Verdict::Return => write!(f, "-j RETURN"),
            Verdict::Jump(chain) => write!(f, "-j {chain}"),
        }
    }
}

/// The expressions of a condition.
fn asked(ask: &Ask) -> Vec<u8> {
    let address = |which: Address, address: &IpAddr| {
        let (version, bytes) = match address {
            IpAddr::V4(address) => (Version::V4, address.octets().to_vec()),
            IpAddr::V6(address) => (Version::V6, address.octets().to_vec()),
        };
        [load_address(version, which, 0), compare(Is::Equal, 0, &bytes)].concat()
    };
    let device = |which: Meta, device: &str, is: bool| {
        let how = if is { Is::Equal } else { Is::Not };
        // The terminating zero is compared too, so that the whole name has to match.
        [load_meta(which, 0), compare(how, 0, &super::text(device))].concat()
    };
    match ask {
        Ask::Source(source) => address(Address::Source, source),
        Ask::Destination(destination) => address(Address::Destination, destination),
        Ask::In(name, is) => device(Meta::InName, name, *is),
        Ask::Out(name, is) => device(Meta::OutName, name, *is),
        Ask::Established => if_match(CONNTRACK, CONNTRACK_REVISION, &established()),
    }
}

/// `struct xt_conntrack_mtinfo3` of `--ctstate RELATED,ESTABLISHED`.
fn established() -> [u8; CONNTRACK_LENGTH] {
    let mut told = [0; CONNTRACK_LENGTH];
    told[MATCH_FLAGS..MATCH_FLAGS + 2].copy_from_slice(&BY_STATE.to_ne_bytes());
    told[STATE_MASK..STATE_MASK + 2].copy_from_slice(&ESTABLISHED_OR_RELATED.to_ne_bytes());
    told
}

/// The state of a rule that is being parsed, expression by expression.
struct Reading {
    version: Version,
    loaded: Option<Loaded>,
    asks: Vec<Ask>,
    verdict: Option<Verdict>,
    comment: Option<String>,
}

#[derive(Clone, Copy)]
enum Loaded {
    Header(Address),
    Device(Meta),
}

impl Reading {
    fn of(version: Version) -> Self {
        Self { version, loaded: None, asks: Vec::new(), verdict: None, comment: None }
    }

    /// Takes one expression in; `None`: the rule is not of the form that netattach writes.
    fn take(&mut self, expression: &str, told: &[u8]) -> Option<()> {
        let number = |kind| attribute_in(told, kind)?.try_into().ok().map(u32::from_be_bytes);
        if self.verdict.is_some() {
            return None;
        }
        match expression {
            "payload" => self.loaded = Some(self.header(number(2)?, number(3)?, number(4)?)?),
            "meta" => {
                let devices = [Meta::InName, Meta::OutName];
                let key = number(2)?;
                self.loaded = Some(Loaded::Device(devices.into_iter().find(|device| *device as u32 == key)?));
            }
            "cmp" => {
                let value = attribute_in(attribute_in(told, 3)?, 1)?;
                let ask = compared(self.loaded.take()?, number(2)?, value)?;
                self.asks.push(ask);
            }
            "match" => self.extension(&name(attribute_in(told, 1)?)?, number(2)?, attribute_in(told, 3)?)?,
            "counter" => {}
            "immediate" => self.verdict = Some(verdict(attribute_in(attribute_in(told, 2)?, 2)?)?),
            _ => return None,
        }
        Some(())
    }

    fn header(&self, base: u32, offset: u32, length: u32) -> Option<Loaded> {
        const NETWORK: u32 = 1;
        let of = |address: &Address| {
            (base, offset, length) == (NETWORK, self.version.offset(*address), self.version.address_length())
        };
        [Address::Source, Address::Destination].into_iter().find(of).map(Loaded::Header)
    }

    fn extension(&mut self, extension: &str, revision: u32, told: &[u8]) -> Option<()> {
        let number =
            |at: usize| told.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
        match extension {
            "comment" => self.comment = Some(name(told).unwrap_or_default()),
            CONNTRACK if revision == CONNTRACK_REVISION => {
                let said = (number(MATCH_FLAGS)?, number(INVERT_FLAGS)?, number(STATE_MASK)?);
                if said != (BY_STATE, 0, ESTABLISHED_OR_RELATED) {
                    return None;
                }
                self.asks.push(Ask::Established);
            }
            _ => return None,
        }
        Some(())
    }
}

fn compared(loaded: Loaded, how: u32, value: &[u8]) -> Option<Ask> {
    let is = match how {
        how if how == Is::Equal as u32 => true,
        how if how == Is::Not as u32 => false,
        _ => return None,
    };
    Some(match loaded {
        Loaded::Header(which) => {
            let v4 = value.try_into().map(|bytes: [u8; 4]| IpAddr::from(bytes));
            let address = v4.or_else(|_| value.try_into().map(|bytes: [u8; 16]| IpAddr::from(bytes))).ok()?;
            match which {
                _ if !is => return None,
                Address::Source => Ask::Source(address),
                Address::Destination => Ask::Destination(address),
            }
        }
        Loaded::Device(which) => {
            // Without the terminating zero the comparison would match a prefix of names.
            let device = name(value).filter(|_| value.last() == Some(&0))?;
            match which {
                Meta::InName => Ask::In(device, is),
                _ => Ask::Out(device, is),
            }
        }
    })
}

fn verdict(attributes: &[u8]) -> Option<Verdict> {
    let code = attribute_in(attributes, 1)?.try_into().ok().map(u32::from_be_bytes)?;
    Some(match code {
        ACCEPT => Verdict::Accept,
        DROP => Verdict::Drop,
        RETURN => Verdict::Return,
        JUMP => Verdict::Jump(name(attribute_in(attributes, 2)?)?),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device() -> impl Strategy<Value = String> {
        "[a-z0-9.-]{1,15}"
    }

    fn ask(version: Version) -> impl Strategy<Value = Ask> {
        let address = move || match version {
            Version::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
            Version::V6 => any::<[u8; 16]>().prop_map(IpAddr::from).boxed(),
        };
        prop_oneof![
            address().prop_map(Ask::Source),
            address().prop_map(Ask::Destination),
            (device(), any::<bool>()).prop_map(|(name, is)| Ask::In(name, is)),
            (device(), any::<bool>()).prop_map(|(name, is)| Ask::Out(name, is)),
            Just(Ask::Established),
        ]
    }

    fn rule(version: Version) -> impl Strategy<Value = Rule> {
        let verdict = prop_oneof![
            Just(Verdict::Accept),
            Just(Verdict::Drop),
            Just(Verdict::Return),
            "[A-Z0-9-]{1,28}".prop_map(Verdict::Jump),
        ];
        (prop::collection::vec(ask(version), 0..4), verdict, "[ -~]{0,254}")
            .prop_map(|(asks, verdict, comment)| Rule { asks, verdict, comment })
    }

    proptest! {
        #[test]
        fn a_rule_is_read_as_it_was_written(v4 in rule(Version::V4), v6 in rule(Version::V6)) {
            prop_assert_eq!(Rule::read(&v4.written(), Version::V4), Some(v4));
            prop_assert_eq!(Rule::read(&v6.written(), Version::V6), Some(v6));
        }

        #[test]
        fn any_bytes_parse_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            Rule::read(&bytes, Version::V4);
            for expression in ["payload", "meta", "cmp", "match", "immediate"] {
                Reading::of(Version::V4).take(expression, &bytes);
            }
            Reading::of(Version::V4).extension(CONNTRACK, CONNTRACK_REVISION, &bytes);
        }
    }

    #[test]
    fn rules_are_shown_as_arguments_of_iptables() {
        let asks = vec![
            Ask::In("br0".into(), true),
            Ask::Out("br0".into(), false),
            Ask::Destination([10, 1, 0, 2].into()),
            Ask::Established,
        ];
        let rule = Rule { asks, verdict: Verdict::Jump("CNI-FORWARD".into()), comment: "whose".into() };
        let shown =
            "-i br0 ! -o br0 -d 10.1.0.2/32 -m conntrack --ctstate RELATED,ESTABLISHED -j CNI-FORWARD";
        assert_eq!(rule.to_string(), shown);
    }

    #[test]
    fn another_form_is_none_of_ours() {
        let asks = |asks: Vec<u8>| {
            let expressions = [asks, give_verdict(ACCEPT, None)].concat();
            Rule::read(&attribute(EXPRESSIONS | NESTED, &expressions), Version::V4)
        };
        assert!(asks(Vec::new()).is_some());
        assert_eq!(asks(if_match("tcp", 0, &[0; 16])), None);
        assert_eq!(asks(super::super::expression::masquerade()), None);
        // A prefix of a name, as `-i br+` matches it, and an address that a packet must not have.
        assert_eq!(asks([load_meta(Meta::InName, 0), compare(Is::Equal, 0, b"br")].concat()), None);
        let not = [load_address(Version::V4, Address::Source, 0), compare(Is::Not, 0, &[10, 1, 0, 2])];
        assert_eq!(asks(not.concat()), None);
        assert_eq!(asks(load_meta(Meta::InName, 0)), None);
        let mut other = established();
        other[STATE_MASK] ^= 1 << 3;
        assert_eq!(asks(if_match(CONNTRACK, CONNTRACK_REVISION, &other)), None);
    }
}
