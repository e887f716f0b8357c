//! Faults on demand, tokens, certificates and the log.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use netattach_tests::Namespace;
use netattach_tests::api_server::{ApiServer, CutOff, Fault, Options, Verb, When};
use serde_json::json;

use super::{names, pod, rig};
use crate::client::Client;

const PODS: &str = "/api/v1/pods";

#[test]
fn answers_by_number_and_until_lifted() {
    let (server, client) = rig();
    server.faults().times(2, When::on(Verb::List, "pods"), Fault::AnswerRetryAfter(429, 7));
    for _ in 0..2 {
        let answer = client.get(PODS).unwrap();
        assert_eq!((answer.code, answer.headers["retry-after"].as_str()), (429, "7"));
        assert_eq!(answer.json().1["reason"], "TooManyRequests");
    }
    assert_eq!(client.read(PODS).0, 200);
    for code in [410, 500, 503, 504] {
        let fault = server.faults().always(When::resource("pods"), Fault::Answer(code));
        assert_eq!((client.read(PODS).0, client.read("/api/v1/nodes").0), (code, 200));
        assert_eq!((client.read(PODS).0, client.read(PODS).0), (code, code));
        assert_eq!(server.faults().lift(fault), 3);
        assert_eq!(client.read(PODS).0, 200);
    }
    server.faults().always(When::verb(Verb::Get).named("a"), Fault::Answer(500));
    assert_eq!(client.read("/api/v1/namespaces/shop/pods/a").0, 500);
    assert_eq!(client.read("/api/v1/namespaces/shop/pods/b").0, 404);
    server.faults().clear();
    assert_eq!(client.read("/api/v1/namespaces/shop/pods/a").0, 404);
}

#[test]
fn late_slow_and_silent_answers() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    server.faults().times(1, When::any(), Fault::Delay(Duration::from_millis(300)));
    let begin = Instant::now();
    assert_eq!(client.read(PODS).0, 200);
    assert!(begin.elapsed() >= Duration::from_millis(300));
    server.faults().times(1, When::any(), Fault::Slow(1000));
    let begin = Instant::now();
    assert_eq!(names(&client.read(PODS).1), ["a"]);
    assert!(begin.elapsed() >= Duration::from_millis(300), "{:?}", begin.elapsed());
    server.faults().times(1, When::any(), Fault::NoAnswer);
    assert_eq!(client.hurried().get(PODS).err().unwrap().kind(), ErrorKind::WouldBlock);
}

#[test]
fn answers_that_stop_in_the_middle() {
    let (server, client) = rig();
    let client = client.hurried();
    server.create(&pod("a", "n1", "web")).unwrap();
    server.faults().times(1, When::any(), Fault::Reset);
    assert_eq!(client.get(PODS).err().unwrap().kind(), ErrorKind::ConnectionReset);
    for (how, expected) in [
        (CutOff::Reset, Err(ErrorKind::ConnectionReset)),
        (CutOff::Silence, Err(ErrorKind::WouldBlock)),
        (CutOff::End, Ok(())),
    ] {
        server.faults().times(1, When::any(), Fault::CutOff { after: 0, how });
        let answer = client.get(PODS).unwrap();
        assert_eq!(answer.code, 200);
        let text = answer.text();
        assert_eq!(text.as_ref().map(|_| ()).map_err(std::io::Error::kind), expected, "{how:?}");
        if let Ok(text) = text {
            assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "half of an object: {text}");
        }
    }
    assert_eq!(client.read(PODS).0, 200);
}

#[test]
fn watches_that_stop_in_the_middle() {
    let (server, client) = rig();
    for name in ["a", "b", "c"] {
        server.create(&pod(name, "n1", "web")).unwrap();
    }
    for how in [CutOff::Reset, CutOff::Silence, CutOff::End, CutOff::Error(410)] {
        server.faults().times(1, When::verb(Verb::Watch), Fault::CutOff { after: 2, how });
        let mut watch = client.hurried().get(&format!("{PODS}?watch=true")).unwrap();
        assert_eq!((watch.told(), watch.told()), ("ADDED a".to_owned(), "ADDED b".to_owned()));
        let end = watch.event();
        match how {
            CutOff::Reset => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset),
            CutOff::Silence => assert_eq!(end.unwrap_err().kind(), ErrorKind::WouldBlock),
            CutOff::End => assert_eq!(end.unwrap(), None),
            CutOff::Error(_) => {
                let (kind, status) = end.unwrap().unwrap();
                assert_eq!((kind.as_str(), &status["code"]), ("ERROR", &json!(410)));
                assert_eq!(watch.event().unwrap(), None);
            }
        }
    }
}

#[test]
fn tokens_expire() {
    let (server, mut client) = rig();
    assert_eq!(client.read(PODS).0, 200);
    server.accept_tokens(&["second"]);
    let (code, status) = client.read(PODS);
    assert_eq!(
        (code, &status["reason"], &status["message"]),
        (401, &json!("Unauthorized"), &json!("Unauthorized"))
    );
    assert_eq!(client.get("/readyz").unwrap().text().unwrap(), "ok");
    client.token = "second".to_owned();
    assert_eq!(client.read(PODS).0, 200);
}

#[test]
fn a_server_goes_away_and_comes_back_at_the_same_port() {
    let (mut server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let mut watch = client.hurried().get(&format!("{PODS}?watch=true")).unwrap();
    assert_eq!(watch.told(), "ADDED a");
    server.refuse_connections();
    // A connection that came just before the listener was closed is reset.
    let kind = client.get(PODS).err().unwrap().kind();
    assert!(matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset), "{kind}");
    server.create(&pod("b", "n1", "web")).unwrap();
    assert_eq!(watch.told(), "ADDED b");
    server.stop();
    assert!(watch.event().is_err());
    server.start_again().unwrap();
    assert_eq!(names(&client.read(PODS).1), ["a", "b"]);
    let mut watch = client.get(&format!("{PODS}?watch=true&resourceVersion=1002")).unwrap();
    server.reset_connections();
    assert_eq!(watch.event().unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn certificates_by_others_are_seen() {
    let (mut server, client) = rig();
    server.foreign_certificate().unwrap();
    let error = client.get(PODS).err().unwrap();
    assert!(error.to_string().contains("certificate"), "{error}");
    server.own_certificate().unwrap();
    assert_eq!(client.read(PODS).0, 200);
    server.rotate_authority().unwrap();
    assert!(client.get(PODS).is_err());
    assert_eq!(Client::of(&server).read(PODS).0, 200);
}

#[test]
fn the_log_has_every_request() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let mark = server.mark();
    client.read("/api/v1/namespaces/shop/pods?limit=5");
    client.patch("/api/v1/namespaces/shop/pods/a/status", &json!({"metadata": {"uid": "uid-a"}}));
    client.read("/version");
    assert!(
        server.wait_for(mark, |requests| requests.iter().filter(|one| one.answer.is_some()).count() == 3)
    );
    let requests = server.requests_since(mark);
    let seen: Vec<_> = requests.iter().map(|one| (one.verb, one.subject(), one.answer)).collect();
    assert_eq!(
        seen,
        [
            (Verb::List, "pods shop/".to_owned(), Some(200)),
            (Verb::Patch, "pods/status shop/a".to_owned(), Some(200)),
            (Verb::Other, "/version".to_owned(), Some(200)),
        ]
    );
    assert_eq!((requests[0].query["limit"].as_str(), requests[0].user_agent.as_str()), ("5", "plain"));
    assert_eq!(requests[1].body, json!({"metadata": {"uid": "uid-a"}}));
    assert_eq!(server.connections().0, 3);
}

#[test]
fn one_server_listens_in_several_namespaces() {
    let nodes = [Namespace::new().unwrap(), Namespace::new().unwrap()];
    for node in &nodes {
        node.loopback_up().unwrap();
    }
    let mut server = ApiServer::start_in(&Options::default(), &nodes[0]).unwrap();
    server.listen_in(&nodes[1]).unwrap();
    let client = Client::of(&server);
    // A connection that came just before the listener was closed is reset.
    let kind = client.get(PODS).err().unwrap().kind();
    assert!(matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset), "{kind}");
    for _ in 0..2 {
        for node in &nodes {
            assert_eq!(node.run(|| client.read(PODS).0), 200);
        }
        server.stop();
        server.start_again().unwrap();
    }
}
