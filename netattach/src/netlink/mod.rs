//! The only module that uses netlink: typed calls that take specifications and return observed state.
//!
//! A [`Handle`] is a blocking socket bound to the namespace of the thread that opened it, or to another, of which it reads
//! no list beyond a bound. Related requests are sent in one datagram. Calls named `ensure_*` are idempotent, `create_*` are
//! not.
//!
//! | module | contents |
//! |---|---|
//! | `socket`, `answer`, `lean`, `text`, `error` | several requests in one datagram; what the answers say; what of them is parsed; texts that are any bytes; the kernel's refusals as data |
//! | `blurred` | descriptions of links whose lengths have wrapped |
//! | `receive` | what the kernel sends, whole however long it is |
//! | `link`, `link_change`, `properties`, `peer` | links; changes of those that exist; the other end of a veth |
//! | `whole` | lists of links that end at none that has grown meanwhile |
//! | `known_links` | bridges and parents as the kernel has told of them last |
//! | `names`, `trunks` | the names of a namespace's links; the devices beneath a VLAN |
//! | `device`, `above`, `virtual_function` | devices that pods take; what is on one; what a card sets for its virtual functions |
//! | [`devlink`], `representor` | whether a card is in mode switchdev; the node's ends of its virtual functions then |
//! | [`ethtool`] | features of a device |
//! | `generic` | families of generic netlink: those of the two above |
//! | `address`, `route`, `rule`, `neighbour` | an interface's addresses; routes; rules that select routing tables; neighbours that are entered for good |
//! | `tc`, `tbf`, `redirect` | programs on clsact hooks; pacing by tbf; intermediate devices for what a device receives |
//! | `bridge`, `bridge_port` | a bridge that is made again as it was; ports, their VLANs |
//! | `bridge_state`, `stations` | forwarding properties of bridges; the stations in their forwarding databases |
//! | `xdp_links` | which links have an XDP program, and taking one off |
//! | `nft`, `xfrm` | whether packets would meet nftables chains or IPsec; transactions of nftables |
//! | `guard`, [`nat`], [`conntrack`] | our own nftables tables: for policies, for translation; tracked connections |
//! | `vrf`, `tap`, `netkit`, `ifb` | VRFs and their ports; taps; netkit pairs; whether there are intermediate devices |
//! | `watch`, `filter_watch`, `change_watch` | notifications about links and routes; about removed filters; which links have changed |
//! | `readable`, `socket_filter` | waits for them; has the kernel leave out those of no use |

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
pub use bridge_port::{VlanUse, VlanUses, has_vlans};
pub use bridge_state::{BridgeState, ForwardingState, PortState};
pub use change_watch::{ChangeWatch, Changed, ChangedLinks};
pub use device::DeviceState;
pub use error::{Error, Refused};
pub use filter_watch::{FilterWatch, Removed};
pub use guard::{
    TABLE as GUARD_TABLE, bridges_call, guard_exists, guard_is_whole, guard_of_another, install_guard,
    remove_guard,
};
pub use known_links::KnownLinks;
pub use link::{Born, Ends, Ensured, LinkState, NewLink};
pub use nft::{Family, HookedChains, filter, filter_generation, hooked_chains, nat, senders};
pub use route::RouteState;
pub use rule::Rule;
pub use stations::{Move, Moves, Station, StationWatch};
pub use tc::{DevicePrograms, Filter, FilterState, FilteredDevice, LOOPBACK};
pub use vrf::KeptAddresses;
pub use watch::{Changes, LinkWatch, Touched};
pub use xdp_links::XdpPlace;
pub use xfrm::has_policies as has_ipsec_policies;

use crate::netns::{Netns, NetnsError, within};

/// A route-netlink socket in one network namespace. One request at a time; open another for concurrency
/// (about 10 us).
#[derive(Debug)]
pub struct Handle {
    socket: socket::Socket,
}

/// Most objects of a list that a handle [in another namespace](Handle::open_in) reads, and most bytes of it as the kernel
/// sends them: as the agent has them, some 32 MiB.
pub const MOST_IN_POD: usize = 32 << 10;
const MOST_BYTES_IN_POD: usize = 8 << 20;

/// No handle could be opened in a namespace.
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

    /// As [`Handle::open_in`], if that is the namespace with this cookie; `None`: it is another one. Where either is not known it is
    /// taken for the same. The handle's socket says which it is in: [`Netns::of`] enters the namespace
    /// once more for it.
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
    /// It reads no list of more than [`MOST_IN_POD`] objects, or of more than some MiB: who administrates a pod's network
    /// makes as many links, routes and rules there as the kernel has memory for. A longer one, or one with an object of which the
    /// kernel cannot tell all, [is too many](Error::is_too_many), and the handle is of no use after that.
    pub fn open_in(netns: &Netns) -> Result<Self, OpenError> {
        Ok(within(netns, Self::open)??.bounded())
    }

    fn bounded(mut self) -> Self {
        self.socket.limit(MOST_IN_POD, MOST_BYTES_IN_POD);
        self
    }
}
