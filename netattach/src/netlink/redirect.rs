//! Intermediate devices (`ifb`): packets that a device receives are redirected through such a device, so that
//! they can wait in its queue.

use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::InfoKind;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};
use rustix::io::Errno;

use super::nft::{NESTED, attribute, attribute_in};
use super::socket::{CREATE, EXCL, NetlinkRequest};
use super::tc::{absent_is_fine, clsact, index_of};
use super::{Error, Handle, LinkState, text};
use crate::spec::TcHook;

/// Priority of the filter: after the filters with BPF programs, which have priority 1.
const PRIORITY: u32 = 100;
const ETH_P_ALL: u16 = 0x0003;
/// Priority and protocol of the filter (`tcm_info`).
const INFO: u32 = (PRIORITY << 16) | ETH_P_ALL.to_be() as u32;
const KIND: &str = "u32";
/// `linux/pkt_cls.h`: selector and action of the filter.
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TERMINAL: u8 = 1;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const FIRST_ACTION: u16 = 1;
/// `linux/tc_act/tc_mirred.h`.
const TCA_MIRRED_PARMS: u16 = 2;
const EGRESS_REDIRECT: u32 = 1;
const STOLEN: u32 = 4;
/// Offset of the device in `struct tc_mirred`.
const DEVICE_AT: usize = 24;

impl Handle {
    /// Creates an intermediate device and sets it up. `alias` is a text for administrators, by which the device is
    /// found again: it never exists without it. The name must be one that no other program uses, as a device that has
    /// it already gets the alias.
    ///
    /// # Errors
    /// The kernel refuses: the name is taken, or it does not support `ifb`.
    pub fn create_ifb(&mut self, name: &str, mtu: u32, alias: &str) -> Result<LinkState, Error> {
        let link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Ifb).name(name.to_owned());
        let create = RouteNetlinkMessage::NewLink(link.mtu(mtu).build());
        // The kernel ignores an alias in the request that creates a link (`rtnl_create_link`).
        let alias = text::attribute(text::ALIAS, alias);
        let named = LinkUnspec::new_with_name(name).append_extra_attribute(alias).build();
        let created = self.create_change_and_show(create, Some(RouteNetlinkMessage::SetLink(named)), name)?;
        self.ensure_up(created.index)?;
        Ok(created)
    }

    /// Redirects everything that a device receives to another device. Replaces an earlier redirection.
    ///
    /// # Errors
    /// The kernel refuses: it may lack `cls_u32` or `act_mirred`.
    pub fn ensure_redirected(&mut self, index: u32, to: u32) -> Result<(), Error> {
        let hook = NetlinkRequest::new(clsact(index), CREATE | EXCL);
        match self.socket.batch(vec![hook])?.into_iter().next() {
            // Other programs have filters on the device, or an ingress discipline, which accepts this filter
            // too.
            Some(Err(refused)) if refused.errno != Errno::EXIST.raw_os_error() => return Err(refused.into()),
            _ => {}
        }
        self.ensure_not_redirected(index)?;
        let mut message = filter(index);
        message.attributes.push(TcAttribute::Options(options(to)));
        self.socket.request(RouteNetlinkMessage::NewTrafficFilter(message), CREATE | EXCL).map(drop)
    }

    /// Returns the priority of a filter that packets from a device meet before the redirecting filter, other
    /// than the filters with the names `ours`.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn filter_before_redirection(&mut self, index: u32, ours: &[&str]) -> Result<Option<u32>, Error> {
        let others = self.other_filters(index, TcHook::Ingress, ours)?;
        Ok(others.into_iter().filter(|priority| *priority < PRIORITY).min())
    }

    /// Removes the redirecting filter. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ensure_not_redirected(&mut self, index: u32) -> Result<(), Error> {
        let removed = self.socket.request(RouteNetlinkMessage::DelTrafficFilter(filter(index)), 0);
        absent_is_fine(removed.map(drop))
    }

    /// Index of the device to which the filter redirects.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn redirected_to(&mut self, index: u32) -> Result<Option<u32>, Error> {
        let mut request = TcMessage::with_index(index_of(index));
        request.header.parent = ingress();
        let found = match self.socket.dump(RouteNetlinkMessage::GetTrafficFilter(request)) {
            Err(error) if error.not_found() || error.errno() == Some(Errno::INVAL) => return Ok(None),
            other => other?,
        };
        Ok(found.into_iter().find_map(observed))
    }
}

fn ingress() -> TcHandle {
    TcHandle { major: 0xffff, minor: TcHandle::MIN_INGRESS }
}

/// The filter without its options.
fn filter(index: u32) -> TcMessage {
    let mut message = TcMessage::with_index(index_of(index));
    message.header.parent = ingress();
    message.header.info = INFO;
    message.attributes.push(TcAttribute::Kind(KIND.into()));
    message
}

/// Options of the filter: match every packet, redirect to that device.
fn options(to: u32) -> Vec<TcOption> {
    // `struct tc_u32_sel` with one key, whose mask is zero.
    let mut selection = [0; 32];
    selection[0] = TERMINAL;
    selection[2] = 1;
    // `struct tc_mirred` in the byte order of the machine; the third and the last two words matter.
    let words = [0, 0, STOLEN, 0, 0, EGRESS_REDIRECT, to];
    let parms: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_ne_bytes()).collect();
    let action = [
        attribute(TCA_ACT_KIND, b"mirred\0"),
        attribute(TCA_ACT_OPTIONS | NESTED, &attribute(TCA_MIRRED_PARMS, &parms)),
    ]
    .concat();
    let actions = attribute(FIRST_ACTION | NESTED, &action);
    vec![
        TcOption::Other(DefaultNla::new(TCA_U32_SEL, selection.to_vec())),
        TcOption::Other(DefaultNla::new(TCA_U32_ACT | NESTED, actions)),
    ]
}

fn observed(message: RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::NewTrafficFilter(filter) = message else { return None };
    if filter.header.info >> 16 != PRIORITY {
        return None;
    }
    let options = filter.attributes.into_iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    // `lean` leaves the options of a filter that is not a BPF program as one attribute.
    options.iter().find_map(|options| {
        let mut bytes = vec![0; netlink_packet_core::Nla::value_len(options)];
        netlink_packet_core::Nla::emit_value(options, &mut bytes);
        device_in(attribute_in(&bytes, TCA_U32_ACT)?)
    })
}

/// The target device of the first action.
fn device_in(actions: &[u8]) -> Option<u32> {
    let action = attribute_in(actions, FIRST_ACTION)?;
    let parms = attribute_in(attribute_in(action, TCA_ACT_OPTIONS)?, TCA_MIRRED_PARMS)?;
    let bytes = parms.get(DEVICE_AT..DEVICE_AT + 4)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Netns;

    #[test]
    fn a_device_is_made_with_its_alias_and_one_that_is_there_is_refused() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let Ok(made) = handle.create_ifb("ifb-a", 1400, "of a pod") else {
            // The kernel has no driver.
            assert!(handle.find_link("ifb-a").unwrap().is_none());
            return;
        };
        let found = handle.device_named("ifb-a").unwrap().unwrap();
        assert_eq!((found.link.index, found.link.mtu, found.link.up), (made.index, 1400, true));
        assert_eq!(found.alias.as_deref(), Some("of a pod"));
        assert!(handle.create_ifb("ifb-a", 1400, "of a pod").unwrap_err().already_exists());
    }

    #[test]
    fn the_device_is_read_as_it_is_written() {
        let mut written = options(77);
        let TcOption::Other(actions) = written.remove(1) else { panic!("{written:?}") };
        let mut bytes = vec![0; netlink_packet_core::Nla::value_len(&actions)];
        netlink_packet_core::Nla::emit_value(&actions, &mut bytes);
        assert_eq!(device_in(&bytes), Some(77));
        assert_eq!(device_in(&bytes[..20]), None);
    }
}
