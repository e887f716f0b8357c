//! An API server of a few lines, which answers as a test says.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::client::{Access, Client};
use crate::sync::{Mutex, locked};

/// An answer.
pub(super) struct Answer {
    pub(super) code: u16,
    pub(super) body: String,
    /// How long after its last byte the body ends; `None`: never.
    pub(super) ends: Option<Duration>,
}

impl Answer {
    /// An answer that ends with its body.
    pub(super) fn of(code: u16, body: impl Into<String>) -> Self {
        Self { code, body: body.into(), ends: Some(Duration::ZERO) }
    }
}

/// Answers by path and query.
pub(super) trait Script: FnMut(&str) -> Answer + Send + 'static {}

impl<F: FnMut(&str) -> Answer + Send + 'static> Script for F {}

/// A client of such a server, which runs until the runtime ends.
pub(super) async fn client(script: impl Script) -> Arc<Client> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let script = Arc::new(Mutex::new(script));
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(serve(connection, Arc::clone(&script)));
        }
    });
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "a", "user": {}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), kubeconfig.to_string()).unwrap();
    Arc::new(Client::new(Access::Kubeconfig(file.path().to_owned()), None).await.unwrap())
}

/// One request: the connection ends with its answer.
async fn serve(mut connection: TcpStream, script: Arc<Mutex<impl Script>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match connection.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let target = head.split(' ').nth(1).unwrap();
    let Answer { code, body, ends } = (*locked(&script))(target);
    let answer =
        format!("HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{body}");
    // The client may have had enough.
    if connection.write_all(answer.as_bytes()).await.is_err() {
        return;
    }
    match ends {
        Some(after) => tokio::time::sleep(after).await,
        None => std::future::pending().await,
    }
}
