//! Requirements that a node lacks: one line of the log, a condition if an agent runs, and a finding of `doctor`, each
//! with the remedy, while existing pods keep working. Missing capabilities are in `capabilities`, a file before
//! netattach's in `primaries`, records of other versions in `older_state`; problems of the cluster in `api::told`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use netattach_tests::manifest::{NAMESPACE, annotated, network, pod};
use netattach_tests::node::executable;
use netattach_tests::privilege::{with_only, without_bpf};
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

use crate::inspect::settings_of_doctor;

/// Returns the result of `doctor` for a check, with these settings.
fn doctor(node: &Node, settings: &str, check: &str) -> Vec<Value> {
    let mut ctl = Command::new(executable("netattachctl").unwrap());
    ctl.arg("--socket").arg(node.socket()).args(["doctor", "-o", "json", "--config", settings]);
    let output = node.namespace.run(|| ctl.output()).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    checks.into_iter().filter(|it| it["check"] == check).collect()
}

/// A node with a pod that an agent has attached, which has ended.
fn left_alone() -> (Node, Pod) {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.stop().unwrap();
    (node, a)
}

/// Checks that the pod keeps working without an agent, and is detached by the next one.
fn goes_on(node: &mut Node, a: &Pod) {
    assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    node.start().unwrap();
    node.check(a).success();
    node.del(a).success();
}

/// The one line of an agent that does not start.
fn refused(node: &Node, mut command: Command) -> String {
    let output = node.namespace.run(|| command.output()).unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let [line] = log.lines().collect::<Vec<_>>()[..] else { panic!("more than a line:\n{log}") };
    assert!(output.status.code() == Some(1) && line.contains("ERROR"), "{line}");
    line.split_once("netattach::agent::run: ").unwrap().1.to_owned()
}

/// In a cluster, `kubectl describe` shows the agent's line for its container.
#[test]
fn without_a_bpf_file_system_agent_and_doctor_say_how_it_is_mounted_and_pods_that_are_there_go_on() {
    let (mut node, a) = left_alone();
    let elsewhere = node.path("no-bpffs");
    let mut command = Command::new(executable("netattachd").unwrap());
    command.arg("--source").arg(node.path("source")).arg("--run-dir").arg(node.path("run"));
    command.arg("--state-dir").arg(node.path("state")).arg("--bpffs").arg(&elsewhere);
    let place = elsewhere.display();
    let said = format!(
        "set up the dataplane: {place} is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`"
    );
    assert_eq!(refused(&node, command), said);
    let settings = node.path("doctor.yaml");
    fs::write(&settings, json!({"source": node.path("source"), "bpffs": elsewhere}).to_string()).unwrap();
    let expected = json!({
        "check": "bpf file system", "state": "failed", "detail": format!("{place} is not on a BPF file system"),
        "remedy": "mount -t bpf bpf /sys/fs/bpf on the node; in a pod, mount it from there with HostToContainer"
    });
    assert_eq!(doctor(&node, settings.to_str().unwrap(), "bpf file system"), [expected]);
    goes_on(&mut node, &a);
}

/// As on a machine that was started with an older kernel by mistake: the agent changes nothing.
#[test]
fn a_kernel_that_lacks_what_is_needed_is_named_by_agent_and_doctor_and_pods_that_are_there_go_on() {
    let (mut node, a) = left_alone();
    let settings = settings_of_doctor(&node);
    let command = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let said = without_bpf(|| Ok(refused(&node, command))).unwrap();
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let what = format!("{release} lacks {WITHOUT_BPF}, without which no program can be loaded");
    let remedy = "(docs/supported.md has those that are tested)";
    let line = format!("kernel {what}: use a newer one {remedy}: ");
    assert!(said.starts_with(&line), "{said}\n{line}");
    let found = without_bpf(|| Ok(doctor(&node, &settings, "kernel"))).unwrap();
    let expected = json!({
        "check": "kernel", "state": "failed", "detail": what, "remedy": format!("use a newer kernel {remedy}")
    });
    assert_eq!(found, [expected]);
    goes_on(&mut node, &a);
}

/// All kernel features that the programs use.
const WITHOUT_BPF: &str = "program type sched_cls, program type socket_filter, program type xdp, helper fib_lookup, \
     helper redirect_neigh, helper redirect_peer, helper skb_change_type, helper jiffies64, helper ktime_get_coarse_ns, \
     map lru_hash, map lpm_trie, map ringbuf";

/// `capabilities` has the agent's message for each.
#[test]
fn a_capability_that_is_missing_is_named_by_doctor_too_and_pods_that_are_there_go_on() {
    let (mut node, a) = left_alone();
    let settings = settings_of_doctor(&node);
    let all = rustix::thread::capabilities(None).unwrap().permitted;
    let command = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let (said, found) = with_only(all - CapabilitySet::NET_ADMIN, || {
        Ok((refused(&node, command), doctor(&node, &settings, "privileges")))
    })
    .unwrap();
    let lacks = "lacks CAP_NET_ADMIN (to make links, addresses, routes and filters)";
    assert!(said.contains(lacks), "{said}");
    let [found] = &found[..] else { panic!("{found:#?}") };
    let detail = found["detail"].as_str().unwrap();
    assert!(detail.contains(lacks), "{detail}");
    assert!(detail.contains("run netattachd as root, or in a container with these capabilities"), "{detail}");
    assert_eq!(found["state"], "warning");
    goes_on(&mut node, &a);
}

/// Contradicting values of the chart are refused when it is rendered (`cluster::chart`); here a person has written
/// the settings.
#[test]
fn settings_that_contradict_one_another_are_named_by_agent_and_doctor_and_pods_that_are_there_go_on() {
    let (mut node, a) = left_alone();
    let settings = node.path("doctor.yaml");
    let usual = json!({
        "source": node.path("source"), "runDir": node.path("run"), "stateDir": node.path("state"), "bpffs": node.bpffs()
    });
    let table = [
        (
            json!({"kubernetes": {"enabled": true}}),
            "source and kubernetes.enabled: objects come from a directory or from the cluster, not from both: leave one of them \
             out",
        ),
        (
            json!({"kubernetes": {"kubeconfig": "/k"}}),
            "kubernetes.kubeconfig is set and kubernetes.enabled is not: set it too, or leave kubeconfig out",
        ),
        (
            json!({"defaultNetwork": "chained", "cniConf": {"dir": "/etc/cni/net.d"}}),
            "defaultNetwork chained: the runtime's list is another program's, with netattach behind its plugins, so cniConf.dir has \
             to be empty, not /etc/cni/net.d; the agent's own file would be taken in its place",
        ),
        (json!({"cniConf": {"remove": true}}), "cniConf.remove: true needs cniConf.dir, where the file is"),
        (json!({"repair": "evict"}), "repair: evict needs kubernetes.enabled"),
    ];
    for (more, said) in table {
        let mut all = usual.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fs::write(&settings, all.to_string()).unwrap();
        let mut command = Command::new(executable("netattachd").unwrap());
        command.arg("--config").arg(&settings);
        assert_eq!(refused(&node, command), said);
        let expected = json!({
            "check": "settings", "state": "failed", "detail": format!("{}: {said}", settings.display()),
            "remedy": "correct the settings: the agent does not start with them; the rest was checked with the defaults"
        });
        assert_eq!(doctor(&node, settings.to_str().unwrap(), "settings"), [expected]);
    }
    goes_on(&mut node, &a);
}

/// Faults of a file system.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spoiled {
    Full,
    ReadOnly,
}

impl Spoiled {
    const ALL: [Self; 2] = [Self::Full, Self::ReadOnly];

    /// Returns the kernel's error for a writer.
    fn error(self) -> &'static str {
        match self {
            Self::Full => "No space left on device (os error 28)",
            Self::ReadOnly => "Read-only file system (os error 30)",
        }
    }

    /// Returns the result of `doctor` for the check `disk`, with the directory of this key there.
    fn found(self, directory: &Path, key: &str) -> Value {
        let how = match self {
            Self::Full => "full",
            Self::ReadOnly => "mounted read-only",
        };
        let place = format!("{} ({key}) is on a file system that is {how}", directory.display());
        let remedy =
            "free space there, or mount it writable: until then no pod is attached, and DELs are repeated";
        json!({"check": "disk", "state": "failed", "detail": place, "remedy": remedy})
    }
}

/// A small separate file system, until dropped.
pub(crate) struct Disk(PathBuf);

impl Disk {
    pub(crate) fn mount(at: &Path) -> Self {
        let options = c"size=1m,mode=0700";
        mount("small", at, "tmpfs", MountFlags::empty(), Some(options)).unwrap();
        Self(at.to_owned())
    }

    /// Fills it; or mounts it over itself, read-only: open files can still be written.
    pub(crate) fn spoil(&self, how: Spoiled) {
        match how {
            Spoiled::Full => {
                let most = fs::write(self.0.join("filler"), vec![0; 2 << 20]).unwrap_err();
                assert_eq!(most.kind(), std::io::ErrorKind::StorageFull);
            }
            Spoiled::ReadOnly => {
                mount_bind(&self.0, &self.0).unwrap();
                mount_remount(&self.0, MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
            }
        }
    }

    pub(crate) fn mend(&self, how: Spoiled) {
        match how {
            Spoiled::Full => fs::remove_file(self.0.join("filler")).unwrap(),
            Spoiled::ReadOnly => unmount(&self.0, UnmountFlags::DETACH).unwrap(),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Only the agent may still use it, which ends too. Unmounts the covering mount, and the file system.
        while unmount(&self.0, UnmountFlags::DETACH).is_ok() {}
    }
}

/// The unmet conditions of the node's agent.
fn unmet(node: &Node) -> Vec<String> {
    let status = node.whole_status().unwrap();
    let unmet = status["ready"].as_array().unwrap().iter().filter(|it| it["met"] == false);
    unmet.map(|it| it["detail"].as_str().unwrap().to_owned()).collect()
}

/// Returns the findings of `doctor` about them.
fn not_ready(node: &Node, settings: &str) -> Vec<Value> {
    let found = doctor(node, settings, "readiness").into_iter();
    found.filter(|it| it["state"] == "failed").collect()
}

#[test]
fn a_full_or_read_only_state_directory_is_told_and_pods_that_are_there_go_on() {
    let manifests = ["a", "b"].map(|name| pod(name, &json!({}), &Value::Null));
    let mut node = Node::new(&manifests).unwrap();
    let disk = Disk::mount(&node.path("state"));
    let settings = settings_of_doctor(&node);
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    let journal = node.path("state/journal");
    for how in Spoiled::ALL {
        disk.spoil(how);
        let error = how.error();
        let problem = format!("journal {}: {error}; {MAKE_ROOM}", journal.display());
        assert!(eventually(PATIENCE, || unmet(&node) == [problem.clone()]), "{how:?}: {:#?}", unmet(&node));
        let told = || {
            let log = node.log_so_far();
            log.lines().filter(|line| line.contains(&format!("not ready: journal: {problem}"))).count()
        };
        assert!(eventually(PATIENCE, || told() == 1), "{how:?}: {} lines", told());
        assert_eq!(doctor(&node, &settings, "disk"), [how.found(&node.path("state"), "stateDir")]);
        let expected = json!({
            "check": "readiness", "state": "failed", "detail": format!("journal: {problem}"),
            "remedy": "free space on, or make writable, the file system of stateDir"
        });
        assert_eq!(not_ready(&node, &settings), [expected], "{how:?}");

        // The new pod is refused with the reason, the other one keeps working.
        let (_, message) = node.call("ADD", &b).run().failure();
        assert!(message.contains(&format!(": {MAKE_ROOM}: {error}")), "{how:?}: {message}");
        assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap(), "{how:?}");
        disk.mend(how);
        assert!(eventually(PATIENCE, || unmet(&node).is_empty()), "{how:?}, mended: {:#?}", unmet(&node));
        assert_eq!(told(), 1, "{how:?}");
    }
    node.add(&b).success();
    for pod in [&a, &b] {
        node.check(pod).success();
        node.del(pod).success();
    }
    node.stop().unwrap();
    drop(disk);
}

/// The remedy for both.
const MAKE_ROOM: &str = "make room there, or mount it writable";

#[test]
fn a_full_or_read_only_directory_of_the_runtime_or_of_a_pool_is_told_with_what_to_do() {
    let manifests = ["a", "b"].map(|name| pod(name, &json!({}), &Value::Null));
    let mut node = Node::new(&manifests).unwrap();
    let (net_d, leases) = (node.path("net.d"), node.path("leases"));
    node.set("cniConf", json!({"dir": net_d}));
    fs::create_dir(&net_d).unwrap();
    let disks = [&net_d, &leases].map(|directory| Disk::mount(directory));
    let [runtimes, pools] = &disks;
    let settings = settings_of_doctor(&node);
    let text = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, format!("{text}cniConf: {{dir: {}}}\n", net_d.display())).unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    let conf = net_d.join("00-netattach.conflist");
    let pool = leases.join("@kube-system/default");
    for how in Spoiled::ALL {
        let error = how.error();
        // Only a file that has to be written is missed.
        runtimes.spoil(how);
        node.start().unwrap();
        let problem = format!("write {}: {MAKE_ROOM}: {error}", conf.display());
        assert!(eventually(PATIENCE, || unmet(&node) == [problem.clone()]), "{how:?}: {:#?}", unmet(&node));
        assert_eq!(doctor(&node, &settings, "disk"), [how.found(&net_d, "cniConf.dir")]);
        let expected = json!({
            "check": "readiness", "state": "failed", "detail": format!("CNI configuration: {problem}"),
            "remedy": "see that cniConf.dir is writable and has room, that no other program's file is in the way there, \
                       and that the default network can be attached (docs/primary-networks.md)"
        });
        assert_eq!(not_ready(&node, &settings), [expected], "{how:?}");
        node.add(&a).success();
        runtimes.mend(how);
        assert!(eventually(PATIENCE, || unmet(&node).is_empty()), "{how:?}, mended: {:#?}", unmet(&node));
        assert!(conf.exists(), "{how:?}");

        // The agent keeps directories of pools open, below the covering mount.
        node.stop().unwrap();
        pools.spoil(how);
        node.start().unwrap();
        let (_, message) = node.call("ADD", &b).run().failure();
        let reservation = format!("write reservation {}/10.50.0.", pool.display());
        assert!(message.contains(&reservation), "{how:?}: {message}");
        assert!(message.ends_with(&format!(": {MAKE_ROOM}: {error}")), "{how:?}: {message}");
        let found = how.found(&pool, "ipam.dataDir");
        assert_eq!(doctor(&node, &settings, "disk"), [found]);
        pools.mend(how);
        node.add(&b).success();
        for pod in [&a, &b] {
            node.check(pod).success();
            node.del(pod).success();
        }
        node.stop().unwrap();
        fs::remove_file(&conf).unwrap();
    }
    drop(disks);
}

/// The runtime asks again, as DEL is not done.
#[test]
fn a_del_that_no_agent_takes_and_no_file_keeps_is_told_with_what_to_do() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    let state = node.path("state");
    let disk = Disk::mount(&state);
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.stop().unwrap();
    let pending = state.join("pending");
    for how in Spoiled::ALL {
        disk.spoil(how);
        let (code, message) = node.del(&a).failure();
        let kept = format!("record the DEL request in {}: {MAKE_ROOM}: {}", pending.display(), how.error());
        let said = format!("DEL is not done and could not be recorded ({kept}): repeat it: ");
        assert!(code == 11 && message.starts_with(&said), "{how:?}: {code}: {message}");
        disk.mend(how);
    }
    goes_on(&mut node, &a);
    node.stop().unwrap();
    drop(disk);
}

const DEVICE: &str = "0000:03:02.1";

/// Defines a network of an executed plugin that gets a device, and the device information of the device's plugin on
/// the node.
fn with_device(node: &Node) {
    let capabilities = json!({"CNIDeviceInfoFile": true});
    let config = json!({"cniVersion": "1.0.0", "name": "odd", "type": "odd", "capabilities": capabilities});
    let odd = network(NAMESPACE, "odd", &config);
    let odd = annotated(odd, "k8s.v1.cni.cncf.io/resourceName", "example.com/vf");
    node.write("odd", &odd).unwrap();
    node.plugin("odd", &json!({})).unwrap();
    let described = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": DEVICE}});
    fs::create_dir(node.path("devinfo/dp")).unwrap();
    let file = node.path(&format!("devinfo/dp/example.com-vf-{DEVICE}-device.json"));
    fs::write(file, described.to_string()).unwrap();
}

/// Files that the agent writes for others to read, so in directories of others.
#[test]
fn a_full_or_read_only_directory_of_libcni_or_of_device_plugins_is_told_with_what_to_do() {
    let selection = json!([{"name": "odd", "deviceID": DEVICE}]);
    let manifests = [pod("a", &json!({}), &Value::Null), pod("b", &json!({}), &selection)];
    let mut node = Node::new(&manifests).unwrap();
    let places = ["devinfo", "cni-cache"].map(|name| node.path(name));
    let disks = places.each_ref().map(|place| {
        fs::create_dir(place).unwrap();
        Disk::mount(place)
    });
    with_device(&node);
    let settings = settings_of_doctor(&node);
    let text = fs::read_to_string(&settings).unwrap();
    let [devices, cache] = places.each_ref().map(|place| place.display());
    let more = format!("deviceInfoDir: {devices}\ndelegation: {{cacheDir: {cache}}}\n");
    fs::write(&settings, text + &more).unwrap();
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    let said = [
        ("deviceInfoDir", format!("device information {devices}/cni/{NAMESPACE}-odd-c-b_net1: ")),
        ("delegation.cacheDir", format!("write cached attachment {cache}/results/odd-c-b-net1: ")),
    ];
    for how in Spoiled::ALL {
        for (((key, what), disk), place) in said.iter().zip(&disks).zip(&places) {
            disk.spoil(how);
            let (code, message) = node.call("ADD", &b).run().failure();
            let said = format!("{what}{MAKE_ROOM}: {}", how.error());
            assert!(code == 5 && message.ends_with(&said), "{key}, {how:?}: {code}: {message}\n{said}");
            assert_eq!(doctor(&node, &settings, "disk"), [how.found(place, key)]);
            assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap(), "{key}, {how:?}");
            disk.mend(how);
            // Files that could not be removed there are removed now.
            node.del(&b).success();
        }
    }
    node.add(&b).success();
    for pod in [&a, &b] {
        node.check(pod).success();
        node.del(pod).success();
    }
    node.stop().unwrap();
    drop(disks);
}

#[test]
fn a_full_or_read_only_directory_of_the_socket_is_told_with_what_to_do_and_pods_that_are_there_go_on() {
    let manifests = ["a", "b"].map(|name| pod(name, &json!({}), &Value::Null));
    let mut node = Node::new(&manifests).unwrap();
    let run = node.path("run");
    let disk = Disk::mount(&run);
    let settings = settings_of_doctor(&node);
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    // The running agent continues to serve, and cannot write published statuses.
    let published = run.join("network-status").join(NAMESPACE).join("b.json");
    for how in Spoiled::ALL {
        disk.spoil(how);
        node.call("ADD", &b).run().success();
        let said = format!("publish network-status {}: {MAKE_ROOM}: {}", published.display(), how.error());
        let is_told = |line: &str| line.contains(" WARN ") && line.contains(&said);
        let told = || node.log_so_far().lines().any(is_told);
        assert!(eventually(PATIENCE, told), "{how:?}: {said}\n{}", node.log_so_far());
        assert_eq!(doctor(&node, &settings, "disk"), [how.found(&run, "runDir")]);
        disk.mend(how);
        node.check(&b).success();
        node.del(&b).success();
    }
    node.stop().unwrap();

    // An agent that starts cannot serve.
    let socket = node.socket();
    fs::remove_file(socket.with_extension("sock.lock")).unwrap();
    disk.spoil(Spoiled::ReadOnly);
    let command = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let said = format!("lock {}.lock: {MAKE_ROOM}: {}", socket.display(), Spoiled::ReadOnly.error());
    assert_eq!(refused(&node, command), said);
    assert_eq!(doctor(&node, &settings, "disk"), [Spoiled::ReadOnly.found(&run, "runDir")]);
    disk.mend(Spoiled::ReadOnly);
    goes_on(&mut node, &a);
    node.stop().unwrap();
    drop(disk);
}
