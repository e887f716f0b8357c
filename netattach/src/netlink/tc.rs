//! Traffic control: BPF programs on the `clsact` hooks of a device.
//!
//! `clsact` costs 70 us; a tcx link costs an RCU grace period under the route-netlink lock. In a pod's namespace a
//! process of the pod can remove `clsact`, but not a tcx link; `hooks` chooses between the two.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcMessage, TcOption};

use super::socket::{CREATE, ECHO, EXCL, NetlinkRequest, Reply};
use super::{DeviceState, Error, Handle, LinkState};
use crate::spec::TcHook;

/// Priority of netattach's filters: the first, so that no other filter passes a packet on before it is
/// judged.
const PRIORITY: u32 = 1;
const ETH_P_ALL: u16 = 0x0003;
/// Priority and protocol of our filters (`tcm_info`).
const OUR_INFO: u32 = (PRIORITY << 16) | ETH_P_ALL.to_be() as u32;
/// Kind of the queueing discipline that has ingress and egress hooks.
const CLSACT: &str = "clsact";
/// Index of the loopback device in every namespace.
pub const LOOPBACK: u32 = 1;
/// `linux/pkt_cls.h`.
const TCA_BPF_CLASSID: u16 = 3;
/// `linux/rtnetlink.h`.
const TCA_INGRESS_BLOCK: u16 = 13;

/// A filter to be attached.
#[derive(Debug, Clone, Copy)]
pub struct Filter<'a> {
    /// The hook.
    pub hook: TcHook,
    /// Number among the filters of netattach's priority.
    pub handle: u32,
    /// The number that the program reads in `tc_classid`.
    pub class: u16,
    /// The program's name.
    pub name: &'a str,
    /// The program.
    pub program: BorrowedFd<'a>,
}

/// Maximum number of devices queried at once: the answers have to fit into a socket's buffer.
const DEVICES_AT_ONCE: usize = 32;

/// The names of the programs that the filters with one number run on a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DevicePrograms {
    /// On [`TcHook::Ingress`].
    pub ingress: Option<String>,
    /// On [`TcHook::Egress`].
    pub egress: Option<String>,
}

/// A filter of netattach's priority as the kernel describes it. A filter without a program is classic BPF or
/// of another kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterState {
    /// Name, given when the filter was attached.
    pub name: Option<String>,
    /// Kernel's id of the program.
    pub program_id: Option<u32>,
    /// Number among the filters of netattach's priority.
    pub handle: u32,
}

/// A device with filters of netattach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilteredDevice {
    /// Its name.
    pub name: String,
    index: u32,
    filters: Vec<(TcHook, u32)>,
}

impl Handle {
    /// Attaches the filters to the device; packets meet new ones in this order. An existing filter is replaced
    /// atomically: no packet passes without one. Returns whether the device had no `clsact` before.
    /// Changes nothing on a device that has another discipline in the place of `clsact`.
    pub fn ensure_filters(&mut self, index: u32, filters: &[Filter<'_>]) -> Result<bool, Error> {
        self.expect_clsact(index)?;
        let outcome = self.ensure_filters_on(&[(index, filters)])?.into_iter().next();
        Ok(outcome.transpose()?.unwrap_or_default())
    }

    /// As [`Handle::ensure_filters`], for several devices in one datagram. Returns the outcome for each; a
    /// refusal for one device does not prevent the others. A device with the discipline `ingress` fails: that
    /// discipline has the handle of `clsact`, and the kernel would run an egress filter on ingress.
    ///
    /// # Errors
    /// The socket failed: some filters may be attached.
    pub fn ensure_filters_on(
        &mut self,
        devices: &[(u32, &[Filter<'_>])],
    ) -> Result<Vec<Result<bool, Error>>, Error> {
        let mut requests = Vec::new();
        for (index, filters) in devices {
            requests.push(NetlinkRequest::new(clsact(*index), CREATE | EXCL));
            // The kernel inserts a new filter before the others of its priority (`cls_bpf_change`).
            for wanted in filters.iter().rev() {
                let message = RouteNetlinkMessage::NewTrafficFilter(filter(*index, wanted));
                requests.push(NetlinkRequest::new(message, CREATE));
            }
        }
        let mut replies = self.socket.batch(requests)?.into_iter();
        let outcome = |(_, filters): &(u32, &[Filter<'_>])| {
            let clsact = replies.next();
            // All replies of a device are consumed, so that the next reply belongs to the next device.
            let filters: Vec<_> = replies.by_ref().take(filters.len()).collect();
            let is_new = match clsact {
                Some(Err(refused)) if refused.errno != rustix::io::Errno::EXIST.raw_os_error() => {
                    return Err(refused.into());
                }
                first => matches!(first, Some(Ok(_))),
            };
            filters.into_iter().try_for_each(|reply| reply.map(drop))?;
            Ok(is_new)
        };
        let mut outcomes: Vec<_> = devices.iter().map(outcome).collect();
        for ((index, _), outcome) in devices.iter().zip(&mut outcomes) {
            if matches!(outcome, Ok(false)) {
                *outcome = match self.expect_clsact(*index) {
                    Ok(true) => Ok(false),
                    Ok(false) => Err(Error::Malformed { request: "RTM_GETQDISC", what: "no discipline" }),
                    Err(error) => Err(error),
                };
            }
        }
        Ok(outcomes)
    }

    /// Fails if a discipline other than `clsact` has its handle. Returns whether `clsact` exists.
    ///
    /// # Errors
    /// [`Error::WrongDiscipline`], or the kernel does not answer.
    pub fn expect_clsact(&mut self, index: u32) -> Result<bool, Error> {
        use rustix::io::Errno;
        let mut request = TcMessage::with_index(index_of(index));
        request.header.parent = TcHandle::CLSACT;
        // The kernel shows a single discipline only if the request asks for an echo.
        let answers = match self.socket.request(RouteNetlinkMessage::GetQueueDiscipline(request), ECHO) {
            // No discipline has been created, or it was deleted.
            Err(error) if matches!(error.errno(), Some(Errno::NOENT | Errno::INVAL)) => return Ok(false),
            answers => answers?,
        };
        match answers.into_iter().find_map(kind_of_discipline) {
            Some(kind) if kind != CLSACT => {
                let device = self.link_by_index(index)?.name;
                Err(Error::WrongDiscipline { device, kind })
            }
            found => Ok(found.is_some()),
        }
    }

    /// Removes netattach's filters with these numbers, and `clsact` too unless other programs have filters
    /// there. A device that is gone counts as done.
    pub fn ensure_filters_absent(
        &mut self,
        index: u32,
        filters: &[(TcHook, u32)],
        clsact_too: bool,
    ) -> Result<(), Error> {
        let requests = filters.iter().map(|(hook, handle)| {
            let message = RouteNetlinkMessage::DelTrafficFilter(address(index, *hook, *handle));
            NetlinkRequest::new(message, 0)
        });
        for reply in self.socket.batch(requests.collect())? {
            absent_is_fine(reply.map(drop).map_err(Error::from))?;
        }
        if !clsact_too {
            return Ok(());
        }
        for hook in [TcHook::Ingress, TcHook::Egress] {
            let has_others = match self.dump_filters(index, hook) {
                Err(error) if error.is_too_many() => true,
                found => !found?.is_empty(),
            };
            if has_others {
                return Ok(());
            }
        }
        let RouteNetlinkMessage::NewQueueDiscipline(message) = clsact(index) else { return Ok(()) };
        absent_is_fine(self.socket.request(RouteNetlinkMessage::DelQueueDiscipline(message), 0).map(drop))
    }

    /// Returns the devices of the namespace, among those for which `counts` holds, that have filters of
    /// netattach with one of these names.
    pub fn devices_with_filters(
        &mut self,
        names: &[&str],
        counts: impl Fn(&DeviceState) -> bool,
    ) -> Result<Vec<FilteredDevice>, Error> {
        let mut found = Vec::new();
        let devices = self.devices()?;
        for device in devices.iter().filter(|device| counts(device)) {
            found.extend(self.filtered(&device.link, names)?);
        }
        Ok(found)
    }

    /// Returns a device with its filters of netattach that have one of these names, whatever their numbers;
    /// `None`: it has none.
    pub fn filtered(&mut self, link: &LinkState, names: &[&str]) -> Result<Option<FilteredDevice>, Error> {
        let LinkState { index, name, .. } = link;
        let mut filters = Vec::new();
        for hook in [TcHook::Ingress, TcHook::Egress] {
            let ours = self.find_filters(*index, hook)?.into_iter();
            let named = ours.filter(|it| it.name.as_deref().is_some_and(|name| names.contains(&name)));
            filters.extend(named.map(|it| (hook, it.handle)));
        }
        let is_filtered = !filters.is_empty();
        Ok(is_filtered.then(|| FilteredDevice { name: name.clone(), index: *index, filters }))
    }

    /// Removes these filters, and with `clsact_too` also `clsact` unless other programs have filters there.
    pub fn ensure_unfiltered(&mut self, device: &FilteredDevice, clsact_too: bool) -> Result<(), Error> {
        self.ensure_filters_absent(device.index, &device.filters, clsact_too)
    }

    /// Returns the programs that netattach's filters with that number run on each of these devices, in the
    /// order of the devices; `None` for a device that is gone. Does not detect other programs' filters that
    /// come first.
    pub fn attached_programs(
        &mut self,
        devices: &[u32],
        number: u32,
    ) -> Result<Vec<Result<Option<DevicePrograms>, Error>>, Error> {
        let mut attached = Vec::with_capacity(devices.len());
        for some in devices.chunks(DEVICES_AT_ONCE) {
            let wanted = some.iter().flat_map(|index| {
                [TcHook::Ingress, TcHook::Egress].map(|hook| {
                    let filter = address(*index, hook, number);
                    NetlinkRequest::new(RouteNetlinkMessage::GetTrafficFilter(filter), 0)
                })
            });
            let mut replies = self.socket.batch(wanted.collect())?.into_iter();
            while let (Some(ingress), Some(egress)) = (replies.next(), replies.next()) {
                attached.push(both(ingress, egress));
            }
        }
        Ok(attached)
    }

    /// Whether the kernel has the `clsact` queueing discipline. Requests one that must fail, with filter block number
    /// 0 on the loopback device: a kernel without clsact reports the unknown kind first.
    pub fn has_clsact(&mut self) -> Result<bool, Error> {
        let RouteNetlinkMessage::NewQueueDiscipline(mut message) = clsact(LOOPBACK) else { return Ok(false) };
        message.attributes.push(TcAttribute::Other(DefaultNla::new(TCA_INGRESS_BLOCK, vec![0; 4])));
        let request = NetlinkRequest::new(RouteNetlinkMessage::NewQueueDiscipline(message), CREATE | EXCL);
        match self.socket.batch(vec![request])?.into_iter().next() {
            Some(Err(refused)) if refused.errno == rustix::io::Errno::NOENT.raw_os_error() => Ok(false),
            _ => Ok(true),
        }
    }

    /// Returns the filters of netattach's priority on that hook of the device, in the order in which packets
    /// meet them.
    pub fn find_filters(&mut self, index: u32, hook: TcHook) -> Result<Vec<FilterState>, Error> {
        Ok(self.dump_filters(index, hook)?.into_iter().filter_map(observed).collect())
    }

    /// Whether that hook of the device has a filter other than netattach's, which have the names `ours`.
    pub fn has_other_filters(&mut self, index: u32, hook: TcHook, ours: &[&str]) -> Result<bool, Error> {
        Ok(!self.other_filters(index, hook, ours)?.is_empty())
    }

    /// The priorities of the filters on that hook of the device other than netattach's, which have the names
    /// `ours`.
    pub(super) fn other_filters(
        &mut self,
        index: u32,
        hook: TcHook,
        ours: &[&str],
    ) -> Result<Vec<u32>, Error> {
        let is_others = |filter: TcMessage| {
            if filter.header.info != OUR_INFO {
                return true;
            }
            // A list of filters contains one more message without a filter.
            let shows_filter = |attribute: &TcAttribute| matches!(attribute, TcAttribute::Options(_));
            let is_filter =
                filter.header.handle != TcHandle::default() && filter.attributes.iter().any(shows_filter);
            let name = observed(RouteNetlinkMessage::NewTrafficFilter(filter)).and_then(|filter| filter.name);
            is_filter && !name.is_some_and(|name| ours.contains(&name.as_str()))
        };
        let of_others = |message| {
            let RouteNetlinkMessage::NewTrafficFilter(filter) = message else { return None };
            let priority = filter.header.info >> 16;
            is_others(filter).then_some(priority)
        };
        Ok(self.dump_filters(index, hook)?.into_iter().filter_map(of_others).collect())
    }

    fn dump_filters(&mut self, index: u32, hook: TcHook) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut request = TcMessage::with_index(index_of(index));
        request.header.parent = parent(hook);
        match self.socket.dump(RouteNetlinkMessage::GetTrafficFilter(request)) {
            Err(error) if error.not_found() || error.errno() == Some(rustix::io::Errno::INVAL) => {
                Ok(Vec::new())
            }
            other => other,
        }
    }
}

pub(super) fn clsact(index: u32) -> RouteNetlinkMessage {
    let mut message = TcMessage::with_index(index_of(index));
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.header.parent = TcHandle::CLSACT;
    message.attributes.push(TcAttribute::Kind(CLSACT.into()));
    RouteNetlinkMessage::NewQueueDiscipline(message)
}

fn kind_of_discipline(shown: RouteNetlinkMessage) -> Option<String> {
    let RouteNetlinkMessage::NewQueueDiscipline(message) = shown else { return None };
    message.attributes.into_iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind),
        _ => None,
    })
}

fn filter(index: u32, filter: &Filter<'_>) -> TcMessage {
    let mut message = address(index, filter.hook, filter.handle);
    let mut options = vec![
        // A file descriptor is never negative.
        TcOption::Bpf(TcFilterBpfOption::ProgFd(filter.program.as_raw_fd().cast_unsigned())),
        TcOption::Bpf(TcFilterBpfOption::ProgName(filter.name.to_owned())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ];
    if filter.class != 0 {
        let class = u32::from(filter.class).to_ne_bytes().to_vec();
        options.push(TcOption::Other(DefaultNla::new(TCA_BPF_CLASSID, class)));
    }
    message.attributes.push(TcAttribute::Options(options));
    message
}

fn address(index: u32, hook: TcHook, handle: u32) -> TcMessage {
    let mut message = TcMessage::with_index(index_of(index));
    message.header.handle = TcHandle::from(handle);
    message.header.parent = parent(hook);
    message.header.info = OUR_INFO;
    message.attributes.push(TcAttribute::Kind("bpf".into()));
    message
}

/// The filters of a device, from the answers for its hooks.
fn both(ingress: Reply, egress: Reply) -> Result<Option<DevicePrograms>, Error> {
    use rustix::io::Errno;
    // The outer `None`: the device is gone; the inner one: it has no such filter.
    let name = |reply: Reply| match reply.map_err(Error::from) {
        Ok(messages) => Ok(Some(messages.into_iter().find_map(observed).and_then(|filter| filter.name))),
        Err(error) if error.errno() == Some(Errno::NODEV) => Ok(None),
        Err(error) if matches!(error.errno(), Some(Errno::NOENT | Errno::INVAL)) => Ok(Some(None)),
        Err(error) => Err(error),
    };
    let names = name(ingress)?.zip(name(egress)?);
    Ok(names.map(|(ingress, egress)| DevicePrograms { ingress, egress }))
}

/// Treats a filter that does not exist, or whose device is gone, as removed.
pub(super) fn absent_is_fine(result: Result<(), Error>) -> Result<(), Error> {
    use rustix::io::Errno;
    match result {
        Err(error) if error.not_found() || matches!(error.errno(), Some(Errno::INVAL | Errno::NOENT)) => {
            Ok(())
        }
        other => other,
    }
}

fn parent(hook: TcHook) -> TcHandle {
    let minor = match hook {
        TcHook::Ingress => TcHandle::MIN_INGRESS,
        TcHook::Egress => TcHandle::MIN_EGRESS,
    };
    TcHandle { major: 0xffff, minor }
}

fn observed(message: RouteNetlinkMessage) -> Option<FilterState> {
    let RouteNetlinkMessage::NewTrafficFilter(filter) = message else { return None };
    // Packets reach other chains only if a filter of the first chain sends them there.
    let is_elsewhere =
        |attribute: &TcAttribute| matches!(attribute, TcAttribute::Chain(chain) if *chain != 0);
    if filter.header.info >> 16 != PRIORITY || filter.attributes.iter().any(is_elsewhere) {
        return None;
    }
    let shows_filter = |attribute: &TcAttribute| matches!(attribute, TcAttribute::Options(_));
    let is_filter = filter.header.handle != TcHandle::default() && filter.attributes.iter().any(shows_filter);
    let handle = filter.header.handle.into();
    let mut state = FilterState { name: None, program_id: None, handle };
    for attribute in filter.attributes {
        let TcAttribute::Options(options) = attribute else { continue };
        for option in options {
            match option {
                TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => state.name = Some(name),
                TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => state.program_id = Some(id),
                _ => {}
            }
        }
    }
    // A list of filters contains one more message without a filter.
    is_filter.then_some(state)
}

/// The wire type of an interface index in traffic control is signed; the kernel never assigns a larger one.
pub(super) fn index_of(index: u32) -> i32 {
    index.cast_signed()
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};

    use super::super::lean::tests::attribute;
    use super::super::lean::{RTM_NEWTFILTER, lean};
    use super::*;

    /// A filter of netattach's priority with number 7, as the kernel describes it.
    fn shown(kind: &[u8], options: &[Vec<u8>]) -> Option<FilterState> {
        // `struct tcmsg`, with the filter's number at 8 and its priority and protocol at 16.
        let mut payload = vec![0; 20];
        payload[8..12].copy_from_slice(&7_u32.to_ne_bytes());
        payload[16..].copy_from_slice(&OUR_INFO.to_ne_bytes());
        payload.extend([attribute(1, kind), attribute(2, &options.concat())].concat());
        let mut header = NetlinkHeader::default();
        header.message_type = RTM_NEWTFILTER;
        observed(RouteNetlinkMessage::deserialize(&header, &lean(RTM_NEWTFILTER, &payload)).unwrap())
    }

    #[test]
    fn a_filter_is_seen_whatever_its_name_and_options_are() {
        let [name, id] = [attribute(7, b"x\xff\0"), attribute(11, &9_u32.to_ne_bytes())];
        let program = FilterState { name: Some("x\u{f7ff}".to_owned()), program_id: Some(9), handle: 7 };
        assert_eq!(shown(b"bpf\0", &[name, id]), Some(program));
        // A class with a wrong length.
        let nobodys = FilterState { name: None, program_id: None, handle: 7 };
        assert_eq!(shown(b"flower\0", &[attribute(1, &[1])]), Some(nobodys));
    }
}
