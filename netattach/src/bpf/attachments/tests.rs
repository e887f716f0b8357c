//! Attachments in maps in memory.

use super::*;

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The attachment whose MAC address ends in `last`.
fn attachment(last: u8, zone: u32, own: &[&str], shared: &[&str]) -> Attachment {
    Attachment {
        mac: Mac([2, 0, 0, 0, 0, last]),
        addresses: own.iter().map(|text| address(text)).collect(),
        shared: shared.iter().map(|text| address(text)).collect(),
        on_link: Vec::new(),
        ethertypes: Vec::new(),
        zone,
        flags: Checks::default(),
        vlans: BTreeSet::new(),
        limits: Limits::default(),
    }
}

fn key(text: &str) -> AddressKey<Ip4> {
    AddressKey { attachment: 1, address: Ip4::from(text.parse::<std::net::Ipv4Addr>().unwrap()) }
}

/// Opens maps in which an earlier agent has left these addresses.
fn over(addresses_v4: BTreeMap<AddressKey<Ip4>, u32>) -> Attachments {
    let maps = Maps {
        links: Box::new(BTreeMap::new()),
        records: Box::new(BTreeMap::new()),
        addresses_v4: Box::new(addresses_v4),
        addresses_v6: Box::new(BTreeMap::new()),
        vlans: Box::new(BTreeMap::new()),
        limits: Box::new(BTreeMap::new()),
        parents: Box::new(BTreeMap::new()),
    };
    Attachments::over(maps, 16).unwrap()
}

#[test]
fn what_goes_with_attachments_is_their_own_and_what_nobody_else_has() {
    let mut attachments = over(BTreeMap::new());
    let virtual_ip = "10.0.0.100";
    for (id, attachment) in [
        (1, attachment(1, 1, &["10.0.0.1", "fd00::1"], &[virtual_ip])),
        (2, attachment(2, 1, &["10.0.0.2"], &[virtual_ip, "10.0.0.1"])),
        (3, attachment(3, 2, &["10.0.0.3"], &[virtual_ip])),
    ] {
        attachments.put(id, &attachment).unwrap();
    }
    let hosts = |attachments: &Attachments, leaving: &[u32]| {
        let found = attachments.hosts(&leaving.iter().copied().collect()).unwrap();
        found.into_iter().map(|(zone, address)| format!("{zone} {address}")).collect::<Vec<_>>()
    };
    assert_eq!(hosts(&attachments, &[1]), ["1 10.0.0.1", "1 fd00::1", "1 fe80::ff:fe00:1"]);
    assert_eq!(hosts(&attachments, &[2]), ["1 10.0.0.2", "1 fe80::ff:fe00:2"]);
    assert_eq!(hosts(&attachments, &[3]), ["2 10.0.0.3", "2 10.0.0.100", "2 fe80::ff:fe00:3"]);
    let both =
        ["1 10.0.0.1", "1 10.0.0.2", "1 10.0.0.100", "1 fd00::1", "1 fe80::ff:fe00:1", "1 fe80::ff:fe00:2"];
    assert_eq!(hosts(&attachments, &[1, 2]), both);
    assert!(hosts(&attachments, &[4]).is_empty(), "no attachment");
    attachments.remove(2).unwrap();
    let last = ["1 10.0.0.1", "1 10.0.0.100", "1 fd00::1", "1 fe80::ff:fe00:1"];
    assert_eq!(hosts(&attachments, &[1]), last);
    let refused = attachments.hosts(&[1, 16].into());
    assert!(matches!(refused, Err(BpfError::InvalidAttachment { id: 16, max: 15 })), "{refused:?}");
}

/// Their DELs run concurrently.
#[test]
fn of_attachments_that_leave_together_the_last_to_begin_takes_what_they_share() {
    let mut attachments = over(BTreeMap::new());
    let put = |attachments: &mut Attachments, id: u8| {
        let own = format!("10.0.0.{id}");
        attachments.put(id.into(), &attachment(id, 1, &[own.as_str()], &["10.0.0.100"])).unwrap();
    };
    (1..=3).for_each(|id| put(&mut attachments, id));
    let texts = |hosts: BTreeSet<Host>| {
        hosts.into_iter().map(|(zone, address)| format!("{zone} {address}")).collect::<Vec<_>>()
    };
    let own = |id: u32| vec![format!("1 10.0.0.{id}"), format!("1 fe80::ff:fe00:{id}")];
    let with_shared =
        |id: u32| vec![format!("1 10.0.0.{id}"), "1 10.0.0.100".to_owned(), format!("1 fe80::ff:fe00:{id}")];
    assert_eq!(texts(attachments.leave(1).unwrap()), own(1));
    assert_eq!(texts(attachments.leave(2).unwrap()), own(2), "the third stays");
    assert_eq!(texts(attachments.leave(3).unwrap()), with_shared(3));
    assert_eq!(texts(attachments.leave(1).unwrap()), with_shared(1), "once more, after it has failed");
    assert!(attachments.leave(4).unwrap().is_empty(), "no attachment");
    // The next attachment with the number is not affected.
    attachments.remove(2).unwrap();
    put(&mut attachments, 2);
    put(&mut attachments, 4);
    assert_eq!(texts(attachments.leave(3).unwrap()), own(3));
    assert_eq!(texts(attachments.leave(4).unwrap()), own(4));
    let refused = attachments.leave(16);
    assert!(matches!(refused, Err(BpfError::InvalidAttachment { id: 16, max: 15 })), "{refused:?}");
}

#[test]
fn the_maps_tell_own_addresses_from_shared_ones_also_those_of_an_earlier_agent() {
    // An earlier agent wrote the same for both.
    let [own, shared, gone] = ["10.0.0.1", "10.0.0.100", "10.0.0.9"].map(key);
    let mut attachments = over([own, shared, gone].map(|key| (key, 1)).into());
    let attachment = attachment(1, 1, &["10.0.0.1"], &["10.0.0.100", "10.0.0.1"]);
    attachments.put(1, &attachment).unwrap();
    let written = attachments.addresses_v4.all().unwrap();
    assert_eq!(written, [(own, source::OWN), (shared, source::SHARED)]);
    let known: BTreeMap<_, BTreeSet<_>> = [(1, ["10.0.0.1", "10.0.0.100"].map(address).into())].into();
    assert_eq!(attachments.addresses(), known);

    let difference =
        |attachments: &Attachments| attachments.difference(1, &Device::Nowhere, &attachment).unwrap();
    assert_eq!(difference(&attachments), None);
    for (key, kind, expected) in [
        (own, source::SHARED, "the dataplane takes the source 10.0.0.1 of attachment 1 for a shared one"),
        (shared, source::OWN, "the dataplane takes the source 10.0.0.100 of attachment 1 for its own"),
    ] {
        let right = attachments.addresses_v4.get(&key).unwrap().unwrap();
        attachments.addresses_v4.put(key, kind).unwrap();
        assert_eq!(difference(&attachments).as_deref(), Some(expected));
        attachments.addresses_v4.put(key, right).unwrap();
    }
    attachments.addresses_v4.remove(&shared).unwrap();
    let expected = "the dataplane does not allow attachment 1 the source 10.0.0.100";
    assert_eq!(difference(&attachments).as_deref(), Some(expected));
}

#[test]
fn a_record_says_whether_others_may_have_an_attachments_addresses_too() {
    let flags = |shared: &[&str]| {
        let mut attachments = over(BTreeMap::new());
        attachments.put(1, &attachment(1, 1, &["10.0.0.1"], shared)).unwrap();
        attachments.known(1).unwrap().flags
    };
    assert_eq!(flags(&[]), flag::PRESENT);
    assert_eq!(flags(&["10.0.0.100"]), flag::PRESENT | flag::SHARES_ADDRESSES);
}
