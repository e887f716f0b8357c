//! The only module that uses netlink: typed calls that take specifications and return observed state.
//!
//! A [`Handle`] is a blocking socket bound to the namespace of the thread that opened it. Related requests are sent in
//! one datagram. Calls named `ensure_*` are idempotent, `create_*` are not.
//!
//! | module | contents |
//! |---|---|
//! | `socket`, `error` | several requests in one datagram; the kernel's refusals as data |
//! | `link`, `link_change`, `properties`, `peer` | links; changes of those that exist; the other end of a veth |
//! | `device`, `virtual_function` | devices that pods take, and what a card sets for its virtual functions |
//! | `address`, `route`, `rule` | an interface's addresses; routes; rules that select routing tables |
//! | `tc`, `tbf` | programs on clsact hooks; pacing by tbf |
//! | `bridge`, `bridge_port` | a bridge that is made again as it was; ports, their VLANs |
//! | `bridge_state`, `stations` | forwarding properties of bridges; the stations in their forwarding databases |
//! | `nft`, `xfrm` | whether packets would meet nftables chains or IPsec; transactions of nftables |
//! | `guard`, [`nat`], [`conntrack`] | our own nftables tables: for policies, for translation; tracked connections |
//! | `watch`, `filter_watch`, `change_watch` | notifications about links and routes; about removed filters; whether anything has changed |

mod address;
mod bridge;
mod bridge_port;
mod bridge_state;
mod change_watch;
pub mod conntrack;
mod device;
mod error;
mod filter_watch;
mod guard;
mod link;
mod link_change;
mod nft;
mod peer;
mod properties;
mod route;
mod rule;
mod socket;
mod stations;
mod tbf;
mod tc;
mod virtual_function;
mod watch;
mod xfrm;

pub use bridge_port::{VlanUse, VlanUses, has_vlans};
pub use bridge_state::{BridgeState, ForwardingState, PortState};
pub use change_watch::ChangeWatch;
pub use device::DeviceState;
pub use error::{Error, Refused};
pub use filter_watch::FilterWatch;
pub use guard::{
    TABLE as GUARD_TABLE, bridges_call, guard_exists, guard_is_whole, install_guard, remove_guard,
};
pub use link::{Ensured, LinkState};
pub use nft::{Family, HookedChains, filter_generation, hooked_chains, nat};
pub use route::RouteState;
pub use rule::Rule;
pub use stations::{Move, Moves, Station, StationWatch};
pub use tc::{DevicePrograms, Filter, FilterState, FilteredDevice, LOOPBACK};
pub use watch::{Changes, LinkWatch, Touched};
pub use xfrm::has_policies as has_ipsec_policies;

use crate::netns::{Netns, NetnsError, within};

/// A route-netlink socket in one network namespace. One request at a time; open another for concurrency
/// (about 10 us).
#[derive(Debug)]
pub struct Handle {
    socket: socket::Socket,
}

/// Most objects of a list that a [bounded](Handle::bounded) handle reads, and most bytes of it as the kernel sends them: as
/// the agent has them, some 32 MiB.
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

    /// Reads no list of more than [`MOST_IN_POD`] objects, or of more than some MiB: who administrates a pod's network makes as many addresses and routes
    /// there as the kernel has memory for. For what may fail: the handle is of no use after that.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.socket.limit(MOST_IN_POD, MOST_BYTES_IN_POD);
        self
    }

    /// Opens a handle in another namespace. The handle may be used from any thread.
    pub fn open_in(netns: &Netns) -> Result<Self, OpenError> {
        Ok(within(netns, Self::open)??)
    }
}
