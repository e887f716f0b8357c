//! The next agent's pod beside the one that serves, as created by controllers since Kubernetes 1.22.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use netattach_tests::cluster::site::{NODE, Site};
use netattach_tests::coming::Coming;
use netattach_tests::machine::PLUGINS;
use netattach_tests::{Call, Namespace};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use serde_json::{Value, json};

use crate::rig::is_ready;

/// The pod that stands by, which a controller would create.
const BY_HAND: &str = "netattach-by-hand";
/// `minReadySeconds` of the DaemonSet.
const MIN_READY: Duration = Duration::from_secs(10);
/// The documented limit is 2 s more for an ADD, which `cargo xtask bench restart --check` checks. The total time
/// depends on the cluster and on concurrent tests.
const LONGEST: Duration = Duration::from_secs(60);

/// A sandbox without a pod, where agents see it: ADD and DEL by the executable that the agent has installed.
struct Sandbox {
    _namespace: Namespace,
    path: PathBuf,
}

impl Sandbox {
    fn new(name: &str) -> Self {
        let (namespace, path) = (Namespace::new().unwrap(), Path::new("/run/netns").join(name));
        fs::write(&path, "").unwrap();
        mount_bind(namespace.path(), &path).unwrap();
        Self { _namespace: namespace, path }
    }

    fn calls(&self) -> (Call, Call) {
        let conf = fs::read("/etc/cni/net.d/00-netattach.conflist").unwrap();
        let list: Value = serde_json::from_slice(&conf).unwrap();
        let mut config = list["plugins"][0].clone();
        config["name"] = list["name"].clone();
        config["cniVersion"] = list["cniVersion"].clone();
        let name = self.path.file_name().unwrap().to_str().unwrap();
        let path = self.path.to_str().unwrap();
        ["ADD", "DEL"]
            .map(|command| {
                let env = [
                    ("CNI_COMMAND", command),
                    ("CNI_CONTAINERID", name),
                    ("CNI_NETNS", path),
                    ("CNI_IFNAME", "eth0"),
                    ("CNI_PATH", PLUGINS),
                ];
                let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
                Call { env, stdin: config.to_string() }
            })
            .into()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns a pod of the DaemonSet's template that a controller would create, and that the DaemonSet does not adopt.
pub(crate) fn by_hand(site: &Site, name: &str) -> Value {
    let set = site.get("/apis/apps/v1/namespaces/kube-system/daemonsets/netattach");
    let mut spec = set["spec"]["template"]["spec"].clone();
    spec["nodeName"] = json!(NODE);
    let labels = json!({"app.kubernetes.io/name": "netattach-by-hand"});
    json!({
        "apiVersion": "v1", "kind": "Pod", "spec": spec,
        "metadata": {"namespace": "kube-system", "name": name, "labels": labels}
    })
}

/// Simulates controllers since Kubernetes 1.22, which this one is not: a second pod of the template beside the first;
/// when it has been ready for `minReadySeconds`, the first one ends. Sandboxes are created all the time. The second
/// pod is replaced by one of the DaemonSet's in the same way.
pub(crate) fn goes_on(site: &Site) {
    let pods = "/api/v1/namespaces/kube-system/pods";
    let of_set = || {
        let all = site.get(&format!("{pods}?labelSelector=app.kubernetes.io/name%3Dnetattach"));
        let names = all["items"].as_array().into_iter().flatten();
        names.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let stands_by = |name: &str| {
        let said = || site.get(&format!("{pods}/{name}/log?container=agent"));
        let standing = || said().as_str().is_some_and(|log| log.contains(" standing by until "));
        assert!(site.eventually(standing), "{name}: {}\n{}", said(), site.told());
        let ready = || is_ready(&site.get(&format!("{pods}/{name}")));
        assert!(site.eventually(ready), "{name}: {}", site.told());
        std::thread::sleep(MIN_READY);
        assert!(ready(), "{name}: {}", site.told());
    };
    let serves = |name: &str| {
        let said = || site.get(&format!("{pods}/{name}/log?container=agent"));
        let serving = || said().as_str().is_some_and(|log| log.contains(" serving socket="));
        assert!(site.eventually(serving), "{name}: {}\n{}", said(), site.told());
    };
    let end = |name: &str| {
        site.kubectl.run(&["delete", "pod", name, "--namespace=kube-system", "--wait=false"]).unwrap();
    };
    let [first] = of_set().try_into().unwrap();
    let sandboxes: Vec<Sandbox> = (0..2).map(|number| Sandbox::new(&format!("coming-{number}"))).collect();
    let calls = sandboxes.iter().map(Sandbox::calls).collect();
    let coming = Coming::start(&Path::new(PLUGINS).join("netattach"), calls);
    site.admin.create(&by_hand(site, BY_HAND)).unwrap();
    stands_by(BY_HAND);
    end(&first);
    serves(BY_HAND);
    let next = || of_set().into_iter().find(|name| *name != first);
    assert!(site.eventually(|| next().is_some()), "{}", site.told());
    let next = next().unwrap();
    stands_by(&next);
    end(BY_HAND);
    serves(&next);
    let came = coming.end();
    eprintln!(
        "agents changed twice, one standing by: {} ADDs, the longest took {} ms",
        came.adds,
        came.longest.as_millis()
    );
    assert!(came.adds > 2 && came.longest < LONGEST, "{came:?}");
    site.rolled_out().unwrap();
}
