//! One attachment under the real programs.

use std::time::Instant;

use super::*;

/// `lo`, the device that test runs pretend to be on: index 1 in every namespace.
pub(super) const DEVICE: u32 = 1;
/// The attachment under test.
pub(super) const POD: u32 = 7;
pub(super) const POD_V4: &str = "10.0.0.1";
pub(super) const POD_V6: &str = "fd00::1";
pub(super) const PEER_V4: &str = "10.0.0.2";
pub(super) const PEER_V6: &str = "fd00::2";

fn pin_below(root: &Path, name: &str) -> PathBuf {
    root.join(format!("v{LAYOUT_VERSION}")).join(name)
}

/// The verdict on a packet.
pub(super) type Outcome = Result<(), DropReason>;

pub(super) struct Rig {
    pub(super) root: PathBuf,
    pub(super) dataplane: Dataplane,
    pub(super) from_pod: SchedClassifier,
    pub(super) to_pod: SchedClassifier,
}

impl Drop for Rig {
    fn drop(&mut self) {
        let removed =
            remove_all_pins(&self.root).map_err(|error| netattach::error_chain::Chain(&error).to_string());
        // A second panic would hide the first.
        if !std::thread::panicking() {
            assert_eq!(removed, Ok(()));
        }
    }
}

impl Rig {
    /// An attachment with one address per family, everything checked, no policy.
    pub(super) fn new() -> Self {
        Self::sized(|config| config)
    }

    /// [`Rig::new`], with maps of another size.
    pub(super) fn sized(change: impl FnOnce(Config) -> Config) -> Self {
        let root = unused_root();
        let dataplane = Dataplane::open(&change(config(&root))).expect("open the dataplane");
        let program = |name: &str| {
            let path = pin_below(&root, &format!("prog/{name}"));
            SchedClassifier::from_pin(path).expect("open a pinned program")
        };
        let (from_pod, to_pod) = (program("na_from_pod"), program("na_to_pod"));
        let rig = Self { root, dataplane, from_pod, to_pod };
        rig.put(Checks { source_mac: true, source_address: true, ..Checks::default() });
        rig.dataplane.attachments().bind(DEVICE, POD).unwrap();
        rig
    }

    /// The path of a pin.
    pub(super) fn pin(&self, name: &str) -> PathBuf {
        pin_below(&self.root, name)
    }

    /// [`Rig::new`], with these policies.
    pub(super) fn isolated(ingress: Option<&CompiledPolicy>, egress: Option<&CompiledPolicy>) -> Self {
        let rig = Self::new();
        rig.enforce(ingress, egress);
        rig
    }

    pub(super) fn put(&self, flags: Checks) {
        let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
        let attachment = Attachment { addresses, flags, ..bare() };
        self.dataplane.attachments().put(POD, &attachment).unwrap();
    }

    pub(super) fn enforce(
        &self,
        ingress: Option<&CompiledPolicy>,
        egress: Option<&CompiledPolicy>,
    ) -> PolicyIds {
        let install =
            |compiled: Option<&CompiledPolicy>| compiled.map_or(0, |compiled| self.install(compiled));
        let ids = PolicyIds { ingress: install(ingress), egress: install(egress) };
        self.dataplane.policies().set(POD, ids).unwrap();
        ids
    }

    /// Writes a policy that is not referenced yet.
    pub(super) fn install(&self, compiled: &CompiledPolicy) -> u32 {
        let id = self.dataplane.policies().allocate().unwrap();
        assert_eq!(self.dataplane.policies().install(&[(id, compiled)]).unwrap().len(), 0);
        id
    }

    /// Runs a packet, and checks that exactly the counters of its outcome moved.
    pub(super) fn run(&self, side: Side, frame: &[u8]) -> Outcome {
        self.run_as(POD, side, frame)
    }

    pub(super) fn run_as(&self, counted_for: u32, side: Side, frame: &[u8]) -> Outcome {
        let before = self.dataplane.stats(counted_for).unwrap();
        let result = self.test_run(side, frame, 1);
        let after = self.dataplane.stats(counted_for).unwrap();
        let dropped = DropReason::ALL
            .iter()
            .copied()
            .find(|reason| after.drops[*reason as usize] > before.drops[*reason as usize]);
        let mut expected = Stats {
            new_flows: after.new_flows,
            flows_displaced: after.flows_displaced,
            records_withheld: after.records_withheld,
            records_lost: after.records_lost,
            ..before
        };
        let traffic = match (side, dropped) {
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

    pub(super) fn test_run(&self, side: Side, frame: &[u8], repeat: u32) -> aya::TestRunResult {
        let program = match side {
            FromPod => &self.from_pod,
            ToPod => &self.to_pod,
        };
        let options = TestRunOptions { data_in: Some(frame), repeat, ..TestRunOptions::new() };
        program.test_run(options).expect("run the program")
    }

    /// Frees the numbers of removed attachments like the agent: once no packet is in progress.
    pub(super) fn free_numbers(&self) {
        let now = Instant::now();
        self.dataplane.wait_for_readers().unwrap();
        self.dataplane.free_numbers(now).unwrap();
    }

    /// The flow table as the agent would read it.
    pub(super) fn flows(&self) -> HashMap<MapData, FlowKey<Ip4>, Flow> {
        let data = MapData::from_pin(self.pin("na_ct4")).unwrap();
        Map::from_map_data(data).unwrap().try_into().unwrap()
    }

    fn shares(&self) -> Array<MapData, Share> {
        let data = MapData::from_pin(self.pin("na_share")).unwrap();
        Map::from_map_data(data).unwrap().try_into().unwrap()
    }

    /// The places in the IPv4 flow table that flows have taken.
    pub(super) fn places(&self) -> impl Iterator<Item = PlaceKey> {
        let data = MapData::from_pin(self.pin("na_own4")).unwrap();
        let map: HashMap<_, PlaceKey, FlowKey<Ip4>> = Map::from_map_data(data).unwrap().try_into().unwrap();
        map.keys().map(Result::unwrap).collect::<Vec<_>>().into_iter()
    }

    /// An attachment's share of the flow table.
    pub(super) fn share(&self, id: u32) -> Share {
        self.shares().get(&id, 0).unwrap()
    }

    /// Changes the share of the attachment under test.
    pub(super) fn set_share(&self, change: impl FnOnce(&mut Share)) {
        let mut share = self.share(POD);
        change(&mut share);
        self.shares().set(POD, share, 0).unwrap();
    }

    /// Changes the configuration in the map `na_cfg`.
    pub(super) fn set_memory(&self, change: impl FnOnce(&mut netattach_common::Config)) {
        let data = MapData::from_pin(self.pin("na_cfg")).unwrap();
        let mut map: Array<_, netattach_common::Config> =
            Map::from_map_data(data).unwrap().try_into().unwrap();
        let mut memory = map.get(&0, 0).unwrap();
        change(&mut memory);
        map.set(0, memory, 0).unwrap();
    }

    /// The only IPv4 flow.
    pub(super) fn only_flow(&self) -> Flow {
        let flows: Vec<_> = self.flows().iter().map(|flow| flow.unwrap().1).collect();
        assert_eq!(flows.len(), 1, "{flows:?}");
        flows[0]
    }

    /// Makes every IPv4 flow this much older.
    pub(super) fn age(&self, seconds: u32) {
        let mut flows = self.flows();
        let entries: Vec<_> = flows.iter().map(Result::unwrap).collect();
        for (key, flow) in entries {
            let older = Flow { last_seen: flow.last_seen.wrapping_sub(seconds), ..flow };
            flows.insert(key, older, 0).unwrap();
        }
    }
}

/// An attachment with the pod's MAC address and no other setting.
pub(super) fn bare() -> Attachment {
    Attachment {
        mac: POD_MAC,
        addresses: Vec::new(),
        shared: Vec::new(),
        on_link: vec!["fd00::/64".parse().unwrap()],
        ethertypes: Vec::new(),
        zone: 1,
        flags: Checks::default(),
        vlans: BTreeSet::new(),
        limits: Limits::default(),
    }
}

pub(super) fn config(root: &Path) -> Config {
    Config {
        max_attachments: 64,
        max_addresses: 64,
        max_peers_v4: 256,
        max_peers_v6: 256,
        max_ports: 256,
        max_rules: 64,
        max_flows_v4: 1024,
        max_flows_v6: 1024,
        record_bytes: 65_536,
        ..Config::new(root)
    }
}

/// A directory on the BPF filesystem that no other test uses, mounting that filesystem where it is missing.
pub(super) fn unused_root() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    assert!(rustix::process::geteuid().is_root(), "these tests load BPF programs: run them as root");
    netattach::bpf::mount_bpffs(Path::new("/sys/fs/bpf")).unwrap();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    PathBuf::from(format!("/sys/fs/bpf/netattach-test-{}-{number}", std::process::id()))
}

/// A policy from peers with classes and classes with traffic; rule ids count from 1, and so do classes here: in the
/// maps they come after the class that allows nothing.
pub(super) fn policy(peers: &[(&str, u32)], ports: &[(u32, lookup::Traffic)]) -> CompiledPolicy {
    let numbered = || (1..).zip(ports);
    let number = |class: &u32| NOTHING + class;
    CompiledPolicy {
        peers: peers.iter().map(|(peer, class)| (peer.parse().unwrap(), number(class))).collect(),
        ports: numbered()
            .map(|(rule, (class, traffic))| (PortPrefix { class: number(class), traffic: *traffic }, rule))
            .collect(),
        rules: numbered()
            .map(|(rule, _)| (rule, Origin::Other(format!("test/policy rule {rule}"))))
            .collect(),
    }
}

pub(super) fn any() -> lookup::Traffic {
    lookup::Traffic::Any
}

pub(super) fn port(protocol: u8, port: u16) -> lookup::Traffic {
    lookup::Traffic::Ports { protocol, port, bits: 16 }
}

pub(super) fn deny_all() -> CompiledPolicy {
    CompiledPolicy::default()
}

pub(super) fn allow_all() -> CompiledPolicy {
    policy(&[("0.0.0.0/0", 1), ("::/0", 1)], &[(1, any())])
}

/// Ingress as for a pod whose node is the peer: anything from the node, and a port of UDP that a policy names.
pub(super) fn from_the_node() -> CompiledPolicy {
    let mut ingress = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, any()), (1, port(17, 53))]);
    ingress.rules.insert(1, Origin::OfNode("the pod's own node"));
    ingress
}

/// TCP 80 for the peer, in both families.
pub(super) fn web_from_peer() -> CompiledPolicy {
    policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, port(6, 80))])
}

pub(super) fn from_pod() -> Packet {
    Packet::between(POD_V4, PEER_V4)
}

pub(super) fn to_pod() -> Packet {
    Packet::between(PEER_V4, POD_V4)
}

pub(super) fn from_pod6() -> Packet {
    Packet::between(POD_V6, PEER_V6)
}

pub(super) fn to_pod6() -> Packet {
    Packet::between(PEER_V6, POD_V6)
}

pub(super) const SYN: u8 = tcp::SYN;
pub(super) const RST: u8 = tcp::RST;
pub(super) const ACK: u8 = tcp::ACK;
pub(super) const INIT: u8 = 1;
pub(super) const INIT_ACK: u8 = 2;
