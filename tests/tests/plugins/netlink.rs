//! Links, addresses, routes and filters on the kernel, each test in its own namespaces.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;

use anyhow::Result;
use netattach::netlink::{Error, Handle, MOST_IN_POD};
use netattach::spec::{Addressing, Bridge, BridgePort, LinkMode, Macvlan, MacvlanMode, Pace, Route, Veth};
use netattach_tests::node::ip;
use netattach_tests::raw::RawSocket;
use netattach_tests::traffic::PATIENCE;
use netattach_tests::{Namespace, tools};

const GROUP: u32 = 77;

fn veth(host: &str, pod: &str) -> Veth {
    Veth {
        host_name: host.into(),
        pod_name: pod.into(),
        mtu: Some(1400),
        mac: None,
        group: GROUP,
        port: None,
    }
}

#[test]
fn a_veth_is_created_in_place_as_a_bridge_port() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    let bridge = node.ensure_bridge(&Bridge { name: "br0".into(), ..Bridge::default() })?;
    assert!(bridge.created);
    let mac = "02:00:00:00:00:07".parse()?;
    let spec = Veth {
        mac: Some(mac),
        port: Some(BridgePort { bridge: "br0".into(), hairpin: true, ..BridgePort::default() }),
        ..veth("na0", "eth0")
    };
    let (near, far) = node.create_veth(&spec, Some(bridge.link.index), pod.netns().as_fd(), &mut inside)?;
    assert_eq!((&near, &far), (&node.link("na0")?, &inside.link("eth0")?));
    assert_eq!(
        (near.name.as_str(), near.up, near.controller, near.mtu),
        ("na0", true, Some(bridge.link.index), 1400)
    );
    assert_eq!((far.mac, far.up, far.mtu, far.group), (Some(mac), false, 1400, GROUP));
    assert!(
        !node.ensure_bridge(&Bridge { name: "br0".into(), promiscuous: true, ..Bridge::default() })?.created
    );
    assert!(node.link("br0")?.promiscuous);
    Ok(())
}

/// A pod that administrates its network can create as many routes there as fit into memory; a bounded handle reads
/// only that many.
#[test]
fn a_bounded_handle_reads_no_more_than_its_bound() -> Result<()> {
    let pod = Namespace::new()?;
    pod.loopback_up()?;
    let directory = tempfile::tempdir()?;
    let many = |first: usize, count: usize| -> Result<()> {
        let route = |number: usize| {
            let [_, a, b, c] = u32::try_from(number)?.to_be_bytes();
            Ok(format!("route add 10.{a}.{b}.{c}/32 dev lo\n"))
        };
        let batch = directory.path().join("batch");
        fs::write(&batch, (first..first + count).map(route).collect::<Result<String>>()?)?;
        ip(&pod, &["-batch", &batch.to_string_lossy()])
    };
    many(0, MOST_IN_POD / 2)?;
    assert_eq!(Handle::open_in(pod.netns())?.routes()?.len(), MOST_IN_POD / 2);
    many(MOST_IN_POD / 2, MOST_IN_POD)?;
    let error = Handle::open_in(pod.netns())?.routes().unwrap_err();
    assert!(matches!(error, Error::TooMany("RTM_GETROUTE", MOST_IN_POD)), "{error}");
    assert_eq!(pod.run(Handle::open)?.routes()?.len(), 3 * MOST_IN_POD / 2);
    Ok(())
}

/// Whatever their numbers, and without a list: rules of one address for other tables, and of other addresses, stay.
#[test]
fn rules_of_an_address_and_a_table_are_removed_by_these_alone() -> Result<()> {
    let pod = Namespace::new()?;
    let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.2".parse()?, "fd00::2".parse()?);
    for (family, words) in [
        ("-4", "from 10.0.0.2 lookup 100 priority 50"),
        ("-4", "from 10.0.0.2 lookup 100 priority 60"),
        ("-4", "from 10.0.0.2 lookup 101 priority 40"),
        ("-4", "from 10.0.0.0/24 lookup 100 priority 30"),
        ("-4", "from 10.0.0.3 lookup 100 priority 20"),
        ("-6", "from fd00::2 lookup 100 priority 70"),
        ("-6", "from fd00::3 lookup 100 priority 10"),
    ] {
        ip(&pod, &[&[family, "rule", "add"][..], &words.split(' ').collect::<Vec<_>>()].concat())?;
    }
    for _ in 0..2 {
        let mut inside = Handle::open_in(pod.netns())?;
        inside.ensure_source_rules_absent(&[(v4, 100), (v6, 100), (v6, 101)])?;
        let left: BTreeSet<_> = inside.rules()?.iter().map(|it| (it.source, it.table, it.priority)).collect();
        let expected = [(v4, 101, 40), ("10.0.0.3".parse()?, 100, 20), ("fd00::3".parse()?, 100, 10)];
        assert_eq!(left, expected.into());
        assert!(inside.tables_in_use()?.contains(&100), "that of the block");
    }
    Ok(())
}

#[test]
fn a_bridge_name_that_is_taken_by_another_kind_is_refused() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    node.create_veth(&veth("na0", "eth0"), None, pod.netns().as_fd(), &mut inside)?;
    let error = node.ensure_bridge(&Bridge { name: "na0".into(), ..Bridge::default() }).unwrap_err();
    assert!(matches!(error, Error::WrongKind { .. }), "{error}");
    Ok(())
}

#[test]
fn a_macvlan_may_have_a_name_that_the_node_uses() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    let parent = node.ensure_bridge(&Bridge { name: "eth0".into(), ..Bridge::default() })?.link;
    let spec = Macvlan {
        pod_name: "eth0".into(),
        parent: None,
        mode: MacvlanMode::Private,
        mtu: None,
        mac: None,
        group: GROUP,
        broadcast_queue: Some(2000),
        tap: false,
        in_pod: false,
    };
    let made = node.create_macvlan(&spec, &parent, pod.netns().as_fd(), &mut inside)?;
    assert_eq!(made, inside.link("eth0")?);
    assert_eq!((made.kind.as_str(), made.mode), ("macvlan", Some(LinkMode::Macvlan(MacvlanMode::Private))));
    let again = node.create_macvlan(&spec, &parent, pod.netns().as_fd(), &mut inside).unwrap_err();
    assert!(again.already_exists(), "{again}");
    let other = Macvlan { pod_name: "net1".into(), broadcast_queue: None, ..spec };
    let made = node.create_macvlan(&other, &parent, pod.netns().as_fd(), &mut inside)?;
    assert_eq!(made, inside.link("net1")?);
    Ok(())
}

#[test]
fn an_interface_is_configured_in_one_go_and_read_back() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    node.create_veth(&veth("na0", "eth0"), None, pod.netns().as_fd(), &mut inside)?;
    let index = inside.link("eth0")?.index;
    let addressing = Addressing {
        addresses: vec!["10.1.0.2/24".parse()?, "fd00::2/64".parse()?],
        routes: vec![
            Route::via("0.0.0.0/0".parse()?, "10.1.0.1".parse()?),
            Route { mtu: Some(1300), ..Route::via("::/0".parse()?, "fd00::1".parse()?) },
        ],
        ..Addressing::default()
    };
    inside.configure(index, &addressing)?;
    let mut found = inside.addresses(index)?;
    found.retain(|net| !net.addr().to_string().starts_with("fe80"));
    assert_eq!(found, addressing.addresses);
    let mut defaults = inside.routes()?;
    defaults.retain(|route| route.destination.prefix_len() == 0);
    assert_eq!(
        defaults.iter().map(|route| (route.gateway, route.interface)).collect::<Vec<_>>(),
        [(Some("10.1.0.1".parse()?), Some(index)), (Some("fd00::1".parse()?), Some(index))]
    );
    assert_eq!(inside.default_route_interface()?, index);
    Ok(())
}

/// The kernel attaches the queue of the end that came up first after a delay: without waiting, some of these frames are
/// lost.
#[test]
fn a_link_with_a_carrier_loses_nothing() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    for number in 0..40 {
        let (near, far) = (format!("na{number}"), format!("net{number}"));
        let ends = node.create_veth(&veth(&near, &far), None, pod.netns().as_fd(), &mut inside)?;
        let frame =
            [[0xff; 12].as_slice(), &[0x88, 0xb5], format!("the first by {near}").as_bytes()].concat();
        let (sender, receiver) = (RawSocket::queued(&host, &near)?, RawSocket::open(&pod, &far)?);
        assert!(receiver.frames().is_err(), "the far end is down");
        inside.configure(ends.1.index, &Addressing::default())?;
        assert!(node.await_carrier(ends.0.index)?);
        sender.send(&frame)?;
        assert_eq!(receiver.frames_until(&frame[14..], PATIENCE)?.last(), Some(&frame), "{near}");
    }
    Ok(())
}

#[test]
fn a_link_can_be_told_to_announce_its_addresses() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    node.create_veth(&veth("na0", "eth0"), None, pod.netns().as_fd(), &mut inside)?;
    let look = || pod.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/conf/eth0/arp_notify"));
    assert_eq!(look()?, "0\n");
    let index = inside.link("eth0")?.index;
    let announced = Addressing { announce_v4: true, ..Addressing::default() };
    inside.configure(index, &announced)?;
    assert_eq!(look()?, "1\n");
    Ok(())
}

#[test]
fn all_links_of_a_pod_go_in_one_request() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    let mut indices = Vec::new();
    for name in ["net0", "net1", "net2", "net3"] {
        let near = name.replace("net", "na");
        let ends = node.create_veth(&veth(&near, name), None, pod.netns().as_fd(), &mut inside)?;
        indices.push(ends.1.index);
    }
    // One link has left the group.
    inside.set_group(indices[3], 0)?;
    for _ in 0..2 {
        let outcomes = inside.delete_links(Some(GROUP), &indices)?;
        assert!(outcomes.len() == 4 && outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert_eq!(inside.links()?.len(), 1, "only lo is left in the pod");
        assert_eq!(node.links()?.len(), 1, "only lo is left on the node");
    }
    Ok(())
}

/// `lo` is of no kind that the kernel deletes.
#[test]
fn what_cannot_be_deleted_keeps_no_other_link_of_its_group() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    let mut inside = Handle::open_in(pod.netns())?;
    let (_, far) = node.create_veth(&veth("na0", "net0"), None, pod.netns().as_fd(), &mut inside)?;
    let lo = inside.link("lo")?.index;
    inside.set_group(lo, GROUP)?;
    let outcomes = inside.delete_links(Some(GROUP), &[lo, far.index])?;
    assert_eq!(outcomes.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true], "{outcomes:?}");
    assert_eq!(inside.links()?.into_iter().map(|link| link.name).collect::<Vec<_>>(), ["lo"]);
    Ok(())
}

#[test]
fn a_device_is_paced_replaced_and_shown() -> Result<()> {
    let (host, pod) = (Namespace::new()?, Namespace::new()?);
    let mut node = Handle::open_in(host.netns())?;
    assert!(node.has_pacing()?, "this kernel has tbf");
    let mut inside = Handle::open_in(pod.netns())?;
    let (near, _) = node.create_veth(&veth("na0", "eth0"), None, pod.netns().as_fd(), &mut inside)?;
    assert_eq!(node.find_pace(near.index)?, None);
    let slow = Pace { rate: 1_000_000, burst: 10_000, queue: 100_000 };
    // More than fits in 32 bits.
    let fast = Pace { rate: 12_500_000_000, burst: 2_000_000, queue: 200_000_000 };
    for pace in [slow, slow, fast] {
        node.ensure_paced(near.index, &pace)?;
        assert_eq!(node.find_pace(near.index)?, Some((pace.rate, pace.queue)));
    }
    let gone = near.index + 100;
    assert!(node.ensure_paced(gone, &slow).unwrap_err().not_found());
    assert!(node.find_pace(gone).unwrap_err().not_found());
    Ok(())
}

#[test]
fn a_device_of_another_namespace_beneath_a_vlan_is_not_taken_for_one_of_this() -> Result<()> {
    if !tools::has_driver("vlan") {
        let test = "a_device_of_another_namespace_beneath_a_vlan_is_not_taken_for_one_of_this";
        tools::report_skipped(test, "this kernel has no VLANs");
        return Ok(());
    }
    let (there, here) = (Namespace::new()?, Namespace::new()?);
    let bridge = Bridge { name: "br0".into(), ..Bridge::default() };
    let lower = Handle::open_in(there.netns())?.ensure_bridge(&bridge)?.link.index;
    let mut node = Handle::open_in(here.netns())?;
    let own = node.ensure_bridge(&bridge)?.link.index;
    assert_eq!(lower, own);
    let vlan = |namespace: &Namespace, on: &str, name: &str, id: &str| {
        ip(namespace, &["link", "add", "link", on, "name", name, "type", "vlan", "id", id])
    };
    vlan(&there, "br0", "moved", "100")?;
    ip(&there, &["link", "set", "moved", "netns", &here.task()])?;
    vlan(&here, "moved", "in-moved", "101")?;
    vlan(&here, "br0", "outer", "5")?;
    vlan(&here, "outer", "inner", "6")?;
    let [moved, within, outer, inner] = ["moved", "in-moved", "outer", "inner"].map(|name| node.link(name));
    let (moved, within, outer, inner) = (moved?, within?, outer?, inner?);
    assert_eq!(node.trunks(&moved)?, []);
    assert_eq!(node.trunks(&within)?, [(moved.index, 101)]);
    assert_eq!(node.trunks(&outer)?, [(own, 5)]);
    assert_eq!(node.trunks(&inner)?, [(outer.index, 6), (own, 5)]);
    let bridge = node.link("br0")?;
    assert_eq!(node.trunks(&bridge)?, []);
    Ok(())
}
