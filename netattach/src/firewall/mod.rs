//! The chained plugin `firewall`: lets the node forward packets from and to pods' addresses, by rules in the
//! tables that `iptables` filters by.
//!
//! | module | contents |
//! |---|---|
//! | `settle` | which rules there should be, and the changes that lead there. Pure |
//! | `agent` | the rules of the agent's attachments, put back when other programs remove them |
//! | [`senders`] | the Ethernet addresses by which pods may send, where there is no agent |
//!
//! A chain whose policy is drop, as Docker leaves `FORWARD`, can only be overridden in that chain: a packet
//! that another table accepts is dropped there all the same. So the rules are in the tables `filter` of
//! `iptables-nft`, in the form that `iptables-nft` reads. The comment of each rule names its attachment, so
//! DEL and GC need no configuration, and a late DEL removes no rule that meanwhile belongs to another pod.
//! Decision 0038 gives the reasons.

mod agent;
pub mod senders;
mod settle;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::cni::CniResult;
use crate::cni::identifier::check_link_name;
use crate::nat::without_agent::{PATIENCE, Pause, attachment_words, network_word};
use crate::netlink::filter::{self, Change, Version, View};
use crate::netlink::{self, Error, Family};
use crate::step::{Admit, Admitted, Ingress};
pub use agent::Firewall;
use settle::{CHAINS, Note, Wanted, said, settle};

/// Most addresses that one attachment may have.
pub const MOST_ADDRESSES: usize = 64;

/// The table of firewalld, which rejects unknown packets after `iptables` has accepted them.
const FIREWALLD: &str = "firewalld";

/// Why the node does not forward as asked.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    /// The tables could not be read or changed.
    #[error("tables filter of the node's packet filter (nftables, with nft_compat and xt_conntrack)")]
    Tables(#[from] netlink::Error),
    /// The kernel's bridge family cannot drop packets that pods send by other Ethernet addresses than their
    /// own.
    #[error(
        "key macspoofchk: without an agent it needs the packet filter of bridges (nftables with its family bridge, and \
         nft_meta_bridge)"
    )]
    NoSenders(#[source] netlink::Error),
    /// The table `bridge` that drops such packets could not be read or changed.
    #[error("table bridge {TABLE} of the node's packet filter", TABLE = netlink::senders::TABLE)]
    Senders(#[source] netlink::Error),
    /// Other processes kept changing the packet filter.
    #[error("the node's packet filter: other programs keep changing it")]
    Busy,
    /// Another program keeps removing rules that the agent puts back.
    #[error(
        "tables filter of the node's packet filter: another program removes rules for pods again and again: they were put back \
         {0} times, and from now on are once a minute, those of closed bridges each time (`nft monitor` shows which program it \
         is)"
    )]
    FoughtOver(u32),
    /// firewalld filters beside the tables.
    #[error(
        "key backend: firewalld filters on this node (table inet {FIREWALLD}), and rejects what iptables accepts: have the \
         executable of the reference do it, or say iptables where firewalld lets the pods pass"
    )]
    Firewalld,
    /// There is no bridge on the node to close.
    #[error(
        "key ingressPolicy: {0} is for bridges, and the first interface of prevResult is none of the node"
    )]
    NoBridge(&'static str),
    /// The policy would keep packets from their gateway, because the gateway is behind a port of the bridge.
    #[error(
        "key ingressPolicy: isolated would keep the pods of a VLAN from their gateway: {0} is behind a port of the bridge; say \
         same-bridge, and portIsolation of bridge keeps the pods from each other"
    )]
    GatewayBehindPort(String),
    /// The policy has no effect, because the interface has no address.
    #[error("key ingressPolicy: {0} is carried out for addresses, and the interface has none")]
    NoAddress(&'static str),
    /// The attachment has too many addresses.
    #[error("the interface has {0} addresses, more than {MOST_ADDRESSES}")]
    Many(usize),
}

/// The writer of rules: the first word of their comments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner(String);

impl Owner {
    /// Prefix of the words of all owners.
    const START: &'static str = "netattach";

    /// The plain executables.
    pub fn executables() -> Self {
        Self("netattach-cni".to_owned())
    }

    /// The agent with that state directory.
    pub fn agent(state: &str) -> Self {
        let digits: String = Sha256::digest(state).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}:{digits}", Self::START))
    }

    /// The comment of an attachment's rules.
    pub fn note(&self, network: &str, container: &str, ifname: &str) -> String {
        format!("{} {}", self.0, attachment_words(network, container, ifname))
    }
}

/// Computes what an attachment gets, from the result of the preceding plugins. If the bridge has a VLAN's
/// gateways on a separate device, the node routes by that device, so the device is closed instead of the
/// bridge.
///
/// # Errors
/// There are too many addresses, or no address or no bridge for the policy, or the policy would close the
/// path to the gateway.
pub fn admitted(admit: &Admit, result: &CniResult) -> Result<Admitted, FirewallError> {
    let addresses: BTreeSet<_> = result.ips.iter().map(|ip| ip.address.addr()).collect();
    if addresses.len() > MOST_ADDRESSES {
        return Err(FirewallError::Many(addresses.len()));
    }
    if addresses.is_empty() && !admit.ingress.is_open() {
        return Err(FirewallError::NoAddress(admit.ingress.word()));
    }
    let of_node = |listed: &&crate::cni::Interface| {
        listed.sandbox.as_deref().unwrap_or_default().is_empty() && check_link_name(&listed.name).is_ok()
    };
    let bridge = result.interfaces.first().filter(of_node);
    let has_gateways = |listed: &&crate::cni::Interface| {
        of_node(listed) && bridge.is_some_and(|bridge| is_of_vlan(&listed.name, &bridge.name))
    };
    let routed = result.interfaces.iter().find(has_gateways);
    let closed = match (admit.ingress, routed.or(bridge)) {
        (Ingress::Open, _) => None,
        (Ingress::Isolated, Some(gateway)) if routed.is_some() => {
            return Err(FirewallError::GatewayBehindPort(gateway.name.clone()));
        }
        (ingress, Some(closed)) => Some((ingress, closed.name.clone())),
        (ingress, None) => return Err(FirewallError::NoBridge(ingress.word())),
    };
    Ok(Admitted {
        addresses: addresses.into_iter().collect(),
        admin_chain: admit.admin_chain.clone(),
        closed,
    })
}

/// Whether a device has the gateways of a VLAN of that bridge, judged by the naming of the reference plugin.
fn is_of_vlan(device: &str, bridge: &str) -> bool {
    let vlan = device.strip_prefix(bridge).and_then(|rest| rest.strip_prefix('.'));
    vlan.is_some_and(|vlan| vlan.parse::<u16>().is_ok())
}

/// Refuses an ADD where the rules would have no effect.
///
/// # Errors
/// firewalld filters on the node, or the kernel does not answer.
pub fn check_effect(admit: &Admit) -> Result<(), FirewallError> {
    if admit.beside_firewalld || !filter::has_table(Family::Inet, FIREWALLD)? {
        return Ok(());
    }
    Err(FirewallError::Firewalld)
}

/// Gives an attachment its rules and removes those that it had before. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn admit(note: &str, admitted: &Admitted) -> Result<(), FirewallError> {
    carry_out(|| try_to_admit(&Kernel, note, admitted)).map(drop)
}

/// Removes the rules of an attachment. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn dismiss(note: &str) -> Result<(), FirewallError> {
    carry_out(|| try_to_dismiss(&Kernel, note)).map(drop)
}

/// Removes the rules of those attachments of a network that are not in `valid`, a list of containers and
/// interfaces.
///
/// # Errors
/// The kernel refuses.
pub fn collect(owner: &Owner, network: &str, valid: &[(&str, &str)]) -> Result<(), FirewallError> {
    let valid: BTreeSet<String> =
        valid.iter().map(|(container, ifname)| owner.note(network, container, ifname)).collect();
    let network = network_word(network);
    let is_gone = |note: &Note<'_>| {
        note.owner == owner.0 && note.network == network && !valid.contains(note.attachment)
    };
    carry_out(|| attempt(&Kernel, &[], |view| Ok(settle(view, &[], &is_gone)))).map(drop)
}

/// Describes what the node lacks of an attachment's rules.
///
/// # Errors
/// The kernel does not answer.
pub fn difference(note: &str, admitted: &Admitted) -> Result<Option<String>, FirewallError> {
    let wanted = [Wanted { note, admitted }];
    let view = carry_out(|| look(&Kernel, &wanted))?;
    Ok(settle(&view, &wanted, &|_| false).first().map(said))
}

/// Checks that the kernel has a packet filter for the rules.
///
/// # Errors
/// It has none.
pub fn check_possible() -> Result<(), FirewallError> {
    Ok(netlink::filter_generation().map(drop)?)
}

/// Access to the tables. A trait so that tests can simulate processes that change the tables first.
trait Tables: fmt::Debug + Send + Sync {
    /// Reads the tables, and which of the administrators' chains `admins` exist.
    fn view(&self, admins: &BTreeSet<&str>) -> Result<View, Error>;
    /// Changes tables on the condition that they are as they were read. Returns `false` if they are not;
    /// nothing was done then.
    fn change(&self, view: &View, changes: &[(Version, Change)]) -> Result<bool, Error>;
    /// The packet filter's generation.
    fn generation(&self) -> Result<u32, Error>;
}

#[derive(Debug)]
struct Kernel;

impl Tables for Kernel {
    fn view(&self, admins: &BTreeSet<&str>) -> Result<View, Error> {
        filter::view(&CHAINS, admins)
    }

    fn change(&self, view: &View, changes: &[(Version, Change)]) -> Result<bool, Error> {
        filter::change(view, changes)
    }

    fn generation(&self) -> Result<u32, Error> {
        netlink::filter_generation()
    }
}

/// Result of an attempt that succeeded.
#[derive(Debug, Clone, Copy)]
struct Settled {
    /// Whether changes were necessary.
    changed: bool,
    /// The packet filter's generation in which the rules were right, if it was read.
    generation: Option<u32>,
}

/// Repeats `attempt` until no other process interferes, for at most [`PATIENCE`]. Sleeps between attempts, so
/// a lock must be taken within an attempt and released at its end.
fn carry_out<T>(mut attempt: impl FnMut() -> Result<Option<T>, FirewallError>) -> Result<T, FirewallError> {
    let due = Instant::now() + PATIENCE;
    let mut pause = Pause::default();
    loop {
        if let Some(done) = attempt()? {
            return Ok(done);
        }
        if Instant::now() > due {
            return Err(FirewallError::Busy);
        }
        pause.wait();
    }
}

/// Makes one attempt to give an attachment its rules. Like all attempts it does not wait; `None`: another
/// process changed the packet filter first.
fn try_to_admit(
    tables: &dyn Tables,
    note: &str,
    admitted: &Admitted,
) -> Result<Option<Settled>, FirewallError> {
    let wanted = [Wanted { note, admitted }];
    attempt(tables, &wanted, |view| Ok(settle(view, &wanted, &|there| there.is_of(note))))
}

/// Makes one attempt to remove the rules of an attachment.
fn try_to_dismiss(tables: &dyn Tables, note: &str) -> Result<Option<Settled>, FirewallError> {
    attempt(tables, &[], |view| Ok(settle(view, &[], &|there| there.is_of(note))))
}

/// Makes one attempt to change the tables as `decide` says, for these attachments.
fn attempt(
    tables: &dyn Tables,
    wanted: &[Wanted<'_>],
    decide: impl FnOnce(&View) -> Result<Vec<(Version, Change)>, FirewallError>,
) -> Result<Option<Settled>, FirewallError> {
    let Some(view) = look(tables, wanted)? else { return Ok(None) };
    let changes = decide(&view)?;
    if changes.is_empty() {
        return Ok(Some(Settled { changed: false, generation: Some(view.generation()) }));
    }
    let is_done = tables.change(&view, &changes)?;
    Ok(is_done.then_some(Settled { changed: true, generation: None }))
}

/// Reads the tables as far as these attachments need. `None`: another process changed them meanwhile.
fn look(tables: &dyn Tables, wanted: &[Wanted<'_>]) -> Result<Option<View>, FirewallError> {
    let admins = wanted.iter().map(|it| it.admitted.admin_chain.as_str()).collect();
    match tables.view(&admins) {
        Err(Error::Interrupted(_)) => Ok(None),
        view => Ok(Some(view?)),
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;
    use crate::cni::{Interface, IpConfig};

    fn result(addresses: &[&str], first: Option<(&str, Option<&str>)>) -> CniResult {
        let ip = |address: &&str| IpConfig {
            interface: None,
            address: address.parse::<IpNet>().unwrap(),
            gateway: None,
        };
        let listed = |(name, sandbox): (&str, Option<&str>)| Interface {
            name: name.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            ..Interface::default()
        };
        CniResult {
            ips: addresses.iter().map(ip).collect(),
            interfaces: first.into_iter().map(listed).collect(),
            ..CniResult::default()
        }
    }

    #[test]
    fn addresses_and_bridge_are_those_of_the_result() {
        let open = Admit { admin_chain: "CNI-ADMIN".into(), ..Admit::default() };
        let closed = Admit { ingress: Ingress::SameBridge, ..open.clone() };
        let of_bridge = result(&["10.1.0.2/24", "fd00::2/64", "10.1.0.2/16"], Some(("br0", None)));
        let expected = Admitted {
            addresses: vec!["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            admin_chain: "CNI-ADMIN".into(),
            closed: Some((Ingress::SameBridge, "br0".into())),
        };
        assert_eq!(admitted(&closed, &of_bridge).unwrap(), expected);
        assert_eq!(admitted(&open, &of_bridge).unwrap(), Admitted { closed: None, ..expected });
        for first in [None, Some(("eth0", Some("/run/netns/a"))), Some(("a b", None)), Some(("", None))] {
            let said = admitted(&closed, &result(&["10.1.0.2/24"], first)).unwrap_err().to_string();
            assert!(said.starts_with("key ingressPolicy: same-bridge is for bridges"), "{said}");
        }
        let without = result(&[], Some(("br0", None)));
        assert_eq!(
            admitted(&closed, &without).unwrap_err().to_string(),
            "key ingressPolicy: same-bridge is carried out for addresses, and the interface has none"
        );
        assert_eq!(admitted(&open, &without).unwrap().addresses, [] as [std::net::IpAddr; 0]);
        let many: Vec<String> = (0..65).map(|number| format!("10.1.0.{number}/24")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(
            admitted(&open, &result(&many, None)).unwrap_err().to_string(),
            "the interface has 65 addresses, more than 64"
        );
    }

    /// Rows: FWL-vlan.
    #[test]
    fn what_the_node_routes_to_a_vlan_by_is_closed_and_the_way_there_is_not() {
        let listed = |(name, sandbox): (&str, Option<&str>)| Interface {
            name: name.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            ..Interface::default()
        };
        let ends = [("br0", None), ("na1", None), ("eth0", Some("/run/netns/a"))];
        for (last, routed) in [
            (("br0.100", None), Some("br0.100")),
            (("br0.100", Some("/run/netns/a")), None),
            (("br0.mine", None), None),
            (("br0100", None), None),
            (("br1.100", None), None),
        ] {
            let mut of_vlan = result(&["10.1.0.2/24"], None);
            of_vlan.interfaces = ends.into_iter().chain([last]).map(listed).collect();
            let found = |ingress| {
                let admitted = admitted(&Admit { ingress, ..Admit::default() }, &of_vlan);
                admitted.map(|admitted| admitted.closed).map_err(|error| error.to_string())
            };
            let closed = |ingress| Ok(Some((ingress, routed.unwrap_or("br0").to_owned())));
            assert_eq!(found(Ingress::Open), Ok(None));
            assert_eq!(found(Ingress::SameBridge), closed(Ingress::SameBridge), "{last:?}");
            let told = "key ingressPolicy: isolated would keep the pods of a VLAN from their gateway: br0.100 is behind a port of \
                        the bridge; say same-bridge, and portIsolation of bridge keeps the pods from each other";
            let isolated = match routed {
                Some(_) => Err(told.to_owned()),
                None => closed(Ingress::Isolated),
            };
            assert_eq!(found(Ingress::Isolated), isolated, "{last:?}");
        }
    }

    #[test]
    fn a_note_fits_and_names_its_attachment() {
        let agent = Owner::agent("/var/lib/netattach");
        let (network, container) = ("n".repeat(60), "c".repeat(64));
        let note = agent.note(&network, &container, "i23456789012345");
        let whole = format!("{note} same-bridge:b23456789012345");
        assert!(whole.len() < 255, "{}", whole.len());
        let read = Note::of(&whole).unwrap();
        assert!(read.is_of(&note) && !read.is_of(&agent.note(&network, &container, "i2345678901234")));
        assert_eq!((read.owner, read.network), (agent.0.as_str(), network_word(&network).as_str()));
        assert_ne!(agent, Owner::agent("/var/lib/other"));
        for other in ["", "CNI firewall plugin rules", "netattach ingressPolicy", "netattach:1 a b"] {
            assert!(Note::of(other).is_none(), "{other}");
        }
    }
}
