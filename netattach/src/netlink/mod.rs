//! The only module that uses netlink: typed calls that take specifications and return observed state.
//!
//! A [`Handle`] is a blocking socket bound to the namespace of the thread that opened it. A handle opened in
//! another namespace limits the length of the lists that it reads. Related requests are sent in one datagram.
//! Calls named `ensure_*` are idempotent, `create_*` are not.
//!
//! | module | contents |
//! |---|---|
//! | `socket`, `answer`, `lean`, `text`, `error` | several requests in one datagram; parsing of answers; attributes that are dropped before parsing; texts that may be any bytes; the kernel's refusals as data |
//! | `blurred` | descriptions of links whose attribute lengths may have wrapped |
//! | `receive` | receives datagrams of any length whole |
//! | `link`, `link_change`, `properties`, `peer` | links; changes of existing links; the other end of a veth |
//! | `whole` | lists of links that are complete even if a link's description grows meanwhile |
//! | `known_links` | a cache of bridges and parents, kept up to date by notifications |
//! | `names`, `trunks` | the names of a namespace's links; the devices beneath a VLAN |
//! | `device`, `above`, `virtual_function` | devices that pods take; links on top of a device; settings that a card has for its virtual functions |
//! | [`devlink`], `representor` | whether a card is in mode switchdev; the representors of its virtual functions in that mode |
//! | [`ethtool`] | features of a device |
//! | `generic` | families of generic netlink, for the two above |
//! | `address`, `route`, `rule`, `neighbour` | an interface's addresses; routes; rules that select routing tables; permanent neighbour entries |
//! | `tc`, `tbf`, `redirect` | programs on clsact hooks; rate limiting by tbf; intermediate devices for what a device receives |
//! | `bridge`, `bridge_port` | bridges, and their recreation with their settings; ports and their VLANs |
//! | `bridge_state`, `stations` | forwarding properties of bridges; the stations in their forwarding databases |
//! | `xdp_links` | which links have an XDP program, and its removal |
//! | `nft`, `xfrm` | whether packets would meet nftables chains or IPsec; transactions of nftables |
//! | `guard`, [`nat`], [`conntrack`] | netattach's own nftables tables: for policies, for translation; conntrack entries |
//! | `vrf`, `tap`, `netkit`, `ifb` | VRFs and their ports; taps; netkit pairs; whether intermediate devices exist |
//! | `watch`, `filter_watch`, `filter_changes`, `change_watch`, `address_watch` | notifications about links and routes; about removed filters; about which devices' filters have changed; about which links have changed; about addresses |
//! | `readable`, `socket_filter` | waits for notifications; has the kernel filter out those that are not needed |
//! | `packet_socket` | sockets for whole frames of a link |

mod above;
mod address;
mod address_watch;
mod answer;
mod blurred;
mod bridge;
mod bridge_port;
mod bridge_state;
mod change_watch;
pub mod conntrack;
mod device;
pub mod devlink;
mod error;
pub mod ethtool;
mod filter_changes;
mod filter_watch;
mod generic;
mod guard;
mod ifb;
mod known_links;
mod lean;
mod link;
mod link_change;
mod names;
mod neighbour;
mod netkit;
mod nft;
pub(crate) mod packet_socket;
mod peer;
mod properties;
mod readable;
mod receive;
mod redirect;
mod representor;
mod route;
mod rule;
mod socket;
pub(crate) mod socket_filter;
mod stations;
mod tap;
mod tbf;
mod tc;
mod text;
mod trunks;
mod virtual_function;
mod vrf;
mod watch;
mod whole;
mod xdp_links;
mod xfrm;

pub use above::Above;
pub use address_watch::{AddressWatch, ToldAddress};
pub use bridge::{Born, Ensured};
pub use bridge_port::{VlanUse, VlanUses, has_vlans};
pub use bridge_state::{BridgeState, ForwardingState, PortState};
pub use change_watch::{ChangeWatch, Changed, ChangedLinks};
pub use device::DeviceState;
pub use error::{Error, Refused};
pub use filter_changes::FilterChanges;
pub use filter_watch::{FilterWatch, Removed};
pub use guard::{
    TABLE as GUARD_TABLE, bridges_call, guard_exists, guard_is_whole, guard_of_another, install_guard,
    remove_guard,
};
pub use known_links::KnownLinks;
pub use link::{Ends, LinkState, NewLink};
pub use nft::{
    Family, FilterGeneration, HookedChains, filter, filter_generation, hooked_chains, nat, senders,
};
pub use route::RouteState;
pub use rule::Rule;
pub use stations::{Move, Moves, Station, StationWatch};
pub use tc::{DevicePrograms, Filter, FilterState, FilteredDevice, LOOPBACK};
pub use vrf::KeptAddresses;
pub use watch::{Changes, LinkWatch, Touched};
pub use xdp_links::XdpPlace;
pub use xfrm::IpsecPolicies;

use crate::netns::{Netns, NetnsError, within};

/// A route-netlink socket in one network namespace. A handle carries out one request at a time; open another
/// one for concurrency (about 10 us).
#[derive(Debug)]
pub struct Handle {
    socket: socket::Socket,
}

/// Limits of a list that a handle [in another namespace](Handle::open_in) reads: most objects, and most bytes
/// in the kernel's encoding. Parsed by the agent, such a list takes some 32 MiB.
pub const MOST_IN_POD: usize = 32 << 10;
const MOST_BYTES_IN_POD: usize = 8 << 20;

/// Why no handle could be opened in a namespace.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The namespace could not be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The socket could not be opened.
    #[error(transparent)]
    Netlink(#[from] Error),
}

impl Handle {
    /// Opens a handle in the calling thread's namespace.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: socket::Socket::open()? })
    }

    /// Cookie of the handle's namespace, by which BPF programs recognise its sockets; 0 on kernels without cookies
    /// (before Linux 5.14).
    pub fn netns_cookie(&self) -> u64 {
        self.socket.netns_cookie()
    }

    /// As [`Handle::open_in`], if that namespace has this cookie; `None`: it has another one. If either
    /// cookie is unknown, the namespaces count as the same. The cookie is read from the handle's socket,
    /// since [`Netns::of`] would enter the namespace once more.
    ///
    /// # Errors
    /// As of [`Handle::open_in`].
    pub fn open_in_that(netns: &Netns, cookie: Option<u64>) -> Result<Option<Self>, OpenError> {
        let handle = Self::open_in(netns)?;
        // 0: the kernel has no cookies.
        let is_it = cookie.is_none_or(|cookie| [0, cookie].contains(&handle.netns_cookie()));
        Ok(is_it.then_some(handle))
    }

    /// Opens a handle in another namespace. The handle may be used from any thread.
    ///
    /// The handle reads no list of more than [`MOST_IN_POD`] objects or of more than some MiB, because a
    /// process that administrates a pod's network can create as many links, routes and rules as the kernel
    /// has memory for. A longer list, or a list with an object that the kernel cannot describe completely,
    /// [is too many](Error::is_too_many), and the handle cannot be used after that.
    pub fn open_in(netns: &Netns) -> Result<Self, OpenError> {
        Ok(within(netns, Self::open)??.bounded())
    }

    fn bounded(mut self) -> Self {
        self.socket.limit(MOST_IN_POD, MOST_BYTES_IN_POD);
        self
    }
}
