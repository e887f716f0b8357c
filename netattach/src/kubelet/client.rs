//! The kubelet's PodResources socket.
//!
//! `Get` answers for one pod (Kubernetes 1.27); before that `List` answers for all. The kubelet refuses more than 100
//! calls a second, 10 at once, from all clients together, so calls are spaced, and one `List` answers all requests
//! that came before it began.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Code;

use super::allocate::{ContainerDevices, devices};
use super::checkpoint::Checkpoint;
use super::messages::{
    GET, GetPodResourcesRequest, GetPodResourcesResponse, LIST, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources as Pod,
};
use crate::grpc::{CallError, Connection, Refused};
use crate::objects::ObjectName;

/// The longest time from a question to its answer.
const DEADLINE: Duration = Duration::from_secs(2);
/// The longest answer, in bytes: the bound that other clients have too.
const LONGEST: usize = 16 << 20;
/// Time between the beginnings of two calls.
const BETWEEN_CALLS: Duration = Duration::from_millis(20);
/// Time between the beginnings of two `List`s.
const BETWEEN_LISTS: Duration = Duration::from_millis(100);

/// Why it is not known which devices a pod has. The pod may be tried again in every case.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no socket.
    #[error(
        "the kubelet's socket {0} does not exist (podResourcesSocket), so the devices of the pod are unknown"
    )]
    Absent(PathBuf),
    /// The kubelet does not accept connections.
    #[error("connect to the kubelet at {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error of the connection.
        #[source]
        source: tonic::transport::Error,
    },
    /// The kubelet refused the call.
    #[error("ask the kubelet at {path} ({call})")]
    Call {
        /// The socket.
        path: PathBuf,
        /// Path of the call.
        call: &'static str,
        /// Its answer.
        #[source]
        source: Refused,
    },
    /// The kubelet did not answer in time.
    #[error("the kubelet at {0} did not answer within {limit} s", limit = DEADLINE.as_secs())]
    Late(PathBuf),
    /// The checkpoint cannot be read.
    #[error("read the kubelet's checkpoint {path} (deviceCheckpoint)")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The kubelet's answer is about another pod.
    #[error(
        "the kubelet lists devices of pod {pod}, none of which its checkpoint has for uid {uid}: they may be an earlier pod's"
    )]
    OtherPod {
        /// The pod.
        pod: ObjectName,
        /// The uid that the runtime named.
        uid: String,
    },
}

/// A client of the kubelet.
#[derive(Debug)]
pub struct PodResources {
    socket: PathBuf,
    checkpoint: PathBuf,
    /// When the next call may begin.
    calls: Mutex<Option<Instant>>,
    lists: Mutex<Lists>,
    /// The number of `List`s that have begun.
    begun: AtomicU64,
    /// The kubelet does not serve `Get`.
    lacks_get: AtomicBool,
}

/// The pods of the node that have devices.
type Listing = Vec<(ObjectName, Vec<ContainerDevices>)>;

/// The outcome of one list, shared by all requests that waited for it.
type Listed = Result<Arc<Listing>, Arc<Error>>;

#[derive(Debug, Default)]
struct Lists {
    /// When the next may begin.
    next: Option<Instant>,
    /// The newest, with its number.
    last: Option<(u64, Listed)>,
}

impl PodResources {
    /// A client of this socket and this checkpoint. Nothing is opened yet.
    pub fn new(socket: &Path, checkpoint: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            checkpoint: checkpoint.to_owned(),
            calls: Mutex::default(),
            lists: Mutex::default(),
            begun: AtomicU64::new(0),
            lacks_get: AtomicBool::new(false),
        }
    }

    /// The devices of a pod. With a uid, none of an earlier pod of that name is among them.
    ///
    /// # Errors
    /// [`Error`]; at the latest after [`DEADLINE`].
    pub async fn of_pod(
        &self,
        pod: &ObjectName,
        uid: Option<&str>,
    ) -> Result<Vec<ContainerDevices>, Arc<Error>> {
        let asked = timeout(DEADLINE, self.checked(pod, uid));
        asked.await.unwrap_or_else(|_| Err(Arc::new(Error::Late(self.socket.clone()))))
    }

    async fn checked(
        &self,
        pod: &ObjectName,
        uid: Option<&str>,
    ) -> Result<Vec<ContainerDevices>, Arc<Error>> {
        let listed = self.by_name(pod).await?;
        let Some(uid) = uid.filter(|_| !listed.is_empty()) else { return Ok(listed) };
        let path = self.checkpoint.clone();
        let read = tokio::task::spawn_blocking(move || Checkpoint::read(&path)).await;
        let checkpoint = read.map_err(io::Error::other).flatten();
        let checkpoint =
            checkpoint.map_err(|source| Error::Checkpoint { path: self.checkpoint.clone(), source })?;
        let of_uid = checkpoint.of_uid(uid, listed);
        if of_uid.is_empty() {
            return Err(Arc::new(Error::OtherPod { pod: pod.clone(), uid: uid.to_owned() }));
        }
        Ok(of_uid)
    }

    async fn by_name(&self, pod: &ObjectName) -> Result<Vec<ContainerDevices>, Arc<Error>> {
        if !self.lacks_get.load(Ordering::Relaxed) {
            match self.get(pod).await {
                Err(Error::Call { source, .. }) if is_not_served(&source) => {
                    self.lacks_get.store(true, Ordering::Relaxed);
                }
                got => return Ok(got?),
            }
        }
        let listing = self.list().await?;
        // An earlier pod of the name, which has ended, may be listed beside this one.
        let of_name = listing.iter().filter(|(name, _)| name == pod);
        Ok(of_name.flat_map(|(_, devices)| devices.clone()).collect())
    }

    async fn get(&self, pod: &ObjectName) -> Result<Vec<ContainerDevices>, Error> {
        let request =
            GetPodResourcesRequest { pod_name: pod.name.clone(), pod_namespace: pod.namespace.clone() };
        let answer: GetPodResourcesResponse = self.call(GET, request).await?;
        Ok(answer.pod_resources.map(devices).unwrap_or_default())
    }

    /// A listing that begins after this call.
    async fn list(&self) -> Result<Arc<Listing>, Arc<Error>> {
        let came = self.begun.load(Ordering::SeqCst);
        let mut lists = self.lists.lock().await;
        if let Some((number, listing)) = &lists.last
            && *number > came
        {
            return listing.clone();
        }
        if let Some(next) = lists.next {
            sleep_until(next).await;
        }
        lists.next = Some(Instant::now() + BETWEEN_LISTS);
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let answer: Result<ListPodResourcesResponse, Error> =
            self.call(LIST, ListPodResourcesRequest {}).await;
        let listing = answer.map(|answer| Arc::new(listing(answer))).map_err(Arc::new);
        if listing.is_err() {
            // Another kubelet may answer next time.
            self.lacks_get.store(false, Ordering::Relaxed);
        }
        lists.last = Some((number, listing.clone()));
        listing
    }

    /// Makes a call, over a connection of its own: a kubelet that restarts leaves nothing behind here.
    async fn call<Q, A>(&self, call: &'static str, request: Q) -> Result<A, Error>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.wait_for_turn().await;
        let answered = async { Connection::to(&self.socket).await?.call(call, request, LONGEST).await }.await;
        let path = || self.socket.clone();
        answered.map_err(|error| match error {
            CallError::Absent => Error::Absent(path()),
            CallError::Connect(source) => Error::Connect { path: path(), source },
            CallError::Refused(source) => Error::Call { path: path(), call, source },
        })
    }

    async fn wait_for_turn(&self) {
        let mut next = self.calls.lock().await;
        if let Some(at) = *next {
            sleep_until(at).await;
        }
        *next = Some(Instant::now() + BETWEEN_CALLS);
    }
}

fn listing(answer: ListPodResourcesResponse) -> Listing {
    let named = |mut pod: Pod| {
        let name = ObjectName::new(std::mem::take(&mut pod.namespace), std::mem::take(&mut pod.name));
        (name, devices(pod))
    };
    answer.pod_resources.into_iter().map(named).filter(|(_, devices)| !devices.is_empty()).collect()
}

/// Whether the kubelet has no such call, or has it switched off (feature gate `KubeletPodResourcesGet`).
fn is_not_served(Refused(status): &Refused) -> bool {
    status.code() == Code::Unimplemented || status.message().contains("method disabled")
}
