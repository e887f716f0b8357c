//! Pins that outlive the agent, and refused policies and layouts.

use std::collections::BTreeMap;
use std::time::Instant;

use aya::Pod;
use aya::maps::{PerCpuArray, PerCpuValues};
use netattach::bpf::{FastStats, Program};
use netattach::spec::TcHook;
use netattach_tests::tools::report_skipped;

use super::*;

#[test]
fn a_successor_adopts_everything_and_disturbs_nothing() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    let ids = rig.dataplane.policies().of(POD).unwrap();
    let stats = rig.dataplane.stats(POD).unwrap();
    let program_id = |path: &str| SchedClassifier::from_pin(rig.pin(path)).unwrap().info().unwrap().id();
    let programs = ["prog/na_from_pod", "prog/na_to_pod"].map(program_id);

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(["prog/na_from_pod", "prog/na_to_pod"].map(program_id), programs);
    assert!(!successor.programs_changed().unwrap());
    assert_eq!(successor.policies().of(POD).unwrap(), ids);
    assert_eq!(successor.policies().installed(), [ids.ingress].into(), "deny-all has no entries");
    assert_eq!(successor.stats(POD).unwrap(), stats);
    assert_eq!(successor.attachments().bound(), [(DEVICE, POD)].into());
    let record = successor.attachments().records()[&POD];
    assert_eq!((record.mac.octets, record.host_ifindex, record.zone), (POD_MAC.0, DEVICE, 1));
    let addresses: Vec<IpAddr> = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    assert_eq!(successor.attachments().addresses(), [(POD, addresses.into_iter().collect())].into());
    assert!(successor.policies().allocate().unwrap() > ids.ingress.max(ids.egress));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()), "the flow lives");
}

/// A verifier of an older kernel may process ten times as many instructions as this one, and none accepts more than a
/// million. So there must be headroom.
#[test]
fn the_verifier_goes_through_little_of_each_program() {
    const MOST: u32 = 60_000;
    let rig = Rig::new();
    let verified = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let program = SchedClassifier::from_pin(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, program.info().unwrap().verified_instruction_count().unwrap())
    };
    let verified: BTreeMap<String, u32> = fs::read_dir(rig.pin("prog")).unwrap().map(verified).collect();
    assert!(verified.contains_key("na_from_pod") && verified.contains_key("na_par_to"), "{verified:?}");
    assert!(verified.values().all(|count| *count < MOST), "{verified:?}");
}

#[test]
fn other_programs_replace_the_pinned_ones_and_ask_to_be_attached() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    assert!(!rig.dataplane.programs_changed().unwrap(), "nothing was attached before the first start");
    // As if another object had been loaded, by an agent that was killed during a replacement.
    let old = SchedClassifier::from_pin(rig.pin("prog/na_to_pod")).unwrap();
    sys::pin(old.fd().unwrap().as_fd(), &rig.pin("prog/next_na_to_pod")).unwrap();
    rig.set_memory(|memory| memory.object_tag ^= 1);

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(successor.programs_changed().unwrap());
    let new = SchedClassifier::from_pin(rig.pin("prog/na_to_pod")).unwrap();
    assert_ne!(new.info().unwrap().id(), old.info().unwrap().id());
    let maps = |program: &SchedClassifier| program.info().unwrap().map_ids().unwrap().unwrap();
    let (before, now) = (maps(&old), maps(&new));
    let others = before.iter().zip(&now).filter(|(before, now)| before != now).count();
    assert_eq!((before.len(), others), (now.len(), 1), "the constants alone are an object's own");
    assert!(!rig.pin("prog/next_na_to_pod").exists());

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(successor.programs_changed().unwrap(), "until someone says that they are attached");
    successor.programs_attached().unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(!successor.programs_changed().unwrap());
    assert_eq!(successor.policies().of(POD).unwrap(), rig.dataplane.policies().of(POD).unwrap());
}

#[test]
fn policy_ids_are_not_reused_even_when_the_memory_is_lost() {
    let rig = Rig::new();
    let ids = rig.enforce(Some(&deny_all()), Some(&deny_all()));
    rig.set_memory(|memory| *memory = netattach_common::Config::default());
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.policies().allocate().unwrap(), ids.ingress.max(ids.egress) + 1);
    rig.set_memory(|memory| memory.next_policy_id = PolicyIds::HIGHEST);
    assert_eq!(successor.policies().allocate().unwrap(), PolicyIds::HIGHEST);
    assert!(matches!(successor.policies().allocate(), Err(BpfError::PolicyIdsUsedUp)));
    rig.set_memory(|memory| memory.next_policy_id = u32::MAX);
    assert!(matches!(successor.policies().allocate(), Err(BpfError::PolicyIdsUsedUp)));
}

#[test]
fn a_tcx_link_outlives_its_maker_and_takes_new_programs() {
    if !netattach::bpf::probe::has_tcx(DEVICE).unwrap() {
        return report_skipped("a tcx link", "this kernel has none; they came with Linux 6.6");
    }
    let rig = Rig::new();
    let root = rig.root.clone();
    let attach = |hook| {
        // SAFETY: only the network namespace of this short-lived thread changes; it opened no sockets.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        let link = sys::tcx_attach(
            rig.dataplane.programs().get(Program::At(hook)).unwrap(),
            DEVICE,
            TcHook::Ingress,
            None,
        )
        .unwrap();
        let twice = sys::tcx_attach(
            rig.dataplane.programs().get(Program::At(hook)).unwrap(),
            DEVICE,
            TcHook::Ingress,
            None,
        )
        .unwrap_err();
        assert_eq!(twice.kind(), std::io::ErrorKind::AlreadyExists);
        sys::pin(link.as_fd(), &root.join("link")).unwrap();
        drop(link);
        let link = sys::open_pin(&root.join("link")).unwrap();
        let info = sys::link_info(link.as_fd()).unwrap();
        assert_eq!((info.ifindex, info.program_id), (DEVICE, rig.from_pod.info().unwrap().id()));
        sys::link_update(link.as_fd(), rig.dataplane.programs().get(Program::At(ToPod)).unwrap()).unwrap();
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
    assert_eq!(successor.attachments().records(), [].into());
    assert_eq!(successor.attachments().addresses(), [].into());
    assert_eq!(successor.attachments().bound(), [].into());
    assert_eq!(successor.policies().of(POD).unwrap(), PolicyIds::default());
    assert_eq!(successor.stats(POD).unwrap(), Stats::default());
}

/// Adds to the counters of the attachment under test on the last processor, like a packet that was still in progress
/// there when the attachment was removed.
fn count_late<T: Pod>(rig: &Rig, map: &str, add: impl FnOnce(&mut T)) {
    let data = MapData::from_pin(rig.pin(map)).unwrap();
    let mut counters: PerCpuArray<_, T> = Map::from_map_data(data).unwrap().try_into().unwrap();
    let mut each = counters.get(&POD, 0).unwrap().to_vec();
    add(each.last_mut().unwrap());
    counters.set(POD, PerCpuValues::try_from(each).unwrap(), 0).unwrap();
}

/// The agent that has removed it may have ended in the meantime.
#[test]
fn what_packets_on_their_way_count_for_an_attachment_that_is_gone_goes_before_its_number_is_free() {
    let rig = Rig::isolated(None, Some(&allow_all()));
    let fast = rig.dataplane.fast_path().unwrap();
    for port in 1..=3 {
        assert_eq!(rig.run(FromPod, &from_pod().udp(port, 53).frame()), Ok(()));
    }
    let before = Instant::now();
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.dataplane.stats(POD).unwrap(), Stats::default());

    count_late(&rig, "na_stat", |stats: &mut Stats| stats.new_flows += 1);
    count_late(&rig, "na_fast_stat", |stats: &mut FastStats| stats.received.packets += 1);
    let data = MapData::from_pin(rig.pin("na_limit")).unwrap();
    let mut limits: Array<_, Limits> = Map::from_map_data(data).unwrap().try_into().unwrap();
    limits
        .set(POD, Limits { flows: Rate { arrival: 1, ..Rate::default() }, ..Limits::default() }, 0)
        .unwrap();
    // Two places; a write of the share has undone the second turn.
    let data = MapData::from_pin(rig.pin("na_own4")).unwrap();
    let mut places: HashMap<_, PlaceKey, FlowKey<Ip4>> =
        Map::from_map_data(data).unwrap().try_into().unwrap();
    let flow = places.get(&PlaceKey { attachment: POD, place: 0 }, 0).unwrap();
    for place in [3, 4] {
        places.insert(PlaceKey { attachment: POD, place }, flow, 0).unwrap();
    }
    rig.set_share(|share| share.next_v4 += 1);

    rig.dataplane.free_numbers(before).unwrap();
    assert!(rig.dataplane.attachments().resting_since(POD).is_some(), "it went after that");
    assert_eq!(rig.dataplane.stats(POD).unwrap(), Stats { new_flows: 1, ..Stats::default() });

    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert!(successor.attachments().resting_since(POD).is_some_and(|since| since > before));
    assert!(successor.attachments().has_resting());
    successor.wait_for_readers().unwrap();
    successor.free_numbers(Instant::now()).unwrap();
    assert!(!successor.attachments().has_resting());
    assert_eq!(successor.stats(POD).unwrap(), Stats::default());
    assert_eq!(fast.stats(POD).unwrap(), FastStats::default());
    assert_eq!(limits.get(&POD, 0).unwrap(), Limits::default());
    assert_eq!((rig.share(POD), rig.places().count()), (Share::default(), 0));
    assert!(!Dataplane::open(&config(&rig.root)).unwrap().attachments().has_resting());
}

#[test]
fn a_removed_policy_frees_its_entries_and_no_other() {
    let rig = Rig::new();
    let ids = rig.enforce(Some(&web_from_peer()), Some(&allow_all()));
    rig.dataplane.policies().set(POD, PolicyIds { ingress: 0, ..ids }).unwrap();
    rig.dataplane.policies().remove(&[ids.ingress].into()).unwrap();
    rig.dataplane.policies().remove(&[ids.ingress].into()).unwrap();
    assert_eq!(rig.dataplane.policies().installed(), [ids.egress].into());
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.policies().installed(), [ids.egress].into());
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
}

/// Rows: C94.
#[test]
fn a_policy_that_does_not_fit_is_refused_whole() {
    let rig = Rig::new();
    let hosts: Vec<String> = (0..200).map(|host| format!("10.7.0.{host}/32")).collect();
    let peers: Vec<(&str, u32)> = hosts.iter().map(|host| (host.as_str(), 1)).collect();
    let large = policy(&peers, &[(1, any())]);
    let small = web_from_peer();
    let install = |policies: &[(u32, &CompiledPolicy)]| rig.dataplane.policies().install(policies);
    let refused = install(&[(1, &large), (2, &large), (3, &small)]).unwrap();
    let [(2, error)] = refused.iter().collect::<Vec<_>>()[..] else { panic!("{refused:?}") };
    assert!(matches!(error, BpfError::OverCapacity { map: "na_peer4", needed: 200, free: 56 }), "{error}");
    assert_eq!(rig.dataplane.policies().installed(), [1, 3].into());
    rig.dataplane.policies().remove(&[1].into()).unwrap();
    assert_eq!(install(&[(2, &large)]).unwrap().len(), 0);
    assert!(matches!(install(&[(2, &large)]), Err(BpfError::PolicyExists(2))));
    assert!(matches!(install(&[(0, &large)]), Err(BpfError::PolicyZero)));
}

/// Rows: C94.
#[test]
fn a_policy_that_fails_half_way_is_taken_back() {
    let rig = Rig::new();
    // A successor's stock-taking does not see later writes of its predecessor: the kernel refuses, late.
    let predecessor = Dataplane::open(&config(&rig.root)).unwrap();
    let hosts: Vec<String> = (0..200).map(|host| format!("10.7.0.{host}/32")).collect();
    let peers: Vec<(&str, u32)> = hosts.iter().map(|host| (host.as_str(), 1)).collect();
    let large = policy(&peers, &[(1, any())]);
    predecessor.policies().install(&[(1, &large)]).unwrap();
    let error = rig.dataplane.policies().install(&[(2, &large)]).unwrap_err();
    assert!(matches!(error, BpfError::WriteMap { map: "na_peer4", .. }), "{error}");
    assert_eq!(Dataplane::open(&config(&rig.root)).unwrap().policies().installed(), [1].into());
}

#[test]
fn ids_out_of_range_and_without_record_are_refused() {
    let rig = Rig::new();
    let attachment = bare();
    for id in [0, 64, u32::MAX] {
        let refused = |result: Result<(), BpfError>| {
            assert!(matches!(result, Err(BpfError::InvalidAttachment { max: 63, .. })), "{result:?}");
        };
        refused(rig.dataplane.attachments().put(id, &attachment));
        refused(rig.dataplane.attachments().bind(DEVICE, id));
        refused(rig.dataplane.policies().set(id, PolicyIds { ingress: 1, egress: 1 }));
        refused(rig.dataplane.remove_attachment(id));
    }
    assert!(matches!(rig.dataplane.attachments().bind(DEVICE, 9), Err(BpfError::UnknownAttachment(9))));
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
                if *path == rig.pin("na_ct4")
        ),
        "{error}"
    );
    fs::remove_file(rig.pin("na_ct4")).unwrap();
    let statistics = MapData::from_pin(rig.pin("na_stat")).unwrap();
    sys::pin(statistics.fd().as_fd(), &rig.pin("na_ct4")).unwrap();
    let error = Dataplane::open(&config(&rig.root)).unwrap_err();
    assert!(matches!(error, BpfError::ForeignMap { property: MapProperty::Type, .. }), "{error}");
    assert!(rig.pin("na_ct4").exists());
}

#[test]
fn a_missing_pin_is_made_again() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    fs::remove_file(rig.pin("na_ct6")).unwrap();
    fs::remove_file(rig.pin("prog/na_to_pod")).unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(successor.policies().of(POD).unwrap(), rig.dataplane.policies().of(POD).unwrap());
    assert!(rig.pin("na_ct6").exists());
    assert!(rig.pin("prog/na_to_pod").exists());
}
