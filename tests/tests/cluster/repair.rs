//! Pods that started without their networks, because the runtime read another configuration: attached while they run,
//! or evicted, as rights and budgets of a real API server permit.

use std::fs;
use std::path::Path;

use netattach_tests::cluster::Setup;
use netattach_tests::machine::CONFIGURATIONS;
use netattach_tests::machine::containerd::SOCKET;
use netattach_tests::traffic::{Echo, SILENCE, connects, eventually};
use serde_json::{Value, json};

use crate::rig::{PATIENCE, PODS, PORT, Rig, busybox, is_ready, published};

const FORMER: &str = "former";
const BUDGET: &str = "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets/web";

impl Rig {
    /// Lets the runtime read the configuration of another plugin, or that of netattach.
    #[track_caller]
    fn runtime_reads(&self, network: &str) {
        let file = Path::new(CONFIGURATIONS).join("05-former.conflist");
        if network == FORMER {
            let list = json!({"cniVersion": "1.0.0", "name": FORMER, "plugins": [{"type": FORMER}]});
            fs::write(&file, list.to_string()).unwrap();
        } else {
            fs::remove_file(&file).unwrap();
        }
        let mut cri = self.worker.containerd().cri().unwrap();
        let name = format!("\"Name\":\"{network}\"");
        let mut says = String::new();
        let reads = eventually(PATIENCE, || {
            says = cri.network_configuration().unwrap();
            says.contains(&name)
        });
        assert!(reads, "{says}");
    }

    /// Returns how often the other plugin was called with that verb since the last query.
    fn calls_of_former(&self, verb: &str) -> usize {
        let calls = self.worker.node().take_calls().unwrap();
        let of_verb = |call: &&Value| call["plugin"] == FORMER && call["env"]["CNI_COMMAND"] == verb;
        calls.iter().filter(of_verb).count()
    }

    /// Returns the pods of the Deployment `web`, once that many are ready; they may lack their networks.
    #[track_caller]
    fn ready_pods(&self, count: usize) -> Vec<Value> {
        let mut pods = Vec::new();
        let ready = eventually(PATIENCE, || {
            let all = self.get(PODS)["items"].as_array().cloned().unwrap_or_default();
            pods = all.into_iter().filter(|pod| pod["metadata"]["labels"]["app"] == "web").collect();
            pods.len() == count && pods.iter().all(is_ready)
        });
        assert!(ready, "{pods:#?}");
        pods
    }

    /// Waits until `netattachctl status` reports that text about an object, or nothing.
    #[track_caller]
    fn await_trouble(&self, object: &str, text: Option<&str>) {
        let mut said = None;
        let as_expected = eventually(PATIENCE, || {
            let status = self.status();
            let rows = status["troubles"].as_array().cloned().unwrap_or_default();
            let row = rows.iter().find(|row| row["object"] == object);
            said = row.map(|row| row["problem"].as_str().unwrap_or_default().to_owned());
            match (&said, text) {
                (None, None) => status["ready"].is_array(),
                (Some(said), Some(text)) => said.contains(text),
                _ => false,
            }
        });
        assert!(as_expected, "{object}: {said:?} in place of {text:?}");
    }

    fn restart_with(&mut self, repair: &str) {
        let node = self.worker.node_mut();
        node.kill().unwrap();
        node.set("repair", json!(repair));
        node.start().unwrap();
    }
}

fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().unwrap()
}

#[test]
fn pods_without_their_networks_are_attached_where_they_are_or_evicted() {
    let settings = [
        ("repair", json!("attach")),
        ("repairAfterSeconds", json!(1)),
        ("runtimeSocket", json!(SOCKET)),
        ("delegation", json!({"cacheDir": "/var/lib/cni"})),
    ];
    let setup = Setup { settings: &settings, ..Setup::default() };
    let Some(mut rig) = Rig::new("repair", &setup) else { return };
    let result = json!({
        "cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/pod"}],
        "ips": [{"address": "10.60.0.9/24", "interface": 0}]
    });
    let former = json!({"ADD": {"result": result}});
    rig.worker.node().plugin(FORMER, &former).unwrap();
    they_are_attached_and_what_attached_them_before_takes_its_part_back(&mut rig);
    they_are_evicted_as_rights_and_budgets_allow(&mut rig);
    rig.assert_nothing_is_left();
}

fn they_are_attached_and_what_attached_them_before_takes_its_part_back(rig: &mut Rig) {
    rig.runtime_reads(FORMER);
    rig.deploy("web", 2);
    let before = rig.ready_pods(2);
    assert_eq!(rig.calls_of_former("ADD"), 2);
    rig.runtime_reads("pods");
    let have_networks = || rig.ready_pods(2).iter().all(|pod| published(pod).len() == 3);
    assert!(eventually(PATIENCE, have_networks), "{:#}", rig.status());
    let pods = rig.ready_pods(2);
    let all_of = |pods: &[Value]| pods.iter().map(|pod| name(pod).to_owned()).collect::<Vec<_>>();
    assert_eq!(all_of(&pods), all_of(&before), "the same pods");
    rig.restart_with("attach");
    assert_eq!(rig.status()["troubles"], json!([]));

    // Their policy is in force: on the first network pods of this Deployment do not reach each other, on the second
    // they do.
    let address = |pod: &Value, network: usize| {
        let entry = &published(pod)[network];
        let ip = entry["ips"][0].as_str().unwrap().parse().unwrap();
        std::net::SocketAddr::new(ip, PORT)
    };
    let [server, client] = [&pods[0], &pods[1]].map(|pod| rig.worker.namespace_of(name(pod)).unwrap());
    let [policed, open] = [0, 1].map(|network| address(&pods[0], network));
    let echoes = [policed, open].map(|at| Echo::serve(&server, at).unwrap());
    assert!(eventually(PATIENCE, || connects(&client, open, SILENCE)));
    assert!(!connects(&client, policed, SILENCE));
    drop((echoes, server, client));

    rig.delete_deployment("web");
    rig.ready_pods(0);
    rig.assert_nothing_is_left();
    assert_eq!(rig.calls_of_former("DEL"), 2);
}

fn they_are_evicted_as_rights_and_budgets_allow(rig: &mut Rig) {
    rig.restart_with("evict");
    let access = "access to pods/eviction";
    rig.await_trouble(access, Some("resources: [\"pods/eviction\"], verbs: [\"create\"]"));

    let budget = json!({
        "apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget",
        "metadata": {"namespace": "default", "name": "web"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    });
    rig.admin.create(&budget).unwrap();
    rig.runtime_reads(FORMER);
    rig.deploy("web", 1);
    let missed = rig.ready_pods(1).remove(0);
    rig.runtime_reads("pods");
    let counts = || rig.get(BUDGET)["status"]["currentHealthy"] == 1;
    assert!(eventually(PATIENCE, counts), "{:#}", rig.get(BUDGET));
    let pod = format!("pod default/{}", name(&missed));
    rig.await_trouble(&pod, Some("it is evicted once the runtime asks this agent to attach a pod"));
    rig.pod("other", &json!({}), "", &busybox(&json!({})));
    rig.await_trouble(&pod, Some("not evicted: POST"));
    rig.await_trouble(&pod, Some("pods \"web-"));

    // With the right, the disruption budget decides.
    rig.cluster.grant("evict").unwrap();
    rig.restart_with("evict");
    rig.await_trouble(access, None);
    rig.await_trouble(&pod, Some("it is evicted once the runtime asks this agent to attach a pod"));
    rig.delete("other");
    rig.pod("other", &json!({}), "", &busybox(&json!({})));
    rig.await_trouble(&pod, Some("its eviction is put off: POST"));
    rig.await_trouble(&pod, Some("disruption budget"));
    assert_eq!(rig.ready_pods(1)[0]["metadata"]["uid"], missed["metadata"]["uid"]);
    rig.admin.delete(BUDGET).unwrap().expect(200).unwrap();
    let is_gone = || rig.get(&format!("{PODS}/{}", name(&missed)))["code"] == 404;
    assert!(eventually(PATIENCE, is_gone), "{:#}", rig.status());
    rig.delete("other");
    let mut events = Value::Null;
    let is_evicted = |it: &&Value| it["reason"] == "Evicted" && it["regarding"]["name"] == *name(&missed);
    let is_told = eventually(PATIENCE, || {
        events = rig.get("/apis/events.k8s.io/v1/namespaces/default/events");
        events["items"].as_array().unwrap().iter().filter(is_evicted).count() == 1
    });
    assert!(is_told, "{events:#}");
    rig.settled(&[("web", 1)]);
    rig.delete_deployment("web");
}
