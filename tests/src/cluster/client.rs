//! A client of the API server that adds nothing to the requests it gets: to check the server's behaviour, and for
//! objects of tests.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::kinds::paths_of;
use super::pki::Identity;
use crate::Namespace;
use crate::traffic::stretched;

/// An answer that takes longer counts as none.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";

/// A user of the server. Each request has a connection of its own.
#[derive(Debug, Clone)]
pub struct Client {
    pub(super) namespace: Arc<Namespace>,
    pub(super) address: (IpAddr, u16),
    pub(super) tls: Arc<ClientConfig>,
    token: Option<String>,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    /// Status code of HTTP.
    pub status: u16,
    /// The object; text that is no JSON is a string.
    pub body: Value,
}

/// The events of a watch, as they arrive.
#[derive(Debug)]
pub struct Watch {
    runtime: Runtime,
    response: Response<Incoming>,
    read: Vec<u8>,
}

impl Reply {
    /// The object.
    ///
    /// # Errors
    /// The status is another one.
    pub fn expect(self, status: u16) -> Result<Value> {
        ensure!(self.status == status, "{} in place of {status}: {}", self.status, self.body);
        Ok(self.body)
    }
}

impl Client {
    /// A user by certificate, by token, or an anonymous one.
    pub(super) fn new(
        namespace: Arc<Namespace>,
        address: (IpAddr, u16),
        authority: String,
        identity: Option<&Identity>,
        token: Option<String>,
    ) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes())?)?;
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some(identity) => {
                let certificate = CertificateDer::from_pem_slice(identity.certificate.as_bytes())?;
                let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes())?;
                config.with_client_auth_cert(vec![certificate], key)?
            }
        };
        Ok(Self { namespace, address, tls: Arc::new(config), token })
    }

    /// GET.
    ///
    /// # Errors
    /// No answer.
    pub fn get(&self, path: &str) -> Result<Reply> {
        self.get_as(path, JSON)
    }

    /// GET of that representation (`Accept`).
    ///
    /// # Errors
    /// No answer.
    pub fn get_as(&self, path: &str, accept: &str) -> Result<Reply> {
        self.request(Method::GET, path, accept, JSON, None)
    }

    /// POST.
    ///
    /// # Errors
    /// No answer.
    pub fn post(&self, path: &str, body: &Value) -> Result<Reply> {
        self.request(Method::POST, path, JSON, JSON, Some(body))
    }

    /// JSON merge patch (RFC 7386).
    ///
    /// # Errors
    /// No answer.
    pub fn merge(&self, path: &str, patch: &Value) -> Result<Reply> {
        self.request(Method::PATCH, path, JSON, MERGE, Some(patch))
    }

    /// DELETE without a grace period.
    ///
    /// # Errors
    /// No answer.
    pub fn delete(&self, path: &str) -> Result<Reply> {
        self.request(Method::DELETE, &format!("{path}?gracePeriodSeconds=0"), JSON, JSON, None)
    }

    /// Creates an object; returns it as the server stored it.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn create(&self, object: &Value) -> Result<Value> {
        let (path, collection) = paths_of(object)?;
        self.post(&collection, object)?.expect(201).with_context(|| format!("create {path}"))
    }

    /// Returns the server's answer if the object was created, or changed if it exists. Nothing is stored (dry run).
    ///
    /// # Errors
    /// No answer.
    pub fn try_out(&self, object: &Value) -> Result<Reply> {
        let (path, collection) = paths_of(object)?;
        let reply = self.post(&format!("{collection}?dryRun=All"), object)?;
        if reply.status == 409 { self.merge(&format!("{path}?dryRun=All"), object) } else { Ok(reply) }
    }

    /// Starts a watch of that representation; the path has the query.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn watch_as(&self, path: &str, accept: &str) -> Result<Watch> {
        let (runtime, response) = self.send(Method::GET, path, accept, JSON, None)?;
        if response.status() != 200 {
            let reply = read(&runtime, response)?;
            bail!("watch {path}: {} {}", reply.status, reply.body);
        }
        Ok(Watch { runtime, response, read: Vec::new() })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        kind: &str,
        body: Option<&Value>,
    ) -> Result<Reply> {
        let (runtime, response) = self.send(method, path, accept, kind, body)?;
        read(&runtime, response)
    }

    /// Sends a request; returns the head of the answer and a reader for the rest of it.
    fn send(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        kind: &str,
        body: Option<&Value>,
    ) -> Result<(Runtime, Response<Incoming>)> {
        let address = SocketAddr::from(self.address);
        let stream = self.namespace.run(|| TcpStream::connect(address)).context("connect to the server")?;
        stream.set_nonblocking(true)?;
        let mut request = Request::builder().method(method).uri(path);
        request = request.header("host", address.to_string()).header("accept", accept);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if body.is_some() {
            request = request.header("content-type", kind);
        }
        let request = request.body(Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default())))?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let answered = async {
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let name = ServerName::IpAddress(self.address.0.into());
            let stream = TlsConnector::from(self.tls.clone()).connect(name, stream).await?;
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            // It ends with the answer's body.
            tokio::spawn(connection);
            anyhow::Ok(sender.send_request(request).await?)
        };
        let response = runtime.block_on(async { timeout(stretched(PATIENCE), answered).await })?;
        let response = response.with_context(|| format!("ask for {path}"))?;
        Ok((runtime, response))
    }
}

fn read(runtime: &Runtime, response: Response<Incoming>) -> Result<Reply> {
    let status = response.status().as_u16();
    let body = response.into_body().collect();
    let body = runtime.block_on(async { timeout(stretched(PATIENCE), body).await })??.to_bytes();
    let body =
        serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into_owned().into());
    Ok(Reply { status, body })
}

impl Watch {
    /// The next event.
    ///
    /// # Errors
    /// The watch ends, or no event arrives.
    pub fn event(&mut self) -> Result<Value> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line)?);
            }
            let frame = self.response.body_mut().frame();
            let frame = self.runtime.block_on(async { timeout(stretched(PATIENCE), frame).await });
            let frame = frame.context("no event comes")?.context("the watch has ended")??;
            self.read.extend_from_slice(frame.data_ref().context("an event is data")?);
        }
    }
}
