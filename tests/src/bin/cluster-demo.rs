//! The demonstration of `cargo xtask demo --cluster`: netattach installed, used, upgraded and removed on a cluster,
//! by commands as an operator types them. Needs root, and the requirements of the cluster tests.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use netattach_tests::cluster::left::Left;
use netattach_tests::cluster::ready::Ready;
use netattach_tests::cluster::site::{Before, NEXT, NODE, Site};
use serde_json::Value;
use xtask::demo::Transcript;
use xtask::progress;

const MINE: &str = "\
resources: [../deploy/alone]
components: [../deploy/components/before-1.22, ../deploy/components/before-1.30]
";
/// The Jobs of deploy/uninstall.
const JOBS: &str = "--namespace kube-system --selector app.kubernetes.io/name=netattach-uninstall";
/// Half a minute of traffic, in which an upgrade has its time.
const PINGS: u32 = 3000;

fn main() -> ExitCode {
    let started = Instant::now();
    // A separate thread has the mounts of the node: processes in them are ended with it.
    let told = std::thread::spawn(tell).join();
    match told.unwrap_or_else(|_| Err(anyhow!("the demonstration panicked"))) {
        Ok(ticks) => {
            let seconds = started.elapsed().as_secs_f64();
            progress::line(&format!(
                "\nAll {ticks} checks were as expected, in {seconds:.0} s. Nothing is left of the demo."
            ));
            ExitCode::SUCCESS
        }
        Err(error) => {
            progress::failure(&error);
            ExitCode::FAILURE
        }
    }
}

fn tell() -> Result<u16> {
    let before = Before { primary: None, has_bpffs: true };
    let Some(site) = Site::new("cluster-demo", &before)? else {
        bail!("the programs of a cluster are not here: cargo xtask demo --cluster builds them")
    };
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/cluster");
    for entry in fs::read_dir(examples)? {
        let entry = entry?;
        fs::copy(entry.path(), site.directory().join(entry.file_name()))?;
    }
    let before = Left::of(&site)?;
    let mut story = Story { site, before, transcript: Transcript::begin() };
    let told = story.whole();
    if told.is_err() {
        story.transcript.output(&story.site.told());
    }
    told?;
    Ok(story.transcript.ticks())
}

struct Story {
    site: Site,
    /// The state of the node without netattach.
    before: Left,
    transcript: Transcript,
}

impl Story {
    fn whole(&mut self) -> Result<()> {
        self.install()?;
        self.attach_pods()?;
        self.enforce_a_policy()?;
        self.explain()?;
        self.upgrade()?;
        self.remove()
    }

    fn install(&mut self) -> Result<()> {
        self.transcript.step(
            "Install netattach on a cluster without a network",
            "A real API server, scheduler, controllers, kubelet, kube-proxy and containerd. The image is on the node.",
        );
        self.show("kubectl get nodes")?;
        fs::create_dir_all(self.site.directory().join("mine"))?;
        fs::write(self.site.directory().join("mine/kustomization.yaml"), MINE)?;
        self.show("cat mine/kustomization.yaml")?;
        let ready = Ready::begin()?;
        self.show("kubectl apply -k mine")?;
        let ready = ready.in_time(&self.site)?;
        self.site.rolled_out()?;
        self.show("kubectl get nodes")?;
        self.show("kubectl --namespace kube-system get pods")?;
        let status = self.json("kubectl netattach status -o json")?;
        let met = status["ready"].as_array().is_some_and(|all| all.iter().all(|it| it["met"] == true));
        self.transcript.expect(&ready.to_string(), &true, &met)
    }

    fn attach_pods(&mut self) -> Result<()> {
        self.transcript.step(
            "Ten pods with three networks each",
            "A routed link, a bridge and a macvlan, beside the pod network that the agent makes from the node's podCIDR.",
        );
        self.show("kubectl apply -f 10-networks.yaml -f 20-pods.yaml")?;
        self.show("kubectl rollout status deployment web --timeout 120s | tail -1")?;
        self.show("kubectl wait --for condition=Ready pod client other --timeout 120s")?;
        self.show("kubectl get pods")?;
        self.show("kubectl exec client -- busybox ip -o -4 addr | grep -v ' lo '")?;
        let pods = self.json("kubectl get pods --selector app=web -o json")?;
        let all = pods["items"].as_array().context("pods are a list")?;
        let networks = |pod: &Value| {
            let status = pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"].as_str();
            let status: Value = status.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
            status.as_array().map_or(0, Vec::len)
        };
        self.transcript.expect(
            "ten pods, and the network-status of each has four entries",
            &vec![4; 10],
            &all.iter().map(networks).collect(),
        )
    }

    fn enforce_a_policy(&mut self) -> Result<()> {
        self.transcript.step(
            "A MultiNetworkPolicy",
            "30-policy.yaml: on the storage network, the client alone reaches the servers.",
        );
        let server = self.server("default/storage")?;
        for pod in ["client", "other"] {
            self.connect(pod, &server, true)?;
        }
        self.show("kubectl apply -f 30-policy.yaml")?;
        let closed = self.site.eventually(|| self.reaches("other", &server).is_ok_and(|reached| !reached));
        self.transcript.expect("the other pod is kept out", &true, &closed)?;
        for (pod, reached) in [("client", true), ("other", false)] {
            self.connect(pod, &server, reached)?;
        }
        Ok(())
    }

    fn explain(&mut self) -> Result<()> {
        self.transcript.step(
            "Why? kubectl netattach",
            "The same executable as netattachctl, as a plugin of kubectl: it asks the agents through pods/exec.",
        );
        let web = self.a_server()?;
        self.show("kubectl netattach attachments --pod default/client")?;
        self.show(&format!("kubectl netattach policy --pod default/{web}"))?;
        let line = |from: &str| format!("kubectl netattach explain default/{from} default/{web} 8080");
        for (from, word) in [("client", "allowed by default/web"), ("other", "denied by default/web")] {
            let line = line(from);
            self.transcript.command(&line);
            // Its exit code is the answer, for scripts.
            let ended = self.site.kubectl.ask(&line, self.site.directory())?;
            self.transcript.output(&ended.stdout);
            self.transcript.output(&ended.stderr);
            let said = ended.stdout.contains(word);
            self.transcript.expect(&format!("from {from}: {word}"), &true, &said)?;
        }
        Ok(())
    }

    fn upgrade(&mut self) -> Result<()> {
        self.transcript.step(
            "Upgrade under traffic",
            "Another tag of the image: the DaemonSet's pod is replaced, while what is attached goes on.",
        );
        let (server, pinged) = (self.server("default/storage")?, self.server("builtin")?);
        let ping = format!("kubectl exec client -- busybox ping -q -i 0.01 -c {PINGS} {pinged}");
        self.transcript.command(&format!("{ping} &"));
        let mut command = self.site.kubectl.shell(&ping);
        command.stdout(std::process::Stdio::piped());
        let pinging = self.site.cluster().outside().run(|| command.spawn()).context("start ping")?;
        let line = format!(
            "printf 'images: [{{name: localhost/netattach, newTag: {NEXT}}}]\\n' >> mine/kustomization.yaml"
        );
        self.show(&line)?;
        self.show("kubectl apply -k mine | grep -v unchanged")?;
        self.show(
            "kubectl --namespace kube-system rollout status daemonset netattach --timeout 120s | tail -1",
        )?;
        self.site.rolled_out()?;
        self.show("kubectl --namespace kube-system get pods")?;
        let said = pinging.wait_with_output().context("wait for ping")?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let summary = said.lines().find(|line| line.contains("packets transmitted")).unwrap_or_default();
        self.transcript.output(summary);
        let whole = format!("{PINGS} packets transmitted, {PINGS} packets received");
        self.transcript.expect("not one packet is lost", &true, &summary.starts_with(&whole))?;
        self.connect("client", &server, true)?;
        self.connect("other", &server, false)
    }

    fn remove(&mut self) -> Result<()> {
        self.transcript.step(
            "Remove it",
            "Pods first: an agent detaches them. Then the agents, a Job on each node, and everything that was applied.",
        );
        self.show("kubectl delete -f 20-pods.yaml --wait")?;
        let site = &self.site;
        let none = || site.ctl(&["attachments"]).as_array().is_some_and(Vec::is_empty);
        self.transcript.expect("nothing is attached any more", &true, &site.eventually(none))?;
        self.show("kubectl --namespace kube-system delete daemonset netattach")?;
        self.uninstall()?;
        self.show("kubectl delete -k mine --ignore-not-found")?;
        let kinds = self.site.kubectl.attempt(&["get", "network-attachment-definitions"])?;
        self.transcript.expect("the API server knows nothing of it", &false, &kinds.success)?;
        // The runtime may still be about to take namespaces of pods away.
        let stays = (Vec::new(), vec!["/opt/cni/bin/loopback".to_owned()]);
        let (site, before) = (&self.site, &self.before);
        site.eventually(|| before.added(site).is_ok_and(|added| added == stays));
        self.transcript.expect(
            "links and files of the node are as before, but for what the Job says stays",
            &stays,
            &before.added(site)?,
        )
    }

    /// Removes the parts that outlast agents: executables, pins, tables.
    fn uninstall(&mut self) -> Result<()> {
        // As the page on removal requires for a server of Kubernetes 1.20.
        self.show("sed -i '/appArmorProfile:/d; s|# annotations:|annotations:|' deploy/uninstall/job.yaml")?;
        self.show(&format!(
            "sed 's|NODE|{NODE}|; s|IMAGE|localhost/netattach:{NEXT}|' deploy/uninstall/job.yaml | kubectl create -f -"
        ))?;
        self.show(&format!("kubectl wait --for condition=complete --timeout 120s job {JOBS}"))?;
        self.show(&format!("kubectl logs --tail=-1 {JOBS}"))?;
        self.show(&format!("kubectl delete jobs {JOBS}")).map(drop)
    }

    /// Shows a command and its output; it has to succeed.
    fn show(&mut self, line: &str) -> Result<String> {
        self.transcript.command(line);
        let ended = self.site.kubectl.ask(line, self.site.directory())?;
        if !ended.success {
            bail!("{line}: {}{}", ended.stderr, ended.stdout);
        }
        self.transcript.output(&ended.stdout);
        Ok(ended.stdout)
    }

    /// A command that is not shown.
    fn json(&self, line: &str) -> Result<Value> {
        let ended = self.site.kubectl.ask(line, self.site.directory())?;
        serde_json::from_str(&ended.stdout).with_context(|| format!("{line}: {}", ended.stderr))
    }

    /// The name of a server.
    fn a_server(&self) -> Result<String> {
        let pods = self.json("kubectl get pods --selector app=web -o json")?;
        Ok(pods["items"][0]["metadata"]["name"].as_str().context("there are servers")?.to_owned())
    }

    /// Its address on a network.
    fn server(&self, network: &str) -> Result<String> {
        let rows = self.site.ctl(&["attachments", "--pod", &format!("default/{}", self.a_server()?)]);
        let row = rows.as_array().into_iter().flatten().find(|row| row["network"] == network);
        let net = row.and_then(|row| row["addresses"][0].as_str()).context("it is on that network")?;
        Ok(net.split('/').next().unwrap_or_default().to_owned())
    }

    fn connect(&mut self, pod: &str, server: &str, expected: bool) -> Result<()> {
        self.transcript.command(&probe(pod, server));
        let seen = self.reaches(pod, server)?;
        let answer = if expected { "is answered" } else { "gets no answer" };
        self.transcript.expect(&format!("{pod} {answer}"), &expected, &seen)
    }

    fn reaches(&self, pod: &str, server: &str) -> Result<bool> {
        let ended = self.site.kubectl.ask(&probe(pod, server), self.site.directory())?;
        Ok(ended.stdout.contains("hello"))
    }
}

fn probe(pod: &str, server: &str) -> String {
    format!(
        "kubectl exec {pod} -- busybox sh -c 'echo hello | busybox timeout 2 busybox nc -w 1 {server} 8080'"
    )
}
