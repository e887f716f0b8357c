//! Asks the container runtime which sandboxes it has: `ListPodSandbox` of the container runtime interface (CRI), over the
//! runtime's unix socket.
//!
//! The messages have only the fields that are needed, by their numbers in kubernetes/cri-api (`api.proto`); they are the
//! same in `runtime.v1` and in `runtime.v1alpha2`, which older runtimes have alone.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Longest time of connecting and of all answers together.
const DEADLINE: Duration = Duration::from_secs(2);

/// Longest answer in bytes: some 10,000 sandboxes with large annotations.
const MAX_ANSWER: usize = 16 << 20;

/// The methods, newest first.
const METHODS: [&str; 2] =
    ["/runtime.v1.RuntimeService/ListPodSandbox", "/runtime.v1alpha2.RuntimeService/ListPodSandbox"];

/// Why the runtime's list is not known.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The path cannot be an address.
    #[error("the runtime's socket {socket} cannot be used")]
    Address {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: tonic::transport::Error,
    },
    /// Nothing answers there, or it does not speak gRPC.
    #[error("connect to the runtime at {socket}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: tonic::transport::Error,
    },
    /// The runtime answered with an error, or with more than is read.
    #[error("the runtime at {socket} does not list its sandboxes: {code:?}: {message}")]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// gRPC's code.
        code: Code,
        /// The runtime's words.
        message: String,
    },
    /// The answer did not come in time.
    #[error("the runtime at {socket} did not list its sandboxes within {DEADLINE:?}")]
    Slow {
        /// The socket.
        socket: PathBuf,
    },
}

/// `ListPodSandboxRequest` without its filter: sandboxes in every state.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct ListRequest {}

/// `ListPodSandboxResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<PodSandbox>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, prost::Message)]
struct PodSandbox {
    #[prost(string, tag = "1")]
    id: String,
}

/// The ids of all sandboxes that the runtime has, in whatever state: `CNI_CONTAINERID` of their ADDs.
///
/// # Errors
/// [`CriError`]: nothing is known then.
pub async fn sandboxes(socket: &Path) -> Result<HashSet<String>, CriError> {
    let asked = tokio::time::timeout(DEADLINE, ask(socket)).await;
    asked.unwrap_or_else(|_| Err(CriError::Slow { socket: socket.to_owned() }))
}

async fn ask(socket: &Path) -> Result<HashSet<String>, CriError> {
    let of = || socket.to_owned();
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(|source| CriError::Address { socket: of(), source })?;
    let channel = endpoint.connect().await.map_err(|source| CriError::Connect { socket: of(), source })?;
    let mut refused = Status::unimplemented("no method");
    for method in METHODS {
        match list(&channel, method).await {
            Ok(response) => return Ok(response.items.into_iter().map(|sandbox| sandbox.id).collect()),
            Err(status) if status.code() == Code::Unimplemented => refused = status,
            Err(status) => {
                refused = status;
                break;
            }
        }
    }
    Err(CriError::Refused { socket: of(), code: refused.code(), message: refused.message().to_owned() })
}

async fn list(channel: &Channel, method: &'static str) -> Result<ListResponse, Status> {
    let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(MAX_ANSWER);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<ListRequest, ListResponse>::default();
    let answer = grpc.unary(Request::new(ListRequest {}), PathAndQuery::from_static(method), codec).await?;
    Ok(answer.into_inner())
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::error_chain::Chain;

    #[test]
    fn the_ids_are_read_and_what_else_a_runtime_tells_is_passed_over() {
        // Field 1 (PodSandbox): field 1 (id) "ab", field 2 (metadata, empty), field 3 (state) 1; then field 9 (unknown).
        let bytes = [0x0a, 8, 0x0a, 2, b'a', b'b', 0x12, 0, 0x18, 1, 0x48, 7];
        let response = ListResponse::decode(&bytes[..]).unwrap();
        assert_eq!(response, ListResponse { items: vec![PodSandbox { id: "ab".into() }] });
        assert!(ListResponse::decode(&bytes[..5]).is_err(), "a list that is cut off is no list");
        assert!(ListRequest {}.encode_to_vec().is_empty());
    }

    #[tokio::test]
    async fn a_runtime_that_is_away_or_silent_is_told_apart_from_one_without_sandboxes() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("runtime.sock");
        let error = sandboxes(&socket).await.unwrap_err();
        assert!(matches!(error, CriError::Connect { .. }), "{}", Chain(&error));
        let silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let error = sandboxes(&socket).await.unwrap_err();
        assert!(matches!(error, CriError::Slow { .. }), "{}", Chain(&error));
        drop(silent);
    }
}
