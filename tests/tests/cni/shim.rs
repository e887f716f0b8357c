//! The CNI executable against agents that are absent, slow, old, or that close the connection.
//!
//! The executable is taken from the directory `NETATTACH_DIST`, or else from beside this test.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netattach::budget;
use netattach::rpc::frame;
use netattach::rpc::message::{CniCall, CniReply, Hello, PROTOCOL, Request, Response};
use netattach::rpc::pending;
use serde_json::{Value, json};
use tempfile::TempDir;

/// More than a call that does not wait takes on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

/// The outcome of one run of the executable.
#[derive(Debug, PartialEq)]
struct Outcome {
    exit: i32,
    stdout: String,
    stderr: String,
}

struct Node {
    dir: TempDir,
}

impl Node {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    fn config(&self) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": "net", "type": "netattach",
            "socket": self.socket(), "stateDir": self.dir.path(), "agentWaitSeconds": 1
        })
    }

    fn run(&self, verb: &str) -> Outcome {
        run(
            &[
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", "abc"),
                ("CNI_IFNAME", "eth0"),
                ("NETATTACH_TIMEOUT", "0.2"),
                ("HOME", "/root"),
            ],
            &self.config(),
        )
    }

    /// The call as the agent should receive it.
    fn call(&self, verb: &str) -> CniCall {
        let env = [("CNI_COMMAND", verb), ("CNI_CONTAINERID", "abc"), ("CNI_IFNAME", "eth0")];
        CniCall {
            env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            stdin: self.config().to_string(),
        }
    }

    /// Serves one connection after the other with `agents`, then closes the socket.
    fn serve(&self, agents: Vec<fn(UnixStream)>) -> JoinHandle<()> {
        let listener = UnixListener::bind(self.socket()).unwrap();
        std::thread::spawn(move || {
            for agent in agents {
                agent(listener.accept().unwrap().0);
            }
        })
    }

    fn pending(&self) -> Vec<(PathBuf, CniCall)> {
        let pending = pending::list(self.dir.path()).unwrap();
        let with_call = |path: PathBuf| (path.clone(), pending::read(&path).unwrap().call);
        pending.into_iter().map(|pending| with_call(pending.path)).collect()
    }
}

fn executable() -> PathBuf {
    match std::env::var_os("NETATTACH_DIST") {
        Some(dist) => Path::new(&dist).join("netattach"),
        None => {
            let test = std::env::current_exe().unwrap();
            let built = test.ancestors().nth(2).unwrap().join("netattach");
            assert!(built.is_file(), "{} is not built: cargo build -p netattach", built.display());
            built
        }
    }
}

fn run(variables: &[(&str, &str)], config: &Value) -> Outcome {
    let mut child = Command::new(executable())
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    match child.stdin.take().unwrap().write_all(config.to_string().as_bytes()) {
        // VERSION ends without reading.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        written => written.unwrap(),
    }
    let output = child.wait_with_output().unwrap();
    Outcome {
        exit: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The outcome of an error of that code.
fn failure(code: u32, message: &str) -> Outcome {
    let object = json!({"cniVersion": "1.0.0", "code": code, "msg": message});
    let mut stdout = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(
        &mut stdout,
        serde_json::ser::PrettyFormatter::with_indent(b"    "),
    );
    serde::Serialize::serialize(&object, &mut serializer).unwrap();
    Outcome { exit: 1, stdout: format!("{}\n", String::from_utf8(stdout).unwrap()), stderr: String::new() }
}

fn greet(stream: &mut UnixStream) {
    let mut frames = Vec::new();
    frame::append(&mut frames, &Hello::ours()).unwrap();
    stream.write_all(&frames).unwrap();
}

fn request(stream: &mut UnixStream) -> Request {
    let hello: Hello = serde_json::from_slice(&frame::read(stream).unwrap()).unwrap();
    assert_eq!(hello, Hello::ours());
    serde_json::from_slice(&frame::read(stream).unwrap()).unwrap()
}

/// Answers with the call itself, exit code 7.
fn echo(mut stream: UnixStream) {
    greet(&mut stream);
    let Request::Cni(call) = request(&mut stream) else { panic!("not a CNI call") };
    let reply = CniReply { stdout: serde_json::to_string(&call).unwrap(), exit: 7 };
    let mut frames = Vec::new();
    frame::append(&mut frames, &Response::Cni(reply)).unwrap();
    stream.write_all(&frames).unwrap();
}

/// Reads the request and closes the connection, like an agent that is killed.
fn hang_up(mut stream: UnixStream) {
    greet(&mut stream);
    request(&mut stream);
}

/// Reads the request and sends nothing until the executable gives up.
fn fall_silent(mut stream: UnixStream) {
    greet(&mut stream);
    request(&mut stream);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

/// Sends the greeting of another protocol version and closes the connection without reading.
fn be_newer(mut stream: UnixStream) {
    let mut frames = Vec::new();
    frame::append(&mut frames, &Hello { protocol: PROTOCOL + 1, version: "9.0.0".to_owned() }).unwrap();
    stream.write_all(&frames).unwrap();
}

/// Acts as an unrelated server.
fn be_garbage(mut stream: UnixStream) {
    stream.write_all(b"\0\0\0\x05hello").unwrap();
}

fn refuse(mut stream: UnixStream) {
    greet(&mut stream);
    request(&mut stream);
    let mut frames = Vec::new();
    frame::append(&mut frames, &Response::Refused("not today".to_owned())).unwrap();
    stream.write_all(&frames).unwrap();
}

#[test]
fn a_call_is_handed_over_whole_and_the_reply_as_it_is() {
    let node = Node::new();
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS", "FOO"] {
        let agent = node.serve(vec![echo]);
        let stdout = serde_json::to_string(&node.call(verb)).unwrap();
        assert_eq!(node.run(verb), Outcome { exit: 7, stdout, stderr: String::new() });
        agent.join().unwrap();
        fs::remove_file(node.socket()).unwrap();
    }
    assert_eq!(node.pending(), []);
}

#[test]
fn an_absent_agent_is_reported_at_once() {
    let node = Node::new();
    let absent = format!(
        "the agent does not answer at {}: is netattachd running, and with this socket?",
        node.socket().display()
    );
    for (verb, code) in [("ADD", 11), ("CHECK", 11), ("GC", 11), ("STATUS", 50)] {
        let start = Instant::now();
        let expected = failure(code, &format!("{verb}: {absent}: No such file or directory (os error 2)"));
        assert_eq!(node.run(verb), expected);
        assert!(start.elapsed() < AT_ONCE, "{verb} took {:?}", start.elapsed());
    }
    drop(UnixListener::bind(node.socket()).unwrap());
    let expected = failure(11, &format!("ADD: {absent}: Connection refused (os error 111)"));
    assert_eq!(node.run("ADD"), expected);
    assert_eq!(node.pending(), []);
}

#[test]
fn an_agent_that_comes_back_within_the_patience_is_found() {
    let node = Node::new();
    for verb in ["ADD", "CHECK"] {
        drop(UnixListener::bind(node.socket()).unwrap());
        let mut config = node.config();
        config["agentWaitSeconds"] = json!(60);
        let variables = [("CNI_COMMAND", verb), ("CNI_CONTAINERID", "abc"), ("CNI_IFNAME", "eth0")];
        std::thread::scope(|scope| {
            let call = scope.spawn(|| run(&variables, &config));
            std::thread::sleep(Duration::from_secs(2));
            assert!(!call.is_finished(), "{verb}");
            fs::remove_file(node.socket()).unwrap();
            let agent = node.serve(vec![echo]);
            assert_eq!(call.join().unwrap().exit, 7, "{verb}");
            agent.join().unwrap();
        });
        fs::remove_file(node.socket()).unwrap();
    }
}

#[test]
fn del_without_an_agent_is_recorded_once_and_is_a_success() {
    let node = Node::new();
    for _ in 0..2 {
        let start = Instant::now();
        let outcome = node.run("DEL");
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        let [(record, call)] = <[_; 1]>::try_from(node.pending()).unwrap();
        assert_eq!(call, node.call("DEL"));
        let stderr = format!(
            "netattach: DEL is recorded in {} for the agent, which carries it out when it runs: \
             the agent does not answer at {}: is netattachd running, and with this socket?: \
             No such file or directory (os error 2)\n",
            record.display(),
            node.socket().display()
        );
        assert_eq!(outcome, Outcome { exit: 0, stdout: String::new(), stderr });
    }
}

#[test]
fn del_beyond_what_may_wait_is_an_error() {
    let node = Node::new();
    assert_eq!(node.run("DEL").exit, 0);
    let (record, _) = node.pending().remove(0);
    for number in 0..budget::WAITING_DELS.most {
        fs::hard_link(&record, record.with_file_name(format!("{number}.del.json"))).unwrap();
    }
    assert_eq!(node.run("DEL").exit, 0, "it waits already");
    fs::remove_file(&record).unwrap();
    let outcome = node.run("DEL");
    let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((outcome.exit, &error["code"]), (1, &json!(11)));
    let message = error["msg"].as_str().unwrap();
    assert!(
        message.contains("DELs that wait for an agent: 4097 requests, and at most 4096 are allowed"),
        "{message}"
    );
}

#[test]
fn del_that_can_neither_be_done_nor_recorded_says_so() {
    let node = Node::new();
    fs::write(node.dir.path().join("pending"), "a file in the way").unwrap();
    let expected = failure(
        11,
        &format!(
            "DEL is not done and could not be recorded (record the DEL request in {}: File exists (os error 17)): \
             repeat it: the agent does not answer at {}: is netattachd running, and with this socket?: \
             No such file or directory (os error 2)",
            node.dir.path().join("pending").display(),
            node.socket().display()
        ),
    );
    assert_eq!(node.run("DEL"), expected);
}

#[test]
fn an_agent_that_hangs_up_leaves_the_outcome_open() {
    let node = Node::new();
    let agent = node.serve(vec![hang_up]);
    let expected = format!(
        "ADD: the connection to the agent at {} broke: the connection was closed",
        node.socket().display()
    );
    assert_eq!(node.run("ADD"), failure(11, &expected));
    agent.join().unwrap();
    assert_eq!(node.pending(), []);
}

#[test]
fn del_broken_off_is_recorded_and_sent_again_to_the_agent_that_follows() {
    let node = Node::new();
    let agent = node.serve(vec![hang_up, echo]);
    let stdout = serde_json::to_string(&node.call("DEL")).unwrap();
    assert_eq!(node.run("DEL"), Outcome { exit: 7, stdout, stderr: String::new() });
    agent.join().unwrap();
    assert_eq!(node.pending(), []);

    fs::remove_file(node.socket()).unwrap();
    let agent = node.serve(vec![hang_up]);
    assert_eq!(node.run("DEL").exit, 0);
    agent.join().unwrap();
    assert_eq!(node.pending().into_iter().map(|(_, call)| call).collect::<Vec<_>>(), [node.call("DEL")]);
}

#[test]
fn a_silent_agent_is_given_up_after_the_patience() {
    let node = Node::new();
    let agent = node.serve(vec![fall_silent]);
    let expected = format!("ADD: the agent at {} did not answer within 200ms", node.socket().display());
    assert_eq!(node.run("ADD"), failure(11, &expected));
    agent.join().unwrap();
}

#[test]
fn a_del_that_a_silent_agent_does_not_answer_is_recorded() {
    let node = Node::new();
    let agent = node.serve(vec![fall_silent]);
    let outcome = node.run("DEL");
    agent.join().unwrap();
    let [(record, call)] = <[_; 1]>::try_from(node.pending()).unwrap();
    assert_eq!(call, node.call("DEL"));
    let stderr = format!(
        "netattach: DEL is recorded in {} for the agent, which carries it out when it runs: \
         the agent at {} did not answer within 200ms\n",
        record.display(),
        node.socket().display()
    );
    assert_eq!(outcome, Outcome { exit: 0, stdout: String::new(), stderr });
}

#[test]
fn an_agent_of_another_protocol_is_named_with_both_versions() {
    let node = Node::new();
    let agent = node.serve(vec![be_newer]);
    let expected = format!(
        "ADD: the agent at {} is version 9.0.0 and speaks protocol 2, this is version {} with protocol 1: \
         install both from one release",
        node.socket().display(),
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(node.run("ADD"), failure(11, &expected));
    agent.join().unwrap();
}

#[test]
fn another_server_on_the_socket_is_recognised() {
    let node = Node::new();
    let agent = node.serve(vec![be_garbage]);
    let expected = format!(
        "ADD: the listener at {} sent something that is not a message of the agent: expected value at line 1 column 1",
        node.socket().display()
    );
    assert_eq!(node.run("ADD"), failure(11, &expected));
    agent.join().unwrap();
}

#[test]
fn a_refusal_is_an_answer_and_records_nothing() {
    let node = Node::new();
    let agent = node.serve(vec![refuse]);
    let expected = format!("DEL: the agent at {} refused: not today", node.socket().display());
    assert_eq!(node.run("DEL"), failure(11, &expected));
    agent.join().unwrap();
    assert_eq!(node.pending(), []);
}

/// Rows: NPWG-2.1-cni-plugin.
#[test]
fn version_needs_no_agent() {
    let outcome = run(&[("CNI_COMMAND", "VERSION")], &json!({"cniVersion": "1.1.0"}));
    assert_eq!((outcome.exit, outcome.stderr.as_str()), (0, ""));
    let versions: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let supported = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
    assert_eq!(versions, json!({"cniVersion": "1.1.0", "supportedVersions": supported}));
}
