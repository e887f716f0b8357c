//! Whole packets through the real programs and maps (`BPF_PROG_TEST_RUN`).
//!
//! Needs root. Every test has its own pins below `/sys/fs/bpf` and removes them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use netattach::bpf::{
    Attachment, BpfError, Checks, Config, Dataplane, DropReason, Hook, MapProperty, PolicyIds, Stats,
    Traffic, remove_all_pins, sys,
};
use netattach::mac::Mac;
use netattach::policy::compiled::{self, CompiledPolicy, PortPrefix};
use netattach_common::decide::NOTHING;
use netattach_common::{Flow, FlowKey, Ip4};
use netattach_tests::packet::{POD_MAC, Packet, arp_request, other_ethertype, tcp};

use Hook::{FromPod, ToPod};

/// `lo`, the device that test runs pretend to be on: index 1 in every namespace.
const DEVICE: u32 = 1;
/// The attachment under test.
const POD: u32 = 7;
const POD_V4: &str = "10.0.0.1";
const POD_V6: &str = "fd00::1";
const PEER_V4: &str = "10.0.0.2";
const PEER_V6: &str = "fd00::2";

/// What became of a packet.
type Outcome = Result<(), DropReason>;

struct Rig {
    root: PathBuf,
    dataplane: Dataplane,
    from_pod: SchedClassifier,
    to_pod: SchedClassifier,
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Err(error) = remove_all_pins(&self.root) {
            eprintln!("{}", netattach::report::Chain(&error));
        }
    }
}

impl Rig {
    /// An attachment with one address per family, everything checked, no policy.
    fn new() -> Self {
        let root = unused_root();
        let dataplane = Dataplane::open(&config(&root)).expect("open the dataplane");
        let program = |name: &str| {
            SchedClassifier::from_pin(root.join("v1/prog").join(name)).expect("open a pinned program")
        };
        let (from_pod, to_pod) = (program("na_from_pod"), program("na_to_pod"));
        let rig = Self { root, dataplane, from_pod, to_pod };
        rig.put(Checks { source_mac: true, source_address: true, pending: false });
        rig.dataplane.bind_link(DEVICE, POD).unwrap();
        rig
    }

    /// As `new`, with these policies.
    fn isolated(ingress: Option<&CompiledPolicy>, egress: Option<&CompiledPolicy>) -> Self {
        let rig = Self::new();
        rig.enforce(ingress, egress);
        rig
    }

    fn put(&self, flags: Checks) {
        let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
        let attachment = Attachment { mac: POD_MAC, addresses, zone: 1, flags };
        self.dataplane.put_attachment(POD, &attachment).unwrap();
    }

    fn enforce(&self, ingress: Option<&CompiledPolicy>, egress: Option<&CompiledPolicy>) -> PolicyIds {
        let install = |compiled: Option<&CompiledPolicy>| match compiled {
            None => 0,
            Some(compiled) => {
                let id = self.dataplane.allocate_policy_id().unwrap();
                self.dataplane.install_policy(id, compiled).unwrap();
                id
            }
        };
        let ids = PolicyIds { ingress: install(ingress), egress: install(egress) };
        self.dataplane.set_policy(POD, ids).unwrap();
        ids
    }

    /// Runs a packet, and checks that exactly the counters of its outcome moved.
    fn run(&self, hook: Hook, frame: &[u8]) -> Outcome {
        self.run_as(POD, hook, frame)
    }

    fn run_as(&self, counted_for: u32, hook: Hook, frame: &[u8]) -> Outcome {
        let before = self.dataplane.stats(counted_for).unwrap();
        let result = self.test_run(hook, frame, 1);
        let after = self.dataplane.stats(counted_for).unwrap();
        let dropped = DropReason::ALL
            .iter()
            .copied()
            .find(|reason| after.drops[*reason as usize] > before.drops[*reason as usize]);
        let mut expected =
            Stats { new_flows: after.new_flows, flows_not_stored: after.flows_not_stored, ..before };
        let traffic = match (hook, dropped) {
            (FromPod, None) => &mut expected.from_pod,
            (ToPod, None) => &mut expected.to_pod,
            (FromPod, Some(_)) => &mut expected.dropped_from_pod,
            (ToPod, Some(_)) => &mut expected.dropped_to_pod,
        };
        traffic.packets += 1;
        traffic.bytes += frame.len() as u64;
        if let Some(reason) = dropped {
            expected.drops[reason as usize] += 1;
        }
        assert_eq!(after, expected);
        match (result.return_value as i32, dropped) {
            (-1, None) => Ok(()),
            (2, Some(reason)) => Err(reason),
            other => panic!("verdict and counters disagree: {other:?}"),
        }
    }

    fn test_run(&self, hook: Hook, frame: &[u8], repeat: u32) -> aya::TestRunResult {
        let program = match hook {
            FromPod => &self.from_pod,
            ToPod => &self.to_pod,
        };
        let options = TestRunOptions { data_in: Some(frame), repeat, ..TestRunOptions::new() };
        program.test_run(options).expect("run the program")
    }

    /// The flow table as the agent would read it.
    fn flows(&self) -> HashMap<MapData, FlowKey<Ip4>, Flow> {
        let data = MapData::from_pin(self.root.join("v1/na_ct4")).unwrap();
        Map::from_map_data(data).unwrap().try_into().unwrap()
    }

    /// Changes what the agent remembers.
    fn set_memory(&self, change: impl FnOnce(&mut netattach_common::Config)) {
        let data = MapData::from_pin(self.root.join("v1/na_cfg")).unwrap();
        let mut map: Array<_, netattach_common::Config> =
            Map::from_map_data(data).unwrap().try_into().unwrap();
        let mut memory = map.get(&0, 0).unwrap();
        change(&mut memory);
        map.set(0, memory, 0).unwrap();
    }

    /// The only IPv4 flow.
    fn only_flow(&self) -> Flow {
        let flows: Vec<_> = self.flows().iter().map(|flow| flow.unwrap().1).collect();
        assert_eq!(flows.len(), 1, "{flows:?}");
        flows[0]
    }

    /// Makes every IPv4 flow this much older.
    fn age(&self, seconds: u32) {
        let mut flows = self.flows();
        let entries: Vec<_> = flows.iter().map(Result::unwrap).collect();
        for (key, flow) in entries {
            let older = Flow { last_seen: flow.last_seen.wrapping_sub(seconds), ..flow };
            flows.insert(key, older, 0).unwrap();
        }
    }
}

fn config(root: &Path) -> Config {
    Config {
        max_attachments: 64,
        max_addresses: 64,
        max_peers_v4: 256,
        max_peers_v6: 256,
        max_ports: 256,
        max_rules: 64,
        max_flows_v4: 1024,
        max_flows_v6: 1024,
        ..Config::new(root)
    }
}

/// A directory on the BPF filesystem that no other test uses, mounting that filesystem where it is missing.
fn unused_root() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    assert!(rustix::process::geteuid().is_root(), "these tests load BPF programs: run them as root");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    if !mounts.lines().any(|line| line.split(' ').nth(1) == Some("/sys/fs/bpf")) {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("bpf", "/sys/fs/bpf", "bpf", flags, None).expect("mount /sys/fs/bpf");
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    PathBuf::from(format!("/sys/fs/bpf/netattach-test-{}-{number}", std::process::id()))
}

/// A policy from peers with classes and classes with traffic; rule ids count from 1, and so do classes here: in
/// the maps they come after the one that allows nothing.
fn policy(peers: &[(&str, u32)], ports: &[(u32, compiled::Traffic)]) -> CompiledPolicy {
    let numbered = || (1..).zip(ports);
    let number = |class: &u32| NOTHING + class;
    CompiledPolicy {
        peers: peers.iter().map(|(peer, class)| (peer.parse().unwrap(), number(class))).collect(),
        ports: numbered()
            .map(|(rule, (class, traffic))| (PortPrefix { class: number(class), traffic: *traffic }, rule))
            .collect(),
        rules: numbered().map(|(rule, _)| (rule, format!("test/policy rule {rule}"))).collect(),
    }
}

fn any() -> compiled::Traffic {
    compiled::Traffic::Any
}

fn port(protocol: u8, port: u16) -> compiled::Traffic {
    compiled::Traffic::Ports { protocol, port, bits: 16 }
}

fn deny_all() -> CompiledPolicy {
    CompiledPolicy::default()
}

fn allow_all() -> CompiledPolicy {
    policy(&[("0.0.0.0/0", 1), ("::/0", 1)], &[(1, any())])
}

/// TCP 80 for the peer, in both families.
fn web_from_peer() -> CompiledPolicy {
    policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, port(6, 80))])
}

fn from_pod() -> Packet {
    Packet::between(POD_V4, PEER_V4)
}

fn to_pod() -> Packet {
    Packet::between(PEER_V4, POD_V4)
}

fn from_pod6() -> Packet {
    Packet::between(POD_V6, PEER_V6)
}

fn to_pod6() -> Packet {
    Packet::between(PEER_V6, POD_V6)
}

const SYN: u8 = tcp::SYN;
const ACK: u8 = tcp::ACK;

#[test]
fn without_policy_own_packets_pass_and_are_counted() {
    let rig = Rig::new();
    let frame = from_pod().tcp(40000, 80, SYN).frame();
    assert_eq!(rig.run(FromPod, &frame), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod6().udp(1, 2).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(80, 40000, ACK).frame()), Ok(()));
    let stats = rig.dataplane.stats(POD).unwrap();
    let expected = Stats {
        from_pod: Traffic { packets: 2, bytes: 54 + 66 },
        to_pod: Traffic { packets: 1, bytes: 54 },
        ..Stats::default()
    };
    assert_eq!(stats, expected);
    assert_eq!(rig.flows().keys().count(), 0, "nobody isolated, nothing tracked");
}

#[test]
fn a_pod_speaks_only_for_itself() {
    let rig = Rig::new();
    let other = Mac([2, 9, 9, 9, 9, 9]);
    // The link-local address of POD_MAC, then one that is somebody else's.
    let (own_link_local, other_link_local) = ("fe80::ff:fe00:1", "fe80::ff:fe00:2");
    let solicit = |source: &str, option| {
        Packet::between(source, "ff02::1:ff00:2").neighbour(135, PEER_V6, &[(1, option)]).frame()
    };
    let advertise = |target: &str, option| from_pod6().neighbour(136, target, &[(2, option)]).frame();
    let cases = [
        ("own IPv4", from_pod().udp(1, 2).frame(), Ok(())),
        ("another MAC", from_pod().from_mac(other).udp(1, 2).frame(), Err(DropReason::SourceMac)),
        ("another IPv4", Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame(), Err(DropReason::SourceIpv4)),
        (
            "0.0.0.0 as a DHCP client",
            Packet::between("0.0.0.0", "255.255.255.255").udp(68, 67).frame(),
            Ok(()),
        ),
        (
            "0.0.0.0 otherwise",
            Packet::between("0.0.0.0", "255.255.255.255").udp(68, 69).frame(),
            Err(DropReason::SourceIpv4),
        ),
        ("a DHCP reply", from_pod().udp(67, 68).frame(), Err(DropReason::DhcpServer)),
        ("own IPv6", from_pod6().udp(1, 2).frame(), Ok(())),
        ("own link-local", Packet::between(own_link_local, PEER_V6).udp(1, 2).frame(), Ok(())),
        (
            "another link-local",
            Packet::between(other_link_local, PEER_V6).udp(1, 2).frame(),
            Err(DropReason::SourceIpv6),
        ),
        ("another IPv6", Packet::between("fd00::9", PEER_V6).udp(1, 2).frame(), Err(DropReason::SourceIpv6)),
        ("a DHCPv6 reply", from_pod6().udp(547, 546).frame(), Err(DropReason::DhcpServer)),
        ("own ARP", arp_request(POD_MAC, POD_V4, PEER_V4), Ok(())),
        ("an ARP probe", arp_request(POD_MAC, "0.0.0.0", POD_V4), Ok(())),
        ("ARP for another", arp_request(POD_MAC, "10.0.0.9", PEER_V4), Err(DropReason::ArpSenderIp)),
        ("ARP from another", arp_request(other, POD_V4, PEER_V4), Err(DropReason::ArpSenderMac)),
        ("a solicitation", solicit(POD_V6, POD_MAC), Ok(())),
        (
            "duplicate detection",
            Packet::between("::", "ff02::1:ff00:1").neighbour(135, POD_V6, &[]).frame(),
            Ok(()),
        ),
        (
            "no source otherwise",
            Packet::between("::", PEER_V6).udp(1, 2).frame(),
            Err(DropReason::SourceIpv6),
        ),
        ("a solicitation for another", solicit("fd00::9", POD_MAC), Err(DropReason::SourceIpv6)),
        ("a solicitation with another MAC", solicit(POD_V6, other), Err(DropReason::NdLinkLayer)),
        ("an advertisement", advertise(POD_V6, POD_MAC), Ok(())),
        ("an advertisement of the link-local", advertise(own_link_local, POD_MAC), Ok(())),
        ("an advertisement of another", advertise(PEER_V6, POD_MAC), Err(DropReason::NdTarget)),
        ("an advertisement with another MAC", advertise(POD_V6, other), Err(DropReason::NdLinkLayer)),
        ("a router solicitation", from_pod6().hop_limit(255).icmp(133, &[0; 4]).frame(), Ok(())),
        (
            "a router advertisement",
            from_pod6().hop_limit(255).icmp(134, &[0; 12]).frame(),
            Err(DropReason::RouterMessage),
        ),
        (
            "a redirect",
            from_pod6().hop_limit(255).icmp(137, &[0; 36]).frame(),
            Err(DropReason::RouterMessage),
        ),
        ("a VLAN tag", from_pod().tagged(5).udp(1, 2).frame(), Err(DropReason::VlanTagged)),
        (
            "loose source routing",
            from_pod().options(&[1, 131, 7, 4, 10, 0, 0, 9]).udp(1, 2).frame(),
            Err(DropReason::SourceRoute),
        ),
        (
            "strict source routing",
            from_pod().options(&[137, 7, 4, 10, 0, 0, 9, 0]).udp(1, 2).frame(),
            Err(DropReason::SourceRoute),
        ),
        ("a router alert", from_pod().options(&[148, 4, 0, 0]).udp(1, 2).frame(), Ok(())),
        ("12 no-operations", from_pod().options(&[1; 12]).udp(1, 2).frame(), Ok(())),
        ("40 no-operations", from_pod().options(&[1; 40]).udp(1, 2).frame(), Err(DropReason::Malformed)),
        (
            "an option without end",
            from_pod().options(&[7, 0, 0, 0]).udp(1, 2).frame(),
            Err(DropReason::Malformed),
        ),
        ("another ethertype", other_ethertype(0x88cc), Ok(())),
    ];
    for (what, frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), expected, "{what}");
    }
}

#[test]
fn router_messages_do_not_hide_behind_extension_headers() {
    let rig = Rig::new();
    let advertisement = || from_pod6().hop_limit(255).icmp(134, &[0; 12]);
    let padding = [0, 1, 4, 0, 0, 0, 0];
    let eight = (0..8).fold(advertisement(), |packet, _| packet.extension(60, &padding));
    let seven = (0..7).fold(advertisement(), |packet, _| packet.extension(60, &padding));
    let cases = [
        (advertisement().extension(0, &padding).frame(), DropReason::RouterMessage),
        (advertisement().extension(51, &[0; 7]).frame(), DropReason::RouterMessage),
        (seven.frame(), DropReason::RouterMessage),
        (eight.frame(), DropReason::ExtensionHeaders),
        (advertisement().fragment(0, true).frame(), DropReason::Malformed),
        (advertisement().fragment(0, false).frame(), DropReason::RouterMessage),
        (from_pod6().extension(43, &[0, 0, 0, 0, 0, 0, 0]).udp(1, 2).frame(), DropReason::SourceRoute),
    ];
    for (frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), Err(expected));
    }
    let segment_routing = from_pod6().extension(43, &[0, 4, 0, 0, 0, 0, 0]).udp(1, 2);
    assert_eq!(rig.run(FromPod, &segment_routing.frame()), Ok(()));
}

#[test]
fn without_known_addresses_only_the_mac_and_the_role_are_checked() {
    let rig = Rig::new();
    rig.put(Checks { source_mac: true, ..Checks::default() });
    let stranger = Packet::between("192.0.2.1", PEER_V4);
    let other = Mac([2, 9, 9, 9, 9, 9]);
    assert_eq!(rig.run(FromPod, &stranger.clone().udp(1, 2).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &arp_request(POD_MAC, "192.0.2.1", PEER_V4)), Ok(()));
    assert_eq!(rig.run(FromPod, &arp_request(other, POD_V4, PEER_V4)), Err(DropReason::ArpSenderMac));
    assert_eq!(
        rig.run(FromPod, &stranger.clone().from_mac(other).udp(1, 2).frame()),
        Err(DropReason::SourceMac)
    );
    rig.put(Checks::default());
    assert_eq!(rig.run(FromPod, &stranger.from_mac(other).udp(67, 68).frame()), Ok(()));
}

#[test]
fn addresses_can_be_added_and_taken_away() {
    let rig = Rig::new();
    let from_second = Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame();
    let put = |addresses: &[&str]| {
        let flags = Checks { source_mac: true, source_address: true, pending: false };
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        rig.dataplane.put_attachment(POD, &Attachment { mac: POD_MAC, addresses, zone: 1, flags }).unwrap();
    };
    assert_eq!(rig.run(FromPod, &from_second), Err(DropReason::SourceIpv4));
    put(&[POD_V4, "10.0.0.9"]);
    assert_eq!(rig.run(FromPod, &from_second), Ok(()));
    put(&["10.0.0.9"]);
    assert_eq!(rig.run(FromPod, &from_second), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Err(DropReason::SourceIpv4));
    put(&[]);
    assert_eq!(rig.run(FromPod, &from_second), Err(DropReason::SourceIpv4));
    let unspecified = Packet::between("0.0.0.0", PEER_V4).udp(1, 2).frame();
    assert_eq!(rig.run(FromPod, &unspecified), Err(DropReason::SourceIpv4), "not even in its place");
}

#[test]
fn truncated_packets_are_malformed() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let cut = |packet: Packet, keep: usize| packet.frame()[..keep].to_vec();
    let cases = [
        ("IPv4 without UDP ports", cut(from_pod().udp(1, 2), 36)),
        ("IPv4 without TCP flags", cut(from_pod().tcp(1, 2, SYN), 46)),
        ("IPv6 without UDP ports", cut(from_pod6().udp(1, 2), 56)),
        ("half an ARP packet", arp_request(POD_MAC, POD_V4, PEER_V4)[..30].to_vec()),
        ("an ARP packet for other networks", {
            let mut frame = arp_request(POD_MAC, POD_V4, PEER_V4);
            frame[18] = 8;
            frame
        }),
        ("a tiny first fragment", cut(from_pod().fragment(0, true).tcp(1, 2, SYN), 42)),
        ("an IPv4 header length below five", {
            let mut frame = from_pod().udp(1, 2).frame();
            frame[14] = 0x44;
            frame
        }),
        ("IPv6 that says version 4", {
            let mut frame = from_pod6().udp(1, 2).frame();
            frame[14] = 0x40;
            frame
        }),
        ("a neighbour option of no length", {
            let mut frame = from_pod6().neighbour(135, PEER_V6, &[(1, POD_MAC)]).frame();
            let option = frame.len() - 8;
            frame[option + 1] = 0;
            frame
        }),
    ];
    for (what, frame) in cases {
        assert_eq!(rig.run(FromPod, &frame), Err(DropReason::Malformed), "{what}");
    }
}

#[test]
fn a_device_of_nobody_passes_nothing() {
    let rig = Rig::new();
    let frame = to_pod().udp(1, 2).frame();
    rig.dataplane.unbind_link(DEVICE).unwrap();
    rig.dataplane.unbind_link(DEVICE).unwrap();
    for hook in [FromPod, ToPod] {
        assert_eq!(rig.run_as(0, hook, &frame), Err(DropReason::Unbound));
    }
    rig.dataplane.bind_link(DEVICE, POD).unwrap();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, ToPod, &frame), Err(DropReason::Unbound));
}

#[test]
fn while_pending_only_address_resolution_passes() {
    let rig = Rig::new();
    rig.put(Checks { source_mac: true, source_address: true, pending: true });
    let pending = Err(DropReason::Pending);
    let report = Packet::between("fe80::ff:fe00:1", "ff02::16")
        .hop_limit(1)
        .extension(0, &[0, 5, 2, 0, 0, 1, 0])
        .icmp(143, &[0; 4]);
    let cases = [
        (FromPod, arp_request(POD_MAC, POD_V4, PEER_V4), Ok(())),
        (ToPod, arp_request(Mac([2; 6]), PEER_V4, POD_V4), Ok(())),
        (FromPod, from_pod6().neighbour(135, PEER_V6, &[(1, POD_MAC)]).frame(), Ok(())),
        (ToPod, to_pod6().neighbour(136, PEER_V6, &[(2, Mac([2; 6]))]).frame(), Ok(())),
        (ToPod, to_pod6().hop_limit(255).icmp(134, &[0; 12]).frame(), Ok(())),
        (FromPod, report.frame(), Ok(())),
        (FromPod, from_pod().udp(1, 2).frame(), pending),
        (ToPod, to_pod().tcp(80, 1, ACK).frame(), pending),
        (FromPod, from_pod6().ping(1).frame(), pending),
        (ToPod, to_pod6().ping(1).frame(), pending),
        (FromPod, other_ethertype(0x88cc), pending),
        (ToPod, to_pod().tagged(3).udp(1, 2).frame(), Err(DropReason::VlanTagged)),
        (FromPod, Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame(), Err(DropReason::SourceIpv4)),
    ];
    for (hook, frame, expected) in cases {
        assert_eq!(rig.run(hook, &frame), expected, "{hook:?} {frame:02x?}");
    }
    rig.put(Checks { source_mac: true, source_address: true, pending: false });
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
}

#[test]
fn policy_denies_by_peer_and_by_port_in_both_families() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&web_from_peer()));
    let others = [("10.0.0.9", POD_V4), ("fd00::9", POD_V6)];
    for (ours, peer) in [(POD_V4, PEER_V4), (POD_V6, PEER_V6)] {
        let (out, into) = (Packet::between(ours, peer), Packet::between(peer, ours));
        assert_eq!(rig.run(FromPod, &out.clone().tcp(1000, 80, SYN).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().tcp(1001, 80, SYN).frame()), Ok(()));
        let denied = [
            (FromPod, out.clone().tcp(1002, 81, SYN), DropReason::EgressPort),
            (FromPod, out.clone().udp(1002, 80), DropReason::EgressPort),
            (FromPod, out.ping(1), DropReason::EgressPort),
            (ToPod, into.clone().tcp(80, 81, SYN), DropReason::IngressPort),
            (ToPod, into.clone().sctp(1, 80), DropReason::IngressPort),
            (ToPod, into.ping(1), DropReason::IngressPort),
        ];
        for (hook, packet, reason) in denied {
            assert_eq!(rig.run(hook, &packet.frame()), Err(reason), "{packet:?}");
        }
    }
    for (other, ours) in others {
        let into = Packet::between(other, ours).tcp(1, 80, SYN);
        assert_eq!(rig.run(ToPod, &into.frame()), Err(DropReason::IngressPeer));
        let out = Packet::between(ours, other).tcp(1, 80, SYN);
        assert_eq!(rig.run(FromPod, &out.frame()), Err(DropReason::EgressPeer));
    }
    let stats = rig.dataplane.stats(POD).unwrap();
    assert_eq!(stats.new_flows, 4, "denied packets open no flow");
}

#[test]
fn a_direction_without_policy_stays_open() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &to_pod().tcp(1, 80, SYN).frame()), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(1000, 22, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(22, 1000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1000, 53).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().udp(53, 1000).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().udp(53, 1001).frame()), Err(DropReason::IngressPeer));
}

#[test]
fn the_longest_peer_prefix_decides_as_except_needs() {
    // 10.0.0.0/8 except 10.1.0.0/16, which another rule opens for one host and UDP 53 only.
    let compiled = policy(
        &[("10.0.0.0/8", 1), ("10.1.0.0/16", 2), ("10.1.0.9/32", 3), ("fd00::/16", 1), ("fd00:1::/32", 2)],
        &[(1, any()), (3, port(17, 53))],
    );
    let rig = Rig::isolated(None, Some(&compiled));
    let cases = [
        (POD_V4, "10.2.0.1", Ok(())),
        (POD_V4, "10.1.0.1", Err(DropReason::EgressPort)),
        (POD_V4, "10.1.0.9", Ok(())),
        (POD_V4, "192.0.2.1", Err(DropReason::EgressPeer)),
        (POD_V6, "fd00:2::1", Ok(())),
        (POD_V6, "fd00:1::1", Err(DropReason::EgressPort)),
        (POD_V6, "fe00::1", Err(DropReason::EgressPeer)),
    ];
    for (ours, peer, expected) in cases {
        assert_eq!(rig.run(FromPod, &Packet::between(ours, peer).udp(1, 53).frame()), expected, "{peer}");
    }
    let other_port = Packet::between(POD_V4, "10.1.0.9").udp(1, 54).frame();
    assert_eq!(rig.run(FromPod, &other_port), Err(DropReason::EgressPort));
}

#[test]
fn port_blocks_begin_and_end_where_they_should() {
    // 5000 to 5003, and 6000 to 6001, as blocks.
    let block = |port, bits| compiled::Traffic::Ports { protocol: 6, port, bits };
    let compiled = policy(&[("10.0.0.2/32", 1)], &[(1, block(5000, 14)), (1, block(6000, 15))]);
    let rig = Rig::isolated(Some(&compiled), None);
    for (number, allowed) in
        [(4999, false), (5000, true), (5003, true), (5004, false), (5999, false), (6001, true), (6002, false)]
    {
        let outcome = rig.run(ToPod, &to_pod().tcp(number, number, SYN).frame());
        assert_eq!(outcome.is_ok(), allowed, "{number}: {outcome:?}");
    }
}

#[test]
fn replies_pass_whatever_the_other_direction_says() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(81, 2001, ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod6().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod6().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
}

#[test]
fn sctp_and_echo_have_replies_too() {
    let compiled = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, any())]);
    let rig = Rig::isolated(Some(&deny_all()), Some(&compiled));
    assert_eq!(rig.run(FromPod, &from_pod().sctp(5, 6).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().sctp(6, 5).frame()), Ok(()));
    for (out, into) in [(from_pod(), to_pod()), (from_pod6(), to_pod6())] {
        assert_eq!(rig.run(FromPod, &out.clone().ping(9).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().pong(9).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().pong(8).frame()), Err(DropReason::IngressPeer));
        // The peer's own echo with the same identifier is another flow.
        assert_eq!(rig.run(ToPod, &into.ping(9).frame()), Err(DropReason::IngressPeer));
        let _ = out;
    }
}

#[test]
fn both_ends_of_a_flow_are_judged_in_one_entry() {
    const SERVER: u32 = 8;
    let rig = Rig::isolated(None, Some(&web_from_peer()));
    let server = Attachment {
        mac: Mac([2, 0, 0, 0, 0, 2]),
        addresses: vec![PEER_V4.parse().unwrap()],
        zone: 1,
        flags: Checks::default(),
    };
    rig.dataplane.put_attachment(SERVER, &server).unwrap();
    let denied = rig.dataplane.allocate_policy_id().unwrap();
    rig.dataplane.install_policy(denied, &deny_all()).unwrap();
    rig.dataplane.set_policy(SERVER, PolicyIds { ingress: denied, egress: 0 }).unwrap();

    let (syn, syn_ack) = (from_pod().tcp(3000, 80, SYN).frame(), to_pod().tcp(80, 3000, SYN | ACK).frame());
    let at = |attachment, hook, frame: &[u8]| {
        rig.dataplane.bind_link(DEVICE, attachment).unwrap();
        rig.run_as(attachment, hook, frame)
    };
    assert_eq!(at(POD, FromPod, &syn), Ok(()));
    assert_eq!(at(SERVER, ToPod, &syn), Err(DropReason::IngressPeer));
    assert_eq!(at(SERVER, FromPod, &syn_ack), Err(DropReason::IngressPeer), "no reply before the call");

    let web = rig.dataplane.allocate_policy_id().unwrap();
    rig.dataplane.install_policy(web, &policy(&[("10.0.0.1/32", 1)], &[(1, port(6, 80))])).unwrap();
    rig.dataplane.set_policy(SERVER, PolicyIds { ingress: web, egress: denied }).unwrap();
    assert_eq!(at(SERVER, ToPod, &syn), Ok(()));
    assert_eq!(at(SERVER, FromPod, &syn_ack), Ok(()));
    assert_eq!(at(POD, ToPod, &syn_ack), Ok(()));
    let flow = rig.only_flow();
    let egress = rig.dataplane.policy(POD).unwrap().egress;
    assert_eq!((flow.opener_approved_by, flow.responder_approved_by), (egress, web));

    let elsewhere = Attachment { zone: 2, ..server };
    rig.dataplane.put_attachment(SERVER, &elsewhere).unwrap();
    assert_eq!(at(SERVER, FromPod, &syn_ack), Err(DropReason::EgressPeer), "another network, another flow");
}

#[test]
fn a_tighter_policy_ends_live_flows_and_a_wider_one_resumes_them() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let (segment, reply) = (to_pod().tcp(2000, 80, ACK).frame(), from_pod().tcp(80, 2000, ACK).frame());
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &segment), Ok(()));
    rig.enforce(Some(&deny_all()), Some(&deny_all()));
    assert_eq!(rig.run(ToPod, &segment), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &reply), Err(DropReason::IngressPeer), "the leg's policy, not egress");
    let ids = rig.enforce(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(FromPod, &reply), Ok(()));
    assert_eq!(rig.only_flow().responder_approved_by, ids.ingress);
    rig.dataplane.set_policy(POD, PolicyIds::default()).unwrap();
    assert_eq!(rig.run(ToPod, &to_pod().tcp(9, 9, SYN).frame()), Ok(()));
}

#[test]
fn old_connections_are_picked_up_in_either_direction() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&deny_all()));
    // The pod is the server: first its answer is seen, then the caller's segment.
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, ACK).frame()), Ok(()));
    let flow = rig.only_flow();
    assert_eq!((flow.opened_by_low, flow.opener_approved_by), (0, 0), "the peer, 10.0.0.2, opened it");
    assert_eq!(flow.responder_approved_by, rig.dataplane.policy(POD).unwrap().ingress);
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    // Forward.
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2001, 80, ACK).frame()), Ok(()));
    // Neither direction allows these.
    assert_eq!(rig.run(FromPod, &from_pod().tcp(81, 2000, ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 81, ACK).frame()), Err(DropReason::IngressPort));
    // These begin something, or answer a SYN that was never allowed.
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2002, SYN).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2002, SYN | ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(FromPod, &from_pod().udp(80, 2002).frame()), Err(DropReason::EgressPeer));
}

#[test]
fn a_pretended_old_connection_does_not_let_a_new_one_in() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    let (bare_ack, syn) = (to_pod().tcp(2000, 22, ACK).frame(), to_pod().tcp(2000, 22, SYN).frame());
    assert_eq!(rig.run(ToPod, &bare_ack), Ok(()), "it might be the pod's own call");
    assert_eq!(rig.run(ToPod, &syn), Err(DropReason::IngressPeer));
}

#[test]
fn a_reused_port_is_a_new_connection() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let syn = to_pod().tcp(2000, 80, SYN).frame();
    assert_eq!(rig.run(ToPod, &syn), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, tcp::FIN | ACK).frame()), Ok(()));
    let closing = rig.only_flow();
    assert_eq!(closing.state, netattach_common::flow::state::REPLIED | netattach_common::flow::state::FIN);
    assert_eq!(rig.run(ToPod, &syn), Ok(()));
    assert_eq!(rig.only_flow().state, 0);
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
    rig.enforce(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &syn), Err(DropReason::IngressPeer));
}

#[test]
fn an_expired_flow_is_no_flow() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    let (query, answer) = (from_pod().udp(1000, 53).frame(), to_pod().udp(53, 1000).frame());
    assert_eq!(rig.run(FromPod, &query), Ok(()));
    rig.age(29);
    assert_eq!(rig.run(ToPod, &answer), Ok(()), "just in time");
    rig.age(119);
    assert_eq!(rig.run(ToPod, &answer), Ok(()), "answered flows live longer");
    rig.age(125);
    assert_eq!(rig.run(ToPod, &answer), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &query), Ok(()));
    assert_eq!(rig.run(ToPod, &answer), Ok(()));
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
}

#[test]
fn icmp_errors_pass_for_known_flows_only() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&web_from_peer()));
    for (out, into, router, ours) in
        [(from_pod(), to_pod(), "10.9.9.9", POD_V4), (from_pod6(), to_pod6(), "fd00::99", POD_V6)]
    {
        let call = out.clone().tcp(3000, 80, SYN);
        assert_eq!(rig.run(FromPod, &call.frame()), Ok(()));
        let too_big = Packet::between(router, ours).unreachable(&call);
        assert_eq!(rig.run(ToPod, &too_big.frame()), Ok(()));
        let unrelated = Err(DropReason::IcmpUnrelated);
        let other_call = out.clone().tcp(3001, 80, SYN);
        let about_other = Packet::between(router, ours).unreachable(&other_call);
        assert_eq!(rig.run(ToPod, &about_other.frame()), unrelated);
        let not_to_the_sender = Packet::between(router, ours).unreachable(&into.tcp(80, 3000, ACK));
        assert_eq!(rig.run(ToPod, &not_to_the_sender.frame()), unrelated);
        let quotes_nothing = Packet::between(router, ours).icmp(if ours == POD_V4 { 3 } else { 1 }, &[0; 8]);
        assert_eq!(rig.run(ToPod, &quotes_nothing.frame()), unrelated);
    }
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
    rig.enforce(Some(&allow_all()), None);
    let stray = Packet::between("10.9.9.9", POD_V4).unreachable(&from_pod().udp(7, 7));
    assert_eq!(rig.run(ToPod, &stray.frame()), Ok(()), "rules without ports cover it");
}

#[test]
fn later_fragments_need_a_rule_without_ports() {
    let ports_only = web_from_peer();
    let rig = Rig::isolated(Some(&ports_only), None);
    for into in [to_pod(), to_pod6()] {
        assert_eq!(rig.run(ToPod, &into.clone().fragment(0, true).tcp(1, 80, SYN).frame()), Ok(()));
        let later = into.clone().fragment(3, false).payload(6, &[0xff; 40]).frame();
        assert_eq!(rig.run(ToPod, &later), Err(DropReason::FragmentPort));
    }
    let atomic = to_pod6().fragment(0, false).tcp(2, 80, SYN).frame();
    assert_eq!(rig.run(ToPod, &atomic), Ok(()));
    let protocol = policy(&[("10.0.0.2/32", 1)], &[(1, compiled::Traffic::Protocol(17))]);
    rig.enforce(Some(&protocol), None);
    let later = |number| to_pod().fragment(3, true).payload(number, &[0xff; 40]).frame();
    assert_eq!(rig.run(ToPod, &later(17)), Ok(()));
    assert_eq!(rig.run(ToPod, &later(6)), Err(DropReason::FragmentPort));
    assert_eq!(rig.run(FromPod, &from_pod().fragment(3, true).payload(6, &[0; 8]).frame()), Ok(()));
}

#[test]
fn vlan_tags_pass_only_towards_a_pod_that_is_not_isolated() {
    let rig = Rig::new();
    let tagged = to_pod().tagged(5).udp(1, 2).frame();
    assert_eq!(rig.run(ToPod, &tagged), Ok(()));
    rig.enforce(Some(&allow_all()), None);
    assert_eq!(rig.run(ToPod, &tagged), Err(DropReason::VlanTagged));
}

#[test]
fn link_control_and_other_ethertypes_pass_a_policy_that_denies_all() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    let peer_mac = Mac([2, 0, 0, 0, 0, 2]);
    let passing = [
        (ToPod, arp_request(peer_mac, PEER_V4, POD_V4)),
        (FromPod, arp_request(POD_MAC, POD_V4, PEER_V4)),
        (ToPod, to_pod6().neighbour(135, POD_V6, &[(1, peer_mac)]).frame()),
        (ToPod, to_pod6().hop_limit(255).icmp(134, &[0; 12]).frame()),
        (ToPod, Packet::between("fe80::9", "ff02::1").hop_limit(1).icmp(130, &[0; 20]).frame()),
        (ToPod, other_ethertype(0x88cc)),
    ];
    for (hook, frame) in passing {
        assert_eq!(rig.run(hook, &frame), Ok(()), "{frame:02x?}");
    }
    let routed = to_pod6().neighbour(135, POD_V6, &[(1, peer_mac)]).hop_limit(254).frame();
    assert_eq!(rig.run(ToPod, &routed), Err(DropReason::IngressPeer), "not from this link");
}

#[test]
fn rules_are_credited_with_their_flows() {
    let compiled = policy(&[("10.0.0.0/8", 1)], &[(1, port(6, 80)), (1, compiled::Traffic::Protocol(17))]);
    let rig = Rig::isolated(Some(&compiled), None);
    let id = rig.dataplane.policy(POD).unwrap().ingress;
    for number in 0..3 {
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000 + number, 80, SYN).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000 + number, 80, ACK).frame()), Ok(()));
    }
    assert_eq!(rig.run(ToPod, &to_pod().udp(1, 2).frame()), Ok(()));
    assert_eq!(rig.dataplane.rule_flows(id).unwrap(), [(1, 3), (2, 1)].into());
}

#[test]
fn a_successor_adopts_everything_and_disturbs_nothing() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    let ids = rig.dataplane.policy(POD).unwrap();
    let stats = rig.dataplane.stats(POD).unwrap();
    let program_id =
        |path: &str| SchedClassifier::from_pin(rig.root.join(path)).unwrap().info().unwrap().id();
    let programs = ["v1/prog/na_from_pod", "v1/prog/na_to_pod"].map(program_id);

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(["v1/prog/na_from_pod", "v1/prog/na_to_pod"].map(program_id), programs);
    assert!(!successor.programs_changed().unwrap());
    assert_eq!(successor.policy(POD).unwrap(), ids);
    assert_eq!(successor.installed_policies(), [ids.ingress].into(), "deny-all has no entries");
    assert_eq!(successor.stats(POD).unwrap(), stats);
    assert_eq!(successor.links_dump(), [(DEVICE, POD)].into());
    let record = successor.attachments_dump().unwrap()[&POD];
    assert_eq!((record.mac.octets, record.host_ifindex, record.zone), (POD_MAC.0, DEVICE, 1));
    let addresses: Vec<IpAddr> = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    assert_eq!(successor.addresses_dump(), [(POD, addresses.into_iter().collect())].into());
    assert!(successor.allocate_policy_id().unwrap() > ids.ingress.max(ids.egress));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()), "the flow lives");
}

#[test]
fn other_programs_replace_the_pinned_ones_and_ask_to_be_attached() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    assert!(!rig.dataplane.programs_changed().unwrap(), "nothing was attached before the first start");
    // As if another object had been loaded, by an agent that was killed half way through a replacement.
    let old = SchedClassifier::from_pin(rig.root.join("v1/prog/na_to_pod")).unwrap();
    sys::pin(old.fd().unwrap().as_fd(), &rig.root.join("v1/prog/next_na_to_pod")).unwrap();
    rig.set_memory(|memory| memory.object_tag ^= 1);

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(successor.programs_changed().unwrap());
    let new = SchedClassifier::from_pin(rig.root.join("v1/prog/na_to_pod")).unwrap();
    assert_ne!(new.info().unwrap().id(), old.info().unwrap().id());
    assert_eq!(new.info().unwrap().map_ids().unwrap(), old.info().unwrap().map_ids().unwrap());
    assert!(!rig.root.join("v1/prog/next_na_to_pod").exists());

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(successor.programs_changed().unwrap(), "until someone says that they are attached");
    successor.programs_attached().unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(!successor.programs_changed().unwrap());
    assert_eq!(successor.policy(POD).unwrap(), rig.dataplane.policy(POD).unwrap());
}

#[test]
fn policy_ids_are_not_reused_even_when_the_memory_is_lost() {
    let rig = Rig::new();
    let ids = rig.enforce(Some(&deny_all()), Some(&deny_all()));
    rig.set_memory(|memory| *memory = netattach_common::Config::default());
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.allocate_policy_id().unwrap(), ids.ingress.max(ids.egress) + 1);
    rig.set_memory(|memory| memory.next_policy_id = u32::MAX);
    assert!(matches!(successor.allocate_policy_id(), Err(BpfError::PolicyIdsUsedUp)));
}

#[test]
fn a_tcx_link_outlives_its_maker_and_takes_new_programs() {
    let rig = Rig::new();
    let root = rig.root.clone();
    let attach = |hook| {
        // SAFETY: only the network namespace of this short-lived thread changes; it opened no sockets.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        let link = sys::tcx_attach(rig.dataplane.program(hook), DEVICE, hook).unwrap();
        let twice = sys::tcx_attach(rig.dataplane.program(hook), DEVICE, hook).unwrap_err();
        assert_eq!(twice.kind(), std::io::ErrorKind::AlreadyExists);
        sys::pin(link.as_fd(), &root.join("link")).unwrap();
        drop(link);
        let link = sys::open_pin(&root.join("link")).unwrap();
        let info = sys::link_info(link.as_fd()).unwrap();
        assert_eq!((info.ifindex, info.program_id), (DEVICE, rig.from_pod.info().unwrap().id()));
        sys::link_update(link.as_fd(), rig.dataplane.program(ToPod)).unwrap();
        let info = sys::link_info(link.as_fd()).unwrap();
        assert_eq!(info.program_id, rig.to_pod.info().unwrap().id());
    };
    std::thread::scope(|scope| scope.spawn(|| attach(FromPod)).join()).unwrap();
}

#[test]
fn removing_an_attachment_leaves_no_trace_of_it() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &to_pod().udp(1, 2).frame()), Err(DropReason::IngressPeer));
    rig.dataplane.remove_attachment(POD).unwrap();
    rig.dataplane.remove_attachment(POD).unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.attachments_dump().unwrap(), [].into());
    assert_eq!(successor.addresses_dump(), [].into());
    assert_eq!(successor.links_dump(), [].into());
    assert_eq!(successor.policy(POD).unwrap(), PolicyIds::default());
    assert_eq!(successor.stats(POD).unwrap(), Stats::default());
}

#[test]
fn a_removed_policy_frees_its_entries_and_no_other() {
    let rig = Rig::new();
    let ids = rig.enforce(Some(&web_from_peer()), Some(&allow_all()));
    rig.dataplane.set_policy(POD, PolicyIds { ingress: 0, ..ids }).unwrap();
    rig.dataplane.remove_policy(ids.ingress).unwrap();
    rig.dataplane.remove_policy(ids.ingress).unwrap();
    assert_eq!(rig.dataplane.installed_policies(), [ids.egress].into());
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.installed_policies(), [ids.egress].into());
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
}

#[test]
fn a_policy_that_does_not_fit_is_refused_whole() {
    let rig = Rig::new();
    let hosts: Vec<String> = (0..200).map(|host| format!("10.7.0.{host}/32")).collect();
    let peers: Vec<(&str, u32)> = hosts.iter().map(|host| (host.as_str(), 1)).collect();
    let large = policy(&peers, &[(1, any())]);
    rig.dataplane.install_policy(1, &large).unwrap();
    let error = rig.dataplane.install_policy(2, &large).unwrap_err();
    assert!(matches!(error, BpfError::OverCapacity { map: "na_peer4", needed: 200, free: 56 }), "{error}");
    assert_eq!(rig.dataplane.installed_policies(), [1].into());
    rig.dataplane.remove_policy(1).unwrap();
    rig.dataplane.install_policy(2, &large).unwrap();
    assert!(matches!(rig.dataplane.install_policy(2, &large), Err(BpfError::PolicyExists(2))));
    assert!(matches!(rig.dataplane.install_policy(0, &large), Err(BpfError::PolicyZero)));
}

#[test]
fn a_policy_that_fails_half_way_is_taken_back() {
    let rig = Rig::new();
    // A successor does not see what its predecessor writes after it took stock: the kernel says no, late.
    let predecessor = Dataplane::open(&config(&rig.root)).unwrap();
    let hosts: Vec<String> = (0..200).map(|host| format!("10.7.0.{host}/32")).collect();
    let peers: Vec<(&str, u32)> = hosts.iter().map(|host| (host.as_str(), 1)).collect();
    let large = policy(&peers, &[(1, any())]);
    predecessor.install_policy(1, &large).unwrap();
    let error = rig.dataplane.install_policy(2, &large).unwrap_err();
    assert!(matches!(error, BpfError::WriteMap { map: "na_peer4", .. }), "{error}");
    assert_eq!(Dataplane::open(&config(&rig.root)).unwrap().installed_policies(), [1].into());
}

#[test]
fn ids_out_of_range_and_without_record_are_refused() {
    let rig = Rig::new();
    let attachment = Attachment { mac: POD_MAC, addresses: Vec::new(), zone: 1, flags: Checks::default() };
    for id in [0, 64, u32::MAX] {
        let refused = |result: Result<(), BpfError>| {
            assert!(matches!(result, Err(BpfError::InvalidAttachment { max: 63, .. })), "{result:?}");
        };
        refused(rig.dataplane.put_attachment(id, &attachment));
        refused(rig.dataplane.bind_link(DEVICE, id));
        refused(rig.dataplane.set_policy(id, PolicyIds { ingress: 1, egress: 1 }));
        refused(rig.dataplane.remove_attachment(id));
    }
    assert!(matches!(rig.dataplane.bind_link(DEVICE, 9), Err(BpfError::UnknownAttachment(9))));
}

#[test]
fn a_foreign_map_at_a_pin_is_refused_and_left_alone() {
    let rig = Rig::new();
    let larger = Config { max_flows_v4: 2048, ..config(&rig.root) };
    let error = Dataplane::open(&larger).unwrap_err();
    assert!(
        matches!(
            &error,
            BpfError::ForeignMap { path, property: MapProperty::MaxEntries, expected: 2048, found: 1024 }
                if *path == rig.root.join("v1/na_ct4")
        ),
        "{error}"
    );
    fs::remove_file(rig.root.join("v1/na_ct4")).unwrap();
    let statistics = MapData::from_pin(rig.root.join("v1/na_stat")).unwrap();
    sys::pin(statistics.fd().as_fd(), &rig.root.join("v1/na_ct4")).unwrap();
    let error = Dataplane::open(&config(&rig.root)).unwrap_err();
    assert!(matches!(error, BpfError::ForeignMap { property: MapProperty::Type, .. }), "{error}");
    assert!(rig.root.join("v1/na_ct4").exists());
}

#[test]
fn a_missing_pin_is_made_again() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    fs::remove_file(rig.root.join("v1/na_ct6")).unwrap();
    fs::remove_file(rig.root.join("v1/prog/na_to_pod")).unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.policy(POD).unwrap(), rig.dataplane.policy(POD).unwrap());
    assert!(rig.root.join("v1/na_ct6").exists());
    assert!(rig.root.join("v1/prog/na_to_pod").exists());
}

/// Not a test of anything: prints what a packet costs. `cargo test --release -- --ignored --nocapture`.
#[test]
#[ignore = "prints nanoseconds per packet"]
#[allow(clippy::print_stdout, reason = "its whole purpose")]
fn nanoseconds_per_packet() {
    const REPEAT: u32 = 1_000_000;
    let print = |what: &str, rig: &Rig, hook, frame: &[u8]| {
        let once = rig.test_run(hook, frame, 1);
        let result = rig.test_run(hook, frame, REPEAT);
        println!("{what:44} {:>5} ns  verdict {}", result.duration.as_nanos(), once.return_value as i32);
    };
    let open = Rig::new();
    print("not isolated, to the pod", &open, ToPod, &to_pod().tcp(1, 2, ACK).frame());
    print("not isolated, from the pod, IPv4", &open, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    print("not isolated, from the pod, IPv6", &open, FromPod, &from_pod6().tcp(1, 2, ACK).frame());
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    print("established, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(1, 2, ACK).frame());
    print("established, from the pod, IPv4", &rig, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    print("established, to the pod, IPv6", &rig, ToPod, &to_pod6().tcp(1, 2, ACK).frame());
    print("established, from the pod, IPv6", &rig, FromPod, &from_pod6().tcp(1, 2, ACK).frame());
    // A SYN on a closing flow is judged and entered anew each time.
    let flags = SYN | tcp::FIN;
    print("new flow, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(3, 2, flags).frame());
    print("new flow, from the pod, IPv4", &rig, FromPod, &from_pod().tcp(4, 2, flags).frame());
    print("new flow, to the pod, IPv6", &rig, ToPod, &to_pod6().tcp(3, 2, flags).frame());
    rig.enforce(Some(&deny_all()), None);
    print("denied, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(9, 2, SYN).frame());
}
