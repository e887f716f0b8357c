//! `netattach-cni install DIR --copy`: whatever happens meanwhile, a runtime finds the previous executable or the new
//! one, complete.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use netattach_tests::node::executable;
use serde_json::Value;
use tempfile::TempDir;

const SIGKILL: i32 = 9;
const NAMES: [&str; 3] = ["netattach", "netattach-cni", "loopback"];

/// Directories: the image's executables, the runtime's, and its configurations.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for name in ["image", "bin"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Executables of a version in the image: as small as can be, as each is tried at every crash point.
    fn image(&self, version: u32) {
        for name in ["netattach", "netattach-cni"] {
            let text = format!(
                "#!/bin/sh\n# netattach-commit {name} {version}\necho '{{\"supportedVersions\": []}}'\n"
            );
            let path = self.path("image").join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    /// The version that an executable is of, if it is whole.
    fn version(&self, name: &str) -> Option<u32> {
        let text = fs::read_to_string(self.path("bin").join(name)).ok()?;
        let whole = text.ends_with("\"supportedVersions\": []}'\n");
        assert!(whole, "{name} is not whole: {text}");
        text.lines().nth(1).unwrap().rsplit(' ').next().unwrap().parse().ok()
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(directory)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn with_crash_points(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crash-install"));
        command.args([self.path("image/netattach-cni"), self.path("bin"), self.path("net.d")]);
        command.env("NETATTACH_CRASH_DIR", self.path("crash"));
        command
    }
}

#[test]
fn killed_at_any_point_it_leaves_the_one_before_or_the_new_one_and_goes_on_the_next_time() {
    let mut points = 0;
    for point in 0.. {
        let place = Place::new();
        place.image(1);
        let whole = place.with_crash_points().output().unwrap();
        assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
        fs::remove_dir_all(place.path("net.d")).unwrap();
        place.image(2);
        fs::create_dir(place.path("crash")).unwrap();
        fs::write(place.path("crash/at"), point.to_string()).unwrap();
        let killed = place.with_crash_points().output().unwrap().status;
        let log = fs::read_to_string(place.path("crash/log")).unwrap();
        let at = log.lines().last().unwrap().to_owned();
        let versions: Vec<u32> = NAMES.iter().map(|name| place.version(name).expect(name)).collect();
        assert!(versions.is_sorted_by(|one, two| one >= two), "{at}: in order: {versions:?}");
        // The configuration is there only when all it leads to is.
        if !place.names("net.d").iter().all(|name| name.starts_with('.')) {
            assert_eq!(versions, [2, 2, 2], "{at}");
        }
        fs::remove_file(place.path("crash/at")).unwrap();
        assert!(place.with_crash_points().status().unwrap().success(), "{at}");
        assert_eq!(NAMES.map(|name| place.version(name)), [Some(2); 3], "{at}");
        let before = NAMES.map(|name| format!(".{name}.before"));
        assert_eq!(
            before.each_ref().map(|name| place.version(name)),
            [Some(1); 3],
            "{at}: one version is kept"
        );
        let mut expected: Vec<String> = NAMES.map(str::to_owned).into_iter().chain(before).collect();
        expected.sort();
        assert_eq!(place.names("bin"), expected, "{at}: nothing else is left");
        assert_eq!(place.names("net.d"), ["00-netattach.conflist"], "{at}");
        if killed.success() {
            break;
        }
        assert_eq!(killed.signal(), Some(SIGKILL), "{at}");
        points = point + 1;
    }
    assert!(points > 12, "only {points} points");
}

fn install(directory: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(executable("netattach-cni").unwrap());
    command.arg("install").arg(directory).arg("--copy").args(more).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The real ones, in the order in which the image's container and a person use them.
#[test]
fn executables_and_a_configuration_are_installed_and_a_call_that_runs_meanwhile_is_not_disturbed() {
    let place = Place::new();
    let (bin, net_d) = (place.path("bin"), place.path("net.d"));
    // An earlier one that is running, and an administrator's link to another path.
    let mut other = fs::read(executable("netattach-cni").unwrap()).unwrap();
    other.extend(b"earlier");
    fs::write(bin.join("netattach"), &other).unwrap();
    fs::set_permissions(bin.join("netattach"), fs::Permissions::from_mode(0o755)).unwrap();
    let variables =
        [("COMMAND", "ADD"), ("CONTAINERID", "a"), ("NETNS", "/n"), ("IFNAME", "eth0"), ("PATH", "/p")];
    let mut running = Command::new(bin.join("netattach"))
        .arg0("loopback")
        .env_clear()
        .envs(variables.map(|(name, value)| (format!("CNI_{name}"), value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    fs::write(place.path("elsewhere"), "not ours").unwrap();
    symlink(place.path("elsewhere"), bin.join("netattach-cni")).unwrap();

    let conflist = format!("--conflist={}", net_d.display());
    let output = install(&bin, &["--also=loopback", &conflist]);
    assert!(output.status.success(), "{}", said(&output));
    let line = |name: &str, became: &str| format!("{}: {became}\n", bin.join(name).display());
    let replaced = "replaced, and the one before kept";
    let conf = net_d.join("00-netattach.conflist");
    assert_eq!(
        said(&output),
        line("netattach", replaced)
            + &line("netattach-cni", replaced)
            + &line("loopback", "installed")
            + &format!("{}: installed\n", conf.display())
    );
    assert_eq!(fs::read(bin.join(".netattach.before")).unwrap(), other);
    assert_eq!(fs::read(place.path("elsewhere")).unwrap(), b"not ours", "what the link led to");
    assert_eq!(fs::read_link(bin.join(".netattach-cni.before")).unwrap(), place.path("elsewhere"));
    // The one that was started before still waits for its configuration.
    assert_eq!(running.try_wait().unwrap(), None);
    running.stdin.take().unwrap().write_all(b"no JSON").unwrap();
    let ended = running.wait_with_output().unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&ended.stdout).unwrap()["code"], 6);

    let again = install(&bin, &["--also=loopback", &conflist]);
    assert!(again.status.success() && !said(&again).contains("replaced"), "{}", said(&again));
    // The owner of the configuration is checked.
    fs::write(&conf, "{}").unwrap();
    let refused = install(&bin, &[&conflist]);
    assert!(
        !refused.status.success() && said(&refused).contains("belongs to another program"),
        "{}",
        said(&refused)
    );
    assert_eq!(install(&bin, &["--conflist"]).status.code(), Some(2));
}

/// Returns the result of the doctor for a directory of executables: state, detail and remedy.
fn doctor(place: &Place) -> [String; 3] {
    let settings = place.path("doctor.yaml");
    let (source, bin) = (place.0.path().display(), place.path("bin"));
    fs::write(&settings, format!("source: {source}\ncniBinDirs: [{}]\n", bin.display())).unwrap();
    let mut command = Command::new(executable("netattachctl").unwrap());
    command.arg("--socket").arg(place.path("agent.sock")).args(["doctor", "-o", "json", "--config"]);
    let output = command.arg(settings).output().unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let check = checks.iter().find(|check| check["check"] == "CNI executables").unwrap();
    ["state", "detail", "remedy"].map(|key| check[key].as_str().unwrap_or_default().to_owned())
}

/// A remedy that is no command, or that does something else, is worse for an operator than none.
#[test]
fn what_the_doctor_says_to_do_puts_the_executables_where_they_are_looked_for() {
    if Path::new("/opt/cni/bin/netattach").exists() {
        eprintln!("skipped: this machine has a netattach, which the doctor finds");
        return;
    }
    let place = Place::new();
    let bin = place.path("bin");
    let [state, detail, remedy] = doctor(&place);
    let places = format!("{}, /opt/cni/bin", bin.display());
    assert_eq!((state, detail), ("failed".to_owned(), format!("{places}: no executable netattach")));
    let (words, _) = remedy.split_once(" puts it there, ").unwrap();
    let mut words = words.split(' ');
    assert_eq!(words.next(), Some("netattach-cni"));
    let words = words.map(|word| if word == "DIR" { bin.clone().into_os_string() } else { word.into() });
    let output = Command::new(executable("netattach-cni").unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let detail = format!("{} and loopback", bin.join("netattach").display());
    assert_eq!(doctor(&place), ["ok".to_owned(), detail, String::new()]);
}

/// On a separate file system: full, read-only, and one mounted noexec.
#[test]
fn a_directory_that_cannot_take_them_is_named_and_keeps_what_it_has() {
    let place = Place::new();
    let script = format!(
        "set -eu; cd {}; mount -t tmpfs tmpfs bin -o \"$1\"; echo before > bin/netattach; if [ \"$2\" ]; then mount -o remount,$2 bin; fi
        {} install bin --copy && exit 9; cat bin/netattach; ls -A bin",
        place.0.path().display(),
        executable("netattach-cni").unwrap().display()
    );
    for (options, then, problem) in [
        (
            "size=64k",
            "",
            "write bin/netattach: the directory has to be writable, with room for the executables twice: No space left on device",
        ),
        (
            "size=512m",
            "ro",
            "write bin/netattach: the directory has to be writable, with room for the executables twice: Read-only file system",
        ),
        ("size=512m", "noexec", "bin/.netattach.new does not run on this node: Permission denied"),
    ] {
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "bash", "-c", &script, "bash", options, then])
            .output()
            .unwrap();
        assert!(output.status.success(), "{options} {then}: {}", said(&output));
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains(problem), "{options} {then}: {complaint}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "before\nnetattach\n", "{options} {then}");
    }
}
