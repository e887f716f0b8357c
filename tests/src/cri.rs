//! A container runtime's CRI socket: it lists sandboxes, and returns their network namespaces.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use prost::Message;
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

use crate::machine::cri::PodSandboxMetadata;

/// Code of gRPC.
const UNIMPLEMENTED: u32 = 12;

/// A sandbox that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// Namespace of its pod.
    pub namespace: String,
    /// Name of its pod.
    pub name: String,
    /// Uid of its pod.
    pub uid: String,
    /// Its network namespace.
    pub netns: PathBuf,
}

/// A runtime that serves until it is dropped.
#[derive(Debug)]
pub struct Cri {
    sandboxes: Arc<Mutex<Vec<Sandbox>>>,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

#[derive(Clone, PartialEq, Message)]
struct List {
    #[prost(message, repeated, tag = "1")]
    items: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
struct Item {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(int32, tag = "3")]
    state: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Wanted {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(btree_map = "string, string", tag = "2")]
    info: std::collections::BTreeMap<String, String>,
}

impl Cri {
    /// Serves on this socket, in the newest version of the interface.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(socket).context("bind the runtime's socket")?
        };
        let sandboxes = Arc::new(Mutex::new(Vec::new()));
        let (stop, stopped) = oneshot::channel();
        let serving = Arc::clone(&sandboxes);
        let serving = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Ok(Self { sandboxes, stop: Some(stop), serving: Some(serving) })
    }

    /// Its sandboxes.
    pub fn sandboxes(&self) -> MutexGuard<'_, Vec<Sandbox>> {
        locked(&self.sandboxes)
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            // A panic has been reported by its thread.
            let _ = serving.join();
        }
    }
}

async fn accept(listener: UnixListener, sandboxes: Arc<Mutex<Vec<Sandbox>>>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(converse(stream, Arc::clone(&sandboxes)));
    }
}

/// Serves one connection. A client that closes it ends it.
async fn converse(stream: UnixStream, sandboxes: Arc<Mutex<Vec<Sandbox>>>) {
    let handshake = h2::server::Builder::new().handshake::<_, Cursor<Vec<u8>>>(stream);
    let Ok(mut connection) = handshake.await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        let sandboxes = Arc::clone(&sandboxes);
        tokio::spawn(async move {
            let path = request.uri().path().to_owned();
            let mut body = request.into_body();
            let mut message = Vec::new();
            while let Some(Ok(part)) = body.data().await {
                let _ = body.flow_control().release_capacity(part.len());
                message.extend_from_slice(&part);
            }
            let answer = answer(&locked(&sandboxes), &path, message.get(5..).unwrap_or_default());
            // The client may have given up.
            let _ = reply(respond, answer);
        });
    }
}

/// The message for a call, or the code of its refusal.
fn answer(sandboxes: &[Sandbox], path: &str, message: &[u8]) -> Result<Vec<u8>, u32> {
    match path {
        "/runtime.v1.RuntimeService/ListPodSandbox" => {
            let item = |sandbox: &Sandbox| Item {
                id: sandbox.id.clone(),
                metadata: Some(PodSandboxMetadata {
                    name: sandbox.name.clone(),
                    uid: sandbox.uid.clone(),
                    namespace: sandbox.namespace.clone(),
                }),
                state: 0,
            };
            Ok(List { items: sandboxes.iter().map(item).collect() }.encode_to_vec())
        }
        "/runtime.v1.RuntimeService/PodSandboxStatus" => {
            let wanted = Wanted::decode(message).map_err(|_| UNIMPLEMENTED)?;
            let found =
                sandboxes.iter().find(|it| it.id == wanted.id && wanted.verbose).ok_or(UNIMPLEMENTED)?;
            let info = json!({"pid": 1, "runtimeSpec": {"linux": {"namespaces": [
                {"type": "pid"}, {"type": "network", "path": found.netns}
            ]}}});
            Ok(Status { info: [("info".to_owned(), info.to_string())].into() }.encode_to_vec())
        }
        _ => Err(UNIMPLEMENTED),
    }
}

fn reply(mut respond: h2::server::SendResponse<Cursor<Vec<u8>>>, answer: Result<Vec<u8>, u32>) -> Result<()> {
    let head = http::Response::builder().header("content-type", "application/grpc").body(())?;
    let mut body = respond.send_response(head, false)?;
    let mut trailers = http::HeaderMap::new();
    match answer {
        Ok(message) => {
            let length = u32::try_from(message.len())?;
            let frame = [&[0][..], &length.to_be_bytes(), &message].concat();
            body.send_data(Cursor::new(frame), false)?;
            trailers.insert("grpc-status", 0.into());
        }
        Err(code) => drop(trailers.insert("grpc-status", code.into())),
    }
    Ok(body.send_trailers(trailers)?)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves whole values.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
