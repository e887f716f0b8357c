//! Rate limiting: the kernel's token bucket (`tbf`) as the queueing discipline of a device.

use netlink_packet_core::{DefaultNla, Nla};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rustix::io::Errno;

use super::nft::attribute_in;
use super::socket::{CREATE, ECHO, EXCL, REPLACE};
use super::tc::{LOOPBACK, index_of};
use super::{Error, Handle};
use crate::spec::Pace;

const KIND: &str = "tbf";
/// Attributes of the discipline (`linux/pkt_sched.h`).
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: the kernel computes times itself and needs no table of them.
const ETHERNET: u8 = 1;
/// Length of `struct tc_tbf_qopt`: two of `struct tc_ratespec`, then limit, buffer and mtu.
const PARMS: usize = 36;
/// Offsets of the rate in `struct tc_ratespec` and of the limit in `struct tc_tbf_qopt`.
const RATE_AT: usize = 8;
const LIMIT_AT: usize = 24;

impl Handle {
    /// Limits the device's sending rate. Replaces another queueing discipline; changes an existing tbf
    /// without losing its queue.
    pub fn ensure_paced(&mut self, index: u32, pace: &Pace) -> Result<(), Error> {
        self.socket.request(discipline(index, options(pace)), CREATE | REPLACE).map(drop)
    }

    /// Replaces a tbf by the device's default discipline. Idempotent.
    pub fn ensure_not_paced(&mut self, index: u32) -> Result<(), Error> {
        if self.find_pace(index)?.is_none() {
            return Ok(());
        }
        let mut message = TcMessage::with_index(index_of(index));
        message.header.parent = TcHandle::ROOT;
        match self.socket.request(RouteNetlinkMessage::DelQueueDiscipline(message), 0) {
            Err(error) if matches!(error.errno(), Some(Errno::NOENT | Errno::NODEV)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Rate in bytes per second and queue in bytes, if the device has a tbf.
    pub fn find_pace(&mut self, index: u32) -> Result<Option<(u64, u32)>, Error> {
        let mut request = TcMessage::with_index(index_of(index));
        request.header.parent = TcHandle::ROOT;
        // The kernel shows a single discipline only if the request asks for an echo.
        match self.socket.request(RouteNetlinkMessage::GetQueueDiscipline(request), ECHO) {
            // The device has no discipline, or one that the kernel does not show (`noqueue`).
            Err(error) if matches!(error.errno(), Some(Errno::NOENT | Errno::INVAL)) => Ok(None),
            answers => Ok(answers?.into_iter().find_map(observed)),
        }
    }

    /// Whether the kernel has the token bucket. Requests one without parameters on the loopback device, which must
    /// fail: a kernel without tbf reports the unknown kind first.
    pub fn has_pacing(&mut self) -> Result<bool, Error> {
        match self.socket.request(discipline(LOOPBACK, Vec::new()), CREATE | REPLACE | EXCL) {
            Err(error) if error.errno() == Some(Errno::INVAL) => Ok(true),
            Err(error) if error.not_found() => Ok(false),
            other => other.map(|_| true),
        }
    }
}

fn discipline(index: u32, options: Vec<TcOption>) -> RouteNetlinkMessage {
    let mut message = TcMessage::with_index(index_of(index));
    message.header.parent = TcHandle::ROOT;
    message.attributes.push(TcAttribute::Kind(KIND.into()));
    message.attributes.push(TcAttribute::Options(options));
    RouteNetlinkMessage::NewQueueDiscipline(message)
}

fn options(pace: &Pace) -> Vec<TcOption> {
    let mut parms = [0; PARMS];
    parms[1] = ETHERNET;
    // A larger rate goes into the 64-bit attribute; the kernel takes the larger of the two.
    let rate = u32::try_from(pace.rate).unwrap_or(u32::MAX);
    parms[RATE_AT..][..4].copy_from_slice(&rate.to_ne_bytes());
    parms[LIMIT_AT..][..4].copy_from_slice(&pace.queue.to_ne_bytes());
    let attribute = |kind, value: &[u8]| TcOption::Other(DefaultNla::new(kind, value.to_vec()));
    vec![
        attribute(TCA_TBF_PARMS, &parms),
        attribute(TCA_TBF_RATE64, &pace.rate.to_ne_bytes()),
        attribute(TCA_TBF_BURST, &pace.burst.to_ne_bytes()),
    ]
}

fn observed(message: RouteNetlinkMessage) -> Option<(u64, u32)> {
    let RouteNetlinkMessage::NewQueueDiscipline(message) = message else { return None };
    let ours = |attribute: &TcAttribute| matches!(attribute, TcAttribute::Kind(kind) if kind == KIND);
    if !message.attributes.iter().any(ours) {
        return None;
    }
    let options = message.attributes.into_iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => options.into_iter().next(),
        _ => None,
    });
    // The crate represents the options of an unknown kind as one attribute.
    let Some(TcOption::Other(options)) = options else { return None };
    let mut value = vec![0; options.value_len()];
    options.emit_value(&mut value);
    let parms = attribute_in(&value, TCA_TBF_PARMS).filter(|parms| parms.len() >= PARMS)?;
    let word = |at: usize| parms.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let long =
        attribute_in(&value, TCA_TBF_RATE64).and_then(|value| value.try_into().ok().map(u64::from_ne_bytes));
    Some((long.unwrap_or(word(RATE_AT)?.into()), word(LIMIT_AT)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_behind_others_and_broken_ones_are_none() {
        let list = [7, 0, 1, 0, b'a', b'b', b'c', 0, 6, 0, 2, 0, b'x', b'y', 0, 0];
        assert_eq!(attribute_in(&list, 1), Some(&b"abc"[..]));
        assert_eq!(attribute_in(&list, 2), Some(&b"xy"[..]));
        assert_eq!(attribute_in(&list, 3), None);
        assert_eq!(attribute_in(&[0, 0, 1, 0], 2), None, "a length of nothing must not go round for ever");
        assert_eq!(attribute_in(&list[..5], 1), None);
    }
}
