//! Ways of a device back to the node, with and without a record.

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;

use super::function::{is_to_be_set, ways_back};
use super::restore::conduct_at_home;
use super::unrecorded::{came_home, free_name, give_back_unrecorded, lost_address};
use super::*;
use crate::attach::device::DeviceError;
use crate::attach::device::identity::tests::{device, mac, port};
use crate::attach::device::left_programs::LeftError;
use crate::attach::device::take_device::home;
use crate::mac::Mac;
use crate::netlink::DeviceState;
use crate::netns::within;
use crate::spec::{
    Bridge, Conduct, DeviceId, Macvlan, OWN_GROUPS, Properties, Reception, Veth, VirtualFunction,
};

fn vf(name: &str) -> Device {
    Device {
        pod_name: "net1".to_owned(),
        id: DeviceId::Name(name.to_owned()),
        userspace: None,
        function: Some(VirtualFunction { physical: "none".to_owned(), number: 0 }),
        rdma: None,
        switchdev: false,
    }
}

fn refused() -> Result<Netns, NetnsError> {
    Err(NetnsError::Make(io::Error::from_raw_os_error(libc::ENOSPC)))
}

/// Rows: SRV-back.
#[test]
fn a_vf_goes_by_a_namespace_of_its_own_only_if_it_can_be_made_and_the_kernel_would_bring_it_home() {
    let made = |is_first, make: fn() -> Result<Netns, NetnsError>| {
        namespace_between(&vf("x"), is_first, make).is_some()
    };
    assert!(made(true, Netns::private));
    assert!(!made(true, refused));
    assert!(!made(false, || unreachable!()));
}

/// Rows: SRV-back.
#[test]
fn a_vf_has_the_address_again_that_its_card_had_set_or_chooses_one() {
    let mac = |last| Mac([2, 0, 0, 0, 0, last]);
    let none = Mac([0; 6]);
    assert_eq!(ways_back(none, Some(mac(1))), [none, mac(1)]);
    assert_eq!(ways_back(mac(2), Some(mac(1))), [none, mac(2), mac(1)]);
    assert_eq!(ways_back(mac(1), Some(mac(1))), [none, mac(1)]);
    assert_eq!(ways_back(none, None), [none]);
    assert_eq!(ways_back(mac(2), None), [mac(2), none]);
    // Once the VF has its own address back, what the card had set before.
    for shown in [Some(none), Some(mac(1)), None] {
        assert!(is_to_be_set(mac(2), shown));
    }
    assert!(!is_to_be_set(mac(2), Some(mac(2))), "it may be the VF's choice");
    assert!(!is_to_be_set(none, Some(mac(1))));
}

/// How a pod has its device send and receive.
const OF_POD: Conduct =
    Conduct { broadcast: Some(Mac([2, 0, 0, 0, 0, 0x99])), arp: false, multicast: false, mode: 1, queue: 1 };

/// A device of the node that a pod has, and how it was before. Its other end is elsewhere.
struct Taken {
    node: Netns,
    pod: Netns,
    _elsewhere: Netns,
    device: Device,
    before: DeviceState,
    /// In the pod.
    index: u32,
}

impl Taken {
    fn new() -> Self {
        let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
        let mut host = Handle::open_in(&node).unwrap();
        let veth = Veth {
            host_name: "card".to_owned(),
            pod_name: "wire".to_owned(),
            mtu: None,
            mac: None,
            group: 5,
            port: None,
        };
        let mut far = Handle::open_in(&elsewhere).unwrap();
        host.create_veth(&veth, None, elsewhere.as_fd(), &mut far).unwrap();
        Self::in_pod([node, pod, elsewhere])
    }

    /// A macvlan on the node's device `wire`, with its MTU of 9000.
    fn on_wire() -> Self {
        let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
        let [mut host, mut same] = [(); 2].map(|()| Handle::open_in(&node).unwrap());
        let (name, mtu) = ("wire".to_owned(), Some(9000));
        let wire = Bridge { name: name.clone(), mtu, promiscuous: false, vlan_filtering: false };
        let wire = host.ensure_bridge(&wire).unwrap().link;
        let macvlan = Macvlan { group: 5, ..Macvlan::plain("card", &name) };
        host.create_macvlan(&macvlan, &wire, node.as_fd(), &mut same).unwrap();
        Self::in_pod([node, pod, elsewhere])
    }

    fn in_pod([node, pod, elsewhere]: [Netns; 3]) -> Self {
        let mut host = Handle::open_in(&node).unwrap();
        let card = host.link("card").unwrap().index;
        host.ensure_up(card).unwrap();
        let before = host.device_named("card").unwrap().unwrap();
        // The pod has given it a group of ours.
        host.move_device(card, pod.as_fd(), "net1", Some("card"), OWN_GROUPS | 7).unwrap();
        let mut inside = Handle::open_in(&pod).unwrap();
        let index = inside.link("net1").unwrap().index;
        inside.set_conduct(index, &OF_POD).unwrap();
        inside.set_queue(index, OF_POD.queue).unwrap();
        Self { node, pod, _elsewhere: elsewhere, device: vf("card"), before, index }
    }

    fn give_back<B, T>(&self, ways: Ways<B, T>) -> Result<(), StepError>
    where
        B: FnOnce() -> Option<Netns>,
        T: Fn(&mut Handle, &Home, u32) -> Result<(), StepError>,
    {
        let claim = Claim {
            device: "card".to_owned(),
            generation: 1,
            home: Some(home(self.before.clone(), false)),
            settings: None,
            physical: None,
            representor: None,
            is_back: false,
        };
        let end = PodEnd::In { netns: &self.pod, made: Some(self.index), others: &[] };
        let mut host = Handle::open_in(&self.node).unwrap();
        within(&self.node, || give_back_by(&mut host, &self.device, &claim, end, ways)).unwrap()
    }

    fn on_node(&self) -> DeviceState {
        Handle::open_in(&self.node).unwrap().device_named("card").unwrap().unwrap()
    }

    /// A macvlan of the pod's on the device, with a handle there.
    fn with_macvlan(&self) -> (Handle, u32) {
        let [mut inside, mut same] = [(); 2].map(|()| Handle::open_in(&self.pod).unwrap());
        let (card, lan) = (inside.link("net1").unwrap(), Macvlan::plain("lan", "net1"));
        let made = inside.create_macvlan(&lan, &card, self.pod.as_fd(), &mut same).unwrap();
        (inside, made.index)
    }

    fn is_in_pod(&self) -> bool {
        Handle::open_in(&self.pod).unwrap().device_named("net1").unwrap().is_some()
    }
}

/// Rows: SRV-back, HDV-conduct.
#[test]
fn a_vf_comes_home_by_either_way_as_it_was() {
    for make in [Netns::private, refused] {
        let taken = Taken::new();
        let between = || namespace_between(&taken.device, true, make);
        taken.give_back(Ways { between, take_off: left_programs::take_off }).unwrap();
        let as_before = |it: &DeviceState| {
            let link = &it.link;
            (link.up, link.mtu, link.mac, link.group, it.alias.clone(), it.conduct)
        };
        assert_eq!(as_before(&taken.on_node()), as_before(&taken.before));
        assert_ne!(taken.before.conduct, OF_POD);
        assert!(!taken.is_in_pod());
    }
}

/// The kernel may bring a device home that its pod had made promiscuous, and whose name there was the node's.
#[test]
fn a_device_that_has_its_name_and_mtu_receives_no_more_than_others_either() {
    let taken = Taken::new();
    let give_back = || taken.give_back(Ways { between: || None, take_off: left_programs::take_off });
    give_back().unwrap();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let all = Properties { promisc: Some(true), allmulti: Some(true), ..Properties::default() };
    host.set_properties("card", &all).unwrap();
    give_back().unwrap();
    let found = host.properties("card").unwrap();
    assert_eq!((found.promisc, found.allmulti), (Some(false), Some(false)));
    assert!(taken.on_node().link.up);
}

/// As systemd-networkd has it set once (`Promiscuous=`, `AllMulticast=`), for a capture or a multicast router.
///
/// Rows: HDV-conduct.
#[test]
fn a_device_that_received_frames_of_others_on_the_node_does_so_again() {
    for wanted in [(true, true), (true, false), (false, true)] {
        let mut taken = Taken::new();
        let (promiscuous, all_multicast) = wanted;
        taken.before.reception = Reception { promiscuous, all_multicast };
        for _ in 0..2 {
            taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
            let found = taken.on_node();
            assert_eq!((found.reception, found.link.up), (taken.before.reception, true));
        }
    }
}

/// Rows: HDV-altname.
#[test]
fn a_device_comes_home_although_its_names_in_the_pod_are_no_texts_or_beyond_number() {
    let many: Vec<String> = (0..496).map(|number| format!("{number:0127}")).collect();
    for (name, others) in [("\u{f7ff}", &many[..]), ("n\u{f780}", &["\u{f7f0}".to_owned()])] {
        let taken = Taken::new();
        let mut inside = Handle::open_in(&taken.pod).unwrap();
        inside.rename(taken.index, name).unwrap();
        inside.set_alias(taken.index, "\u{f7fe}").unwrap();
        inside.add_other_names(taken.index, others).unwrap();
        taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
        let back = taken.on_node();
        assert_eq!((back.alias, back.other_names), (None, Vec::new()), "{name}");
        assert_eq!(inside.links().unwrap().len(), 1, "lo alone");
    }
}

/// Rows: HDV-above.
#[test]
fn what_is_on_a_device_goes_although_it_cannot_be_told_what_it_is_on() {
    let taken = Taken::new();
    let (mut inside, lan) = taken.with_macvlan();
    inside.give_sources(lan, 6_000);
    taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
    assert!(!taken.is_in_pod());
    assert_eq!(inside.links().unwrap().len(), 1, "lo alone");
    assert_eq!(taken.on_node().link.index, taken.before.link.index);
}

/// Rows: HDV-impossible.
#[test]
fn what_a_device_had_and_cannot_have_any_more_does_not_keep_it_from_coming_home() {
    let taken = Taken::on_wire();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let wire = host.link("wire").unwrap().index;
    // The kernel lowers that of what is on it as well.
    host.set_mtu(wire, 1500).unwrap();
    let as_is = |it: &DeviceState| (it.link.up, it.link.mtu, it.link.group, it.alias.clone());
    let give_back = || taken.give_back(Ways { between: || None, take_off: left_programs::take_off });
    assert_eq!(as_is(&taken.before), (true, 9000, 5, None));
    give_back().unwrap();
    let back = taken.on_node();
    assert_eq!((as_is(&back), taken.is_in_pod()), ((true, 1500, 5, None), false));
    // As the kernel brings a card home, under the name that it had in its pod.
    host.set_down(back.link.index).unwrap();
    host.rename(back.link.index, "net1").unwrap();
    host.set_alias(back.link.index, "card").unwrap();
    give_back().unwrap();
    assert_eq!(as_is(&taken.on_node()), (true, 1500, 5, None));

    // No macvlan is up with the address of what is beneath it.
    let taken = Taken::on_wire();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let wire = host.link("wire").unwrap().index;
    host.set_mac(wire, taken.before.link.mac.unwrap()).unwrap();
    taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
    assert_eq!(as_is(&taken.on_node()), (false, 9000, 5, None));
}

/// Rows: HDV-alias.
#[test]
fn a_free_name_is_no_devices_by_another_name_either() {
    assert_eq!(free_name(&[]), "dev0");
    let second = DeviceState { other_names: vec!["dev1".to_owned()], ..port(5, "card", None) };
    let present = [port(4, "dev0", None), second, port(6, "dev3", None)];
    assert_eq!(free_name(&present), "dev2");
}

/// Rows: HDV-mac-back.
#[test]
fn a_device_without_a_record_has_lost_the_address_that_it_was_made_with_if_it_has_another() {
    let lost = |permanent, own| {
        let mut found = port(4, "card", permanent);
        found.link.mac = own;
        lost_address(&found)
    };
    assert_eq!(lost(mac(1), mac(2)), mac(1));
    assert_eq!(lost(mac(1), mac(1)), None);
    assert_eq!(lost(None, mac(2)), None);
}

/// Rows: HDV-conduct.
#[test]
fn a_device_of_which_nobody_has_noted_it_sends_and_receives_as_its_kind_does() {
    let broadcast = Some(Mac([0xff; 6]));
    let usual = Conduct { broadcast, arp: true, multicast: true, mode: 0, queue: OF_POD.queue };
    let as_noted = Conduct { arp: false, ..usual };
    let at_home = |kind, own, noted| {
        let mut found = device(4, "card", (kind, None));
        (found.link.mac, found.conduct) = (own, OF_POD);
        conduct_at_home(&Home { conduct: noted, ..home(found.clone(), false) }, &found)
    };
    assert_eq!(at_home("", mac(1), Some(as_noted)), as_noted);
    for kind in ["", "veth", "macvlan", "macvtap", "vlan"] {
        assert_eq!(at_home(kind, mac(1), None), usual, "{kind}");
    }
    // The kernel makes a dummy without ARP; a card may be none of Ethernet.
    assert_eq!((at_home("dummy", mac(1), None), at_home("", None, None)), (OF_POD, OF_POD));
}

/// The node could not list its links with it. The pod gives it the name and an alias, as a device that was taken has.
#[test]
fn what_a_pod_has_given_more_than_can_be_told_does_not_go_to_the_node() {
    let taken = Taken::new();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let (mut inside, lan) = taken.with_macvlan();
    inside.set_alias(lan, "of the node").unwrap();
    let mut is_in_pod_after = |sources| {
        inside.give_sources(lan, sources);
        let of = ("c1", "lan");
        let unrecorded = Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 };
        let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
        given.unwrap().unwrap();
        inside.find_link("lan").unwrap().is_some()
    };
    assert!(is_in_pod_after(6_000));
    let kept = Home { link: Some(1_000_000), ..home(inside.device_by_index(lan).unwrap().unwrap(), false) };
    let found = within(&taken.node, || find_in_pod(&mut host, &taken.pod, (&kept, Some(lan)), "lan"));
    assert!(found.unwrap().unwrap().is_none());
}

/// Rows: HDV-programs.
#[test]
fn a_device_without_a_record_is_found_again_while_a_program_of_its_pod_stays_on_it() {
    fn of(container: &str) -> Unrecorded<'_> {
        let of = (container, "net1");
        Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 }
    }
    let taken = Taken::new();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let del = |host: &mut Handle, container: &str, netns: Option<&Netns>| {
        within(&taken.node, || give_back_by_alias(host, of(container), netns)).unwrap().unwrap();
    };
    del(&mut host, "c1", Some(&taken.pod));
    let back = taken.on_node();
    assert_eq!((&back.alias, back.link.group), (&None, 0));
    assert_eq!(back.conduct, Conduct { queue: OF_POD.queue, ..taken.before.conduct });
    // As a DEL leaves it that could not take a program off.
    let mark = of("c1").mark();
    host.set_alias(back.link.index, &mark).unwrap();
    del(&mut host, "c2", Some(&taken.pod));
    assert_eq!(taken.on_node().alias, Some(mark));
    del(&mut host, "c1", None);
    assert_eq!(taken.on_node().alias, None);
    assert!(of(&"c".repeat(400)).mark().len() < 256);
}

/// Rows: HDV-repeated.
#[test]
fn a_device_without_a_record_is_found_again_from_its_move_on_until_all_is_given_back() {
    let taken = Taken::new();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let of = ("c1", "net1");
    let unrecorded = Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 };
    let seen = RefCell::new(None);
    let take_off = |host: &mut Handle, _: &Home, index: u32| -> Result<(), StepError> {
        *seen.borrow_mut() = host.device_by_index(index)?.and_then(|it| it.alias);
        Ok(())
    };
    let pod = Some(&taken.pod);
    let given = within(&taken.node, || give_back_unrecorded(&mut host, unrecorded, pod, take_off));
    given.unwrap().unwrap();
    assert_eq!((seen.into_inner(), taken.on_node().alias), (Some(unrecorded.mark()), None));
    // As a DEL leaves it that is killed behind the move.
    let index = taken.on_node().link.index;
    host.set_conduct(index, &OF_POD).unwrap();
    host.set_alias(index, &unrecorded.mark()).unwrap();
    within(&taken.node, || give_back_by_alias(&mut host, unrecorded, None)).unwrap().unwrap();
    let back = taken.on_node();
    let conduct = Conduct { queue: OF_POD.queue, ..taken.before.conduct };
    assert_eq!((back.alias, back.conduct, back.link.up), (None, conduct, false));
}

/// Rows: HDV-altname.
#[test]
fn without_a_record_a_device_goes_back_as_it_was_kept_if_that_is_of_it() {
    let other = Mac([2, 0, 0, 0, 0, 0x77]);
    for (group, is_its) in [(OWN_GROUPS | 7, true), (OWN_GROUPS | 8, false)] {
        let taken = Taken::new();
        let [mut host, mut inside] = [&taken.node, &taken.pod].map(|netns| Handle::open_in(netns).unwrap());
        let (alias, other_names) = (Some("of rack 7".to_owned()), vec!["enp3s0".to_owned()]);
        let kept = Home { alias, other_names, ..home(taken.before.clone(), false) };
        inside.add_other_names(taken.index, &["of-pod".to_owned()]).unwrap();
        inside.set_mtu(taken.index, 1400).unwrap();
        inside.set_mac(taken.index, other).unwrap();
        let of = ("c1", "net1");
        let unrecorded =
            Unrecorded { of, others: &[], card: false, has_mac: false, home: Some(&kept), group };
        let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
        given.unwrap().unwrap();
        let back = taken.on_node();
        let shown = (back.link.mtu, back.link.mac, back.link.group, back.conduct.queue, back.link.up);
        let before = &taken.before;
        if is_its {
            assert_eq!((back.alias, back.other_names), (kept.alias, kept.other_names));
            let as_before = (before.link.mtu, before.link.mac, 5, before.conduct.queue, false);
            assert_eq!(shown, as_before);
        } else {
            assert_eq!((back.alias, back.other_names), (None, Vec::new()));
            assert_eq!(shown, (1400, Some(other), 0, OF_POD.queue, false));
        }
    }
}

/// Rows: HDV-altname.
#[test]
fn a_card_that_came_home_with_its_namespace_is_the_one_that_was_moved_if_it_is_marked_still() {
    let group = OWN_GROUPS | 9;
    let shown = |group, alias: Option<&str>| {
        let mut found = port(8, "net1", mac(1));
        (found.link.group, found.alias) = (group, alias.map(str::to_owned));
        found
    };
    let is_it = |kept: &Home, found| came_home(kept, std::slice::from_ref(&found), group).is_some();
    let kept = home(port(4, "eth1", mac(1)), false);
    assert!(is_it(&kept, shown(group, None)));
    // It was not moved, or was given back already; or another container held it.
    assert!(!is_it(&kept, shown(0, Some("eth1"))) && !is_it(&kept, shown(OWN_GROUPS | 8, None)));
    let of_group = Home { group: 5, ..kept };
    assert!(is_it(&of_group, shown(5, Some("eth1"))) && !is_it(&of_group, shown(5, None)));
    let mut veth = device(4, "card", ("veth", None));
    let kept = home(veth.clone(), false);
    veth.link.group = group;
    assert!(!is_it(&kept, veth));
}

/// Rows: HDV-names.
#[test]
fn a_device_that_is_another_records_is_not_given_back_without_one() {
    let taken = Taken::new();
    let mut host = Handle::open_in(&taken.node).unwrap();
    let mut is_in_pod_after = |others: &[Other]| {
        let of = ("c1", "net1");
        let unrecorded = Unrecorded { of, others, card: false, has_mac: true, home: None, group: 0 };
        let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
        given.unwrap().unwrap();
        taken.is_in_pod()
    };
    let known_by = |made| [Other { home: home(taken.before.clone(), false), made }];
    assert!(is_in_pod_after(&known_by(None)));
    // Whatever its alias is.
    let mut inside = Handle::open_in(&taken.pod).unwrap();
    inside.set_alias(taken.index, "other").unwrap();
    assert!(is_in_pod_after(&known_by(Some(taken.index))));
    inside.set_alias(taken.index, "card").unwrap();
    assert!(!is_in_pod_after(&known_by(Some(taken.index + 1))));
}

/// Rows: HDV-programs.
#[test]
fn a_device_on_which_a_program_of_its_pod_stays_is_home_and_down_until_that_goes() {
    let taken = Taken::new();
    let stays = |_: &mut Handle, home: &Home, _: u32| -> Result<(), StepError> {
        let (device, name) = (home.name.clone(), "foreign".to_owned());
        Err(StepError::Device(DeviceError::ProgramLeft {
            device,
            program: 7,
            name,
            source: LeftError::NoLink,
        }))
    };
    for _ in 0..2 {
        let refused = taken.give_back(Ways { between: || None, take_off: stays }).unwrap_err();
        assert_eq!(
            Chain(&refused).to_string(),
            "device card stays down: program 7 (foreign), which its pod has attached, cannot be taken off: the link that \
             holds it is not found"
        );
        let found = taken.on_node();
        assert_eq!((found.link.up, &found.alias), (false, &taken.before.alias));
        assert!(!taken.is_in_pod());
    }
    taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
    assert!(taken.before.link.up && taken.on_node().link.up);
}
