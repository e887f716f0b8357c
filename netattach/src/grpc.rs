//! Unary gRPC calls over a unix socket, as the kubelet and container runtimes answer them, with hand-written
//! messages. Callers limit the time of an answer.

use std::error::Error;
use std::fmt;
use std::path::Path;

use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// There is no socket.
    #[error("the socket is not there")]
    Absent,
    /// No process listens on the socket, or it does not speak gRPC.
    #[error("connect")]
    Connect(#[source] tonic::transport::Error),
    /// The server returned an error or an answer that is too long, or the connection ended.
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// The status that a call ended with. It is displayed as text for people, with its cause as the source: a [`Status`]
/// itself prints its cause in Rust's debug format.
#[derive(Debug)]
pub struct Refused(pub Status);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.code(), self.0.message())
    }
}

impl Error for Refused {
    /// If the status was made from an error here, its message is that error's, which must not appear twice.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let first = self.0.source();
        let mut cause = first;
        while let Some(error) = cause {
            if error.to_string() == self.0.message() {
                return error.source();
            }
            cause = error.source();
        }
        first
    }
}

/// A connection to the server at a unix socket.
#[derive(Debug)]
pub struct Connection<'a> {
    socket: &'a Path,
    channel: Channel,
}

impl<'a> Connection<'a> {
    /// Connects. The path must be absolute.
    ///
    /// # Errors
    /// [`CallError::Absent`], [`CallError::Connect`].
    pub async fn to(socket: &'a Path) -> Result<Self, CallError> {
        let failed = |source| not_connected(socket, source);
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(failed)?;
        Ok(Self { socket, channel: endpoint.connect().await.map_err(failed)? })
    }

    /// Sends one request. `method` is the path of the call, `longest` the longest answer in bytes.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call<Q, A>(&self, method: &'static str, request: Q, longest: usize) -> Result<A, CallError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(longest);
        grpc.ready().await.map_err(|source| not_connected(self.socket, source))?;
        let codec = ProstCodec::<Q, A>::default();
        let answer = grpc.unary(Request::new(request), PathAndQuery::from_static(method), codec).await;
        Ok(answer.map_err(Refused)?.into_inner())
    }
}

fn not_connected(socket: &Path, source: tonic::transport::Error) -> CallError {
    match socket.try_exists() {
        Ok(false) => CallError::Absent,
        _ => CallError::Connect(source),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::error_chain::Chain;

    #[derive(Debug, thiserror::Error)]
    #[error("transport error")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_status_is_said_with_all_its_causes_and_none_twice() {
        let ended = Outer(io::Error::from_raw_os_error(libc::ECONNRESET));
        let table = [
            (
                Status::from_error(Box::new(ended)),
                "Unknown: transport error: Connection reset by peer (os error 104)",
            ),
            (Status::not_found("pod not found"), "NotFound: pod not found"),
        ];
        for (status, said) in table {
            assert_eq!(Chain(&Refused(status)).to_string(), said);
        }
    }

    #[tokio::test]
    async fn no_socket_is_told_apart_from_one_at_which_nobody_listens() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let absent = Connection::to(&socket).await.unwrap_err();
        assert!(matches!(absent, CallError::Absent), "{}", Chain(&absent));
        // The file stays.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let refused = Connection::to(&socket).await.unwrap_err();
        assert!(matches!(refused, CallError::Connect(_)), "{}", Chain(&refused));
        let said = Chain(&refused).to_string();
        assert!(said.ends_with("Connection refused (os error 111)"), "{said}");
    }
}
