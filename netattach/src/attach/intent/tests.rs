//! The outcome of an ADD when the source lags behind.

use std::path::Path;
use std::sync::Mutex;

use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::*;
use crate::objects::Definition;
use crate::source::PodFuture;
use crate::source::read::manifest::Object;
use crate::source::read::{Kind, api_object};

/// A source in a given state, which records the requested pods.
struct Behind {
    synced: Result<(), NotSynced>,
    asked: Mutex<Vec<WantedPod>>,
}

impl Source for Behind {
    fn snapshot(&self) -> Arc<Objects> {
        Arc::default()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn synced(&self) -> Result<(), NotSynced> {
        self.synced.clone()
    }

    fn pod<'a>(&'a self, wanted: &'a WantedPod, _: Instant) -> PodFuture<'a> {
        self.asked.lock().unwrap().push(wanted.clone());
        Box::pin(async { None })
    }

    fn reading(&self) -> Duration {
        Duration::ZERO
    }
}

/// The code and the message of an ADD of the pod `shop/web` with a uid, and the pods that were waited for.
async fn add(synced: Result<(), NotSynced>) -> (u32, String, Vec<WantedPod>) {
    let source = Arc::new(Behind { synced, asked: Mutex::default() });
    let directory = tempfile::tempdir().unwrap();
    let intents = reader(Arc::clone(&source) as Arc<dyn Source>, directory.path());
    let request = request();
    intents.await_pod(&request).await;
    let error = CniError::from(intents.read(&request).unwrap_err());
    let asked = source.asked.lock().unwrap().clone();
    (error.code, error.to_string(), asked)
}

fn reader(source: Arc<dyn Source>, conf_dir: &Path) -> IntentReader {
    IntentReader {
        source,
        pod_wait: Duration::from_secs(5),
        default: "default".parse().unwrap(),
        default_namespace: "kube-system".into(),
        from_node: Arc::default(),
        restrictions: Restrictions::default(),
        conf_dir: conf_dir.to_owned(),
        ignore_invalid: false,
        separate_pools: true,
        known: ReadNetworks::default(),
    }
}

/// ADD of the pod `shop/web` with uid 7.
fn request() -> cni::Request {
    let env = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "abc"),
        ("CNI_NETNS", "/run/netns/abc"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=7"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let stdin = br#"{"cniVersion": "1.0.0", "name": "netattach", "type": "netattach"}"#;
    cni::Request::parse(&env, stdin).unwrap()
}

#[tokio::test]
async fn before_the_first_complete_snapshot_an_add_is_to_be_tried_again_and_waits_for_nothing() {
    let incomplete = NotSynced::Incomplete("pods are being listed".into());
    let why = "source: objects have not been read completely yet: pods are being listed";
    assert_eq!(add(Err(incomplete)).await, (11, why.to_owned(), vec![]));
}

#[tokio::test]
async fn a_complete_snapshot_is_good_enough_and_the_pod_is_waited_for_by_name_and_uid() {
    let wanted = WantedPod { name: ObjectName::new("shop", "web"), uid: Some("7".into()) };
    let unknown = "pod shop/web is not known yet";
    for synced in [Ok(()), Err(NotSynced::Stale("the directory is away".into()))] {
        assert_eq!(add(synced).await, (11, unknown.to_owned(), vec![wanted.clone()]));
    }
}

/// A source with the pod `shop/web`, which names `shop/lan`.
struct Lagging {
    objects: Mutex<Arc<Objects>>,
    changes: watch::Sender<u64>,
}

impl Lagging {
    fn new() -> Self {
        let annotations = BTreeMap::from([(NETWORKS_ANNOTATION, "lan")]);
        let metadata = json!({"namespace": "shop", "name": "web", "uid": "7", "annotations": annotations});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
        let pod = RawValue::from_string(pod.to_string()).unwrap();
        let Object::Pod(pod) = api_object(Kind::Pod, &pod).unwrap() else { unreachable!() };
        let mut objects = Objects::default();
        objects.pods.insert(pod.name.clone(), pod);
        Self { objects: Mutex::new(Arc::new(objects)), changes: watch::Sender::new(0) }
    }

    fn define(&self, name: &str) {
        self.define_as(name, None);
    }

    fn define_as(&self, name: &str, config: Option<&str>) {
        let network = NetworkRef::new("shop", name);
        let definition = Definition {
            namespace: "shop".into(),
            name: name.into(),
            config: config.map(Into::into),
            annotations: BTreeMap::new(),
            allowed: None,
        };
        Arc::make_mut(&mut self.objects.lock().unwrap()).definitions.insert(network, definition.into());
        self.changes.send_modify(|number| *number += 1);
    }
}

impl Source for Lagging {
    fn snapshot(&self) -> Arc<Objects> {
        Arc::clone(&self.objects.lock().unwrap())
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn reading(&self) -> Duration {
        Duration::ZERO
    }
}

#[tokio::test]
async fn a_definition_that_the_pod_came_before_is_waited_for_and_no_longer_than_a_moment() {
    let source = Arc::new(Lagging::new());
    let directory = tempfile::tempdir().unwrap();
    let intents = reader(Arc::clone(&source) as Arc<dyn Source>, directory.path());
    let began = Instant::now();
    intents.await_pod(&request()).await;
    assert!(began.elapsed() >= DEFINITION_LAG, "it may still come");
    let is_defined = async || {
        intents.await_pod(&request()).await;
        source.snapshot().definitions.get(&NetworkRef::new("shop", "lan")).is_some()
    };
    let define = async {
        for name in ["wan", "lan"] {
            tokio::time::sleep(DEFINITION_LAG / 50).await;
            source.define(name);
        }
    };
    assert_eq!(tokio::join!(is_defined(), define), (true, ()), "another does not end it");
}

#[test]
fn a_definition_that_has_changed_is_read_again() {
    let source = Arc::new(Lagging::new());
    let directory = tempfile::tempdir().unwrap();
    let intents = reader(Arc::clone(&source) as Arc<dyn Source>, directory.path());
    let lan = NetworkRef::new("shop", "lan");
    let read = || intents.network_for(&source.snapshot(), "shop", &lan).map(|network| network.list);
    let kind = |list: &NetworkList| list.plugins[0].plugin_type().to_owned();
    source.define_as("lan", Some(r#"{"name": "lan", "type": "bridge"}"#));
    let first = read().unwrap();
    assert!(Arc::ptr_eq(&first, &read().unwrap()), "it is not read again");
    source.define_as("lan", Some(r#"{"name": "lan", "type": "macvlan"}"#));
    assert_eq!((kind(&first), kind(&read().unwrap())), ("bridge".to_owned(), "macvlan".to_owned()));
    source.define_as("lan", Some("{"));
    assert!(matches!(read(), Err(IntentError::Config { .. })));
    source.define("lan");
    let file = directory.path().join("lan.conf");
    for found in ["vlan", "ptp"] {
        std::fs::write(&file, format!(r#"{{"name": "lan", "type": "{found}"}}"#)).unwrap();
        assert_eq!(kind(&read().unwrap()), found, "a file may change without the definition");
    }
}
