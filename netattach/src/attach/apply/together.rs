//! Steps that several attachments of a pod take at once, each in one datagram to the kernel.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::time::Duration;

use super::links::{check_has_v6, check_mtu, not_created};
use super::plugins::PluginError;
use super::{Executor, Failed, ensure_if_present, host_access, interface};
use crate::attach::StepError;
use crate::attach::addresses::advertise::{Sender, Told};
use crate::attach::addresses::holder::{Address, AddressError, Holder};
use crate::attach::addresses::in_use::check_mac_is_free;
use crate::cni::code;
use crate::enforce::attachment::EnforcedAttachment;
use crate::error_chain::Chain;
use crate::netlink::{self, Ends, LinkState, NewLink};
use crate::netns::within;
use crate::plan::addressing::{self, Announcement};
use crate::plan::phases::Item;
use crate::plan::result::{self, Leased};
use crate::plan::{AttachmentPlan, hook_kind};
use crate::spec::{self, Addressing};
use crate::step::{Configure, HookKind, Interface, NotObservable, Output, Protect, Step, StepRef, Style};
use crate::sysctl;
use crate::waits;

/// How long duplicate address detection of IPv6 may take if requested: the kernel needs a second or two.
const DETECTION: Duration = Duration::from_secs(5);

/// A link that is ready to be created.
enum Ready<'p> {
    Veth { veth: &'p spec::Veth, bridge: Option<u32> },
    Macvlan { macvlan: &'p spec::Macvlan, parent: LinkState },
}

impl Ready<'_> {
    fn link(&self) -> NewLink<'_> {
        match self {
            Self::Veth { veth, bridge } => NewLink::Veth { veth, bridge: *bridge },
            Self::Macvlan { macvlan, parent } => NewLink::Macvlan { macvlan, parent },
        }
    }
}

/// An interface of the pod that is about to come up.
struct Wanted<'p> {
    item: Item<'p>,
    configure: &'p Configure,
    host: Option<Interface>,
    pod: Interface,
    addressing: Addressing,
    awaits_carrier: bool,
}

impl Wanted<'_> {
    fn has_v6(&self) -> bool {
        self.addressing.addresses.iter().any(|address| address.addr().is_ipv6())
    }

    fn all(&self) -> Vec<IpAddr> {
        self.addressing.addresses.iter().map(|address| address.addr()).collect()
    }

    fn v4(&self) -> Vec<Ipv4Addr> {
        let each = self.addressing.addresses.iter().map(|address| address.addr());
        let v4 = each.filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        v4.collect()
    }
}

impl<'a> Executor<'a> {
    /// Creates the links of a group, down in the pod.
    pub(super) fn create_links(&mut self, group: &[Item<'a>]) -> Result<Vec<Output>, Failed<'a>> {
        let mut ready = Vec::with_capacity(group.len());
        for item in group {
            ready.push(self.ready(item).map_err(Failed::of(item))?);
        }
        let links: Vec<_> = ready.iter().map(Ready::link).collect();
        let made = self.host.create_links(&links, self.netns.as_fd(), &mut self.pod);
        let made = match (made, group.first()) {
            (Ok(made), _) => made,
            (Err(error), Some(first)) => return Err(Failed::of(first)(error)),
            (Err(_), None) => return Ok(Vec::new()),
        };
        let mut outputs = Vec::with_capacity(group.len());
        for ((item, ready), made) in group.iter().zip(&ready).zip(made) {
            let output = self.created(item, ready, made).map_err(|error| match item.2 {
                Step::CreateLink(link) => not_created(link, error),
                _ => error,
            });
            outputs.push(output.map_err(Failed::of(item))?);
        }
        Ok(outputs)
    }

    /// Determines the parent or bridge of a link, and claims its addresses.
    fn ready(&mut self, (at, attachment, step): &Item<'a>) -> Result<Ready<'a>, StepError> {
        let (at, attachment) = (*at, *attachment);
        match step {
            Step::CreateLink(spec::Link::Veth(veth)) => {
                let bridge = match &veth.port {
                    Some(_) => Some(self.bridge_index(at)?),
                    None => None,
                };
                if let Some(mac) = veth.mac {
                    if let Some(bridge) = bridge {
                        self.node.occupied.claim(bridge, Address::Mac(mac), self.sandbox, attachment)?;
                    }
                    check_mac_is_free(&mut self.host, mac, bridge, Some(&veth.host_name))?;
                }
                Ok(Ready::Veth { veth, bridge })
            }
            Step::CreateLink(link @ spec::Link::Macvlan(macvlan)) => {
                self.share_parent(attachment, link)?;
                let parent = self.parent(macvlan.parent.as_deref())?;
                check_mtu(macvlan.mtu, &parent)?;
                if let Some(mac) = macvlan.mac.filter(|_| has_own_mac(macvlan)) {
                    self.node.occupied.claim(parent.index, Address::Mac(mac), self.sandbox, attachment)?;
                    check_mac_is_free(&mut self.host, mac, None, None)?;
                    if let Some(link) = host_access::taken_beside(&parent, mac) {
                        let (address, holder) = (Address::Mac(mac), Holder::Node(link));
                        return Err(AddressError::Taken { address, holder }.into());
                    }
                }
                Ok(Ready::Macvlan { macvlan, parent })
            }
            _ => Err(StepError::Missing("a link that is created with others")),
        }
    }

    fn created(
        &mut self,
        (_, attachment, _): &Item<'a>,
        ready: &Ready<'a>,
        made: Result<Ends, netlink::Error>,
    ) -> Result<Output, StepError> {
        match ready {
            Ready::Veth { veth, bridge } => {
                let (host, pod) = match made {
                    Err(error) if error.already_exists() => {
                        // The name is derived from the container and the interface, so an existing link is a leftover
                        // of netattach.
                        self.host.ensure_link_absent(&veth.host_name)?;
                        self.host.create_veth(veth, *bridge, self.netns.as_fd(), &mut self.pod)?
                    }
                    made => {
                        let (host, pod) = made?;
                        (host.ok_or(StepError::Missing("an end on the node"))?, pod)
                    }
                };
                if veth.port.is_none() {
                    // A bridge port has no network layer of its own. The node's end of a routed link has one, and the
                    // pod could send router advertisements to it. There is no carrier yet, so no advertisement was
                    // received before this.
                    ensure_if_present(&format!("ipv6/conf/{}/accept_ra", veth.host_name), "0")?;
                }
                if let (Some(bridge), Some(mac)) = (bridge, pod.mac) {
                    self.node.occupied.claim(*bridge, Address::Mac(mac), self.sandbox, attachment)?;
                }
                Ok(Output::Link { host: Some(interface(&host)), pod: interface(&pod), parent: None })
            }
            Ready::Macvlan { macvlan, parent } => {
                let (_, pod) = made?;
                if let Some(mac) = pod.mac.filter(|_| has_own_mac(macvlan)) {
                    self.node.occupied.claim(parent.index, Address::Mac(mac), self.sandbox, attachment)?;
                }
                let parent = self.shared(parent, None)?;
                Ok(Output::Link { host: None, pod: interface(&pod), parent: Some(parent) })
            }
        }
    }

    /// Attaches the programs to the attachments of a group.
    pub(super) fn protect(&mut self, group: &[Item<'a>]) -> Result<Vec<Output>, Failed<'a>> {
        let mut guarded = Vec::with_capacity(group.len());
        for item in group {
            let protect = item.1.protect().ok_or(StepError::Missing("a record in the dataplane"));
            let protect = protect.and_then(|protect| self.guarded(item, protect));
            guarded.push(protect.map_err(Failed::of(item))?);
        }
        if let Some(enforcer) = &self.node.enforcer {
            let attached = enforcer.attach(&guarded, &mut self.host, &mut self.pod);
            if let Err(failed) = attached
                && let Some(item) = group.get(failed.at).or(group.first())
            {
                return Err(Failed::of(item)(*failed.source));
            }
        }
        Ok(group.iter().map(|_| Output::Nothing).collect())
    }

    fn guarded(
        &self,
        (at, attachment, _): &Item<'a>,
        protect: &Protect,
    ) -> Result<EnforcedAttachment, StepError> {
        let leased = result::own(&self.sandbox.netns, attachment, self.progress.outputs().of(at.0))
            .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
        self.enforced(*at, attachment, protect, &leased)
    }

    /// Returns an attachment with these addresses in the dataplane's form.
    pub(super) fn enforced(
        &self,
        at: StepRef,
        attachment: &AttachmentPlan,
        protect: &Protect,
        leased: &Leased,
    ) -> Result<EnforcedAttachment, StepError> {
        let enforcer = self.node.enforcer.as_ref().ok_or(StepError::Missing("a dataplane"))?;
        let outputs = self.progress.outputs();
        let ends = result::ends(outputs.of(at.0));
        let vantage = hook_kind::of(attachment, outputs.of(at.0));
        if attachment.vantage().is_none() {
            enforcer.permit(self.sandbox.pod.as_ref(), attachment, Some(&vantage))?;
        }
        if let HookKind::Nowhere(unseen) = &vantage {
            let (ifname, why) = (attachment.ifname.clone(), unseen.clone());
            if protect.needed {
                return Err(DataplaneError::NoDataplane { ifname, why }.into());
            }
            if protect.bandwidth.is_some() {
                return Err(DataplaneError::Unlimited { ifname, why }.into());
            }
        }
        let of = (self.sandbox, self.progress.netns_cookie());
        let enforced = EnforcedAttachment::new(protect, of, attachment, leased, vantage, ends.as_ref())?;
        enforcer.permit_on_device(self.sandbox.pod.as_ref(), attachment, &enforced)?;
        // The parent was looked up when the link was created there.
        let parent = self.parents.iter().find(|(_, parent)| parent.index == enforced.host_index());
        Ok(enforced.on_card(parent.map(|(_, parent)| parent.is_card())))
    }

    /// Adds addresses and routes to the interfaces of a group, and brings them up.
    pub(super) fn configure(&mut self, group: &[Item<'a>]) -> Result<Vec<Output>, Failed<'a>> {
        let mut wanted = Vec::with_capacity(group.len());
        for item in group {
            self.raise_representor(item.0).map_err(Failed::of(item))?;
            match item.2 {
                Step::Configure(configure) if !configure.down => {
                    wanted.push(self.wanted(item, configure).map_err(Failed::of(item))?);
                }
                _ => {}
            }
        }
        if let Some(first) = wanted.first() {
            let links: Vec<_> = wanted.iter().map(|it| (it.pod.index, &it.addressing)).collect();
            let outcomes = self.pod.configure_all(&links).map_err(Failed::of(&first.item))?;
            for (it, outcome) in wanted.iter().zip(outcomes) {
                self.configured(it, outcome).map_err(Failed::of(&it.item))?;
            }
            self.await_carriers(&wanted)?;
            for it in &wanted {
                self.announce(it).map_err(Failed::of(&it.item))?;
            }
        }
        Ok(group.iter().map(|_| Output::Nothing).collect())
    }

    fn wanted(&self, item: &Item<'a>, configure: &'a Configure) -> Result<Wanted<'a>, StepError> {
        let (at, attachment, _) = *item;
        let leased = self.leased(at, attachment)?;
        let mut addressing = addressing::pod_side(configure, &leased.addresses, &leased.routes);
        let late = self.node.announces_late;
        let announcement = addressing::announcement(attachment.made_by(), &addressing, late);
        addressing.announce_v4 = announcement == Announcement::AtOnce;
        let (host, pod) = self.link(at)?;
        let outputs = self.progress.outputs().of(at.0);
        let awaits_carrier = addressing::awaits_carrier(&attachment.steps, outputs, &addressing);
        let wanted = Wanted { item: *item, configure, host, pod, addressing, awaits_carrier };
        check_has_v6(wanted.pod.mtu, &wanted.addressing.addresses)?;
        Ok(wanted)
    }

    fn configured(&mut self, it: &Wanted<'a>, outcome: Result<(), netlink::Error>) -> Result<(), StepError> {
        match outcome {
            // A runtime may have disabled IPv6 for new interfaces of the pod.
            Err(error) if error.errno() == Some(rustix::io::Errno::ACCESS) => {
                within(self.netns, || {
                    sysctl::ensure("ipv6/conf/lo/disable_ipv6", "0")?;
                    sysctl::ensure(&format!("ipv6/conf/{}/disable_ipv6", it.pod.name), "0")
                })??;
                Ok(self.pod.configure(it.pod.index, &it.addressing)?)
            }
            other => Ok(other?),
        }
    }

    /// Waits until the pod's ends have a carrier; from then on packets sent to them arrive.
    fn await_carriers(&mut self, wanted: &[Wanted<'a>]) -> Result<(), Failed<'a>> {
        let ends = wanted.iter().filter_map(|it| Some((&it.item, it.host.as_ref()?)));
        let ends: Vec<(&Item<'a>, &Interface)> = ends.collect();
        if let Some((first, _)) = ends.first() {
            let indices: Vec<u32> = ends.iter().map(|(_, host)| host.index).collect();
            let carriers = self.host.await_carriers(&indices).map_err(Failed::of(first))?;
            for ((item, host), has_carrier) in ends.into_iter().zip(carriers) {
                if !has_carrier.map_err(Failed::of(item))? {
                    tracing::warn!(
                        device = host.name,
                        "no carrier yet, though both ends are up; the first packets may be lost"
                    );
                }
            }
        }
        for it in wanted.iter().filter(|it| it.awaits_carrier) {
            if !self.pod.await_carrier(it.pod.index).map_err(Failed::of(&it.item))? {
                tracing::warn!(device = it.pod.name, "no carrier; neighbours may not hear of its addresses");
            }
        }
        Ok(())
    }

    /// Announces addresses of the selected families, now and whenever the link comes up again: IPv4 by
    /// `Addressing::announce_v4`, IPv6 by a setting that route netlink cannot change. The kernel's announcement when
    /// the link comes up is lost on a bridge, whose port does not forward yet, and on a card, which has no carrier
    /// yet. All addresses of an ipvlan are advertised ([`Sender`]), unless that is done after the answer. Waits for
    /// duplicate address detection, if requested.
    ///
    /// Also makes IPv6 addresses survive when the pod sets the link down and up again, like IPv4 addresses and as
    /// with the reference plugins.
    fn announce(&mut self, it: &Wanted<'a>) -> Result<(), StepError> {
        let pod = &it.pod;
        let (v4, v6) = (it.addressing.announce_v4, it.has_v6() && it.configure.style != Style::Routed);
        if it.has_v6() {
            let key = |setting| format!("ipv6/conf/{}/{setting}", pod.name);
            within(self.netns, || {
                ensure_if_present(&key("keep_addr_on_down"), "1")?;
                if v6 { ensure_if_present(&key("ndisc_notify"), "1") } else { Ok(()) }
            })??;
        }
        // Neighbours that have another Ethernet address for an address learn this one.
        if let Err(error) = self.tell_neighbours(it, (v4, v6)) {
            tracing::warn!(device = pod.name, error = %Chain(&error), "addresses not announced to neighbours");
        }
        if it.configure.detect_duplicates {
            let detection = waits::detection(it.item.1);
            let found = waits::at(&detection, || self.pod.await_unique(pod.index, DETECTION))?;
            if let Some(taken) = found {
                return Err(AddressError::Duplicate(taken).into());
            }
        }
        Ok(())
    }

    /// Announces the addresses of these families, see [`Self::announce`].
    fn tell_neighbours(&mut self, it: &Wanted<'a>, (v4, v6): (bool, bool)) -> Result<(), StepError> {
        let (made_by, pod) = (it.item.1.made_by(), &it.pod);
        if addressing::advertised(made_by) {
            if self.node.announces_late {
                return Ok(());
            }
            let told = Told { by_kernel: if v4 { it.v4() } else { Vec::new() }, by_frames: it.all() };
            let (index, mac) = (pod.index, pod.mac);
            return Sender { netns: self.netns, pod: &mut self.pod, index, mac }.announce(&told);
        }
        match (addressing::announced_by_requests(made_by, &it.addressing), pod.mac) {
            (true, _) if v4 => Ok(self.pod.announce(pod.index, &it.v4())?),
            (false, Some(mac)) if v4 || v6 => Ok(self.pod.announce_all(pod.index, mac)?),
            _ => Ok(()),
        }
    }
}

/// A macvlan in mode passthru has its parent's address, regardless of the request.
fn has_own_mac(macvlan: &spec::Macvlan) -> bool {
    macvlan.mode != spec::MacvlanMode::Passthru
}

/// Why a rate limit or the dataplane cannot be provided for an interface.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// A chained plugin asks for a rate limit, but no program sees the traffic of the interface.
    #[error("bandwidth of {ifname} cannot be limited: {why}")]
    Unlimited {
        /// Name of the interface in the pod.
        ifname: String,
        /// The reason.
        why: NotObservable,
    },
    /// The network's list enables netattach's dataplane for the interface, but no program sees its traffic.
    #[error("netattach behind another plugin: {ifname} cannot have its dataplane: {why}")]
    NoDataplane {
        /// Name of the interface in the pod.
        ifname: String,
        /// The reason.
        why: NotObservable,
    },
}

impl DataplaneError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::Unlimited { .. } | Self::NoDataplane { .. } => code::INVALID_CONFIG,
        }
    }
}
