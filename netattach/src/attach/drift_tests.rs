//! What counts as drift, and how often it is put back.

use super::*;

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
        link: None,
        mode: None,
        group: 9,
    }
}

fn end(port: Option<(&str, bool)>) -> End {
    End {
        made: Interface { name: "na0".to_owned(), index: 7, mac: None, mtu: 1500 },
        group: 9,
        mtu: 1500,
        port: port.map(|(bridge, hairpin)| (bridge.to_owned(), hairpin)),
        routed: None,
    }
}

fn all(links: &[&LinkState]) -> BTreeMap<u32, LinkState> {
    links.iter().map(|link| (link.index, (*link).clone())).collect()
}

#[test]
fn each_difference_of_an_end_is_found() {
    let bridge = link(3, "br0", "bridge");
    let port = LinkState { controller: Some(3), hairpin: Some(true), ..link(7, "na0", "veth") };
    let of = |found: &LinkState| differences(&end(Some(("br0", true))), found, &all(&[&bridge, found]), true);
    assert_eq!(of(&port), []);
    assert_eq!(of(&LinkState { name: "x".to_owned(), ..port.clone() }), [Difference::Renamed]);
    assert_eq!(of(&LinkState { mtu: 1400, ..port.clone() }), [Difference::Mtu(1400)]);
    assert_eq!(of(&LinkState { up: false, ..port.clone() }), [Difference::Down]);
    assert_eq!(of(&LinkState { hairpin: Some(false), ..port.clone() }), [Difference::Hairpin]);
    let out = LinkState { controller: None, hairpin: None, ..port.clone() };
    assert_eq!(of(&out), [Difference::NotInBridge(3), Difference::Hairpin]);
    // Without its bridge nothing can be put back there.
    assert_eq!(differences(&end(Some(("br0", true))), &out, &all(&[&out]), true), []);
    let unknown = End { mtu: 0, ..end(None) };
    assert_eq!(differences(&unknown, &LinkState { mtu: 1400, ..out.clone() }, &all(&[]), true), []);
    assert_eq!(differences(&end(None), &out, &all(&[]), false), [Difference::Addressing]);
    let routed = End { routed: Some(Addressing::default()), ..end(None) };
    let down = LinkState { up: false, ..out };
    assert_eq!(differences(&routed, &down, &all(&[]), true), [Difference::Down, Difference::Addressing]);
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
fn what_others_change_again_and_again_is_put_back_once_a_minute() {
    let mut bound = PutBack::default();
    let start = Instant::now();
    let mut at = |seconds| bound.once_more("a", start + Duration::from_secs(seconds));
    for second in 0..5 {
        assert_eq!(at(second), Ok(()));
    }
    assert_eq!(at(5), Err(5));
    assert_eq!((at(63), at(64), at(65)), (Err(5), Ok(()), Err(6)));
    for second in 64 + 600..64 + 605 {
        assert_eq!(at(second), Ok(()), "nobody has changed it for long");
    }
    assert_eq!(bound.once_more("b", start), Ok(()));
}
