//! The table in the node's packet filter: changes by others, agents that die, and shared use.

use super::*;

fn ports(host: u16) -> Value {
    json!([{"hostPort": host, "containerPort": 80, "protocol": "tcp"}])
}

#[test]
fn what_another_program_removes_is_put_back() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    let (web, addresses) = scene.add("web", &ports(8080));
    let _echo = Echo::serve(scene.pod(web), SocketAddr::new(addresses[0], 80)).unwrap();
    let whole = scene.elements();
    let shape = scene.node.namespace.run(nat::shape).unwrap();
    let is_back = || scene.elements() == whole && scene.node.namespace.run(nat::shape).unwrap() == shape;
    // Like `nft flush ruleset` and `nft delete element`.
    scene.node.namespace.run(nat::uninstall).unwrap();
    assert!(eventually(PATIENCE, is_back));
    let some: Vec<Element> = whole.iter().filter(|it| it.set == Set::Ports4).cloned().collect();
    scene.node.namespace.run(|| nat::change(&some, [])).unwrap();
    assert!(eventually(PATIENCE, is_back));
    assert!(connects(&scene.outside, at(NODE[0], 8080), PATIENCE));
    // A change of an attachment does not wait for that.
    scene.node.namespace.run(nat::uninstall).unwrap();
    scene.node.del(&scene.pods[web]).success();
    scene.end();
}

#[test]
fn what_another_program_removes_again_and_again_is_put_back_rarely_and_told_of() {
    let mut scene = Scene::new(Links::Bridge, &["web", "late"]);
    scene.add("web", &ports(8080));
    let shape = || scene.node.namespace.run(nat::shape).unwrap();
    let whole = shape();
    let lets_loopback_in = |expected: &str| {
        let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
        let value = || scene.node.namespace.run(|| std::fs::read_to_string(setting)).unwrap();
        eventually(PATIENCE, || value().trim() == expected)
    };
    assert!(lets_loopback_in("1"));
    let remove = || scene.node.namespace.run(nat::uninstall).unwrap();
    for time in 1..=5 {
        remove();
        assert!(eventually(PATIENCE, || shape() == whole), "{time}");
    }
    remove();
    let told = "another program removes it or a part of it again and again: it was put back 5 times, and from now on is once a minute";
    let is_told = || scene.node.whole_status().unwrap().to_string().contains(told);
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    assert!(shape().is_empty());
    // No rule drops packets that pods would send to the node's loopback.
    assert!(lets_loopback_in("0"));
    // An ADD rebuilds the table. Its own port is not for loopback.
    let at_one = json!([{"hostPort": 8081, "containerPort": 80, "protocol": "tcp", "hostIP": NODE[0]}]);
    let late = Pod::new("late").unwrap();
    scene.ask(&late, &at_one).success();
    scene.node.await_status(&late);
    assert_eq!(shape(), whole);
    assert!(lets_loopback_in("1"));
    scene.pods.push(late);
    scene.end();
}

#[test]
fn an_agent_takes_over_what_another_has_left() {
    let mut scene = Scene::new(Links::Bridge, &["web", "gone", "late"]);
    let (web, addresses) = scene.add("web", &ports(8080));
    let _echo = Echo::serve(scene.pod(web), SocketAddr::new(addresses[0], 80)).unwrap();
    let whole = scene.elements();
    let (gone, _) = scene.add("gone", &ports(8081));
    scene.node.kill().unwrap();
    // Without an agent all traffic continues.
    assert!(connects(&scene.outside, at(NODE[0], 8080), PATIENCE));
    assert!(connects(&scene.node.namespace, at("127.0.0.1", 8080), PATIENCE));
    let pod = scene.pods.remove(gone);
    scene.node.del(&pod).success();
    // An element of no attachment that the agent knows.
    let stray = Element { set: Set::Masquerade4, key: vec![10, 50, 0, 99], end: None, value: vec![7; 12] };
    scene.node.namespace.run(|| nat::change([], [&stray])).unwrap();
    scene.node.start().unwrap();
    assert_eq!(scene.elements(), whole);
    assert!(connects(&scene.outside, at(NODE[0], 8080), PATIENCE));
    scene.add("late", &ports(8081));
    scene.end();
}

#[test]
fn uninstall_removes_the_table() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    let (web, _) = scene.add("web", &ports(8080));
    scene.node.stop().unwrap();
    let (bpffs, state) = (scene.node.bpffs(), scene.node.path("state"));
    let (bpffs, state) = (bpffs.to_string_lossy(), state.to_string_lossy());
    let conf = scene.node.path("net.d");
    let conf = conf.to_string_lossy();
    let words = ["uninstall", "--force", "--bpffs", &bpffs, "--state-dir", &state, "--cni-conf-dir", &conf];
    scene.node.namespace.run(|| scene.node.ctl(&words)).unwrap();
    assert!(scene.node.namespace.run(nat::shape).unwrap().is_empty());
    let _ = scene.pods.remove(web);
}
