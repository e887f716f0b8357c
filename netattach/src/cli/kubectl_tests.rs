//! `kubectl netattach` against a server that lists agents and runs commands like an API server: by WebSocket, with
//! the protocol v5.channel.k8s.io.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tungstenite::Message;
use tungstenite::handshake::server::{Request, Response};

use super::super::Exit;
use super::*;

/// A server, and the commands that were run: the node, with the namespace if it is not that of the agents, and the
/// words.
struct Server {
    kubeconfig: PathBuf,
    commands: Arc<Mutex<Vec<(String, String)>>>,
    _dir: tempfile::TempDir,
}

/// The namespace of the agents.
const AGENTS: &str = "kube-system";
/// Nodes on which every command fails, and on which no command may be run.
const BROKEN: &str = "broken";
const REFUSED: &str = "refused";
/// A node whose agent's pod does not run.
const PENDING: &str = "pending";

fn server(nodes: &'static [&'static str]) -> Server {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", listener.local_addr().unwrap())}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let commands = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&commands);
    // The thread ends with the process: it owns the listener.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, noted) = (stream.unwrap(), Arc::clone(&noted));
            std::thread::spawn(move || serve(stream, nodes, &noted));
        }
    });
    Server { kubeconfig, commands, _dir: dir }
}

fn serve(mut stream: TcpStream, nodes: &[&str], noted: &Mutex<Vec<(String, String)>>) {
    let mut start = [0; 512];
    let mut length = 0;
    while !start[..length].windows(2).any(|pair| pair == b"\r\n") {
        length = stream.peek(&mut start).unwrap();
        if length == 0 {
            return;
        }
    }
    let line = String::from_utf8_lossy(&start[..length]).lines().next().unwrap().to_owned();
    let target = line.split(' ').nth(1).unwrap().to_owned();
    if target.contains("/exec?") {
        return execute(stream, &target, noted);
    }
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() > 0 {
        head.push(byte[0]);
    }
    let body = answer(&target, nodes).to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
}

fn answer(target: &str, nodes: &[&str]) -> Value {
    let pod = |namespace: &str, name: &str, node: &str| {
        let phase = if node == PENDING { "Pending" } else { "Running" };
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name},
               "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase}})
    };
    if target.starts_with("/api/v1/namespaces/shop/pods/cart") {
        return pod("shop", "cart", "n2");
    }
    let (path, query) = target.split_once('?').unwrap();
    assert!(query.contains("labelSelector=app.kubernetes.io%2Fname%3Dnetattach"), "{target}");
    // The author of a pod can give it any labels, and `aaa` is listed first.
    let listed = match path {
        "/api/v1/pods" => vec!["aaa", AGENTS, "net"],
        "/api/v1/namespaces/kube-system/pods" => vec![AGENTS],
        "/api/v1/namespaces/net/pods" => vec!["net"],
        "/api/v1/namespaces/empty/pods" => vec![],
        _ => panic!("{target}"),
    };
    let of = |namespace| nodes.iter().map(move |node| pod(namespace, &format!("agent-{node}"), node));
    let items: Vec<Value> = listed.into_iter().flat_map(of).collect();
    json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items})
}

/// Runs a command as a kubelet would: writes to both outputs, then reports how it ended.
#[allow(clippy::result_large_err, reason = "the library's callback")]
fn execute(stream: TcpStream, target: &str, noted: &Mutex<Vec<(String, String)>>) {
    let (path, query) = target.split_once('?').unwrap();
    let parts: Vec<&str> = path.split('/').collect();
    let node = parts[6].trim_start_matches("agent-").to_owned();
    let node = if parts[4] == AGENTS { node } else { format!("{}/{node}", parts[4]) };
    let words: Vec<String> = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("command="))
        .map(|word| word.replace("%2F", "/").replace('+', " "))
        .collect();
    let mut socket = tungstenite::accept_hdr(stream, |_: &Request, mut response: Response| {
        let protocol = "v5.channel.k8s.io".parse().unwrap();
        response.headers_mut().insert("Sec-WebSocket-Protocol", protocol);
        Ok(response)
    })
    .unwrap();
    let channel = |number: u8, text: &str| Message::binary([&[number][..], text.as_bytes()].concat());
    let ended_with = |code: &str| {
        json!({"status": "Failure", "reason": "NonZeroExitCode",
               "details": {"causes": [{"reason": "ExitCode", "message": code}]}})
    };
    let status = match () {
        () if words.contains(&"shop/nope".to_owned()) => ended_with("3"),
        () if words.contains(&"shop/of-n2".to_owned()) && node != "n2" => ended_with("3"),
        () if node == BROKEN => ended_with("1"),
        () if node == REFUSED => {
            json!({"status": "Failure", "reason": "Forbidden", "message": "not allowed"})
        }
        () => json!({"status": "Success"}),
    };
    let out = if words.contains(&"shop/of-n2".to_owned()) && node != "n2" {
        String::new()
    } else if words.contains(&"shop/hostile".to_owned()) {
        "\u{1b}[2Jä\u{9b}\n".to_owned()
    } else if words.contains(&"json".to_owned()) {
        format!("[{{\"of\":\"{node}\"}}]\n")
    } else {
        format!("of {node}\n")
    };
    // Before the client knows that the command has ended.
    noted.lock().unwrap().push((node, words.join(" ")));
    socket.send(channel(1, &out)).unwrap();
    socket.send(channel(2, "a warning\n")).unwrap();
    socket.send(channel(3, &status.to_string())).unwrap();
    // The client may have closed the connection already.
    let _ = socket.close(None);
    while socket.read().is_ok() {}
}

fn run_words(server: &Server, text: &str) -> (Result<u8, (Exit, String)>, String) {
    let mut words: Vec<String> = text.split(' ').map(str::to_owned).collect();
    words.extend(["--kubeconfig".to_owned(), server.kubeconfig.display().to_string()]);
    let mut out = Vec::new();
    let code = run(words, &mut out).map_err(|error| (error.exit(), Chain(&error).to_string()));
    (code, String::from_utf8(out).unwrap())
}

#[test]
fn a_command_is_run_in_the_agents_pod_of_a_node_and_its_exit_code_is_passed_on() {
    let server = server(&["n1", "n2"]);
    let noted = |server: &Server| std::mem::take(&mut *server.commands.lock().unwrap());
    let pair = |node: &str, words: &str| (node.to_owned(), words.to_owned());
    assert_eq!(run_words(&server, "status --node n1"), (Ok(0), "of n1\n".to_owned()));
    assert_eq!(noted(&server), [pair("n1", "netattachctl status")]);
    // The request goes to the pod's node.
    assert_eq!(run_words(&server, "attachments --pod shop/cart -o wide"), (Ok(0), "of n2\n".to_owned()));
    assert_eq!(noted(&server), [pair("n2", "netattachctl attachments --pod shop/cart -o wide")]);
    assert_eq!(run_words(&server, "attachments --node n1 --pod shop/nope").0, Ok(3));
    noted(&server);
    let (code, out) = run_words(&server, "stats -A -o json");
    assert_eq!(code, Ok(0));
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json, json!({"n1": [{"of": "n1"}], "n2": [{"of": "n2"}]}));
    let mut commands = noted(&server);
    commands.sort();
    let words = "netattachctl stats -o json";
    assert_eq!(commands, [pair("n1", words), pair("n2", words)]);
    assert_eq!(run_words(&server, "status -A"), (Ok(0), "NODE n1\nof n1\n\nNODE n2\nof n2\n\n".to_owned()));
}

#[test]
fn what_a_terminal_acts_on_is_written_out_in_text_for_people_and_data_is_passed_on_as_it_is() {
    let server = server(&["n1"]);
    let shown = |more: &str| run_words(&server, &format!("attachments --pod shop/hostile --node n1{more}"));
    assert_eq!(shown(""), (Ok(0), "\\u{1b}[2Jä\\u{9b}\n".to_owned()));
    assert_eq!(shown(" -o name"), (Ok(0), "\\u{1b}[2Jä\\u{9b}\n".to_owned()));
    assert_eq!(shown(" -o json"), (Ok(0), "\u{1b}[2Jä\u{9b}\n".to_owned()));
    let everywhere = run_words(&server, "attachments --pod shop/hostile -A");
    assert_eq!(everywhere, (Ok(0), "NODE n1\n\\u{1b}[2Jä\\u{9b}\n\n".to_owned()));
}

#[test]
fn a_node_that_is_not_named_or_not_there_is_refused_with_those_there_are() {
    let server = server(&["n1", "n2"]);
    let refused = |text: &str| run_words(&server, text).0.unwrap_err();
    assert_eq!(
        refused("status"),
        (Exit::Usage, "name the node by --node, or ask every node by -A; agents run on n1, n2".to_owned())
    );
    assert_eq!(
        refused("status --node n9"),
        (Exit::NotFound, "no agent runs on node n9; agents run on n1, n2".to_owned())
    );
    assert_eq!(
        refused("flows --follow -A"),
        (Exit::Usage, "this command asks one node: name it by --node".to_owned())
    );
    assert!(server.commands.lock().unwrap().is_empty());
}

#[test]
fn a_node_whose_agent_does_not_run_is_told_of_and_counts_as_one_that_cannot_be_asked() {
    let some = server(&["n1", PENDING]);
    assert_eq!(run_words(&some, "status -A"), (Ok(4), "NODE n1\nof n1\n\n".to_owned()));
    assert_eq!(run_words(&some, "attachments -A -o name"), (Ok(4), "of n1\n".to_owned()));
    let why = "no agent can be asked: pending: its agent's pod kube-system/agent-pending is Pending";
    let refused = (Exit::NoAgent, why.to_owned());
    assert_eq!(run_words(&some, "status --node pending").0.unwrap_err(), refused);
    // It is ambiguous which of two nodes is meant, because one of them cannot be queried.
    let ambiguous = "name the node by --node, or ask every node by -A; agents run on n1".to_owned();
    assert_eq!(run_words(&some, "status").0.unwrap_err(), (Exit::Usage, ambiguous));

    let none = server(&[PENDING]);
    assert_eq!(run_words(&none, "status").0.unwrap_err(), refused);
    assert_eq!(run_words(&none, "status -A"), (Ok(4), String::new()));
}

#[test]
fn nodes_without_what_is_asked_for_are_silent_if_another_has_it() {
    let server = server(&["n1", "n2"]);
    let of = |pod: &str| run_words(&server, &format!("attachments -A --pod {pod}"));
    assert_eq!(of("shop/of-n2"), (Ok(0), "NODE n2\nof n2\n\n".to_owned()));
    assert_eq!(of("shop/nope").0, Ok(3));
}

/// Pods with the labels of agents in another namespace are not queried, and their answers are not trusted.
#[test]
fn only_pods_of_the_agents_namespace_are_agents() {
    let server = server(&["n1", "n2"]);
    let noted = |server: &Server| std::mem::take(&mut *server.commands.lock().unwrap());
    let pair = |node: &str, words: &str| (node.to_owned(), words.to_owned());
    assert_eq!(run_words(&server, "status --node n1"), (Ok(0), "of n1\n".to_owned()));
    assert_eq!(noted(&server), [pair("n1", "netattachctl status")]);
    assert_eq!(run_words(&server, "status -A").0, Ok(0));
    let mut commands = noted(&server);
    commands.sort();
    assert_eq!(commands, [pair("n1", "netattachctl status"), pair("n2", "netattachctl status")]);
    let (code, out) = run_words(&server, "sysdump --file - --node n2 --agents-namespace=net");
    assert_eq!((code, out.as_str()), (Ok(0), "of net/n2\n"));
    assert_eq!(noted(&server), [pair("net/n2", "netattachctl sysdump --file -")]);
    assert_eq!(
        run_words(&server, "status --node n1 --agents-namespace empty").0.unwrap_err(),
        (
            Exit::NotFound,
            "no agent's pod with labels app.kubernetes.io/name=netattach runs in namespace empty; --agents-namespace names \
             another namespace, --agents other labels"
                .to_owned()
        )
    );
    assert_eq!(noted(&server), []);
}

/// The archive is created in the agent's pod and written here; a partial archive is removed.
#[test]
fn an_archive_of_a_node_is_a_file_of_this_machine_or_none() {
    let server = server(&["n1", BROKEN, REFUSED]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("dump.tar.gz");
    let dump = |node: &str| run_words(&server, &format!("sysdump --file {} --node {node}", file.display()));

    assert_eq!(dump("n1"), (Ok(0), format!("{}: of node n1\n", file.display())));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "of n1\n");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let command = "netattachctl sysdump --file -".to_owned();
    assert_eq!(std::mem::take(&mut *server.commands.lock().unwrap()), [("n1".to_owned(), command.clone())]);

    // An existing file is not overwritten, and no agent is queried.
    let (refused, out) = dump("n1");
    let (exit, why) = refused.unwrap_err();
    assert_eq!((exit, out.as_str()), (Exit::Failed, ""));
    assert!(why.contains(file.to_str().unwrap()) && why.contains("File exists"), "{why}");
    assert!(server.commands.lock().unwrap().is_empty());
    std::fs::remove_file(&file).unwrap();

    assert_eq!(dump(BROKEN), (Ok(1), String::new()));
    assert!(!file.exists(), "what there is of it is of no use");
    let (refused, out) = dump(REFUSED);
    let (exit, why) = refused.unwrap_err();
    assert_eq!((exit, out.as_str()), (Exit::NoAgent, ""));
    assert!(why.contains("not allowed"), "{why}");
    assert!(!file.exists());

    // To standard output the archive is passed on unchanged.
    let (code, out) = run_words(&server, "sysdump --file - --node n1");
    assert_eq!((code, out.as_str()), (Ok(0), "of n1\n"));
    assert_eq!(
        run_words(&server, "sysdump -A").0.unwrap_err(),
        (Exit::Usage, "this command asks one node: name it by --node".to_owned())
    );
}
