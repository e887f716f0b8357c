//! Commands against an agent with given answers.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::cni::code;
use crate::error_chain::Chain;
use crate::rpc::frame;
use crate::rpc::message::{Attachment, AttachmentStats, Failure, Hello, Kind, Level, State, Traffic};

pub(super) fn name(id: u32, pod: &str, network: &str, ifname: &str) -> AttachmentName {
    AttachmentName {
        id: Some(id),
        pod: pod.parse().ok(),
        network: network.to_owned(),
        ifname: ifname.to_owned(),
    }
}

/// Commands whose answers are tables of texts from authors.
const TABLES: [&[&str]; 9] = [
    &["attachments"],
    &["stats"],
    &["policy"],
    &["policy", "dump"],
    &["explain", "shop/cart", "shop/db", "80"],
    &["pools", "--holders"],
    &["status"],
    &["top", "--once", "--interval", "100ms"],
    &["graph"],
];

fn arguments(socket: &Path, words: &[&str]) -> Arguments {
    let socket = socket.to_str().unwrap();
    Arguments::try_parse_from(["netattachctl", "--socket", socket].iter().chain(words)).unwrap()
}

/// Runs the command against an agent that gives this answer to every request.
fn run_against(answer: &Response, words: &[&str]) -> (String, Result<(), CliError>) {
    run_with(|_| answer.clone(), words)
}

/// Runs the command against an agent with these answers.
pub(super) fn run_with(
    answer: impl Fn(&Request) -> Response + Sync,
    words: &[&str],
) -> (String, Result<(), CliError>) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok((mut client, _)) = listener.accept() {
                if has_ended.load(Ordering::SeqCst) {
                    return;
                }
                frame::read(&mut client).unwrap();
                let request: Request = serde_json::from_slice(&frame::read(&mut client).unwrap()).unwrap();
                let mut frames = Vec::new();
                frame::append(&mut frames, &Hello::ours()).unwrap();
                frame::append(&mut frames, &answer(&request)).unwrap();
                client.write_all(&frames).unwrap();
            }
        });
        let mut out = Vec::new();
        let result = run(&arguments(&socket, words), &mut out);
        has_ended.store(true, Ordering::SeqCst);
        UnixStream::connect(&socket).unwrap();
        (String::from_utf8(out).unwrap(), result)
    })
}

/// Returns an attachment with that name and container.
pub(super) fn attachment(name: AttachmentName, container_id: &str) -> Attachment {
    Attachment {
        name,
        container_id: container_id.to_owned(),
        kind: Kind::Native("veth".to_owned()),
        mac: None,
        addresses: vec![],
        host_interface: None,
        enforcement: Level::Full,
        enforcement_detail: String::new(),
        programs_wait: false,
        fast_path: None,
        state: State::Attached,
    }
}

/// Returns statistics of an attachment without traffic.
pub(super) fn idle(name: AttachmentName) -> AttachmentStats {
    AttachmentStats {
        name,
        received: Traffic::default(),
        sent: Traffic::default(),
        dropped: [].into(),
        fast: Traffic::default(),
        fast_sent: Default::default(),
        left_to_stack: [].into(),
        records_withheld: 0,
        records_lost: 0,
        flows: 0,
        new_flows: 0,
        flows_displaced: 0,
    }
}

fn stats() -> Response {
    let row = |name| AttachmentStats { sent: Traffic { packets: 1, bytes: 60 }, ..idle(name) };
    Response::Stats(vec![
        row(name(1, "shop/cart-0", "shop/blue", "net1")),
        row(name(2, "shop/cart-1", "shop/blue", "net1")),
        row(name(3, "shop/cart-1", "ops/blue", "net2")),
    ])
}

fn shown(words: &[&str]) -> Vec<u64> {
    let words: Vec<_> = ["-o", "json", "stats"].iter().chain(words).copied().collect();
    let (out, result) = run_against(&stats(), &words);
    assert_eq!(result.is_ok(), out != "[]\n");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    rows.iter().map(|row| row["id"].as_u64().unwrap()).collect()
}

#[test]
fn filters_leave_what_matches_all_of_them() {
    assert_eq!(shown(&[]), [1, 2, 3]);
    assert_eq!(shown(&["--pod", "shop/cart-1"]), [2, 3]);
    assert_eq!(shown(&["--network", "blue"]), [1, 2, 3]);
    assert_eq!(shown(&["--network", "ops/blue"]), [3]);
    assert_eq!(shown(&["--pod", "shop/cart-0", "--network", "ops/blue"]), [] as [u64; 0]);
}

#[test]
fn json_is_an_object_per_row_with_stable_names() {
    let (out, result) = run_against(&stats(), &["stats", "--pod", "shop/cart-0", "-o", "json"]);
    result.unwrap();
    assert_eq!(
        out,
        r#"[
  {
    "id": 1,
    "pod": {
      "namespace": "shop",
      "name": "cart-0"
    },
    "network": "shop/blue",
    "ifname": "net1",
    "received": {
      "packets": 0,
      "bytes": 0
    },
    "sent": {
      "packets": 1,
      "bytes": 60
    },
    "dropped": {},
    "fast": {
      "packets": 0,
      "bytes": 0
    },
    "fast_sent": {
      "packets": 0,
      "bytes": 0
    },
    "left_to_stack": {},
    "flows": 0,
    "new_flows": 0
  }
]
"#
    );
}

#[test]
fn nothing_to_show_says_what_to_do_next() {
    let (out, result) = run_against(&Response::Attachments(vec![]), &["attachments"]);
    result.unwrap();
    assert_eq!(
        out,
        "No attachments on this node.\n\
             A pod gets one from its k8s.v1.cni.cncf.io/networks annotation, through a container runtime that calls netattach.\n\
             Whether the agent is ready, and what it could not read: netattachctl status\n"
    );
    is_narrow(&out);
}

#[test]
fn a_filter_that_matches_nothing_is_an_error_with_its_own_code_in_either_form() {
    for (form, shown) in [("table", ""), ("json", "[]\n")] {
        let (out, result) = run_against(&stats(), &["stats", "--pod", "a/b", "--network", "c", "-o", form]);
        let error = result.unwrap_err();
        assert_eq!(
            error.to_string(),
            "pod a/b is not attached on this node; attached pods: shop/cart-0, shop/cart-1"
        );
        assert_eq!((error.exit(), out.as_str()), (Exit::NotFound, shown));
    }
    let failure = |code, not_there| Failure { code, message: "pod a/b is not known".into(), not_there };
    for words in [&["detach", "a/b", "net1"][..], &["attach", "a/b", "lan"], &["explain", "a/b", "c/d", "80"]]
    {
        for (code, not_there, exit) in [
            (code::UNKNOWN_CONTAINER, false, Exit::NotFound),
            (code::INVALID_CONFIG, true, Exit::NotFound),
            (code::INVALID_CONFIG, false, Exit::Failed),
        ] {
            let (_, result) = run_against(&Response::Failed(failure(code, not_there)), words);
            assert_eq!(result.unwrap_err().exit(), exit, "{words:?}");
        }
    }
}

#[test]
fn an_absent_agent_is_one_line() {
    let arguments = arguments(Path::new("/nonexistent/agent.sock"), &["status"]);
    let error = run(&arguments, &mut Vec::new()).unwrap_err();
    assert_eq!(
        Chain(&error).to_string(),
        "the agent does not answer at /nonexistent/agent.sock: is netattachd running, and with this socket?: \
             No such file or directory (os error 2)"
    );
    assert_eq!(error.exit(), Exit::NoAgent);
}

#[test]
fn another_answer_than_asked_for_is_an_error() {
    let (_, result) = run_against(&stats(), &["attachments"]);
    assert_eq!(result.unwrap_err().to_string(), "the agent's answer is not one to attachments");
}

#[test]
fn the_command_line_is_consistent() {
    use clap::CommandFactory;
    Arguments::command().debug_assert();
}

/// Returns the answer to a request from the golden files of the protocol.
fn golden_answer(request: &Request) -> Response {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../rpc/golden/responses.json")).unwrap();
    let wanted = match request {
        Request::Attach(_) => "attached",
        Request::Detach(_) => return Response::Detached,
        Request::Explain(_) => "explanation",
        Request::PolicyDump(_) => "policy_dump",
        Request::Select(_) => "selected",
        other => other.name(),
    };
    let answers = golden["responses"].as_array().unwrap();
    let answer = answers.iter().find(|answer| answer.get(wanted).is_some());
    serde_json::from_value(answer.unwrap_or_else(|| panic!("no answer {wanted}")).clone()).unwrap()
}

/// Every command that has a form for programs, with the name of its golden file.
const GOLDEN: [(&str, &[&str]); 10] = [
    ("attachments", &["attachments"]),
    ("stats", &["stats"]),
    ("policy", &["policy"]),
    ("policy-dump", &["policy", "dump"]),
    ("explain", &["explain", "shop/cart", "shop/db", "80"]),
    ("flows", &["flows"]),
    ("pools", &["pools"]),
    ("status", &["status"]),
    ("attach", &["attach", "shop/db", "lan"]),
    ("detach", &["detach", "shop/db", "net9"]),
];

fn golden_file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/golden").join(format!("{name}.json"))
}

pub(super) fn same_as_golden(name: &str, text: &str) {
    same_file(&format!("src/cli/golden/{name}.json"), text);
}

/// Compares the text with a file of the package, or writes the file if `NETATTACH_WRITE_GOLDEN` is set.
pub(super) fn same_file(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("NETATTACH_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{}", path.display());
}

#[test]
fn the_json_of_every_command_is_pinned_and_its_yaml_says_the_same() {
    for (name, words) in GOLDEN {
        let (json, _) = run_with(golden_answer, &[words, &["-o", "json"]].concat());
        same_as_golden(name, &json);
        let (yaml, _) = run_with(golden_answer, &[words, &["-o", "yaml"]].concat());
        // `flows` is endless: its values come one by one.
        let json: Vec<serde_json::Value> =
            serde_json::Deserializer::from_str(&json).into_iter().map(Result::unwrap).collect();
        let documents = serde_norway::Deserializer::from_str(&yaml);
        let yaml: Vec<serde_json::Value> =
            documents.map(|it| serde::Deserialize::deserialize(it).unwrap()).collect();
        assert_eq!(yaml, json, "{name}");
    }
}

/// Compares the data that a command prints for programs, or would print, with its golden file.
pub(super) fn is_pinned(name: &str, value: &impl serde::Serialize) {
    let text = super::output::Format::Json.data(value).unwrap().unwrap();
    same_as_golden(name, &text);
}

#[test]
fn every_command_has_a_golden_file() {
    use clap::CommandFactory;
    for command in Arguments::command().get_subcommands().map(clap::Command::get_name) {
        // It prints scripts.
        let has_no_data = command == "completion";
        assert_eq!(golden_file(command).exists(), !has_no_data, "{command}");
    }
}

#[test]
fn the_page_names_every_command_that_takes_a_filter() {
    use clap::CommandFactory;
    let page = include_str!("../../../docs/inspecting.md");
    let paragraph = page.split("\n\n").find(|paragraph| paragraph.contains("`--container-id`")).unwrap();
    let named = paragraph.split(" take ").next().unwrap().split('`').skip(1).step_by(2);
    let mut named: Vec<String> = named.map(str::to_owned).collect();
    named.sort();
    let command = Arguments::command();
    let takes = |command: &&clap::Command| {
        command.get_arguments().any(|argument| argument.get_long() == Some("selector"))
    };
    let mut taking: Vec<String> =
        command.get_subcommands().filter(takes).map(|command| command.get_name().to_owned()).collect();
    taking.sort();
    assert_eq!(named, taking, "docs/inspecting.md, left, and the code, right");
}

/// The paths of the keys of a value, such as `ranges[].free`, each with whether one of its values is null.
fn paths(value: &serde_json::Value, path: &str, found: &mut std::collections::BTreeMap<String, bool>) {
    match value {
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| paths(value, &format!("{path}[]"), found));
        }
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                let below = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                *found.entry(below.clone()).or_default() |= value.is_null();
                // Counts by reason have the reasons as keys.
                if !["dropped", "left_to_stack"].contains(&below.as_str()) {
                    paths(value, &below, found);
                }
            }
        }
        _ => {}
    }
}

/// The section of docs/json.md about a command; `policy dump` for the file `policy-dump`.
fn section_of<'page>(page: &'page str, file: &str) -> &'page str {
    let command = format!("`{}`", file.replace('-', " "));
    let is_about = |section: &&str| section.lines().next().is_some_and(|heading| heading.contains(&command));
    page.split("\n## ").find(is_about).unwrap_or_else(|| panic!("docs/json.md has no section {command}"))
}

/// Whether a section has the path of a key, and says that it may be null if it is null.
fn is_documented(section: &str, path: &str, is_null: bool) -> bool {
    // Objects and names of an attachment that several commands have.
    const OF_OBJECTS: [&str; 4] = ["namespace", "name", "packets", "bytes"];
    const NULL: [&str; 2] = ["id", "pod"];
    let written = |path: &str| format!("`{path}`");
    let last = path.rsplit('.').next().unwrap_or_default();
    let is_shared =
        |(above, last): (&str, &str)| OF_OBJECTS.contains(&last) && section.contains(&written(above));
    if path.rsplit_once('.').is_some_and(is_shared) {
        return true;
    }
    let mut lines = section.lines().filter(|line| line.contains(&written(path))).peekable();
    lines.peek().is_some() && (!is_null || NULL.contains(&last) || lines.any(|line| line.contains("null")))
}

/// Every key of every golden file is in the section of its command, at its place: whoever writes a script takes it from there.
#[test]
fn every_key_of_the_json_is_documented() {
    let page = include_str!("../../../docs/json.md");
    let mut lacking = Vec::new();
    for entry in std::fs::read_dir(golden_file("x").parent().unwrap()).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let section = section_of(page, &name);
        // A result in `attach` has the form of the CNI specification, and `import` has settings, with the keys of
        // docs/configuration.md.
        if ["attach", "import"].contains(&&*name) {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let mut found = std::collections::BTreeMap::new();
        for value in serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>() {
            match value.unwrap() {
                serde_json::Value::Array(rows) => rows.iter().for_each(|row| paths(row, "", &mut found)),
                value => paths(&value, "", &mut found),
            }
        }
        let found = found.into_iter().filter(|(path, is_null)| !is_documented(section, path, *is_null));
        lacking.extend(found.map(|(path, _)| format!("{name}: {path}")));
    }
    assert_eq!(lacking, [""; 0], "docs/json.md");
}

#[test]
fn a_key_is_documented_at_its_place_alone() {
    let section = "| `ranges` | |\n| `ranges[].free` | a number |\n| `ranges[].first`, `pod`* | null: none |\n\
                   | `sent` | |\n";
    let table = [
        ("ranges[].free", false, true),
        ("ranges[].free", true, false),
        ("ranges[].first", true, true),
        ("free", false, false),
        ("pod.name", false, true),
        ("pod.node", false, false),
        ("sent.bytes", false, true),
        ("left.bytes", false, false),
    ];
    for (path, is_null, expected) in table {
        assert_eq!(is_documented(section, path, is_null), expected, "{path}");
    }
}

#[test]
fn no_table_is_wider_than_a_hundred_and_twenty_columns() {
    let long = |text: &str| format!("{text}-{}", "x".repeat(200));
    let lengthen = |request: &Request| {
        let mut answer = serde_json::to_value(golden_answer(request)).unwrap();
        fn each(value: &mut serde_json::Value, long: &impl Fn(&str) -> String) {
            match value {
                serde_json::Value::Array(values) => values.iter_mut().for_each(|value| each(value, long)),
                serde_json::Value::Object(object) => {
                    for (key, value) in object {
                        match (key.as_str(), value.as_str()) {
                            (
                                "name" | "namespace" | "network" | "host_interface" | "container_id"
                                | "attachment" | "from" | "directory" | "by",
                                Some(text),
                            ) => {
                                *value = long(text).into();
                            }
                            _ => each(value, long),
                        }
                    }
                }
                _ => {}
            }
        }
        each(&mut answer, &long);
        serde_json::from_value(answer).unwrap()
    };
    for words in TABLES {
        for answer in [&golden_answer as &(dyn Fn(&Request) -> Response + Sync), &lengthen] {
            let (text, _) = run_with(answer, words);
            assert!(text.lines().count() > 1, "{words:?}: {text}");
            is_narrow(&text);
        }
    }
}

/// Text that an author of pods, definitions or policies may have written into a name or a message.
const HOSTILE: &str = "\u{1b}]0;x\u{7}\u{9b}2J\u{202e}\nFORGED";

/// Makes every name and message of an answer hostile.
fn poison(value: &mut serde_json::Value) {
    const TEXTS: [&str; 18] = [
        "name",
        "namespace",
        "network",
        "networks",
        "ifname",
        "host_interface",
        "container_id",
        "attachment",
        "from",
        "directory",
        "by",
        "object",
        "problem",
        "detail",
        "why",
        "reason",
        "selected_by",
        "decided_by",
    ];
    match value {
        serde_json::Value::Array(values) => values.iter_mut().for_each(poison),
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                let texts = match value {
                    serde_json::Value::Array(texts) if TEXTS.contains(&key.as_str()) => texts.as_mut_slice(),
                    value if TEXTS.contains(&key.as_str()) => std::slice::from_mut(value),
                    value => {
                        poison(value);
                        continue;
                    }
                };
                for text in texts {
                    match text.as_str() {
                        Some(clean) => *text = format!("{clean}{HOSTILE}").into(),
                        None => poison(text),
                    }
                }
            }
        }
        _ => {}
    }
}

/// Returns the answer of the golden files, with a problem of an object, and hostile.
fn hostile_answer(request: &Request) -> Response {
    let mut answer = serde_json::to_value(golden_answer(request)).unwrap();
    if let Some(status) = answer.get_mut("status") {
        status["troubles"] = serde_json::json!([{"object": "network shop/lan", "problem": "is odd"}]);
    }
    poison(&mut answer);
    serde_json::from_value(answer).unwrap()
}

#[test]
fn no_command_shows_a_person_what_a_terminal_would_act_on_nor_lines_of_others() {
    for words in TABLES.into_iter().chain([&["flows"][..]]) {
        for form in ["table", "wide", "name"] {
            let (text, result) = run_with(hostile_answer, &[words, &["-o", form]].concat());
            if result.as_ref().is_err_and(|error| error.exit() == Exit::Usage) {
                // The answer has no names.
                continue;
            }
            assert!(form != "wide" || text.contains("FORGED"), "{words:?}: {text}");
            let is_acted_on = |sign: char| sign != '\n' && (sign.is_control() || sign == '\u{202e}');
            assert_eq!(text.matches(is_acted_on).count(), 0, "{words:?} {form}: {text:?}");
            assert!(!text.lines().any(|line| line.starts_with("FORGED")), "{words:?} {form}: {text}");
        }
    }
    let (json, _) = run_with(hostile_answer, &["attachments", "-o", "json"]);
    let rows: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(rows[0]["ifname"], format!("eth0{HOSTILE}"), "programs get what it is");
    let message = format!("key cni-args: unknown variant `{HOSTILE}`");
    let failure = Failure { code: 7, message, not_there: false };
    let (_, result) = run_against(&Response::Failed(failure), &["status"]);
    assert_eq!(
        result.unwrap_err().line(),
        r"key cni-args: unknown variant `\u{1b}]0;x\u{7}\u{9b}2J\u{202e}\nFORGED` (code 7)"
    );
}

/// Checks that no line is wider than a table may be, except a single word, which is not broken.
#[track_caller]
pub(super) fn is_narrow(text: &str) {
    let is_wide = |line: &&str| line.chars().count() > 120 && line.trim().contains(' ');
    assert_eq!(text.lines().find(is_wide), None);
}

#[test]
fn names_are_one_in_a_line_and_only_lists_have_them() {
    let (names, _) = run_with(golden_answer, &["attachments", "-o", "name", "--network", "storage"]);
    assert_eq!(names, "shop/cart/net1\nshop/db/net1\n");
    for words in [&["status"][..], &["explain", "shop/a", "shop/b", "80"], &["policy", "dump"]] {
        let (text, result) = run_with(golden_answer, &[words, &["-o", "name"]].concat());
        let error = result.unwrap_err();
        assert_eq!(
            (text.as_str(), error.to_string().as_str(), error.exit()),
            ("", "-o name is for commands that list objects", Exit::Usage)
        );
    }
}

#[test]
fn rows_are_chosen_by_namespace_labels_and_container() {
    let names = |words: &[&str]| {
        let (text, result) = run_with(golden_answer, &[&["attachments", "-o", "name"], words].concat());
        result
            .map(|()| text.lines().map(str::to_owned).collect::<Vec<_>>())
            .map_err(|error| (error.exit(), Chain(&error).to_string()))
    };
    let all = names(&[]).unwrap();
    assert_eq!(names(&["-A"]).unwrap(), all);
    assert_eq!(names(&["-n", "shop"]).unwrap().len(), all.len() - 1, "one attachment has no pod");
    assert_eq!(names(&["-l", "app=web"]).unwrap().len(), all.len() - 1);
    assert_eq!(names(&["--container-id", "ct"]).unwrap(), ["-/eth0"]);
    assert_eq!(names(&["-n", "shop", "--pod", "db", "--network", "lan"]).unwrap_err().0, Exit::NotFound);
    let (exit, text) = names(&["--container-id", "c"]).unwrap_err();
    assert_eq!(
        (exit, text.as_str()),
        (Exit::Usage, "more than one container's id begins with c: cart (pod shop/cart), ctr (pod -)")
    );
    assert_eq!(names(&["--container-id", "nope"]).unwrap_err().0, Exit::NotFound);
    assert_eq!(names(&["-n", "ops"]).unwrap_err().0, Exit::NotFound);
    assert_eq!(names(&["-n", "ops", "--pod", "shop/db"]).unwrap_err().0, Exit::Usage);
}
