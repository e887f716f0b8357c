//! Plugins that behave, and plugins that do not, run by `delegate` as real processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use netattach::cni::{CniError, Command, NetworkList, Version};
use netattach::delegate::{Call, Caller, Delegate, DelegateError, STDERR_LIMIT, STDOUT_LIMIT};
use netattach::error_chain::Chain;
use serde_json::{Value, json};

/// Far more than any of these plugins needs when it behaves.
const PATIENT: Duration = Duration::from_secs(60);

/// A directory with a scripted plugin in it.
struct Rig {
    directory: tempfile::TempDir,
    delegate: Delegate,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let search = vec![directory.path().to_owned()];
        let delegate =
            Delegate { search, timeout: PATIENT, caller: Caller::OneCall, root: None, watcher: None };
        Self { directory, delegate }
    }

    fn scripted(script: Value) -> Self {
        let rig = Self::new();
        rig.install("fake", script);
        rig
    }

    fn install(&self, name: &str, script: Value) {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_fake-plugin"), self.path(name)).unwrap();
        fs::write(self.path(&format!("{name}.json")), script.to_string()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn with_timeout(mut self, timeout: Duration) -> Self {
        self.delegate.timeout = timeout;
        self
    }

    fn run(&self, command: Command) -> Result<Vec<u8>, DelegateError> {
        self.delegate.run(&call(command))
    }

    fn refusal(&self, command: Command) -> DelegateError {
        self.run(command).unwrap_err()
    }

    fn records(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("fake.json.calls")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The process left by a `holdMs` script.
    fn held(&self) -> i32 {
        let held = self.records().iter().find_map(|record| record["held"].as_i64()).unwrap();
        i32::try_from(held).unwrap()
    }
}

/// A call of the plugin `fake`.
pub(super) fn call(command: Command) -> Call<'static> {
    Call {
        command,
        plugin_type: "fake",
        container_id: "c1",
        netns: Some("/run/netns/a"),
        ifname: "net1",
        args: "K=v",
        netns_override: false,
        stdin: br#"{"cniVersion":"1.0.0","name":"n","type":"fake"}"#,
    }
}

fn exited(code: i32) -> ExitStatus {
    ExitStatus::from_raw(code << 8)
}

pub(super) fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        // A zombie that its new parent has not reaped yet counts as ended.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    })
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::yield_now();
    }
}

/// Rows: EXE-05, REQ-20, REQ-21, REQ-22.
#[test]
fn an_add_is_given_its_variables_and_its_stdin() {
    let rig = Rig::scripted(json!({"stderr": "warning: x\n"}));
    let stdout = rig.run(Command::Add).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&stdout).unwrap(), json!({"cniVersion": "1.0.0"}));
    let record = rig.records().remove(0);
    assert_eq!(
        record["env"],
        json!({
            "CNI_COMMAND": "ADD", "CNI_CONTAINERID": "c1", "CNI_NETNS": "/run/netns/a", "CNI_IFNAME": "net1",
            "CNI_ARGS": "K=v", "CNI_PATH": rig.directory.path(),
        })
    );
    assert_eq!(record["stdin"], json!({"cniVersion": "1.0.0", "name": "n", "type": "fake"}));
    assert_eq!(record["path"], json!(true));
}

/// Rows: ENV-28.
#[test]
fn the_override_is_passed_on() {
    let rig = Rig::scripted(json!({}));
    rig.delegate.run(&Call { netns_override: true, ..call(Command::Del) }).unwrap();
    assert_eq!(rig.records()[0]["env"]["CNI_NETNS_OVERRIDE"], json!("1"));
}

/// Rows: REQ-23.
#[test]
fn gc_and_status_name_no_attachment() {
    let rig = Rig::scripted(json!({}));
    for command in [Command::Gc, Command::Status] {
        assert_eq!(rig.run(command).unwrap(), b"");
    }
    for (record, command) in rig.records().iter().zip(["GC", "STATUS"]) {
        let expected = json!({
            "CNI_COMMAND": command, "CNI_CONTAINERID": "", "CNI_NETNS": "", "CNI_IFNAME": "", "CNI_ARGS": "",
            "CNI_PATH": rig.directory.path(),
        });
        assert_eq!(record["env"], expected);
    }
}

/// Rows: EXE-15, RES-08, RES-09, RES-11.
#[test]
fn the_result_of_an_add_is_read_in_its_own_or_the_assumed_version() {
    for (printed, raw, ips) in [
        (
            json!({"ip4": {"ip": "10.0.0.2/24"}, "own": 1}),
            json!({"ip4": {"ip": "10.0.0.2/24"}, "own": 1, "cniVersion": "0.2.0"}),
            1,
        ),
        (
            json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}]}),
            json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}]}),
            1,
        ),
        (Value::Null, json!({"cniVersion": "0.2.0"}), 0),
    ] {
        let rig = Rig::scripted(json!({"stdout": printed.to_string()}));
        let added = rig.delegate.add(&call(Command::Add), Version::V0_2_0).unwrap();
        assert_eq!((added.raw, added.result.ips.len()), (raw, ips));
    }
}

/// Rows: REQ-03.
#[test]
fn the_previous_result_passes_through_a_plugin_that_adds_nothing() {
    let rig = Rig::scripted(json!({"result": "prevResult"}));
    let prev = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "a"}]});
    let stdin = json!({"cniVersion": "1.0.0", "name": "n", "type": "fake", "prevResult": prev}).to_string();
    let added =
        rig.delegate.add(&Call { stdin: stdin.as_bytes(), ..call(Command::Add) }, Version::V1_0_0).unwrap();
    assert_eq!(added.raw, prev);
}

/// Rows: RES-10.
#[test]
fn a_result_of_an_unknown_version_is_refused() {
    let rig = Rig::scripted(json!({"result": {"cniVersion": "9.0.0"}}));
    let error = rig.delegate.add(&call(Command::Add), Version::V1_0_0).unwrap_err();
    assert_eq!(
        Chain(&error).to_string(),
        "decode the result of plugin \"fake\": unsupported CNI result version \"9.0.0\""
    );
}

/// Rows: EXE-06, EXE-16.
#[test]
fn an_error_object_keeps_its_code_and_message() {
    let rig = Rig::scripted(json!({
        "stderr": "tried twice\n", "error": {"code": 123, "msg": "no vlan left", "details": "on eno1"},
    }));
    let error = rig.refusal(Command::Add);
    assert_eq!(error.reported(), Some(&CniError::new(123, "no vlan left").with_details("on eno1")));
    assert_eq!(
        CniError::from(error),
        CniError::new(123, "plugin \"fake\" failed (ADD): no vlan left")
            .with_details("on eno1; stderr: tried twice")
    );
}

/// Rows: EXE-06.
#[test]
fn an_error_object_without_a_code_is_an_internal_error() {
    let rig = Rig::scripted(json!({"error": {"msg": "no"}}));
    assert_eq!(
        CniError::from(rig.refusal(Command::Del)),
        CniError::new(999, "plugin \"fake\" failed (DEL): no")
    );
}

/// Rows: EXE-07, EXE-08.
#[test]
fn a_failure_without_output_says_how_the_plugin_ended() {
    for (script, expected, message) in [
        (json!({"exit": 3, "stdout": ""}), exited(3), "with no error message: exit status: 3"),
        (
            json!({"exit": 3, "stdout": " \n", "stderr": "bad \"x\"\n"}),
            exited(3),
            r#"saying "bad \"x\"": exit status: 3"#,
        ),
        (
            json!({"abort": true, "stdout": ""}),
            ExitStatus::from_raw(6),
            "with no error message: signal: 6 (SIGABRT)",
        ),
    ] {
        let error = Rig::scripted(script).refusal(Command::Add);
        let DelegateError::Silent { status, .. } = &error else { panic!("{error:?}") };
        // The flag of a core dump depends on the machine.
        assert_eq!((status.code(), status.signal()), (expected.code(), expected.signal()));
        let text = CniError::from(error).msg;
        assert_eq!(text.replace(" (core dumped)", ""), format!("plugin \"fake\" failed (ADD) {message}"));
    }
}

/// Rows: EXE-09, EXE-10.
#[test]
fn a_failure_with_something_else_than_an_error_object_quotes_it() {
    for (printed, cause) in [
        ("panic!", "expected value at line 1 column 1"),
        ("{\"cniVersion\":\"1.0.0\"}", "`code` and `msg` are both missing, so this is not an error object"),
    ] {
        let error = Rig::scripted(json!({"stdout": printed, "exit": 1})).refusal(Command::Del);
        assert_eq!(
            Chain(&error).to_string(),
            format!(
                "plugin \"fake\" failed (DEL, exit status: 1) and its message {printed:?} is not a CNI error: {cause}"
            )
        );
        assert_eq!(error.code(), 999);
    }
}

#[test]
fn garbage_from_a_success_is_an_error_where_a_result_is_due() {
    for printed in ["", "not json", "{\"cniVersion\":\"1.0.0\"} trailing"] {
        let rig = Rig::scripted(json!({"stdout": printed}));
        let error = rig.refusal(Command::Add);
        let DelegateError::Garbage { stdout, .. } = &error else { panic!("{error:?}") };
        assert_eq!(stdout, printed);
        assert_eq!(error.code(), 6);
        assert_eq!(rig.run(Command::Del).unwrap(), printed.as_bytes());
    }
}

/// Rows: EXE-14.
#[test]
fn an_error_object_from_a_success_is_taken_for_a_result() {
    let rig = Rig::scripted(json!({"stdout": r#"{"code": 7, "msg": "x"}"#}));
    let added = rig.delegate.add(&call(Command::Add), Version::V1_0_0).unwrap();
    assert_eq!(added.result, netattach::cni::CniResult::default());
}

/// Rows: EXE-13, EXE-16.
#[test]
fn a_plugin_that_hangs_is_killed_with_everything_it_started() {
    let rig = Rig::scripted(json!({"sleepMs": 600_000, "holdMs": 600_000, "stderr": "waiting for lease\n"}))
        .with_timeout(Duration::from_secs(3));
    let started = Instant::now();
    let error = rig.refusal(Command::Add);
    assert!(started.elapsed() < Duration::from_secs(60));
    assert_eq!(
        CniError::from(error),
        CniError::new(11, "plugin \"fake\" (ADD) did not end within 3s and was killed")
            .with_details("stderr: waiting for lease")
    );
    let pid = i32::try_from(rig.records()[0]["pid"].as_i64().unwrap()).unwrap();
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the plugin is not reaped");
    let held = rig.held();
    wait_until("the plugin's child is dead", || !is_alive(held));
}

/// Rows: EXE-16.
#[test]
fn a_flood_on_stdout_is_cut_off() {
    let error = Rig::scripted(json!({"floodStdout": 1_u64 << 40})).refusal(Command::Add);
    assert_eq!(
        CniError::from(error),
        CniError::new(
            6,
            format!("plugin \"fake\" (ADD) wrote more than {STDOUT_LIMIT} bytes to stdout and was killed")
        )
    );
}

/// Rows: EXE-16.
#[test]
fn the_longest_result_that_is_allowed_is_read_whole() {
    let text = format!("\"{}\"", "x".repeat(STDOUT_LIMIT - 2));
    let rig = Rig::scripted(json!({"stdout": text}));
    assert_eq!(rig.run(Command::Add).unwrap().len(), STDOUT_LIMIT);
}

/// Rows: EXE-16.
#[test]
fn a_flood_on_stderr_neither_blocks_the_plugin_nor_fills_memory() {
    let rig = Rig::scripted(json!({"floodStderr": 50_000_000, "exit": 1, "stdout": ""}));
    let error = rig.refusal(Command::Add);
    assert!(error.stderr().starts_with("(49983616 bytes cut) xxx"), "{}", &error.stderr()[..40]);
    assert_eq!(error.stderr().len(), STDERR_LIMIT + "(49983616 bytes cut) ".len());
}

#[test]
fn a_child_that_holds_the_pipes_does_not_delay_the_answer() {
    let rig = Rig::scripted(json!({"holdMs": 600_000, "result": {"cniVersion": "1.0.0"}}));
    let started = Instant::now();
    let outcome = rig.delegate.add(&call(Command::Add), Version::V1_0_0);
    let elapsed = started.elapsed();
    // It may be a daemon that the plugin started on purpose: it keeps running.
    let held = rig.held();
    assert!(is_alive(held));
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(held).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    assert_eq!(outcome.unwrap().raw, json!({"cniVersion": "1.0.0"}));
    assert!(elapsed < Duration::from_secs(60), "{elapsed:?}");
}

#[test]
fn a_plugin_that_does_not_read_its_stdin_may_still_succeed() {
    let rig = Rig::scripted(json!({"readStdin": false}));
    let stdin = vec![b' '; 4 << 20];
    let stdout = rig.delegate.run(&Call { stdin: &stdin, ..call(Command::Add) }).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&stdout).unwrap(), json!({"cniVersion": "0.1.0"}));
}

#[test]
fn a_configuration_larger_than_a_pipe_arrives_whole() {
    let rig = Rig::scripted(json!({}));
    let stdin = json!({"cniVersion": "1.0.0", "x": "y".repeat(3 << 20)}).to_string();
    rig.delegate.run(&Call { stdin: stdin.as_bytes(), ..call(Command::Add) }).unwrap();
    assert_eq!(rig.records()[0]["stdin"].to_string().len(), stdin.len());
}

/// Rows: EXE-04.
#[test]
fn a_directory_of_the_plugins_name_is_not_a_plugin() {
    let rig = Rig::new();
    fs::create_dir(rig.path("fake")).unwrap();
    let directory = rig.directory.path().display().to_string();
    assert_eq!(
        CniError::from(rig.refusal(Command::Add)),
        CniError::new(
            7,
            format!(
                "failed to find plugin \"fake\" in path [{directory}] ({directory}/fake is not a regular file)"
            )
        )
    );
}

/// Rows: EXE-04.
#[test]
fn a_file_that_cannot_be_executed_says_why() {
    let rig = Rig::new();
    let path = rig.path("fake");
    fs::write(&path, "").unwrap();
    for (mode, cause) in
        [(0o644, "Permission denied (os error 13)"), (0o755, "Exec format error (os error 8)")]
    {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let message = format!("start plugin \"fake\" ({}): {cause}", path.display());
        assert_eq!(CniError::from(rig.refusal(Command::Add)), CniError::new(5, message));
    }
    fs::write(&path, "#!/nonexistent/sh\n").unwrap();
    let message = format!(
        "start plugin \"fake\": {} is there, but the loader or interpreter that it names is not: in a container, have plugins \
         started in the node's root directory (delegation.root)",
        path.display()
    );
    assert_eq!(CniError::from(rig.refusal(Command::Add)), CniError::new(5, message));
}

/// Rows: EXE-11.
#[test]
fn a_plugin_that_is_being_written_is_tried_again() {
    let rig = Rig::new();
    let path = rig.path("fake");
    fs::copy(env!("CARGO_BIN_EXE_fake-plugin"), &path).unwrap();
    let writer = fs::OpenOptions::new().append(true).open(&path).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let rig = &rig;
        let running = scope.spawn(move || {
            send.send(rustix::thread::gettid()).unwrap();
            rig.run(Command::Del)
        });
        let waits_at = format!("/proc/self/task/{}/wchan", receive.recv().unwrap().as_raw_nonzero());
        wait_until("the start was refused and is tried again", || {
            fs::read_to_string(&waits_at).unwrap().contains("nanosleep")
        });
        drop(writer);
        assert_eq!(running.join().unwrap().unwrap(), b"");
    });
}

/// Rows: EXE-12.
#[test]
fn a_plugin_that_stays_busy_is_an_error() {
    let rig = Rig::new().with_timeout(Duration::from_millis(200));
    let path = rig.path("fake");
    fs::copy(env!("CARGO_BIN_EXE_fake-plugin"), &path).unwrap();
    let writer = fs::OpenOptions::new().append(true).open(&path).unwrap();
    let error = rig.refusal(Command::Del);
    drop(writer);
    assert!(matches!(&error, DelegateError::Busy { .. }), "{error:?}");
    assert_eq!(error.code(), 11);
}

/// Rows: VER-12.
#[test]
fn the_version_probe_sends_the_latest_version_and_dummies() {
    let rig = Rig::scripted(json!({"versions": ["0.4.0", "9.0.0"]}));
    assert_eq!(rig.delegate.version("fake").unwrap(), ["0.4.0", "9.0.0"]);
    let record = rig.records().remove(0);
    assert_eq!(record["stdin"], json!({"cniVersion": "1.1.0"}));
    assert_eq!(
        record["env"],
        json!({
            "CNI_COMMAND": "VERSION", "CNI_CONTAINERID": "", "CNI_NETNS": "dummy", "CNI_IFNAME": "dummy",
            "CNI_ARGS": "", "CNI_PATH": "dummy",
        })
    );
}

/// Rows: VER-11.
#[test]
fn a_plugin_older_than_the_version_verb_supports_the_first_version() {
    let rig = Rig::scripted(json!({"error": {"code": 4, "msg": "unknown CNI_COMMAND: VERSION"}}));
    assert_eq!(rig.delegate.version("fake").unwrap(), ["0.1.0"]);
}

/// Rows: VER-08, VER-10.
#[test]
fn an_answer_to_version_that_is_not_one_names_the_plugin() {
    let rig = Rig::scripted(json!({"stdout": "{}"}));
    assert_eq!(
        Chain(&rig.delegate.version("fake").unwrap_err()).to_string(),
        "decode the versions that plugin \"fake\" supports: key cniVersion: missing"
    );
}

/// Rows: VER-23.
#[test]
fn a_list_is_valid_when_every_plugin_supports_its_version() {
    let rig = Rig::scripted(json!({"versions": ["0.4.0", "1.0.0"]}));
    let list = |version: &str| {
        let plugins = json!([
            {"type": "fake", "capabilities": {"mac": true, "ips": false}},
            {"type": "native", "capabilities": {"portMappings": true, "mac": true}},
            {"type": "fake"},
        ]);
        let value = json!({"cniVersion": version, "name": "n", "plugins": plugins});
        NetworkList::parse(value.to_string().as_bytes()).unwrap()
    };
    let is_native = |plugin: &str| plugin == "native";
    assert_eq!(rig.delegate.validate(&list("1.0.0"), is_native).unwrap(), ["mac", "portMappings"]);
    let unfit = "of the list: \"fake\" does not support version 1.1.0 (supported: 0.4.0, 1.0.0)";
    assert_eq!(
        rig.delegate.validate(&list("1.1.0"), is_native).unwrap_err().to_string(),
        format!("[plugin 0 {unfit}; plugin 2 {unfit}]")
    );
    let directory = rig.directory.path().display();
    assert_eq!(
        rig.delegate.validate(&list("1.0.0"), |_| false).unwrap_err().to_string(),
        format!("[plugin 1 of the list: failed to find plugin \"native\" in path [{directory}]]")
    );
}
