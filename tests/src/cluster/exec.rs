//! Commands in containers, by the subresource `exec` of a pod: a WebSocket (RFC 6455) with the protocol
//! `v4.channel.k8s.io`, whose messages begin with the number of a stream.

use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Builder;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::client::{Client, PATIENCE};
use crate::traffic::stretched;

const STDOUT: u8 = 1;
const STDERR: u8 = 2;
/// The stream of the outcome, a `Status` of the API.
const OUTCOME: u8 = 3;
/// Opcodes of frames.
const CONTINUED: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
/// Longest frame that is read.
const LONGEST: u64 = 1 << 20;

/// The output of a command.
#[derive(Debug, Default)]
pub struct Executed {
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// Its result: an object of the kind `Status`.
    pub outcome: Value,
}

impl Client {
    /// Runs busybox in a container of a pod (its path in the API), and waits for its end. Needs a client without a token.
    ///
    /// # Errors
    /// The server, the kubelet or the runtime refuses.
    pub fn exec(&self, pod: &str, container: &str, words: &[&str]) -> Result<Executed> {
        let mut query = format!("container={container}&stdout=true&stderr=true");
        for word in ["/bin/busybox"].iter().chain(words) {
            query.push_str(&format!("&command={}", escaped(word)));
        }
        let address = SocketAddr::from(self.address);
        let request = format!(
            "GET {pod}/exec?{query} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: bmV0YXR0YWNoLXRlc3RzLg==\r\n\
             Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
        );
        let stream = self.namespace.run(|| TcpStream::connect(address)).context("connect to the server")?;
        stream.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let said = async {
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let name = ServerName::IpAddress(self.address.0.into());
            let mut stream = TlsConnector::from(self.tls.clone()).connect(name, stream).await?;
            stream.write_all(request.as_bytes()).await?;
            converse(&mut stream).await
        };
        runtime
            .block_on(async { timeout(stretched(PATIENCE), said).await })?
            .with_context(|| format!("exec in {pod}"))
    }
}

async fn converse(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<Executed> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    if !head.starts_with("HTTP/1.1 101 ") {
        let mut body = Vec::new();
        let _ = stream.take(LONGEST).read_to_end(&mut body).await;
        bail!("{head}{}", String::from_utf8_lossy(&body));
    }
    let mut streams: [Vec<u8>; 4] = Default::default();
    let mut current = 0;
    loop {
        let [first, second] = [stream.read_u8().await?, stream.read_u8().await?];
        ensure!(second & 0x80 == 0, "a server does not mask what it sends");
        let length = match second {
            126 => u64::from(stream.read_u16().await?),
            127 => stream.read_u64().await?,
            length => u64::from(length),
        };
        ensure!(length <= LONGEST, "a frame of {length} bytes");
        let mut payload = vec![0; usize::try_from(length)?];
        stream.read_exact(&mut payload).await?;
        let content = match first & 0x0f {
            CLOSE => break,
            CONTINUED => &payload[..],
            TEXT | BINARY => match payload.split_first() {
                Some((number, rest)) => {
                    current = usize::from(*number);
                    rest
                }
                None => continue,
            },
            _ => continue,
        };
        streams.get_mut(current).with_context(|| format!("a stream {current}"))?.extend_from_slice(content);
        // The last message.
        if current == usize::from(OUTCOME) && first & 0x80 != 0 && !content.is_empty() {
            break;
        }
    }
    let text = |number: u8| String::from_utf8_lossy(&streams[usize::from(number)]).into_owned();
    let outcome = text(OUTCOME);
    let outcome = serde_json::from_str(&outcome).with_context(|| format!("an outcome: {outcome:?}"))?;
    Ok(Executed { stdout: text(STDOUT), stderr: text(STDERR), outcome })
}

/// A value of a query.
fn escaped(word: &str) -> String {
    word.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
