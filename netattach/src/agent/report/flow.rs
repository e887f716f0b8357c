//! Converts records of the packet path to text.

use std::net::{IpAddr, Ipv6Addr};
use std::time::{SystemTime, UNIX_EPOCH};

use netattach_common::flow::state;

use crate::bpf::{self, DropReason, Ended, Ending, Record};
use crate::observe::WallClock;
use crate::rpc::message::{AttachmentName, EndedFlow, FlowRecord, Traffic};

/// The current time of both clocks.
pub(in crate::agent) fn wall_clock() -> WallClock {
    let monotonic = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither clock is ever negative.
    let monotonic_ns = monotonic.tv_sec.unsigned_abs() * 1_000_000_000 + monotonic.tv_nsec.unsigned_abs();
    let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    WallClock { monotonic_ns, wall_ms }
}

/// The text form of a record, with its attachment's name. `time_ms`: milliseconds since 1970.
pub(in crate::agent) fn describe(record: &Record, name: AttachmentName, time_ms: u64) -> FlowRecord {
    let reason = DropReason::from_number(record.reason);
    let parsed = record.parsed != 0;
    let address =
        |address: netattach_common::Ip6| parsed.then(|| IpAddr::V6(Ipv6Addr::from(address)).to_canonical());
    let with_ports = has_ports(record.protocol);
    let port = |port: netattach_common::Port| (parsed && with_ports).then(|| port.number());
    let some = |number: u32| Some(number).filter(|number| *number != 0);
    FlowRecord {
        name,
        time_ms,
        verdict: if record.reason == 0 { "allowed" } else { "dropped" }.to_owned(),
        reason: reason.map(|reason| reason.name().to_owned()),
        direction: if record.to_pod == 0 { "from-pod" } else { "to-pod" }.to_owned(),
        protocol: parsed.then(|| protocol(record.protocol)),
        source: address(record.source),
        source_port: port(record.source_port),
        destination: address(record.destination),
        destination_port: port(record.destination_port),
        vlan: Some(record.vlan).filter(|vlan| *vlan != 0),
        length: record.length,
        policy: some(policy(record, reason)),
        rule: some(record.rule),
        source_pod: None,
        destination_pod: None,
        decided_by: Vec::new(),
        ended: None,
    }
}

/// The text form of an ended flow that was recorded at the attachment of this name and these addresses.
pub(super) fn describe_ended(
    ended: &Ended,
    name: AttachmentName,
    addresses: &[IpAddr],
    time_ms: u64,
) -> FlowRecord {
    let Ended { entry, ending, .. } = ended;
    let traffic = |counted: bpf::Traffic| Traffic { packets: counted.packets, bytes: counted.bytes };
    let with_ports = has_ports(entry.protocol);
    let some_port = |port: u16| with_ports.then_some(port);
    FlowRecord {
        name,
        time_ms,
        verdict: "ended".to_owned(),
        reason: Some(why(*ending, entry.flow.state).to_owned()),
        direction: if addresses.contains(&entry.opener.0) { "from-pod" } else { "to-pod" }.to_owned(),
        protocol: Some(protocol(entry.protocol)),
        source: Some(entry.opener.0),
        source_port: some_port(entry.opener.1),
        destination: Some(entry.responder.0),
        destination_port: some_port(entry.responder.1),
        vlan: Some(entry.vlan).filter(|vlan| *vlan != 0),
        length: 0,
        policy: None,
        rule: None,
        source_pod: None,
        destination_pod: None,
        decided_by: Vec::new(),
        ended: Some(EndedFlow {
            seconds: entry.flow.last_seen.wrapping_sub(entry.flow.opened),
            forward: traffic(entry.flow.forward),
            backward: traffic(entry.flow.backward),
        }),
    }
}

fn why(ending: Ending, state: u8) -> &'static str {
    match ending {
        Ending::Detached => "detached",
        Ending::Displaced => "displaced",
        Ending::Expired if state & state::RST != 0 => "reset",
        Ending::Expired if state & state::CLOSED == state::CLOSED => "closed",
        Ending::Expired => "timeout",
    }
}

fn has_ports(protocol: u8) -> bool {
    matches!(protocol, 6 | 17 | 132)
}

/// The policy that decided: for a new flow that of the leg, for a drop the one that the reason refers to.
fn policy(record: &Record, reason: Option<DropReason>) -> u32 {
    match reason {
        None if record.responder != 0 => record.ingress,
        None => record.egress,
        Some(DropReason::IngressPeer | DropReason::IngressPort) => record.ingress,
        Some(DropReason::EgressPeer | DropReason::EgressPort) => record.egress,
        Some(DropReason::FragmentMiss | DropReason::IcmpUnrelated) if record.to_pod != 0 => record.ingress,
        Some(DropReason::FragmentMiss | DropReason::IcmpUnrelated) => record.egress,
        Some(_) => 0,
    }
}

fn protocol(number: u8) -> String {
    match number {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        132 => "sctp".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use netattach_common::Port;

    use super::*;
    use crate::rpc::message::ENDINGS;

    #[test]
    fn a_record_is_described_in_words() {
        let v4 = |address: [u8; 4]| Ipv4Addr::from(address).to_ipv6_mapped().into();
        let record = Record {
            time: 5_000_000_000,
            attachment: 7,
            ifindex: 3,
            ingress: 11,
            egress: 12,
            rule: 0,
            length: 74,
            source: v4([10, 0, 0, 1]),
            destination: v4([10, 0, 0, 2]),
            source_port: Port::new(4000),
            destination_port: Port::new(80),
            ethertype: 0x800,
            vlan: 0,
            reason: DropReason::EgressPort as u8,
            to_pod: 0,
            protocol: 6,
            flags: 2,
            parsed: 1,
            responder: 0,
            pad: [0; 2],
        };
        let name = AttachmentName { id: Some(7), pod: None, network: "a/b".into(), ifname: "net1".into() };
        let described = FlowRecord { time_ms: 999_000, ..FlowRecord::dropped(name.clone()) };
        assert_eq!(describe(&record, name.clone(), 999_000), described);
        let opened = Record { reason: 0, rule: 4, to_pod: 1, responder: 1, ..record };
        let expected = FlowRecord {
            verdict: "allowed".into(),
            reason: None,
            direction: "to-pod".into(),
            policy: Some(11),
            rule: Some(4),
            ..described.clone()
        };
        assert_eq!(describe(&opened, name.clone(), 999_000), expected);
        let unread = Record { reason: DropReason::Malformed as u8, parsed: 0, ..record };
        let expected = FlowRecord {
            reason: Some("malformed".into()),
            protocol: None,
            source: None,
            source_port: None,
            destination: None,
            destination_port: None,
            policy: None,
            ..described
        };
        assert_eq!(describe(&unread, name, 999_000), expected);
    }
    #[test]
    fn an_ended_flow_is_described_as_its_opener_saw_it() {
        use netattach_common::Flow;
        use state::{CLOSED, ESTABLISHED, REPLIED, RST};
        let flow = Flow {
            opened: 100,
            last_seen: 130,
            attachment: 7,
            state: REPLIED | ESTABLISHED | CLOSED,
            forward: bpf::Traffic { packets: 5, bytes: 500 },
            backward: bpf::Traffic { packets: 4, bytes: 4000 },
            ..Flow::default()
        };
        let (pod, server) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let entry = bpf::FlowEntry {
            zone: 1,
            opener: (pod, 4000),
            responder: (server, 80),
            protocol: 6,
            vlan: 0,
            flow,
        };
        let ended = Ended { at: 150, entry, ending: Ending::Expired };
        let name = AttachmentName { id: Some(7), pod: None, network: "a/b".into(), ifname: "net1".into() };
        let described = FlowRecord {
            name: name.clone(),
            time_ms: 999_000,
            verdict: "ended".into(),
            reason: Some("closed".into()),
            direction: "from-pod".into(),
            protocol: Some("tcp".into()),
            source: Some(pod),
            source_port: Some(4000),
            destination: Some(server),
            destination_port: Some(80),
            vlan: None,
            length: 0,
            policy: None,
            rule: None,
            source_pod: None,
            destination_pod: None,
            decided_by: Vec::new(),
            ended: Some(EndedFlow {
                seconds: 30,
                forward: Traffic { packets: 5, bytes: 500 },
                backward: Traffic { packets: 4, bytes: 4000 },
            }),
        };
        assert_eq!(describe_ended(&ended, name.clone(), &[pod], 999_000), described);
        let answered = FlowRecord { direction: "to-pod".into(), ..described };
        assert_eq!(describe_ended(&ended, name, &[server], 999_000), answered);
        assert_eq!(why(Ending::Expired, REPLIED | RST), "reset");
        assert_eq!(why(Ending::Expired, REPLIED | ESTABLISHED), "timeout");
        assert_eq!(why(Ending::Detached, CLOSED), "detached");
        let ways = [
            (Ending::Expired, CLOSED),
            (Ending::Expired, RST),
            (Ending::Expired, 0),
            (Ending::Detached, 0),
            (Ending::Displaced, 0),
        ];
        assert_eq!(ways.map(|(ending, state)| why(ending, state)), ENDINGS);
    }
}
