//! A plain HTTPS client: one connection for each request, and streamed bodies.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use netattach_tests::api_server::{ApiServer, TOKEN};
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// If an answer must not come, silence of this length counts as that; it is less than the second between bookmarks.
const SILENCE: Duration = Duration::from_millis(700);
/// Elsewhere this does.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client with a token.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    address: SocketAddr,
    config: Arc<ClientConfig>,
    patience: Duration,
    pub(crate) token: String,
}

/// An answer whose body has not been read yet.
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) headers: BTreeMap<String, String>,
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
    body: Vec<u8>,
    left: Left,
}

#[derive(Debug, Clone, Copy)]
enum Left {
    Bytes(usize),
    Chunks,
    Nothing,
}

impl Client {
    /// A client that trusts the server and has its first token.
    pub(crate) fn of(server: &ApiServer) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Self {
            address: server.address(),
            config: Arc::new(config),
            patience: PATIENCE,
            token: TOKEN.to_owned(),
        }
    }

    /// Returns a client that takes a short silence for a missing answer.
    pub(crate) fn hurried(&self) -> Self {
        Self { patience: SILENCE, ..self.clone() }
    }

    /// Sends a request, and reads the head of the answer.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> io::Result<Answer> {
        let socket = TcpStream::connect(self.address)?;
        socket.set_read_timeout(Some(self.patience))?;
        let name = ServerName::IpAddress(self.address.ip().into());
        let tls = ClientConnection::new(Arc::clone(&self.config), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(tls, socket);
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nhost: tests\r\nuser-agent: plain\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n",
            self.token,
            body.len()
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{head}\r\n{body}").as_bytes())?;
        stream.flush()?;
        Answer::read(BufReader::new(stream))
    }

    /// GET.
    pub(crate) fn get(&self, path: &str) -> io::Result<Answer> {
        self.send("GET", path, &[], "")
    }

    /// The code and the body of a GET.
    pub(crate) fn read(&self, path: &str) -> (u16, Value) {
        self.get(path).unwrap().json()
    }

    /// The code and the body of a merge patch.
    pub(crate) fn patch(&self, path: &str, patch: &Value) -> (u16, Value) {
        let kind = [("content-type", "application/merge-patch+json")];
        self.send("PATCH", path, &kind, &patch.to_string()).unwrap().json()
    }

    /// The code and the body of a POST.
    pub(crate) fn post(&self, path: &str, object: &Value) -> (u16, Value) {
        let kind = [("content-type", "application/json")];
        self.send("POST", path, &kind, &object.to_string()).unwrap().json()
    }
}

impl Answer {
    fn read(mut stream: BufReader<StreamOwned<ClientConnection, TcpStream>>) -> io::Result<Self> {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match line.trim_end() {
                "" => break,
                line => head.push(line.to_owned()),
            }
        }
        let code = head.first().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or_default();
        let headers: BTreeMap<String, String> = head
            .iter()
            .skip(1)
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect();
        let left = match headers.get("content-length").and_then(|length| length.parse().ok()) {
            Some(length) => Left::Bytes(length),
            None => Left::Chunks,
        };
        Ok(Self { code, headers, stream, body: Vec::new(), left })
    }

    /// Reads more of the body; false: it has ended.
    fn more(&mut self) -> io::Result<bool> {
        let length = match self.left {
            Left::Nothing | Left::Bytes(0) => return Ok(false),
            Left::Bytes(length) => length,
            Left::Chunks => {
                let mut line = String::new();
                if self.stream.read_line(&mut line)? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                usize::from_str_radix(line.trim_end(), 16).map_err(io::Error::other)?
            }
        };
        if matches!(self.left, Left::Chunks) {
            let mut chunk = vec![0; length + 2];
            self.stream.read_exact(&mut chunk)?;
            self.body.extend(&chunk[..length]);
            if length == 0 {
                self.left = Left::Nothing;
            }
        } else {
            let mut piece = vec![0; length];
            let read = self.stream.read(&mut piece)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.body.extend(&piece[..read]);
            self.left = Left::Bytes(length - read);
        }
        Ok(true)
    }

    /// The whole body.
    pub(crate) fn text(mut self) -> io::Result<String> {
        while self.more()? {}
        Ok(String::from_utf8_lossy(&self.body).into_owned())
    }

    /// The code and the whole body as JSON.
    pub(crate) fn json(self) -> (u16, Value) {
        let code = self.code;
        (code, serde_json::from_str(&self.text().unwrap()).unwrap())
    }

    /// The next event of a watch: its type and its object. `None`: the watch has ended.
    pub(crate) fn event(&mut self) -> io::Result<Option<(String, Value)>> {
        loop {
            if let Some(end) = self.body.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.body.drain(..=end).collect();
                let mut event: Value = serde_json::from_slice(&line)?;
                let kind = event["type"].as_str().unwrap_or_default().to_owned();
                return Ok(Some((kind, event["object"].take())));
            }
            if !self.more()? {
                return Ok(None);
            }
        }
    }

    /// The next event that is not a bookmark, as `TYPE name`.
    pub(crate) fn told(&mut self) -> String {
        loop {
            match self.event().unwrap() {
                Some((kind, _)) if kind == "BOOKMARK" => {}
                Some((kind, object)) => {
                    return format!("{kind} {}", object["metadata"]["name"].as_str().unwrap_or_default());
                }
                None => return "the end".to_owned(),
            }
        }
    }
}
