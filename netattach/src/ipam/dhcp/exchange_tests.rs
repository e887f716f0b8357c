//! Exchanges, message by message.

use proptest::prelude::*;

use super::*;

const SERVER: Server = Server { address: Ipv4Addr::new(10, 1, 0, 1), mac: Mac([2, 0, 0, 0, 0, 1]) };
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 7);

fn client() -> Client {
    Client {
        mac: Mac([2, 0, 0, 0, 0, 7]),
        id: b"\0c1/lan/net1".to_vec(),
        broadcast: false,
        wanted: vec![code::SUBNET_MASK, code::ROUTERS],
        provided: vec![(12, b"pod".to_vec())],
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn begin(purpose: Purpose) -> Exchange {
    Exchange::begin(client(), purpose, seconds(100), seconds(110), 7)
}

/// An answer of the server to the exchange.
fn answer(exchange: &Exchange, kind: Kind) -> Message {
    let mut message = Message::of(kind, exchange.xid, client().mac);
    message.yiaddr = if kind == Kind::Nak { Ipv4Addr::UNSPECIFIED } else { ADDRESS };
    message.options.set(code::SERVER, SERVER.address.octets());
    if kind != Kind::Nak {
        message.options.set(code::SUBNET_MASK, [255, 255, 255, 0]);
        message.options.set(code::LEASE_TIME, 3600_u32.to_be_bytes());
    }
    message
}

fn sent(act: Act) -> Outgoing {
    match act {
        Act::Send(outgoing) => outgoing,
        other => panic!("{other:?}"),
    }
}

fn terms(exchange: &Exchange, since: u64) -> Terms {
    Terms::of(&answer(exchange, Kind::Ack), SERVER, seconds(since), None).unwrap()
}

#[test]
fn a_lease_is_discovered_offered_requested_and_acknowledged() {
    let mut exchange = begin(Purpose::New(None));
    let Outgoing { message, to, asks_for } = sent(exchange.tick(seconds(100)));
    assert_eq!((message.options.kind(), to, asks_for), (Some(Kind::Discover), None, None));
    assert_eq!(message.options.get(code::CLIENT), Some(&b"\0c1/lan/net1"[..]));
    assert_eq!(message.options.get(code::WANTED), Some(&[code::SUBNET_MASK, code::ROUTERS][..]));
    assert_eq!(message.options.text(12), Some("pod"));
    let offer = answer(&exchange, Kind::Offer);
    let Outgoing { message, to, asks_for } = sent(exchange.hear(seconds(101), SERVER.mac, &offer));
    assert_eq!((message.options.kind(), to), (Some(Kind::Request), None));
    assert_eq!(asks_for, Some((ADDRESS, SERVER)));
    assert_eq!((message.ciaddr, message.secs), (Ipv4Addr::UNSPECIFIED, 1));
    assert_eq!(message.options.address(code::REQUESTED_ADDRESS), Some(ADDRESS));
    assert_eq!(message.options.address(code::SERVER), Some(SERVER.address));
    let ack = answer(&exchange, Kind::Ack);
    let bound = Outcome::Bound(terms(&exchange, 101), ack.options.clone());
    assert_eq!(exchange.hear(seconds(103), SERVER.mac, &ack), Act::Done(bound));
}

/// The answer may be the one to the first request, which was only late.
#[test]
fn a_lease_counts_from_the_first_request_for_it() {
    let mut exchange = begin(Purpose::New(None));
    sent(exchange.tick(seconds(100)));
    let offer = answer(&exchange, Kind::Offer);
    sent(exchange.hear(seconds(101), SERVER.mac, &offer));
    let due = exchange.due();
    sent(exchange.tick(due));
    let ack = answer(&exchange, Kind::Ack);
    let bound = Outcome::Bound(terms(&exchange, 101), ack.options.clone());
    assert_eq!(exchange.hear(seconds(103), SERVER.mac, &ack), Act::Done(bound));

    let known = terms(&begin(Purpose::New(None)), 40);
    for purpose in [Purpose::Renew(known), Purpose::Rebind(known), Purpose::Again(known)] {
        let mut exchange = begin(purpose.clone());
        sent(exchange.tick(seconds(100)));
        let due = exchange.due();
        sent(exchange.tick(due));
        let ack = answer(&exchange, Kind::Ack);
        let bound = Outcome::Bound(terms(&exchange, 100), ack.options.clone());
        assert_eq!(exchange.hear(seconds(103), SERVER.mac, &ack), Act::Done(bound), "{purpose:?}");
    }
}

#[test]
fn what_has_no_answer_is_sent_again_until_the_time_is_over() {
    let mut exchange = begin(Purpose::New(Some(ADDRESS)));
    let mut times = Vec::new();
    let outcome = loop {
        let now = exchange.due();
        match exchange.tick(now) {
            Act::Send(outgoing) => {
                let asked = outgoing.message.options.address(code::REQUESTED_ADDRESS);
                assert_eq!((outgoing.message.options.kind(), asked), (Some(Kind::Discover), Some(ADDRESS)));
                times.push(now);
            }
            Act::Done(outcome) => break outcome,
            Act::Wait => panic!("it was due"),
        }
    };
    assert_eq!(outcome, Outcome::Silence("nothing was heard".into()));
    let pauses: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    for (pause, expected) in pauses.iter().zip([1.0, 2.0, 4.0]) {
        assert!((expected * 0.75..=expected * 1.25).contains(pause), "{pauses:?}");
    }
    assert!((3..=5).contains(&times.len()), "{times:?}");
}

#[test]
fn a_refused_request_begins_anew_and_is_told_in_the_end() {
    let mut exchange = begin(Purpose::New(None));
    sent(exchange.tick(seconds(100)));
    let offer = answer(&exchange, Kind::Offer);
    sent(exchange.hear(seconds(100), SERVER.mac, &offer));
    let mut nak = answer(&exchange, Kind::Nak);
    nak.options.set(code::MESSAGE, "address in use");
    // A NAK of another server.
    let mut foreign = nak.clone();
    foreign.options.set(code::SERVER, [10, 1, 0, 2]);
    assert_eq!(exchange.hear(seconds(101), SERVER.mac, &foreign), Act::Wait);
    assert_eq!(exchange.hear(seconds(101), SERVER.mac, &nak), Act::Wait);
    assert_eq!(exchange.due(), seconds(102));
    assert_eq!(sent(exchange.tick(seconds(102))).message.options.kind(), Some(Kind::Discover));
    let told = "10.1.0.1 refuses 10.1.0.7: address in use".to_owned();
    assert_eq!(exchange.tick(seconds(110)), Act::Done(Outcome::Silence(told)));
}

#[test]
fn an_offer_that_is_not_acknowledged_is_given_up() {
    let mut exchange = begin(Purpose::New(None));
    sent(exchange.tick(seconds(100)));
    let offer = answer(&exchange, Kind::Offer);
    sent(exchange.hear(seconds(100), SERVER.mac, &offer));
    let mut kinds = Vec::new();
    for _ in 0..3 {
        let due = exchange.due();
        kinds.push(sent(exchange.tick(due)).message.options.kind());
    }
    assert_eq!(kinds, [Some(Kind::Request), Some(Kind::Request), Some(Kind::Discover)]);
    let told = "no answer to the request for 10.1.0.7".to_owned();
    assert_eq!(exchange.tick(seconds(110)), Act::Done(Outcome::Silence(told)));
}

/// How each purpose requests an address that the client had, and the effect of each answer.
///
/// Rows: DHCP-nak.
#[test]
fn an_address_that_the_client_had_is_kept_or_lost() {
    let known = terms(&begin(Purpose::New(None)), 40);
    for (purpose, to, ciaddr, requested) in [
        (Purpose::Renew(known), Some(SERVER), ADDRESS, None),
        (Purpose::Rebind(known), None, ADDRESS, None),
        (Purpose::Again(known), None, Ipv4Addr::UNSPECIFIED, Some(ADDRESS)),
    ] {
        let begin = || {
            let mut exchange = begin(purpose.clone());
            let outgoing = sent(exchange.tick(seconds(100)));
            (exchange, outgoing)
        };
        let (mut exchange, Outgoing { message, to: goes_to, asks_for }) = begin();
        let found = (message.options.kind(), goes_to, message.ciaddr, asks_for);
        assert_eq!(found, (Some(Kind::Request), to, ciaddr, None), "{purpose:?}");
        assert_eq!(message.options.address(code::REQUESTED_ADDRESS), requested);
        assert_eq!(message.options.get(code::SERVER), None);
        // The mask is known already, and may be missing.
        let mut ack = answer(&exchange, Kind::Ack);
        ack.options = Options::default();
        for option in [code::KIND, code::SERVER, code::LEASE_TIME] {
            ack.options.set(option, answer(&exchange, Kind::Ack).options.get(option).unwrap());
        }
        let bound = Act::Done(Outcome::Bound(terms(&exchange, 100), ack.options.clone()));
        assert_eq!(exchange.hear(seconds(101), SERVER.mac, &ack), bound);

        let (mut exchange, _) = begin();
        let nak = answer(&exchange, Kind::Nak);
        let refused = Act::Done(Outcome::Refused("10.1.0.1 refuses 10.1.0.7".into()));
        assert_eq!(exchange.hear(seconds(101), SERVER.mac, &nak), refused);

        // Only its server can deny a lease that has not expired. Any server can deny one that has expired.
        for (server, by) in [(Some([10_u8, 1, 0, 2]), "10.1.0.2"), (None, "a server")] {
            let (mut exchange, _) = begin();
            let mut nak = answer(&exchange, Kind::Nak);
            nak.options = Options::default();
            nak.options.set(code::KIND, answer(&exchange, Kind::Nak).options.get(code::KIND).unwrap());
            if let Some(server) = server {
                nak.options.set(code::SERVER, server);
            }
            let refused = format!("{by} refuses 10.1.0.7");
            let heard = exchange.hear(seconds(101), SERVER.mac, &nak);
            if matches!(purpose, Purpose::Again(_)) {
                assert_eq!(heard, Act::Done(Outcome::Refused(refused)));
                continue;
            }
            assert_eq!(heard, Act::Wait, "{purpose:?}, {by}");
            let ack = answer(&exchange, Kind::Ack);
            let bound = Act::Done(Outcome::Bound(terms(&exchange, 100), ack.options.clone()));
            assert_eq!(exchange.hear(seconds(101), SERVER.mac, &ack), bound);
            let told = Outcome::Silence(format!("{refused}, which is a lease of 10.1.0.1"));
            assert_eq!(exchange.tick(seconds(110)), Act::Done(told));
        }

        let (mut exchange, _) = begin();
        let another = Message { yiaddr: [10, 1, 0, 8].into(), ..answer(&exchange, Kind::Ack) };
        assert_eq!(exchange.hear(seconds(101), SERVER.mac, &another), Act::Wait);
        let told = "10.1.0.1 gives 10.1.0.8 instead of 10.1.0.7".to_owned();
        assert_eq!(exchange.tick(seconds(110)), Act::Done(Outcome::Silence(told)));
    }
}

/// A server that takes over the lease, as the first one is gone.
///
/// Rows: DHCP-renew.
#[test]
fn another_server_that_extends_a_lease_is_asked_next() {
    let known = terms(&begin(Purpose::New(None)), 40);
    let mut exchange = begin(Purpose::Rebind(known));
    sent(exchange.tick(seconds(100)));
    let another = Server { address: [10, 1, 0, 2].into(), mac: Mac([2, 0, 0, 0, 0, 2]) };
    let mut ack = answer(&exchange, Kind::Ack);
    ack.options.set(code::SERVER, another.address.octets());
    let given = Terms { server: another, ..terms(&exchange, 100) };
    let bound = Outcome::Bound(given, ack.options.clone());
    assert_eq!(exchange.hear(seconds(101), another.mac, &ack), Act::Done(bound));
    // Only that server may deny it.
    let mut exchange = begin(Purpose::Renew(given));
    assert_eq!(sent(exchange.tick(seconds(100))).to, Some(another));
    let nak = answer(&exchange, Kind::Nak);
    assert_eq!(exchange.hear(seconds(101), SERVER.mac, &nak), Act::Wait);
}

/// Servers may send the client identifier back (RFC 6842): an answer with another identifier is for another client,
/// even if it is the one that this client would have by default.
///
/// Rows: DHCP-client.
#[test]
fn an_answer_with_an_identifier_is_the_clients_if_it_has_sent_that_one() {
    let own = client().id;
    let mine = b"\x01mine".to_vec();
    for (provided, sent_back, is_ours) in [
        (None, own.clone(), true),
        (None, mine.clone(), false),
        (None, Vec::new(), false),
        (Some(mine.clone()), mine, true),
        (Some(b"\x01other".to_vec()), own, false),
    ] {
        let provided: Vec<_> = provided.into_iter().map(|id| (code::CLIENT, id)).collect();
        let mut exchange = Exchange::begin(
            Client { provided, ..client() },
            Purpose::New(None),
            seconds(100),
            seconds(110),
            7,
        );
        sent(exchange.tick(seconds(100)));
        let mut offer = answer(&exchange, Kind::Offer);
        offer.options.set(code::CLIENT, sent_back.clone());
        let act = exchange.hear(seconds(101), SERVER.mac, &offer);
        assert_eq!(act != Act::Wait, is_ours, "{sent_back:?}");
    }
}

#[test]
fn messages_of_others_are_passed_over() {
    let mut exchange = begin(Purpose::New(None));
    sent(exchange.tick(seconds(100)));
    let offer = answer(&exchange, Kind::Offer);
    let mut other_client = offer.clone();
    other_client.options.set(code::CLIENT, "\0c2/lan/net1");
    let mut maskless = offer.clone();
    maskless.options.set(code::SUBNET_MASK, [0; 4]);
    for message in [
        Message { is_reply: false, ..offer.clone() },
        Message { xid: offer.xid ^ 1, ..offer.clone() },
        Message { mac: Mac([2; 6]), ..offer.clone() },
        answer(&exchange, Kind::Ack),
        answer(&exchange, Kind::Nak),
        other_client,
        maskless,
    ] {
        assert_eq!(exchange.hear(seconds(101), SERVER.mac, &message), Act::Wait, "{message:?}");
    }
    let told = "an offer of 10.1.0.1 with an empty subnet mask".to_owned();
    assert_eq!(exchange.tick(seconds(110)), Act::Done(Outcome::Silence(told)));
}

/// Rows: DHCP-probe.
#[test]
fn an_address_that_another_host_has_is_declined_and_others_are_looked_for_three_times() {
    let mut exchange = Exchange::begin(client(), Purpose::New(Some(ADDRESS)), seconds(100), seconds(110), 7);
    let holder = Mac([2, 0, 0, 0, 0, 9]);
    let mut now = seconds(100);
    for number in 1..=3 {
        let Outgoing { message, .. } = sent(exchange.tick(now));
        let hint = message.options.address(code::REQUESTED_ADDRESS);
        assert_eq!((message.options.kind(), hint.is_some()), (Some(Kind::Discover), number == 1));
        let offer = answer(&exchange, Kind::Offer);
        sent(exchange.hear(now, SERVER.mac, &offer));
        let ack = answer(&exchange, Kind::Ack);
        let given = terms(&exchange, now.as_secs());
        let bound = Outcome::Bound(given, ack.options.clone());
        assert_eq!(exchange.hear(now, SERVER.mac, &ack), Act::Done(bound));
        let mut expected = Message::of(Kind::Decline, exchange.xid, client().mac);
        expected.options.set(code::CLIENT, "\0c1/lan/net1");
        expected.options.set(code::SERVER, SERVER.address.octets());
        expected.options.set(code::REQUESTED_ADDRESS, ADDRESS.octets());
        let declined = exchange.decline(now, &given, holder);
        assert_eq!(declined, Outgoing { message: expected, to: None, asks_for: None });
        // Messages that are still on the way for the declined address have no effect.
        assert_eq!(exchange.hear(now, SERVER.mac, &ack), Act::Wait);
        if number < 3 {
            assert_eq!((exchange.tick(now), exchange.due()), (Act::Wait, now + seconds(1)));
            now += seconds(1);
        }
    }
    let told = "10.1.0.7, which 10.1.0.1 gives, is in use by 02:00:00:00:00:09".to_owned();
    assert_eq!(exchange.tick(now), Act::Done(Outcome::Silence(told)));
}

/// Rows: DHCP-proxy.
#[test]
fn a_host_that_has_every_address_is_told_from_hosts_with_one_each_and_from_one_address_again_and_again() {
    let answered = |declined: [(u8, u8); 3]| {
        let mut exchange = begin(Purpose::New(None));
        let host = |last| Mac([2, 0, 0, 0, 0, last]);
        for (address, holder) in declined {
            assert!(!exchange.is_answered_by(host(9)));
            let given = Terms { address: [10, 1, 0, address].into(), ..terms(&exchange, 100) };
            exchange.decline(seconds(100), &given, host(holder));
        }
        assert!(matches!(exchange.tick(seconds(100)), Act::Done(Outcome::Silence(_))));
        exchange.is_answered_by(host(9))
    };
    let all = [[(7, 9), (8, 9), (10, 9)], [(7, 9), (8, 9), (7, 9)], [(7, 9), (8, 5), (10, 9)]];
    assert_eq!(all.map(answered), [true, false, false]);
}

#[test]
fn a_lease_is_given_back_to_its_server_by_the_same_identifier() {
    let provided = vec![(code::CLIENT, b"\x01mine".to_vec())];
    let Outgoing { message, to, .. } = release(&Client { provided, ..client() }, ADDRESS, SERVER, 9);
    let mut expected = Message::of(Kind::Release, 9, client().mac);
    expected.ciaddr = ADDRESS;
    expected.options.set(code::CLIENT, "\x01mine");
    expected.options.set(code::SERVER, SERVER.address.octets());
    assert_eq!((message, to), (expected, Some(SERVER)));
}

fn any_message() -> impl Strategy<Value = (Message, u64)> {
    let option = (any::<u8>(), prop::collection::vec(any::<u8>(), 0..6));
    let kind = prop::sample::select(vec![Kind::Offer, Kind::Ack, Kind::Nak]);
    (kind, any::<u32>(), prop::collection::vec(option, 0..4), any::<bool>(), 0..3_u64).prop_map(
        |(kind, address, options, is_whole, pause)| {
            let mut message = Message::of(kind, 0, client().mac);
            message.yiaddr = address.into();
            if is_whole {
                message.options.set(code::SERVER, SERVER.address.octets());
                message.options.set(code::SUBNET_MASK, [255, 255, 0, 0]);
                message.options.set(code::LEASE_TIME, [0, 0, 0, 9]);
            }
            for (code, value) in options.into_iter().filter(|(code, _)| *code != code::KIND) {
                message.options.set(code, value);
            }
            (message, pause)
        },
    )
}

proptest! {
    /// Whatever is received, an exchange ends at its deadline, sends a bounded number of messages, and keeps only its
    /// own address.
    ///
    /// Rows: DHCP-malformed.
    #[test]
    fn an_exchange_ends_whatever_it_hears(messages in prop::collection::vec(any_message(), 0..20), keeps: bool) {
        let known = terms(&begin(Purpose::New(None)), 40);
        let mut exchange = begin(if keeps { Purpose::Rebind(known) } else { Purpose::New(None) });
        let (mut now, mut sent, mut offered) = (seconds(100), 0, None);
        let mut messages = messages.into_iter();
        loop {
            let act = match messages.next() {
                Some((message, pause)) => {
                    now += seconds(pause);
                    let message = Message { xid: exchange.xid, ..message };
                    let act = exchange.hear(now, SERVER.mac, &message);
                    if act == Act::Wait { exchange.tick(now) } else { act }
                }
                None => {
                    now = now.max(exchange.due());
                    exchange.tick(now)
                }
            };
            match act {
                Act::Send(outgoing) => {
                    sent += 1;
                    offered = outgoing.asks_for.or(offered);
                }
                Act::Done(Outcome::Bound(terms, _)) => {
                    let asked = if keeps { known.address } else { offered.unwrap().0 };
                    prop_assert_eq!(terms.address, asked);
                    break;
                }
                Act::Done(_) => break,
                Act::Wait => {}
            }
            prop_assert!(sent <= 40 && now <= seconds(200));
        }
    }
}
