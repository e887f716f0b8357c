//! The outcome of an ADD when the source lags behind.

use std::sync::Mutex;

use tokio::sync::watch;

use super::*;
use crate::source::PodFuture;

/// A source in a given state, which records the pods that are asked for.
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
    let intents = IntentReader {
        source: Arc::clone(&source) as Arc<dyn Source>,
        pod_wait: Duration::from_secs(5),
        default: "default".parse().unwrap(),
        default_namespace: "kube-system".into(),
        from_node: Arc::default(),
        restrictions: Restrictions::default(),
        conf_dir: directory.path().to_owned(),
        ignore_invalid: false,
        separate_pools: true,
    };
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
    let request = cni::Request::parse(&env, stdin).unwrap();
    intents.await_pod(&request).await;
    let error = CniError::from(intents.read(&request).unwrap_err());
    let asked = source.asked.lock().unwrap().clone();
    (error.code, error.to_string(), asked)
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
