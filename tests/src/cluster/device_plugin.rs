//! A device plugin of a kubelet: gRPC services `v1beta1.Registration` and `v1beta1.DevicePlugin` (kubernetes,
//! `staging/src/k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`), with the members that are used.

use std::io::Cursor;
use std::path::Path;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use h2::server::SendResponse;
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

/// Where the kubelet looks for plugins, and its own socket.
const DIRECTORY: &str = "/var/lib/kubelet/device-plugins";
const KUBELET: &str = "kubelet.sock";
/// Where the kubelet says which devices it has given to which pods: its socket, and its checkpoint.
pub const POD_RESOURCES: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
/// See [`POD_RESOURCES`].
pub const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

/// A plugin with devices that need nothing. It serves until it is dropped.
#[derive(Debug)]
pub struct DevicePlugin {
    stop: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

impl DevicePlugin {
    /// Serves devices of a resource, and registers it with the kubelet. For the thread of the worker, whose mounts it
    /// needs.
    ///
    /// # Errors
    /// The kubelet refuses.
    pub fn register(resource: &str, ids: &[&str]) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = format!("{}.sock", resource.replace('/', "-"));
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(Path::new(DIRECTORY).join(&endpoint)).context("bind the plugin's socket")?
        };
        let devices = ids.iter().map(|id| Device { id: (*id).to_owned(), health: "Healthy".to_owned() });
        let listed = Listed { devices: devices.collect() }.encode_to_vec();
        let request =
            Register { version: "v1beta1".to_owned(), endpoint, resource_name: resource.to_owned() };
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let serving = std::thread::spawn(move || {
            runtime.block_on(async {
                // The kubelet connects before it answers.
                tokio::spawn(accept(listener, listed));
                // The test has ended if nobody hears this.
                let _ = tell.send(register(request).await);
                let _ = stopped.await;
            });
        });
        let plugin = Self { stop: Some(stop), serving: Some(serving) };
        told.recv().context("the plugin's thread ended")??;
        Ok(plugin)
    }
}

impl Drop for DevicePlugin {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            // A panic has been reported by its thread.
            let _ = serving.join();
        }
    }
}

async fn register(request: Register) -> Result<()> {
    let channel = Endpoint::from_shared(format!("unix:{DIRECTORY}/{KUBELET}"))?.connect().await?;
    let mut kubelet = Grpc::new(channel);
    kubelet.ready().await?;
    let path = PathAndQuery::from_static("/v1beta1.Registration/Register");
    let codec = ProstCodec::<Register, Nothing>::default();
    kubelet.unary(tonic::Request::new(request), path, codec).await.context("register with the kubelet")?;
    Ok(())
}

async fn accept(listener: UnixListener, listed: Vec<u8>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(converse(stream, listed.clone()));
    }
}

/// Serves one connection. A kubelet that goes away ends it.
async fn converse(stream: UnixStream, listed: Vec<u8>) {
    let handshake = h2::server::Builder::new().handshake::<_, Cursor<Vec<u8>>>(stream);
    let Ok(mut connection) = handshake.await else { return };
    // The list is open as long as the plugin has its devices.
    let mut open = Vec::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        let path = request.uri().path().to_owned();
        if path.ends_with("/ListAndWatch") {
            open.extend(send(respond, &listed));
            continue;
        }
        let is_allocation = path.ends_with("/Allocate");
        tokio::spawn(async move {
            let mut body = request.into_body();
            let mut message = Vec::new();
            while let Some(Ok(part)) = body.data().await {
                let _ = body.flow_control().release_capacity(part.len());
                message.extend_from_slice(&part);
            }
            let asked = Allocate::decode(message.get(5..).unwrap_or_default()).unwrap_or_default();
            let answer = match is_allocation {
                true => Allocated { containers: asked.containers.iter().map(|_| Nothing {}).collect() }
                    .encode_to_vec(),
                false => Vec::new(),
            };
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", 0.into());
            // The kubelet may have given up.
            let _ = send(respond, &answer).and_then(|mut body| Ok(body.send_trailers(trailers)?));
        });
    }
}

/// Sends the head of an answer and a message; more may follow.
fn send(
    mut respond: SendResponse<Cursor<Vec<u8>>>,
    message: &[u8],
) -> Result<h2::SendStream<Cursor<Vec<u8>>>> {
    let head = http::Response::builder().header("content-type", "application/grpc").body(())?;
    let mut body = respond.send_response(head, false)?;
    let frame = [&[0][..], &u32::try_from(message.len())?.to_be_bytes(), message].concat();
    body.send_data(Cursor::new(frame), false)?;
    Ok(body)
}

/// `RegisterRequest`.
#[derive(Clone, PartialEq, Message)]
struct Register {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    resource_name: String,
}

/// `ListAndWatchResponse`.
#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    health: String,
}

/// `AllocateRequest`: a member for each container.
#[derive(Clone, PartialEq, Message)]
struct Allocate {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Nothing>,
}

/// `AllocateResponse`.
#[derive(Clone, PartialEq, Message)]
struct Allocated {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Nothing>,
}

/// A message whose members are not used.
#[derive(Clone, Copy, PartialEq, Message)]
struct Nothing {}
