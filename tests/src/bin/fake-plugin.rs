//! A CNI plugin that follows a script and records how it was called.
//!
//! The script is a JSON file: the one that `FAKE_SCRIPT` names, in the environment or else in `CNI_ARGS`; else the
//! path of the executable as called, with `.json` appended; else an empty one. Every key may also be in an object
//! under a verb (`"DEL": {...}`), which has precedence for that verb.
//!
//! | key | effect, in this order |
//! |---|---|
//! | `record` | appends `{"plugin": name, "env": {"CNI_…": …}, "stdin": …, "pid": …}` as a line to this file; without it to the script's path with `.calls` appended, if there is a script |
//! | `readStdin` | `false`: stdin is not read (and recorded as null) |
//! | `stderr` | this text goes to stderr |
//! | `holdMs` | a child keeps stdout and stderr open that long; its pid is recorded as `{"held": pid}` |
//! | `sleepMs` | sleeps |
//! | `tellGroup` | `true`: its control groups are recorded as `{"group": text of /proc/self/cgroup}` |
//! | `tellInterface` | `true`: whether the container has the interface is recorded as `{"interface": bool}` |
//! | `eatMiB` | takes that much memory, in MiB |
//! | `floodStdout`, `floodStderr` | writes that many bytes |
//! | `deviceInfo` | ADD writes this to the file of device information whose path `runtimeConfig` has |
//! | `link` | ADD makes a link of that kind, up, in the container under the interface's name; DEL deletes it |
//! | `addresses` | ADD gives them to that link |
//! | `discover` | `true`: ADD brings the container's interface up and asks for a lease on it, as the daemon of `dhcp` does |
//! | `stdout` | this text goes to stdout as it is |
//! | `versions` | VERSION answers with these; by default with all |
//! | `error` | `{code, msg, details}` is printed with `cniVersion`, and the exit status is 1 |
//! | `result` | printed; the text `prevResult` passes the previous result through |
//! | `exit` | the exit status |
//! | `abort` | `true`: dies by a signal |
//! | `exec` | this executable answers instead, with the same environment and stdin |
//! | `with` | additional keys for its configuration, which replace those of the same name |
//!
//! Without `result`, ADD passes the previous result through, or prints an empty one.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use netattach::netns::{Netns, within};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Network;
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Script {
    record: Option<PathBuf>,
    read_stdin: bool,
    stderr: String,
    hold_ms: u64,
    sleep_ms: u64,
    tell_group: bool,
    tell_interface: bool,
    #[serde(rename = "eatMiB")]
    eat_mib: usize,
    flood_stdout: usize,
    flood_stderr: usize,
    device_info: Option<Value>,
    link: Option<String>,
    addresses: Vec<String>,
    discover: bool,
    stdout: Option<String>,
    versions: Vec<String>,
    error: Option<Map<String, Value>>,
    result: Option<Value>,
    exit: u8,
    abort: bool,
    exec: Option<PathBuf>,
    with: Map<String, Value>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            record: None,
            read_stdin: true,
            stderr: String::new(),
            hold_ms: 0,
            sleep_ms: 0,
            tell_group: false,
            tell_interface: false,
            eat_mib: 0,
            flood_stdout: 0,
            flood_stderr: 0,
            device_info: None,
            link: None,
            addresses: Vec::new(),
            discover: false,
            stdout: None,
            versions: ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
                .map(str::to_owned)
                .to_vec(),
            error: None,
            result: None,
            exit: 0,
            abort: false,
            exec: None,
            with: Map::new(),
        }
    }
}

/// Set for the child that holds the pipes.
const HOLD: &str = "FAKE_PLUGIN_HOLD_MS";

fn main() -> ExitCode {
    if let Some(hold) = std::env::var(HOLD).ok().and_then(|text| text.parse().ok()) {
        std::thread::sleep(Duration::from_millis(hold));
        return ExitCode::SUCCESS;
    }
    match run() {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // A script that cannot be followed must not look like a scripted failure.
            let _ = writeln!(io::stderr(), "fake-plugin: {error:#}");
            ExitCode::from(99)
        }
    }
}

fn run() -> Result<u8> {
    let verb = std::env::var("CNI_COMMAND").unwrap_or_default();
    let (path, script) = load(&verb)?;
    let mut stdin = Vec::new();
    if script.read_stdin {
        io::stdin().read_to_end(&mut stdin).context("read stdin")?;
    }
    let config: Value = serde_json::from_slice(&stdin).unwrap_or(Value::Null);
    let record = script.record.clone().or_else(|| path.map(|path| with_suffix(path, ".calls")));
    let env: BTreeMap<String, String> =
        std::env::vars().filter(|(name, _)| name.starts_with("CNI_")).collect();
    let path_is_set = std::env::var_os("PATH").is_some_and(|path| !path.is_empty());
    let called_as = std::env::args().next().unwrap_or_default();
    let plugin = PathBuf::from(called_as).file_name().map(|name| name.to_string_lossy().into_owned());
    append(
        &record,
        &json!({"plugin": plugin, "env": env, "stdin": config, "pid": std::process::id(), "path": path_is_set}),
    )?;

    io::stderr().write_all(script.stderr.as_bytes())?;
    if script.hold_ms > 0 {
        let child = Command::new("/proc/self/exe").env(HOLD, script.hold_ms.to_string()).spawn()?;
        append(&record, &json!({"held": child.id()}))?;
    }
    std::thread::sleep(Duration::from_millis(script.sleep_ms));
    if script.tell_group {
        append(&record, &json!({"group": fs::read_to_string("/proc/self/cgroup")?}))?;
    }
    if script.tell_interface {
        append(&record, &json!({"interface": has_interface(&env)?}))?;
    }
    // Every page is written, so that it is there.
    let eaten = vec![1_u8; script.eat_mib << 20];
    std::hint::black_box(&eaten);
    flood(&mut io::stdout().lock(), script.flood_stdout)?;
    flood(&mut io::stderr().lock(), script.flood_stderr)?;
    if let (Some(info), "ADD", Some(path)) =
        (&script.device_info, verb.as_str(), config["runtimeConfig"]["CNIDeviceInfoFile"].as_str())
    {
        std::fs::write(path, info.to_string()).with_context(|| format!("write {path}"))?;
    }
    if let Some(kind) = &script.link {
        link(&verb, kind, &script.addresses, &env)?;
    }
    if script.discover && verb == "ADD" {
        discover(&env)?;
    }
    let status = match &script.exec {
        Some(other) => hand_over(other, &with(&config, &script).unwrap_or(stdin))?,
        None => answer(&verb, &script, &config)?,
    };
    if script.abort {
        std::process::abort();
    }
    Ok(if script.exit == 0 { status } else { script.exit })
}

/// Whether the container has the interface; `false` if the namespace is gone.
fn has_interface(env: &BTreeMap<String, String>) -> Result<bool> {
    let Some((netns, name)) = env.get("CNI_NETNS").zip(env.get("CNI_IFNAME")) else { return Ok(false) };
    let Ok(netns) = Netns::open(netns) else { return Ok(false) };
    Ok(Network::of_netns(&netns)?.links.contains_key(name))
}

/// Creates a link in the container with these addresses, or deletes it. A deleted namespace has none.
fn link(verb: &str, kind: &str, addresses: &[String], env: &BTreeMap<String, String>) -> Result<()> {
    let Some((netns, name)) = env.get("CNI_NETNS").zip(env.get("CNI_IFNAME")) else { return Ok(()) };
    let Ok(netns) = Netns::open(netns) else { return Ok(()) };
    let ip = |words: &[&str]| within(&netns, || Command::new("ip").args(words).output());
    match verb {
        "ADD" => {
            let done = |words: &[&str]| {
                let made = ip(words)??;
                anyhow::ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
                Ok(())
            };
            done(&["link", "add", name, "up", "type", kind])?;
            addresses.iter().try_for_each(|address| done(&["addr", "add", address, "dev", name]))?;
        }
        // It may be gone.
        "DEL" => drop(ip(&["link", "del", name])??),
        _ => {}
    }
    Ok(())
}

/// Sends the first message of a DHCP client without an address, by a socket in the container.
fn discover(env: &BTreeMap<String, String>) -> Result<()> {
    let (netns, name) = env.get("CNI_NETNS").zip(env.get("CNI_IFNAME")).context("no interface")?;
    let netns = Netns::open(netns)?;
    let mac = Network::of_netns(&netns)?.links.get(name).and_then(|link| link.mac).context("no address")?;
    let mut frame = Packet::between("0.0.0.0", "255.255.255.255").from_mac(mac).udp(68, 67).frame();
    frame[..6].fill(0xff);
    within(&netns, || {
        let up = Command::new("ip").args(["link", "set", name, "up"]).output()?;
        anyhow::ensure!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        RawSocket::open_here(name, libc::ETH_P_IP as u16)?.send(&frame)
    })?
}

/// The configuration with the keys of the script; `None`: it is as it was.
fn with(config: &Value, script: &Script) -> Option<Vec<u8>> {
    let mut config = config.as_object().filter(|_| !script.with.is_empty())?.clone();
    config.extend(script.with.clone());
    Some(Value::Object(config).to_string().into_bytes())
}

/// Lets another plugin answer, and returns its status.
fn hand_over(plugin: &Path, stdin: &[u8]) -> Result<u8> {
    let mut child = Command::new(plugin).stdin(Stdio::piped()).spawn()?;
    // A plugin that does not read, as VERSION does not, closes the pipe early.
    let _ = child.stdin.take().context("stdin is a pipe")?.write_all(stdin);
    let status = child.wait()?.code().context("the plugin died by a signal")?;
    Ok(u8::try_from(status)?)
}

/// Prints the answer of the script or the verb, and returns the exit status.
fn answer(verb: &str, script: &Script, config: &Value) -> Result<u8> {
    let version = config.get("cniVersion").and_then(Value::as_str).unwrap_or("0.1.0");
    let print = |value: &Value| writeln!(io::stdout(), "{value:#}");
    if let Some(text) = &script.stdout {
        io::stdout().write_all(text.as_bytes())?;
    } else if let Some(error) = &script.error {
        let mut object = Map::from_iter([("cniVersion".to_owned(), version.into())]);
        object.extend(error.clone());
        print(&Value::Object(object))?;
        return Ok(1);
    } else if verb == "VERSION" {
        print(&json!({"cniVersion": "1.1.0", "supportedVersions": script.versions}))?;
    } else if verb == "ADD" {
        let passed = config.get("prevResult").cloned().unwrap_or_else(|| json!({"cniVersion": version}));
        match &script.result {
            Some(Value::String(word)) if word == "prevResult" => print(&passed)?,
            Some(result) => print(result)?,
            None => print(&passed)?,
        }
    }
    Ok(0)
}

fn load(verb: &str) -> Result<(Option<PathBuf>, Script)> {
    let named = std::env::var_os("FAKE_SCRIPT").map(PathBuf::from).or_else(|| {
        let args = std::env::var("CNI_ARGS").ok()?;
        args.split(';').find_map(|pair| pair.strip_prefix("FAKE_SCRIPT=")).map(PathBuf::from)
    });
    let beside =
        || Some(with_suffix(std::env::args_os().next()?.into(), ".json")).filter(|path| path.exists());
    let Some(path) = named.or_else(beside) else { return Ok((None, Script::default())) };
    let text = std::fs::read(&path).with_context(|| format!("read script {}", path.display()))?;
    let mut keys: Map<String, Value> = serde_json::from_slice(&text).context("decode script")?;
    for other in ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"] {
        match keys.remove(other) {
            Some(Value::Object(own)) if other == verb => keys.extend(own),
            _ => {}
        }
    }
    let script = serde_json::from_value(Value::Object(keys)).context("decode script")?;
    Ok((Some(path), script))
}

fn with_suffix(path: PathBuf, suffix: &str) -> PathBuf {
    let mut text = path.into_os_string();
    text.push(suffix);
    text.into()
}

/// Appends one line with one write, so that concurrent calls do not mix. The test may take the record away at any
/// time (`Node::take_calls`): it waits for the holder of the lock, and a file that was taken is not written to.
fn append(record: &Option<PathBuf>, line: &Value) -> Result<()> {
    let Some(path) = record else { return Ok(()) };
    let mut file = loop {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        file.lock()?;
        match fs::metadata(path) {
            Ok(there) if there.ino() == file.metadata()?.ino() => break file,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    };
    file.write_all(format!("{line}\n").as_bytes()).with_context(|| format!("record to {}", path.display()))
}

fn flood(to: &mut impl Write, bytes: usize) -> io::Result<()> {
    let block = [b'x'; 8192];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(block.len());
        to.write_all(&block[..length])?;
        left -= length;
    }
    to.flush()
}
