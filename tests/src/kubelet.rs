//! A kubelet's PodResources socket, and its checkpoint of device allocations.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netattach::kubelet::messages::{
    ContainerResources, DevicesOfResource, GET, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesResponse, PodResources,
};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

/// Codes of gRPC.
const NOT_FOUND: u32 = 5;
const UNIMPLEMENTED: u32 = 12;

/// The answers of the kubelet.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    /// Its pods.
    pub pods: Vec<PodResources>,
    /// Whether it serves `Get`.
    pub serves_get: bool,
    /// How long an answer takes.
    pub takes: Duration,
    /// The length of the answer that it claims, in place of an answer.
    pub claims: Option<u32>,
}

/// A kubelet that serves until it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    answers: Mutex<Answers>,
    calls: Mutex<Vec<(String, Instant)>>,
}

impl Kubelet {
    /// Serves on this socket.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(socket: &Path, answers: Answers) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let _ = std::fs::remove_file(socket);
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(socket).context("bind the kubelet's socket")?
        };
        let shared = Arc::new(Shared { answers: Mutex::new(answers), calls: Mutex::default() });
        let (stop, stopped) = oneshot::channel();
        let serving = Arc::clone(&shared);
        let serving = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Ok(Self { shared, stop: Some(stop), serving: Some(serving) })
    }

    /// Changes the answers.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        locked(&self.shared.answers)
    }

    /// The calls since the last question, by path, and when they came.
    pub fn take_calls(&self) -> Vec<(String, Instant)> {
        std::mem::take(&mut locked(&self.shared.calls))
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            // A panic has been reported by its thread.
            let _ = serving.join();
        }
    }
}

/// A pod whose containers have these devices: container, resource, ids.
pub fn pod(namespace: &str, name: &str, devices: &[(&str, &str, &[&str])]) -> PodResources {
    let mut containers: Vec<ContainerResources> = Vec::new();
    for (container, resource, ids) in devices {
        let devices = DevicesOfResource {
            resource_name: (*resource).to_owned(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        match containers.iter_mut().find(|known| known.name == *container) {
            Some(known) => known.devices.push(devices),
            None => {
                containers.push(ContainerResources { name: (*container).to_owned(), devices: vec![devices] });
            }
        }
    }
    PodResources { name: name.to_owned(), namespace: namespace.to_owned(), containers }
}

/// A checkpoint in which pods have devices: uid, container, resource, ids.
pub fn checkpoint(devices: &[(&str, &str, &str, &[&str])]) -> Value {
    let entries = devices.iter().map(|(uid, container, resource, ids)| {
        let by_node: BTreeMap<&str, &[&str]> = [("-1", *ids)].into();
        json!({
            "PodUID": uid, "ContainerName": container, "ResourceName": resource, "DeviceIDs": by_node, "AllocResp": "",
        })
    });
    json!({"Data": {"PodDeviceEntries": entries.collect::<Vec<_>>(), "RegisteredDevices": {}}, "Checksum": 1})
}

async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(converse(stream, Arc::clone(&shared)));
    }
}

/// Serves one connection. A client that closes it ends it.
async fn converse(stream: UnixStream, shared: Arc<Shared>) {
    let handshake = h2::server::Builder::new().handshake::<_, Cursor<Vec<u8>>>(stream);
    let Ok(mut connection) = handshake.await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let path = request.uri().path().to_owned();
            locked(&shared.calls).push((path.clone(), Instant::now()));
            let mut body = request.into_body();
            let mut message = Vec::new();
            while let Some(Ok(part)) = body.data().await {
                let _ = body.flow_control().release_capacity(part.len());
                message.extend_from_slice(&part);
            }
            let answers = locked(&shared.answers).clone();
            tokio::time::sleep(answers.takes).await;
            // The client may have given up.
            let _ = reply(respond, &answers, answer(&answers, &path, message.get(5..).unwrap_or_default()));
        });
    }
}

/// The message for a call, or the code and text of its refusal.
fn answer(answers: &Answers, path: &str, message: &[u8]) -> Result<Vec<u8>, (u32, &'static str)> {
    if path != GET {
        return Ok(ListPodResourcesResponse { pod_resources: answers.pods.clone() }.encode_to_vec());
    }
    if !answers.serves_get {
        return Err((UNIMPLEMENTED, "unknown method Get"));
    }
    let wanted = GetPodResourcesRequest::decode(message).map_err(|_| (UNIMPLEMENTED, "not a request"))?;
    let is_wanted =
        |pod: &&PodResources| pod.name == wanted.pod_name && pod.namespace == wanted.pod_namespace;
    let found = answers.pods.iter().find(is_wanted).ok_or((NOT_FOUND, "pod not found"))?;
    Ok(GetPodResourcesResponse { pod_resources: Some(found.clone()) }.encode_to_vec())
}

fn reply(
    mut respond: h2::server::SendResponse<Cursor<Vec<u8>>>,
    answers: &Answers,
    answer: Result<Vec<u8>, (u32, &'static str)>,
) -> Result<()> {
    let head = http::Response::builder().header("content-type", "application/grpc").body(())?;
    let mut body = respond.send_response(head, false)?;
    let mut trailers = http::HeaderMap::new();
    match answer {
        Ok(message) => {
            let length = answers.claims.unwrap_or(u32::try_from(message.len())?);
            let frame = [&[0][..], &length.to_be_bytes(), &message].concat();
            body.send_data(Cursor::new(frame), false)?;
            trailers.insert("grpc-status", 0.into());
        }
        Err((code, text)) => {
            trailers.insert("grpc-status", code.into());
            trailers.insert("grpc-message", http::HeaderValue::from_static(text));
        }
    }
    Ok(body.send_trailers(trailers)?)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves whole values.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
