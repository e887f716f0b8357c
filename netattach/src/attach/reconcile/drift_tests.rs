//! Tests of the differences that count as drift.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use super::*;
use crate::attach::rig::{self, Maps};
use crate::ipam::host_local::{self, withheld::Withheld};
use crate::journal::Store;
use crate::plan::Plan;
use crate::plan::addressing::Others;
use crate::spec::Bridge;
use crate::step::{Outputs, StepRef};

fn link(index: u32, name: &str, kind: &str) -> LinkState {
    LinkState {
        index,
        name: name.to_owned(),
        kind: kind.to_owned(),
        mac: None,
        mtu: 1500,
        up: true,
        promiscuous: false,
        controller: None,
        hairpin: None,
        isolated: false,
        link: None,
        mode: None,
        group: 9,
        own: false,
        table: None,
    }
}

fn interface(index: u32, name: &str) -> Interface {
    Interface { name: name.to_owned(), index, mac: None, mtu: 1500 }
}

fn beneath(gateways: &[&str], made: bool) -> Beneath {
    let spec = Bridge { name: "br0".to_owned(), ..Bridge::default() };
    let gateways = gateways.iter().map(|it| it.parse().unwrap()).collect();
    Beneath { spec, link: interface(3, "br0"), gateways, others: Others::Refused, made }
}

/// A bridge that does not filter by VLAN.
fn found_as<'a>(link: &'a LinkState, addresses: &'a [IpNet]) -> bridges::CurrentBridge<'a> {
    bridges::CurrentBridge { link, addresses, filters_by_vlan: false }
}

fn end(port: Option<(Beneath, BridgePort)>) -> End {
    End { made: interface(7, "na0"), kind: "veth", group: 9, mtu: 1500, port, routed: None, netkit: None }
}

fn hairpin() -> BridgePort {
    BridgePort { bridge: "br0".to_owned(), hairpin: true, ..BridgePort::default() }
}

fn all(links: &[&LinkState]) -> BTreeMap<u32, LinkState> {
    links.iter().map(|link| (link.index, (*link).clone())).collect()
}

#[test]
fn each_difference_of_an_end_is_found() {
    let bridge = link(3, "br0", "bridge");
    let port = LinkState { controller: Some(3), hairpin: Some(true), ..link(7, "na0", "veth") };
    let of = |found: &LinkState| {
        differences(
            &end(Some((beneath(&[], false), hairpin()))),
            found,
            Some(found_as(&bridge, &[])),
            None,
            true,
        )
    };
    assert_eq!(of(&port), []);
    assert_eq!(of(&LinkState { name: "x".to_owned(), ..port.clone() }), [Difference::Renamed]);
    assert_eq!(of(&LinkState { mtu: 1400, ..port.clone() }), [Difference::Mtu(1400)]);
    assert_eq!(of(&LinkState { up: false, ..port.clone() }), [Difference::Down]);
    assert_eq!(of(&LinkState { hairpin: Some(false), ..port.clone() }), [Difference::Hairpin]);
    let out = LinkState { controller: None, hairpin: None, ..port.clone() };
    assert_eq!(of(&out), [Difference::NotInBridge(3), Difference::Hairpin]);
    let without = differences(&end(Some((beneath(&[], false), hairpin()))), &out, None, None, true);
    assert_eq!(without, [Difference::Bridge(Change::Gone)]);
    let unknown = End { mtu: 0, ..end(None) };
    assert_eq!(differences(&unknown, &LinkState { mtu: 1400, ..out.clone() }, None, None, true), []);
    assert_eq!(differences(&end(None), &out, None, None, false), [Difference::Addressing]);
    let routed = End { routed: Some(Addressing::default()), ..end(None) };
    let down = LinkState { up: false, ..out };
    assert_eq!(differences(&routed, &down, None, None, true), [Difference::Down, Difference::Addressing]);
}

#[test]
fn a_netkit_whose_policies_are_others_is_found() {
    use crate::spec::NetkitPolicy;
    let made = NetkitWays::default();
    let made_as = End { kind: "netkit", netkit: Some(made), ..end(None) };
    let of = |ways| {
        let found = LinkState { mode: Some(LinkMode::Netkit(ways)), ..link(7, "na0", "netkit") };
        differences(&made_as, &found, None, None, true)
    };
    assert_eq!(of(made), []);
    assert_eq!(of(NetkitWays { policy: NetkitPolicy::Drop, ..made }), [Difference::Policies(made)]);
    assert_eq!(of(NetkitWays { peer_policy: NetkitPolicy::Drop, ..made }), [Difference::Policies(made)]);
    let unknown = link(7, "na0", "netkit");
    assert_eq!(differences(&made_as, &unknown, None, None, true), []);
}

#[test]
fn a_port_that_got_out_of_its_vlans_or_its_isolation_is_found() {
    use crate::netlink::VlanUse;
    use crate::spec::PortVlans;
    let bridge = link(3, "br0", "bridge");
    let vlans = PortVlans { native: Some(100), ..PortVlans::default() };
    let wanted = BridgePort { isolated: true, vlans: Some(vlans), hairpin: false, ..hairpin() };
    let of = |found: &LinkState, vlans: &[(u16, bool)]| {
        let uses =
            vlans.iter().map(|(id, native)| (*id, VlanUse { pvid: *native, untagged: *native })).collect();
        differences(
            &end(Some((beneath(&[], false), wanted.clone()))),
            found,
            Some(found_as(&bridge, &[])),
            Some(&uses),
            true,
        )
    };
    let port = LinkState { controller: Some(3), isolated: true, ..link(7, "na0", "veth") };
    assert_eq!(of(&port, &[(100, true)]), []);
    assert_eq!(of(&port, &[(100, true), (7, false)]), [Difference::Vlans]);
    assert_eq!(of(&port, &[]), [Difference::Vlans]);
    assert_eq!(of(&LinkState { isolated: false, ..port.clone() }, &[(100, true)]), [Difference::Isolation]);
    let out = LinkState { controller: None, isolated: false, ..port };
    let all = [Difference::NotInBridge(3), Difference::Isolation, Difference::Vlans];
    assert_eq!(of(&out, &[]), all);
}

#[test]
fn a_port_is_open_that_reaches_whom_it_should_not() {
    let in_bridge = LinkState { controller: Some(3), ..link(7, "na0", "veth") };
    let own = LinkState { own: true, ..link(3, "br0", "bridge") };
    let links = all(&[&own, &link(4, "br1", "bridge")]);
    let opens = |difference| is_open(&in_bridge, &links, &[Difference::Mtu(1400), difference]);
    let open = [
        Difference::Isolation,
        Difference::Vlans,
        Difference::NotInBridge(4),
        Difference::Bridge(Change::Unfiltered(3)),
    ];
    assert_eq!(open.map(opens), [true; 4]);
    let shut = [
        Difference::Hairpin,
        Difference::Down,
        Difference::Renamed,
        Difference::Addressing,
        Difference::Bridge(Change::Down(3)),
        Difference::Bridge(Change::Gateways(3, Vec::new())),
        Difference::Bridge(Change::Unfiltered(4)),
    ];
    assert_eq!(shut.map(opens), [false; 7]);
    let out = LinkState { controller: None, ..in_bridge.clone() };
    assert!(!is_open(&out, &links, &[Difference::NotInBridge(3), Difference::Isolation, Difference::Vlans]));
}

#[test]
fn an_index_that_another_link_has_by_now_is_not_ours() {
    let ours = link(7, "na0", "veth");
    let find = |link: &LinkState| end(None).find(&all(&[link])).is_some();
    assert!(find(&ours) && find(&LinkState { name: "renamed".to_owned(), ..ours.clone() }));
    assert!(find(&LinkState { group: 0, ..ours.clone() }));
    assert!(!find(&LinkState { name: "other".to_owned(), group: 0, ..ours.clone() }));
    assert!(!find(&LinkState { kind: "dummy".to_owned(), ..ours.clone() }));
    assert!(!find(&LinkState { index: 8, ..ours }));
}

#[test]
fn a_bridge_lacks_what_it_has_nothing_in_the_place_of() {
    let up = link(3, "br0", "bridge");
    let nets = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect::<Vec<IpNet>>();
    let own = beneath(&["10.1.0.1/24", "fd00::1/64"], true);
    let of = |present: &[&str]| own.changes(Some(found_as(&up, &nets(present))));
    let lacks = |missing: &[&str]| vec![Change::Gateways(3, nets(missing))];
    assert_eq!(of(&["10.1.0.1/24", "fd00::1/64", "fe80::1/64"]), []);
    assert_eq!(of(&["10.1.0.1/24"]), lacks(&["fd00::1/64"]));
    assert_eq!(of(&[]), lacks(&["10.1.0.1/24", "fd00::1/64"]));
    assert_eq!(of(&["10.2.0.1/24", "fd00::1/64"]), [], "another gateway was forced on it");
    let down = LinkState { up: false, ..up.clone() };
    assert_eq!(own.changes(Some(found_as(&down, &[]))), [Change::Down(3)]);
    assert_eq!(own.changes(None), [Change::Gone]);
    let in_vlans =
        Beneath { spec: Bridge { vlan_filtering: true, ..own.spec.clone() }, ..beneath(&[], true) };
    assert_eq!(in_vlans.changes(Some(found_as(&up, &[]))), [Change::Unfiltered(3)]);
    assert_eq!(
        in_vlans.changes(Some(bridges::CurrentBridge { filters_by_vlan: true, ..found_as(&up, &[]) })),
        []
    );
    assert_eq!(
        in_vlans.changes(Some(found_as(&down, &[]))),
        [Change::Unfiltered(3), Change::Down(3)],
        "neither hides the other"
    );
    let all = [beneath(&[], false), beneath(&[], true), beneath(&["10.1.0.1/24"], false)];
    assert_eq!(all.map(|it| it.is_ours()), [false, true, true]);
}

/// Attaches a container, with a lease alone.
fn attach(engine: &Engine, container: &str, plan: Plan) {
    let mut outputs = Outputs::default();
    outputs.insert(StepRef(0, 0), rig::lease(engine, &plan));
    let key = rig::key(container);
    engine.registry().insert(Arc::new(Attached { key, plan, outputs, netns_cookie: None, planned: None }));
}

#[test]
fn a_lease_that_cannot_be_read_keeps_no_other_of_its_pool_from_being_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let maps = crate::sync::Arc::new(Maps::default());
    let engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), &maps);
    for (container, number) in [("a", 1), ("b", 2)] {
        attach(&engine, container, rig::plan(directory, container, number));
    }
    let pool = directory.join("pools/net");
    let _withheld = Withheld::new(&pool.join("10.1.0.2"));
    fs::remove_file(pool.join("10.1.0.3")).unwrap();
    assert_eq!(engine.without_lease().unwrap(), [rig::key("b")]);
    let taken = |container| engine.take_leases_back(&rig::key(container)).unwrap();
    assert_eq!(taken("b"), ["the lease of 10.1.0.3 was removed"]);
    assert_eq!(taken("a"), [""; 0]);
    assert_eq!(engine.without_lease().unwrap(), []);
}

/// Otherwise a bad block fills the log.
#[test]
fn the_log_warns_of_leases_that_cannot_be_read_only_when_they_are_others_than_before() {
    let told = UnreadLeases::default();
    let [net, other] = ["net", "other"].map(|name| ipam::Pool::directory("/pools", name));
    let errors = |names: &[&str]| -> Vec<ipam::Error> {
        let error = |name: &&str| {
            let (path, source) = (name.into(), std::io::ErrorKind::Other.into());
            ipam::Error::HostLocal(host_local::Error::Read { path, source })
        };
        names.iter().map(error).collect()
    };
    let many: Vec<String> = (0..=NAMED).map(|number| format!("10.1.1.{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for (pool, names, is_warning) in [
        (&net, &["10.1.0.2"][..], true),
        (&net, &["10.1.0.2"][..], false),
        (&other, &["10.1.0.2"][..], true),
        (&net, &["10.1.0.2", "10.1.0.3"][..], true),
        (&net, &["10.1.0.3"][..], true),
        (&net, &[][..], false),
        (&net, &["10.1.0.3"][..], true),
        (&net, &many[..NAMED], true),
        (&net, &many[..], true),
        (&net, &many[..], false),
    ] {
        assert_eq!(told.tell(pool, &errors(names)), is_warning, "{pool} {names:?}");
    }
    told.keep(&BTreeMap::from([(net.clone(), ())]));
    assert!(!told.tell(&net, &errors(&many)) && told.tell(&other, &errors(&["10.1.0.2"])));
}

/// Its lock is a directory meanwhile.
#[test]
fn the_log_warns_of_a_pool_that_cannot_be_read_until_it_can() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let maps = crate::sync::Arc::new(Maps::default());
    let engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), &maps);
    attach(&engine, "a", rig::plan(directory, "a", 1));
    let look = || (engine.without_lease().unwrap(), locked(&engine.unread_leases.0).len());
    assert_eq!(look(), (vec![], 0));
    let lock = directory.join("pools/net/lock");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    assert_eq!(look(), (vec![], 1));
    fs::remove_dir(&lock).unwrap();
    assert_eq!(look(), (vec![], 0));
}

#[test]
fn a_look_at_leases_passes_over_a_pool_that_another_process_has_locked_and_over_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let maps = crate::sync::Arc::new(Maps::default());
    let engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), &maps);
    for (container, number, network) in [("a", 1, "net"), ("b", 2, "net"), ("c", 3, "net"), ("z", 4, "other")]
    {
        let mut plan = rig::plan(directory, container, number);
        let Step::Lease(ipam::Config::HostLocal(config)) = &mut plan.attachments[0].steps[0] else {
            panic!("the first step is a lease of host-local")
        };
        config.network = network.to_owned();
        attach(&engine, container, plan);
    }
    assert_eq!(engine.without_lease().unwrap(), []);
    let pools = directory.join("pools");
    for removed in ["net/10.1.0.2", "other/10.1.0.2"] {
        fs::remove_file(pools.join(removed)).unwrap();
    }
    let lock = File::open(pools.join("net/lock")).unwrap();
    lock.lock().unwrap();
    let began = Instant::now();
    assert_eq!(engine.without_lease().unwrap(), [rig::key("z")]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    drop(lock);
    assert_eq!(engine.without_lease().unwrap(), [rig::key("a"), rig::key("z")]);
}
